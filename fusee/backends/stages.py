"""Runs a graph in which sizes show that only the data knows, stage by stage.

An operator that gives such a size runs by itself, on eager's kernel, and the size is read off its
result; so is an integer off the tensor that holds it. What needs a size comes in a later stage than
what shows it. A stage is one part, compiled as any graph with open sizes: it has a memory plan of
its own, and frames for the sizes seen last. What depends on no such size is in the first stage, and
sizes that depend on none of each other are all read before the second.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusee.aten.graph import (
    AtenGraph,
    OtherSizes,
    must_run,
    used_symbols,
)
from fusee.aten.subgraph import Part, body_lines, cut
from fusee.backends.resume import laid_out
from fusee.source import HostSource, listed

# Compiles a part, given the whole graph's inputs among its own: what takes a list of inputs.
CompilePart = Callable[[AtenGraph, list[Any]], Callable[[tuple[Any, ...]], Sequence[Any]]]
Refuse = Callable[[Sequence[Any]], None]


def is_staged(aten: AtenGraph) -> bool:
    """Whether sizes show in the course of a call."""
    return any(at.unbacked is not None for at in aten.symbols.values())


def levels(aten: AtenGraph) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Per stage: the calls of its part, and the calls that run by themselves after it."""
    shown: dict[fx.Node, list[str]] = {}
    for name, at in aten.symbols.items():
        if at.unbacked is not None:
            shown.setdefault(aten.results[at.index], []).append(name)
    level: dict[fx.Node, int] = {}
    alone: set[fx.Node] = set()
    of_symbol: dict[str, int] = {}
    latest = 0  # of what must run in the program's order
    for node in aten.graph.nodes:
        if node.op != "call_function":
            continue
        given = node.all_input_nodes
        picks = node.target is operator.getitem and given[0] in alone
        after = [level.get(x, 0) + (x in alone and not picks) for x in given]
        if picks or node.meta.get("alone"):
            alone.add(node)
        else:
            used = used_symbols([node], aten.to_size)
            after += [of_symbol.get(name, 0) for name in used]
        level[node] = max([*after, latest if must_run(node) else 0])
        if must_run(node):
            latest = level[node]
        of_symbol.update((name, level[node] + 1) for name in shown.get(node, ()))
    count = max(level.values(), default=-1) + 1
    found: list[tuple[list[fx.Node], list[fx.Node]]] = [([], []) for _ in range(count)]
    for node, number in level.items():
        found[number][node in alone].append(node)
    return found


class Staged:
    """A graph that runs stage by stage, writes included.

    examples   one per InputSpec
    """

    def __init__(self, aten: AtenGraph, compile_part: CompilePart, examples: Sequence[Any]) -> None:
        self.aten, self.compile_part, self.examples = aten, compile_part, examples

    def function(self, refuse: Refuse | None) -> Callable[..., Sequence[Any]]:
        """From its inputs to its results. refuse: looks at them where grad mode is on."""
        aten = self.aten
        steps: list[Part | fx.Node] = []
        for together, alone in levels(aten):
            steps += [*cut(aten, [(False, tuple(together))]), *alone]
        name = {node: f"x{k}" for k, node in enumerate(aten.placeholders)}
        names = {"torch": torch, "laid_out": laid_out, "no_grad": torch.no_grad}
        given, names["OtherSizes"] = listed(name.values()), OtherSizes
        for k, step in enumerate(steps):
            names[f"part{k}"] = step.target if isinstance(step, fx.Node) else self._part(step)
        for node in aten.graph.find_nodes(op="get_attr"):
            name[node] = f"c{len(name)}"
            names[name[node]] = aten.constants[str(node.target)]
        write = HostSource("body", given[1:-1], "x{}".format, **names)
        if refuse is not None:
            write.names.update(is_grad_enabled=torch.is_grad_enabled, refuse=refuse)
            write.add(f"if is_grad_enabled(): refuse({given})")
        write.read_symbols(aten.symbols)
        write.add(*body_lines(aten, steps, name))
        return write.function("body")

    def _part(self, part: Part) -> Any:
        known: dict[Any, Any] = dict(zip(self.aten.placeholders, self.examples))
        return self.compile_part(part.graph, [known.get(x) for x in part.inputs])
