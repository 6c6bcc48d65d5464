"""The body of a phase: its statements in the innermost open loop, for one stage of vectors, and
what is carried round the loops of a reduction.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusee.codegen.llvm.math import rough_quotient
from fusee.codegen.llvm.memory import (
    NEAR,
    groups,
    load_scalar,
    load_vector,
    scalar_size,
    scalar_sum,
    split_lanes,
    store_scalar,
    store_vector,
    vector_sum,
)
from fusee.codegen.llvm.ops import STATIC_SIZE, Context, compare, emit, emit_bitcast, emit_cast
from fusee.loops import (
    REDUCTIONS,
    SCALAR_OPS,
    Acc,
    Accumulate,
    Kernel,
    Phase,
    Store,
    Value,
    identity,
    index_of,
)
from fusee.loops.schedule import is_scan
from fusee.runtime.llvm_text import (
    BITS,
    HELD,
    InsertPoint,
    Machine,
    is_float,
    literal,
    memory_type,
    numbered,
    vector,
)
from fusee.sym import Size, Symbol, coefficient, count_points, symbols

# ---------------------------------------------------------------------------- tile
# Tiles: the lanes run along one axis and the copies along another, where accesses disagree.
#
# A kernel that loads contiguously along i and stores contiguously along j works on squares of i and
# j. A load along i yields, turned in registers, the vectors along j of all rows of the square; a
# store along i turns them back. Where i is shorter than a vector (points of three coordinates), a
# tile is all of i: its rows lie beside one another. Kernels with masks, indirect indices or inner
# loops go without.

# Squares beside one another in a strip: two of 8 float32 are one line of the cache.
SQUARES = 2


@dataclass(frozen=True)
class Tile:
    """Copies run along `axis`: as many as there are lanes, or all of an axis that is shorter."""

    axis: Symbol
    lanes: int
    copies: int

    @property
    def is_square(self) -> bool:
        return self.copies == self.lanes

    @property
    def strip(self) -> int:
        return self.copies * (SQUARES if self.is_square else 1)


def choose_vectors(
    kernel: Kernel, orders: Sequence[Sequence[Value]], lane: Symbol | None, machine: Machine
) -> tuple[Symbol | None, list[Stage], Tile | None]:
    """The axis that vectors run along, how, and in which tile.

    It is `lane`, or another one with a tile of all of `lane`, if that is short.
    """
    if lane is None:
        return None, [], None
    stages = choose_stages(kernel.phases, orders, lane, machine)
    lanes = stages[0].lanes
    others = [] if _fills(lane, lanes) else [axis for axis in kernel.outer if axis != lane]
    for axis in (*others, lane):
        tile = _tile(kernel, orders, axis, lanes, machine)
        if tile is None or lane not in (axis, tile.axis):
            continue
        if is_light(orders):  # what tiles leave is no slower one by one, and much less code
            stages = [Stage(1, 1)]
        elif axis != lane:
            stages = choose_stages(kernel.phases, orders, axis, machine)
        return axis, stages, tile
    return lane, stages, None


def _tile(
    kernel: Kernel, orders: Sequence[Sequence[Value]], lane: Symbol, lanes: int, machine: Machine
) -> Tile | None:
    """The tile that serves a kernel whose vectors run along `lane`, or None."""
    if kernel.ordered or lanes < 4 or any(p.inner for p in kernel.phases):
        return None
    indices: list[Size] = []
    for statement in kernel.statements():
        if isinstance(statement, Accumulate):
            return None
        indices.append(statement.index)
    stored = {s.buffer for s in kernel.statements() if isinstance(s, Store)}
    for value in (value for order in orders for value in order):
        if value.op == "load":
            if value.args or value.attr[0] in stored:
                return None
            indices.append(value.attr[1])
        elif value.op == "check" or lane in symbols(index_of(value)):
            return None
    if any(s.payload is not None for index in indices for s in symbols(index)):
        return None
    lanes = min(lanes, 16 if "avx512f" in machine.features else 8)
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
        is_near = all(_is_near(index, axis, lane) for index in indices)
        if is_near and isinstance(axis.hi, int) and axis.hi < lanes:
            return Tile(axis, lanes, axis.hi)
    return None


def _fills(axis: Symbol, lanes: int) -> bool:
    """Whether an axis is as long as a vector, or may be."""
    return not isinstance(axis.hi, int) or axis.hi >= lanes


def _is_near(index: Size, axis: Symbol, lane: Symbol) -> bool:
    """Whether an access of a tile of all of `axis` is made of whole vectors."""
    along, across = coefficient(index, lane), coefficient(index, axis)
    if along is None or across is None:
        return False
    is_near = isinstance(along[0], int) and 0 <= along[0] <= NEAR
    return is_near or (along[0] == axis.hi and across[0] == 1)


def _turns(indices: Sequence[Size], kernel: Kernel, axis: Symbol, lane: Symbol) -> bool:
    """True if an access is contiguous along `axis`, strided along `lane`; all must be linear."""
    found = False
    own = set(kernel.outer)
    for index in indices:
        along, across = coefficient(index, lane), coefficient(index, axis)
        if along is None or across is None:
            return False
        if own & {*symbols(along[0]), *symbols(across[0])}:
            return False
        found |= across[0] == 1 and along[0] not in (0, 1)
    return found


# ---------------------------------------------------------------------------- values
# Values of the loop IR as instructions, each at the rank where it last changes.


def emit_value(ctx: Context, value: Value) -> None:
    """Write the value's instructions unless its level has them already. Operands come first."""
    rank, varies = ctx.facts[id(value)]
    known = ctx.ranked[rank].known
    if id(value) in known:
        return
    if not varies:
        known[id(value)] = _scalar(ctx, value, rank)
    elif value.op == "load":
        known[id(value)] = load_vector(ctx, value)
    elif value.op == "index":
        known[id(value)] = vector_sum(ctx, groups(ctx, value.attr), rank)
    else:
        known[id(value)] = _vectors(ctx, value, rank)


def _scalar(ctx: Context, value: Value, rank: int) -> str:
    if value.op == "const":
        return ctx.number(value)
    if value.op == "acc":
        found = ctx.acc_names[value.attr]
        assert isinstance(found, str)
        return found
    if value.op == "load":
        return load_scalar(ctx, value)
    if value.op == "index":
        return scalar_size(ctx, value.attr)
    args = [ctx.scalar(arg) for arg in value.args]
    return _apply(ctx, ctx.target(rank, 1), value, args)


def _vectors(ctx: Context, value: Value, rank: int) -> list[str]:
    if value.op == "acc":
        found = ctx.acc_names[value.attr]
        assert isinstance(found, list)
        return found
    t = ctx.target(rank, ctx.lanes)
    if value.op in FLIPPED and value.args[0].dtype is torch.int64:
        test = _position_test(ctx, t, value)
        if test is not None:
            return test
    columns = [ctx.vectors(arg) for arg in value.args]
    return [_apply(ctx, t, value, list(args)) for args in zip(*columns, strict=True)]


# Comparisons, and what they are with the operands exchanged.
FLIPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
_FAR = 1 << 20  # further away than any lane


def _position_test(ctx: Context, t: InsertPoint, value: Value) -> list[str] | None:
    """`start + lane < bound` as a test of 32-bit lane numbers against `bound - start`; or None.

    Masks of padding are such tests, and vectors of 64-bit numbers are dear.
    """
    op, (position, bound) = value.op, value.args
    if ctx.facts[id(bound)][1]:
        op, position, bound = FLIPPED[op], bound, position
    if position.op != "index" or ctx.facts[id(bound)][1] or ctx.copy_axis is not None:
        return None
    varying, uniform = split_lanes(ctx, position.attr)
    if [mono for mono, _ in varying] != [(ctx.lane,)] or varying[0][1] != 1:
        return None
    start, limit = scalar_sum(ctx, [*varying, *uniform]), ctx.scalar(bound)
    level, scalar = t.level, InsertPoint(t.level, ctx.machine, 1)
    kind, numbers = vector("i32", ctx.lanes), numbered("i32", range(ctx.lanes))
    op = {"eq": "eq", "ne": "ne"}.get(op, "s" + op)
    found = []
    for copy in range(ctx.copies):
        left = level.op(f"sub i64 {limit}, {start}")
        if copy:
            left = level.op(f"sub i64 {left}, {copy * ctx.lanes}")
        left = scalar.intrinsic("smin", "i64", left, str(_FAR))
        left = scalar.intrinsic("smax", "i64", left, str(-_FAR))
        left = ctx.splat(level.op(f"trunc i64 {left} to i32"), "i32", ctx.facts[id(value)][0])
        found.append(level.op(f"icmp {op} {kind} {numbers}, {left}"))
    return found


def _apply(ctx: Context, t: InsertPoint, value: Value, args: list[str]) -> str:
    if value.op == "where":
        return t.select(args[0], HELD[value.dtype], args[1], args[2])
    source = value.args[0].dtype
    if value.op == "cast":
        return emit_cast(t, source, value.dtype, args[0])
    if value.op == "bitcast":
        return emit_bitcast(t, source, value.dtype, args[0])
    if value.op == "check":
        return _check(ctx, t, value, args[0])
    if id(value) in ctx.rough:
        return rough_quotient(t, *args)
    given = ctx.numbers.get(id(value.args[-1]))
    is_inverse = given is not None and given.is_inverse
    return emit(t, "mul" if is_inverse else value.op, source, args)


def _check(ctx: Context, t: InsertPoint, value: Value, x: str) -> str:
    """x in [0, size), wrapped into it if asked; outside, the status is set and 0 taken.

    Of several that are outside the first is told, as eager tells it.
    """
    size, message, wraps = value.attr
    kind, op = t.kind(torch.int64), t.level.op
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
    """Writes statements. `orders`: by id of a phase, its values with operands first.

    `masks_sums`: the lanes run along a reduced axis, so those beyond its end must change nothing.
    """

    def __init__(
        self, ctx: Context, orders: Mapping[int, Sequence[Value]], masks_sums: bool
    ) -> None:
        self.ctx, self.writer = ctx, ctx.writer
        self.orders, self.masks_sums = orders, masks_sums

    def order(self, phase: Phase) -> Sequence[Value]:
        return self.orders[id(phase)]

    def sum_mask(self) -> str | None:
        """The lanes that change accumulators, if not all do."""
        return self.ctx.mask if self.masks_sums else None

    def is_scan(self, phase: Phase) -> bool:
        return is_scan(phase, self.order(phase))

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
        ctx.learn(self.order(phase))
        parts = dict(parts)
        pending: list[Store] = []
        waiting = list(reversed(phase.body))
        needed = {id(s): set(map(id, s.operands)) for s in phase.body}
        done: set[int] = set()
        for value in self.order(phase):
            if value.op == "load" and any(s.buffer is value.attr[0] for s in pending):
                # loads of the caller's tensors are of what was there before the kernel
                if value.attr[0].role != "input":
                    last = [s for s in pending if s.buffer.role == "input"]
                    self._flush([s for s in pending if s.buffer.role != "input"], rank)
                    pending = last
            emit_value(ctx, value)
            done.add(id(value))
            while waiting and needed[id(waiting[-1])] <= done:
                statement = waiting.pop()
                if isinstance(statement, Store):
                    pending.append(statement)
                    continue
                acc, how = statement.acc, hows[statement.acc]
                if ctx.copy_axis is not None:
                    parts[acc] = self._running(statement, parts[acc], how, rank)
                    continue
                if scans and self.masks_sums and ctx.lanes > 1:
                    parts[acc] = self._scan(statement, parts[acc], how, rank)
                    continue
                parts[acc] = self._accumulate(statement, parts[acc], how, rank)
                if scans:
                    self.publish(how, parts[acc])
        self._flush(pending, rank)
        return parts

    def _flush(self, pending: list[Store], rank: int) -> None:
        ctx = self.ctx
        for store in pending:
            varies = ctx.size_fact(store.index)[1] or ctx.facts[id(store.value)][1]
            (store_vector if varies or ctx.copy_axis is not None else store_scalar)(
                ctx, store, rank
            )

    def _scan(
        self, statement: Accumulate, old: list[list[str]], how: Carried, rank: int
    ) -> list[list[str]]:
        """What the lanes have accumulated one after the other; the last one's, in all lanes.

        In each step every lane takes in the one so far before it, which has taken in as many.

        source   Hillis and Steele, Data parallel algorithms, 1986
        """
        ctx = self.ctx
        t, lanes, starts = ctx.target(rank, ctx.lanes), ctx.lanes, how.start(ctx.lanes)
        given = [v for v in (statement.value, statement.which) if v is not None]
        found = [ctx.vectors(value)[0] for value in given]
        if ctx.mask is not None:
            places = zip(how.dtypes, found, starts, strict=True)
            found = [t.select(ctx.mask, HELD[dtype], x, first) for dtype, x, first in places]
        kinds, step = how.kinds(lanes), 1
        while step < lanes:
            picks = [*[lanes] * step, *range(lanes - step)]
            rows = zip(kinds, found, starts, strict=True)
            moved = [t.level.shuffle(kind, x, first, picks) for kind, x, first in rows]
            found = how.merge(t, moved, found)
            step *= 2
        found = how.merge(t, old[0], found)
        self.publish(how, [found])
        last = [lanes - 1] * lanes
        return [[t.level.shuffle(k, x, "poison", last) for k, x in zip(kinds, found, strict=True)]]

    def _running(
        self, statement: Accumulate, old: list[list[str]], how: Carried, rank: int
    ) -> list[list[str]]:
        """What has been accumulated with each copy of a tile, which are one after the other."""
        ctx, found = self.ctx, old
        t = ctx.target(rank, ctx.lanes)
        given = [v for v in (statement.value, statement.which) if v is not None]
        for new in zip(*map(ctx.vectors, given), strict=True):
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
        values = [statement.value] + ([] if statement.which is None else [statement.which])
        values = list(statement.value.args) if is_fused else values
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
            last = InsertPoint(top, self.ctx.machine, 1).intrinsic("smin", "i64", after, stop)
            yield first, last, now, found

    def publish(self, how: Carried, parts: list[list[str]]) -> None:
        """What reading the accumulator yields from here on."""
        names = [result(how, part) for part in parts]
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
        either = t.level.op(f"or {mask} {better}, {worse}")
        equal = t.level.op(f"xor {mask} {either}, {literal(True, torch.bool, t.lanes)}")
        lower = compare(t, "lt", torch.int64, b[1], a[1])
        tie = t.level.op(f"and {mask} {equal}, {lower}")
        takes_b = t.level.op(f"or {mask} {better}, {tie}")
        rows = zip(self.dtypes, a, b, strict=True)
        return [t.select(takes_b, HELD[dtype], y, x) for dtype, x, y in rows]

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
    ctx: Context, t: InsertPoint, how: Carried, old: list[str], new: list[str], mask: str | None
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


def combine(t: InsertPoint, how: Carried, old: str, new: str) -> str:
    op = REDUCTIONS[how.acc.op]
    if how.dtype is torch.bool:
        # numbers 0 and 1: a sum or maximum of them is an or
        op = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}.get(op, op)
    return emit(t, op, how.dtype, [new, old])


def _better(t: InsertPoint, how: Carried, old: str, new: str) -> str:
    """True where new goes before old: strictly better, or the first NaN."""
    op = "gt" if how.acc.op == "argmax" else "lt"
    if not is_float(how.dtype):
        return compare(t, op, how.dtype, new, old)
    kind, mask = t.kind(how.dtype), vector("i1", t.lanes)
    wins = t.level.op(f"fcmp u{op} {kind} {new}, {old}")
    number_before = t.level.op(f"fcmp ord {kind} {old}, {old}")
    return t.level.op(f"and {mask} {wins}, {number_before}")


def merge_all(t: InsertPoint, how: Carried, parts: list[list[str]]) -> list[str]:
    """Pairwise, so that the chain is short."""
    while len(parts) > 1:
        rest = parts[len(parts) & ~1 :]
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [how.merge(t, a, b) for a, b in pairs] + rest
    return parts[0]


def two_sum(t: InsertPoint, how: Carried, outer: list[str], block: str) -> list[str]:
    """(sum, error) with a block's sum added; exact but for the rounding of the error."""
    kind, op = t.kind(how.dtype), t.level.op
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
    finite = t.level.op(f"fcmp ord {kind} {error}, {error}")
    error = t.select(finite, HELD[how.dtype], error, literal(0, how.dtype, t.lanes))
    return [t.level.op(f"fadd {kind} {total}, {error}")]


def across(ctx: Context, t: InsertPoint, how: Carried, parts: list[str]) -> list[str]:
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
        parts = how.merge(InsertPoint(level, ctx.machine, half), *halves)
        lanes = half
    return parts


def into_first_lane(t: InsertPoint, how: Carried, parts: list[str]) -> list[str]:
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


def is_short(phase: Phase) -> bool:
    """True if all inner loops are short enough to keep their sizes in the text."""
    return all(isinstance(axis.hi, int) and axis.hi <= STATIC_SIZE for axis in phase.inner)


def choose_stages(
    phases: Sequence[Phase], orders: Sequence[Sequence[Value]], lane: Symbol, machine: Machine
) -> list[Stage]:
    """The loops along `lane`, one after the other."""
    widths: list[int] = []
    for phase, order in zip(phases, orders, strict=True):
        for value in order:
            if value.op in ("const", "check"):
                continue
            bits = max(BITS[HELD[value.dtype]], 8)
            widths.append(min(bits, 32) if value.op == "index" else bits)
        widths += [max(BITS[HELD[s.buffer.dtype]], 8) for s in phase.body if isinstance(s, Store)]
    # what vectors are filled with: the widest, but 64 only if most values are
    wide = sum(bits == 64 for bits in widths)
    widest = 64 if 2 * wide >= max(len(widths), 1) else min(max(widths, default=32), 32)
    lanes = machine.bits // widest
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


def outlined(orders: Iterable[Sequence[Value]]) -> frozenset[tuple[str, torch.dtype]]:
    """The elementary functions, by op and dtype, of which a kernel has too many to inline them."""
    values = (value for order in orders for value in order)
    counts = Counter((v.op, v.dtype) for v in values if v.op in SCALAR_OPS)
    heavy = (key for key, n in counts.items() if n > MOST_INLINED)
    return frozenset(key for key in heavy if SCALAR_OPS[key[0]].heavy >= HEAVY)


def is_light(orders: Sequence[Sequence[Value]]) -> bool:
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
    return count_points(phase.inner) * cost
