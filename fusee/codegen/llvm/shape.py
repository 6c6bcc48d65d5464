"""How a kernel is cut into vectors: lanes, copies, the end of an axis; what a point costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fusee.codegen.llvm.context import STATIC_SIZE
from fusee.codegen.llvm.types import BITS, HELD, Machine, memory_type
from fusee.loops.ir import Accumulate, Phase, Statement, Store, Value, index_of, walk
from fusee.loops.scalar import SCALAR_OPS
from fusee.sym.expr import Size, Symbol
from fusee.sym.parts import product, symbols

# An elementary function that a kernel computes more often is called instead of written out: LLVM
# takes some 2 ms for each time (a vector body and its masked end), a call costs some ns a vector.
MOST_INLINED = 8
# An op at least this heavy is a function call or a long sequence: copies would not help it.
HEAVY = 12
# Operations in a body up to which four, and two, copies fit the registers and hide latency.
FEW, SOME = 6, 16


@dataclass(frozen=True)
class Stage:
    """One loop along the lanes: `copies` vectors of `lanes`; masked: the last may be partial."""

    copies: int
    lanes: int
    masked: bool = False

    @property
    def width(self) -> int:
        return self.copies * self.lanes


def roots(statement: Statement) -> list[Value]:
    """The values that a statement needs, those hidden in its index too."""
    found = [statement.value]
    if isinstance(statement, Accumulate):
        if statement.which is not None:
            found.append(statement.which)
        return found
    hidden = [s.payload for s in symbols(statement.index) if isinstance(s.payload, Value)]
    return hidden + found


def body_order(phase: Phase) -> list[Value]:
    return walk(root for statement in phase.body for root in roots(statement))


def is_scan(phase: Phase, order: Sequence[Value]) -> bool:
    own = {s.acc for s in phase.body if isinstance(s, Accumulate)}
    return any(value.op == "acc" and value.attr in own for value in order)


def is_short(phase: Phase) -> bool:
    """True if all inner loops are short enough to keep their sizes in the text."""
    return all(isinstance(axis.hi, int) and axis.hi <= STATIC_SIZE for axis in phase.inner)


def choose_stages(
    phases: Sequence[Phase], orders: Sequence[list[Value]], lane: Symbol, machine: Machine
) -> list[Stage]:
    """The loops along `lane`, one after the other."""
    lanes = machine.bits // _element_bits(phases, orders)
    # Without a chain of additions to break up, copies gain nothing; and they leave whole vectors
    # to the end of the axis, where masked stores are dear.
    copies = 1
    if any(isinstance(s, Accumulate) for phase in phases for s in phase.body):
        copies = min(_copies(p, order, lane) for p, order in zip(phases, orders, strict=True))
    if all(
        machine.can_mask(bits)
        for phase, order in zip(phases, orders, strict=True)
        for bits in _access_bits(phase, order, lane, machine)
    ):
        return [Stage(copies, lanes), Stage(1, lanes, masked=True)]
    middle = [Stage(1, lanes)] if copies > 1 else []
    return [Stage(copies, lanes), *middle, Stage(1, 1)]


def _access_bits(phase: Phase, order: Sequence[Value], lane: Symbol, machine: Machine) -> set[int]:
    """Widths of the elements that vectors load and store."""
    places = [(v.attr[0].dtype, v.attr[1]) for v in order if v.op == "load"]
    places += [(s.buffer.dtype, s.index) for s in phase.body if isinstance(s, Store)]
    return {
        BITS[memory_type(dtype, machine)]
        for dtype, index in places
        if lane in symbols(index) or any(s.payload is not None for s in symbols(index))
    }


def _element_bits(phases: Sequence[Phase], orders: Sequence[list[Value]]) -> int:
    """The width that a vector is filled with: the widest, but 64 only if most values are."""
    widths: list[int] = []
    for phase, order in zip(phases, orders, strict=True):
        for value in order:
            if value.op in ("const", "check"):
                continue
            bits = max(BITS[HELD[value.dtype]], 8)
            widths.append(min(bits, 32) if value.op == "index" else bits)
        widths += [max(BITS[HELD[s.buffer.dtype]], 8) for s in phase.body if isinstance(s, Store)]
    wide = sum(bits == 64 for bits in widths)
    if 2 * wide >= max(len(widths), 1):
        return 64
    return min(max(widths, default=32), 32)


def _copies(phase: Phase, order: Sequence[Value], lane: Symbol) -> int:
    weight = 0
    for value in order:
        row = SCALAR_OPS.get(value.op)
        if row is not None and row.heavy >= HEAVY:
            return 1
        index = index_of(value)
        if lane in symbols(index) and value.op == "index":
            return 1
        if value.op == "load" and any(s.payload is not None for s in symbols(index)):
            return 1
        weight += value.op not in ("const", "index", "load", "acc")
    weight += sum(isinstance(s, Accumulate) for s in phase.body)
    return 4 if weight <= FEW else 2 if weight <= SOME else 1


def outlined(orders: Iterable[list[Value]]) -> frozenset[tuple[str, torch.dtype]]:
    """The elementary functions, by op and dtype, of which a kernel has too many to inline them."""
    values = (value for order in orders for value in order)
    counts = Counter((v.op, v.dtype) for v in values if v.op in SCALAR_OPS)
    heavy = (key for key, n in counts.items() if n > MOST_INLINED)
    return frozenset(key for key in heavy if SCALAR_OPS[key[0]].heavy >= HEAVY)


def is_light(orders: Sequence[list[Value]]) -> bool:
    """True if a kernel does little more than move data."""
    plain = ("const", "index", "load", "acc", "cast")
    return sum(value.op not in plain for order in orders for value in order) <= FEW and not any(
        row.heavy >= HEAVY
        for order in orders
        for value in order
        if (row := SCALAR_OPS.get(value.op)) is not None
    )


def phase_cost(phase: Phase, order: Sequence[Value]) -> Size:
    """Additions that one outer point of the phase takes, per lane."""
    cost = len(phase.body)
    for value in order:
        row = SCALAR_OPS.get(value.op)
        cost += row.heavy if row is not None else value.op not in ("const", "acc", "index")
    return product(axis.hi for axis in phase.inner if axis.hi is not None) * cost
