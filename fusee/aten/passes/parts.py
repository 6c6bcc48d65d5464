"""Derived weights in parts that share no parameter: one that changes recomputes its part alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fusee.aten.passes.constants import Derived, DeriveStep, Slot

__all__ = ["parts"]


def parts(derived: Derived) -> list[tuple[tuple[int, ...], Derived]]:
    """Per part: positions among `derived.results`, and how to compute these.

    What comes from constants alone is computed in each part that reads it.
    """
    first = len(derived.sources) + len(derived.constants)
    reads = {k: sorted(set(_slots(step))) for k, step in enumerate(derived.steps, first)}
    group = _groups(len(derived.sources), first, reads)
    members: dict[int, list[int]] = {}
    for position, number in enumerate(derived.results):
        members.setdefault(group[number], []).append(position)
    return [(tuple(taken), _part(derived, taken, reads)) for taken in members.values()]


def _slots(step: DeriveStep) -> Iterator[int]:
    pending: list[Any] = [step.args, *step.kwargs.values()]
    while pending:
        arg = pending.pop()
        if type(arg) is Slot:
            yield int(arg)
        elif isinstance(arg, (list, tuple)):
            pending += arg


def _groups(sources: int, first: int, reads: dict[int, list[int]]) -> list[int]:
    """Per value, a number that connected values have in common; -1 if no source is behind it."""
    above = [*range(sources), *[-1] * (first - sources + len(reads))]

    def top(number: int) -> int:
        while number != -1 and above[number] != number:
            number = above[number]
        return number

    for number, read in reads.items():
        found = {top(k) for k in read} - {-1}
        lead = min(found, default=-1)
        above[number] = lead
        for other in found:
            above[other] = lead
    return [top(number) for number in range(len(above))]


def _part(derived: Derived, positions: list[int], reads: dict[int, list[int]]) -> Derived:
    """The steps behind these results, their values numbered anew."""
    needed = {derived.results[k] for k in positions}
    for number in reversed(reads):
        if number in needed:
            needed.update(reads[number])
    ordered = sorted(needed)
    new = {number: Slot(k) for k, number in enumerate(ordered)}
    inputs = len(derived.sources)
    first = inputs + len(derived.constants)
    last = {k: number for number in ordered for k in reads.get(number, ())}
    results = {derived.results[k] for k in positions}

    def renamed(arg: Any) -> Any:
        if type(arg) is Slot:
            return new[int(arg)]
        if isinstance(arg, (list, tuple)):
            return [renamed(item) for item in arg]
        return arg

    def step(number: int) -> DeriveStep:
        old = derived.steps[number - first]
        done = [k for k in reads[number] if k >= first and last[k] == number and k not in results]
        return DeriveStep(
            old.name,
            old.target,
            tuple(map(renamed, old.args)),
            {key: renamed(arg) for key, arg in old.kwargs.items()},
            tuple(int(new[k]) for k in done),
        )

    return dataclasses.replace(
        derived,
        sources=tuple(derived.sources[k] for k in ordered if k < inputs),
        constants=tuple(derived.constants[k - inputs] for k in ordered if inputs <= k < first),
        steps=tuple(step(k) for k in ordered if k >= first),
        results=tuple(int(new[derived.results[k]]) for k in positions),
        targets=tuple(derived.targets[k] for k in positions),
        opaque=frozenset(at for at, k in enumerate(positions) if k in derived.opaque),
    )
