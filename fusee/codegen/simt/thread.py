"""What one thread of a GPU does: arguments, code that only some threads run, atomics, reductions.

The value code is that of vectors (codegen/llvm): the lanes of a vector are elements of one thread.
Two reductions run in one pass where the second needs the first's result (loops/schedule.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusee.codegen.llvm.body import Accumulators, Body, Carried, Parts, across, carried
from fusee.codegen.llvm.memory import (
    NEAR,
    AccessPlace,
    combined,
    store_element,
    store_value,
)
from fusee.codegen.llvm.ops import Context, compare, emit, from_memory, picked, to_memory
from fusee.loops import Acc, Accumulate, Buffer, Phase, Store, Value, identity, walk
from fusee.loops.schedule import Online
from fusee.runtime.llvm_text import (
    BITS,
    HELD,
    SIGNED,
    InsertPoint,
    Level,
    literal,
    memory_type,
    vector,
)
from fusee.source import HALVES
from fusee.sym import Size, Symbol, coefficient, divides


def accumulators(phase: Phase, along: bool) -> Accumulators:
    """Those of a phase. `along`: lanes run along the reduced axis."""
    found = Accumulators()
    for s in phase.body:
        if isinstance(s, Online):
            how = Squares if s.acc.op == "sum" else Powers
            found[s.acc] = how(s.acc, s.value.dtype, False, s.raw, along)
        elif isinstance(s, Accumulate):
            found[s.acc] = carried(s, two_level=False)
    return found


@dataclass(frozen=True)
class OnlineCarried(Carried):
    """Parts: of the first accumulator, of the second one without its base, and what else it takes.

    Where lanes run along the reduced axis, they become one at each step.
    """

    raw: Acc
    along: bool

    def round(self, lanes: int) -> tuple[list[str], list[str]]:
        return super().round(1 if self.along else lanes)

    def step(self, t: InsertPoint, old: list[str], given: Sequence[list[str]]) -> list[str]:
        """Some more elements per lane: of each the value, and the factor if there is one."""
        raise NotImplementedError

    def finished(self, parts: list[str]) -> list[str]:
        """What went round a loop as parts."""
        return parts

    def _apply(self, t: InsertPoint) -> Callable[..., str]:
        return lambda op, *args: emit(t, op, self.dtype, [*args])

    def _one(self, t: InsertPoint, x: str, op: str = "sum") -> str:
        """All lanes as one."""
        return across(t, Carried(Acc("", op, self.dtype), self.dtype, False), [x])[0]


class Powers(OnlineCarried):
    """A maximum m, and the sum of exp(v - m)."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtype, self.dtype

    def start(self, lanes: int) -> list[str]:
        return [literal(n, self.dtype, lanes) for n in (identity("max", self.dtype), 0)]

    def _base(self, t: InsertPoint, m: str) -> str:
        """The maximum, 0 if it is infinite: exp(x - base) is what a sum of infinities would be."""
        kind, size = HELD[self.dtype], self._apply(t)("abs", m)
        endless = compare(t, "eq", self.dtype, size, literal(float("inf"), self.dtype, t.lanes))
        return t.select(endless, kind, literal(0, self.dtype, t.lanes), m)

    def _power(self, t: InsertPoint, x: str, base: str) -> str:
        apply = self._apply(t)
        return apply("exp", apply("sub", x, base))

    def step(self, t: InsertPoint, old: list[str], given: Sequence[list[str]]) -> list[str]:
        own = t.of(1 if self.along else t.lanes)
        each, apply = self._apply(t), self._apply(own)
        most = functools.reduce(partial(each, "maximum"), (x for x, *_ in given))
        m = apply("maximum", self._one(t, most, "max") if self.along else most, old[0])
        base = self._base(own, m)
        wide = base if own.lanes == t.lanes else t.level.splat(HELD[self.dtype], base, t.lanes)
        powers = [
            functools.reduce(partial(each, "mul"), factor, self._power(t, x, wide))
            for x, *factor in given
        ]
        power = functools.reduce(partial(each, "add"), powers)
        if self.along:
            power = self._one(t, power)
        return [m, apply("fma", old[1], self._power(own, old[0], base), power)]

    def merge(self, t: InsertPoint, a: list[str], b: list[str]) -> list[str]:
        apply = self._apply(t)
        m = apply("maximum", a[0], b[0])
        base = self._base(t, m)
        left, right = (self._power(t, x, base) for x, _ in (a, b))
        return [m, apply("fma", b[1], right, apply("mul", a[1], left))]


class Squares(OnlineCarried):
    """A sum, the sum of squares of what elements are away from their mean, and their number.

    The number is the same for all lanes, and in a loop its inverse goes round with it.
    """

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtype, self.dtype, self.dtype

    def widths(self, lanes: int) -> list[int]:
        return [lanes, lanes, 1]

    def start(self, lanes: int) -> list[str]:
        return [literal(0, self.dtype, width) for width in self.widths(lanes)]

    def round(self, lanes: int) -> tuple[list[str], list[str]]:
        kinds, first = super().round(lanes)
        return [*kinds, kinds[2]], [*first, first[2]]

    def step(self, t: InsertPoint, old: list[str], given: Sequence[list[str]]) -> list[str]:
        dtype, own, one = self.dtype, t, t.of(1)
        each, alone, elements = self._apply(t), self._apply(one), [x for (x,) in given]
        total, squares, count = functools.reduce(partial(each, "add"), elements), old[1], len(given)
        if self.along and t.lanes > 1:
            own, count, total = one, count * t.lanes, self._one(t, total)
        apply, mean = self._apply(own), total
        if count > 1:
            mean = apply("mul", total, literal(1 / count, dtype, own.lanes))
            wide = mean if own is t else self._wide(t, mean)
            aways = [each("sub", x, wide) for x in elements]
            first = each("mul", aways[0], aways[0])
            found = functools.reduce(lambda x, away: each("fma", away, away, x), aways[1:], first)
            squares = apply("add", squares, found if own is t else self._one(t, found))
        n = alone("add", old[2], literal(count, dtype, 1))
        inverse = alone("div", literal(1, dtype, 1), n)
        share = alone("mul", old[2], alone("mul", inverse, literal(count, dtype, 1)))
        share, before = (self._wide(own, y) for y in (share, old[3]))
        away = apply("sub", mean, apply("mul", old[0], before))
        squares = apply("fma", apply("mul", away, share), away, squares)
        return [apply("add", old[0], total), squares, n, inverse]

    def _wide(self, t: InsertPoint, x: str) -> str:
        return x if t.lanes == 1 else t.level.splat(HELD[self.dtype], x, t.lanes)

    def finished(self, parts: list[str]) -> list[str]:
        return parts[:3]

    def merge(self, t: InsertPoint, a: list[str], b: list[str]) -> list[str]:
        one = t.of(1)
        apply, alone, unit = self._apply(t), self._apply(one), literal(1, self.dtype, 1)
        n = alone("add", a[2], b[2])
        inverses = [alone("div", unit, alone("maximum", x, unit)) for x in (a[2], b[2], n)]
        share = alone("mul", a[2], alone("mul", b[2], inverses[2]))
        left, right, share = (self._wide(t, x) for x in (*inverses[:2], share))
        away = apply("sub", apply("mul", b[0], right), apply("mul", a[0], left))
        squares = apply("add", a[1], b[1])
        squares = apply("fma", apply("mul", away, share), away, squares)
        return [apply("add", a[0], b[0]), squares, n]


# What a thread reads or writes at once at most; values up to which it has more than two points.
ACCESS_BYTES, MOST_LANES, MANY_VALUES = 16, 8, 96
# Points of a reduction that a thread loads in one go.
TOGETHER = 4
# Where a kernel's threads find memory that all may read, past the address of the status.
SPARE_BYTES = 64


# Of these a little more or less in an operand is a little more or less in the result.
_SMOOTH = frozenset(
    "abs add asinh atan cosh div erf erfc exp exp2 expm1 fma log log10 log1p log2 maximum"
    " minimum mul neg pow rsqrt sin sinh sqrt sub tanh".split()
)


def rough_values(phases: Sequence[Phase]) -> set[Value]:
    """Values that need not be exact, since all that comes of them is rounded to 16 bits:

    quotients   of which only products are made before
    tanh        that is rounded next
    casts       to bfloat16 that the program did not ask for, and whose results are read as float32
                and go on without being compared or stored: results come nearer to float64
    """
    order = walk(v for phase in phases for v in phase.operands)
    users: dict[Value, list[Value]] = {}
    for value in order:
        for arg in value.args:
            users.setdefault(arg, []).append(value)
    found = set[Value]()
    exact, sharp = {v for phase in phases for v in phase.operands}, _sharp(phases, order)
    for value in reversed(order):
        is_rounded = value.op == "cast" and value.dtype in HALVES
        is_product = value.op in ("mul", "div", "neg") and value not in exact
        if not (is_rounded or is_product):
            exact.update(value.args)
        readers = users.get(value, [])
        if value.dtype is torch.float32:
            of_tanh = value.op == "tanh" and all(v.dtype in HALVES for v in readers)
            if value not in exact and (value.op == "div" or (of_tanh and readers)):
                found.add(value)
        elif value.op == "cast" and value.dtype is torch.bfloat16 and value.attr is None:
            widens = all(v.op == "cast" and v.dtype is torch.float32 for v in readers)
            is_wide = value.args[0].dtype is torch.float32
            if readers and widens and is_wide and value not in sharp:
                found.add(value)
    return found


def _sharp(phases: Sequence[Phase], order: Sequence[Value]) -> set[Value]:
    """Values of which not only smooth functions are made before they are rounded to 16 bits
    and stored: they are compared, or stored as they are, or are sums that are."""
    # powers and differences of what float32 memory has part in, as a maximum or a mean has that
    # another kernel made of the same values, rounded: others would not be as far from it
    reads = set[Value]()
    for value in order:
        is_read = value.op == "load" and value.dtype is torch.float32
        if is_read or not reads.isdisjoint(value.args):
            reads.add(value)
    found = {value for value in reads if value.op in ("exp", "exp2", "expm1", "sub")}
    accs: dict[Acc, Value] = {}
    for statement in (s for phase in phases for s in phase.body):
        if isinstance(statement, Accumulate):
            accs[statement.acc] = statement.value
            if statement.which is not None or statement.acc.op not in ("sum", "max", "min"):
                found.add(statement.value)
        elif statement.mode != "set" or statement.value.dtype not in HALVES:
            found.update(statement.operands)
        else:
            found.update(v for v in statement.operands if v is not statement.value)
    grows = True
    while grows:  # what is made of a sum stands behind it
        before = len(found)
        for value in reversed(order):
            inner = value.args
            if value.op == "where":
                found.add(value.args[0])
                inner = value.args[1:]
            is_smooth = value.op in _SMOOTH or value.op == "where"
            is_smooth |= value.op == "cast" and value.dtype.is_floating_point
            if not is_smooth or value in found:
                found.update(inner)
            if value.op == "acc" and value in found:
                # a sum that is kept together with its maximum bears a name of its own
                of = [accs[value.attr]] if value.attr in accs else accs.values()
                found.update(of)
        grows = len(found) > before
    return found


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
        with level.unless(level.op(f"xor i1 {is_bad}, true")):
            place = level.load("ptr", "%status")
            level.store("i64", refused, place, 1)
            level.store("i64", code, place)
            level.call("void", "llvm.nvvm.membar.sys")
            # prints, and makes each later call of CUDA fail, as an assertion of ATen's kernels does
            words = 'private constant [26 x i8] c"an index is out of range\\00\\00"'
            level.writer.declares["fusee.words"] = f"@fusee.words = {words}"
            text = ("ptr", "@fusee.words")
            level.call("void", "__assertfail", text, text, ("i32", "0"), text, ("i64", "1"))


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

    def enter(self, ctx: Context) -> None:
        """What follows is written here, at these coordinates."""
        ctx.ranked[2:] = [self]
        ctx.know_axes(self.axes, self.axes.values(), 2)


Shares = Callable[[InsertPoint, Carried, list[str]], tuple[list[str], list[str]]]


class ThreadBody(Body):
    """Statements of one thread.

    skips    an i1: the thread has nothing to store, for others store the same or it is out of range
    idle     an i1: what it computes now is no part of a reduction
    waiting  elements of reductions in one pass, to be taken in together
    shares   of what this one has of a scan: what those before it have, and what all of its team
    """

    skips: str | None = None
    idle: str | None = None
    shares: Shares | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.waiting: dict[Acc, list[list[str]]] = {}

    def sum_mask(self) -> str | None:
        if self.idle is None:
            return None
        level, lanes = self.writer.top, self.ctx.lanes
        busy = level.op(f"xor i1 {self.idle}, true")
        return busy if lanes == 1 else level.splat("i1", busy, lanes)

    def scans_together(self) -> bool:
        return self.shares is not None

    def _scan(
        self, statement: Accumulate, old: list[list[str]], how: Carried, rank: int
    ) -> list[list[str]]:
        """Of a team: each thread has some elements behind each other. `old`, and what is returned,
        are all threads' alike."""
        assert self.shares is not None
        lanes = self.ctx.lanes
        t, one = (self.ctx.target(rank, n) for n in (lanes, 1))
        found = own = self._so_far(statement, how, t)
        if lanes > 1:
            rows = zip(how.kinds(lanes), found, strict=True)
            own = [t.op(f"extractelement {kind} {x}, i64 {lanes - 1}") for kind, x in rows]
        before, whole = self.shares(one, how, own)
        before = how.merge(one, old[0], before)
        if lanes > 1:
            rows = zip(how.kinds(1), before, strict=True)
            before = [t.level.splat(kind, x, lanes) for kind, x in rows]
        self.publish(how, [how.merge(t, before, found)])
        return [how.merge(one, old[0], whole)]

    def _accumulate(
        self, statement: Accumulate, old: list[list[str]], how: Carried, rank: int
    ) -> list[list[str]]:
        if not isinstance(how, OnlineCarried):
            return super()._accumulate(statement, old, how, rank)
        ctx = self.ctx
        values = statement.operands
        given = [ctx.vectors(v)[0] if ctx.lanes > 1 else ctx.scalar(v) for v in values]
        self.waiting.setdefault(how.acc, []).append(given)
        return old

    def reduced(
        self,
        phase: Phase,
        hows: Accumulators,
        first: str,
        stop: str,
        step: int,
        often: int,
        place: Callable[[str], None],
    ) -> Parts:
        """A reduction over points `step` apart: some in one go, so that all of these are loaded
        before one is waited for, then those that are left.

        often   about how many they are
        place   tells the coordinates of a point
        """
        parts: Parts = {}
        kinds: dict[Acc, list[str]] = {}
        for acc, how in hows.items():
            kinds[acc], start = how.round(self.ctx.lanes)
            parts[acc] = [start]

        def several(count: int, at: str, parts: Parts) -> Parts:
            level = self.writer.top
            for k in range(count):
                self.ctx.ranked[2:] = [Stretch(level)]
                place(level.op(f"add nsw i64 {at}, {k * step}") if k else at)
                parts = self.statements(phase, parts, hows, 2)
            for acc, given in self.waiting.items():
                how = hows[acc]
                assert isinstance(how, OnlineCarried)
                t = self.ctx.target(2, self.ctx.lanes)
                parts[acc] = [how.step(t, parts[acc][0], given)]
            self.waiting.clear()
            return parts

        op = self.writer.top.op
        if often >= 2 * TOGETHER:
            last, whole = op(f"sub nsw i64 {stop}, {(TOGETHER - 1) * step}"), TOGETHER * step
            with self.carry(first, last, whole, parts, kinds) as (at, now, parts):
                parts |= several(TOGETHER, at, now)
            left = op(f"sub nsw i64 {op(f'add nsw i64 {last}, {whole - 1}')}, {first}")
            done = op(f"and i64 {self.writer.top.extreme('smax', left, '0')}, {-whole}")
            first = op(f"add nsw i64 {first}, {done}")
        with self.carry(first, stop, step, parts, kinds) as (at, now, found):
            found |= several(1, at, now)
        self.ctx.ranked[2:] = []
        return found

    def _flush(self, pending: list[Store], rank: int) -> None:
        ctx, level = self.ctx, self.ctx.ranked[rank]
        where = [x for x in (self.skips, self.idle) if x is not None]
        skips = level.either("i1", "or", *where) if where and pending else None
        woven = woven_stores(pending, ctx.lane) if ctx.lane is not None else {}
        beside = {s for stores in woven.values() for s in stores[1:]}
        for store in pending:
            first = len(level.lines)
            if store.mode != "set":
                write = _atomics(ctx, store, rank)
            elif store in beside:
                continue
            else:
                if store in woven:
                    # vectors of what lies side by side, each element from the store it belongs to
                    place = AccessPlace(ctx, store.buffer, store.index, rank)
                    t, stores = place.t(), woven[store]
                    count = len(stores)
                    rows = [to_memory(t, place.dtype, ctx.vectors(s.value)[0]) for s in stores]
                    for begin in range(0, count * t.lanes, t.lanes):
                        places = [(k % count, k // count) for k in range(begin, begin + t.lanes)]
                        x = picked(t, place.kind, rows, places)
                        store_element(t, place.kind, x, place.ahead(place.address, begin))
                else:
                    store_value(ctx, store, rank)
                # addresses and conversions are for all threads: later code may know them
                new = level.lines[first:]
                writes = [line for line in new if line.startswith("  store ")]
                level.lines[first:] = [line for line in new if line not in writes]

                def write(writes: Sequence[str] = writes) -> None:
                    level.lines.extend(writes)

            with level.unless(skips):
                write()


def lanes_along(phases: Sequence[Phase], axis: Symbol) -> int:
    """Neighbours along an axis that a thread takes: all accesses in one piece are aligned."""
    places = []
    order = walk(v for phase in phases for v in phase.operands)
    for value in order:
        if value.op == "load":
            places.append((value.attr[0].dtype, value.attr[1]))
    narrow, rests = ACCESS_BYTES, list[Size]()
    for phase in phases:
        stores = phase.stores
        places += [(s.buffer.dtype, s.index) for s in stores]
        for first, *_ in woven_stores(stores, axis).values():
            narrow = min(narrow, first.buffer.dtype.itemsize)
            rests += [parts[1] for parts in [coefficient(first.index, axis)] if parts is not None]
    for dtype, index in places:
        parts = coefficient(index, axis)
        if parts is not None and parts[0] in (1, -1):
            narrow = min(narrow, dtype.itemsize)
            rests.append(parts[1] if parts[0] == 1 else parts[1] + 1)
    lanes = min(ACCESS_BYTES // narrow, MOST_LANES)
    if len(order) > MANY_VALUES:
        lanes = min(lanes, 2)
    while lanes > 1 and not all(divides(lanes, rest) for rest in rests):
        lanes //= 2
    return lanes


def woven_stores(stores: Iterable[Store], lane: Symbol) -> dict[Store, list[Store]]:
    """Stores that fill a piece of memory together, each every n-th element of it; by the first."""
    found: dict[tuple[Buffer, int, Size], dict[int, Store]] = {}
    for store in stores:
        step, rest = coefficient(store.index, lane) or (0, 0)
        if store.mode == "set" and isinstance(step, int) and 1 < step <= NEAR:
            place = rest % step
            if isinstance(place, int):
                found.setdefault((store.buffer, step, rest - place), {})[place] = store
    return {
        row[0]: [row[k] for k in range(step)]
        for (_, step, _), row in found.items()
        if len(row) == step
    }


def _atomics(ctx: Context, store: Store, rank: int) -> Callable[[], None]:
    """What combines the elements of a store with memory, where others may do so now."""
    place, dtype = AccessPlace(ctx, store.buffer, store.index, rank), store.buffer.dtype
    one, level, kind = place.t(1), ctx.ranked[rank], memory_type(dtype, ctx.machine)
    if ctx.lanes == 1 or not ctx.facts[store.value][1]:
        elements = [ctx.scalar(store.value)] * ctx.lanes
    else:
        (full,), held = ctx.vectors(store.value), ctx.held(store.value)
        wide = vector(held, ctx.lanes)
        elements = [level.op(f"extractelement {wide} {full}, i64 {k}") for k in range(ctx.lanes)]
    places = [place.lane(0, k, None) for k in range(ctx.lanes)]
    # what memory does by itself; the rest is tried until nobody was faster
    native = None
    if dtype is not torch.bool and BITS[kind] >= 32 and store.mode != "mul":
        if kind not in ("float", "double"):
            unsigned = "" if dtype in SIGNED or store.mode == "add" else "u"
            native = f"{unsigned}{store.mode}"
        elif store.mode == "add":  # minima and maxima of NaN are NaN
            native = "fadd"

    def write() -> None:
        for x, address in zip(elements, places, strict=True):
            if native is not None:
                level.op(f"atomicrmw {native} ptr {address}, {kind} {x} monotonic")
            else:
                _exchange(one, store, kind, x, address)

    return write


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
