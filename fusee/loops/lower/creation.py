"""Tensors made from nothing: fills, ranges, triangles. Their elements follow from the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusee.loops.ir import Extern, Value, cast, op, where
from fusee.loops.lower.pointwise import Operand
from fusee.loops.lower.tensor import Call, Index, Number, Tensor, lowers, opmath
from fusee.loops.lower.views import converted, expand, reshape
from fusee.loops.operators import named
from fusee.sym.expr import Size

# ---------------------------------------------------------------------------- fill


@lowers(*named("full full_like new_full scalar_tensor"), *named("fill", "Scalar", "Tensor"))
def filled(call: Call, *given: Operand) -> Tensor:
    """The call's result with every element the last argument."""
    meta, number = call.meta, given[-1]
    if isinstance(number, Tensor):
        return expand(converted(reshape(number, ()), meta.dtype), meta.shape)
    return call.lowering.filled(meta.shape, number, meta.dtype)


@lowers(*named("zeros zeros_like new_zeros zero"))
# nobody may rely on what uninitialised memory holds; zeros are as good as any
@lowers(*named("empty", "memory_format"), *named("empty_like new_empty empty_strided"))
@lowers(*named("new_empty_strided empty_permuted"))
def _zeros(call: Call) -> Tensor:
    return filled(call, 0)


@lowers(*named("ones ones_like new_ones"))
def _ones(call: Call) -> Tensor:
    return filled(call, 1)


# ---------------------------------------------------------------------------- ranges


@lowers(*named("arange", "default", "start", "start_step"))
def _arange(call: Call, *bounds: Any) -> Tensor:
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


@lowers(*named("linspace", "default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"))
def _linspace(call: Call, start: Operand, end: Operand) -> Tensor:
    """ATen counts from whichever end is nearer, so that both ends are exact.

    source   aten/src/ATen/native/cpu/RangeFactoriesKernel.cpp; its products and sums are contracted
             in float, and rounded one by one in the halves
    """
    meta, lowering = call.meta, call.lowering
    count, dtype = meta.shape[0], meta.dtype
    halves = dtype in (torch.bfloat16, torch.float16)
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


@lowers(*named("eye", "default", "m"))
def _eye(call: Call) -> Tensor:
    meta, lowering = call.meta, call.lowering
    one = lowering.number(1, meta.dtype)

    def at(ix: Index) -> Value:
        return where(op("eq", lowering.values.index(ix[0] - ix[1]), 0), one, 0)

    return lowering.computed(meta.shape, meta.dtype, at)


def _triangle(name: str) -> Callable[..., Tensor]:
    def handler(call: Call, x: Tensor, diagonal: Size) -> Tensor:
        def at(ix: Index) -> Value:
            place = call.lowering.values.index(ix[-1] - ix[-2] - diagonal)
            return where(op(name, place, 0), x.at(ix), 0)

        return call.lowering.computed(x.shape, x.dtype, at, (x,), call.meta.strides)

    return handler


lowers(*named("tril"))(_triangle("le"))
lowers(*named("triu"))(_triangle("ge"))

# ---------------------------------------------------------------------------- random
# Random numbers: drawn into memory by a call, in program order; the rest is loops.


def _other_stream(
    call: Call, x: Tensor, p: Number, *, generator: torch.Generator | None
) -> str | None:
    if generator is not None:
        return "a generator of its own"
    if not isinstance(p, (int, float)):
        return "a probability that is no number"
    return None if call.call_of(call.op) is not None else "drawn by ATen"


@lowers(*named("bernoulli", "p"), unless=_other_stream)
def _bernoulli(call: Call, x: Tensor, p: float) -> Tensor:
    """A mask of booleans, whatever the dtype of `x`, whose elements nobody reads."""
    meta, lowering = call.meta, call.lowering
    draw = call.call_of(call.op).out
    buffer = lowering.buffer(meta.shape, torch.bool, meta.strides)
    reason = "random numbers of ATen's generator, in eager's order"
    step = Extern(str(call.op), draw, (p,), {}, (buffer,), out=True, reason=reason)
    step.origin = lowering.origin
    lowering.graph.steps.append(step)
    return converted(lowering.whole(buffer), meta.dtype)
