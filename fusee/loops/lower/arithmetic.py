"""Pointwise ops that are more than a formula of their operands: checked divisors, choices, halves.

The others are rows of fusee/loops/operators.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fusee.loops.ir import Value, cast, op, where
from fusee.loops.lower.pointwise import Operand, demand, nonzero, pointwise, result
from fusee.loops.lower.tensor import Call, Pieces, Tensor, lowers
from fusee.loops.lower.views import narrow
from fusee.loops.operators import (
    BOTH,
    Formula,
    binary,
    clamp,
    exp,
    floor_divide,
    is_bool,
    is_true,
    log_sigmoid,
    named,
    power,
    remainder,
    sigmoid,
)
from fusee.sym.expr import floordiv

# ---------------------------------------------------------------------------- division


def _divides(name: str, of_floats: Formula) -> Callable[..., Tensor]:
    """A division by its op of the vocabulary for integers, whose divisor of zero is reported."""

    def handler(call: Call, x: Operand, y: Operand) -> Tensor:
        lowering, dtype = call.lowering, call.meta.dtype
        if dtype.is_floating_point:
            return result(call, of_floats, x, y)
        number = 1 if isinstance(y, Tensor) else y
        single = lowering.computed((), dtype, lambda ix: lowering.number(number, dtype))
        demand(y if isinstance(y, Tensor) else single, lambda v: nonzero(lowering, cast(v, dtype)))
        return result(call, lambda a, b: op(name, a, nonzero(lowering, b)), x, y)

    return handler


_floor_divide = _divides("floordiv", floor_divide)
_truncated = _divides("truncdiv", lambda x, y: op("trunc", x / y))
lowers(*named("floor_divide", "default", "Scalar"))(_floor_divide)
lowers(*named("remainder", *BOTH, "Scalar_Tensor"))(_divides("remainder", remainder))
lowers(*named("fmod", *BOTH))(_divides("fmod", binary("fmod")))


@lowers(*named("div", "Tensor_mode", "Scalar_mode"))
def _div_mode(call: Call, x: Operand, y: Operand, *, rounding_mode: str | None) -> Tensor:
    if rounding_mode is None:
        return result(call, binary("div"), x, y)
    return _floor_divide(call, x, y) if rounding_mode == "floor" else _truncated(call, x, y)


# ---------------------------------------------------------------------------- powers


def _unlike_aten(call: Call, x: Operand, exponent: Operand) -> str | None:
    if call.meta.dtype.is_floating_point:
        return None
    if isinstance(exponent, Tensor):
        return "integer power with exponents known only at run time"
    if isinstance(exponent, (int, float)) and exponent < 0:
        return "ATen refuses negative powers of integers"
    return None


_BY_LITERAL = named("pow", "Tensor_Scalar")


@lowers(*_BY_LITERAL, *named("pow", "Tensor_Tensor", "Scalar"), unless=_unlike_aten)
@lowers(*named("float_power", "Tensor_Tensor", "Scalar", "Tensor_Scalar"))
def _pow(call: Call, x: Operand, exponent: Operand) -> Tensor:
    if isinstance(exponent, (int, float)) and call.op in _BY_LITERAL:
        return result(call, lambda v: power(v, exponent), x)
    return result(call, binary("pow"), x, exponent)


# ---------------------------------------------------------------------------- choices


@lowers(*named("clamp", "default", "Tensor"))
def _clamp(call: Call, x: Tensor, min: Operand | None, max: Operand | None) -> Tensor:
    def fn(value: Value, *given: Value) -> Value:
        low = given[0] if min is not None else None
        return clamp(value, low, given[-1] if max is not None else None)

    return result(call, fn, x, *(bound for bound in (min, max) if bound is not None))


@lowers(*named("where", "self", "ScalarSelf", "ScalarOther", "Scalar"))
def choose(call: Call, condition: Tensor, x: Operand, y: Operand) -> Tensor:
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


@lowers(*named("masked_fill", "Scalar", "Tensor"))
def _masked_fill(call: Call, x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    return choose(call, mask, value, x)


@lowers(*named("nan_to_num"))
def _nan_to_num(
    call: Call, x: Tensor, nan: float | None, posinf: float | None, neginf: float | None
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


@lowers(*named("log_sigmoid_forward"))
def _log_sigmoid_forward(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    # the second result serves only the backward pass of CUDA builds or of this kernel's vectors
    second = call.metas[1]
    tail = pointwise(call.lowering, [x], lambda v: exp(-op("abs", v)), x.shape, second.dtype)
    whole = second.shape == x.shape
    return result(call, log_sigmoid, x), tail if whole else narrow(tail, 0, 0, 0)


@lowers(*named("_prelu_kernel_backward"))
def _prelu_backward(call: Call, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    operands = grad, x, weight
    return (
        result(call, lambda g, v, w: where(v > 0, g, w * g), *operands),
        result(call, lambda g, v, w: where(v > 0, 0, v * g), *operands, place=1),
    )


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    half = floordiv(x.shape[dim], 2)
    return narrow(x, dim, 0, half), narrow(x, dim, half, half)


@lowers(*named("glu"))
def _glu(call: Call, x: Tensor, dim: int) -> Tensor:
    return result(call, lambda a, b: a * sigmoid(b), *_halves(x, dim % len(x.shape)))


@lowers(*named("glu_backward"))
def _glu_backward(call: Call, grad: Tensor, x: Tensor, dim: int) -> Tensor:
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
