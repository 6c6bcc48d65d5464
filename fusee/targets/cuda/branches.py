"""Kernels that do not depend on each other become branches of the graph that is recorded.

A stream runs its launches one after the other, and so would their recording. Kernels that leave
most of a GPU idle, such as the products of one row with several matrices, run beside each other if
the graph says that they may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fusee.codegen.llvm.kernel import KernelCode
from fusee.loops.ir import Buffer, Extern, Kernel
from fusee.loops.memory import Plan, size_bytes
from fusee.loops.schedule import reads, writes

# Branches of a row: more would not fit a GPU side by side.
MOST = 4

Run = Callable[..., int]
Place = tuple[Buffer | None, float, float]  # in the arena if there is no buffer


def rows_of(plan: Plan, codes: Sequence[KernelCode]) -> list[range]:
    """Launches that follow each other and that none of them depends on, two to MOST in each range.

    codes   of the launches, in order
    """
    found: list[range] = []
    row: list[tuple[list[Place], list[Place]]] = []
    launch = 0

    def end() -> None:
        if len(row) > 1:
            found.append(range(launch - len(row), launch))
        row.clear()

    for item in plan.schedule.items:
        if isinstance(item, Extern):
            end()
            continue
        own = _touched(plan, item, codes[launch])
        if own is None or len(row) == MOST or any(_depend(own, other) for other in row):
            end()
        if own is not None:
            row.append(own)
        launch += 1
    end()
    return found


def _touched(
    plan: Plan, kernel: Kernel, code: KernelCode
) -> tuple[list[Place], list[Place]] | None:
    """What a kernel writes and reads; None if it must run alone: it shares a room with others, or
    its memory may be that of another input."""
    if code.shared != 0 or any(buffer.role == "input" for buffer in writes(kernel)):
        return None
    found = [[_place(plan, buffer) for buffer in which(kernel)] for which in (writes, reads)]
    return None if None in found[0] + found[1] else (found[0], found[1])  # type: ignore[return-value]


def _place(plan: Plan, buffer: Buffer) -> Place | None:
    if buffer.role != "scratch":
        return buffer, 0, math.inf
    start, size = plan.offsets[buffer], size_bytes(buffer)
    if not isinstance(start, int) or not isinstance(size, int):
        return None
    return None, start, start + size


def _depend(a: tuple[list[Place], list[Place]], b: tuple[list[Place], list[Place]]) -> bool:
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
                status = self.together([partial(self.run, state, k, k + 1) for k in row])
                at = row.stop
        return status
