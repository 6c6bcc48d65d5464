"""What follows a packed operator and costs nothing inside it.

    relu(conv(x))              =>  conv(x, "relu")
    add(conv(x), y)            =>  conv.binary(x, y, "add")
    relu(add(conv(x), y))      =>  conv.binary(x, y, "add", "relu")

Only what oneDNN does in a few instructions: for gelu, silu, tanh and sigmoid its code is two to
four times slower than a separate pass over the result by our own (docs/decisions.md, Externs), so
those stay, and are fused with what follows them. bfloat16 and float16 keep their rounding between
operators: their sums are not fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.onednn import Packed, packed
from fusee.aten.operators import is_view
from fusee.aten.passes.edit import Editor, bound, only_user, val

__all__ = ["postops"]

aten = torch.ops.aten

PostOp = tuple[str, list[float], str]


def postops(edit: Editor) -> None:
    """Run the pass."""
    ops = packed()
    if ops is None:
        return
    done: dict[str, int] = {}
    for node in edit.calls(ops.conv, ops.linear):
        while (step := _step(edit, ops, node)) is not None:
            node, name = step
            done[name] = done.get(name, 0) + 1
    edit.notes += [f"{count} {name} inside packed operators" for name, count in done.items()]


def _step(edit: Editor, ops: Packed, node: fx.Node) -> tuple[fx.Node, str] | None:
    """Take the only user of `node` into it: the new node, and the name of what it took in."""
    user = only_user(node)
    if user is None or user.op != "call_function":
        return None
    if not isinstance(user.meta["val"], Tensor):
        return None
    if val(user).dtype is not val(node).dtype or val(user).shape != val(node).shape:
        return None
    unary = _unary(user)
    if unary is not None:
        return _take_unary(edit, ops, node, user, unary)
    if user.target is aten.add.Tensor:
        return _take_sum(edit, ops, node, user)
    return None


# ------------------------------------------------------------------------------ unary


def _unary(user: fx.Node) -> PostOp | None:
    """The post-op that `user` is, in oneDNN's names."""
    target = user.target
    if target is aten.relu.default:
        return "relu", [], ""
    if target is aten.hardswish.default:
        return "hardswish", [], ""
    if target is aten.leaky_relu.default:
        _, slope = bound(user, ("self", "negative_slope"), (0.01,))
        return "leaky_relu", [slope], ""
    if target is aten.hardtanh.default:
        _, low, high = bound(user, ("self", "min_val", "max_val"), (-1.0, 1.0))
        return "hardtanh", [low, high], ""
    if target is aten.clamp.default:
        _, low, high = bound(user, ("self", "min", "max"))
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high:
            return "hardtanh", [low, high], ""
    return None


def _take_unary(
    edit: Editor, ops: Packed, node: fx.Node, user: fx.Node, unary: PostOp
) -> tuple[fx.Node, str] | None:
    # after a sum only relu: the operator takes no other there
    takes = (node.target is ops.conv_binary and node.args[-3] is None and unary[0] == "relu") or (
        node.target in (ops.conv, ops.linear) and node.args[-3] == "none"
    )
    if not takes:
        return None
    return _replace(edit, node.target, [*node.args[:-3], *unary], node, user), unary[0]


def _replace(edit: Editor, target: Any, args: list[Any], node: fx.Node, user: fx.Node) -> fx.Node:
    if "layout" in node.meta:
        user.meta["layout"] = node.meta["layout"]
    return edit.become(user, target, *args)


# ------------------------------------------------------------------------------ sum


def _take_sum(
    edit: Editor, ops: Packed, node: fx.Node, user: fx.Node
) -> tuple[fx.Node, str] | None:
    left, right = user.args[:2]
    other = right if left is node else left
    if user.kwargs or not isinstance(other, fx.Node) or other is node:
        return None
    if val(node).dtype is not torch.float32 or val(other).dtype is not torch.float32:
        return None
    if val(other).shape != val(node).shape or node.args[-3] != "none":
        return None
    if not _is_stored(ops, other):
        return None
    x, weight, bias = node.args[:3]
    if node.target is ops.linear:
        args = [x, other, weight, bias, "add"]
        return _replace(edit, ops.linear_binary, args, node, user), "add"
    if node.target is ops.conv and "layout" in node.meta:
        args = [x, other, weight, bias, *node.args[3:7], "add", None, None, [], None]
        return _replace(edit, ops.conv_binary, args, node, user), "add"
    return None


def _is_stored(ops: Packed, node: fx.Node) -> bool:
    """Whether the operand is in memory anyway, in the layout of convolutions.

    An expression that only this sum uses would have to be stored for it: a pass more, not less.
    """
    if node.target in (ops.conv, ops.conv_binary, ops.linear, ops.linear_binary):
        return True
    return node.op == "call_function" and len(node.users) > 1 and not is_view(node.target)
