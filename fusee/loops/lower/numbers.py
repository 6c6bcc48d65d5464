"""Numbers as a dtype holds them, and the dtype in which ATen computes."""

from __future__ import annotations

from ctypes import c_float

import torch

__all__ = ["literal", "opmath"]


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ATen computes on `dtype`."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def literal(x: float | int | bool, dtype: torch.dtype) -> float | int | bool:
    """A number as `dtype` holds it."""
    if dtype is torch.float64:
        return float(x)
    if dtype is torch.float32:
        return c_float(x).value
    if dtype is torch.bool:
        return bool(x)
    if dtype.is_floating_point:
        return torch.tensor(x, dtype=torch.float64).to(dtype).item()
    bits = dtype.itemsize * 8
    whole = int(x) & ((1 << bits) - 1)
    return whole - (1 << bits) if dtype.is_signed and whole >> (bits - 1) else whole
