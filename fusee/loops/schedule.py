"""Loop order of one kernel: axes split, lanes chosen, axes sorted and merged.

    split   an axis that indices use only as i//c and i%c becomes two axes, and the division is gone
    turn    an axis along which memory is only gone through backwards runs from its end
    lanes   vectors run along the axis where most accesses are contiguous
    sort    outer axes by the stride of what is stored, widest first, the lanes axis last
    merge   neighbours i, j with stride(i) == stride(j)*size(j) in every access become one axis

All of it is legal for any order of outer axes; inner axes keep their order where the order shows
(scans, and argmax's first among equals).

A reduction that needs another's result runs in one pass with it: softmax's sum, the variance. What
an element contributes is moved from the base so far to a later one:

    sum(exp(v - g) * u), g made of max(v)    raw = sum(exp(v - m) * u), then raw * exp(m - g)
    sum((v - g)^2),      g made of sum(v)    raw = sum((v - mean)^2), then raw + n * (mean - g)^2

source   Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Chan, Golub and
         LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fusee.loops import (
    Acc,
    Accumulate,
    Buffer,
    Extern,
    Kernel,
    Loop,
    Phase,
    Profile,
    Statement,
    Store,
    Value,
    View,
    contiguous,
    index_of,
    op,
    payloads,
    rewrite,
    rewrite_index,
    walk,
)
from fusee.source import leaves
from fusee.sym import (
    Size,
    Symbol,
    calls_in,
    coefficient,
    count_points,
    divides,
    hint,
    known_ge,
    known_lt,
    symbols,
)

# How often a value is read again, at least, if it is stored for that.
AGAIN = 16

# ---------------------------------------------------------------------------- order


def order_loops(kernel: Kernel, profile: Profile) -> Kernel:
    """The kernel with its loops in the order in which they are to run."""
    phases = [accesses(phase.body) for phase in kernel.phases]
    for _ in range(8):
        # an axis i and c such that i//c or i%c occurs and c divides i's size
        own = {*kernel.outer, *(axis for phase in kernel.phases for axis in phase.inner)}
        each = (cut for phase in phases for index, _ in phase for cut in cuts(index, own))
        found = next(each, None)
        if found is None:
            break
        whole = {found[0]: split_symbols(*found)[2]}
        parts = [
            Phase(cut_axes(phase.inner, *found), rewrite_body(phase.body, whole))
            for phase in kernel.phases
        ]
        outer, ordered = (cut_axes(axes, *found) for axes in (kernel.outer, kernel.ordered))
        kernel = Kernel(outer, parts, None, ordered, kernel.origin)
        phases = [accesses(phase.body) for phase in kernel.phases]
    if kernel.ordered:
        return kernel
    places = {index for found in phases for index, is_memory in found if is_memory}
    steps = {axis: {stride(index, axis) for index in places} for axis in kernel.outer}
    # what lies beside one another is gone through backwards alone
    turned = (a for a, own in steps.items() if -1 in own and 1 not in own)
    back: dict[Symbol, Size] = {a: a.size - 1 - a.expr for a in turned}
    if back:
        for phase in kernel.phases:
            phase.body = rewrite_body(phase.body, back)
        phases = [accesses(phase.body) for phase in kernel.phases]
    phases = _order_outer(kernel, phases)  # lanes go along all of what is one
    kernel.lanes = _choose_lanes(kernel, phases, profile.wide)
    phases = _order_outer(kernel, phases)
    for phase, own_accesses in zip(kernel.phases, phases, strict=True):
        if len(phase.inner) > 1 and not (is_scan(phase) or any(s.which for s in phase.accumulates)):
            last = None
            if kernel.lanes is None:
                scores = {axis: _suits(own_accesses, axis, profile.wide) for axis in phase.inner}
                last = max(scores, key=scores.__getitem__)
            inner = _by_stride(phase.inner, own_accesses, last)
            phase.inner, one = _merge_axes(inner, own_accesses)
            phase.body = rewrite_body(phase.body, one) if one else phase.body
    return kernel


def _order_outer(kernel: Kernel, phases: list[Accesses]) -> list[Accesses]:
    """Sort the outer axes, lanes last, and make one of those that lie behind each other; the
    accesses then."""
    every = phases[0] if len(phases) == 1 else accesses([*kernel.statements()])
    axes = _by_stride(kernel.outer, every, kernel.lanes)
    kernel.outer, one = _merge_axes(axes, every)
    if not one:
        return phases
    kernel.lanes = None if kernel.lanes is None else kernel.outer[-1]
    for phase in kernel.phases:
        phase.body = rewrite_body(phase.body, one)
    return [accesses(phase.body) for phase in kernel.phases]


# ------------------------------------------------------------------------------ access


Accesses = Mapping[tuple[Size, bool], int]


def accesses(body: Sequence[Statement]) -> Accesses:
    """The weight of every (index, is memory) of a body.

    Stores weigh double; numbers made from indices (arange, masks) are no memory.
    """
    found: dict[tuple[Size, bool], int] = {}
    for statement in body:
        if isinstance(statement, Store):
            key = statement.index, True
            found[key] = found.get(key, 0) + 2
    for value in walk(v for statement in body for v in statement.operands):
        if value.op in ("load", "index"):
            key = index_of(value), value.op == "load"
            found[key] = found.get(key, 0) + 1
    return found


def rewritten(
    loop: Loop, axes: dict[Symbol, Size], change: Callable[[Value], Value | None] | None = None
) -> Loop:
    """A copy of the loop whose values are those of `rewrite`. Its axes keep their names."""
    new = rewrite(loop.operands, axes, change)
    of: Any = new.get  # None stays none
    return replace(
        loop,
        index=rewrite_index(loop.index, axes, new),
        value=new[loop.value],
        result=of(loop.result),
        which=of(loop.which),
        folds=tuple((acc, new[value]) for acc, value in loop.folds),
        reads_memo=loop.reads_memo if change is None else None,
    )


def stride(index: Size, axis: Symbol) -> Size | None:
    """How far an index moves from one point of an axis to the next; None if not always as far."""
    parts = coefficient(index, axis)
    return None if parts is None else parts[0]


def points_of(axes: Iterable[Symbol]) -> int:
    """How many points these axes have, in the first call."""
    return hint(count_points(axes))


def rewrite_body(
    body: Sequence[Statement],
    axes: dict[Symbol, Size] | None,
    change: Callable[[Value], Value | None] | None = None,
) -> list[Statement]:
    """The body with values that are those of `rewrite`."""
    new = rewrite([v for statement in body for v in statement.operands], axes, change)
    result: list[Statement] = []
    for statement in body:
        value = new[statement.value]
        if isinstance(statement, Store):
            index = rewrite_index(statement.index, axes, new)
            result.append(Store(statement.buffer, index, value, statement.mode))
        else:
            which = None if statement.which is None else new[statement.which]
            result.append(Accumulate(statement.acc, value, which))
    return result


def is_scan(phase: Phase, values: Iterable[Value] | None = None) -> bool:
    """Whether the phase, of these values, reads an accumulator that it is still accumulating."""
    own = {s.acc for s in phase.accumulates}
    values = walk(phase.operands) if values is None else values
    return any(v.op in ("acc", "carry") and v.attr in own for v in values)


def scans_along(phase: Phase) -> bool:
    """Whether a scan's elements may be put together in another order: products may overflow, and
    functions of the program's are of one element and what came before it."""
    sorts = {(s.acc.op, s.value.dtype.is_floating_point) for s in phase.accumulates}
    return sorts.isdisjoint((("fold", True), ("fold", False), ("prod", True)))


def scanned_rows(kernel: Kernel) -> Symbol | None:
    """The axis of the rows that a kernel scans, if its elements lie along these, one after another.

    Then vectors may run along that axis, through squares of rows and columns.
    """
    own = {*kernel.outer, *(axis for phase in kernel.phases for axis in phase.inner)}
    scans = [is_scan(phase) for phase in kernel.phases]
    accs = [s.acc for s in kernel.accumulates]
    if kernel.ordered or not any(scans) or any(acc.op == "fold" for acc in accs):
        return None
    for phase, scan in zip(kernel.phases, scans, strict=True):
        sums = phase.accumulates
        if len(phase.inner) != 1 or (sums and not scan):
            return None
    fitting = (r for r in kernel.outer if all(_is_of_rows(p, r, own) for p in kernel.phases))
    return next(fitting, None)


def _is_of_rows(phase: Phase, rows: Symbol, own: set[Symbol]) -> bool:
    """Whether what a phase reads and stores lies along its inner axis, or is all points' alike."""
    stores = phase.stores
    stored, found = {s.buffer for s in stores}, [(s.index, s.mode == "set") for s in stores]
    for value in walk(phase.operands):
        is_load = value.op == "load"
        if value.op == "check" or (is_load and (value.args or value.attr[0] in stored)):
            return False
        if is_load or value.op == "index":
            found.append((index_of(value), is_load))
    for index, is_memory in found:
        down, along = coefficient(index, rows), coefficient(index, phase.inner[0])
        if payloads(index) or down is None or along is None or own & {*symbols(down[0])}:
            return False
        is_along = is_memory and along[0] == 1 and down[0] not in (0, 1)
        if not is_along and (down[0] != 0 or along[0] != 0):
            return False
    return True


# ------------------------------------------------------------------------------ split


def cuts(index: Size, own: set[Symbol]) -> Iterator[tuple[Symbol, Size]]:
    """Each axis i and c such that i//c or i%c occurs in an index and c divides i's size."""
    for atom in calls_in(index):
        for axis in symbols(atom.a) if atom.op in ("//", "%") else ():
            parts = coefficient(atom.a, axis)
            if axis not in own or axis.hi is None or parts is None or parts[0] == 0:
                continue
            step, divisor = parts[0], atom.b
            if not divides(step, divisor):
                continue
            chunk = divisor // step
            if chunk == 1 or not known_ge(chunk, 0):  # negative: what is divided runs backwards
                continue
            if chunk != axis.hi and divides(chunk, axis.hi):
                yield axis, chunk
                break


def cuts_of(loop: Loop) -> Iterator[tuple[Symbol, Size]]:
    """What `cuts` gives for all that a loop stores, loads or makes numbers from."""
    own = {*loop.all_axes}
    indices = [loop.index, *(index_of(v) for v in walk(loop.operands) if v.op in ("load", "index"))]
    for index in indices:
        yield from cuts(index, own)


def cut_apart(loop: Loop, beside: Sequence[Loop]) -> Loop | None:
    """A loop whose axes are those that its indices cut them into, or that scans beside it go
    through in pieces, and run as these do; None if its own are."""
    steps = {x.buffer: stride(x.index, *x.reduce_axes) for x in beside if x.scan}
    back: dict[Symbol, Size] = {}
    for value in walk(loop.operands) if steps else ():
        if value.op == "load" and (step := steps.get(value.attr[0])) is not None:
            # axes along which it reads backwards what a scan stores
            own = ((axis, stride(value.attr[1], axis)) for axis in loop.axes)
            back.update((a, a.size - 1 - a.expr) for a, n in own if n == -1 * step and n != 0)
    cut = rewritten(loop, back) if back and loop.acc is None and not loop.ordered else loop
    # sizes that are two axes of a loop beside it, of which the inner one is scanned; and that one's
    pieces: list[tuple[Size, Size]] = []
    for other in beside:
        for number in other.axes if other.scan else ():
            (piece,) = other.reduce_axes
            inner, outer = stride(other.index, piece), stride(other.index, number)
            if inner is not None and outer == inner * piece.size:
                pieces.append((piece.size * number.size, piece.size))
    while loop.acc is None and not loop.ordered and len(cut.axes) < 8:
        inside = ((axis, n) for whole, n in pieces for axis in cut.axes if axis.hi == whole)
        found = next(itertools.chain(cuts_of(cut), inside), None)
        if found is None:
            break
        cut = cut_loop(cut, *found)
    return None if cut is loop else cut


def split_symbols(axis: Symbol, chunk: Size) -> tuple[Symbol, Symbol, Size]:
    """(high, low, high*chunk + low): two axes that stand for `axis`."""
    high = Symbol(f"{axis.name}a", 0, axis.size // chunk)
    low = Symbol(f"{axis.name}b", 0, chunk)
    return high, low, high.expr * chunk + low.expr


def split_loop(loop: Loop) -> Loop:
    """The loop with two axes for each that it uses as i//c and i%c."""
    while (found := next(cuts_of(loop), None)) is not None and not loop.ordered:
        loop = cut_loop(loop, *found)
    return loop


def cut_axes(axes: Iterable[Symbol], axis: Symbol, chunk: Size) -> tuple[Symbol, ...]:
    """Axes with two for one."""
    high, low, _ = split_symbols(axis, chunk)
    return tuple(x for a in axes for x in ((high, low) if a == axis else (a,)))


def cut_loop(loop: Loop, axis: Symbol, chunk: Size) -> Loop:
    """The loop with two axes for one."""
    axes, reduced = (cut_axes(x, axis, chunk) for x in (loop.axes, loop.reduce_axes))
    whole = split_symbols(axis, chunk)[2]
    return replace(rewritten(loop, {axis: whole}), axes=axes, reduce_axes=reduced)


def ends_of(
    index: Size, axes: Iterable[Symbol], other: Size, others: Iterable[Symbol]
) -> Iterator[tuple[Symbol, int]]:
    """Each axis of an index within which one of another index ends, and after how many points."""
    steps = [stride(other, axis) for axis in others]
    for axis in axes:
        own, size = stride(index, axis), axis.hi
        if not isinstance(own, int) or own <= 0 or not isinstance(size, int):
            continue
        for step in steps:
            chunk, rest = divmod(step, own) if isinstance(step, int) else (0, 0)
            if rest == 0 and 1 < chunk < size and size % chunk == 0:
                yield axis, chunk


# ------------------------------------------------------------------------------ repeats
# Values that repeat within a vector, as a number per group of channels does beside channels.
#
# A loop over i that reads x[i // 8] has lanes of eight elements at most. Where it reads that again
# at each point of other axes, x[i // 8] is stored before, once for each i, by a loop of its own.


def unrepeated(loop: Loop, profile: Profile, numbers: Iterator[int]) -> Iterator[Loop]:
    """A loop, with loops before it if it would have few lanes. `numbers` name their buffers."""
    stored: dict[Value, Value] = {}
    every = loop.all_axes
    loads = [] if loop.scan else [v for v in walk(loop.operands) if v.op == "load"]
    indices = [loop.index, *(v.attr[1] for v in loads)]
    for value in loads:
        own = symbols(value.attr[1])
        cut = {axis for axis, size in cuts(value.attr[1], {*every}) if are_few(size, profile)}
        if not cut or value.args or any(symbol not in every for symbol in own):
            continue
        axes = [axis for axis in every if axis in own]
        often = points_of(every) >= AGAIN * points_of(axes)
        if not often or not any(stride(at, axis) == 1 for at in indices for axis in cut):
            continue
        shape = tuple([axis.size for axis in axes])
        name = f"each{next(numbers)}"
        buffer = Buffer(name, value.dtype, shape, contiguous(shape), "scratch")
        index = buffer.index([axis.expr for axis in axes])
        stored[value] = value.table.load(buffer, index)
        yield Loop(buffer, tuple(axes), index, value, origin=loop.origin)
    yield rewritten(loop, {}, stored.get) if stored else loop


def are_few(size: Size, profile: Profile) -> bool:
    """Whether pieces of an axis fill no vector. Threads' vectors fill such a piece, which may be
    longer."""
    if profile.shares:
        return known_lt(size, profile.lanes) or not divides(profile.lanes // 2, size)
    return known_lt(size, profile.wide)


# ------------------------------------------------------------------------------ lanes


def _suits(found: Accesses, axis: Symbol, wide: int) -> float:
    """How well a body's accesses suit vectors along `axis`: share of contiguous minus strided.

    Less for short axes, which fill vectors badly.
    """
    good = bad = 0.0
    for (index, is_memory), weight in found.items():
        if not is_memory:
            continue
        step = stride(index, axis)
        read = (v for v in walk(payloads(index)) if v.op in ("load", "index"))
        if step is None or any(axis in symbols(index_of(v)) for v in read):
            bad += 2 * weight
        elif step == 1:
            good += weight
        elif step != 0:
            bad += weight
    return (good - 2 * bad) / max(good + bad, 1.0) + min(hint(axis.size) / wide, 1.0)


def _choose_lanes(kernel: Kernel, phases: Sequence[Accesses], wide: int) -> Symbol | None:
    """The outer axis for lanes, or None when the phases' own inner axes serve better."""
    looped = [pair for pair in zip(kernel.phases, phases, strict=True) if pair[0].inner]
    weighed = [found for _, found in looped] or phases
    scores = {axis: min(_suits(found, axis, wide) for found in weighed) for axis in kernel.outer}
    best = max(reversed(scores), key=scores.__getitem__, default=None)
    if not looped or best is None:
        return best
    inner = min(max(_suits(found, axis, wide) for axis in p.inner) for p, found in looped)
    # vectors along an outer axis, picked out of near elements, beat loops of few points
    points = [count_points(phase.inner) for phase, _ in looped]
    steps = [stride(index, best) for _, found in looped for index, _ in found]
    is_brief = all(isinstance(n, int) and n <= _BRIEF for n in points) and all(
        isinstance(step, int) and 0 <= step <= _BRIEF for step in steps
    )
    return best if is_brief or inner < scores[best] else None


# Points that are few beside the lanes of a vector.
_BRIEF = 8


# ------------------------------------------------------------------------------ sort


def _by_stride(
    axes: tuple[Symbol, ...], found: Accesses, last: Symbol | None
) -> tuple[Symbol, ...]:
    """Axes by total stride, widest first; `last` last."""
    if len(axes) < 2:
        return axes
    indices = [(index, weight) for (index, is_memory), weight in found.items() if is_memory]

    def total(axis: Symbol) -> int:
        steps = ((stride(index, axis), weight) for index, weight in indices)
        return sum(n * (1 if step is None else abs(hint(step))) for step, n in steps)

    return tuple(sorted(axes, key=lambda axis: (axis == last, -total(axis))))


# ------------------------------------------------------------------------------ merge


def _merge_axes(
    axes: tuple[Symbol, ...], found: Accesses
) -> tuple[tuple[Symbol, ...], dict[Symbol, Size]]:
    """(new axes, what the old ones are in terms of them)."""
    merged = list(axes)
    values: dict[Symbol, Size] = {}
    last = dict(zip(axes, axes, strict=True))  # what an axis goes along in the indices
    position = len(merged) - 2
    while position >= 0:
        left, right = merged[position], merged[position + 1]
        steps = ((stride(i, left), stride(i, last[right])) for i, _ in found)
        if all(a is not None and b is not None and a == b * right.size for a, b in steps):
            one = Symbol(f"{left.name}{right.name}", 0, left.size * right.size)
            # no access needs left alone, so all of `one` may be put on right
            last[one] = last[right]
            values |= {left: 0, last[one]: one.expr}
            merged[position : position + 2] = [one]
        position -= 1
    return tuple(merged), values


# ---------------------------------------------------------------------------- deps
# Which buffers a step or kernel reads and writes.


def writes(step: Loop | Extern | Kernel) -> list[Buffer]:
    """The buffers that a step or kernel stores to."""
    if isinstance(step, Loop):
        return [step.buffer]
    if isinstance(step, Kernel):
        return list(dict.fromkeys(s.buffer for s in step.stores))
    return [b for b in step.results if b is not None] + list(step.mutates)


def first_write(steps: Sequence[Loop | Extern | Kernel]) -> int:
    """The place of the first step that writes to an input; how many there are if none does."""
    changes = (any(buffer.role == "input" for buffer in writes(step)) for step in steps)
    return next((k for k, does in enumerate(changes) if does), len(steps))


def checks(step: Loop | Extern | Kernel) -> bool:
    """Whether a loop or kernel may refuse a value."""
    return not isinstance(step, Extern) and any(v.op == "check" for v in walk(step.operands))


def reads(step: Loop | Extern | Kernel) -> list[Buffer]:
    """The buffers that a step or kernel loads from."""
    if isinstance(step, Extern):
        return list(dict.fromkeys(v.buffer for v in views((step.args, step.kwargs))))
    if step.reads_memo is None:
        order = walk(step.operands)
        step.reads_memo = list(dict.fromkeys(v.attr[0] for v in order if v.op == "load"))
        if isinstance(step, Loop):
            step.size_memo = len(order)
    return step.reads_memo


def reads_back(phases: Sequence[Phase], orders: Sequence[Sequence[Value]]) -> bool:
    """Whether a phase reads what another one stores, or it stores at other points of its own.

    What a point reads and then overwrites, once all phases are over, is its own.

    orders   the values of each phase
    """
    stored = [{s.buffer for s in phase.stores} for phase in phases]
    for k, (phase, order) in enumerate(zip(phases, orders, strict=True)):
        loads = {v.attr[0] for v in order if v.op == "load"}
        is_own = k == len(phases) - 1 and not phase.inner
        if any(loads & own for j, own in enumerate(stored) if j != k or not is_own):
            return True
    return False


def size(loop: Loop) -> int:
    """How many values the loop computes at one point."""
    reads(loop)
    return loop.size_memo


def views(tree: object) -> Iterable[View]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, View))


# ---------------------------------------------------------------------------- same
# When two kernels are one kernel on other buffers: the repeated layers of a network.
#
# `form(kernel)` is all of a kernel but which buffers it works on, and the numbers that it is given.
# Kernels of equal form are emitted once. The code generator shares more, kernels of other sizes
# too, but only by their finished text.


class Given(NamedTuple):
    """A constant that the host passes: the word that it lies in; whether that has its inverse."""

    word: int
    is_inverse: bool


def form(kernel: Kernel, given: Mapping[Value, Given] = {}) -> tuple[Hashable, list[Buffer]]:
    """(form, the buffers in order of appearance). Unequal forms may still be equal kernels.

    given   constants that are passed
    """
    return _Form(given).of(kernel)


def ordered_once(kernel: Kernel, profile: Profile) -> Kernel:
    """`order_loops` for the first of a form; others are that one on buffers of their own."""
    found, forms = _Form({}), kernel.phases[0].body[0].value.table.forms
    key, own = found.of(kernel)[0], (*found.buffers, *found.accs)
    if key not in forms:
        forms[key] = order_loops(kernel, profile), own
    first, others = forms[key]
    if others is own:
        return first
    instead = dict(zip(others, own, strict=True))

    phases = on_others(first.phases, instead)
    return Kernel(first.outer, phases, first.lanes, first.ordered, kernel.origin)


def on_others(phases: Iterable[Phase], instead: Mapping[Any, Any]) -> list[Phase]:
    """The phases with other buffers and accumulators in place of some."""

    def change(value: Value) -> Value | None:
        if value.op not in ("load", "acc", "carry"):
            return None
        of, *index = value.attr if value.op == "load" else (value.attr,)
        if of not in instead:
            return None
        attr = (instead[of], *index) if index else instead[of]
        return value.table.make(value.op, value.args, value.dtype, attr)

    found = [Phase(phase.inner, rewrite_body(phase.body, None, change)) for phase in phases]
    for statement in (s for phase in found for s in phase.body):
        if isinstance(statement, Store):
            statement.buffer = instead.get(statement.buffer, statement.buffer)
        else:
            statement.acc = instead.get(statement.acc, statement.acc)
    return found


class _Form:
    def __init__(self, given: Mapping[Value, Given]) -> None:
        self.given = given
        self.buffers: dict[Buffer, int] = {}
        self.accs: dict[object, int] = {}
        self.values: dict[Value, int] = {}

    def of(self, kernel: Kernel) -> tuple[Hashable, list[Buffer]]:
        phases = []
        for phase in kernel.phases:
            rows: list[Hashable] = []
            for value in walk(phase.operands):
                if value in self.values:
                    continue
                args = tuple([self.values[arg] for arg in value.args])
                given = self.given.get(value)
                attr = self._attr(value.op, value.attr) if given is None else given.is_inverse
                rows.append((value.op, value.dtype, args, attr))
                self.values[value] = len(self.values)
            phases.append((phase.inner, tuple(rows), tuple(map(self._statement, phase.body))))
        key = (kernel.outer, kernel.lanes, kernel.ordered, tuple(phases))
        return key, list(self.buffers)

    def _statement(self, statement: Store | Accumulate) -> Hashable:
        value = self.values[statement.value]
        if isinstance(statement, Store):
            place = self._buffer(statement.buffer), self._index(statement.index)
            return (*place, value, statement.mode)
        which = None if statement.which is None else self.values[statement.which]
        return self._acc(statement.acc), statement.acc.op, statement.acc.dtype, value, which

    def _attr(self, op: str, attr: object) -> Hashable:
        if op == "load":
            assert isinstance(attr, tuple)
            return self._buffer(attr[0]), self._index(attr[1])
        if op == "index":
            return self._index(attr)  # type: ignore[arg-type]
        if op in ("acc", "carry"):
            return self._acc(attr)
        # repr tells 0.0 from -0.0 and makes NaN equal to itself
        return repr(attr)

    def _index(self, index: Size) -> Hashable:
        # data-dependent parts are named by the value they load, which differs between twins
        return index, tuple([self.values[value] for value in payloads(index)])

    def _buffer(self, buffer: Buffer) -> Hashable:
        number = self.buffers.setdefault(buffer, len(self.buffers))
        return number, buffer.dtype, buffer.role == "input"

    def _acc(self, acc: object) -> Hashable:
        return self.accs.setdefault(acc, len(self.accs))


class Online(Accumulate):
    """Accumulates `value` into `acc` as it would be alone, and beside it into `raw`.

    which   u of exp(v - g) * u, if there is one
    """

    def __init__(self, acc: Acc, value: Value, raw: Acc, factor: Value | None = None) -> None:
        super().__init__(acc, value, factor)
        self.raw = raw


def in_one_pass(phases: Sequence[Phase]) -> list[Phase]:
    """The phases with later ones merged into the first whose points they share, where they can.

    What happens at outer points alone comes after them, and what is only stored.
    """
    found: list[Phase] = []
    waiting: list[Phase] = []
    rest = list(phases)
    changes: dict[Acc, Value] = {}

    def instead(value: Value) -> Value | None:
        return changes.get(value.attr) if value.op == "acc" else None

    while rest:
        phase = rest.pop(0)
        if not phase.inner:
            waiting.append(phase)
            continue
        last = found[-1] if found and found[-1].inner else None
        merged = None if last is None else _merged(last, phase, waiting)
        if merged is None and last is not None and not phase.accumulates:
            waiting.append(phase)
            continue
        if merged is None:
            found += [*waiting, phase]
            waiting = []
            continue
        found[-1], changes = merged
        waiting, rest = (
            [Phase(p.inner, rewrite_body(p.body, None, instead)) for p in some]
            for some in (waiting, rest)
        )
    return found + waiting


def takes_one_pass(phases: Sequence[Phase]) -> bool:
    """Whether all that is reduced is reduced in one pass. Of what was found a few elements may be
    stored after it: a group's mean for each of its channels."""
    first, *others = [phase for phase in phases if phase.inner] or [Phase((), [])]
    few = hint(count_points(first.inner)) // AGAIN
    return not any(hint(count_points(phase.inner)) > few or phase.accumulates for phase in others)


def _merged(
    first: Phase, second: Phase, between: Sequence[Phase]
) -> tuple[Phase, dict[Acc, Value]] | None:
    """Both as one, and what is to be read in the place of an accumulator; None: they can't be."""
    if first.inner != second.inner or is_scan(first) or is_scan(second):
        return None
    stored = {s.buffer for p in (first, *between) for s in p.stores}
    if any(v.op == "load" and v.attr[0] in stored for v in walk(second.operands)):
        return None
    own, body, changes = set[object](), list(first.body), dict[Acc, Value]()
    for s in first.body:
        if isinstance(s, Accumulate):
            own |= {s.acc, s.raw} if isinstance(s, Online) else {s.acc}
    for statement in second.body:
        if not any(v.op == "acc" and v.attr in own for v in walk(statement.operands)):
            body.append(statement)
            continue
        if not isinstance(statement, Accumulate) or statement.acc.op != "sum":
            return None
        for k, base in enumerate(body):
            if type(base) is Accumulate and base.which is None:
                both = _online(base, statement, first)
                if both is not None:
                    body[k], changes[statement.acc] = both
                    break
        else:
            return None
    return Phase(first.inner, body), changes


def _online(base: Accumulate, statement: Accumulate, phase: Phase) -> tuple[Online, Value] | None:
    """What accumulates both, and what the second accumulator is then."""
    v, value, table = base.value, statement.value, statement.value.table
    if v.dtype is not value.dtype or not v.dtype.is_floating_point:
        return None
    raw = Acc(f"{statement.acc.name}_raw", "sum", statement.acc.dtype)
    own, found = table.acc(base.acc), table.acc(raw)
    if base.acc.op == "sum" and value.op == "mul" and value.args[0] is value.args[1]:
        g = _subtracted(value.args[0], base, phase)
        if g is None:
            return None
        count = table.index(count_points(phase.inner), v.dtype)
        away = own / count - g
        return Online(base.acc, v, raw), found + count * (away * away)
    sides = (value, None), *((value.args, value.args[::-1]) if value.op == "mul" else ())
    for power, factor in sides:
        if base.acc.op == "max" and power.op == "exp":
            g = _subtracted(power.args[0], base, phase)
            reads = walk([] if factor is None else [factor])
            if g is not None and not any(x.op == "acc" and x.attr is base.acc for x in reads):
                return Online(base.acc, v, raw, factor), found * op("exp", own - g)
    return None


def _subtracted(value: Value, base: Accumulate, phase: Phase) -> Value | None:
    """g of v - g: the same at all points of the phase, made of no accumulator but the base's."""
    if value.op != "sub" or value.args[0] is not base.value:
        return None
    g = value.args[1]
    for part in walk([g]):
        if {*phase.inner} & {*symbols(index_of(part))}:
            return None
        if part.op == "acc" and part.attr is not base.acc:
            return None
    return g
