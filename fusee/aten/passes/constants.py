"""What depends on parameters alone is computed once and kept: the derived weights.

The static part of the graph that the rest reads becomes a program of its own, `Derived`; its
results are new inputs of the graph. Left where they are
    views of parameters, and fills      cost nothing at each call
    what a pass marked derive=False     costs less time than memory
    what would grow memory              see Budget
Then its own operands are looked at, so that no more than necessary runs at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fusee.aten.graph import AtenGraph, InputSpec
from fusee.aten.operators import is_creation, is_view
from fusee.aten.passes.edit import Editor, val

__all__ = ["FREE", "Budget", "DeriveStep", "Derived", "Slot", "closure", "constants", "frontier"]


class Slot(int):
    """An argument of a step: the value with this number."""


class DeriveStep(NamedTuple):
    """One call. Its result gets the next number, after the sources' and the constants'."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    done: tuple[int, ...]  # values that no later step reads


@dataclass(eq=False)
class Derived:
    """How to compute the derived inputs of a graph from its static inputs.

    sources    indices of inputs: when one of these tensors changes, compute() must run again
    constants  tensors of the graph
    steps      values are numbered: sources, then constants, then the steps' results
    results    the numbers of the values to keep
    targets    indices of the derived inputs, one per result
    opaque     the results, by position, that are packed weights: only for the operator they go to
    """

    sources: tuple[int, ...] = ()
    constants: tuple[Tensor, ...] = ()
    steps: tuple[DeriveStep, ...] = ()
    results: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    opaque: frozenset[int] = frozenset()

    def compute(self, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The derived inputs for these values of `sources`."""
        values: list[Any] = [*sources, *self.constants]

        def load(arg: Any) -> Any:
            if type(arg) is Slot:
                return values[arg]
            if isinstance(arg, (list, tuple)):
                return [load(item) for item in arg]
            return arg

        with torch.no_grad():
            for step in self.steps:
                kwargs = {key: load(arg) for key, arg in step.kwargs.items()}
                values.append(step.target(*map(load, step.args), **kwargs))
                for number in step.done:
                    values[number] = None
        return tuple(values[number] for number in self.results)

    def __str__(self) -> str:
        first = len(self.sources) + len(self.constants)
        rows = [f"v{k} = input {index}" for k, index in enumerate(self.sources)]
        rows += [f"v{len(rows) + k} = constant {k}" for k in range(len(self.constants))]
        for k, step in enumerate(self.steps, first):
            args = [_show(arg) for arg in step.args]
            args += [f"{key}={_show(arg)}" for key, arg in step.kwargs.items()]
            name = getattr(step.target, "__name__", str(step.target))
            rows.append(f"v{k} = {name}({', '.join(args)})  # {step.name}")
        rows += [
            f"input {target} = v{number}"
            for target, number in zip(self.targets, self.results, strict=True)
        ]
        return "\n".join(rows)


def _show(arg: Any) -> str:
    if type(arg) is Slot:
        return f"v{int(arg)}"
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_show, arg))}]"
    return str(arg)


# Tables such as attention masks come from no parameter; up to here they are worth keeping.
FREE = 2**20


@dataclass
class Budget:
    """Memory that derived weights may take: as much as the parameters again, packed ones aside.

    free   bytes that one tensor may take however little it comes from
    """

    edit: Editor
    left: int
    spent: int = 0
    refused: list[str] = field(default_factory=list)
    free: int = FREE

    def allows(self, node: fx.Node) -> bool:
        """Whether to keep the result of `node`; if so its bytes are spent."""
        if node.meta.get("packed") or node.meta.get("free"):
            return True
        size = self.edit.bytes(node)
        sources = _bytes_behind(self.edit, node)
        if size > self.left or (size > self.free and size > 2 * sources):
            self.refused.append(f"{node} is computed at each call: it takes {size} bytes to keep")
            return False
        self.left -= size
        self.spent += size
        return True


def constants(edit: Editor) -> Derived:
    """Split the static part off. Derived inputs are appended to the graph's inputs."""
    total = sum(
        edit.bytes(node)
        for node in edit.graph.nodes
        if node.op in ("placeholder", "get_attr") and edit.is_static(node) and _is_tensor(node)
    )
    budget = Budget(edit, max(total, FREE))
    kept = frontier(edit, budget)
    derived = _split(edit, kept)
    edit.notes += budget.refused
    if kept:
        edit.notes.append(
            f"{len(kept)} tensors derived from {len(derived.sources)} parameters, "
            f"{len(derived.opaque)} packed, {budget.spent} bytes beside those"
        )
    return derived


# ------------------------------------------------------------------------------ what to keep


def frontier(edit: Editor, budget: Budget) -> list[fx.Node]:
    """The static nodes to keep, in graph order."""
    chosen: set[fx.Node] = set()
    refused: set[fx.Node] = set()
    for reader in edit.graph.nodes:
        if edit.is_static(reader):
            continue
        pending = list(reader.all_input_nodes)
        while pending:
            node = pending.pop()
            if not edit.is_static(node) or node.op != "call_function" or node in chosen:
                continue
            if _costs_nothing(node) or node in refused or node.meta.get("derive") is False:
                pending += node.all_input_nodes
            elif budget.allows(node):
                chosen.add(node)
            else:
                refused.add(node)
                pending += node.all_input_nodes
    return [node for node in edit.graph.nodes if node in chosen]


def _costs_nothing(node: fx.Node) -> bool:
    # items of tuples are kept by themselves, not the tuple
    return is_view(node.target) or is_creation(node.target) or not _is_tensor(node)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _bytes_behind(edit: Editor, node: fx.Node) -> int:
    """Bytes of the parameters and constants that `node` is computed from."""
    seen = {node}
    pending = [node]
    total = 0
    while pending:
        at = pending.pop()
        if at.op in ("placeholder", "get_attr"):
            total += edit.bytes(at)
        for arg in at.all_input_nodes:
            if arg not in seen:
                seen.add(arg)
                pending.append(arg)
    return total


# ------------------------------------------------------------------------------ the split


def _split(edit: Editor, kept: list[fx.Node]) -> Derived:
    if not kept:
        return Derived()
    aten = edit.aten
    needed = closure(kept)
    placeholders = zip(aten.placeholders, aten.inputs, strict=True)
    given = [(node, spec.index) for node, spec in placeholders if node in needed]
    ordered = [node for node in edit.graph.nodes if node in needed and node.op != "placeholder"]
    attributes = [node for node in ordered if node.op == "get_attr"]
    calls = [node for node in ordered if node.op == "call_function"]
    slots = {node: Slot(k) for k, (node, _) in enumerate(given)}
    slots |= {node: Slot(len(slots) + k) for k, node in enumerate(attributes)}
    slots |= {node: Slot(len(slots) + k) for k, node in enumerate(calls)}
    done = _last_readers(calls, kept)
    derived = Derived(
        sources=tuple(index for _, index in given),
        constants=tuple(aten.constants[str(node.target)] for node in attributes),
        steps=tuple(_step(node, slots, done) for node in calls),
        results=tuple(int(slots[node]) for node in kept),
        targets=tuple(range(len(aten.inputs), len(aten.inputs) + len(kept))),
        opaque=frozenset(i for i, node in enumerate(kept) if node.meta.get("packed")),
    )
    _add_inputs(edit, kept)
    return derived


def _step(
    node: fx.Node, slots: dict[fx.Node, Slot], done: dict[fx.Node, list[fx.Node]]
) -> DeriveStep:
    def slot(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return slots[arg]
        if isinstance(arg, (list, tuple)):
            return [slot(item) for item in arg]
        return arg

    target = node.target
    assert callable(target)
    kwargs = {key: slot(arg) for key, arg in node.kwargs.items()}
    numbers = tuple(int(slots[arg]) for arg in done.get(node, ()))
    return DeriveStep(node.name, target, tuple(map(slot, node.args)), kwargs, numbers)


def _last_readers(calls: list[fx.Node], kept: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each call the results of calls that it is the last to read."""
    last: dict[fx.Node, fx.Node] = {}
    for node in calls:
        for arg in node.all_input_nodes:
            last[arg] = node
    stay = set(kept)
    found: dict[fx.Node, list[fx.Node]] = {}
    for arg, reader in last.items():
        if arg.op == "call_function" and arg not in stay:
            found.setdefault(reader, []).append(arg)
    return found


def closure(kept: list[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are computed from."""
    needed = set(kept)
    pending = list(kept)
    while pending:
        for arg in pending.pop().all_input_nodes:
            if arg not in needed:
                needed.add(arg)
                pending.append(arg)
    return needed


def _add_inputs(edit: Editor, kept: list[fx.Node]) -> None:
    """Make a placeholder of each kept node, after the others."""
    aten = edit.aten
    specs = list(aten.inputs)
    with aten.graph.inserting_before(_first_call(aten)):
        inputs = [aten.graph.placeholder(f"derived_{node.name}") for node in kept]
    for node, made in zip(kept, inputs, strict=True):
        meta = val(node)
        made.meta = {key: value for key, value in node.meta.items() if key != "stack_trace"}
        edit.adopt(made)
        is_opaque = bool(node.meta.get("packed"))
        specs.append(
            InputSpec(
                index=len(specs),
                name=made.name,
                dtype=meta.dtype,
                size=tuple(map(aten.to_size, meta.shape)),
                stride=() if is_opaque else tuple(map(aten.to_size, meta.stride())),
                offset=0,
                device=node.meta.get("device"),
                is_static=True,
            )
        )
        edit.replace(node, made)
    aten.inputs = tuple(specs)


def _first_call(aten: AtenGraph) -> fx.Node:
    """The first node that is no placeholder."""
    for node in aten.graph.nodes:
        if node.op != "placeholder":
            found: fx.Node = node
            return found
    raise AssertionError("a graph ends with its output")
