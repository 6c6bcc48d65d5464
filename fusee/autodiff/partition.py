"""A joint graph becomes a forward and a backward: what is saved, and what is computed once more.

prepare         values take fewer bytes, constants depend on no tensor    joint_passes.py
choose          a minimum cut                                             min_cut.py
split           the two graphs                                            partition.py
differentiate   all of it, from the captured graph on                     partition.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fusee import log
from fusee.aten.graph import (
    AtenGraph,
    Fresh,
    InputItself,
    InputSpec,
    OutputSpec,
    SymbolSource,
    ViewOfInput,
    ViewOfOutput,
)
from fusee.aten.operators import is_view
from fusee.aten.torch_api import is_opaque
from fusee.autodiff.joint import Joint, Saved, Split, leaves, made_of, parts, sparse_nodes
from fusee.autodiff.joint_passes import REDRAWN, drawn_for, prepare
from fusee.autodiff.min_cut import Choice, Costs, Facts, Kind, Prices, choose, closure, kind, root
from fusee.autodiff.trace import trace_joint
from fusee.sym.expr import Expr, Size, Symbol, hint, product, symbols
from fusee.sym.symint import same_ints

# ---------------------------------------------------------------------------- absent
# A backward without some tangents: what a joint graph is when no loss came through some results.
#
# Eager does not run the backward of what no gradient reaches; where several gradients meet, it adds
# those that are there. So it is here: what depends on missing gradients alone is missing too, a sum
# with one is the other operand, and anything else takes zeros for it. A gradient that is missing is
# None, as eager leaves it, and an infinite derivative is not multiplied by zero.

# What takes the place of a node; None: nothing, its value is zeros. Others stay.
Instead = Mapping[fx.Node, fx.Node | None]


def instead_of(joint: Joint, facts: Facts, absent: frozenset[int]) -> Instead:
    """What becomes of the nodes of the backward without the tangents numbered `absent`."""
    tangents = joint.aten.placeholders[joint.forward_inputs :]
    behind = joint.backward_nodes()
    incoming = _incoming(facts.nodes, behind)
    found: dict[fx.Node, fx.Node | None] = {tangents[k]: None for k in absent}
    for node in facts.nodes:
        if node not in behind or node in tangents:
            continue
        function = node.meta.get("function")
        gradients = _behind(node, behind) if function is None else incoming[function]
        there = [x for x in gradients if resolved(found, x) is not None]
        if not there:
            found[node] = None
        elif len(there) < len(gradients) and function is None and _is_sum(node, there[0]):
            found[node] = resolved(found, there[0])
    return found


def resolved(instead: Instead, node: fx.Node) -> fx.Node | None:
    """What `node` has become."""
    return instead.get(node, node)


def operands(instead: Instead, node: fx.Node) -> list[fx.Node]:
    """What the operands of `node` have become, those that are left."""
    found = node.all_input_nodes
    if not instead:
        return found
    return [x for x in (resolved(instead, arg) for arg in found) if x is not None]


def needed_for(gradients: Iterable[fx.Node], instead: Instead) -> set[fx.Node]:
    """These nodes and all that they depend on now."""
    found = set(gradients)
    row = list(found)
    for node in row:
        for x in operands(instead, node):
            if x not in found:
                found.add(x)
                row.append(x)
    return found


def is_moved(instead: Instead, node: fx.Node) -> bool:
    """Whether `node` is a view of something that another node has taken the place of."""
    while node.op == "call_function" and is_view(node.target):
        node = node.all_input_nodes[0]
        if node in instead:
            return True
    return False


def _behind(node: fx.Node, behind: set[fx.Node]) -> list[fx.Node]:
    return [x for x in node.all_input_nodes if x in behind]


def _incoming(nodes: Iterable[fx.Node], behind: set[fx.Node]) -> dict[int, list[fx.Node]]:
    """The gradients that go into each call of a Function's backward, which may do anything."""
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        number = node.meta.get("function")
        if number is not None and node in behind:
            row = found.setdefault(number, [])
            row += [x for x in _behind(node, behind) if x.meta.get("function") != number]
    return found


def _is_sum(node: fx.Node, other: fx.Node) -> bool:
    """Whether `node` adds something to `other`, and lies in memory as that does."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return False
    x, y = node.meta["val"], other.meta["val"]
    return x.dtype is y.dtype and same_ints(x.shape, y.shape) and same_ints(x.stride(), y.stride())


# ---------------------------------------------------------------------------- split
# A joint graph in two, once it is decided what is saved.
#
# Forward nodes keep their order. So do the backward's; what it computes once more comes right
# before its first use, so that nothing is in memory for longer than it must.

aten = torch.ops.aten


def split(
    joint: Joint, facts: Facts, choice: Choice, absent: frozenset[int] = frozenset()
) -> Split:
    """The two graphs. The joint graph's nodes are copied; it stays as it is.

    absent   tangents that the backward is without. Forward and saved values do not depend on it
    """
    return _Splitter(joint, facts, choice, absent).run()


class _Splitter:
    def __init__(self, joint: Joint, facts: Facts, choice: Choice, absent: frozenset[int]) -> None:
        self.joint, self.facts, self.choice, self.absent = joint, facts, choice, absent
        self.aten = joint.aten
        self.inputs = dict(zip(self.aten.placeholders, self.aten.inputs, strict=True))

    def run(self) -> Split:
        joint, results = self.joint, self.aten.results
        forward, saved = self._forward(results[: joint.forward_results])
        self.instead = instead_of(joint, self.facts, self.absent) if self.absent else {}
        resolve = functools.partial(resolved, self.instead)
        self.sparse = sparse_nodes(self.aten.graph)
        found = [None if k is None else resolve(results[k]) for k in joint.gradients]
        sums = [None if x is None else parts(x, self.sparse, resolve) for x in found]
        there = [node for row in sums for node in leaves(row or (), self.sparse)]
        unique = list(dict.fromkeys(filter(None, map(resolve, there))))
        backward, sizes = self._backward(unique)
        position = {node: k for k, node in enumerate(unique)}
        place = {node: position[x] for node in there if (x := resolve(node)) is not None}
        gradients = tuple(made_of(row, self.sparse, place) if row else None for row in sums)
        without = None
        if len(joint.tangents) > 1:
            without = functools.partial(split, joint, self.facts, self.choice)
        return Split(joint, forward, backward, saved, sizes, gradients, self.absent, without)

    # -------------------------------------------------------------------------- forward

    def _forward(self, results: Sequence[fx.Node]) -> tuple[AtenGraph, tuple[Saved, ...]]:
        needed = self.facts.forward | closure(self.choice.saved)
        copy = _Copier()
        specs = self.aten.inputs[: self.joint.forward_inputs]
        for node in self.facts.nodes:
            if node.op == "placeholder":
                if self.inputs[node].index < len(specs):
                    copy.node(node)
            elif node in needed and node.target is not REDRAWN:
                drawn = drawn_for(node)
                if drawn is None:
                    copy.node(node)
                else:
                    copy.made[node] = copy.made[drawn]
        returned = [copy.made[node] for node in results]
        shared = {node: k for k, node in enumerate(results) if node in self.facts.shared}
        taken = set(self.facts.roots)
        saved = []
        self.kept: dict[fx.Node, Any] = {}  # what the backward gets, with its meta
        for node in self.choice.saved:
            spec = self.inputs.get(node)
            self.kept[node] = node.meta
            if spec is not None and node not in self.facts.written:
                saved.append(Saved("input", spec.index))
            elif node in shared:
                saved.append(Saved("result", shared[node]))
            else:
                saved.append(Saved("result", len(returned)))
                returned.append(self._own(copy, node, taken))
        copy.graph.output(tuple(returned))
        graph = replace(
            self.aten,
            graph=copy.graph,
            constants=copy.constants(self.aten),
            inputs=specs,
            _module=None,
        )
        return _flat(self.joint, graph), tuple(saved)

    def _own(self, copy: _Copier, node: fx.Node, taken: set[fx.Node]) -> fx.Node:
        """`node` as a result in memory that nobody else has."""
        made = copy.made[node]
        base = root(node)
        if node.op == "call_function" and base is node and node not in taken:
            taken.add(node)
            return made
        clone = copy.clone(made, node.meta)
        self.kept[node] = clone.meta
        return clone

    # -------------------------------------------------------------------------- backward

    def _backward(self, gradients: Sequence[fx.Node]) -> tuple[AtenGraph, tuple[str, ...]]:
        tangents = [
            node
            for k, node in enumerate(self.aten.placeholders[self.joint.forward_inputs :])
            if k not in self.absent
        ]
        saved = self.choice.saved
        specs = [self._spec(k, node) for k, node in enumerate(saved)]
        given = [
            replace(self.inputs[node], index=len(saved) + k, is_static=False)
            for k, node in enumerate(tangents)
        ]
        found, missing = self._symbols(specs, given)
        copy = _Copier(self.instead, self.aten.to_size)
        for node in saved:
            copy.node(node, "placeholder", self.kept[node])
        for name, symbol in missing.items():
            index = len(specs)
            specs.append(InputSpec(index, name, None, (), (), 0, None, symbol=symbol.expr))
            found[name] = SymbolSource(index, None)
            copy.graph.placeholder(name).meta = {"val": self._integer(name)}
        for spec, node in zip(given, tangents, strict=True):
            specs.append(replace(spec, index=len(specs)))
            copy.node(node)
        needed = self.facts.backward - self.sparse
        if self.absent:
            needed = needed & needed_for(gradients, self.instead)
        for node in self.facts.nodes:
            if node in needed and node.op == "call_function":
                copy.demand(node)
        indices = {node: len(specs) - len(tangents) + k for k, node in enumerate(tangents)}
        results = [copy.demand(node) for node in gradients]
        outputs = [
            self._output(copy, node, results, indices, k) for k, node in enumerate(gradients)
        ]
        copy.graph.output(tuple(results))
        backward = AtenGraph(
            graph=copy.graph,
            constants=copy.constants(self.aten),
            inputs=tuple(specs),
            outputs=tuple(outputs),
            mutations=(),
            structure=tuple,
            symbols=found,
            to_size=self.aten.to_size,
            no_autocast=self.aten.no_autocast,
        )
        return backward, tuple(missing)

    def _spec(self, index: int, node: fx.Node) -> InputSpec:
        """How the backward takes a saved value."""
        given = self.inputs.get(node)
        if given is not None and node not in self.facts.written:
            return replace(given, index=index, attribute=None, is_static=False)
        val, to_size = self.kept[node]["val"], self.aten.to_size
        size, stride = tuple(map(to_size, val.shape)), tuple(map(to_size, val.stride()))
        device = node.meta.get("device")
        return InputSpec(index, node.name, val.dtype, size, stride, 0, device)

    def _output(
        self,
        copy: _Copier,
        node: fx.Node,
        results: list[fx.Node],
        tangents: dict[fx.Node, int],
        position: int,
    ) -> OutputSpec:
        """What the caller gets as the gradient `node`. May change and append to `results`."""
        to_size, val, base = self.aten.to_size, node.meta["val"], root(node)
        size, stride = tuple(map(to_size, val.shape)), tuple(map(to_size, val.stride()))
        if node in tangents:
            return InputItself(tangents[node])
        crosses = is_opaque(val) or is_opaque(base.meta["val"])
        if base in tangents and not crosses:
            start = val.storage_offset() - base.meta["val"].storage_offset()
            return ViewOfInput(tangents[base], size, stride, to_size(start), val.dtype)
        if is_moved(self.instead, node) or copy.made[base].op != "call_function":
            results[position] = made = copy.clone(copy.made[node], node.meta)
            own = made.meta["val"].stride()
            return Fresh(position, size, tuple(map(to_size, own)))
        if any(step == 0 and n != 1 for n, step in zip(size, stride)) and not crosses:
            # all elements are one in memory: the caller gets a view of what is there
            results[position] = copy.made[base]
            start = val.storage_offset() - base.meta["val"].storage_offset()
            return ViewOfOutput(position, size, stride, to_size(start), val.dtype)
        return Fresh(position, size, stride)

    # -------------------------------------------------------------------------- symbols

    def _symbols(
        self, saved: Sequence[InputSpec], tangents: Sequence[InputSpec]
    ) -> tuple[dict[str, SymbolSource], dict[str, Symbol]]:
        """Where the backward reads sizes, and those that no tensor of its inputs shows."""
        if not self.aten.symbols:
            return {}, {}
        used: dict[str, Symbol] = {}
        for size in self._sizes([*saved, *tangents]):
            used |= {symbol.name: symbol for symbol in symbols(size)}
        shown: dict[str, SymbolSource] = {}
        seen: dict[str, SymbolSource] = {}
        for spec in saved:
            for axis, size in enumerate(spec.size):
                name = _only_symbol(size)
                if name is not None:
                    shown.setdefault(name, SymbolSource(spec.index, axis))
        missing = {name: symbol for name, symbol in used.items() if name not in shown}
        for spec in tangents:
            for axis, size in enumerate(spec.size):
                name = _only_symbol(size)
                if name in missing:
                    seen.setdefault(name, SymbolSource(spec.index, axis))
        missing = {name: symbol for name, symbol in missing.items() if name not in seen}
        for name, source in seen.items():
            shown[name] = SymbolSource(source.index + len(missing), source.axis)
        return {name: source for name, source in shown.items() if name in used}, missing

    def _sizes(self, specs: Iterable[InputSpec]) -> Iterator[Size]:
        """All sizes that the backward computes with."""
        for spec in specs:
            yield from (*spec.size, *spec.stride, spec.offset)
        nodes = self.facts.backward | set(self.choice.recomputed)
        for node in nodes:
            found: list[Size] = []
            fx.node.map_aggregate((node.args, node.kwargs), _collector(found))
            yield from found
            val = node.meta.get("val")
            for part in val if isinstance(val, (tuple, list)) else (val,):
                if isinstance(part, torch.Tensor):
                    yield from map(self.aten.to_size, (*part.shape, *part.stride()))

    def _integer(self, name: str) -> Any:
        """The SymInt of a symbol."""
        source = self.aten.symbols[name]
        val = self.aten.placeholders[source.index].meta["val"]
        return val if source.axis is None else val.shape[source.axis]


class _Copier:
    """A new graph that takes over nodes of another one, with their names and metas."""

    def __init__(
        self, instead: Instead | None = None, to_size: Callable[[Any], Size] = int
    ) -> None:
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.instead, self.to_size = instead or {}, to_size

    def node(self, node: fx.Node, op: str = "", meta: dict[str, Any] | None = None) -> fx.Node:
        """A copy of `node`, whose operands are there; with `op`, one without operands."""
        if op:
            made = self.graph.create_node(op, node.name, name=node.name)
        else:
            # create_node looks for SymInts among arguments that it is given, which takes long
            get = self._operand if self.instead else self.made.__getitem__
            args, kwargs = fx.map_arg(node.args, get), fx.map_arg(node.kwargs, get)
            made = self.graph.create_node(node.op, node.target, name=node.name)
            made.args = args
            if kwargs:
                made.kwargs = kwargs
        made.meta = dict(node.meta if meta is None else meta)
        self.made[node] = made
        return made

    def demand(self, node: fx.Node) -> fx.Node:
        """The copy of `node`, which comes now with what it needs if it did not come yet."""
        row = [node]
        while row:
            at = row[-1]
            missing = []
            if at not in self.made:
                found = operands(self.instead, at)
                missing = [x for x in found if x not in self.made]
            row += missing
            if not missing:
                row.pop()
                if at not in self.made:
                    self.node(at)
        return self.made[node]

    def _operand(self, node: fx.Node) -> fx.Node:
        """The copy of what takes the place of `node`; zeros where nothing does."""
        found = resolved(self.instead, node)
        if found is not None:
            return self.made[found]
        val = node.meta["val"]
        order = sorted(range(val.dim()), key=lambda axis: -hint(self.to_size(val.stride(axis))))
        sizes = [self.to_size(val.shape[axis]) for axis in order]
        kwargs = {"dtype": val.dtype, "device": node.meta["device"]}
        args: Any = (sizes, 0)
        made = self.graph.create_node("call_function", aten.full.default, (), kwargs)
        made.args = args
        made.meta = {**node.meta, "val": val.new_empty([val.shape[axis] for axis in order])}
        if order == sorted(order):
            return made
        inverse = [order.index(axis) for axis in range(len(order))]
        view = self.graph.create_node("call_function", aten.permute.default, (made, inverse), {})
        view.meta = {**node.meta, "val": made.meta["val"].permute(inverse)}
        return view

    def clone(self, made: fx.Node, meta: dict[str, Any]) -> fx.Node:
        """A node with the values of `made` in dense memory of its own."""
        clone = self.graph.create_node("call_function", aten.clone.default, (made,), {})
        clone.meta = {**meta, "val": aten.clone.default(meta["val"])}
        return clone

    def constants(self, graph: AtenGraph) -> dict[str, torch.Tensor]:
        """Those constants of `graph` that came along."""
        names = [str(node.target) for node in self.graph.find_nodes(op="get_attr")]
        return {name: graph.constants[name] for name in dict.fromkeys(names)}


def _collector(found: list[Size]) -> Callable[[Any], Any]:
    def look(leaf: Any) -> Any:
        if isinstance(leaf, Expr):
            found.append(leaf)
        return leaf

    return look


def _only_symbol(size: Size) -> str | None:
    """The name of the symbol that a size is, if it is nothing else."""
    found = list(symbols(size))
    return found[0].name if len(found) == 1 and found[0].expr == size else None


# ---------------------------------------------------------------------------- partition


_UTMOST = 2.0**20  # a scarcity at which no work is too much
_STEPS = 8  # of the search between scarcities


def partition(joint: Joint, *, budget: float = 1.0, prices: Prices = Prices()) -> Split:  # noqa: B008
    """The two graphs of a joint one, which is rewritten in place to need less memory.

    budget   1.0: calls to ATen are never repeated. 0.0: all is repeated that can be. Between: the
             share of the memory between these two that saved values may take, in bytes
    prices   of the machine that the graphs are for
    raises   CheckError if nothing can be saved so that the backward could run
    """
    prepare(joint)
    facts = Facts(joint, Costs(joint.aten, prices))
    return split(joint, facts, _within(facts, budget))


def differentiate(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    cut: Callable[[Joint], Split] = partition,
    timed: Callable[[str], AbstractContextManager[object]] = nullcontext,
    **tracing: Any,
) -> Split:
    """The captured graph with its gradients, as two graphs and what goes from one to the other.

    cut      in place of `partition`; for graphs that have tangents
    timed    is entered for each of the two steps, with its name
    tracing  as for trace_joint
    raises   as trace_joint
    """
    with timed("trace"):
        joint = trace_joint(gm, example_inputs, **tracing)
    log.publish("aten", "joint", lambda: str(joint.aten))
    if not joint.tangents:
        nothing = fx.Graph()
        nothing.output(())
        backward = AtenGraph(nothing, {}, (), (), (), tuple)
        return Split(joint, _flat(joint, joint.aten), backward, (), (), joint.gradients)
    with timed("partition"):
        return cut(joint)


def _flat(joint: Joint, graph: AtenGraph) -> AtenGraph:
    """The forward, as it is compiled: see `Split.forward`."""
    inputs = [
        replace(
            spec,
            is_static=spec.is_static and gradient is None and spec.attribute is None,
            attribute=None,
        )
        for spec, gradient in zip(graph.inputs, joint.gradients, strict=True)
    ]
    return replace(graph.flat(), inputs=tuple(inputs))


def describe(split: Split) -> str:
    """What is saved for the backward and what is computed once more, in a line."""
    total: Size = 0
    count = 0
    for spec, saved in zip(split.backward.inputs, split.saved):
        if saved.kind == "result" and spec.dtype is not None:
            count += 1
            total = total + product(spec.size) * spec.dtype.itemsize
    again = sum(
        node.op == "call_function" and not node.meta.get("backward") and not is_view(node.target)
        for node in split.backward.graph.nodes
    )
    recomputed = f"{again} operators are computed again" if again else "none computed again"
    size = f"{total:,}" if isinstance(total, int) else str(total)
    return f"{count} values of {size} bytes are saved for the backward; {recomputed}"


def saved_bytes(facts: Facts, choice: Choice) -> int:
    """Bytes that live until the backward for its sake alone. Unwritten inputs live anyway."""
    return sum(
        facts.costs.bytes(node)
        for node in choice.saved
        if kind(node) is not Kind.INPUT or node in facts.written
    )


def _within(facts: Facts, budget: float) -> Choice:
    """The choice of least work whose saved values fit the budget."""
    best = choose(facts, None)
    if budget >= 1:
        return best
    least = choose(facts, _UTMOST)
    floor, full = (saved_bytes(facts, choice) for choice in (least, best))
    limit = floor + budget * max(0, full - floor)
    if budget <= 0:
        return least
    low, high = 1.0, 1024.0
    best = least
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        choice = choose(facts, middle)
        if saved_bytes(facts, choice) <= limit:
            best, high = choice, middle
        else:
            low = middle
    return best
