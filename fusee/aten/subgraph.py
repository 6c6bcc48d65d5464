"""A level of a split graph as an AtenGraph of its own, and how its tensors come in and go out.

What goes from part to part is dense. An engine's parts see row-major tensors only: a permuted
tensor is handed over as the row-major tensor that has the same memory, and permuted in the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten.externs import is_view
from fusee.aten.graph import AtenGraph, Fresh, InputSpec, Order, SymbolSource, inverse, must_run
from fusee.sym.expr import Expr, Size, hint, symbols

# ---------------------------------------------------------------------------- cut


aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Part:
    """One level, compiled and called as one.

    inputs   what it is given: nodes of the whole graph, or names of symbols
    outputs  the nodes of the whole graph that it computes for others
    orders   per input and per output, the permutation that makes it row-major; None: none needed
    """

    graph: AtenGraph
    is_claimed: bool
    inputs: tuple[fx.Node | str, ...]
    outputs: tuple[fx.Node, ...]
    input_orders: tuple[Order | None, ...]
    output_orders: tuple[Order | None, ...]


def cut(whole: AtenGraph, levels: Sequence[tuple[bool, tuple[fx.Node, ...]]]) -> list[Part]:
    """The levels as parts, in their order."""
    wanted = set(whole.results)
    parts = []
    for is_claimed, nodes in levels:
        inside = set(nodes)
        outputs = tuple(
            n for n in nodes if n in wanted or any(u not in inside for u in _readers(n))
        )
        if outputs or any(map(must_run, nodes)):
            parts.append(_Cutter(whole, is_claimed).part(nodes, outputs))
    return parts


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output"]


class _Cutter:
    def __init__(self, whole: AtenGraph, is_claimed: bool) -> None:
        self.whole = whole
        self.is_claimed = is_claimed
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.specs: list[InputSpec] = []
        self.inputs: list[fx.Node | str] = []
        self.orders: list[Order | None] = []
        self.constants: dict[str, Tensor] = {}
        self.symbols: dict[str, SymbolSource] = {}
        self.given = dict(zip(whole.placeholders, whole.inputs, strict=True))
        self.written = {mutation.index for mutation in whole.mutations}

    def part(self, nodes: Sequence[fx.Node], outputs: tuple[fx.Node, ...]) -> Part:
        inside = set(nodes)
        outer = dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside)
        for node in outer:
            if node.op != "get_attr":
                self._tensor(node)
        self._find_symbols([*nodes, *outer])
        for node in outer:
            if node.op == "get_attr":
                name = str(node.target)
                self.constants[name] = self.whole.constants[name]
                self.copies[node] = self.graph.node_copy(node)
            else:
                self._permute_back(node)
        for node in nodes:
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        results, orders = self._results(outputs)
        self.graph.output(tuple(results))
        vals = [result.meta["val"] for result in results]
        graph = AtenGraph(
            graph=self.graph,
            constants=self.constants,
            inputs=tuple(self.specs),
            outputs=tuple(Fresh(k, *self._geometry(val)) for k, val in enumerate(vals)),
            mutations=(),
            structure=tuple,
            symbols=self.symbols,
            to_size=self.whole.to_size,
            no_autocast=self.whole.no_autocast,
        )
        return Part(
            graph, self.is_claimed, tuple(self.inputs), outputs, tuple(self.orders), tuple(orders)
        )

    # -------------------------------------------------------------------------- inputs

    def _tensor(self, node: fx.Node) -> None:
        """Append a placeholder for the value of `node`, in row-major order for an engine."""
        index = len(self.specs)
        spec = self.given.get(node)
        val = node.meta["val"]
        if not isinstance(val, Tensor):
            raise AssertionError(f"{node} is no tensor, but goes from part to part")
        is_static = spec is not None and spec.is_static and spec.index not in self.written
        order = None if is_static or not self.is_claimed else self._order(val)
        if order is not None:
            val = val.permute(order)
        elif (spec is None or self.is_claimed) and not is_static and not self._is_dense(val):
            val = val.new_empty(val.shape)
        placeholder = self.graph.placeholder(node.name)
        placeholder.meta = {**node.meta, "val": val}
        size, stride = self._geometry(val)
        self.specs.append(
            InputSpec(
                index,
                node.name,
                val.dtype,
                size,
                stride,
                spec.offset if spec is not None and order is None else 0,
                node.meta.get("device"),
                is_static=is_static,
            )
        )
        self.inputs.append(node)
        self.orders.append(order)
        self.copies[node] = placeholder

    def _permute_back(self, node: fx.Node) -> None:
        order = self.orders[self.inputs.index(node)]
        if order is not None:
            self.copies[node] = self._permute(self.copies[node], inverse(order))

    def _find_symbols(self, nodes: Sequence[fx.Node]) -> None:
        """Where a call of this part reads the symbols it computes with: a tensor, or a number."""
        names: set[str] = set()
        for node in nodes:
            vals = node.meta.get("val")
            for val in vals if isinstance(vals, (tuple, list)) else [vals]:
                if isinstance(val, Tensor):
                    names.update(_names([*self._geometry(val)]))
            if node.op == "call_function":
                names.update(_names([node.args, node.kwargs]))
        for spec in self.specs:
            for axis, size in enumerate(spec.size):
                for name in names:
                    if size == self._size(name):
                        self.symbols.setdefault(name, SymbolSource(spec.index, axis))
        for name in sorted(names - self.symbols.keys()):
            index = len(self.specs)
            placeholder = self.graph.placeholder(f"size_{name}")
            source = self.whole.symbols[name]
            given = self.whole.placeholders[source.index].meta["val"]
            placeholder.meta = {"val": given if source.axis is None else given.shape[source.axis]}
            size = self._size(name)
            self.specs.append(
                InputSpec(index, placeholder.name, None, (), (), 0, None, symbol=size)
            )
            self.inputs.append(name)
            self.orders.append(None)
            self.symbols[name] = SymbolSource(index, None)

    def _size(self, name: str) -> Size:
        source = self.whole.symbols[name]
        spec = self.whole.inputs[source.index]
        size = spec.symbol if source.axis is None else spec.size[source.axis]
        assert size is not None
        return size

    # -------------------------------------------------------------------------- results

    def _results(self, outputs: Sequence[fx.Node]) -> tuple[list[fx.Node], list[Order | None]]:
        results, orders = [], []
        roots: set[fx.Node] = set()
        for node in outputs:
            made = self.copies[node]
            val = made.meta["val"]
            root = _root(made)
            order = self._order(val) if self.is_claimed else None
            if not self._is_dense(val):
                made = self._clone(made, torch.contiguous_format)
            elif root.op != "call_function" or root in roots:
                made = self._clone(made, torch.preserve_format)
            roots.add(_root(made))
            results.append(made if order is None else self._permute(made, order))
            orders.append(order)
        return results, orders

    def _clone(self, node: fx.Node, layout: torch.memory_format) -> fx.Node:
        made = self.graph.call_function(aten.clone.default, (node,), {"memory_format": layout})
        val = aten.clone.default(node.meta["val"], memory_format=layout)
        made.meta = {**node.meta, "val": val}
        return made

    def _permute(self, node: fx.Node, order: Order) -> fx.Node:
        made = self.graph.call_function(aten.permute.default, (node, list(order)))
        made.meta = {**node.meta, "val": node.meta["val"].permute(order)}
        return made

    # -------------------------------------------------------------------------- geometry

    def _geometry(self, val: Tensor) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
        to_size = self.whole.to_size
        return tuple(map(to_size, val.shape)), tuple(map(to_size, val.stride()))

    def _order(self, val: Tensor) -> Order | None:
        """The permutation that makes a dense tensor row-major; None: it is so, or cannot be."""
        strides = [hint(size) for size in self._geometry(val)[1]]
        order = tuple(sorted(range(val.dim()), key=lambda axis: -strides[axis]))
        if _is_row_major(val) or not _is_row_major(val.permute(order)):
            return None
        return order

    def _is_dense(self, val: Tensor) -> bool:
        return _is_row_major(val) or self._order(val) is not None


def _is_row_major(val: Tensor) -> bool:
    return bool(val.is_contiguous())


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory a node's result is in."""
    while node.target is operator.getitem or (node.op == "call_function" and is_view(node.target)):
        below = node.args[0]
        assert isinstance(below, fx.Node)
        if node.target is operator.getitem and not is_view(below.target):
            return node
        node = below
    return node


def _names(args: Any) -> set[str]:
    """The names of all symbols in sizes among arguments."""
    found: set[str] = set()
    pending = [args]
    while pending:
        arg = pending.pop()
        if isinstance(arg, (list, tuple)):
            pending += arg
        elif isinstance(arg, dict):
            pending += arg.values()
        elif isinstance(arg, Expr):
            found.update(symbol.name for symbol in symbols(arg))
    return found


# ---------------------------------------------------------------------------- explicit
# An AtenGraph as an fx graph with nothing implied, as other projects' importers want it.
#
# constants placeholders, like inputs sizes computed from the shapes of inputs, by calls of their
# own dtypes the casts of type promotion written out, since ONNX promotes nothing

# Not elementwise, but computed in the dtype of the result.
_PROMOTED = frozenset(
    {
        aten.cat.default,
        aten.stack.default,
        aten.cumsum.default,
        aten.cumprod.default,
        aten.mean.default,
        aten.mean.dim,
        aten.prod.default,
        aten.prod.dim_int,
        aten.sum.default,
        aten.sum.dim_IntList,
    }
)
# Casts on their own, or keeping their operands' dtypes: nothing is promoted.
_UNPROMOTED = frozenset({aten._to_copy.default, aten.clone.default, aten.fill.Scalar})
# What chooses between tensors is a tensor of bools, and stays one.
_MASKS = ("condition", "mask")


def explicit(region: AtenGraph) -> fx.Graph:
    """The graph of a region. Constants become placeholders of their names, before the inputs."""
    write = _Writer()
    for name, constant in region.constants.items():
        write.input(name, constant)
    for node in region.graph.nodes:
        if node.op == "placeholder":
            write.copies[node] = write.input(node.name, node.meta["val"])
        elif node.op == "get_attr":
            write.copies[node] = write.inputs[str(node.target)]
    for name, source in region.symbols.items():
        given = write.copies[region.placeholders[source.index]]
        write.symbol(name, given, source.axis)
    for node in region.graph.nodes:
        if node.op == "call_function":
            write.call(node)
    write.graph.output(tuple(write.copies[node] for node in region.results))
    return write.graph


def single(node: fx.Node) -> fx.Graph:
    """One call with its operands as inputs, sizes too. Its results are those that are used."""
    write = _Writer()
    for source in node.all_input_nodes:
        write.copies[source] = write.input(source.name, source.meta["val"])
    write.size = lambda size: write.input(f"size_{len(write.inputs)}", hint(size))
    results = [write.call(node)]
    if isinstance(node.meta["val"], (tuple, list)):
        results = [write.call(user) for user in node.users if user.target is operator.getitem]
    write.graph.output(tuple(results))
    return write.graph


class _Writer:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs: dict[str, fx.Node] = {}
        self.symbols: dict[str, Any] = {"min": torch.sym_min, "max": torch.sym_max}
        self.sizes: dict[Expr, fx.Node] = {}
        self.size: Callable[[Expr], fx.Node] = self._computed

    def input(self, name: str, val: Any) -> fx.Node:
        made = self.inputs[name] = self.graph.placeholder(name)
        made.meta["val"] = val
        return made

    def symbol(self, name: str, given: fx.Node, axis: int | None) -> None:
        if axis is not None:
            size = hint_of(given.meta["val"].shape[axis])
            given = self._add(aten.sym_size.int, (given, axis), size)
        self.symbols[name] = fx.Proxy(given)

    def call(self, node: fx.Node) -> fx.Node:
        args = fx.map_arg(node.args, self.copies.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self.copies.__getitem__)
        args, kwargs = self._sized(args), self._sized(kwargs)
        if node.target is aten.squeeze.dims:
            made = self._squeeze(node, args)
        else:
            made = self._add(node.target, args, node.meta["val"], kwargs)
        self._promote(made)
        self.copies[node] = made
        return made

    def _squeeze(self, node: fx.Node, args: Any) -> fx.Node:
        """One axis after the other: what takes them all at once is younger."""
        made: fx.Node = args[0]
        val = made.meta["val"]
        for axis in sorted((axis % val.dim() for axis in args[1]), reverse=True):
            val = val.squeeze(axis)
            made = self._add(aten.squeeze.dim, (made, axis), val)
        return made

    def _add(self, target: Any, args: Any, val: Any, kwargs: Any = None) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta["val"] = val
        return made

    # -------------------------------------------------------------------------- sizes

    def _sized(self, arg: Any) -> Any:
        if isinstance(arg, Expr):
            if arg not in self.sizes:
                self.sizes[arg] = self.size(arg)
            return self.sizes[arg]
        if isinstance(arg, (list, tuple)):
            return type(arg)(map(self._sized, arg))
        if isinstance(arg, dict):
            return {name: self._sized(item) for name, item in arg.items()}
        return arg

    def _computed(self, size: Expr) -> fx.Node:
        before = len(self.graph.nodes)
        found = eval(repr(size), {}, self.symbols)
        for node in list(self.graph.nodes)[before:]:
            node.meta["val"] = hint(size)  # a number's value is of no use to importers, its type is
        made: fx.Node = found.node
        return made

    # -------------------------------------------------------------------------- dtypes

    def _promote(self, node: fx.Node) -> None:
        op, val = node.target, node.meta["val"]
        if not isinstance(op, OpOverload) or op in _UNPROMOTED or not isinstance(val, Tensor):
            return
        if torch.Tag.pointwise not in op.tags and op not in _PROMOTED:
            return
        dtype = val.dtype
        if dtype is torch.bool:
            dtype = _compared(node)
        names = [argument.name for argument in op._schema.arguments]
        args = [
            arg if name in _MASKS else fx.map_arg(arg, lambda x: self._cast(node, x, dtype))
            for name, arg in zip(names, node.args)
        ]
        node.args = tuple(args)

    def _cast(self, before: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        val = x.meta["val"]
        if not isinstance(val, Tensor) or val.dtype == dtype:
            return x
        with self.graph.inserting_before(before):
            return self._add(aten._to_copy.default, (x,), val.to(dtype), {"dtype": dtype})


def _compared(node: fx.Node) -> torch.dtype:
    """The dtype in which a call that gives bools compares its operands."""
    vals = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
    operands = [val for val in vals if isinstance(val, (Tensor, bool, int, float))]
    if len(operands) == 2:
        return torch.result_type(*operands)  # type: ignore[arg-type]
    tensor = next(val for val in operands if isinstance(val, Tensor))
    return tensor.dtype


def hint_of(size: Any) -> int:
    """A size as torch first saw it."""
    return size if isinstance(size, int) else int(size.node.hint)
