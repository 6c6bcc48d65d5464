"""Tiles: the lanes run along one axis and the copies along another, where accesses disagree.

A kernel that loads contiguously along i and stores contiguously along j works on squares of i and
j. A load along i yields, turned in registers, the vectors along j of all rows of the square; a
store along i turns them back. Kernels with masks, indirect indices or inner loops go without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusee.codegen.llvm.access import combined, load_element, store_element
from fusee.codegen.llvm.context import Context
from fusee.codegen.llvm.index import groups, pointer
from fusee.codegen.llvm.ops import Target, from_memory, to_memory
from fusee.codegen.llvm.types import HELD, Machine, memory_type, vector
from fusee.loops.ir import Accumulate, Buffer, Kernel, Store, Value, index_of
from fusee.sym.expr import Size, Symbol
from fusee.sym.parts import coefficient, symbols

# Squares beside one another in a strip: two of 8 float32 are one line of the cache.
SQUARES = 2


@dataclass(frozen=True)
class Tile:
    """Copies run along `axis`, as many as there are lanes."""

    axis: Symbol
    lanes: int

    @property
    def strip(self) -> int:
        return self.lanes * SQUARES


def choose_tile(
    kernel: Kernel, orders: Sequence[list[Value]], lane: Symbol | None, lanes: int, machine: Machine
) -> Tile | None:
    """The tile that serves a kernel whose vectors run along `lane`, or None."""
    if lane is None or kernel.ordered or lanes < 4 or any(p.inner for p in kernel.phases):
        return None
    indices: list[Size] = []
    for statement in kernel.statements():
        if isinstance(statement, Accumulate):
            return None
        indices.append(statement.index)
    stored = {s.buffer for s in kernel.statements() if isinstance(s, Store)}
    for value in (value for order in orders for value in order):
        if value.op == "load":
            if value.args or value.attr[0] in stored:
                return None
            indices.append(value.attr[1])
        elif value.op == "check" or lane in symbols(index_of(value)):
            return None
    if any(s.payload is not None for index in indices for s in symbols(index)):
        return None
    for axis in kernel.outer:
        if axis != lane and _turns(indices, kernel, axis, lane) and _plain(orders, axis):
            return Tile(axis, min(lanes, 16 if "avx512f" in machine.features else 8))
    return None


def _plain(orders: Sequence[list[Value]], axis: Symbol) -> bool:
    """True if no number is made from the axis itself."""
    return not any(v.op == "index" and axis in symbols(v.attr) for order in orders for v in order)


def _turns(indices: Sequence[Size], kernel: Kernel, axis: Symbol, lane: Symbol) -> bool:
    """True if an access is contiguous along `axis`, strided along `lane`; all must be linear."""
    found = False
    own = set(kernel.outer)
    for index in indices:
        along, across = coefficient(index, lane), coefficient(index, axis)
        if along is None or across is None:
            return False
        if own & {*symbols(along[0]), *symbols(across[0])}:
            return False
        found |= across[0] == 1 and along[0] not in (0, 1)
    return found


# ------------------------------------------------------------------------------ access


class Square:
    """Where the lanes and copies of one access are."""

    def __init__(self, ctx: Context, buffer: Buffer, index: Size, rank: int) -> None:
        assert ctx.lane is not None and ctx.copy_axis is not None
        self.ctx, self.rank, self.dtype = ctx, rank, buffer.dtype
        self.kind = memory_type(buffer.dtype, ctx.machine)
        self.address = pointer(ctx, buffer, self.kind, groups(ctx, index))
        self.along = _step(index, ctx.lane)
        self.across = _step(index, ctx.copy_axis)

    @property
    def is_turned(self) -> bool:
        return self.across == 1 and self.along not in (0, 1)

    def t(self, lanes: int) -> Target:
        return self.ctx.target(self.rank, lanes)

    def moved(self, address: str, step: Size, count: int) -> str:
        """`count` steps beyond an address."""
        if not count or step == 0:
            return address
        by = str(count * step) if step in (1, -1) else ""
        if not by:
            by = self._steps(step, count)
        return self.t(1).level.op(f"getelementptr {self.kind}, ptr {address}, i64 {by}")

    def _steps(self, step: Size, count: int) -> str:
        entry = self.ctx.ranked[0]
        # of a role of its own: the steps along two axes may be equal by chance
        name = self.ctx.param("lanes" if step is self.along else "copies", step)
        found = entry.known.get(("steps", name, count))
        if found is None:
            found = entry.op(f"mul i64 {name}, {count}")
            entry.known["steps", name, count] = found
        assert isinstance(found, str)
        return found


def _step(index: Size, axis: Symbol) -> Size:
    parts = coefficient(index, axis)
    assert parts is not None
    return parts[0]


def load_square(ctx: Context, value: Value) -> list[str]:
    """One register per copy."""
    buffer, index = value.attr
    place = Square(ctx, buffer, index, ctx.facts[id(value)][0])
    wide, one = place.t(ctx.lanes), place.t(1)
    if place.is_turned:
        columns = [
            load_element(wide, place.kind, place.moved(place.address, place.along, lane))
            for lane in range(ctx.lanes)
        ]
        return [from_memory(wide, buffer.dtype, x) for x in turned(wide, place.kind, columns)]
    found = []
    for copy in range(ctx.copies):
        address = place.moved(place.address, place.across, copy)
        if place.along == 1:
            x = from_memory(wide, buffer.dtype, load_element(wide, place.kind, address))
        elif place.along == 0:
            x = from_memory(one, buffer.dtype, load_element(one, place.kind, address))
            x = ctx.splat(x, HELD[buffer.dtype], place.rank)
        else:
            x, full = "poison", vector(place.kind, ctx.lanes)
            for lane in range(ctx.lanes):
                element = load_element(one, place.kind, place.moved(address, place.along, lane))
                x = one.level.op(f"insertelement {full} {x}, {place.kind} {element}, i64 {lane}")
            x = from_memory(wide, buffer.dtype, x)
        found.append(x)
    return found


def store_square(ctx: Context, store: Store, rank: int) -> None:
    place = Square(ctx, store.buffer, store.index, rank)
    wide, one, dtype = place.t(ctx.lanes), place.t(1), store.buffer.dtype
    new = ctx.vectors(store.value)
    if place.is_turned and store.mode == "set":
        rows = [to_memory(wide, dtype, x) for x in new]
        for lane, x in enumerate(turned(wide, place.kind, rows)):
            store_element(wide, place.kind, x, place.moved(place.address, place.along, lane))
        return
    full = vector(HELD[dtype], ctx.lanes)
    for copy, x in enumerate(new):
        address = place.moved(place.address, place.across, copy)
        if place.along == 1:
            if store.mode != "set":
                old = from_memory(wide, dtype, load_element(wide, place.kind, address))
                x = combined(wide, store, old, x)
            store_element(wide, place.kind, to_memory(wide, dtype, x), address)
            continue
        for lane in range(ctx.lanes):
            there = place.moved(address, place.along, lane)
            element = one.level.op(f"extractelement {full} {x}, i64 {lane}")
            if store.mode != "set":
                old = from_memory(one, dtype, load_element(one, place.kind, there))
                element = combined(one, store, old, element)
            store_element(one, place.kind, to_memory(one, dtype, element), there)


def turned(t: Target, kind: str, rows: list[str]) -> list[str]:
    """The square matrix of `rows` with rows and columns exchanged.

    For each power of two, blocks of that size are exchanged across the diagonals of blocks twice
    the size.
    """
    full, lanes = vector(kind, t.lanes), t.lanes
    rows = list(rows)
    distance = lanes // 2
    while distance:
        low = [i if not i & distance else i - distance + lanes for i in range(lanes)]
        high = [i + distance if not i & distance else i + lanes for i in range(lanes)]
        for first in range(lanes):
            second = first + distance
            if first & distance:
                continue
            pair = []
            for picks in (low, high):
                mask = ", ".join(f"i32 {i}" for i in picks)
                pair.append(
                    t.level.op(
                        f"shufflevector {full} {rows[first]}, {full} {rows[second]}, "
                        f"<{lanes} x i32> <{mask}>"
                    )
                )
            rows[first], rows[second] = pair
        distance //= 2
    return rows
