"""The backend "fusee": our compiler. Read `compile_native` and `compile_aten` first.

A graph goes down as a value, each step taking a form and giving the next:

    trace    fx graph of torch calls   -> functional fx graph of ATen ops     fusee.aten
    weights  what depends on parameters alone is split off, packed, folded    fusee.aten.weights
    lower    ATen ops                  -> loops and calls to ATen             fusee.loops.lower
    fuse     loops                     -> kernels                             fusee.loops.fusion
    memory   intermediates             -> places in one arena                 fusee.loops.memory
    emit     kernels                   -> LLVM IR -> machine code             fusee.targets
    host     all of it                 -> one Python function                 fusee.targets

A graph that is differentiated becomes two (autodiff/partition.py), and each goes down by itself.
What this is not made for, such as other devices, runs eagerly: decided here, before anything runs,
with the reason in the report and one warning.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import itertools
import operator
import pickle
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, fx

from fusee import log
from fusee.aten import (
    WHOLE,
    AtenGraph,
    Fresh,
    InputSpec,
    ViewOfOutput,
    inverse,
    must_run,
    returning,
)
from fusee.aten.attention import lacks_heads
from fusee.aten.canonicalize import Table
from fusee.aten.control_flow import COMPILERS
from fusee.aten.rewriter import edited
from fusee.aten.torch_api import OpOverload
from fusee.aten.trace import trace
from fusee.aten.weights import Derived, run_passes
from fusee.autodiff import Split
from fusee.autodiff.autograd_function import Run
from fusee.autodiff.bill import bill
from fusee.autodiff.partition import describe, differentiate, partition
from fusee.backends.aot_autograd import (
    Staged,
    bind,
    bind_split,
    is_differentiated,
    left_to_eager,
)
from fusee.backends.report import (
    CompiledGraph,
    ExternRow,
    KernelRow,
    Report,
    captured_source,
    first_line,
    remember,
)
from fusee.backends.resume import name_on_disk
from fusee.codegen import HostArguments
from fusee.config import Options
from fusee.errors import InputError, MissingFake, MissingPackage, TraceError
from fusee.loops import Buffer, Extern, Kernel, LoopGraph, contiguous
from fusee.loops.checker import (
    check_graph,
    check_plan,
    check_schedule,
    show_kernel,
    show_schedule,
    show_step,
)
from fusee.loops.fusion import fuse
from fusee.loops.lower import GraphLowering, supported
from fusee.loops.memory import Plan, plan_memory, show_plan
from fusee.runtime import change_detection, gc_paused
from fusee.runtime.cache import GRADIENTS, KEPT, Sidecar, Unread, content_key
from fusee.runtime.change_detection import DerivedSet, Fixed, why_not_derivable
from fusee.runtime.jit import prepare
from fusee.source import define
from fusee.targets import Emitted, Kept, Loaded, Target
from fusee.targets.cpu import CPU

_CPU = CPU()
# Device -> what graphs are compiled for there, or the module that has it as TARGET: it is imported
# when a tensor is on such a device.
TARGETS: dict[str, Target | str] = {"cpu": _CPU, "cuda": "fusee.targets.cuda"}

_numbers = itertools.count()

# ---------------------------------------------------------------------------- steps

# In training what one half is done with is what the other saves: larger intermediates than this are
# tensors of their own, given back after their last reader as eager does.
_LARGE_BYTES = 2**17


def _weights(
    aten: AtenGraph, example_inputs: Sequence[Any], target: Target, options: Options, report: Report
) -> tuple[Derived, ...]:
    specs = []
    for spec in aten.inputs:
        reason = None
        if spec.is_static and spec.attribute is None:
            reason = why_not_derivable(example_inputs[spec.index])
        if reason is not None:
            report.notes.append(f"nothing is derived from {spec.name}: {reason}")
            spec = dataclasses.replace(spec, is_static=False)
        specs.append(spec)
    aten.inputs = tuple(specs)
    derived, notes = run_passes(aten, options, target.passes(options))
    report.passes += notes
    log.publish("passes", "", lambda: "\n".join([*notes, "", str(aten)]))
    log.publish("weights", "", lambda: "\n".join(map(str, derived)))
    return derived


def _lower(aten: AtenGraph, count: int, target: Target, report: Report) -> LoopGraph:
    """The first `count` inputs are the caller's."""
    inputs = [
        Buffer(
            spec.name,
            spec.dtype,
            spec.size,
            # packed weights have no strides; the calls that they go to take them whole
            spec.stride or contiguous(spec.size),
            "input" if spec.index < count else "derived",
        )
        for spec in aten.inputs
        if spec.dtype is not None
    ]
    loops = GraphLowering(
        aten.graph,
        inputs,
        profile=target.profile,
        constants=aten.constants,
        size_of=aten.to_size,
        extern_of=target.call_of,
        must_run=must_run,
        writes={mutation.position: mutation.index for mutation in aten.mutations},
        home=target.device,
    ).run()
    report.notes += loops.notes
    return loops


def _refuse(name: str, inputs: Sequence[Any]) -> None:
    """Inputs to be differentiated, of a graph that was compiled where none were.

    What captures a graph looks at that; its callers may not.
    """
    for k, x in enumerate(inputs):
        if isinstance(x, Tensor) and x.requires_grad:
            raise InputError(
                f"input {k} of {name} requires grad, and those that it was compiled for did not:"
                " its results would have no gradients",
                did="nothing was run",
                remedy="compile it for inputs like these, or call it under torch.no_grad()",
            )


def _kept(derived: Sequence[Derived], constants: Sequence[Tensor]) -> Kept:
    if not any(one.sources for one in derived):
        return Fixed((*(x for one in derived for x in one.compute(())), *constants))
    order = inverse([place for one in derived for place in one.targets])
    computed = [change_detection.Derivation(one.sources, one.compute) for one in derived]
    return DerivedSet(computed, lambda found: (*(found[k] for k in order), *constants))


def _arguments(
    aten: AtenGraph, given: Sequence[InputSpec], loops: LoopGraph, **how: Any
) -> HostArguments:
    named = {b.name: b for b in loops.inputs if isinstance(b, Buffer) and b.role == "input"}
    return HostArguments(
        [named.get(spec.name) for spec in given],
        {symbol: (source.index, source.axis) for symbol, source in aten.symbols.items()},
        brought=[k for k, x in enumerate(aten.placeholders[: len(given)]) if "brought" in x.meta],
        **how,
    )


# ---------------------------------------------------------------------------- the way down

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What verifies the form that a step gives, and the artefact that shows it.
_FORMS: dict[str, tuple[Callable[[Any], None], str, Callable[[Any], str]]] = {
    "lower": (check_graph, "loops", lambda loops: "\n\n".join(map(show_step, loops.steps))),
    "fuse": (check_schedule, "fusion", show_schedule),
    "memory": (check_plan, "memory", show_plan),
}


def compile_aten(
    aten: AtenGraph,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report,
    *,
    target: Target = _CPU,
    saved: Sequence[int] | None = None,
    saves: int | None = None,
    gradients: Sequence[int] = (),
    large_bytes: int | None = None,
    plain: bool = False,
    keep: Callable[[CompiledAten], None] | None = None,
) -> Run:
    """Compile a traced graph that reads no module, and change it: a function of a list of inputs.

    example_inputs   one per InputSpec; only those that are static are looked at
    report           receives the kernels, and the time of each stage on top of what it has
    saved            of a backward: the inputs that its forward made for it alone. The list is
                     emptied: each input is let go as soon as nothing reads it any more
    saves            of a forward: results from this one on are saved for a backward
    gradients        results that become gradients of leaves
    large_bytes      larger intermediates are no part of the arena, which is kept between calls
    keep             is given what another process can run it from
    plain            it takes inputs as arguments, none to be differentiated; results as they are
    raises           as compile_native
    """

    def step(name: str, take: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with report.timed(name):
            form = take(*args, **kwargs)
        if name in _FORMS:
            check, artefact, show = _FORMS[name]
            log.publish(artefact, "", partial(show, form))
            if options.check or getattr(form, "elsewhere", None):  # where a fault would be a crash
                step("check", check, form)
        return form

    target.prepare()
    refuse = partial(_refuse, report.name) if plain else None
    if aten.is_staged:
        if aten.required:  # which checks by example know nothing of
            options = dataclasses.replace(options, check=False)
        given: Any = {"options": options, "report": report, "target": target}
        part = partial(compile_aten, **given, large_bytes=large_bytes)
        body = Staged(aten, part, example_inputs).function(refuse)
        return body if plain else returning(aten, lambda inputs: body(*inputs), spread=False)
    count = len(aten.inputs)  # of the caller's; the derived ones follow
    with gc_paused():
        derived = step("weights", _weights, aten, example_inputs, target, options, report)
        loops = step("lower", _lower, aten, count, target, report)
        read = (b for b in loops.inputs if isinstance(b, Buffer) and b.role == "constant")
        tensors = derived, tuple(aten.constants[b.name] for b in read)
        how: Any = {"saved": saved, "saves": saves, "spread": plain, "refuse": refuse}
        how.update(gradients=gradients, followed=any(one.sources for one in derived))
        arguments = _arguments(aten, aten.inputs[:count], loops, **how)
        schedule = step("fuse", fuse, loops, merge=options.fuse)
        plan = step("memory", plan_memory, schedule, large_bytes)
        run = _emit(plan, arguments, tensors, target, options, report, keep)
    return run if plain else returning(aten, run, spread=False)


def _emit(
    plan: Plan,
    arguments: HostArguments,
    tensors: tuple[tuple[Derived, ...], tuple[Tensor, ...]],
    target: Target,
    options: Options,
    report: Report,
    keep: Callable[[CompiledAten], None] | None,
) -> Callable[..., Sequence[Any]]:
    """The last steps.

    tensors   that are kept between calls: how weights are derived, and constants
    """
    build = target.build(options)
    emitted, functions = target.emit(plan, arguments, build, options, report.timed)
    loaded = target.load(emitted, build, _kept(*tensors), options)
    _fill_report(report, plan, functions, loaded)
    if keep is not None:
        keep(CompiledAten(build.salt(), emitted, *tensors))
    return loaded.run


def begin(options: Options) -> None:
    """Let threads compile what every program needs while a graph is captured."""
    with contextlib.suppress(MissingPackage):  # the graph says so, if there is one
        prepare()


def compile_native(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object] | Options
) -> CompiledGraph:
    """Compile a captured graph for the machine where its tensors are.

    raises   OptionError; MissingPackage without llvmlite; MissingFake for an operator without meta
    """
    parsed = Options.parse(options)
    report = Report(parsed.name or f"graph_{next(_numbers)}")
    kept = _Keeping(gm, example_inputs, parsed, report)
    with log.graph(report.name):
        log.publish("graph", "", partial(captured_source, gm))
        try:
            target = _target_of(gm, example_inputs)
            report.where = first_line(gm)
            target.prepare()
            if is_differentiated(gm, example_inputs):
                split = split_native(gm, example_inputs, parsed, report, target)
                parsed = _for_training(parsed)
                halves = split.forward, split.backward
                if _costs_less(split.joint.aten, halves, parsed, target, report):
                    return _as_captured(gm, report)
                how: Any = {"saves": split.joint.forward_results, "large_bytes": _LARGE_BYTES}
                how["gradients"] = _gradients(gm, split.joint.aten)
                aten = split.forward
                how["keep"] = kept.of(aten, target, report, split)
                forward = compile_aten(aten, example_inputs, parsed, report, target=target, **how)
                call = bind_native(gm, split, forward, parsed, report, target, kept)
            else:
                keep = (supported() | WHOLE).__contains__
                with report.timed("trace"), gc_paused():
                    aten = trace(gm, example_inputs, keep=keep)
                log.publish("aten", "", partial(str, aten))
                if _costs_less(aten, (aten,), parsed, target, report):
                    return _as_captured(gm, report)
                given: Any = {"target": target, "plain": True}
                given["keep"] = kept.of(aten, target, report)
                run = compile_aten(aten, example_inputs, parsed, report, **given)
                call = bind(gm, aten, run, report)
            log.publish("time", "", str(report.stages_ms))
            log.publish("kernels", "", lambda: str(report))
            remember(report)
            found = CompiledGraph(call, report)
            found.kept = kept.begin if kept.is_asked else None
            return found
        except MissingFake:
            raise
        except TraceError as error:
            return left_to_eager(gm, example_inputs, report, error)


def _gradients(gm: fx.GraphModule, aten: AtenGraph) -> list[int]:
    """The results that become gradients of leaves."""
    marked = gm.graph.output_node().meta.get(GRADIENTS, ())
    return [x.position for k in marked if isinstance(x := aten.outputs[k], Fresh)]


# Sizes that are open count as these times the first call's: a graph runs as it was captured where
# that costs less at all of them.
_TIMES = (1, 1 / 64, 64)


def _costs_less(
    aten: AtenGraph, halves: Sequence[AtenGraph], options: Options, target: Target, report: Report
) -> bool:
    """Whether the calls of a graph as it was captured cost less than what it is compiled as."""
    if aten.is_staged:
        return False
    bills = [
        bill(aten, halves, supported(), target.prices, times)
        for times in (_TIMES if aten.symbols else _TIMES[:1])
    ]
    report.bill = bills[0]
    static = {x for x, spec in zip(halves[0].placeholders, halves[0].inputs) if spec.is_static}
    if not options.derive_weights:
        static = set()
    nodes = [x for x in aten.graph.nodes if x.op == "call_function"]
    better = (lacks_heads(x) or "improved" in x.meta or target.improves(x, static) for x in nodes)
    if not options.prices or any(better):
        return False
    if any(getattr(x.target, "namespace", "") == "fusee" for x in nodes):
        return False  # loops and branches: torch 2.11's own gradient of `scan` is wrong
    if options.memory_budget < 1 or any("recompute" in x.meta for x in nodes):
        return False  # eager would save more than was asked for
    if not all(found.is_captured for found in bills):
        for x, pair in bills[0].singles.items() if not aten.symbols else ():
            call, loop = (price / target.prices.unit for price in pair)
            x.meta["called"] = f"costs {call:.1f} us as a call, {loop:.1f} as a loop"
        return False
    report.notes.append(
        "runs as captured: by the target's prices its calls cost no more than kernels"
    )
    remember(report)
    return True


def _as_captured(gm: fx.GraphModule, report: Report) -> CompiledGraph:
    found = CompiledGraph(gm.forward, report)
    found.is_captured = True
    return found


COMPILERS.append(lambda graph, inputs: compile_native(graph, inputs, {}))


def _for_training(options: Options) -> Options:
    """Saved values lie as eager's: a forward in another layout would copy each of them."""
    return dataclasses.replace(options, channels_last=False)


def split_native(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report,
    target: Target = _CPU,
    keeps: Callable[[OpOverload], bool] = lambda op: False,
    decompositions: Table | None = None,
) -> Split:
    """The graph with its gradients, as two graphs of operators that we compile.

    keeps            operators that are kept whole besides ours
    decompositions   of operators that are not kept, ours or not
    raises           TraceError for an operator without a form, before anything has run
    """
    known = supported().union(WHOLE).difference(decompositions or ())
    passes = target.joint_passes(options)
    edit = partial(edited, options=options, passes=passes, notes=report.notes) if passes else None
    budget, prices = options.memory_budget, target.prices
    with gc_paused():
        split = differentiate(
            gm,
            example_inputs,
            halved=partial(partition, budget=budget, prices=prices),
            edit=edit,
            timed=report.timed,
            keep=lambda op: op in known or keeps(op),
            decompositions=decompositions,
        )
    report.notes += split.joint.notes
    if split.joint.tangents:
        report.notes.append(describe(split))
    return split


def bind_native(
    gm: fx.GraphModule,
    split: Split,
    forward: Run,
    options: Options,
    report: Report,
    target: Target = _CPU,
    kept: _Keeping | None = None,
) -> Callable[..., Any]:
    """The callable that takes the graph's inputs, given what runs its forward: ours or another's.

    The backward is compiled by us, when it is known which results the loss came through.
    """

    made = split.joint.forward_results
    own = [k for k, (kind, at) in enumerate(split.saved) if kind == "result" and at >= made]

    def backward(of: Split) -> Run:
        graph = of.backward
        report.backward = Report(f"{report.name}.backward")
        given = _for_training(options)
        if split.joint.aten.required:  # which checks by example know nothing of
            given = dataclasses.replace(given, check=False)
        with log.graph(report.name):  # with several results this is at the first backward
            return compile_aten(
                graph,
                (),
                given,
                report.backward,
                target=target,
                saved=own,
                gradients=range(len(graph.results)),
                large_bytes=_LARGE_BYTES,
                keep=None if kept is None else kept.of(graph, target, report.backward, of),
            )

    return bind_split(gm, split, forward, backward, report)


def _target_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Target:
    """The target of the device where the tensors are: with several devices, not the CPU.

    raises   TraceError if there is none
    """
    tensors = [*example_inputs, *(node.meta.get("example_value") for node in gm.graph.nodes)]
    found = dict.fromkeys(x.device for x in tensors if isinstance(x, Tensor))
    unknown = [device for device in found if device.type not in TARGETS]
    if unknown:
        names = ", ".join(sorted(TARGETS)).upper()
        what = f"a tensor is on {unknown[0]}, and code is generated for the {names} only"
        raise TraceError(what)
    cpu = torch.device("cpu")
    return _target_at(next((x for x in found if x != cpu), cpu))


def _target_at(device: torch.device) -> Target:
    target = TARGETS[device.type]
    if isinstance(target, str):
        target = TARGETS[device.type] = importlib.import_module(target).TARGET
    return target.at(device)


def _fill_report(
    report: Report, plan: Plan, functions: Mapping[Kernel, str], loaded: Loaded
) -> None:
    report.replays = loaded.replays
    firsts: dict[str, Kernel] = {}  # one loop nest per function
    for item in plan.schedule.items:
        if isinstance(item, Extern):
            report.externs.append(ExternRow(item.name, item.reason, item.origin))
        else:
            name = functions[item]
            show = partial(show_kernel, firsts.setdefault(name, item))
            report.kernels.append(KernelRow(name, item.origin, show, loaded.uses))
    report.arena_bytes = plan.total_bytes if isinstance(plan.total_bytes, int) else None


# ---------------------------------------------------------------------------- kept
# What a later process runs without the graph: one that nobody differentiates, or a forward; and
# each of its backwards, once it is compiled. Each is an entry of its own; a backward's belongs to
# the very forward that it was compiled for, since of two processes each may save other values.


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


class _Keeping:
    """Takes down what becomes of a captured graph, as it comes."""

    def __init__(
        self, gm: fx.GraphModule, examples: Sequence[Any], options: Options, report: Report
    ) -> None:
        self.is_asked, self.label = options.cache and KEPT in gm.meta, report.name
        told = [repr(options)] if self.is_asked else []
        self.name = name_on_disk(told, examples, gm.meta.get(KEPT, False))
        self.waiting: list[tuple[frozenset[int] | None, Callable[[], KeptNative]]] = []
        self.sidecar: Sidecar | None = None
        self.backwards: Sidecar | None = None

    def of(
        self, aten: AtenGraph, target: Target, report: Report, split: Split | None = None
    ) -> Callable[[CompiledAten], None] | None:
        """What takes down what becomes of a graph, which compiling changes."""
        if not self.is_asked:
            return None
        absent = split.absent if split is not None and aten is split.backward else None
        about = dataclasses.replace(aten), len(aten.results), split, target, report

        def take(made: CompiledAten) -> None:
            self.waiting.append((absent, partial(_content, made, *about)))
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


def _content(
    made: CompiledAten,
    aten: AtenGraph,
    results: int,
    split: Split | None,
    target: Target,
    report: Report,
) -> KeptNative:
    """raises   PicklingError where another process has no use for it"""
    outer = aten if split is None else split.joint.aten
    if outer.is_staged or outer.required:
        raise pickle.PicklingError("only the data tells its sizes")
    if any(spec.attribute is not None for spec in outer.inputs):
        raise pickle.PicklingError("it reads tensors of a module")
    constants = [*made.constants, *(x for one in made.derived for x in one.constants)]
    if sum(x.nbytes for x in constants) > _MOST_BYTES:
        raise pickle.PicklingError(f"its constants take more than {_MOST_BYTES} bytes")
    kernels = tuple((x.function, x.origin) for x in report.kernels)
    nothing: dict[str, Any] = {"name": "", "replays": None, "backward": None}
    prices = report.bill and report.bill._replace(singles={})
    plain = dataclasses.replace(report, kernels=[], stages_ms={}, bill=prices, **nothing)
    about = aten, results, split and _outline(split), plain, kernels
    return KeptNative(target.device, target.settings(), made, *about)


def _outline(split: Split) -> Split:
    """What binds a forward to its backwards. raises PicklingError"""
    joint, made = copy.copy(split.joint), copy.copy(split)
    shown = {x.position for x in joint.aten.outputs if isinstance(x, Fresh)}
    shown |= {x.index for x in joint.aten.outputs if isinstance(x, ViewOfOutput)}
    if not {*joint.tangents} <= shown | {position for _, position in joint.rebinds}:
        raise pickle.PicklingError("eager could not take the place of a backward that is not kept")
    # what is known of the graphs goes where they do not
    joint.tangents_of, joint.generators = split.joint.tangents_of, split.joint.generators
    made.read, made.joint, made.without = split.read, joint, None
    return made


def _graph_outline(aten: AtenGraph) -> Any:
    """How an AtenGraph is made again without its graph, for pickle."""
    kind = aten.kind
    if kind is None:
        raise pickle.PicklingError("its results are in containers")
    about = aten.inputs, aten.outputs, aten.mutations, kind, aten.symbols
    more: Any = {"no_autocast": aten.no_autocast, "from_start": aten.from_start}
    return partial(AtenGraph, **more), (fx.Graph(), {}, *about)


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, torch.Generator):
            raise pickle.PicklingError("it draws from a generator of the program's")
        if type(x) is AtenGraph:
            return _graph_outline(x)
        if (defined := getattr(x, "defined", None)) and isinstance(x, types.FunctionType):
            return define, defined
        return (_overload, (str(x),)) if isinstance(x, OpOverload) else NotImplemented


def _overload(name: str) -> OpOverload:
    """Of a name such as aten.mm.default."""
    found: OpOverload = operator.attrgetter(name)(torch.ops)
    return found


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
        found = _taken_up(data, parsed.name or f"graph_{next(_numbers)}", parsed)
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
    target = _target_at(kept.device)
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
        loaded = target.load(made.emitted, build, _kept(made.derived, made.constants), options)
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
