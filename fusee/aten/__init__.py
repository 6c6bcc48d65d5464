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
    call         (number, operator): the call of eager's it is a part of; called: why it stays one
    improved     True: it is a faster call than eager's, so the graph does not run as captured
    alone        True: it shows a size that only data knows, and so runs by itself
    relies       (a, op, b): what an engine that has the call takes for granted of sizes
Sizes in arguments are `sym` sizes: ints, or Expr in a graph with `symbols`. Those of `val` are ints
or torch's SymInts (`to_size`). A number may stand in any tensor's place, as "wrapped numbers" do.

A call runs in this order: the graph; the mutations; views of inputs and outputs are made.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten.torch_api import recurrent_layer, without_autocast
from fusee.errors import user_line
from fusee.fake import may_raise, raises
from fusee.fake.torch_python import packet_name
from fusee.source import HostSource, define, listed, overloads, tensors_in
from fusee.sym import Expr, Size, Symbol, hint, only_symbol, symbols
from fusee.sym.ranges import Comparison

# ---------------------------------------------------------------------------- source
# A functional graph as Python source: for people under the user's lines, and to be run.

aten = torch.ops.aten

_SHOWN_ELEMENTS = 64  # of a constant; longer ones are left out of the text


def python_source(graph: AtenGraph) -> str:
    """The graph as a module that runs with torch alone: `graph(*inputs)` returns the results."""
    rows = ["import torch", ""]
    rows += [f"{name} = {constant_source(x)}" for name, x in graph.constants.items()]
    return "\n".join([*rows, "", function_source(graph, for_people=True)])


def function_source(graph: AtenGraph, for_people: bool = False) -> str:
    """The function `graph` alone; constants are globals. It drops tensors after their last use."""
    nodes = list(graph.graph.nodes)
    names = [node.name for node in nodes if node.op == "placeholder"]
    write = HostSource("graph", ", ".join(names), names.__getitem__)
    write.read_symbols(graph.symbols)
    readings = Readings(graph)
    calls = [] if for_people else [node for node in nodes if node.op == "call_function"]
    last = last_reads(graph.results, [((node,), node.all_input_nodes) for node in calls])
    gone = {calls[k]: ", ".join(map(_name, some)) for k, some in last.items()}
    line = None
    for node in nodes:
        if for_people and node.op == "call_function":
            now = user_line(node.meta.get("stack_trace"))
            if now is not None and now != line:
                write.add(f"# {now}")
            line = now
        if node.op == "call_function":
            layer = not for_people and node.target is aten.mkldnn_rnn_layer.default
            call = "recurrent_layer" if layer else f"torch.ops.{node.target}"
            note = f"  # {_note(node.meta.get('val'))}" if for_people else ""
            write.add(f"{node.name} = {call_source(node, call)}{note}")
        elif node.op == "get_attr" and node.name != node.target:
            write.add(f"{node.name} = {node.target}")
        elif node.op == "output":
            write.add(f"return {value_source(node.args[0])}")
        write.add(*readings.lines(node, node.name))
        if node in gone:
            write.add(f"del {gone[node]}")
    return str(write)


_name: Callable[[fx.Node], str] = operator.attrgetter("name")


def call_source(node: fx.Node, call: str, name: Callable[[fx.Node], str] = _name) -> str:
    """A call as an expression, `call` being what is called; or the item of a tuple."""
    args = [value_source(x, name) for x in node.args]
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    args += [f"{key}={value_source(x, name)}" for key, x in node.kwargs.items()]
    return f"{call}({', '.join(args)})"


def value_source(x: Any, name: Callable[[fx.Node], str] = _name) -> str:
    """An argument as an expression."""
    if isinstance(x, fx.Node):
        return name(x)
    if isinstance(x, (tuple, list)):
        inner = ", ".join(value_source(item, name) for item in x)
        return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' if len(x) == 1 else ''})"
    if isinstance(x, torch.device):
        return f"torch.device({str(x)!r})"
    if isinstance(x, float) and not math.isfinite(x):
        return f'float("{x}")'
    return repr(x)


def _note(val: Any) -> str:
    if isinstance(val, Tensor):
        sizes = ", ".join(map(str, val.shape))
        return f"{str(val.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(val, (tuple, list)):
        return ", ".join(map(_note, val))
    return str(val)


def constant_source(x: Tensor) -> str:
    """An expression for a small tensor; a large one becomes zeros, with a comment that says so."""
    if x.numel() <= _SHOWN_ELEMENTS:
        return (
            f"torch.tensor({value_source(x.tolist())}, dtype={x.dtype}, device={str(x.device)!r})"
        )
    shape = list(x.shape)
    return f"torch.zeros({shape}, dtype={x.dtype}, device={str(x.device)!r})  # elements left out"


# ---------------------------------------------------------------------------- graph


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


def tensor_input(
    index: int,
    name: str,
    val: Tensor,
    device: torch.device | None,
    to_size: Callable[[Any], Size],
    **more: Any,
) -> InputSpec:
    """The spec of an input of the geometry of `val`, at the start of its memory by default."""
    geometry, offset = geometry_of(val, to_size), more.pop("offset", 0)
    return InputSpec(index, name, val.dtype, *geometry, offset, device, **more)


def geometry_of(val: Tensor, to_size: Callable[[Any], Size]) -> tuple[Sizes, Sizes]:
    """Sizes and strides."""
    return tuple(map(to_size, val.shape)), tuple(map(to_size, val.stride()))


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

    bits   functions of torch to call on it: lazily conjugated or negated, detached tensors; "data"
    """

    index: int
    size: Sizes
    stride: Sizes
    offset: Size
    dtype: torch.dtype
    bits: tuple[str, ...] = ()


class ViewOfOutput(ViewOfInput):
    """The same of the result at `index`, which may be an output too, or only carry views."""


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
    """Input `index` takes the values of the result at `position`; `is_data`: through `.data`."""

    index: int
    position: int
    is_data: bool = False


@dataclass(frozen=True, slots=True)
class SymbolSource:
    """Where a call reads a symbol: the input itself (axis None), or its size along `axis`.

    unbacked  the SymInt of a symbol that only data knows: it is read from the result `index`, its
              size along `axis` or the integer that it holds
    """

    index: int
    axis: int | None
    unbacked: Any = None


class OtherSizes(Exception):
    """Sizes that only the data knows are not as the graph takes them to be: eager runs."""


def names_in(relation: Comparison) -> set[str]:
    return {s.name for s in (*symbols(relation.a), *symbols(relation.b))}


class Readings:
    """How a call reads unbacked symbols, in lines of Python."""

    def __init__(self, graph: AtenGraph) -> None:
        self.places: dict[fx.Node, list[tuple[str, str]]] = {}
        found = {name: at for name, at in graph.symbols.items() if at.unbacked is not None}
        results = graph.results if found else []
        for name, at in found.items():
            text = ".item()" if at.axis is None else f".size({at.axis})"
            self.places.setdefault(results[at.index], []).append((name, text))
        self.unread, self.required = set(found), graph.required

    def lines(self, node: fx.Node, value: str) -> list[str]:
        """What comes once a node is there, as `value`: the readings, and what must hold of them."""
        places = self.places.get(node, ())
        lines = [f"{name} = {value}{text}" for name, text in places]
        self.unread.difference_update(name for name, _ in places)
        left = []
        for one in self.required if lines else ():
            if self.unread.isdisjoint(names_in(one)):
                lines.append(f"if not {one}: raise OtherSizes")
            else:
                left.append(one)
        self.required = tuple(left) if lines else self.required
        return lines


def shown_symbols(inputs: Iterable[InputSpec]) -> dict[str, SymbolSource]:
    """Where a call reads each symbol that one of these inputs shows: itself, or by a size."""
    found: dict[str, SymbolSource] = {}
    for index, spec in enumerate(inputs):
        for axis, size in [(None, spec.symbol), *enumerate(spec.size)]:
            symbol = only_symbol(size)
            if symbol is not None:
                found.setdefault(symbol.name, SymbolSource(index, axis))
    return found


def used_symbols(
    nodes: Iterable[fx.Node], to_size: Callable[[Any], Size], inputs: Iterable[InputSpec] = ()
) -> dict[str, Symbol]:
    """The symbols in the sizes of these nodes' arguments, of their results, and of inputs, which
    were noted before tracing found values for some."""
    found: dict[str, Symbol] = {}

    def look(leaf: Any) -> Any:
        if isinstance(leaf, (Expr, torch.SymInt)):
            found.update((symbol.name, symbol) for symbol in symbols(to_size(leaf)))
        return leaf

    for node in nodes:
        fx.node.map_aggregate((node.args, node.kwargs, node.meta.get("relies", ())), look)
        for part in tensors_in(node.meta.get("val")):
            for n in (*part.shape, *part.stride()):
                look(n)
    for spec in inputs:
        for n in (*spec.size, *spec.stride, spec.offset):
            look(n)
    return found


@dataclass(eq=False)
class AtenGraph:
    """A functional graph with all it takes to call it. See the top of this file.

    structure     rebuilds the caller's return value from the list of outputs
    symbols       name -> source, for graphs with symbolic sizes; the names are those of `to_size`
    to_size       an int or SymInt of this graph's arguments and metas as a Size
    no_autocast   the caller has autocast on: casts are in the graph, operators must not cast again
    from_start    inputs that must begin their memory, since offsets in the graph count from there
    required      what must hold of unbacked symbols; where it does not, OtherSizes is raised
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    mutations: tuple[Mutation, ...]
    structure: Callable[[list[Any]], Any]
    symbols: Mapping[str, SymbolSource] = field(default_factory=dict)
    to_size: Callable[[Any], Size] = int
    no_autocast: bool = False
    from_start: frozenset[int] = frozenset()
    required: tuple[Comparison, ...] = ()
    _module: fx.GraphModule | None = None

    @property
    def module(self) -> fx.GraphModule:
        """The graph with its constants as attributes. Made when first asked for."""
        if self._module is None:
            self._module = fx.GraphModule(dict(self.constants), self.graph, "AtenGraph")
        return self._module

    @property
    def kind(self) -> type | None:
        """What its results are returned in, if that is a flat tuple or list of them."""
        marks = [object() for _ in self.outputs]
        given = self.structure(list(marks))
        return type(given) if isinstance(given, (tuple, list)) and [*given] == marks else None

    @property
    def is_staged(self) -> bool:
        """Whether sizes show in the course of a call."""
        return any(at.unbacked is not None for at in self.symbols.values())

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that the graph returns, by position."""
        (output,) = self.graph.find_nodes(op="output")
        return list(output.args[0])

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of `inputs`, in the same order."""
        return list(self.graph.find_nodes(op="placeholder"))

    def attributes(self, module: torch.nn.Module) -> list[Tensor]:
        """The inputs that are read from the traced module, to append to the caller's arguments."""
        names = [spec.attribute for spec in self.inputs if spec.attribute is not None]
        return [operator.attrgetter(name)(module) for name in names]

    def flat(self) -> AtenGraph:
        """The same graph as a function that returns all its results, in a tuple."""
        made = [geometry_of(node.meta["val"], self.to_size) for node in self.results]
        outputs = tuple(Fresh(k, *geometry) for k, geometry in enumerate(made))
        return dataclasses.replace(self, outputs=outputs, structure=tuple, _module=None)

    def source(self) -> str:
        """The graph as Python that runs with torch alone, under the user's lines as comments."""
        return python_source(self)

    def __str__(self) -> str:
        rows = [self.source(), ""]
        for kind, specs in (("in", self.inputs), ("write", self.mutations), ("out", self.outputs)):
            for spec in specs:
                values = {x.name: getattr(spec, x.name) for x in dataclasses.fields(spec)}
                # fields that have their default value say nothing
                said = [f"{k}={x}" for k, x in values.items() if x is not None and x is not False]
                rows.append(f"# {kind:5} {type(spec).__name__}({', '.join(said)})")
        return "\n".join(rows)


# ---------------------------------------------------------------------------- part source
# A part of a graph as Python source: called with torch alone, in this process or another.

Order = tuple[int, ...]


class PartSource(NamedTuple):
    """What runs a part whose results are all new tensors, with eager ATen.

    source        of the function `graph`; constants are globals
    orders        of each result, the permutation that makes its strides row-major
    no_autocast   operators must not cast: casts are in the source
    """

    source: str
    orders: tuple[Order, ...]
    no_autocast: bool

    def bind(self, constants: Mapping[str, Tensor]) -> Callable[..., tuple[Any, ...]]:
        """The part as a function of its inputs."""
        body = function(self.source, constants)

        def call(*inputs: Any) -> tuple[Tensor, ...]:
            with torch.no_grad(), without_autocast(self.no_autocast):
                return tuple(
                    x.permute(order).contiguous().permute(inverse(order))
                    for x, order in zip(body(*inputs), self.orders, strict=True)
                )

        return call


def function(source: str, constants: Mapping[str, Tensor]) -> Callable[..., Any]:
    """What `fusee.aten.function_source` wrote, to be called."""
    names: dict[str, Any] = {"torch": torch, "recurrent_layer": recurrent_layer, **constants}
    names["OtherSizes"] = OtherSizes
    return define(source, "graph", "aten graph", names)


def inverse(order: Sequence[int]) -> Order:
    """The permutation that undoes `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


# ---------------------------------------------------------------------------- interpret
# Runs an AtenGraph with eager ATen: what every later form of the graph is compared with.


def executable(graph: AtenGraph) -> Callable[..., Any]:
    """What the traced program returns, by a function of the graph's inputs, which it may write to.

    These are one per InputSpec: the caller's arguments, then `graph.attributes(module)`.
    """
    return around(graph, function(function_source(graph), graph.constants))


def around(graph: AtenGraph, body: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """`executable` with another function that computes the graph's results from its inputs."""

    def run(*inputs: Any) -> Sequence[Any]:
        results = body(*inputs)
        for mutation in graph.mutations:
            inputs[mutation.index].copy_(results[mutation.position])
        return results

    returned = returning(graph, run)

    def call(*inputs: Any) -> Any:
        with torch.no_grad(), without_autocast(graph.no_autocast):
            return returned(*inputs)

    return call


def executable_anywhere(graph: AtenGraph) -> Callable[..., Any]:
    """`executable` of a part, for kernels that choose other strides than tracing knows; changes it.

    Tracing knows what the CPU's kernels choose; those of other devices may differ. Results have
    the strides that tracing knows.
    """
    return part_source(graph).bind(graph.constants)


def part_source(graph: AtenGraph) -> PartSource:
    """What `executable_anywhere` runs, but for the constants; changes the graph."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    for node in graph.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        source = node.args[0]
        sizes: Any = geometry_of(source.meta["val"], graph.to_size)
        with graph.graph.inserting_before(node):
            empty = graph.graph.call_function(aten.new_empty_strided.default, (source, *sizes))
            laid_out = graph.graph.call_function(aten.copy.default, (empty, source))
        for made in (empty, laid_out):
            made.meta = dict(source.meta)
        node.replace_input_with(source, laid_out)
    orders = []
    for k, spec in enumerate(graph.outputs):
        assert isinstance(spec, Fresh) and spec.position == k
        steps = [hint(step) for step in spec.stride]
        orders.append(tuple(sorted(range(len(steps)), key=lambda k: -steps[k])))
    return PartSource(function_source(graph), tuple(orders), graph.no_autocast)


def returning(
    graph: AtenGraph,
    run: Callable[..., Sequence[Any]],
    *,
    spread: bool = True,
    module: torch.nn.Module | None = None,
    count: int | None = None,
    rebinds: Sequence[tuple[int, int]] = (),
    detached: Sequence[bool] = (),
) -> Callable[..., Any]:
    """What the traced program returned, by a function that gives the results of its graph.

    Writes are counted, views and aliases are taken again. `run` has written to the inputs already.

    spread    `run` takes the inputs as arguments; else a list, which it may empty
    module    the traced one: attributes are read from it, and what is returned takes arguments
              however `run` does
    count     how many results `run` gives; None: those of the graph
    rebinds   (input, result): the input takes the result's values, under autograd
    detached  per output: whether autograd must not see what it is a view of
    """
    outputs = graph.outputs
    kind = graph.kind
    plain = kind is not None and not graph.mutations and not rebinds
    plain &= len(outputs) == (len(graph.results) if count is None else count)
    plain &= all(isinstance(o, Fresh) and o.position == k for k, o in enumerate(outputs))
    reads = module is not None and any(spec.attribute is not None for spec in graph.inputs)
    arguments = spread or module is not None
    if plain and not reads and arguments == spread:
        return run
    write = HostSource("call", f"{'*' * arguments}inputs", run=run)
    if reads:
        write.names.update(attributes=graph.attributes, module=module)
        write.add("inputs = (*inputs, *attributes(module))")
    elif not arguments:  # what nobody reads afterwards is let go by `run`
        parts = (*outputs, *graph.mutations, *graph.symbols.values())
        read = [k for k in {getattr(x, "index", -1) for x in parts} if 0 <= k < len(graph.inputs)]
        write.add(f"inputs, given = {{k: inputs[k] for k in {read}}}, inputs")
    taken = "*inputs" if spread else "inputs" if arguments else "given"
    if plain:
        write.add(f"return run({taken})")
        return write.function("results")
    write.names.update(increment_version=torch.autograd.graph.increment_version, retyped=retyped)
    write.add(f"results = run({taken})")
    write.read_symbols(graph.symbols, "results[{}]".format)
    counted = [write.input(m.index) for m in graph.mutations if not m.is_data]
    if counted:
        write.add(f"increment_version({listed(counted)})")
    write.add(*(f"{write.input(index)}.copy_(results[{k}])" for index, k in rebinds))
    for k, spec in enumerate(outputs):
        detach = ".detach()" if detached and detached[k] else ""
        write.add(f"o{k} = {_output(spec, k, write)}{detach}")
    write.names["structure"] = kind or graph.structure
    write.add(f"return structure([{', '.join(f'o{k}' for k in range(len(outputs)))}])")
    return write.function("results")


def _output(spec: OutputSpec, number: int, write: HostSource) -> str:
    """An output as an expression."""
    if isinstance(spec, Fresh):
        return f"results[{spec.position}]"
    if isinstance(spec, InputItself):
        return write.input(spec.index)
    if isinstance(spec, OutputItself):
        return f"o{spec.index}"
    if isinstance(spec, Sym):
        return str(spec.expr)
    if isinstance(spec, Constant):
        return write.hold(f"constant{number}", spec.value)
    at = f"results[{spec.index}]" if isinstance(spec, ViewOfOutput) else write.input(spec.index)
    dtype = write.hold(str(spec.dtype).removeprefix("torch."), spec.dtype)
    text = f"retyped({at}, {listed(spec.size)}, {listed(spec.stride)}, {spec.offset}, {dtype})"
    for name in spec.bits:
        text = f"{write.hold(name, getattr(torch, name, operator.attrgetter(name)))}({text})"
    return text


def retyped(
    base: Tensor, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
) -> Tensor:
    """A view of `base`, `offset` elements of `dtype` after its first one."""
    if dtype == base.dtype:
        return base.as_strided(size, stride, base.storage_offset() + offset)
    if base.dtype.is_complex and dtype is base.dtype.to_real():
        parts = torch.view_as_real(base.conj() if base.is_conj() else base)
        return parts.as_strided(size, stride, parts.storage_offset() + offset)
    if dtype.is_complex and base.dtype is dtype.to_real():
        start = base.storage_offset() + 2 * offset
        return torch.view_as_complex(
            base.as_strided((*size, 2), (*(2 * step for step in stride), 1), start)
        )
    start = base.storage_offset() * base.dtype.itemsize // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=base.device)
    return view.set_(base.untyped_storage(), start + offset, size, stride)


# ---------------------------------------------------------------------------- tidy
# Dead code and common subexpressions of a functional graph.

# Random only if their `dropout_p` is not zero.
_DROPOUT = (
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def is_pure(node: fx.Node) -> bool:
    """Whether the node may be dropped or merged: neither random nor with an effect."""
    found = _is_pure(node.target)
    return not arguments(node)["dropout_p"] if found is None else found


def draws(op: Any) -> bool:
    """Whether an operator takes from a generator's stream."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


@functools.cache
def _is_pure(target: Any) -> bool | None:
    """None: its arguments say so."""
    if draws(target):
        return None if target in _DROPOUT else False
    return not isinstance(target, OpOverload) or bool(target._schema.returns)


def must_run(node: fx.Node) -> bool:
    """Whether a call stays even if nobody uses its results: it draws, has an effect, or may raise.

    Unlike an impure one, a call that may only raise gives the same each time.
    """
    return node.op == "call_function" and (not is_pure(node) or refuses(node))


def refuses(node: fx.Node) -> bool:
    """Whether a call may raise for what its operands hold."""
    target = node.target
    if not isinstance(target, OpOverload) or node.meta.get("never_raises"):
        return False
    return may_raise(target) or raises(node, packet_name(target), "val")


def arguments(node: fx.Node) -> dict[str, Any]:
    """What a call of an operator is given; see `bound`."""
    return bound(node.target, node.args, node.kwargs)


def bound(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator is called with, by its schema's names and in their order, defaults filled
    in."""
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    return {**defaults, **dict(zip(defaults, args)), **kwargs}


def remove_dead(graph: fx.Graph) -> None:
    """Erase nodes that nobody uses, but for those that must run."""
    for node in reversed(graph.nodes):
        if not node.users and node.op in ("call_function", "get_attr") and not must_run(node):
            graph.erase_node(node)


def merge_equal(graph: fx.Graph, apart: Container[fx.Node]) -> None:
    """One node for equal calls, except for those in `apart`, whose memory must be their own."""
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not is_pure(node) or node.meta.get("alone"):
            continue
        found = first.setdefault(key_of((node.target, node.args, node.kwargs)), node)
        if found is not node and node not in apart:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def key_of(x: Any) -> Any:
    """Hashable, and equal only for arguments that mean the same: 1, 1.0 and True don't."""
    if isinstance(x, (list, tuple)):
        return tuple(map(key_of, x))
    if isinstance(x, dict):
        return tuple((name, key_of(item)) for name, item in x.items())
    if isinstance(x, fx.Node):
        return x
    if isinstance(x, float):
        return float, x.hex()
    return type(x), x


# ---------------------------------------------------------------------------- operators
# Facts about ATen operators, read from their schemas.

# What tracing must not take apart: ATen runs it better as one call than as its parts, torch's parts
# give other bits, or the passes look for it.
WHOLE = frozenset(
    overloads(
        "convolution dot embedding_dense_backward hardswish hardtanh leaky_relu linear logspace"
        " logspace.Scalar_Tensor logspace.Tensor_Scalar logspace.Tensor_Tensor max_unpool2d"
        " max_unpool3d relu scaled_dot_product_attention vdot"
    )
)


_IMPURE_TAGS = (
    torch.Tag.nondeterministic_seeded,  # takes from the generator's stream
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


@functools.cache
def is_deterministic(op: Any) -> bool:
    """Whether equal arguments give an equal result of a known shape, and nothing else happens."""
    if not isinstance(op, OpOverload) or op._schema.is_mutable or not op._schema.returns:
        return False
    return not any(tag in op.tags for tag in _IMPURE_TAGS)


@functools.cache
def is_view(op: Any) -> bool:
    """Whether the result shares memory with the first argument (or may, as `reshape` may)."""
    if op is torch.ops.aten.reshape.default:
        return True
    if not isinstance(op, OpOverload) or op._schema.is_mutable:
        return False
    returns = op._schema.returns
    return bool(returns) and returns[0].alias_info is not None


def memory_root(node: fx.Node) -> fx.Node:
    """The node in whose memory a node's result is: itself, or what it is a view of."""
    while node.op == "call_function" and is_view(node.target):
        node = node.all_input_nodes[0]
    return node


def closure(
    nodes: Iterable[fx.Node],
    operands: Callable[[fx.Node], list[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """These nodes and all that they depend on."""
    found = set(nodes)
    row = list(found)
    for node in row:
        new = [x for x in operands(node) if x not in found]
        found.update(new)
        row += new
    return found


def last_reads(
    kept: Iterable[fx.Node], steps: Iterable[tuple[Iterable[fx.Node], Iterable[Any]]]
) -> dict[int, list[fx.Node]]:
    """After which step nobody reads a value again that one of them made.

    kept    are read at the end
    steps   what each makes, and what it is given
    """
    last: dict[fx.Node, int] = {}
    for k, (made, given) in enumerate(steps):
        last.update({x: k for x in given if x in last} | dict.fromkeys(made, k))
    found: dict[int, list[fx.Node]] = {}
    ends = {*kept}
    for node, k in last.items():
        if node not in ends:
            found.setdefault(k, []).append(node)
    return found


def dependents(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes and all that depends on them."""
    found = set(nodes)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


@functools.cache
def is_creation(op: Any) -> bool:
    """Whether the result comes from no tensor: `full`, `arange`, `zeros`."""
    if not isinstance(op, OpOverload):
        return False
    return not any("Tensor" in str(argument.type) for argument in op._schema.arguments)
