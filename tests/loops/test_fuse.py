"""What becomes one kernel."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import fusee
from fusee.backends import lookup
from fusee.loops import PLAIN, Acc, Buffer, Kernel, Loop, Profile, Role, Values, kernel_of, schedule
from fusee.loops.associative import SCAN, combine_of
from fusee.loops.checker import show_kernel
from fusee.loops.memory import are_apart, gathered
from fusee.loops.schedule import writes
from fusee.sym import Size, Symbol
from tests.aten.harness import one_node

aten = torch.ops.aten


def kernels_of(fn: Any, *args: Tensor) -> Any:
    compiled: Any = lookup("fusee")(one_node(fn, list(args)), list(args))
    return compiled.report().kernels


def test_batch_norm_reads_each_channel_while_it_is_in_the_cache() -> None:
    x, w = torch.randn(4, 32, 14, 14), torch.rand(32)

    def forward(x: Tensor, w: Tensor) -> Any:
        return aten._native_batch_norm_legit_functional(x, w, w, w, w, True, 0.1, 1e-5)

    def backward(g: Tensor, x: Tensor, w: Tensor) -> Any:
        g = aten.threshold_backward(g, x, 0)
        masks = [True, True, True]
        return aten.native_batch_norm_backward(g, x, w, None, None, w, w, True, 1e-5, masks)

    assert len(kernels_of(forward, x, w)) == 1
    assert len(kernels_of(backward, x, x, w)) == 1


def test_copies_of_inputs_are_made_together() -> None:
    """Up to so many bytes, and none after an input was written, of which others may be views."""
    values, axis = Values(), Symbol("i", 0, 100)
    names = iter("abcdefgh")

    def copied(of: Buffer, role: Role = "scratch", more: int = 0) -> Kernel:
        to = of if role == "input" else Buffer(next(names), torch.float32, (100,), (1,), role)
        value = values.load(of, axis.expr)
        value = value + more if more else value
        return kernel_of(Loop(to, (axis,), axis.expr, value))

    def order(items: list[Kernel], most: int) -> str:
        return "".join(str(writes(item)[0]) for item in gathered(items, most))

    x, y = (Buffer(name, torch.float32, (100,), (1,), "input") for name in "xy")
    one, two, three = copied(x), copied(y), copied(x)
    (between,) = writes(one)
    other, result, sum_ = copied(between), copied(x, "result"), copied(y, more=1)
    items = [other, one, sum_, two, result, three]
    assert order(items, 1 << 20) == "dabcfe"
    assert order(items, 800) == "dabfec"
    assert order(items, 100) == "dafbec"
    assert order([one, sum_, copied(y, "input", more=1), two], 1 << 20) == "afyb"
    again = kernel_of(Loop(between, (axis,), axis.expr, values.load(y, axis.expr)))
    assert order([other, two, one, again], 1 << 20) == "dbaa"  # it is written in pieces


def test_kernels_of_equal_form_are_ordered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each is what it would be alone, with buffers and accumulators of its own."""
    values, (i, k) = Values(), (Symbol("i", 0, 8), Symbol("k", 0, 64))

    def rows(name: str) -> Kernel:
        x = Buffer(f"{name}_of", torch.float32, (64, 8), (1, 64), "input")
        y = Buffer(name, torch.float32, (8,), (1,), "scratch")
        value = values.load(x, i.expr * 64 + k.expr)
        return kernel_of(
            Loop(y, (i,), i.expr, value * value, (k,), Acc(f"{name}_sum", "sum", y.dtype))
        )

    alone = [schedule.order_loops(rows(name), PLAIN) for name in "ab"]
    asked: list[Kernel] = []
    order = schedule.order_loops

    def noted(kernel: Kernel, profile: Profile) -> Kernel:
        asked.append(kernel)
        return order(kernel, profile)

    monkeypatch.setattr(schedule, "order_loops", noted)
    found = [schedule.ordered_once(rows(name), PLAIN) for name in "ab"]
    assert len(asked) == 1 and [*map(show_kernel, found)] == [*map(show_kernel, alone)]
    first, second = ({s.acc for s in kernel.accumulates} for kernel in found)
    assert first.isdisjoint(second)

    def layers(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.softmax(x * 2, -1) @ w
        return x

    x, w = torch.randn(6, 6), torch.randn(6, 6)
    asked.clear()
    assert len(kernels_of(layers, x, w)) == 4 and len(asked) < 4


def test_loops_are_joined_before_a_call_where_that_makes_room() -> None:
    """What is computed again for a product is computed with the gradient behind it."""
    x, w = torch.randn(32, 32), torch.randn(32, 32)

    def backward(x: Tensor, w: Tensor) -> Any:
        g, y = aten.mm(w, w), aten.gelu(x)
        return aten.mm(y, w), aten.gelu_backward(g, x)

    def reads_what_stays(x: Tensor, w: Tensor) -> Any:
        y = aten.gelu(x)
        return aten.mm(y, w), aten.gelu_backward(w, x)

    assert len(kernels_of(backward, x, w)) == 1
    assert len(kernels_of(reads_what_stays, x, w)) == 2


def test_short_pieces_are_stored_in_their_own_order() -> None:
    x, w = torch.randn(4, 32, 3, 3), torch.rand(32)

    def forward(x: Tensor, w: Tensor) -> Any:
        return aten._native_batch_norm_legit.no_stats(x, w, w, True, 0.1, 1e-5)

    assert len(kernels_of(forward, x, w)) == 2


def test_costly_values_are_computed_as_vectors_before_they_are_repeated() -> None:
    x, w = torch.randn(4, 96, 32), torch.randn(96, 16)

    def few(x: Tensor, w: Tensor) -> Any:
        return torch.exp(w[None, :, None] * torch.nn.functional.softplus(x)[..., None])

    def many(x: Tensor, w: Tensor) -> Any:
        return x[0, :, 0, None].sqrt() * w.repeat(1, 64)

    softplus, exp = kernels_of(few, x, w)
    assert "exp" not in softplus.origin and "softplus" not in exp.origin
    assert len(kernels_of(many, x, w)) == 1


@pytest.mark.parametrize("groups", [8, 32])
def test_numbers_of_groups_do_not_cut_vectors(groups: int) -> None:
    """Each group has its number, and channels lie last: vectors go over all channels."""
    x, each = torch.randn(3, 20, 20, 64).permute(0, 3, 1, 2), torch.randn(3, groups, 1)

    def scaled(x: Tensor, each: Tensor) -> Tensor:
        wide = each.expand(3, groups, 64 // groups).reshape(3, 64, 1, 1)
        return (x - wide) * wide

    texts = [kernel.show() for kernel in kernels_of(scaled, x, each)]
    lanes = [text.count("in range(64):  # lanes") for text in texts]
    assert lanes[-1] == 1 and len(texts) == 2, texts


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_large_windows_go_along_one_axis_after_the_other(layout: torch.memory_format) -> None:
    """Where they have elements in common; blocks are summed at once."""
    x = torch.randn(2, 16, 33, 35).to(memory_format=layout)
    for pool in (
        lambda x: aten.avg_pool2d(x, 5, 2, 2, False, False),
        lambda x: aten.max_pool2d(x, 5, 1, 2),
    ):
        texts = [kernel.show() for kernel in kernels_of(pool, x)]
        assert len(texts) == 2 and all("for r0" not in text for text in texts), texts
    (block,) = kernels_of(lambda x: aten.avg_pool2d(x, 5), x)
    assert "for r1" in block.show()


def test_what_is_only_read_backwards_is_read_forwards() -> None:
    """And stored from its end; vectors then go through squares of both axes."""
    x = torch.randn(3, 40, 30)

    def fn(x: Tensor) -> Any:
        back = (aten.flip(x, [2]) * 2).transpose(1, 2)
        return aten.clone(back, memory_format=torch.contiguous_format)

    (turned,) = kernels_of(fn, x)
    stored, read = turned.show().splitlines()[-1].split(" = ")
    assert " - " in stored and " - " not in read, turned.show()
    (both,) = kernels_of(lambda x: aten.flip(x, [2]) + x, x)
    assert "- 1*" in both.show()


def test_what_stores_along_other_axes_than_it_reads_goes_through_squares_of_its_own() -> None:
    x, w = torch.randn(4, 20, 12, 11).to(memory_format=torch.channels_last), torch.randn(20)

    def normed(x: Tensor, w: Tensor) -> Any:
        rows = aten.clone(x, memory_format=torch.contiguous_format).view(1, 80, 12, 11)
        return aten._native_batch_norm_legit(rows, None, None, True, 0.1, 1e-5)[0]

    (sums, stored) = (kernel.show() for kernel in kernels_of(normed, x, w))
    assert "sum=" in sums and "sum=" not in stored


@pytest.mark.parametrize("shape", [(4, 12, 9, 11), (4, 12, 50), (2, 12, 3, 4, 5)])
def test_group_norm_and_its_gradient_pass_each_pixel_of_a_group_once(shape: Any) -> None:
    x, w = torch.randn(shape), torch.rand(12)
    n, c, pixels = shape[0], shape[1], x[0, 0].numel()
    stats = torch.rand(n, 3)

    def forward(x: Tensor, w: Tensor) -> Any:
        return aten.native_group_norm(x, w, w, n, c, pixels, 3, 1e-5)

    def backward(g: Tensor, x: Tensor, mean: Tensor, w: Tensor) -> Any:
        sizes = n, c, pixels, 3, [True, True, True]
        return aten.native_group_norm_backward(g, x, mean, mean, w, *sizes)

    assert len(kernels_of(forward, x, w)) == 1
    texts = [kernel.show() for kernel in kernels_of(backward, x, x, stats, w)]
    assert sum(f"range({pixels})" in text for text in texts) == 2, texts


def test_rows_that_are_picked_are_read_along_themselves() -> None:
    """Along the rows' numbers their elements would be gathered one by one."""
    x, y = torch.randn(300, 64), torch.randint(300, (4, 32))
    (kernel,) = kernels_of(lambda x, y: aten.embedding(x, y).mean(1), x, y)
    assert "in range(64):  # lanes" in kernel.show(), kernel.show()


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 24)), min_size=1, max_size=3),
    st.integers(-24, 24),
)
def test_stores_that_are_said_to_be_apart_never_meet(
    axes: list[tuple[int, int]], distance: int
) -> None:
    symbols = [Symbol(f"i{k}", 0, size) for k, (size, _) in enumerate(axes)]
    index: Size = 3
    for symbol, (_, step) in zip(symbols, axes, strict=True):
        index = index + symbol.expr * step
    places = {0}
    for size, step in axes:
        places = {place + k * step for place in places for k in range(size)}
    if are_apart(index + distance, index, symbols):
        assert places.isdisjoint({place + distance for place in places})


def test_halves_of_rows_are_apart() -> None:
    i, j = (Symbol(name, 0, n) for name, n in (("i", 8), ("j", 16)))
    index = i.expr * 32 + j.expr
    assert are_apart(index + 16, index, (i, j)) and not are_apart(index + 8, index, (i, j))


def test_elements_between_those_of_rows_of_open_sizesare_apart() -> None:
    rows, size = (Symbol(name, 2, None) for name in ("s0", "s1"))
    i, j = Symbol("i", 0, rows.expr), Symbol("j", 0, size.expr)
    index = i.expr * size.expr * 2 + j.expr * 2
    assert are_apart(index, index + 1, (i, j)) and not are_apart(index, index + 2, (i, j))
    assert not are_apart(index, index + size.expr, (i, j))


def test_a_scan_by_a_function_its_operands_and_its_readers_are_one_kernel() -> None:
    combine = combine_of(lambda a, b, c, d: (a * c, c * b + d), [torch.float32] * 2, 4)
    assert combine is not None
    dt, a, x = torch.randn(2, 3, 9), torch.randn(3, 8), torch.randn(2, 9, 8)

    def states(dt: Tensor, a: Tensor, x: Tensor) -> Any:
        decay, given = (dt[..., None] * a[:, None]).exp(), dt[..., None] * x[:, None]
        (_, h) = SCAN([y.permute(2, 0, 1, 3) for y in (decay, given)], combine.text)
        return h.transpose(0, 1).reshape(18, 3, 8).to(torch.bfloat16)

    (kernel,) = kernels_of(states, dt, a, x)
    assert "associative_scan" in kernel.origin and "_to_copy" in kernel.origin

    def back(dt: Tensor, x: Tensor) -> Any:
        (_, h) = SCAN([dt.exp().flip(0), x.flip(0)], combine.text)
        return h.flip(0) + 1

    assert len(kernels_of(back, torch.randn(9, 4, 8, 2), torch.randn(9, 4, 8, 2))) == 1

    def both(dt: Tensor, x: Tensor) -> Any:
        h, g = SCAN([dt.exp(), x.sin()], combine.text)
        return h + 1, g.cos()

    assert len(kernels_of(both, torch.randn(9, 4, 8, 2), torch.randn(9, 4, 8, 2))) == 1


def test_what_reads_a_running_sum_is_in_its_phase() -> None:
    """It was stored, and read again in a phase of its own."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(y.softmax(-1).cumsum(-1) > 0.9, -torch.inf, x)

    (kernel,) = kernels_of(fn, torch.empty(64, 100), torch.empty(64, 100))
    shown = kernel.show()
    assert shown.count(" = ") == 1 and shown.count("for r0") == 3


@pytest.mark.parametrize("shape", [(7,), (64, 100), (100, 7), (3, 1000)], ids=str)
def test_what_is_made_of_a_running_sum_is_made_in_its_phase_alone(shape: tuple[int, ...]) -> None:
    """Later phases load it: the sum is another one by then."""

    def first_zero(g: Tensor, x: Tensor) -> Any:
        first = ((x == 0).cumsum(-1) == 1) & (x == 0)
        return torch.where(first, g, x).cumprod(-1), first.cumsum(-1), first.sum(-1)

    def added(g: Tensor, x: Tensor) -> Any:
        y = x.cumsum(-1) * 2 + g
        return torch.where(y > 0, g, x).cumsum(-1), y.cumsum(-1), y.amax(-1)

    g, x = torch.randn(shape), torch.randn(shape).clamp(min=0)
    for fn, dynamic in itertools.product((first_zero, added), (None, True)):
        options: dict[str, Any] = {"cache": False, "prices": False}
        compiled = fusee.compile(fn, options=options, dynamic=dynamic)
        torch.testing.assert_close(compiled(g, x), fn(g, x), rtol=1e-4, atol=1e-4)
