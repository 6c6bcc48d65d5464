"""Of reductions, pooling, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusee.sym.metas.table import (
    Meta,
    aten,
    empty,
    laid_out,
    like,
    meta,
    overload,
    suggested_layout,
)

# ------------------------------------------------------------------------------ reductions


def _reduced(x: torch.Tensor, axes: Sequence[int] | int | None, keep: bool) -> list[Any] | None:
    """The shape; None if an axis is not one of `x`, which is torch's to say."""
    rank = x.dim()
    given = (axes,) if isinstance(axes, int) else axes or range(rank)
    if not all(-rank <= axis < rank for axis in given):
        return None
    gone = {axis % rank for axis in given}
    if len(gone) != len(given):
        return None
    return [1 if i in gone else n for i, n in enumerate(x.shape) if keep or i not in gone]


def _sum_like(op: Any, is_mean: bool) -> Meta:
    def result(
        x: torch.Tensor,
        axes: Sequence[int] | None = None,
        keep: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        shape = _reduced(x, axes, keep)
        summed = dtype or x.dtype
        is_inexact = summed.is_floating_point or summed.is_complex
        if shape is None or (is_mean and not is_inexact):
            return op(x, axes, keep, dtype=dtype)
        return empty(shape, summed if is_inexact or dtype else torch.int64)

    return result


meta(aten.sum.dim_IntList)(_sum_like(aten.sum.dim_IntList, False))
meta(aten.mean.dim)(_sum_like(aten.mean.dim, True))


@meta(aten.sum.default)
def _sum(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _sum_like(aten.sum.dim_IntList, False)(x, dtype=dtype)


@meta(aten.mean.default)
def _mean(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _sum_like(aten.mean.dim, True)(x, dtype=dtype)


def _extreme(op: Any) -> Meta:
    def result(x: torch.Tensor, axes: Sequence[int] = (), keep: bool = False) -> Any:
        shape = _reduced(x, axes, keep)
        if shape is None or x.numel() == 0:
            return op(x, axes, keep)
        return empty(shape, x.dtype)

    return result


meta(aten.amax.default)(_extreme(aten.amax.default))
meta(aten.amin.default)(_extreme(aten.amin.default))


def _place_of_extreme(op: Any) -> Meta:
    def result(x: torch.Tensor, axis: int | None = None, keep: bool = False) -> Any:
        shape = _reduced(x, axis, keep)
        if shape is None or x.numel() == 0:
            return op(x, axis, keep)
        return empty(shape, torch.int64)

    return result


meta(aten.argmax.default)(_place_of_extreme(aten.argmax.default))
meta(aten.argmin.default)(_place_of_extreme(aten.argmin.default))


@meta(aten.cumsum.default)
def _cumsum(x: torch.Tensor, axis: int, *, dtype: torch.dtype | None = None) -> Any:
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    return empty(x.shape, dtype or x.dtype)


# ------------------------------------------------------------------------------ pooling


def _pooled(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> list[Any] | None:
    """The shape; None for what torch has something to say about.

    source   aten/src/ATen/native/Pool.h, pooling_output_shape
    """
    if x.dim() not in (3, 4) or 0 in x.shape:
        return None
    shape = list(x.shape[:-2])
    for i, n in enumerate(x.shape[-2:]):
        k, p, d = (row[i % len(row)] for row in (kernel, padding, dilation))
        step = (stride or kernel)[i % len(stride or kernel)]
        if step <= 0 or d <= 0 or p < 0 or 2 * p > (k - 1) * d + 1:
            return None
        reach = n + 2 * p - d * (k - 1) - 1
        size = (reach + (step - 1 if ceil else 0)) // step + 1
        if ceil and (size - 1) * step >= n + p:
            size -= 1
        if size < 1:
            return None
        shape.append(size)
    return shape


@meta(aten.max_pool2d_with_indices.default)
def _max_pool2d(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> Any:
    shape = _pooled(x, kernel, stride, padding, dilation, ceil)
    if shape is None:
        return aten.max_pool2d_with_indices.default(x, kernel, stride, padding, dilation, ceil)
    layout = suggested_layout(x)
    return laid_out(shape, x.dtype, layout), laid_out(shape, torch.int64, layout)


@meta(aten.avg_pool2d.default)
def _avg_pool2d(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil: bool = False,
    *rest: Any,
) -> Any:
    shape = _pooled(x, kernel, stride, padding, (1,), ceil)
    if shape is None:
        return aten.avg_pool2d.default(x, kernel, stride, padding, ceil, *rest)
    return laid_out(shape, x.dtype, suggested_layout(x))


@meta(aten._adaptive_avg_pool2d.default)
def _adaptive_avg_pool2d(x: torch.Tensor, size: Sequence[Any]) -> Any:
    if x.dim() not in (3, 4) or len(size) != 2 or 0 in x.shape:
        return aten._adaptive_avg_pool2d.default(x, size)
    return laid_out((*x.shape[:-2], *size), x.dtype, suggested_layout(x))


@meta(aten.max_unpool2d.default)
def _max_unpool2d(x: torch.Tensor, index: torch.Tensor, size: Sequence[Any]) -> torch.Tensor:
    return laid_out((*x.shape[:-2], *size), x.dtype, suggested_layout(x))


# ------------------------------------------------------------------------------ copies


@meta(aten.clone.default)
def _clone(x: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> Any:
    if memory_format in (None, torch.preserve_format):
        return like(x, x.dtype)
    return laid_out(x.shape, x.dtype, memory_format)


@meta(aten._to_copy.default)
def _to_copy(x: Any, **kwargs: Any) -> Any:
    if not isinstance(x, torch.Tensor):  # a number that functorch has made a tensor of
        x = torch.scalar_tensor(x, device="meta")
    if kwargs.get("device") == x.device:
        del kwargs["device"]
    if set(kwargs) <= {"dtype", "non_blocking"}:
        return like(x, kwargs.get("dtype") or x.dtype)
    return aten._to_copy.default(x, **kwargs)


def _of_one(op: Any, is_like: bool) -> Meta:
    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") not in (None, x.device) or not {*kwargs} <= _SETTINGS:
            return op(x, *args, **kwargs)
        dtype = kwargs.get("dtype") or x.dtype
        return like(x, dtype) if is_like else empty(args[0], dtype)

    return run


_SETTINGS = {"dtype", "device", "pin_memory"}
for _name in ("empty_like", "zeros_like", "ones_like", "full_like"):
    meta(overload(_name))(_of_one(overload(_name), is_like=True))
for _name in ("new_empty", "new_zeros", "new_ones", "new_full"):
    meta(overload(_name))(_of_one(overload(_name), is_like=False))
