"""Autocast on meta tensors: torch's cast policy, applied where its dispatcher would apply it.

Autocast is a dispatch key of a device, and meta tensors have none. But every operator comes to
the tracer where it would come to that key, so its arguments are cast here, by torch's own list:
the operators registered for the key. Those named below cast down or promote, all others on the
list run in float32. Inside a listed operator autocast is off.

source aten/src/ATen/autocast_mode.cpp; a test compares the kinds with what torch does
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from fusee.aten.torch_api import OpOverload, op_name, ops_with_kernel
from fusee.source import Args, Kwargs

Kind = Literal["lower", "float32", "promote", "dtype", "norm"]


class _Casts(NamedTuple):
    """Autocast of a device. Operators on its list that are named nowhere run in float32.

    lower    take the lower precision; promote: float32 if an argument has it
    dtype    are asked for a float32 result, and get no other arguments
    """

    key: str
    lower: frozenset[str]
    promote: frozenset[str]
    dtype: frozenset[str] = frozenset()


CASTS = {
    "cpu": _Casts(
        "AutocastCPU",
        frozenset(
            "_addmm_activation _convolution _native_multi_head_attention addbmm addmm baddbmm bmm"
            " conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"
            " linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu"
            " scaled_dot_product_attention".split()
        ),
        frozenset("cat index_copy stack".split()),
    ),
    "cuda": _Casts(
        "AutocastCUDA",
        frozenset(
            "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d"
            " conv_transpose3d convolution cudnn_convolution cudnn_convolution_transpose prelu"
            " addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm"
            " chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell"
            " gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention"
            " scaled_dot_product_attention".split()
        ),
        frozenset(
            "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot"
            " scatter_add".split()
        ),
        frozenset(
            "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm"
            " sum".split()
        ),
    ),
}


@functools.cache
def kind_of(op: OpOverload, device: str = "cpu") -> Kind | None:
    """What autocast does to the arguments of `op` on a device; None if nothing."""
    casts = CASTS[device]
    if op_name(op) not in ops_with_kernel(casts.key):
        return None
    name = op_name(op).removeprefix("aten::").partition(".")[0]
    if name in casts.dtype:
        return "dtype"
    if name == "norm" and casts.dtype:
        return "norm"
    return "lower" if name in casts.lower else "promote" if name in casts.promote else "float32"


# The form of `norm` that is asked for a dtype.
_NORMS = {
    torch.ops.aten.norm.Scalar: torch.ops.aten.norm.ScalarOpt_dtype,
    torch.ops.aten.norm.ScalarOpt_dim: torch.ops.aten.norm.ScalarOpt_dim_dtype,
}


def as_autocast_calls(
    op: OpOverload,
    kind: Kind,
    lower: torch.dtype,
    args: Args,
    kwargs: Kwargs,
    convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """An operator and its arguments as autocast passes them on: float64 is left alone."""
    if kind in ("dtype", "norm"):
        places = [x.name for x in op._schema.arguments].index("dtype") if kind == "dtype" else 99
        given = kwargs.get("dtype") or (args[places] if len(args) > places else None)
        if given is not None or not args[0].dtype.is_floating_point or args[0].dtype.itemsize > 4:
            return op, args, kwargs
        args = (*args, *((False,) if kind == "norm" and len(args) == 3 else ()))
        return _NORMS.get(op, op), args, {**kwargs, "dtype": torch.float32}
    target = torch.float32 if kind == "float32" else lower
    if kind == "promote" and _any_float32((args, tuple(kwargs.values()))):
        target = torch.float32

    def cast(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.dtype.is_floating_point and x.dtype not in (target, torch.float64):
                return convert(x, target)
            return x
        return type(x)(map(cast, x)) if isinstance(x, (list, tuple)) else x

    return op, tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


def _any_float32(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.dtype is torch.float32
    return isinstance(x, (list, tuple)) and any(map(_any_float32, x))
