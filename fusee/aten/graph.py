"""The functional ATen graph, and what surrounds it: where inputs come from, what outputs are.

    AtenGraph ::= inputs, fx graph of ATen operators, results, mutations, outputs
    results   ::= the flat tuple that the fx graph returns; others name positions in it
    outputs   ::= what the caller gets: Fresh | InputItself | ViewOfInput | ViewOfOutput
                | OutputItself | Constant | Sym

Every operator in the graph is free of side effects, except the random ones, which stay in program
order. node.meta of each holds
    val          the result without data: shape, strides and dtype are eager's; several: a tuple
    device       where eager has the result
    stack_trace  the user's lines, as fx writes them
Sizes in arguments are `sym` sizes: ints, or Expr in a graph with `symbols`. Those of `val` are ints
or torch's SymInts, which `to_size` turns into sizes. A number may stand in any tensor's place among
the arguments, as eager's "wrapped numbers" do.

A call runs in this order: the graph; the mutations; views of inputs and outputs are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch import fx

from fusee.aten.source import python_source
from fusee.sym.expr import Size

__all__ = [
    "AtenGraph",
    "Constant",
    "Fresh",
    "InputItself",
    "InputSpec",
    "Mutation",
    "OutputItself",
    "OutputSpec",
    "Sym",
    "SymbolSource",
    "ViewOfInput",
    "ViewOfOutput",
]

Sizes = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One placeholder of the graph.

    The first placeholders are the caller's arguments; those with `attribute` follow them and are
    read from the module at each call (`AtenGraph.attributes`).

    dtype      None if the argument is no tensor: an integer `symbol`, or a constant of the graph
    size       empty unless the argument is a tensor; so are stride and offset
    is_static  a parameter or buffer: a tensor whose values rarely change between calls
    symbol     the integer that the argument is
    """

    index: int
    name: str
    dtype: torch.dtype | None
    size: Sizes
    stride: Sizes
    offset: Size
    device: torch.device | None
    is_static: bool = False
    symbol: Size | None = None
    attribute: str | None = None


@dataclass(frozen=True, slots=True)
class Fresh:
    """The result at `position`, in memory of its own, with exactly these strides."""

    position: int
    size: Sizes
    stride: Sizes


@dataclass(frozen=True, slots=True)
class InputItself:
    """The very object passed as input `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class ViewOfInput:
    """A view of input `index`, `offset` elements after its first one (elements of `dtype`).

    bits   functions of torch to call on it: lazily conjugated or negated tensors
    """

    index: int
    size: Sizes
    stride: Sizes
    offset: Size
    dtype: torch.dtype
    bits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ViewOfOutput:
    """A view of the result at `position`, which may be an output too, or only carry views."""

    position: int
    size: Sizes
    stride: Sizes
    offset: Size
    dtype: torch.dtype
    bits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputItself:
    """The very object that the earlier output `index` is."""

    index: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A value known when tracing."""

    value: object


@dataclass(frozen=True, slots=True)
class Sym:
    """A number computed from sizes."""

    expr: Size


OutputSpec = Union[Fresh, InputItself, ViewOfInput, ViewOfOutput, OutputItself, Constant, Sym]


@dataclass(frozen=True, slots=True)
class Mutation:
    """After the graph has run, input `index` takes the values of the result at `position`."""

    index: int
    position: int


@dataclass(frozen=True, slots=True)
class SymbolSource:
    """Where a call reads a symbol: the input itself (axis None), or its size along `axis`."""

    index: int
    axis: int | None


@dataclass(eq=False)
class AtenGraph:
    """A functional graph with all it takes to call it. See the top of this file.

    structure     rebuilds the caller's return value from the list of outputs
    symbols       name -> source, for graphs with symbolic sizes; the names are those of `to_size`
    to_size       an int or SymInt of this graph's arguments and metas as a Size
    no_autocast   the caller has autocast on: casts are in the graph, operators must not cast again
    from_start    inputs that must begin their memory, since offsets in the graph count from there
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    mutations: tuple[Mutation, ...]
    structure: Callable[[list[Any]], Any]
    symbols: Mapping[str, SymbolSource] = field(default_factory=dict)
    to_size: Callable[[Any], Size] = int
    no_autocast: bool = False
    from_start: frozenset[int] = frozenset()
    _module: fx.GraphModule | None = None

    @property
    def module(self) -> fx.GraphModule:
        """The graph with its constants as attributes. Made when first asked for."""
        if self._module is None:
            self._module = fx.GraphModule(dict(self.constants), self.graph, "AtenGraph")
        return self._module

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that the graph returns, by position."""
        (output,) = self.graph.find_nodes(op="output")
        return list(output.args[0])

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of `inputs`, in the same order."""
        return list(self.graph.find_nodes(op="placeholder"))

    def attributes(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The inputs that are read from the traced module, to append to the caller's arguments."""
        found = []
        for spec in self.inputs:
            if spec.attribute is not None:
                value: Any = module
                for part in spec.attribute.split("."):
                    value = getattr(value, part)
                found.append(value)
        return found

    def source(self) -> str:
        """The graph as Python that runs with torch alone, under the user's lines as comments."""
        return python_source(self)

    def __str__(self) -> str:
        rows = [self.source(), ""]
        for kind, specs in (("in", self.inputs), ("write", self.mutations), ("out", self.outputs)):
            rows += [f"# {kind:5} {_row(spec)}" for spec in specs]
        return "\n".join(rows)


def _row(spec: Any) -> str:
    """A spec without the fields that have their default value."""
    parts = []
    for item in dataclasses.fields(spec):
        value = getattr(spec, item.name)
        if value is not None and value is not False:
            parts.append(f"{item.name}={value}")
    return f"{type(spec).__name__}({', '.join(parts)})"
