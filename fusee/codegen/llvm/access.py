"""Loads and stores, of one element or of a vector: contiguous, reversed, strided or scattered.

A mask excludes lanes: past the end of the lanes axis, or where the program says that nothing is to
be read. Where the processor has no masked access of that width, excluded lanes go to a spare place
on the stack instead of branching.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusee.codegen.llvm.context import Context, Group
from fusee.codegen.llvm.index import (
    groups,
    lane_stride,
    pointer,
    scalar_sum,
    split_lanes,
    vector_sum,
)
from fusee.codegen.llvm.ops import Target, emit, from_memory, round_to, to_memory
from fusee.codegen.llvm.types import BITS, HELD, mangled, memory_type, vector
from fusee.loops.ir import Buffer, Mode, Store, Value
from fusee.sym.expr import Size

# What a store mode does with the old and the new element.
COMBINE: dict[Mode, str] = {"add": "add", "mul": "mul", "min": "minimum", "max": "maximum"}
_COMBINE_BOOL: dict[Mode, str] = {"add": "or", "mul": "and", "min": "and", "max": "or"}


class Place:
    """Where the lanes of one access are, at the rank where it is emitted.

    Contiguous (step 1) or reversed (step -1) from `address`; or `offsets`: per copy a vector of
    element offsets from `address`, or with `stride` given, lane times stride.
    """

    def __init__(self, ctx: Context, buffer: Buffer, index: Size, rank: int) -> None:
        self.ctx, self.rank = ctx, rank
        self.dtype = buffer.dtype
        self.kind = memory_type(buffer.dtype, ctx.machine)
        self.step = 0
        self.stride = ""
        self.offsets: list[str] = []
        varying, uniform = split_lanes(ctx, index)
        stride = lane_stride(ctx, varying)
        if stride is None:
            self.address = pointer(ctx, buffer, self.kind, uniform)
            self.offsets = vector_sum(ctx, varying, rank)
            return
        self.address = pointer(ctx, buffer, self.kind, [*varying, *uniform])
        self.step = _constant(stride)
        if abs(self.step) != 1:
            self.stride = scalar_sum(ctx, stride)

    def t(self, lanes: int = 0) -> Target:
        return self.ctx.target(self.rank, lanes or self.ctx.lanes)

    def block(self, copy: int) -> str:
        """The lowest address of a contiguous or reversed copy."""
        lanes = self.ctx.lanes
        ahead = copy * lanes if self.step == 1 else -copy * lanes - (lanes - 1)
        if not ahead:
            return self.address
        return self.t().level.op(f"getelementptr {self.kind}, ptr {self.address}, i64 {ahead}")

    def lane(self, copy: int, lane: int, mask: str | None) -> str:
        """The address of one lane's element, or of a spare one if the lane is masked out."""
        level = self.t().level
        if self.offsets:
            wide = vector("i64", self.ctx.lanes)
            offset = level.op(f"extractelement {wide} {self.offsets[copy]}, i64 {lane}")
        elif self.stride in ("0", ""):
            offset = str(self.step * (copy * self.ctx.lanes + lane))
        else:
            by = copy * self.ctx.lanes + lane
            offset = level.op(f"mul i64 {self.stride}, {by}") if by else "0"
        address = level.op(f"getelementptr {self.kind}, ptr {self.address}, i64 {offset}")
        if mask is None:
            return address
        wide = vector("i1", self.ctx.lanes)
        active = level.op(f"extractelement {wide} {mask}, i64 {lane}")
        return level.op(f"select i1 {active}, ptr {address}, ptr {self.ctx.spare()}")

    def pointers(self, copy: int) -> str:
        """All lanes' addresses as one vector of pointers."""
        level, lanes = self.t().level, self.ctx.lanes
        wide = vector("i64", lanes)
        if self.offsets:
            offsets = self.offsets[copy]
        else:
            numbers = ", ".join(f"i64 {copy * lanes + lane}" for lane in range(lanes))
            by = self.ctx.splat(self.stride or str(self.step), "i64", self.rank)
            offsets = level.op(f"mul {wide} <{numbers}>, {by}")
        return level.op(f"getelementptr {self.kind}, ptr {self.address}, {wide} {offsets}")

    def reverse(self, kind: str, x: str) -> str:
        lanes = self.ctx.lanes
        full = vector(kind, lanes)
        picks = ", ".join(f"i32 {lane}" for lane in reversed(range(lanes)))
        return self.t().level.op(
            f"shufflevector {full} {x}, {full} poison, <{lanes} x i32> <{picks}>"
        )


def _constant(stride: Sequence[Group]) -> int:
    """The stride if it is 1 or -1, else 0."""
    if len(stride) == 1 and not stride[0][0] and stride[0][1] in (1, -1):
        assert isinstance(stride[0][1], int)
        return stride[0][1]
    return 0


def _both(t: Target, a: str | None, b: str | None) -> str | None:
    if a is None or b is None:
        return a or b
    return t.level.op(f"and {vector('i1', t.lanes)} {a}, {b}")


# ------------------------------------------------------------------------------ loads


def load_scalar(ctx: Context, value: Value) -> str:
    buffer, index = value.attr
    rank = ctx.facts[id(value)][0]
    t = ctx.target(rank, 1)
    kind = memory_type(buffer.dtype, ctx.machine)
    address = pointer(ctx, buffer, kind, groups(ctx, index))
    if not value.args:
        return from_memory(t, buffer.dtype, load_element(t, kind, address))
    mask, other = (ctx.scalar(arg) for arg in value.args)
    address = t.level.op(f"select i1 {mask}, ptr {address}, ptr {ctx.spare()}")
    x = from_memory(t, buffer.dtype, load_element(t, kind, address))
    return t.select(mask, HELD[buffer.dtype], x, other)


def load_element(t: Target, kind: str, address: str) -> str:
    align = max(BITS[kind] // 8, 1)
    return t.level.op(f"load {vector(kind, t.lanes)}, ptr {address}, align {align}")


def load_vector(ctx: Context, value: Value) -> list[str]:
    """One register per copy."""
    buffer, index = value.attr
    rank = ctx.facts[id(value)][0]
    place = Place(ctx, buffer, index, rank)
    t = place.t()
    if not ctx.size_fact(index)[1]:
        return _load_shared(ctx, place, value)
    found: list[str] = []
    guard = value.args[0] if value.args else None
    shared_guard = guard is not None and not ctx.facts[id(guard)][1]
    guards = ctx.vectors(guard) if guard is not None and not shared_guard else []
    if guard is not None and shared_guard and place.step:
        # one test for all lanes: read from the spare place instead
        other = t.level.op(f"select i1 {ctx.scalar(guard)}, ptr {place.address}, ptr {ctx.spare()}")
        shift = (ctx.copies * ctx.lanes - 1) * (BITS[place.kind] // 8)
        if place.step == -1:
            behind = t.level.op(f"getelementptr i8, ptr {ctx.spare()}, i64 {shift}")
            other = t.level.op(f"select i1 {ctx.scalar(guard)}, ptr {place.address}, ptr {behind}")
        place.address = other
    elif guard is not None and shared_guard:
        guards = ctx.vectors(guard)
    for copy in range(ctx.copies):
        mask = _both(t, ctx.mask, guards[copy] if guards else None)
        found.append(from_memory(t, buffer.dtype, _load_copy(place, copy, mask)))
    if guard is None:
        return found
    conditions, others = ctx.vectors(guard), ctx.vectors(value.args[1])
    return [
        t.select(condition, HELD[buffer.dtype], x, other)
        for condition, x, other in zip(conditions, found, others, strict=True)
    ]


def _load_shared(ctx: Context, place: Place, value: Value) -> list[str]:
    """One element for all lanes whose mask differs between lanes."""
    t, one = place.t(), place.t(1)
    masks, others = ctx.vectors(value.args[0]), ctx.vectors(value.args[1])
    found = []
    for mask, other in zip(masks, others, strict=True):
        wide = vector("i1", ctx.lanes)
        active = _both(t, ctx.mask, mask)
        any_lane = t.level.call(
            "i1", f"llvm.vector.reduce.or.{mangled('i1', ctx.lanes)}", (wide, active or mask)
        )
        address = t.level.op(f"select i1 {any_lane}, ptr {place.address}, ptr {ctx.spare()}")
        x = from_memory(one, place.dtype, load_element(one, place.kind, address))
        kind = HELD[place.dtype]
        found.append(t.select(mask, kind, ctx.splat(x, kind, place.rank), other))
    return found


def _load_copy(place: Place, copy: int, mask: str | None) -> str:
    """One vector in memory's type; lanes masked out hold anything."""
    ctx, t = place.ctx, place.t()
    full = vector(place.kind, ctx.lanes)
    if place.step and mask is None:
        x = load_element(t, place.kind, place.block(copy))
        return x if place.step == 1 else place.reverse(place.kind, x)
    if place.step and ctx.machine.can_mask(BITS[place.kind]):
        if place.step == -1:
            mask = place.reverse("i1", mask or "")
        align = BITS[place.kind] // 8
        x = t.level.call(
            full,
            f"llvm.masked.load.{mangled(place.kind, ctx.lanes)}.p0",
            ("ptr", place.block(copy)),
            ("i32", str(align)),
            (vector("i1", ctx.lanes), mask or ""),
            (full, "zeroinitializer"),
        )
        return x if place.step == 1 else place.reverse(place.kind, x)
    if ctx.machine.has_gather and BITS[place.kind] >= 32:
        return t.level.call(
            full,
            f"llvm.masked.gather.{mangled(place.kind, ctx.lanes)}.v{ctx.lanes}p0",
            (vector("ptr", ctx.lanes), place.pointers(copy)),
            ("i32", str(BITS[place.kind] // 8)),
            (vector("i1", ctx.lanes), mask or "splat (i1 true)"),
            (full, "zeroinitializer"),
        )
    one = place.t(1)
    x = "poison"
    for lane in range(ctx.lanes):
        element = load_element(one, place.kind, place.lane(copy, lane, mask))
        x = t.level.op(f"insertelement {full} {x}, {place.kind} {element}, i64 {lane}")
    return x


# ------------------------------------------------------------------------------ stores


def store_scalar(ctx: Context, store: Store, rank: int) -> None:
    dtype = store.buffer.dtype
    t = ctx.target(rank, 1)
    kind = memory_type(dtype, ctx.machine)
    address = pointer(ctx, store.buffer, kind, groups(ctx, store.index))
    x = ctx.scalar(store.value)
    if store.mode != "set":
        old = from_memory(t, dtype, load_element(t, kind, address))
        x = combined(t, store, old, x)
    store_element(t, kind, to_memory(t, dtype, x), address)


def combined(t: Target, store: Store, old: str, new: str) -> str:
    dtype = store.buffer.dtype
    if HELD[dtype] == "i1":
        return t.level.op(f"{_COMBINE_BOOL[store.mode]} {t.kind(dtype)} {old}, {new}")
    return round_to(t, dtype, emit(t, COMBINE[store.mode], dtype, [old, new]))


def store_element(t: Target, kind: str, x: str, address: str) -> None:
    align = max(BITS[kind] // 8, 1)
    t.level.do(f"store {vector(kind, t.lanes)} {x}, ptr {address}, align {align}")


def store_vector(ctx: Context, store: Store, rank: int) -> None:
    """Every copy; `rank` is that of the loop whose body the store stands in."""
    place = Place(ctx, store.buffer, store.index, rank)
    t, dtype = place.t(), store.buffer.dtype
    for copy, new in enumerate(ctx.vectors(store.value)):
        x = new
        if store.mode != "set":
            old = from_memory(t, dtype, _load_copy(place, copy, ctx.mask))
            x = combined(t, store, old, new)
        _store_copy(place, copy, to_memory(t, dtype, x))


def _store_copy(place: Place, copy: int, x: str) -> None:
    ctx, t, mask = place.ctx, place.t(), place.ctx.mask
    full = vector(place.kind, ctx.lanes)
    narrow = not ctx.machine.can_mask(BITS[place.kind])
    if place.step == -1 and (mask is None or not narrow):
        x = place.reverse(place.kind, x)
        mask = place.reverse("i1", mask) if mask else None
    if place.step and mask is None:
        store_element(t, place.kind, x, place.block(copy))
        return
    if place.step and not narrow:
        t.level.call(
            "void",
            f"llvm.masked.store.{mangled(place.kind, ctx.lanes)}.p0",
            (full, x),
            ("ptr", place.block(copy)),
            ("i32", str(BITS[place.kind] // 8)),
            (vector("i1", ctx.lanes), mask or ""),
        )
        return
    if ctx.machine.has_gather and BITS[place.kind] >= 32:
        t.level.call(
            "void",
            f"llvm.masked.scatter.{mangled(place.kind, ctx.lanes)}.v{ctx.lanes}p0",
            (full, x),
            (vector("ptr", ctx.lanes), place.pointers(copy)),
            ("i32", str(BITS[place.kind] // 8)),
            (vector("i1", ctx.lanes), mask or "splat (i1 true)"),
        )
        return
    one = place.t(1)
    for lane in range(ctx.lanes):
        element = t.level.op(f"extractelement {full} {x}, i64 {lane}")
        store_element(one, place.kind, element, place.lane(copy, lane, mask))
