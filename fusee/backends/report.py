"""A backend as capture calls it, in buckets or whole, and the report of what it compiled.

A report says what a compiled graph is made of: kernels, externs, what was left out and why, time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import re
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, fx, nn

from fusee.aten import constant_source
from fusee.aten.rewriter import Copier
from fusee.aten.torch_api import is_state, storage_id, symbolic_mode
from fusee.backends.dynamo import suppresses_errors
from fusee.config import settings
from fusee.errors import BackendError, FuseeError, TraceError, user_line
from fusee.fake import with_bits
from fusee.runtime import gc_paused
from fusee.runtime.cache import APART, CUTS, GraphCompiler, Sidecar, Unread
from fusee.runtime.jit import defer
from fusee.source import tensors_in
from fusee.sym.shape_env import is_unbacked


@dataclass(frozen=True)
class KernelRow:
    """One launch. Equal `function` names share machine code; `body` is the first's loop nest.

    show  writes it down: only when somebody asks, since that takes as long as a stage of compiling
    uses  gives what the function takes of the machine: on a GPU its registers, and bytes of memory
          that each thread needs besides
    """

    function: str
    origin: str
    show: Callable[[], str] = field(repr=False)
    uses: Callable[[str], str] | None = field(default=None, repr=False)

    @property
    def body(self) -> str:
        return self.show()

    def __str__(self) -> str:
        used = self.uses(self.function) if self.uses is not None else ""
        return f"{self.function}  {self.origin}{used and f'  ({used})'}"


class ExternRow(NamedTuple):
    """One call to ATen, with the reason why it is no loop."""

    op: str
    reason: str
    origin: str


@dataclass(eq=False)
class RegionRow:
    """A part of the graph that an engine runs.

    ops          how often each operator is in it
    open         inputs with sizes that vary
    failed       why our compiler runs it instead, if it does
    primitives   what the engine executes and how often, if it can say
    calls        how often it was called; `seconds` is what they took in all
    """

    name: str
    engine: str
    device: str
    ops: dict[str, int]
    open: tuple[str, ...] = ()
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
        sizes = f"; open: {', '.join(self.open)}" if self.open else ""
        return f"{self.name}  {where}; {sum(self.ops.values())} calls: {listed}{more}{sizes}{mean}"


class UnclaimedRow(NamedTuple):
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
    replays: Callable[[], str] | None = None  # of calls that a GPU replays
    arena_bytes: int | None = None  # None: only a call's sizes tell
    eager: str | None = None  # why the whole graph runs eagerly, if it does
    backward: Report | None = None  # of the graph that computes gradients, if there is one
    bill: Any = None  # bill.Bill: what it costs as it was captured, and as kernels

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
        if self.bill is not None:
            rows.append(f"  prices       {self.bill}")
        stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in self.stages_ms.items())
        rows.append(f"  stages, ms   {stages}")
        if self.arena_bytes is not None:
            rows.append(f"  arena        {self.arena_bytes:,} bytes for intermediates")
        if self.replays is not None:
            rows.append(f"  replayed     {self.replays()}")
        externs = {f"{row.op}: {row.reason}" for row in self.externs}
        for title, lines in (
            ("regions", [str(row) for row in self.regions]),
            ("not the engine's", _counted(f"{r.op}  {r.reason}" for r in self.unclaimed)),
            ("kernels", _counted(str(row) for row in self.kernels)),
            ("calls to ATen", _counted(f"{r.op}  {r.reason}" for r in self.externs)),
            ("passes", _counted(self.passes)),
            ("notes", _counted(note for note in self.notes if note not in externs)),
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

    kept   as KeptGraph has it
    is_captured  whether it is the captured graph itself, since that costs less than kernels
    """

    _report: Report
    kept: Callable[[Sidecar], object] | None
    is_captured: bool

    def __new__(cls, call: Callable[..., Any], report: Report, *rest: Any) -> Self:
        made = super().__new__(cls, call)
        made._report, made.kept, made.is_captured = report, None, False
        return made

    def report(self) -> Report:
        """What it is made of: kernels, calls to ATen, what was left out and why, time per stage."""
        return self._report


def graphs_of(compiled: Any) -> list[CompiledGraph]:
    """The compiled graphs that what a backend made consists of: one, or one for each part."""
    parts = compiled.compiled if isinstance(compiled, Bucketed) else (compiled,)
    return [x for x in parts if isinstance(x, CompiledGraph)]


def _counted(lines: Iterable[str]) -> list[str]:
    return [f"{n:3}x {line}" for line, n in Counter(lines).items()]


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


# ---------------------------------------------------------------------------- same graph
# Graphs that were captured twice: one compiled graph serves both.
#
# A version of a function may differ from another in what it checks and not in what it computes: at
# a second training step gradients exist, the forward is the same.

_LEAVES = (
    int, bool, str, bytes, complex, type(None), type(Ellipsis), torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip


class _Indistinct(Exception):
    """Something whose equality says too little."""


@gc_paused()
def form(gm: fx.GraphModule, examples: Sequence[Any]) -> Hashable | None:
    """What a compiled graph depends on; None if that cannot be told. Equal forms: one graph.

    That is each call with its arguments, the inputs' metadata and which of them share memory, the
    very parameters, since what is derived from them is kept, and the modes of torch that are on.
    """
    if any(True for _ in (*gm.parameters(), *gm.buffers())):
        return None
    if symbolic_mode(n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")):
        return None  # what it relies on about sizes belongs to one capture
    places: dict[fx.Node, int] = {}
    rows: list[Hashable] = []
    now = situation(examples)
    if now is None:
        return None
    try:
        for node in gm.graph.nodes:
            target = None if node.op == "placeholder" else node.target
            if node.op in ("get_attr", "call_module"):
                return None
            rows.append((node.op, target, _argument((node.args, node.kwargs), places)))
            places[node] = len(places)
        buffers = [n.meta.get("is_buffer", False) for n in gm.graph.find_nodes(op="placeholder")]
        kept = tuple(
            id(x) if isinstance(x, Tensor) and (is_buffer or is_state(x)) else None
            for x, is_buffer in zip(examples, buffers, strict=True)
        )
        found = tuple(rows), now, kept
        hash(found)
    except (_Indistinct, TypeError):  # TypeError: a target that cannot be hashed
        return None
    return found


def _argument(x: Any, places: dict[fx.Node, int]) -> Hashable:
    if isinstance(x, fx.Node):
        return fx.Node, places[x]
    if isinstance(x, (tuple, list)):
        return type(x), tuple(_argument(item, places) for item in x)
    if isinstance(x, dict):
        return dict, tuple((key, _argument(item, places)) for key, item in x.items())
    if isinstance(x, slice):
        return slice, _argument((x.start, x.stop, x.step), places)
    if type(x) is float:
        return float, x.hex()  # which tells -0.0 from 0.0, and finds NaN again
    if type(x) in _LEAVES:
        return type(x), x
    raise _Indistinct


def situation(examples: Sequence[Any], is_open: bool = False) -> Hashable | None:
    """What a graph is compiled for besides what it is: its inputs' metadata, and torch's modes.

    Equal in two processes where it is the same. None if an input has no storage of its own, as
    sparse ones have not.

    is_open  without sizes: they are open, or facts of the graph
    """
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    rows: list[Hashable] = []
    for k, x in enumerate(examples):
        if not isinstance(x, Tensor):
            rows.append((type(x), None if is_open else x))
            continue
        if x.layout is not torch.strided:
            return None
        storage = x.untyped_storage().data_ptr() if x.numel() else -k - 1
        sizes = () if is_open else (tuple(x.shape), x.stride())
        about = (type(x), x.dtype, x.device, x.layout, *sizes)
        grad = (x.storage_offset(), x.requires_grad, x.is_leaf, x.is_inference(), is_state(x))
        bits = x.is_conj(), x.is_neg()
        same = objects.setdefault(id(x), k), storages.setdefault(storage, k)
        rows.append((*about, *grad, *bits, *same))
    asked = torch.is_autocast_enabled, torch.get_autocast_dtype
    autocast = [ask(device) for device in ("cpu", "cuda") for ask in asked]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return tuple(rows), (*autocast, *modes, torch.get_default_dtype())


# ---------------------------------------------------------------------------- source
# The captured graph as Python that runs: for people, and to take a graph away from its program.


def captured_source(gm: fx.GraphModule) -> str:
    """A module that runs with torch alone: `graph(*inputs)` returns what the graph does.

    Modules that the graph calls, which only graphs made by hand do, are to be put in by name.
    """
    code = gm.graph.python_code("self", verbose=True)
    words = set(re.findall(r"\w+", code.src))
    globals_ = {name: value for name, value in code.globals.items() if name in words - {"torch"}}
    rows = ["import torch", "from torch import nn"]
    for name, value in globals_.items():  # how to have them again
        home = getattr(value, "__module__", None)
        where = getattr(value, "__qualname__", getattr(value, "__name__", name))
        if isinstance(value, ModuleType):
            rows.append(f"import {value.__name__} as {name}")
        elif isinstance(value, float):  # inf and nan
            rows.append(f'{name} = float("{value}")')
        elif value is type(None):
            rows.append(f"{name} = type(None)")
        elif home is None or "<" in where:
            rows.append(f"{name} = ...  # {value!r}: put it in")
        else:
            rows.append(f"from {home} import {where} as {name}")
    body = [f"    {line}" if line.strip() else "" for line in code.src.strip("\n").splitlines()]
    rows += ["", "", "class Graph(nn.Module):", *body, "", "", "graph = Graph()"]
    names = {str(node.target) for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    for name in sorted(names):
        parent = "graph"
        for part in name.split(".")[:-1]:
            row = f'{parent}.{part} = getattr({parent}, "{part}", None) or nn.Module()'
            rows += [row] if row not in rows else []
            parent = f"{parent}.{part}"
        x: Any = operator.attrgetter(name)(gm)
        if isinstance(x, nn.Parameter):
            text = f"nn.Parameter({constant_source(x.detach())}, {x.requires_grad})"
        elif isinstance(x, Tensor):
            text = constant_source(x)
        else:
            text = f"...  # {type(x).__name__}: put it in"
        rows.append(f"graph.{name} = {text}")
    return "\n".join(rows) + "\n"


# ---------------------------------------------------------------------------- buckets
# Graphs within DistributedDataParallel: cut where gradients fill a bucket of its reducer.
#
# A compiled backward gives all of its gradients at its end. Of several graphs each one's gradients
# are sent while the backward of the one before it runs.
# source   torch/_dynamo/backends/distributed.py, DDPOptimizer; private names of
#          torch.nn.parallel.distributed as in torch 2.11 to 2.13


CompiledFn = Callable[..., Any]


@dataclass
class BucketGraph:
    """A graph that is a part of another.

    given      the places of what it takes, among the whole graph's inputs and all parts' results
    dead       those of them that nobody reads any more
    compiled   at its first call, where sizes are known: what comes from other parts has no data
               before
    """

    graph: fx.GraphModule
    given: list[int]
    dead: list[int]
    compiled: CompiledFn | None = None


class Bucketed:
    """Graphs that run one after the other: takes and gives what the whole one does.

    results   the places of what it gives
    """

    def __init__(
        self, compile_graph: CompiledFn, parts: Sequence[BucketGraph], results: Sequence[Any]
    ) -> None:
        self.compile_graph, self.parts, self.results = compile_graph, parts, results

    @property
    def compiled(self) -> list[CompiledFn]:
        return [part.compiled for part in self.parts if part.compiled is not None]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        values = [*inputs]
        for part in self.parts:
            given = [values[k] for k in part.given]
            if part.compiled is None:
                part.compiled = self.compile_graph(part.graph, given)
            for k in part.dead:
                values[k] = None
            values += part.compiled(*given)
        return tuple(values[k] for k in self.results)


def in_buckets(
    gm: fx.GraphModule, examples: Sequence[Any], compile_graph: CompiledFn
) -> Bucketed | None:
    """The graph in parts, each compiled by itself; None if it is to be one graph.

    So are those that switch torch's state on their way.
    """
    limits = _limits()
    if limits is None:
        return None
    *nodes, output = gm.graph.nodes
    calls = [node for node in nodes if node.op.startswith("call_")]
    inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True))
    if not all("example_value" in node.meta for node in calls):
        return None
    left = {
        node: x.nbytes
        for node, x in inputs.items()
        if isinstance(x, Tensor) and x.requires_grad and x.is_leaf
    }
    outer = [*map(storage_id, tensors_in([node.meta.get("example_value") for node in inputs]))]
    crossing = {node for node in output.all_input_nodes if node.op.startswith("call_")}
    starts, size, limit = list[int](), 0, next(limits)  # the last part's first
    for k in range(len(calls) - 1, 0, -1):
        read = calls[k].all_input_nodes
        size += sum(left.pop(node, 0) for node in read)
        crossing.update(node for node in read if node.op.startswith("call_"))
        crossing.discard(calls[k])
        if size < limit or not left:
            continue
        # no two tensors that go from one part to another may share memory
        values = [node.meta["example_value"] for node in crossing]
        places = [*map(storage_id, tensors_in(values))]
        is_single = all(isinstance(x, Tensor) for x in values)
        if is_single and len({*places}.difference(outer)) == len(places):
            starts.append(k)
            size, limit = 0, next(limits)
    return in_parts(gm, starts[::-1], compile_graph, examples) if starts else None


def _limits() -> Iterator[int] | None:
    """The bytes of each bucket, that of the last layers first; None where there are none."""
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    active = module and module.DistributedDataParallel._get_active_ddp_module()
    if active is None or not torch.is_grad_enabled() or active.process_group.size() == 1:
        return None
    most: int = active.bucket_bytes_cap
    first: int = module.dist._DEFAULT_FIRST_BUCKET_BYTES
    return itertools.chain((min(first, most),), itertools.repeat(most))


def apart(
    gm: fx.GraphModule, call: fx.Node | None, compile_graph: CompiledFn, examples: Sequence[Any]
) -> Bucketed | None:
    """The graph in parts, one of which runs a call as it was captured; None if it has none."""
    around, left = gm.meta.get(APART, (None, 0))
    found = around(gm, call) if left and call is not None else None
    if found is None:
        return None
    whole, parts = found
    whole.meta[APART] = gm.meta[APART] = around, left - 1
    return in_parts(whole, [*parts][1:], compile_graph, examples, [*parts.values()])


def in_parts(
    gm: fx.GraphModule,
    starts: Sequence[int],
    compile_graph: CompiledFn,
    examples: Sequence[Any],
    captured: Iterable[bool] = itertools.repeat(False),
) -> Bucketed:
    """The graph in parts that begin at these calls, each compiled by itself, or as captured.

    Where sizes are open all are compiled now: what they ask of sizes is guarded.
    """
    *nodes, output = gm.graph.nodes
    calls = [node for node in nodes if node.op.startswith("call_")]
    places = {node: k for k, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    given = [node.meta.get("example_value") for node in places]
    sizes = (n for x in given for n in (x.shape if isinstance(x, Tensor) else (x,)))
    is_open = any(type(n) is torch.SymInt for n in sizes)
    parts, values = list[BucketGraph](), [*examples] if is_open else None
    ends = itertools.pairwise((0, *starts, len(calls)))
    for (begin, end), is_captured in zip(ends, captured):
        part, given, results = _part(gm, calls[begin:end])
        run, taken = part.forward if is_captured else None, [places[node] for node in given]
        if values is not None:
            run = run or compile_graph(part, [values[k] for k in taken])
            for x in (node.meta["example_value"] for node in results):
                at = (*x.shape, *x.stride()) if isinstance(x, Tensor) else ()
                if isinstance(x, Tensor) and not any(map(is_unbacked, at)):
                    # zeros of this call's sizes; what the data tells the sizes of stays a fake
                    known = [n if type(n) is int else n.node.hint for n in at]
                    made = torch.empty_strided(
                        known[: x.dim()], known[x.dim() :], dtype=x.dtype, device=x.device
                    ).zero_()
                    with torch.enable_grad():  # no leaf, either
                        x = with_bits(made.requires_grad_(x.requires_grad).view_as(made), x)
                values.append(x)
        parts.append(BucketGraph(part, taken, [], run))
        places.update(zip(results, itertools.count(len(places))))
    shown = fx.map_arg(output.args[0], places.__getitem__)
    later = {*shown}
    for bucket in reversed(parts):
        bucket.dead = [k for k in bucket.given if k not in later]
        later.update(bucket.given)
    return Bucketed(compile_graph, parts, shown)


def _part(
    gm: fx.GraphModule, calls: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """A graph of these calls, what it is given, and what others want of it."""
    copier, own = Copier(), {*calls}
    given = [x for x in gm.graph.find_nodes(op="placeholder") if not _is_tensor(x)]
    read = [x for node in calls for x in node.all_input_nodes if x not in own]
    given = [*dict.fromkeys((*given, *(x for x in read if x.op != "get_attr" and _is_tensor(x))))]
    known, row = {*given, *own}, [x for x in read if not _is_tensor(x)]
    while row:  # tensors that numbers are read of, which only the data tells
        if (node := row.pop()) not in known:
            known.add(node)
            row += node.all_input_nodes
            given += [node] * (node.op == "placeholder")
    for node in given:
        copier.placeholder(node)
    for node in (*read, *calls):  # numbers are computed anew
        copier.demand(node)
    shown = gm.graph.output_node().all_input_nodes
    wanted = [node for node in calls if not own.issuperset(node.users)]
    results = [node for node in wanted if _is_tensor(node) or node in shown]
    copier.graph.output(tuple(map(copier.argument, results)))
    part = fx.GraphModule(gm, copier.graph)
    part.meta[APART] = gm.meta.get(APART, (None, 0))
    return part, given, results


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


# ---------------------------------------------------------------------------- guarded
# A backend as capture calls it: what goes wrong in it becomes an error that one can act on.

# Says in the meta of a graph that an error is wanted in place of what runs it eagerly.
REFUSES = "fusee_refuses"


class GuardedBackend:
    """A backend, with its failures as BackendError, or as a notice and the graph run eagerly.

    A graph of our own compiler serves again where the same one is captured for another version.
    One that eager refuses to run is left to eager, which raises what the program expects: shape
    functions accept more than ATen does, of tensors without elements above all.

    notice      is told of graphs that run eagerly, and where they begin
    fall_back   whether to run a graph eagerly that the backend cannot compile
    raises      BackendError; errors of ours as they are, since they say what is wrong
    """

    def __init__(
        self,
        backend: CompiledFn,
        name: str,
        notice: Callable[[str, str], None] = lambda text, where: None,
        *,
        fall_back: bool = False,
    ) -> None:
        self.backend, self.__name__ = backend, name
        self.notice, self.fall_back = notice, fall_back
        self.serves_copies = False
        self.made: weakref.WeakValueDictionary[Hashable, CompiledGraph]
        self.made = weakref.WeakValueDictionary()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledFn:
        if (starts := gm.meta.get(CUTS, ())) != ():
            return in_parts(gm, starts, self._compiled, example_inputs) if starts else gm.forward
        key = form(gm, example_inputs)
        known = None if key is None else self.made.get(key)
        if known is not None:
            return known
        parts = in_buckets(gm, example_inputs, self._compiled)
        return self._compiled(gm, example_inputs, key) if parts is None else parts

    def _compiled(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], key: Hashable | None = None
    ) -> CompiledFn:
        if _has_nothing(gm) and is_refused(gm, example_inputs):
            return gm.forward
        cause: Exception | None = None
        try:
            compiled = self.backend(gm, list(example_inputs))
            if key is not None and isinstance(compiled, CompiledGraph):
                defer(lambda: self.made.setdefault(key, compiled))
            if callable(compiled):
                return compiled  # type: ignore[no-any-return]
            problem = f"returned {type(compiled).__name__}, which cannot be called"
        except FuseeError as error:
            if isinstance(error, TraceError):
                if is_refused(gm, example_inputs):
                    return gm.forward
                if (parts := apart(gm, error.call, self._compiled, example_inputs)) is not None:
                    return parts
            if not (self.fall_back or suppresses_errors()):
                raise
            problem = error.what
        except Exception as error:  # noqa: BLE001  # a backend is anybody's code
            if is_refused(gm, example_inputs):
                return gm.forward
            problem, cause = f"raised {type(error).__name__}: {error}", error
        where = first_line(gm)
        problem = f"backend {self.__name__!r} {problem}"
        if self.fall_back or suppresses_errors():
            self.notice(f"a graph runs eagerly: {problem}", where or "")
            return gm.forward
        raise BackendError(
            problem,
            where=where,
            did=f"saved the graph to {save_graph(gm)}",
            remedy='options={"fallback": "eager"} runs such graphs eagerly',
        ) from cause

    def begin(self) -> None:
        """As GraphCompiler has it."""
        if isinstance(self.backend, GraphCompiler):
            self.backend.begin()

    def resume(self, sidecar: Sidecar, examples: Sequence[Any], graph: Unread) -> CompiledFn | None:
        """As GraphCompiler has it."""
        if not isinstance(self.backend, GraphCompiler) or _limits() is not None:
            return None
        return self.backend.resume(sidecar, examples, graph)


def _has_nothing(gm: fx.GraphModule) -> bool:
    """Whether a graph of torch's own functions alone meets a tensor without elements."""
    is_empty = False
    for node in gm.graph.nodes:
        module = getattr(node.target, "__module__", None) or "torch"
        if node.op == "call_function" and module.partition(".")[0] not in ("torch", "_operator"):
            return False
        value = node.meta.get("example_value")
        sizes = value.shape if isinstance(value, Tensor) else ()
        is_empty |= any(n == 0 for n in sizes if not is_unbacked(n))
    return is_empty


def is_refused(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether eager raises for a graph and inputs like these, of which it gets copies."""
    copies = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in inputs
    ]
    devices = {x.device for x in copies if isinstance(x, Tensor) and x.is_cuda}
    with torch.random.fork_rng(devices):
        try:
            gm.forward(*copies)
        except Exception:  # noqa: BLE001  # whatever it is, the call will raise it
            return True
    return False


def save_graph(gm: fx.GraphModule) -> str:
    """Write a graph as Python that runs with torch alone. Returns the file's path."""
    folder = settings().dump
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    file, path = tempfile.mkstemp(prefix="fusee_graph_", suffix=".py", dir=folder)
    with os.fdopen(file, "w", encoding="utf-8") as out:
        out.write(captured_source(gm))
    return path
