"""An AtenGraph as an fx graph with nothing implied, as other projects' importers want it.

constants   placeholders, like inputs
sizes       computed from the shapes of inputs, by calls of their own
dtypes      the casts of type promotion written out, since ONNX promotes nothing
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten.graph import AtenGraph
from fusee.sym.expr import Expr
from fusee.sym.parts import hint

__all__ = ["explicit", "single"]

aten = torch.ops.aten

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
