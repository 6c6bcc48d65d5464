"""Threads that compile.

A fork waits until they are at rest: a child has none of its parent's threads, and would wait for
ever for a lock of LLVM's that one of them held.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["count", "submit"]

P = ParamSpec("P")
T = TypeVar("T")

_MOST = 8


class _Rest:
    """How many jobs run now, and a way to wait until there are none."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running = 0

    def run(self, job: Callable[[], T]) -> T:
        with self.changed:
            self.running += 1
        try:
            return job()
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def begin(self) -> None:
        """Wait until nothing runs, and let nothing begin."""
        self.changed.acquire()
        while self.running:
            self.changed.wait()

    def end(self) -> None:
        self.changed.release()


_rest = _Rest()


def submit(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run a function in one of the threads."""
    return _pool().submit(_rest.run, functools.partial(function, *args, **kwargs))


def count() -> int:
    """How many threads there are."""
    return min(os.cpu_count() or 1, _MOST)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count(), thread_name_prefix="fusee-compile")


def _in_child() -> None:
    _rest.changed, _rest.running = threading.Condition(), 0
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_rest.begin, after_in_parent=_rest.end, after_in_child=_in_child)
