"""Tensors made from nothing: fills, ranges, triangles. Their elements follow from the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusee.loops.ir import Extern, Value, cast, op, where
from fusee.loops.lower.pointwise import Operand
from fusee.loops.lower.tensor import Call, Index, Number, Tensor, lowers, named, opmath
from fusee.loops.lower.views import converted, expand, reshape
from fusee.sym.expr import Size

# ---------------------------------------------------------------------------- fill


def filled(call: Call, number: Operand) -> Tensor:
    """The call's result with every element `number`."""
    meta, lowering = call.meta, call.lowering
    if isinstance(number, Tensor):
        return expand(converted(reshape(number, ()), meta.dtype), meta.shape)
    value = lowering.number(number, meta.dtype)
    return lowering.computed(meta.shape, meta.dtype, lambda ix: value)


@lowers(*named("full full_like new_full"))
def _full(call: Call, shape: Any, *rest: Any, fill_value: Any = None, **_: object) -> Tensor:
    return filled(call, rest[-1] if fill_value is None else fill_value)


@lowers(*named("fill", "Scalar", "Tensor"))
def _fill(call: Call, x: Tensor, value: Operand) -> Tensor:
    return filled(call, value)


@lowers(*named("zeros zeros_like new_zeros zero"))
# nobody may rely on what uninitialised memory holds; zeros are as good as any
@lowers(*named("empty", "memory_format"), *named("empty_like new_empty empty_strided"))
@lowers(*named("new_empty_strided empty_permuted"))
def _zeros(call: Call, *_: object, **__: object) -> Tensor:
    return filled(call, 0)


@lowers(*named("ones ones_like new_ones"))
def _ones(call: Call, *_: object, **__: object) -> Tensor:
    return filled(call, 1)


@lowers(*named("scalar_tensor"))
def _scalar_tensor(call: Call, number: Operand, **_: object) -> Tensor:
    return filled(call, number)


# ------------------------------------------------------------------------------ ranges


@lowers(*named("arange", "default", "start", "start_step"))
def _arange(call: Call, *bounds: Any, **_: object) -> Tensor:
    start, step = (0, 1) if len(bounds) == 1 else (bounds[0], 1 if len(bounds) == 2 else bounds[2])
    return ramp(call, start, step)


def ramp(call: Call, start: Any, step: Any) -> Tensor:
    """start + i * step along the only dimension."""
    meta, lowering = call.meta, call.lowering
    if not meta.dtype.is_floating_point:
        # ATen truncates before it steps
        first, stride = (int(n) if isinstance(n, float) else n for n in (start, step))

        def at(ix: Index) -> Value:
            return lowering.values.index(first + ix[0] * stride, meta.dtype)

    else:
        # ATen steps in double for float and in float for the halves
        wide = torch.float64 if meta.dtype in (torch.float32, torch.float64) else opmath(meta.dtype)

        def at(ix: Index) -> Value:
            place = lowering.values.index(ix[0], wide)
            scaled = op("mul", place, lowering.number(step, wide))
            return cast(op("add", lowering.number(start, wide), scaled), meta.dtype)

    return lowering.computed(meta.shape, meta.dtype, at)


@lowers(*named("linspace", "default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"))
def _linspace(call: Call, start: Operand, end: Operand, steps: Any, **_: object) -> Tensor:
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
        if halves:
            return op("add", x, rounded(op("mul", step, times)))
        return op("fma", step, times, x)

    def at(ix: Index) -> Value:
        first, last = bound(start), bound(end)
        step = rounded(op("div", rounded(op("sub", last, first)), number(count - 1)))
        low = stepped(first, step, number(ix[0]))
        high = stepped(last, op("neg", step), number(count - 1 - ix[0]))
        half = lowering.values.index(ix[0] - count // 2)
        is_low = op("lt", half, lowering.values.const(0, torch.int64))
        return cast(where(is_low, low, high), dtype)

    tensors = [x for x in (start, end) if isinstance(x, Tensor)]
    return lowering.computed(meta.shape, dtype, at, tensors)


# ------------------------------------------------------------------------------ triangles


def _compared(
    call: Call, name: str, difference: Callable[[Index], Size]
) -> Callable[[Index], Value]:
    """difference(index) compared with 0."""
    values = call.lowering.values

    def at(ix: Index) -> Value:
        return op(name, values.index(difference(ix)), values.const(0, torch.int64))

    return at


@lowers(*named("eye", "default", "m"))
def _eye(call: Call, *_: object, **__: object) -> Tensor:
    meta, lowering = call.meta, call.lowering
    same = _compared(call, "eq", lambda ix: ix[0] - ix[1])
    one, zero = lowering.number(1, meta.dtype), lowering.number(0, meta.dtype)
    return lowering.computed(meta.shape, meta.dtype, lambda ix: where(same(ix), one, zero))


def _triangle(call: Call, x: Tensor, name: str, diagonal: Size) -> Tensor:
    lowering = call.lowering
    kept = _compared(call, name, lambda ix: ix[-1] - ix[-2] - diagonal)
    mask = lowering.computed(x.shape, torch.bool, kept)
    zero = lowering.number(0, x.dtype)

    def fn(value: Value, flag: Value) -> Value:
        return where(flag, value, zero)

    def at(ix: Index) -> Value:
        return fn(x.at(ix), mask.at(ix))

    return lowering.computed(x.shape, x.dtype, at, (x,), call.meta.strides)


@lowers(*named("tril"))
def _tril(call: Call, x: Tensor, diagonal: Size = 0) -> Tensor:
    return _triangle(call, x, "le", diagonal)


@lowers(*named("triu"))
def _triu(call: Call, x: Tensor, diagonal: Size = 0) -> Tensor:
    return _triangle(call, x, "ge", diagonal)


# ---------------------------------------------------------------------------- random
# Random numbers: drawn into memory by a call, in program order; the rest is loops.


def _other_stream(
    call: Call, x: Tensor, p: Number, *, generator: torch.Generator | None = None
) -> str | None:
    if generator is not None:
        return "a generator of its own"
    if not isinstance(p, (int, float)):
        return "a probability that is no number"
    return None if call.call_of(call.op) is not None else "drawn by ATen"


@lowers(*named("bernoulli", "p"), unless=_other_stream)
def _bernoulli(
    call: Call, x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    """A mask of booleans, whatever the dtype of `x`, whose elements nobody reads."""
    meta, lowering = call.meta, call.lowering
    draw = call.call_of(call.op).out
    buffer = lowering.buffer(meta.shape, torch.bool, meta.strides)
    lowering.graph.steps.append(
        Extern(
            str(call.op),
            draw,
            (p,),
            {},
            (buffer,),
            out=True,
            reason="random numbers of ATen's generator, in eager's order",
            origin=lowering.origin,
        )
    )
    return converted(lowering.whole(buffer), meta.dtype)
