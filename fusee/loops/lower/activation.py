"""The table of activation functions, by ATen's formulas (native/cpu/Activation.cpp)."""

from __future__ import annotations

import math
from typing import Any

from fusee.loops.ir import Value, op, where
from fusee.loops.lower.formulas import clamp, const, maximum, sigmoid, test
from fusee.loops.lower.pointwise import pointwise, row
from fusee.loops.lower.shape import narrow
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Tensor
from fusee.sym.expr import floordiv


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
