"""What it costs to keep a value for the backward, and what to compute it there once more.

Both are counted in the time that a tenth of a byte takes to go to or from memory. An addition per
element takes about two of these on a core with wide vectors. Memory that is held until the backward
costs more than going there and back: it is not in any cache, and its pages are often new.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusee.aten.graph import AtenGraph
from fusee.aten.operators import is_creation, is_view
from fusee.aten.tidy import is_pure
from fusee.sym.parts import hint

__all__ = ["HOLD", "MOVE", "Costs", "Kind", "kind"]

aten = torch.ops.aten

MOVE = 10  # a byte to or from memory
HOLD = 40  # a byte kept until the backward reads it
_STEP = 2  # one operation on one element
_FLOP = 1  # half a multiplication and addition inside a matrix product; at least


class Kind(enum.Enum):
    """What computing a node once more means."""

    INPUT = "an input of the graph"
    FREE = "a view, a part of a tuple, or made from nothing"
    POINTWISE = "element by element: fuses into whatever reads it"
    MOVING = "elements put elsewhere"
    REDUCTION = "one or two passes over the operands"
    HEAVY = "never worth it unless memory is scarce"
    ONCE = "random, or of unknown effect: only ever once"


# Not tagged as pointwise by torch, or not by all versions.
_POINTWISE = frozenset(
    "_prelu_kernel _prelu_kernel_backward _to_copy clamp_backward clone copy elu_backward"
    " fill gelu_backward glu glu_backward hardsigmoid hardsigmoid_backward hardswish"
    " hardswish_backward hardtanh hardtanh_backward leaky_relu_backward lift_fresh_copy"
    " log_sigmoid_backward log_sigmoid_forward prelu silu_backward softplus_backward tril triu"
    " zeros_like ones_like full_like".split()
)
_MOVING = frozenset(
    "_unsafe_index as_strided_scatter cat constant_pad_nd diagonal_scatter embedding flip gather"
    " index index_select reflection_pad1d reflection_pad2d reflection_pad3d repeat"
    " replication_pad1d replication_pad2d replication_pad3d roll select_scatter slice_scatter stack"
    " upsample_nearest1d upsample_nearest2d upsample_nearest3d".split()
)
_REDUCTIONS = frozenset(
    "_fused_rms_norm _native_batch_norm_legit _native_batch_norm_legit_functional all amax amin any"
    " argmax argmin count_nonzero linalg_vector_norm logsumexp max mean min native_group_norm"
    " native_layer_norm prod std std_mean sum var var_mean".split()
)
_WORK = {
    **dict.fromkeys("div reciprocal sqrt rsqrt".split(), 4),
    **dict.fromkeys("remainder fmod floor_divide".split(), 12),
    **dict.fromkeys("exp exp2 expm1 log log2 log10 log1p sigmoid silu logaddexp elu".split(), 14),
    **dict.fromkeys("sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh".split(), 16),
    **dict.fromkeys("erf erfc erfinv lgamma digamma gelu mish softplus xlogy".split(), 24),
    **dict.fromkeys("pow atan2 hypot".split(), 24),
}


@functools.cache
def _kind_of(op: Any) -> Kind:
    if not isinstance(op, OpOverload):
        return Kind.FREE if op is operator.getitem else Kind.ONCE
    if op.namespace != "aten":
        return Kind.ONCE
    if is_view(op) or is_creation(op):
        return Kind.FREE
    name = _name(op)
    if name in _POINTWISE or torch.Tag.pointwise in op.tags:
        return Kind.POINTWISE
    if name in _MOVING:
        return Kind.MOVING
    return Kind.REDUCTION if name in _REDUCTIONS else Kind.HEAVY


def kind(node: fx.Node) -> Kind:
    """What `node` is; constants of the graph are FREE, there is no need to keep them."""
    if node.op == "placeholder":
        return Kind.INPUT
    if node.op == "get_attr":
        return Kind.FREE
    return _kind_of(node.target) if is_pure(node) else Kind.ONCE


@functools.cache
def _name(op: OpOverload) -> str:
    return op._schema.name.partition("::")[2]


class Costs:
    """Sizes and work of the nodes of one graph; symbolic sizes count as in the first call."""

    def __init__(self, aten: AtenGraph) -> None:
        self._to_size = aten.to_size
        self._bytes: dict[fx.Node, int] = {}

    def count(self, x: torch.Tensor) -> int:
        """Elements of a node's `val`."""
        return math.prod(map(self._hint, x.shape))

    def _hint(self, n: Any) -> int:
        return n if type(n) is int else hint(self._to_size(n))

    def bytes(self, node: fx.Node) -> int:
        """Bytes of a node's results; 0 for what is no tensor."""
        found = self._bytes.get(node)
        if found is None:
            val = node.meta.get("val")
            parts = val if isinstance(val, (tuple, list)) else (val,)
            tensors = [x for x in parts if isinstance(x, torch.Tensor)]
            found = self._bytes[node] = sum(self.count(x) * x.itemsize for x in tensors)
        return found

    def work(self, node: fx.Node, sort: Kind) -> int:
        """Computing `node` from operands that are at hand, inside a larger kernel if it can be."""
        if sort in (Kind.FREE, Kind.INPUT):
            return 0
        val = node.meta.get("val")
        if sort is Kind.POINTWISE:
            # the first operation that fuses costs next to nothing, yet is not free
            elements = max(map(self.count, _tensors(val)), default=0)
            return 1 + elements * _STEP * _WORK.get(_name(_op(node)), 1)
        moved = self.bytes(node) * MOVE
        if sort is Kind.MOVING:
            return 2 * moved
        read = sum(map(self.bytes, node.all_input_nodes)) * MOVE
        if sort is Kind.REDUCTION:
            return 2 * (read + moved)
        return max(self.flops(node) * _FLOP, 8 * (read + moved))

    def flops(self, node: fx.Node) -> int:
        """Of matrix products and convolutions; 0 for others, whose operands are what counts."""
        operands = [_tensors(arg.meta.get("val")) for arg in node.all_input_nodes]
        vals = [row[0] for row in operands if row]
        results = _tensors(node.meta.get("val"))
        if len(vals) < 2 or not results:
            return 0
        name = _name(_op(node))
        out = self.count(results[0])
        if name == "convolution":
            return 2 * out * math.prod(map(self._hint, vals[1].shape[1:]))
        if name in ("mm", "bmm", "mv", "linear", "addmm", "baddbmm", "addmv"):
            left = vals[1] if name.startswith(("addm", "badd")) else vals[0]
            return 2 * out * self._hint(left.shape[-1])
        if "scaled_dot_product" in name:
            return 4 * out * self._hint(vals[1].shape[-2])
        return 0


def _op(node: fx.Node) -> OpOverload:
    assert isinstance(node.target, OpOverload), node.format_node()
    return node.target


def _tensors(val: Any) -> list[torch.Tensor]:
    parts = val if isinstance(val, (tuple, list)) else (val,)
    return [x for x in parts if isinstance(x, torch.Tensor)]
