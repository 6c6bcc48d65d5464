"""What a graph computes from no input is computed ahead, and becomes a constant.

For graphs that are split: T5's position buckets, int64 from aranges alone, were no engine's, and
parted what is. Our own compiler keeps such values with the weights (`constants`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

from fusee.aten.graph import AtenGraph
from fusee.aten.passes.constants import FREE, Budget, closure, frontier
from fusee.aten.passes.edit import Editor, val
from fusee.config import Options

__all__ = ["fold"]

# Constants may take this part of the parameters' memory.
_SHARE = 16


def fold(aten: AtenGraph, options: Options) -> None:
    """Change `aten` in place. Its results, and views and fills, stay as they are."""
    edit = Editor(aten, options, parameters=False)
    inputs = zip(aten.placeholders, aten.inputs, strict=True)
    most = max(FREE, sum(edit.bytes(node) for node, spec in inputs if spec.is_static) // _SHARE)
    results = set(aten.results)
    kept = [n for n in frontier(edit, Budget(edit, most, free=most)) if n not in results]
    values = _values(aten, closure(kept))
    for node in kept:
        value = values.get(node)
        if isinstance(value, Tensor) and _geometry(value) == _geometry(val(node)):
            name = f"_folded{len(aten.constants)}"
            aten.constants[name] = value
            with edit.before(node):
                made = aten.graph.create_node("get_attr", name)
            made.meta = dict(node.meta)
            edit.replace(node, made)


def _values(aten: AtenGraph, needed: set[fx.Node]) -> dict[fx.Node, Any]:
    """What these nodes give, but for those that raise: in a call they do so in their turn."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in aten.graph.nodes:
            if node not in needed:
                continue
            if node.op == "get_attr":
                values[node] = aten.constants[str(node.target)]
            elif all(arg in values for arg in node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    values[node] = cast(Callable[..., Any], node.target)(*args, **kwargs)
                except (RuntimeError, IndexError, ValueError):
                    continue
    return values


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, tuple(x.shape), x.stride()
