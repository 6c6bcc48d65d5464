"""Of normalisations, and of what has no other place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusee.sym.metas.table import (
    METAS,
    Meta,
    Op,
    aten,
    empty,
    laid_out,
    like,
    meta,
    suggested_layout,
)

_ROWS = torch.contiguous_format


@meta(aten._softmax.default, aten._log_softmax.default)
def _softmax(x: torch.Tensor, axis: int, to_float: bool) -> torch.Tensor:
    return empty(x.shape, x.dtype)


@meta(aten.native_layer_norm.default)
def _native_layer_norm(
    x: torch.Tensor,
    shape: Sequence[Any],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    outer = x.dim() - len(shape)
    sizes = [list(p.shape) for p in (weight, bias) if p is not None]
    if not shape or any(size != list(shape) for size in (list(x.shape[outer:]), *sizes)):
        raise RuntimeError(f"layer_norm over {list(shape)} of a tensor of size {list(x.shape)}")
    rows = [*x.shape[:outer], *[1] * len(shape)]
    dtype = _statistics_dtype(x, weight, bias)
    return empty(x.shape, x.dtype), empty(rows, dtype), empty(rows, dtype)


@meta(aten.native_group_norm.default)
def _native_group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: Any,
    channels: Any,
    pixels: Any,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    sizes = {p.numel() for p in (weight, bias) if p is not None}
    if type(channels) is int and (sizes - {channels} or channels % groups):
        raise RuntimeError(f"group_norm of {channels} channels in {groups} groups, weights {sizes}")
    dtype = _statistics_dtype(x, weight, bias)
    out = laid_out(x.shape, x.dtype, suggested_layout(x))
    return out, empty((n, groups), dtype), empty((n, groups), dtype)


def _statistics_dtype(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.dtype:
    """float32 if the parameters are wider than x, as in mixed precision."""
    is_mixed = any(p is not None and p.dtype != x.dtype for p in parameters)
    return torch.float32 if is_mixed else x.dtype


@meta(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return _batch_normalised(x, rest[:4], (0,))


@meta(aten.native_batch_norm.default)
def _batch_norm_whole(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> tuple[torch.Tensor, ...]:
    rows = (x.shape[1],) if training else (0,)
    return _batch_normalised(x, (weight, bias, mean, var), rows)


@meta(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return _batch_normalised(x, rest[:2], (x.shape[1],))


@meta(aten._native_batch_norm_legit_functional.default)
def _batch_norm_functional(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> tuple[torch.Tensor, ...]:
    rows = (x.shape[1],) if training else (0,)
    found = _batch_normalised(x, (weight, bias, mean, var), rows)
    return *found, like(mean, mean.dtype), like(var, var.dtype)


def _batch_normalised(
    x: torch.Tensor, parameters: Sequence[torch.Tensor | None], rows: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    dtype = _statistics_dtype(x, *parameters)
    out = laid_out(x.shape, x.dtype, suggested_layout(x))
    return out, empty(rows, dtype), empty(rows, dtype)


def _in_the_layout_of_x(op: Op) -> Meta:
    """Of a kernel that fills the memory format which its operand suggests."""

    def result(x: torch.Tensor, *args: Any) -> torch.Tensor:
        found: torch.Tensor = op(x, *args)
        layout = suggested_layout(x)
        return found if layout == _ROWS else laid_out(found.shape, x.dtype, layout)

    return result


for _op in (
    *(aten.reflection_pad2d.default, aten.reflection_pad3d.default),
    *(aten.replication_pad2d.default, aten.replication_pad3d.default),
):
    METAS[_op] = _in_the_layout_of_x(_op)


@meta(aten.roll.default)
def _roll(x: torch.Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Any:
    found, layout = aten.roll.default(x, shifts, dims), suggested_layout(x)
    # a cat of two parts for each axis: an empty part suggests rows
    if layout == _ROWS or not dims or any(s % x.shape[d] == 0 for s, d in zip(shifts, dims)):
        return found
    return laid_out(x.shape, x.dtype, layout)


@meta(aten._linalg_svd.default)
def _svd(x: torch.Tensor, full: bool = False, vectors: bool = True, **kwargs: Any) -> Any:
    u, s, v = aten._linalg_svd.default(x, full, vectors, **kwargs)
    return u, s, empty(v.mT.shape, v.dtype).mT if vectors else v  # LAPACK's is column-major


@meta(aten.linalg_eig.default)
def _eig(x: torch.Tensor) -> Any:
    values, vectors = aten.linalg_eig.default(x)
    return values, vectors.mT.contiguous().mT  # column-major, as LAPACK writes them


@meta(aten.nonzero_static.default)
def _nonzero_static(x: torch.Tensor, *, size: Any, fill_value: int = -1) -> torch.Tensor:
    return empty((size, x.dim()), torch.int64)
