"""A result's sizes, strides and dtype, and how kernels lay results out in memory.

Sizes are ints or SymInts. What decides is asked of them, and is a guard then.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusee.sym.ranges import Written
from fusee.sym.shape_env import BoolNode, SizeNode

Sizes = Sequence[Any]


def is_transforming() -> bool:
    """Whether a transform of torch.func is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Spec(NamedTuple):
    """A result."""

    size: Sizes
    stride: Sizes
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Any) -> Any:
        """Of a tensor; anything else as it is."""
        return cls(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


class Unsure(Exception):
    """Sizes decide that are not known."""


# ---------------------------------------------------------------------------- sizes


def known(sizes: Iterable[Any]) -> bool:
    return all(type(n) is int for n in sizes)


def has_zero(sizes: Iterable[Any]) -> bool:
    """Whether one of these is 0 as written."""
    return any(type(n) is int and n == 0 for n in sizes)


def same_ints(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two rows of sizes are equal as written. Unlike `==`, leaves no guard behind."""
    if len(a) != len(b):
        return False
    for x, y in zip(a, b):
        if type(x) is int and type(y) is int:
            if x != y:
                return False
        elif x is not y and _expression(x) != _expression(y):
            return False
    return True


def _expression(x: Any) -> Any:
    """The expression of a SymInt, which may be a number; anything else as it is."""
    found = x.node.expr if isinstance(x, torch.SymInt) else x
    return found.size if isinstance(found, Written) else found


def equal(a: Sizes, b: Sizes) -> bool:
    """Whether two rows of sizes are equal; asked of open ones, as torch asks it. raises Unsure"""
    return same_ints(a, b) or (len(a) == len(b) and all(_is(n, m) for n, m in zip(a, b)))


def let_be_equal(a: Sizes, b: Sizes) -> None:
    """Let sizes be equal of which only data knows one, or eager raises."""
    _let(map(operator.eq, a, b))


def let_be_sizes(a: Sizes) -> None:
    """Let numbers that only data knows be no less than 0, or eager raises."""
    _let(n >= 0 for n in a)


def _let(relations: Iterable[Any]) -> None:
    for holds in relations:
        is_ours = isinstance(holds, torch.SymBool) and type(holds.node) is BoolNode
        if is_ours and holds.node.is_pending():
            holds.node.env.data.require(holds.node.a, holds.node.op, holds.node.b)


def let_be_as_many(a: Sizes, b: Sizes) -> None:
    """The same of how many elements there are. torch itself asks its own symbols."""
    if any(type(n) is torch.SymInt and type(n.node) is SizeNode for n in (*a, *b)):
        let_be_equal((math.prod(a),), (math.prod(b),))


def is_empty(*tensors: Tensor) -> bool:
    """Whether one of these has no element. raises Unsure"""
    return any(_is(n, 0) for x in tensors for n in x.shape)


def broadcast(*shapes: Sizes) -> list[Any]:
    """torch.broadcast_shapes, which imports sympy at its first call and takes long.

    raises   RuntimeError, Unsure
    """
    rank = max(map(len, shapes), default=0)
    found: list[Any] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            here = found[axis]
            if type(here) is int and here == 1:
                found[axis] = size
            elif (type(size) is int and size == 1) or _is(size, here) or _is(size, 1):
                pass
            elif _is(here, 1):
                found[axis] = size
            else:
                raise RuntimeError(f"sizes {', '.join(map(str, shapes))} do not broadcast")
    return found


# ---------------------------------------------------------------------------- layouts


def let_be_filled(size: Sizes) -> None:
    """Let those that only data knows be no 0: eager runs where one is."""
    for n in size:
        if type(n) is not int and isinstance(n.node, SizeNode):
            n.node.env.data.filled(n.node.size)


def strides(size: Sizes, order: Sequence[int]) -> list[Any]:
    """Strides without gaps of axes in this order, from the outermost in."""
    found: list[Any] = [1] * len(size)
    step: Any = 1
    for axis in reversed(order):
        found[axis] = step
        n = size[axis]
        if axis != order[0]:  # of which no stride is a multiple
            let_be_filled((n,))
        step = step * (max(n, 1) if type(n) is int else n)
    return found


def rows(size: Sizes, dtype: torch.dtype) -> Spec:
    """A new tensor in row-major order."""
    return Spec(size, strides(size, range(len(size))), dtype)


_ORDERS: dict[torch.memory_format, tuple[int, ...]] = {
    torch.channels_last: (0, 2, 3, 1),
    torch.channels_last_3d: (0, 2, 3, 4, 1),
}


def in_format(size: Sizes, dtype: torch.dtype, layout: torch.memory_format) -> Spec:
    return Spec(size, strides(size, _ORDERS.get(layout, range(len(size)))), dtype)


def extent(size: Sizes, stride: Sizes) -> Any:
    """How many elements lie from a tensor's first to past its last."""
    if has_zero(size):
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def is_row_major(x: Tensor) -> bool:
    """Whether the strides are written as those of a contiguous tensor. Leaves no guard behind."""
    return same_ints(x.stride(), strides(x.shape, range(x.dim())))


def is_contiguous(x: Tensor) -> bool:
    """Whether it certainly is. An axis of one element lies anywhere."""
    if known((*x.shape, *x.stride())):
        return x.is_contiguous()
    steps = zip(x.shape, x.stride(), strides(x.shape, range(x.dim())))
    return all(is_written(n, 1) or is_written(a, b) for n, a, b in steps)


def is_dense(x: Tensor) -> bool:
    """Whether the elements of `x` fill its memory without gaps.

    An axis of one element lies anywhere: where that is open, it lies as the others of its order.
    """
    axes = [(n, step) for n, step in zip(x.shape, x.stride()) if not (type(n) is int and n == 1)]
    expected: Any = 1
    while axes:
        at = next((k for k, (_, step) in enumerate(axes) if is_written(step, expected)), None)
        if at is None:
            at = next((k for k, (_, step) in enumerate(axes) if _is(step, expected)), None)
        if at is None:
            return False
        n, _ = axes.pop(at)
        expected = expected * n
    return True


def meet(x: Tensor, y: Tensor, distance: int) -> bool:
    """Whether tensors of known sizes, of which the one begins so many elements before the other,
    have an element of their memory in common."""
    spans: dict[int, list[int]] = {}  # by step: how often it may be taken, either way
    for tensor, side, sign in ((x, 1, 1), (y, 0, -1)):
        for n, step in zip(tensor.shape, tensor.stride()):
            spans.setdefault(step, [0, 0])[side] += sign * (n - 1)
    steps = sorted(spans, reverse=True)
    ends = [
        [sum(s * spans[s][side] for s in steps[k:]) for side in (0, 1)]
        for k in range(len(steps) + 1)
    ]
    left = [(0, distance)] if x.numel() and y.numel() else []
    while left:
        k, rest = left.pop()
        if k == len(steps) or not steps[k]:
            if rest == 0:
                return True
            continue
        step, (low, high) = steps[k], spans[steps[k]]
        least, most = ends[k + 1]
        turns = range(max(low, -((most - rest) // step)), min(high, (rest - least) // step) + 1)
        if len(turns) > _MOST_TURNS:
            return True  # steps that have as little to do with each other
        left += [(k + 1, rest - step * turn) for turn in turns]
    return False


_MOST_TURNS = 1000


def may_repeat(x: Tensor) -> bool:
    """Whether elements of a tensor may share memory, by its sizes and strides in the first call."""
    reach = 0
    axes: Any = zip(x.stride(), x.shape)
    for step, n in sorted([m if type(m) is int else m.node.hint for m in axis] for axis in axes):
        if n > 1 and step <= reach:
            return True
        reach += step * (n - 1)
    return False


def _is(a: Any, b: Any) -> bool:
    """Whether two sizes are equal. raises Unsure where only data tells"""
    found = a == b
    if type(found) is torch.SymBool and getattr(found.node, "is_pending", bool)():
        raise Unsure
    return bool(found)


def like(x: Tensor, dtype: torch.dtype | None = None) -> Spec:
    """torch.empty_like, which takes 100 us on meta tensors and imports sympy at its first call."""
    if is_contiguous(x) or is_dense(x):
        return Spec(x.shape, x.stride(), dtype or x.dtype)
    # source   at::infer_dense_strides, aten/src/ATen/ExpandUtils.cpp: TensorIterator's order
    return iterated([(x.shape, x.stride())], dtype or x.dtype)


def like_one(x: Tensor, dtype: torch.dtype) -> Spec:
    """What TensorIterator makes of operands that lie in one way, all as `x`.

    source   TensorIteratorBase::compute_fast_setup_type, aten/src/ATen/TensorIterator.cpp
    """
    if is_contiguous(x):
        return rows(x.shape, dtype)
    if x.dim() == 4 and known((*x.shape, *x.stride())):
        if x.is_contiguous(memory_format=torch.channels_last):
            return in_format(x.shape, dtype, torch.channels_last)
    return like(x, dtype)


def expanded(size: Sizes, stride: Sizes, to: Sizes) -> list[Any]:
    """The strides of what is broadcast."""
    lead = len(to) - len(size)
    given = zip(size, stride, to[lead:])
    ones = [0 if is_written(n, 1) and not is_written(m, 1) else s for n, s, m in given]
    return [0] * lead + ones


def iterated(operands: Iterable[tuple[Sizes, Sizes]], dtype: torch.dtype) -> Spec:
    """What TensorIterator makes of operands of these sizes and strides, in several orders.

    source   TensorIteratorBase::reorder_dimensions, aten/src/ATen/TensorIterator.cpp
    """
    operands = list(operands)
    shape = broadcast(*(size for size, _ in operands))
    steps = [expanded(size, stride, shape) for size, stride in operands]

    def is_outer(a: int, b: int) -> bool | None:
        for row in steps:
            if any(type(row[k]) is int and row[k] == 0 for k in (a, b)):
                continue
            if not is_written(row[a], row[b]) and row[a] != row[b]:
                return bool(row[a] > row[b])
            if not is_written(shape[a], shape[b]) and shape[a] > shape[b]:
                return True
        return None

    inner_first = [*range(len(shape))][::-1]
    for i in range(1, len(shape)):
        place = i
        for k in range(i - 1, -1, -1):
            found = is_outer(inner_first[k], inner_first[place])
            if found:
                inner_first[k], inner_first[place] = inner_first[place], inner_first[k]
                place = k
            elif found is False:
                break
    return Spec(shape, strides(shape, inner_first[::-1]), dtype)


def combined(operands: Sequence[Tensor], dtype: torch.dtype, *, alone: bool) -> Spec:
    """One element for each of the operands', the first one's order before the others'.

    alone   no number is an operand, which TensorIterator takes for a tensor of another size
    """
    shape = operands[0].shape if operands else ()
    if all(map(is_row_major, operands)):
        return rows(broadcast(*(x.shape for x in operands)), dtype)
    if alone and all(same_ints(x.shape, shape) for x in operands):
        if all(map(is_contiguous, operands)):
            return rows(shape, dtype)
        stride = operands[0].stride()
        if all(same_ints(x.stride(), stride) for x in operands):
            return like_one(operands[0], dtype)
    return iterated(((x.shape, x.stride()) for x in operands), dtype)


def is_written(a: Any, b: Any) -> bool:
    return same_ints((a,), (b,))


def view_strides(
    old: Sizes, stride: Sizes, new: Sizes, same: Callable[[Any, Any], bool] = is_written
) -> list[Any] | None:
    """The strides of a view, where sizes say so as they are written, or asked.

    source   computeStride_impl, aten/src/ATen/TensorUtils.cpp
    """
    found: list[Any] = [0] * len(new)
    at, base, count, taken = len(new) - 1, stride[-1] if old else 1, 1, 1
    for k in reversed(range(len(old))):
        count = count * old[k]
        if k and (same(old[k - 1], 1) or same(stride[k - 1], count * base)):
            continue
        while at >= 0 and (not same(taken, count) or same(new[at], 1)):
            found[at] = taken * base
            taken = taken * new[at]
            at -= 1
        if not same(taken, count):
            return None
        if k:
            base, count, taken = stride[k - 1], 1, 1
    return found if at < 0 else None


def indexed(x: Tensor, indices: Sequence[Tensor | None], *more: torch.dtype) -> Spec | None:
    """`x[indices]`; None: masks. TensorIterator sees chosen axes of `x` with stride 0.

    more   dtypes of indices beside int64, which ATen converts: strides may be others then
    source   aten/src/ATen/native/TensorAdvancedIndexing.cpp, make_info and AdvancedIndex
    """
    at = [k for k, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if not at or len(indices) > x.dim() or any(i.dtype not in (torch.int64, *more) for i in given):
        return None
    lead = at[0] if at == [*range(at[0], at[-1] + 1)] else 0  # else what is chosen comes first
    others = [(n, s) for k, (n, s) in enumerate(zip(x.shape, x.stride())) if k not in at]
    chosen = broadcast(*(i.shape for i in given))
    operand = [*others[:lead], *((n, 0) for n in chosen), *others[lead:]]
    operands: list[tuple[Sizes, Sizes]] = [([n for n, _ in operand], [s for _, s in operand])]
    size = [*[1] * lead, *chosen, *[1] * (len(others) - lead)]
    for i in given:
        found = view_strides(chosen, expanded(i.shape, i.stride(), chosen), size)
        operands.append((size, found or strides(size, range(len(size)))))
    return iterated(operands, x.dtype)


def suggested_layout(x: Tensor) -> torch.memory_format:
    """What at::Tensor::suggest_memory_format says: channels-last only if strides say nothing else.

    source   c10/core/MemoryFormat.h, is_channels_last_strides_2d_s4 and _3d_s5
    """
    if x.dim() not in (4, 5) or is_row_major(x):
        return torch.contiguous_format
    size, stride = x.shape, x.stride()
    least: Any = 0
    if stride[1] == 0:
        return torch.contiguous_format
    for axis in (1, *range(x.dim() - 1, 1, -1), 0):
        if size[axis] == 0 or stride[axis] < least or (axis == 0 and least == stride[1]):
            return torch.contiguous_format  # the last: N111 is row-major
        least = stride[axis]
        if size[axis] > 1:
            least = least * size[axis]
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


# ---------------------------------------------------------------------------- devices


def together(placed: Iterable[tuple[Tensor, torch.device]]) -> torch.device | None:
    """Where an operator computes: on the GPU where operands are, which takes numbers of the CPU.

    source   aten/src/ATen/TensorIterator.cpp, compute_types
    """
    found, are_numbers = None, True
    for x, device in placed:
        if device.type != "cpu" and x.dim():
            return device
        are_numbers &= not x.dim()
        if found is None or (found.type == "cpu" and are_numbers):
            found = device
    return found
