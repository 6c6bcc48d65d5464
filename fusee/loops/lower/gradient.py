"""Gradients of pointwise operators, by the formulas of ATen's CPU kernels.

source   aten/src/ATen/native/cpu/Activation.cpp, BinaryOpsKernel.cpp, PointwiseOpsKernel.cpp
"""

from __future__ import annotations

import math
from typing import Any

from fusee.loops.ir import Value, op, where
from fusee.loops.lower.formulas import const, sigmoid, test
from fusee.loops.lower.pointwise import pointwise, row
from fusee.loops.lower.shape import narrow
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Pieces, Tensor
from fusee.sym.expr import floordiv


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
