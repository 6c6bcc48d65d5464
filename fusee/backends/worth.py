"""Whether an engine should have a region that it could have.

Engines write down what a permutation or a strided slice gives, one element after another; our
compiler reads through them, and mostly pays nothing. An element so copied takes OpenVINO about as
long as a hundred operations of a matrix product. A region that copies for longer than it multiplies
is therefore ours: the scan of a state space model has 15 operations per element that is copied,
vision models with windows have 600, language models over 1,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusee.aten.operators import is_view
from fusee.autodiff.costs import Costs

__all__ = ["why_not_worth"]

aten = torch.ops.aten

_HEAVY = frozenset(
    {
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.convolution.default,
        aten.linear.default,
        aten.mm.default,
        aten.scaled_dot_product_attention.default,
    }
)
_COPIES = (aten.clone.default, aten.copy.default)
# Operations of products in the time that one element takes to be put elsewhere.
_FLOPS_OF_COPY = 100
# Elements that are copied in a millisecond, about: less is not worth leaving the engine for.
_FEW = 1 << 20


def why_not_worth(nodes: Sequence[fx.Node], costs: Costs, least: int, device: str) -> str | None:
    """Why these calls, one region, are better not an engine's; None if they are good for it.

    least    calls that compute, unless one of them is heavy
    device   the engine's: copies are weighed on the "CPU", which our compiler has as well
    """
    calls = [n for n in nodes if not is_view(n.target) and n.target not in _COPIES]
    if len(calls) < least and not any(node.target in _HEAVY for node in calls):
        return f"{len(nodes)} calls are too few"
    copied = sum(_copied(node, costs) for node in nodes) if device == "CPU" else 0
    if copied > _FEW and sum(map(costs.flops, nodes)) < _FLOPS_OF_COPY * copied:
        return (
            f"putting {copied / 1e6:.1f} million elements elsewhere takes longer than its products"
        )
    return None


def _copied(node: fx.Node, costs: Costs) -> int:
    """Elements that a call puts elsewhere one by one."""
    val: Any = node.meta.get("val")
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        moved = [axis for axis, n in zip(order, val.shape, strict=True) if n != 1]
        return costs.count(val) if moved != sorted(moved) else 0
    is_strided = node.target is aten.slice.Tensor and len(node.args) > 4 and node.args[4] != 1
    return costs.count(val) if is_strided else 0
