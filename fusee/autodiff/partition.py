"""A joint graph becomes a forward and a backward: what is saved, and what is computed once more.

prepare         values take fewer bytes, constants depend on no tensor    __init__.py
choose          a minimum cut                                             min_cut.py
split           the two graphs                                            partition.py
differentiate   all of it, from the captured graph on                     partition.py
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fusee import log
from fusee.aten import (
    AtenGraph,
    Fresh,
    InputItself,
    InputSpec,
    OutputSpec,
    SymbolSource,
    ViewOfInput,
    ViewOfOutput,
    closure,
    geometry_of,
    inverse,
    is_view,
    memory_root,
    remove_dead,
    shown_symbols,
    tensor_input,
    used_symbols,
)
from fusee.aten.rewriter import Copier, val
from fusee.aten.torch_api import is_opaque
from fusee.autodiff import (
    REDRAWN,
    SPARSE,
    Gradient,
    Joint,
    Saved,
    SparseRows,
    Split,
    is_sum,
    prepare,
    sparse_nodes,
)
from fusee.autodiff.chunks import chunk_losses
from fusee.autodiff.min_cut import Choice, Costs, JointFacts, Kind, Prices, choose, kind
from fusee.fake.layouts import same_ints
from fusee.sym import Size, hint, only_symbol, product

aten = torch.ops.aten

# ---------------------------------------------------------------------------- absent
# A backward without some tangents: what a joint graph is when no loss came through some results.
#
# Eager does not run the backward of what no gradient reaches; where several gradients meet, it adds
# those that are there. So it is here: what depends on missing gradients alone is missing too, a sum
# with one is the other operand, and anything else takes zeros for it. A gradient that is missing is
# None, as eager leaves it, and an infinite derivative is not multiplied by zero.

# What takes the place of a node; None: nothing, its value is zeros. Others stay.
Instead = Mapping[fx.Node, fx.Node | None]


def instead_of(joint: Joint, facts: JointFacts, absent: frozenset[int]) -> Instead:
    """What becomes of the nodes of the backward without the tangents numbered `absent`."""
    if not absent:
        return {}
    tangents = joint.aten.placeholders[joint.forward_inputs :]
    found: dict[fx.Node, fx.Node | None] = {tangents[k]: None for k in absent}
    behind = [node for node in facts.nodes if node in facts.behind and node not in tangents]
    read = {node: [x for x in node.all_input_nodes if x in facts.behind] for node in behind}
    # a Function's backward may do anything with the gradients that go into its call
    incoming: dict[int, list[fx.Node]] = {}
    for node, given in read.items():
        number = node.meta.get("function")
        if number is not None:
            outer = (x for x in given if x.meta.get("function") != number)
            incoming.setdefault(number, []).extend(outer)
    for node, given in read.items():
        number = node.meta.get("function")
        given = given if number is None else incoming[number]
        there = [x for x in given if found.get(x, x) is not None]
        if not there:
            found[node] = None
        elif len(there) < len(given) and number is None and is_sum(node):
            x, y = val(node), val(there[0])
            is_alike = x.dtype is y.dtype and same_ints(x.shape, y.shape)
            if is_alike and same_ints(x.stride(), y.stride()):
                found[node] = found.get(there[0], there[0])
    return found


class _BackwardCopier(Copier):
    """Copies nodes, and where they read what something stands for, that; zeros for nothing."""

    def __init__(self, instead: Instead, to_size: Callable[[Any], Size]) -> None:
        super().__init__()
        self.instead, self.to_size = instead, to_size

    def operands(self, node: fx.Node) -> list[fx.Node]:
        found = (self.instead.get(x, x) for x in node.all_input_nodes)
        return [x for x in found if x is not None]

    def argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        found = self.instead.get(leaf, leaf)
        return self._zeros(leaf) if found is None else self.made[found]

    def _zeros(self, node: fx.Node) -> fx.Node:
        val = node.meta["val"]
        order = sorted(range(val.dim()), key=lambda axis: -hint(self.to_size(val.stride(axis))))
        sizes: Any = [self.to_size(val.shape[axis]) for axis in order]
        like, dense = {"dtype": val.dtype, "device": node.meta["device"]}, val.new_empty
        empty = dense([val.shape[axis] for axis in order])
        made = self.call(aten.full.default, sizes, 0, like=node, val=empty, **like)
        if order == sorted(order):
            return made
        return self.call(aten.permute.default, made, list(inverse(tuple(order))), like=made)


# ---------------------------------------------------------------------------- split
# A joint graph in two, once it is decided what is saved.
#
# Forward nodes keep their order. So do the backward's; what it computes once more comes right
# before its first use, so that nothing is in memory for longer than it must.


def split(
    joint: Joint, facts: JointFacts, choice: Choice, absent: frozenset[int] = frozenset()
) -> Split:
    """The two graphs. The joint graph's nodes are copied; it stays as it is.

    absent   tangents that the backward is without. Forward and saved values do not depend on it
    """
    return _Splitter(joint, facts, choice, absent).run()


class _Splitter:
    def __init__(
        self, joint: Joint, facts: JointFacts, choice: Choice, absent: frozenset[int]
    ) -> None:
        self.joint, self.facts, self.choice, self.absent = joint, facts, choice, absent
        self.aten = joint.aten
        self.inputs = dict(zip(self.aten.placeholders, self.aten.inputs, strict=True))
        self.instead = instead_of(joint, facts, absent)
        self.sparse = sparse_nodes(self.aten.graph)
        self.symbols = {**self.aten.symbols}
        self.kept: dict[fx.Node, Tensor] = {}  # saved nodes: what the backward gets for them
        self.results: dict[fx.Node, int] = {}  # of the backward, each once, with its position

    def run(self) -> Split:
        forward, saved = self._forward()
        gradients = tuple(map(self._gradient, self.joint.gradients))
        backward, sizes = self._backward()
        without = None
        if len(self.joint.tangents) > 1:
            without = functools.partial(split, self.joint, self.facts, self.choice)
        return Split(self.joint, forward, backward, saved, sizes, gradients, self.absent, without)

    # -------------------------------------------------------------------------- forward

    def _forward(self) -> tuple[AtenGraph, tuple[Saved, ...]]:
        needed = self.facts.forward | closure(self.choice.saved)
        copy = Copier()
        specs = self.aten.inputs[: self.joint.forward_inputs]
        for node in self.facts.nodes:
            if node.op == "placeholder":
                if self.inputs[node].index < len(specs):
                    copy.placeholder(node)
            elif node in needed and node.target is not REDRAWN:
                drawn = node.meta.get("drawn")
                if drawn is None:
                    copy.copy(node)
                else:
                    copy.made[node] = copy.made[drawn]
        results = self.aten.results[: self.joint.forward_results]
        returned = [copy.made[node] for node in results]
        shared = {node: k for k, node in enumerate(results) if node in self.facts.shared}
        taken = set(self.facts.roots)
        saved = []
        for node in self.choice.saved:
            spec = self.inputs.get(node)
            self.kept[node] = val(node)
            if spec is not None and node not in self.facts.written:
                saved.append(Saved("input", spec.index))
            elif node in shared:
                saved.append(Saved("result", shared[node]))
            else:  # as a result in memory that nobody else has
                saved.append(Saved("result", len(returned)))
                own = copy.made[node]
                if node.op != "call_function" or memory_root(node) is not node or node in taken:
                    own = copy.own(own)
                    self.kept[node] = val(own)
                taken.add(node)
                returned.append(own)
        # what shows a size that only a formula of the backward asks the data for is returned
        for node in copy.made.values():
            for axis, n in enumerate(getattr(node.meta.get("val"), "shape", ())):
                symbol = None if type(n) is int else only_symbol(self.aten.to_size(n))
                if symbol is not None and symbol.name not in self.symbols:
                    returned += [node] * (node not in returned)
                    self.symbols[symbol.name] = SymbolSource(returned.index(node), axis, n)
        graph = copy.finish(self.aten, returned, specs, (), self.symbols, self.aten.mutations)
        return _flat(self.joint, graph), tuple(saved)

    # -------------------------------------------------------------------------- backward

    def _gradient(self, position: int | None) -> Gradient:
        """How the gradient at a position of the joint graph comes from the backward's results."""
        rows: list[int | SparseRows] = []
        for node in () if position is None else self._parts(self.aten.results[position]):
            if node in self.sparse:
                gradient, indices, *options = node.args
                rows.append(SparseRows(self._at(gradient), self._at(indices), tuple(options)))
            else:
                rows.append(self._at(node))
        return rows[0] if len(rows) == 1 and isinstance(rows[0], int) else tuple(rows) or None

    def _parts(self, node: Any) -> Iterator[fx.Node]:
        """What a gradient is the sum of: nodes that make sparse tensors, and dense ones."""
        node = self.instead.get(node, node)
        if node not in self.sparse or node.target is SPARSE:
            yield from () if node is None else (node,)
            return
        for x in node.args:
            if isinstance(x, fx.Node):
                yield from self._parts(x)

    def _at(self, node: Any) -> int:
        found: Any = self.instead.get(node, node)
        return self.results.setdefault(found, len(self.results))

    def _backward(self) -> tuple[AtenGraph, tuple[str, ...]]:
        facts, saved, whole = self.facts, self.choice.saved, self.aten
        given = enumerate(whole.placeholders[self.joint.forward_inputs :])
        tangents = [node for k, node in given if k not in self.absent]
        copy = _BackwardCopier(self.instead, whole.to_size) if self.instead else Copier()
        for node in saved:
            copy.placeholder(node, val=self.kept[node])
        specs = [*map(self._spec, saved), *map(self._spec, tangents)]
        nodes = [*facts.backward, *self.choice.recomputed, *saved, *tangents]
        used = used_symbols(nodes, whole.to_size, specs) if self.symbols else {}
        sizes = sorted(used.keys() - shown_symbols(specs).keys())
        specs[len(saved) : len(saved)] = [copy.symbol(whole, name) for name in sizes]
        symbols = {name: at for name, at in shown_symbols(specs).items() if name in used}
        for node in tangents:
            copy.placeholder(node)
        needed = facts.backward - self.sparse
        if self.absent:
            needed &= closure(self.results, copy.operands)
        for node in facts.nodes:
            if node in needed and node.op == "call_function":
                copy.demand(node)
        results = [copy.demand(node) for node in self.results]
        first = len(specs) - len(tangents)
        indices = {node: first + k for k, node in enumerate(tangents)}
        outputs = [self._output(copy, node, results, indices) for node in self.results]
        computed: dict[int, int] = {}  # results that are no tangent's memory, with new positions
        for k, spec in enumerate(outputs):
            if isinstance(spec, Fresh):
                at = computed.setdefault(spec.position, len(computed))
                outputs[k] = replace(spec, position=at)
            elif isinstance(spec, ViewOfOutput):
                at = computed.setdefault(spec.index, len(computed))
                outputs[k] = replace(spec, index=at)
        results = [results[k] for k in computed]
        return copy.finish(whole, results, specs, outputs, symbols), tuple(sizes)

    def _spec(self, node: fx.Node) -> InputSpec:
        """How the backward takes a saved value or a tangent."""
        given = self.inputs.get(node)
        if given is not None and node not in self.facts.written:
            size, stride = (tuple(map(self.aten.to_size, x)) for x in (given.size, given.stride))
            return replace(given, size=size, stride=stride, attribute=None, is_static=False)
        device = node.meta.get("device")
        return tensor_input(0, node.name, self.kept[node], device, self.aten.to_size)

    def _output(
        self, copy: Copier, node: fx.Node, results: list[fx.Node], tangents: dict[fx.Node, int]
    ) -> OutputSpec:
        """What the caller gets as the gradient `node`. May change `results`."""
        to_size, val, base = self.aten.to_size, node.meta["val"], memory_root(node)
        size, stride = geometry_of(val, to_size)
        position = self.results[node]
        if node in tangents:
            return InputItself(tangents[node])
        start = to_size(val.storage_offset() - base.meta["val"].storage_offset())
        crosses = is_opaque(val) or is_opaque(base.meta["val"])
        if base in tangents and not crosses:
            return ViewOfInput(tangents[base], size, stride, start, val.dtype)
        made_here = base in copy.made and copy.made[base].op == "call_function"  # and not saved
        # whether it is a view of something that another node has taken the place of
        below, is_moved = node, False
        while below.op == "call_function" and is_view(below.target):
            below = below.all_input_nodes[0]
            is_moved |= below in self.instead
        if is_moved or not made_here:
            results[position] = made = copy.own(copy.made[node])
            return Fresh(position, size, tuple(map(to_size, made.meta["val"].stride())))
        if any(step == 0 and n != 1 for n, step in zip(size, stride)) and not crosses:
            # all elements are one in memory: the caller gets a view of what is there
            results[position] = copy.made[base]
            return ViewOfOutput(position, size, stride, start, val.dtype)
        return Fresh(position, size, stride)


# ---------------------------------------------------------------------------- partition


_UTMOST = 2.0**20  # a scarcity at which no work is too much
_STEPS = 8  # of the search between scarcities


def partition(
    joint: Joint,
    *,
    budget: float = 1.0,
    prices: Prices = Prices(),  # noqa: B008
) -> Split:
    """The two graphs of a joint one, which is rewritten in place to need less memory.

    budget   1.0: calls to ATen are never repeated. 0.0: all is repeated that can be. Between: the
             share of the memory between these two that saved values may take, in bytes
    prices   of the machine that the graphs are for
    raises   CheckError if nothing can be saved so that the backward could run
    """
    prepare(joint)
    if budget < 1:
        chunk_losses(joint)
    facts = JointFacts(joint, Costs(joint.aten, prices))
    choice = _within(facts, budget)
    if joint.tangents:
        return split(joint, facts, choice)
    # What backward passes in the graph have not saved is computed once more, before its first use;
    # node.meta["late"] numbers the passes, each with what follows it
    graph = joint.aten.graph
    made: dict[fx.Node, fx.Node] = {}
    again, number, is_within = {*choice.recomputed}, 0, False
    for node in facts.nodes:
        before, is_within = is_within, node in facts.behind
        if not is_within:
            continue
        number += not before
        row = [x for x in node.all_input_nodes if x in again]
        with graph.inserting_before(node):
            while row:
                missing = [x for x in row[-1].all_input_nodes if x in again and x not in made]
                row += missing
                if not missing and (one := row.pop()) not in made:
                    made[one] = graph.node_copy(one, lambda x: made.get(x, x))
                    made[one].meta["late"] = number
        if not made.keys().isdisjoint(node.all_input_nodes):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda x: made.get(x, x))
        node.meta["late"] = number
    remove_dead(graph)
    return _whole(joint)


def _whole(joint: Joint) -> Split:
    """A joint graph without a backward after it."""
    nothing = fx.Graph()
    nothing.output(())
    backward = AtenGraph(nothing, {}, (), (), (), tuple)
    return Split(joint, _flat(joint, joint.aten), backward, (), (), joint.gradients)


def differentiate(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    halved: Callable[[Joint], Split] = partition,
    edit: Callable[[AtenGraph], object] | None = None,
    timed: Callable[[str], AbstractContextManager[object]] = nullcontext,
    **tracing: Any,
) -> Split:
    """The captured graph with its gradients, as two graphs and what goes from one to the other.

    halved   in place of `partition`
    edit     changes the joint graph in place first
    timed    is entered for each of the two steps, with its name
    tracing  as for trace_joint
    raises   as trace_joint
    """
    with timed("trace"):
        # by name: an engine that takes whole graphs loads none of it
        tracer = importlib.import_module("fusee.autodiff.trace")
        joint: Joint = tracer.trace_joint(gm, example_inputs, **tracing)
    log.publish("aten", "joint", functools.partial(str, joint.aten))
    if edit is not None:
        edit(joint.aten)
    if not (joint.tangents or joint.backward_nodes()):
        return _whole(joint)
    with timed("partition"):
        return halved(joint)


def _flat(joint: Joint, graph: AtenGraph) -> AtenGraph:
    """The forward, as it is compiled: see `Split.forward`."""
    written = {mutation.index for mutation in graph.mutations if not joint.tangents}
    inputs = [
        replace(
            spec,
            is_static=spec.is_static
            and gradient is None
            and spec.attribute is None
            and spec.index not in written,
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


def saved_bytes(facts: JointFacts, choice: Choice) -> int:
    """Bytes that live until the backward for its sake alone. Unwritten inputs live anyway."""
    return sum(
        facts.costs.bytes(node)
        for node in choice.saved
        if kind(node) is not Kind.INPUT or node in facts.written
    )


def _within(facts: JointFacts, budget: float) -> Choice:
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
