"""Of Fourier transforms where MKL computes them: its batches come first, in the order of strides.

source   aten/src/ATen/native/mkl/SpectralOps.cpp
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusee.sym.metas.table import aten, meta


def _transformed(
    x: torch.Tensor, size: Sequence[Any], dims: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """What _exec_fft gives for a transform of these dimensions, in this order."""
    steps = x.stride()
    batch = sorted((d for d in range(x.dim()) if d not in dims), key=lambda d: -steps[d])
    strides = [0] * x.dim()
    step: Any = 1
    for d in reversed((*batch, *dims)):
        strides[d] = step
        step = step * size[d]
    return torch.empty_strided(size, strides, dtype=dtype, device="meta")


def _sorted(x: torch.Tensor, dims: Sequence[int]) -> list[int]:
    steps = x.stride()
    return sorted(dims, key=lambda d: -steps[d])


def _real_to_complex(
    x: torch.Tensor, dims: Sequence[int], normalization: int, onesided: bool
) -> Any:
    *others, last = dims
    size = list(x.shape)
    if onesided:
        size[last] = size[last] // 2 + 1
    return _transformed(x, size, [*_sorted(x, others), last], x.dtype.to_complex())


def _complex_to_real(
    x: torch.Tensor, dims: Sequence[int], normalization: int, last_size: Any
) -> Any:
    *others, last = dims
    if others:
        x = _transformed(x, x.shape, _sorted(x, others), x.dtype)
    size = list(x.shape)
    size[last] = last_size
    return _transformed(x, size, [last], x.dtype.to_real())


if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
    meta(aten._fft_r2c.default)(_real_to_complex)
    meta(aten._fft_c2r.default)(_complex_to_real)
