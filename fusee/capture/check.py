"""The check of one entry: facts about what dicts hold are watched, the others are looked at.

Those about tensors that are new at each call are one call of machine code, with what holds between
their sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.capture.guards import Fact, Facts, TensorMatch, Values
from fusee.capture.relations import SizeRelation
from fusee.capture.sources import Origin, SizeOf, StrideOf, looking
from fusee.capture.watched import Watched
from fusee.runtime import process
from fusee.runtime.change_detection import (
    Open,
    Read,
    Table,
    available,
    can_watch,
    changed,
    differs,
)
from fusee.sym.expr import Steps

_FEW = 8  # facts that are looked at as quickly as they are watched


@process.paused()
def compile_check(
    facts: Facts,
    parameters: list[str],
    names: dict[str, Any],
    conditions: list[str],
    values: Values,
) -> tuple[Callable[..., bool], Callable[[], str]]:
    """The check as a function of the locals, and what gives its source.

    conditions   about global state, with `names` for what they use
    values       the locals, for which all facts hold now
    """
    if not available():
        check, text = facts.compile(parameters, names, conditions)
        return check, lambda: text
    seen, watched, others = Watched(), Facts(kinds=facts.kinds), Facts(kinds=facts.kinds)
    for fact in facts.rows:
        (watched if fact.watched(seen) else others).rows.append(fact)
    if len(watched.rows) < _FEW:
        watched.rows, others.rows = [], facts.rows
    fresh = _fresh(others, [*facts.rows], values)
    whole = functools.cache(functools.partial(watched.compile, [], {}, []))
    if watched.rows:
        seen.start(watched.rows, lambda: whole()[0]())
        names = {**names, "_changed": changed(), "_watched": seen}
        conditions = [*conditions, "_changed(_watched.address) < 0 or _watched.look()"]
    if fresh is not None:
        names = {**names, "_differs": differs(), "_table": fresh[1]}
    check, text = others.compile(parameters, names, conditions)

    def source() -> str:
        if fresh is None and not watched.rows:
            return text
        listed = [] if fresh is None else [f"# _table: {fact}" for fact in fresh[0]]
        looked = whole()[1] if watched.rows else ""
        return "\n".join([text, *listed, "# _watched.look():", looked])

    return check, source


def _fresh(others: Facts, known: Sequence[Fact], values: Values) -> tuple[list[Fact], Table] | None:
    """Takes facts about tensors and their sizes out of `others` that machine code looks at.

    None if they are few, and no size is open.
    """
    look = looking(values)
    closed: dict[Fact, torch.Tensor | None] = {}
    opened: dict[Fact, Open] = {}
    for fact in others.rows:
        if fact.is_listed():
            x = look(fact.origin)
            if isinstance(fact, TensorMatch) and None in (*fact.value.size, *fact.value.stride):
                if can_watch(x):
                    opened[fact] = Open(x, fact.value.size, fact.value.stride)
            elif x is None or can_watch(x):
                closed[fact] = x
    if not opened and len(closed) < _FEW:
        return None
    others.listed = listed = [fact.origin for fact in (*closed, *opened)]
    elements = {origin: k for k, origin in enumerate(listed)}
    tensors = {fact.origin for fact in known if isinstance(fact, TensorMatch)}

    def element(origin: Origin) -> int:
        if origin not in elements:
            elements[origin] = len(listed)
            listed.append(origin)
        return elements[origin]

    def place(origin: Origin) -> Read | None:
        if type(look(origin)) is not int:
            return None
        if not isinstance(origin, (SizeOf, StrideOf)):
            return Read(element(origin), "int")
        if origin.of not in tensors or not can_watch(look(origin.of)):
            return None
        kind = "size" if isinstance(origin, SizeOf) else "stride"
        return Read(element(origin.of), kind, origin.axis)

    read: dict[Origin, Read] = {}
    related: list[SizeRelation] = []
    for fact in others.rows:
        if isinstance(fact, SizeRelation):
            places = {origin: place(origin) for origin in fact.reads()}
            if None not in places.values():
                read.update({origin: one for origin, one in places.items() if one is not None})
                related.append(fact)
    names = {origin: str(k) for k, origin in enumerate(read)}
    steps = Steps(names.values())
    required = [fact.compared(steps, names) for fact in related]
    taken = [*closed, *opened, *related]
    gone = set(taken)
    others.rows = [fact for fact in others.rows if fact not in gone]
    table = Table([*closed.values()], [*opened.values()], [*read.values()], [*steps.rows], required)
    return taken, table
