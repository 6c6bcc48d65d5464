"""The memory plan: buffers that are alive together never share a byte, however it is made."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

import fusee
from fusee.loops import Buffer, Kernel, LoopGraph, Phase, Schedule, Store, Values, memory
from fusee.loops.memory import plan_memory, size_bytes
from fusee.sym import Size, Symbol, hint, substitute
from tests.compare import assert_same

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


def test_buffers_of_unknown_sizes_are_apart_for_all_sizes() -> None:
    n, m = Symbol("n", 1, hint=100), Symbol("m", 1, hint=30)
    sizes = [n.expr, m.expr, n.expr * 2, n.expr * m.expr, n.expr + m.expr]
    lives = _random(60, 40, sizes)
    plan = plan_memory(_schedule(lives, 40))
    assert plan.places
    for values in ((100, 30), (1, 1), (3000, 2), (1, 5000), (17, 800)):
        known: dict[Symbol, Size] = dict(zip((n, m), values))
        for symbol, ends in plan.places:
            found = [substitute(end, known) for end in ends]
            known[symbol] = max(x for x in found if isinstance(x, int))
        places: dict[Buffer, tuple[int, int, int, int]] = {}
        for buffer, first, last in lives:
            start, size = (substitute(x, known) for x in (plan.offsets[buffer], size_bytes(buffer)))
            end, total = substitute(start + size, known), substitute(plan.total_bytes, known)
            assert isinstance(start, int) and isinstance(end, int) and isinstance(total, int)
            assert start % memory.ALIGNMENT == 0 and end <= total
            for begin, stop, earliest, latest in places.values():
                if max(first, earliest) <= min(last, latest):
                    assert end <= begin or stop <= start
            places[buffer] = start, end, first, last


def test_open_sizes_take_no_more_memory_in_the_first_call() -> None:
    n = Symbol("n", 1, hint=1000)
    lives = _random(60, 40, [16, 100, 1000, 4096])

    def times(factor: Size) -> Schedule:
        return _schedule(
            [
                (Buffer(b.name, b.dtype, (b.shape[0] * factor,), (1,), "scratch"), first, last)
                for b, first, last in lives
            ],
            40,
        )

    plans = plan_memory(times(n.expr)), plan_memory(times(1000))
    assert hint(plans[0].total_bytes) == hint(plans[1].total_bytes)


def test_what_threads_share_is_the_greatest_of_many_open_sizes() -> None:
    """Offsets name it: a maximum of maxima would be as deep as there are kernels."""
    plan = plan_memory(_schedule(_random(5, 8, (4096,)), 8))
    at = dict(plan.offsets)
    symbols = [Symbol(f"s{k}", 1) for k in range(300)]
    wider, room = plan.with_room([0, 64, *(s.expr * 4 for s in symbols), 128])
    assert room is not None and len(str(wider.total_bytes)) < 100
    ((place, ends),) = wider.places
    values: dict[Symbol, Size] = {s: 10 * k + 1 for k, s in enumerate(symbols)}
    assert max(hint(substitute(end, values)) for end in ends) == 4 * 2991
    shared = substitute(size_bytes(room), {place: 4 * 2991})
    assert all(substitute(wider.offsets[b], {place: 4 * 2991}) == shared + at[b] for b in at)
    assert plan.with_room([0, 0]) == (plan, None)


def _turned(x: Tensor, w: Tensor) -> Tensor:
    a = x @ w
    return (a + a.t()) @ w


def _read_later(x: Tensor, w: Tensor) -> Tensor:
    a = x @ w
    return a.relu() @ a


def _written_over(x: Tensor, w: Tensor) -> Tensor:
    a = (x @ w).relu()
    return ((a @ w) * 2 + a) @ w


def _in_order(x: Tensor, w: Tensor) -> Tensor:
    a = x @ w
    b = a.sin()
    return (b + a) @ w + (b @ w)


@pytest.mark.parametrize(
    ("f", "live"), [(_written_over, 2), (_turned, 2), (_read_later, 2), (_in_order, 3)]
)
def test_a_large_result_takes_the_place_of_an_operand(f: Callable[..., Tensor], live: int) -> None:
    side = 512
    assert side * side * 4 == memory.OVER_BYTES
    for dynamic in (False, True):
        g = fusee.compile(f, dynamic=dynamic, options={"prices": False})
        for n in (side, side, side + 8):
            x, w = torch.randn(n, n), torch.randn(n, n) / n
            with torch.no_grad():
                assert_same(g(x, w), f(x, w), partial(f, x.double(), w.double()))
            x, w = (y.requires_grad_() for y in (x, w))
            want = torch.autograd.grad(f(x, w).sum(), (x, w))
            got = torch.autograd.grad(g(x, w).sum(), (x, w))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        first = fusee.report(g)[0]
        assert dynamic or first.arena_bytes == live * memory.OVER_BYTES


def test_only_memory_of_its_own_is_written_over() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a = x @ w
        return a, a.relu() @ w + (x.relu() @ w)

    x, w = torch.randn(2, 512, 512)
    before = x.clone()
    with torch.no_grad():
        for got, want in zip(fusee.compile(f)(x, w), f(x, w), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert torch.equal(x, before)
