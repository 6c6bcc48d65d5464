"""Reading where there may be nothing: loads behind masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusee.loops.ir import Value, op, rewrite, where
from fusee.loops.lower.strides import Shape
from fusee.loops.lower.tensor import Index, Lowering, Number, Tensor
from fusee.sym.expr import Size, known_ge, known_lt


def masked(value: Value, mask: Value, other: Value) -> Value:
    """`value` where `mask`, else `other`; nothing below `value` is read where `mask` is false."""
    if mask.op == "const":
        return value if mask.attr else other
    table = value.table
    if value.op == "load" and not value.args and not value.operands:
        buffer, index = value.attr
        return table.load(buffer, index, mask, other)

    def guard(inner: Value) -> Value | None:
        if inner.op != "load":
            return None
        buffer, index = inner.attr
        if inner.args:
            return table.load(buffer, index, op("and", mask, inner.args[0]), inner.args[1])
        return table.load(buffer, index, mask, table.const(0, inner.dtype))

    return where(mask, rewrite([value], None, guard)[0], other)


def inside(lowering: Lowering, i: Size, size: Size, mask: Value | None = None) -> Value | None:
    """`mask` and 0 <= i < size; None where that is known."""
    values = lowering.values
    if not known_ge(i, 0):
        test = op("ge", values.index(i), values.const(0, torch.int64))
        mask = test if mask is None else op("and", mask, test)
    if not known_lt(i, size):
        test = op("lt", values.index(i), values.index(size))
        mask = test if mask is None else op("and", mask, test)
    return mask


def pad_constant(x: Tensor, shape: Shape, before: Sequence[Size], fill: Number) -> Tensor:
    """`x` with `before` elements of `fill` in front of each dimension, and the rest behind."""
    lowering = x.lowering
    other = lowering.number(fill, x.dtype)

    def at(ix: Index) -> Value:
        places = tuple(i - n for i, n in zip(ix, before, strict=True))
        mask: Value | None = None
        for k, place in enumerate(places):
            if shape[k] != x.shape[k] or before[k] != 0:
                mask = inside(lowering, place, x.shape[k], mask)
        value = x.at(places)
        return value if mask is None else masked(value, mask, other)

    return lowering.computed(shape, x.dtype, at, (x,))
