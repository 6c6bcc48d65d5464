"""Which values of the forward the backward gets, and which it computes once more: a minimum cut.

Each node of the forward that the backward can reach is an arc: cutting it means to save its value.
An arc from the source says what computing the node once more costs; one without limit says that it
must not be. Each operand of a node leads to it without limit, and what the backward reads is the
sink. A minimum cut then separates what the forward has from what the backward does at the least
sum of both costs. The idea of cutting at all: H. He, "min-cut optimal recomputation", in
torch's functorch partitioner; there, only what is saved has a cost.

node.meta["recompute"] is the number of a checkpointed region: all inside is computed once more,
whatever it costs, and nothing but what leaves the region is saved; or "save": never once more.

Cuts are found by Dinic's algorithm, with distances counted towards the sink: the nearest to it.

source   E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power
         estimation", Soviet Math. Doklady 11 (1970)
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten import AtenGraph, closure, is_creation, is_pure, is_view, memory_root, must_run
from fusee.autodiff import Joint
from fusee.errors import CheckError
from fusee.loops.operators import ROWS, is_pointwise
from fusee.source import tensors_in
from fusee.sym import hint

# ---------------------------------------------------------------------------- costs
# What it costs to keep a value for the backward, and what to compute it there once more.
#
# Both are counted in the time that a tenth of a byte takes to go to or from memory. An addition per
# element takes about two of these on a core with wide vectors. Memory that is held until the
# backward costs more than going there and back: it is not in any cache, and its pages are often
# new.

aten = torch.ops.aten


class Prices(NamedTuple):
    """What a machine takes for these, in the time that a tenth of a byte takes to or from memory.

        move   a byte to or from memory
        hold   a byte kept until the backward reads it
        step   one operation on one element
        flop   half a multiplication and addition inside a matrix product; at least
        call   an operator that eager calls
        view   a view that eager takes
        run    a call of what was compiled, without a backward
        train  the same with one
        guard  what that takes longer where ATen is called
        cold   what that takes longer where so many bytes as `cache` pass: what Python reads is gone
               from near caches; in proportion below

    near   a byte of what kernels pass on, which mostly is in a cache, by `move`
    own    operators, and after them what their operands are like (`_layout`) -> by how much ATen's
           kernel, and a loop of ours, takes longer than `move` of what they read and write;
           "": any operator; a space and one word: times as much in such a layout; with "once": what
           a call by itself costs, of ATen's and of kernels ("number": an operand is one)
    unit   how many of this unit are a microsecond
    beside whether the host goes on while others compute, so that the slower of the two counts
    """

    move: int = 10
    hold: int = 40
    step: int = 2
    flop: int = 1
    call: int = 80_000
    view: int = 60_000
    run: int = 75_000
    train: int = 2_000_000
    guard: int = 1_000_000
    cold: int = 6_000_000
    cache: int = 4_000_000
    near: float = 0.1
    own: Mapping[str, tuple[float, float]] = {"": (0.15, 0.1)}
    unit: float = 1e5
    beside: bool = False

    def both(self, host: float, others: float) -> float:
        """What the host's part and that of others take together."""
        return max(host, others) if self.beside else host + others


class Kind(enum.Enum):
    """What computing a node once more means."""

    INPUT = "an input of the graph"
    FREE = "a view, a part of a tuple, or made from nothing"
    POINTWISE = "element by element: fuses into whatever reads it"
    MOVING = "elements put elsewhere"
    REDUCTION = "one or two passes over the operands"
    HEAVY = "never worth it unless memory is scarce"
    ONCE = "random, or of unknown effect: only ever once"


# Not pointwise, but made where they are read as well.
_FUSED = frozenset(
    "_prelu_kernel_backward copy fill glu glu_backward lift_fresh_copy log_sigmoid_forward prelu"
    " tril triu full_like".split()
)
_MOVING = frozenset(
    "_unsafe_index as_strided_scatter cat constant_pad_nd diagonal_scatter embedding flip gather"
    " im2col index index_select reflection_pad1d reflection_pad2d reflection_pad3d repeat"
    " replication_pad1d replication_pad2d replication_pad3d roll select_scatter slice_scatter stack"
    " upsample_nearest1d upsample_nearest2d upsample_nearest3d".split()
)
REDUCTIONS = frozenset(
    "_fused_rms_norm _native_batch_norm_legit _native_batch_norm_legit_functional all amax amin any"
    " argmax argmin count_nonzero linalg_vector_norm logsumexp max mean min native_group_norm"
    " native_layer_norm prod std std_mean sum var var_mean".split()
)
_WORK = {op: row.work for row in ROWS for op in row.overloads}


@functools.cache
def kind_of(op: Any) -> Kind:
    if not isinstance(op, OpOverload):
        return Kind.FREE if op is operator.getitem else Kind.ONCE
    if op in _WORK:
        return Kind.POINTWISE
    if op.namespace != "aten":
        return Kind.ONCE
    if is_view(op) or is_creation(op):
        return Kind.FREE
    name = name_of(op)
    if name in _FUSED or is_pointwise(op):
        return Kind.POINTWISE
    if name in _MOVING:
        return Kind.MOVING
    return Kind.REDUCTION if name in REDUCTIONS else Kind.HEAVY


def kind(node: fx.Node) -> Kind:
    """What `node` is; constants of the graph are FREE, there is no need to keep them."""
    if node.op == "placeholder":
        return Kind.INPUT
    if node.op == "get_attr":
        return Kind.FREE
    if node.target is torch.ops.aten.clone.default and not node.kwargs:
        (x,) = node.all_input_nodes
        if memory_root(x).op == "placeholder":
            return Kind.ONCE  # the program may write to the input before the backward
    return kind_of(node.target) if is_pure(node) else Kind.ONCE


@functools.cache
def name_of(op: OpOverload) -> str:
    return op._schema.name.partition("::")[2]


class Costs:
    """Sizes and work of the nodes of one graph.

    times   symbolic sizes count as so many times those of the first call
    """

    def __init__(self, aten: AtenGraph, prices: Prices = Prices(), times: float = 1) -> None:  # noqa: B008
        self.prices, self.times = prices, times
        self._to_size = aten.to_size
        self._bytes: dict[fx.Node, int] = {}

    def count(self, x: Tensor) -> int:
        """Elements of a node's `val`."""
        return math.prod(map(self.size, x.shape))

    def size(self, n: Any) -> int:
        return n if type(n) is int else hint(self._to_size(n), times=self.times)

    def bytes(self, node: fx.Node) -> int:
        """Bytes of a node's results; 0 for what is no tensor."""
        found = self._bytes.get(node)
        if found is None:
            tensors = tensors_in(node.meta.get("val"))
            found = self._bytes[node] = sum(self.count(x) * x.itemsize for x in tensors)
        return found

    def work(self, node: fx.Node, sort: Kind) -> int:
        """Computing `node` from operands that are at hand, inside a larger kernel if it can be."""
        if sort in (Kind.FREE, Kind.INPUT):
            return 0
        val = node.meta.get("val")
        if sort is Kind.POINTWISE:
            # the first operation that fuses costs next to nothing, yet is not free
            elements = max(map(self.count, tensors_in(val)), default=0)
            return 1 + elements * self.prices.step * _WORK.get(op_of(node), 1)
        moved = self.bytes(node) * self.prices.move
        if sort is Kind.MOVING:
            return 2 * moved
        read = sum(map(self.bytes, node.all_input_nodes)) * self.prices.move
        if sort is Kind.REDUCTION:
            return 2 * (read + moved)
        return max(self.flops(node) * self.prices.flop, 8 * (read + moved))

    def flops(self, node: fx.Node) -> int:
        """Of matrix products and convolutions; 0 for others, whose operands are what counts."""
        operands = [tensors_in(arg.meta.get("val")) for arg in node.all_input_nodes]
        vals = [row[0] for row in operands if row]
        results = tensors_in(node.meta.get("val"))
        if len(vals) < 2 or not results:
            return 0
        name = name_of(op_of(node))
        out = self.count(results[0])
        if name == "convolution":
            return 2 * out * math.prod(map(self.size, vals[1].shape[1:]))
        if name in ("mm", "bmm", "mv", "linear", "addmm", "baddbmm", "addmv"):
            left = vals[1] if name.startswith(("addm", "badd")) else vals[0]
            return 2 * out * self.size(left.shape[-1])
        if "scaled_dot_product" in name:
            return 4 * out * self.size(vals[1].shape[-2])
        return 0


def op_of(node: fx.Node) -> OpOverload:
    assert isinstance(node.target, OpOverload), node.format_node()
    return node.target


# ---------------------------------------------------------------------------- choice


_NEVER = 1 << 60


class Choice(NamedTuple):
    """The outcome, in the order of the graph."""

    saved: list[fx.Node]
    recomputed: list[fx.Node]


class JointFacts:
    """What a joint graph says before anything is decided.

    forward   nodes that the forward's results need, and what must run once
    behind    nodes that need a tangent
    backward  nodes that need a tangent, and that the gradients need
    wanted    the other nodes that `backward` reads, or that are gradients
    shared    results of the forward that the backward may have without a copy
    """

    def __init__(self, joint: Joint, costs: Costs) -> None:
        graph, self.costs = joint.aten, costs
        results = graph.results
        forward = results[: joint.forward_results]
        self.nodes = [node for node in graph.graph.nodes if node.op != "output"]
        self.position = {node: k for k, node in enumerate(self.nodes)}
        self.kinds = {node: kind(node) for node in self.nodes}
        self.behind = behind = joint.backward_nodes()
        returned = [node for node in forward if node not in behind]
        gradients = {node for node in forward if node in behind}
        gradients.update(results[k] for k in joint.gradients if k is not None)
        runs = [n for n in self.nodes if must_run(n)]
        ahead = [node for node in self.nodes if node.meta.get("ahead")]
        self.forward = closure(n for n in (*returned, *ahead, *runs) if n not in behind)
        self.backward = behind & closure([*gradients, *(n for n in runs if n in behind)])
        self.wanted = {
            arg: None
            for node in self.nodes
            if node in self.backward
            for arg in node.all_input_nodes
            if arg not in behind
        } | {node: None for node in results if node in gradients and node not in behind}
        placeholders = graph.placeholders
        # of a graph with a backward pass in it an input has its value until the end
        self.written = {placeholders[index] for index in joint.written if joint.tangents}
        self.roots = {memory_root(node) for node in returned}
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
            if leaves or not _may_repeat(source) or node.meta.get("saved"):
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


def choose(facts: JointFacts, scarcity: float | None) -> Choice:
    """The cheapest choice.

    scarcity   what memory is worth more than usual, at least 1; calls to ATen may then be repeated.
               None: they may not
    """
    return _Chooser(facts, scarcity).run()


class _Chooser:
    def __init__(self, facts: JointFacts, scarcity: float | None) -> None:
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
        if not isinstance(node.meta.get("val"), Tensor) or node in facts.inside:
            return _NEVER
        prices = self.costs.prices
        read = size * prices.move + 1
        if sort is Kind.INPUT and node not in facts.written:
            return read
        if node in facts.shared or node.meta.get("recompute") == "save":
            return read
        held = prices.hold
        if self.scarcity is not None:
            # What comes early is held for longer. It also tells equal layers apart.
            age = 1 - facts.position[node] / len(facts.nodes)
            held = int(prices.hold * self.scarcity * (1 + age))
        is_copied = node not in facts.in_memory or sort is Kind.INPUT or is_view(node.target)
        is_copied = is_copied or memory_root(node) in facts.roots
        return read + size * (held + prices.move * is_copied)

    def _repeating(self, node: fx.Node) -> int:
        facts = self.facts
        if node not in facts.forward:
            return 0
        sort = facts.kinds[node]
        cost, prices = self.costs.work(node, sort), self.costs.prices
        if node in facts.feeds_calls and sort is Kind.POINTWISE:
            cost += self.costs.bytes(node) * prices.move
        if node in facts.far and sort is not Kind.FREE:
            cost += self.costs.bytes(node) * (prices.hold + prices.move)
        return cost


_SOURCE, _SINK = 0, 1


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


class Network:
    """A directed network of `count` vertices, numbered from 0."""

    def __init__(self, count: int) -> None:
        # Arc 2k leads where arc 2k+1 comes from: pushing through one makes room in the other.
        self._arcs: list[list[int]] = [[] for _ in range(count)]
        self._head: list[int] = []
        self._room: list[int] = []

    def add(self, tail: int, head: int, capacity: int) -> None:
        """An arc from `tail` to `head`."""
        self._arcs[tail].append(len(self._head))
        self._arcs[head].append(len(self._head) + 1)
        self._head += (head, tail)
        self._room += (capacity, 0)

    def minimum_cut(self, source: int, sink: int) -> tuple[int, bytearray]:
        """Push a maximum flow: its value, and for each vertex whether it is on the sink's side.

        The arcs into that side from the rest are a minimum cut. Call it once.
        """
        value = 0
        while True:
            distance = self._distances(sink)
            if distance[source] < 0:
                return value, bytearray(d >= 0 for d in distance)
            value += self._push_all(source, sink, distance)

    def _distances(self, sink: int) -> list[int]:
        """How many arcs with room lead from each vertex to the sink; -1 where none do."""
        arcs, head, room = self._arcs, self._head, self._room
        distance = [-1] * len(arcs)
        distance[sink] = 0
        row = [sink]
        for at in row:
            further = distance[at] + 1
            for arc in arcs[at]:
                if room[arc ^ 1] and distance[head[arc]] < 0:
                    distance[head[arc]] = further
                    row.append(head[arc])
        return distance

    def _push_all(self, source: int, sink: int, distance: list[int]) -> int:
        """Push along shortest paths until none is left; how much."""
        arcs, head, room = self._arcs, self._head, self._room
        tried = [0] * len(arcs)  # arcs of each vertex that lead nowhere any more
        path: list[int] = []
        total = 0
        at = source
        while True:
            if at == sink:
                amount = min([room[arc] for arc in path])
                total += amount
                full = 0
                for k in range(len(path) - 1, -1, -1):
                    arc = path[k]
                    room[arc] -= amount
                    room[arc ^ 1] += amount
                    if not room[arc]:
                        full = k
                at = head[path[full] ^ 1]
                del path[full:]
                continue
            row, k = arcs[at], tried[at]
            nearer = distance[at] - 1
            while k < len(row) and not (room[row[k]] and distance[head[row[k]]] == nearer):
                k += 1
            tried[at] = k
            if k < len(row):
                path.append(row[k])
                at = head[row[k]]
            elif path:
                arc = path.pop()
                at = head[arc ^ 1]
                tried[at] += 1
            else:
                return total
