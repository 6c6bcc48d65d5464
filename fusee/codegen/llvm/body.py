"""The body of a phase: its statements in the innermost open loop, for one stage of vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusee.codegen.llvm.access import store_scalar, store_vector
from fusee.codegen.llvm.context import Context
from fusee.codegen.llvm.ops import emit
from fusee.codegen.llvm.reduce import Carried, accumulate, fuses, result
from fusee.codegen.llvm.shape import Stage, is_scan, roots
from fusee.codegen.llvm.tile import store_square
from fusee.codegen.llvm.types import HELD, vector
from fusee.codegen.llvm.values import emit_value
from fusee.loops.ir import Acc, Accumulate, Phase, Store, Value
from fusee.sym.expr import Symbol

Parts = dict[Acc, list[list[str]]]  # per accumulator and copy: the registers of its parts


class Body:
    """Writes statements. `orders`: by id of a phase, its values with operands first.

    `masks_sums`: the lanes run along a reduced axis, so those beyond its end must change nothing.
    """

    def __init__(self, ctx: Context, orders: Mapping[int, list[Value]], masks_sums: bool) -> None:
        self.ctx, self.writer = ctx, ctx.writer
        self.orders, self.masks_sums = orders, masks_sums

    def order(self, phase: Phase) -> list[Value]:
        return self.orders[id(phase)]

    def is_scan(self, phase: Phase) -> bool:
        return is_scan(phase, self.order(phase))

    def set_stage(self, lane: Symbol | None, stage: Stage, mask: str | None) -> None:
        ctx = self.ctx
        ctx.lane = lane if stage.lanes > 1 else None
        ctx.copy_axis = None
        ctx.lanes, ctx.copies, ctx.mask = stage.lanes, stage.copies, mask

    def open_lanes(self, lane: Symbol, stage: Stage, i: str, stop: str, rank: int) -> None:
        """The top level becomes the body of a loop along the lanes."""
        self.ctx.open_axis(lane, i, rank)
        mask = self._tail_mask(stage.lanes, i, stop) if stage.masked else None
        self.set_stage(lane, stage, mask)

    def _tail_mask(self, lanes: int, i: str, stop: str) -> str:
        op = self.writer.top.op
        left = op(f"trunc i64 {op(f'sub i64 {stop}, {i}')} to i32")
        kind = vector("i32", lanes)
        one = op(f"insertelement {kind} poison, i32 {left}, i64 0")
        limit = op(f"shufflevector {kind} {one}, {kind} poison, <{lanes} x i32> zeroinitializer")
        numbers = ", ".join(f"i32 {lane}" for lane in range(lanes))
        return op(f"icmp ugt {kind} {limit}, <{numbers}>")

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
        needed = {id(s): {id(root) for root in roots(s)} for s in phase.body}
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
                parts[statement.acc] = self._accumulate(
                    statement, parts[statement.acc], hows[statement.acc], rank
                )
                if scans:
                    self.publish(hows[statement.acc], parts[statement.acc])
        self._flush(pending, rank)
        return parts

    def _flush(self, pending: list[Store], rank: int) -> None:
        ctx = self.ctx
        for store in pending:
            varies = ctx.size_fact(store.index)[1] or ctx.facts[id(store.value)][1]
            if ctx.copy_axis is not None:
                store_square(ctx, store, rank)
            else:
                (store_vector if varies else store_scalar)(ctx, store, rank)

    def _accumulate(
        self, statement: Accumulate, old: list[list[str]], how: Carried, rank: int
    ) -> list[list[str]]:
        ctx = self.ctx
        t = ctx.target(rank, ctx.lanes)
        mask = ctx.mask if self.masks_sums else None
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

    def carry(
        self,
        start: str,
        stop: str,
        step: int,
        parts: Parts,
        kinds: Callable[[Acc], list[str]],
        body: Callable[[str, Parts], Parts],
    ) -> Parts:
        """A loop that carries accumulators round; `kinds` are the types of one copy."""
        types = [kind for acc, copies in parts.items() for _ in copies for kind in kinds(acc)]
        carried = list(zip(types, _flat(parts), strict=True))
        names = self.writer.loop(
            start, stop, step, carried, lambda i, c: _flat(body(i, _shaped(parts, c)))
        )
        return _shaped(parts, names)

    def publish(self, how: Carried, parts: list[list[str]]) -> None:
        """What reading the accumulator yields from here on."""
        names = [result(how, part) for part in parts]
        self.ctx.acc_names[how.acc] = names if self.ctx.lanes > 1 else names[0]


def _flat(parts: Parts) -> list[str]:
    return [name for copies in parts.values() for part in copies for name in part]


def _shaped(like: Parts, names: list[str]) -> Parts:
    left = iter(names)
    return {acc: [[next(left) for _ in part] for part in copies] for acc, copies in like.items()}
