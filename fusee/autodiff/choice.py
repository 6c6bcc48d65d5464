"""Which values of the forward the backward gets, and which it computes once more: a minimum cut.

Each node of the forward that the backward can reach is an arc: cutting it means to save its value.
An arc from the source says what computing the node once more costs; one without limit says that it
must not be. Each operand of a node leads to it without limit, and what the backward reads is the
sink. A minimum cut then separates what the forward has from what the backward does at the least
sum of both costs. The idea of cutting at all: H. He, "min-cut optimal recomputation", in
torch's functorch partitioner; there, only what is saved has a cost.

node.meta["recompute"] is the number of a checkpointed region: all inside is computed once more,
whatever it costs, and nothing but what leaves the region is saved; or "save": never once more.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fusee.aten.operators import is_view
from fusee.aten.tidy import is_pure, must_run
from fusee.autodiff.costs import HOLD, MOVE, Costs, Kind, kind
from fusee.autodiff.flow import Network
from fusee.autodiff.joint import Joint
from fusee.errors import CheckError

__all__ = ["Choice", "Facts", "choose", "closure", "is_saved_by_eager", "root"]

_NEVER = 1 << 60


class Choice(NamedTuple):
    """The outcome, in the order of the graph."""

    saved: list[fx.Node]
    recomputed: list[fx.Node]


class Facts:
    """What a joint graph says before anything is decided.

    forward   nodes that the forward's results need, and what must run once
    backward  nodes that need a tangent, and that the gradients need
    wanted    the other nodes that `backward` reads, or that are gradients
    shared    results of the forward that the backward may have without a copy
    """

    def __init__(self, joint: Joint, costs: Costs) -> None:
        graph, self.costs = joint.aten, costs
        results = graph.results
        returned = results[: joint.forward_results]
        gradients = {results[k] for k in joint.gradients if k is not None}
        self.nodes = [node for node in graph.graph.nodes if node.op != "output"]
        self.position = {node: k for k, node in enumerate(self.nodes)}
        self.kinds = {node: kind(node) for node in self.nodes}
        behind = joint.backward_nodes()
        runs = [n for n in self.nodes if must_run(n)]
        self.forward = closure([*returned, *(n for n in runs if n not in behind)])
        self.backward = behind & closure([*gradients, *(n for n in runs if n in behind)])
        self.wanted = {
            arg: None
            for node in self.nodes
            if node in self.backward
            for arg in node.all_input_nodes
            if arg not in behind
        } | {node: None for node in results if node in gradients and node not in behind}
        writes = [*((m.index, m.position) for m in graph.mutations), *joint.rebinds]
        placeholders = graph.placeholders
        self.written = {placeholders[index] for index, _ in writes}
        self.roots = {root(node) for node in returned}
        # Where eager saves an output too, a write by the caller is an error in eager as well.
        self.shared = {node for node in returned if is_saved_by_eager(node)}
        self._look_at_lives(returned)
        self._look_at_regions(set(returned))
        self.feeds_calls = self._feeding(gradients)

    def _look_at_lives(self, results: Sequence[fx.Node]) -> None:
        """Find what is in memory anyway, and what had better be saved than computed from afar.

        A value that loops read before and after a call to ATen, a residual stream for instance: to
        compute it in the backward for the later reader, which comes first there, and to hold it for
        the earlier one, is no better than to save it. So either it stays, or its later readers do.
        """
        self.in_memory: set[fx.Node] = {n for n in results if self.kinds[n] is not Kind.INPUT}
        self.far: set[fx.Node] = set()
        end = len(self.nodes)
        first: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            if node not in self.forward:
                continue
            sort, stop = self.kinds[node], end
            for user in node.users:
                if user in self.forward:
                    is_call = self.kinds[user] in _CALLS
                    stop = min(stop, self.position[user] if is_call else first[user])
                    if is_call or (self.kinds[user] is Kind.FREE and user in self.in_memory):
                        self.in_memory.add(node)
            first[node] = stop
            if sort in _CALLS or sort is Kind.REDUCTION:
                self.in_memory.add(node)
            if sort in _CALLS or sort in (Kind.FREE, Kind.INPUT):
                continue
            late = [user for user in self._readers(node) if self.position[user] > stop]
            if late:
                self.in_memory.add(node)
                size = self.costs.bytes(node)
                grows = any(self.costs.bytes(user) > size for user in late)
                self.far.update([node] if grows else late)

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Loops of the forward that read the node, or a view of it."""
        row = [node]
        for one in row:
            for user in one.users:
                if user in self.forward and self.kinds[user] not in _CALLS:
                    if self.kinds[user] is Kind.FREE:
                        row.append(user)
                    else:
                        yield user

    def _look_at_regions(self, returned: set[fx.Node]) -> None:
        """Find what leaves a checkpointed region, and what is inside of one for good."""
        self.leaving: set[fx.Node] = set()
        self.inside: set[fx.Node] = set()
        for node in reversed(self.nodes):
            region = node.meta.get("recompute")
            if type(region) is not int or node not in self.forward:
                continue
            leaves = node in returned or any(
                user.meta.get("recompute") != region
                or (user in self.leaving and is_view(user.target))
                for user in node.users
                if user in self.forward
            )
            source = node.args[0] if node.target is operator.getitem else node
            if leaves or not _may_repeat(source):
                self.leaving.add(node)
        for node in self.nodes:
            if node in self.forward:
                region = node.meta.get("recompute")
                if type(region) is int and node not in self.leaving:
                    self.inside.add(node)
            elif any(arg in self.inside for arg in node.all_input_nodes):
                self.inside.add(node)

    def _feeding(self, gradients: set[fx.Node]) -> set[fx.Node]:
        """Nodes whose value must be in memory in the backward: calls to ATen read it there."""
        found = set(gradients)
        for node in reversed(self.nodes):
            for user in node.users:
                if user in self.backward:
                    if self.kinds[user] in _CALLS:
                        found.add(node)
                elif self.kinds.get(user) is Kind.FREE and user in found:
                    found.add(node)
        return found


_CALLS = (Kind.HEAVY, Kind.ONCE)


def choose(facts: Facts, scarcity: float | None) -> Choice:
    """The cheapest choice.

    scarcity   what memory is worth more than usual, at least 1; calls to ATen may then be repeated.
               None: they may not
    """
    return _Chooser(facts, scarcity).run()


class _Chooser:
    def __init__(self, facts: Facts, scarcity: float | None) -> None:
        self.facts, self.costs, self.scarcity = facts, facts.costs, scarcity

    def run(self) -> Choice:
        facts = self.facts
        seen = dict.fromkeys(facts.wanted)
        open_nodes: dict[fx.Node, int] = {}  # what may be computed again, with its vertex
        row = list(seen)
        for node in row:
            if not self._is_fixed(node):
                open_nodes[node] = 2 + 2 * len(open_nodes)
                for arg in node.all_input_nodes:
                    if arg not in seen:
                        seen[arg] = None
                        row.append(arg)
        # Two vertices a node, before and after its arc. What is fixed begins at the source, what
        # is wanted ends at the sink.
        after = dict.fromkeys(facts.wanted, _SINK)
        count = 2 + 2 * len(open_nodes)
        for node in row:
            if node not in after:
                after[node] = count
                count += 1
        network = Network(count)
        for node in row:
            before = open_nodes.get(node, _SOURCE)
            network.add(before, after[node], self._saving(node))
            if before != _SOURCE:
                network.add(_SOURCE, before, self._repeating(node))
                for arg in node.all_input_nodes:
                    if after[arg] != _SINK:
                        network.add(after[arg], before, _NEVER)
        value, is_backward = network.minimum_cut(_SOURCE, _SINK)
        if value >= _NEVER:
            raise CheckError(
                "no cut separates the backward from the forward",
                did="stopped before compiling",
                remedy="please report it",
            )
        again = {node for node, vertex in open_nodes.items() if is_backward[vertex]}
        saved = [node for node in row if node not in again and is_backward[after[node]]]
        order = facts.position.__getitem__
        return Choice(sorted(saved, key=order), sorted(again, key=order))

    def _is_fixed(self, node: fx.Node) -> bool:
        """Whether the backward must not compute the node."""
        facts, sort = self.facts, self.facts.kinds[node]
        if sort is Kind.INPUT or not _may_repeat(node) or node in facts.leaving:
            return True
        if node.meta.get("recompute") == "save":
            return True
        if node in facts.inside or node not in facts.forward:
            return False
        if sort is Kind.ONCE:
            return True
        if self.scarcity is not None or sort is Kind.FREE:
            return False
        return sort is Kind.HEAVY or node in facts.far

    def _saving(self, node: fx.Node) -> int:
        facts, size = self.facts, self.costs.bytes(node)
        sort = facts.kinds[node]
        if not isinstance(node.meta.get("val"), torch.Tensor) or node in facts.inside:
            return _NEVER
        read = size * MOVE + 1
        if sort is Kind.INPUT and node not in facts.written:
            return read
        if node in facts.shared:
            return read
        if node.meta.get("recompute") == "save":
            return read
        held = HOLD
        if self.scarcity is not None:
            # What comes early is held for longer. It also tells equal layers apart.
            age = 1 - facts.position[node] / len(facts.nodes)
            held = int(HOLD * self.scarcity * (1 + age))
        is_copied = node not in facts.in_memory or sort is Kind.INPUT or is_view(node.target)
        is_copied = is_copied or root(node) in facts.roots
        return read + size * (held + MOVE * is_copied)

    def _repeating(self, node: fx.Node) -> int:
        facts = self.facts
        if node not in facts.forward:
            return 0
        sort = facts.kinds[node]
        cost = self.costs.work(node, sort)
        if node in facts.feeds_calls and sort is Kind.POINTWISE:
            cost += self.costs.bytes(node) * MOVE
        if node in facts.far and sort is not Kind.FREE:
            cost += self.costs.bytes(node) * (HOLD + MOVE)
        return cost


_SOURCE, _SINK = 0, 1


def root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` shares if it is a view."""
    while node.op == "call_function" and is_view(node.target):
        node = node.all_input_nodes[0]
    return node


def is_saved_by_eager(node: fx.Node) -> bool:
    """Whether eager keeps the node's value, or a view of it: a formula of its backward reads it."""
    row = [node]
    for one in row:
        if not one.meta.get("backward"):
            if any(user.meta.get("backward") for user in one.users):
                return True
            row += [user for user in one.users if is_view(user.target)]
    return False


def _may_repeat(node: Any) -> bool:
    """Whether running the node a second time gives the same value and nothing else."""
    return not isinstance(node, fx.Node) or node.op != "call_function" or is_pure(node)


def closure(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they depend on."""
    found = set(nodes)
    row = list(found)
    for node in row:
        for arg in node.all_input_nodes:
            if arg not in found:
                found.add(arg)
                row.append(arg)
    return found
