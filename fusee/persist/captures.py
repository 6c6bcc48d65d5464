"""Captures on disk: what one process captured, the next one does not capture again.

Kept are the facts, the graph and the source of the piece that runs around it, for functions that
are one graph. A process that finds them looks at each fact, as it would at a later call of its own;
but facts rely on what nobody can change within a process. So it is sure first that each object it
finds is what the other one had (references.py): functions by their code, classes by the classes
that they are made of, constants of Python's library and torch by their values. Whatever can differ
unseen keeps a capture from being kept: addresses, hashes, the order of sets of texts.

What is kept is code, as the machine code in the same folder is, and as trusted.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fusee.capture.captured import Captured, Place
from fusee.capture.frame import is_scalar
from fusee.capture.graph_break import Failing
from fusee.capture.guards import Facts
from fusee.capture.policy import Policy
from fusee.capture.sources import Origin, looking
from fusee.capture.torch_api import State, allowed_by_torch, graph_module, state_conditions
from fusee.log import publish
from fusee.persist.references import (
    Names,
    NotKept,
    Resolved,
    is_torchs,
    known_by,
    reached,
    replaced,
    taken_now,
)
from fusee.runtime import process
from fusee.runtime.cache import (
    GraphCompiler,
    KeptGraph,
    ObjectCache,
    Sidecar,
    code_salt,
    content_key,
    object_cache,
)

# ---------------------------------------------------------------------------- graphs
# Graphs of kept captures: their nodes wait until somebody wants them, which a backend need not.
#
# What a graph names, its operators and constants, does not wait: that it is the same in this
# process is what makes the capture good. So nodes are written by value, and all else as its place
# in a list.

_BY_VALUE = frozenset((
    int, float, bool, str, bytes, type(None), list, tuple, dict, slice, immutable_list,
    immutable_dict, fx.Node, fx.Graph, fx.GraphModule,
))  # fmt: skip


class Waiting:
    """A graph that is made when it is first asked for. May be called from any thread."""

    def __init__(self) -> None:
        self.data = b""
        self.named: Sequence[Any] = ()

    @functools.cached_property
    def module(self) -> fx.GraphModule:
        """The graph as it was captured, without what only the capture itself needs."""
        found: fx.GraphModule = _Reader(self.data, self.named).load()
        return found

    def forward(self, *inputs: Any) -> Any:
        """What the graph gives, run by torch."""
        return self.module.forward(*inputs)


def written(module: fx.GraphModule) -> tuple[bytes, list[Any]]:
    """The nodes, and what they name: `Waiting.data` and `Waiting.named`. raises NotKept"""
    writer = _Writer()
    try:
        writer.dump(module)
    except RecursionError as error:
        raise NotKept(str(error)) from None
    return writer.out.getvalue(), writer.named


class _Writer(pickle.Pickler):
    def __init__(self) -> None:
        self.out = io.BytesIO()
        super().__init__(self.out, protocol=5)
        self.named: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, x: Any) -> int | None:
        if type(x) in _BY_VALUE or isinstance(x, fx.GraphModule):
            return None
        place = self._places.setdefault(id(x), len(self.named))
        if place == len(self.named):
            self.named.append(x)
        return place

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return _node, (x.graph, x.op, x.target, x.args, x.kwargs, x.name, _meta(x))
        if isinstance(x, (immutable_list, immutable_dict)):
            return (list, (tuple(x),)) if isinstance(x, list) else (dict, ((*x.items(),),))
        if isinstance(x, fx.Graph):
            return fx.Graph, ()
        if isinstance(x, fx.GraphModule):
            return _module, (x.graph, list(x.graph.nodes))
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, named: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.named = named

    def persistent_load(self, place: int) -> Any:
        return self.named[place]


def _meta(node: fx.Node) -> dict[str, Any]:
    """Without the FakeTensors, which only the capture itself needs."""
    kept = {key: x for key, x in node.meta.items() if key != "example_value"}
    if not {*kept} <= {"stack_trace", "is_buffer"}:
        raise NotKept(f"a node knows of {', '.join(map(str, kept))}")
    known = node.meta.get("example_value")
    return kept | {"example_value": known} if isinstance(known, float) else kept


def _node(
    graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str, meta: dict[str, Any]
) -> fx.Node:
    node = graph.create_node(op, target, name=name)
    node.args = args  # given to `create_node`, they would be searched for symbols first
    if kwargs:
        node.kwargs = kwargs
    node.meta.update(meta)
    return node


def _module(graph: fx.Graph, nodes: list[fx.Node]) -> fx.GraphModule:
    return graph_module(graph)


# ---------------------------------------------------------------------------- captures


class Keeper:
    """Keeps captures in the folder of the object code cache."""

    def __init__(self, cache: ObjectCache | None = None) -> None:
        self.cache = cache or object_cache()

    @process.paused()
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

    @process.paused()
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
        return content_key(code_salt(), repr(parts))


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
        rows = [(type(row), row.origin, row.value, sys.intern(row.where)) for row in x.rows]
        return _facts, (list(zip(*rows)), x.kinds)
    if type(x) is State:
        return State, tuple(x)
    return (Failing, (x.eagerly, x.state, x.changes)) if type(x) is Failing else NotImplemented


def _facts(columns: list[tuple[Any, ...]], kinds: dict[Origin, type]) -> Facts:
    return Facts([kind(*given) for kind, *given in zip(*columns)], kinds)


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
        if (
            self.waiting is None
            or not isinstance(compile_graph, GraphCompiler)
            or not all(map(is_torchs, self.waiting.named))
        ):
            return super().compiled(compile_graph)

        def anew(inputs: Sequence[Any]) -> Any:
            with self.modes():
                return compile_graph(self.graph, list(inputs))

        with self.modes():
            found = compile_graph.resume(self.sidecar, self.examples, anew)
        if found is None:
            found = anew(self.examples)
            _keep_compiled(self.sidecar, found)
        return found

    def check(self, values: Mapping[str, Any]) -> tuple[Callable[..., bool], Callable[[], str]]:
        compiled: list[tuple[Callable[..., bool], Callable[[], str]]] = []

        def check(*given: Any, **named: Any) -> bool:
            if not compiled:
                now = {**dict(zip(self.place.parameters, given)), **named}
                if self.facts.unlike(looking(now)) is not None:
                    return False
                compiled.append(super(_Kept, self).check(now))
            return compiled[0][0](*given, **named)

        return check, lambda: compiled[0][1]() if compiled else "# compiled by the second call"


def _keep_compiled(sidecar: Sidecar, compiled: Any) -> None:
    """Keep what a backend made, if it can be used again: `kept`, a name and the content."""
    if isinstance(compiled, KeptGraph) and compiled.kept is not None:
        sidecar.put(*compiled.kept)


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
    if (fact := captured.facts.unlike(found.look)) is not None:
        raise NotKept(f"not so: {fact}")
    captured.examples = [found.look(origin) for origin in captured.inputs]
    return captured
