"""Of backward formulas: gradients lie in memory as what they are gradients of, or row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusee.sym.metas.table import aten, empty, laid_out, like, meta, suggested_layout


@meta(aten.native_layer_norm_backward.default)
def _layer_norm(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[Any],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    parts = (x, weight, bias)
    return tuple(
        empty(part.shape, part.dtype) if part is not None and asked else None
        for part, asked in zip(parts, mask)
    )


@meta(aten.native_batch_norm_backward.default)
def _batch_norm(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor | None,
    invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    dtype = x.dtype if weight is None else weight.dtype
    channels = (x.shape[1],)
    return (
        laid_out(x.shape, x.dtype, suggested_layout(x)) if mask[0] else None,
        empty(channels, dtype) if mask[1] else None,
        empty(channels, dtype) if mask[2] else None,
    )


@meta(aten.native_group_norm_backward.default)
def _group_norm(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    n: Any,
    channels: Any,
    pixels: Any,
    groups: int,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    dtype = x.dtype if weight is None else weight.dtype
    return (
        laid_out(x.shape, x.dtype, suggested_layout(x)) if mask[0] else None,
        empty((channels,), dtype) if mask[1] else None,
        empty((channels,), dtype) if mask[2] else None,
    )


@meta(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax(grad: torch.Tensor, out: torch.Tensor, axis: int, dtype: torch.dtype) -> torch.Tensor:
    return empty(grad.shape, dtype)


@meta(aten.mse_loss_backward.default, aten.huber_loss_backward.default)
@meta(aten.smooth_l1_loss_backward.default, aten.glu_backward.default)
@meta(aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default)
@meta(aten.fractional_max_pool3d_backward.default)
def _row_by_row(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return empty(x.shape, x.dtype)


@meta(aten.binary_cross_entropy_backward.default)
def _as_input(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return like(x, x.dtype)


@meta(aten.log_sigmoid_forward.default)
def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return empty(x.shape, x.dtype), empty(x.shape, x.dtype)


@meta(aten.convolution_backward.default)
def _convolution(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Sequence[Any] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Any:
    if x.dim() != 4:
        given = (stride, padding, dilation, transposed, extra, groups, mask)
        return aten.convolution_backward.default(grad, x, weight, bias, *given)
    layout = suggested_layout(x)
    if layout is torch.contiguous_format:
        layout = suggested_layout(weight)
    return (
        laid_out(x.shape, x.dtype, layout) if mask[0] else None,
        laid_out(weight.shape, weight.dtype, layout) if mask[1] else None,
        empty((grad.shape[1],), weight.dtype) if mask[2] else None,
    )
