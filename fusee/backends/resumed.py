"""Split graphs that another process compiled: called again without the graph.

- What was kept is found by a name that says all it depends on: the capture, the engine's options,
  the geometry of the inputs, torch's modes, our code.
- It holds no graph. What it cannot serve, a changed weight or an error of the engine's, is served
  by compiling the captured graph, as if nothing had been kept, from then on.
- Parts run again then: those that are kept have no effects, and inputs are written after them.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusee import log
from fusee.aten.part_source import PartSource
from fusee.backends.report import (
    CompiledGraph,
    ExternRow,
    RegionRow,
    Report,
    UnclaimedRow,
    remember,
)
from fusee.backends.same_graph import situation
from fusee.runtime.cache import Sidecar, code_salt

__all__ = ["ClaimedPart", "KeptSplit", "Resuming", "body_of", "name_of"]

RegionCall = Callable[[tuple[Any, ...]], Sequence[Tensor]]

# The packages whose code decides how a graph is split and what its parts are.
_DECIDED_BY = ("aten", "autodiff", "backends", "runtime", "sym")
# Who listens to these wants to see the graph.
_ARTEFACTS = ("graph", "aten", "host")
_PLAIN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class NotServed(Exception):
    """What was kept cannot serve a call."""


@dataclass(frozen=True)
class ClaimedPart:
    """An engine's part.

    ops      how often each operator is in it
    spec     what the engine makes its call of
    inputs   which of the graph's inputs it takes; None for what is computed
    """

    name: str
    ops: dict[str, int]
    spec: Any
    inputs: tuple[int | None, ...]


@dataclass(frozen=True)
class KeptSplit:
    """A split graph without the graph.

    body   source of the function that calls the parts
    rows   `where`, `unclaimed`, `externs` and `notes` of its report
    """

    body: str
    parts: tuple[ClaimedPart | PartSource, ...]
    where: str | None
    unclaimed: tuple[UnclaimedRow, ...]
    externs: tuple[ExternRow, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, body: str, parts: Sequence[ClaimedPart | PartSource | None], report: Report
    ) -> KeptSplit | None:
        """None if a part is not there."""
        known = tuple(part for part in parts if part is not None)
        if len(known) < len(parts):
            return None
        rows = tuple(report.unclaimed), tuple(report.externs), tuple(report.notes)
        return cls(body, known, report.where, *rows)

    def entry(self, engine: Sequence[str], examples: Sequence[Any]) -> tuple[str, bytes] | None:
        """Its name and content, for the folder of machine code, as trusted as pickles must be."""
        name = name_of(engine, examples)
        return None if name is None else (name, pickle.dumps(self, protocol=5))


def name_of(engine: Sequence[str], examples: Sequence[Any]) -> str | None:
    """All that a split graph depends on, but for what was captured; None if that cannot be told.

    engine   its versions and options; none: nothing is kept for it
    """
    if not engine or any(type(x) not in _PLAIN_TYPES for x in examples):
        return None
    return repr((list(engine), situation(examples), code_salt(*_DECIDED_BY)))


def body_of(source: str, calls: Sequence[RegionCall]) -> Callable[..., tuple[Tensor, ...]]:
    """The function that calls the parts."""
    names: dict[str, Any] = {f"part{k}": call for k, call in enumerate(calls)}
    names.update(row_major=_row_major, laid_out=_laid_out, no_grad=torch.no_grad)
    exec(compile(source, "<fusee body>", "exec"), names)
    body: Callable[..., tuple[Tensor, ...]] = names["body"]
    return body


def _row_major(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _laid_out(x: Tensor, steps: tuple[int, ...]) -> Tensor:
    """A result with the strides that it has as a view of what is no result."""
    if x.stride() == steps:
        return x
    held = x
    for axis, step in enumerate(steps):
        held = held if step else held.narrow(axis, 0, min(1, x.shape[axis]))
    made = torch.empty_strided(held.shape, steps, dtype=x.dtype, device=x.device).copy_(held)
    return made.expand(x.shape)


# ------------------------------------------------------------------------------ resuming


@dataclass(frozen=True)
class Resuming:
    """How an engine calls what was kept for it.

    label     what reports call the graph
    engine    what its regions run in, on `device`
    take_up   from the spec of a part and its first inputs, what runs it; raises anything
    """

    label: str
    engine: str
    device: str
    take_up: Callable[[Any, tuple[Any, ...]], RegionCall]

    def resume(
        self,
        sidecar: Sidecar,
        name: str | None,
        examples: Sequence[Any],
        anew: Callable[[Sequence[Any]], Any],
    ) -> CompiledGraph | None:
        """The compiled graph that was kept under a name; None if none can be used.

        examples   the first call's inputs
        anew       compiles the captured graph, for these inputs
        """
        begin = time.perf_counter()
        if name is None or any(map(log.wants, _ARTEFACTS)):
            return None
        data = sidecar.get(name)
        if data is None:
            return None
        kept: KeptSplit = pickle.loads(data)
        report = Report(self.label, kept.where)
        report.unclaimed += kept.unclaimed
        report.externs += kept.externs
        report.notes += kept.notes
        try:
            calls = [
                _Claimed(self, part, examples, report)
                if isinstance(part, ClaimedPart)
                else _starred(part.bind({}))
                for part in kept.parts
            ]
        except NotServed as reason:
            log.publish("cache", self.label, f"what was kept of it is of no use: {reason}")
            return None
        report.notes.append("another process split it: it was not traced")
        report.stages_ms["resume"] = (time.perf_counter() - begin) * 1e3
        remember(report)
        return _Resumed(body_of(kept.body, calls), report, anew)


def _starred(call: Callable[..., tuple[Any, ...]]) -> RegionCall:
    return lambda inputs: call(*inputs)


class _Claimed:
    """A part in its engine."""

    def __init__(
        self, how: Resuming, part: ClaimedPart, examples: Sequence[Any], report: Report
    ) -> None:
        given = tuple(None if k is None else examples[k] for k in part.inputs)
        try:
            self.call = how.take_up(part.spec, given)
        except Exception as error:  # the engine is another project's code
            raise NotServed(str(error) or type(error).__name__) from error
        primitives = getattr(self.call, "primitives", None)
        self.row = RegionRow(part.name, how.engine, how.device, part.ops, primitives=primitives)
        report.regions.append(self.row)

    def __call__(self, inputs: tuple[Any, ...]) -> Sequence[Tensor]:
        begin = time.perf_counter()
        try:
            results = self.call(inputs)
        except Exception as error:  # the engine is another project's code
            raise NotServed(str(error) or type(error).__name__) from error
        self.row.calls += 1
        self.row.seconds += time.perf_counter() - begin
        return results


class _Resumed(CompiledGraph):
    """Served by what was kept as long as that can. May be called from several threads."""

    __slots__ = ("anew", "lock")

    def __init__(
        self, body: Callable[..., Any], report: Report, anew: Callable[[Sequence[Any]], Any]
    ) -> None:
        super().__init__(body, report)
        self.anew: Callable[[Sequence[Any]], Any] | None = anew
        self.lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        try:
            return super().__call__(*inputs)
        except NotServed as reason:
            log.publish("cache", self.report().name, f"compiled after all: {reason}")
        with self.lock:
            if self.anew is not None:
                self.become(self.anew(inputs))
                self.anew = None
        return super().__call__(*inputs)
