"""Which calls may raise for what their operands hold. Such a call is never dead.

An operator is listed by its schema where that says enough: it returns nothing, or takes a tensor of
places. The rest are rows of a table. Adapter of torch's schema objects, tested with torch 2.13: the
names used, `OpOverload._schema` with the names of its arguments, exist from 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

# Arguments that say where: ATen compares them with the size of what they point into.
_PLACES = frozenset("index indices offsets lengths repeats pivots LU_pivots sorter".split())

# Compared with what they must lie between, solved, counted: by name, whatever the overload.
_NAMES = frozenset(
    """
    put binary_cross_entropy nll_loss nll_loss_nd nll_loss_forward nll_loss2d nll_loss2d_forward
    cross_entropy cross_entropy_loss one_hot multi_margin_loss multilabel_margin_loss
    multilabel_margin_loss_forward ctc_loss _ctc_loss masked_scatter histc histogram histogramdd
    bincount combinations embedding_bag take_along_dim bernoulli multinomial normal poisson binomial
    inverse det logdet slogdet cholesky cholesky_inverse cholesky_solve triangular_solve lu_solve
    lu_unpack geqrf ormqr orgqr svd pinverse qr matrix_exp fake_quantize_per_channel_affine
    fake_quantize_per_channel_affine_cachemask quantize_per_tensor quantize_per_channel
    max_unpool1d max_unpool2d max_unpool3d tensor_split
    """.split()
)
_FACTORS = ("linalg_", "_linalg_")
_NEVER = frozenset("linalg_cross linalg_vector_norm linalg_vecdot linalg_diagonal".split())

# Of integers: by zero, or to a negative power.
_DIVIDE = frozenset(
    "div divide floor_divide floordiv true_divide remainder mod fmod pow ldexp".split()
)
# Without an element there is no result.
_EXTREMES = frozenset(
    "max min amax amin aminmax argmax argmin mode kthvalue linalg_vector_norm norm".split()
)


@functools.cache
def may_raise(op: Any) -> bool:
    """Whether an operator may raise for the values of operands of any dtype.

    Gradients are of calls that did not raise.
    """
    if not isinstance(op, OpOverload):
        return False
    schema = op._schema
    name = schema.name.partition("::")[2]
    if not schema.returns:
        return True
    if name in _NEVER or name.endswith("_backward") or name.startswith("_unsafe_"):
        return False
    if name.rstrip("_") in _NAMES or name.startswith(_FACTORS):
        return True
    return any(a.name in _PLACES and "Tensor" in str(a.type) for a in schema.arguments)


@functools.cache
def name_may_raise(name: str) -> bool:
    """The same of what a program calls: `gather`, `index_add_`, `cross_entropy`."""
    name = name.strip("_")
    packet = getattr(torch.ops.aten, name, None)
    if name in _NAMES or name.startswith(_FACTORS):
        return name not in _NEVER
    if not isinstance(packet, OpOverloadPacket):
        return False
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    return any(may_raise(getattr(packet, overload)) for overload in names)


def raises(node: fx.Node, name: str, value: str) -> bool:
    """Whether this call may raise, beyond what its operator says.

    name    of the operator
    value   the entry of a node's meta that holds its result
    """
    name = name.strip("_")
    out = node.meta.get(value)
    if name in _DIVIDE or name[1:] in _DIVIDE:
        divisor = node.args[1] if len(node.args) > 1 else None
        is_safe = isinstance(divisor, (int, float)) and (divisor > 0 or "pow" not in name)
        is_whole = isinstance(out, torch.Tensor) and not out.is_floating_point()
        return is_whole and not (is_safe and divisor != 0)
    return name in _EXTREMES and any(_is_empty(x.meta.get(value)) for x in node.all_input_nodes)


def _is_empty(x: Any) -> bool:
    if not isinstance(x, torch.Tensor):
        return False
    return any(type(n) is int and n == 0 for n in x.shape)
