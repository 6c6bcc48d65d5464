"""Joint graphs written by hand, and what splits of them compute.

joint(step, inputs, tangents, forward=1)   step(*inputs, *tangents) returns the results of the
                                           forward, then one gradient (or None) per input
check(joint, inputs, tangents)             splits it, runs both halves, compares with the whole
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.aten import AtenGraph, Fresh, closure, executable
from fusee.autodiff import Joint, Split
from fusee.autodiff.min_cut import Kind, kind
from fusee.autodiff.partition import partition
from tests.aten.harness import assert_functional, copies, traced

Fn = Callable[..., Any]


def joint(step: Fn, inputs: Sequence[Any], tangents: Sequence[Any], forward: int = 1) -> Joint:
    return joint_of(traced(step, *inputs, *tangents), len(tangents), forward)


def joint_of(aten: AtenGraph, tangents: int, forward: int = 1) -> Joint:
    """A graph traced from a step, the last inputs of which are tangents, as a joint graph."""
    gradients: list[int | None] = []
    for spec in aten.outputs[forward:]:
        gradients.append(getattr(spec, "position", None))
    outputs = aten.outputs[:forward]
    taken = [getattr(spec, "position", -1) for spec in (*outputs, *aten.mutations)]
    results = max(taken) + 1
    of_forward = closure(aten.results[:results])
    for node in aten.graph.nodes:
        made_by = node.args[0] if node.target is operator.getitem else node
        if node.op == "call_function" and made_by not in of_forward:
            node.meta["backward"] = True
    return Joint(
        aten=dataclasses.replace(aten, outputs=outputs, structure=tuple),
        forward_results=results,
        tangents=tuple(range(tangents)),
        gradients=tuple(gradients),
        rebinds=(),
        detached=(False,) * forward,
    )


def results_of(graph: AtenGraph, inputs: Sequence[Any]) -> list[Any]:
    """The raw results; inputs are written to as the graph says."""
    count = len(graph.results)
    raw = dataclasses.replace(
        graph, outputs=tuple(Fresh(k, (), ()) for k in range(count)), structure=list
    )
    found: list[Any] = executable(raw)(*inputs)
    return found


def run_split(
    split: Split, inputs: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Results of the forward, then the gradients, one per input. `inputs` are written to."""
    sizes = {
        name: inputs[at.index] if at.axis is None else inputs[at.index].size(at.axis)
        for name, at in split.forward.symbols.items()
    }
    results = results_of(split.forward, inputs)
    kept = [inputs[at] if sort == "input" else results[at] for sort, at in split.saved]
    given = [*kept, *(sizes[name] for name in split.sizes), *tangents]
    for spec, x in zip(split.backward.inputs, given, strict=True):
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.dim()) == (spec.dtype, len(spec.size)), spec
            assert all(n == m for n, m in zip(spec.size, x.shape) if type(n) is int), spec
            assert all(n == m for n, m in zip(spec.stride, x.stride()) if type(n) is int), spec
    found = executable(split.backward)(*given)
    return results, [None if k is None else found[k] for k in split.gradients]


def check(case: Joint, inputs: Sequence[Any], tangents: Sequence[Any], budget: float = 1) -> Split:
    """Both halves, one after the other, give what the joint graph gives. No ATen call twice."""
    torch.manual_seed(7)
    whole = results_of(case.aten, copies([*inputs, *tangents]))
    after = torch.rand(3)
    split = partition(case, budget=budget)
    for graph in (split.forward, split.backward):
        assert_functional(graph)
    torch.manual_seed(7)
    ours = copies(inputs)
    results, gradients = run_split(split, ours, tangents)
    assert torch.equal(torch.rand(3), after), "the random stream differs"
    expected = [None if k is None else whole[k] for k in case.gradients]
    assert_close(results[: case.forward_results], whole[: case.forward_results])
    assert_close(gradients, expected)
    if budget == 1:
        both = calls(split.forward) & calls(split.backward)
        assert not both, f"computed twice: {both}"
    assert len(split.forward.inputs) == case.forward_inputs
    return split


def assert_close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            assert x.stride() == y.stride() or not x.numel()
            torch.testing.assert_close(x, y)


def calls(graph: AtenGraph) -> set[str]:
    """Names of the nodes that are worth doing once only."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    return {n.name for n in nodes if kind(n) in (Kind.HEAVY, Kind.ONCE)}


def operators(graph: AtenGraph) -> list[str]:
    """Base names of the operators called, in order."""
    targets: list[Any] = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    called = [target for target in targets if target is not operator.getitem]
    return [target._schema.name.partition("::")[2] for target in called]


def saved_names(split: Split) -> list[str]:
    """What the backward gets: names of its inputs that are saved values."""
    return [spec.name for spec in split.backward.inputs[: len(split.saved)]]
