"""A Kernel as one LLVM function: loop nest, vectors along the lanes axis, tails, reductions.

    define void @k_<hash>(ptr bufs, ptr params, i64 begin, i64 end, i64 thread)

`bufs` is an array of data pointers, one per buffer, then that of the status (a code and the index
that was refused); `params` the sizes that the text leaves open; [begin, end) a range of the
parallel iterations: points of the outer axes, times blocks of the lanes axis. The text names
nothing but positions, so kernels that differ in sizes alone are one function.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from fusee.codegen.llvm.body import Body, Tile, choose_tile
from fusee.codegen.llvm.loops import Across, Along, Strip
from fusee.codegen.llvm.ops import Context
from fusee.codegen.llvm.reduce import (
    Stage,
    body_order,
    choose_stages,
    is_light,
    is_short,
    outlined,
    phase_cost,
)
from fusee.codegen.llvm.types import Machine, Target
from fusee.loops.ir import Buffer, Kernel
from fusee.sym.expr import Size, Symbol, hint, minimum, product

# Lanes per parallel iteration: of plain kernels, of those that reduce within, and so on.
BLOCK, BLOCK_REDUCING, BLOCK_ORDERED, BLOCK_TILED = 1024, 64, 256, 256
# Strips of columns that a reduction down the rows should have at least; how wide they may be.
STRIPS, WIDEST_STRIP = 16, 1024


@dataclass(frozen=True)
class KernelCode:
    """A kernel's function and what the host must give it.

    `declares` are lines and whole functions that the module needs once. `params` and `total`, the
    number of parallel iterations, are expressions over sizes; `work` is about how many additions
    one of these iterations takes.
    """

    name: str
    text: str
    declares: frozenset[str]
    buffers: tuple[Buffer, ...]
    params: tuple[Size, ...]
    total: Size
    work: Size

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
        self.kernel = kernel
        self.ctx = Context(kernel, machine)
        self.writer = self.ctx.writer
        self.lane = self._outer_lane()
        self.orders = {id(phase): body_order(phase) for phase in kernel.phases}
        self.writer.outlined = outlined(self.orders.values())
        self.body = Body(self.ctx, self.orders, masks_sums=self.lane is None)
        self.parallel = [a for a in kernel.outer if a not in kernel.ordered and a != self.lane]
        self.ordered = [a for a in kernel.outer if a in kernel.ordered]
        self.tile: Tile | None = None
        if self.lane is not None:
            orders = list(self.orders.values())
            self.stages = choose_stages(kernel.phases, orders, self.lane, machine)
            self.tile = choose_tile(kernel, orders, self.lane, self.stages[0].lanes, machine)
            if self.tile is not None and is_light(orders):
                # light work: what the squares leave is no slower one by one, and much less code
                self.stages = [Stage(1, 1)]
        self.ctx.base_rank = 1 + len(self.ordered) + bool(self.lane) + bool(self.tile)
        self.block = BLOCK
        reduces = not all(is_short(phase) for phase in kernel.phases)
        scans = any(map(self.body.is_scan, kernel.phases))
        self.is_strip = self.lane is not None and reduces and not self.ordered and not scans
        if self.tile is not None:
            self.block = BLOCK_TILED
        elif self.ordered:
            self.block = BLOCK_ORDERED
        elif reduces:
            self.block = self._strip_width()

    def _outer_lane(self) -> Symbol | None:
        """The outer axis for vectors. Ordered kernels come without: their last axis may serve."""
        kernel = self.kernel
        if kernel.lanes is not None:
            return None if kernel.lanes in kernel.ordered else kernel.lanes
        last = kernel.outer[-1] if kernel.outer else None
        if last is None or last in kernel.ordered or any(p.inner for p in kernel.phases):
            return None
        return last

    def _strip_width(self) -> int:
        """Columns that are read row by row: long runs of them, but enough strips for threads."""
        if self.lane is None or self.lane.hi is None:
            return BLOCK_REDUCING
        others = hint(product(axis.hi for axis in self.parallel if axis.hi is not None))
        fair = hint(self.lane.hi) * max(others, 1) // STRIPS
        return min(max(fair & -BLOCK_REDUCING, BLOCK_REDUCING), WIDEST_STRIP)

    # -------------------------------------------------------------------------- function

    def emit(self) -> KernelCode:
        ctx = self.ctx
        if self.lane is not None and not self.parallel and not self.is_strip:
            self._one_range()
        else:
            self._points()
        status = len(ctx.buffers)
        lines = ["entry:"]
        if ctx.uses_spare:
            lines.append("  %spare = alloca [2048 x i8], align 64")
        lines += [f"  {line}" for line in ctx.arrays]
        if ctx.uses_status:
            lines.append(f"  %status_at = getelementptr ptr, ptr %bufs, i64 {status}")
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
        body = "\n".join(lines)
        name = "k_" + hashlib.sha256(body.encode()).hexdigest()[:20]
        signature = "ptr %bufs, ptr %params, i64 %begin, i64 %end, i64 %thread"
        return KernelCode(
            name,
            f"define void @{name}({signature}) nounwind {{\n{body}\n}}\n",
            frozenset(self.writer.declares.values()),
            tuple(ctx.buffers),
            tuple(size for _, size in ctx.params),
            self._total(),
            self._work(),
        )

    def _total(self) -> Size:
        total = product(self._count(axis) for axis in self.parallel)
        if self.lane is None:
            return total
        assert self.lane.hi is not None
        return total * ((self.lane.hi + self.block - 1) // self.block)

    def _count(self, axis: Symbol) -> Size:
        """Parallel iterations along an axis that is not the lanes'."""
        assert axis.hi is not None
        if self.tile is None or axis != self.tile.axis:
            return axis.hi
        return (axis.hi + self.tile.strip - 1) // self.tile.strip

    def _work(self) -> Size:
        work: Size = 0
        for phase in self.kernel.phases:
            work = work + phase_cost(phase, self.orders[id(phase)])
        work = work * product(axis.hi for axis in self.ordered if axis.hi is not None)
        work = work * (self.tile.strip if self.tile else 1)
        if self.lane is None or self.lane.hi is None:
            return work
        return work * minimum(self.lane.hi, self.block)

    # -------------------------------------------------------------------------- outer loops

    def _one_range(self) -> None:
        """Only the lanes axis is parallel: all blocks are one range of it."""
        assert self.lane is not None
        top = self.writer.top
        self.ctx.ranked.append(top)
        low, high = self._block_range("%begin", "%end")
        self._ordered(0, low, high)

    def _block_range(self, first: str, last: str) -> tuple[str, str]:
        assert self.lane is not None
        ctx, top = self.ctx, self.writer.top
        low = top.op(f"mul nsw i64 {first}, {self.block}")
        high = top.op(f"mul nsw i64 {last}, {self.block}")
        size = ctx.size_of(self.lane)
        return low, Target(top, ctx.machine, 1).intrinsic("smin", "i64", high, size)

    def _points(self) -> None:
        """One loop over the linear range; coordinates count along like an odometer."""
        ctx, top = self.ctx, self.writer.top
        sizes = [self._count_name(axis) for axis in self.parallel]
        if self.lane is not None:
            more = top.op(f"add i64 {ctx.size_of(self.lane)}, {self.block - 1}")
            sizes.append(top.op(f"udiv i64 {more}, {self.block}"))
        rest, starts = "%begin", []
        for size in reversed(sizes[1:]):
            starts.append(top.op(f"urem i64 {rest}, {size}"))
            rest = top.op(f"udiv i64 {rest}, {size}")
        if sizes:
            starts.append(rest)

        def body(_: str, at: list[str]) -> list[str]:
            ctx.ranked.append(self.writer.top)
            for axis, name in zip(self.parallel, at, strict=False):
                ctx.axis_rank[axis], ctx.axis_name[axis] = 1, name
            low = high = ""
            if self.lane is not None:
                following = self.writer.top.op(f"add nsw i64 {at[-1]}, 1")
                low, high = self._block_range(at[-1], following)
            if self.tile is not None:
                self._tiled(self.tile, ctx.axis_name[self.tile.axis], low, high)
            else:
                self._ordered(0, low, high)
            return self._advance(at, sizes)

        self.writer.loop("%begin", "%end", 1, [("i64", s) for s in reversed(starts)], body)

    def _advance(self, at: list[str], sizes: list[str]) -> list[str]:
        op = self.writer.top.op
        carry = "1"
        following: list[str] = []
        for name, size in zip(reversed(at), reversed(sizes), strict=True):
            plus = op(f"add nsw i64 {name}, {carry}")
            if len(following) == len(at) - 1:
                following.append(plus)
                break
            wraps = op(f"icmp eq i64 {plus}, {size}")
            following.append(op(f"select i1 {wraps}, i64 0, i64 {plus}"))
            carry = op(f"zext i1 {wraps} to i64")
        return following[::-1]

    def _count_name(self, axis: Symbol) -> str:
        top, size = self.writer.top, self.ctx.size_of(axis)
        if self.tile is None or axis != self.tile.axis:
            return size
        more = top.op(f"add i64 {size}, {self.tile.strip - 1}")
        return top.op(f"udiv i64 {more}, {self.tile.strip}")

    def _tiled(self, tile: Tile, strip: str, low: str, high: str) -> None:
        """A strip of the tile's axis: squares as far as they go, then the rest row by row."""
        ctx, writer, lane, axis = self.ctx, self.writer, self.lane, tile.axis
        assert lane is not None
        op = writer.top.op
        first = op(f"mul nsw i64 {strip}, {tile.strip}")
        after = op(f"add nsw i64 {first}, {tile.strip}")
        scalar = Target(writer.top, ctx.machine, 1)
        last = scalar.intrinsic("smin", "i64", after, ctx.size_of(axis))
        is_full = op(f"icmp eq i64 {last}, {after}")
        whole = op(f"and i64 {op(f'sub i64 {high}, {low}')}, {-tile.lanes}")
        whole = op(f"select i1 {is_full}, i64 {whole}, i64 0")
        middle = op(f"add i64 {low}, {whole}")

        def column(j: str, _: list[str]) -> list[str]:
            ctx.open_axis(lane, j, 2)
            return writer.loop(first, last, tile.lanes, [], square)

        def square(i: str, _: list[str]) -> list[str]:
            ctx.open_axis(axis, i, 3)
            self.body.set_stage(lane, Stage(tile.lanes, tile.lanes), None)
            ctx.copy_axis = axis
            for phase in self.kernel.phases:
                Across(self.body, phase).emit()
            return []

        def row(i: str, _: list[str]) -> list[str]:
            ctx.open_axis(axis, i, 2)
            self._outer_lanes(lane, middle, high)
            return []

        writer.loop(low, middle, tile.lanes, [], column)
        writer.loop(first, last, 1, [], row)

    def _ordered(self, position: int, low: str, high: str) -> None:
        if position < len(self.ordered):
            axis = self.ordered[position]

            def body(i: str, _: list[str]) -> list[str]:
                self.ctx.open_axis(axis, i, 2 + position)
                self._ordered(position + 1, low, high)
                return []

            self.writer.loop("0", self.ctx.size_of(axis), 1, [], body)
        elif self.lane is not None:
            self._outer_lanes(self.lane, low, high)
        else:
            for phase in self.kernel.phases:
                if phase.inner and not self.body.is_scan(phase):
                    Along(self.body, phase).emit()
                else:
                    self.body.set_stage(None, Stage(1, 1), None)
                    Across(self.body, phase).emit()

    # -------------------------------------------------------------------------- lanes

    def _outer_lanes(self, lane: Symbol, low: str, high: str) -> None:
        phases = self.kernel.phases
        parts = self._stage_parts(low, high)
        if self.is_strip:
            Strip(self.body, phases, lane, parts, (low, high), self.block).emit()
            return
        for stage, start, stop in parts:

            def body(i: str, _: list[str], stage: Stage = stage) -> list[str]:
                self.body.open_lanes(lane, stage, i, high, self.ctx.base_rank)
                for phase in phases:
                    Across(self.body, phase).emit()
                return []

            self.writer.loop(start, stop, stage.width, [], body)

    def _stage_parts(self, low: str, high: str) -> list[tuple[Stage, str, str]]:
        """Each stage with the part of [low, high) that it covers."""
        found = []
        start = low
        for stage in self.stages:
            stop = high
            if not stage.masked and stage.lanes > 1:
                op = self.writer.top.op
                whole = op(f"and i64 {op(f'sub i64 {high}, {start}')}, {-stage.width}")
                stop = op(f"add i64 {start}, {whole}")
            found.append((stage, start, stop))
            start = stop
        return found
