"""Reductions and scans: each is realised, since its result is needed whole before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.loops.ir import Loop, Value, cast, op, rewrite
from fusee.loops.lower.numbers import opmath
from fusee.loops.lower.shape import squeeze
from fusee.loops.lower.strides import Shape, axis_strides, dense
from fusee.loops.lower.tensor import Lowering, Tensor
from fusee.loops.scalar import identity
from fusee.sym.expr import Size, Symbol, floordiv
from fusee.sym.parts import hint, product

Map = Callable[[Value], Value]

# A reduction to fewer than FEW results over more than MANY elements is done in chunks first, so
# that threads have work.
FEW = 16
MANY = 1 << 16
CHUNK = 1 << 12
# Sums down columns read rows in pieces of at most STRIP elements. Where that leaves few pieces for
# threads, rows are summed up in at least ROWS chunks first.
STRIP = 1 << 10
ROWS = 8


def normal_dims(dims: Any, rank: int) -> list[int]:
    """Reduced dimensions as given to ATen: None or () mean all."""
    if isinstance(dims, int):
        dims = [dims]
    if dims is None or len(dims) == 0:
        return list(range(rank))
    return sorted({dim % max(rank, 1) for dim in dims} & set(range(rank)))


def reduce(
    x: Tensor,
    dims: Sequence[int],
    kind: str,
    acc_dtype: torch.dtype,
    dtype: torch.dtype,
    before: Map | None = None,
    after: Map | None = None,
) -> Tensor:
    """Reduce `dims`, which keep size 1. `before` maps elements, `after` the accumulator."""
    lowering, shape = x.lowering, x.shape
    kept: Shape = tuple(1 if k in dims else n for k, n in enumerate(shape))
    small = pointwise_if_trivial(x, dims, kind, acc_dtype, dtype, before, after, kept)
    if small is not None:
        return small
    index, reduced = _space(lowering, shape, dims)
    value = mapped(x.at(tuple(index)), before, acc_dtype)
    return _accumulate(lowering, value, kept, reduced, kind, acc_dtype, dtype, after)


def mapped(value: Value, before: Map | None, dtype: torch.dtype) -> Value:
    """An element as it is accumulated. Maps see halves as float32."""
    value = cast(value, opmath(value.dtype))
    return cast(value if before is None else before(value), dtype)


def pointwise_if_trivial(
    x: Tensor,
    dims: Sequence[int],
    kind: str,
    acc_dtype: torch.dtype,
    dtype: torch.dtype,
    before: Map | None,
    after: Map | None,
    kept: Shape,
) -> Tensor | None:
    """Reductions over one element or none."""
    lowering = x.lowering

    def finish(value: Value) -> Value:
        return cast(value if after is None else after(value), dtype)

    if any(x.shape[k] == 0 for k in dims):
        start = lowering.values.const(identity(kind, acc_dtype), acc_dtype)
        return lowering.computed(kept, dtype, lambda ix: finish(start))
    if all(x.shape[k] == 1 for k in dims):

        def fn(value: Value) -> Value:
            return finish(mapped(value, before, acc_dtype))

        return lowering.computed(kept, dtype, lambda ix: fn(x.at(ix)), (x,))
    return None


def _space(
    lowering: Lowering, shape: Shape, dims: Sequence[int]
) -> tuple[list[Size], list[Symbol]]:
    """The index of the general element, and the axes that are reduced."""
    index = list(lowering.axes(shape))
    reduced: list[Symbol] = []
    for k in dims:
        if shape[k] != 1:
            axis = lowering.axis(f"r{len(reduced)}", shape[k])
            reduced.append(axis)
            index[k] = axis.expr
    return index, reduced


def _accumulate(
    lowering: Lowering,
    value: Value,
    kept: Shape,
    reduced: list[Symbol],
    kind: str,
    acc_dtype: torch.dtype,
    dtype: torch.dtype,
    after: Map | None,
    which: Value | None = None,
) -> Tensor:
    points = hint(product(kept))
    elements = hint(product(axis.hi for axis in reduced if axis.hi is not None))
    if which is None and points * elements > MANY:
        if points < FEW:
            return _in_two_stages(lowering, value, kept, reduced, kind, acc_dtype, dtype, after)
        rows = _rows(lowering, value, kept, reduced)
        if rows is not None and points < FEW * STRIP:
            order = [rows, *(axis for axis in reduced if axis is not rows)]
            return _in_two_stages(
                lowering, value, kept, order, kind, acc_dtype, dtype, after, _chunk_of_rows(rows)
            )
    acc = lowering.accumulator(kind, acc_dtype)
    buffer = lowering.buffer(kept, dtype, _layout(lowering, value, kept))
    result = None if after is None else cast(after(lowering.values.acc(acc)), dtype)
    index = lowering.axes(kept)
    lowering.emit(
        Loop(
            buffer,
            lowering.axis_symbols(kept),
            buffer.index(index),
            value,
            tuple(reduced),
            acc,
            result,
            which,
        )
    )
    return lowering.whole(buffer)


def _layout(lowering: Lowering, value: Value, kept: Shape) -> tuple[Size, ...]:
    """Dimensions in the order in which they lie in what is read."""
    axes = {k: lowering.axis(f"i{k}", n) for k, n in enumerate(kept) if n != 1}
    order = list(range(len(kept)))
    if len(axes) > 1:
        for load in lowering.loads(value):
            strides = axis_strides(load.attr[1], axes)
            if strides is not None:
                order.sort(key=lambda k: -strides.get(k, 0))
                break
    return dense(kept, order)


def _in_two_stages(
    lowering: Lowering,
    value: Value,
    kept: Shape,
    reduced: list[Symbol],
    kind: str,
    acc_dtype: torch.dtype,
    dtype: torch.dtype,
    after: Map | None,
    length: Size | None = None,
) -> Tensor:
    """Chunks first, each to one partial result; then the partial results.

    length   of a chunk along reduced[0]; found here unless given
    """
    first = reduced[0]
    assert first.hi is not None
    rest, size = reduced[1:], first.hi
    inner = hint(product(axis.hi for axis in rest if axis.hi is not None))
    if length is None:  # the outermost reduced axis may make good chunks as it is
        is_good = FEW <= hint(size) <= CHUNK <= inner * FEW
        length = 1 if is_good else max(CHUNK // max(inner, 1), 1)
    if length == 1:
        partial = _partial(lowering, kept, size, acc_dtype)
        chunk = lowering.axis("c0", size)
        moved = rewrite([value], {first: chunk.expr})[0]
        _store_partial(lowering, partial, kept, chunk, moved, rest, kind)
    else:
        whole = floordiv(size, length)
        left = size - whole * length
        partial = _partial(lowering, kept, whole if left == 0 else whole + 1, acc_dtype)
        chunk, step = lowering.axis("c0", whole), lowering.axis("s0", length)
        moved = rewrite([value], {first: chunk.expr * length + step.expr})[0]
        _store_partial(lowering, partial, kept, chunk, moved, [step, *rest], kind)
        if left != 0:
            step = lowering.axis("s0", left)
            moved = rewrite([value], {first: whole * length + (0 if left == 1 else step.expr)})[0]
            _store_partial(lowering, partial, kept, whole, moved, [step, *rest], kind)
    last = len(kept)
    return squeeze(reduce(partial, [last], kind, acc_dtype, dtype, None, after), [last])


def _rows(lowering: Lowering, value: Value, kept: Shape, reduced: list[Symbol]) -> Symbol | None:
    """The widest reduced axis of many points, if what is read lies along kept ones."""
    axes = {k: lowering.axis(f"i{k}", n) for k, n in enumerate(kept) if n != 1}
    for load in lowering.loads(value):
        columns = axis_strides(load.attr[1], axes)
        rows = axis_strides(load.attr[1], dict(enumerate(reduced)))
        if columns is None or rows is None or min(columns.values()) != 1:
            continue
        sizes = {k: hint(axis.hi) for k, axis in enumerate(reduced) if axis.hi is not None}
        long = [k for k, size in sizes.items() if size >= ROWS]
        return reduced[max(long, key=lambda k: rows[k])] if long else None
    return None


def _chunk_of_rows(axis: Symbol) -> Size:
    """How many points of an axis make one chunk: all chunks alike if its size can be divided."""
    assert axis.hi is not None
    size = hint(axis.hi)
    if size < 4 * ROWS:
        return 1
    if not isinstance(axis.hi, int):
        return max(size // (2 * ROWS), 1)
    whole = [n for n in range(2 * ROWS, 4 * ROWS) if size % n == 0]
    return size // (whole[0] if whole else 2 * ROWS)


def _partial(lowering: Lowering, kept: Shape, count: Size, dtype: torch.dtype) -> Tensor:
    return lowering.whole(lowering.buffer((*kept, count), dtype))


def _store_partial(
    lowering: Lowering,
    partial: Tensor,
    kept: Shape,
    chunk: Symbol | Size,
    value: Value,
    reduced: list[Symbol],
    kind: str,
) -> None:
    """One partial result per point of the axis `chunk`, or the one at that place."""
    storage = partial.storage
    assert storage is not None
    axes = lowering.axis_symbols(kept)
    place: Size = 0
    if not isinstance(chunk, Symbol):
        place = chunk
    elif chunk.hi != 1:
        axes, place = (*axes, chunk), chunk.expr
    index = lowering.offset(storage, (*lowering.axes(kept), place))
    acc = lowering.accumulator(kind, partial.dtype)
    several = tuple(axis for axis in reduced if axis.hi != 1)
    if several:
        lowering.emit(Loop(storage.buffer, axes, index, value, several, acc))
    else:
        lowering.emit(Loop(storage.buffer, axes, index, value))


# ------------------------------------------------------------------------------ shapes of results


def dropped(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """`x` with the reduced dimensions, which have size 1, unless they are to be kept."""
    return x if keepdim else squeeze(x, dims)


def prepared(x: Tensor, passes: int) -> Tensor:
    """An operand that is read several times: computed once if that is cheaper."""
    if passes > 1 and x.lowering.is_heavy(x):
        x.lowering.realise(x)
    return x


def count_of(x: Tensor, dims: Sequence[int]) -> Size:
    return product(x.shape[k] for k in dims)


def divided_by(count: Size) -> Map:
    return lambda v: op("div", v, v.table.index(count, v.dtype))


def position(x: Tensor, dims: Sequence[int], kind: str) -> Tensor:
    """argmax or argmin over `dims`: the flat index within them, in row-major order."""
    lowering = x.lowering
    kept: Shape = tuple(1 if k in dims else n for k, n in enumerate(x.shape))
    if all(x.shape[k] == 1 for k in dims):
        zero = lowering.values.const(0, torch.int64)
        return lowering.computed(kept, torch.int64, lambda ix: zero)
    index, reduced = _space(lowering, x.shape, dims)
    value = x.at(tuple(index))
    value = cast(value, torch.uint8 if x.dtype is torch.bool else opmath(x.dtype))
    flat: Size = 0
    for k in dims:
        flat = flat * x.shape[k] + index[k]
    which = lowering.values.index(flat)
    return _accumulate(lowering, value, kept, reduced, kind, torch.int64, torch.int64, None, which)
