"""Element-wise ATen ops: how operands are brought to one dtype and shape, and the table of ops.

ATen computes every op in one dtype: the result's, float32 for bfloat16 and float16, or, for ops
that return bool, what its operands promote to. Each op rounds to its result's dtype at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fusee.loops.ir import (
    Extern,
    Loop,
    LoopGraph,
    Value,
    View,
    cast,
    check,
    op,
    payloads,
    walk,
    where,
)
from fusee.loops.lower.tensor import (
    HANDLERS,
    REFUSALS,
    Call,
    Index,
    Lowering,
    Number,
    Pieces,
    Refusal,
    Shape,
    Tensor,
    literal,
    opmath,
)
from fusee.loops.lower.views import narrow
from fusee.loops.schedule import reads
from fusee.sym.expr import Expr, Size, Symbol, known_eq

# ---------------------------------------------------------------------------- pointwise


Operand = Tensor | Number
Scalar = Callable[..., Value]

# ------------------------------------------------------------------------------ promotion


def _rank(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 2 if dtype.is_floating_point else 1


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """torch's rule for a group of operands that outranks another."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    if _rank(lower) > _rank(higher):
        return torch.promote_types(higher, lower)
    return higher


def _number_dtype(x: Number) -> torch.dtype:
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, float):
        return torch.get_default_dtype()
    if isinstance(x, Value) and x.dtype.is_floating_point:
        return torch.get_default_dtype()
    return torch.int64


def promote(operands: Sequence[Operand]) -> torch.dtype:
    """torch.result_type: tensors with dimensions, then those without, then numbers."""
    groups: list[torch.dtype | None] = [None, None, None]
    for x in operands:
        if isinstance(x, Tensor):
            level, dtype = (0 if x.shape else 1), x.dtype
        else:
            level, dtype = 2, _number_dtype(x)
        known = groups[level]
        groups[level] = dtype if known is None else torch.promote_types(known, dtype)
    result = _combine(_combine(groups[0], groups[1]), groups[2])
    assert result is not None
    return result


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
    if lowering.is_costly(x):
        lowering.realise(x)
    lead = len(shape) - len(x.shape)
    keep = [None if size == 1 else lead + k for k, size in enumerate(x.shape)]

    def read(ix: Index) -> Value:
        value = x.at(tuple(0 if k is None else ix[k] for k in keep))
        return cast(cast(value, common), compute)

    return read


def pointwise(
    lowering: Lowering,
    operands: Sequence[Operand],
    fn: Scalar,
    shape: Shape,
    dtype: torch.dtype,
    common: torch.dtype | None = None,
    strides: tuple[Any, ...] | None = None,
) -> Tensor:
    """fn over operands broadcast to `shape`, computed in `common`'s opmath, rounded to `dtype`."""
    common = dtype if common is None else common
    compute = opmath(common)
    tensors = [x for x in operands if isinstance(x, Tensor)]
    apart = _in_pieces(operands, shape)
    if apart is not None:
        dim, starts, parts = apart
        results = tuple(
            pointwise(lowering, part, fn, part_shape, dtype, common) for part, part_shape in parts
        )
        result = lowering.beside(shape, dtype, Pieces(dim, starts, results))
        result.strides = strides
        return result
    readers = [reader(lowering, x, shape, common, compute) for x in operands]

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
            if model is None:
                model, dim = x.pieces, place
            elif place != dim or x.pieces.starts != model.starts:
                return None
    if model is None:
        return None
    own = model.tensors[0]
    lead = len(shape) - len(own.shape)
    parts: list[tuple[list[Operand], Shape]] = []
    for start, piece in zip(model.starts, model.tensors, strict=True):
        length = piece.shape[dim - lead]
        cut: list[Operand] = []
        for x in operands:
            place = dim if not isinstance(x, Tensor) else dim - len(shape) + len(x.shape)
            if isinstance(x, Tensor) and place >= 0 and known_eq(x.shape[place], shape[dim]):
                cut.append(narrow(x, place, start, length))
            else:
                cut.append(x)
        parts.append((cut, (*shape[:dim], length, *shape[dim + 1 :])))
    return dim, model.starts, parts


# ------------------------------------------------------------------------------ rows


def row(
    overloads: Sequence[OpOverload],
    fn: Scalar,
    operands: int | tuple[int, ...] = 1,
    *,
    rounds: bool = False,
    returns_bool: bool = False,
    unless: Refusal | None = None,
) -> None:
    """Register pointwise ops that compute `fn`.

    operands      how many of the leading arguments are operands, or their positions; the other
                  arguments go to fn by position after them and by name
    returns_bool  computed in the dtype that the operands promote to, not in the result's
    rounds        numbers are first rounded to the result's dtype, as ATen does for these ops
    """
    places = tuple(range(operands)) if isinstance(operands, int) else operands

    def handler(call: Call, *args: Any, **kwargs: Any) -> Tensor:
        chosen = [args[k] for k in places]
        rest = [arg for k, arg in enumerate(args) if k not in places]
        meta = call.meta
        common = promote(chosen) if returns_bool else meta.dtype
        if rounds or returns_bool:
            chosen = [_round(call.lowering, x, common) for x in chosen]
        bound: Scalar = fn
        if rest or kwargs:

            def bound(*values: Value) -> Value:
                return fn(*values, *rest, **kwargs)

        return pointwise(call.lowering, chosen, bound, meta.shape, meta.dtype, common, meta.strides)

    for overload in overloads:
        HANDLERS[overload] = handler
        if unless is not None:
            REFUSALS[overload] = unless


def _round(lowering: Lowering, x: Operand, dtype: torch.dtype) -> Operand:
    if isinstance(x, (int, float)):
        return literal(x, dtype)
    if isinstance(x, (Value, Expr)):
        return cast(lowering.number(x, torch.float64 if dtype.is_floating_point else dtype), dtype)
    if not x.shape and x.dtype is not dtype:
        return pointwise(lowering, [x], lambda v: v, (), dtype)
    return x


# ---------------------------------------------------------------------------- formulas
# Scalar formulas: what pointwise ops compute, from Values to a Value.


def const(like: Value, number: float | int | bool) -> Value:
    """A literal of the dtype of `like`."""
    return like.table.const(literal(number, like.dtype), like.dtype)


def is_float(x: Value) -> bool:
    return x.dtype.is_floating_point


def is_bool(x: Value) -> bool:
    return x.dtype is torch.bool


def unary(name: str) -> Scalar:
    return lambda x: op(name, x)


def binary(name: str) -> Scalar:
    return lambda x, y: op(name, x, y)


def test(name: str, x: Value, number: float | int) -> Value:
    return op(name, x, const(x, number))


def is_true(x: Value) -> Value:
    return x if is_bool(x) else op("ne", x, const(x, 0))


def _scaled(x: Value, alpha: Any) -> Value:
    if isinstance(alpha, (int, float)) and alpha == 1:
        return x
    factor = (
        x.table.index(alpha, x.dtype) if not isinstance(alpha, (int, float)) else const(x, alpha)
    )
    return op("and", x, factor) if is_bool(x) else op("mul", x, factor)


def add(x: Value, y: Value, alpha: Any = 1) -> Value:
    return op("or" if is_bool(x) else "add", x, _scaled(y, alpha))


def sub(x: Value, y: Value, alpha: Any = 1) -> Value:
    return op("sub", x, _scaled(y, alpha))


def rsub(x: Value, y: Value, alpha: Any = 1) -> Value:
    return sub(y, x, alpha)


def mul(x: Value, y: Value) -> Value:
    return op("and" if is_bool(x) else "mul", x, y)


def not_(x: Value) -> Value:
    return op("not", x)


def maximum(x: Value, y: Value) -> Value:
    return op("or" if is_bool(x) else "maximum", x, y)


def minimum(x: Value, y: Value) -> Value:
    return op("and" if is_bool(x) else "minimum", x, y)


def fmax(x: Value, y: Value) -> Value:
    if not is_float(x):
        return maximum(x, y)
    return where(op("isnan", x), y, where(op("isnan", y), x, op("maximum", x, y)))


def fmin(x: Value, y: Value) -> Value:
    if not is_float(x):
        return minimum(x, y)
    return where(op("isnan", x), y, where(op("isnan", y), x, op("minimum", x, y)))


def clamp(x: Value, low: Value | None, high: Value | None) -> Value:
    """Bounds that are NaN make the result NaN; the upper bound wins."""
    if low is not None:
        x = maximum(x, low)
    return x if high is None else minimum(x, high)


def unless(wrong: Value, message: int, value: Value) -> Value:
    """`value`; where `wrong` is true, that is reported."""
    checked = check(cast(wrong, torch.int64), 1, message)
    return where(op("eq", checked, const(checked, 0)), value, const(value, 1))


def nonzero(lowering: Lowering, y: Value) -> Value:
    """An integer divisor; zero is reported as eager does, then replaced by one."""
    if y.op == "const" and y.attr != 0:
        return y
    zero = op("eq", y, const(y, 0))
    message = lowering.message(RuntimeError, "ZeroDivisionError")
    return where(zero, const(y, 1), unless(zero, message, y))


def remainder_float(x: Value, y: Value) -> Value:
    """ATen: fmod moved to the divisor's sign."""
    rest = op("fmod", x, y)
    other_sign = op("ne", test("lt", y, 0), test("lt", rest, 0))
    return where(op("and", test("ne", rest, 0), other_sign), op("add", rest, y), rest)


def floor_divide_float(x: Value, y: Value) -> Value:
    """ATen's div_floor_floating (c10/util/generic_math.h): Python's float floor division."""
    rest = op("fmod", x, y)
    quotient = op("div", op("sub", x, rest), y)
    other_sign = op("ne", test("lt", y, 0), test("lt", rest, 0))
    lower = op("and", test("ne", rest, 0), other_sign)
    quotient = where(lower, op("sub", quotient, const(x, 1)), quotient)
    floored = op("floor", quotient)
    high = test("gt", op("sub", quotient, floored), 0.5)
    floored = where(high, op("add", floored, const(x, 1)), floored)
    signed_zero = op("copysign", const(x, 0), op("div", x, y))
    result = where(test("ne", quotient, 0), floored, signed_zero)
    return where(test("eq", y, 0), op("div", x, y), result)


def abs_(x: Value) -> Value:
    return x if x.dtype in (torch.bool, torch.uint8) else op("abs", x)


def sign(x: Value) -> Value:
    if is_bool(x):
        return x
    one, zero = const(x, 1), const(x, 0)
    if x.dtype is torch.uint8:
        return where(test("ne", x, 0), one, zero)
    return op("sub", where(test("gt", x, 0), one, zero), where(test("lt", x, 0), one, zero))


def reciprocal(x: Value) -> Value:
    return op("div", const(x, 1), x)


def sigmoid(x: Value) -> Value:
    return reciprocal(op("add", const(x, 1), op("exp", op("neg", x))))


def isfinite(x: Value) -> Value:
    if not is_float(x):
        return x.table.const(True, torch.bool)
    return not_(op("or", op("isnan", x), op("isinf", x)))


def isnan(x: Value) -> Value:
    return op("isnan", x) if is_float(x) else x.table.const(False, torch.bool)


def isinf(x: Value) -> Value:
    return op("isinf", x) if is_float(x) else x.table.const(False, torch.bool)


def _infinite(sign_of: float) -> Scalar:
    def fn(x: Value) -> Value:
        return test("eq", x, sign_of) if is_float(x) else x.table.const(False, torch.bool)

    return fn


def signbit(x: Value) -> Value:
    if is_float(x):
        return op("signbit", x)
    if x.dtype in (torch.bool, torch.uint8):
        return x.table.const(False, torch.bool)
    return test("lt", x, 0)


def _whole(name: str) -> Scalar:
    """Rounding, which leaves integers alone."""
    return lambda x: op(name, x) if is_float(x) else x


def round_decimals(x: Value, decimals: int = 0) -> Value:
    if not is_float(x) or decimals == 0:
        return op("round", x) if is_float(x) else x
    scale = const(x, float(10 ** abs(decimals)))
    there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
    return op(back, op("round", op(there, x, scale)), scale)


def frac(x: Value) -> Value:
    return op("sub", x, op("trunc", x))


def heaviside(x: Value, y: Value) -> Value:
    positive = where(test("gt", x, 0), const(x, 1), const(x, 0))
    return where(test("eq", x, 0), y, positive)


def xlogy(x: Value, y: Value, log: str = "log") -> Value:
    result = where(test("eq", x, 0), const(x, 0), op("mul", x, op(log, y)))
    return where(op("isnan", y), y, result)


def logaddexp(x: Value, y: Value) -> Value:
    """max + log1p(exp(-|x - y|)), and x itself where both are the same infinity."""
    same = op("and", op("eq", x, y), op("isinf", x))
    gap = op("neg", op("abs", op("sub", x, y)))
    return where(same, x, op("add", op("maximum", x, y), op("log1p", op("exp", gap))))


def logaddexp2(x: Value, y: Value) -> Value:
    same = op("and", op("eq", x, y), op("isinf", x))
    gap = op("neg", op("abs", op("sub", x, y)))
    spread = op("log2", op("add", const(x, 1), op("exp2", gap)))
    return where(same, x, op("add", op("maximum", x, y), spread))


def sinc(x: Value) -> Value:
    angle = op("mul", x, const(x, math.pi))
    return where(test("eq", x, 0), const(x, 1), op("div", op("sin", angle), angle))


def lerp(start: Value, end: Value, weight: Value) -> Value:
    gap = op("sub", end, start)
    low = op("add", start, op("mul", weight, gap))
    high = op("sub", end, op("mul", gap, op("sub", const(weight, 1), weight)))
    return where(op("lt", abs_(weight), const(weight, 0.5)), low, high)


def addcmul(x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    return op("add", x, op("mul", _scaled(a, value), b))


def addcdiv(x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    return op("add", x, op("div", _scaled(a, value), b))


def shift_left(x: Value, by: Value) -> Value:
    bits = x.dtype.itemsize * 8
    wide = (
        op("or", test("lt", by, 0), test("ge", by, bits))
        if by.dtype.is_signed
        else test("ge", by, bits)
    )
    return where(wide, const(x, 0), op("shl", x, where(wide, const(by, 0), by)))


def shift_right(x: Value, by: Value) -> Value:
    """Shifts that are negative or too wide fill with the sign, as ATen's."""
    most = x.dtype.itemsize * 8 - (1 if x.dtype.is_signed else 0)
    wide = (
        op("or", test("lt", by, 0), test("ge", by, most))
        if by.dtype.is_signed
        else test("ge", by, most)
    )
    if x.dtype.is_signed:
        return op("shr", x, where(wide, const(by, most), by))
    return where(wide, const(x, 0), op("shr", x, where(wide, const(by, 0), by)))


# ---------------------------------------------------------------------------- demands
# Checks that a call makes whatever becomes of its result: of indices, divisors, probabilities.
#
# Results are lazy, so a check inside one is made where it is used, as far as it is used: not at all
# for `ones(4)[i]`, of which each element is known, and for the first rows alone in `x[i][:2]`. A
# demand is a loop over all that the call takes. In the end those are added that no loop covers.


def demand(tensor: Tensor, checked: Callable[[Value], Value]) -> None:
    """Each element of `tensor` must go through `checked`, which has the `check`."""
    lowering, shape = tensor.lowering, tensor.shape
    if 0 in shape:
        return
    value = checked(tensor.at(lowering.axes(shape)))
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
    """Add the loops of demands that no loop covers."""
    steps = lowering.graph.steps
    made = list(_made(lowering.graph)) if lowering.demands else []
    written = {step.buffer for step in steps if isinstance(step, Loop)}
    covered = {_elements(x, loop) for x, loop in made} | {x for x, _ in made}
    for position, demanded in reversed(lowering.demands):
        for x in _checks(demanded):
            found = {x, _elements(x, demanded)} & covered
            if not found or any(load.attr[0] in written for load in _written(x)):
                steps.insert(position, demanded)
                break


def _written(x: Value) -> list[Value]:
    """Loads from what may hold something else at another place of the program."""
    return [v for v in walk([x]) if v.op == "load" and v.attr[0].role == "input"]


def _made(graph: LoopGraph) -> Iterator[tuple[Value, Loop]]:
    """The checks of loops whose results are needed."""
    needed = {view.buffer for view in graph.outputs if isinstance(view, View)}
    for step in reversed(graph.steps):
        if isinstance(step, Extern):
            needed.update(reads(step))
        elif step.buffer in needed or step.buffer.role != "scratch":
            needed.update(reads(step))
            for x in _checks(step):
                yield x, step


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
            footprint = _footprint(index, (*loop.axes, *loop.reduce_axes))
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
        count = ranges.get(monomial[0]) if len(monomial) == 1 else None  # type: ignore[call-overload]
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
