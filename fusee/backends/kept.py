"""Graphs of our compiler that outlive their process: run by a later one without the graph.

Kept is what a graph became that nobody differentiates, or a forward; and each of its backwards,
once it is compiled. Each is an entry of its own; a backward's belongs to the very forward that it
was compiled for, since of two processes each may save other values.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import pickle
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fusee import log
from fusee.aten import AtenGraph, Fresh, ViewOfOutput, inverse, returning
from fusee.aten.torch_api import OpOverload, op_name
from fusee.aten.weights import Derived
from fusee.autodiff import Split
from fusee.autodiff.autograd_function import Run
from fusee.backends.aot_autograd import bind, bind_split
from fusee.backends.report import CompiledGraph, KernelRow, Report, remember
from fusee.backends.resume import name_on_disk
from fusee.config import Options
from fusee.errors import MissingPackage
from fusee.runtime import gc_paused
from fusee.runtime.cache import Sidecar, Unread, content_key
from fusee.runtime.change_detection import Derivation, DerivedSet, Fixed
from fusee.runtime.jit import prepare
from fusee.source import define, overload
from fusee.targets import Emitted, Kept, Target, target_at

_numbers = itertools.count()


def tensors_kept(derived: Sequence[Derived], constants: Sequence[Tensor]) -> Kept:
    """The tensors that a graph keeps between calls."""
    if not any(one.sources for one in derived):
        return Fixed((*(x for one in derived for x in one.compute(())), *constants))
    order = inverse([place for one in derived for place in one.targets])
    computed = [Derivation(one.sources, one.compute) for one in derived]
    return DerivedSet(computed, lambda found: (*(found[k] for k in order), *constants))


def name_of(options: Options) -> str:
    """What reports call the next graph."""
    return options.name or f"graph_{next(_numbers)}"


class CompiledAten(NamedTuple):
    """What a graph became.

    salt       what its machine code depends on besides its text
    constants  of the graph, as far as kernels or calls read them
    """

    salt: str
    emitted: Emitted
    derived: tuple[Derived, ...]
    constants: tuple[Tensor, ...]


class KeptNative(NamedTuple):
    """A compiled graph without the graph.

    device     where it runs
    settings   Target.settings
    aten       what is known of it besides; results: how many it gives
    split      what it is the forward or a backward of, if that is so
    report     without kernels; of them name and origin
    """

    device: torch.device
    settings: Hashable
    made: CompiledAten
    aten: AtenGraph
    results: int
    split: Split | None
    report: Report
    kernels: tuple[tuple[str, str], ...]


# Who listens to these wants to see what only compiling makes.
_FORMS_SHOWN = ("graph", "aten", "passes", "loops", "fusion", "memory")
# Tensors of the graph itself are kept with it up to so many bytes.
_MOST_BYTES = 1 << 24


class Keeping:
    """Takes down what becomes of a captured graph, as it comes.

    is_open   as Sidecar has it
    """

    def __init__(
        self, is_open: bool, examples: Sequence[Any], options: Options, report: Report
    ) -> None:
        self.label = report.name
        self.name = name_on_disk([repr(options)], examples, is_open)
        self.waiting: list[tuple[frozenset[int] | None, Callable[[], KeptNative]]] = []
        self.sidecar: Sidecar | None = None
        self.backwards: Sidecar | None = None

    def of(
        self, aten: AtenGraph, target: Target, report: Report, split: Split | None = None
    ) -> Callable[[CompiledAten], None]:
        """What takes down what becomes of a graph, which compiling changes."""
        absent = split.absent if split is not None and aten is split.backward else None
        aten, results = dataclasses.replace(aten), len(aten.results)

        def content(made: CompiledAten) -> KeptNative:
            """raises   PicklingError where another process has no use for it"""
            outer = aten if split is None else split.joint.aten
            if outer.is_staged or outer.required:
                raise pickle.PicklingError("only the data tells its sizes")
            if any(spec.attribute is not None for spec in outer.inputs):
                raise pickle.PicklingError("it reads tensors of a module")
            constants = [*made.constants, *(x for one in made.derived for x in one.constants)]
            if sum(x.nbytes for x in constants) > _MOST_BYTES:
                raise pickle.PicklingError(f"its constants take more than {_MOST_BYTES} bytes")
            bound = None if split is None else copy.copy(split)
            if split is not None and bound is not None:  # as it binds a forward to its backwards
                bound.joint = joint = copy.copy(split.joint)
                shown = {x.position for x in outer.outputs if isinstance(x, Fresh)}
                shown |= {x.index for x in outer.outputs if isinstance(x, ViewOfOutput)}
                if not {*joint.tangents} <= shown | {k for _, k in joint.rebinds}:
                    what = "eager could not take the place of a backward that is not kept"
                    raise pickle.PicklingError(what)
                # what is known of the graphs goes where they do not
                joint.tangents_of = split.joint.tangents_of
                joint.generators = split.joint.generators
                bound.read, bound.without = split.read, None
            kernels = tuple((x.function, x.origin) for x in report.kernels)
            nothing: dict[str, Any] = {"name": "", "replays": None, "backward": None}
            prices = report.bill and report.bill._replace(singles={})
            plain = dataclasses.replace(report, kernels=[], stages_ms={}, bill=prices, **nothing)
            about = aten, results, bound, plain, kernels
            return KeptNative(target.device, target.settings(), made, *about)

        def take(made: CompiledAten) -> None:
            self.waiting.append((absent, partial(content, made)))
            if self.sidecar is not None:
                self.begin(self.sidecar)

        return take

    def begin(self, sidecar: Sidecar) -> None:
        """See fusee.runtime.cache.KeptGraph."""
        self.sidecar, rows, self.waiting = sidecar, self.waiting, []
        for absent, content in rows:
            out = io.BytesIO()
            try:
                if self.name is None:
                    raise pickle.PicklingError("an input is no plain tensor")
                _Pickler(out, protocol=5).dump(content())
                data = out.getvalue()
                if absent is None:
                    sidecar.put(self.name, data)
                    self.backwards = Sidecar(sidecar.cache, content_key(data))
                elif self.backwards is not None:
                    self.backwards.put(_without(self.name, absent), data)
            except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
                log.publish("cache", self.label, f"what was compiled is not kept: {error}")


def _without(name: str, absent: frozenset[int]) -> str:
    """The name of a backward's entry."""
    return f"{name} {sorted(absent)} {torch.are_deterministic_algorithms_enabled()}"


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, torch.Generator):
            raise pickle.PicklingError("it draws from a generator of the program's")
        if type(x) is AtenGraph:  # which is made again without its graph
            if (kind := x.kind) is None:
                raise pickle.PicklingError("its results are in containers")
            about = x.inputs, x.outputs, x.mutations, kind, x.symbols
            more: Any = {"no_autocast": x.no_autocast, "from_start": x.from_start}
            return partial(AtenGraph, **more), (fx.Graph(), {}, *about)
        if (defined := getattr(x, "defined", None)) and isinstance(x, types.FunctionType):
            return define, defined
        return (overload, (op_name(x),)) if isinstance(x, OpOverload) else NotImplemented


def begin(options: Options) -> None:
    """Let threads compile what every program needs while a graph is captured."""
    with contextlib.suppress(MissingPackage):  # the graph says so, if there is one
        prepare()


def resume(
    options: Mapping[str, object] | Options,
    sidecar: Sidecar,
    examples: Sequence[Any],
    graph: Unread,
) -> CompiledGraph | None:
    """What another process kept of a graph, as `Backend.resume`."""
    parsed = Options.parse(options)
    name = name_on_disk([repr(parsed)], examples, sidecar.is_open)
    if name is None or any(map(log.wants, _FORMS_SHOWN)):
        return None
    if (data := sidecar.get(name)) is None:
        return None
    with gc_paused():
        found = _taken_up(data, name_of(parsed), parsed)
        if found is None:
            return None
        kept, run, report = found
        if kept.split is None:
            call = bind(graph, kept.aten, run, report, count=kept.results)
        else:
            backwards = Sidecar(sidecar.cache, content_key(data))
            resumed = _ResumedSplit(backwards, name, graph, kept.split, report, parsed)
            if len(kept.split.joint.tangents) == 1 and resumed.part(frozenset()) is None:
                return None
            call = resumed.bound(run)
    remember(report)
    return CompiledGraph(call, report)


def _taken_up(
    data: bytes, name: str, options: Options
) -> tuple[KeptNative, Callable[..., Sequence[Any]], Report] | None:
    """An entry, what runs it and the report of that; None if it is of no use here."""
    kept: KeptNative = pickle.loads(data)
    target = target_at(kept.device)
    target.prepare()
    build = target.build(options)
    made, host = kept.made, kept.made.emitted.host
    if (kept.settings, made.salt) != (target.settings(), build.salt()):
        return None  # another kind of machine shares the folder
    report = dataclasses.replace(kept.report, name=name)
    report.notes.append("another process compiled it: it was not traced")
    with report.timed("resume"):
        for text in host.functions.values():
            build.add(text)
        loaded = target.load(
            made.emitted, build, tensors_kept(made.derived, made.constants), options
        )
        run = loaded.run
        if kept.split is not None:
            run = returning(kept.aten, run, spread=False, count=kept.results)
    report.replays = loaded.replays
    show = partial(str, "another process wrote it; FUSEE_KEEP_CAPTURES=0 compiles it anew")
    report.kernels += [KernelRow(*row, show, loaded.uses) for row in kept.kernels]
    with log.graph(name):
        log.publish("host", "", host.source)
        log.publish("time", "", str(report.stages_ms))
        log.publish("kernels", "", lambda: str(report))
    return kept, run, report


class _ResumedSplit:
    """A forward that another process compiled, and its backwards as they are asked for.

    Where one is not there, eager differentiates the graph, and the next call has it compiled.
    """

    def __init__(
        self,
        backwards: Sidecar,
        name: str,
        graph: Unread,
        split: Split,
        report: Report,
        options: Options,
    ) -> None:
        self.backwards, self.name, self.graph, self.options = backwards, name, graph, options
        self.report, self.is_lacking = report, False
        self.compiled: Callable[..., Any] | None = None
        self.part = functools.cache(self._part)
        self.split, split.without = split, self._without

    def _part(self, absent: frozenset[int]) -> tuple[KeptNative, Run, Report] | None:
        if (data := self.backwards.get(_without(self.name, absent))) is None:
            return None
        with gc_paused():
            return _taken_up(data, f"{self.report.name}.backward", self.options)

    def _without(self, absent: frozenset[int]) -> Split:
        found = self.part(absent)
        own = None if found is None else found[0].split
        if own is None:
            own = copy.copy(self.split)  # with what is known of the graphs
            own.absent = absent
        return own

    def _backward(self, of: Split) -> Run | None:
        found = self.part(of.absent)
        if found is None:
            self.is_lacking = True
            return None
        self.report.backward = found[2]
        return found[1]

    def bound(self, forward: Run) -> Callable[..., Any]:
        """The callable that takes the graph's inputs."""
        call = bind_split(self.graph, self.split, forward, self._backward, self.report)
        if len(self.split.joint.tangents) < 2:
            return call

        def served(*inputs: Any) -> Any:
            if self.is_lacking and self.compiled is None:
                self.compiled = self.graph.recompile(inputs)
            return (self.compiled or call)(*inputs)

        return served
