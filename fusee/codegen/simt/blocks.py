"""Blocks that share what a team reduces: the one that comes last merges what all have found.

Memory that they share begins with a counter for each group of blocks; the last block of a group
sets its counter back. Behind the counters lies a record for each team of each block.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusee.codegen.llvm.body import Carried
from fusee.codegen.simt.team import Exchange, barrier
from fusee.codegen.simt.thread import ThreadContext
from fusee.loops.ir import Acc
from fusee.runtime.llvm_text import BITS, InsertPoint, vector
from fusee.sym.expr import Size

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
        op = t.level.op
        number = op(f"add i64 {op(f'mul i64 {team}, {self.blocks}')}, {part}")
        place = op(f"add i64 {op(f'mul i64 {number}, {self.record_bytes}')}, {COUNTER_BYTES}")
        return t.level.at(self.ctx.shared(), place)

    def leave(self, t: InsertPoint, team: str, found: Mapping[Acc, list[str]]) -> None:
        """What a team of this block has found."""
        record = self._record(t, team, self.part)
        for acc, places in self._places.items():
            for x, (kind, memory, at) in zip(found[acc], places, strict=True):
                x = x if kind == memory else t.level.op(f"zext {kind} {x} to {memory}")
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
                x = t.level.op(f"load {memory}, ptr {address}, align {_align(memory)}")
                x = x if kind == memory else t.level.op(f"trunc {memory} {x} to {kind}")
                found[acc].append(x)
        return found

    def stay_if_last(self, exchange: Exchange) -> None:
        """All blocks but the one that comes last end here; it sees what they have left."""
        level, op = self.level, self.level.op
        word = exchange.word()
        level.call("void", "llvm.nvvm.membar.gl")
        barrier(level, exchange.block)

        def arrive() -> None:
            counter = level.at(self.ctx.shared(), self._group, "i32")
            before = op(f"atomicrmw add ptr {counter}, i32 1 monotonic")
            missing = op(f"sub i64 {self.blocks}, {op(f'zext i32 {before} to i64')}")
            early = op(f"icmp ne i64 {missing}, 1")
            level.unless(early, lambda: level.do(f"store i32 0, ptr {counter}, align 4"))
            early = op(f"zext i1 {early} to i32")
            level.do(f"store i32 {early}, ptr addrspace(3) {word}, align 4")

        def meet() -> str:
            level.unless(op(f"icmp ne i32 {exchange.tid}, 0"), arrive)
            barrier(level, exchange.block)
            early = op(f"load i32, ptr addrspace(3) {word}, align 4")
            return op(f"icmp ne i32 {early}, 0")

        alone = op(f"icmp eq i64 {self.blocks}, 1")
        level.leave(level.unless(alone, meet, "i1", "false"), lambda: "void")
        level.call("void", "llvm.nvvm.membar.gl")


def _align(memory: str) -> int:
    count, _, kind = memory.strip("<>").rpartition(" x ")
    return min(int(count or 1) * BITS[kind] // 8, _ALIGN)
