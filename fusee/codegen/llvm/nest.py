"""The inner loops of a phase, with the accumulators that they carry round.

Lanes run either across the reductions, every lane one of its own, or along the last inner axis:
then all lanes become one number at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from fusee.codegen.llvm.body import Body, Parts
from fusee.codegen.llvm.ops import Target
from fusee.codegen.llvm.reduce import (
    Carried,
    across,
    carried,
    into_first_lane,
    merge,
    merge_all,
    result,
    settle,
    two_sum,
)
from fusee.codegen.llvm.shape import Stage, choose_stages, is_short
from fusee.loops.ir import Acc, Accumulate, Phase

# Additions into one accumulator before its sum goes to the second level. Along lanes, many
# accumulators share the error; across them, each is on its own.
SUM_ALONG, SUM_ACROSS = 128, 16


def accumulators(phase: Phase, two_level: bool) -> dict[Acc, Carried]:
    """How each accumulator of a phase is kept; sums in two levels if so asked."""
    return {s.acc: carried(s, two_level) for s in phase.body if isinstance(s, Accumulate)}


class _Nest:
    """The loops of one phase with what they carry."""

    along: bool  # vectors run along the innermost axis

    def __init__(self, body: Body, phase: Phase) -> None:
        self.body, self.phase = body, phase
        self.ctx, self.writer = body.ctx, body.writer
        self.rank = self.ctx.base_rank + 1  # of the first inner axis
        scans = body.is_scan(phase)
        self.hows = accumulators(phase, not scans and not is_short(phase))
        self.two_level = any(how.two_level for how in self.hows.values())

    def carry(
        self,
        start: str,
        stop: str,
        step: int,
        parts: Parts,
        kinds: Callable[[Carried], list[str]],
        body: Callable[[str, Parts], Parts],
    ) -> Parts:
        """A loop that carries accumulators round; `kinds` are the types of one copy."""
        return self.body.carry(start, stop, step, parts, lambda acc: kinds(self.hows[acc]), body)


class Across(_Nest):
    """Inner loops are scalar; each lane and copy accumulates on its own."""

    def emit(self) -> None:
        ctx = self.ctx
        start = {
            acc: [how.outer_start(ctx.lanes) for _ in range(ctx.copies)]
            for acc, how in self.hows.items()
        }
        final = self._nest(0, start)
        t = Target(self.writer.top, ctx.machine, ctx.lanes)
        for acc, how in self.hows.items():
            ctx.acc_facts[acc] = (ctx.base_rank, ctx.lanes > 1)
            self.body.publish(how, [settle(t, how, part) for part in final[acc]])

    def _outer_kinds(self, how: Carried) -> list[str]:
        return how.outer_kinds(self.ctx.lanes)

    def _nest(self, position: int, parts: Parts) -> Parts:
        inner = self.phase.inner
        if position == len(inner):
            return self.body.statements(
                self.phase, parts, self.hows, self.ctx.base_rank + len(inner)
            )
        size = self.ctx.size_of(inner[position])
        if position == len(inner) - 1 and self.two_level:
            return self._blocks(size, parts)

        def body(i: str, carried: Parts) -> Parts:
            self.ctx.open_axis(inner[position], i, self.rank + position)
            return self._nest(position + 1, carried)

        return self.carry("0", size, 1, parts, self._outer_kinds, body)

    def _blocks(self, size: str, parts: Parts) -> Parts:
        ctx, axis = self.ctx, self.phase.inner[-1]
        rank = ctx.base_rank + len(self.phase.inner)

        def block(first: str, outer: Parts) -> Parts:
            t = Target(self.writer.top, ctx.machine, ctx.lanes)
            scalar = Target(self.writer.top, ctx.machine, 1)
            after = self.writer.top.op(f"add nsw i64 {first}, {SUM_ACROSS}")
            last = scalar.intrinsic("smin", "i64", after, size)
            local = {
                acc: [how.start(ctx.lanes) for _ in outer[acc]] if how.two_level else outer[acc]
                for acc, how in self.hows.items()
            }

            def body(i: str, carried: Parts) -> Parts:
                ctx.open_axis(axis, i, rank)
                return self.body.statements(self.phase, carried, self.hows, rank)

            local = self.carry(first, last, 1, local, lambda how: how.kinds(ctx.lanes), body)
            return {
                acc: [two_sum(t, how, o, x[0]) for o, x in zip(outer[acc], local[acc], strict=True)]
                if how.two_level
                else local[acc]
                for acc, how in self.hows.items()
            }

        return self.carry("0", size, SUM_ACROSS, parts, self._outer_kinds, block)


class Along(_Nest):
    """Vectors run along the last inner axis; all lanes and copies become one at the end.

    Outside the innermost loop a two-level sum is one vector of sums and one of errors; other
    accumulators keep all their copies.
    """

    def __init__(self, body: Body, phase: Phase) -> None:
        super().__init__(body, phase)
        self.lane = phase.inner[-1]
        order = body.order(phase)
        self.stages = choose_stages([phase], [order], self.lane, self.ctx.machine)
        self.lanes = self.stages[0].lanes

    def emit(self) -> None:
        ctx = self.ctx
        start = {
            acc: [how.outer_start(self.lanes)]
            if how.two_level
            else [how.start(self.lanes) for _ in range(self.stages[0].copies)]
            for acc, how in self.hows.items()
        }
        final = self._nest(0, start)
        t = Target(self.writer.top, ctx.machine, self.lanes)
        for acc, how in self.hows.items():
            if how.two_level:
                whole = settle(t, how, final[acc][0])
            else:
                whole = merge_all(t, how, final[acc])
            ctx.acc_facts[acc] = (ctx.base_rank, False)
            ctx.acc_names[acc] = result(how, across(ctx, t, how, whole))

    def _outer_kinds(self, how: Carried) -> list[str]:
        return how.outer_kinds(self.lanes)

    def _nest(self, position: int, parts: Parts) -> Parts:
        inner = self.phase.inner
        if position == len(inner) - 1:
            return self._stages(parts)

        def body(i: str, carried: Parts) -> Parts:
            self.ctx.open_axis(inner[position], i, self.rank + position)
            return self._nest(position + 1, carried)

        size = self.ctx.size_of(inner[position])
        return self.carry("0", size, 1, parts, self._outer_kinds, body)

    def _stages(self, parts: Parts) -> Parts:
        size, start = self.ctx.size_of(self.lane), "0"
        for stage in self.stages:
            stop = size if stage.masked or stage.lanes == 1 else self._whole(size, stage.width)
            if stop == start:
                continue
            if self.two_level and stage is self.stages[0]:
                parts = self._blocks(stage, stop, parts)
            else:
                parts = self._segment(stage, start, stop, size, parts)
            start = stop
        return parts

    def _whole(self, size: str, width: int) -> str:
        """The part of the axis that whole vectors cover."""
        if size.isdigit():
            return str(int(size) & -width)
        entry = self.ctx.ranked[0]
        key = ("whole", size, width)
        found = entry.known.get(key)
        if found is None:
            found = entry.known[key] = entry.op(f"and i64 {size}, {-width}")
        assert isinstance(found, str)
        return found

    def _blocks(self, stage: Stage, stop: str, parts: Parts) -> Parts:
        length = SUM_ALONG * stage.width

        def block(first: str, outer: Parts) -> Parts:
            scalar = Target(self.writer.top, self.ctx.machine, 1)
            after = self.writer.top.op(f"add nsw i64 {first}, {length}")
            last = scalar.intrinsic("smin", "i64", after, stop)
            return self._segment(stage, first, last, last, outer)

        return self.carry("0", stop, length, parts, self._outer_kinds, block)

    def _segment(self, stage: Stage, start: str, stop: str, end: str, outer: Parts) -> Parts:
        """One loop along the lanes; two-level sums start from zero, then join the outer ones."""
        ctx, rank = self.ctx, self.ctx.base_rank + len(self.phase.inner)
        fresh = stage.lanes != self.lanes  # scalars can't continue vectors
        local = {
            acc: [how.start(stage.lanes) for _ in range(stage.copies)]
            if how.two_level or fresh
            else outer[acc][: stage.copies]
            for acc, how in self.hows.items()
        }

        def body(i: str, carried: Parts) -> Parts:
            self.body.open_lanes(self.lane, stage, i, end, rank)
            return self.body.statements(self.phase, carried, self.hows, rank)

        local = self.carry(
            start, stop, stage.width, local, lambda how: how.kinds(stage.lanes), body
        )
        small = Target(self.writer.top, ctx.machine, stage.lanes)
        wide = Target(self.writer.top, ctx.machine, self.lanes)
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
