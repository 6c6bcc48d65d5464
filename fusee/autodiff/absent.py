"""A backward without some tangents: what a joint graph is when no loss came through some results.

Eager does not run the backward of what no gradient reaches; where several gradients meet, it adds
those that are there. So it is here: what depends on missing gradients alone is missing too, a sum
with one is the other operand, and anything else takes zeros for it. A gradient that is missing is
None, as eager leaves it, and an infinite derivative is not multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from fusee.aten.operators import is_view
from fusee.aten.torch_api import same_ints
from fusee.autodiff.choice import Facts
from fusee.autodiff.joint import Joint

__all__ = ["Instead", "instead_of", "is_moved", "needed_for", "operands", "resolved"]

# What takes the place of a node; None: nothing, its value is zeros. Others stay.
Instead = Mapping[fx.Node, fx.Node | None]


def instead_of(joint: Joint, facts: Facts, absent: frozenset[int]) -> Instead:
    """What becomes of the nodes of the backward without the tangents numbered `absent`."""
    tangents = joint.aten.placeholders[joint.forward_inputs :]
    behind = joint.backward_nodes()
    incoming = _incoming(facts.nodes, behind)
    found: dict[fx.Node, fx.Node | None] = {tangents[k]: None for k in absent}
    for node in facts.nodes:
        if node not in behind or node in tangents:
            continue
        function = node.meta.get("function")
        gradients = _behind(node, behind) if function is None else incoming[function]
        there = [x for x in gradients if resolved(found, x) is not None]
        if not there:
            found[node] = None
        elif len(there) < len(gradients) and function is None and _is_sum(node, there[0]):
            found[node] = resolved(found, there[0])
    return found


def resolved(instead: Instead, node: fx.Node) -> fx.Node | None:
    """What `node` has become."""
    return instead.get(node, node)


def operands(instead: Instead, node: fx.Node) -> list[fx.Node]:
    """What the operands of `node` have become, those that are left."""
    found = node.all_input_nodes
    if not instead:
        return found
    return [x for x in (resolved(instead, arg) for arg in found) if x is not None]


def needed_for(gradients: Iterable[fx.Node], instead: Instead) -> set[fx.Node]:
    """These nodes and all that they depend on now."""
    found = set(gradients)
    row = list(found)
    for node in row:
        for x in operands(instead, node):
            if x not in found:
                found.add(x)
                row.append(x)
    return found


def is_moved(instead: Instead, node: fx.Node) -> bool:
    """Whether `node` is a view of something that another node has taken the place of."""
    while node.op == "call_function" and is_view(node.target):
        node = node.all_input_nodes[0]
        if node in instead:
            return True
    return False


def _behind(node: fx.Node, behind: set[fx.Node]) -> list[fx.Node]:
    return [x for x in node.all_input_nodes if x in behind]


def _incoming(nodes: Iterable[fx.Node], behind: set[fx.Node]) -> dict[int, list[fx.Node]]:
    """The gradients that go into each call of a Function's backward, which may do anything."""
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        number = node.meta.get("function")
        if number is not None and node in behind:
            row = found.setdefault(number, [])
            row += [x for x in _behind(node, behind) if x.meta.get("function") != number]
    return found


def _is_sum(node: fx.Node, other: fx.Node) -> bool:
    """Whether `node` adds something to `other`, and lies in memory as that does."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return False
    x, y = node.meta["val"], other.meta["val"]
    return x.dtype is y.dtype and same_ints(x.shape, y.shape) and same_ints(x.stride(), y.stride())
