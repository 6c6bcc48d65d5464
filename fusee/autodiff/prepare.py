"""Rewrites of a joint graph that leave less to save.

narrow   a value that the backward may read again goes through the smallest dtype that holds it
fills    zeros_like(x) -> full(sizes of x): the backward does not need x for it
parts    zeros with a part put in + zeros with another part put in -> zeros with both put in
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from fusee.aten.geometry import is_row_major
from fusee.aten.torch_api import same_ints
from fusee.autodiff.joint import Joint
from fusee.autodiff.norms import open_norm
from fusee.autodiff.replay import replay

__all__ = ["prepare"]

aten = torch.ops.aten


def prepare(joint: Joint) -> None:
    """Rewrite the graph in place. Its results stay what they are, bit by bit."""
    graph = joint.aten.graph
    for node in list(graph.nodes):
        open_norm(joint.aten, node)
    for node in list(graph.nodes):
        if replay(joint, node):
            continue
        dtype = _narrow_dtype(node)
        if dtype is not None:
            _narrow(graph, node, dtype)
        elif node.op == "call_function" and node.target in _FILLS:
            _fill(joint, node)
        elif node.target is aten.add.Tensor and node.meta.get("backward"):
            _put_together(node)


def _narrow_dtype(node: fx.Node) -> torch.dtype | None:
    """A smaller dtype that holds every value that `node` can have."""
    val: Any = node.meta.get("val")
    if node.op != "call_function" or node.meta.get("backward"):
        return None
    if node.target in (aten.bernoulli.p, aten.bernoulli.default):
        return None if val.dtype is torch.bool else torch.bool  # zeros and ones
    if node.target is operator.getitem and node.args[1] == 1:
        source: Any = node.args[0]
        if source.target in _WINDOWS:
            plane = source.args[0].meta["val"].shape[-_WINDOWS[source.target] :]
            if all(type(n) is int for n in plane) and math.prod(plane) < 2**31:
                return torch.int32  # positions in a plane
    return None


_WINDOWS = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}


def _narrow(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> None:
    val = node.meta["val"]
    users = [user for user in node.users if user.op != "output"]
    if not users:
        return
    meta = {key: x for key, x in node.meta.items() if key != "recompute"}
    with graph.inserting_after(node):
        small = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    with graph.inserting_after(small):
        wide = graph.call_function(aten._to_copy.default, (small,), {"dtype": val.dtype})
    small.meta = {**meta, "val": torch.empty_like(val, dtype=dtype)}
    wide.meta = {**meta, "val": torch.empty_like(val)}
    for user in users:
        user.replace_input_with(node, wide)


# The number that fills the result: itself, or the position and name of the argument that says it.
_FILLS: dict[Any, float | tuple[int, str]] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.full_like.default: (1, "fill_value"),
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_full.default: (2, "fill_value"),
}


def _fill(joint: Joint, node: fx.Node) -> None:
    val = node.meta["val"]
    value: Any = _FILLS[node.target]
    if isinstance(value, tuple):
        at, name = value
        value = node.args[at] if len(node.args) > at else node.kwargs[name]
    if not is_row_major(val) or isinstance(value, fx.Node):
        return
    sizes: list[Any] = [joint.aten.to_size(n) for n in val.shape]
    node.target = aten.full.default
    node.args = (sizes, value)
    node.kwargs = {"dtype": val.dtype, "device": node.meta["device"]}


def _put_together(node: fx.Node) -> None:
    """Gradients of several parts of a tensor, of q, k and v say, are written, not added up."""
    if len(node.args) != 2 or node.kwargs:
        return
    a, b = node.args
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return
    there, new = _parts_put_in(a), _parts_put_in(b)
    strides = a.meta["val"].stride(), node.meta["val"].stride()
    is_alone = len(a.users) == 1 and same_ints(*strides)
    if is_alone and there and len(new) == 1:
        ((dim, start, end),) = new
        if all(at == dim and (last <= start or end <= first) for at, first, last in there):
            node.target, node.args = b.target, (a, *b.args[1:])


def _parts_put_in(node: fx.Node) -> list[tuple[int, int, int]]:
    """(axis, begin, end) of what was put into zeros for `node`; empty if it is no such thing."""
    found: list[tuple[int, int, int]] = []
    while node.target in _DEFAULTS and not node.kwargs:
        given: Any = (*node.args, *_DEFAULTS[node.target][len(node.args) :])
        node, _, dim, *rest = given
        size = node.meta["val"].shape[dim]
        if any(type(n) is not int for n in (size, dim, *rest)) or rest[2:] not in ([], [1]):
            return []
        if len(rest) == 1:
            start = rest[0] % size
            end = start + 1
        else:
            start, end, _ = slice(*rest).indices(size)
        found.append((dim % node.meta["val"].dim(), start, end))
    return found if node.target is aten.full.default and node.args[1] == 0 else []


_DEFAULTS: dict[Any, tuple[Any, ...]] = {
    aten.select_scatter.default: (None, None, 0, 0),
    aten.slice_scatter.default: (None, None, 0, 0, 2**63 - 1, 1),
}
