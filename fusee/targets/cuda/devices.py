"""A graph whose tensors are on a GPU and on the CPU: what of the CPU's becomes the GPU's.

ATen takes a number of the CPU beside tensors of a GPU: `x * torch.tensor(2.0)`, a float that
varies, a learning rate. Numbers that only the GPU uses are computed there, and come there if they
are inputs (`brought` in their node's meta). What is left on the CPU stays ATen's.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fusee.aten.graph import is_deterministic
from fusee.aten.rewriter import Editor
from fusee.loops.lower.graph import is_home
from fusee.loops.lower.tensor import HANDLERS

_to_copy = torch.ops.aten._to_copy.default


def numbers_home(edit: Editor, home: torch.device) -> None:
    """Pass over a graph for the GPU `home`."""
    aten = edit.aten
    moved = 0
    written = {aten.placeholders[mutation.index] for mutation in aten.mutations}
    first = next(node for node in edit.graph.nodes if node.op not in ("placeholder", "get_attr"))
    for node in reversed(list(edit.graph.nodes)):
        if not _is_number(node) or _is_at(node, home):
            continue
        there = [user for user in node.users if "device" in user.meta and _is_at(user, home)]
        if len(there) == len(node.users) and node not in written and _may_move(node):
            moved += bool(there)
            node.meta["device"] = home
            if node.op == "placeholder":
                node.meta["brought"] = True
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": home}
            continue
        users = [u for u in there if u.target is not _to_copy or "device" not in u.kwargs]
        if users:
            with edit.before(node.next if node.op == "call_function" else first):
                twin = edit.call(_to_copy, node, like=users[0], val=node.meta["val"], device=home)
            for user in users:
                user.replace_input_with(node, twin)
    if moved:
        edit.notes.append(f"{moved} numbers of the CPU are computed on {home}")


def _is_at(node: fx.Node, home: torch.device) -> bool:
    device = node.meta.get("device")
    return device is None or is_home(torch.device(device), home)


def _is_number(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.dim() == 0


def _may_move(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr")
    return node.target in HANDLERS and is_deterministic(node.target)
