"""What a compiled graph is made of: kernels, externs, what was left out and why, time per stage."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from torch import fx

from fusee.errors import user_line


@dataclass(frozen=True)
class KernelRow:
    """One launch. Equal `function` names share machine code; `body` is the first's loop nest.

    show  writes it down: only when somebody asks, since that takes as long as a stage of compiling
    """

    function: str
    origin: str
    show: Callable[[], str] = field(repr=False)

    @property
    def body(self) -> str:
        return self.show()


@dataclass(frozen=True)
class ExternRow:
    """One call to ATen, with the reason why it is no loop."""

    op: str
    reason: str
    origin: str


@dataclass(eq=False)
class RegionRow:
    """A part of the graph that an engine runs.

    ops          how often each operator is in it
    failed       why our compiler runs it instead, if it does
    primitives   what the engine executes and how often, if it can say
    calls        how often it was called; `seconds` is what they took in all
    """

    name: str
    engine: str
    device: str
    ops: dict[str, int]
    failed: str | None = None
    primitives: Callable[[], dict[str, int]] | None = None
    calls: int = 0
    seconds: float = 0.0

    def timed(self, call: Callable[[Any], Any], inputs: tuple[Any, ...]) -> Any:
        """What the region's call gives; it is counted."""
        begin = time.perf_counter()
        results = call(inputs)
        self.calls += 1
        self.seconds += time.perf_counter() - begin
        return results

    def __str__(self) -> str:
        most = sorted(self.ops, key=self.ops.__getitem__, reverse=True)[:4]
        listed = ", ".join(f"{self.ops[op]} {op}" for op in most)
        more = ", ..." if len(self.ops) > len(most) else ""
        mean = f", {self.seconds / self.calls * 1e3:.3f} ms a call" if self.calls else ""
        where = f"{self.engine} on {self.device}"
        if self.failed is not None:
            where = f"our compiler, since {self.engine} failed: {self.failed}"
        return f"{self.name}  {where}; {sum(self.ops.values())} calls: {listed}{more}{mean}"


@dataclass(frozen=True)
class UnclaimedRow:
    """A call that an engine does not run, and why."""

    op: str
    reason: str
    where: str | None = None


@dataclass(eq=False)
class Report:
    """Everything that a user may ask about one compiled graph. str(report) is for reading.

    name       the option `name`, or a number
    where      the user's line that the graph begins with, if it is known
    notes      what was not lowered, not fused, not derived, and why
    passes     what each pass over the ATen graph changed
    regions    the parts that an engine runs; `unclaimed`: the calls that it does not
    stages_ms  milliseconds of each stage of compiling, in their order
    """

    name: str
    where: str | None = None
    kernels: list[KernelRow] = field(default_factory=list)
    externs: list[ExternRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    stages_ms: dict[str, float] = field(default_factory=dict)
    regions: list[RegionRow] = field(default_factory=list)
    unclaimed: list[UnclaimedRow] = field(default_factory=list)
    arena_bytes: int | None = None  # None: only a call's sizes tell
    eager: str | None = None  # why the whole graph runs eagerly, if it does
    backward: Report | None = None  # of the graph that computes gradients, if there is one

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """What runs inside counts as time of this stage, if it ends well."""
        begin = time.perf_counter()
        yield
        spent = (time.perf_counter() - begin) * 1e3
        self.stages_ms[stage] = self.stages_ms.get(stage, 0.0) + spent

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
            ("regions", [str(row) for row in self.regions]),
            ("not the engine's", list(_counted(f"{r.op}  {r.reason}" for r in self.unclaimed))),
            ("kernels", list(_counted(f"{row.function}  {row.origin}" for row in self.kernels))),
            ("calls to ATen", list(_counted(f"{r.op}  {r.reason}" for r in self.externs))),
            ("passes", list(_counted(self.passes))),
            ("notes", list(_counted(note for note in self.notes if note not in externs))),
        ):
            if lines:
                rows.append(f"  {title}")
                rows += [f"    {line}" for line in lines]
        if self.backward is not None:
            rows.append(str(self.backward))
        return "\n".join(rows)


class CompiledGraph(functools.partial[Any]):
    """What the backend returns: call it with the graph's inputs.

    A partial, so that no frame of Python's lies between its caller and what it calls.

    kept   what another process may make of it: a name that says all it depends on but for the
           graph, and the content; None if nothing
    """

    _report: Report
    kept: tuple[str, bytes] | None

    def __new__(cls, call: Callable[..., Any], report: Report, *rest: Any) -> Self:
        made = super().__new__(cls, call)
        made._report, made.kept = report, None
        return made

    def report(self) -> Report:
        """What it is made of: kernels, calls to ATen, what was left out and why, time per stage."""
        return self._report


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
