"""Concatenations that grow: cat([a, b]), cat([a, b, c]), ... share one buffer.

Each is the beginning of the longest. The buffer has the longest one's shape, every part is written
once, when the first concatenation that has it is lowered, and each concatenation is a slice of the
buffer. Without this, a dense block with n layers would copy its first part n times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusee.loops.lower.shape import narrow
from fusee.loops.lower.strides import dense, stride_order
from fusee.loops.lower.tensor import Strided, Tensor
from fusee.sym.expr import Size

aten = torch.ops.aten


@dataclass(eq=False)
class Growth:
    """One family of concatenations along `dim`; `length` is the longest's size there."""

    dim: int
    length: Size = 0
    whole: Tensor | None = None
    written: int = 0  # how many parts are in the buffer
    end: Size = 0  # where they end

    def take(self, parts: Sequence[Tensor]) -> Tensor:
        """The concatenation of `parts`, those written before and new ones."""
        lowering = parts[0].lowering
        if self.whole is None:
            first = parts[0]
            shape = (*first.shape[: self.dim], self.length, *first.shape[self.dim + 1 :])
            order = stride_order(first.shape, lowering.realise(first).strides)
            self.whole = lowering.whole(lowering.buffer(shape, first.dtype, dense(shape, order)))
        storage = self.whole.storage
        assert storage is not None
        total: Size = 0
        for position, part in enumerate(parts):
            if position >= self.written:
                offset = storage.offset + self.end * storage.strides[self.dim]
                lowering.write_into(part, Strided(storage.buffer, storage.strides, offset))
                self.written += 1
                self.end = self.end + part.shape[self.dim]
            total = total + part.shape[self.dim]
        return narrow(self.whole, self.dim, 0, total)


def growing(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[Growth, fx.Node]]:
    """The family of each concatenation that has one, with the family's longest member."""
    found: dict[fx.Node, tuple[Growth, fx.Node]] = {}
    cats = [node for node in nodes if _is_plain_cat(node)]
    by_start: dict[tuple[Any, Any, int], list[fx.Node]] = {}
    for node in cats:
        parts = node.args[0]
        assert isinstance(parts, (list, tuple))
        by_start.setdefault((parts[0], parts[1], _dim(node)), []).append(node)
    for (_, _, dim), family in by_start.items():
        longest = max(family, key=lambda node: len(node.args[0]))  # type: ignore[arg-type]
        everything = list(longest.args[0])  # type: ignore[arg-type]
        members = [
            node
            for node in family
            if list(node.args[0]) == everything[: len(node.args[0])]  # type: ignore[arg-type]
        ]
        if len(members) > 1:
            growth = Growth(dim)
            found.update(dict.fromkeys(members, (growth, longest)))
    return found


def _is_plain_cat(node: fx.Node) -> bool:
    """A cat of two or more tensors of one dtype that are not empty."""
    if node.target is not aten.cat.default:
        return False
    parts = node.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) < 2:
        return False
    metas = [part.meta["val"] for part in parts if isinstance(part, fx.Node)]
    first = metas[0]
    return first.dim() > 0 and all(m.dtype == first.dtype and m.dim() == first.dim() for m in metas)


def _dim(node: fx.Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return int(dim % node.meta["val"].dim())
