"""Captures on disk: what one process captured, the next one does not capture again.

Kept are the facts, the graph and the source of the piece that runs around it, for functions that
are one graph. A process that finds them looks at each fact, as it would at a later call of its own;
but facts rely on what nobody can change within a process. So it is sure first that each object it
finds is what the other one had (naming.py): functions by their code, classes by the classes that
they are made of, constants of Python's library and torch by their values. Whatever can differ
unseen keeps a capture from being kept: addresses, hashes, the order of sets of texts.

What is kept is code, as the machine code in the same folder is, and as trusted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusee.capture.captured import Captured, Place
from fusee.capture.facts import Fact, Facts
from fusee.capture.failures import Failing
from fusee.capture.origin import Origin
from fusee.capture.policy import Policy
from fusee.capture.torch_api import State, allowed_by_torch, state_conditions
from fusee.capture.world import is_scalar
from fusee.kept.graphs import Waiting, written
from fusee.kept.naming import (
    Names,
    NotKept,
    Resolved,
    holds,
    is_torchs,
    known_by,
    looking,
    taken_now,
)
from fusee.kept.reached import reached, replaced
from fusee.log import publish
from fusee.runtime import collector
from fusee.runtime.cache import ObjectCache, Sidecar, code_salt, content_key, object_cache

__all__ = ["Keeper"]

# The packages whose code decides what a capture is.
_READ_BY = ("capture", "torch_functions", "kept", "sym")


class Keeper:
    """Keeps captures in the folder of the object code cache."""

    def __init__(self, cache: ObjectCache | None = None) -> None:
        self.cache = cache or object_cache()

    @collector.paused()
    def find(self, place: Place, values: Mapping[str, Any], policy: Policy) -> Captured | None:
        """The capture that another process kept, if all that it relied on is as it was."""
        try:
            key = self._key(place, values, policy)
            data = self.cache.get(key)
            if data is None:
                return None
            found = _read(data, place, values)
            found.sidecar = self._sidecar(key, data)
        except NotKept as reason:
            _tell(place, f"the kept capture is of no use: {reason}")
            return None
        _tell(place, f"the capture was kept as {key}")
        return found

    @collector.paused()
    def keep(
        self, captured: Captured, compiled: Any, values: Mapping[str, Any], policy: Policy
    ) -> None:
        """Keep a capture and what its backend made of it, if another process can use them."""
        place = captured.place
        try:
            data = _written(captured)
            key = self._key(place, values, policy)
            self.cache.put(key, data)
            _keep_compiled(self._sidecar(key, data), compiled)
        except NotKept as reason:
            _tell(place, f"the capture cannot be kept: {reason}")
        self.cache.report()

    def _sidecar(self, key: str, data: bytes) -> Sidecar:
        return Sidecar(self.cache, content_key(key, data))

    def _key(self, place: Place, values: Mapping[str, Any], policy: Policy) -> str:
        conditions, names = state_conditions()
        dtypes = [x for x in names.values() if isinstance(x, torch.dtype)]
        tables = (policy.in_graph, policy.constant, policy.substitutes)
        said = [sorted(map(repr, map(known_by, table))) for table in tables]
        known = known_by(place.function)
        parts = conditions, dtypes, said, allowed_by_torch(), known, _sketch(dict(values))
        return content_key(code_salt(*_READ_BY), repr(parts))


def _tell(place: Place, what: str) -> None:
    publish("cache", place.function.__qualname__, what)


def _sketch(x: Any) -> Any:
    """What is plain to see of a value: two captures differ in it more often than not."""
    if isinstance(x, torch.Tensor):
        return str(x.dtype), tuple(x.shape), x.requires_grad
    if isinstance(x, torch.nn.Module):
        state = [_sketch(tensor) for tensor in (*x.parameters(), *x.buffers())]
        return known_by(type(x)), x.training, state
    if type(x) in (list, tuple):
        return [_sketch(item) for item in x]
    if type(x) is dict:
        return [(_sketch(key), _sketch(item)) for key, item in x.items()]
    return repr(x) if is_scalar(x) else type(x).__qualname__


# ------------------------------------------------------------------------------ all of it


def _written(captured: Captured) -> bytes:
    why = captured.passing
    if captured.eager or captured.stop is not None or captured.place.at >= 0:
        why = "the function is not one graph"
    if why:
        raise NotKept(why)
    graph = captured.graph

    def reduced(x: Any) -> Any:
        return (Resolved.waiting, ()) if x is graph and graph is not None else _reduced(x)

    names = Names(captured.facts, captured.place.function, captured.taken, reduced)
    found = {name: getattr(captured, name) for name in _FIELDS}
    return names.written((found, None if graph is None else (*written(graph), reached(graph))))


_FIELDS = ("facts", "inputs", "source", "names", "grad", "inference", "taken", "answers")


def _reduced(x: Any) -> Any:
    """How an object of ours is made again, for pickle; NotImplemented for others."""
    if type(x) is Facts:
        rows = [(row.kind, row.origin, row.value, sys.intern(row.where)) for row in x.rows]
        return _facts, (list(zip(*rows)), x.kinds)
    if type(x) is State:
        return State, tuple(x)
    return (Failing, (x.eagerly, x.state, x.changes)) if type(x) is Failing else NotImplemented


def _facts(columns: list[tuple[Any, ...]], kinds: dict[Origin, type]) -> Facts:
    return Facts([*map(Fact, *columns)] if columns else [], kinds)


class _Kept(Captured):
    """One that was found.

    Its check is compiled when a second call asks for it, since of the first one it is known. Its
    graph waits for a backend that has not kept what it made of it, or cannot serve a call with it.
    """

    waiting: Waiting | None = None
    sidecar: Sidecar

    @property
    def graph(self) -> fx.GraphModule | None:
        return None if self.waiting is None else self.waiting.module

    @graph.setter
    def graph(self, graph: fx.GraphModule | None) -> None:
        assert graph is None, "a kept capture's graph is read when it is asked for"

    def compiled(self, compile_graph: Callable[..., Any]) -> Callable[..., Any] | None:
        resume = getattr(compile_graph, "resume", None)
        if self.waiting is None or resume is None or not all(map(is_torchs, self.waiting.named)):
            return super().compiled(compile_graph)

        def anew(inputs: Sequence[Any]) -> Any:
            with self.modes():
                return compile_graph(self.graph, list(inputs))

        with self.modes():
            found: Callable[..., Any] | None = resume(self.sidecar, self.examples, anew)
        if found is None:
            found = anew(self.examples)
            _keep_compiled(self.sidecar, found)
        return found

    def check(self, values: Mapping[str, Any]) -> tuple[Callable[..., bool], Callable[[], str]]:
        compiled: list[tuple[Callable[..., bool], Callable[[], str]]] = []

        def check(*given: Any, **named: Any) -> bool:
            if not compiled:
                now = {**dict(zip(self.place.parameters, given)), **named}
                if self.unlike(looking(now)) is not None:
                    return False
                compiled.append(super(_Kept, self).check(now))
            return compiled[0][0](*given, **named)

        return check, lambda: compiled[0][1]() if compiled else "# compiled by the second call"

    def unlike(self, look: Callable[[Origin], Any]) -> Fact | None:
        """The first fact that does not hold."""
        return next((fact for fact in self.facts.rows if not holds(fact, look)), None)


def _keep_compiled(sidecar: Sidecar, compiled: Any) -> None:
    """Keep what a backend made, if it can be used again: `kept`, a name and the content."""
    if (kept := getattr(compiled, "kept", None)) is not None:
        sidecar.put(*kept)


def _read(data: bytes, place: Place, values: Mapping[str, Any]) -> _Kept:
    waiting = Waiting()
    found = Resolved(data, place.function, values, waiting)
    fields, graph = found.content
    captured = _Kept(place, conditions=state_conditions(), **fields)
    if graph is not None:
        waiting.data, waiting.named, rows = graph
        captured.waiting = waiting
        if (other := replaced(rows)) is not None:
            raise NotKept(f"{other}, which torch's functions call, is another")
    for (module, name), value in captured.taken.items():
        now = taken_now(module, name)
        if now is not value and not (is_scalar(value) and known_by(now) == known_by(value)):
            raise NotKept(f"{module}.{name} is another")
    for function, args, kwargs, result in captured.answers:
        if not is_scalar(result) or known_by(function(*args, **kwargs)) != known_by(result):
            raise NotKept(f"{function.__qualname__}() gives another result")
    if (fact := captured.unlike(found.look)) is not None:
        raise NotKept(f"not so: {fact}")
    captured.examples = [found.look(origin) for origin in captured.inputs]
    return captured
