"""A kernel in the making: its members, and how they become one Kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from fusee.loops.ir import (
    Accumulate,
    Buffer,
    Kernel,
    Loop,
    Phase,
    Statement,
    Store,
    Value,
    cast,
    payloads,
    rewrite,
    rewrite_index,
    walk,
)
from fusee.loops.order import order_loops, roots
from fusee.loops.origin import joined
from fusee.sym.expr import Size, Symbol

# A producer's value is computed again in a later phase if it takes no more additions than this;
# otherwise the later phase loads what the earlier one stored, which is in the nearest cache.
RECOMPUTE_COST = 8
# The same where the value is stored anyway: one load replaces it.
STORED_COST = 2


@dataclass(eq=False)
class Member:
    """A loop inside a kernel, renamed to the kernel's axes; `space` are those it doesn't reduce."""

    loop: Loop
    space: tuple[Symbol, ...]
    reduce: tuple[Symbol, ...]
    index: Size
    value: Value
    result: Value | None
    which: Value | None
    phase: int = 0

    def stored(self) -> Value:
        """What ends up in the buffer, as later statements see it."""
        if self.loop.acc is None:
            return cast(self.value, self.loop.buffer.dtype)
        if self.result is not None:
            return cast(self.result, self.loop.buffer.dtype)
        return cast(self.value.table.acc(self.loop.acc), self.loop.buffer.dtype)


@dataclass(eq=False)
class Group:
    """A kernel in the making."""

    position: int
    outer: tuple[Symbol, ...]
    members: list[Member] = field(default_factory=list)
    phases: list[tuple[Symbol, ...]] = field(default_factory=list)  # inner axes
    sealed: bool = False  # takes no more members
    values: int = 0  # how many the members have, those that they share counted each time
    frozen: bool = False  # a reduction joined: the outer axes are its axes and stay


def build(group: Group, live: set[Buffer]) -> Kernel | None:
    """Forward values between members, drop dead stores, order the loops. None: all is dead."""
    by_buffer: dict[Buffer, Member] = {}  # of the members so far
    bodies: list[list[Statement]] = [[] for _ in group.phases]
    finals: list[list[Statement]] = [[] for _ in group.phases]
    for member in group.members:
        replace = _Forwarding(member, by_buffer, live)
        values = [v for v in (member.value, member.result, member.which) if v is not None]
        order = walk(values + payloads(member.index))
        new = dict(zip(map(id, order), rewrite(order, None, replace), strict=True))
        by_buffer[member.loop.buffer] = member
        member.value = new[id(member.value)]
        member.result = None if member.result is None else new[id(member.result)]
        member.which = None if member.which is None else new[id(member.which)]
        member.index = rewrite_index(member.index, None, new)
        store = Store(member.loop.buffer, member.index, member.stored(), member.loop.mode)
        if member.loop.acc is None:
            bodies[member.phase].append(store)
            continue
        bodies[member.phase].append(Accumulate(member.loop.acc, member.value, member.which))
        (bodies if member.loop.scan else finals)[member.phase].append(store)
    phases = []
    for inner, body, final in zip(group.phases, bodies, finals, strict=True):
        phases.append(Phase(inner, body))
        if final:
            phases.append(Phase((), final))
    _drop_dead(phases, live)
    phases = _compact(phases)
    if not phases:
        return None
    ordered = tuple(axis for m in group.members for axis in m.loop.ordered)
    origin = joined(part for m in group.members for part in m.loop.origin.split(" + ") if part)
    return order_loops(Kernel(group.outer, phases, None, ordered, origin))


class _Forwarding:
    """Replaces a member's loads of what other members computed by the values themselves."""

    def __init__(self, member: Member, by_buffer: dict[Buffer, Member], live: set[Buffer]) -> None:
        self.member, self.by_buffer, self.live = member, by_buffer, live

    def __call__(self, value: Value) -> Value | None:
        if value.op != "load":
            return None
        producer = self.by_buffer.get(value.attr[0])
        if producer is None or producer is self.member or producer.index != value.attr[1]:
            return None
        stored = producer.stored()
        if producer.loop.acc is None and producer.phase != self.member.phase:
            limit = STORED_COST if producer.loop.buffer in self.live else RECOMPUTE_COST
            if stored.cost > limit:
                return None
        elif producer.loop.scan:
            return None
        if value.args:
            return None  # masked: the mask may protect what the producer never computed
        return stored


def _drop_dead(phases: list[Phase], live: set[Buffer]) -> None:
    loaded: set[Buffer] = set()
    for phase in phases:
        values = [root for s in phase.body for root in roots(s)]
        loaded.update(v.attr[0] for v in walk(values) if v.op == "load")
    for phase in phases:
        phase.body = [
            s
            for s in phase.body
            if not isinstance(s, Store) or s.buffer in live or s.buffer in loaded
        ]


def _compact(phases: list[Phase]) -> list[Phase]:
    """Phases without statements go; neighbouring phases without inner axes become one."""
    result: list[Phase] = []
    for phase in phases:
        if not phase.body:
            continue
        if result and not phase.inner and not result[-1].inner:
            result[-1].body.extend(phase.body)
        else:
            result.append(phase)
    return result
