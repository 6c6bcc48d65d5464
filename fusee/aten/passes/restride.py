"""An as_strided that moves no element becomes a copy, for graphs that are split.

Pools of channels-last images end in one, for the strides of axes of size one. No engine knows
strides, so it parted what is an engine's.
"""

from __future__ import annotations

from typing import Any

import torch

from fusee.aten.graph import AtenGraph

__all__ = ["restride"]

aten = torch.ops.aten


def restride(graph: AtenGraph) -> None:
    """Change `graph` in place. Metas stay as they are, strides included."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        source: Any = node.args[0]
        val, made = source.meta["val"], node.meta["val"]
        before, after = (
            [(graph.to_size(n), graph.to_size(step)) for n, step in zip(x.shape, x.stride())]
            for x in (val, made)
        )
        same = len(before) == len(after) and all(
            n == m and (n == 1 or step == other)
            for (n, step), (m, other) in zip(before, after, strict=True)
        )
        if same and val.storage_offset() == made.storage_offset() == 0 and val.dtype == made.dtype:
            node.target = aten.clone.default
            node.args, node.kwargs = (source,), {"memory_format": torch.preserve_format}
