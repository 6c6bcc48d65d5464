"""Fusion: the steps of a LoopGraph become Kernels, each doing the work of one or more Loops.

Invariants
  - A kernel's outer axes are free of dependences: for one outer point, everything that a member
    reads of another member's result was computed at the same outer point, in an earlier phase or
    earlier in the same phase.
  - A kernel runs at one place in the program: whatever its members read from others was computed
    before it, and nothing that they overwrite is read after it.

A loop that shares data with an existing kernel is tried against it: `legality` answers with a
Placement or a reason, the bytes saved are the score, the best placement wins. What a consumer loads
from a fused producer is forwarded in registers; stores that nobody reads any more are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fusee.loops import (
    Accumulate,
    Buffer,
    Extern,
    Kernel,
    Loop,
    LoopGraph,
    Phase,
    Profile,
    Schedule,
    Statement,
    Store,
    Value,
    View,
    cast,
    joined,
    walk,
)
from fusee.loops.memory import are_apart, gathered, is_update, reads_only_at, size_bytes, turns
from fusee.loops.schedule import (
    AGAIN,
    are_few,
    checks,
    cut_apart,
    cut_axes,
    cut_loop,
    cuts_of,
    ends_of,
    in_one_pass,
    ordered_once,
    points_of,
    reads,
    reads_back,
    rewritten,
    size,
    split_loop,
    stride,
    takes_one_pass,
    unrepeated,
    views,
    writes,
)
from fusee.sym import (
    Expr,
    Size,
    Symbol,
    coefficient,
    count_points,
    hint,
    product,
    substitute,
    symbols,
)

# ---------------------------------------------------------------------------- group
# A kernel in the making: its members, and how they become one Kernel.


@dataclass(eq=False)
class Member:
    """A loop inside a kernel: a copy of it, renamed to the kernel's axes."""

    loop: Loop
    phase: int = 0

    def stored(self) -> Value:
        """What ends up in the buffer, as later statements see it."""
        loop = self.loop
        value = loop.value
        if loop.acc is not None:
            value = loop.result or value.table.acc(loop.acc)
        return cast(value, loop.buffer.dtype)


@dataclass(eq=False)
class Group:
    """A kernel in the making."""

    position: int
    profile: Profile
    outer: tuple[Symbol, ...]
    members: list[Member] = field(default_factory=list)
    phases: list[tuple[Symbol, ...]] = field(default_factory=list)  # inner axes
    sealed: bool = False  # takes no more members
    values: int = 0  # how many the members have, those that they share counted each time
    frozen: bool = False  # a reduction joined: the outer axes are its axes and stay


def build(group: Group, live: set[Buffer]) -> Kernel | None:
    """Forward values between members, drop dead stores, order the loops. None: all is dead."""
    by_buffer: dict[Buffer, Member] = {}  # of the members so far
    bodies: list[list[Statement]] = [[] for _ in group.phases]
    finals: list[list[Statement]] = [[] for _ in group.phases]
    for member in group.members:
        loop = member.loop
        if not by_buffer.keys().isdisjoint(reads(loop)):
            loop = rewritten(loop, {}, partial(_forwarded, member, by_buffer, live))
        member.loop, by_buffer[loop.buffer] = loop, member
        store = Store(loop.buffer, loop.index, member.stored(), loop.mode)
        if loop.acc is None:
            bodies[member.phase].append(store)
            continue
        known = {s.acc for s in bodies[member.phase] if isinstance(s, Accumulate)}
        bodies[member.phase] += [s for s in loop.gathered if s.acc not in known]
        (bodies if loop.scan else finals)[member.phase].append(store)
    phases = []
    for inner, body, final in zip(group.phases, bodies, finals, strict=True):
        phases.append(Phase(inner, body))
        if final:
            phases.append(Phase((), final))
    values = walk(value for phase in phases for value in phase.operands)
    needed = live.union(v.attr[0] for v in values if v.op == "load")
    # Phases without statements go; neighbouring phases without inner axes become one.
    kept: list[Phase] = []
    for phase in phases:
        body = [s for s in phase.body if not isinstance(s, Store) or s.buffer in needed]
        if body and kept and not phase.inner and not kept[-1].inner:
            kept[-1].body += body
        elif body:
            kept.append(Phase(phase.inner, body))
    if not kept:
        return None
    ordered = tuple(axis for m in group.members for axis in m.loop.ordered)
    origin = joined(part for m in group.members for part in m.loop.origin.split(" + ") if part)
    return ordered_once(Kernel(group.outer, kept, None, ordered, origin), group.profile)


def _forwarded(
    member: Member, by_buffer: dict[Buffer, Member], live: set[Buffer], value: Value
) -> Value | None:
    """For a member's load of what another one computed, the value itself."""
    producer = by_buffer.get(value.attr[0]) if value.op == "load" else None
    if producer is None or producer is member or producer.loop.index != value.attr[1]:
        return None
    stored = producer.stored()
    if producer.phase != member.phase:
        running = {s.acc for m in by_buffer.values() if m.loop.scan for s in m.loop.gathered}
        if running and any(v.op in ("acc", "carry") and v.attr in running for v in walk([stored])):
            return None  # at each point it is another, in its own phase
        profile = stored.table.profile
        limit = profile.reloaded if producer.loop.buffer in live else profile.again
        if producer.loop.acc is None and stored.cost > limit:
            return None
    # masked: the mask may protect what the producer never computed
    return None if value.args else stored


# ---------------------------------------------------------------------------- fuse


@dataclass
class Placement:
    """How a loop joins a group."""

    group: Group
    member: Member
    outer: tuple[Symbol, ...]
    inner: tuple[Symbol, ...]
    saved_bytes: int
    whole: Group | None = None  # what `group` is a copy of, with an axis that is cut in two


def fuse(graph: LoopGraph, merge: bool = True) -> Schedule:
    """Merge loops into kernels and order their axes. Without `merge`: one kernel a loop."""
    return _Fuser(graph, merge).run()


class _Fuser:
    def __init__(self, graph: LoopGraph, merge: bool) -> None:
        self.graph, self.merge = graph, merge
        profile = graph.values.profile
        self.profile, self.numbers = profile, itertools.count()
        self.items: list[Group | Extern] = []
        self.written: dict[Buffer, list[int]] = {}  # positions of writers
        self.read: dict[Buffer, list[int]] = {}  # positions of readers
        self.sharing: dict[Buffer, list[Group]] = {}  # groups that read or write a buffer
        self.refusals: list[str] = []
        # The last ones of single elements: of the graph's own, and of the caller's, which are
        # written when all that may raise is over.
        self.alone: dict[bool, Group] = {}
        self.last_extern = -1
        self.raises = profile.raises and bool(graph.messages)
        self.last_check = -1  # position of the last kernel or call that may raise
        self.cuts: dict[Loop, list[Symbol]] = {}
        self.writers: dict[Buffer, int] = {}
        self.last_reader: dict[Buffer, Loop | Extern | None] = {}
        for step in graph.steps:
            self.last_reader.update(dict.fromkeys(reads(step), step))
            for buffer in writes(step):
                self.writers[buffer] = self.writers.get(buffer, 0) + 1
        self.last_reader.update({view.buffer: None for view in views(graph.outputs)})

    def run(self) -> Schedule:
        for step in self.graph.steps:
            self.step = step
            if isinstance(step, Extern):
                self.last_extern = len(self.items)
                self.last_check = self.last_extern if step.must_run else self.last_check
                self.items.append(step)
                self._note(step, len(self.items) - 1)
                continue
            loops = [*unrepeated(step, self.profile, self.numbers)]
            if len(loops) > 1 and self.profile.shares and self._best(step) is not None:
                loops = [step]  # what would be stored before is in registers
            for loop in loops:
                self.writers.setdefault(loop.buffer, 1)
                self._place(loop)
        live = self._read_outside()
        items: list[Kernel | Extern] = []
        for item in self.items:
            built = item if isinstance(item, Extern) else build(item, live.get(item, set()))
            if built is not None:
                items.append(built)
        if self.profile.gathers:
            items = gathered(items, self.profile.gathers)
        return Schedule(self.graph, items, self.refusals)

    def _note(self, step: Loop | Extern, position: int) -> None:
        for buffer in writes(step):
            self.written.setdefault(buffer, []).append(position)
        for buffer in reads(step):
            self.read.setdefault(buffer, []).append(position)

    def _best(self, loop: Loop) -> Placement | None:
        """Where it joins a kernel; None: it begins one."""
        best = None
        for group in self._candidates(loop) if self.merge and not _stands_alone(loop) else ():
            answer = self._try(loop, group)
            folds = [m.loop for m in group.members if m.loop.is_fold]
            if folds and isinstance(answer, str) and (cut := cut_apart(loop, folds)):
                answer = self._try(cut, group)
            if isinstance(answer, str) and group.profile.shares:
                answer = self._try_in_pieces(loop, group) or answer
            if isinstance(answer, str):
                with_whom = group.members[0].loop
                self.refusals.append(f"{_label(loop)} with {_label(with_whom)}: {answer}")
            elif best is None or answer.saved_bytes > best.saved_bytes:
                best = answer
        return best

    def _place(self, loop: Loop) -> None:
        best = self._best(loop)
        if best is None:
            group = Group(len(self.items), self.profile, loop.axes, sealed=_stands_alone(loop))
            self.items.append(group)
            _join(Placement(group, Member(replace(loop)), loop.axes, loop.reduce_axes, 0))
            if _is_one_element(loop) and not group.sealed:
                self.alone[loop.buffer.role == "input"] = group
        else:
            group = best.whole or best.group
            group.outer, group.phases = best.group.outer, best.group.phases
            group.members = best.group.members
            _join(replace(best, group=group))
        self._note(loop, group.position)
        if self.raises and checks(loop):
            self.last_check = max(self.last_check, group.position)
        for buffer in (*reads(loop), *writes(loop)):
            shared = self.sharing.setdefault(buffer, [])
            if group not in shared:
                shared.append(group)

    def _candidates(self, loop: Loop) -> list[Group]:
        """Groups that share data with the loop, from where it may run on; the last ones first."""
        earliest = 0
        for buffer in reads(loop):
            earliest = max([earliest, *self.written.get(buffer, ())])
        for buffer in writes(loop):
            earliest = max([earliest, *self.read.get(buffer, ()), *self.written.get(buffer, ())])
        if loop.buffer.role == "input":  # so that an error finds it as it was
            earliest = max(earliest, self.last_check + 1)
        found: dict[int, Group] = {}
        for buffer in (*reads(loop), *writes(loop)):
            for group in self.sharing.get(buffer, ())[-4:]:
                if group.position >= earliest and not group.sealed:
                    found[group.position] = group
        alone = self.alone.get(loop.buffer.role == "input") if _is_one_element(loop) else None
        if alone is not None and alone.position >= earliest:
            found[alone.position] = alone
        return [found[position] for position in sorted(found, reverse=True)[:6]]

    def _try(self, loop: Loop, group: Group) -> Placement | str:
        profile = group.profile
        if len(group.members) >= profile.members or group.values + size(loop) > profile.values:
            return "the kernel is full"
        produced = {m.loop.buffer: m for m in group.members}
        for buffer in reads(loop):
            if buffer in produced and self.writers[buffer] > 1:
                return f"{buffer} is written in pieces"
        in_pieces = loop.buffer in produced
        if in_pieces and not profile.shares:
            return f"{loop.buffer} is written in pieces"
        if group.position < self.last_extern:
            # it may be as large as what is read here for the last time
            ends = (b for b in {*reads(loop)} if self.last_reader.get(b) is self.step)
            freed = (hint(size_bytes(b)) for b in ends if b.role in ("scratch", "extern"))
            fits = any(b in produced for b in reads(loop))
            fits = fits or sum(freed) >= hint(size_bytes(loop.buffer))
            if loop.late != group.members[0].loop.late or not fits:
                return "its result would lie in memory long before it is read"
        answer = _legality(loop, group, produced)
        if in_pieces and isinstance(answer, Placement):
            # nowhere twice, as far as one look at its indices tells
            new, axes = answer.member.loop, (*answer.outer, *answer.inner)
            others = (m.loop for m in answer.group.members if m.loop.buffer is new.buffer)
            if not all(are_apart(other.index, new.index, axes) for other in others):
                return f"{loop.buffer} is written in pieces"
        if isinstance(answer, Placement) and self._cuts_lanes(loop, answer):
            return "its lanes would be few"
        overwrites = any(map(is_update, (loop, *(m.loop for m in group.members))))
        if overwrites and isinstance(answer, Placement) and not _may_overwrite(answer):
            return "what overwrites its operands shares only a single pass over the same points"
        return answer

    def _try_in_pieces(self, loop: Loop, group: Group) -> Placement | None:
        """Where the loop joins the group if an axis of the one is two of the other's: the channels
        of groups of channels, where a norm reduces each group."""
        if not group.frozen and loop.acc is None:
            return None
        own = {axis.hi for axis in loop.all_axes}
        theirs = {axis.hi for axes in (group.outer, *group.phases) for axis in axes}
        if own <= theirs or theirs <= own:
            return None
        if any(x.scan or x.ordered for x in (loop, *(m.loop for m in group.members))):
            return None
        pieces, cut = split_loop(loop), group
        while True:
            indices = {m.loop.buffer: m.loop.index for m in cut.members}
            inner = dict.fromkeys(axis for phase in cut.phases for axis in phase)
            mine, others = pieces.all_axes, (*cut.outer, *inner)
            loads = [
                v.attr for v in walk([pieces.value]) if v.op == "load" and v.attr[0] in indices
            ]
            ends = (x for b, at in loads for x in ends_of(at, mine, indices[b], others))
            if (found := next(ends, None)) is not None:
                pieces = cut_loop(pieces, *found)
                continue
            ends = (x for b, at in loads for x in ends_of(indices[b], others, at, mine))
            if (found := next(ends, None)) is None:
                break
            members = [replace(m, loop=cut_loop(m.loop, *found)) for m in cut.members]
            outer, *phases = (cut_axes(axes, *found) for axes in (cut.outer, *cut.phases))
            cut = replace(cut, outer=outer, members=members, phases=phases)
        if pieces is loop and cut is group:
            return None
        answer = self._try(pieces, cut)
        return None if isinstance(answer, str) else replace(answer, whole=group)

    def _cuts_lanes(self, loop: Loop, placement: Placement) -> bool:
        """Whether few values that repeat along an axis would cut it for many that do not."""
        members = [m.loop for m in placement.group.members]
        if not any(map(self._cuts, (loop, *members))):
            return False
        loops = [placement.member.loop, *members]  # `loop` in the group's axes
        cut = {loop: self._cuts(loop) for loop in loops}
        few = max((points_of(x.axes) for x in loops if cut[x]), default=0)
        axes = {axis for found in cut.values() for axis in found}
        return few > 0 and any(
            points_of(x.all_axes) >= AGAIN * few and axes & {*x.axes} for x in loops if not cut[x]
        )

    def _cuts(self, loop: Loop) -> Sequence[Symbol]:
        """Axes of which a loop sees pieces with fewer elements than a vector."""
        found = self.cuts.get(loop)
        if found is None:
            found = [axis for axis, size in cuts_of(loop) if are_few(size, self.profile)]
            self.cuts[loop] = found
        return found

    def _read_outside(self) -> dict[Group, set[Buffer]]:
        """Per group, the buffers that must really be stored."""
        outputs = {view.buffer for view in self.graph.outputs if isinstance(view, View)}
        live: dict[Group, set[Buffer]] = {}
        for item in self.items:
            if not isinstance(item, Group):
                continue
            for member in item.members:
                buffer = member.loop.buffer
                others = any(p != item.position for p in self.read.get(buffer, ()))
                kept = buffer in outputs or buffer.role != "scratch" or member.loop.stays
                if others or kept or self.writers[buffer] > 1:
                    live.setdefault(item, set()).add(buffer)
        return live


def _label(loop: Loop) -> str:
    return f"{loop.buffer} ({loop.origin})" if loop.origin else str(loop.buffer)


def _stands_alone(loop: Loop) -> bool:
    """Loops whose stores may collide, accumulate in memory or change what others still read."""
    if loop.ordered or loop.mode != "set":
        return True
    return loop.buffer.role == "input" and not is_update(loop)


def _is_one_element(loop: Loop) -> bool:
    return not (loop.axes or loop.reduce_axes)


def _may_overwrite(placement: Placement) -> bool:
    """Whether all points of the kernel read what they are to, where it overwrites operands.

    They do in one pass over the same points, each of which sees its own alone: all that is loaded
    was there before the kernel, and what is there after it is forwarded. They do, too, if the new
    loop comes last and the others read there alone: a running mean, once the batch's is known. Not
    where a later step may raise.
    """
    group, new = placement.group, placement.member.loop
    others = [m.loop for m in group.members]
    readers = [loop for loop in others if new.buffer in reads(loop)]
    if new.acc is not None or placement.outer != group.outer:
        return False
    if not all(x.acc is None and reads_only_at(x.value, new.buffer, new.index) for x in readers):
        return False
    if len(group.phases) == 1 and {*placement.inner} == {*group.phases[0]}:
        masked = any(v.op == "load" and v.args for v in walk([new.value]))
        if not masked and all(loop.acc is None for loop in others):
            return True
    fed = {loop.buffer for loop in readers}
    users = [loop for loop in others if fed & {*reads(loop)}]
    return not (group.profile.raises or placement.inner) and all(map(is_update, users))


# ------------------------------------------------------------------------------ legality


def _legality(loop: Loop, group: Group, produced: dict[Buffer, Member]) -> Placement | str:
    """Match the loop's axes to the group's through the data they share."""
    links = list(_links(loop, group, produced))
    if _is_one_element(loop) and not group.outer and group.phases == [()]:
        if any(must and theirs != ours for theirs, ours, _, must in links):
            return "what they write is read elsewhere"
        return Placement(group, Member(replace(loop)), (), (), 0)
    if not links:
        return "they read the same data at different places"
    pairing = _Pairing(loop, group)
    bytes_saved = 0
    depends = False
    points = points_of(loop.all_axes)
    for theirs, ours, buffer, must in links:
        elements = hint(product(buffer.shape))
        if not must and 2 * elements < points:
            pairing.tables.append((theirs, ours))
            continue  # a small table read by both is in the cache anyway
        matched = pairing.match(theirs, ours)
        if not matched and must:
            return f"{buffer} is read elsewhere than where it is written"
        if matched:
            bytes_saved += buffer.dtype.itemsize * elements
            depends |= must
    if not bytes_saved and not (group.profile.pairs and pairing.of_equal_sums(loop)):
        return "they read the same data at different places"
    if not depends and len(pairing.pairs) != len(loop.axes) + len(loop.reduce_axes):
        return "they share data but not their axes"
    return _fit(loop, group, pairing, bytes_saved)


def _links(
    loop: Loop, group: Group, produced: dict[Buffer, Member]
) -> Iterable[tuple[Size, Size, Buffer, bool]]:
    """(group's index, loop's index, buffer, must be equal) for each buffer both touch."""
    values = [v for v in (loop.value, loop.result, *dict(loop.folds).values()) if v is not None]
    loads = [v for v in walk(values) if v.op == "load"]
    shared: list[tuple[Size, Size, Buffer, bool]] = []
    if loop.buffer in produced:  # what lies between the elements of others fills the same lines
        theirs = produced[loop.buffer].loop.index
        axes = (*loop.axes, *group.outer, *(axis for inner in group.phases for axis in inner))
        ours, start = (substitute(at, dict.fromkeys(axes, 0)) for at in (loop.index, theirs))
        distance = ours - start
        steps = [stride(loop.index, axis) for axis in loop.axes]
        known = [0 if step is None else abs(step) for step in steps if not isinstance(step, Expr)]
        if isinstance(distance, int) and abs(distance) < min(known, default=0):
            shared.append((theirs, loop.index - distance, loop.buffer, False))
    for load in loads:
        buffer, index = load.attr
        if buffer in produced:
            yield produced[buffer].loop.index, index, buffer, True
        else:
            readers = [m.loop for m in group.members if buffer in reads(m.loop)]
            others = [v for x in readers for v in walk([x.value, *dict(x.folds).values()])]
            at = (v.attr[1] for v in others if v.op == "load" and v.attr[0] is buffer)
            shared += [(other, index, buffer, False) for other in dict.fromkeys(at)]
    yield from shared


class _Pairing:
    """Which axis of the loop is which axis of the group; axes are split where sizes ask for it."""

    def __init__(self, loop: Loop, group: Group) -> None:
        self.group = group
        self.pairs: dict[Symbol, Symbol] = {}  # loop's axis -> group's axis
        self.own = {*loop.all_axes}
        self.theirs = set(group.outer)
        for inner in group.phases:
            self.theirs.update(inner)
        self.tables: list[tuple[Size, Size]] = []  # where both read what is small

    def of_equal_sums(self, loop: Loop) -> bool:
        """Pair all axes of sums that have equal ones and read the same small row: a launch less.

        So have two layers of one row whose results are multiplied.
        """
        group = self.group
        inner = [phase for phase in group.phases if phase]
        if loop.acc is None or loop.scan or self.pairs or len(inner) != 1:
            return False
        ours, theirs = loop.all_axes, (*group.outer, *inner[0])
        alike = len(loop.axes) == len(group.outer) and len(ours) == len(theirs)
        if not alike or any(x.hi != y.hi for x, y in zip(ours, theirs, strict=True)):
            return False
        self.pairs = dict(zip(ours, theirs, strict=True))
        return any(self.match(*places) for places in self.tables)

    def match(self, theirs: Size, ours: Size) -> bool:
        """Pair axes so that both indices are equal; False (and nothing changed) if impossible."""
        a, b = self._terms(theirs, self.theirs), self._terms(ours, self.own)
        if a is None or b is None or a[1] != b[1]:
            return False
        left, right = a[0], b[0]
        pairs = dict(self.pairs)
        while left and right:
            (step, x), (step2, y) = left.pop(), right.pop()
            if step != step2 or x.hi != y.hi:
                return False
            if pairs.get(y, x) != x or (y not in pairs and x in pairs.values()):
                return False
            pairs[y] = x
        if left or right:
            return False
        self.pairs = pairs
        return True

    @staticmethod
    def _terms(index: Size, axes: set[Symbol]) -> tuple[list[tuple[Size, Symbol]], Size] | None:
        """([(stride, axis)] by falling stride, the rest); None if not linear in its axes."""
        terms: list[tuple[Size, Symbol]] = []
        for axis in symbols(index):
            if axis not in axes:
                if axis.payload is not None:
                    return None
                continue
            parts = coefficient(index, axis)
            if parts is None:
                return None
            if parts[0] != 0:
                terms.append((parts[0], axis))
                index = parts[1]
        terms.sort(key=lambda term: -abs(hint(term[0])))
        return terms, index


def _fit(loop: Loop, group: Group, pairing: _Pairing, saved: int) -> Placement | str:
    """Outer axes, inner axes and phase for the loop, or why it can't run inside this kernel."""
    space = [pairing.pairs.get(axis) for axis in loop.axes]
    outer = tuple(axis for axis in group.outer if axis in space)
    if outer != group.outer:
        if group.frozen:
            return "a reduction fixes the kernel's outer axes"
        if any(phase for phase in group.phases):
            return "the kernel has inner loops already"
    if loop.acc is not None and not loop.scan and len(outer) != len(loop.axes):
        return "the reduction would leave the kernel's outer axes"
    if not outer and group.outer:
        return "no common outer axis is left"
    own = points_of(group.outer) * max(map(points_of, group.phases))
    work = max(points_of(loop.all_axes), own)
    points = points_of(outer)
    few = points < group.profile.parallel and work > group.profile.small
    if outer != group.outer and few and not group.profile.shares:
        return "too few outer points would be left for the threads"
    names = _rename(loop, group, pairing)
    axes: dict[Symbol, Size] = {old: new.expr for old, new in names.items() if old != new}
    member = Member(rewritten(loop, axes) if axes else replace(loop))
    inner = tuple(names[a] for a in loop.all_axes if names[a] not in outer)
    if loop.scan and outer != tuple(names[a] for a in loop.axes):
        return "a scan keeps its own axes outside"
    found = {axis: stride(member.loop.index, axis) for axis in (*outer, *inner)}
    steps = {axis: 0 if step is None else abs(hint(step)) for axis, step in found.items()}
    widest = max((steps[axis] for axis in inner), default=0)
    if loop.acc is None and not (
        all(steps[axis] >= widest for axis in outer)
        or _stores_along(group, member.loop, inner, points)
    ):
        return "its further axes are not the innermost of what it stores"
    if inner and outer and not group.profile.shares and turns(loop):
        return "it stores along other axes than it reads, which squares of its own do better"
    if _wastes_lanes(group, member, outer, inner):
        return "one element at a time would be computed of what takes long, for few others"
    placement = Placement(group, member, outer, inner, saved)
    accs = {s.acc for s in loop.gathered}
    twins = {m.phase for m in group.members for s in m.loop.gathered if s.acc in accs}
    if twins - {_phase_of(group, member, inner)}:
        return "what both gather would be gathered twice"
    kept = _keeps(group, inner, points)
    if few and group.profile.shares and not (kept or _takes_one_pass(placement)):
        return "threads share few points in a single pass only"
    return placement


def _takes_one_pass(placement: Placement) -> bool:
    """Whether the kernel would go through its elements once, if it reduces any."""
    group = placement.group
    trial = replace(group, members=[replace(m) for m in group.members], phases=[*group.phases])
    _join(replace(placement, group=trial, member=replace(placement.member)))
    kernel = build(trial, {m.loop.buffer for m in trial.members if m.loop.buffer.role != "scratch"})
    if kernel is None or not kernel.accumulates:
        return True
    orders = [walk(phase.operands) for phase in kernel.phases]
    passes = in_one_pass(kernel.phases)
    return takes_one_pass(passes) and not reads_back(kernel.phases, orders)


def _wastes_lanes(
    group: Group, new: Member, outer: tuple[Symbol, ...], inner: tuple[Symbol, ...]
) -> bool:
    """True if a costly value is computed per outer point, not as vectors, and takes most time.

    What depends on a reduction in the kernel is worth it: apart, it would need another pass.
    """
    if group.frozen or outer != group.outer:
        return False
    placed = [(m, group.phases[m.phase]) for m in group.members] + [(new, inner)]
    alone = max((m.loop.value.cost for m, axes in placed if not axes), default=0)
    many = max((points_of(a) * m.loop.value.cost for m, a in placed if a), default=None)
    costly, lanes = group.profile.costly, group.profile.lanes
    return alone > costly and many is not None and lanes * alone > many


def _walks(group: Group, inner: tuple[Symbol, ...]) -> bool:
    """Whether the kernel goes through these points anyway."""
    return any(set(inner) == set(phase) for phase in group.phases)


def _keeps(group: Group, inner: tuple[Symbol, ...], points: int) -> bool:
    """Whether threads keep the elements that they reduce, of as many rows as make the processors
    busy, if not all: another launch would take longer."""
    elements = count_points(inner)
    profile = group.profile
    if not isinstance(elements, int) or elements > profile.kept or not _walks(group, inner):
        return False
    return _BUSY * points >= profile.parallel or points * elements <= profile.small


# How many times more rows keep a machine busy than its processors are.
_BUSY = 8
# Bytes in one piece that are stored well if what lies between such pieces is stored at that time.
_PIECE = 8


def _stores_along(group: Group, loop: Loop, inner: tuple[Symbol, ...], points: int) -> bool:
    """True if the kernel walks the same axes anyway and the store moves in long runs, in short ones
    if the elements are kept, or in one piece along the axis along which a fold there stores so.

    So does a batch norm: per channel it sums up pieces of all images, then stores them.
    """

    def narrowest(index: Size) -> list[Symbol]:
        return [axis for axis in (*group.outer, *inner) if stride(index, axis) == 1]

    along = [m.loop for m in group.members if {*group.phases[m.phase]} == {*inner}]
    folds = [other for other in along if other.is_fold and other.scan]
    if any(narrowest(fold.index) == narrowest(loop.index) for fold in folds):
        return True
    profile, kept = group.profile, _keeps(group, inner, points)
    if not kept and (points < profile.parallel or not _walks(group, inner)):
        return False
    run = 1
    steps = [(stride(loop.index, axis), axis) for axis in inner]
    for step, axis in sorted(steps, key=lambda row: 0 if row[0] is None else abs(hint(row[0]))):
        if step != run:
            break
        run *= hint(axis.size)
    return run >= profile.run or (kept and run * loop.buffer.dtype.itemsize >= _PIECE)


def _rename(loop: Loop, group: Group, pairing: _Pairing) -> dict[Symbol, Symbol]:
    """The group's symbol for each of the loop's axes; unpaired axes take equal-sized inner ones."""
    names = dict(pairing.pairs)
    taken = set(names.values())
    used = {axis.name for axis in pairing.theirs}
    spare = [axis for inner in group.phases for axis in inner]
    if len(names) < len(loop.axes):  # the group's outer axes may become inner ones
        spare += [axis for axis in group.outer if axis not in taken]
    for axis in loop.all_axes:
        if axis in names:
            continue
        twin = next((s for s in spare if s not in taken and s.hi == axis.hi), None)
        if twin is None:
            name = axis.name
            while name in used:
                name += "_"
            twin = axis if name == axis.name else Symbol(name, axis.lo, axis.hi, axis.hint)
        names[axis] = twin
        taken.add(twin)
        used.add(twin.name)
    return names


# ------------------------------------------------------------------------------ joining


def _phase_of(group: Group, member: Member, inner: tuple[Symbol, ...]) -> int:
    """The first phase with a loop's inner axes after everything it needs is complete.

    What a scan has gathered is complete at each point, so it is read in its own phase.
    """
    needed = set(reads(member.loop))
    ends = (
        m.phase + (m.loop.acc is not None and not m.loop.scan)
        for m in group.members
        if m.loop.buffer in needed
    )
    # folds run point by point; sums do not, and other scans have a phase for each
    gathers = [m for m in group.members if m.loop.acc is not None and member.loop.acc is not None]
    taken = {
        m.phase
        for m in gathers
        if m.loop.is_fold is not member.loop.is_fold
        or (not m.loop.is_fold and (m.loop.scan or member.loop.scan))
    }
    after = range(max(ends, default=0), len(group.phases))
    fitting = (k for k in after if {*group.phases[k]} == {*inner} and k not in taken)
    return next(fitting, len(group.phases))


def _join(placement: Placement) -> None:
    """Put the member into its group: outer axes shrink, the member takes its phase."""
    group, member = placement.group, placement.member
    if placement.outer != group.outer:
        gone = tuple(axis for axis in group.outer if axis not in placement.outer)
        group.outer = placement.outer
        group.phases = [gone + inner for inner in group.phases]
    member.phase = _phase_of(group, member, placement.inner)
    if member.phase == len(group.phases):
        group.phases.append(placement.inner)
    if member.loop.acc is not None:
        group.frozen = True
    group.members.append(member)
    group.values += size(member.loop)
