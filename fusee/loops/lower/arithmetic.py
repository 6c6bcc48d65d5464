"""The table of pointwise ops: arithmetic, comparisons, logic, elementary functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fusee.loops.ir import Value, cast, op, where
from fusee.loops.lower.demands import demand
from fusee.loops.lower.formulas import (
    _infinite,
    _whole,
    abs_,
    add,
    addcdiv,
    addcmul,
    binary,
    clamp,
    const,
    floor_divide_float,
    fmax,
    fmin,
    frac,
    heaviside,
    is_bool,
    is_float,
    is_true,
    isfinite,
    isinf,
    isnan,
    lerp,
    logaddexp,
    logaddexp2,
    maximum,
    minimum,
    mul,
    nonzero,
    not_,
    reciprocal,
    remainder_float,
    round_decimals,
    rsub,
    shift_left,
    shift_right,
    sigmoid,
    sign,
    signbit,
    sinc,
    sub,
    test,
    unary,
    xlogy,
)
from fusee.loops.lower.pointwise import Operand, Scalar, pointwise, row
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Number, Tensor

# ------------------------------------------------------------------------------ rows

BOTH = ("Tensor", "Scalar")

row(named("add", *BOTH), add, 2)
row(named("sub", *BOTH), sub, 2)
row(named("rsub", *BOTH), rsub, 2)
row(named("mul", *BOTH), mul, 2)
row(named("div true_divide", *BOTH), binary("div"), 2)
row(named("maximum"), maximum, 2, rounds=True)
row(named("minimum"), minimum, 2, rounds=True)
row(named("fmax"), fmax, 2)
row(named("fmin"), fmin, 2)
row(named("atan2"), binary("atan2"), 2)
row(named("hypot"), binary("hypot"), 2)
row(named("nextafter"), binary("nextafter"), 2)
row(named("copysign", *BOTH), binary("copysign"), 2)
row(named("logaddexp"), logaddexp, 2)
row(named("logaddexp2"), logaddexp2, 2)
row(named("xlogy", "Tensor", "Scalar_Other", "Scalar_Self"), xlogy, 2)
row(
    named("special_xlog1py", "default", "other_scalar", "self_scalar"),
    lambda x, y: xlogy(x, y, "log1p"),
    2,
)
row(named("heaviside"), heaviside, 2)
row(named("lerp", *BOTH), lerp, 3)
row(named("addcmul"), addcmul, 3)
row(named("addcdiv"), addcdiv, 3)

for _name in "eq ne lt le gt ge".split():
    row(named(_name, *BOTH), binary(_name), 2, returns_bool=True)
row(named("logical_and"), lambda x, y: op("and", is_true(x), is_true(y)), 2, returns_bool=True)
row(named("logical_or"), lambda x, y: op("or", is_true(x), is_true(y)), 2, returns_bool=True)
row(named("logical_xor"), lambda x, y: op("xor", is_true(x), is_true(y)), 2, returns_bool=True)
row(named("logical_not"), lambda x: not_(is_true(x)), returns_bool=True)
row(named("bitwise_not"), not_)
for _name in "and or xor".split():
    row(
        named(f"bitwise_{_name} __{_name}__", "Tensor", "Scalar", "Scalar_Tensor"), binary(_name), 2
    )
row(named("bitwise_left_shift", "Tensor", "Tensor_Scalar", "Scalar_Tensor"), shift_left, 2)
row(named("bitwise_right_shift", "Tensor", "Tensor_Scalar", "Scalar_Tensor"), shift_right, 2)
row(named("__lshift__", *BOTH), shift_left, 2)
row(named("__rshift__", *BOTH), shift_right, 2)

for _name in (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh atanh erf erfc lgamma sqrt rsqrt"
).split():
    row(named(_name), unary(_name))
row(named("neg"), unary("neg"))
row(named("abs"), abs_)
row(named("reciprocal"), reciprocal)
row(named("square"), lambda x: mul(x, x))
row(named("sign sgn"), sign)
row(named("sinc"), sinc)
row(named("sigmoid"), sigmoid)
for _name in "floor ceil trunc".split():
    row(named(_name), _whole(_name))
row(named("fix"), _whole("trunc"))
row(named("round", "default", "decimals"), round_decimals)
row(named("frac"), frac)
row(named("deg2rad"), lambda x: op("mul", x, const(x, math.pi / 180)))
row(named("rad2deg"), lambda x: op("mul", x, const(x, 180 / math.pi)))
row(named("isnan"), isnan, returns_bool=True)
row(named("isinf"), isinf, returns_bool=True)
row(named("isfinite"), isfinite, returns_bool=True)
row(named("isposinf"), _infinite(math.inf), returns_bool=True)
row(named("isneginf"), _infinite(-math.inf), returns_bool=True)
row(named("signbit"), signbit, returns_bool=True)

# ------------------------------------------------------------------------------ division


def _whole_numbers(call: Call, x: Operand, y: Operand, name: str) -> Tensor:
    """Integers divided: a divisor of zero is reported."""
    lowering, dtype = call.lowering, call.meta.dtype
    number: Number = 1 if isinstance(y, Tensor) else y
    single = lowering.computed((), dtype, lambda ix: lowering.number(number, dtype))
    demand(y if isinstance(y, Tensor) else single, lambda v: nonzero(lowering, cast(v, dtype)))
    return _binary(call, x, y, lambda a, b: op(name, a, nonzero(lowering, b)))


def _binary(call: Call, x: Operand, y: Operand, fn: Scalar) -> Tensor:
    meta = call.meta
    return pointwise(call.lowering, [x, y], fn, meta.shape, meta.dtype, None, meta.strides)


@lowers(*named("div", "Tensor_mode", "Scalar_mode"))
def _div_mode(call: Call, x: Operand, y: Operand, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode == "floor":
        return _floor_divide(call, x, y)
    if rounding_mode is None:
        return _binary(call, x, y, binary("div"))
    if call.meta.dtype.is_floating_point:
        return _binary(call, x, y, lambda a, b: op("trunc", op("div", a, b)))
    return _whole_numbers(call, x, y, "truncdiv")


@lowers(*named("floor_divide", "default", "Scalar"))
def _floor_divide(call: Call, x: Operand, y: Operand) -> Tensor:
    if call.meta.dtype.is_floating_point:
        return _binary(call, x, y, floor_divide_float)
    return _whole_numbers(call, x, y, "floordiv")


@lowers(*named("remainder", "Tensor", "Scalar", "Scalar_Tensor"))
def _remainder(call: Call, x: Operand, y: Operand) -> Tensor:
    if call.meta.dtype.is_floating_point:
        return _binary(call, x, y, remainder_float)
    return _whole_numbers(call, x, y, "remainder")


@lowers(*named("fmod", "Tensor", "Scalar"))
def _fmod(call: Call, x: Operand, y: Operand) -> Tensor:
    if call.meta.dtype.is_floating_point:
        return _binary(call, x, y, binary("fmod"))
    return _whole_numbers(call, x, y, "fmod")


# ------------------------------------------------------------------------------ powers


def power(x: Value, exponent: float | int) -> Value:
    """x ** exponent for a literal; the cases that ATen computes exactly are products here too."""
    if not is_float(x):
        return _integer_power(x, int(exponent))
    exact: dict[float, Callable[[], Value]] = {
        0.5: lambda: op("sqrt", x),
        1.0: lambda: x,
        2.0: lambda: op("mul", x, x),
        3.0: lambda: op("mul", op("mul", x, x), x),
        -0.5: lambda: op("rsqrt", x),
        -1.0: lambda: reciprocal(x),
        -2.0: lambda: reciprocal(op("mul", x, x)),
    }
    special = exact.get(float(exponent))
    return special() if special else op("pow", x, const(x, exponent))


def _integer_power(x: Value, exponent: int) -> Value:
    if is_bool(x):
        return x if exponent else const(x, True)
    result: Value | None = None
    square = x
    while exponent:
        if exponent & 1:
            result = square if result is None else op("mul", result, square)
        exponent >>= 1
        square = op("mul", square, square) if exponent else square
    return const(x, 1) if result is None else result


def _pow_by_tensor(call: Call, x: Operand, y: Operand) -> str | None:
    if call.meta.dtype.is_floating_point:
        return None
    return "integer power with exponents known only at run time"


def _to_negative(call: Call, x: Operand, exponent: Operand) -> str | None:
    if call.meta.dtype.is_floating_point or not isinstance(exponent, (int, float)):
        return None
    return "ATen refuses negative powers of integers" if exponent < 0 else None


@lowers(*named("pow", "Tensor_Scalar"), unless=_to_negative)
def _pow_scalar(call: Call, x: Tensor, exponent: Number) -> Tensor:
    if not isinstance(exponent, (int, float)):
        return _binary(call, x, exponent, binary("pow"))
    return _unary(call, x, lambda v: power(v, exponent))


@lowers(*named("pow", "Tensor_Tensor", "Scalar"), unless=_pow_by_tensor)
@lowers(*named("float_power", "Tensor_Tensor", "Scalar", "Tensor_Scalar"))
def _pow(call: Call, x: Operand, y: Operand) -> Tensor:
    return _binary(call, x, y, binary("pow"))


def _unary(call: Call, x: Operand, fn: Scalar) -> Tensor:
    meta = call.meta
    return pointwise(call.lowering, [x], fn, meta.shape, meta.dtype, None, meta.strides)


# ------------------------------------------------------------------------------ choices


@lowers(*named("clamp", "default", "Tensor"))
def _clamp(call: Call, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    bounds = [bound for bound in (min, max) if bound is not None]

    def fn(value: Value, *given: Value) -> Value:
        low = given[0] if min is not None else None
        return clamp(value, low, given[-1] if max is not None else None)

    meta = call.meta
    return pointwise(call.lowering, [x, *bounds], fn, meta.shape, meta.dtype, None, meta.strides)


row(named("clamp_min", "default", "Tensor"), maximum, 2)
row(named("clamp_max", "default", "Tensor"), minimum, 2)


@lowers(*named("where", "self", "ScalarSelf", "ScalarOther", "Scalar"))
def _where(call: Call, condition: Tensor, x: Operand, y: Operand) -> Tensor:
    return choose(call, condition, x, y)


def choose(call: Call, condition: Tensor, x: Operand, y: Operand) -> Tensor:
    """x where condition, else y."""
    meta, lowering = call.meta, call.lowering
    flags = pointwise(lowering, [condition], is_true, condition.shape, torch.bool, condition.dtype)
    picked = [flags, x, y]

    def fn(flag: Value, a: Value, b: Value) -> Value:
        # operands come in the result's dtype; a bool survives the way there and back
        return where(_flag(flag), a, b)

    return pointwise(lowering, picked, fn, meta.shape, meta.dtype, None, meta.strides)


def _flag(value: Value) -> Value:
    inner = value
    while inner.op == "cast":
        inner = inner.args[0]
        if inner.dtype is torch.bool:
            return inner
    return is_true(value)


@lowers(*named("masked_fill", "Scalar", "Tensor"))
def _masked_fill(call: Call, x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    return choose(call, mask, value, x)


@lowers(*named("nan_to_num"))
def _nan_to_num(
    call: Call,
    x: Tensor,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Tensor:
    if not call.meta.dtype.is_floating_point:
        return x
    info = torch.finfo(call.meta.dtype)
    top = info.max if posinf is None else posinf
    bottom = info.min if neginf is None else neginf

    def fn(v: Value) -> Value:
        v = where(
            test("eq", v, math.inf),
            const(v, top),
            where(test("eq", v, -math.inf), const(v, bottom), v),
        )
        return where(op("isnan", v), const(v, 0.0 if nan is None else nan), v)

    return _unary(call, x, fn)
