"""What a compiled graph is made of: kernels, externs, what was left out and why, time per stage."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from fusee.errors import user_line

__all__ = ["ExternRow", "KernelRow", "Report", "first_line", "live_reports", "remember"]


@dataclass(frozen=True)
class KernelRow:
    """One launch. Equal `function` names share machine code; `body` is the first's loop nest."""

    function: str
    origin: str
    body: str


@dataclass(frozen=True)
class ExternRow:
    """One call to ATen, with the reason why it is no loop."""

    op: str
    reason: str
    origin: str


@dataclass(eq=False)
class Report:
    """Everything that a user may ask about one compiled graph. str(report) is for reading.

    name       the option `name`, or a number
    where      the user's line that the graph begins with, if it is known
    notes      what was not lowered, not fused, not derived, and why
    passes     what each pass over the ATen graph changed
    stages_ms  milliseconds of each stage of compiling, in their order
    """

    name: str
    where: str | None = None
    kernels: list[KernelRow] = field(default_factory=list)
    externs: list[ExternRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    stages_ms: dict[str, float] = field(default_factory=dict)
    arena_bytes: int | None = None  # None: only a call's sizes tell
    eager: str | None = None  # why the whole graph runs eagerly, if it does

    def __str__(self) -> str:
        if self.eager is not None:
            where = f"  at     {self.where}\n" if self.where else ""
            return f"graph {self.name} runs eagerly\n{where}  why    {self.eager}"
        functions = len({row.function for row in self.kernels})
        total = sum(self.stages_ms.values())
        rows = [
            f"graph {self.name}: {len(self.kernels)} kernels from {functions} functions, "
            f"{len(self.externs)} calls to ATen, compiled in {total:.0f} ms"
        ]
        if self.where:
            rows.append(f"  begins at    {self.where}")
        stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in self.stages_ms.items())
        rows.append(f"  stages, ms   {stages}")
        if self.arena_bytes is not None:
            rows.append(f"  arena        {self.arena_bytes:,} bytes for intermediates")
        externs = {f"{row.op}: {row.reason}" for row in self.externs}
        for title, lines in (
            ("kernels", list(_counted(f"{row.function}  {row.origin}" for row in self.kernels))),
            ("calls to ATen", list(_counted(f"{r.op}  {r.reason}" for r in self.externs))),
            ("passes", list(_counted(self.passes))),
            ("notes", list(_counted(note for note in self.notes if note not in externs))),
        ):
            if lines:
                rows.append(f"  {title}")
                rows += [f"    {line}" for line in lines]
        return "\n".join(rows)


def _counted(lines: Iterator[str] | list[str]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for line in lines:
        counts[line] = counts.get(line, 0) + 1
    for line, n in counts.items():
        yield f"{n:3}x {line}"


def first_line(gm: fx.GraphModule) -> str | None:
    """The user's line that a captured graph begins with."""
    traces = (node.stack_trace for node in gm.graph.nodes if node.op != "placeholder")
    return next(filter(None, map(user_line, traces)), None)


_live: weakref.WeakValueDictionary[int, Report] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def remember(report: Report) -> None:
    """List the report in `live_reports` for as long as its compiled graph lives."""
    _live[next(_numbers)] = report


def live_reports() -> list[Report]:
    """The reports of all compiled graphs that are alive, oldest first."""
    return list(_live.values())
