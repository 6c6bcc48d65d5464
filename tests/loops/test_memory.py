"""The memory plan: buffers that are alive together never share a byte, however it is made."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from fusee.loops import memory
from fusee.loops.fusion import Schedule
from fusee.loops.ir import Buffer, Kernel, LoopGraph, Phase, Store, Values
from fusee.loops.memory import plan_memory, size_bytes
from fusee.sym.expr import Size, Symbol, hint

Life = tuple[Buffer, int, int]


def _schedule(lives: Sequence[Life], length: int) -> Schedule:
    """A kernel a position, which stores each buffer that begins and loads each that ends there."""
    values = Values()
    kernels = [Kernel((), [Phase((), [])]) for _ in range(length)]
    sink = Buffer("sink", torch.float32, (1,), (1,), "result")
    for buffer, first, last in lives:
        one = values.const(1.0, torch.float32)
        kernels[first].phases[0].body.append(Store(buffer, 0, one))
        kernels[last].phases[0].body.append(Store(sink, 0, values.load(buffer, 0)))
    return Schedule(LoopGraph(values, []), list(kernels), [])


def _random(count: int, length: int, sizes: Sequence[Size]) -> list[Life]:
    draw = random.Random(count)
    lives = []
    for k in range(count):
        first = draw.randrange(length)
        last = min(first + draw.choice((1, 1, 2, 9, length)), length - 1)
        size = draw.choice(sizes)
        buffer = Buffer(f"b{k}", torch.float32, (size,), (1,), "scratch")
        lives.append((buffer, first, last))
    return lives


def _check(lives: list[Life], length: int) -> int:
    plan = plan_memory(_schedule(lives, length))
    for k, (a, first, last) in enumerate(lives):
        for b, begin, end in lives[:k]:
            if max(first, begin) <= min(last, end):
                one, other = plan.offsets[a], plan.offsets[b]
                assert isinstance(one, int) and isinstance(other, int)
                sizes = hint(size_bytes(a)), hint(size_bytes(b))
                assert one + sizes[0] <= other or other + sizes[1] <= one, (a, b)
    assert isinstance(plan.total_bytes, int)
    return plan.total_bytes


@pytest.mark.parametrize("pairs", [memory.PAIRS, 0])
def test_no_two_buffers_share_bytes(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PAIRS", pairs)
    for count in (1, 7, 60, 300):
        _check(_random(count, 40, (1, 16, 100, 1000, 4096)), 40)


def test_plan_in_order_is_about_as_small(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = _random(300, 100, (16, 100, 1000, 4096))
    best = _check(lives, 100)
    monkeypatch.setattr(memory, "PAIRS", 0)
    assert _check(lives, 100) <= 1.3 * best


def test_buffers_of_one_unknown_size_take_turns() -> None:
    n = Symbol("n", 1).expr
    chain = [(Buffer(f"b{k}", torch.float32, (n,), (1,), "scratch"), k, k + 1) for k in range(20)]
    plan = plan_memory(_schedule(chain, 21))
    assert len(set(map(str, plan.offsets.values()))) == 2
