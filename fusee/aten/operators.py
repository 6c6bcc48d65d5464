"""Facts about ATen operators, read from their schemas. Adapter of torch's schema objects.

Tested with torch 2.13. The names used, `OpOverload._schema` with `alias_info` of its arguments
and results, and `OpOverload.tags`, exist from 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten

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
