"""Kernels that do not depend on each other: one launch, or branches of the graph that is recorded.

A stream runs its launches one after the other, and so would their recording. Equal kernels that
follow each other are launched as one (fusee/codegen/simt/batch.py). Others that leave most of a GPU
idle run beside each other if the graph says that they may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fusee.codegen.host import Launch
from fusee.codegen.simt.batch import batched, most_launches
from fusee.loops.ir import Buffer, Extern
from fusee.loops.memory import Plan, size_bytes
from fusee.loops.schedule import reads, writes

# Branches of a row: more would not fit a GPU side by side.
MOST = 4

Run = Callable[..., int]
Place = tuple[Buffer | None, float, float]  # in the arena if there is no buffer
Touched = tuple[list[Place], list[Place]]  # written, and read


class Joined:
    """See fusee.targets.linking.Batches."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._touched: list[Touched | None] = []  # by each of the batch

    def takes(self, batch: Sequence[Launch], launch: Launch) -> bool:
        own, before = _touched(self.plan, launch), self._touched
        found = 0 < len(batch) < most_launches(launch.code)
        found = found and batch[0].code.name == launch.code.name
        found = found and own is not None and not any(x is None or _depend(own, x) for x in before)
        self._touched = [*(before if found else ()), own]
        return found

    def join(self, batch: Sequence[Launch]) -> Launch:
        kernels = [kernel for launch in batch for kernel in launch.kernels]
        return Launch(batched([launch.code for launch in batch]), kernels)


def rows_of(plan: Plan, launches: Sequence[Launch]) -> list[range]:
    """Launches that follow each other and that none of them depends on, two to MOST in each range.

    launches   in order
    """
    found: list[range] = []
    row: list[Touched] = []
    rest = iter(launches)
    number, waiting = 0, next(rest, None)

    def end() -> None:
        if len(row) > 1:
            found.append(range(number - len(row), number))
        row.clear()

    for item in plan.schedule.items:
        if isinstance(item, Extern):
            end()
        elif waiting is not None and item is waiting.kernels[0]:
            own = _touched(plan, waiting)
            if any(buffer.role == "input" for k in waiting.kernels for buffer in writes(k)):
                own = None  # its memory may be that of another input
            if own is None or len(row) == MOST or any(_depend(own, other) for other in row):
                end()
            if own is not None:
                row.append(own)
            number, waiting = number + 1, next(rest, None)
    end()
    return found


def _touched(plan: Plan, launch: Launch) -> Touched | None:
    """What is written and read; None if it must run alone: it shares a room with others."""
    if launch.code.shared != 0:
        return None
    found = [
        [_place(plan, buffer) for kernel in launch.kernels for buffer in which(kernel)]
        for which in (writes, reads)
    ]
    return None if None in found[0] + found[1] else (found[0], found[1])  # type: ignore[return-value]


def _place(plan: Plan, buffer: Buffer) -> Place | None:
    if buffer.role != "scratch":
        return buffer, 0, math.inf
    start, size = plan.offsets[buffer], size_bytes(buffer)
    if not isinstance(start, int) or not isinstance(size, int):
        return None
    return None, start, start + size


def _depend(a: Touched, b: Touched) -> bool:
    pairs = ((a[0], b[0]), (a[0], b[1]), (a[1], b[0]))
    return any(_meet(x, y) for ours, theirs in pairs for x in ours for y in theirs)


def _meet(a: Place, b: Place) -> bool:
    return a[0] is b[0] and a[1] < b[2] and b[1] < a[2]


class Beside:
    """`run`, whose rows of launches run beside each other.

    together   calls each with a stream of its own, and goes on after all; gives the first status
               that is not 0
    """

    def __init__(
        self, run: Run, rows: Sequence[range], together: Callable[[Sequence[Run]], int]
    ) -> None:
        self.run, self.together = run, together
        self.rows = {row.start: row for row in rows}

    def __call__(self, state: int, first: int, last: int, stream: int, *pointers: Any) -> int:
        status, at = self.run(state, first, first, stream, *pointers), first
        while not status and at < last:
            row = self.rows.get(at)
            if row is None:
                end = min((start for start in self.rows if at < start < last), default=last)
                status, at = self.run(state, at, end, stream), end
            else:
                # the rest has no pointers yet: what it works on is made after this run
                row = range(at, min(row.stop, last))
                status = self.together([partial(self.run, state, k, k + 1) for k in row])
                at = row.stop
        return status
