"""Reductions and scans: each is realised, since its result is needed whole before it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fusee.loops import (
    Acc,
    Buffer,
    Loop,
    Value,
    cast,
    const,
    contiguous,
    identity,
    op,
    rewrite,
    walk,
    where,
)
from fusee.loops.associative import SCAN, CombineCall, parsed
from fusee.loops.lower.pointwise import elementwise
from fusee.loops.lower.tensor import (
    DTYPES,
    HANDLERS,
    Index,
    Lowering,
    Meta,
    NotLowered,
    OpCall,
    Shape,
    Tensor,
    axis_strides,
    bound,
    dense,
    lowers,
)
from fusee.loops.lower.views import converted, resized, squeeze
from fusee.loops.operators import abs_, exp, is_true, itself_times, log, opmath, power, unary
from fusee.sym import Size, Symbol, count_points, floordiv, hint, maximum, product

# ---------------------------------------------------------------------------- reduce


Map = Callable[[Value], Value]


def normal_dims(dims: Any, x: Tensor) -> list[int]:
    """Reduced dimensions as given to ATen: None or () mean all."""
    rank = len(x.shape)
    if isinstance(dims, int):
        dims = [dims]
    if dims is None or len(dims) == 0:
        return list(range(rank))
    return sorted({dim % max(rank, 1) for dim in dims} & set(range(rank)))


class Reduction(NamedTuple):
    """What becomes of elements: accumulated in `dtype`, then after(accumulator) in `result`.

    which   of argmax and argmin: the number of an element
    """

    kind: str
    dtype: torch.dtype
    result: torch.dtype
    after: Map | None = None
    which: Value | None = None

    def finish(self, accumulated: Value) -> Value:
        return cast(accumulated if self.after is None else self.after(accumulated), self.result)


def reduce(
    x: Tensor,
    dims: Sequence[int],
    kind: str = "sum",
    acc_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    before: Map | None = None,
    after: Map | None = None,
) -> Tensor:
    """Reduce `dims`, which keep size 1. `before` maps elements, `after` the accumulator.

    acc_dtype   opmath unless given; so is the result's unless `dtype` is given
    """
    lowering, shape = x.lowering, x.shape
    acc_dtype = acc_dtype or opmath(x.dtype)
    how = Reduction(kind, acc_dtype, dtype or acc_dtype, after)
    kept: Shape = tuple(1 if k in dims else n for k, n in enumerate(shape))
    if any(shape[k] == 0 for k in dims):
        start = lowering.values.const(identity(kind, acc_dtype), acc_dtype)
        return lowering.computed(kept, how.result, lambda ix: how.finish(start))
    if all(shape[k] == 1 for k in dims):

        def only(ix: Index) -> Value:
            return how.finish(mapped(x.at(ix), before, acc_dtype))

        return lowering.computed(kept, how.result, only, (x,))
    index, reduced = _space(lowering, shape, dims)
    value = mapped(x.at(tuple(index)), before, acc_dtype)
    return _Reduced(lowering, value, kept, reduced, how).computed()


def mapped(value: Value, before: Map | None, dtype: torch.dtype) -> Value:
    """An element as it is accumulated. Maps see halves as float32."""
    value = cast(value, opmath(value.dtype))
    return cast(value if before is None else before(value), dtype)


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


class _Reduced(NamedTuple):
    """`value` at every point of `kept`, reduced along some axes."""

    lowering: Lowering
    value: Value
    kept: Shape
    axes: list[Symbol]
    how: Reduction

    def computed(self) -> Tensor:
        lowering, kept, how = self.lowering, self.kept, self.how
        points = hint(product(kept))
        elements = hint(count_points(self.axes))
        profile = lowering.values.profile
        cuts = how.which is None and not profile.shares
        if cuts and points * elements > profile.many:
            if points < profile.parallel:
                return self._in_two_stages()
            rows, pieces = self._rows()
            if rows is not None and pieces < profile.parallel:
                order = [rows, *(axis for axis in self.axes if axis is not rows)]
                return self._replace(axes=order)._in_two_stages(columns=True)
        short = self._short_run() if cuts else None
        if short is None:
            return self._whole()
        last, whole = len(kept), (*kept, short.size)
        moved = rewrite([self.value], {short: lowering.axes(whole)[last]})[self.value]
        first = Reduction(how.kind, how.dtype, how.dtype)
        others = [axis for axis in self.axes if axis is not short]
        each = _Reduced(lowering, moved, whole, others, first).computed()
        return squeeze(
            reduce(each, [last], how.kind, how.dtype, how.result, None, how.after), [last]
        )

    def _whole(self) -> Tensor:
        """In one loop."""
        lowering, kept, how = self.lowering, self.kept, self.how
        acc = lowering.accumulator(how.kind, how.dtype)
        strides = dense(kept, self._order())
        result = None if how.after is None else how.finish(lowering.values.acc(acc))
        return lowering.looped(
            self.value, how.result, kept, strides, self.axes, acc, result, how.which
        )

    def _steps(self) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
        """Of each load along all axes: its steps along those that are kept, and reduced."""
        both = self.lowering.axes_of(self.kept), dict(enumerate(self.axes))
        for load in self.lowering.loads(self.value):
            columns, rows = (axis_strides(load.attr[1], axes) for axes in both)
            if columns is not None and rows is not None:
                yield columns, rows

    def _short_run(self) -> Symbol | None:
        """A reduced axis that fills no vector, if it does beside a kept one, of several.

        The channels of a group are such an axis where channels lie last.
        """
        profile = self.lowering.values.profile
        for columns, rows in self._steps():
            if len(self.axes) < 2 or 1 not in rows.values():
                continue
            short = self.axes[min(rows, key=lambda k: (rows[k] != 1, k))]
            size = hint(short.size)
            others = count_points(axis for axis in self.axes if axis is not short)
            if size < profile.wide and size in columns.values() and hint(others) >= profile.rows:
                return short
            return None
        return None

    def _order(self) -> list[int]:
        """Dimensions in the order in which they lie in what is read."""
        axes = self.lowering.axes_of(self.kept)
        order = list(range(len(self.kept)))
        if len(axes) > 1:
            for load in self.lowering.loads(self.value):
                strides = axis_strides(load.attr[1], axes)
                if strides is not None:
                    order.sort(key=lambda k: -strides.get(k, 0))
                    break
        return order

    def _in_two_stages(self, columns: bool = False) -> Tensor:
        """Chunks first, each to one partial result; then the partial results.

        columns   vectors run down them: along what is kept
        """
        lowering, kept, how = self.lowering, self.kept, self.how
        first, *rest = self.axes
        size = first.size
        inner, profile = hint(count_points(rest)), lowering.values.profile
        few, most, least = profile.parallel, profile.chunk, profile.rows
        length: Size
        if not columns:  # the outermost reduced axis may make good chunks as it is
            is_good = few <= hint(size) <= most <= inner * few
            length = 1 if is_good else max(most // max(inner, 1), 1)
        elif hint(size) < 4 * least:
            length = 1
        elif isinstance(size, int):  # all alike, if it can be divided
            counts = [n for n in range(2 * least, 4 * least) if size % n == 0]
            length = size // (*counts, 2 * least)[0]
        else:
            length = max(hint(size) // (2 * least), 1)
        whole = floordiv(size, length)
        left = size - whole * length
        shape = (*kept, whole if left == 0 else whole + 1)
        # what the lanes of a chunk find lies beside one another: those of kept axes, or of none
        order = [*self._order(), len(kept)]
        layout = dense(shape, order[-1:] + order[:-1] if columns else order)
        partial = lowering.whole(lowering.buffer(shape, how.dtype, layout))

        def store(place: Size, axes: tuple[Symbol, ...], count: Size) -> None:
            """The partial result of `count` points from the beginning of chunk `place` on."""
            step = lowering.axis("s0", count)
            point = place * length + (0 if count == 1 else step.expr)
            moved = rewrite([self.value], {first: point})[self.value]
            buffer = lowering.realise(partial).buffer
            index = buffer.index((*lowering.axes(kept), place))
            acc = lowering.accumulator(how.kind, how.dtype)
            several = tuple(axis for axis in (step, *rest) if axis.hi != 1)
            axes = (*lowering.axis_symbols(kept), *axes)
            lowering.emit(Loop(buffer, axes, index, moved, several, acc if several else None))

        chunk = lowering.axis("c0", whole)
        if whole == 1:
            store(0, (), length)
        else:
            store(chunk.expr, (chunk,), length)
        if left != 0:
            store(whole, (), left)
        last = [len(kept)]
        places, chunks = _space(lowering, shape, last)
        value = mapped(partial.at(tuple(places)), None, how.dtype)
        return squeeze(_Reduced(lowering, value, (*kept, 1), chunks, how)._whole(), last)

    def _rows(self) -> tuple[Symbol | None, int]:
        """The widest reduced axis of many points, if what is read lies along kept ones.

        Then, into how many pieces of at most a strip these are cut.
        """
        profile = self.lowering.values.profile
        for columns, rows in self._steps():
            if min(columns.values()) != 1:
                continue
            sizes = {k: hint(axis.size) for k, axis in enumerate(self.axes)}
            long = [k for k, size in sizes.items() if size >= profile.rows]
            run = 1
            for k in sorted(columns, key=columns.__getitem__):
                run *= hint(self.kept[k]) if hint(columns[k]) == run else 1
            pieces = hint(product(self.kept)) // run * -(-run // profile.strip)
            return self.axes[max(long, key=lambda k: rows[k])] if long else None, pieces
        return None, 0


# ------------------------------------------------------------------------------ shapes of results


def dropped(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """`x` with the reduced dimensions, which have size 1, unless they are to be kept."""
    return x if keepdim else squeeze(x, dims)


def prepared(x: Tensor) -> Tensor:
    """An operand that is read several times: computed once if that is cheaper."""
    if x.lowering.is_heavy(x):
        x.lowering.realise(x)
    return x


def count_of(x: Tensor, dims: Sequence[int]) -> Size:
    return product(x.shape[k] for k in dims)


def divided_by(count: Size) -> Map:
    return lambda v: v / v.table.index(count, v.dtype)


def position(x: Tensor, dims: Sequence[int], kind: str) -> Tensor:
    """argmax or argmin over `dims`: the flat index within them, in row-major order."""
    lowering = x.lowering
    kept: Shape = tuple(1 if k in dims else n for k, n in enumerate(x.shape))
    if all(x.shape[k] == 1 for k in dims):
        zero = lowering.values.const(0, torch.int64)
        return lowering.computed(kept, torch.int64, lambda ix: zero)
    index, reduced = _space(lowering, x.shape, dims)
    value = cast(x.at(tuple(index)), torch.uint8 if x.dtype is torch.bool else opmath(x.dtype))
    flat: Size = 0
    for k in dims:
        flat = flat * x.shape[k] + index[k]
    how = Reduction(kind, torch.int64, torch.int64, which=lowering.values.index(flat))
    return _Reduced(lowering, value, kept, reduced, how).computed()


# ---------------------------------------------------------------------------- aggregate
# ATen's reductions: sums, moments, extremes, truth, vector norms.


def _sums(kind: str, is_mean: bool = False) -> Callable[..., Tensor]:
    def handler(call: OpCall, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dtype, dims = call.meta.dtype, normal_dims(dim, x)
        after = divided_by(count_of(x, dims)) if is_mean else None
        found = reduce(x, dims, kind, opmath(dtype), dtype, lambda v: cast(v, dtype), after)
        return dropped(found, dims, keepdim)

    return handler


lowers("sum sum.dim_IntList")(_sums("sum"))
lowers("prod prod.dim_int")(_sums("prod"))
lowers("mean mean.dim")(_sums("sum", is_mean=True))


@lowers("var.correction std.correction var_mean.correction std_mean.correction")
def _variance(
    call: OpCall, x: Tensor, dim: Any, *, correction: Any, keepdim: bool
) -> tuple[Tensor, ...]:
    dims = normal_dims(dim, x)
    correction = 1 if correction is None else correction
    if isinstance(correction, float) and correction.is_integer():
        correction = int(correction)
    finish = unary("sqrt") if "std" in str(call.op) else None
    found = mean_and_squares(x, dims, correction, finish)[::-1]
    return tuple(
        converted(dropped(t, dims, keepdim), call.meta.dtype) for t in found[: len(call.metas)]
    )


@lowers("logsumexp")
def _logsumexp(call: OpCall, x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    dims, dtype = normal_dims(dim, x), call.meta.dtype
    x = prepared(converted(x, opmath(dtype)))
    # an infinite maximum is left out: inf - inf is NaN, but exp(inf) and exp(-inf) are right
    top = reduce(x, dims, "max", after=lambda v: where(op("eq", op("abs", v), float("inf")), 0, v))
    total = reduce(elementwise(lambda v, m: exp(v - m), x, top), dims, after=log)
    return dropped(elementwise(lambda a, b: a + b, total, top, dtype=dtype), dims, keepdim)


def mean_and_squares(
    x: Tensor,
    dims: Sequence[int],
    correction: Any,
    finish: Map | None,
    spread: Callable[[Tensor], Tensor] = lambda mean: mean,
) -> tuple[Tensor, Tensor]:
    """The mean, and finish(variance), both with the reduced dimensions kept, in opmath.

    spread   the mean as it is subtracted from elements
    """
    count = count_of(prepared(x), dims)
    mean = reduce(x, dims, after=divided_by(count))
    centred = elementwise(lambda v, m: (v - m) * (v - m), x, spread(mean))

    def variance(total: Value) -> Value:
        free = count - correction if isinstance(correction, int) else None
        if isinstance(free, int):
            below = const(total, max(free, 0))
        elif free is not None:
            below = op("maximum", total.table.index(free, total.dtype), 0)
        else:
            below = op("maximum", total.table.index(count, total.dtype) - correction, 0)
        return total / below if finish is None else finish(total / below)

    return mean, reduce(centred, dims, after=variance)


# ------------------------------------------------------------------------------ extremes


def extreme(x: Tensor, dims: Sequence[int], name: str) -> Tensor:
    """The "max" or "min"."""
    if x.dtype is torch.bool:
        return reduce(x, dims, "any" if name == "max" else "all")
    return reduce(x, dims, name, dtype=x.dtype)


def _register_extreme(name: str) -> None:
    def alone(call: OpCall, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dims = normal_dims(dim, x)
        return dropped(extreme(x, dims, name), dims, keepdim)

    def place(call: OpCall, x: Tensor, dim: Any, keepdim: bool) -> Tensor:
        dims = normal_dims(dim, x)
        return dropped(position(x, dims, f"arg{name}"), dims, keepdim)

    def both(call: OpCall, x: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
        best = alone(call, prepared(x), dim, keepdim)
        return best, place(call, x, dim, keepdim) if call.used[1] else best

    lowers(f"{name} a{name}")(alone)
    lowers(f"arg{name}")(place)
    lowers(f"{name}.dim")(both)


_register_extreme("max")
_register_extreme("min")


@lowers("aminmax")
def _aminmax(call: OpCall, x: Tensor, *, dim: Any, keepdim: bool) -> tuple[Tensor, ...]:
    dims = normal_dims(dim, prepared(x))
    return tuple(
        dropped(t, dims, keepdim) for t in (extreme(x, dims, "min"), extreme(x, dims, "max"))
    )


def _truth(kind: str) -> Callable[..., Tensor]:
    def handler(call: OpCall, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        # an empty list of dimensions reduces nothing here
        dims = [] if isinstance(dim, (list, tuple)) and not dim else normal_dims(dim, x)
        return dropped(reduce(x, dims, kind, torch.bool, call.meta.dtype, is_true), dims, keepdim)

    return handler


lowers("any any.dim any.dims")(_truth("any"))
lowers("all all.dim all.dims")(_truth("all"))


@lowers("count_nonzero count_nonzero.dim_IntList")
def _count_nonzero(call: OpCall, x: Tensor, dim: Any) -> Tensor:
    dims = normal_dims(dim, x)
    number = torch.int64
    counted = reduce(x, dims, "sum", number, number, lambda v: cast(is_true(v), number))
    return dropped(counted, dims, False)


# ------------------------------------------------------------------------------ vector norms


@lowers("linalg_vector_norm norm.ScalarOpt_dim norm.Scalar")
def _norm(call: OpCall, x: Tensor, order: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    dims, dtype = normal_dims(dim, x), call.meta.dtype
    order = 2.0 if order is None else float(order)
    if order != 0 and dims and all(x.shape[k] == 1 for k in dims):
        order = 1.0  # of one number: its absolute value, unrounded
    extremes, root = {math.inf: "max", -math.inf: "min"}, unary("sqrt")

    def element(v: Value) -> Value:
        v = abs_(cast(v, opmath(dtype)))
        if order == 0:
            return where(op("ne", v, 0), const(v, 1), 0)
        if order == 1 or order in extremes:
            return v
        return itself_times(v, int(order)) if order in range(_MOST_FACTORS) else power(v, order)

    if order != 2:
        root = lambda v: op("pow", v, 1 / order)  # noqa: E731
    after = None if order in (0, 1, *extremes) else root
    kind, wide = extremes.get(order, "sum"), opmath(dtype)
    return dropped(reduce(x, dims, kind, wide, dtype, element, after), dims, keepdim)


_MOST_FACTORS = 9  # below this, what products round off is no more than what the sum does


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
    running = lowering.axis("r0", shape[dim])
    index = resized(lowering.axes(shape), dim, running.expr)
    axes = tuple(lowering.axis(f"i{k}", n) for k, n in enumerate(shape) if n != 1 and k != dim)
    value = mapped(x.at(index), before, acc_dtype)
    buffer = lowering.buffer(shape, dtype)
    acc = lowering.accumulator(kind, acc_dtype)
    lowering.emit(Loop(buffer, axes, buffer.index(index), value, (running,), acc, scan=True))
    return lowering.whole(buffer)


def _cumulates(kind: str) -> Callable[..., Tensor]:
    def handler(call: OpCall, x: Tensor, dim: int) -> Tensor:
        dtype = call.meta.dtype
        acc_dtype = opmath(dtype)
        # ATen's scans accumulate float in double on CPUs
        if dtype is torch.float32 and not prepared(x).lowering.values.profile.shares:
            acc_dtype = torch.float64
        return scan(x, dim % max(len(x.shape), 1), kind, acc_dtype, dtype, lambda v: cast(v, dtype))

    return handler


lowers("cumsum")(_cumulates("sum"))
lowers("cumprod")(_cumulates("prod"))


def _extreme_so_far(kind: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Running extremes, and the last place so far where an element equals the extreme."""

    def handler(call: OpCall, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        dim %= max(len(x.shape), 1)
        lowering = prepared(x).lowering
        compute = torch.uint8 if x.dtype is torch.bool else opmath(x.dtype)
        best = scan(x, dim, kind, compute, x.dtype)
        if not call.used[1]:
            return best, best

        def at(ix: Index) -> Value:
            value = cast(x.at(ix), compute)
            here = op("eq", value, cast(best.at(ix), compute))
            if compute.is_floating_point:
                here = here | op("isnan", value)
            return where(here, lowering.values.index(ix[dim] if ix else 0), 0)

        place = lowering.computed(x.shape, torch.int64, at, (x, best))
        return best, scan(place, dim, "max", torch.int64, torch.int64)

    return handler


lowers("cummax")(_extreme_so_far("max"))
lowers("cummin")(_extreme_so_far("min"))


# ------------------------------------------------------------------------------ folds
# Scans with a function of the program's (fusee/loops/associative.py). An accumulator carries each
# value that the function gives from one element to the next.
#
# Where threads by the thousand would wait for a few long scans, these go in pieces: what each piece
# comes to is found first, then scanned, and each piece begins anew with what came before it.


def _folds(
    call: OpCall, xs: Sequence[Tensor], text: str, before: Sequence[Tensor] = ()
) -> list[tuple[Acc, Value]]:
    """What the accumulators of a scan become at the general element, whose axis r0 is the first.

    before   what the pieces come to, whose number is the second axis, each with those before it
    """
    lowering, shape = call.lowering, xs[0].shape
    running = lowering.axis("r0", shape[0]).expr
    index = (running, *lowering.axes(shape)[1:])
    accs = [lowering.accumulator("fold", opmath(x.dtype)) for x in xs]
    first = op("eq", lowering.values.index(running), 0)

    def leaf(x: Tensor | None, acc: Acc) -> Tensor:
        def at(ix: Index) -> Value:
            if x is not None:
                return cast(x.at(ix), acc.dtype)
            carried = lowering.values.carry(acc)
            if not before:
                return carried
            return where(first, begun[acc].at((maximum(ix[1] - 1, 0), *ix[2:])), carried)

        return lowering.computed(shape, acc.dtype, at)

    def apply(one: CombineCall, args: Any, kwargs: Any) -> Tensor:
        meta = Meta(shape, one.dtype, contiguous(shape))
        inner = replace(call, op=one.op, metas=(meta,), used=(True,), overwrites=False)
        if one.op not in HANDLERS:
            raise NotLowered(f"{one.name} has no lowering")
        found: Tensor = bound(HANDLERS[one.op], inner, args, kwargs)
        return found

    begun = dict(zip(accs, before))
    present = [*map(leaf, xs, accs)]
    found = parsed(text).values([*(leaf(None, acc) for acc in accs), *present], apply)
    alone = first & op("eq", lowering.values.index(index[1]), 0) if before else first
    rows = [where(alone, x.at(index), y.at(index)) for x, y in zip(present, found, strict=True)]
    return [*zip(accs, rows, strict=True)]


@lowers([SCAN])
def _associative_scan(call: OpCall, xs: Sequence[Tensor], text: str) -> list[Tensor]:
    """raises  NotLowered for a function that is no expression of one element"""
    if any(x.shape != xs[0].shape or x.dtype not in DTYPES for x in xs):
        raise NotLowered("operands of several sizes, or of numbers that loops do not have")
    trial = replace(call, lowering=Lowering(call.lowering.values.profile))
    found = _folds(trial, [trial.lowering.filled(x.shape, 0, x.dtype) for x in xs], text)
    if trial.lowering.graph.steps or any(v.op == "check" for v in walk([x for _, x in found])):
        raise NotLowered("its function takes more than a step of a loop")
    return _scanned(call, xs, text)


def _scanned(call: OpCall, xs: Sequence[Tensor], text: str) -> list[Tensor]:
    lowering, shape = call.lowering, xs[0].shape
    if shape[0] == 1:
        return [lowering.computed(shape, x.dtype, x.at, (x,)) for x in xs]
    results = [lowering.buffer(shape, x.dtype) for x in xs]
    # of threads, each goes through a piece of it, if it is long and there are few beside it
    length, profile = 0, lowering.values.profile
    if profile.shares and hint(product(shape[1:])) < profile.many:
        if isinstance(shape[0], int) and shape[0] >= 2 * _PIECE:
            pieces_of = (n for n in range(_PIECE, _SHORT - 1, -1) if shape[0] % n == 0)
            length = next(pieces_of, 0)
    if not length:
        _emit_folds(call, xs, results, lambda ix: ix, _folds(call, xs, text))
        return [*map(lowering.whole, results)]
    count = shape[0] // length

    def apart(x: Tensor) -> Tensor:
        at = lambda ix: x.at((ix[1] * length + ix[0], *ix[2:]))  # noqa: E731
        return lowering.computed((length, count, *shape[1:]), x.dtype, at, (x,))

    pieces, every = [*map(apart, xs)], replace(call, used=(True,) * len(xs))
    totals = [lowering.buffer((count, *shape[1:]), opmath(x.dtype)) for x in xs]
    _emit_folds(every, pieces, totals, lambda ix: ix[1:], _folds(call, pieces, text), scan=False)
    before = _scanned(every, [*map(lowering.whole, totals)], text)
    folds = _folds(call, pieces, text, before)
    _emit_folds(call, pieces, results, lambda ix: (ix[1] * length + ix[0], *ix[2:]), folds)
    return [*map(lowering.whole, results)]


# Elements of a piece, at most and at least.
_PIECE, _SHORT = 64, 16


def _emit_folds(
    call: OpCall,
    xs: Sequence[Tensor],
    buffers: Sequence[Buffer],
    place: Callable[[Index], Index],
    folds: Sequence[tuple[Acc, Value]],
    scan: bool = True,
) -> None:
    """A loop for each result that is used: it stores each value, or without `scan` the last."""
    lowering, shape = call.lowering, xs[0].shape
    running = lowering.axis("r0", shape[0])
    axes = tuple(lowering.axis(f"i{k}", n) for k, n in enumerate(shape) if k > 0 and n != 1)
    at = place((running.expr, *lowering.axes(shape)[1:]))
    known = dict(folds)
    for (acc, value), buffer, is_used in zip(folds, buffers, call.used, strict=True):
        if not is_used:
            continue
        others: dict[Acc, Value] = {}  # accumulators that it is made of, and what they become
        waiting = [value]
        while waiting:
            for part in walk([waiting.pop()]):
                if part.op == "carry" and part.attr not in others and part.attr is not acc:
                    others[part.attr] = known[part.attr]
                    waiting.append(known[part.attr])
        index, more = buffer.index(at), tuple(others.items())
        loop = Loop(buffer, axes, index, value, (running,), acc, scan=scan, folds=more)
        lowering.emit(loop)
