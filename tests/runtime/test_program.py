"""Launches, frames, teams of threads, and what the builtin does with wrong arguments."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusee.runtime import jit
from fusee.runtime import launch as launch_module
from fusee.runtime.launch import (
    Frames,
    FrameSpec,
    LaunchFrame,
    LaunchSpec,
    Program,
    StepResult,
    ViewSpec,
    runner,
)
from fusee.runtime.llvm_text import Step
from tests.runtime.kernels import DO_NOTHING, REPORT, SCALED_ADD, WHO

run = runner()


def functions(*texts: str) -> list[jit.Function]:
    build = jit.Build(check=True)
    for text in texts:
        build.add(text)
    return build.finish()


def frame_of(spec: FrameSpec, *texts: str) -> LaunchFrame:
    return Frames(Program(functions(*texts), spec))[()]


def test_launches_run_in_order_on_given_and_scratch_memory() -> None:
    n = 1000
    spec = FrameSpec(
        launches=(LaunchSpec(0, (0, 1, 2), (3,), n, 16), LaunchSpec(0, (2, 2, 3), (10,), n, 16)),
        slots=4,
        arena_bytes=8 * n,
        scratch=((2, 0),),
    )
    x, y = torch.arange(n), torch.arange(n) * 7
    out = torch.empty(n, dtype=torch.int64)
    frame = frame_of(spec, SCALED_ADD)
    for count in (1, 2, 3, 1):
        out.zero_()
        pairs = (0, x.data_ptr(), 1, y.data_ptr(), 3, out.data_ptr())
        assert run(frame.state, 0, 2, count, *pairs) == 0
        assert torch.equal(out, 11 * (x + 3 * y))


def test_pointers_stay_until_replaced() -> None:
    spec = FrameSpec((LaunchSpec(0, (0, 1, 2), (1,), 4, 1),), slots=3)
    frame = frame_of(spec, SCALED_ADD)
    x, y, out = torch.arange(4), torch.ones(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    frame.bind(5, ((0, x.data_ptr()), (1, y.data_ptr())))
    assert frame.version == 5
    assert run(frame.state, 0, 1, 1, 2, out.data_ptr()) == 0
    assert out.tolist() == [1, 2, 3, 4]
    assert run(frame.state, 0, 1, 1, 0, y.data_ptr()) == 0
    assert out.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("total", [0, 1, 2, 63, 64, 65, 1000, 1001])
@pytest.mark.parametrize("grain", [1, 16, 500, 10_000])
@pytest.mark.parametrize("align", [1, 16])
def test_each_iteration_runs_once(total: int, grain: int, align: int) -> None:
    spec = FrameSpec((LaunchSpec(0, (0,), (), total, -(-total // grain), align),), slots=1)
    frame = frame_of(spec, WHO)
    for count in (1, 2, 5):
        out = torch.zeros(total + 8, dtype=torch.int64)
        assert run(frame.state, 0, 1, count, 0, out.data_ptr()) == 0
        assert out[total:].eq(0).all()
        owner = out[:total]
        assert owner.ge(1).all() and owner.le(count).all()
        assert owner.diff().ge(0).all()  # each thread has one run of iterations
        used = owner.unique().numel()
        assert used <= max(1, -(-total // grain))
        for border in (owner.diff().nonzero().flatten() + 1).tolist():
            assert border % align == 0


@pytest.mark.skipif(not launch_module.openmp(), reason="torch without OpenMP")
def test_large_work_is_shared() -> None:
    spec = FrameSpec((LaunchSpec(0, (0,), (), 10_000, 1000),), slots=1)
    out = torch.zeros(10_000, dtype=torch.int64)
    frame = frame_of(spec, WHO)
    assert run(frame.state, 0, 1, 2, 0, out.data_ptr()) == 0
    assert out.eq(1).sum() == out.eq(2).sum() == 5000


def test_a_reported_code_stops_the_run_and_is_forgotten_by_the_next() -> None:
    spec = FrameSpec(
        (
            LaunchSpec(1, (0,), (), 3, 3),
            LaunchSpec(0, (0,), (7, -12), 1, 1),
            LaunchSpec(1, (0,), (), 3, 3),
        ),
        slots=1,
    )
    frame = frame_of(spec, REPORT, WHO)
    out = torch.zeros(3, dtype=torch.int64)
    assert run(frame.state, 0, 3, 1, 0, out.data_ptr()) == 7
    assert frame.value == -12
    assert out.tolist() == [1, 1, 1]
    assert run(frame.state, 2, 3, 1) == 0
    assert out.tolist() == [2, 2, 2]


def test_wrong_arguments_run_nothing() -> None:
    spec = FrameSpec((LaunchSpec(0, (0,), (), 1, 1),), slots=1)
    frame = frame_of(spec, WHO)
    out = torch.zeros(1, dtype=torch.int64)
    good = (frame.state, 0, 1, 1, 0, out.data_ptr())
    wrong: list[tuple[tuple[Any, ...], type[Exception]]] = [
        ((), TypeError),
        (good[:3], TypeError),
        (good[:5], TypeError),
        ((0, *good[1:]), TypeError),
        (("x", *good[1:]), TypeError),
        ((good[0], 0, 2, *good[3:]), IndexError),
        ((good[0], -1, *good[2:]), IndexError),
        ((good[0], 1, 0, *good[3:]), IndexError),
        ((good[0], 1.5, *good[2:]), TypeError),
        ((*good[:3], None, *good[4:]), TypeError),
        ((*good[:4], 1, good[5]), IndexError),
        ((*good[:4], -1, good[5]), IndexError),
        ((*good[:5], "y"), TypeError),
        ((*good, 0, 2**70), OverflowError),
    ]
    for arguments, error in wrong:
        with pytest.raises(error):
            run(*arguments)
    assert out.item() == 0
    with pytest.raises(TypeError):
        run(*good, state=1)


def test_objects_are_not_leaked() -> None:
    spec = FrameSpec((LaunchSpec(0, (0,), (), 1, 1),), slots=1)
    frame = frame_of(spec, WHO)
    pointer = torch.zeros(1, dtype=torch.int64)
    address = pointer.data_ptr()
    before = sys.getrefcount(address), sys.getrefcount(frame.state)
    for _ in range(100):
        run(frame.state, 0, 1, 1, 0, address)
        with pytest.raises(IndexError):
            run(frame.state, 0, 1, 1, 9, address)
    assert (sys.getrefcount(address), sys.getrefcount(frame.state)) == before


SLOW = """
define void @kernel(ptr %bufs, ptr %params, i64 %begin, i64 %end, i64 %thread) nounwind {
entry:
  %out = load ptr, ptr %bufs
  br label %body
body:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  store volatile i64 %i, ptr %out
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, 400000000
  br i1 %more, label %body, label %done
done:
  ret void
}
"""


def test_python_threads_run_beside_large_work() -> None:
    spec = FrameSpec((LaunchSpec(0, (0,), (), 100, 100),), slots=1)
    frame = frame_of(spec, SLOW)
    out = torch.zeros(1, dtype=torch.int64)
    worker = threading.Thread(target=run, args=(frame.state, 0, 1, 1, 0, out.data_ptr()))
    start = time.monotonic()
    worker.start()
    gaps = []
    while worker.is_alive():
        gaps.append(time.monotonic())
        time.sleep(0.001)
    took = time.monotonic() - start
    assert len(gaps) > 10
    assert max(b - a for a, b in itertools.pairwise(gaps)) < took / 2


def sized(text: str, steps: list[Step], spec: FrameSpec, **limits: Any) -> Program:
    """With one size, the number 0; what the steps give are the numbers after it."""
    return Program(functions(text), spec._replace(inputs=1, steps=tuple(steps)), **limits)


def test_frames_by_sizes() -> None:
    spec = FrameSpec((LaunchSpec(0, (0,), (), StepResult(0), StepResult(0)),), 1, 100)
    frames = Frames(sized(DO_NOTHING, [], spec, most_sizes=2))
    first, second = frames[1,], frames[2,]
    assert first is not second and first is frames[1,] and second is frames[2,]
    assert first.arena is second.arena
    third = frames[3,]
    assert third is first and [*frames] == [(2,), (3,)]  # whose place it took
    assert frames[2,] is second


def test_an_arena_grows_with_the_sizes_and_is_given_back() -> None:
    frames = Frames(sized(DO_NOTHING, [], FrameSpec((), 0, StepResult(0)), most_bytes=1000))
    held = [len(frames[n,].arena) for n in (400, 300, 500, 5000, 2000)]
    assert held == [448, 448, 1024, 10048, 4032]
    assert [*frames] == [(2000,)]  # the others were in another arena
    assert len(frames[3000,].arena) == 4032


def test_an_arena_of_a_targets_own_holds_elements_of_any_dtype() -> None:
    asked: list[int] = []

    def arena(size: int) -> torch.Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    frames = Frames(sized(DO_NOTHING, [], FrameSpec((), 0, StepResult(0)), arena=arena))
    for n in (8, 3001, 40_001):
        assert frames[n,].arena.view(torch.complex128).numel() * 16 == asked[-1] >= n
    assert len(asked) == 3


STEPS: list[tuple[Step, Callable[[int, int], int]]] = [
    (("number", 0, 0, -7), lambda a, b: -7),
    (("+", 0, 1, 3), lambda a, b: a + 3 * b),
    (("*", 0, 1, 0), lambda a, b: a * b),
    (("min", 0, 1, 0), min),
    (("max", 0, 1, 0), max),
    (("==", 0, 1, 0), lambda a, b: a == b),
    (("!=", 0, 1, 0), lambda a, b: a != b),
    (("<=", 0, 1, 0), lambda a, b: a <= b),
    (("//", 0, 1, 0), lambda a, b: a // b if b > 0 else 0),
    (("%", 0, 1, 0), lambda a, b: a % b if b > 0 else 0),
]


def test_steps_compute_what_python_does() -> None:
    numbers = tuple(StepResult(k) for k in range(2, 2 + len(STEPS)))
    spec = FrameSpec(
        (LaunchSpec(0, (0,), numbers, 1, 1),), 1, inputs=2, steps=tuple(step for step, _ in STEPS)
    )
    frames = Frames(Program(functions(DO_NOTHING), spec))
    for a, b in itertools.product((-9, -8, -1, 0, 1, 7, 8, 9, 2**40), (-3, 0, 1, 2, 4, 7, 2**20)):
        found = params(frames[a, b], len(STEPS))
        assert found == [int(expected(a, b)) for _, expected in STEPS]


def params(frame: LaunchFrame, count: int) -> list[int]:
    """The numbers that the first launch is given."""
    launch = launch_module.word(frame.state + 24)
    at = launch_module.word(launch + 32)
    return [*(ctypes.c_int64 * count).from_address(at)]


def test_wrong_sizes_raise() -> None:
    program = sized(DO_NOTHING, [], FrameSpec((), 0))
    for given in ((), (0,), (0, 0), (0, 0, 1, 2), (0, 0, "x")):
        with pytest.raises(TypeError):
            program.fit(*given)


def test_arena_views() -> None:
    views = (
        ViewSpec(0, torch.float32, (4, 5), (5, 1)),
        ViewSpec(128, torch.bfloat16, (3, 2), (1, 3)),
        ViewSpec(192, torch.int64, (0, 7), (7, 1)),
    )
    with torch.inference_mode():
        frame = frame_of(FrameSpec((), 2, 192, ((0, 0), (1, 128)), views))
    assert frame.arena.data_ptr() % 64 == 0
    for view, spec in zip(frame.views, views, strict=True):
        assert view.data_ptr() == frame.arena.data_ptr() + spec.offset_bytes or not view.numel()
        assert (view.dtype, tuple(view.shape), view.stride()) == spec[1:]
        assert not view.is_inference()
    torch.add(torch.ones(4, 5), 1, out=frame.views[0])
    assert frame.views[0].sum() == 40


def in_threads(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)
            raise

    started = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not failures


def test_concurrent_calls_have_frames_of_their_own() -> None:
    launches = (
        LaunchSpec(0, (0, 0, 1), (StepResult(0),), StepResult(0), StepResult(3)),
        LaunchSpec(0, (1, 1, 2), (1,), StepResult(0), StepResult(3)),
    )
    steps: list[Step] = [("number", 0, 0, 8), ("*", 0, 1, 0), ("//", 0, 1, 0)]
    spec = FrameSpec(launches, 3, StepResult(2), ((1, 0),))
    program = sized(SCALED_ADD, steps, spec, most_sizes=2)
    waiting: list[Frames] = []

    def work(number: int) -> None:
        for k in range(200):
            n = 40 + 10 * ((k + number) % 4)
            x, out = torch.full((n,), number + k), torch.zeros(n, dtype=torch.int64)
            try:
                frames = waiting.pop()
            except IndexError:
                frames = Frames(program)
            frame = frames[n,]
            assert run(frame.state, 0, 2, 1 + k % 2, 0, x.data_ptr(), 2, out.data_ptr()) == 0
            waiting.append(frames)
            assert torch.equal(out, x * (1 + n) * 2)

    in_threads(4, work)
    assert len(waiting) <= 4
