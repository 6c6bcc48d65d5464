"""Accumulators: what is carried round the loops of a reduction.

A floating-point sum is kept in two levels, so that its error does not grow with its length: the
inner loop sums blocks from zero, and finished blocks are added with the rounding error of each
addition kept beside them (Knuth's two-sum). Other reductions are carried as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fusee.codegen.llvm.ops import STATIC_SIZE, Context, compare, emit
from fusee.loops.ir import (
    REDUCTIONS,
    SCALAR_OPS,
    Acc,
    Accumulate,
    Phase,
    Store,
    Value,
    identity,
    index_of,
)
from fusee.runtime.llvm_text import (
    BITS,
    HELD,
    Machine,
    Target,
    is_float,
    literal,
    memory_type,
    vector,
)
from fusee.sym.expr import Size, Symbol, product, symbols

# ---------------------------------------------------------------------------- reduce


@dataclass(frozen=True)
class Carried:
    """How one accumulator is kept. Its parts: a value, and for arg-reductions an index."""

    acc: Acc
    dtype: torch.dtype  # of the values accumulated
    two_level: bool

    @property
    def is_arg(self) -> bool:
        return self.acc.op in ("argmax", "argmin")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype, torch.int64) if self.is_arg else (self.dtype,)

    def kinds(self, lanes: int) -> list[str]:
        return [vector(HELD[dtype], lanes) for dtype in self.dtypes]

    def start(self, lanes: int) -> list[str]:
        first = literal(identity(self.acc.op, self.dtype), self.dtype, lanes)
        return [first, literal(0, torch.int64, lanes)] if self.is_arg else [first]

    def outer_kinds(self, lanes: int) -> list[str]:
        """Of what is carried outside the innermost loop: sum and error, or the parts."""
        return self.kinds(lanes) * 2 if self.two_level else self.kinds(lanes)

    def outer_start(self, lanes: int) -> list[str]:
        return self.start(lanes) * 2 if self.two_level else self.start(lanes)


def carried(statement: Accumulate, two_level: bool) -> Carried:
    acc = statement.acc
    sums = two_level and acc.op == "sum" and is_float(statement.value.dtype)
    return Carried(acc, statement.value.dtype, sums)


def accumulate(
    ctx: Context, t: Target, how: Carried, old: list[str], new: list[str], mask: str | None
) -> list[str]:
    """One more element per lane; masked lanes take the identity."""
    if mask is not None:
        value = t.select(mask, HELD[how.dtype], new[0], how.start(t.lanes)[0])
        new = [value, *new[1:]]
    if not how.is_arg:
        return [combine(t, how, old[0], new[0])]
    better = _better(t, how, old[0], new[0])
    return [
        t.select(better, HELD[dtype], x, y)
        for dtype, x, y in zip(how.dtypes, new, old, strict=True)
    ]


def fuses(how: Carried, value: Value, machine: Machine) -> bool:
    """True for a sum of products: multiplied and added with one rounding, as ATen's compiler does.

    It halves the error of a scalar product, and takes one instruction.
    """
    is_sum = how.acc.op == "sum" and is_float(how.dtype) and value.op == "mul"
    return is_sum and machine.has_fused


def combine(t: Target, how: Carried, old: str, new: str) -> str:
    op = REDUCTIONS[how.acc.op]
    if how.dtype is torch.bool:
        # numbers 0 and 1: a sum or maximum of them is an or
        op = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}.get(op, op)
    return emit(t, op, how.dtype, [new, old])


def _better(t: Target, how: Carried, old: str, new: str) -> str:
    """True where new goes before old: strictly better, or the first NaN."""
    op = "gt" if how.acc.op == "argmax" else "lt"
    if not is_float(how.dtype):
        return compare(t, op, how.dtype, new, old)
    kind, mask = t.kind(how.dtype), vector("i1", t.lanes)
    wins = t.level.op(f"fcmp u{op} {kind} {new}, {old}")
    number_before = t.level.op(f"fcmp ord {kind} {old}, {old}")
    return t.level.op(f"and {mask} {wins}, {number_before}")


def merge(t: Target, how: Carried, a: list[str], b: list[str]) -> list[str]:
    """Two accumulators of disjoint elements as one; among equals the lower index."""
    if not how.is_arg:
        return [combine(t, how, a[0], b[0])]
    mask = vector("i1", t.lanes)
    better = _better(t, how, a[0], b[0])
    worse = _better(t, how, b[0], a[0])
    either = t.level.op(f"or {mask} {better}, {worse}")
    equal = t.level.op(f"xor {mask} {either}, {literal(True, torch.bool, t.lanes)}")
    lower = compare(t, "lt", torch.int64, b[1], a[1])
    tie = t.level.op(f"and {mask} {equal}, {lower}")
    takes_b = t.level.op(f"or {mask} {better}, {tie}")
    return [
        t.select(takes_b, HELD[dtype], y, x) for dtype, x, y in zip(how.dtypes, a, b, strict=True)
    ]


def merge_all(t: Target, how: Carried, parts: list[list[str]]) -> list[str]:
    """Pairwise, so that the chain is short."""
    while len(parts) > 1:
        rest = parts[len(parts) & ~1 :]
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [merge(t, how, a, b) for a, b in pairs] + rest
    return parts[0]


def two_sum(t: Target, how: Carried, outer: list[str], block: str) -> list[str]:
    """(sum, error) with a block's sum added; exact but for the rounding of the error."""
    kind, op = t.kind(how.dtype), t.level.op
    total, error = outer
    new = op(f"fadd {kind} {total}, {block}")
    virtual = op(f"fsub {kind} {new}, {total}")
    left = op(f"fsub {kind} {total}, {op(f'fsub {kind} {new}, {virtual}')}")
    right = op(f"fsub {kind} {block}, {virtual}")
    lost = op(f"fadd {kind} {left}, {right}")
    return [new, op(f"fadd {kind} {error}, {lost}")]


def settle(t: Target, how: Carried, outer: list[str]) -> list[str]:
    """The result of what was carried outside: a sum with its error, NaN beside infinities."""
    if not how.two_level:
        return outer
    kind = t.kind(how.dtype)
    total, error = outer
    finite = t.level.op(f"fcmp ord {kind} {error}, {error}")
    error = t.select(finite, HELD[how.dtype], error, literal(0, how.dtype, t.lanes))
    return [t.level.op(f"fadd {kind} {total}, {error}")]


def across(ctx: Context, t: Target, how: Carried, parts: list[str]) -> list[str]:
    """All lanes as one: halves are merged until one element is left."""
    lanes, level = t.lanes, t.level
    while lanes > 1:
        half = lanes // 2
        halves: list[list[str]] = [[], []]
        for kind, part in zip(how.kinds(lanes), parts, strict=True):
            for side, picks in zip(halves, (range(half), range(half, lanes)), strict=True):
                if half == 1:
                    side.append(level.op(f"extractelement {kind} {part}, i32 {picks[0]}"))
                else:
                    side.append(level.shuffle(kind, part, "poison", picks))
        parts = merge(Target(level, ctx.machine, half), how, *halves)
        lanes = half
    return parts


def into_first_lane(t: Target, how: Carried, parts: list[str]) -> list[str]:
    """Scalars as a vector whose other lanes change nothing."""
    found = []
    scalar_start = Carried(how.acc, how.dtype, False).start(t.lanes)
    for dtype, base, part in zip(how.dtypes, scalar_start, parts, strict=True):
        kind = vector(HELD[dtype], t.lanes)
        found.append(t.level.op(f"insertelement {kind} {base}, {HELD[dtype]} {part}, i64 0"))
    return found


def result(how: Carried, parts: list[str]) -> str:
    """The part that reading the accumulator yields."""
    return parts[-1]


# ---------------------------------------------------------------------------- shape
# How a kernel is cut into vectors: lanes, copies, the end of an axis; what a point costs.

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
    if lanes <= 1:
        return [Stage(1, 1)]
    # Without a chain of additions to break up, copies gain nothing; and they leave whole vectors
    # to the end of the axis, where masked stores are dear.
    copies = 1
    if any(isinstance(s, Accumulate) for phase in phases for s in phase.body):
        copies = min(_copies(p, order, lane) for p, order in zip(phases, orders, strict=True))
    places = [(v.attr[0].dtype, v.attr[1]) for order in orders for v in order if v.op == "load"]
    places += [(s.buffer.dtype, s.index) for p in phases for s in p.body if isinstance(s, Store)]
    if all(
        machine.can_mask(BITS[memory_type(dtype, machine)])
        for dtype, index in places
        if lane in symbols(index) or any(s.payload is not None for s in symbols(index))
    ):
        return [Stage(copies, lanes), Stage(1, lanes, masked=True)]
    middle = [Stage(1, lanes)] if copies > 1 else []
    return [Stage(copies, lanes), *middle, Stage(1, 1)]


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
