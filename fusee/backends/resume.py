"""Split graphs that another process compiled: called again without the graph.

- What was kept is found by a name that says all it depends on: the capture, the engine's options,
  the geometry of the inputs, torch's modes, our code.
- It holds no graph. What it cannot serve, a changed weight or an error of the engine's, is served
  by compiling the captured graph, as if nothing had been kept, from then on.
- Parts run again then: those that are kept have no effects, and inputs are written after them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import pickle
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusee import log
from fusee.aten import PartSource
from fusee.aten.torch_api import laid_out
from fusee.backends.regions import CompiledRegion, RegionCall
from fusee.backends.report import (
    CompiledGraph,
    ExternRow,
    RegionRow,
    Report,
    UnclaimedRow,
    remember,
    situation,
)
from fusee.runtime import in_child, jit
from fusee.runtime.cache import Blobs, Sidecar, bytes_of, code_salt, content_key
from fusee.source import define

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
        name = name_on_disk(engine, examples)
        return None if name is None else (name, pickle.dumps(self, protocol=5))


def name_on_disk(
    engine: Sequence[str], examples: Sequence[Any], is_open: bool = False
) -> str | None:
    """All that a split graph depends on, but for what was captured; None if that cannot be told.

    engine   its versions and options; none: nothing is kept for it
    is_open  as Sidecar has it
    """
    plain = (*_PLAIN_TYPES, int) if is_open else _PLAIN_TYPES
    if not engine or any(type(x) not in plain for x in examples):
        return None
    now = situation(examples, is_open)
    return None if now is None else repr((list(engine), now, code_salt()))


def body_of(source: str, calls: Sequence[RegionCall]) -> Callable[..., tuple[Tensor, ...]]:
    """The function that calls the parts."""
    names: dict[str, Any] = {f"part{k}": call for k, call in enumerate(calls)}
    names.update(
        row_major=lambda x: x if x.is_contiguous() else x.contiguous(),
        laid_out=laid_out,
        no_grad=torch.no_grad,
    )
    return define(source, "body", "body", names)


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
    take_up: Callable[[Any, tuple[Any, ...]], CompiledRegion]

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
        if name is None or any(map(log.wants, _ARTEFACTS)):
            return None
        data = sidecar.get(name)
        if data is None:
            return None
        kept: KeptSplit = pickle.loads(data)
        notes = [*kept.notes, "another process split it: it was not traced"]
        report = Report(
            self.label,
            kept.where,
            unclaimed=[*kept.unclaimed],
            externs=[*kept.externs],
            notes=notes,
        )
        try:
            with report.timed("resume"):
                calls = [self._call(part, examples, report) for part in kept.parts]
        except NotServed as reason:
            log.publish("cache", self.label, f"what was kept of it is of no use: {reason}")
            return None
        remember(report)
        return _Resumed(body_of(kept.body, calls), report, anew)

    def _call(
        self, part: ClaimedPart | PartSource, examples: Sequence[Any], report: Report
    ) -> RegionCall:
        """What runs a part. raises NotServed, then and when it is called"""
        if isinstance(part, PartSource):
            run = part.bind({})
            return lambda inputs: run(*inputs)
        given = tuple(None if k is None else examples[k] for k in part.inputs)
        call, _, primitives = _served(self.take_up, part.spec, given)
        row = RegionRow(part.name, self.engine, self.device, part.ops, primitives=primitives)
        report.regions.append(row)
        return functools.partial(_served, row.timed, call)


def _served(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # the engine is another project's code
        raise NotServed(str(error) or type(error).__name__) from error


class _Resumed(CompiledGraph):
    """Served by what was kept as long as that can. May be called from several threads."""

    def __init__(
        self, body: Callable[..., Any], report: Report, anew: Callable[[Sequence[Any]], Any]
    ) -> None:
        self.call = body
        self.anew: Callable[[Sequence[Any]], Any] | None = anew
        self.lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        try:
            return self.call(*inputs)
        except NotServed as reason:
            log.publish("cache", self.report().name, f"compiled after all: {reason}")
        with self.lock:
            if self.anew is not None:
                self.call = self.anew(inputs)
                if isinstance(self.call, CompiledGraph):
                    self._report = self.call.report()
                self.anew = None
        return self.call(*inputs)


# ---------------------------------------------------------------------------- ahead
# Compiled models read from disk before they are asked for, while Python traces a graph.
#
# A file of keys says what a program that started alike used last time, in that order. They are read
# one after another in one of the threads that compile.
#
# - A model is found by its key alone, which holds the graph and its weights: a wrong guess costs
#   time and is never used.
# - What fails here is not told and leaves nothing: whoever asks for that key reads it again, and
#   meets the same.
# - Wrong guesses keep no memory: a key that was not expected drops what is left, and so does a
#   minute. No more than a quarter of the free memory is filled.
# - A fork waits for the model being read, and its child expects none; the end of a program waits
#   for it, too, and no more are begun.

# Seconds that a model waits for being asked for.
_PATIENCE = 60
# How many programs one folder remembers: arguments that are never twice the same must not fill it.
_PROGRAMS = 100

_all: dict[str, Ahead] = {}
_finding = threading.Lock()
# Models of a forked child's parent, never freed: OpenVINO would wait for threads that are gone.
_inherited: list[dict[str, Future[Any]]] = []


class Ahead:
    """The compiled models of one folder, device and configuration. For use by several threads."""

    def __init__(self, blobs: Blobs, index: str, load: Callable[[Tensor], Any]) -> None:
        """index   key of the list of keys; load   a compiled model of a blob"""
        self.blobs, self.index, self.load = blobs, index, load
        self.lock = threading.Lock()
        self.used: list[str] = []
        text = blobs.read(index, tell=False)
        words = "" if text is None else bytes_of(text).tobytes().decode("ascii", "replace")
        self.expected = list(dict.fromkeys(re.findall(r"^[0-9a-f]{40}$", words, re.M)))
        # The first keys whose models fit: each takes its blob's memory, and packs it in as much
        left = _available_bytes() // 4
        found = []
        for key in self.expected:
            with contextlib.suppress(OSError):  # there is none
                left -= 2 * blobs.path(key).stat().st_size
            if left < 0:
                break
            found.append(key)
        self.waiting = found
        self.begun: dict[str, Future[Any]] = {}
        if self.waiting:
            self._begin()
            timer = threading.Timer(_PATIENCE, self.drop)
            timer.daemon = True
            timer.start()

    def get(self, key: str) -> Any:
        """The model of a key, read now unless it was before; None if there is none.

        raises   what `load` does
        """
        found = self._take(key)
        if found is None:
            blob = self.blobs.read(key)
            found = None if blob is None else self.load(blob)
        return found

    def note(self, key: str) -> None:
        """Remember that this program used a key, which is on disk."""
        with self.lock:
            if key not in self.used:
                self.used.append(key)
            if key not in self.expected:
                self._remember()

    def finish(self) -> None:
        """Forget keys that the program used another time only."""
        with self.lock:
            if self.used and not set(self.expected) <= set(self.used):
                self._remember()

    def drop(self) -> None:
        """Begin nothing more, and keep nothing that was not asked for."""
        with self.lock:
            self.waiting.clear()
            self.begun.clear()

    def _take(self, key: str) -> Any:
        if key not in self.expected:
            self.drop()
        with self.lock:
            if key in self.waiting:
                self.waiting.remove(key)
            future = self.begun.pop(key, None)
        if future is None:
            return None
        if future.cancel():  # it waited for a thread: reading it here is faster
            self._begin()
            return None
        return None if future.exception() is not None else future.result()

    def _begin(self) -> None:
        with self.lock:
            if self.waiting:
                key = self.waiting.pop(0)
                with contextlib.suppress(RuntimeError):  # the program ends: nothing is read ahead
                    self.begun[key] = jit.in_thread(self._read, key)

    def _read(self, key: str) -> Any:
        try:
            blob = self.blobs.read(key, tell=False)
            return None if blob is None else self.load(blob)
        finally:
            self._begin()

    def _remember(self) -> None:
        self.expected = list(self.used)
        self.blobs.write(
            self.index,
            "\n".join(self.used).encode(),
            did="went on; the next start will not read models ahead",
        )
        with contextlib.suppress(OSError):  # what cannot be cleared away stays
            for _, _, path in self.blobs.entries("index-")[:-_PROGRAMS]:
                path.unlink()


def find(
    folder: Path, device: str, config: Mapping[str, object], load: Callable[[Tensor], Any]
) -> Ahead:
    """The models of a folder for this program; the first time their reading begins."""
    alike = repr((sys.argv, device, sorted((name, str(config[name])) for name in config)))
    index = f"index-{content_key(alike)[:34]}"
    name = f"{folder} {index}"
    with _finding:
        if name not in _all:
            _all[name] = Ahead(Blobs(folder), index, load)
        return _all[name]


def _available_bytes() -> int:
    """Free memory and what the page cache would give back; 0 where this is not known."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.M)
    return int(found[1]) * 1024 if found else 0


@atexit.register
def _finish() -> None:
    for models in list(_all.values()):
        models.finish()


@in_child
def _expect_none() -> None:
    global _finding
    _finding = threading.Lock()
    for models in _all.values():
        models.lock = threading.Lock()
        _inherited.append(models.begun)
        models.waiting, models.begun = [], {}
    _all.clear()  # what a child uses says little of the next start
