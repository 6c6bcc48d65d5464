"""Element-wise ATen ops: operands of one dtype and shape, the table of ops; what is made of none.

ATen computes every op in one dtype: the result's, float32 for bfloat16 and float16, or, for ops
that return bool, what its operands promote to. Each op rounds to its result's dtype at its end.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from fusee.loops import (
    Buffer,
    Extern,
    Loop,
    Step,
    Value,
    View,
    cast,
    check,
    literal,
    op,
    payloads,
    walk,
    where,
)
from fusee.loops.lower.tensor import (
    Index,
    Lowering,
    NotLowered,
    Number,
    OpCall,
    Pieces,
    Shape,
    Tensor,
    lowers,
)
from fusee.loops.lower.views import converted, expand, is_repeated, narrow, reshape, resized
from fusee.loops.operators import (
    ROWS,
    Formula,
    Row,
    binary,
    clamp,
    exp,
    floor_divide,
    is_bool,
    is_true,
    log_sigmoid,
    opmath,
    power,
    remainder,
    sigmoid,
)
from fusee.loops.schedule import first_write, reads, writes
from fusee.source import HALVES
from fusee.sym import Expr, Size, Symbol, floordiv

Operand = Tensor | Number


@functools.cache
def _example(dtype: torch.dtype, is_scalar: bool) -> torch.Tensor:
    return torch.empty(() if is_scalar else (1,), dtype=dtype, device="meta")


def promote(operands: Sequence[Operand]) -> torch.dtype:
    """torch.result_type of one operand, or of two."""
    given: list[Any] = []
    for x in operands:
        if isinstance(x, Tensor):
            given.append(_example(x.dtype, not x.shape))
        elif isinstance(x, (Value, Expr)):
            given.append(1.0 if isinstance(x, Value) and x.dtype.is_floating_point else 1)
        else:
            given.append(x)
    return torch.result_type(given[0], given[-1])


# ------------------------------------------------------------------------------ operands


def reader(
    lowering: Lowering, x: Operand, shape: Shape, common: torch.dtype, compute: torch.dtype
) -> Callable[[Index], Value]:
    """Reads the operand, broadcast to `shape`, in the dtype `compute`.

    A full tensor's elements pass through `common` on their way; numbers and tensors without
    dimensions go there directly, since ATen reads them in its computing dtype.
    """
    if not isinstance(x, Tensor):
        value = lowering.number(x, compute)
        return lambda ix: value
    if x.shape == shape:
        if x.dtype is common or x.dtype is compute:
            return lambda ix: cast(x.at(ix), compute)
        return lambda ix: cast(cast(x.at(ix), common), compute)
    if not x.shape:
        return lambda ix: cast(x.at(()), compute)
    if lowering.is_heavy(x, by_loads=False):
        lowering.realise(x)
    lead = len(shape) - len(x.shape)
    keep = [
        None if size == 1 or is_repeated(size, shape[lead + k]) else lead + k
        for k, size in enumerate(x.shape)
    ]

    def read(ix: Index) -> Value:
        value = x.at(tuple(0 if k is None else ix[k] for k in keep))
        return cast(cast(value, common), compute)

    return read


def pointwise(
    lowering: Lowering,
    operands: Sequence[Operand | None],
    fn: Formula,
    shape: Shape,
    dtype: torch.dtype,
    common: torch.dtype | None = None,
    strides: tuple[Any, ...] | None = None,
) -> Tensor:
    """fn over operands broadcast to `shape`, computed in `common`'s opmath, rounded to `dtype`.

    operands   without those that are None
    """
    given = [x for x in operands if x is not None]
    common = dtype if common is None else common
    compute = opmath(common)
    tensors = [x for x in given if isinstance(x, Tensor)]
    apart = _in_pieces(given, shape)
    if apart is not None:
        dim, starts, parts = apart
        results = tuple(
            pointwise(lowering, part, fn, part_shape, dtype, common) for part, part_shape in parts
        )
        result = lowering.beside(shape, dtype, Pieces(dim, starts, results))
        result.strides = strides
        return result
    readers = [reader(lowering, x, shape, common, compute) for x in given]

    def at(ix: Index) -> Value:
        return cast(fn(*[read(ix) for read in readers]), dtype)

    return lowering.computed(shape, dtype, at, tensors, strides)


def _in_pieces(
    operands: Sequence[Operand], shape: Shape
) -> tuple[int, tuple[Any, ...], list[tuple[list[Operand], Shape]]] | None:
    """Operands cut alike, if one of them lies in pieces and the others can be cut where it is."""
    model: Pieces | None = None
    dim = -1
    for x in operands:
        if isinstance(x, Tensor) and x.pieces is not None and x.storage is None:
            place = len(shape) - len(x.shape) + x.pieces.dim
            if is_repeated(x.shape[x.pieces.dim], shape[place]):
                continue
            if model is None:
                model, dim = x.pieces, place
            elif place != dim or x.pieces.starts != model.starts:
                return None
    if model is None:
        return None
    parts: list[tuple[list[Operand], Shape]] = []
    for k, (start, piece) in enumerate(zip(model.starts, model.tensors, strict=True)):
        length = piece.shape[model.dim]
        cut: list[Operand] = []
        for x in operands:
            if isinstance(x, Tensor):
                place = dim - len(shape) + len(x.shape)
                if place >= 0 and not is_repeated(x.shape[place], shape[dim]):
                    own = x.pieces if x.storage is None else None
                    is_model = own is not None and own.dim == place  # nothing need be known
                    x = own.tensors[k] if own and is_model else narrow(x, place, start, length)
            cut.append(x)
        parts.append((cut, resized(shape, dim, length)))
    return dim, model.starts, parts


# ------------------------------------------------------------------------------ rows


def elementwise(
    fn: Formula, x: Tensor, *others: Operand | None, dtype: torch.dtype | None = None
) -> Tensor:
    """fn in opmath over operands broadcast to the shape of `x`; rounded to `dtype` if given."""
    compute = opmath(x.dtype)
    return pointwise(x.lowering, [x, *others], fn, x.shape, dtype or compute, compute)


def result(
    call: OpCall,
    fn: Formula,
    *operands: Operand | None,
    common: torch.dtype | None = None,
    place: int = 0,
) -> Tensor:
    """The call's result number `place`, computed element by element."""
    meta = call.metas[place]
    return pointwise(call.lowering, operands, fn, meta.shape, meta.dtype, common, meta.strides)


def _register(row: Row, formula: Formula) -> None:
    """The lowering of pointwise ops that have a formula."""

    def handler(call: OpCall, *args: Any, **kwargs: Any) -> Tensor:
        if row.unless is not None and (reason := row.unless(call, *args, **kwargs)) is not None:
            raise NotLowered(reason)
        chosen = [args[k] for k in row.operands]
        rest = [arg for k, arg in enumerate(args) if k not in row.operands]
        common = promote(chosen) if row.to_bool else call.meta.dtype
        if row.rounds or row.to_bool:
            chosen = [_round(call.lowering, x, common) for x in chosen]
        compute = opmath(common)
        rest = [call.lowering.number(x, compute) if isinstance(x, Expr) else x for x in rest]
        applied: Formula = lambda *values: formula(*values, *rest, **kwargs)  # noqa: E731
        return result(call, applied if rest or kwargs else formula, *chosen, common=common)

    lowers(row.overloads)(handler)


for _row in ROWS:
    if _row.formula is not None:
        _register(_row, _row.formula)


def _round(lowering: Lowering, x: Operand, dtype: torch.dtype) -> Operand:
    if isinstance(x, (int, float)):
        return literal(x, dtype)
    if isinstance(x, (Value, Expr)):
        return cast(lowering.number(x, torch.float64 if dtype.is_floating_point else dtype), dtype)
    if not x.shape and x.dtype is not dtype:
        return pointwise(lowering, [x], lambda v: v, (), dtype)
    return x


# ---------------------------------------------------------------------------- demands
# Checks that a call makes whatever becomes of its result: of indices, divisors, probabilities.
#
# Results are lazy, so a check inside one is made where it is used, as far as it is used: not at all
# for `ones(4)[i]`, of which each element is known, and for the first rows alone in `x[i][:2]`. A
# demand is a loop over all that the call takes. In the end those are added that no loop covers.


def unless(wrong: Value, message: int, value: Value) -> Value:
    """`value`; where `wrong` is true, that is reported."""
    return where(op("eq", check(cast(wrong, torch.int64), 1, message), 0), value, 1)


def nonzero(lowering: Lowering, y: Value) -> Value:
    """An integer divisor; zero is reported where eager does, then replaced by one."""
    if y.op == "const" and y.attr != 0:
        return y
    zero = op("eq", y, 0)
    if not lowering.values.profile.raises:
        return where(zero, 1, y)
    return where(zero, 1, unless(zero, lowering.message(RuntimeError, "ZeroDivisionError"), y))


def demand(checked: Callable[..., Value], *tensors: Tensor) -> None:
    """The elements at each place of tensors of one shape must go through `checked`, which has the
    `check`."""
    lowering, shape = tensors[0].lowering, tensors[0].shape
    if 0 in shape:
        return
    value = checked(*(x.at(lowering.axes(shape)) for x in tensors))
    buffer = lowering.buffer(shape, torch.bool)
    loop = Loop(
        buffer,
        lowering.axis_symbols(shape),
        buffer.index(lowering.axes(shape)),
        cast(value, torch.bool),
        stays=True,
        origin=lowering.origin,
    )
    lowering.demands.append((len(lowering.graph.steps), loop))


def make_checks(lowering: Lowering) -> None:
    """Add the loops of demands that no loop covers.

    An error must find the caller's tensors as eager leaves them. So where an error stops what
    follows, all is checked before the first write to an input that no write decides on.
    """
    if not lowering.demands:
        return
    graph, raises = lowering.graph, lowering.values.profile.raises
    steps = graph.steps
    first = first_write(steps)
    since, free = _written(steps, first)
    before, covered = set[Hashable](), set[Hashable]()
    needed = {view.buffer for view in graph.outputs if isinstance(view, View)}
    for k in reversed(range(len(steps))):  # of loops whose results are needed
        step = steps[k]
        if isinstance(step, Extern):
            needed.update(reads(step))
        elif step.buffer in needed or step.buffer.role != "scratch":
            needed.update(reads(step))
            if step.buffer.role != "input" or not raises:
                found = {y for x in _checks(step) for y in (x, _elements(x, step))}
                covered |= found
                before |= found if k < first else set()
    added: dict[int, list[Step]] = {}
    moved: set[int] = set()
    for position, demanded in reversed(lowering.demands):
        checks = _checks(demanded)
        loads = {v.attr[0] for v in walk(checks) if v.op == "load"}
        late = [b for b in loads if since.get(b, position) < position]
        is_early = raises and free.issuperset(late)
        # what is read may be something else at another place of the program
        is_old = not is_early and any(b.role == "input" and b in since for b in loads)
        made = before if is_early else covered
        if is_old or not all({x, _elements(x, demanded)} & made for x in checks):
            added.setdefault(min(position, first) if is_early else position, []).append(demanded)
            while is_early and late:
                moved.add(since[late[-1]])
                late += free.intersection(reads(steps[since[late.pop()]]))
    added.setdefault(first, []).extend(steps[k] for k in sorted(moved, reverse=True))
    graph.steps = [
        each
        for k, step in enumerate([*steps, None])
        for each in (*reversed(added.get(k, ())), *([] if step is None or k in moved else [step]))
    ]


def _written(steps: Sequence[Step], first: int) -> tuple[dict[Buffer, int], set[Buffer]]:
    """What is written from a step on, and where first; and which of it could be before that."""
    since: dict[Buffer, int] = {}
    free: set[Buffer] = set()
    times = Counter(buffer for step in steps for buffer in writes(step))
    for k, step in enumerate(steps[first:], first):
        if isinstance(step, Loop) and free.issuperset(since.keys() & {*reads(step)}):
            if step.buffer.role != "input" and times[step.buffer] == 1:
                free.add(step.buffer)
        for buffer in writes(step):
            since.setdefault(buffer, k)
    return since, free


def _checks(loop: Loop) -> list[Value]:
    values = [v for v in (loop.value, loop.result, loop.which) if v is not None]
    return [v for v in walk([*values, *payloads(loop.index)]) if v.op == "check"]


def _elements(check: Value, loop: Loop) -> Hashable:
    """Equal only for equal checks of the same elements, those of one buffer; else its own."""
    rows: list[Hashable] = []
    number: dict[Value, int] = {}
    loads = 0
    for value in walk([check]):
        attr: Hashable = repr(value.attr)
        if value.op == "load":
            buffer, index = value.attr
            loads += 1
            footprint = _footprint(index, loop.all_axes)
            if footprint is None or value.args:
                return check
            attr = buffer, footprint
        if value.op == "index":
            return check
        number[value] = len(rows)
        rows.append((value.op, value.dtype, attr, *(number[arg] for arg in value.args)))
    return tuple(rows) if loads == 1 else check


def _footprint(index: Size, axes: tuple[Symbol, ...]) -> Hashable | None:
    """Which elements a flat index visits over all axes: the first, then steps and counts."""
    ranges = {axis: axis.hi for axis in axes}
    start = 0
    steps: list[tuple[int, int]] = []
    for monomial, factor in ({(): index} if isinstance(index, int) else index.terms).items():
        count = ranges.get(monomial[0]) if len(monomial) == 1 else None  # type: ignore[arg-type]
        if not monomial:
            start += factor
        elif type(count) is int and count > 0:
            start += min(factor, 0) * (count - 1)
            steps.append((abs(factor), count))
        else:
            return None
    merged: list[tuple[int, int]] = []
    for step, count in sorted(steps):
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = merged[-1][0], merged[-1][1] * count
        elif count != 1:
            merged.append((step, count))
    return start, *merged


# ---------------------------------------------------------------------------- arithmetic
# Pointwise ops that are more than a formula of their operands: checked divisors, choices, halves.
#
# The others are rows of fusee/loops/operators.py.


def _divides(name: str, of_floats: Formula, rounds: int = 2) -> Callable[..., Tensor]:
    """A division by its op of the vocabulary for integers, whose divisor of zero is reported.

    rounds   so many operands, if they are numbers, ATen first rounds to the dtype of floats
    """

    def handler(call: OpCall, x: Operand, y: Operand) -> Tensor:
        lowering, dtype = call.lowering, call.meta.dtype
        if dtype.is_floating_point:
            given = [_round(lowering, v, dtype) for v in (x, y)[:rounds]]
            return result(call, of_floats, *given, *(x, y)[rounds:])
        number = 1 if isinstance(y, Tensor) else y
        single = lowering.computed((), dtype, lambda ix: lowering.number(number, dtype))
        demand(lambda v: nonzero(lowering, cast(v, dtype)), y if isinstance(y, Tensor) else single)
        return result(call, lambda a, b: op(name, a, nonzero(lowering, b)), x, y)

    return handler


_floor_divide = _divides("floordiv", floor_divide, 1)
_truncated = _divides("truncdiv", lambda x, y: op("trunc", x / y), 1)
lowers("floor_divide floor_divide.Scalar")(_floor_divide)
lowers("remainder.Tensor remainder.Scalar remainder.Scalar_Tensor")(
    _divides("remainder", remainder)
)
lowers("fmod.Tensor fmod.Scalar")(_divides("fmod", binary("fmod")))


@lowers("div.Tensor_mode div.Scalar_mode")
def _div_mode(call: OpCall, x: Operand, y: Operand, *, rounding_mode: str | None) -> Tensor:
    if rounding_mode is None:
        return result(call, binary("div"), x, y)
    return _floor_divide(call, x, y) if rounding_mode == "floor" else _truncated(call, x, y)


# ---------------------------------------------------------------------------- powers


@lowers("pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar")
@lowers("float_power.Tensor_Tensor float_power.Scalar float_power.Tensor_Scalar")
def _pow(call: OpCall, x: Operand, exponent: Operand) -> Tensor:
    if not call.meta.dtype.is_floating_point:
        if not isinstance(exponent, (int, float)):
            raise NotLowered("integer power with exponents known only at run time")
        if exponent < 0:
            raise NotLowered("ATen refuses negative powers of integers")
    if isinstance(exponent, (int, float)) and call.op is torch.ops.aten.pow.Tensor_Scalar:
        return result(call, lambda v: power(v, exponent), x)
    return result(call, binary("pow"), x, exponent)


# ---------------------------------------------------------------------------- choices


@lowers("clamp clamp.Tensor")
def _clamp(call: OpCall, x: Tensor, min: Operand | None, max: Operand | None) -> Tensor:
    def fn(value: Value, *given: Value) -> Value:
        low = given[0] if min is not None else None
        return clamp(value, low, given[-1] if max is not None else None)

    return result(call, fn, x, min, max)


@lowers("where.self where.ScalarSelf where.ScalarOther where.Scalar")
def choose(call: OpCall, condition: Tensor, x: Operand, y: Operand) -> Tensor:
    """x where condition, else y."""
    dtype = condition.dtype
    flags = pointwise(call.lowering, [condition], is_true, condition.shape, torch.bool, dtype)

    def fn(flag: Value, a: Value, b: Value) -> Value:
        # operands come in the result's dtype; a bool survives the way there and back
        inner = flag
        while inner.op == "cast" and not is_bool(inner):
            inner = inner.args[0]
        return where(inner if is_bool(inner) else is_true(flag), a, b)

    return result(call, fn, flags, x, y)


lowers("masked_fill.Scalar masked_fill.Tensor")(
    lambda call, x, mask, value: choose(call, mask, value, x)
)


@lowers("nan_to_num")
def _nan_to_num(
    call: OpCall, x: Tensor, nan: float | None, posinf: float | None, neginf: float | None
) -> Tensor:
    if not call.meta.dtype.is_floating_point:
        return x
    info = torch.finfo(call.meta.dtype)
    top = info.max if posinf is None else posinf
    bottom = info.min if neginf is None else neginf

    def fn(v: Value) -> Value:
        v = where(op("eq", v, math.inf), top, where(op("eq", v, -math.inf), bottom, v))
        return where(op("isnan", v), 0.0 if nan is None else nan, v)

    return result(call, fn, x)


# ---------------------------------------------------------------------------- several results


@lowers("log_sigmoid_forward")
def _log_sigmoid_forward(call: OpCall, x: Tensor) -> tuple[Tensor, Tensor]:
    # the second result serves only the backward pass of CUDA builds or of this kernel's vectors
    second = call.metas[1]
    if second.shape != x.shape:
        tail = call.lowering.filled(second.shape, 0, second.dtype)
    else:
        tail = pointwise(call.lowering, [x], lambda v: exp(-op("abs", v)), x.shape, second.dtype)
    return result(call, log_sigmoid, x), tail


@lowers("_prelu_kernel_backward")
def _prelu_backward(call: OpCall, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    operands = grad, x, weight
    return (
        result(call, lambda g, v, w: where(v > 0, g, w * g), *operands),
        result(call, lambda g, v, w: where(v > 0, 0, v * g), *operands, place=1),
    )


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    half = floordiv(x.shape[dim], 2)
    return narrow(x, dim, 0, half), narrow(x, dim, half, half)


lowers("glu")(
    lambda call, x, dim: result(call, lambda a, b: a * sigmoid(b), *_halves(x, dim % len(x.shape)))
)


@lowers("glu_backward")
def _glu_backward(call: OpCall, grad: Tensor, x: Tensor, dim: int) -> Tensor:
    dim %= len(x.shape)

    def of_right(g: Value, a: Value, b: Value) -> Value:
        s = sigmoid(b)
        return (1 - s) * s * g * a

    formulas: tuple[Formula, Formula] = (lambda g, a, b: sigmoid(b) * g), of_right
    left, right = _halves(x, dim)
    parts = tuple(
        pointwise(call.lowering, [grad, left, right], fn, grad.shape, call.meta.dtype)
        for fn in formulas
    )
    return call.lowering.beside(x.shape, call.meta.dtype, Pieces(dim, (0, left.shape[dim]), parts))


# ---------------------------------------------------------------------------- creation
# Tensors made from nothing: fills, ranges, triangles. Their elements follow from the index.


@lowers("full full_like fill.Scalar fill.Tensor")
def filled(call: OpCall, *given: Operand) -> Tensor:
    """The call's result with every element the last argument."""
    meta, number = call.meta, given[-1]
    if isinstance(number, Tensor):
        return expand(converted(reshape(number, ()), meta.dtype), meta.shape)
    return call.lowering.filled(meta.shape, number, meta.dtype)


@lowers("zeros_like zero")
# nobody may rely on what uninitialised memory holds; zeros are as good as any
@lowers("empty.memory_format empty_like new_empty empty_strided new_empty_strided empty_permuted")
def _zeros(call: OpCall) -> Tensor:
    return filled(call, 0)


lowers("ones_like")(lambda call: filled(call, 1))


# ---------------------------------------------------------------------------- ranges


@lowers("arange arange.start arange.start_step")
def _arange(call: OpCall, *bounds: Any) -> Tensor:
    """start + i * step along the only dimension."""
    start, step = (0, 1) if len(bounds) == 1 else (bounds[0], 1 if len(bounds) == 2 else bounds[2])
    meta, lowering = call.meta, call.lowering
    # ATen truncates before it steps
    first, stride = (int(n) if isinstance(n, float) else n for n in (start, step))
    # ATen steps in double for float and in float for the halves
    wide = torch.float64 if meta.dtype is torch.float32 else opmath(meta.dtype)

    def at(ix: Index) -> Value:
        if not meta.dtype.is_floating_point:
            return lowering.values.index(first + ix[0] * stride, meta.dtype)
        place = lowering.values.index(ix[0], wide)
        begin = lowering.number(start, wide)
        return cast(begin + place * lowering.number(step, wide), meta.dtype)

    return lowering.computed(meta.shape, meta.dtype, at)


@lowers("linspace linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor")
def _linspace(call: OpCall, start: Operand, end: Operand) -> Tensor:
    """ATen counts from whichever end is nearer, so that both ends are exact.

    source   aten/src/ATen/native/cpu/RangeFactoriesKernel.cpp; its products and sums are contracted
             in float, and rounded one by one in the halves
    """
    meta, lowering = call.meta, call.lowering
    count, dtype = meta.shape[0], meta.dtype
    halves = dtype in HALVES
    wide = opmath(dtype) if dtype.is_floating_point else torch.float64
    if count == 1:
        return filled(call, start)

    def rounded(x: Value) -> Value:
        return cast(cast(x, dtype), wide) if halves else x

    def bound(x: Operand) -> Value:
        value = cast(x.at(()), dtype) if isinstance(x, Tensor) else lowering.number(x, dtype)
        return cast(value, wide)

    def number(x: Size) -> Value:
        return rounded(lowering.values.index(x, wide))

    def stepped(x: Value, step: Value, times: Value) -> Value:
        return x + rounded(step * times) if halves else op("fma", step, times, x)

    def at(ix: Index) -> Value:
        first, last = bound(start), bound(end)
        step = rounded(rounded(last - first) / number(count - 1))
        low = stepped(first, step, number(ix[0]))
        high = stepped(last, -step, number(count - 1 - ix[0]))
        return cast(where(lowering.values.index(ix[0] - count // 2) < 0, low, high), dtype)

    tensors = [x for x in (start, end) if isinstance(x, Tensor)]
    return lowering.computed(meta.shape, dtype, at, tensors)


# ---------------------------------------------------------------------------- triangles


@lowers("eye eye.m")
def _eye(call: OpCall) -> Tensor:
    meta, lowering = call.meta, call.lowering
    one = lowering.number(1, meta.dtype)

    def at(ix: Index) -> Value:
        return where(op("eq", lowering.values.index(ix[0] - ix[1]), 0), one, 0)

    return lowering.computed(meta.shape, meta.dtype, at)


def _triangle(name: str) -> Callable[..., Tensor]:
    def handler(call: OpCall, x: Tensor, diagonal: Size) -> Tensor:
        def at(ix: Index) -> Value:
            place = call.lowering.values.index(ix[-1] - ix[-2] - diagonal)
            return where(op(name, place, 0), x.at(ix), 0)

        return call.computed(at, x)

    return handler


lowers("tril")(_triangle("le"))
lowers("triu")(_triangle("ge"))

# ---------------------------------------------------------------------------- random
# Random numbers: drawn into memory by a call, in program order; the rest is loops.


@lowers("bernoulli.p")
def _bernoulli(call: OpCall, x: Tensor, p: Number, *, generator: torch.Generator | None) -> Tensor:
    """A mask of booleans, whatever the dtype of `x`, whose elements nobody reads."""
    meta, lowering, spec = call.meta, call.lowering, call.call_of(call.op)
    if generator is not None:
        raise NotLowered("a generator of its own")
    if not isinstance(p, (int, float)):
        raise NotLowered("a probability that is no number")
    if spec is None:
        raise NotLowered("drawn by ATen")
    buffer = lowering.buffer(meta.shape, torch.bool, meta.strides)
    reason = "random numbers of ATen's generator, in eager's order"
    lowering.call(str(call.op), spec.out, (p,), (buffer,), reason, out=True)
    return converted(lowering.whole(buffer), meta.dtype)
