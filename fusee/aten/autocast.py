"""Autocast on meta tensors: torch's cast policy, applied where its dispatcher would apply it.

Autocast is a dispatch key of a device, and meta tensors have none. But every operator comes to the
tracer where it would come to that key, so its arguments are cast here, by torch's own list: the
operators registered for the key. Those named below cast down or promote, all others on the list
run in float32. Inside a listed operator autocast is off.

source   aten/src/ATen/autocast_mode.cpp; a test compares the kinds with what torch does
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch

from fusee.aten.torch_api import OpOverload, op_name, ops_with_kernel

__all__ = ["Kind", "cast_arguments", "kind_of"]

Kind = Literal["lower", "float32", "promote"]

_LOWER = frozenset(
    "_addmm_activation _convolution _native_multi_head_attention addbmm addmm baddbmm bmm conv1d"
    " conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d linalg_vecdot"
    " linear matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention".split()
)
_PROMOTE = frozenset("cat index_copy stack".split())


@functools.cache
def kind_of(op: OpOverload) -> Kind | None:
    """What autocast does to the arguments of `op` on the CPU; None if nothing."""
    if op_name(op) not in ops_with_kernel("AutocastCPU"):
        return None
    name = op_name(op).removeprefix("aten::").partition(".")[0]
    return "lower" if name in _LOWER else "promote" if name in _PROMOTE else "float32"


def cast_arguments(
    kind: Kind,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as autocast passes them on: floating tensors cast, float64 left alone."""
    target = torch.float32 if kind == "float32" else torch.get_autocast_dtype("cpu")
    if kind == "promote" and _any_float32((args, tuple(kwargs.values()))):
        target = torch.float32

    def cast(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.dtype.is_floating_point and x.dtype not in (target, torch.float64):
                return convert(x, target)
            return x
        return type(x)(map(cast, x)) if isinstance(x, (list, tuple)) else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


def _any_float32(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.dtype is torch.float32
    return isinstance(x, (list, tuple)) and any(map(_any_float32, x))
