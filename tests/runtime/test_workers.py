"""Compiling threads and forks: a child compiles too, whatever its parent was doing."""

from __future__ import annotations

import concurrent.futures.thread
import os
import signal
import threading
import time
import warnings

import pytest

from fusee.runtime import jit


def test_jobs_give_their_results() -> None:
    assert [jit.submit(divmod, k, 3).result() for k in (7, 9)] == [(2, 1), (3, 0)]
    with pytest.raises(ZeroDivisionError):
        jit.submit(divmod, 1, 0).result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_waits_for_running_jobs() -> None:
    job = jit.submit(time.sleep, 0.2)
    time.sleep(0.05)
    assert job.running()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: what this is about
        child = os.fork()
    if child == 0:
        os._exit(0 if jit.submit(sum, [1, 2]).result(timeout=10) == 3 else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0 and jit.submit(sum, [1, 2]).result() == 3
    assert job.done()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_waits_for_a_thread_that_links() -> None:
    """A thread of the program has the lock of llvmlite, which nobody would give back in a child."""
    lock, has_it = jit.binding().ffi.lib._lock, threading.Event()

    def links() -> None:
        with lock:
            has_it.set()
            time.sleep(0.2)

    thread = threading.Thread(target=links)
    thread.start()
    has_it.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if jit.symbol("malloc") else 1)
    _, status = os.waitpid(child, 0)
    thread.join()
    assert status == 0 and jit.symbol("malloc")


def test_a_job_waits_for_no_lock_of_the_programs_executors() -> None:
    """Who adds a job to one may wait for TorchDynamo's lock, and that for what is compiled here."""
    with concurrent.futures.thread._global_shutdown_lock:
        assert jit.submit(sum, [1, 2]).result(timeout=10) == 3


def test_threads_have_the_stack_that_llvm_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, start = [], threading.Thread.start

    def started(thread: threading.Thread) -> None:
        sizes.append(threading.stack_size())  # which sets it to zero
        threading.stack_size(sizes[-1])
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    before = threading.stack_size(65_536)
    try:
        jit._pool.cache_clear()
        assert jit.submit(sum, [1, 2]).result() == 3
        assert min(sizes) >= 2**20 and threading.stack_size() == 65_536
    finally:
        threading.stack_size(before)
