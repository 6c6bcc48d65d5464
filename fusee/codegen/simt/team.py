"""Reductions that threads share: each has its part, then parts are exchanged and merged.

Threads of one warp exchange by shuffles, others through memory that a block shares. All threads of
a team come to the same result: the one part of a pair is merged with the other in both of them.
"""

from __future__ import annotations

from fusee.codegen.llvm.body import Carried
from fusee.codegen.llvm.ops import Context
from fusee.runtime.llvm_text import BITS, InsertPoint, Level, vector

WARP = 32
Places = list[list[tuple[str, str]]]  # per part and lane: its type in memory, and the address


def barrier(level: Level, threads: int) -> None:
    """All threads of a team, or of the block if teams have more than a warp, have come here."""
    if threads <= WARP:
        level.call("void", "llvm.nvvm.bar.warp.sync", ("i32", "-1"))
    else:
        level.call("void", "llvm.nvvm.barrier0")


def shuffled(level: Level, kind: str, x: str, distance: int) -> str:
    """What the thread whose number differs in the bit `distance` has."""
    bits = BITS[kind]

    def moved(word: str) -> str:
        given = (("i32", "-1"), ("i32", word), ("i32", str(distance)), ("i32", "31"))
        return level.call("i32", "llvm.nvvm.shfl.sync.bfly.i32", *given)

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
            return self._by_warps(t, how, parts)
        distance = max(self.apart, WARP)
        while distance < end:
            self._put(t, how, parts, self._places(t, how, self.tid, self.block, 0))
            barrier(t.level, self.block)
            partner = t.level.op(f"xor i32 {self.tid}, {distance}")
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
            rows = zip(how.kinds(1), how.widths(t.lanes), parts, strict=True)
            others = [_per_lane(t.level, *row, distance) for row in rows]
            parts = how.merge(t, parts, others)
            distance *= 2
        return parts

    def _by_warps(self, t: InsertPoint, how: Carried, parts: list[str]) -> list[str]:
        """One place per warp, which all warps read; each reduction has places of its own."""
        level, warps, start = t.level, self.threads // WARP, -(-self.shared_bytes // 16) * 16
        warp = level.op(f"lshr i32 {self.tid}, {WARP.bit_length() - 1}")
        own = self._places(t, how, warp, warps, start)
        follows = level.op(f"icmp ne i32 {level.op(f'and i32 {self.tid}, {WARP - 1}')}, 0")
        level.unless(follows, lambda: self._put(t, how, parts, own))
        barrier(level, self.block)
        lane = level.op(f"and i32 {self.tid}, {warps - 1}")
        parts = self._get(t, how, self._places(t, how, lane, warps, start))
        return self._by_shuffles(t, how, parts, 1, warps)

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


def _per_lane(level: Level, kind: str, width: int, x: str, distance: int) -> str:
    if width == 1:
        return shuffled(level, kind, x, distance)
    full, whole = vector(kind, width), "poison"
    for k in range(width):
        one = level.op(f"extractelement {full} {x}, i64 {k}")
        one = shuffled(level, kind, one, distance)
        whole = level.op(f"insertelement {full} {whole}, {kind} {one}, i64 {k}")
    return whole
