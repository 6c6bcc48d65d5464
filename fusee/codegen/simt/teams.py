"""Who works on one point together, and how what each has found becomes one.

Each thread or block has its part, then parts are exchanged and merged: threads of one warp exchange
by shuffles, others through memory that a block shares, blocks through memory of the device. All
threads of a team come to the same result: the one part of a pair is merged with the other in both
of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fusee.codegen.llvm.body import Carried, emit_value
from fusee.codegen.llvm.lanes import Stage
from fusee.codegen.llvm.math import each_lane
from fusee.codegen.llvm.ops import Context, from_memory, to_memory
from fusee.codegen.simt.thread import Stretch, ThreadBody, ThreadContext
from fusee.loops import Acc, Kernel, Phase, Value, walk
from fusee.loops.schedule import stride
from fusee.runtime.llvm_text import BITS, HELD, InsertPoint, Level, vector
from fusee.sym import Size, Symbol, count_points, divides, hint, symbols

WARP = 32
Places = list[list[tuple[str, str]]]  # per part and lane: its type in memory, and the address


class Team(NamedTuple):
    """Who works on one point.

    threads   of a team, a power of two; teams: of a block
    along     the axes that are shared are the inner ones, and so are vectors: rows
    """

    threads: int
    teams: int
    along: bool

    @property
    def block(self) -> int:
        return self.threads * self.teams

    @property
    def apart(self) -> int:
        """How far apart in their block the threads of a team are."""
        return 1 if self.along else self.teams


class Sharing(NamedTuple):
    """How many blocks share what a team would do, and the steps that each of them takes.

    Each leaves what it found in memory; the one that comes last merges that of all, and goes on.
    """

    blocks: Size
    steps: Size


def barrier(level: Level, threads: int) -> None:
    """All threads of a team, or of the block if teams have more than a warp, have come here."""
    if threads <= WARP:
        level.call("void", "llvm.nvvm.bar.warp.sync", ("i32", "-1"))
    else:
        level.call("void", "llvm.nvvm.barrier0")


def shuffled(t: InsertPoint, dtype: torch.dtype, x: str, distance: int) -> str:
    """What the thread whose number differs in the bit `distance` has, lane by lane."""
    level, kind = t.level, HELD[dtype]
    bits = BITS[kind]

    def moved(word: str) -> str:
        given = (("i32", "-1"), ("i32", word), ("i32", str(distance)), ("i32", "31"))
        return level.call("i32", "llvm.nvvm.shfl.sync.bfly.i32", *given)

    def of_lane(_: InsertPoint, args: Sequence[str]) -> str:
        (x,) = args
        if bits < 32:
            word = moved(level.op(f"zext {kind} {x} to i32"))
            return level.op(f"trunc i32 {word} to {kind}")
        if bits == 32:
            word = x if kind == "i32" else level.op(f"bitcast {kind} {x} to i32")
            word = moved(word)
            return word if kind == "i32" else level.op(f"bitcast i32 {word} to {kind}")
        whole = x if kind == "i64" else level.op(f"bitcast {kind} {x} to i64")
        low = moved(level.op(f"trunc i64 {whole} to i32"))
        high = moved(level.op(f"trunc i64 {level.op(f'lshr i64 {whole}, 32')} to i32"))
        high = level.op(f"shl i64 {level.op(f'zext i32 {high} to i64')}, 32")
        whole = level.op(f"or i64 {high}, {level.op(f'zext i32 {low} to i64')}")
        return whole if kind == "i64" else level.op(f"bitcast i64 {whole} to {kind}")

    return each_lane(t, dtype, [x], of_lane)


class Exchange:
    """Merges what the threads of a team have.

    threads  of a team, a power of two
    apart    how far apart in the block the threads of a team are: 1, or the number of teams
    tid      the number of the thread in its block
    """

    def __init__(self, ctx: Context, block: int, threads: int, apart: int, tid: str) -> None:
        self.ctx, self.block, self.threads, self.apart, self.tid = ctx, block, threads, apart, tid
        self.shared_bytes = 0

    def word(self) -> str:
        """The address of four bytes that are nobody else's."""
        start = -(-self.shared_bytes // 4) * 4
        self.shared_bytes = start + 4
        return f"getelementptr (i8, ptr addrspace(3) @shared, i64 {start})"

    def merged(self, t: InsertPoint, how: Carried, parts: list[str]) -> list[str]:
        """`parts` of all threads of the team as one, in all of them."""
        end = self.apart * self.threads
        parts = self._by_shuffles(t, how, parts, self.apart, min(end, WARP))
        if end <= WARP:
            return parts
        if self.apart == 1:
            _, parts = self._of_warps(t, how, parts)
            return self._by_shuffles(t, how, parts, 1, self.threads // WARP)
        distance = max(self.apart, WARP)
        while distance < end:
            self._put(t, how, parts, self._places(t, how, self.tid, self.block, 0))
            barrier(t.level, self.block)
            partner = t.op(f"xor i32 {self.tid}, {distance}")
            others = self._get(t, how, self._places(t, how, partner, self.block, 0))
            barrier(t.level, self.block)
            parts = how.merge(t, parts, others)
            distance *= 2
        return parts

    def _by_shuffles(
        self, t: InsertPoint, how: Carried, parts: list[str], first: int, end: int
    ) -> list[str]:
        distance = first
        while distance < end:
            rows = zip(how.dtypes, how.widths(t.lanes), parts, strict=True)
            others = [shuffled(t.of(width), dtype, x, distance) for dtype, width, x in rows]
            parts = how.merge(t, parts, others)
            distance *= 2
        return parts

    def _of_warps(self, t: InsertPoint, how: Carried, parts: list[str]) -> tuple[str, list[str]]:
        """One place per warp, which all warps read; each reduction has places of its own. Which
        warp's a thread has, and that."""
        level, warps, start = t.level, self.threads // WARP, -(-self.shared_bytes // 16) * 16
        warp = level.op(f"lshr i32 {self.tid}, {WARP.bit_length() - 1}")
        own = self._places(t, how, warp, warps, start)
        follows = level.op(f"icmp ne i32 {level.op(f'and i32 {self.tid}, {WARP - 1}')}, 0")
        with level.unless(follows):
            self._put(t, how, parts, own)
        barrier(level, self.block)
        lane = level.op(f"and i32 {self.tid}, {warps - 1}")
        return lane, self._get(t, how, self._places(t, how, lane, warps, start))

    def scanned(
        self, t: InsertPoint, how: Carried, parts: list[str]
    ) -> tuple[list[str], list[str]]:
        """Of a team whose threads follow each other: what those before this one have as one, and
        what all have."""
        before, whole, distance = how.start(1), parts, 1
        while distance < min(self.threads, WARP):
            rows = zip(how.dtypes, whole, strict=True)
            others = [shuffled(t.of(1), dtype, x, distance) for dtype, x in rows]
            is_first = t.op(f"icmp eq i32 {t.op(f'and i32 {self.tid}, {distance}')}, 0")
            before = self._unless(t, how, is_first, how.merge(t, others, before), before)
            whole = how.merge(t, others, whole)
            distance *= 2
        if self.threads <= WARP:
            return before, whole
        lane, parts = self._of_warps(t, how, whole)
        barrier(t.level, self.block)  # all have read when the next elements' are put there
        warp = t.op(f"lshr i32 {self.tid}, {WARP.bit_length() - 1}")
        is_later = t.op(f"icmp uge i32 {lane}, {warp}")
        ahead = self._unless(t, how, is_later, parts, how.start(1))
        found = [self._by_shuffles(t, how, x, 1, self.threads // WARP) for x in (ahead, parts)]
        return how.merge(t, found[0], before), found[1]

    @staticmethod
    def _unless(
        t: InsertPoint, how: Carried, condition: str, parts: list[str], others: list[str]
    ) -> list[str]:
        rows = zip(how.dtypes, others, parts, strict=True)
        return [t.select(condition, HELD[dtype], x, y) for dtype, x, y in rows]

    # Elements of one lane lie side by side, so that the threads of a warp use all banks.

    def _places(self, t: InsertPoint, how: Carried, number: str, count: int, start: int) -> Places:
        """Of one of `count` threads or warps that have places from the byte `start` on."""
        found, level = [], t.level
        for kind, width in zip(how.kinds(1), how.widths(t.lanes), strict=True):
            held = "i8" if kind == "i1" else kind
            lanes = []
            for _ in range(width):
                address = f"getelementptr (i8, ptr addrspace(3) @shared, i64 {start})"
                at = level.op(f"getelementptr {held}, ptr addrspace(3) {address}, i32 {number}")
                lanes.append((held, at))
                start += count * (BITS[held] // 8)
            found.append(lanes)
        self.shared_bytes = max(self.shared_bytes, start)
        return found

    def _put(self, t: InsertPoint, how: Carried, parts: list[str], places: Places) -> None:
        level = t.level
        for kind, x, lanes in zip(how.kinds(1), parts, places, strict=True):
            for k, (held, address) in enumerate(lanes):
                one = x
                if len(lanes) > 1:
                    one = level.op(f"extractelement {vector(kind, len(lanes))} {x}, i64 {k}")
                if held != kind:
                    one = level.op(f"zext {kind} {one} to {held}")
                align = BITS[held] // 8
                level.do(f"store {held} {one}, ptr addrspace(3) {address}, align {align}")

    def _get(self, t: InsertPoint, how: Carried, places: Places) -> list[str]:
        level, found = t.level, []
        for kind, lanes in zip(how.kinds(1), places, strict=True):
            whole = "poison"
            for k, (held, address) in enumerate(lanes):
                align = BITS[held] // 8
                one = level.op(f"load {held}, ptr addrspace(3) {address}, align {align}")
                if held != kind:
                    one = level.op(f"trunc {held} {one} to {kind}")
                full = vector(kind, len(lanes))
                if len(lanes) > 1:
                    one = level.op(f"insertelement {full} {whole}, {kind} {one}, i64 {k}")
                whole = one
            found.append(whole)
        return found


# ---------------------------------------------------------------------------- blocks
# Blocks that share what a team reduces: the one that comes last merges what all have found.
#
# Memory that they share begins with a counter for each group of blocks; the last block of a group
# sets its counter back. Behind the counters lies a record for each team of each block.

# Blocks that share points are at most so many, and so are groups of them.
MOST_BLOCKS = 1024
COUNTER_BYTES = 4 * MOST_BLOCKS
_ALIGN = 16  # of records and their parts, in bytes


class Meeting:
    """One group of blocks.

    blocks  how many they are; part: which of them this one is; group: their number, an i32
    """

    def __init__(self, ctx: ThreadContext, blocks: Size, block: str) -> None:
        self.ctx, self.level = ctx, ctx.ranked[1]
        op = self.level.op
        self.blocks = ctx.param("blocks", blocks)
        number = op(f"zext i32 {block} to i64")
        self.part = op(f"urem i64 {number}, {self.blocks}")
        self._group = op(f"udiv i64 {number}, {self.blocks}")
        self.group = op(f"trunc i64 {self._group} to i32")
        self.record_bytes = 0
        self._places: dict[Acc, list[tuple[str, str, int]]] = {}  # types, held and in memory; where

    def lay_out(self, hows: Mapping[Acc, Carried], lanes: int) -> None:
        """What a record is made of."""
        for acc, how in hows.items():
            places = self._places[acc] = []
            rows = zip(how.kinds(lanes), how.kinds(1), how.widths(lanes), strict=True)
            for kind, one, width in rows:
                memory = "i8" if one == "i1" else one
                places.append((kind, vector(memory, width), self.record_bytes))
                size = width * BITS[memory] // 8
                self.record_bytes += -(-size // _ALIGN) * _ALIGN

    def _record(self, t: InsertPoint, team: str, part: str) -> str:
        op = t.op
        number = op(f"add i64 {op(f'mul i64 {team}, {self.blocks}')}, {part}")
        place = op(f"add i64 {op(f'mul i64 {number}, {self.record_bytes}')}, {COUNTER_BYTES}")
        return t.level.at(self.ctx.shared(), place)

    def leave(self, t: InsertPoint, team: str, found: Mapping[Acc, list[str]]) -> None:
        """What a team of this block has found."""
        record = self._record(t, team, self.part)
        for acc, places in self._places.items():
            for x, (kind, memory, at) in zip(found[acc], places, strict=True):
                x = x if kind == memory else t.op(f"zext {kind} {x} to {memory}")
                address = t.level.at(record, at)
                t.level.do(f"store {memory} {x}, ptr {address}, align {_align(memory)}")

    def of(self, t: InsertPoint, team: str, part: str) -> dict[Acc, list[str]]:
        """What a team of another block has found."""
        found: dict[Acc, list[str]] = {}
        record = self._record(t, team, part)
        for acc, places in self._places.items():
            found[acc] = []
            for kind, memory, at in places:
                address = t.level.at(record, at)
                x = t.op(f"load {memory}, ptr {address}, align {_align(memory)}")
                x = x if kind == memory else t.op(f"trunc {memory} {x} to {kind}")
                found[acc].append(x)
        return found

    def stay_if_last(self, exchange: Exchange) -> None:
        """All blocks but the one that comes last end here; it sees what they have left."""
        level, op = self.level, self.level.op
        word = exchange.word()
        level.call("void", "llvm.nvvm.membar.gl")
        barrier(level, exchange.block)

        def meet() -> str:
            with level.unless(op(f"icmp ne i32 {exchange.tid}, 0")):
                counter = level.at(self.ctx.shared(), self._group, "i32")
                before = op(f"atomicrmw add ptr {counter}, i32 1 monotonic")
                missing = op(f"sub i64 {self.blocks}, {op(f'zext i32 {before} to i64')}")
                early = op(f"icmp ne i64 {missing}, 1")
                with level.unless(early):
                    level.do(f"store i32 0, ptr {counter}, align 4")
                early = op(f"zext i1 {early} to i32")
                level.do(f"store i32 {early}, ptr addrspace(3) {word}, align 4")
            barrier(level, exchange.block)
            early = op(f"load i32, ptr addrspace(3) {word}, align 4")
            return op(f"icmp ne i32 {early}, 0")

        alone = op(f"icmp eq i64 {self.blocks}, 1")
        level.leave(level.chosen(alone, "false", meet, "i1"), lambda: "void")
        level.call("void", "llvm.nvvm.membar.gl")


def _align(memory: str) -> int:
    count, _, kind = memory.strip("<>").rpartition(" x ")
    return min(int(count or 1) * BITS[kind] // 8, _ALIGN)


# ---------------------------------------------------------------------------- tiles
# Tiles: what lies in one piece along one axis is loaded so, and stored along another.
#
# Where most stores go along `lane`, and loads along `along`, neighbouring threads would load from
# as many lines as they are. So a block takes a tile of both axes: its threads first go along
# `along`, and leave what they load in memory that they share, then along `lane`, to compute and
# store. An axis that is short is in the tile as a whole, and the other one longer.

# Threads of a block. Points along a side of a tile: as many loads are on their way at once as a
# thread has points; fewer where a kernel has few tiles, or much to keep.
THREADS = 256
WIDE, NARROW = 64, 32
# Points from which on tiles pay, and wide ones do; bytes of a point in a wide tile, and a narrow.
LEAST, MANY = 1 << 16, 1 << 20
WIDE_BYTES, NARROW_BYTES = 8, 32
# Loads of a thread that are under way at once; values that it computes at once.
UNDER_WAY, LIGHT = 4, 96


class SharedTile(NamedTuple):
    """The sizes of a tile, and the loads that are crossed."""

    along: Symbol
    lane: Symbol
    sizes: Mapping[Symbol, int]
    loads: tuple[Value, ...]

    @property
    def steps(self) -> int:
        """Points of a thread."""
        return -(-self.sizes[self.along] * self.sizes[self.lane] // THREADS)

    def pitch(self, load: Value) -> int:
        """Elements from one row in shared memory to the next: an odd number of words, so that a
        warp that walks down a column finds all banks."""
        unit = max(4 // _bytes(load), 1)
        return (-(-self.sizes[self.along] // unit) | 1) * unit

    def starts(self) -> list[int]:
        """Where the rows of each load begin in shared memory, and where all end."""
        found = [0]
        for load in self.loads:
            size = _bytes(load) * self.pitch(load) * self.sizes[self.lane]
            found.append(found[-1] + -(-size // 16) * 16)
        return found


def choose_tile(kernel: Kernel, orders: Sequence[Sequence[Value]]) -> SharedTile | None:
    """The tile that serves a kernel; None where its loads lie as its stores do."""
    points = hint(count_points(kernel.outer))
    stores = kernel.stores
    plain = not any(phase.inner for phase in kernel.phases) and not kernel.ordered
    if points < LEAST or not plain or any(s.mode != "set" for s in stores):
        return None
    stored = {s.buffer for s in stores}
    lane = _commonest(kernel.outer, [s.index for s in stores])
    values = dict.fromkeys(v for order in orders for v in order if v.op == "load")
    if lane is None:
        return None
    crossed = [
        v for v in values
        if v.attr[0] not in stored and stride(v.attr[1], lane) not in (None, 0, 1)
        # a smaller table is in the cache
        and 2 * hint(count_points(a for a in kernel.outer if a in symbols(v.attr[1]))) > points
    ]  # fmt: skip
    along = _commonest(kernel.outer, [v.attr[1] for v in crossed])
    if along is None:
        return None
    crossed = [v for v in crossed if stride(v.attr[1], along) == 1]
    edge, most = (WIDE, WIDE_BYTES) if points >= MANY else (NARROW, NARROW_BYTES)
    if len(crossed) * 4 > most or sum(map(_bytes, crossed)) > most:
        edge, most = NARROW, NARROW_BYTES
    while sum(max(_bytes(v), 4) for v in crossed) > most:
        crossed.pop()
    sizes = {axis: _side(axis, edge) for axis in (along, lane)}
    for axis, other in ((along, lane), (lane, along)):
        if 2 * sizes[axis] <= edge:
            whole = edge * edge // sizes[axis]
            sizes[other] = _side(other, 1 << whole.bit_length() - 1)
    if math.prod(sizes.values()) < THREADS:
        return None  # both axes are short: most threads would wait for the others
    return SharedTile(along, lane, sizes, tuple(crossed))


def _side(axis: Symbol, most: int) -> int:
    return min(axis.hi, most) if isinstance(axis.hi, int) else most


def _commonest(axes: Sequence[Symbol], indices: Sequence[Size]) -> Symbol | None:
    """The axis along which most of the indices go by one."""
    counts = Counter(axis for index in indices for axis in axes if stride(index, axis) == 1)
    return max(counts, key=counts.__getitem__, default=None)


def _bytes(value: Value) -> int:
    return max(BITS[HELD[value.dtype]] // 8, 1)


class Crossing:
    """One tile of a block.

    tid     the number of the thread; first: the coordinates of the tile's first point
    beyond  an i1: the thread is beyond the tile at the present step, if it may be
    """

    beyond: str | None

    def __init__(
        self,
        ctx: ThreadContext,
        body: ThreadBody,
        tile: SharedTile,
        tid: str,
        first: Mapping[Symbol, str],
    ) -> None:
        self.ctx, self.body, self.tile, self.tid, self.first = ctx, body, tile, tid, first
        self.level, self.starts = ctx.ranked[1], tile.starts()
        self.last: dict[Symbol, str] = {}  # points of axes that tiles may go beyond
        for axis, side in tile.sizes.items():
            if not divides(side, axis.size):
                self.last[axis] = self.level.op(f"sub i64 {ctx.size_of(axis)}, 1")
        body.set_stage(None, Stage(1, 1), None)
        ctx.base_rank = 2

    def emit(self, phases: Sequence[Phase]) -> None:
        values = sum(len(self.body.order(phase)) for phase in phases)
        self._rounds(UNDER_WAY, self._fetch)
        barrier(self.level, THREADS)
        self._rounds(min(LIGHT // max(values, 1), UNDER_WAY), partial(self._compute, phases))

    def _rounds(self, most: int, run: Callable[[Level, Sequence[str]], None]) -> None:
        """All steps, as many at once as `most` and the loop's end allow."""
        steps, writer = self.tile.steps, self.ctx.writer
        count = next(n for n in range(max(min(most, steps), 1), 0, -1) if not steps % n)
        with writer.each("0", str(steps), count) as i:
            top = writer.top
            run(top, [i, *(top.op(f"add i64 {i}, {k}") for k in range(1, count))])

    def _fetch(self, level: Level, steps: Sequence[str]) -> None:
        """What is loaded is stored behind all loads, which are under way at once."""
        ctx, tile, order, found = self.ctx, self.tile, walk(self.tile.loads), []
        for step in steps:
            places = self._point(level, step, tile.along, tile.lane)
            ctx.learn(order)
            for value in order:
                emit_value(ctx, value)
            found.append((self.beyond, places, [ctx.scalar(load) for load in tile.loads]))
        t = ctx.top(1)
        for beyond, *row in found:
            with level.unless(beyond):
                for load, place, name in zip(tile.loads, *row, strict=True):
                    kind = _kind(load)
                    name = to_memory(t, load.dtype, name) if kind == "i8" else name
                    level.do(f"store {kind} {name}, {_address(kind, place)}")

    def _compute(self, phases: Sequence[Phase], level: Level, steps: Sequence[str]) -> None:
        tile, body, t = self.tile, self.body, self.ctx.top(1)
        loads = {v.attr[0] for p in phases for v in body.order(p) if v.op == "load"}
        for step in steps:
            places = self._point(level, step, tile.lane, tile.along)
            known = self.ctx.ranked[2].known
            for load, place in zip(tile.loads, places, strict=True):
                kind = _kind(load)
                name = level.op(f"load {kind}, {_address(kind, place)}")
                known[load] = from_memory(t, load.dtype, name) if kind == "i8" else name
            idle = body.idle if loads & self.ctx.stored else None
            if idle is not None:
                body.idle = None  # a point may read there what it overwrites
            with level.unless(idle):
                for phase in phases:
                    body.statements(phase, {}, {}, 2)
        body.idle = None

    def _point(self, level: Level, step: str, fast: Symbol, slow: Symbol) -> list[str]:
        """What a thread does at a step, where neighbours go along `fast`: the coordinates are known
        from here on. Its place in shared memory for each load."""
        ctx, tile, op, part = self.ctx, self.tile, level.op, Stretch(level)
        side, rows = tile.sizes[fast], tile.sizes[slow]
        more, number = op(f"mul i64 {step}, {THREADS // side}"), self.tid
        if THREADS % side:
            more, number = "0", op(f"add i64 {number}, {op(f'mul i64 {step}, {THREADS}')}")
        number = op(f"trunc i64 {number} to i32")
        digits = [op(f"{how} i32 {number}, {side}") for how in ("urem", "udiv")]
        local = {axis: op(f"zext i32 {x} to i64") for axis, x in zip((fast, slow), digits)}
        local[slow] = op(f"add i64 {local[slow]}, {more}")
        self.beyond = None
        if side * rows % THREADS:
            self.beyond = op(f"icmp sge i64 {local[slow]}, {rows}")
            local[slow] = level.extreme("smin", local[slow], str(rows - 1))
        outside = [self.beyond] if self.beyond is not None else []
        for axis, name in local.items():
            at = part.axes[axis] = op(f"add nsw i64 {self.first[axis]}, {name}")
            if axis in self.last:  # there they do what the last point does, and store nothing
                outside.append(op(f"icmp sgt i64 {at}, {self.last[axis]}"))
                part.axes[axis] = level.extreme("smin", at, self.last[axis])
        self.body.idle = level.either("i1", "or", *outside) if outside else None
        part.enter(ctx)
        places = []
        for load, start in zip(tile.loads, self.starts, strict=False):
            row = op(f"mul i64 {local[tile.lane]}, {tile.pitch(load)}")
            place = op(f"add i64 {row}, {local[tile.along]}")
            shared = f"ptr addrspace(3) getelementptr (i8, ptr addrspace(3) @shared, i64 {start})"
            places.append(op(f"getelementptr {_kind(load)}, {shared}, i64 {place}"))
        return places


def _kind(load: Value) -> str:
    """What shared memory holds of a load: what registers do, and a byte of a bool."""
    return "i8" if HELD[load.dtype] == "i1" else HELD[load.dtype]


def _address(kind: str, place: str) -> str:
    return f"ptr addrspace(3) {place}, align {BITS[kind] // 8}"
