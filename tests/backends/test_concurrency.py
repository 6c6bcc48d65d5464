"""One compiled graph in many threads, modes and processes; nothing stays when it goes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusee
from fusee.backends.native import compile_native
from fusee.backends.report import CompiledGraph


def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.softmax(x @ w, -1) + x.sum(-1, keepdim=True)
    return torch.layer_norm(y, (y.shape[-1],)), torch.cumsum(y, 0)


def compiled(fn: Callable[..., Any], *args: Any, **options: object) -> CompiledGraph:
    with torch.no_grad():
        return compile_native(fx.symbolic_trace(fn), list(args), options)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(k) in `count` threads that start together; the first exception is raised here."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            barrier.wait()
            with torch.no_grad():
                work(k)
        except BaseException as error:  # noqa: BLE001  it is raised by the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("rows", [3, 300])
def test_many_threads_call_one_graph(rows: int) -> None:
    w = torch.randn(40, 24)
    xs = [torch.randn(rows, 40) for _ in range(12)]
    wants = [program(x, w) for x in xs]
    graph = compiled(program, xs[0], w)

    def work(k: int) -> None:
        for _ in range(30):
            torch.testing.assert_close(tuple(graph(xs[k], w)), wants[k], rtol=1e-3, atol=1e-4)

    in_threads(12, work)


def test_first_calls_at_once() -> None:
    conv = nn.Conv2d(3, 32, 3)
    x = torch.randn(2, 3, 8, 8)
    fn = lambda x, w, b: torch.relu(torch.conv2d(x, w, b))  # noqa: E731
    graph = compiled(fn, x, conv.weight, conv.bias)
    with torch.no_grad():
        want = torch.relu(conv(x))

    def work(k: int) -> None:
        got = graph(x, conv.weight, conv.bias)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    assert "1 packed" in str(graph.report())
    in_threads(8, work)


def test_compiling_in_many_threads_at_once() -> None:
    x = torch.randn(4, 6)

    def scaled(by: float) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.softmax(x * by, -1)

    programs = [scaled(1.5 + k / 8) for k in range(8)]
    traced = [fx.symbolic_trace(fn) for fn in programs]  # fx itself traces in one thread only

    def work(k: int) -> None:
        graph = compile_native(traced[k], [x], {})
        torch.testing.assert_close(graph(x), programs[k](x))

    in_threads(8, work)


@pytest.fixture
def threads_restored() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def others_share(call: Callable[[], object], calls: int = 20) -> float:
    """The part of the processor time that other threads than this one took."""

    def spent() -> dict[int, int]:
        tasks = Path("/proc/self/task").iterdir()
        return {int(at.name): int((at / "schedstat").read_text().split()[0]) for at in tasks}

    call()
    time.sleep(0.05)  # until workers of an earlier team have stopped spinning
    before = spent()
    for _ in range(calls):
        call()
    taken = {task: ns - before.get(task, 0) for task, ns in spent().items()}
    return 1 - taken[threading.get_native_id()] / sum(taken.values())


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs /proc")
def test_set_num_threads_is_honoured(threads_restored: None) -> None:
    x = torch.randn(2000, 1000)
    follows = compiled(lambda x: torch.exp(torch.sin(x)).sum(-1), x)
    alone = compiled(lambda x: torch.exp(torch.cos(x)).sum(-1), x, threads=1)
    torch.set_num_threads(1)
    assert others_share(lambda: follows(x)) < 0.1
    torch.set_num_threads(2)
    assert others_share(lambda: alone(x)) < 0.1
    assert others_share(lambda: follows(x)) > 0.25
    small = torch.randn(3, 1000)
    tiny = compiled(lambda x: torch.exp(x).sum(-1), small)
    assert others_share(lambda: tiny(small), 20_000) < 0.1


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("second", [torch.no_grad, torch.inference_mode])
def test_inference_mode_and_no_grad(first: Any, second: Any) -> None:
    torch._dynamo.reset()
    conv = nn.Conv2d(3, 32, 3)
    model = nn.Sequential(conv, nn.BatchNorm2d(32), nn.ReLU()).eval()
    fast = torch.compile(model, backend="fusee")
    x = torch.randn(2, 3, 8, 8)
    for mode in (first, second):
        with mode():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        conv.weight.mul_(2)
    with second():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_inference_tensors_as_parameters_are_followed() -> None:
    torch._dynamo.reset()
    with torch.inference_mode():
        conv = nn.Conv2d(3, 32, 3)
        model = nn.Sequential(conv, nn.BatchNorm2d(32)).eval()
        fast = torch.compile(model, backend="fusee", options={"name": "inference tensors"})
        x = torch.randn(2, 3, 8, 8)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        conv.weight.mul_(2)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    (report,) = fusee.report("inference tensors")
    assert any("inference tensor" in note for note in report.notes)


def test_a_forked_process_goes_on() -> None:
    x, w = torch.randn(300, 40), torch.randn(40, 24)
    graph = compiled(program, x, w)
    want = [y.clone() for y in graph(x, w)]

    def child() -> None:
        torch.set_num_threads(1)  # the parent's OpenMP threads are not in the child
        with torch.no_grad():
            torch.testing.assert_close(list(graph(x, w)), want)
            other = compiled(lambda x: torch.softmax(x * 1.8125, -1), x)
            torch.testing.assert_close(other(x), torch.softmax(x * 1.8125, -1))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    torch.testing.assert_close(list(graph(x, w)), want)


def test_a_dropped_graph_is_gone() -> None:
    x, w = torch.randn(30, 40), torch.randn(40, 24)
    graph = compiled(program, x, w)
    graph(x, w)
    report = weakref.ref(graph.report())
    del graph
    gc.collect()
    assert report() is None


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_compiling_and_dropping_does_not_grow() -> None:
    x, w = torch.randn(64, 64), torch.randn(64, 64)

    def once(scale: float) -> None:
        def fn(x: Tensor, w: Tensor) -> Any:
            y, z = program(x * scale, w)
            return y, z.flip(0) * (scale + 1)

        graph = compiled(fn, x, w, cache=False)
        graph(x, w)

    for k in range(20):
        once(1 + k / 64)
    gc.collect()
    before = resident_bytes()
    for k in range(20, 120):
        once(1 + k / 64)
    gc.collect()
    grown = resident_bytes() - before
    assert grown < 20 * 2**20, f"{grown / 2**20:.1f} MiB in 100 rounds"
