"""The body of a phase: its statements in the innermost open loop, for one stage of vectors, what
is carried round the loops of a reduction, and these loops.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusee.codegen.llvm.lanes import Stage, choose_stages, is_short, width_of
from fusee.codegen.llvm.math import rough_quotient, rough_tanh
from fusee.codegen.llvm.memory import (
    load_scalar,
    load_vector,
    scalar_size,
    scalar_sum,
    split_lanes,
    store_value,
    vector_sum,
)
from fusee.codegen.llvm.ops import Context, compare, emit, emit_bitcast, emit_cast, groups
from fusee.loops import REDUCTIONS, Acc, Accumulate, Phase, Store, Value, identity
from fusee.loops.schedule import is_scan
from fusee.runtime.llvm_text import (
    BITS,
    HELD,
    InsertPoint,
    Machine,
    is_float,
    literal,
    numbered,
    vector,
)
from fusee.sym import Symbol, known_lt

# ---------------------------------------------------------------------------- values
# Values of the loop IR as instructions, each at the rank where it last changes.


def emit_value(ctx: Context, value: Value) -> None:
    """Write the value's instructions unless its level has them already. Operands come first."""
    rank, varies = ctx.facts[value]
    known = ctx.ranked[rank].known
    if value in known:
        return
    if value.op in ("acc", "carry"):
        known[value] = (ctx.acc_names if value.op == "acc" else ctx.carried)[value.attr]
    elif value.op == "const":
        known[value] = ctx.number(value)
    elif value.op == "load":
        known[value] = load_vector(ctx, value) if varies else load_scalar(ctx, value)
    elif value.op == "index" and varies:
        known[value] = vector_sum(ctx, groups(ctx, value.attr), rank)
    elif value.op == "index":
        known[value] = scalar_size(ctx, value.attr)
    elif varies:
        t, found = ctx.target(rank, ctx.lanes), None
        if value.op in FLIPPED and value.args[0].dtype is torch.int64:
            found = _position_test(ctx, t, value)
        if found is None:
            columns = [ctx.vectors(arg) for arg in value.args]
            for k, arg in enumerate(value.args if value.op == "where" else ()):
                # vectors as memory has them, or that in another type, as one instruction gives it
                given, held = arg.args[0] if arg.op == "cast" else arg, HELD[arg.dtype]
                if given.op == "load" and ctx.facts[given][1] and BITS[held] > 1:
                    columns[k] = [t.apart(held, x) for x in columns[k]]
            rows = zip(*columns, strict=True)
            found = [_apply(ctx, t, value, list(args)) for args in rows]
        known[value] = found
    else:
        args = [ctx.scalar(arg) for arg in value.args]
        known[value] = _apply(ctx, ctx.target(rank, 1), value, args)


# Comparisons, and what they are with the operands exchanged.
FLIPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
_FAR = 1 << 20  # further away than any lane


def _position_test(ctx: Context, t: InsertPoint, value: Value) -> list[str] | None:
    """`start + lane < bound` as a test of 32-bit lane numbers against `bound - start`; or None.

    Masks of padding are such tests, and vectors of 64-bit numbers are dear.
    """
    op, (position, bound) = value.op, value.args
    if ctx.facts[bound][1]:
        op, position, bound = FLIPPED[op], bound, position
    if position.op != "index" or ctx.facts[bound][1] or ctx.copy_axis is not None:
        return None
    varying, uniform = split_lanes(ctx, groups(ctx, position.attr))
    if [mono for mono, _ in varying] != [(ctx.lane,)] or varying[0][1] != 1:
        return None
    start, limit = scalar_sum(ctx, [*varying, *uniform]), ctx.scalar(bound)
    level = t.level
    kind, numbers = vector("i32", ctx.lanes), numbered("i32", range(ctx.lanes))
    op = {"eq": "eq", "ne": "ne"}.get(op, "s" + op)
    # places that are near need no limits to be told apart in 32 bits
    places = [x.attr if x.op in ("const", "index") else _FAR for x in (position, bound)]
    is_near = all(known_lt(x, _FAR) and known_lt(-_FAR, x) for x in places)
    found = []
    for copy in range(ctx.copies):
        left = level.op(f"sub i64 {limit}, {start}")
        if copy:
            left = level.op(f"sub i64 {left}, {copy * ctx.lanes}")
        if not is_near:
            left = level.extreme("smin", left, str(_FAR))
            left = level.extreme("smax", left, str(-_FAR))
        left = ctx.splat(level.op(f"trunc i64 {left} to i32"), "i32", ctx.facts[value][0])
        found.append(level.op(f"icmp {op} {kind} {numbers}, {left}"))
    return found


def _apply(ctx: Context, t: InsertPoint, value: Value, args: list[str]) -> str:
    if value.op == "where":
        return t.select(args[0], HELD[value.dtype], args[1], args[2])
    source = value.args[0].dtype
    is_rough = value in ctx.rough
    if value.op == "cast":
        return args[0] if is_rough else emit_cast(t, source, value.dtype, args[0])
    if value.op == "bitcast":
        return emit_bitcast(t, source, value.dtype, args[0])
    if value.op == "check":
        return _check(ctx, t, value, args[0])
    if is_rough:
        return (rough_tanh if value.op == "tanh" else rough_quotient)(t, *args)
    given = ctx.numbers.get(value.args[-1])
    is_inverse = given is not None and given.is_inverse
    return emit(t, "mul" if is_inverse else value.op, source, args)


def _check(ctx: Context, t: InsertPoint, value: Value, x: str) -> str:
    """x in [0, size), wrapped into it if asked; outside, the status is set and 0 taken.

    Of several that are outside the first is told, as eager tells it.
    """
    size, message, wraps = value.attr
    kind, op = t.kind(torch.int64), t.op
    bound = scalar_size(ctx, size) if not isinstance(size, int) else ctx.param("check", size)
    if t.lanes > 1:
        bound = ctx.splat(bound, "i64", 0)
    zero = literal(0, torch.int64, t.lanes)
    index = x
    if wraps:
        negative = op(f"icmp slt {kind} {x}, {zero}")
        index = t.select(negative, "i64", op(f"add {kind} {x}, {bound}"), x)
    outside = op(f"icmp uge {kind} {index}, {bound}")
    report, refused = outside, x
    if t.lanes > 1:
        mask = vector("i1", t.lanes)
        if ctx.mask is not None:
            report = op(f"and {mask} {outside}, {ctx.mask}")
        bits = op(f"bitcast {mask} {report} to i{t.lanes}")
        bits = op(f"zext i{t.lanes} {bits} to i64")
        first = t.level.call("i64", "llvm.cttz.i64", ("i64", bits), ("i1", "false"))
        refused = op(f"extractelement {kind} {x}, i64 {first}")
        report = op(f"icmp ne i64 {bits}, 0")
    ctx.report(t.level, report, refused, message)
    return t.select(outside, "i64", zero, index)


# ---------------------------------------------------------------------------- body


Parts = dict[Acc, list[list[str]]]  # per accumulator and copy: the registers of its parts


class Body:
    """Writes statements. `orders`: by phase, its values with operands first.

    `masks_sums`: the lanes run along a reduced axis, so those beyond its end must change nothing.
    """

    def __init__(
        self, ctx: Context, orders: Mapping[Phase, Sequence[Value]], masks_sums: bool
    ) -> None:
        self.ctx, self.writer = ctx, ctx.writer
        self.orders, self.masks_sums = orders, masks_sums

    def order(self, phase: Phase) -> Sequence[Value]:
        return self.orders[phase]

    def sum_mask(self) -> str | None:
        """The lanes that change accumulators, if not all do."""
        return self.ctx.mask if self.masks_sums else None

    def is_scan(self, phase: Phase) -> bool:
        return is_scan(phase, self.order(phase))

    def scans_together(self) -> bool:
        """Whether what is computed at once are elements that a scan takes one after the other."""
        return self.masks_sums and self.ctx.lanes > 1

    def set_stage(self, lane: Symbol | None, stage: Stage, mask: str | None) -> None:
        ctx = self.ctx
        ctx.lane = lane if stage.lanes > 1 else None
        ctx.copy_axis = ctx.tail = None
        ctx.lanes, ctx.copies, ctx.mask = stage.lanes, stage.copies, mask

    def open_lanes(self, lane: Symbol, stage: Stage, stop: str, i: str, rank: int) -> None:
        """The top level becomes the body of a loop along the lanes."""
        self.ctx.open_axis(lane, i, rank)
        mask = self.tail_mask(stage.lanes, i, stop) if stage.masked else None
        self.set_stage(lane, stage, mask)

    def tail_mask(self, lanes: int, i: str, stop: str) -> str:
        op = self.writer.top.op
        left = op(f"trunc i64 {op(f'sub i64 {stop}, {i}')} to i32")
        limit = self.writer.top.splat("i32", left, lanes)
        return op(f"icmp ugt {vector('i32', lanes)} {limit}, {numbered('i32', range(lanes))}")

    def statements(self, phase: Phase, parts: Parts, hows: dict[Acc, Carried], rank: int) -> Parts:
        """The body of a phase in the top level; accumulators before and after it."""
        ctx = self.ctx
        scans = self.is_scan(phase)
        if scans:
            for acc in hows:
                ctx.acc_facts[acc] = (rank, ctx.lanes > 1)
                before = [result(part) for part in parts[acc]]
                ctx.carried[acc] = before if ctx.lanes > 1 else before[0]
        ctx.learn(self.order(phase))
        parts = dict(parts)
        pending: list[Store] = []
        waiting = list(reversed(phase.body))
        needed = {s: set(s.operands) for s in phase.body}
        done: set[Value] = set()
        for value in self.order(phase):
            if value.op == "load" and any(s.buffer is value.attr[0] for s in pending):
                # loads of the caller's tensors are of what was there before the kernel
                if value.attr[0].role != "input":
                    last = [s for s in pending if s.buffer.role == "input"]
                    self._flush([s for s in pending if s.buffer.role != "input"], rank)
                    pending = last
            emit_value(ctx, value)
            done.add(value)
            while waiting and needed[waiting[-1]] <= done:
                statement = waiting.pop()
                if isinstance(statement, Store):
                    pending.append(statement)
                    continue
                acc, how = statement.acc, hows[statement.acc]
                if ctx.copy_axis is not None:
                    parts[acc] = self._running(statement, parts[acc], how, rank)
                    continue
                if scans and self.scans_together():
                    parts[acc] = self._scan(statement, parts[acc], how, rank)
                    continue
                parts[acc] = self._accumulate(statement, parts[acc], how, rank)
                if scans:
                    self.publish(how, parts[acc])
        self._flush(pending, rank)
        return parts

    def _flush(self, pending: list[Store], rank: int) -> None:
        for store in pending:
            store_value(self.ctx, store, rank)

    def _scan(
        self, statement: Accumulate, old: list[list[str]], how: Carried, rank: int
    ) -> list[list[str]]:
        """What the lanes have accumulated one after the other; the last one's, in all lanes."""
        t, lanes = self.ctx.target(rank, self.ctx.lanes), self.ctx.lanes
        found = how.merge(t, old[0], self._so_far(statement, how, t))
        self.publish(how, [found])
        rows = zip(how.kinds(lanes), found, strict=True)
        return [[t.level.shuffle(kind, x, "poison", [lanes - 1] * lanes) for kind, x in rows]]

    def _so_far(self, statement: Accumulate, how: Carried, t: InsertPoint) -> list[str]:
        """Of each lane, its element and those of the lanes before it as one.

        In each step every lane takes in the one so far before it, which has taken in as many.

        source   Hillis and Steele, Data parallel algorithms, 1986
        """
        ctx, lanes, starts = self.ctx, self.ctx.lanes, how.start(self.ctx.lanes)
        found = [ctx.vectors(v)[0] if lanes > 1 else ctx.scalar(v) for v in statement.operands]
        if (mask := self.sum_mask()) is not None:
            places = zip(how.dtypes, found, starts, strict=True)
            found = [t.select(mask, HELD[dtype], x, first) for dtype, x, first in places]
        kinds, step = how.kinds(lanes), 1
        while step < lanes:
            picks = [*[lanes] * step, *range(lanes - step)]
            rows = zip(kinds, found, starts, strict=True)
            moved = [t.level.shuffle(kind, x, first, picks) for kind, x, first in rows]
            found = how.merge(t, moved, found)
            step *= 2
        return found

    def _running(
        self, statement: Accumulate, old: list[list[str]], how: Carried, rank: int
    ) -> list[list[str]]:
        """What has been accumulated with each copy of a tile, which are one after the other."""
        ctx, found = self.ctx, old
        t = ctx.target(rank, ctx.lanes)
        for new in zip(*map(ctx.vectors, statement.operands), strict=True):
            found = [*found, accumulate(ctx, t, how, found[-1], list(new), None)]
        self.publish(how, found[1:])
        return found[-1:]

    def _accumulate(
        self, statement: Accumulate, old: list[list[str]], how: Carried, rank: int
    ) -> list[list[str]]:
        ctx = self.ctx
        t = ctx.target(rank, ctx.lanes)
        mask = self.sum_mask()
        is_fused = fuses(how, statement.value, ctx.machine)
        values = list(statement.value.args) if is_fused else statement.operands
        if ctx.lanes > 1:
            columns = [ctx.vectors(value) for value in values]
        else:
            columns = [[ctx.scalar(value)] for value in values]
        if is_fused:
            x, y = columns
            sums = [emit(t, "fma", how.dtype, [*xy, z]) for *xy, (z,) in zip(x, y, old)]
            if mask is not None:
                kind = HELD[how.dtype]
                sums = [t.select(mask, kind, new, z) for new, (z,) in zip(sums, old)]
            return [[new] for new in sums]
        return [
            accumulate(ctx, t, how, old[copy], [column[copy] for column in columns], mask)
            for copy in range(ctx.copies)
        ]

    @contextlib.contextmanager
    def carry(
        self, start: str, stop: str, step: int, parts: Parts, kinds: Mapping[Acc, list[str]]
    ) -> Iterator[tuple[str, Parts, Parts]]:
        """Writer.loop with accumulators carried round; `kinds` are the types of one copy."""
        types = [kind for acc, copies in parts.items() for _ in copies for kind in kinds[acc]]
        carried, found = list(zip(types, _flat(parts), strict=True)), Parts()
        with self.writer.loop(start, stop, step, carried) as (i, now, after):
            yield i, _shaped(parts, now), found
            after += _flat(found)
        found.update(_shaped(parts, after))

    @contextlib.contextmanager
    def blocks(
        self, stop: str, length: int, parts: Parts, kinds: Mapping[Acc, list[str]]
    ) -> Iterator[tuple[str, str, Parts, Parts]]:
        """The same over [0, stop) in segments of at most `length`: where each begins and ends."""
        with self.carry("0", stop, length, parts, kinds) as (first, now, found):
            top = self.writer.top
            after = top.op(f"add nsw i64 {first}, {length}")
            yield first, top.extreme("smin", after, stop), now, found

    def publish(self, how: Carried, parts: list[list[str]]) -> None:
        """What reading the accumulator yields from here on."""
        names = [*map(result, parts)]
        self.ctx.acc_names[how.acc] = names if self.ctx.lanes > 1 else names[0]


def _flat(parts: Parts) -> list[str]:
    return [name for copies in parts.values() for part in copies for name in part]


def _shaped(like: Parts, names: list[str]) -> Parts:
    left = iter(names)
    return {acc: [[next(left) for _ in part] for part in copies] for acc, copies in like.items()}


# ---------------------------------------------------------------------------- reductions
# Accumulators: what is carried round the loops of a reduction.
#
# A floating-point sum is kept in two levels, so that its error does not grow with its length: the
# inner loop sums blocks from zero, and finished blocks are added with the rounding error of each
# addition kept beside them (Knuth's two-sum). Other reductions are carried as they are.


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

    def widths(self, lanes: int) -> list[int]:
        """Lanes of each part."""
        return [lanes] * len(self.dtypes)

    def kinds(self, lanes: int) -> list[str]:
        rows = zip(self.dtypes, self.widths(lanes), strict=True)
        return [vector(HELD[dtype], width) for dtype, width in rows]

    def start(self, lanes: int) -> list[str]:
        first = literal(identity(self.acc.op, self.dtype), self.dtype, lanes)
        return [first, literal(0, torch.int64, lanes)] if self.is_arg else [first]

    def merge(self, t: InsertPoint, a: list[str], b: list[str]) -> list[str]:
        """Two accumulators of disjoint elements as one; among equals the lower index."""
        if not self.is_arg:
            return [combine(t, self, a[0], b[0])]
        mask = vector("i1", t.lanes)
        better = _better(t, self, a[0], b[0])
        worse = _better(t, self, b[0], a[0])
        either = t.op(f"or {mask} {better}, {worse}")
        equal = t.op(f"xor {mask} {either}, {literal(True, torch.bool, t.lanes)}")
        lower = compare(t, "lt", torch.int64, b[1], a[1])
        tie = t.op(f"and {mask} {equal}, {lower}")
        takes_b = t.op(f"or {mask} {better}, {tie}")
        rows = zip(self.dtypes, a, b, strict=True)
        return [t.select(takes_b, HELD[dtype], y, x) for dtype, x, y in rows]

    def outer_kinds(self, lanes: int) -> list[str]:
        """Of what is carried outside the innermost loop: sum and error, or the parts."""
        return self.kinds(lanes) * 2 if self.two_level else self.kinds(lanes)

    def outer_start(self, lanes: int) -> list[str]:
        return self.start(lanes) * 2 if self.two_level else self.start(lanes)

    def round(self, lanes: int) -> tuple[list[str], list[str]]:
        """Types and first values of what goes round a loop of one thread."""
        return self.kinds(lanes), self.start(lanes)


class Accumulators(dict[Acc, Carried]):
    """How each accumulator of a phase is kept."""

    def kinds(self, lanes: int) -> dict[Acc, list[str]]:
        return {acc: how.kinds(lanes) for acc, how in self.items()}

    def start(self, lanes: int) -> Parts:
        """What they are before any element, one copy of each."""
        return {acc: [how.start(lanes)] for acc, how in self.items()}

    def within(self, lanes: int, outer: Parts) -> Parts:
        """What the innermost loop begins with: sums of two levels begin anew."""
        return {
            acc: [how.start(lanes) for _ in outer[acc]] if how.two_level else outer[acc]
            for acc, how in self.items()
        }

    def joined(
        self, t: InsertPoint, outer: Parts, local: Parts
    ) -> Iterator[tuple[Acc, list[list[str]]]]:
        """What it has found, with what was before it."""
        for acc, how in self.items():
            pairs = zip(outer[acc], local[acc], strict=True)
            yield acc, [two_sum(t, how, x, y[0]) if how.two_level else y for x, y in pairs]


def carried(statement: Accumulate, two_level: bool) -> Carried:
    acc = statement.acc
    sums = two_level and acc.op == "sum" and is_float(statement.value.dtype)
    return Carried(acc, statement.value.dtype, sums)


def accumulate(
    ctx: Context, t: InsertPoint, how: Carried, old: list[str], new: list[str], mask: str | None
) -> list[str]:
    """One more element per lane; masked lanes take the identity."""
    if mask is not None:
        value = t.select(mask, HELD[how.dtype], new[0], how.start(t.lanes)[0])
        new = [value, *new[1:]]
    if how.acc.op == "fold":
        return new
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


def combine(t: InsertPoint, how: Carried, old: str, new: str) -> str:
    return emit(t, REDUCTIONS[how.acc.op], how.dtype, [new, old])


def _better(t: InsertPoint, how: Carried, old: str, new: str) -> str:
    """True where new goes before old: strictly better, or the first NaN."""
    op = "gt" if how.acc.op == "argmax" else "lt"
    if not is_float(how.dtype):
        return compare(t, op, how.dtype, new, old)
    kind, mask = t.kind(how.dtype), vector("i1", t.lanes)
    wins = t.op(f"fcmp u{op} {kind} {new}, {old}")
    number_before = t.op(f"fcmp ord {kind} {old}, {old}")
    return t.op(f"and {mask} {wins}, {number_before}")


def merge_all(t: InsertPoint, how: Carried, parts: list[list[str]]) -> list[str]:
    """Pairwise, so that the chain is short."""
    while len(parts) > 1:
        rest = parts[len(parts) & ~1 :]
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [how.merge(t, a, b) for a, b in pairs] + rest
    return parts[0]


def two_sum(t: InsertPoint, how: Carried, outer: list[str], block: str) -> list[str]:
    """(sum, error) with a block's sum added; exact but for the rounding of the error."""
    kind, op = t.kind(how.dtype), t.op
    total, error = outer
    new = op(f"fadd {kind} {total}, {block}")
    virtual = op(f"fsub {kind} {new}, {total}")
    left = op(f"fsub {kind} {total}, {op(f'fsub {kind} {new}, {virtual}')}")
    right = op(f"fsub {kind} {block}, {virtual}")
    lost = op(f"fadd {kind} {left}, {right}")
    return [new, op(f"fadd {kind} {error}, {lost}")]


def settle(t: InsertPoint, how: Carried, outer: list[str]) -> list[str]:
    """The result of what was carried outside: a sum with its error, NaN beside infinities."""
    if not how.two_level:
        return outer
    kind = t.kind(how.dtype)
    total, error = outer
    finite = t.op(f"fcmp ord {kind} {error}, {error}")
    error = t.select(finite, HELD[how.dtype], error, literal(0, how.dtype, t.lanes))
    return [t.op(f"fadd {kind} {total}, {error}")]


def across(t: InsertPoint, how: Carried, parts: list[str]) -> list[str]:
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
        parts = how.merge(t.of(half), *halves)
        lanes = half
    return parts


def into_first_lane(t: InsertPoint, how: Carried, parts: list[str]) -> list[str]:
    """Scalars as a vector whose other lanes change nothing."""
    found = []
    scalar_start = Carried(how.acc, how.dtype, False).start(t.lanes)
    for dtype, base, part in zip(how.dtypes, scalar_start, parts, strict=True):
        kind = vector(HELD[dtype], t.lanes)
        found.append(t.op(f"insertelement {kind} {base}, {HELD[dtype]} {part}, i64 0"))
    return found


def result(parts: list[str]) -> str:
    """The part that reading an accumulator yields."""
    return parts[-1]


# ---------------------------------------------------------------------------- loops
# The inner loops of a phase, with the accumulators that they carry round.
#
# Lanes run either across the reductions, every lane one of its own, or along the last inner axis:
# then all lanes become one number at the end.


# Additions into one accumulator before its sum goes to the second level. Along lanes, many
# accumulators share the error; across them, each is on its own.
SUM_ALONG, SUM_ACROSS = 128, 16


def accumulators(phase: Phase, two_level: bool) -> Accumulators:
    """Those of a phase; sums in two levels if so asked."""
    return Accumulators({s.acc: carried(s, two_level) for s in phase.accumulates})


class _Nest:
    """The loops of one phase with what they carry."""

    is_own = False  # whether `_inside` writes the last loop itself

    def __init__(self, body: Body, phase: Phase, lanes: int) -> None:
        self.body, self.phase, self.lanes = body, phase, lanes
        self.ctx, self.writer = body.ctx, body.writer
        self.hows = accumulators(phase, not body.is_scan(phase) and not is_short(phase))
        self.two_level = any(how.two_level for how in self.hows.values())
        self.outer_kinds = {acc: how.outer_kinds(lanes) for acc, how in self.hows.items()}

    def _nest(self, position: int, parts: Parts) -> Parts:
        inner = self.phase.inner
        if position == len(inner) - self.is_own:
            return self._inside(parts)
        size = self.ctx.size_of(inner[position])
        with self.body.carry("0", size, 1, parts, self.outer_kinds) as (i, now, found):
            self.ctx.open_axis(inner[position], i, self.ctx.base_rank + 1 + position)
            found |= self._nest(position + 1, now)
        return found

    def _inside(self, parts: Parts) -> Parts:
        raise NotImplementedError

    def _loop(
        self, start: str, stop: str, step: int, lanes: int, parts: Parts, open_: Open
    ) -> Parts:
        """The innermost loop: `open_(i, rank)` makes its body the top level."""
        rank = self.ctx.base_rank + len(self.phase.inner)
        kinds = self.hows.kinds(lanes)
        with self.body.carry(start, stop, step, parts, kinds) as (i, now, found):
            open_(i, rank)
            found |= self.body.statements(self.phase, now, self.hows, rank)
        return found


Open = Callable[[str, int], None]


class Across(_Nest):
    """Inner loops are scalar; each lane and copy accumulates on its own."""

    def __init__(self, body: Body, phase: Phase) -> None:
        super().__init__(body, phase, body.ctx.lanes)
        self.is_own = self.two_level

    def emit(self) -> None:
        ctx = self.ctx
        start = {a: [how.outer_start(self.lanes)] * ctx.copies for a, how in self.hows.items()}
        final = self._nest(0, start)
        t = ctx.top(self.lanes)
        for acc, how in self.hows.items():
            ctx.acc_facts[acc] = (ctx.base_rank, self.lanes > 1)
            self.body.publish(how, [settle(t, how, part) for part in final[acc]])

    def _inside(self, parts: Parts) -> Parts:
        inner = self.phase.inner
        if not self.two_level:
            rank = self.ctx.base_rank + len(inner)
            return self.body.statements(self.phase, parts, self.hows, rank)
        size = self.ctx.size_of(inner[-1])
        blocks = self.body.blocks(size, SUM_ACROSS, parts, self.outer_kinds)
        with blocks as (first, last, now, found):
            t, local = self.ctx.top(self.lanes), self.hows.within(self.lanes, now)
            open_ = functools.partial(self.ctx.open_axis, inner[-1])
            local = self._loop(first, last, 1, self.lanes, local, open_)
            found |= self.hows.joined(t, now, local)
        return found


class Along(_Nest):
    """Vectors run along the last inner axis; all lanes and copies become one at the end.

    Outside the innermost loop a two-level sum is one vector of sums and one of errors; other
    accumulators keep all their copies.
    """

    is_own = True

    def __init__(self, body: Body, phase: Phase) -> None:
        self.lane = phase.inner[-1]
        of = [phase], [body.order(phase)]
        lanes = width_of(*of, body.ctx.machine)
        self.stages = choose_stages(*of, self.lane, lanes, body.ctx.machine)
        super().__init__(body, phase, self.stages[0].lanes)

    def emit(self) -> None:
        ctx = self.ctx
        start = {
            acc: [how.outer_start(self.lanes)] * (1 if how.two_level else self.stages[0].copies)
            for acc, how in self.hows.items()
        }
        final = self._nest(0, start)
        t = ctx.top(self.lanes)
        for acc, how in self.hows.items():
            whole = merge_all(t, how, final[acc])
            ctx.acc_facts[acc] = (ctx.base_rank, False)
            ctx.acc_names[acc] = result(across(t, how, settle(t, how, whole)))

    def _inside(self, parts: Parts) -> Parts:
        size, start = self.ctx.size_of(self.lane), "0"
        for stage in self.stages:
            stop = (
                size
                if stage.masked or stage.lanes == 1
                else whole_vectors(self.ctx, size, stage.width)
            )
            if stop == start:
                continue
            if self.two_level and stage is self.stages[0]:
                length = SUM_ALONG * stage.width
                blocks = self.body.blocks(stop, length, parts, self.outer_kinds)
                with blocks as (first, last, now, parts):
                    parts |= self._segment(stage, first, last, now)
            else:
                parts = self._segment(stage, start, stop, parts, size)
            start = stop
        return parts

    def _segment(self, stage: Stage, start: str, stop: str, outer: Parts, end: str = "") -> Parts:
        """One loop along the lanes; two-level sums start from zero, then join the outer ones.

        end   of the axis, if that is not `stop`
        """
        fresh = stage.lanes != self.lanes  # scalars can't continue vectors
        local = {
            acc: [how.start(stage.lanes) for _ in range(stage.copies)]
            if how.two_level or fresh
            else outer[acc][: stage.copies]
            for acc, how in self.hows.items()
        }
        open_ = functools.partial(self.body.open_lanes, self.lane, stage, end or stop)
        local = self._loop(start, stop, stage.width, stage.lanes, local, open_)
        small, wide = self.ctx.top(stage.lanes), self.ctx.top(self.lanes)
        merged: Parts = {}
        for acc, how in self.hows.items():
            if not how.two_level and not fresh:
                merged[acc] = local[acc] + outer[acc][stage.copies :]
                continue
            whole = merge_all(small, how, local[acc])
            if fresh:
                whole = into_first_lane(wide, how, whole)
            if how.two_level:
                merged[acc] = [two_sum(wide, how, outer[acc][0], whole[0])]
            else:
                merged[acc] = [how.merge(wide, outer[acc][0], whole), *outer[acc][1:]]
        return merged


def whole_vectors(ctx: Context, size: str, width: int) -> str:
    """The part of an axis that whole vectors cover."""
    if size.isdigit():
        return str(int(size) & -width)
    entry = ctx.ranked[0]
    return entry.once(("whole", size, width), lambda: entry.op(f"and i64 {size}, {-width}"))


class Scan(Along):
    """Vectors run along a scanned axis; what is carried round is one number, in all lanes."""

    def __init__(self, body: Body, phase: Phase) -> None:
        super().__init__(body, phase)
        stages = (s._replace(copies=1, lanes=min(s.lanes, self.lanes)) for s in self.stages)
        self.stages = list(dict.fromkeys(stages))
        self.outer_kinds = {acc: how.outer_kinds(self.lanes) for acc, how in self.hows.items()}

    def emit(self) -> None:
        self._nest(0, self.hows.start(self.lanes))

    def _segment(self, stage: Stage, start: str, stop: str, outer: Parts, end: str = "") -> Parts:
        open_ = functools.partial(self.body.open_lanes, self.lane, stage, end or stop)
        is_narrow = stage.lanes != self.lanes
        local = dict(outer)
        for acc, how in self.hows.items() if is_narrow else ():
            wide = zip(how.kinds(self.lanes), outer[acc][0], strict=True)
            op = self.writer.top.op
            local[acc] = [[op(f"extractelement {kind} {total}, i64 0") for kind, total in wide]]
        local = self._loop(start, stop, stage.width, stage.lanes, local, open_)
        for acc, how in self.hows.items() if is_narrow else ():
            narrow = zip(how.kinds(1), local[acc][0], strict=True)
            splat = self.writer.top.splat
            local[acc] = [[splat(kind, total, self.lanes) for kind, total in narrow]]
        return local
