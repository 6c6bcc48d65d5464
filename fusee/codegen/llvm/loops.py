"""The inner loops of a phase, with the accumulators that they carry round.

Lanes run either across the reductions, every lane one of its own, or along the last inner axis:
then all lanes become one number at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from fusee.codegen.llvm.body import Body, Parts
from fusee.codegen.llvm.reduce import (
    Carried,
    Stage,
    across,
    carried,
    choose_stages,
    into_first_lane,
    is_short,
    merge,
    merge_all,
    result,
    settle,
    two_sum,
)
from fusee.codegen.llvm.types import BITS, HELD, Target
from fusee.loops.ir import Acc, Accumulate, Phase, Store
from fusee.runtime.llvm_text import vector
from fusee.sym.expr import Symbol

# ---------------------------------------------------------------------------- nest


# Additions into one accumulator before its sum goes to the second level. Along lanes, many
# accumulators share the error; across them, each is on its own.
SUM_ALONG, SUM_ACROSS = 128, 16


def accumulators(phase: Phase, two_level: bool) -> dict[Acc, Carried]:
    """How each accumulator of a phase is kept; sums in two levels if so asked."""
    return {s.acc: carried(s, two_level) for s in phase.body if isinstance(s, Accumulate)}


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

        def body(i: str, carried: Parts) -> Parts:
            self.ctx.open_axis(inner[position], i, self.ctx.base_rank + 1 + position)
            return self._nest(position + 1, carried)

        size = self.ctx.size_of(inner[position])
        return self.body.carry("0", size, 1, parts, self.outer_kinds, body)

    def _inside(self, parts: Parts) -> Parts:
        raise NotImplementedError

    def _loop(
        self, start: str, stop: str, step: int, lanes: int, parts: Parts, open_: Open
    ) -> Parts:
        """The innermost loop: `open_(i, rank)` makes its body the top level."""
        rank = self.ctx.base_rank + len(self.phase.inner)
        kinds = {acc: how.kinds(lanes) for acc, how in self.hows.items()}

        def body(i: str, carried: Parts) -> Parts:
            open_(i, rank)
            return self.body.statements(self.phase, carried, self.hows, rank)

        return self.body.carry(start, stop, step, parts, kinds, body)


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
        t = Target(self.writer.top, ctx.machine, self.lanes)
        for acc, how in self.hows.items():
            ctx.acc_facts[acc] = (ctx.base_rank, self.lanes > 1)
            self.body.publish(how, [settle(t, how, part) for part in final[acc]])

    def _inside(self, parts: Parts) -> Parts:
        inner = self.phase.inner
        if not self.two_level:
            rank = self.ctx.base_rank + len(inner)
            return self.body.statements(self.phase, parts, self.hows, rank)
        size = self.ctx.size_of(inner[-1])
        return self.body.blocks(size, SUM_ACROSS, parts, self.outer_kinds, self._segment)

    def _segment(self, first: str, last: str, outer: Parts) -> Parts:
        t = Target(self.writer.top, self.ctx.machine, self.lanes)
        local = {
            acc: [how.start(self.lanes) for _ in outer[acc]] if how.two_level else outer[acc]
            for acc, how in self.hows.items()
        }
        open_ = functools.partial(self.ctx.open_axis, self.phase.inner[-1])
        local = self._loop(first, last, 1, self.lanes, local, open_)
        return {
            acc: [two_sum(t, how, o, x[0]) for o, x in zip(outer[acc], local[acc], strict=True)]
            if how.two_level
            else local[acc]
            for acc, how in self.hows.items()
        }


class Along(_Nest):
    """Vectors run along the last inner axis; all lanes and copies become one at the end.

    Outside the innermost loop a two-level sum is one vector of sums and one of errors; other
    accumulators keep all their copies.
    """

    is_own = True

    def __init__(self, body: Body, phase: Phase) -> None:
        self.lane = phase.inner[-1]
        self.stages = choose_stages([phase], [body.order(phase)], self.lane, body.ctx.machine)
        super().__init__(body, phase, self.stages[0].lanes)

    def emit(self) -> None:
        ctx = self.ctx
        start = {
            acc: [how.outer_start(self.lanes)] * (1 if how.two_level else self.stages[0].copies)
            for acc, how in self.hows.items()
        }
        final = self._nest(0, start)
        t = Target(self.writer.top, ctx.machine, self.lanes)
        for acc, how in self.hows.items():
            whole = merge_all(t, how, final[acc])
            ctx.acc_facts[acc] = (ctx.base_rank, False)
            ctx.acc_names[acc] = result(how, across(ctx, t, how, settle(t, how, whole)))

    def _inside(self, parts: Parts) -> Parts:
        size, start = self.ctx.size_of(self.lane), "0"
        for stage in self.stages:
            stop = size if stage.masked or stage.lanes == 1 else self._whole(size, stage.width)
            if stop == start:
                continue
            if self.two_level and stage is self.stages[0]:
                length = SUM_ALONG * stage.width
                block = functools.partial(self._segment, stage)
                parts = self.body.blocks(stop, length, parts, self.outer_kinds, block)
            else:
                parts = self._segment(stage, start, stop, parts, size)
            start = stop
        return parts

    def _whole(self, size: str, width: int) -> str:
        """The part of the axis that whole vectors cover."""
        if size.isdigit():
            return str(int(size) & -width)
        entry = self.ctx.ranked[0]
        return entry.once(("whole", size, width), lambda: entry.op(f"and i64 {size}, {-width}"))

    def _segment(self, stage: Stage, start: str, stop: str, outer: Parts, end: str = "") -> Parts:
        """One loop along the lanes; two-level sums start from zero, then join the outer ones.

        end   of the axis, if that is not `stop`
        """
        machine = self.ctx.machine
        fresh = stage.lanes != self.lanes  # scalars can't continue vectors
        local = {
            acc: [how.start(stage.lanes) for _ in range(stage.copies)]
            if how.two_level or fresh
            else outer[acc][: stage.copies]
            for acc, how in self.hows.items()
        }

        def open_(i: str, rank: int) -> None:
            self.body.open_lanes(self.lane, stage, i, end or stop, rank)

        local = self._loop(start, stop, stage.width, stage.lanes, local, open_)
        small = Target(self.writer.top, machine, stage.lanes)
        wide = Target(self.writer.top, machine, self.lanes)
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
                merged[acc] = [merge(wide, how, outer[acc][0], whole), *outer[acc][1:]]
        return merged


# ---------------------------------------------------------------------------- strip
# Reductions down the columns of a block: rows outside, vectors inside.
#
# Vectors along the columns, each walking down all rows, would touch one line of the cache per row
# and a new page every few. So a few rows of the whole block are read before the next ones, and what
# the columns have accumulated waits in small arrays meanwhile.


class Strip:
    """All phases over the columns [low, high), at most `width` of them."""

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
        self.hows: dict[Acc, Carried] = {}
        # arrays per accumulator: its value, or sum, error and the sum of the present rows
        self.arrays: dict[Acc, list[str]] = {}

    def emit(self) -> None:
        for phase in self.phases:
            self._phase(phase)

    def _phase(self, phase: Phase) -> None:
        hows = accumulators(phase, two_level=True)
        self.hows |= hows
        for acc, how in hows.items():
            places = range(len(self._starts(how, 1)))
            self.arrays[acc] = [self.ctx.array(self.width * self._size(acc, k)) for k in places]
        two_level = {acc: how for acc, how in hows.items() if how.two_level}

        def start(t: Target, i: str) -> None:
            for acc, how in hows.items():
                self._store(t, i, acc, [self._starts(how, t.lanes)] * self.ctx.copies)

        def finish(t: Target, i: str) -> None:
            for acc, how in two_level.items():
                sums = self._load(t, i, acc, range(2))
                self._store(t, i, acc, [settle(t, how, part) for part in sums])

        if hows:
            self._columns(self.first_rank, start)
        self._rows(phase, hows, 0)
        if two_level:
            self._columns(self.first_rank, finish)

    # -------------------------------------------------------------------------- loops

    def _columns(self, rank: int, write: Callable[[Target, str], None]) -> None:
        """A loop over the block's vectors, for each stage."""
        for stage, start, stop in self.stages:

            def body(i: str, _: list[str], stage: Stage = stage) -> list[str]:
                self.body.open_lanes(self.lane, stage, i, self.high, rank)
                self.ctx.base_rank = rank
                write(Target(self.writer.top, self.ctx.machine, stage.lanes), i)
                return []

            self.writer.loop(start, stop, stage.width, [], body)

    def _rows(self, phase: Phase, hows: dict[Acc, Carried], position: int) -> None:
        """The phase's inner axes; the last one a few rows at a time."""
        inner, rank = phase.inner, self.first_rank + position
        if not inner:
            self._columns(rank, lambda t, i: self._element(phase, hows, t, i))
            return
        size = self.ctx.size_of(inner[position])

        def row(i: str, _: list[str]) -> list[str]:
            self.ctx.open_axis(inner[position], i, rank)
            self._rows(phase, hows, position + 1)
            return []

        def block(first: str, last: str, parts: Parts) -> Parts:
            del self.ctx.ranked[rank:]
            self.ctx.ranked.append(self.writer.top)
            self._block(phase, hows, (first, last), rank + 1)
            return parts

        if position < len(inner) - 1:
            self.writer.loop("0", size, 1, [], row)
        else:
            self.body.blocks(size, SUM_ACROSS, {}, {}, block)

    def _block(
        self, phase: Phase, hows: dict[Acc, Carried], rows: tuple[str, str], rank: int
    ) -> None:
        axis, two_level = phase.inner[-1], {a: h for a, h in hows.items() if h.two_level}
        if not any(isinstance(s, Store) for s in phase.body):
            self._columns(rank, lambda t, i: self._walk(phase, hows, t, i, rows))
            return

        # A load waits for stores whose address has the same last 12 bits, and rows often lie a
        # multiple of 4096 bytes apart. So whoever stores goes along the rows.
        def row(r: str, _: list[str]) -> list[str]:
            self.ctx.open_axis(axis, r, rank)
            self._columns(rank + 1, lambda t, i: self._element(phase, hows, t, i))
            return []

        def add(t: Target, i: str) -> None:
            for acc, how in two_level.items():
                found = self._load(t, i, acc, range(3))
                parts = [[*two_sum(t, how, p[:2], p[2]), how.start(t.lanes)[0]] for p in found]
                self._store(t, i, acc, parts)

        self.writer.loop(*rows, 1, [], row)
        if two_level:
            self._columns(rank, add)

    def _walk(
        self, phase: Phase, hows: dict[Acc, Carried], t: Target, i: str, rows: tuple[str, str]
    ) -> None:
        """One vector of columns down some rows, in registers."""
        ctx, rank = self.ctx, self.ctx.base_rank + 1
        self._publish(phase, hows, t, i)
        outer = {
            acc: self._load(t, i, acc, range(len(h.outer_kinds(1)))) for acc, h in hows.items()
        }
        local = {
            acc: [how.start(t.lanes) for _ in outer[acc]] if how.two_level else outer[acc]
            for acc, how in hows.items()
        }

        def row(r: str, carried: Parts) -> Parts:
            ctx.open_axis(phase.inner[-1], r, rank)
            return self.body.statements(phase, carried, hows, rank)

        kinds = {acc: how.kinds(t.lanes) for acc, how in hows.items()}
        local = self.body.carry(*rows, 1, local, kinds, row)
        for acc, how in hows.items():
            pairs = zip(outer[acc], local[acc], strict=True)
            parts = [two_sum(t, how, x, y[0]) if how.two_level else y for x, y in pairs]
            self._store(t, i, acc, parts)

    def _element(self, phase: Phase, hows: dict[Acc, Carried], t: Target, i: str) -> None:
        """One vector of one row."""
        self._publish(phase, hows, t, i)
        parts: Parts = {}
        for acc, how in hows.items():
            places = range(2, 3) if how.two_level else range(len(how.kinds(1)))
            parts[acc] = self._load(t, i, acc, places)
        parts = self.body.statements(phase, parts, hows, self.ctx.base_rank)
        for acc, how in hows.items():
            self._store(t, i, acc, parts[acc], 2 if how.two_level else 0)

    # -------------------------------------------------------------------------- arrays

    @staticmethod
    def _starts(how: Carried, lanes: int) -> list[str]:
        return how.start(lanes) * 3 if how.two_level else how.start(lanes)

    def _publish(self, phase: Phase, hows: dict[Acc, Carried], t: Target, i: str) -> None:
        """What earlier phases accumulated, for this phase to read."""
        ctx = self.ctx
        for value in self.body.order(phase):
            if value.op == "acc" and value.attr not in hows:
                acc, how = value.attr, self.hows[value.attr]
                # a sum that was settled is in the first array, the index of a maximum in the last
                place = 0 if how.two_level else len(how.dtypes) - 1
                names = [part for (part,) in self._load(t, i, acc, range(place, place + 1))]
                ctx.acc_facts[acc] = (ctx.base_rank, ctx.lanes > 1)
                ctx.acc_names[acc] = names if ctx.lanes > 1 else names[0]

    def _size(self, acc: Acc, place: int) -> int:
        """Bytes of an element."""
        dtypes = self.hows[acc].dtypes
        return max(BITS[HELD[dtypes[place % len(dtypes)]]] // 8, 1)

    def _kind(self, acc: Acc, place: int, lanes: int) -> str:
        dtypes = self.hows[acc].dtypes
        return vector(HELD[dtypes[place % len(dtypes)]], lanes)

    def _address(self, t: Target, i: str, acc: Acc, copy: int, place: int) -> str:
        """Of the column i in an array, `copy` vectors further on."""
        here = t.level.op(f"sub i64 {i}, {self.low}")
        if copy:
            here = t.level.op(f"add i64 {here}, {copy * t.lanes}")
        size, array = self._size(acc, place), self.arrays[acc][place]
        return t.level.op(f"getelementptr [{size} x i8], ptr {array}, i64 {here}")

    def _load(self, t: Target, i: str, acc: Acc, places: range) -> list[list[str]]:
        """Per copy, parts of an accumulator."""
        found = []
        for copy in range(self.ctx.copies):
            addresses = [self._address(t, i, acc, copy, place) for place in places]
            kinds = [self._kind(acc, place, t.lanes) for place in places]
            loads = zip(kinds, addresses, strict=True)
            found.append([t.level.op(f"load {kind}, ptr {at}, align 1") for kind, at in loads])
        return found

    def _store(
        self, t: Target, i: str, acc: Acc, copies: Sequence[Sequence[str]], first: int = 0
    ) -> None:
        """Parts of an accumulator for every copy, from the array number `first` on."""
        # the loops inside have closed: what follows them goes to the same level
        for copy, parts in enumerate(copies):
            for place, name in enumerate(parts, first):
                address = self._address(t, i, acc, copy, place)
                kind = self._kind(acc, place, t.lanes)
                t.level.do(f"store {kind} {name}, ptr {address}, align 1")
