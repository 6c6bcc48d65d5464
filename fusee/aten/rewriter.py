"""AtenGraphs made of others: changed in place, copied in parts, and in forms that engines read.

Editor     changes a graph in place, for passes
Copier     copies nodes, with names and metas, and makes an AtenGraph of the copies
cut        each level of a split graph as an AtenGraph of its own
explicit   a graph with sizes and casts written out
single     one call of it

A node is static if it depends on nothing but parameters, buffers and constants that the graph does
not write to. Passes compute new weights with ordinary nodes; `constants` moves the static ones out.

node.meta of inputs may hold
    brought   the caller's is a number on the CPU, and this one is on the graph's own device
of others
    stored    it is computed once, though what reads it could compute it
and of static nodes
    packed    an opaque oneDNN weight: its `val` is the plain weight's
    derive    False: compute it at each call, keeping it would cost more memory than time is gained
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten import (
    AtenGraph,
    InputSpec,
    Mutation,
    Order,
    OutputSpec,
    Readings,
    SymbolSource,
    arguments,
    call_source,
    geometry_of,
    inverse,
    is_deterministic,
    last_reads,
    memory_root,
    must_run,
    names_in,
    shown_symbols,
    tensor_input,
    used_symbols,
)
from fusee.aten.torch_api import bits_of
from fusee.aten.tracer import with_sizes
from fusee.config import Options
from fusee.fake import on_metas
from fusee.fake.layouts import is_contiguous, same_ints
from fusee.fake.torch_python import is_pointwise
from fusee.source import Args, Kwargs, NodeGraph, give, listed, overloads
from fusee.sym import Expr, Size, hint
from fusee.sym.shape_env import computed_from

aten = torch.ops.aten


def new_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    meta: Mapping[str, Any],
    val: Any = None,
    name: str | None = None,
) -> fx.Node:
    """A call of ours, of the value `val`, or else of what `target` gives for its arguments'."""
    if val is None:
        values = fx.map_arg((args, kwargs), lambda x: x.meta["val"])
        val = on_metas(target, *values[0], **values[1])
    made = graph.create_node("call_function", target, args, kwargs, name)
    made.meta.update(meta, val=val)
    return made


# ---------------------------------------------------------------------------- in place

# Functions that passes compute weights with, which are no operators.
DERIVATIONS: set[Callable[..., Any]] = set()


class Editor:
    """One AtenGraph while passes change it in place. `notes` says what they did, in order.

    parameters   whether they are static, as constants are
    """

    def __init__(self, aten: AtenGraph, options: Options, parameters: bool = True) -> None:
        self.aten = aten
        self.graph = aten.graph
        self.options = options
        self.notes: list[str] = []
        self._like: Any = None
        written = {mutation.index for mutation in aten.mutations}
        self._static: set[fx.Node] = {
            node
            for node, spec in zip(aten.placeholders, aten.inputs, strict=True)
            if parameters and spec.is_static and spec.index not in written
        }
        for node in self.graph.nodes:
            self._mark(node)

    # -------------------------------------------------------------------- questions

    def calls(self, *targets: Callable[..., Any]) -> Iterator[fx.Node]:
        """The nodes, in order, that call one of `targets`. The graph may change meanwhile."""
        for target in targets:
            yield from list(self.graph.find_nodes(op="call_function", target=target))

    def is_static(self, node: object) -> bool:
        """Whether an argument depends on parameters and constants alone. True for no argument."""
        return node is None or node in self._static

    def hint(self, size: int | torch.SymInt) -> int:
        """A size as a number: for a symbolic one what it is in the first call."""
        return size if isinstance(size, int) else hint(self.aten.to_size(size))

    def sizes(self, node: fx.Node) -> list[Size]:
        """The shape of a node's result."""
        return [n if type(n) is int else self.aten.to_size(n) for n in val(node).shape]

    def hints(self, node: fx.Node) -> list[int]:
        """The shape of a node's result as numbers."""
        return [self.hint(size) for size in val(node).shape]

    def bytes(self, node: fx.Node) -> int:
        """Bytes of a node's result."""
        return math.prod(self.hints(node)) * val(node).itemsize

    def _mark(self, node: fx.Node) -> None:
        """Extend what is static by one node whose arguments are settled."""
        if node.op == "get_attr":
            self._static.add(node)
        if node.op != "call_function" or not is_droppable(node):
            return
        if not all(arg in self._static for arg in node.all_input_nodes):
            return
        leaves: list[Any] = []
        if self.aten.symbols:
            fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
        if not any(isinstance(leaf, Expr) for leaf in leaves):
            self._static.add(node)

    # -------------------------------------------------------------------- changes

    def _with_sizes(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """SymInts among arguments as the sizes that nodes hold."""
        if not self.aten.symbols:
            return args, kwargs
        found: tuple[Args, Kwargs] = with_sizes((args, kwargs), self.aten.to_size)
        return found

    @contextlib.contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """Inside, new nodes come before `node`, whose device and lines of the user they take."""
        outer, self._like = self._like, node
        with self.graph.inserting_before(node):
            yield
        self._like = outer

    def call(
        self,
        target: Callable[..., Any],
        *args: Any,
        like: fx.Node | None = None,
        val: Any = None,
        **kwargs: Any,
    ) -> fx.Node:
        """A new node. Its meta is `val`, or else what `target` returns for its arguments' metas.

        like    whose device and lines it takes in place of those of the node that it comes before
        """
        like = like or self._like
        meta: dict[str, Any] = {"device": like.meta.get("device")}
        if "stack_trace" in like.meta:
            meta["stack_trace"] = like.meta["stack_trace"]
        node = new_call(self.graph, target, args, kwargs, meta, val)
        if self.aten.symbols:
            give(node, *self._with_sizes(args, kwargs))
        self._mark(node)
        return node

    def number(self, number: float, beside: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A tensor without axes, where `beside` is."""
        of = val(beside).new_empty((), dtype=dtype)
        return self.call(torch.ops.aten.full.default, [], number, dtype=dtype, val=of)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """A copy of `node` that lies row by row."""
        layout = torch.contiguous_format
        return self.call(torch.ops.aten.clone.default, node, memory_format=layout)

    def images(self, dtypes: Collection[torch.dtype]) -> list[fx.Node]:
        """Convolutions of images in `dtypes` that may have another layout."""
        if not self.options.channels_last:
            return []
        found = self.calls(aten.convolution.default)
        found = (x for x in found if val(x).dim() == 4 and val(x).dtype in dtypes)
        return [x for x in found if not x.args[6]]  # a transposed one

    def mark_channels_last(self, nodes: Collection[fx.Node], what: str = "convolutions") -> None:
        """Give calls on images that layout."""
        for node in nodes:
            node.meta["layout"] = "channels_last"
        if nodes:
            self.notes.append(f"{len(nodes)} {what} in channels-last layout")

    def become(
        self, node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Make `node` another call with the same result. Cheaper than a new node in its place."""
        old = node.all_input_nodes
        node.target = target
        node.args, node.kwargs = self._with_sizes(args, kwargs)
        self.erase(*[arg for arg in old if not arg.users])
        return node

    def change(self, node: fx.Node, **given: Any) -> None:
        """Give a call of an operator other arguments, by the names of its schema."""
        op: Any = node.target
        named = {**arguments(node), **given}
        kwargs = {x.name: named.pop(x.name) for x in op._schema.arguments if x.kwarg_only}
        self.become(node, op, *named.values(), **kwargs)

    def adopt(self, node: fx.Node) -> None:
        """Take a new placeholder as static."""
        self._static.add(node)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """All that used `old` uses `new`; `old` goes, and what only it used goes with it."""
        old.replace_all_uses_with(new)
        self.erase(old)

    def erase(self, *nodes: fx.Node) -> None:
        """Drop nodes without users, then the arguments that lost their last user by it."""
        pending = dict.fromkeys(nodes)
        gone = set()
        while pending:
            node, _ = pending.popitem()
            if node.users or node in gone or not is_droppable(node):
                continue
            gone.add(node)
            inputs = node.all_input_nodes
            self.graph.erase_node(node)
            self._static.discard(node)
            pending.update(dict.fromkeys(inputs))

    def cast(self, node: fx.Node, dtype: torch.dtype, derive: bool = True) -> fx.Node:
        """`node` converted to `dtype`; itself if it has that dtype."""
        if val(node).dtype is dtype:
            return node
        made = self.call(torch.ops.aten._to_copy.default, node, dtype=dtype)
        made.meta["derive"] = derive
        return made


Pass = Callable[[Editor], None]


def edited(aten: AtenGraph, options: Options, passes: Sequence[Pass], notes: list[str]) -> Editor:
    """Change `aten` in place; what was done joins `notes`."""
    edit = Editor(aten, options)
    edit.notes = notes
    for step in passes:
        step(edit)
    return edit


def val(node: fx.Node) -> Tensor:
    """A node's one result on the meta device, with eager's shape, strides and dtype."""
    found: Tensor = node.meta["val"]
    return found


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Whether two results have one shape for all values of open sizes."""
    return same_ints(val(a).shape, val(b).shape)


def is_droppable(node: fx.Node) -> bool:
    """Whether a node without users may go."""
    if node.op != "call_function":
        return node.op == "get_attr"
    return (
        is_deterministic(node.target)
        or node.target is operator.getitem
        or node.target in DERIVATIONS
    )


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that uses `node`, once."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user


# ---------------------------------------------------------------------------- copies


def copied(gm: fx.GraphModule, inner: Callable[[fx.GraphModule], fx.GraphModule]) -> fx.GraphModule:
    """A copy of a graph, and of those that it calls, by `inner`."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    made = fx.GraphModule(gm, graph)
    for name in dict.fromkeys(node.target for node in graph.find_nodes(op="get_attr")):
        called = getattr(made, name, None)
        if isinstance(called, fx.GraphModule):
            setattr(made, name, inner(called))
    return made


class Copier:
    """A new graph of copies of another's nodes, and of calls on these.

    made   node of the other graph -> what stands for it
    """

    def __init__(self) -> None:
        self.graph = NodeGraph()
        self.made: dict[fx.Node, fx.Node] = {}

    def argument(self, leaf: Any) -> Any:
        """What stands for a node or literal among arguments."""
        return self.made[leaf] if isinstance(leaf, fx.Node) else leaf

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that `node` cannot be copied without."""
        return node.all_input_nodes

    def placeholder(self, node: fx.Node, **meta: Any) -> fx.Node:
        """An input for the value of `node`, named and described like it but for `meta`."""
        made = self.graph.create_node("placeholder", node.name, name=node.name)
        made.meta = {**node.meta, **meta}
        self.made[node] = made
        return made

    def copy(self, node: fx.Node) -> fx.Node:
        """A copy of `node`, whose operands are there."""
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self.argument)
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        self.made[node] = made
        return made

    def demand(self, node: fx.Node) -> fx.Node:
        """The copy of `node`, which comes now with what it needs if it did not come yet."""
        row = [node]
        while row:
            at = row[-1]
            missing = []
            if at not in self.made:
                missing = [x for x in self.operands(at) if x not in self.made]
            row += missing
            if not missing:
                row.pop()
                if at not in self.made:
                    self.copy(at)
        return self.made[node]

    def call(
        self, target: Any, *args: Any, like: fx.Node, val: Any = None, **kwargs: Any
    ) -> fx.Node:
        """A call of ours, described like a node. Its `val` is what the target gives for metas."""
        return new_call(self.graph, target, args, kwargs, like.meta, val)

    def own(self, node: fx.Node, **layout: torch.memory_format) -> fx.Node:
        """A copy in memory of its own, conjugated and negated when it is read if `node` is."""
        bits = bits_of(val(node))
        for bit in bits:
            node = self.call(bit, node, like=node)
        node = self.call(aten.clone.default, node, like=node, **layout)
        for bit in bits:
            node = self.call(bit, node, like=node)
        return node

    def symbol(self, whole: AtenGraph, name: str) -> InputSpec:
        """An input for a size of the other graph that no tensor among the inputs shows."""
        made = self.graph.placeholder(f"size_{name}")
        source = whole.symbols[name]
        if source.unbacked is not None:
            made.meta = {"val": source.unbacked}
            known = whole.to_size(source.unbacked)
            return InputSpec(0, made.name, None, (), (), 0, None, symbol=known)
        given, spec = val(whole.placeholders[source.index]), whole.inputs[source.index]
        made.meta = {"val": given if source.axis is None else given.shape[source.axis]}
        size = spec.symbol if source.axis is None else spec.size[source.axis]
        return InputSpec(0, made.name, None, (), (), 0, None, symbol=size)

    def finish(
        self,
        whole: AtenGraph,
        results: Iterable[fx.Node],
        inputs: Iterable[InputSpec],
        outputs: Iterable[OutputSpec],
        symbols: Mapping[str, SymbolSource],
        mutations: tuple[Mutation, ...] = (),
        structure: Callable[[list[Any]], Any] = tuple,
    ) -> AtenGraph:
        """The AtenGraph of what was copied from `whole`. Inputs are numbered in their order."""
        self.graph.output(tuple(results))
        names = dict.fromkeys(str(n.target) for n in self.graph.find_nodes(op="get_attr"))
        read = {name for name, at in symbols.items() if at.unbacked is not None}
        # what must hold is looked at where the last of its symbols is read
        required = [r for r in whole.required if (n := names_in(r)) & read and n <= symbols.keys()]
        return AtenGraph(
            graph=self.graph,
            constants={name: whole.constants[name] for name in names},
            inputs=tuple(dataclasses.replace(spec, index=k) for k, spec in enumerate(inputs)),
            outputs=tuple(outputs),
            mutations=mutations,
            structure=structure,
            symbols=symbols,
            to_size=whole.to_size,
            no_autocast=whole.no_autocast,
            required=tuple(required),
        )


# ---------------------------------------------------------------------------- cut
# A level of a split graph as an AtenGraph of its own, and how its tensors come in and go out.
#
# What goes from part to part is dense. An engine's parts see row-major tensors only: a permuted
# tensor is handed over as the row-major tensor that has the same memory, and permuted in the graph.


@dataclass(frozen=True, eq=False)
class GraphPart:
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


def body_lines(
    aten: AtenGraph,
    steps: Sequence[GraphPart | fx.Node],
    name: dict[fx.Node, str],
) -> list[str]:
    """From a split graph's inputs, which are named, to its results: step k is a call of `part{k}`.

    steps   parts, and calls that run by themselves: how their results lie is ATen's to choose, but
            what operators of users give may lie otherwise than their fake kernels say
    """
    inputs = [name[node] for node in aten.placeholders]
    readings, lines = Readings(aten), []

    def lay_out(node: fx.Node) -> None:
        strides, x = listed(map(aten.to_size, node.meta["val"].stride())), name[node]
        lines.append(f"if {x}.stride() != {strides}: {x} = laid_out({x}, {strides})")

    rows: list[Any] = [
        ((x,), x.all_input_nodes) if isinstance(x, fx.Node) else (x.outputs, x.inputs)
        for x in steps
    ]
    last = last_reads(aten.results, rows)
    for k, (step, (made, _)) in enumerate(zip(steps, rows)):
        names = {node: f"v{len(name) + n}" for n, node in enumerate(made)}
        if isinstance(step, fx.Node):
            lines.append(f"{names[step]} = {call_source(step, f'part{k}', name.__getitem__)}")
        else:
            args = [name[x] if isinstance(x, fx.Node) else x for x in step.inputs]
            for n, (spec, order) in enumerate(zip(step.graph.inputs, step.input_orders)):
                if step.is_claimed and spec.dtype is not None and not spec.is_static:
                    args[n] = f"row_major({args[n] if order is None else permuted(args[n], order)})"
            results = "".join(f"{x}, " for x in names.values())
            lines.append(f"{results}{'= ' * bool(results)}part{k}({listed(args)})")
            for x, order in zip(names.values(), step.output_orders, strict=True):
                lines += [] if order is None else [f"{x} = {permuted(x, inverse(order))}"]
        name.update(names)
        for node in made:
            lines += readings.lines(node, name[node])
        if isinstance(step, fx.Node) and isinstance(step.meta.get("val"), Tensor):
            of: Any = step.args[0] if step.target is operator.getitem else step
            if of.target.namespace != "aten":
                lay_out(step)
        if gone := [name[node] for node in last.get(k, ())]:
            lines.append(f"del {', '.join(gone)}")
    for node in dict.fromkeys(aten.results):
        val = node.meta["val"]
        if node.op == "call_function" and (aten.is_staged or not is_contiguous(val)):
            lay_out(node)
    lines += ["with no_grad():"] if aten.mutations else []
    for m in aten.mutations:
        written = f"{inputs[m.index]}{'.data' if m.is_data else ''}"
        lines.append(f"    {written}.copy_({name[aten.results[m.position]]})")
    return [*lines, f"return {listed(name[node] for node in aten.results)}"]


def permuted(value: str, order: Order) -> str:
    return f"{value}.permute({', '.join(map(str, order))})"


def cut(whole: AtenGraph, levels: Sequence[tuple[bool, tuple[fx.Node, ...]]]) -> list[GraphPart]:
    """The levels as parts, in their order."""
    wanted = set(whole.results)
    parts = []
    for is_claimed, nodes in levels:
        inside = {*nodes, *whole.graph.find_nodes(op="output")}
        outputs = tuple(n for n in nodes if n in wanted or not inside.issuperset(n.users))
        if outputs or any(map(must_run, nodes)):
            parts.append(_Cutter(whole, is_claimed).part(nodes, outputs))
    return parts


class _Cutter(Copier):
    def __init__(self, whole: AtenGraph, is_claimed: bool) -> None:
        super().__init__()
        self.whole = whole
        self.is_claimed = is_claimed
        self.specs: list[InputSpec] = []
        self.inputs: list[fx.Node | str] = []
        self.orders: list[Order | None] = []
        self.given = dict(zip(whole.placeholders, whole.inputs, strict=True))
        self.written = {mutation.index for mutation in whole.mutations}

    def part(self, nodes: Sequence[fx.Node], outputs: tuple[fx.Node, ...]) -> GraphPart:
        inside = set(nodes)
        outer = list(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))
        for node in outer:
            if node.op != "get_attr":
                self._tensor(node)
        used = used_symbols([*nodes, *outer], self.whole.to_size)
        symbols = {name: at for name, at in shown_symbols(self.specs).items() if name in used}
        for name in sorted(used.keys() - symbols.keys()):
            symbols[name] = SymbolSource(len(self.specs), None)
            self._add(name, self.symbol(self.whole, name), None)
        for given, order in zip(self.inputs, self.orders, strict=True):
            if order is not None and isinstance(given, fx.Node):
                made = self.made[given]
                self.made[given] = self.call(_PERMUTE, made, list(inverse(order)), like=made)
        for node in (*(n for n in outer if n.op == "get_attr"), *nodes):
            self.copy(node)
        results, orders = self._results(outputs)
        graph = self.finish(self.whole, results, self.specs, (), symbols).flat()
        return GraphPart(
            graph, self.is_claimed, tuple(self.inputs), outputs, tuple(self.orders), tuple(orders)
        )

    def _tensor(self, node: fx.Node) -> None:
        """Append a placeholder for the value of `node`, in row-major order for an engine."""
        spec = self.given.get(node)
        val = node.meta["val"]
        if not isinstance(val, Tensor):
            raise AssertionError(f"{node} is no tensor, but goes from part to part")
        is_static = spec is not None and spec.is_static and spec.index not in self.written
        order = None if is_static or not self.is_claimed else self._order(val)
        if order is not None:
            val = on_metas(Tensor.permute, val, order)
        elif (spec is None or self.is_claimed) and not is_static and not self._is_dense(val):
            val = on_metas(Tensor.new_empty, val, val.shape)
        self.placeholder(node, val=val)
        offset = spec.offset if spec is not None and order is None else 0
        device, to_size = node.meta.get("device"), self.whole.to_size
        more = {"offset": offset, "is_static": is_static}
        self._add(node, tensor_input(0, node.name, val, device, to_size, **more), order)

    def _add(self, given: fx.Node | str, spec: InputSpec, order: Order | None) -> None:
        self.inputs.append(given)
        self.specs.append(spec)
        self.orders.append(order)

    def _results(self, outputs: Sequence[fx.Node]) -> tuple[list[fx.Node], list[Order | None]]:
        results, orders = [], []
        roots: set[fx.Node] = set()
        for node in outputs:
            made = self.made[node]
            val = made.meta["val"]
            root = memory_root(made)
            order = self._order(val) if self.is_claimed else None
            if not self._is_dense(val):
                made = self.own(made, memory_format=torch.contiguous_format)
            elif root.op != "call_function" or root in roots:
                made = self.own(made, memory_format=torch.preserve_format)
            roots.add(memory_root(made))
            if order is not None:
                made = self.call(_PERMUTE, made, list(order), like=made)
            results.append(made)
            orders.append(order)
        return results, orders

    def _order(self, val: Tensor) -> Order | None:
        """The permutation that makes a dense tensor row-major; None: it is so, or cannot be."""
        strides = [hint(size) for size in geometry_of(val, self.whole.to_size)[1]]
        order = tuple(sorted(range(val.dim()), key=lambda axis: -strides[axis]))
        if is_contiguous(val) or not is_contiguous(on_metas(Tensor.permute, val, order)):
            return None
        return order

    def _is_dense(self, val: Tensor) -> bool:
        return is_contiguous(val) or self._order(val) is not None


_PERMUTE = aten.permute.default


class Sized(Copier):
    """Copies whose sizes are computed by calls of their own, from the shapes of inputs."""

    def __init__(
        self,
        least: Any = torch.sym_min,
        greatest: Any = torch.sym_max,
        numbers: type[fx.proxy.GraphAppendingTracer] = fx.proxy.GraphAppendingTracer,
    ) -> None:
        """numbers   makes the proxies that sizes are computed with"""
        super().__init__()
        self.symbols: dict[str, Any] = {"min": least, "max": greatest}
        self.numbers = numbers(self.graph)
        self.sizes: dict[Expr, fx.Node] = {}

    def name_symbols(self, whole: AtenGraph) -> None:
        """What sizes are computed from. All placeholders of `whole` have their copies."""
        for name, source in whole.symbols.items():
            given = self.made[whole.placeholders[source.index]]
            if source.axis is not None:
                size = val(given).shape[source.axis]
                size = size if isinstance(size, int) else hint(whole.to_size(size))
                given = self.call(aten.sym_size.int, given, source.axis, like=given, val=size)
            self.symbols[name] = self.numbers.proxy(given)

    def rest(self, whole: AtenGraph, results: Sequence[fx.Node]) -> fx.Graph:
        """The graph, with these results, once what stands for all placeholders of `whole` is there:
        what has no copy yet is copied."""
        self.name_symbols(whole)
        for node in whole.graph.nodes:
            if node.op != "output" and node not in self.made:
                self.copy(node)
        self.graph.output(tuple(self.made[node] for node in results))
        return self.graph

    def argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Expr):
            if leaf not in self.sizes:
                self.sizes[leaf] = self.size(leaf)
            return self.sizes[leaf]
        return super().argument(leaf)

    def size(self, size: Expr) -> fx.Node:
        """The node that computes a size: sizes print as Python, which runs on nodes."""
        before = len(self.graph.nodes)
        found: fx.Node = computed_from(size, self.symbols).node
        for node in list(self.graph.nodes)[before:]:
            node.meta["val"] = hint(size)  # a number's value is of no use to importers, its type is
        return found


def computing_sizes(whole: AtenGraph) -> fx.GraphModule:
    """A graph that computes its own sizes, as a module; the metas of these are SymInts."""
    write = Sized()
    for node in whole.placeholders:
        write.placeholder(node)
    for node in write.rest(whole, whole.results).nodes:
        if node.op == "call_function" and isinstance(node.meta["val"], int):
            node.meta["val"] = node.target(*fx.map_arg(node.args, val))
    return fx.GraphModule(dict(whole.constants), write.graph, "AtenGraph")


# ---------------------------------------------------------------------------- explicit
# An AtenGraph as an fx graph with nothing implied, as other projects' importers want it.
#
# Constants are placeholders, like inputs. Sizes are computed from the shapes of inputs by calls of
# their own. Casts of type promotion are written out, since ONNX promotes nothing.

# Not elementwise, but computed in the dtype of the result.
_PROMOTED = frozenset(
    overloads("cat stack cumsum cumprod mean mean.dim prod prod.dim_int sum sum.dim_IntList")
)
# Casts on their own, or keeping their operands' dtypes: nothing is promoted.
_UNPROMOTED = frozenset({aten._to_copy.default, aten.clone.default, aten.fill.Scalar})
# What chooses between tensors is a tensor of bools, and stays one.
_MASKS = ("condition", "mask")


def explicit(region: AtenGraph) -> fx.Graph:
    """The graph of a region. Constants become placeholders of their names, before the inputs."""
    write = _ExplicitNodes()
    constants = {name: write.input(name, x) for name, x in region.constants.items()}
    for node in region.graph.nodes:
        if node.op == "placeholder":
            write.made[node] = write.input(node.name, val(node))
        elif node.op == "get_attr":
            write.made[node] = constants[str(node.target)]
    return write.rest(region, region.results)


def single(node: fx.Node) -> fx.Graph:
    """One call with its operands as inputs, sizes too. Its results are those that are used."""
    write = _Single()
    for source in node.all_input_nodes:
        write.made[source] = write.input(source.name, val(source))
    results = [write.copy(node)]
    if isinstance(node.meta["val"], (tuple, list)):
        results = [write.copy(user) for user in node.users if user.target is operator.getitem]
    write.graph.output(tuple(results))
    return write.graph


class _ExplicitNodes(Sized):
    def input(self, name: str, val: Any) -> fx.Node:
        made = self.graph.placeholder(name)
        made.meta["val"] = val
        return made

    def copy(self, node: fx.Node) -> fx.Node:
        if node.target is aten.squeeze.dims:
            # one axis after the other: what takes them all at once is younger
            made = self.made[node.all_input_nodes[0]]
            axes: Any = node.args[1]
            for axis in sorted((axis % val(made).dim() for axis in axes), reverse=True):
                made = self.call(aten.squeeze.dim, made, axis, like=made)
            self.made[node] = made
            return made
        made = super().copy(node)
        self._promote(made)
        return made

    def _promote(self, node: fx.Node) -> None:
        op, val = node.target, node.meta["val"]
        if not isinstance(op, OpOverload) or op in _UNPROMOTED or not isinstance(val, Tensor):
            return
        if op not in _PROMOTED and not is_pointwise(op):
            return
        dtype = val.dtype
        if dtype is torch.bool:
            # the dtype in which a call that gives bools compares its operands
            vals = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
            operands = [x for x in vals if isinstance(x, (Tensor, bool, int, float))]
            if len(operands) == 2:
                dtype = torch.result_type(*operands)  # type: ignore[arg-type]
            else:
                dtype = next(x.dtype for x in operands if isinstance(x, Tensor))
        names = [argument.name for argument in op._schema.arguments]
        args = [
            arg if name in _MASKS else fx.map_arg(arg, lambda x: self._cast(node, x, dtype))
            for name, arg in zip(names, node.args)
        ]
        node.args = tuple(args)

    def _cast(self, before: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        val = x.meta["val"]
        if (val.dtype if isinstance(val, Tensor) else torch.int64) == dtype:
            return x
        made = None if isinstance(val, Tensor) else torch.empty((), dtype=dtype, device="meta")
        with self.graph.inserting_before(before):
            return self.call(aten._to_copy.default, x, like=x, val=made, dtype=dtype)


class _Single(_ExplicitNodes):
    def size(self, size: Expr) -> fx.Node:
        return self.input(f"size_{len(self.graph.nodes)}", hint(size))
