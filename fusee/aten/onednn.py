"""What oneDNN can do in this build of torch and on this processor. Adapter of torch.ops.mkldnn.

Tested with torch 2.13. torch.ops.mkldnn exists in builds with oneDNN for x86 and ARM; the packed
operators and their arguments are equal from 2.11 to 2.15.

A packed weight is an opaque tensor: it has the size of the weight it was made from, and no strides.
"""

from __future__ import annotations

import functools

import torch
from torch._ops import OpOverload

__all__ = ["Packed", "is_native", "packed"]


class Packed:
    """The packed operators. Linear takes inputs of any rank, convolution images."""

    def __init__(self) -> None:
        ops = torch.ops.mkldnn
        self.linear: OpOverload = ops._linear_pointwise.default
        self.linear_binary: OpOverload = ops._linear_pointwise.binary
        self.conv: OpOverload = ops._convolution_pointwise.default
        self.conv_binary: OpOverload = ops._convolution_pointwise.binary
        self.conv_binary_inplace: OpOverload = ops._convolution_pointwise_.binary
        self.reorder_linear: OpOverload = ops._reorder_linear_weight.default
        self.reorder_conv: OpOverload = ops._reorder_convolution_weight.default


def packed() -> Packed | None:
    """The packed operators, or None where this build has no oneDNN or it is switched off."""
    return _built_in() if torch.backends.mkldnn.enabled else None


@functools.cache
def _built_in() -> Packed | None:
    if not _available():
        return None
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    return Packed()


def _available() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@functools.cache
def is_native(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies matrices of `dtype` at least as fast as float32.

    Where it does not, ATen multiplies bfloat16 and float16 with scalar code, 8 to 25 times slower
    than float32 (docs/decisions.md, Externs).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not _available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
