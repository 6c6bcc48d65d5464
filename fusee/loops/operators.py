"""Pointwise operators of ATen: a row for each, from which all that knows operators follows.

    lowering       the formula, from scalar Values to a Value (loops/lower/pointwise.py)
    shape rule     that there is one new tensor, element by element of the operands (fake/rules.py)
    cost           what computing it again in a backward costs (autodiff/min_cut.py)
    claims         which engines take the operator (backends)

An operator is added by its formula and one row; its gradient, if that is an operator, by a second
formula in the same row. Formulas compute in the dtype of their operands, float32 for the halves.

source   aten/src/ATen/native/cpu: Activation.cpp, BinaryOpsKernel.cpp, PointwiseOpsKernel.cpp
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from fusee.loops import Operand, Value, const, op, where
from fusee.source import HALVES

Formula = Callable[..., Value]
Unless = Callable[..., "str | None"]


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ATen computes on `dtype`."""
    return torch.float32 if dtype in HALVES else dtype


class Row(NamedTuple):
    """Overloads of one operator.

    formula      from the operands to the result; other arguments follow by position and by name.
                 None: loops/lower has a handler for it
    operands     positions of the arguments that are operands
    unless       says why a call is ATen's, or None
    to_bool      computed in the dtype that the operands promote to, not in the result's
    rounds       numbers are first rounded to the result's dtype, as ATen does for these ops
    work         additions that an element takes, roughly
    engines      that take the operator too
    """

    overloads: tuple[OpOverload, ...]
    formula: Formula | None
    operands: tuple[int, ...]
    unless: Unless | None = None
    to_bool: bool = False
    rounds: bool = False
    work: int = 1
    engines: str = ""


ROWS: list[Row] = []


def named(names: str, *overloads: str) -> tuple[OpOverload, ...]:
    """The ops `add.Tensor relu` that this torch has; ATen's unless a name says `space::op`.

    overloads   of all of them, where names do not say it
    """
    found = []
    for name in names.split():
        space, _, own = name.rpartition("::")
        own, _, kind = own.partition(".")
        packet = getattr(getattr(torch.ops, space or "aten"), own, None)
        for overload in overloads or (kind or "default",):
            if packet is not None and overload in packet.overloads():
                found.append(getattr(packet, overload))
    return tuple(found)


def row(
    names: str,
    formula: Formula | None,
    operands: int = 1,
    *overloads: str,
    gradient: Formula | None = None,
    takes: tuple[int, ...] = (0, 1),
    unless: Unless | None = None,
    **facts: Any,
) -> None:
    """Add operators of one formula.

    operands   how many of the leading arguments are operands
    overloads  "default" unless given
    gradient   the formula of `<name>_backward`, whose arguments `takes` are operands
    facts      more of Row
    """
    ROWS.append(Row(named(names, *overloads), formula, (*range(operands),), unless, **facts))
    if gradient is not None:
        backward = named(" ".join(f"{name}_backward" for name in names.split()))
        ROWS.append(Row(backward, gradient, takes))


# Without a row, and without torch's tag.
_UNTAGGED = {*named("where", "ScalarOther", "ScalarSelf", "Scalar"), *named("_to_copy")}


@functools.cache
def is_pointwise(op: Any) -> bool:
    """Whether each element of the result depends on those at its place alone."""
    is_told = op in _UNTAGGED or torch.Tag.pointwise in getattr(op, "tags", ())
    return is_told or any(op in row.overloads for row in ROWS)


def claimed(engine: str) -> list[OpOverload]:
    """The pointwise operators that an engine takes."""
    return [op for row in ROWS if engine in row.engines for op in row.overloads]


# ---------------------------------------------------------------------------- vocabulary


def unary(name: str) -> Callable[[Value], Value]:
    return lambda x: op(name, x)


def binary(name: str, of_bools: str | None = None) -> Callable[[Value, Operand], Value]:
    """An op of the vocabulary, and what it is for bools."""
    return lambda x, y: op(of_bools if of_bools and is_bool(x) else name, x, y)


exp, expm1, log, log1p, erf, tanh = map(unary, "exp expm1 log log1p erf tanh".split())
add, mul = binary("add", "or"), binary("mul", "and")
maximum, minimum = binary("maximum", "or"), binary("minimum", "and")


def is_float(x: Value) -> bool:
    return x.dtype.is_floating_point


def is_bool(x: Value) -> bool:
    return x.dtype is torch.bool


def is_true(x: Value) -> Value:
    return x if is_bool(x) else op("ne", x, 0)


# ---------------------------------------------------------------------------- arithmetic


def _scaled(x: Value, alpha: Any) -> Value:
    if isinstance(alpha, (int, float)):
        return x if alpha == 1 else mul(x, alpha)
    return mul(x, x.table.index(alpha, x.dtype))


def sub(x: Value, y: Value, alpha: Any = 1) -> Value:
    return x - _scaled(y, alpha)


def _over_nan(choose: Formula, x: Value, y: Value) -> Value:
    """Of two numbers, or the one that is a number."""
    if not is_float(x):
        return choose(x, y)
    return where(op("isnan", x), y, where(op("isnan", y), x, choose(x, y)))


def clamp(x: Value, low: Operand | None, high: Operand | None) -> Value:
    """Bounds that are NaN make the result NaN; the upper bound wins."""
    if low is not None:
        x = maximum(x, low)
    return x if high is None else minimum(x, high)


def abs_(x: Value) -> Value:
    return x if x.dtype in (torch.bool, torch.uint8) else op("abs", x)


def sign(x: Value) -> Value:
    if is_bool(x):
        return x
    one = const(x, 1)
    if x.dtype is torch.uint8:
        return where(op("ne", x, 0), one, 0)
    return where(x > 0, one, 0) - where(x < 0, one, 0)


def sigmoid(x: Value) -> Value:
    return 1 / (1 + exp(-x))


def _of_floats(test: Callable[[Value], Value], otherwise: bool = False) -> Formula:
    """A test that has one answer for all integers."""
    return lambda x: test(x) if is_float(x) else x.table.const(otherwise, torch.bool)


def signbit(x: Value) -> Value:
    if is_float(x):
        return op("signbit", x)
    return x < 0 if x.dtype.is_signed and not is_bool(x) else x.table.const(False, torch.bool)


def _whole(name: str) -> Formula:
    """Rounding, which leaves integers alone."""
    return lambda x: op(name, x) if is_float(x) else x


def round_decimals(x: Value, decimals: int = 0) -> Value:
    if not is_float(x) or decimals == 0:
        return op("round", x) if is_float(x) else x
    scale = float(10 ** abs(decimals))
    return op("round", x * scale) / scale if decimals > 0 else op("round", x / scale) * scale


def heaviside(x: Value, y: Value) -> Value:
    return where(op("eq", x, 0), y, where(x > 0, const(x, 1), 0))


def xlogy(x: Value, y: Value, log: Formula = log) -> Value:
    return where(op("isnan", y), y, where(op("eq", x, 0), 0, x * log(y)))


def logaddexp(x: Value, y: Value, base_2: bool = False) -> Value:
    """max + log1p(exp(-|x - y|)), and x itself where both are the same infinity."""
    gap = -op("abs", x - y)
    spread = op("log2", 1 + op("exp2", gap)) if base_2 else log1p(exp(gap))
    return where(op("eq", x, y) & op("isinf", x), x, op("maximum", x, y) + spread)


def sinc(x: Value) -> Value:
    angle = x * math.pi
    return where(op("eq", x, 0), 1, op("sin", angle) / angle)


def lerp(start: Value, end: Value, weight: Value) -> Value:
    gap = end - start
    return where(abs_(weight) < 0.5, start + weight * gap, end - gap * (1 - weight))


def _too_wide(by: Value, most: int) -> Value:
    return (by < 0) | (by >= most) if by.dtype.is_signed else by >= most


def shift_left(x: Value, by: Value) -> Value:
    wide = _too_wide(by, x.dtype.itemsize * 8)
    return where(wide, 0, op("shl", x, where(wide, 0, by)))


def shift_right(x: Value, by: Value) -> Value:
    """Shifts that are negative or too wide fill with the sign, as ATen's."""
    most = x.dtype.itemsize * 8 - x.dtype.is_signed
    wide = _too_wide(by, most)
    if x.dtype.is_signed:
        return op("shr", x, where(wide, most, by))
    return where(wide, 0, op("shr", x, where(wide, 0, by)))


def remainder(x: Value, y: Value) -> Value:
    """Of floats. ATen: fmod moved to the divisor's sign."""
    rest = op("fmod", x, y)
    return where(op("ne", rest, 0) & op("ne", y < 0, rest < 0), rest + y, rest)


def floor_divide(x: Value, y: Value) -> Value:
    """Of floats. ATen's div_floor_floating (c10/util/generic_math.h): Python's floor division."""
    rest = op("fmod", x, y)
    quotient = (x - rest) / y
    lower = op("ne", rest, 0) & op("ne", y < 0, rest < 0)
    quotient = where(lower, quotient - 1, quotient)
    floored = op("floor", quotient)
    floored = where(quotient - floored > 0.5, floored + 1, floored)
    result = where(op("ne", quotient, 0), floored, op("copysign", const(x, 0), x / y))
    return where(op("eq", y, 0), x / y, result)


def itself_times(x: Value, count: int) -> Value:
    """x times itself, by squares."""
    result: Value | None = None
    square = x
    while count:
        if count & 1:
            result = square if result is None else result * square
        count >>= 1
        square = square * square if count else square
    return const(x, 1) if result is None else result


def power(x: Value, exponent: float | int) -> Value:
    """x ** exponent for a literal; the cases that ATen computes exactly are products here too."""
    if not is_float(x):
        exponent = int(exponent)
        return (x if exponent else const(x, True)) if is_bool(x) else itself_times(x, exponent)
    exact: dict[float, Callable[[], Value]] = {
        0.5: lambda: op("sqrt", x),
        1.0: lambda: x,
        2.0: lambda: x * x,
        3.0: lambda: x * x * x,
        -0.5: lambda: op("rsqrt", x),
        -1.0: lambda: 1 / x,
        -2.0: lambda: 1 / (x * x),
    }
    special = exact.get(float(exponent))
    return special() if special else op("pow", x, exponent)


# ---------------------------------------------------------------------------- activations


def gelu(x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        bent = tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))
    else:
        bent = erf(x * math.sqrt(0.5))
    return x * 0.5 * (1 + bent)


def gelu_backward(grad: Value, x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        bent = tanh((x + square * x * kappa) * beta)
        steep = (1 + square * (3 * kappa)) * beta
        return grad * ((1 + bent) * 0.5 + x * 0.5 * (1 - bent * bent) * steep)
    density = exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return grad * ((1 + erf(x * math.sqrt(0.5))) * 0.5 + x * density)


def silu_backward(grad: Value, x: Value) -> Value:
    s = sigmoid(x)
    return grad * s * (1 + x * (1 - s))


def relu6(x: Value) -> Value:
    return clamp(x, 0, 6)


def hardsigmoid_backward(grad: Value, x: Value) -> Value:
    return where((x > -3) & (x < 3), grad * (1 / 6), 0)


def hardswish_backward(grad: Value, x: Value) -> Value:
    return where(x <= -3, 0, where(x < 3, grad * (x / 3 + 0.5), grad))


def hardtanh(x: Value, min_val: float = -1, max_val: float = 1) -> Value:
    return clamp(x, min_val, max_val)


def hardtanh_backward(grad: Value, x: Value, low: float, high: float) -> Value:
    return where((x <= low) | (x >= high), 0, grad)


def elu(x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    return where(x < 0, expm1(x * input_scale) * (alpha * scale), x * scale)


def elu_backward(
    grad: Value, x: Value, alpha: float, scale: float, input_scale: float, is_result: bool
) -> Value:
    """`x` is the result of elu if `is_result`."""
    low = alpha * scale
    steep = grad * input_scale
    steep = steep * (x + low) if is_result else steep * low * exp(x * input_scale)
    return where(x <= 0, steep, grad * scale)


def celu(x: Value, alpha: float = 1) -> Value:
    return elu(x, alpha, 1, 1 / alpha)


def selu(x: Value) -> Value:
    return elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def leaky_relu(x: Value, negative_slope: float = 0.01) -> Value:
    return where(x > 0, x, x * negative_slope)


def leaky_relu_backward(grad: Value, x: Value, slope: float, is_result: bool) -> Value:
    return where(x > 0, grad, grad * slope)


def mish_backward(grad: Value, x: Value) -> Value:
    bent = tanh(log1p(exp(x)))
    return grad * (bent + x * sigmoid(x) * (1 - bent * bent))


def softplus(x: Value, beta: float = 1, threshold: float = 20) -> Value:
    scaled = x * beta
    return where(scaled > threshold, x, log1p(exp(scaled)) / beta)


def softplus_backward(grad: Value, x: Value, beta: float, threshold: float) -> Value:
    scaled = x * beta
    power = exp(scaled)
    return where(scaled > threshold, grad, grad * power / (power + 1))


def log_sigmoid(x: Value) -> Value:
    return op("minimum", const(x, 0), x) - log1p(exp(-op("abs", x)))


def log_sigmoid_backward(grad: Value, x: Value, buffer: object) -> Value:
    """The buffer, exp(-|x|), is computed again."""
    power = exp(-op("abs", x))
    share = power / (1 + power)
    return grad * where(x < 0, 1 - share, share)


def logit(x: Value, eps: float | None = None) -> Value:
    if eps is not None:
        x = where(x < eps, eps, x)
        x = where(x > 1 - eps, 1 - eps, x)
    return log(x / (1 - x))


def logit_backward(grad: Value, x: Value, eps: float | None = None) -> Value:
    low, high = (0.0, 1.0) if eps is None else (eps, 1 - eps)
    edge = op("eq", x, 0) | op("eq", x, 1)
    inner = where(edge, grad * math.inf, grad / (x * (1 - x)))
    return where((x < low) | (x > high), math.nan if eps is None else 0, inner)


def softshrink(x: Value, lambd: float = 0.5) -> Value:
    edge = const(x, lambd)
    return where(x > edge, x - edge, where(x < -edge, x + edge, x * 0))


def hardshrink(x: Value, lambd: float = 0.5) -> Value:
    return where((x >= -lambd) & (x <= lambd), 0, x)


def shrink_backward(grad: Value, x: Value, lambd: float) -> Value:
    return where((x >= -lambd) & (x <= lambd), 0, grad)


def threshold(x: Value, limit: float, value: float) -> Value:
    return where(x <= limit, value, x)


def threshold_backward(grad: Value, x: Value, limit: float) -> Value:
    return where(x <= limit, 0, grad)


# ---------------------------------------------------------------------------- table

BOTH = ("Tensor", "Scalar")
SHIFTS = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
BUILT = "openvino tvm"

row("add", lambda x, y, alpha=1: add(x, _scaled(y, alpha)), 2, *BOTH, engines=BUILT)
row("sub", sub, 2, "Tensor", engines=BUILT)
row("sub", sub, 2, "Scalar")
row("rsub", lambda x, y, alpha=1: sub(y, x, alpha), 2, *BOTH, engines="openvino")
row("mul", mul, 2, *BOTH, engines=BUILT)
row("div", binary("div"), 2, *BOTH, work=4, engines=BUILT)
row("true_divide", binary("div"), 2, *BOTH, work=4)
row("div", None, 2, "Tensor_mode", work=4, engines="openvino")
row("div", None, 2, "Scalar_mode", work=4)
row("floor_divide", None, 2, "default", "Scalar", work=12)
row("remainder fmod", None, 2, *BOTH, work=12)
row("remainder", None, 2, "Scalar_Tensor", work=12)
row("pow", None, 2, "Tensor_Scalar", "Tensor_Tensor", work=24, engines="openvino")
row("pow", None, 2, "Scalar", work=24, engines="openvino")
row("maximum", maximum, 2, rounds=True)
row("minimum", minimum, 2, rounds=True)
row("fmax", functools.partial(_over_nan, maximum), 2)
row("fmin", functools.partial(_over_nan, minimum), 2)
row("atan2", binary("atan2"), 2, work=24, engines="openvino")
row("hypot", binary("hypot"), 2, work=24)
row("nextafter", binary("nextafter"), 2)
row("copysign", binary("copysign"), 2, *BOTH)
row("logaddexp", logaddexp, 2, work=14)
row("logaddexp2", lambda x, y: logaddexp(x, y, base_2=True), 2)
row("xlogy", xlogy, 2, "Tensor", "Scalar_Other", "Scalar_Self", work=24)
row(
    *("special_xlog1py", lambda x, y: xlogy(x, y, log1p), 2),
    *("default", "other_scalar", "self_scalar"),
)
row("heaviside", heaviside, 2)
row("lerp", lerp, 3, *BOTH)
row("addcmul", lambda x, a, b, value=1: x + _scaled(a, value) * b, 3, engines="openvino")
row("addcdiv", lambda x, a, b, value=1: x + _scaled(a, value) / b, 3)

for _name in "eq ne lt le gt ge".split():
    row(_name, binary(_name), 2, *BOTH, to_bool=True)
row("logical_and", lambda x, y: is_true(x) & is_true(y), 2, to_bool=True)
row("logical_or", lambda x, y: is_true(x) | is_true(y), 2, to_bool=True)
row("logical_xor", lambda x, y: op("xor", is_true(x), is_true(y)), 2, to_bool=True)
row("logical_not", lambda x: ~is_true(x), to_bool=True)
for _name in "and or xor".split():
    row(f"bitwise_{_name} __{_name}__", binary(_name), 2, *BOTH, "Scalar_Tensor")
row("bitwise_not", unary("not"))
row("bitwise_left_shift", shift_left, 2, *SHIFTS)
row("bitwise_right_shift", shift_right, 2, *SHIFTS)
row("__lshift__", shift_left, 2, *BOTH)
row("__rshift__", shift_right, 2, *BOTH)

for _names, _work, _engines in (
    ("exp", 14, BUILT),
    ("log log2 log10", 14, "openvino"),
    ("exp2 expm1 log1p", 14, ""),
    ("sin cos", 16, BUILT),
    ("tan asin acos atan sinh cosh asinh acosh atanh", 16, "openvino"),
    ("erf", 24, BUILT),
    ("erfc lgamma", 24, ""),
    ("sqrt rsqrt", 4, BUILT),
    ("neg", 1, BUILT),
):
    for _name in _names.split():
        row(_name, unary(_name), work=_work, engines=_engines)
row("erfinv digamma", None, work=24)
row("abs", abs_, engines="tvm")
row("reciprocal", lambda x: 1 / x, work=4, engines="openvino")
row("square", lambda x: mul(x, x))
row("sign sgn", sign)
row("sinc", sinc)
row("floor", _whole("floor"), engines="openvino")
row("ceil", _whole("ceil"), engines="openvino")
row("trunc fix", _whole("trunc"))
row("round", round_decimals, engines="openvino")
row("round", round_decimals, 1, "decimals")
row(
    "frac",
    lambda x: x - op("trunc", x),
    unless=lambda call, x: None if call.meta.dtype.is_floating_point else "ATen refuses integers",
)
row("deg2rad", lambda x: x * (math.pi / 180))
row("rad2deg", lambda x: x * (180 / math.pi))
row("isnan", _of_floats(unary("isnan")), to_bool=True)
row("isinf", _of_floats(unary("isinf")), to_bool=True)
row("isfinite", _of_floats(lambda x: ~(op("isnan", x) | op("isinf", x)), True), to_bool=True)
row("isposinf", _of_floats(lambda x: op("eq", x, math.inf)), to_bool=True)
row("isneginf", _of_floats(lambda x: op("eq", x, -math.inf)), to_bool=True)
row("signbit", signbit, to_bool=True)
row("clamp", None, engines="openvino")
row("clamp", None, 3, "Tensor", engines="openvino")
row("clamp_min", maximum, 2, "default", "Tensor", engines="openvino")
row("clamp_max", minimum, 2, "default", "Tensor", engines="openvino")

row("relu", lambda x: maximum(x, 0), engines=BUILT)
row("sigmoid", sigmoid, gradient=lambda grad, y: grad * (1 - y) * y, work=14, engines=BUILT)
row("tanh", tanh, gradient=lambda grad, y: grad * (1 - y * y), work=16, engines=BUILT)
row(
    "gelu",
    gelu,
    gradient=gelu_backward,
    unless=lambda call, *_, approximate="none": (
        None if approximate in ("none", "tanh") else "ATen knows no such approximation"
    ),
    work=24,
    engines=BUILT,
)
row("silu", lambda x: x / (1 + exp(-x)), gradient=silu_backward, work=14, engines=BUILT)
row("relu6", relu6)
row("hardsigmoid", lambda x: relu6(x + 3) / 6, gradient=hardsigmoid_backward, engines=BUILT)
row("hardswish", lambda x: x * relu6(x + 3) / 6, gradient=hardswish_backward, engines=BUILT)
row("hardtanh", hardtanh, gradient=hardtanh_backward, engines=BUILT)
row("elu", elu, gradient=elu_backward, takes=(0, 5), work=14, engines="openvino")
row("celu", celu)
row("selu", selu)
row("leaky_relu", leaky_relu, gradient=leaky_relu_backward, engines="openvino")
row("_prelu_kernel", lambda x, weight: where(x > 0, x, weight * x), 2)
row("mish", lambda x: x * tanh(log1p(exp(x))), gradient=mish_backward, work=24)
row("softplus", softplus, gradient=softplus_backward, work=24)
row("log_sigmoid", log_sigmoid, gradient=log_sigmoid_backward)
row("logit special_logit", logit, gradient=logit_backward)
row(
    "softshrink",
    softshrink,
    gradient=shrink_backward,
    unless=lambda call, x, lambd=0.5: (
        None if isinstance(lambd, (int, float)) and lambd >= 0 else "ATen refuses a negative lambda"
    ),
)
row("hardshrink", hardshrink, gradient=shrink_backward)
row("threshold", threshold, gradient=threshold_backward)
row("native_dropout_backward", lambda grad, mask, scale: grad * (mask * scale), 2)
