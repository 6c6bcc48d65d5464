"""Index expressions as i64 arithmetic, and what is loaded and stored there.

One element or a vector: contiguous, reversed, strided or scattered. Each part of an address is
computed where it last changes.

A mask excludes lanes: past the end of the lanes axis, or where the program says that nothing is to
be read. Where the processor has no masked access of that width, excluded lanes go to a spare place
on the stack instead of branching.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence

from fusee.codegen.llvm.ops import (
    Context,
    Group,
    emit,
    from_memory,
    groups,
    mono_key,
    mono_rank,
    mono_varies,
    picked,
    round_to,
    to_memory,
    turned,
)
from fusee.loops import Buffer, Mode, Store, Value
from fusee.loops.schedule import stride
from fusee.runtime.llvm_text import (
    BITS,
    HELD,
    InsertPoint,
    mangled,
    memory_type,
    numbered,
    splat,
    vector,
)
from fusee.sym import Atom, Call, Size, Symbol, hint, known_ge, known_lt, maximum

# ---------------------------------------------------------------------------- indices


def scalar_size(ctx: Context, size: Size) -> str:
    """An expression that is the same in all lanes, as an i64."""
    return scalar_sum(ctx, groups(ctx, size))


def scalar_sum(ctx: Context, terms: Sequence[Group]) -> str:
    """The sum of terms, each added at the rank where it changes."""
    return _by_rank(ctx, ("sum",), terms, "", functools.partial(_sum, ctx)) or "0"


def pointer(ctx: Context, buffer: Buffer, kind: str, terms: Sequence[Group]) -> str:
    """The address of element sum(terms) of a buffer of `kind`."""

    def further(rank: int, place: str, own: Sequence[Group]) -> str:
        return ctx.ranked[rank].at(place, _sum(ctx, rank, "", own), kind)

    start = ctx.buffer(buffer)
    return _by_rank(ctx, ("pointer", ctx.buffers[buffer], kind), terms, start, further)


def _by_rank(
    ctx: Context,
    key: tuple[object, ...],
    terms: Sequence[Group],
    total: str,
    join: Callable[[int, str, Sequence[Group]], str],
) -> str:
    """`join(rank, total so far, the rank's terms)` for each rank that terms have, in its level."""
    ranks = [mono_rank(ctx, mono) for mono, _ in terms]
    ordered = [group for _, group in sorted(zip(ranks, terms), key=operator.itemgetter(0))]
    done = 0
    for rank, count in sorted(Counter(ranks).items()):
        made = functools.partial(join, rank, total, ordered[done : done + count])
        done += count
        total = ctx.ranked[rank].once((*key, tuple(ordered[:done])), made)
    return total


def _sum(ctx: Context, rank: int, total: str, terms: Sequence[Group]) -> str:
    """total + terms; "" is no total yet."""
    level = ctx.ranked[rank]
    for mono, coef in terms:
        if coef == -1 and mono:
            total = level.op(f"sub i64 {total or '0'}, {_product(ctx, rank, mono, 1)}")
        else:
            term = _product(ctx, rank, mono, coef)
            total = level.op(f"add i64 {total}, {term}") if total else term
    return total


def _product(ctx: Context, rank: int, mono: tuple[Atom, ...], coef: Size) -> str:
    level = ctx.ranked[rank]

    def make() -> str:
        found = coefficient_name(ctx, mono, coef) if coef != 1 or not mono else ""
        if found and len(mono) == 1 and mono[0] in ctx.loop_axes:
            return level.times(found)
        for atom in mono:
            name = _scalar_atom(ctx, atom)
            found = level.op(f"mul nsw i64 {name}, {found}") if found else name
        return found

    return level.once(("product", mono, coef), make)


def coefficient_name(ctx: Context, mono: tuple[Atom, ...], coef: Size) -> str:
    """A coefficient: 0, 1 and -1 stay in the text, others are the host's to give."""
    return str(coef) if coef in (0, 1, -1) else ctx.param(("of", mono_key(ctx, mono)), coef)


def _scalar_atom(ctx: Context, atom: Atom) -> str:
    if isinstance(atom, Symbol):
        if atom in ctx.axis_name:
            return ctx.axis_name[atom]
        assert isinstance(atom.payload, Value)
        return ctx.scalar(atom.payload)
    rank, _ = ctx.atom_fact(atom)

    def make() -> str:
        a = scalar_size(ctx, atom.a)
        b = str(atom.b) if _has_number(atom) else scalar_size(ctx, atom.b)
        return _call(ctx, rank, atom, a, b, 1)

    return ctx.ranked[rank].once(("call", atom), make)


def _has_number(atom: Call) -> bool:
    """Whether a divisor is a number, which stays in the text."""
    return isinstance(atom.b, int) and atom.op in ("//", "%")


def _call(ctx: Context, rank: int, atom: Call, a: str, b: str, lanes: int) -> str:
    t = ctx.target(rank, lanes)
    kind = vector("i64", lanes)
    if atom.op in ("min", "max"):
        return t.intrinsic(f"s{atom.op}", "i64", a, b)
    if atom.op in ("&", "<<"):
        return t.op(f"{'and' if atom.op == '&' else 'shl'} {kind} {a}, {b}")
    if known_ge(atom.a, 0):
        name = "udiv" if atom.op == "//" else "urem"
        if lanes > 1 and _has_number(atom) and known_lt(atom.a, 1 << 32):
            # no machine multiplies vectors of 64 bits and keeps the upper half, as a division does
            half = vector("i32", lanes)
            a = t.op(f"trunc {kind} {a} to {half}")
            a = t.op(f"{name} {half} {a}, {splat('i32', atom.b, lanes)}")
            return t.op(f"zext {half} {a} to {kind}")
        return t.op(f"{name} {kind} {a}, {b}")
    # divisors are positive: only a negative remainder has to be moved
    rest = t.op(f"srem {kind} {a}, {b}")
    negative = t.op(f"ashr {kind} {rest}, {splat('i64', 63, lanes)}")
    if atom.op == "//":
        quotient = t.op(f"sdiv {kind} {a}, {b}")
        return t.op(f"add {kind} {quotient}, {negative}")
    moved = t.op(f"and {kind} {negative}, {b}")
    return t.op(f"add {kind} {rest}, {moved}")


# ------------------------------------------------------------------------------ of vectors


def split_lanes(ctx: Context, terms: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """(terms that differ between lanes, terms that do not)."""
    pairs = [(group, mono_varies(ctx, group[0])) for group in terms]
    return [group for group, varies in pairs if varies], [x for x, varies in pairs if not varies]


def lane_stride(ctx: Context, varying: Sequence[Group]) -> list[Group] | None:
    """The sum by which `varying` grows from lane to lane, or None if it is not constant."""
    stride: list[Group] = []
    for mono, coef in varying:
        rest = tuple(atom for atom in mono if atom != ctx.lane)
        if len(rest) != len(mono) - 1 or mono_varies(ctx, rest):
            return None
        stride.append((rest, coef))
    return stride


def vector_sum(ctx: Context, terms: Sequence[Group], rank: int) -> list[str]:
    """The sum as vectors of i64, for every copy, emitted at `rank`."""
    varying, uniform = split_lanes(ctx, terms)
    stride = lane_stride(ctx, varying)
    if stride is not None:
        return _ramp(ctx, [*varying, *uniform], stride, rank)
    level, kind = ctx.ranked[rank], vector("i64", ctx.lanes)
    start = [ctx.splat(scalar_sum(ctx, uniform), "i64", rank)] if uniform else []
    products = []
    for mono, coef in varying:
        factors = [_vector_atom(ctx, atom, rank) for atom in mono]
        totals = []
        for of_copy in zip(*factors, strict=True):
            total = functools.reduce(lambda x, y: level.op(f"mul {kind} {x}, {y}"), of_copy)
            if coef != 1:
                by = ctx.splat(coefficient_name(ctx, mono, coef), "i64", 0)
                total = level.op(f"mul {kind} {total}, {by}")
            totals.append(total)
        products.append(totals)
    return [
        functools.reduce(lambda x, y: level.op(f"add {kind} {x}, {y}"), (*start, *terms))
        for terms in zip(*products, strict=True)
    ]


def _ramp(ctx: Context, terms: Sequence[Group], stride: Sequence[Group], rank: int) -> list[str]:
    """Start + lane * stride."""
    level, kind = ctx.ranked[rank], vector("i64", ctx.lanes)
    start, step = scalar_sum(ctx, terms), scalar_sum(ctx, stride)
    steps = numbered("i64", range(ctx.lanes))
    if step != "1":
        steps = level.op(f"mul {kind} {steps}, {ctx.splat(step, 'i64', rank)}")
    totals = []
    for copy in range(ctx.copies):
        first = start
        if copy:
            ahead = level.op(f"mul i64 {step}, {copy * ctx.lanes}")
            first = level.op(f"add i64 {start}, {ahead}")
        totals.append(level.op(f"add {kind} {ctx.splat(first, 'i64', rank)}, {steps}"))
    return totals


def _vector_atom(ctx: Context, atom: Atom, rank: int) -> list[str]:
    if not ctx.atom_fact(atom)[1]:
        name = _scalar_atom(ctx, atom)
        return [ctx.splat(name, "i64", rank)] * ctx.copies
    if isinstance(atom, Symbol):
        if atom == ctx.lane:
            return _ramp(ctx, [((atom,), 1)], [((), 1)], rank)
        assert isinstance(atom.payload, Value)
        return ctx.vectors(atom.payload)
    a = vector_sum(ctx, groups(ctx, atom.a), rank)
    if _has_number(atom):
        b = [splat("i64", atom.b, ctx.lanes)] * ctx.copies
    else:
        b = vector_sum(ctx, groups(ctx, atom.b), rank)
    return [_call(ctx, rank, atom, x, y, ctx.lanes) for x, y in zip(a, b, strict=True)]


# ---------------------------------------------------------------------------- access


# What a store mode does with the old and the new element.
COMBINE: dict[Mode, str] = {"add": "add", "mul": "mul", "min": "minimum", "max": "maximum"}


# Elements that lie so far apart at most are picked out of whole vectors.
NEAR = 8
# An axis of fewer vectors has too many partial ones to go without care for these.
BRIEF = 8


class AccessPlace:
    """Where the lanes of one access are, at the rank where it is emitted.

    Contiguous (step 1) or reversed (step -1) from `address`; or `offsets`: per copy a vector of
    element offsets from `address`, or with `stride` given, lane times stride.

    apart    that stride, if it is one of few
    uniform  the terms of its index that all lanes have, but in a tile
    """

    apart = 0
    uniform: Sequence[Group] = ()

    def __init__(self, ctx: Context, buffer: Buffer, index: Size, rank: int) -> None:
        self.ctx, self.rank, self.buffer = ctx, rank, buffer
        self.dtype = buffer.dtype
        self.kind = memory_type(buffer.dtype, ctx.machine)
        self.step = 0
        self.stride = ""
        self.offsets: list[str] = []
        self.can_gather = ctx.machine.has_gather and BITS[self.kind] >= 32
        self._find(index)

    def _find(self, index: Size) -> None:
        ctx, buffer = self.ctx, self.buffer
        varying, uniform = split_lanes(ctx, groups(ctx, index))
        self.uniform = uniform
        stride = lane_stride(ctx, varying)
        if stride is None:
            self.address = pointer(ctx, buffer, self.kind, uniform)
            self.offsets = vector_sum(ctx, varying, self.rank)
            return
        self.address = pointer(ctx, buffer, self.kind, [*varying, *uniform])
        (mono, coef), *others = stride or [((), 0)]
        step = coef if isinstance(coef, int) and not mono and not others else 0
        if abs(step) == 1:
            self.step = step
        else:
            self.stride = scalar_sum(ctx, stride)
            self.apart = step if 1 < step <= NEAR else 0

    def t(self, lanes: int = 0) -> InsertPoint:
        return self.ctx.target(self.rank, lanes or self.ctx.lanes)

    def block(self, copy: int) -> str:
        """The lowest address of a copy whose elements lie beside one another, or near."""
        lanes = self.ctx.lanes
        by = copy * lanes * (self.apart or 1) if self.step != -1 else -copy * lanes - (lanes - 1)
        return self.ahead(self.address, by)

    def ahead(self, address: str, by: int) -> str:
        """So many elements behind an address."""
        if not by:
            return address
        return self.t().level.op(f"getelementptr {self.kind}, ptr {address}, i64 {by}")

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
            numbers = numbered("i64", range(copy * lanes, (copy + 1) * lanes))
            by = self.ctx.splat(self.stride or str(self.step), "i64", self.rank)
            offsets = level.op(f"mul {wide} {numbers}, {by}")
        return level.op(f"getelementptr {self.kind}, ptr {self.address}, {wide} {offsets}")

    def reverse(self, kind: str, x: str) -> str:
        lanes = self.ctx.lanes
        return self.t().level.shuffle(vector(kind, lanes), x, "poison", reversed(range(lanes)))

    def masked(self, what: str, copy: int, mask: str | None, value: str = "") -> str:
        """A load or store of a copy's lanes, beside one another or gathered, those of the mask."""
        lanes = self.ctx.lanes
        where = ("ptr", self.block(copy)) if self.step else ()
        where = where or (vector("ptr", lanes), self.pointers(copy))
        return self.masked_at(what, where, mask or "splat (i1 true)", value)

    def masked_at(self, what: str, where: tuple[str, str], mask: str, value: str = "") -> str:
        """The same at a pointer, or at a vector of them."""
        lanes, kind = self.ctx.lanes, self.kind
        full, wide = vector(kind, lanes), ".p0" if where[0] == "ptr" else f".v{lanes}p0"
        rest = ("i32", str(BITS[kind] // 8)), (vector("i1", lanes), mask)
        name = f"llvm.masked.{what}.{mangled(kind, lanes)}{wide}"
        if value:
            return self.t().level.call("void", name, (full, value), where, *rest)
        return self.t().level.call(full, name, where, *rest, (full, "zeroinitializer"))


class TilePlace(AccessPlace):
    """Where the lanes and copies of an access of a tile are: copies run along an axis of their own.

    along, across   the steps from lane to lane, and from copy to copy
    is_turned       rows of the tile are contiguous, lanes are not
    row             elements that are loaded and stored in one piece then
    """

    def _find(self, index: Size) -> None:
        ctx = self.ctx
        self.address = pointer(ctx, self.buffer, self.kind, groups(ctx, index))
        assert ctx.lane is not None and ctx.copy_axis is not None
        along, across = stride(index, ctx.lane), stride(index, ctx.copy_axis)
        assert along is not None and across is not None
        self.along, self.across = along, across
        self.step, self.can_gather = int(self.along == 1), False
        self.blocks: dict[int, str] = {}
        # one row after the other is one vector after the other
        self.row = ctx.lanes if self.along == ctx.copies else ctx.copies
        fits = ctx.lanes % self.row == 0
        self.is_turned = self.across == 1 and self.along not in (0, 1) and fits
        if isinstance(self.along, int) and 1 < self.along <= NEAR:
            self.apart = self.along

    def load_rows(self) -> list[str]:
        """The vectors of a turned tile, row after row."""
        ctx, t, tail = self.ctx, self.t(), self.ctx.tail
        if tail is not None:
            rows = self._rows()

            def masked() -> list[str]:
                return [self.masked_at("load", ("ptr", address), tail) for address in rows]

            return _load_whole(self, rows, masked) if _loads_whole(self, False) else masked()
        narrow = t.of(self.row)
        found = [load_element(narrow, self.kind, address) for address in self._rows()]
        lanes = self.row
        while lanes < ctx.lanes:
            pairs, wide = zip(found[::2], found[1::2], strict=True), vector(self.kind, lanes)
            found = [t.level.shuffle(wide, *pair, range(2 * lanes)) for pair in pairs]
            lanes *= 2
        return found

    def store_rows(self, vectors: Sequence[str]) -> None:
        ctx, t, tail = self.ctx, self.t(), self.ctx.tail
        narrow, full = t.of(self.row), vector(self.kind, ctx.lanes)
        addresses = iter(self._rows())
        for x in vectors:
            for first in range(0, ctx.lanes, self.row):
                part, address = x, next(addresses)
                if self.row < ctx.lanes:
                    part = t.level.shuffle(full, x, "poison", range(first, first + self.row))
                if tail is None:
                    store_element(narrow, self.kind, part, address)
                else:
                    self.masked_at("store", ("ptr", address), tail, part)

    def _rows(self) -> list[str]:
        """The addresses of what is loaded and stored in one piece."""
        ctx = self.ctx
        if self.along == ctx.copies != ctx.lanes:
            return [self.ahead(self.address, row * ctx.lanes) for row in range(ctx.copies)]
        return [self.lane(0, lane, None) for lane in range(ctx.lanes)]

    def block(self, copy: int) -> str:
        if copy not in self.blocks:
            self.blocks[copy] = self.moved(self.address, self.across, copy)
        return self.blocks[copy]

    def lane(self, copy: int, lane: int, mask: str | None) -> str:
        return self.moved(self.block(copy), self.along, lane)

    def moved(self, address: str, step: Size, count: int) -> str:
        """`count` steps beyond an address."""
        if not count or step == 0:
            return address
        if step in (1, -1):
            by = str(count * step)
        else:
            entry = self.ctx.ranked[0]
            # of a role of its own: the steps along two axes may be equal by chance
            name = self.ctx.param("lanes" if step is self.along else "copies", step)
            by = entry.once(("steps", name, count), lambda: entry.op(f"mul i64 {name}, {count}"))
        return self.t(1).level.op(f"getelementptr {self.kind}, ptr {address}, i64 {by}")


def _place(ctx: Context, buffer: Buffer, index: Size, rank: int) -> AccessPlace:
    return (AccessPlace if ctx.copy_axis is None else TilePlace)(ctx, buffer, index, rank)


def _both(t: InsertPoint, a: str | None, b: str | None) -> str | None:
    return a or b if a is None or b is None else t.op(f"and {vector('i1', t.lanes)} {a}, {b}")


# ------------------------------------------------------------------------------ loads


def load_scalar(ctx: Context, value: Value) -> str:
    buffer, index = value.attr
    rank = ctx.facts[value][0]
    t = ctx.target(rank, 1)
    kind = memory_type(buffer.dtype, ctx.machine)
    address = pointer(ctx, buffer, kind, groups(ctx, index))
    if not value.args:
        return from_memory(t, buffer.dtype, load_element(t, kind, address))
    mask, other = (ctx.scalar(arg) for arg in value.args)
    address = t.op(f"select i1 {mask}, ptr {address}, ptr {ctx.spare()}")
    x = from_memory(t, buffer.dtype, load_element(t, kind, address))
    return t.select(mask, HELD[buffer.dtype], x, other)


def load_element(t: InsertPoint, kind: str, address: str) -> str:
    align = t.machine.alignment(BITS[kind], t.lanes)
    return t.op(f"load {vector(kind, t.lanes)}, ptr {address}, align {align}")


def load_vector(ctx: Context, value: Value) -> list[str]:
    """One register per copy."""
    buffer, index = value.attr
    rank = ctx.facts[value][0]
    place = _place(ctx, buffer, index, rank)
    t = place.t()
    found: list[str] = []
    if not ctx.size_fact(index)[1]:
        # one element for all lanes, whose mask differs between them
        one, kind, wide = place.t(1), HELD[buffer.dtype], vector("i1", ctx.lanes)
        name = f"llvm.vector.reduce.or.{mangled('i1', ctx.lanes)}"
        for mask, other in zip(*map(ctx.vectors, value.args), strict=True):
            any_lane = t.level.call("i1", name, (wide, _both(t, ctx.mask, mask) or mask))
            address = t.op(f"select i1 {any_lane}, ptr {place.address}, ptr {ctx.spare()}")
            x = from_memory(one, buffer.dtype, load_element(one, place.kind, address))
            found.append(t.select(mask, kind, ctx.splat(x, kind, rank), other))
        return found
    if isinstance(place, TilePlace) and place.is_turned:
        turns = turned(t, place.kind, place.load_rows(), ctx.copies)
        return [from_memory(t, buffer.dtype, x) for x in turns]
    if place.step == 1 and not ctx.machine.is_simt:
        _fetch_ahead(place)
    given, guards = value.args, list[str]()  # where something is to be read, and what is elsewhere
    if given and place.step and not ctx.facts[given[0]][1]:
        # one test for all lanes: read from elsewhere instead
        elsewhere = _filled(place, given[1])
        address = elsewhere or ctx.spare()
        if place.step == -1:
            shift = (ctx.copies * ctx.lanes - 1) * (BITS[place.kind] // 8)
            address = t.op(f"getelementptr i8, ptr {address}, i64 {shift}")
        test = ctx.scalar(given[0])
        place.address = t.op(f"select i1 {test}, ptr {place.address}, ptr {address}")
        given = () if elsewhere else given
    elif given:
        guards = ctx.vectors(given[0])
    for copy in range(ctx.copies):
        mask = _both(t, ctx.mask, guards[copy] if guards else None)
        found.append(from_memory(t, buffer.dtype, _load_copy(place, copy, mask, bool(guards))))
    if not given:
        return found
    return [
        t.select(condition, HELD[buffer.dtype], x, other)
        for condition, x, other in zip(ctx.vectors(given[0]), found, ctx.vectors(given[1]))
    ]


# So many rows ahead of those that a loop picks are fetched, and so many lines of each at most; what
# follows in a row the processor foresees.
AHEAD, LINES, LINE = 8, 8, 64


def _fetch_ahead(place: AccessPlace) -> None:
    """Fetch the beginning of the row that an index in memory will pick some rounds later."""
    ctx, length = place.ctx, None if place.ctx.lane is None else place.ctx.lane.hi

    for mono, coef in place.uniform:
        value = mono[0].payload if len(mono) == 1 and isinstance(mono[0], Symbol) else None
        while isinstance(value, Value) and value.op in ("check", "cast"):
            (value,) = value.args
        if not isinstance(value, Value) or value.op != "load" or value.args:
            continue
        own = {x: stride(value.attr[1], x) for x in ctx.axis_rank}
        steps = {x: step for x, step in own.items() if step is not None and step != 0}
        axis = min(steps, key=lambda x: hint(steps[x]), default=None)
        rank, key = ctx.facts[value][0], ("ahead", place.buffer, mono, coef)
        level, kind = ctx.ranked[rank], HELD[value.dtype]
        if axis is None or not isinstance(length, int) or kind not in ("i32", "i64"):
            continue
        if key in level.known:
            continue
        # the row that `value` picks some steps further along its axis
        op, here, step = level.op, ctx.axis_name[axis], steps[axis]
        there, last = op(f"add i64 {here}, {AHEAD}"), op(f"sub i64 {ctx.size_of(axis)}, 1")
        there = level.extreme("smin", there, last)
        by = op(f"sub i64 {there}, {here}")
        by = by if step == 1 else op(f"mul i64 {by}, {ctx.param('ahead', step)}")
        buffer, index = value.attr
        number = level.load(kind, pointer(ctx, buffer, kind, groups(ctx, index)), by, kind)
        number = op(f"sext i32 {number} to i64") if kind == "i32" else number
        row = op(f"mul i64 {number}, {coefficient_name(ctx, mono, coef)}")
        others = [x for x in place.uniform if x != (mono, coef) and mono_rank(ctx, x[0]) <= rank]
        row = level.at(pointer(ctx, place.buffer, place.kind, others), row, place.kind)
        level.known[key] = row
        for line in range(min(LINES, -(-length * BITS[place.kind] // (8 * LINE)))):
            # to be read, kept in all caches, data; whatever the index is, a fetch does not fail
            how = ("i32", "0"), ("i32", "3"), ("i32", "1")
            level.call("void", "llvm.prefetch.p0", ("ptr", level.at(row, line * LINE)), *how)


def _filled(place: AccessPlace, value: Value) -> str | None:
    """Memory that holds a number in all lanes of all copies, if it is the same in a whole kernel.

    What is read there needs no mask: LLVM makes one instruction of a select and the load before it,
    and processors fetch nothing ahead of masked loads (twice as long on Zen 5).
    """
    ctx = place.ctx
    if ctx.machine.is_simt or ctx.facts[value] != (0, False):
        return None
    entry = ctx.target(0, ctx.lanes)

    def make() -> str:
        size = ctx.lanes * (BITS[place.kind] // 8)
        array = ctx.array(ctx.copies * size)
        x = to_memory(entry, place.dtype, ctx.splat(ctx.scalar(value), HELD[place.dtype], 0))
        for copy in range(ctx.copies):
            store_element(entry, place.kind, x, entry.level.at(array, copy * size))
        return array

    return entry.level.once(("filled", value, ctx.lanes, ctx.copies), make)


def _loads_whole(place: AccessPlace, has_guards: bool) -> bool:
    """Whether lanes beyond those of a mask are loaded, too, where that helps to fetch ahead.

    What a kernel reads several times is near after the first.
    """
    ctx, buffer = place.ctx, place.buffer
    if ctx.machine.fetches_masked or ctx.machine.is_simt:
        return False
    axis = ctx.copy_axis or ctx.lane
    size = None if axis is None else axis.hi
    has_tails = isinstance(size, int) and size % ctx.lanes > 0 and size < BRIEF * ctx.lanes
    reads = (v for v in ctx.facts if v.op == "load" and v.attr[0] is buffer)
    return (has_guards or has_tails) and len([*reads]) == 1


def _load_whole(
    place: AccessPlace, blocks: Sequence[str], masked: Callable[[], list[str]]
) -> list[str]:
    """Vectors at some addresses, the first and last of which are the farthest apart: by `masked`
    where not all of them lie in the buffer's memory."""
    ctx, t, buffer, entry = place.ctx, place.t(), place.buffer, place.ctx.ranked[0]
    size, base = BITS[place.kind] // 8, ctx.buffer(place.buffer)
    room = ctx.param("room", maximum(buffer.size - ctx.lanes + 1, 0) * size)
    first = ctx.param("first", buffer.offset * size)

    def make() -> str:
        return entry.op(f"add i64 {entry.op(f'ptrtoint ptr {base} to i64')}, {first}")

    start = entry.once(("first", ctx.buffers[buffer]), make)
    op, tests = t.level.op, list[str]()
    for block in dict.fromkeys((blocks[0], blocks[-1])):
        further = op(f"sub i64 {op(f'ptrtoint ptr {block} to i64')}, {start}")
        tests.append(op(f"icmp ult i64 {further}, {room}"))
    is_inside = t.level.either("i1", "and", *tests)
    spare, loads = ctx.spare(), list[str]()
    for block in blocks:
        address = op(f"select i1 {is_inside}, ptr {block}, ptr {spare}")
        loads.append(load_element(t, place.kind, address))
    return t.level.each_chosen(is_inside, loads, masked, vector(place.kind, ctx.lanes))


def _shifted(place: AccessPlace, copy: int) -> str:
    """A vector of 16 bytes that begins anywhere, of two that lie where a GPU can load them."""
    t, level = place.t(), place.t().level
    op, four = level.op, t.of(4)
    begin = op(f"ptrtoint ptr {place.block(copy)} to i64")
    off = op(f"and i64 {begin}, 15")
    first = op(f"getelementptr i8, ptr {place.block(copy)}, i64 {op(f'sub i64 0, {off}')}")
    halves = [load_element(four, "i32", at) for at in (first, place.ahead(first, 16 // 2))]
    words = [op(f"extractelement <4 x i32> {x}, i64 {k}") for x in halves for k in range(4)]
    for count in (2, 1):  # words that are skipped
        skips = op(f"icmp ne i64 {op(f'and i64 {off}, {4 * count}')}, 0")
        pairs = zip(words[count:], words, strict=False)
        words = [op(f"select i1 {skips}, i32 {after}, i32 {x}") for after, x in pairs]
    bits = op(f"trunc i64 {op(f'shl i64 {off}, 3')} to i32")
    whole = "poison"
    for k in range(4):
        given = (("i32", x) for x in (words[k + 1], words[k], bits))
        word = level.call("i32", "llvm.fshr.i32", *given)
        whole = op(f"insertelement <4 x i32> {whole}, i32 {word}, i64 {k}")
    return op(f"bitcast <4 x i32> {whole} to {vector(place.kind, t.lanes)}")


def _load_copy(place: AccessPlace, copy: int, mask: str | None, has_guards: bool = False) -> str:
    """One vector in memory's type; lanes masked out hold anything."""
    ctx, t = place.ctx, place.t()
    full = vector(place.kind, ctx.lanes)
    if place.step and mask is None:
        if ctx.begins_anywhere:
            return _shifted(place, copy)
        x = load_element(t, place.kind, place.block(copy))
        return x if place.step == 1 else place.reverse(place.kind, x)
    if place.step and ctx.machine.can_mask(BITS[place.kind]):
        if place.step == -1:
            mask = place.reverse("i1", mask or "")
        masked = functools.partial(place.masked, "load", copy, mask)
        if _loads_whole(place, has_guards):
            (x,) = _load_whole(place, [place.block(copy)], lambda: [masked()])
        else:
            x = masked()
        return x if place.step == 1 else place.reverse(place.kind, x)
    # a thread of a GPU has aligned pieces only
    if 0 < place.apart <= ctx.lanes and mask is None and not ctx.machine.is_simt:
        # every n-th element of n vectors beside one another; the last of them ends with it
        lanes, apart, first = ctx.lanes, place.apart, place.block(copy)
        starts = [*(k * lanes for k in range(apart - 1)), (apart - 1) * (lanes - 1)]
        found = [load_element(t, place.kind, place.ahead(first, start)) for start in starts]
        sources = [min(lane * apart // lanes, apart - 1) for lane in range(lanes)]
        places = [(k, lane * apart - starts[k]) for lane, k in enumerate(sources)]
        return picked(t, place.kind, found, places)
    if place.can_gather:
        return place.masked("gather", copy, mask)
    one = place.t(1)
    if isinstance(place, TilePlace) and place.along == 0:
        return ctx.splat(load_element(one, place.kind, place.block(copy)), place.kind, place.rank)
    x = "poison"
    for lane in range(ctx.lanes):
        element = load_element(one, place.kind, place.lane(copy, lane, mask))
        x = t.op(f"insertelement {full} {x}, {place.kind} {element}, i64 {lane}")
    return x


# ------------------------------------------------------------------------------ stores


def store_value(ctx: Context, store: Store, rank: int) -> None:
    """`rank` is that of the loop whose body the store stands in."""
    dtype, varies = store.buffer.dtype, ctx.size_fact(store.index)[1] or ctx.facts[store.value][1]
    if not varies and ctx.copy_axis is None:
        t, kind = ctx.target(rank, 1), memory_type(dtype, ctx.machine)
        address = pointer(ctx, store.buffer, kind, groups(ctx, store.index))
        x = ctx.scalar(store.value)
        if store.mode != "set":
            old = from_memory(t, dtype, load_element(t, kind, address))
            x = combined(t, store, old, x)
        store_element(t, kind, to_memory(t, dtype, x), address)
        return
    place = _place(ctx, store.buffer, store.index, rank)
    t = place.t()
    if isinstance(place, TilePlace) and place.is_turned and store.mode == "set":
        rows = [to_memory(t, dtype, x) for x in ctx.vectors(store.value)]
        place.store_rows(turned(t, place.kind, rows, ctx.lanes))
        return
    for copy, x in enumerate(ctx.vectors(store.value)):
        if store.mode != "set":
            old = from_memory(t, dtype, _load_copy(place, copy, ctx.mask))
            x = combined(t, store, old, x)
        x, mask = to_memory(t, dtype, x), ctx.mask
        can_mask = ctx.machine.can_mask(BITS[place.kind])
        if place.step == -1 and (mask is None or can_mask):
            x = place.reverse(place.kind, x)
            mask = place.reverse("i1", mask) if mask else None
        if place.step and mask is None:
            store_element(t, place.kind, x, place.block(copy))
        elif place.step and can_mask:
            place.masked("store", copy, mask, x)
        elif place.can_gather:
            place.masked("scatter", copy, mask, x)
        else:
            full = vector(place.kind, ctx.lanes)
            for lane in range(ctx.lanes):
                element = t.op(f"extractelement {full} {x}, i64 {lane}")
                store_element(place.t(1), place.kind, element, place.lane(copy, lane, mask))


def combined(t: InsertPoint, store: Store, old: str, new: str) -> str:
    dtype = store.buffer.dtype
    return round_to(t, dtype, emit(t, COMBINE[store.mode], dtype, [old, new]))


def store_element(t: InsertPoint, kind: str, x: str, address: str) -> None:
    align = t.machine.alignment(BITS[kind], t.lanes)
    t.level.do(f"store {vector(kind, t.lanes)} {x}, ptr {address}, align {align}")
