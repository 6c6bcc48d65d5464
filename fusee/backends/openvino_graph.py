"""A region as the fx graph that OpenVINO's decoder reads: weights as attributes, sizes as nodes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.graph import AtenGraph

__all__ = ["decodable", "distinct"]

aten = torch.ops.aten


def decodable(
    graph: AtenGraph,
    weights: Mapping[int, Tensor],
    results: Sequence[fx.Node],
    computed: Sequence[fx.Node] = (),
) -> fx.GraphModule:
    """The graph up to these results, with the inputs in `weights` as attributes.

    computed   calls whose values are inputs, after all others
    """
    return _Rewriter(graph, weights, results, computed).run()


def distinct(graph: AtenGraph) -> tuple[list[fx.Node], list[int]]:
    """Results without copies, and for each result which of these it is; ~k: a copy of input k.

    OpenVINO takes a copy for the same tensor, and refuses to give that out twice. If it is an
    input, and not all that there is, OpenVINO writes to that.
    """
    inputs = {node: k for k, node in enumerate(graph.placeholders)}
    found: dict[fx.Node, int] = {}
    places = []
    for node in graph.results:
        source = node
        while source.target is aten.clone.default and isinstance(source.args[0], fx.Node):
            if source.args[0].op != "call_function":
                break
            source = source.args[0]
        copied = inputs.get(_unmoved(graph, node))
        places.append(found.setdefault(source, len(found)) if copied is None else ~copied)
    return list(found), places


def _unmoved(graph: AtenGraph, node: fx.Node) -> fx.Node:
    """The first node whose elements a node has, in the same places of the same sizes."""

    def sizes(x: fx.Node) -> list[object]:
        return [graph.to_size(n) for n in x.meta["val"].shape]

    found = here = node
    while here.target in _IN_ORDER or here.target in _IF_ALL:
        source: Any = here.args[here.target is aten.copy.default]
        if not isinstance(source, fx.Node) or source.meta["val"].dtype != node.meta["val"].dtype:
            break
        if here.target in _IF_ALL and _without_ones(sizes(source)) != _without_ones(sizes(here)):
            break
        here = source
        if sizes(here) == sizes(node):
            found = here
    return found


def _without_ones(sizes: Sequence[object]) -> list[object]:
    return [n for n in sizes if n != 1]


# What keeps the order of elements; what does if it keeps their number.
_IN_ORDER = {aten.clone.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dims}
_IF_ALL = {aten.copy.default, aten.expand.default, aten.slice.Tensor, aten.select.int}


class _Rewriter:
    def __init__(
        self,
        graph: AtenGraph,
        weights: Mapping[int, Tensor],
        results: Sequence[fx.Node],
        computed: Sequence[fx.Node],
    ) -> None:
        self.aten = graph
        self.results = results
        self.computed = computed
        self.weights = weights
        self.made = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.symbols: dict[str, Any] = {}
        self.sizes: dict[Any, fx.Node] = {}

    def run(self) -> fx.GraphModule:
        attributes: dict[str, Any] = dict(self.aten.constants)
        for node, spec in zip(self.aten.placeholders, self.aten.inputs, strict=True):
            if spec.index in self.weights:
                name = f"weight{spec.index}"
                attributes[name] = self.weights[spec.index].detach()
                self.copies[node] = self.made.get_attr(name)
            else:
                self.copies[node] = self.made.placeholder(node.name)
        for node in self.computed:
            self.copies[node] = self.made.placeholder(node.name)
        self._name_symbols()
        for node in self.aten.graph.nodes:
            if node.op == "get_attr":
                self.copies[node] = self.made.get_attr(str(node.target))
            elif node.op == "call_function" and node not in self.computed:
                self._call(node)
        self.made.output(tuple(self.copies[node] for node in self.results))
        self.made.eliminate_dead_code()
        return fx.GraphModule(attributes, self.made, "Region")

    def _name_symbols(self) -> None:
        for name, source in self.aten.symbols.items():
            node: Any = self.copies[self.aten.placeholders[source.index]]
            if source.axis is not None:
                node = self.made.call_function(aten.sym_size.int, (node, source.axis))
            self.symbols[name] = _Number(self.made, node)

    def _call(self, node: fx.Node) -> None:
        args = self._short_shape(node)
        args, kwargs = self._mapped(args), self._mapped(node.kwargs)
        made = self.made.create_node("call_function", node.target, tuple(args), kwargs, node.name)
        self.copies[node] = made

    def _short_shape(self, node: fx.Node) -> Sequence[Any]:
        """A call's arguments, with -1 in a shape wherever that says the same."""
        if node.target not in (aten.view.default, aten.expand.default):
            return node.args
        source: Any = node.args[0]
        shape: Any = node.args[1]
        if node.target is aten.view.default:
            open_ = [k for k, n in enumerate(shape) if not isinstance(n, int)]
            if len(open_) == 1 and 0 not in shape:
                shape = [-1 if k == open_[0] else n for k, n in enumerate(shape)]
        else:
            old: list[Any] = [self.aten.to_size(n) for n in source.meta["val"].shape]
            old = [None] * (len(shape) - len(old)) + old
            shape = [-1 if n == m and not isinstance(n, int) else n for n, m in zip(shape, old)]
        return [source, shape, *node.args[2:]]

    def _mapped(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self.copies[arg]
        if isinstance(arg, (list, tuple)):
            return [self._mapped(item) for item in arg]
        if isinstance(arg, dict):
            return {name: self._mapped(item) for name, item in arg.items()}
        if isinstance(arg, (int, float, str)) or arg is None or not hasattr(arg, "terms"):
            return arg
        return self._size(arg)

    def _size(self, size: Any) -> fx.Node:
        """The node that computes a symbolic size: sizes print as Python, which runs on nodes."""
        if size not in self.sizes:
            self.sizes[size] = eval(
                str(size), {**self.symbols, "min": _least, "max": _greatest}
            ).node
        return self.sizes[size]


class _Number:
    """An integer of the graph: arithmetic with it adds nodes."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def call(self, target: Any, *args: Any) -> _Number:
        plain = tuple(arg.node if isinstance(arg, _Number) else arg for arg in args)
        return _Number(self.graph, self.graph.call_function(target, plain))

    def __add__(self, other: Any) -> _Number:
        return self.call(operator.add, self, other)

    def __sub__(self, other: Any) -> _Number:
        return self.call(operator.sub, self, other)

    def __rsub__(self, other: Any) -> _Number:
        return self.call(operator.sub, other, self)

    def __mul__(self, other: Any) -> _Number:
        return self.call(operator.mul, self, other)

    def __neg__(self) -> _Number:
        return self.call(operator.neg, self)

    def __pow__(self, other: int) -> _Number:
        return self if other == 1 else self.call(operator.mul, self, self ** (other - 1))

    def __floordiv__(self, other: Any) -> _Number:
        return self.call(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> _Number:
        return self.call(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> _Number:
        return self.call(operator.sub, self, self.call(operator.mul, self // other, other))

    __radd__, __rmul__ = __add__, __mul__


def _least(a: Any, b: Any) -> Any:
    return _extreme(aten.minimum.default, a, b)


def _greatest(a: Any, b: Any) -> Any:
    return _extreme(aten.maximum.default, a, b)


def _extreme(target: Any, a: Any, b: Any) -> _Number:
    number: _Number = a if isinstance(a, _Number) else b
    return number.call(target, a, b)
