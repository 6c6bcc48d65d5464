"""A Kernel as one function for a GPU.

    define ptx_kernel void @k_<hash>(ptr %b0, .., ptr %status, i64 %p0, ..)

Arguments are the data pointers, one per buffer, the memory that SPARE_BYTES speaks of, and the
sizes that the text leaves open. Threads are mapped to points in one of four ways:

    points   a thread for `vec` neighbours along the last axis: reductions, if any, are its own
    rows     a team of threads for one point of the outer axes: it walks the reduced axes in steps
             of the whole team, `vec` neighbours each. Rows that fit stay in registers from the
             first phase to the last; longer ones are read again. In scans a thread also takes in
             what those before it have, and all of them what came before the step
    columns  a team for `vec` neighbours along the last outer axis: each thread reduces some rows
    tiles    a block for a tile of two axes: what lies along the one and is stored along the other
             (see teams.py)

`vec` is what one access of 16 bytes holds, fewer where sizes or strides are no multiples of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from fusee.codegen.llvm import KernelCode
from fusee.codegen.llvm.body import Accumulators, Across, Parts, across, merge_all, result
from fusee.codegen.llvm.lanes import Stage, is_short
from fusee.codegen.llvm.memory import pointer
from fusee.codegen.llvm.ops import STATIC_SIZE, groups
from fusee.codegen.simt.teams import (
    COUNTER_BYTES,
    THREADS,
    WARP,
    Crossing,
    Exchange,
    Meeting,
    SharedTile,
    Sharing,
    Team,
    barrier,
    choose_tile,
)
from fusee.codegen.simt.thread import (
    ACCESS_BYTES,
    MOST_LANES,
    OnlineCarried,
    Stretch,
    ThreadBody,
    ThreadContext,
    accumulators,
    lanes_along,
    rough_values,
)
from fusee.loops import Acc, Kernel, Phase, Store, walk
from fusee.loops.schedule import (
    in_one_pass,
    is_scan,
    reads_back,
    scans_along,
    stride,
    takes_one_pass,
)
from fusee.runtime.llvm_text import BITS, Machine, memory_type
from fusee.sym import (
    Size,
    Symbol,
    coefficient,
    count_points,
    divides,
    floordiv,
    hint,
    maximum,
    minimum,
    product,
    symbols,
)

SIMT = Machine(frozenset(), 128, is_simt=True)

# Threads of a block that need not be a team; of one that shares columns; of the largest.
BLOCK, COLUMNS, LARGEST = 256, 256, 1024
# Threads that give a GPU enough to do: with as many points, reductions are not shared.
ENOUGH = 1 << 16
# Points of an axis that a thread takes for what it loads but once.
ROWS = 4
# Elements of a row that a thread takes one by one, threads of such a block, and its elements.
PIECES, STRIPS = 8, 128
STRIP = PIECES * STRIPS
# Elements that one of so many threads reduces by itself.
ALONE = 64
# Blocks that are few enough for several to share what each of them does, how many there are then,
# and how many steps a thread has to take at least.
FEW_GROUPS, MOST_SHARING, LEAST = 264, 264, 4
# Accesses that a row has at most if several blocks are to run on a processor, one of which reduces
# while another stores: longer rows under way would not be in the cache when they are read again.
CACHED = 1 << 13
# Elements of a row that a thread keeps in registers.
KEPT = 32
SECTOR_BYTES = 32


_WIDE = re.compile(r"(<\d+ x (\w+)>.*, ptr .*), align \d+")


def with_any_pointers(module: str) -> str:
    """The same kernel where pointers are multiples of one element only."""
    return _WIDE.sub(lambda m: f"{m[1]}, align {max(BITS[m[2]] // 8, 1)}", module)


def emit_kernel(kernel: Kernel, machine: Machine = SIMT, first: int = 1) -> KernelCode:
    """The function of one kernel: `total` blocks of `units` threads.

    `align` are the bytes of its arguments, and above them the bits that pointers must not have.
    `first` is the number of the graph's first message.
    """
    mapping = _Mapping(kernel, machine)
    mapping.ctx.first = first
    return mapping.emit()


def _power(n: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(n - 1, 0).bit_length()


class _Mapping:
    def __init__(self, kernel: Kernel, machine: Machine) -> None:
        self.kernel = kernel
        self.ctx = ThreadContext(kernel, machine)
        self.level = self.ctx.writer.top
        self.ctx.ranked.append(self.level)
        self.phases = kernel.phases
        self.orders = {phase: walk(phase.operands) for phase in kernel.phases}
        self.inner = [phase for phase in kernel.phases if phase.inner]
        self.scans = [p for p in kernel.phases if is_scan(p, self.orders[p])]
        self.reloads = reads_back(kernel.phases, list(self.orders.values()))
        together = bool(self.scans) and self._scans_rows()
        rows = together or (bool(kernel.outer) and not self.scans and self._reads_rows())
        alone = bool(self.scans) and not together
        short = not rows and self._is_short()
        self.lane = None if rows else kernel.lanes
        if self.lane is None and kernel.outer and (short or alone):
            self.lane = kernel.outer[-1]
        self.parallel = [axis for axis in kernel.outer if axis != self.lane]
        self.team: Team | None = None
        self.vec = 1 if self.lane is None else lanes_along(kernel.phases, self.lane)
        self.split: Sharing | None = None
        self.row: Symbol | None = None
        while alone and self.vec > 1 and hint(self._space()) < ENOUGH:
            self.vec //= 2  # each waits for what it carries: the more there are, the better
        if not short and not alone:
            self.team = self._team()
        self.tile: SharedTile | None = None
        if self.team is None and not self.reloads:
            self.tile = choose_tile(kernel, list(self.orders.values()))
            self.vec = 1 if self.tile is not None else self.vec
        if self.team is None and self.tile is None:
            self.row = self._row()
        if self.team is not None and not self.scans and not self._is_kept(self.team):
            self.phases = in_one_pass(kernel.phases)
            self.orders = {phase: walk(phase.operands) for phase in self.phases}
            self._divide(self.team)
        self.ctx.rough = rough_values(self.phases)
        self.body = ThreadBody(self.ctx, self.orders, masks_sums=False)
        self.stretches: dict[tuple[Symbol, ...], list[Stretch]] = {}

    # -------------------------------------------------------------------------- who does what

    def _points(self) -> int:
        return hint(count_points(self.parallel))

    def _is_short(self) -> bool:
        """Whether a thread reduces by itself: some elements, or more if there are many to do so."""
        most = max((hint(count_points(phase.inner)) for phase in self.inner), default=1)
        threads = hint(count_points(self.kernel.outer))
        alone = ALONE if threads >= ENOUGH else STATIC_SIZE
        if most > alone or not all(map(is_short, self.inner)):
            return False
        # threads with a row each that store pieces of a sector and more would write into many
        # sectors at once, which leave the cache before they are full
        along = [(s, p.inner[-1]) for p in self.inner for s in p.stores]
        sizes = [
            s.buffer.dtype.itemsize * hint(axis.size)
            for s, axis in along
            if stride(s.index, axis) == 1
        ]
        return self.kernel.lanes is not None or max(sizes, default=0) < SECTOR_BYTES

    def _reads_rows(self) -> bool:
        """Whether all that phases load along their rows are rows behind each other, in accesses of
        full width: threads with several rows each would load element by element."""
        outer, rows = self.kernel.outer, 0
        for phase in self.inner:
            axis = phase.inner[-1]
            for value in self.orders[phase]:
                if value.op != "load" or axis not in symbols(value.attr[1]):
                    continue
                lanes = ACCESS_BYTES // value.attr[0].dtype.itemsize
                step, row = (stride(value.attr[1], x) for x in (axis, outer[-1]))
                if step != 1 or row is None or row != axis.hi:
                    return False
                if lanes > MOST_LANES or not divides(lanes, row):
                    return False
                rows += 1
        return rows > 0

    def _scans_rows(self) -> bool:
        """Whether teams go through the elements that scans take one after the other: these lie
        behind each other."""
        if self.kernel.lanes is not None or self.kernel.ordered:
            return False
        for phase in self.scans:
            stored = {store.buffer for store in phase.stores}
            loads = [v.attr for v in self.orders[phase] if v.op == "load"]
            steps = {stride(index, phase.inner[-1]) for _, index in loads}
            is_row = scans_along(phase) and not phase.inner[1:] and steps & {1, -1}
            if not is_row or not stored.isdisjoint(dict(loads)):
                return False
        return True

    def _team(self) -> Team | None:
        points = self._points()
        counts = [hint(count_points(phase.inner)) for phase in self.inner]
        if self.lane is None:
            last = {phase.inner[-1] for phase in self.inner}
            lanes = [lanes_along(self.inner, axis) for axis in last]
            self.vec = min(lanes)
            while any(not divides(self.vec, axis.size) for axis in last):
                self.vec //= 2
            chunks = max(max(counts) // self.vec, 1)
            # blocks that have a processor each, or half of one, need threads to hide its latencies
            few = max((KEPT if points > FEW_GROUPS else KEPT // 2) // self.vec, 1)
            threads = min(_power(chunks), WARP)
            if chunks > few * WARP:
                threads = min(max(_power(-(-chunks // few)), 2 * WARP), LARGEST)
            is_read_again = chunks * self.vec > threads * max(KEPT, self.vec)
            if is_read_again and points > FEW_GROUPS and chunks < CACHED:
                threads = LARGEST // 2
            # those of a scan that have no row go through another's, which somebody may be storing
            alone = threads > WARP or (self.reloads and self.scans)
            return Team(threads, 1 if alone else BLOCK // threads, True)
        while not divides(self.vec, self.lane.size):
            self.vec //= 2
        columns = max(hint(self.lane.size) // self.vec, 1)
        if columns * points >= ENOUGH:
            return None
        # lines of 128 bytes; of wider ones more would be left to the block that comes last
        teams = min(_power(columns), max(WARP // self.vec, MOST_LANES))
        threads = max(_power(max(counts)), WARP // teams)
        return Team(min(COLUMNS // teams, threads), teams, False)

    def _is_kept(self, team: Team) -> bool:
        """Whether all that a team reduces stays in registers from the first phase to the last."""
        totals = [count_points(phase.inner) for phase in self.inner]
        most = team.threads * max(KEPT, self.vec)
        return (
            team.along
            and not self.reloads
            and all(isinstance(total, int) and total <= most for total in totals)
        )

    def _divide(self, team: Team) -> None:
        """Blocks share points if there are few, and one pass over many elements is all."""
        if self.reloads or not takes_one_pass(self.phases):
            return
        whole = next(phase for phase in self.phases if phase.inner)
        rest = [phase for phase in self.phases if phase is not whole]
        groups, count, least = self._space(), count_points(whole.inner), LEAST
        if team.along:
            team, count = Team(min(team.threads, COLUMNS), 1, True), floordiv(count, self.vec)
        else:
            groups, least = (groups + (team.teams - 1)) // team.teams, 2 * LEAST
        step = team.threads
        most = floordiv(count, step * least)
        if hint(groups) > FEW_GROUPS or hint(most) < 2:
            return
        blocks = maximum(minimum(most, floordiv(MOST_SHARING, maximum(groups, 1))), 1)
        share = floordiv(count + (blocks * step - 1), blocks * step) * step
        self.team, self.phases = team, [whole, *rest]
        self.split = Sharing(blocks, share)

    # -------------------------------------------------------------------------- function

    def emit(self) -> KernelCode:
        size = 0
        if self.tile is not None:
            threads, total, size = THREADS, self._by_tiles(self.tile), self.tile.starts()[-1]
        elif self.team is None and self._takes_strips():
            threads, total = STRIPS, self._by_strips()
        elif self.team is None:
            threads, total = BLOCK, self._by_points()
        else:
            threads = self.team.block
            total, size = self._by_teams(self.team)
        text = f"@shared = internal addrspace(3) global [{size} x i8] undef, align 16"
        ctx, shared = self.ctx, [text] if size else []
        self.level.do("ret void")
        lines = "\n".join(["start:", *self.level.lines])
        # what the kernel writes may be the caller's, and be seen through another input
        fixed = all(buffer.role != "input" for buffer in ctx.stored)
        arguments = [
            f"ptr{' noalias readonly' if fixed and b not in ctx.stored else ''} {name}"
            for b, name in ctx.buffers.items()
        ]
        shared_bytes: Size = 0
        if ctx.uses_shared and self.split is not None:
            arguments.append("ptr %shared")
            records = self._space() * self.split.blocks * self.meeting.record_bytes
            shared_bytes = COUNTER_BYTES + records
        arguments += ["ptr %status", *(f"i64 {name}" for name in ctx.params.values())]
        head = f'({", ".join(arguments)}) "nvvm.maxntid"="{threads}" nounwind'
        digest = hashlib.sha256("\n".join([head, lines, *shared]).encode()).hexdigest()
        name = f"k_{digest[:20]}"
        return KernelCode(
            name,
            f"define ptx_kernel void @{name}{head} {{\n{lines}\n}}\n",
            frozenset([*ctx.writer.declares.values(), *shared]),
            tuple(ctx.buffers),
            tuple(size for _, size in ctx.params),
            total,
            threads,
            8 * len(arguments) + ((ACCESS_BYTES - 1 if self.vec > 1 else 0) << 32),
            shared_bytes,
        )

    def _special(self, name: str) -> str:
        """A special register: tid or ctaid."""
        return self.level.call("i32", f"llvm.nvvm.read.ptx.sreg.{name}.x")

    def _number(self, block: str, count: int, own: str) -> str:
        """The number of a thread or team in the whole grid."""
        op = self.level.op
        first = op(f"mul i64 {op(f'zext i32 {block} to i64')}, {count}")
        return op(f"add i64 {first}, {op(f'zext i32 {own} to i64')}")

    def _digits(self, number: str, sizes: Sequence[str], wide: bool) -> list[str]:
        """A number as coordinates; the first is the rest, and may be too large."""
        op, kind = self.ctx.writer.top.op, "i64" if wide else "i32"
        if len(sizes) < 2:
            return [number] * len(sizes)
        rest, found = number if wide else op(f"trunc i64 {number} to i32"), []
        for size in reversed(sizes[1:]):
            by = size if wide or size.isdigit() else op(f"trunc i64 {size} to i32")
            found.append(op(f"urem {kind} {rest}, {by}"))
            rest = op(f"udiv {kind} {rest}, {by}")
        found = [*reversed([*found, rest])]
        return found if wide else [op(f"zext i32 {x} to i64") for x in found]

    def _row(self) -> Symbol | None:
        """The axis of which a thread takes several points: what it loads for its lanes alone, as a
        channel's mean, it has then for all of them."""
        lane = self.lane
        if lane is None or not self.parallel or self.kernel.ordered:
            return None
        axis, enough = self.parallel[-1], 2 * ENOUGH * ROWS
        if hint(axis.size) < ROWS or hint(self._space()) < enough:
            return None
        loads = (symbols(v.attr[1]) for x in self.orders.values() for v in x if v.op == "load")
        shares = any(lane in place and axis not in place for place in loads)
        return axis if shares and divides(self.vec, lane.size) else None

    def _space(self) -> Size:
        """How many threads or teams there are."""
        total = product(
            (axis.size + (ROWS - 1)) // ROWS if axis is self.row else axis.size
            for axis in self.parallel
        )
        if self.lane is None:
            return total
        return total * ((self.lane.size + self.vec - 1) // self.vec)

    def _chunks(self) -> list[str]:
        """Names of the sizes of the space that they are numbered in."""
        sizes = [self.ctx.size_of(axis) for axis in self.parallel]
        if self.row is not None:
            sizes[-1] = self.ctx.param("rows", (self.row.size + (ROWS - 1)) // ROWS)
        if self.lane is None:
            return sizes
        size = self.ctx.size_of(self.lane)
        if self.vec > 1:
            more = self.level.op(f"add i64 {size}, {self.vec - 1}")
            size = self.level.op(f"lshr i64 {more}, {self.vec.bit_length() - 1}")
        return [*sizes, size]

    def _place(self, digits: Sequence[str]) -> None:
        """Names of the outer axes' coordinates, and vectors along the last."""
        ctx = self.ctx
        ctx.know_axes(self.parallel, digits, 1)
        if self.lane is not None:
            low = digits[-1]
            if self.vec > 1:
                low = self.level.op(f"mul nsw i64 {low}, {self.vec}")
            ctx.know_axes([self.lane], [low], 1)
            self.body.set_stage(self.lane, Stage(1, self.vec), None)
        else:
            self.body.set_stage(None, Stage(1, 1), None)

    # -------------------------------------------------------------------------- tiles

    def _by_tiles(self, tile: SharedTile) -> Size:
        """A block for each tile at each point of other axes."""
        ctx, level = self.ctx, self.level
        others = [axis for axis in self.kernel.outer if axis not in tile.sizes]
        sizes, total = [*map(ctx.size_of, others)], count_points(others)
        for axis, side in tile.sizes.items():
            count = (axis.size + (side - 1)) // side
            sizes.append(ctx.param(("tiles", len(sizes)), count))
            total = total * count
        block = level.op(f"zext i32 {self._special('ctaid')} to i64")
        digits = self._digits(block, sizes, _is_wide(total))
        ctx.know_axes(others, digits, 1)
        ends = zip(tile.sizes.items(), digits[-2:], strict=True)
        first = {axis: level.op(f"mul nsw i64 {name}, {side}") for (axis, side), name in ends}
        tid = level.op(f"zext i32 {self._special('tid')} to i64")
        Crossing(ctx, self.body, tile, tid, first).emit(self.phases)
        return total

    # -------------------------------------------------------------------------- points

    def _by_points(self) -> Size:
        """A thread for each point, or each `vec` of them; blocks that it takes."""
        ctx, level = self.ctx, self.level
        number = self._number(self._special("ctaid"), BLOCK, self._special("tid"))
        sizes, total = self._chunks(), self._space()
        digits = self._digits(number, sizes, _is_wide(total))
        last = level.op(f"icmp uge i64 {(digits or [number])[0]}, {(sizes or ['1'])[0]}")
        level.leave(last, lambda: "void")
        self._place(digits)
        if self.row is not None:
            low = level.op(f"mul nsw i64 {ctx.axis_name[self.row]}, {ROWS}")
            self._along(self.row, low, self._end(self.row, low, ROWS), 1, self.vec)
        elif self.lane is None or divides(self.vec, self.lane.size):
            self._all_phases()
        else:
            # a vector where it is whole; at the end of the axis one by one
            lane, low = self.lane, ctx.axis_name[self.lane]
            high, size = level.op(f"add nsw i64 {low}, {self.vec}"), ctx.size_of(lane)
            whole = level.op(f"icmp sle i64 {high}, {size}")
            stop = level.op(f"select i1 {whole}, i64 1, i64 0")
            end = level.op(f"select i1 {whole}, i64 {low}, i64 {size}")
            self._once(lane, low, stop, self.vec)
            self._along(lane, low, end, 1, 1)
        return (total + (BLOCK - 1)) // BLOCK

    def _takes_strips(self) -> bool:
        """Whether rows are long, and their elements are loaded one by one: where each lies in its
        row would be a division for each."""
        lane = self.lane
        if self.vec > 1 or lane is None or not self.parallel:
            return False
        return hint(lane.size) >= 2 * STRIP and self._points() * hint(lane.size) >= ENOUGH * PIECES

    def _by_strips(self) -> Size:
        """A block for a piece of a row, of which each thread takes some elements: one by one, or
        those that one store takes."""
        ctx, level, lane = self.ctx, self.level, self.lane
        assert lane is not None
        store = self._only_store(lane)
        skew = 0 if store is None else PIECES - 1
        pieces = (lane.size + (STRIP - 1 + skew)) // STRIP
        rows = count_points(self.parallel)
        sizes = [*map(ctx.size_of, self.parallel), ctx.param("pieces", pieces)]
        block = level.op(f"zext i32 {self._special('ctaid')} to i64")
        *digits, piece = self._digits(block, sizes, _is_wide(rows * pieces))
        ctx.know_axes(self.parallel, digits, 1)
        first, own = level.op(f"mul nsw i64 {piece}, {STRIP}"), self._special("tid")
        own = level.op(f"zext i32 {own} to i64")
        if store is None:
            low = level.op(f"add nsw i64 {first}, {own}")
            self._along(lane, low, self._end(lane, first, STRIP), STRIPS, 1)
        else:
            low = level.op(f"add nsw i64 {first}, {level.op(f'mul nsw i64 {own}, {PIECES}')}")
            self._neighbours(store, lane, low)
        return rows * pieces

    def _only_store(self, lane: Symbol) -> Store | None:
        """That of a kernel whose rows of 16 bits begin anywhere, so that loads are shifted."""
        orders = self.orders.values()
        loads = [v for order in orders for v in order if v.op == "load"]
        (store, *others) = (s for phase in self.kernel.phases for s in phase.body)
        if others or not isinstance(store, Store) or store.mode != "set":
            return None
        if store.buffer.role == "input" or any(v.op == "check" for x in orders for v in x):
            return None
        if any(v.args or v.attr[0] is store.buffer for v in loads):
            return None
        places = [v.attr for v in loads if lane in symbols(v.attr[1])]
        fits = all(
            b.dtype.itemsize * PIECES == ACCESS_BYTES and stride(at, lane) == 1
            for b, at in [(store.buffer, store.index), *places]
        )
        return store if places and fits else None

    def _neighbours(self, store: Store, lane: Symbol, low: str) -> None:
        """Points that one access stores, from `low` of a row that is taken to begin where such an
        access may; near the ends of a row one by one, since more is loaded than they need."""
        ctx, level = self.ctx, self.level
        parts = coefficient(store.index, lane)
        assert parts is not None
        row = pointer(
            ctx, store.buffer, memory_type(store.buffer.dtype, ctx.machine), groups(ctx, parts[1])
        )
        begin = level.op(f"lshr i64 {level.op(f'ptrtoint ptr {row} to i64')}, 1")
        skew = level.op(f"and i64 {begin}, {PIECES - 1}")
        low = level.op(f"sub nsw i64 {low}, {skew}")
        high, size = level.op(f"add nsw i64 {low}, {PIECES}"), ctx.size_of(lane)
        after = level.op(f"add nsw i64 {high}, {PIECES}")
        inside = (f"icmp sge i64 {low}, {PIECES}", f"icmp sle i64 {after}, {size}")
        whole = level.op(f"and i1 {', '.join(map(level.op, inside))}")
        stop = level.op(f"select i1 {whole}, i64 1, i64 0")
        start = level.extreme("smax", low, "0")
        end = level.op(f"select i1 {whole}, i64 {start}, i64 {level.extreme('smin', high, size)}")
        ctx.begins_anywhere = True
        self._once(lane, low, stop, PIECES)
        ctx.begins_anywhere = False
        self._along(lane, start, end, 1, 1)

    def _end(self, axis: Symbol, first: str, count: int) -> str:
        """Where `count` points of an axis end, or the axis."""
        size, end = self.ctx.size_of(axis), self.level.op(f"add nsw i64 {first}, {count}")
        return self.level.extreme("smin", end, size)

    def _along(self, axis: Symbol, low: str, end: str, step: int, lanes: int) -> None:
        """Points of an axis one after the other."""
        ctx = self.ctx
        ctx.base_rank = 2
        with ctx.writer.each(low, end, step) as i:
            ctx.open_axis(axis, i, 2)
            self.body.set_stage(self.lane, Stage(1, lanes), None)
            self._all_phases()

    def _all_phases(self) -> None:
        for phase in self.kernel.phases:
            Across(self.body, phase).emit()

    def _once(self, lane: Symbol, low: str, times: str, lanes: int) -> None:
        """A vector from `low` on, once or not at all."""
        ctx = self.ctx
        ctx.base_rank = 2
        with ctx.writer.each("0", times):
            ctx.ranked[2:] = [ctx.writer.top]
            ctx.know_axes([lane], [low], 2)
            self.body.set_stage(lane, Stage(1, lanes), None)
            self._all_phases()

    # -------------------------------------------------------------------------- teams

    def _by_teams(self, team: Team) -> tuple[Size, int]:
        """Blocks that it takes, and bytes of shared memory."""
        level = self.level
        tid, block = self._special("tid"), self._special("ctaid")
        if self.split is not None:
            self.meeting = Meeting(self.ctx, self.split.blocks, block)
            block = self.meeting.group
        is_row = team.apart == 1
        shift = (team.threads if is_row else team.teams).bit_length() - 1
        high = level.op(f"lshr i32 {tid}, {shift}")
        low = level.op(f"and i32 {tid}, {(1 << shift) - 1}")
        own, member = (high, low) if is_row else (low, high)
        number = self._number(block, team.teams, own)
        sizes, total = self._chunks(), self._space()
        outside = None
        if team.teams > 1:  # who has nothing to do works along with the others, and stores nothing
            end = sizes[0] if sizes else "1"
            for size in sizes[1:]:
                end = level.op(f"mul i64 {end}, {size}")
            outside = level.op(f"icmp sge i64 {number}, {end}")
            number = level.op(f"select i1 {outside}, i64 0, i64 {number}")
        self.number = number
        self._place(self._digits(number, sizes, _is_wide(total)))
        member = level.op(f"zext i32 {member} to i64")
        leads = level.op(f"icmp ne i64 {member}, 0")
        if outside is not None:
            leads = level.op(f"or i1 {leads}, {outside}")
        exchange = Exchange(self.ctx, team.block, team.threads, team.apart, tid)
        for phase in self.phases:
            if phase in self.scans:
                self.body.skips = outside
                self._scanned(phase, team, member, exchange)
            elif phase.inner:
                self.body.skips = outside
                self._shared(phase, team, member, exchange, leads)
            else:
                self._at_points(phase, team, leads if team.threads > 1 else outside)
            if self.reloads and phase.stores and team.threads > 1:
                barrier(level, team.threads if team.along else team.block)
        blocks = (total + (team.teams - 1)) // team.teams if team.teams > 1 else total
        if self.split is not None:
            blocks = blocks * self.split.blocks
        return blocks, exchange.shared_bytes

    def _at_points(self, phase: Phase, team: Team, others: str | None) -> None:
        """A phase of outer points alone: `others` compute along, and store nothing. At the end
        they don't, since a point may read there what it overwrites."""
        body = self.body
        if team.along:
            body.set_stage(None, Stage(1, 1), None)
        is_last = phase is self.phases[-1]
        body.skips = None if is_last else others
        with self.level.unless(others if is_last else None):
            body.statements(phase, {}, {}, 1)

    def _scanned(self, phase: Phase, team: Team, member: str, exchange: Exchange) -> None:
        """A scan of which the threads of a team take elements that lie behind each other, then as
        many behind these: all of them come as often, also those that have none any more."""
        ctx, body, (axis,) = self.ctx, self.body, phase.inner
        body.set_stage(axis, Stage(1, self.vec), None)
        hows = accumulators(phase, False)
        parts, kinds, count = hows.start(1), hows.kinds(1), ctx.size_of(axis)
        if self.vec > 1:
            count = self.level.op(f"lshr i64 {count}, {self.vec.bit_length() - 1}")
        body.shares = exchange.scanned
        with body.carry("0", count, team.threads, parts, kinds) as (first, now, found):
            level = Stretch(ctx.writer.top)
            ctx.ranked[2:] = [level]
            flat = level.op(f"add nsw i64 {first}, {member}")
            body.idle = level.op(f"icmp sge i64 {flat}, {count}")
            flat = level.op(f"select i1 {body.idle}, i64 0, i64 {flat}")
            self._open(phase, flat, True, False)
            found |= body.statements(phase, now, hows, 2)
        body.idle = body.shares = None
        ctx.ranked[2:] = []

    def _shared(
        self, phase: Phase, team: Team, member: str, exchange: Exchange, leads: str
    ) -> None:
        """A phase whose inner points the threads of a team share."""
        ctx, body, vec = self.ctx, self.body, self.vec if team.along else 1
        if team.along:
            body.set_stage(phase.inner[-1], Stage(1, vec), None)
        lanes, hows = ctx.lanes, accumulators(phase, team.along)
        if self.split is None and not self.scans and self._is_kept(team):
            parts = self._kept(phase, team, member, hows)
        else:
            parts = self._looped(phase, team, member, hows)
        t = ctx.top(lanes)
        wide = t.of(1) if team.along else t
        found: dict[Acc, list[str]] = {}
        for acc, how in hows.items():
            whole = merge_all(t, how, parts[acc])
            if isinstance(how, OnlineCarried):
                whole = how.finished(whole)
            elif team.along:
                whole = across(t, how, whole)
            found[acc] = exchange.merged(wide, how, whole)
        # what all blocks have found, in the one that goes on
        if self.split is not None and phase is self.phases[0]:
            meeting, level, lanes = self.meeting, self.level, wide.lanes
            meeting.lay_out(hows, lanes)
            with level.unless(leads):
                meeting.leave(wide, self.number, found)
            meeting.stay_if_last(exchange)
            start, kinds, stop = hows.start(lanes), hows.kinds(lanes), meeting.blocks
            if body.skips is not None:  # no record is theirs
                stop = level.op(f"select i1 {body.skips}, i64 0, i64 {stop}")
            with body.carry(member, stop, team.threads, start, kinds) as (part, now, every):
                inner = ctx.top(lanes)
                other = meeting.of(inner, self.number, part)
                every |= {a: [how.merge(inner, now[a][0], other[a])] for a, how in hows.items()}
            found = {a: exchange.merged(wide, how, every[a][0]) for a, how in hows.items()}
        for acc, how in hows.items():
            names = {acc: result(found[acc])}
            if isinstance(how, OnlineCarried):
                names = {acc: found[acc][0], how.raw: found[acc][1]}
            for one, name in names.items():
                ctx.acc_facts[one] = 1, wide.lanes > 1
                ctx.acc_names[one] = [name] if wide.lanes > 1 else name

    def _open(self, phase: Phase, flat: str, along: bool, wide: bool) -> None:
        """The inner axes' coordinates at one point of a phase, or `vec` of them."""
        ctx, level = self.ctx, self.ctx.writer.top
        sizes = [ctx.size_of(axis) for axis in phase.inner]
        shift = self.vec.bit_length() - 1 if along else 0
        if shift and len(sizes) > 1:
            last = sizes[-1]
            sizes[-1] = (
                str(int(last) >> shift) if last.isdigit() else level.op(f"lshr i64 {last}, {shift}")
            )
        digits = self._digits(flat, sizes, wide)
        if shift:
            digits[-1] = level.op(f"shl i64 {digits[-1]}, {shift}")
        ctx.know_axes(phase.inner, digits, 2)

    def _kept(self, phase: Phase, team: Team, member: str, hows: Accumulators) -> Parts:
        """All points one after the other: what is known of them stays known in later phases."""
        ctx, body, level = self.ctx, self.body, self.level
        parts, total = hows.start(ctx.lanes), count_points(phase.inner)
        assert isinstance(total, int)
        stretches, count = self.stretches.setdefault(phase.inner, []), total // self.vec
        for first in range(0, count, team.threads):
            if first == len(stretches) * team.threads:  # one or `vec` points for each thread
                stretches.append(part := Stretch(level))
                flat = level.op(f"add i64 {member}, {first}") if first else member
                if first + team.threads > count:
                    part.idle = level.op(f"icmp sge i64 {flat}, {count}")
                    flat = level.op(f"select i1 {part.idle}, i64 0, i64 {flat}")
                self._open(phase, flat, True, False)
                part.axes = {axis: ctx.axis_name[axis] for axis in phase.inner}
            part = stretches[first // team.threads]
            part.enter(ctx)
            body.idle = part.idle
            parts = body.statements(phase, parts, hows, 2)
        body.idle = None
        ctx.ranked[2:] = []
        return parts

    def _looped(self, phase: Phase, team: Team, member: str, hows: Accumulators) -> Parts:
        ctx, level, body = self.ctx, self.level, self.body
        total, vec = count_points(phase.inner), self.vec if team.along else 1
        count = ctx.size_of(phase.inner[0])
        for axis in phase.inner[1:]:
            count = level.op(f"mul i64 {count}, {ctx.size_of(axis)}")
        if vec > 1:
            count = level.op(f"lshr i64 {count}, {vec.bit_length() - 1}")
        if (
            self.reloads and body.skips is not None
        ):  # another team may be storing what it would read
            count = level.op(f"select i1 {body.skips}, i64 0, i64 {count}")
        first, often = member, hint(total) // vec
        if self.split is not None and phase is self.phases[0]:
            steps, often = ctx.param("steps", self.split.steps), hint(self.split.steps)
            low = level.op(f"mul i64 {self.meeting.part}, {steps}")
            first = level.op(f"add i64 {low}, {member}")
            high = level.op(f"add i64 {low}, {steps}")
            count = level.extreme("smin", high, count)

        def place(flat: str) -> None:
            self._open(phase, flat, team.along, _is_wide(total))

        often //= team.threads
        return body.reduced(phase, hows, first, count, team.threads, often, place)


def _is_wide(total: Size) -> bool:
    """Whether numbers of points may not fit 32 bits."""
    return not isinstance(total, int) or total >= 1 << 31
