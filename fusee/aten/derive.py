"""What passes compute from parameters that is no single ATen operator.

These functions appear as static nodes of the graph until `constants` moves them out. What they
compute per channel they compute in float64: folding must not cost accuracy that eager has.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DERIVATIONS", "folded_bias", "folded_weight", "norm_scale", "norm_shift"]


def norm_scale(
    weight: Tensor | None, variance: Tensor, eps: float, dtype: torch.dtype, trailing: int = 0
) -> Tensor:
    """The factor that batch norm multiplies each channel by: (channels, 1, .. trailing times)."""
    scale = (variance.double() + eps).rsqrt_()
    if weight is not None:
        scale *= weight
    return scale.to(dtype).view(-1, *[1] * trailing)


def norm_shift(
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    dtype: torch.dtype,
    trailing: int = 0,
) -> Tensor:
    """What batch norm adds to each channel after the factor; of the same shape."""
    return folded_bias(None, weight, bias, mean, variance, eps, dtype).view(-1, *[1] * trailing)


def folded_weight(
    layer_weight: Tensor,
    weight: Tensor | None,
    variance: Tensor,
    eps: float,
    transposed_groups: int,
    dtype: torch.dtype,
) -> Tensor:
    """A layer's weight with the following batch norm's factor in it.

    shapes   (out, ...), or with transposed_groups = g > 0 a transposed convolution's
             (in, out / g, ...), whose g groups of inputs make consecutive groups of outputs
    """
    scale = norm_scale(weight, variance, eps, dtype)
    wide = layer_weight.to(dtype)
    if not transposed_groups:
        return wide * scale.view(-1, *[1] * (wide.dim() - 1))
    rest = wide.shape[1:]
    grouped = wide.reshape(transposed_groups, -1, *rest)
    scale = scale.view(transposed_groups, 1, rest[0], *[1] * (len(rest) - 1))
    return (grouped * scale).reshape(wide.shape)


def folded_bias(
    layer_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """A layer's bias with the following batch norm in it; 1-d."""
    centre = mean.double().neg() if layer_bias is None else layer_bias.double() - mean
    shift = centre * norm_scale(weight, variance, eps, torch.float64)
    if bias is not None:
        shift += bias
    return shift.to(dtype)


DERIVATIONS = frozenset({norm_scale, norm_shift, folded_weight, folded_bias})
