"""How to call the ATen operators that have no loops of ours, as cheaply as there is a way.

The overload `torch.ops.aten.mm.out` costs 3 to 5 us a call, the builtin `torch.mm` 1 to 2 us with
the same arguments (docs/decisions.md, Externs). With `out` the result goes straight into the arena:
nothing is allocated, and no fresh page is touched. Operators without a row are called by their
overload. `out` needs grad mode off where a parameter is among the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from fusee.aten.onednn import packed
from fusee.aten.torch_api import recurrent_layer
from fusee.sym.metas.recurrent import LAYERS

__all__ = ["EXTERNS", "WHOLE", "ExternSpec", "extern_of"]

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
