"""How a kernel is cut into vectors: the axis that they run along, in which tile, in which loops.

Nothing is emitted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fusee.codegen.llvm.memory import BRIEF, NEAR
from fusee.codegen.llvm.ops import STATIC_SIZE
from fusee.loops import SCALAR_OPS, Accumulate, Kernel, Phase, Value, index_of
from fusee.loops.schedule import stride
from fusee.runtime.llvm_text import BITS, HELD, Machine, memory_type
from fusee.sym import Size, Symbol, count_points, symbols

# ---------------------------------------------------------------------------- shape
# Lanes, copies and the end of an axis; what a point costs.

# An elementary function that a kernel computes more often is called instead of written out: LLVM
# takes some 2 ms for each time (a vector body and its masked end), a call costs some ns a vector.
MOST_INLINED = 8
# An op at least this heavy is a function call or a long sequence: copies would not help it.
HEAVY = 12
# Operations in a body up to which four, and two, copies fit the registers and hide latency; what
# is none.
FEW, SOME = 6, 16
PLAIN = ("const", "index", "load", "acc", "carry")


class Stage(NamedTuple):
    """One loop along the lanes: `copies` vectors of `lanes`; masked: the last may be partial."""

    copies: int
    lanes: int
    masked: bool = False

    @property
    def width(self) -> int:
        return self.copies * self.lanes


def is_short(phase: Phase) -> bool:
    """True if all inner loops are short enough to keep their sizes in the text."""
    return all(isinstance(axis.hi, int) and axis.hi <= STATIC_SIZE for axis in phase.inner)


def width_of(phases: Sequence[Phase], orders: Sequence[Sequence[Value]], machine: Machine) -> int:
    """Elements of a vector: of the widest, but of those of 64 bits only if most values are."""
    widths: list[int] = []
    for phase, order in zip(phases, orders, strict=True):
        for value in order:
            if value.op in ("const", "check"):
                continue
            bits = max(BITS[HELD[value.dtype]], 8)
            widths.append(min(bits, 32) if value.op == "index" else bits)
        widths += [max(BITS[HELD[s.buffer.dtype]], 8) for s in phase.stores]
    wide = sum(bits == 64 for bits in widths)
    widest = 64 if 2 * wide >= max(len(widths), 1) else min(max(widths, default=32), 32)
    return machine.bits // widest


def choose_stages(
    phases: Sequence[Phase],
    orders: Sequence[Sequence[Value]],
    lane: Symbol,
    lanes: int,
    machine: Machine,
) -> list[Stage]:
    """The loops along `lane`, one after the other, of vectors of at most so many lanes."""
    if isinstance(lane.hi, int) and lane.hi > 1:  # none wider than the axis
        lanes = min(lanes, 1 << (lane.hi - 1).bit_length())
    if lanes <= 1:
        return [Stage(1, 1)]
    # Without a chain of additions to break up, copies gain nothing; and they leave whole vectors
    # to the end of the axis, where masked stores are dear.
    copies = 4 if any(phase.accumulates for phase in phases) else 1
    for phase, order in zip(phases, orders, strict=True) if copies > 1 else ():
        moved = [(v.op, symbols(index_of(v))) for v in order if v.op in ("load", "index")]
        is_slow = any(op == "index" and lane in own for op, own in moved)
        is_slow |= any(op == "load" and s.payload is not None for op, own in moved for s in own)
        is_slow |= any(SCALAR_OPS[v.op].heavy >= HEAVY for v in order if v.op in SCALAR_OPS)
        weight = len(phase.accumulates) + sum(v.op not in PLAIN for v in order)
        copies = min(copies, 1 if is_slow or weight > SOME else 2 if weight > FEW else 4)
    if isinstance(lane.hi, int) and lane.hi < BRIEF * lanes:  # nor more than whole ones in it
        whole = max(lane.hi // lanes, 1)
        copies = min(copies, whole & -whole)
    places = [(v.attr[0].dtype, v.attr[1]) for order in orders for v in order if v.op == "load"]
    places += [(s.buffer.dtype, s.index) for p in phases for s in p.stores]
    if all(
        machine.can_mask(BITS[memory_type(dtype, machine)])
        for dtype, index in places
        if lane in symbols(index) or any(s.payload is not None for s in symbols(index))
    ):
        return [Stage(copies, lanes), Stage(1, lanes, masked=True)]
    middle = [Stage(1, lanes)] if copies > 1 else []
    return [Stage(copies, lanes), *middle, Stage(1, 1)]


def outlined(orders: Iterable[Sequence[Value]]) -> frozenset[tuple[str, torch.dtype]]:
    """The elementary functions, by op and dtype, of which a kernel has too many to inline them."""
    values = (value for order in orders for value in order)
    counts = Counter((v.op, v.dtype) for v in values if v.op in SCALAR_OPS)
    heavy = (key for key, n in counts.items() if n > MOST_INLINED)
    return frozenset(key for key in heavy if SCALAR_OPS[key[0]].heavy >= HEAVY)


def is_light(orders: Sequence[Sequence[Value]]) -> bool:
    """True if a kernel does little more than move data."""
    ops = [v.op for order in orders for v in order if v.op not in (*PLAIN, "cast")]
    return len(ops) <= FEW and all(SCALAR_OPS[x].heavy < HEAVY for x in ops if x in SCALAR_OPS)


def phase_cost(phase: Phase, order: Sequence[Value]) -> Size:
    """Additions that one outer point of the phase takes, per lane."""
    cost = len(phase.body)
    for value in order:
        row = SCALAR_OPS.get(value.op)
        cost += row.heavy if row is not None else value.op not in ("const", "acc", "carry", "index")
    return count_points(phase.inner) * cost


# ---------------------------------------------------------------------------- tile
# Tiles: the lanes run along one axis and the copies along another, where accesses disagree.
#
# A kernel that loads contiguously along i and stores contiguously along j works on squares of i and
# j. A load along i yields, turned in registers, the vectors along j of all rows of the square; a
# store along i turns them back. Where i is shorter than a vector (points of three coordinates), a
# tile is all of i: its rows lie beside one another, or each is a part of a vector. Kernels with
# masks, indirect indices or inner loops go without.

# Squares beside one another in a strip: two of 8 float32 are one line of the cache.
SQUARES = 2
# Elements of a row that are loaded and stored in one piece, wherever the next row lies.
PIECES = (2, 4, 8)
# Vectors in a row from which on counting coordinates costs little; rows that follow each other.
LONG, ROWS = 8, 64


class Tile(NamedTuple):
    """Copies run along `axis`: as many as there are lanes, or all of an axis that is shorter.

    One that does not turn is so many rows, one after the other.
    """

    axis: Symbol
    lanes: int
    copies: int
    turns: bool = True

    @property
    def is_square(self) -> bool:
        return self.turns and self.copies == self.lanes

    @property
    def strip(self) -> int:
        return self.copies * (SQUARES if self.is_square else 1)


def choose_vectors(
    kernel: Kernel, orders: Sequence[Sequence[Value]], lane: Symbol | None, machine: Machine
) -> tuple[Symbol | None, list[Stage], Tile | None]:
    """The axis that vectors run along, how, and in which tile.

    It is `lane`, or another one with a tile of all of `lane`, if that is short; or `lane` with
    vectors that are as short.
    """
    if lane is None:
        return None, [], None
    lanes = width_of(kernel.phases, orders, machine)
    stages = choose_stages(kernel.phases, orders, lane, lanes, machine)
    is_long = _fills(lane, min(lanes, _most(machine)))
    others = [] if is_long else [axis for axis in kernel.outer if axis != lane]
    tries = [(axis, lanes) for axis in (*others, lane)]
    if others:
        tries.append((lane, stages[0].lanes))
    for axis, width in tries:
        tile = _tile(kernel, orders, axis, width, machine)
        if tile is None or lane not in (axis, tile.axis):
            continue
        if is_light(orders):  # what tiles leave is no slower one by one, and much less code
            stages = [Stage(1, 1)]
        elif axis != lane:
            stages = choose_stages(kernel.phases, orders, axis, lanes, machine)
        return axis, stages, tile
    if others and lanes >= 4 and is_light(orders):
        indices = _moved(kernel, orders, lane)
        if indices and any(_turns(indices, kernel, axis, lane) for axis in others):
            stages = [Stage(1, 1)]  # a vector of few lanes would gather them one by one
    # rows in a loop of their own, where counting all coordinates on takes longer than a row
    axes = [axis for axis in kernel.outer if axis != lane]
    is_short = isinstance(lane.hi, int) and lane.hi * 32 <= LONG * machine.bits
    if axes and is_short and not kernel.ordered and not any(p.inner for p in kernel.phases):
        return lane, stages, Tile(axes[-1], 1, ROWS, turns=False)
    return lane, stages, None


def _tile(
    kernel: Kernel, orders: Sequence[Sequence[Value]], lane: Symbol, lanes: int, machine: Machine
) -> Tile | None:
    """The tile that serves a kernel whose vectors run along `lane`, or None."""
    indices = _moved(kernel, orders, lane) if lanes >= 4 else None
    if indices is None:
        return None
    lanes = min(lanes, _most(machine))
    if not _fills(lane, lanes):  # no tile would be whole
        return None
    for axis in kernel.outer:
        if axis == lane or not _turns(indices, kernel, axis, lane):
            continue
        # nor may a number be made from the axis itself
        if any(v.op == "index" and axis in symbols(v.attr) for o in orders for v in o):
            continue
        if _fills(axis, lanes):
            return Tile(axis, lanes, lanes)
        if isinstance(axis.hi, int):
            # of all of the axis, if accesses are made of vectors, or of parts of them
            is_piece, own = axis.hi in PIECES, axis.hi
            steps = [(stride(index, lane), stride(index, axis)) for index in indices]
            if all(
                (isinstance(along, int) and 0 <= along <= NEAR)
                or (across == 1 and (is_piece or along == own))
                for along, across in steps
            ):
                return Tile(axis, lanes, axis.hi)
    return None


def _most(machine: Machine) -> int:
    """Lanes of a tile, at most."""
    return 16 if "avx512f" in machine.features else 8


def _moved(kernel: Kernel, orders: Sequence[Sequence[Value]], lane: Symbol) -> list[Size] | None:
    """Where a kernel of points alone loads and stores, if tiles may do so in another order."""
    if kernel.ordered or any(p.inner for p in kernel.phases):
        return None
    indices: list[Size] = []
    for statement in kernel.statements():
        if isinstance(statement, Accumulate):
            return None
        indices.append(statement.index)
    stored = {s.buffer for s in kernel.stores}
    for value in (value for order in orders for value in order):
        if value.op == "load":
            if value.args or value.attr[0] in stored:
                return None
            indices.append(value.attr[1])
        elif value.op == "check" or lane in symbols(index_of(value)):
            return None
    if any(s.payload is not None for index in indices for s in symbols(index)):
        return None
    return indices


def _fills(axis: Symbol, lanes: int) -> bool:
    """Whether an axis is as long as a vector, or may be."""
    return not isinstance(axis.hi, int) or axis.hi >= lanes


def _turns(indices: Sequence[Size], kernel: Kernel, axis: Symbol, lane: Symbol) -> bool:
    """True if an access is contiguous along `axis`, strided along `lane`; all must be linear."""
    found = False
    own = set(kernel.outer)
    for index in indices:
        along, across = stride(index, lane), stride(index, axis)
        if along is None or across is None or own & {*symbols(along), *symbols(across)}:
            return False
        found |= across == 1 and along not in (0, 1)
    return found
