"""Splits an AtenGraph between an engine (OpenVINO, ONNX Runtime, ...) and our own compiler.

    claims    engine.claim says for each call: yes, or why not
    levels    what can run together, claimed or not, one level after the other
    worth     regions that cost more to enter than they save go back to the rest, and say so
    parts     each level as an AtenGraph of its own: fusee.aten.cut

`split` only decides; `split_run.py` compiles the parts and calls them one after another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fusee.aten.graph import AtenGraph
from fusee.aten.tidy import is_pure
from fusee.aten.torch_api import OpOverload
from fusee.autodiff.costs import Costs
from fusee.backends.report import UnclaimedRow
from fusee.backends.worth import why_not_worth
from fusee.errors import user_line
from fusee.runtime.weights import why_not_derivable

__all__ = [
    "HEAD",
    "Engine",
    "Region",
    "RegionCall",
    "Split",
    "lasting",
    "op_of",
    "split",
]

# In a node's meta: the call that it runs together with, as what makes a weight for it.
HEAD = "head"

# Takes the region's inputs, one per InputSpec, and returns its results.
RegionCall = Callable[[tuple[Any, ...]], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a graph, for an engine to compile.

    graph     functional, without mutations; its outputs are its results. All tensors in it are
              row-major: a part's other layouts are permuted before and after it, without copies.
              Only inputs with `is_static`, parameters and buffers, come as they are
    examples  per input of `graph` the tensor of the first call, or None for what is computed
    """

    name: str
    graph: AtenGraph
    examples: tuple[Any, ...]

    def calls(self) -> list[fx.Node]:
        """The calls to operators, in order."""
        found = self.graph.graph.nodes
        return [n for n in found if n.op == "call_function" and n.target is not operator.getitem]

    def open_sizes(self) -> list[object]:
        """Sizes of what it computes that inputs decide: engines decline a call where one is 0."""
        vals = pytree.tree_leaves([node.meta["val"] for node in self.calls()])
        sizes = [self.graph.to_size(n) for x in vals if isinstance(x, Tensor) for n in x.shape]
        return [size for size in dict.fromkeys(sizes) if not isinstance(size, int)]

    def fixed(self) -> tuple[int, ...]:
        """Positions of the inputs that its engine may hold as constants."""
        found = lasting(self.graph, self.examples)
        return tuple(k for k, node in enumerate(self.graph.placeholders) if node in found)

    def values(self, inputs: Mapping[int, Tensor]) -> dict[fx.Node, Tensor]:
        """What is known before a call: constants, and these inputs, by position."""
        graph = self.graph
        found = {graph.placeholders[k]: x for k, x in inputs.items()}
        constants = (node for node in graph.graph.nodes if node.op == "get_attr")
        return found | {node: graph.constants[str(node.target)] for node in constants}


def lasting(graph: AtenGraph, examples: Sequence[Any]) -> dict[fx.Node, Tensor]:
    """Inputs that engines may hold as constants: parameters and buffers whose changes show.

    Not those that the graph writes to: a region's call gets what they hold by then.

    examples   per input of `graph` the tensor of the first call, or None for what is computed
    """
    given = zip(graph.placeholders, graph.inputs, examples, strict=True)
    written = {mutation.index for mutation in graph.mutations}
    return {
        node: x
        for node, spec, x in given
        if spec.is_static and spec.index not in written
        if isinstance(x, Tensor) and why_not_derivable(x) is None
    }


class Engine(Protocol):
    """What runs regions: one per compiled function, with that function's options.

    name     of the backend, for reports: "openvino"
    device   where regions run: "CPU"
    """

    name: str
    device: str

    def keeps(self, op: OpOverload) -> bool:
        """Whether tracing leaves this operator whole, since the engine has it as it is."""
        ...

    def claim(self, node: fx.Node) -> str | None:
        """None if the engine can run this call exactly as eager does, else the reason why not."""
        ...

    def compile(self, region: Region) -> RegionCall:
        """The region, ready to be called, from several threads too.

        Results are fresh row-major tensors. Static inputs may be kept in whatever form, if calls
        notice that they changed (fusee.runtime.weights).

        raises   anything: the region is then compiled by us, with one warning
        """
        ...


@dataclass(frozen=True, eq=False)
class Split:
    """The levels, in the order in which they run.

    levels    (True: the engine's; nodes in program order)
    unclaimed  one row per call that is not the engine's
    """

    levels: tuple[tuple[bool, tuple[fx.Node, ...]], ...]
    unclaimed: tuple[UnclaimedRow, ...]

    @property
    def rest(self) -> list[fx.Node]:
        """What is not the engine's."""
        return [n for is_claimed, nodes in self.levels if not is_claimed for n in nodes]

    @property
    def claimed(self) -> int:
        """How many calls the engine has."""
        return sum(len(_calls(nodes)) for is_claimed, nodes in self.levels if is_claimed)


def split(aten: AtenGraph, engine: Engine, least: int = 4) -> Split:
    """Decide which calls go to the engine.

    least   a region with fewer calls that compute, and none that is heavy, goes back to the rest;
            if it is the whole graph, one is enough
    """
    reasons: dict[fx.Node, str] = {}
    for node in aten.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        reason = _never(node) or engine.claim(node)
        if reason is not None:
            reasons[node] = reason
    for node in aten.graph.nodes:
        if node.meta.get(HEAD) in reasons:
            reasons[node] = "it makes a weight for a product that is not claimed"
    costs = Costs(aten)
    while True:
        levels = _levels(aten.graph, reasons)
        enough = 1 if len(levels) == 1 else least
        regions = [_calls(nodes) for claimed, nodes in levels if claimed]
        found = [(calls, why_not_worth(calls, costs, enough, engine.device)) for calls in regions]
        if all(why is None for _, why in found):
            break
        for calls, why in found:
            if why is not None:
                text = f"not worth entering {engine.name}: {why}"
                reasons.update(dict.fromkeys(calls, text))
    rows = [
        UnclaimedRow(op_of(n), why, user_line(n.meta.get("stack_trace")))
        for n, why in reasons.items()
    ]
    return Split(tuple(levels), tuple(rows))


def op_of(node: fx.Node) -> str:
    """How reports call a node's operator: "aten.add.Tensor"."""
    return str(node.target)


def _never(node: fx.Node) -> str | None:
    """What no engine runs."""
    if not isinstance(node.target, OpOverload):
        return "it is no ATen operator"
    if not is_pure(node):
        return "it draws from torch's random numbers, or has an effect"
    return None


def _levels(
    graph: fx.Graph, reasons: Mapping[fx.Node, str]
) -> list[tuple[bool, tuple[fx.Node, ...]]]:
    """Levels, claimed and not in turn; every edge stays in its level or goes up.

    So each level can run as one after those below it. What has an effect stays in program order.
    Either kind may come first: whatever makes fewer levels, of the engine's above all.
    """
    return min(
        (_levels_from(graph, reasons, first) for first in (True, False)),
        key=lambda levels: (sum(claimed for claimed, _ in levels), len(levels)),
    )


def _levels_from(
    graph: fx.Graph, reasons: Mapping[fx.Node, str], first: bool
) -> list[tuple[bool, tuple[fx.Node, ...]]]:
    """first   whether level 0, and with it every second one, is the engine's"""
    level: dict[fx.Node, int] = {}
    members: dict[int, list[fx.Node]] = {}
    waiting: dict[fx.Node, list[fx.Node]] = {}
    effects = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if HEAD in node.meta:
            waiting.setdefault(node.meta[HEAD], []).append(node)
            continue
        odd = (node not in reasons) is not first
        if node.target is operator.getitem:
            odd = level[node.all_input_nodes[0]] % 2 == 1
        at = int(odd)
        for source in node.all_input_nodes:
            below = level.get(source, 0)
            at = max(at, below if (below % 2 == 1) is odd else below + 1)
        if node in reasons and not is_pure(node):
            at = effects = max(at, effects)
        for one in (*waiting.pop(node, ()), node):
            level[one] = at
            members.setdefault(at, []).append(one)
    return [((at % 2 == 0) is first, tuple(members[at])) for at in sorted(members)]


def _calls(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.target is not operator.getitem]
