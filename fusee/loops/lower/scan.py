"""Scans: running reductions along one dimension."""

from __future__ import annotations

import torch

from fusee.loops.ir import Loop, Value, cast, op, where
from fusee.loops.lower.numbers import opmath
from fusee.loops.lower.reduce import Map, mapped, prepared
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Index, Strided, Tensor


def scan(
    x: Tensor,
    dim: int,
    kind: str,
    acc_dtype: torch.dtype,
    dtype: torch.dtype,
    before: Map | None = None,
) -> Tensor:
    """The running reduction along `dim`."""
    lowering, shape = x.lowering, x.shape
    if not shape or shape[dim] == 1 or 0 in shape:
        return lowering.computed(shape, dtype, lambda ix: cast(x.at(ix), dtype), (x,))
    index: Index = tuple(
        lowering.axis("r0", n).expr if k == dim else i
        for k, (i, n) in enumerate(zip(lowering.axes(shape), shape, strict=True))
    )
    value = x.at(index)
    value = mapped(value, before, acc_dtype)
    axes = tuple(lowering.axis(f"i{k}", n) for k, n in enumerate(shape) if n != 1 and k != dim)
    buffer = lowering.buffer(shape, dtype)
    acc = lowering.accumulator(kind, acc_dtype)
    lowering.emit(
        Loop(
            buffer,
            axes,
            lowering.offset(Strided(buffer, buffer.strides, 0), index),
            value,
            (lowering.axis("r0", shape[dim]),),
            acc,
            scan=True,
        )
    )
    return lowering.whole(buffer)


def _scan_dtype(dtype: torch.dtype) -> torch.dtype:
    """ATen's CPU scans accumulate float in double, and halves in float."""
    return torch.float64 if dtype is torch.float32 else opmath(dtype)


def _cumulate(call: Call, x: Tensor, dim: int, kind: str) -> Tensor:
    dtype = call.meta.dtype
    dim = dim % len(x.shape) if x.shape else 0
    return scan(x, dim, kind, _scan_dtype(dtype), dtype, lambda v: cast(v, dtype))


@lowers(*named("cumsum"))
def _cumsum(call: Call, x: Tensor, dim: int, **_: object) -> Tensor:
    return _cumulate(call, x, dim, "sum")


@lowers(*named("cumprod"))
def _cumprod(call: Call, x: Tensor, dim: int, **_: object) -> Tensor:
    return _cumulate(call, x, dim, "prod")


def _extreme_scan(call: Call, x: Tensor, dim: int, kind: str) -> tuple[Tensor, Tensor]:
    """Running extremes, and the last place so far where an element equals the extreme."""
    dim = dim % len(x.shape) if x.shape else 0
    prepared(x, 2)
    lowering = x.lowering
    compute = torch.uint8 if x.dtype is torch.bool else opmath(x.dtype)
    best = scan(x, dim, kind, compute, x.dtype)
    if not call.used[1]:
        return best, best

    def at(ix: Index) -> Value:
        value, top = x.at(ix), best.at(ix)
        here = op("eq", cast(value, compute), cast(top, compute))
        if compute.is_floating_point:
            here = op("or", here, op("isnan", cast(value, compute)))
        place = lowering.values.index(ix[dim] if ix else 0)
        return where(here, place, lowering.values.const(0, torch.int64))

    place = lowering.computed(x.shape, torch.int64, at, (x, best))
    return best, scan(place, dim, "max", torch.int64, torch.int64)


@lowers(*named("cummax"))
def _cummax(call: Call, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _extreme_scan(call, x, dim, "max")


@lowers(*named("cummin"))
def _cummin(call: Call, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _extreme_scan(call, x, dim, "min")
