"""Writes, views and aliases: the functional graph and what surrounds it do what eager does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fusee.aten import Fresh, InputItself, OutputItself, ViewOfInput, ViewOfOutput
from fusee.aten.canonicalize import keep_core
from fusee.aten.trace import trace
from fusee.backends import aot
from fusee.errors import FuseeWarning, TraceError
from tests.aten.harness import operators, same, traced

Fn = Callable[..., Any]


def x35() -> torch.Tensor:
    return torch.arange(15.0).reshape(3, 5) - 7


# ------------------------------------------------------------------------------ writes


def add_to_input(x: torch.Tensor) -> Any:
    x.add_(1)
    return x * 2


def add_and_return_input(x: torch.Tensor) -> Any:
    return x.add_(1)


def write_to_row(x: torch.Tensor) -> Any:
    x[1] = 5
    return x + 1


def write_to_column_of_rows(x: torch.Tensor) -> Any:
    x[1:][:, 2].mul_(3)
    return x


def write_through_transpose(x: torch.Tensor) -> Any:
    y = x.t()
    y[2, 1:] = -1
    return y, x.sum(0)


def write_through_view(x: torch.Tensor) -> Any:
    x.view(-1)[3:9].zero_()
    return x.view(5, 3)


def write_through_narrow_and_unsqueeze(x: torch.Tensor) -> Any:
    x.narrow(1, 1, 2).unsqueeze(0).squeeze().add_(10)
    return x.clone()


def write_to_intermediate(x: torch.Tensor) -> Any:
    y = x * 2
    row = y[0]
    y.add_(1)
    row.mul_(3)
    return y, row


def write_after_view(x: torch.Tensor) -> Any:
    y = x + 0
    view = y[:, 1:3]
    y.zero_()
    return view + 1


def view_of_view_goes_stale(x: torch.Tensor) -> Any:
    y = x + 0
    a = y[1:]
    b = a[:, 2]
    y[1, 2] = 100
    c = b * 1
    a.add_(1)
    return c, b, a


def copy_with_cast_and_broadcast(x: torch.Tensor) -> Any:
    y = torch.zeros(3, 5, dtype=torch.float64)
    y.copy_(x[0])
    return y


def copy_between_inputs(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.copy_(y)
    return x, y + x


def swap_inputs(x: torch.Tensor, y: torch.Tensor) -> Any:
    held = x.clone()
    x.copy_(y)
    y.copy_(held)


def copy_into_fresh(x: torch.Tensor) -> Any:
    y = torch.empty(3, 5)
    y.copy_(x)
    return y


def promote_in_place(x: torch.Tensor) -> Any:
    y = x.to(torch.int64)
    y.mul_(torch.tensor(3))
    z = x.to(torch.float16)
    z.add_(torch.ones(5, dtype=torch.float64))
    return y, z


def add_out(x: torch.Tensor) -> Any:
    out = torch.empty(3, 5)
    torch.add(x, 1, out=out)
    return out


def max_out(x: torch.Tensor) -> Any:
    values, where = torch.empty(3), torch.empty(3, dtype=torch.int64)
    torch.max(x, 1, out=(values, where))
    return values, where


def scan_out(x: torch.Tensor) -> Any:
    out, of_ints = torch.zeros(3, 6), torch.zeros(3, 6, dtype=torch.int64)
    torch.cumsum(x, 1, out=out.narrow(1, 1, 5))
    torch.cumprod(x, 1, out=of_ints[:, 1:])
    return out, of_ints, torch.sum(x, 1, out=torch.zeros(3, dtype=torch.float64))


def out_resizes_empty(x: torch.Tensor) -> Any:
    out = torch.empty(0)
    torch.mul(x, 2, out=out)
    return out.sum(), out


def index_put(x: torch.Tensor) -> Any:
    x[torch.tensor([0, 2]), torch.tensor([1, 1])] = torch.tensor([9.0, 8.0])
    x.index_put_((torch.tensor([1, 1]),), torch.ones(5), accumulate=True)
    return x


def masked_setitem(x: torch.Tensor) -> Any:
    x[x > 0] = -1
    x.masked_fill_(x < -5, 3)
    return x.sum()


def scatter_add(x: torch.Tensor) -> Any:
    y = torch.zeros(3, 2)
    y.scatter_add_(1, torch.tensor([[0, 1, 0, 1, 0]] * 3), x)
    return y


def index_with_lists(x: torch.Tensor) -> Any:
    x[[0, 2]] = 1.5
    return x[[2, 0]], x[:, [True, False, True, False, True]]


def fill_and_zero(x: torch.Tensor) -> Any:
    y = x[1]
    y.fill_(4)
    z = torch.empty_like(x)
    z.zero_()
    z.fill_(torch.tensor(2.0))
    return z, y


def relu_in_place(x: torch.Tensor) -> Any:
    return F.relu(x, inplace=True), F.hardtanh(x + 1, inplace=True)


def clamp_chain(x: torch.Tensor) -> Any:
    return x.clamp_(min=-3).neg_().exp_().sub_(1).div_(2)


def foreach(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch._foreach_add_([x, y], 1.0)
    torch._foreach_mul_([x, y], [y.clone(), x.clone()])
    zeros = [x * 2, y[0].clone()]
    torch._foreach_zero_(zeros)
    return torch._foreach_add([x, y], [y, x]), zeros


def foreach_in_turn(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch._foreach_add_([x, x], 1.0)
    torch._foreach_mul_([x, y], [y, x])
    torch._foreach_addcmul_([x, y], [y, x], [y, y], value=2)


def write_strided(x: torch.Tensor) -> Any:
    x[::2, 1::2].add_(100)
    return x[::2]


def write_diagonal(x: torch.Tensor) -> Any:
    x.diagonal(1).fill_(7)
    return x


def write_as_strided(x: torch.Tensor) -> Any:
    x.as_strided((2, 2), (5, 2), 1).neg_()
    return x


def strided_copy_of_a_part(x: torch.Tensor) -> Any:
    y, z = torch.empty(2, 5), torch.zeros(2, 5)
    y.copy_(x[1:])
    later = z.as_strided((2,), (1,), 3)
    z.copy_(x[1:])
    later.neg_()
    ones = torch.ones(2)
    return y.as_strided((2,), (1,), 1) * 2, z + 1, y.as_strided_scatter(ones, (2,), (1,), 0)


def write_bits(x: torch.Tensor) -> Any:
    x.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    return x


def unbind_and_split(x: torch.Tensor) -> Any:
    a, _, c = x.unbind(0)
    a.add_(1)
    left, right = x.split([2, 3], 1)
    right.mul_(2)
    return c, left


def transpose_in_place(x: torch.Tensor) -> Any:
    y = x + 1
    first = y[0]
    y.t_()
    y.unsqueeze_(0).squeeze_(0)
    y.transpose_(0, 1)
    y[1].add_(first * 2)
    return y, first


def turn_one_of_several(x: torch.Tensor) -> Any:
    q, r = torch.linalg.qr(x.t())
    mantissa, _ = torch.frexp(x)
    return q.t_(), r, mantissa.t_() * 2, torch.aminmax(x).max.unsqueeze_(0)


def resize_smaller(x: torch.Tensor) -> Any:
    y = x + 1
    y.resize_(2, 3)
    return y


def set_to_another(x: torch.Tensor) -> Any:
    y = torch.empty(0)
    y.set_(x * 2)  # type: ignore[call-overload]
    y.add_(1)
    return y


def python_arithmetic(x: torch.Tensor) -> Any:
    y = x[:2]
    y += 1
    y *= 2
    x -= 1
    x **= 2
    return y


def write_then_read_old_value(x: torch.Tensor) -> Any:
    old = x * 1
    x.add_(1)
    return old, x.detach()


def list_of_slices(x: torch.Tensor) -> Any:
    parts = list(x.chunk(2, 1))
    parts[0].add_(1)
    return torch.cat(parts, 1), parts


def add_to_permuted(x: torch.Tensor) -> Any:
    y = x.t().contiguous().t()
    y.add_(x)
    z = x.t() * 1
    z += x.t().contiguous()
    return y, z


def write_same_shape_other_strides(x: torch.Tensor) -> Any:
    y = torch.zeros(5, 3).t()
    y.copy_(x)
    y.mul_(x)
    return y, y.t().view(-1)


def in_place_on_expanded_scalar(x: torch.Tensor) -> Any:
    y = torch.zeros(1)
    y.expand(1).add_(x[0, 0])
    return y


def write_twice_through_two_views(x: torch.Tensor) -> Any:
    y = x + 0
    a, b = y[:2], y[1:]
    a.add_(10)
    b.mul_(2)
    a.sub_(1)
    return a, b, y


WRITES = [
    add_to_input,
    add_and_return_input,
    write_to_row,
    write_to_column_of_rows,
    write_through_transpose,
    write_through_view,
    write_through_narrow_and_unsqueeze,
    write_to_intermediate,
    write_after_view,
    view_of_view_goes_stale,
    copy_with_cast_and_broadcast,
    copy_into_fresh,
    promote_in_place,
    add_out,
    max_out,
    scan_out,
    out_resizes_empty,
    index_put,
    masked_setitem,
    scatter_add,
    index_with_lists,
    fill_and_zero,
    relu_in_place,
    clamp_chain,
    write_strided,
    write_diagonal,
    write_as_strided,
    strided_copy_of_a_part,
    write_bits,
    unbind_and_split,
    transpose_in_place,
    turn_one_of_several,
    resize_smaller,
    set_to_another,
    python_arithmetic,
    write_then_read_old_value,
    list_of_slices,
    add_to_permuted,
    write_same_shape_other_strides,
    in_place_on_expanded_scalar,
    write_twice_through_two_views,
]


@pytest.mark.parametrize("fn", WRITES, ids=lambda fn: fn.__name__)
def test_writes_as_eager(fn: Fn) -> None:
    same(fn, x35())


@pytest.mark.parametrize(
    "fn", [copy_between_inputs, swap_inputs, foreach, foreach_in_turn], ids=lambda f: f.__name__
)
def test_writes_to_two_inputs(fn: Fn) -> None:
    same(fn, x35(), x35() * 2)


@pytest.mark.parametrize("fn", [add_to_input, write_to_row, write_through_transpose, write_strided])
@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset"])
def test_writes_to_inputs_with_strides(fn: Fn, layout: str) -> None:
    whole = torch.arange(60.0).reshape(6, 10)
    views = {"transposed": whole[:5, :3].t(), "sliced": whole[::2, ::2], "offset": whole[2:5, 3:8]}
    same(fn, views[layout])


# ------------------------------------------------------------------------------ outputs


def by_no_rows(x: torch.Tensor) -> Any:
    y = x.clone()
    y[[]], y[:, []] = 5, 3.0
    y[()] *= 2
    return x[[]], x[..., []].round().all(), x[None, []], x[..., ()], x[range(0)], x[()] + y


def test_lists_of_no_indices() -> None:
    same(by_no_rows, x35())


def test_output_specs() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x + y
        return z, z, z.t(), x, y[1:], z.view(-1)[2:], 3, None, x.expand(2, 3, 5)

    graph = same(fn, x35(), x35())
    kinds = [type(spec) for spec in graph.outputs]
    assert kinds[:4] == [Fresh, OutputItself, ViewOfOutput, InputItself]
    assert kinds[4:6] == [ViewOfInput, ViewOfOutput]
    assert kinds[8] is ViewOfInput


def test_expanded_result_keeps_its_strides() -> None:
    graph = same(lambda x: (x[0] * 2).expand(4, 5), x35())
    assert graph.outputs[0] == ViewOfOutput(0, (4, 5), (0, 1), 0, torch.float32)


def test_views_of_one_intermediate_share_memory() -> None:
    same(lambda x: ((x + 1)[1:], (x + 1)[:2]), x35())

    def fn(x: torch.Tensor) -> Any:
        y = x + 1
        return y[1:], y[:2].t(), y.view(torch.int32)

    same(fn, x35())


def test_results_that_are_equal_do_not_share_memory() -> None:
    same(lambda x: (x + 1, x + 1, (x + 1).view(-1)), x35())
    same(lambda x: (x.clone(), x.clone()), x35())
    same(lambda x: torch.empty(3, 5).copy_(x), x35())


def test_constants_made_on_the_way_stay_apart() -> None:
    """torch makes a tensor of each index, and forgets it: the next one may get its address."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    places: list[Any] = [(..., [k]) for k in range(64)]
    graph.output([graph.call_function(operator.getitem, (x, place)) for place in places])
    aten = trace(fx.GraphModule({}, graph), [torch.randn(2, 64)], keep=keep_core)
    assert [int(aten.constants[f"_constant{k}"]) for k in range(64)] == list(range(64))


def test_constants_are_copied_for_each_call() -> None:
    same(lambda x: (torch.tensor([1.0, 2.0]), torch.tensor(3)), x35())
    same(lambda x: torch.tensor([1.0, 2.0]).add_(1), x35())


def test_nested_structures_are_rebuilt() -> None:
    same(lambda x: {"a": [x + 1, (x, 2)], "b": (x * 2,)}, x35())


def test_no_copy_where_a_program_copies_nothing() -> None:
    graph = same(lambda x: x.contiguous().to(torch.float32).reshape(3, 5).detach() + 1, x35())
    assert operators(graph) == ["aten.add.Tensor"]


# ------------------------------------------------------------------------------ random


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(x, 0.3),
        lambda x: (torch.rand(3), x.uniform_(1, 2), torch.randn_like(x), x.normal_()),
        lambda x: x[1].bernoulli_(),
        lambda x: (x.t().bernoulli_(0.3), x.exponential_(), x[0].random_(5), torch.randperm(4)),
        lambda x: (torch.rand(3), x)[1] + 1,
        lambda x: F.rrelu(x, training=True),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
        lambda x: torch.multinomial(x.abs() + 1, 2),
        lambda x: (x.log_normal_(), torch.randint(0, 9, (4,)), torch.bernoulli(x * 0 + 0.5)),
        lambda x: F.gumbel_softmax(x),
        lambda x: F.alpha_dropout(x, training=True),
    ],
)
def test_random_stream_is_eagers(fn: Fn) -> None:
    same(fn, x35())


# ------------------------------------------------------------------------------ modules


def test_batch_norm_training_writes_statistics() -> None:
    def fn(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
        return F.batch_norm(x, mean, var, training=True), F.instance_norm(x, mean, var)

    graph = same(fn, torch.randn(4, 3, 2, 2), torch.zeros(3), torch.ones(3))
    assert [m.index for m in graph.mutations] == [1, 2]


# ------------------------------------------------------------------------------ refusals


def test_inputs_that_share_memory_and_are_written_run_as_captured() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.add_(1) + b.sum()

    x = x35()
    call = aot(fw_compiler=lambda gm, inputs: gm.forward)(fx.symbolic_trace(fn), [x35(), x35()[1:]])
    ours, eager = x.clone(), x.clone()
    with pytest.warns(FuseeWarning, match="share memory"):
        found = call(ours, ours[1:])
    assert torch.equal(found, fn(eager, eager[1:])) and torch.equal(ours, eager)
    same(lambda a, b: a + b[0], x, x[1:])


@pytest.mark.parametrize(
    "fn, reason",
    [
        (lambda x: x.t_(), "changes the shape or strides of an input"),
        (lambda x: x.resize_(2), "changes the shape or strides of an input"),
        (lambda x: x[0, 0].item(), "depends on the values"),
        (lambda x: x[x > 0], "mask"),
        (lambda x: x.nonzero(), "depends on the values"),
        (lambda x: x.unfold(1, 2, 1).zero_(), "no functional form"),
        (lambda x: x.as_strided((2, 4), (1, 1))[:1].zero_(), "a view whose elements share memory"),
        (lambda x: x.unfold(0, 2, 1).slice_scatter(x[1:2, :, None], 0, 1), "share memory"),
        (lambda x: x.unfold(0, 2, 1).diagonal_scatter(x[:2].t()), "share memory"),
        (lambda x: F.batch_norm(x, x[0], x[1], training=True), "reads as another tensor"),
        (lambda x: x.to_sparse(), "gives a torch.float32 torch.sparse_coo tensor"),
    ],
)
def test_refusals_say_why(fn: Fn, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        traced(fn, x35())


# ------------------------------------------------------------------------------ parts


def rows_put(x: torch.Tensor) -> Any:
    y = torch.zeros(5, 3)
    for i in range(5):
        y[i] = x[:, i].sin()
    return y


def columns_read_as_put(x: torch.Tensor) -> Any:
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 1]
    for i in range(1, 5):
        y[:, i] += y[:, i - 1] * 2 + y[:, i : i + 1].sum(1) + y[:, i - 1 : i].cos().view(3)
    return y, y * 2


def pads_put(x: torch.Tensor) -> Any:
    y = torch.full((3, 9), 2.0)
    y[:, 2:-2] = x
    y[:, 1] = y[:, 4]
    return y


def put_twice(x: torch.Tensor) -> Any:
    y = torch.zeros(3, 5)
    for _ in range(2):
        for i in range(3):
            y[i] = x[i] + y[i]
    return y


def written_and_returned(x: torch.Tensor) -> Any:
    for i in range(3):
        x[i] = x[i] + i
    return x, x[1]


def overlapping_parts(x: torch.Tensor) -> Any:
    y = torch.zeros(3, 5)
    y[:, :3], y[:, 2:] = 1, x[:, 2:]
    return y


def parts_of_two_axes(x: torch.Tensor) -> Any:
    y = torch.zeros(3, 5)
    y[0], y[:, 1], y[1], y[2] = x[0], 5, x[1], x[2].int()
    return y.t()


@pytest.mark.parametrize(
    ("fn", "puts"),
    [
        (rows_put, 0), (columns_read_as_put, 0), (pads_put, 0), (put_twice, 0),
        (written_and_returned, 3), (overlapping_parts, 2), (parts_of_two_axes, 4),
    ],
)  # fmt: skip
def test_parts_that_are_put_are_joined(fn: Fn, puts: int) -> None:
    found = [name for name in operators(same(fn, x35())) if "_scatter" in name]
    assert len(found) == puts, found


@pytest.mark.parametrize(
    ("fn", "size"),
    [
        (lambda x, part: torch.slice_scatter(x, part, 0, 1, 2), (2, 5)),
        (lambda x, part: torch.select_scatter(x, part, 0, -1), (1, 5)),
        (lambda x, part: torch.select_scatter(x, part, 0, 3), (5,)),
        (lambda x, part: torch.diagonal_scatter(x, part, 1), (2,)),
        (lambda x, part: torch.diagonal_scatter(x, part, 0, 1, 1), (3,)),
    ],
)
def test_parts_of_another_size_are_refused(fn: Fn, size: tuple[int, ...]) -> None:
    with pytest.raises(TraceError, match=r"equal to the slice|out of range|identical"):
        traced(fn, x35(), torch.ones(size))
