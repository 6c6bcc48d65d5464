"""How to call the ATen operators that have no loops of ours, as cheaply as there is a way.

The overload `torch.ops.aten.mm.out` costs 3 to 5 us a call, the builtin `torch.mm` 1 to 2 us with
the same arguments (benchmarks.md, Externs). With `out` the result goes straight into the arena:
nothing is allocated, and no fresh page is touched. Operators without a row are called by their
overload. `out` needs grad mode off where a parameter is among the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusee.aten.torch_api import recurrent_layer
from fusee.fake.products import LAYERS

# ---------------------------------------------------------------------------- onednn
# What oneDNN can do in this build of torch and on this processor. Adapter of torch.ops.mkldnn.
#
# Tested with torch 2.13. torch.ops.mkldnn exists in builds with oneDNN for x86 and ARM; the packed
# operators and their arguments are equal from 2.11 to 2.15.
#
# A packed weight is an opaque tensor: it has the size of the weight it was made from, and no
# strides.


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
    than float32 (benchmarks.md, Externs).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not _available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


# ---------------------------------------------------------------------------- externs


aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ExternSpec:
    """A row: `call` takes the overload's arguments, `out` these and the keyword `out`.

    in_place  writes its result over the argument number `operand`, which it takes first
    exact     the tensors that it takes must have eager's strides
    """

    call: Callable[..., Any]
    out: Callable[..., Any] | None = None
    in_place: Callable[..., Any] | None = None
    operand: int = 0
    exact: bool = False


def _builtin(op: OpOverload) -> Callable[..., Any]:
    """`torch.lstm` of aten.lstm.input."""
    found: Callable[..., Any] = getattr(torch, op._schema.name.partition("::")[2])
    return found


# `out` only where the kernel writes into the given memory itself, of any row stride, and where what
# it writes does not depend on the strides of the result.
EXTERNS: dict[OpOverload, ExternSpec] = {
    aten.mm.default: ExternSpec(torch.mm, torch.mm),
    aten.bmm.default: ExternSpec(torch.bmm, torch.bmm),
    aten.addmm.default: ExternSpec(torch.addmm, torch.addmm),
    aten.baddbmm.default: ExternSpec(torch.baddbmm, torch.baddbmm),
    aten.mv.default: ExternSpec(torch.mv, torch.mv),
    aten.addmv.default: ExternSpec(torch.addmv, torch.addmv),
    aten.convolution.default: ExternSpec(torch.convolution),
    aten.mkldnn_rnn_layer.default: ExternSpec(recurrent_layer, exact=True),
    **{op: ExternSpec(_builtin(op), exact=True) for op in LAYERS},
}


# What tracing must not take apart: ATen runs it better as one call than as its parts, torch's parts
# give other bits, or the passes look for it.
WHOLE: frozenset[OpOverload] = frozenset(
    {
        aten.convolution.default,
        aten.dot.default,
        aten.embedding_dense_backward.default,
        aten.hardswish.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
        aten.linear.default,
        aten.logspace.default,
        aten.logspace.Scalar_Tensor,
        aten.logspace.Tensor_Scalar,
        aten.logspace.Tensor_Tensor,
        aten.max_unpool2d.default,
        aten.max_unpool3d.default,
        aten.relu.default,
        aten.scaled_dot_product_attention.default,
        aten.vdot.default,
    }
)


def extern_of(op: OpOverload) -> ExternSpec | None:
    """The row of `op`, if it has one."""
    found = EXTERNS.get(op)
    if found is None and op.namespace == "mkldnn":
        return _packed_rows().get(op)
    return found


@functools.cache
def _packed_rows() -> dict[OpOverload, ExternSpec]:
    ops = packed()
    if ops is None:
        return {}
    sum_over = ExternSpec(ops.conv_binary, in_place=ops.conv_binary_inplace, operand=1)
    return {ops.conv_binary: sum_over}


# ---------------------------------------------------------------------------- operators
# Facts about ATen operators, read from their schemas. Adapter of torch's schema objects.
#
# Tested with torch 2.13. The names used, `OpOverload._schema` with `alias_info` of its arguments
# and results, and `OpOverload.tags`, exist from 2.11 to 2.15.

_IMPURE_TAGS = (
    torch.Tag.nondeterministic_seeded,  # takes from the generator's stream
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


@functools.cache
def is_pure(op: Any) -> bool:
    """Whether equal arguments give an equal result of a known shape, and nothing else happens."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    if op._schema.is_mutable or not op._schema.returns:
        return False
    return not any(tag in op.tags for tag in _IMPURE_TAGS)


@functools.cache
def is_view(op: Any) -> bool:
    """Whether the result shares memory with the first argument (or may, as `reshape` may)."""
    if op is torch.ops.aten._unsafe_view.default or op is torch.ops.aten.reshape.default:
        return True
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    returns = op._schema.returns
    return bool(returns) and returns[0].alias_info is not None


def memory_root(node: fx.Node) -> fx.Node:
    """The node in whose memory a node's result is: itself, or what it is a view of."""
    while node.op == "call_function" and is_view(node.target):
        node = node.all_input_nodes[0]
    return node


@functools.cache
def is_creation(op: Any) -> bool:
    """Whether the result comes from no tensor: `full`, `arange`, `zeros`."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    return not any("Tensor" in str(argument.type) for argument in op._schema.arguments)
