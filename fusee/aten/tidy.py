"""Dead code and common subexpressions of a functional graph."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from fusee.aten.torch_api import OpOverload, op_name
from fusee.sym.raising import may_raise, raises

__all__ = ["is_pure", "merge_equal", "must_run", "refuses", "remove_dead"]

# Random only if this argument is not zero.
_DROPOUT = {
    torch.ops.aten.scaled_dot_product_attention.default: (4, "dropout_p"),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (3, "dropout_p"),
}


def is_pure(node: fx.Node) -> bool:
    """Whether the node may be dropped or merged: neither random nor with an effect."""
    target = node.target
    if isinstance(target, OpOverload):
        if not target._schema.returns:
            return False
        if torch.Tag.nondeterministic_seeded in target.tags:
            at = _DROPOUT.get(target)
            return at is not None and not _argument(node, *at)
    return True


def must_run(node: fx.Node) -> bool:
    """Whether a call stays even if nobody uses its results: it draws, has an effect, or may raise.

    Unlike an impure one, a call that may only raise gives the same each time.
    """
    return node.op == "call_function" and (not is_pure(node) or refuses(node))


def refuses(node: fx.Node) -> bool:
    """Whether a call may raise for what its operands hold."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    name = op_name(target).partition("::")[2].partition(".")[0]
    return may_raise(target) or raises(node, name, "val")


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def remove_dead(graph: fx.Graph) -> None:
    """Erase nodes that nobody uses, but for those that must run."""
    for node in reversed(graph.nodes):
        if not node.users and node.op in ("call_function", "get_attr") and not must_run(node):
            graph.erase_node(node)


def merge_equal(graph: fx.Graph, apart: Container[fx.Node]) -> None:
    """One node for equal calls, except for those in `apart`, whose memory must be their own."""
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not is_pure(node):
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        found = first.setdefault(key, node)
        if found is not node and node not in apart:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _key(x: Any) -> Any:
    """Hashable, and equal only for arguments that mean the same: 1, 1.0 and True don't."""
    if isinstance(x, (list, tuple)):
        return tuple(map(_key, x))
    if isinstance(x, dict):
        return tuple((name, _key(item)) for name, item in x.items())
    if isinstance(x, fx.Node):
        return x
    if isinstance(x, float):
        return float, x.hex()
    return type(x), x
