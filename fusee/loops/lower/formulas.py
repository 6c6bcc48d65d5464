"""Scalar formulas: what pointwise ops compute, from Values to a Value."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusee.loops.ir import Value, cast, check, op, where
from fusee.loops.lower.numbers import literal
from fusee.loops.lower.pointwise import Scalar
from fusee.loops.lower.tensor import Lowering


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
