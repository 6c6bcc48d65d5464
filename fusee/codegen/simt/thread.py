"""What one thread of a GPU does: names of arguments, code that only some threads run, atomics.

The value code is that of vectors (codegen/llvm): the lanes of a vector are elements of one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from fusee.codegen.llvm.body import Body, Carried
from fusee.codegen.llvm.memory import (
    NEAR,
    AccessPlace,
    combined,
    picked,
    store_element,
    store_scalar,
    store_vector,
)
from fusee.codegen.llvm.ops import Context, from_memory, to_memory
from fusee.codegen.simt.online import OnlineCarried
from fusee.loops.ir import Accumulate, Buffer, Store
from fusee.runtime.llvm_text import BITS, SIGNED, InsertPoint, Level, memory_type, vector
from fusee.sym.expr import Size, Symbol, coefficient

# Where a kernel's threads find memory that all may read, past the address of the status.
SPARE_BYTES = 64


class ThreadContext(Context):
    """Buffers, sizes and the status are arguments of the kernel.

    `%status` is memory of the device: it begins with the address of two words that the host reads.

    first   the number of the graph's first message among those of all graphs on a GPU
    """

    uses_shared = False
    first = 1

    def param(self, role: object, size: Size) -> str:
        return self.params.setdefault((role, size), f"%p{len(self.params)}")

    def buffer(self, buffer: Buffer) -> str:
        return self.buffers.setdefault(buffer, f"%b{len(self.buffers)}")

    def shared(self) -> str:
        """Memory that all blocks share: counters that are 0, then what they leave there."""
        self.uses_shared = True
        return "%shared"

    def spare(self) -> str:
        entry = self.ranked[0]
        return entry.once("spare", lambda: entry.at("%status", SPARE_BYTES))

    def report(self, level: Level, is_bad: str, refused: str, message: int) -> None:
        """Tell the host, and end as a failed assertion on the device does."""
        code = self.param("message", self.first + message)

        def tell() -> None:
            place = level.load("ptr", "%status")
            level.store("i64", refused, place, 1)
            level.store("i64", code, place)
            level.call("void", "llvm.nvvm.membar.sys")
            # prints, and makes each later call of CUDA fail, as an assertion of ATen's kernels does
            words = 'private constant [26 x i8] c"an index is out of range\\00\\00"'
            level.writer.declares["fusee.words"] = f"@fusee.words = {words}"
            text = ("ptr", "@fusee.words")
            level.call("void", "__assertfail", text, text, ("i32", "0"), text, ("i64", "1"))

        level.unless(level.op(f"xor i1 {is_bad}, true"), tell)


class Stretch(Level):
    """What is known in a stretch of another level's code, which has it all.

    idle   an i1: the thread has no point here; None: all have
    axes   coordinates by axis
    """

    __slots__ = ("axes", "idle", "whole")

    def __init__(self, whole: Level) -> None:
        self.idle: str | None = None
        self.axes: dict[Symbol, str] = {}
        self.whole = whole
        super().__init__(whole.writer, whole.label)
        self.lines = whole.lines

    @property
    def label(self) -> str:
        return self.whole.label

    @label.setter
    def label(self, label: str) -> None:
        self.whole.label = label


class ThreadBody(Body):
    """Statements of one thread.

    skips    an i1: the thread has nothing to store, for others store the same or it is out of range
    idle     an i1: what it computes now is no part of a reduction
    """

    skips: str | None = None
    idle: str | None = None

    def sum_mask(self) -> str | None:
        if self.idle is None:
            return None
        level, lanes = self.writer.top, self.ctx.lanes
        busy = level.op(f"xor i1 {self.idle}, true")
        return busy if lanes == 1 else level.splat("i1", busy, lanes)

    def _accumulate(
        self, statement: Accumulate, old: list[list[str]], how: Carried, rank: int
    ) -> list[list[str]]:
        if not isinstance(how, OnlineCarried):
            return super()._accumulate(statement, old, how, rank)
        ctx = self.ctx
        values = [v for v in (statement.value, statement.which) if v is not None]
        given = [ctx.vectors(v)[0] if ctx.lanes > 1 else ctx.scalar(v) for v in values]
        return [how.step(ctx, ctx.target(rank, ctx.lanes), old[0], given)]

    def _flush(self, pending: list[Store], rank: int) -> None:
        ctx, level = self.ctx, self.ctx.ranked[rank]
        where = [x for x in (self.skips, self.idle) if x is not None]
        skips = level.either("i1", "or", *where) if where and pending else None
        woven = woven_stores(pending, ctx.lane) if ctx.lane is not None else {}
        beside = {id(s) for stores in woven.values() for s in stores[1:]}
        for store in pending:
            first = len(level.lines)
            if store.mode != "set":
                write = _atomics(ctx, store, rank)
            elif id(store) in beside:
                continue
            else:
                varies = ctx.size_fact(store.index)[1] or ctx.facts[id(store.value)][1]
                if id(store) in woven:
                    _store_woven(ctx, woven[id(store)], rank)
                else:
                    (store_vector if varies else store_scalar)(ctx, store, rank)
                # addresses and conversions are for all threads: later code may know them
                new = level.lines[first:]
                stores = [line for line in new if line.startswith("  store ")]
                level.lines[first:] = [line for line in new if line not in stores]

                def write(stores: Sequence[str] = stores) -> None:
                    level.lines.extend(stores)

            if skips is None:
                write()
            else:
                level.unless(skips, write)


def woven_stores(stores: Iterable[Store], lane: Symbol) -> dict[int, list[Store]]:
    """Stores that fill a piece of memory together, each every n-th element of it; by the id of the
    first."""
    found: dict[tuple[Buffer, int, Size], dict[int, Store]] = {}
    for store in stores:
        step, rest = coefficient(store.index, lane) or (0, 0)
        if store.mode == "set" and isinstance(step, int) and 1 < step <= NEAR:
            place = rest % step
            if isinstance(place, int):
                found.setdefault((store.buffer, step, rest - place), {})[place] = store
    return {
        id(row[0]): [row[k] for k in range(step)]
        for (_, step, _), row in found.items()
        if len(row) == step
    }


def _store_woven(ctx: Context, stores: Sequence[Store], rank: int) -> None:
    """Vectors of what lies side by side, each element from the store that it belongs to."""
    place = AccessPlace(ctx, stores[0].buffer, stores[0].index, rank)
    t, count = place.t(), len(stores)
    rows = [to_memory(t, place.dtype, ctx.vectors(store.value)[0]) for store in stores]
    for first in range(0, count * t.lanes, t.lanes):
        places = [(k % count, k // count) for k in range(first, first + t.lanes)]
        x = picked(t, place.kind, rows, places)
        store_element(t, place.kind, x, place.ahead(place.address, first))


def _atomics(ctx: Context, store: Store, rank: int) -> Callable[[], None]:
    """What combines the elements of a store with memory, where others may do so now."""
    place, dtype = AccessPlace(ctx, store.buffer, store.index, rank), store.buffer.dtype
    one, level, kind = place.t(1), ctx.ranked[rank], memory_type(dtype, ctx.machine)
    if ctx.lanes == 1 or not ctx.facts[id(store.value)][1]:
        elements = [ctx.scalar(store.value)] * ctx.lanes
    else:
        (full,), held = ctx.vectors(store.value), ctx.held(store.value)
        wide = vector(held, ctx.lanes)
        elements = [level.op(f"extractelement {wide} {full}, i64 {k}") for k in range(ctx.lanes)]
    places = [place.lane(0, k, None) for k in range(ctx.lanes)]

    def write() -> None:
        for x, address in zip(elements, places, strict=True):
            native = _native(store, kind)
            if native is not None:
                level.op(f"atomicrmw {native} ptr {address}, {kind} {x} monotonic")
            else:
                _exchange(one, store, kind, x, address)

    return write


def _native(store: Store, kind: str) -> str | None:
    """The operation that memory does by itself; None: it is tried until nobody was faster."""
    dtype = store.buffer.dtype
    if dtype is torch.bool or BITS[kind] < 32:
        return None
    if kind in ("float", "double"):
        return "fadd" if store.mode == "add" else None  # minima and maxima of NaN are NaN
    if store.mode == "add":
        return "add"
    return None if store.mode == "mul" else f"{'' if dtype in SIGNED else 'u'}{store.mode}"


def _exchange(t: InsertPoint, store: Store, kind: str, x: str, address: str) -> None:
    level, dtype = t.level, store.buffer.dtype
    number, bits = level.writer.label(), f"i{BITS[kind]}"

    def turned(value: str, source: str, result: str) -> str:
        return value if source == result else level.op(f"bitcast {source} {value} to {result}")

    start = level.op(f"load {bits}, ptr {address}, align {BITS[kind] // 8}")
    before, found = level.label, f"%found{number}"
    level.do(f"br label %again{number}")
    level._open(f"again{number}")
    old = level.op(f"phi {bits} [ {start}, %{before} ], [ {found}, %again{number} ]")
    held = from_memory(t, dtype, turned(old, bits, kind))
    new = turned(to_memory(t, dtype, combined(t, store, held, x)), kind, bits)
    both = level.op(f"cmpxchg ptr {address}, {bits} {old}, {bits} {new} monotonic monotonic")
    level.do(f"{found} = extractvalue {{ {bits}, i1 }} {both}, 0")
    done = level.op(f"extractvalue {{ {bits}, i1 }} {both}, 1")
    level.do(f"br i1 {done}, label %fine{number}, label %again{number}")
    level._open(f"fine{number}")
