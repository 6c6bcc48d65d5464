"""Graphs of kept captures: their nodes wait until somebody wants them, which a backend need not.

What a graph names, its operators and constants, does not wait: that it is the same in this process
is what makes the capture good. So nodes are written by value, and all else as its place in a list.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fusee.capture.torch_api import graph_module
from fusee.kept.naming import NotKept

__all__ = ["Waiting", "written"]

_BY_VALUE = frozenset((
    int, float, bool, str, bytes, type(None), list, tuple, dict, slice, immutable_list,
    immutable_dict, fx.Node, fx.Graph, fx.GraphModule,
))  # fmt: skip


class Waiting:
    """A graph that is made when it is first asked for. May be called from any thread."""

    def __init__(self) -> None:
        self.data = b""
        self.named: Sequence[Any] = ()

    @functools.cached_property
    def module(self) -> fx.GraphModule:
        """The graph as it was captured, without what only the capture itself needs."""
        found: fx.GraphModule = _Reader(self.data, self.named).load()
        return found

    def forward(self, *inputs: Any) -> Any:
        """What the graph gives, run by torch."""
        return self.module.forward(*inputs)


def written(module: fx.GraphModule) -> tuple[bytes, list[Any]]:
    """The nodes, and what they name: `Waiting.data` and `Waiting.named`. raises NotKept"""
    writer = _Writer()
    try:
        writer.dump(module)
    except RecursionError as error:
        raise NotKept(str(error)) from None
    return writer.out.getvalue(), writer.named


class _Writer(pickle.Pickler):
    def __init__(self) -> None:
        self.out = io.BytesIO()
        super().__init__(self.out, protocol=5)
        self.named: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, x: Any) -> int | None:
        if type(x) in _BY_VALUE or isinstance(x, fx.GraphModule):
            return None
        place = self._places.setdefault(id(x), len(self.named))
        if place == len(self.named):
            self.named.append(x)
        return place

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return _node, (x.graph, x.op, x.target, x.args, x.kwargs, x.name, _meta(x))
        if isinstance(x, (immutable_list, immutable_dict)):
            return (list, (tuple(x),)) if isinstance(x, list) else (dict, ((*x.items(),),))
        if isinstance(x, fx.Graph):
            return fx.Graph, ()
        if isinstance(x, fx.GraphModule):
            return _module, (x.graph, list(x.graph.nodes))
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, named: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.named = named

    def persistent_load(self, place: int) -> Any:
        return self.named[place]


def _meta(node: fx.Node) -> dict[str, Any]:
    """Without the FakeTensors, which only the capture itself needs."""
    kept = {key: x for key, x in node.meta.items() if key != "example_value"}
    if not {*kept} <= {"stack_trace", "is_buffer"}:
        raise NotKept(f"a node knows of {', '.join(map(str, kept))}")
    known = node.meta.get("example_value")
    return kept | {"example_value": known} if isinstance(known, float) else kept


def _node(
    graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str, meta: dict[str, Any]
) -> fx.Node:
    node = graph.create_node(op, target, name=name)
    node.args = args  # given to `create_node`, they would be searched for symbols first
    if kwargs:
        node.kwargs = kwargs
    node.meta.update(meta)
    return node


def _module(graph: fx.Graph, nodes: list[fx.Node]) -> fx.GraphModule:
    return graph_module(graph)
