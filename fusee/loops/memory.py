"""The memory plan: where in the arena each intermediate lives, and what lies apart.

Buffers whose lives don't overlap share bytes. Lives are ranges of schedule positions: a buffer
lives from the item that writes it first to the item that reads it last, both included, so an item
never finds its operands where its results go, but for what `reuse_operands` makes one buffer.
Buffers of sizes that only the call knows lie in the order that fits best in the first call.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fusee.loops import (
    Buffer,
    Extern,
    Kernel,
    Loop,
    Schedule,
    Store,
    Value,
    View,
    index_of,
    payloads,
    walk,
)
from fusee.loops.schedule import (
    first_write,
    on_others,
    points_of,
    reads,
    split_loop,
    stride,
    views,
    writes,
)
from fusee.source import mapped
from fusee.sym import Size, Symbol, coefficient, divides, hint

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
# Results of at least so many bytes are written over operands: smaller ones stay in a cache anyway.
OVER_BYTES = 1 << 20
# So many pairs of buffers may be alive together for the plan that looks at each of them.
PAIRS = 1 << 17

Life = tuple[int, int]  # positions of the first and of the last item that uses a buffer


@dataclass
class Plan:
    """Byte offset of every scratch buffer of a schedule, and the arena's size in bytes.

    places  symbols in these: each is the greatest of some sizes, in which earlier ones may be
    """

    schedule: Schedule
    offsets: dict[Buffer, Size]
    total_bytes: Size
    places: list[tuple[Symbol, tuple[Size, ...]]] = field(default_factory=list)

    def with_room(self, sizes: Iterable[Size]) -> tuple[Plan, Buffer | None]:
        """Room for what the threads of a kernel share, so many bytes of each; kernels run in turn.

        It is where an arena begins, so that what kernels leave there stays for the next.
        """
        asked = dict.fromkeys(sizes)
        known = max((size for size in asked if isinstance(size, int)), default=0)
        ends: tuple[Size, ...] = (known, *(size for size in asked if not isinstance(size, int)))
        if ends == (0,):
            return self, None
        places, most = self.places, ends[0]
        if len(ends) > 1:
            place = Symbol("shared", 0, hint=max(map(hint, ends)))
            places, most = [(place, ends), *places], place.expr
        room = Buffer("shared", torch.uint8, (most,), (1,), "scratch")
        size = size_bytes(room)
        offsets = {room: 0, **{buffer: size + at for buffer, at in self.offsets.items()}}
        total = size + self.total_bytes
        return replace(self, offsets=offsets, total_bytes=total, places=places), room


def size_bytes(buffer: Buffer) -> Size:
    """Bytes of a buffer rounded up to the alignment; an empty one takes none."""
    if 0 in buffer.shape:
        return 0
    size = buffer.size * buffer.dtype.itemsize
    return (size + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def plan_memory(schedule: Schedule, large_bytes: int | None = None) -> Plan:
    """Where the schedule's intermediates live, once as few as possible lie in the arena.

    large_bytes   larger ones are tensors of their own
    """
    reuse_operands(schedule)
    take_out_shared(schedule)
    if large_bytes is not None:
        take_out_large(schedule, large_bytes)
    return placed(schedule)


def placed(schedule: Schedule) -> Plan:
    """Lay out the scratch buffers: those of known size best-fit, the others after them."""
    lives: dict[Buffer, Life] = {}
    for position, item in enumerate(schedule.items):
        for buffer in (*writes(item), *reads(item)):
            if buffer.role == "scratch":
                lives[buffer] = lives.get(buffer, (position, position))[0], position
    known = {b: live for b, live in lives.items() if isinstance(size_bytes(b), int)}
    neighbours = _neighbours(known)
    offsets, total = _in_order(known) if neighbours is None else _best_fit(known, neighbours)
    plan = Plan(schedule, dict(offsets), total)
    others = {b: live for b, live in lives.items() if b not in known}
    neighbours = _neighbours(others)
    if neighbours is None:
        # each in the place of a dead one of the same size; size -> heap of (dead after, .., offset)
        free: dict[Size, list[tuple[int, int, Size]]] = {}
        for number, (buffer, (first, last)) in enumerate(others.items()):
            size = size_bytes(buffer)
            slots = free.setdefault(size, [])
            if slots and slots[0][0] < first:
                *_, offset = heapq.heappop(slots)
            else:
                offset = plan.total_bytes
                plan.total_bytes = plan.total_bytes + size
            plan.offsets[buffer] = offset
            heapq.heappush(slots, (last, number, offset))
    else:
        _upon_others(plan, others, neighbours)
    return plan


def _upon_others(
    plan: Plan, lives: dict[Buffer, Life], neighbours: dict[Buffer, list[Buffer]]
) -> None:
    """Buffers of open size as they fit best in the first call.

    Each lies past the ends of those below it then that are alive with it: so for all sizes.
    """
    at, _ = _best_fit(lives, neighbours)
    start = plan.total_bytes
    under: dict[Buffer, set[Buffer]] = {}  # all that a buffer lies past, through others too

    def past(buffers: Iterable[Buffer]) -> tuple[Size, set[Buffer]]:
        """The greatest end of some buffers."""
        beyond: set[Buffer] = set()
        ends: list[Size] = []
        for other in sorted(buffers, key=lambda b: -at[b]):
            if other not in beyond:
                beyond |= under[other] | {other}
                ends.append(plan.offsets[other] + size_bytes(other))
        ends = [*dict.fromkeys(ends)]
        if len(ends) < 2:
            return (ends[0] if ends else start), beyond
        place = Symbol(f"place{len(plan.places)}", 0, hint=max(map(hint, ends)))
        plan.places.append((place, tuple(ends)))
        return place.expr, beyond

    for buffer in sorted(lives, key=at.__getitem__):
        plan.offsets[buffer], under[buffer] = past([b for b in neighbours[buffer] if b in under])
    plan.total_bytes, _ = past(under)


def take_out_large(schedule: Schedule, limit: int) -> None:
    """Scratch buffers of more than `limit` bytes become tensors that live as long as they must.

    An arena is there from the first buffer to the last, however few of them are alive. Sizes that
    only the call knows count as in the first call.
    """
    for item in schedule.items:
        for buffer in writes(item):
            if buffer.role == "scratch" and hint(size_bytes(buffer)) > limit:
                buffer.role = "large"


def take_out_shared(schedule: Schedule) -> None:
    """What an Extern gives a view of becomes a tensor that lives as long as the view."""
    for item in schedule.items:
        if isinstance(item, Extern) and item.shares:
            for view in views(item.args):
                if view.buffer.role == "scratch":
                    view.buffer.role = "large"


def reuse_operands(schedule: Schedule) -> None:
    """Calls, and kernels of large results, write over an operand that nobody reads afterwards.

    Of a kernel, each point reads of the operand what it writes, and memory is gone through in one
    order. A call takes a tensor that another one has made for it alone.
    """
    items, writers, last = schedule.items, Counter[Buffer](), dict[Buffer, int]()
    stays = {view.buffer for view in views(schedule.graph.outputs)}
    owned: set[Buffer] = set()
    for position, item in enumerate(items):
        writers.update(writes(item))
        last.update(dict.fromkeys(reads(item), position))
        if isinstance(item, Kernel) or item.owns or item.out:
            owned.update(buffer for buffer in writes(item) if buffer.role in ("scratch", "extern"))
        elif item.shares:
            stays.update(reads(item))
    owned -= stays
    instead: dict[Buffer, Buffer] = {}
    for position, item in enumerate(items):
        if instead and not instead.keys().isdisjoint(reads(item)):
            item = items[position] = _with_operands(item, instead)
        free = {operand for operand in reads(item) if last[operand] == position} & owned
        if isinstance(item, Extern):
            if item.in_place is not None:
                view, k = item.args[item.operand], item.operand
                buffer, rest = view.buffer, (*item.args[:k], *item.args[k + 1 :])
                whole = (view.shape, view.strides) == (buffer.shape, buffer.strides)
                alone = all(other.buffer is not buffer for other in views(rest))
                if buffer.role == "extern" and buffer in free and whole and alone:
                    item.call, item.args, item.mutates = item.in_place, (view, *rest), (buffer,)
            continue
        for store in item.stores if free and [p.inner for p in item.phases] == [()] else ():
            buffer = store.buffer
            if buffer in owned and writers[buffer] == 1 and hint(size_bytes(buffer)) >= OVER_BYTES:
                over = None if item.ordered else _written_over(item, store, free)
                if over is not None:
                    instead[buffer], last[over] = over, last.get(buffer, position)
                    items[position] = _with_operands(item, instead)
                    break


def _written_over(kernel: Kernel, store: Store, free: Container[Buffer]) -> Buffer | None:
    """The operand that a store may go to in place of its own buffer: of the same dtype and size,
    read only where it is written, and before that."""
    buffer, index, statements = store.buffer, store.index, [*kernel.statements()]
    behind = statements[statements.index(store) + 1 :]
    later = {v.attr[0] for s in behind for v in walk(s.operands) if v.op == "load"}
    same: dict[Buffer, bool] = {}
    for operand, at in (value.attr for value in walk(kernel.operands) if value.op == "load"):
        if kernel.outer and stride(at, kernel.outer[-1]) not in (None, 0, 1):
            return None
        same[operand] = same.get(operand, operand in free and operand not in later) and at == index
    kind = buffer.dtype, buffer.size
    fits = (b for b, is_same in same.items() if is_same and (b.dtype, b.size) == kind)
    return None if payloads(index) else next(fits, None)


def _with_operands(item: Kernel | Extern, instead: Mapping[Buffer, Buffer]) -> Kernel | Extern:
    """The item on other buffers."""
    if isinstance(item, Kernel):
        return replace(item, phases=on_others(item.phases, instead), reads_memo=None)

    def buffer_of(buffer: Buffer) -> Buffer:
        return instead.get(buffer, buffer)

    def view_of(x: object) -> object:
        return replace(x, buffer=buffer_of(x.buffer)) if isinstance(x, View) else x

    mutates = tuple(map(buffer_of, item.mutates))
    args, kwargs = mapped(item.args, view_of), mapped(item.kwargs, view_of)
    return replace(item, args=args, kwargs=kwargs, mutates=mutates)


def _neighbours(lives: dict[Buffer, Life]) -> dict[Buffer, list[Buffer]] | None:
    """The buffers that are alive together with each; None if they are more than PAIRS in all."""
    found: dict[Buffer, list[Buffer]] = {buffer: [] for buffer in lives}
    alive: list[Buffer] = []
    pairs = 0
    for buffer, (first, _) in lives.items():  # in the order in which they are written
        alive = [other for other in alive if lives[other][1] >= first]
        pairs += len(alive)
        if pairs > PAIRS:
            return None
        found[buffer] += alive
        for other in alive:
            found[other].append(buffer)
        alive.append(buffer)
    return found


def _best_fit(
    lives: dict[Buffer, Life], neighbours: dict[Buffer, list[Buffer]]
) -> tuple[dict[Buffer, int], int]:
    """Largest first, each at the lowest place that is free during its life."""
    placed: dict[Buffer, tuple[int, int]] = {}  # offset, end
    for buffer in sorted(lives, key=lambda b: -hint(size_bytes(b))):
        size = hint(size_bytes(buffer))
        offset = 0
        for start, end in sorted(placed[b] for b in neighbours[buffer] if b in placed):
            if offset + size <= start:
                break
            offset = max(offset, end)
        placed[buffer] = offset, offset + size
    offsets = {buffer: offset for buffer, (offset, _) in placed.items()}
    return offsets, max((end for _, end in placed.values()), default=0)


def _in_order(lives: dict[Buffer, Life]) -> tuple[dict[Buffer, int], int]:
    """As they are written, each in the smallest hole that it fits: n log n."""
    offsets: dict[Buffer, int] = {}
    alive: list[tuple[int, int, int]] = []  # heap of (last, offset, size)
    holes: list[tuple[int, int]] = []  # (size, offset), sorted
    sizes: dict[int, int] = {}  # of holes, by offset
    starts: dict[int, int] = {}  # of holes, by end
    total = 0

    def remove(offset: int) -> int:
        size = sizes.pop(offset)
        del starts[offset + size]
        del holes[bisect_left(holes, (size, offset))]
        return size

    def free(offset: int, size: int) -> None:
        if offset + size in sizes:
            size += remove(offset + size)
        if offset in starts:
            offset = starts[offset]
            size += remove(offset)
        sizes[offset], starts[offset + size] = size, offset
        insort(holes, (size, offset))

    for buffer, (first, last) in lives.items():
        while alive and alive[0][0] < first:
            _, offset, size = heapq.heappop(alive)
            free(offset, size)
        size = hint(size_bytes(buffer))
        at = bisect_left(holes, (size, 0))
        if at < len(holes):
            offset = holes[at][1]
            rest = remove(offset) - size
            if rest:
                free(offset + size, rest)
        else:
            offset = starts.get(total, total)
            if offset < total:
                remove(offset)
            total = offset + size
        offsets[buffer] = offset
        heapq.heappush(alive, (last, offset, size))
    return offsets, total


def show_plan(plan: Plan) -> str:
    """The arena as a table."""
    rows = [f"{plan.total_bytes} bytes"]
    rows += [f"{place} = max{ends}" for place, ends in plan.places]
    rows += [f"{offset!s:>12} {size_bytes(b)!s:>12} {b}" for b, offset in plan.offsets.items()]
    return "\n".join(rows)


# ---------------------------------------------------------------------------- copies
# Copies of inputs in another layout or dtype, which may be made together: weights of convolutions
# whose images lie by channels, weights under autocast. Each is a kernel before the call that takes
# it. Behind each other they are one launch, if their text is one (targets/cuda/launch.py: Joined).


def gathered(items: Sequence[Kernel | Extern], most: int) -> list[Kernel | Extern]:
    """The items, with copies of inputs behind the first of them, those like each other together.

    What comes after `most` bytes of them begins anew, not to lie there for long.
    """
    end = first_write(items)  # by then an input may have changed
    writers = Counter(buffer for item in items for buffer in writes(item))
    found: list[Sequence[Kernel | Extern]] = []
    copies: list[Kernel] = []
    room = 0
    for item in items[:end]:
        store = None if isinstance(item, Extern) else _copy(item)
        if isinstance(item, Extern) or store is None or writers[store.buffer] > 1:
            found.append([item])
            continue
        size = hint(store.buffer.size) * store.buffer.dtype.itemsize
        if size > room:
            copies, room = [], most
            found.append(copies)
        copies.append(item)
        copies.sort(key=_likeness)
        room -= size
    return [*(item for row in found for item in row), *items[end:]]


def _copy(kernel: Kernel) -> Store | None:
    """The only store of a kernel that copies what was there before the call."""
    store, *others = kernel.statements()
    if others or not isinstance(store, Store) or store.mode != "set":
        return None
    value = store.value
    while value.op == "cast":
        (value,) = value.args
    is_load = value.op == "load" and not value.operands and not payloads(store.index)
    given = is_load and value.attr[0].role in ("input", "derived", "constant")
    return store if given and store.buffer.role == "scratch" else None


def _likeness(kernel: Kernel) -> list[int]:
    """Equal for copies that may have one text: they differ in sizes alone."""
    indices = [s.index for s in kernel.stores]
    indices += [index_of(value) for value in walk(kernel.operands) if value.op == "load"]
    steps = [stride(index, axis) for index in indices for axis in kernel.outer]
    sizes = [0 if step is None else step for step in steps]
    sizes += [axis.size for axis in kernel.outer[-1:]]
    return [len(kernel.outer), *(math.gcd(n, 16) if isinstance(n, int) else 0 for n in sizes)]


# ---------------------------------------------------------------------------- places


def is_update(loop: Loop) -> bool:
    """Whether a loop changes a tensor of the caller's, each element from that element at most."""
    if loop.buffer.role != "input" or loop.acc is not None or loop.mode != "set" or loop.ordered:
        return False
    return reads_only_at(loop.value, loop.buffer, loop.index)


def reads_only_at(value: Value, buffer: Buffer, index: Size) -> bool:
    loads = [v for v in walk([value]) if v.op == "load" and v.attr[0] is buffer]
    return all(v.attr[1] == index for v in loads)


# An axis along which elements lie fills a side of a square from here on.
_SQUARE = 8


def turns(loop: Loop) -> bool:
    """Whether a loop without a reduction stores along one axis what lies along another.

    As a phase of a kernel it would store one element at a time; alone it goes through squares.
    """
    if loop.acc is not None:
        return False
    loop = split_loop(loop)
    long = [axis for axis in loop.axes if points_of([axis]) >= _SQUARE]
    loads = [value.attr[1] for value in walk(loop.operands) if value.op == "load"]
    return any(
        stride(index, other) == 1 and stride(index, axis) not in (None, 0, 1)
        for axis in long
        if stride(loop.index, axis) == 1
        for index in loads
        for other in long
    )


def are_apart(a: Size, b: Size, axes: Sequence[Symbol]) -> bool:
    """Whether two indices with the same steps never meet: rows in one piece, side by side."""
    distance = a - b
    if not isinstance(distance, int) or distance == 0:
        return False
    distance, row, beyond = abs(distance), 0, list[Size]()
    for axis in axes:
        parts = coefficient(b, axis)
        if parts is None:
            return False
        step, b = parts
        if step == 0:
            continue
        if not isinstance(step, int) or abs(step) >= distance:
            beyond.append(step)
        elif isinstance(axis.hi, int):
            row += abs(step) * (axis.hi - 1)
        else:
            return False
    known = [abs(step) for step in beyond if isinstance(step, int)]
    pitch = min(known, default=distance + row + 1)
    aligned = isinstance(b, int) and all(divides(pitch, step) for step in beyond)
    return aligned and row < distance and distance + row < pitch
