"""Tiles: what lies in one piece along one axis is loaded so, and stored along another.

Where most stores go along `lane`, and loads along `along`, neighbouring threads would load from as
many lines as they are. So a block takes a tile of both axes: its threads first go along `along`,
and leave what they load in memory that they share, then along `lane`, to compute and store. An
axis that is short is in the tile as a whole, and the other one longer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from fusee.codegen.llvm.body import emit_value
from fusee.codegen.llvm.lanes import Stage
from fusee.codegen.llvm.ops import from_memory, to_memory
from fusee.codegen.simt.teams import barrier
from fusee.codegen.simt.thread import Stretch, ThreadBody, ThreadContext
from fusee.loops import Kernel, Phase, Value, walk
from fusee.loops.schedule import stride
from fusee.runtime.llvm_text import BITS, HELD, InsertPoint, Level
from fusee.sym import Size, Symbol, count_points, divides, hint, symbols

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
            if axis.hi is not None and not divides(side, axis.hi):
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
        t = InsertPoint(level, ctx.machine, 1)
        for beyond, *row in found:
            with level.unless(beyond):
                for load, place, name in zip(tile.loads, *row, strict=True):
                    kind = _kind(load)
                    name = to_memory(t, load.dtype, name) if kind == "i8" else name
                    level.do(f"store {kind} {name}, {_address(kind, place)}")

    def _compute(self, phases: Sequence[Phase], level: Level, steps: Sequence[str]) -> None:
        tile, body, t = self.tile, self.body, InsertPoint(level, self.ctx.machine, 1)
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
        side, rows, t = tile.sizes[fast], tile.sizes[slow], InsertPoint(level, ctx.machine, 1)
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
            local[slow] = t.intrinsic("smin", "i64", local[slow], str(rows - 1))
        outside = [self.beyond] if self.beyond is not None else []
        for axis, name in local.items():
            at = part.axes[axis] = op(f"add nsw i64 {self.first[axis]}, {name}")
            if axis in self.last:  # there they do what the last point does, and store nothing
                outside.append(op(f"icmp sgt i64 {at}, {self.last[axis]}"))
                part.axes[axis] = t.intrinsic("smin", "i64", at, self.last[axis])
        self.body.idle = level.either("i1", "or", *outside) if outside else None
        ctx.ranked[2:] = [part]
        ctx.know_axes(part.axes, part.axes.values(), 2)
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
