"""A result's sizes, strides and dtype, and how kernels lay results out in memory.

Sizes are ints or SymInts, on which nothing here leaves a guard but `suggested_layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusee.sym.shape_env import SizeNode
from fusee.sym.symint import same_ints

Sizes = Sequence[Any]


class Spec(NamedTuple):
    """A result."""

    size: Sizes
    stride: Sizes
    dtype: torch.dtype


class Unsure(Exception):
    """Sizes decide that are not known."""


# ---------------------------------------------------------------------------- sizes


def known(sizes: Iterable[Any]) -> bool:
    return all(type(n) is int for n in sizes)


def equal(a: Sizes, b: Sizes) -> bool:
    """Whether two rows of sizes are equal. raises Unsure"""
    if same_ints(a, b):
        return True
    if len(a) == len(b) and not (known(a) and known(b)):
        raise Unsure
    return False


def is_empty(*tensors: Tensor) -> bool:
    """Whether one of these has no element. raises Unsure"""
    sizes = [n for x in tensors for n in x.shape]
    if any(type(n) is int and n == 0 for n in sizes):
        return True
    if not known(sizes):
        raise Unsure
    return False


def broadcast(*shapes: Sizes) -> list[Any]:
    """torch.broadcast_shapes, which imports sympy at its first call and takes long.

    raises   RuntimeError, Unsure
    """
    rank = max(map(len, shapes))
    found: list[Any] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            here = found[axis]
            if type(here) is int and here == 1:
                found[axis] = size
            elif not (type(size) is int and size == 1) and not equal([size], [here]):
                raise RuntimeError(f"sizes {', '.join(map(str, shapes))} do not broadcast")
    return found


# ---------------------------------------------------------------------------- layouts


def strides(size: Sizes, order: Sequence[int]) -> list[Any]:
    """Strides without gaps of axes in this order, from the outermost in."""
    found: list[Any] = [1] * len(size)
    step: Any = 1
    for axis in reversed(order):
        found[axis] = step
        n = size[axis]
        if type(n) is not int and isinstance(n.node, SizeNode):
            n.node.env.data.filled(n.node.size)
        step = step * (max(n, 1) if type(n) is int else n)
    return found


def rows(size: Sizes, dtype: torch.dtype) -> Spec:
    """A new tensor in row-major order."""
    return Spec(size, strides(size, range(len(size))), dtype)


_ORDERS: dict[torch.memory_format, tuple[int, ...]] = {
    torch.channels_last: (0, 2, 3, 1),
    torch.channels_last_3d: (0, 2, 3, 4, 1),
}


def laid_out(size: Sizes, dtype: torch.dtype, layout: torch.memory_format) -> Spec:
    return Spec(size, strides(size, _ORDERS.get(layout, range(len(size)))), dtype)


def is_row_major(x: Tensor) -> bool:
    """Whether the strides are written as those of a contiguous tensor. Leaves no guard behind."""
    return same_ints(x.stride(), strides(x.shape, range(x.dim())))


def is_contiguous(x: Tensor) -> bool:
    """Whether it certainly is."""
    return x.is_contiguous() if known((*x.shape, *x.stride())) else is_row_major(x)


def is_dense(x: Tensor) -> bool:
    """Whether the elements of `x` fill its memory without gaps. raises Unsure for open sizes"""
    axes = [(n, step) for n, step in zip(x.shape, x.stride()) if not (type(n) is int and n == 1)]
    expected: Any = 1
    while axes:
        at = next((k for k, (_, step) in enumerate(axes) if same_ints((step,), (expected,))), None)
        if at is None:
            if known((*x.shape, *x.stride())):
                return False
            raise Unsure
        n, _ = axes.pop(at)
        expected = expected * n
    return True


def like(x: Tensor, dtype: torch.dtype) -> Spec:
    """torch.empty_like, which takes 100 us on meta tensors and imports sympy at its first call."""
    if is_contiguous(x):
        return rows(x.shape, dtype)
    return Spec(x.shape, x.stride() if is_dense(x) else strides(x.shape, _order(x)), dtype)


def _order(x: Tensor) -> list[int]:
    """The axes of `x` from the outermost in, as far as that is certain.

    source   at::infer_dense_strides, aten/src/ATen/ExpandUtils.cpp
    """
    size, stride = x.shape, x.stride()
    order = list(range(x.dim()))[::-1]
    for i in range(1, len(order)):
        place = i
        for k in range(i - 1, -1, -1):
            a, b = order[k], order[place]
            if stride[a] == 0 or stride[b] == 0:
                continue  # either may come first
            if (stride[a], size[a]) > (stride[b], size[b]):
                order[k], order[place] = b, a
                place = k
            elif stride[a] < stride[b]:
                break
    return order[::-1]


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
