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
import operator
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn.parameter import is_lazy

from fusee.capture.captured import Captured, Place, Relation
from fusee.capture.dynamic import Varying
from fusee.capture.effects import EFFECTS, is_asked
from fusee.capture.frame import is_scalar
from fusee.capture.graph_break import Failing
from fusee.capture.guards import Facts, Values
from fusee.capture.policy import Policy
from fusee.capture.sources import Origin, looking
from fusee.capture.symbols import Symbols
from fusee.capture.torch_api import (
    State,
    allowed_by_torch,
    graph_module,
    is_the_programs,
    marks,
    state_conditions,
)
from fusee.fake import FakeTensor, fake_mode
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
    text_of,
    unchanged,
)
from fusee.runtime import gc_paused
from fusee.runtime.cache import (
    APART,
    CUTS,
    GRADIENTS,
    KEPT,
    MOST_CUTS,
    GraphCompiler,
    KeptGraph,
    ObjectCache,
    Sidecar,
    Unread,
    code_salt,
    content_key,
    object_cache,
)
from fusee.source import NodeGraph, mapped
from fusee.sym import Call, Expr, Size, Symbol
from fusee.sym.ranges import Comparison
from fusee.sym.shape_env import ShapeEnv, SizeNode, known_size, wrapped

# ---------------------------------------------------------------------------- graphs


class _Ref(NamedTuple):
    """Stands for a node among the arguments of others, or for something that all of them name."""

    to_node: bool
    k: int


class Waiting:
    """A graph that is made when it is first asked for, which a backend need not do.

    That what its nodes name is the same in this process is what makes the capture good: it is
    found at once. May be called from any thread.

    data    operator, target, arguments, name and meta of each node
    named   what these have instead of a _Ref
    env     of the sizes that are open in it
    """

    data = b""
    named: Sequence[Any] = ()
    env: ShapeEnv | None = None

    @functools.cached_property
    def module(self) -> fx.GraphModule:
        """The graph as it was captured, without what only the capture itself needs."""
        graph, nodes, mode = NodeGraph(), list[fx.Node](), fake_mode()

        def part(x: Any) -> Any:
            return x if type(x) is not _Ref else (nodes if x.to_node else self.named)[x.k]

        for op, target, args, kwargs, name, meta in pickle.loads(self.data):
            args, kwargs = mapped(args, part), mapped(kwargs, part)
            node = graph.create_node(op, part(target), args, kwargs, name)
            if isinstance(example := meta.get("example_value"), (Expr, _Shape)):
                meta["example_value"] = _stand_in(example, self.env, mode)
            node.meta.update(meta)
            nodes.append(node)
        made = graph_module(graph)
        made.meta[KEPT] = self.env is not None
        return made

    def forward(self, *inputs: Any) -> Any:
        """What the graph gives, run by torch."""
        return self.module.forward(*inputs)


class _Shape(NamedTuple):
    """A tensor without its values. Sizes may be open."""

    size: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool


def _shape(x: Any, has_symbols: bool) -> _Shape | Size | None:
    """What is written of an example but numbers; None of others.

    has_symbols  whether sizes that only the data tells are known by their symbols
    raises       NotKept for what a graph is compiled by, and nothing is written of
    """

    def known(n: Any) -> Size:
        found = known_size(n)
        if type(n) is torch.SymInt and type(n.node) is SizeNode:
            by_data = n.node.env.data.of
            # also where the program has gone on because it was some other size
            if by_data(n.node.size) and not (has_symbols and by_data(found)):
                raise NotKept("a size that only the data tells")
        return found

    if type(x) is torch.SymInt:
        return known(x)
    if type(x) in (tuple, list):
        for part in x:
            _shape(part, has_symbols)
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        return None
    if x.device.type == "meta":
        raise NotKept("a tensor on the meta device")
    size, stride = (tuple(map(known, row)) for row in (x.shape, x.stride()))
    return _Shape(size, stride, x.dtype, str(x.device), x.requires_grad)


def _stand_in(x: _Shape | Size, env: Any, mode: Any) -> Any:
    """The example that `_shape` is about."""
    if not isinstance(x, _Shape):
        return wrapped(env, x)
    size, stride = ([n if type(n) is int else wrapped(env, n) for n in row] for row in x[:2])
    meta = torch.empty_strided(size, stride, dtype=x.dtype, device="meta")
    made = FakeTensor(mode, meta, torch.device(x.device))
    return made.requires_grad_() if x.requires_grad else made


_WRITTEN_META = {"stack_trace", "is_buffer", GRADIENTS, "recompute", "ac_graph_id", "ac_policy"}


def _written_graph(
    graph: fx.Graph, has_symbols: bool
) -> tuple[bytes, list[Any], list[_ForeignCall]]:
    """`Waiting.data`, `Waiting.named`, and the calls that are not torch's. raises NotKept"""
    nodes = {node: k for k, node in enumerate(graph.nodes)}
    places: dict[int, int] = {}
    named: list[Any] = []

    def part(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return _Ref(True, nodes[x])
        if type(x) in (int, float, bool, str, bytes, types.NoneType):
            return x
        if places.setdefault(id(x), len(named)) == len(named):
            named.append(x)
        return _Ref(False, places[id(x)])

    def shown(x: Any) -> Any:
        example = x.meta.get("example_value") if isinstance(x, fx.Node) else x
        shape = _shape(example, has_symbols)
        return example if shape is None else shape

    rows, foreign = [], []
    for node in graph.nodes:
        args, kwargs = mapped(node.args, part), mapped(node.kwargs, part)
        meta = {key: x for key, x in node.meta.items() if key not in ("example_value", EFFECTS)}
        if not {*meta} <= _WRITTEN_META or meta.get("ac_policy") is not None:
            raise NotKept(f"a node knows of {', '.join(map(str, meta))}")
        known = node.meta.get("example_value")
        if type(known) is torch.SymFloat and not has_symbols:
            raise NotKept("a float that is computed of others")
        if not isinstance(known, float):
            known = _shape(known, has_symbols)
        if known is not None:
            meta["example_value"] = known
        rows.append((node.op, part(node.target), args, kwargs, node.name, meta))
        if node.op == "call_function" and not is_torchs(node.target):
            if has_symbols:
                raise NotKept(f"{node.target} is not torch's, and sizes are open")
            given, by_name = mapped((node.args, node.kwargs), shown)
            gives = _shapes(node.meta.get("example_value"), has_symbols)
            foreign.append(_ForeignCall(node.target, given, by_name, gives))
    return pickle.dumps(rows, protocol=5), named, foreign


class _ForeignCall(NamedTuple):
    """A call of a function that is not torch's: no fact says what decides on what it gives.

    args, kwargs   with a _Shape for each tensor
    gives          what `_shape` says of its results
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gives: list[Any]

    def make_sure(self) -> None:
        """That it gives such results for such tensors in this process. raises NotKept"""
        mode = fake_mode()

        def given(x: Any) -> Any:
            return _stand_in(x, None, mode) if type(x) is _Shape else x

        try:
            args, kwargs = mapped((self.args, self.kwargs), given)
            with mode:
                gives = _shapes(self.target(*args, **kwargs), False)
        except Exception as error:  # noqa: BLE001  # the program's
            raise NotKept(f"{self.target} raises {type(error).__name__}: {error}") from None
        if gives != self.gives:
            raise NotKept(f"{self.target} gives other tensors")


def _shapes(x: Any, has_symbols: bool) -> list[Any]:
    parts = x if type(x) in (tuple, list) else [x]
    return [_shape(part, has_symbols) for part in parts]


# ---------------------------------------------------------------------------- captures


class Keeper:
    """Keeps captures in the folder of the object code cache.

    least   nodes that a graph must have
    """

    def __init__(self, least: int = 0, cache: ObjectCache | None = None) -> None:
        self.least, self.cache = least, cache or object_cache()

    @unchanged()
    @gc_paused()
    def find(
        self, place: Place, values: Values, policy: Policy, varies: Varying
    ) -> Captured | None:
        """The capture that another process kept, if all that it relied on is as it was."""
        try:
            keys = self._keys(place, values, policy, varies)
        except NotKept as reason:
            _tell(place, f"no capture of it is kept: {reason}")
            return None
        for key in keys:
            if (data := self.cache.get(key)) is None:
                return None
            try:
                found = _read(data, place, values)
            except NotKept as reason:
                _tell(place, f"the kept capture is of no use: {reason}")
                continue
            found.sidecar = self._sidecar(key, data, found)
            _tell(place, f"the capture was kept as {key}")
            return found
        return None

    def takes(self, captured: Captured) -> bool:
        """Whether to keep what was captured; its graph, not compiled yet, is told."""
        graph = captured.graph
        if captured.is_once or (0 if graph is None else len(graph.graph.nodes)) < self.least:
            return False
        if graph is not None:
            graph.meta[KEPT] = captured.symbols is not None
        return True

    @unchanged()
    @gc_paused()
    def keep(
        self, captured: Captured, compiled: Any, values: Values, policy: Policy, varies: Varying
    ) -> None:
        """Keep a capture and what its backend made of it, if another process can use them."""
        place = captured.place
        try:
            data = _written(captured)
            keys = self._keys(place, values, policy, varies)
            any_of_them = keys[hash(data) % len(keys)]
            key = next((key for key in keys if self.cache.get(key) is None), any_of_them)
            self.cache.put(key, data)
            _tell(place, f"the capture is kept as {key}")
            _keep_compiled(self._sidecar(key, data, captured), compiled)
        except NotKept as reason:
            _tell(place, f"the capture cannot be kept: {reason}")
        self.cache.report()

    def _sidecar(self, key: str, data: bytes, captured: Captured) -> Sidecar:
        return Sidecar(self.cache, content_key(key, data), captured.symbols is not None)

    def _keys(self, place: Place, values: Values, policy: Policy, varies: Varying) -> list[str]:
        """Where captures for such values are: what tells them apart is not all in the name.

        raises   NotKept
        """
        tables = (policy.in_graph, policy.constant, policy.substitutes)
        said = [sorted(map(repr, map(known_by, table))) for table in tables]
        with torch._C.DisableTorchFunction():  # which classes and modes of the program's would hear
            sketch = repr(_sketch(dict(values), varies.is_any()))
        # of these, the program's run without a fact
        methods = [(k, known_by(x)) for k, x in vars(Tensor).items() if is_the_programs(x)]
        settings = known_by(place.function), *varies.settings(), is_asked(varies.callers), methods
        text = repr((state_conditions(), said, allowed_by_torch(), sketch, settings))
        count = _VERSIONS if "'open'" in sketch or varies.is_any() else _STATES
        return [content_key(code_salt(), text, str(k)) for k in range(count)]


_VERSIONS = 8  # as many as a place has unless said otherwise
_STATES = 4  # of known sizes: before and after a cache is filled, say, of two models


def _tell(place: Place, what: str) -> None:
    publish("cache", place.function.__qualname__, what)


def _sketch(x: Any, varies: bool) -> Any:
    """What is plain to see of a value: two captures differ in it more often than not.

    varies   whether sizes and numbers may be open, which are left out then
    """
    if isinstance(x, Tensor):
        if x.layout is not torch.strided or x.is_nested or is_lazy(x):
            raise NotKept(f"a {type(x).__qualname__} without strides")
        marked = marks(x)
        size = [
            "open" if n > 1 and (varies or axis in marked) else n for axis, n in enumerate(x.shape)
        ]
        return str(x.dtype), size, x.requires_grad, marked
    if isinstance(x, torch.nn.Module):
        if "_parameters" not in vars(x):
            raise NotKept(f"a {type(x).__qualname__} without parameters of its own")
        state = [_sketch(tensor, False) for tensor in (*x.parameters(), *x.buffers())]
        return known_by(type(x)), x.training, state
    if type(x) in (list, tuple):
        return [_sketch(item, varies) for item in x]
    if type(x) is dict:
        return [(_sketch(key, False), _sketch(item, varies)) for key, item in x.items()]
    is_told = is_scalar(x) and not (varies and type(x) in (int, float))
    return text_of(x) if is_told else type(x).__qualname__


# ------------------------------------------------------------------------------ all of it


def _written(captured: Captured) -> bytes:
    why, known = captured.passing, {} if captured.graph is None else captured.graph.meta
    if captured.eager or captured.stop is not None or captured.place.at >= 0:
        why = "the function is not one graph"
    elif CUTS in known:
        why = "gradients of its results may be asked for"
    elif known.get(APART, (None, MOST_CUTS))[1] < MOST_CUTS:
        why = "a call of it runs as it was captured"
    if why:
        raise NotKept(why)
    graph = captured.graph

    def reduced(x: Any) -> Any:
        """How an object of ours is made again, for pickle; NotImplemented for others."""
        if x is graph and graph is not None:
            return Resolved.waiting, ()
        if type(x) is Facts:
            rows = [(type(row), row.origin, row.value, sys.intern(row.where)) for row in x.rows]
            return _facts, (list(zip(*rows)), x.kinds)
        if type(x) is Failing:
            return Failing, (x.eagerly, x.state, x.changes, x.draws)
        if type(x) is Relation:
            return Relation, (x.a, x.op, x.b, dict(x.origins))
        if type(x) in (State, Comparison, _ForeignCall, _Shape):
            return type(x), tuple(x)
        return x.__reduce__() if type(x) in _BY_VALUE else NotImplemented

    names = Names(captured.facts, captured.place.function, captured.taken, reduced)
    found = {name: getattr(captured, name) for name in _FIELDS}
    found["symbols"] = captured.symbols and captured.symbols.written()
    parts = None
    if graph is not None:
        written = _written_graph(graph.graph, captured.symbols is not None)
        parts = *written, reached(graph)
    return names.written((found, parts))


_FIELDS = tuple("facts inputs source names grad inference taken answers is_plain".split())
_BY_VALUE = (Symbol, Call, Expr, operator.attrgetter)


def _facts(columns: list[tuple[Any, ...]], kinds: dict[Origin, type]) -> Facts:
    return Facts([kind(at, value, where) for kind, at, value, where in zip(*columns)], kinds)


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

        waiting = self.waiting

        def anew(inputs: Sequence[Any]) -> Any:
            with self.modes():
                made = compile_graph(self.graph, list(inputs))
            _keep_compiled(self.sidecar, made)
            return made

        def later(inputs: Sequence[Any]) -> Any:
            relied = self._relied()
            made = anew(inputs)
            # of what is relied on from now on the check knows nothing
            return made if self._relied() == relied else waiting.forward

        unread = Unread(len(self.inputs), waiting.forward, later)
        with self.modes():
            found = compile_graph.resume(self.sidecar, self.examples, unread)
        return anew(self.examples) if found is None else found

    def _relied(self) -> tuple[Any, ...]:
        """What is relied on about open sizes."""
        env = None if self.waiting is None else self.waiting.env
        return () if env is None else (env.relations, [*env.written])

    def check(self, values: Values) -> tuple[Callable[..., bool], Callable[[], str]]:
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
    """Keep what a backend made, if it can be used again."""
    if isinstance(compiled, KeptGraph) and compiled.kept is not None:
        compiled.kept(sidecar)


def _read(data: bytes, place: Place, values: Values) -> _Kept:
    waiting = Waiting()
    found = Resolved(data, place.function, values, waiting)
    fields, graph = found.content
    captured = _Kept(place, conditions=state_conditions(), **fields)
    if captured.symbols is not None:
        captured.symbols = Symbols.read(*captured.symbols)
        waiting.env = captured.symbols.env
    foreign: Sequence[_ForeignCall] = ()
    if graph is not None:
        waiting.data, waiting.named, foreign, calls = graph
        captured.waiting = waiting
        if (other := replaced(calls)) is not None:
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
    with captured.modes():
        for call in foreign:
            call.make_sure()
    captured.examples = [found.look(origin) for origin in captured.inputs]
    return captured
