"""Batch and group norm as their statistics and a formula, so that results need not be saved.

    native_group_norm(x, weight, bias, ...) -> (x - mean) * rstd * weight + bias
The operator stays for its statistics, which are small. The formula is the one that its lowering
computes the result by, in the same order of operations.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fusee.aten.graph import AtenGraph
from fusee.aten.torch_api import same_ints

__all__ = ["open_norm"]

aten = torch.ops.aten

_HALVES = (torch.bfloat16, torch.float16)
_BATCH_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)


def open_norm(aten_graph: AtenGraph, node: fx.Node) -> None:
    """Replace the result of `node`, if it is a norm and its statistics are not rounded."""
    is_group = node.target is aten.native_group_norm.default
    if not (is_group or node.target in _BATCH_NORMS):
        return
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    x, weight, bias = _operands(node)
    val, statistics = x.meta["val"], node.meta["val"][1:3]
    exact = torch.float32 if val.dtype in _HALVES else val.dtype
    if 0 not in parts or any(s.dtype is not exact for s in statistics):
        return
    if any(type(n) is not int for s in statistics for n in s.shape) or val.dim() < 2:
        return
    out = parts[0]
    if not same_ints(out.meta["val"].stride(), val.stride()):
        return
    write = _Writer(aten_graph.graph, node)
    like = out.meta["val"] if val.dtype is exact else out.meta["val"].to(exact)
    channels = [1, statistics[0].shape[-1], *[1] * (val.dim() - 2)]
    rows = []
    for k in (1, 2):
        row = write.item(k, parts.get(k))
        if is_group:
            row = write.per_channel(row, val)
        else:
            row = write(aten.view.default, row, channels)
        rows.append(row)
    y = write.made(aten.sub.Tensor, (write.cast(x, exact), rows[0]), like)
    y = write.made(aten.mul.Tensor, (y, rows[1]), like)
    channels[1] = val.shape[1]
    for operand, op in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
        if operand is not None:
            wide = write(aten.view.default, write.cast(operand, exact), channels)
            y = write.made(op, (y, wide), like)
    y = write.cast(y, val.dtype)
    out.replace_all_uses_with(y)
    aten_graph.graph.erase_node(out)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    x, weight, bias = (*node.args, None, None)[:3]
    assert isinstance(x, fx.Node)
    return (
        x,
        weight if isinstance(weight, fx.Node) else None,
        bias if isinstance(bias, fx.Node) else None,
    )


class _Writer:
    """Appends nodes right after a norm."""

    def __init__(self, graph: fx.Graph, norm: fx.Node) -> None:
        self.graph, self.norm, self.last = graph, norm, norm

    def __call__(self, op: Any, x: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        return self.made(op, (x, *args), op(x.meta["val"], *args, **kwargs), kwargs)

    def made(self, op: Any, args: tuple[Any, ...], val: Any, kwargs: Any = None) -> fx.Node:
        with self.graph.inserting_after(self.last):
            node = self.graph.create_node("call_function", op, name="norm")
        node.args, node.kwargs = args, kwargs or {}
        node.meta = {**self.norm.meta, "val": val}
        self.last = node
        return node

    def item(self, k: int, old: fx.Node | None) -> fx.Node:
        """Result `k` of the norm. Takes the place of `old`, which may come too late."""
        made = self.made(operator.getitem, (self.norm, k), self.norm.meta["val"][k])
        if old is not None:
            old.replace_all_uses_with(made)
            self.graph.erase_node(old)
        return made

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        if x.meta["val"].dtype is dtype:
            return x
        return self(aten._to_copy.default, x, dtype=dtype)

    def per_channel(self, row: fx.Node, x: torch.Tensor) -> fx.Node:
        """Statistics of groups, (batch, groups), for each channel of the groups."""
        batch, groups = row.meta["val"].shape
        each = x.shape[1] // groups
        row = self(aten.expand.default, self(aten.unsqueeze.default, row, 2), [batch, groups, each])
        row = self(aten.clone.default, row, memory_format=torch.contiguous_format)
        return self(aten.view.default, row, [batch, x.shape[1], *[1] * (x.dim() - 2)])
