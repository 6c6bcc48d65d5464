"""Reductions and scans: each is realised, since its result is needed whole before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.loops.ir import Loop, Value, cast, identity, op, rewrite, where
from fusee.loops.lower.pointwise import abs_, const, is_true, pointwise, test
from fusee.loops.lower.tensor import (
    Call,
    Index,
    Lowering,
    Shape,
    Strided,
    Tensor,
    axis_strides,
    dense,
    lowers,
    named,
    opmath,
)
from fusee.loops.lower.views import squeeze
from fusee.sym.expr import Size, Symbol, floordiv, hint, product

# ---------------------------------------------------------------------------- reduce


Map = Callable[[Value], Value]


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
    profile = lowering.values.profile
    if which is None and points * elements > profile.many:
        if points < profile.parallel:
            return _in_two_stages(lowering, value, kept, reduced, kind, acc_dtype, dtype, after)
        rows = _rows(lowering, value, kept, reduced)
        if rows is not None and points < profile.parallel * profile.strip:
            order = [rows, *(axis for axis in reduced if axis is not rows)]
            return _in_two_stages(
                lowering,
                value,
                kept,
                order,
                kind,
                acc_dtype,
                dtype,
                after,
                _chunk_of_rows(rows, profile.rows),
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
        few, chunk = lowering.values.profile.parallel, lowering.values.profile.chunk
        is_good = few <= hint(size) <= chunk <= inner * few
        length = 1 if is_good else max(chunk // max(inner, 1), 1)
    if length == 1:
        partial = _partial(lowering, kept, size, acc_dtype)
        part = lowering.axis("c0", size)
        moved = rewrite([value], {first: part.expr})[0]
        _store_partial(lowering, partial, kept, part, moved, rest, kind)
    else:
        whole = floordiv(size, length)
        left = size - whole * length
        partial = _partial(lowering, kept, whole if left == 0 else whole + 1, acc_dtype)
        part, step = lowering.axis("c0", whole), lowering.axis("s0", length)
        moved = rewrite([value], {first: part.expr * length + step.expr})[0]
        _store_partial(lowering, partial, kept, part, moved, [step, *rest], kind)
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
        long = [k for k, size in sizes.items() if size >= lowering.values.profile.rows]
        return reduced[max(long, key=lambda k: rows[k])] if long else None
    return None


def _chunk_of_rows(axis: Symbol, least: int) -> Size:
    """How many points of an axis make one chunk: all chunks alike if its size can be divided."""
    assert axis.hi is not None
    size = hint(axis.hi)
    if size < 4 * least:
        return 1
    if not isinstance(axis.hi, int):
        return max(size // (2 * least), 1)
    whole = [n for n in range(2 * least, 4 * least) if size % n == 0]
    return size // (whole[0] if whole else 2 * least)


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


# ---------------------------------------------------------------------------- aggregate
# ATen's reductions: sums, moments, extremes, truth, vector norms.

# ------------------------------------------------------------------------------ sums


def _sum_like(
    call: Call, x: Tensor, dims: Any, keepdim: bool, kind: str, after: Map | None
) -> Tensor:
    dtype = call.meta.dtype
    chosen = normal_dims(dims, len(x.shape))
    result = reduce(x, chosen, kind, opmath(dtype), dtype, lambda v: cast(v, dtype), after)
    return dropped(result, chosen, keepdim)


@lowers(*named("sum", "dim_IntList"))
def _sum_dims(call: Call, x: Tensor, dim: Any, keepdim: bool = False, **_: object) -> Tensor:
    return _sum_like(call, x, dim, keepdim, "sum", None)


@lowers(*named("sum"))
def _sum(call: Call, x: Tensor, **_: object) -> Tensor:
    return _sum_like(call, x, None, False, "sum", None)


@lowers(*named("prod", "default", "dim_int"))
def _prod(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, **_: object) -> Tensor:
    return _sum_like(call, x, dim, keepdim, "prod", None)


@lowers(*named("mean", "default", "dim"))
def _mean(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, **_: object) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    return _sum_like(call, x, dims, keepdim, "sum", divided_by(count_of(x, dims)))


def _variance(
    call: Call, x: Tensor, dim: Any, correction: Any, keepdim: bool, finish: Map | None
) -> tuple[Tensor, Tensor]:
    dims = normal_dims(dim, len(x.shape))
    correction = 1 if correction is None else correction
    if isinstance(correction, float) and correction.is_integer():
        correction = int(correction)
    mean, spread = mean_and_squares(x, dims, correction, finish)
    dtype = call.meta.dtype
    return tuple(  # type: ignore[return-value]
        pointwise(x.lowering, [t], lambda v: v, t.shape, dtype) if t.dtype is not dtype else t
        for t in (dropped(spread, dims, keepdim), dropped(mean, dims, keepdim))
    )


def _sqrt(x: Value) -> Value:
    return op("sqrt", x)


@lowers(*named("var", "correction"))
def _var(
    call: Call, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    return _variance(call, x, dim, correction, keepdim, None)[0]


@lowers(*named("std", "correction"))
def _std(
    call: Call, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    return _variance(call, x, dim, correction, keepdim, _sqrt)[0]


@lowers(*named("var_mean", "correction"))
def _var_mean(
    call: Call, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _variance(call, x, dim, correction, keepdim, None)


@lowers(*named("std_mean", "correction"))
def _std_mean(
    call: Call, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _variance(call, x, dim, correction, keepdim, _sqrt)


@lowers(*named("var std", "default", "dim"))
def _var_unbiased(
    call: Call, x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False
) -> Tensor:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    finish = _sqrt if "std" in str(call.op) else None
    return _variance(call, x, dim, int(unbiased), keepdim, finish)[0]


@lowers(*named("logsumexp"))
def _logsumexp(call: Call, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    dtype = call.meta.dtype
    compute = opmath(dtype)
    x = pointwise(x.lowering, [x], lambda v: v, x.shape, compute) if x.dtype is not compute else x
    prepared(x, 2)
    # an infinite maximum is left out: inf - inf is NaN, but exp(inf) and exp(-inf) are right
    top = reduce(x, dims, "max", compute, compute, None, _finite_or_zero)
    shifted = pointwise(
        x.lowering, [x, top], lambda v, m: op("exp", op("sub", v, m)), x.shape, compute
    )
    total = reduce(shifted, dims, "sum", compute, compute, None, lambda v: op("log", v))
    result = pointwise(x.lowering, [total, top], lambda a, b: op("add", a, b), total.shape, dtype)
    return dropped(result, dims, keepdim)


def _finite_or_zero(x: Value) -> Value:
    return where(op("eq", op("abs", x), const(x, float("inf"))), const(x, 0), x)


def mean_and_squares(
    x: Tensor, dims: Sequence[int], correction: Any, finish: Map | None
) -> tuple[Tensor, Tensor]:
    """The mean, and finish(variance), both with the reduced dimensions kept, in opmath."""
    compute = opmath(x.dtype)
    prepared(x, 2)
    count = count_of(x, dims)
    mean = reduce(x, dims, "sum", compute, compute, None, divided_by(count))
    centred = pointwise(
        x.lowering,
        [x, mean],
        lambda v, m: op("mul", op("sub", v, m), op("sub", v, m)),
        x.shape,
        compute,
    )

    def variance(total: Value) -> Value:
        free = count - correction if isinstance(correction, int) else None
        if isinstance(free, int):
            below = const(total, max(free, 0))
        elif free is not None:
            below = op("maximum", total.table.index(free, total.dtype), const(total, 0))
        else:
            left = op("sub", total.table.index(count, total.dtype), const(total, correction))
            below = op("maximum", left, const(total, 0))
        value = op("div", total, below)
        return value if finish is None else finish(value)

    return mean, reduce(centred, dims, "sum", compute, compute, None, variance)


# ------------------------------------------------------------------------------ extremes


def extreme(x: Tensor, dims: Sequence[int], high: bool) -> Tensor:
    if x.dtype is torch.bool:
        return reduce(x, dims, "any" if high else "all", torch.bool, torch.bool)
    return reduce(x, dims, "max" if high else "min", opmath(x.dtype), x.dtype)


@lowers(*named("amax"))
def _amax(call: Call, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    return dropped(extreme(x, dims, True), dims, keepdim)


@lowers(*named("amin"))
def _amin(call: Call, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    return dropped(extreme(x, dims, False), dims, keepdim)


@lowers(*named("aminmax"))
def _aminmax(
    call: Call, x: Tensor, *, dim: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = normal_dims(dim, len(x.shape))
    prepared(x, 2)
    low, high = extreme(x, dims, False), extreme(x, dims, True)
    return dropped(low, dims, keepdim), dropped(high, dims, keepdim)


@lowers(*named("max"))
def _max_all(call: Call, x: Tensor) -> Tensor:
    dims = normal_dims(None, len(x.shape))
    return dropped(extreme(x, dims, True), dims, False)


@lowers(*named("min"))
def _min_all(call: Call, x: Tensor) -> Tensor:
    dims = normal_dims(None, len(x.shape))
    return dropped(extreme(x, dims, False), dims, False)


@lowers(*named("max", "dim"))
def _max_dim(call: Call, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme_and_place(x, dim, keepdim, True, call.used[1])


@lowers(*named("min", "dim"))
def _min_dim(call: Call, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme_and_place(x, dim, keepdim, False, call.used[1])


def _extreme_and_place(
    x: Tensor, dim: int, keepdim: bool, high: bool, placed: bool
) -> tuple[Tensor, Tensor]:
    dims = normal_dims(dim, len(x.shape))
    prepared(x, 2)
    best = dropped(extreme(x, dims, high), dims, keepdim)
    if not placed:
        return best, best
    place = position(x, dims, "argmax" if high else "argmin")
    return best, dropped(place, dims, keepdim)


def _arg(call: Call, x: Tensor, dim: int | None, keepdim: bool, kind: str) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    return dropped(position(x, dims, kind), dims, keepdim)


@lowers(*named("argmax"))
def _argmax(call: Call, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(call, x, dim, keepdim, "argmax")


@lowers(*named("argmin"))
def _argmin(call: Call, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(call, x, dim, keepdim, "argmin")


# ------------------------------------------------------------------------------ truth


def _truth(call: Call, x: Tensor, dim: Any, keepdim: bool, kind: str) -> Tensor:
    # an empty list of dimensions reduces nothing here
    dims = [] if isinstance(dim, (list, tuple)) and not dim else normal_dims(dim, len(x.shape))
    return dropped(reduce(x, dims, kind, torch.bool, call.meta.dtype, is_true), dims, keepdim)


@lowers(*named("any", "default", "dim", "dims"))
def _any(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _truth(call, x, dim, keepdim, "any")


@lowers(*named("all", "default", "dim", "dims"))
def _all(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _truth(call, x, dim, keepdim, "all")


@lowers(*named("count_nonzero", "default", "dim_IntList"))
def _count_nonzero(call: Call, x: Tensor, dim: Any = None) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    counted = reduce(
        x, dims, "sum", torch.int64, torch.int64, lambda v: cast(is_true(v), torch.int64)
    )
    return dropped(counted, dims, False)


# ------------------------------------------------------------------------------ vector norms


def _norm(call: Call, x: Tensor, order: Any, dim: Any, keepdim: bool) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    dtype = call.meta.dtype
    order = 2.0 if order is None else float(order)
    kind, before, after = _norm_maps(order)
    if order != 0 and dims and all(x.shape[k] == 1 for k in dims):
        kind, before, after = _norm_maps(1)  # of one number: its absolute value, unrounded

    def element(v: Value) -> Value:
        return before(abs_(cast(v, opmath(dtype))))

    return dropped(reduce(x, dims, kind, opmath(dtype), dtype, element, after), dims, keepdim)


def _norm_maps(order: float) -> tuple[str, Map, Map | None]:
    if order == float("inf"):
        return "max", lambda v: v, None
    if order == float("-inf"):
        return "min", lambda v: v, None
    if order == 0:
        return "sum", lambda v: where(test("ne", v, 0), const(v, 1), const(v, 0)), None
    if order == 1:
        return "sum", lambda v: v, None
    if order == 2:
        return "sum", lambda v: op("mul", v, v), _sqrt
    return (
        "sum",
        lambda v: op("pow", v, const(v, order)),
        lambda v: op("pow", v, const(v, 1 / order)),
    )


@lowers(*named("linalg_vector_norm"))
def _vector_norm(
    call: Call, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: object
) -> Tensor:
    return _norm(call, x, ord, dim, keepdim)


@lowers(*named("norm", "ScalarOpt_dim", "Scalar"))
def _norm_dims(call: Call, x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _norm(call, x, p, dim, keepdim)


# ---------------------------------------------------------------------------- scan
# Scans: running reductions along one dimension.


def scan(
    x: Tensor,
    dim: int,
    kind: str,
    acc_dtype: torch.dtype,
    dtype: torch.dtype,
    before: Map | None = None,
) -> Tensor:
    """The running reduction along `dim`."""
    lowering, shape = x.lowering, x.shape
    if not shape or shape[dim] == 1 or 0 in shape:
        return lowering.computed(shape, dtype, lambda ix: cast(x.at(ix), dtype), (x,))
    index: Index = tuple(
        lowering.axis("r0", n).expr if k == dim else i
        for k, (i, n) in enumerate(zip(lowering.axes(shape), shape, strict=True))
    )
    value = x.at(index)
    value = mapped(value, before, acc_dtype)
    axes = tuple(lowering.axis(f"i{k}", n) for k, n in enumerate(shape) if n != 1 and k != dim)
    buffer = lowering.buffer(shape, dtype)
    acc = lowering.accumulator(kind, acc_dtype)
    lowering.emit(
        Loop(
            buffer,
            axes,
            lowering.offset(Strided(buffer, buffer.strides, 0), index),
            value,
            (lowering.axis("r0", shape[dim]),),
            acc,
            scan=True,
        )
    )
    return lowering.whole(buffer)


def _scan_dtype(dtype: torch.dtype) -> torch.dtype:
    """ATen's CPU scans accumulate float in double, and halves in float."""
    return torch.float64 if dtype is torch.float32 else opmath(dtype)


def _cumulate(call: Call, x: Tensor, dim: int, kind: str) -> Tensor:
    dtype = call.meta.dtype
    dim = dim % len(x.shape) if x.shape else 0
    return scan(x, dim, kind, _scan_dtype(dtype), dtype, lambda v: cast(v, dtype))


@lowers(*named("cumsum"))
def _cumsum(call: Call, x: Tensor, dim: int, **_: object) -> Tensor:
    return _cumulate(call, x, dim, "sum")


@lowers(*named("cumprod"))
def _cumprod(call: Call, x: Tensor, dim: int, **_: object) -> Tensor:
    return _cumulate(call, x, dim, "prod")


def _extreme_scan(call: Call, x: Tensor, dim: int, kind: str) -> tuple[Tensor, Tensor]:
    """Running extremes, and the last place so far where an element equals the extreme."""
    dim = dim % len(x.shape) if x.shape else 0
    prepared(x, 2)
    lowering = x.lowering
    compute = torch.uint8 if x.dtype is torch.bool else opmath(x.dtype)
    best = scan(x, dim, kind, compute, x.dtype)
    if not call.used[1]:
        return best, best

    def at(ix: Index) -> Value:
        value, top = x.at(ix), best.at(ix)
        here = op("eq", cast(value, compute), cast(top, compute))
        if compute.is_floating_point:
            here = op("or", here, op("isnan", cast(value, compute)))
        place = lowering.values.index(ix[dim] if ix else 0)
        return where(here, place, lowering.values.const(0, torch.int64))

    place = lowering.computed(x.shape, torch.int64, at, (x, best))
    return best, scan(place, dim, "max", torch.int64, torch.int64)


@lowers(*named("cummax"))
def _cummax(call: Call, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _extreme_scan(call, x, dim, "max")


@lowers(*named("cummin"))
def _cummin(call: Call, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _extreme_scan(call, x, dim, "min")
