"""A Kernel as one LLVM function: loop nest, vectors along the lanes axis, tails, reductions.

    define void @k_<hash>(ptr bufs, ptr params, i64 begin, i64 end, i64 thread)

`bufs` is an array of data pointers, one per buffer, then that of the status (a code and the index
that was refused); `params` the sizes that the text leaves open; [begin, end) a range of the
parallel iterations: points of the outer axes, times blocks of the lanes axis. The text names
nothing but positions, so kernels that differ in sizes alone are one function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fusee.codegen.llvm.body import (
    SUM_ACROSS,
    Accumulators,
    Across,
    Along,
    Body,
    Carried,
    Parts,
    Scan,
    accumulators,
    carried,
    settle,
    two_sum,
    whole_vectors,
)
from fusee.codegen.llvm.lanes import Stage, Tile, choose_vectors, is_short, outlined, phase_cost
from fusee.codegen.llvm.ops import Context, given_numbers
from fusee.loops import Acc, Buffer, Kernel, Phase, index_of, payloads, walk
from fusee.loops.schedule import scanned_rows, scans_along
from fusee.runtime.llvm_text import BITS, HELD, InsertPoint, Machine, memory_type, vector
from fusee.sym import Size, Symbol, count_points, hint, maximum, minimum

# ---------------------------------------------------------------------------- strip
# Reductions down the columns of a block: rows outside, vectors inside.
#
# Vectors along the columns, each walking down all rows, would touch one line of the cache per row
# and a new page every few. So a few rows of the whole block are read before the next ones, and what
# the columns have accumulated waits in small arrays meanwhile.


class Strip:
    """All phases over the columns [low, high), at most `width` of them.

    hows    the accumulators of the present phase; known: of all phases so far
    """

    phase: Phase
    hows: Accumulators

    def __init__(
        self,
        body: Body,
        phases: Sequence[Phase],
        lane: Symbol,
        stages: Sequence[tuple[Stage, str, str]],
        bounds: tuple[str, str],
        width: int,
    ) -> None:
        self.body, self.phases, self.lane, self.stages = body, phases, lane, stages
        self.ctx, self.writer = body.ctx, body.writer
        (self.low, self.high), self.width = bounds, width
        self.first_rank = len(self.ctx.ranked)
        self.known: dict[Acc, Carried] = {}
        # arrays per accumulator: its value, or sum, error and the sum of the present rows
        self.arrays: dict[Acc, list[str]] = {}

    def emit(self) -> None:
        for phase in self.phases:
            self.phase, self.hows = phase, accumulators(phase, two_level=True)
            self.known |= self.hows
            for acc, how in self.hows.items():
                places = range(len(self._starts(how, 1)))
                self.arrays[acc] = [self.ctx.array(self.width * self._size(acc, k)) for k in places]
            if self.hows:
                self._columns(self.first_rank, self._start)
            self._rows(0)
            if any(how.two_level for how in self.hows.values()):
                self._columns(self.first_rank, self._finish)

    def _start(self, t: InsertPoint, i: str) -> None:
        for acc, how in self.hows.items():
            self._store(t, i, acc, [self._starts(how, t.lanes)] * self.ctx.copies)

    def _finish(self, t: InsertPoint, i: str) -> None:
        for acc, how in self.hows.items():
            if how.two_level:
                sums = self._load(t, i, acc, range(2))
                self._store(t, i, acc, [settle(t, how, part) for part in sums])

    # -------------------------------------------------------------------------- loops

    def _columns(self, rank: int, write: Callable[[InsertPoint, str], None]) -> None:
        """A loop over the block's vectors, for each stage."""
        for stage, start, stop in self.stages:
            with self.writer.each(start, stop, stage.width) as i:
                self.body.open_lanes(self.lane, stage, self.high, i, rank)
                self.ctx.base_rank = rank
                write(self.ctx.top(stage.lanes), i)

    def _rows(self, position: int) -> None:
        """The phase's inner axes; the last one a few rows at a time."""
        inner, rank = self.phase.inner, self.first_rank + position
        if not inner:
            self._columns(rank, self._element)
            return
        size = self.ctx.size_of(inner[position])
        if position < len(inner) - 1:
            with self.writer.each("0", size) as i:
                self.ctx.open_axis(inner[position], i, rank)
                self._rows(position + 1)
        else:
            with self.body.blocks(size, SUM_ACROSS, {}, {}) as (first, last, *_):
                del self.ctx.ranked[rank:]
                self.ctx.ranked.append(self.writer.top)
                self._block((first, last), rank + 1)

    def _block(self, rows: tuple[str, str], rank: int) -> None:
        phase, two_level = self.phase, {a: h for a, h in self.hows.items() if h.two_level}
        picks = any(v.op == "load" and payloads(index_of(v)) for v in self.body.order(phase))
        if not picks and not phase.stores:
            self._columns(rank, lambda t, i: self._walk(t, i, rows))
            return

        def add(t: InsertPoint, i: str) -> None:
            for acc, how in two_level.items():
                found = self._load(t, i, acc, range(3))
                parts = [[*two_sum(t, how, p[:2], p[2]), how.start(t.lanes)[0]] for p in found]
                self._store(t, i, acc, parts)

        # A load waits for stores whose address has the same last 12 bits, and rows often lie a
        # multiple of 4096 bytes apart. So whoever stores goes along the rows; so does who picks
        # rows, whose lines no prefetcher foresees.
        with self.writer.each(*rows) as r:
            self.ctx.open_axis(phase.inner[-1], r, rank)
            self._columns(rank + 1, self._element)
        if two_level:
            self._columns(rank, add)

    def _walk(self, t: InsertPoint, i: str, rows: tuple[str, str]) -> None:
        """One vector of columns down some rows, in registers."""
        ctx, rank, hows = self.ctx, self.ctx.base_rank + 1, self.hows
        self._publish(t, i)
        outer = {
            acc: self._load(t, i, acc, range(len(h.outer_kinds(1)))) for acc, h in hows.items()
        }
        local, kinds = hows.within(t.lanes, outer), hows.kinds(t.lanes)
        with self.body.carry(*rows, 1, local, kinds) as (r, now, local):
            ctx.open_axis(self.phase.inner[-1], r, rank)
            local |= self.body.statements(self.phase, now, hows, rank)
        for acc, parts in hows.joined(t, outer, local):
            self._store(t, i, acc, parts)

    def _element(self, t: InsertPoint, i: str) -> None:
        """One vector of one row."""
        self._publish(t, i)
        hows, parts = self.hows, Parts()
        for acc, how in hows.items():
            places = range(2, 3) if how.two_level else range(len(how.kinds(1)))
            parts[acc] = self._load(t, i, acc, places)
        parts = self.body.statements(self.phase, parts, hows, self.ctx.base_rank)
        for acc, how in hows.items():
            self._store(t, i, acc, parts[acc], 2 if how.two_level else 0)

    # -------------------------------------------------------------------------- arrays

    @staticmethod
    def _starts(how: Carried, lanes: int) -> list[str]:
        return how.start(lanes) * 3 if how.two_level else how.start(lanes)

    def _publish(self, t: InsertPoint, i: str) -> None:
        """What earlier phases accumulated, for this phase to read."""
        ctx = self.ctx
        for value in self.body.order(self.phase):
            if value.op == "acc" and value.attr not in self.hows:
                acc, how = value.attr, self.known[value.attr]
                # a sum that was settled is in the first array, the index of a maximum in the last
                place = 0 if how.two_level else len(how.dtypes) - 1
                names = [part for (part,) in self._load(t, i, acc, range(place, place + 1))]
                ctx.acc_facts[acc] = (ctx.base_rank, ctx.lanes > 1)
                ctx.acc_names[acc] = names if ctx.lanes > 1 else names[0]

    def _size(self, acc: Acc, place: int) -> int:
        """Bytes of an element."""
        dtypes = self.known[acc].dtypes
        return max(BITS[HELD[dtypes[place % len(dtypes)]]] // 8, 1)

    def _kind(self, acc: Acc, place: int, lanes: int) -> str:
        dtypes = self.known[acc].dtypes
        return vector(HELD[dtypes[place % len(dtypes)]], lanes)

    def _address(self, t: InsertPoint, i: str, acc: Acc, copy: int, place: int) -> str:
        """Of the column i in an array, `copy` vectors further on."""
        here = t.op(f"sub i64 {i}, {self.low}")
        if copy:
            here = t.op(f"add i64 {here}, {copy * t.lanes}")
        size, array = self._size(acc, place), self.arrays[acc][place]
        return t.op(f"getelementptr [{size} x i8], ptr {array}, i64 {here}")

    def _load(self, t: InsertPoint, i: str, acc: Acc, places: range) -> list[list[str]]:
        """Per copy, parts of an accumulator."""
        found = []
        for copy in range(self.ctx.copies):
            addresses = [self._address(t, i, acc, copy, place) for place in places]
            kinds = [self._kind(acc, place, t.lanes) for place in places]
            loads = zip(kinds, addresses, strict=True)
            found.append([t.op(f"load {kind}, ptr {at}, align 1") for kind, at in loads])
        return found

    def _store(
        self, t: InsertPoint, i: str, acc: Acc, copies: Sequence[Sequence[str]], first: int = 0
    ) -> None:
        """Parts of an accumulator for every copy, from the array number `first` on."""
        # the loops inside have closed: what follows them goes to the same level
        for copy, parts in enumerate(copies):
            for place, name in enumerate(parts, first):
                address = self._address(t, i, acc, copy, place)
                kind = self._kind(acc, place, t.lanes)
                t.level.do(f"store {kind} {name}, ptr {address}, align 1")


# ---------------------------------------------------------------------------- kernel


# A thread gets at least this much work, in elements times the cost of one; less is not worth
# waking it.
GRAIN_WORK = 1 << 15
# Lanes per parallel iteration: of plain kernels, of those that reduce within, and so on.
BLOCK, BLOCK_REDUCING, BLOCK_ORDERED, BLOCK_TILED = 1024, 64, 256, 256
# Strips of columns, or of scanned rows, that there should be at least; how wide they may be.
STRIPS, WIDEST_STRIP = 16, 1024
# Rows of a scan that are turned at a time, at most: each is a stream for the prefetcher.
SQUARE = 8


class KernelCode(NamedTuple):
    """A kernel's function and what the host must give it.

    `declares` are lines and whole functions that the module needs once. `params` are expressions
    over sizes, `given` the places of what `given_numbers` lists; `total`, `units` and `align` are
    what a LaunchSpec says. `shared` are bytes that its blocks share: 0 before it runs and after it
    where they count each other.
    """

    name: str
    text: str
    declares: frozenset[str]
    buffers: tuple[Buffer, ...]
    params: tuple[Size, ...]
    total: Size
    units: Size
    align: int = 1
    shared: Size = 0
    given: tuple[int, ...] = ()

    @property
    def module(self) -> str:
        """A module of this one function, under the name @kernel."""
        lines = "\n".join(sorted(self.declares))
        return f"{lines}\n{self.text.replace(self.name, 'kernel', 1)}"


def emit_kernel(kernel: Kernel, machine: Machine) -> KernelCode:
    """The function of one kernel for a machine."""
    return _Emitter(kernel, machine).emit()


class _Emitter:
    def __init__(self, kernel: Kernel, machine: Machine) -> None:
        self.kernel, self.ctx = kernel, Context(kernel, machine)
        self.writer = self.ctx.writer
        self.orders = {phase: walk(phase.operands) for phase in kernel.phases}
        self.ctx.numbers = given_numbers(kernel)
        lane, orders = self._outer_lane(), list(self.orders.values())
        self.lane, self.stages, self.tile = choose_vectors(kernel, orders, lane, machine)
        self.rows = self._rows_in_a_square(machine)
        if self.rows:
            self.lane = scanned_rows(kernel)
        self.writer.outlined = outlined(self.orders.values())
        self.body = Body(self.ctx, self.orders, masks_sums=self.lane is None or self.rows > 0)
        self.parallel = [a for a in kernel.outer if a not in kernel.ordered and a != self.lane]
        self.ordered = [a for a in kernel.outer if a in kernel.ordered]
        self.ctx.base_rank = 1 + len(self.ordered) + bool(self.lane) + bool(self.tile)
        self.block = BLOCK
        reduces = not all(is_short(phase) for phase in kernel.phases)
        scans = any(map(self.body.is_scan, kernel.phases))
        self.is_strip = self.lane is not None and reduces and not self.ordered and not scans
        if self.tile is not None:
            self.block = BLOCK_TILED if self.tile.is_square else BLOCK
        elif self.ordered:
            self.block = BLOCK_ORDERED
        elif self.rows:
            self.block = self.rows
        elif reduces:
            self.block = BLOCK_REDUCING
            if self.lane is not None:  # long runs of columns, but enough strips for threads
                fair = hint(self.lane.size) * max(hint(count_points(self.parallel)), 1) // STRIPS
                self.block = min(max(fair & -BLOCK_REDUCING, BLOCK_REDUCING), WIDEST_STRIP)

    def _outer_lane(self) -> Symbol | None:
        """The outer axis for vectors. Ordered kernels come without: their last axis may serve."""
        kernel = self.kernel
        if kernel.lanes is not None:
            return None if kernel.lanes in kernel.ordered else kernel.lanes
        last = kernel.outer[-1] if kernel.outer else None
        if last is None or last in kernel.ordered or any(p.inner for p in kernel.phases):
            return None
        return last

    def _rows_in_a_square(self, machine: Machine) -> int:
        """How many rows of scans, and as many columns, are turned at a time; 0: none are."""
        kernel, lane = self.kernel, scanned_rows(self.kernel)
        if lane is None:
            return 0
        accs = kernel.accumulates
        dtypes = [dtype for s in accs for dtype in carried(s, False).dtypes]
        rows = min(SQUARE, *(machine.bits // BITS[HELD[dtype]] for dtype in dtypes))
        buffers = [s.buffer for s in kernel.stores]
        buffers += [v.attr[0] for order in self.orders.values() for v in order if v.op == "load"]
        kinds = {memory_type(b.dtype, machine) for b in buffers}
        length = max(hint(count_points(phase.inner)) for phase in kernel.phases)
        if kinds == {"i64"} and length > rows and all(s.acc.op == "sum" for s in accs):
            return 0  # added in a cycle, as fast along rows, each of which is a stream of its own
        masks = all(machine.can_mask(BITS[kind]) for kind in kinds)
        return rows if rows >= 4 and masks and hint(count_points([lane])) >= STRIPS * rows else 0

    # -------------------------------------------------------------------------- function

    def emit(self) -> KernelCode:
        ctx = self.ctx
        if self.lane is not None and not self.parallel and not self.is_strip:
            ctx.ranked.append(self.writer.top)  # all blocks are one range of it
            self._ordered(0, *self._block_range("%begin", "%end"))
        else:
            self._points()
        spare = "  %spare = alloca [2048 x i8], align 64"
        lines = ["entry:", *[spare] * ctx.uses_spare]
        lines += [f"  {line}" for line in ctx.arrays]
        if ctx.uses_status:
            lines.append(f"  %status_at = getelementptr ptr, ptr %bufs, i64 {len(ctx.buffers)}")
            lines.append("  %status = load ptr, ptr %status_at")
            lines.append("  %found = getelementptr i64, ptr %status, i64 1")
        lines += [
            "  %some = icmp slt i64 %begin, %end",
            "  br i1 %some, label %start, label %done",
            "start:",
            *ctx.ranked[0].lines,
            "  br label %done",
            "done:",
            "  ret void",
        ]
        total, work = self._total_and_work()
        grain = (GRAIN_WORK - 1) // maximum(work, 1) + 1
        body = "\n".join(lines)
        name = "k_" + hashlib.sha256(body.encode()).hexdigest()[:20]
        signature = "ptr %bufs, ptr %params, i64 %begin, i64 %end, i64 %thread"
        return KernelCode(
            name,
            f"define void @{name}({signature}) nounwind {{\n{body}\n}}\n",
            frozenset(self.writer.declares.values()),
            tuple(ctx.buffers),
            tuple(size for _, size in ctx.params),
            total,
            (total + grain - 1) // grain,
            given=ctx.given(),
        )

    def _total_and_work(self) -> tuple[Size, Size]:
        """How many parallel iterations there are, and about how many additions one takes."""
        total: Size = 1
        work: Size = 0
        for axis in self.parallel:
            strip = self.tile.strip if self.tile is not None and axis == self.tile.axis else 1
            total = total * ((axis.size + strip - 1) // strip)
        for phase in self.kernel.phases:
            work = work + phase_cost(phase, self.orders[phase])
        work = work * count_points(self.ordered) * (self.tile.strip if self.tile else 1)
        if self.lane is None:
            return total, work
        blocks = (self.lane.size + self.block - 1) // self.block
        return total * blocks, work * minimum(self.lane.size, self.block)

    # -------------------------------------------------------------------------- outer loops

    def _block_range(self, first: str, last: str) -> tuple[str, str]:
        assert self.lane is not None
        ctx, top = self.ctx, self.writer.top
        low = top.op(f"mul nsw i64 {first}, {self.block}")
        high = top.op(f"mul nsw i64 {last}, {self.block}")
        return low, top.extreme("smin", high, ctx.size_of(self.lane))

    def _points(self) -> None:
        """One loop over the linear range; coordinates count along like an odometer."""
        ctx, top = self.ctx, self.writer.top
        sizes = []
        for axis in self.parallel:
            size = ctx.size_of(axis)
            if self.tile is not None and axis == self.tile.axis:
                more = top.op(f"add i64 {size}, {self.tile.strip - 1}")
                size = top.op(f"udiv i64 {more}, {self.tile.strip}")
            sizes.append(size)
        if self.lane is not None:
            more = top.op(f"add i64 {ctx.size_of(self.lane)}, {self.block - 1}")
            sizes.append(top.op(f"udiv i64 {more}, {self.block}"))
        rest, starts = "%begin", []
        for size in reversed(sizes[1:]):
            starts.append(top.op(f"urem i64 {rest}, {size}"))
            rest = top.op(f"udiv i64 {rest}, {size}")
        if sizes:
            starts.append(rest)
        counted = [("i64", start) for start in reversed(starts)]
        with self.writer.loop("%begin", "%end", 1, counted) as (_, at, following):
            ctx.ranked.append(self.writer.top)
            ctx.know_axes(self.parallel, at, 1)
            low = high = ""
            if self.lane is not None:
                after = self.writer.top.op(f"add nsw i64 {at[-1]}, 1")
                low, high = self._block_range(at[-1], after)
            if self.tile is not None:
                self._tiled(self.tile, ctx.axis_name[self.tile.axis], low, high)
            else:
                self._ordered(0, low, high)
            op, carry, moved = self.writer.top.op, "1", list[str]()
            for name, size in zip(reversed(at), reversed(sizes), strict=True):
                plus = op(f"add nsw i64 {name}, {carry}")
                if len(moved) < len(at) - 1:  # the first one does not wrap
                    wraps = op(f"icmp eq i64 {plus}, {size}")
                    plus = op(f"select i1 {wraps}, i64 0, i64 {plus}")
                    carry = op(f"zext i1 {wraps} to i64")
                moved.append(plus)
            following += moved[::-1]

    def _tiled(self, tile: Tile, strip: str, low: str, high: str) -> None:
        """A strip of the tile's axis: whole tiles, then what is left of their rows, and the rest of
        the rows."""
        ctx, writer, lane, axis = self.ctx, self.writer, self.lane, tile.axis
        assert lane is not None
        op = writer.top.op
        first = op(f"mul nsw i64 {strip}, {tile.strip}")
        after = op(f"add nsw i64 {first}, {tile.strip}")
        last = writer.top.extreme("smin", after, ctx.size_of(axis))
        begin, middle = low, last
        if tile.is_square:  # another one is all of its axis
            rows = op(f"and i64 {op(f'sub i64 {last}, {first}')}, {-tile.copies}")
            middle = op(f"add i64 {first}, {rows}")
        if tile.turns:
            whole = op(f"and i64 {op(f'sub i64 {high}, {low}')}, {-tile.lanes}")
            begin = op(f"add i64 {low}, {whole}")
            with writer.each(low, begin, tile.lanes) as j:
                ctx.open_axis(lane, j, 2)
                with writer.each(first, middle, tile.copies) as i:
                    ctx.open_axis(axis, i, 3)
                    self.body.set_stage(lane, Stage(tile.copies, tile.lanes), None)
                    ctx.copy_axis = axis
                    for phase in self.kernel.phases:
                        Across(self.body, phase).emit()
        with writer.each(first, last) as i:
            ctx.open_axis(axis, i, 2)
            if tile.is_square:
                is_rest = writer.top.op(f"icmp sge i64 {i}, {middle}")
                begin = writer.top.op(f"select i1 {is_rest}, i64 {low}, i64 {begin}")
            self._outer_lanes(lane, begin, high)

    def _ordered(self, position: int, low: str, high: str) -> None:
        if position < len(self.ordered):
            axis = self.ordered[position]
            with self.writer.each("0", self.ctx.size_of(axis)) as i:
                self.ctx.open_axis(axis, i, 2 + position)
                self._ordered(position + 1, low, high)
        elif self.lane is not None and self.rows:
            self._squares(self.lane, self.rows, low, high)
        elif self.lane is not None:
            self._outer_lanes(self.lane, low, high)
        else:
            self._point()

    def _point(self) -> None:
        """One point of all outer axes."""
        for phase in self.kernel.phases:
            if phase.inner and not self.body.is_scan(phase):
                Along(self.body, phase).emit()
            elif phase.inner and scans_along(phase):
                Scan(self.body, phase).emit()
            else:
                self.body.set_stage(None, Stage(1, 1), None)
                Across(self.body, phase).emit()

    def _squares(self, lane: Symbol, rows: int, low: str, high: str) -> None:
        """Scans along rows: through squares of as many rows as there are lanes, then the rest.

        In a turned square what is accumulated goes from vector to vector, one operation for each.
        """
        ctx, op = self.ctx, self.writer.top.op
        whole = op(f"and i64 {op(f'sub i64 {high}, {low}')}, {-rows}")
        middle = op(f"add i64 {low}, {whole}")
        body, rank = self.body, ctx.base_rank + 1
        with self.writer.each(low, middle, rows) as i:
            ctx.open_axis(lane, i, ctx.base_rank)
            for phase in self.kernel.phases:
                (axis,) = phase.inner
                size = ctx.size_of(axis)
                whole, hows = whole_vectors(ctx, size, rows), accumulators(phase, two_level=False)
                kinds, parts = hows.kinds(rows), hows.start(rows)
                pieces = ("0", whole, False), (whole, size, True)
                for start, stop, is_tail in (x for x in pieces if x[0] != x[1]):
                    with body.carry(start, stop, rows, parts, kinds) as (j, now, parts):
                        ctx.open_axis(axis, j, rank)
                        body.set_stage(lane, Stage(rows, rows), None)
                        ctx.copy_axis = axis
                        ctx.tail = body.tail_mask(rows, j, size) if is_tail else None
                        parts |= body.statements(phase, now, hows, rank)
        with self.writer.each(middle, high) as i:
            ctx.open_axis(lane, i, ctx.base_rank)
            self._point()

    # -------------------------------------------------------------------------- lanes

    def _outer_lanes(self, lane: Symbol, low: str, high: str) -> None:
        phases = self.kernel.phases
        parts: list[tuple[Stage, str, str]] = []  # what of [low, high) each stage covers
        start = low
        for stage in self.stages:
            stop = high
            if not stage.masked and stage.lanes > 1:
                op = self.writer.top.op
                whole = op(f"and i64 {op(f'sub i64 {high}, {start}')}, {-stage.width}")
                stop = op(f"add i64 {start}, {whole}")
            parts.append((stage, start, stop))
            start = stop
        if self.is_strip:
            Strip(self.body, phases, lane, parts, (low, high), self.block).emit()
            return
        for stage, start, stop in parts:
            with self.writer.each(start, stop, stage.width) as i:
                self.body.open_lanes(lane, stage, high, i, self.ctx.base_rank)
                for phase in phases:
                    Across(self.body, phase).emit()
