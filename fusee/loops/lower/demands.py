"""Checks that a call makes whatever becomes of its result: of indices, divisors, probabilities.

Results are lazy, so a check inside one is made where it is used, as far as it is used: not at all
for `ones(4)[i]`, of which each element is known, and for the first rows alone in `x[i][:2]`. A
demand is a loop over all that the call takes. In the end those are added that no loop covers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import torch

from fusee.loops.deps import reads
from fusee.loops.ir import Extern, Loop, LoopGraph, Value, View, cast, payloads, walk
from fusee.loops.lower.tensor import Lowering, Tensor
from fusee.sym.expr import Size, Symbol

__all__ = ["demand", "make_checks"]


def demand(tensor: Tensor, checked: Callable[[Value], Value]) -> None:
    """Each element of `tensor` must go through `checked`, which has the `check`."""
    lowering, shape = tensor.lowering, tensor.shape
    if 0 in shape:
        return
    value = checked(tensor.at(lowering.axes(shape)))
    buffer = lowering.buffer(shape, torch.bool)
    loop = Loop(
        buffer,
        lowering.axis_symbols(shape),
        buffer.index(lowering.axes(shape)),
        cast(value, torch.bool),
        stays=True,
        origin=lowering.origin,
    )
    lowering.demands.append((len(lowering.graph.steps), loop))


def make_checks(lowering: Lowering) -> None:
    """Add the loops of demands that no loop covers."""
    steps = lowering.graph.steps
    made = list(_made(lowering.graph)) if lowering.demands else []
    written = {step.buffer for step in steps if isinstance(step, Loop)}
    covered = {_elements(check, loop) for check, loop in made} | {check for check, _ in made}
    for position, demanded in reversed(lowering.demands):
        for check in _checks(demanded):
            found = {check, _elements(check, demanded)} & covered
            if not found or any(load.attr[0] in written for load in _written(check)):
                steps.insert(position, demanded)
                break


def _written(check: Value) -> list[Value]:
    """Loads from what may hold something else at another place of the program."""
    return [v for v in walk([check]) if v.op == "load" and v.attr[0].role == "input"]


def _made(graph: LoopGraph) -> Iterator[tuple[Value, Loop]]:
    """The checks of loops whose results are needed."""
    needed = {view.buffer for view in graph.outputs if isinstance(view, View)}
    for step in reversed(graph.steps):
        if isinstance(step, Extern):
            needed.update(reads(step))
        elif step.buffer in needed or step.buffer.role != "scratch":
            needed.update(reads(step))
            for check in _checks(step):
                yield check, step


def _checks(loop: Loop) -> list[Value]:
    values = [v for v in (loop.value, loop.result, loop.which) if v is not None]
    return [v for v in walk([*values, *payloads(loop.index)]) if v.op == "check"]


def _elements(check: Value, loop: Loop) -> Hashable:
    """Equal only for equal checks of the same elements, those of one buffer; else its own."""
    rows: list[Hashable] = []
    number: dict[Value, int] = {}
    loads = 0
    for value in walk([check]):
        attr: Hashable = repr(value.attr)
        if value.op == "load":
            buffer, index = value.attr
            loads += 1
            footprint = _footprint(index, (*loop.axes, *loop.reduce_axes))
            if footprint is None or value.args:
                return check
            attr = buffer, footprint
        if value.op == "index":
            return check
        number[value] = len(rows)
        rows.append((value.op, value.dtype, attr, *(number[arg] for arg in value.args)))
    return tuple(rows) if loads == 1 else check


def _footprint(index: Size, axes: tuple[Symbol, ...]) -> Hashable | None:
    """Which elements a flat index visits over all axes: the first, then steps and counts."""
    ranges = {axis: axis.hi for axis in axes}
    start = 0
    steps: list[tuple[int, int]] = []
    for monomial, factor in ({(): index} if isinstance(index, int) else index.terms).items():
        count = ranges.get(monomial[0]) if len(monomial) == 1 else None  # type: ignore[call-overload]
        if not monomial:
            start += factor
        elif type(count) is int and count > 0:
            start += min(factor, 0) * (count - 1)
            steps.append((abs(factor), count))
        else:
            return None
    merged: list[tuple[int, int]] = []
    for step, count in sorted(steps):
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = merged[-1][0], merged[-1][1] * count
        elif count != 1:
            merged.append((step, count))
    return start, *merged
