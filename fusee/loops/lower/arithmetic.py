"""The table of pointwise ops: arithmetic, comparisons, logic, elementary functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fusee.loops.ir import Value, cast, op, where
from fusee.loops.lower.pointwise import (
    Operand,
    Scalar,
    _infinite,
    _whole,
    abs_,
    add,
    addcdiv,
    addcmul,
    binary,
    clamp,
    const,
    demand,
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
    pointwise,
    reciprocal,
    remainder_float,
    round_decimals,
    row,
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
from fusee.loops.lower.tensor import Call, Number, Pieces, Tensor, lowers, named
from fusee.loops.lower.views import narrow
from fusee.sym.expr import floordiv

# ---------------------------------------------------------------------------- arithmetic


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


def _of_whole_numbers(call: Call, x: Tensor) -> str | None:
    return None if call.meta.dtype.is_floating_point else "ATen refuses integers"


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
row(named("frac"), frac, unless=_of_whole_numbers)
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


# ---------------------------------------------------------------------------- activation
# The table of activation functions, by ATen's formulas (native/cpu/Activation.cpp).


def relu(x: Value) -> Value:
    return maximum(x, const(x, 0))


def gelu(x: Value, approximate: str = "none") -> Value:
    half, one = const(x, 0.5), const(x, 1)
    if approximate == "tanh":
        cube = op("mul", op("mul", x, x), x)
        inner = op("add", x, op("mul", const(x, 0.044715), cube))
        bent = op("tanh", op("mul", const(x, math.sqrt(2 / math.pi)), inner))
    else:
        bent = op("erf", op("mul", x, const(x, math.sqrt(0.5))))
    return op("mul", op("mul", x, half), op("add", one, bent))


def silu(x: Value) -> Value:
    return op("div", x, op("add", const(x, 1), op("exp", op("neg", x))))


def relu6(x: Value) -> Value:
    return clamp(x, const(x, 0), const(x, 6))


def hardsigmoid(x: Value) -> Value:
    return op("div", relu6(op("add", x, const(x, 3))), const(x, 6))


def hardswish(x: Value) -> Value:
    return op("div", op("mul", x, relu6(op("add", x, const(x, 3)))), const(x, 6))


def hardtanh(x: Value, min_val: float = -1, max_val: float = 1) -> Value:
    return clamp(x, const(x, min_val), const(x, max_val))


def elu(x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    low = op("expm1", op("mul", x, const(x, input_scale)))
    low = op("mul", low, const(x, alpha * scale))
    return where(test("lt", x, 0), low, op("mul", x, const(x, scale)))


def celu(x: Value, alpha: float = 1) -> Value:
    return elu(x, alpha, 1, 1 / alpha)


def selu(x: Value) -> Value:
    return elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def leaky_relu(x: Value, negative_slope: float = 0.01) -> Value:
    return where(test("gt", x, 0), x, op("mul", x, const(x, negative_slope)))


def prelu(x: Value, weight: Value) -> Value:
    return where(test("gt", x, 0), x, op("mul", weight, x))


def mish(x: Value) -> Value:
    return op("mul", x, op("tanh", op("log1p", op("exp", x))))


def softplus(x: Value, beta: float = 1, threshold: float = 20) -> Value:
    scaled = op("mul", x, const(x, beta))
    bent = op("div", op("log1p", op("exp", scaled)), const(x, beta))
    return where(test("gt", scaled, threshold), x, bent)


def log_sigmoid(x: Value) -> Value:
    tail = op("log1p", op("exp", op("neg", op("abs", x))))
    return op("sub", op("minimum", const(x, 0), x), tail)


def logit(x: Value, eps: float | None = None) -> Value:
    if eps is not None:
        x = where(test("lt", x, eps), const(x, eps), x)
        x = where(test("gt", x, 1 - eps), const(x, 1 - eps), x)
    return op("log", op("div", x, op("sub", const(x, 1), x)))


def softshrink(x: Value, lambd: float = 0.5) -> Value:
    edge = const(x, lambd)
    inner = where(op("lt", x, op("neg", edge)), op("add", x, edge), op("mul", x, const(x, 0)))
    return where(op("gt", x, edge), op("sub", x, edge), inner)


def hardshrink(x: Value, lambd: float = 0.5) -> Value:
    small = op("and", test("ge", x, -lambd), test("le", x, lambd))
    return where(small, const(x, 0), x)


def threshold(x: Value, limit: float, value: float) -> Value:
    return where(test("le", x, limit), const(x, value), x)


def _other_gelu(call: Call, x: object, *, approximate: str = "none") -> str | None:
    return None if approximate in ("none", "tanh") else "ATen knows no such approximation"


def _negative(call: Call, x: object, lambd: float = 0.5) -> str | None:
    return None if lambd >= 0 else "ATen refuses a negative lambda"


row(named("relu"), relu)
row(named("gelu"), gelu, unless=_other_gelu)
row(named("silu"), silu)
row(named("relu6"), relu6)
row(named("hardsigmoid"), hardsigmoid)
row(named("hardswish"), hardswish)
row(named("hardtanh"), hardtanh)
row(named("elu"), elu)
row(named("celu"), celu)
row(named("selu"), selu)
row(named("leaky_relu"), leaky_relu)
row(named("_prelu_kernel"), prelu, 2)
row(named("mish"), mish)
row(named("softplus"), softplus)
row(named("log_sigmoid"), log_sigmoid)
row(named("logit special_logit"), logit)
row(named("softshrink"), softshrink, unless=_negative)
row(named("hardshrink"), hardshrink)
row(named("threshold"), threshold)


@lowers(*named("log_sigmoid_forward"))
def _log_sigmoid_forward(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    meta, second = call.metas
    lowering = call.lowering
    result = pointwise(lowering, [x], log_sigmoid, meta.shape, meta.dtype, None, meta.strides)
    # the second result serves only the backward pass of CUDA builds or of this kernel's vectors
    tail = pointwise(
        lowering, [x], lambda v: op("exp", op("neg", op("abs", v))), x.shape, second.dtype
    )
    return result, tail if second.shape == x.shape else narrow(tail, 0, 0, 0)


@lowers(*named("glu"))
def _glu(call: Call, x: Tensor, dim: int = -1) -> Any:
    dim %= len(x.shape)
    half = floordiv(x.shape[dim], 2)
    left, right = narrow(x, dim, 0, half), narrow(x, dim, half, half)
    meta = call.meta
    return pointwise(
        call.lowering,
        [left, right],
        lambda a, b: op("mul", a, sigmoid(b)),
        meta.shape,
        meta.dtype,
        None,
        meta.strides,
    )


# ---------------------------------------------------------------------------- gradient
# Gradients of pointwise operators, by the formulas of ATen's CPU kernels.
#
# source aten/src/ATen/native/cpu/Activation.cpp, BinaryOpsKernel.cpp, PointwiseOpsKernel.cpp


def _times(x: Value, *factors: Value | float) -> Value:
    for factor in factors:
        x = op("mul", x, factor if isinstance(factor, Value) else const(x, factor))
    return x


def _one_minus(x: Value) -> Value:
    return op("sub", const(x, 1), x)


def _zero_where(mask: Value, x: Value) -> Value:
    return where(mask, const(x, 0), x)


# ------------------------------------------------------------------------------ smooth


def sigmoid_backward(grad: Value, y: Value) -> Value:
    return _times(grad, _one_minus(y), y)


def tanh_backward(grad: Value, y: Value) -> Value:
    return op("mul", grad, _one_minus(op("mul", y, y)))


def gelu_backward(grad: Value, x: Value, approximate: str = "none") -> Value:
    one = const(x, 1)
    if approximate == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715
        square = op("mul", x, x)
        cube = op("mul", square, x)
        bent = op("tanh", _times(op("add", x, _times(cube, kappa)), beta))
        left = _times(op("add", one, bent), 0.5)
        steep = _times(op("add", one, _times(square, 3 * kappa)), beta)
        right = _times(_times(x, 0.5), _one_minus(op("mul", bent, bent)), steep)
        return op("mul", grad, op("add", left, right))
    below = _times(op("add", one, op("erf", _times(x, math.sqrt(0.5)))), 0.5)
    density = _times(op("exp", _times(op("mul", x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return op("mul", grad, op("add", below, op("mul", x, density)))


def silu_backward(grad: Value, x: Value) -> Value:
    s = sigmoid(x)
    return _times(grad, s, op("add", const(x, 1), op("mul", x, _one_minus(s))))


def mish_backward(grad: Value, x: Value) -> Value:
    bent = op("tanh", op("log1p", op("exp", x)))
    steep = _times(x, sigmoid(x), _one_minus(op("mul", bent, bent)))
    return op("mul", grad, op("add", bent, steep))


def softplus_backward(grad: Value, x: Value, beta: float, threshold: float) -> Value:
    scaled = _times(x, beta)
    power = op("exp", scaled)
    steep = op("div", op("mul", grad, power), op("add", power, const(x, 1)))
    return where(test("gt", scaled, threshold), grad, steep)


def log_sigmoid_backward(grad: Value, x: Value) -> Value:
    """The third argument of the operator, exp(-|x|), is computed again."""
    negative = test("lt", x, 0)
    power = op("exp", op("neg", op("abs", x)))
    share = op("div", power, op("add", const(x, 1), power))
    return op("mul", grad, where(negative, _one_minus(share), share))


def elu_backward(
    grad: Value, x: Value, alpha: float, scale: float, input_scale: float, is_result: bool
) -> Value:
    """`x` is the result of elu if `is_result`."""
    low = alpha * scale
    if is_result:
        steep = _times(grad, input_scale, op("add", x, const(x, low)))
    else:
        steep = _times(grad, input_scale, low, op("exp", _times(x, input_scale)))
    return where(test("le", x, 0), steep, _times(grad, scale))


def logit_backward(grad: Value, x: Value, eps: float | None = None) -> Value:
    outside = const(x, math.nan if eps is None else 0)
    low, high = (0.0, 1.0) if eps is None else (eps, 1 - eps)
    edge = op("or", test("eq", x, 0), test("eq", x, 1))
    inner = where(edge, _times(grad, math.inf), op("div", grad, op("mul", x, _one_minus(x))))
    return where(op("or", test("lt", x, low), test("gt", x, high)), outside, inner)


# ------------------------------------------------------------------------------ in pieces


def threshold_backward(grad: Value, x: Value, threshold: float) -> Value:
    return _zero_where(test("le", x, threshold), grad)


def hardtanh_backward(grad: Value, x: Value, low: float, high: float) -> Value:
    return _zero_where(op("or", test("le", x, low), test("ge", x, high)), grad)


def hardswish_backward(grad: Value, x: Value) -> Value:
    middle = op("mul", grad, op("add", op("div", x, const(x, 3)), const(x, 0.5)))
    upper = where(test("lt", x, 3), middle, grad)
    return _zero_where(test("le", x, -3), upper)


def hardsigmoid_backward(grad: Value, x: Value) -> Value:
    inner = op("and", test("gt", x, -3), test("lt", x, 3))
    return where(inner, _times(grad, 1 / 6), const(grad, 0))


def leaky_relu_backward(grad: Value, x: Value, slope: float, is_result: bool) -> Value:
    return where(test("gt", x, 0), grad, _times(grad, slope))


def shrink_backward(grad: Value, x: Value, limit: float) -> Value:
    return _zero_where(op("and", test("ge", x, -limit), test("le", x, limit)), grad)


def dropout_backward(grad: Value, mask: Value, scale: float) -> Value:
    return op("mul", grad, _times(mask, scale))


row(named("sigmoid_backward"), sigmoid_backward, 2)
row(named("tanh_backward"), tanh_backward, 2)
row(named("gelu_backward"), gelu_backward, 2)
row(named("silu_backward"), silu_backward, 2)
row(named("mish_backward"), mish_backward, 2)
row(named("softplus_backward"), softplus_backward, 2)
row(named("elu_backward"), elu_backward, (0, 5))
row(named("logit_backward"), logit_backward, 2)
row(named("threshold_backward"), threshold_backward, 2)
row(named("hardtanh_backward"), hardtanh_backward, 2)
row(named("hardswish_backward"), hardswish_backward, 2)
row(named("hardsigmoid_backward"), hardsigmoid_backward, 2)
row(named("leaky_relu_backward"), leaky_relu_backward, 2)
row(named("hardshrink_backward softshrink_backward"), shrink_backward, 2)
row(named("native_dropout_backward"), dropout_backward, 2)


@lowers(*named("log_sigmoid_backward"))
def _log_sigmoid_backward(call: Call, grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    meta = call.meta
    return pointwise(
        call.lowering, [grad, x], log_sigmoid_backward, meta.shape, meta.dtype, None, meta.strides
    )


@lowers(*named("_prelu_kernel_backward"))
def _prelu_backward(call: Call, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    def of_x(g: Value, v: Value, w: Value) -> Value:
        return where(test("gt", v, 0), g, op("mul", w, g))

    def of_weight(g: Value, v: Value, w: Value) -> Value:
        return _zero_where(test("gt", v, 0), op("mul", v, g))

    first, second = call.metas
    operands = [grad, x, weight]
    return (
        pointwise(call.lowering, operands, of_x, first.shape, first.dtype, None, first.strides),
        pointwise(
            call.lowering, operands, of_weight, second.shape, second.dtype, None, second.strides
        ),
    )


@lowers(*named("glu_backward"))
def _glu_backward(call: Call, grad: Tensor, x: Tensor, dim: int) -> Any:
    dim %= len(x.shape)
    half = floordiv(x.shape[dim], 2)
    left, right = narrow(x, dim, 0, half), narrow(x, dim, half, half)

    def of_left(g: Value, a: Value, b: Value) -> Value:
        return op("mul", sigmoid(b), g)

    def of_right(g: Value, a: Value, b: Value) -> Value:
        s = sigmoid(b)
        return _times(_one_minus(s), s, g, a)

    halves = tuple(
        pointwise(call.lowering, [grad, left, right], fn, grad.shape, call.meta.dtype)
        for fn in (of_left, of_right)
    )
    return call.lowering.beside(x.shape, call.meta.dtype, Pieces(dim, (0, half), halves))
