"""The memory plan: where in the arena each intermediate lives.

Buffers whose lives don't overlap share bytes. Lives are ranges of schedule positions: a buffer
lives from the item that writes it first to the item that reads it last, both included, so an item
never finds its operands where its results go. Sizes that only the call knows are compared as
expressions: such a buffer takes over only the place of a dead one of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusee.loops.deps import reads, views, writes
from fusee.loops.fuse import Schedule
from fusee.loops.ir import Buffer, Extern, LoopGraph
from fusee.sym.expr import Size
from fusee.sym.parts import hint

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass
class Plan:
    """Byte offset of every scratch buffer, and the arena's size in bytes."""

    offsets: dict[Buffer, Size]
    total_bytes: Size


def size_bytes(buffer: Buffer) -> Size:
    """Bytes of a buffer rounded up to the alignment; an empty one takes none."""
    if 0 in buffer.shape:
        return 0
    size = buffer.size * buffer.dtype.itemsize
    return (size + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def plan_memory(schedule: Schedule) -> Plan:
    """Lay out the scratch buffers: those of known size best-fit, the others after them."""
    lives = _lives(schedule)
    known = {b: live for b, live in lives.items() if isinstance(size_bytes(b), int)}
    offsets, total = _best_fit(known)
    plan = Plan(dict(offsets), total)
    free: list[tuple[int, Size, Size]] = []  # (dead after, size, offset)
    for buffer, (first, last) in lives.items():
        if buffer in known:
            continue
        size = size_bytes(buffer)
        for slot in free:
            if slot[0] < first and slot[1] == size:
                free.remove(slot)
                offset = slot[2]
                break
        else:
            offset = plan.total_bytes
            plan.total_bytes = plan.total_bytes + size
        plan.offsets[buffer] = offset
        free.append((last, size, offset))
    return plan


def take_out_large(schedule: Schedule, limit: int) -> None:
    """Scratch buffers of more than `limit` bytes become tensors that live as long as they must.

    An arena is there from the first buffer to the last, however few of them are alive. Sizes that
    only the call knows count as in the first call.
    """
    for item in schedule.items:
        for buffer in writes(item):
            if buffer.role == "scratch" and hint(size_bytes(buffer)) > limit:
                buffer.role = "large"


def reuse_operands(graph: LoopGraph, schedule: Schedule) -> None:
    """Calls write over their operand where they can and nobody reads it afterwards.

    Only tensors that another packed call returned are overwritten: they share memory with nothing.
    """
    returned = {view.buffer for view in views(graph.outputs)}
    last: dict[Buffer, int] = {}
    for position, item in enumerate(schedule.items):
        last.update(dict.fromkeys(reads(item), position))
    owned: set[Buffer] = set()
    for position, item in enumerate(schedule.items):
        if not isinstance(item, Extern):
            continue
        if item.in_place is not None:
            view = item.args[item.operand]
            others = list(views((*item.args[: item.operand], *item.args[item.operand + 1 :])))
            if (
                view.buffer in owned - returned
                and last[view.buffer] == position
                and all(other.buffer is not view.buffer for other in others)
                and (view.shape, view.strides) == (view.buffer.shape, view.buffer.strides)
            ):
                rest = (*item.args[: item.operand], *item.args[item.operand + 1 :])
                item.call, item.args = item.in_place, (view, *rest)
                item.mutates = (view.buffer,)
        if item.owns:
            owned.update(b for b in item.results if b is not None)


def _lives(schedule: Schedule) -> dict[Buffer, tuple[int, int]]:
    lives: dict[Buffer, tuple[int, int]] = {}
    for position, item in enumerate(schedule.items):
        for buffer in (*writes(item), *reads(item)):
            if buffer.role == "scratch":
                first, _ = lives.get(buffer, (position, position))
                lives[buffer] = (first, position)
    return lives


def _best_fit(lives: dict[Buffer, tuple[int, int]]) -> tuple[dict[Buffer, int], int]:
    """Largest first, each at the lowest place that is free during its life."""
    placed: list[tuple[int, int, int, int]] = []  # (first, last, offset, end)
    offsets: dict[Buffer, int] = {}
    for buffer in sorted(lives, key=lambda b: -hint(size_bytes(b))):
        first, last = lives[buffer]
        size = hint(size_bytes(buffer))
        offset = 0
        for other in sorted(placed, key=lambda p: p[2]):
            if other[1] < first or last < other[0]:
                continue
            if offset + size <= other[2]:
                break
            offset = max(offset, other[3])
        offsets[buffer] = offset
        placed.append((first, last, offset, offset + size))
    return offsets, max((p[3] for p in placed), default=0)


def show_plan(plan: Plan) -> str:
    """The arena as a table."""
    rows = [f"{plan.total_bytes} bytes"]
    rows += [f"{offset!s:>12} {size_bytes(b)!s:>12} {b}" for b, offset in plan.offsets.items()]
    return "\n".join(rows)
