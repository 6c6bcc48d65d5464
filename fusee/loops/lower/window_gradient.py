"""Gradients of pooling and of upsampling, where each element of the image has one window.

Windows that overlap, or that differ in size, are ATen's: it adds to the image window by window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusee.loops.ir import Value, cast, op
from fusee.loops.lower.formulas import const
from fusee.loops.lower.numbers import opmath
from fusee.loops.lower.reduce import reduce
from fusee.loops.lower.shape import reshape
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Index, Tensor
from fusee.sym.expr import Size, floordiv

OVERLAP = "windows that overlap or differ in size: their sums are ATen's"


def _spread(call: Call, grad: Tensor, steps: Sequence[int], divisor: int) -> Tensor:
    """Each element of `grad` divided and repeated over a block of `steps`."""
    meta = call.meta
    first = len(meta.shape) - len(steps)
    compute = opmath(grad.dtype)

    def at(ix: Index) -> Value:
        places = [floordiv(i, n) for i, n in zip(ix[first:], steps, strict=True)]
        value = cast(grad.at((*ix[:first], *places)), compute)
        return cast(op("div", value, const(value, divisor)), meta.dtype)

    return call.lowering.computed(meta.shape, meta.dtype, at, (grad,), meta.strides)


def _pairs(numbers: Sequence[int], rank: int) -> list[int]:
    return list(numbers) * rank if len(numbers) == 1 else list(numbers)


def _steps(large: Sequence[Size], small: Sequence[Size]) -> list[int] | None:
    """How many elements of `large` each of `small` stands for; None if not all for as many."""
    steps = []
    for n, m in zip(large, small, strict=True):
        if not isinstance(n, int) or not isinstance(m, int) or m == 0 or n % m:
            return None
        steps.append(n // m)
    return steps


# ------------------------------------------------------------------------------ averages


def _avg_overlap(
    call: Call,
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *rest: Any,
) -> str | None:
    rank = 2 if "2d" in str(call.op) else 3
    kernel = _pairs(kernel, rank)
    stride = _pairs(stride, rank) if stride else kernel
    steps = _steps(x.shape[len(x.shape) - rank :], grad.shape[len(x.shape) - rank :])
    is_apart = kernel == stride == steps and not any(padding)
    return None if is_apart else OVERLAP


@lowers(*named("avg_pool2d_backward avg_pool3d_backward"), unless=_avg_overlap)
def _avg_pool_backward(
    call: Call,
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    steps = _pairs(kernel, 2 if "2d" in str(call.op) else 3)
    count = 1
    for n in steps:
        count *= n
    return _spread(call, grad, steps, divisor or count)


def _adaptive_steps(call: Call, grad: Tensor, x: Tensor) -> list[int] | None:
    rank = 2 if "2d" in str(call.op) else 3
    first = len(x.shape) - rank
    return _steps(x.shape[first:], grad.shape[first:])


def _adaptive_overlap(call: Call, grad: Tensor, x: Tensor) -> str | None:
    return OVERLAP if _adaptive_steps(call, grad, x) is None else None


@lowers(
    *named("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
    unless=_adaptive_overlap,
)
def _adaptive_avg_pool_backward(call: Call, grad: Tensor, x: Tensor) -> Tensor:
    steps = _adaptive_steps(call, grad, x)
    assert steps is not None
    count = 1
    for n in steps:
        count *= n
    return _spread(call, grad, steps, count)


# ------------------------------------------------------------------------------ upsampling


def _uneven_scale(
    call: Call, grad: Tensor, output: Sequence[Size], size: Sequence[Size], *scales: float | None
) -> str | None:
    steps = _steps(grad.shape[2:], size[2:])
    scales = (*scales, *([None] * (len(size) - 2 - len(scales))))
    if steps is None or any(s not in (None, n) for s, n in zip(scales, steps, strict=True)):
        return OVERLAP
    return None


@lowers(
    *named("upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward"),
    unless=_uneven_scale,
)
def _upsample_nearest_backward(
    call: Call, grad: Tensor, output: Sequence[Size], size: Sequence[Size], *scales: float | None
) -> Tensor:
    shape: list[Size] = list(grad.shape[:2])
    for n, m in zip(grad.shape[2:], size[2:], strict=True):
        shape += [m, floordiv(n, m)]
    blocks = list(range(3, len(shape), 2))
    compute = opmath(grad.dtype)
    total = reduce(reshape(grad, tuple(shape)), blocks, "sum", compute, grad.dtype)
    return reshape(total, call.meta.shape)
