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

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, fx

from fusee import log
from fusee.aten import (
    WHOLE,
    AtenGraph,
    Fresh,
    InputSpec,
    must_run,
    returning,
)
from fusee.aten.attention import lacks_heads
from fusee.aten.canonicalize import Table
from fusee.aten.control_flow import COMPILERS
from fusee.aten.rewriter import Pass, edited
from fusee.aten.torch_api import OpOverload
from fusee.aten.trace import trace
from fusee.aten.weights import Derived, run_passes
from fusee.autodiff import Split
from fusee.autodiff.autograd_function import Run
from fusee.autodiff.bill import bill
from fusee.autodiff.partition import describe, differentiate, partition
from fusee.backends.aot_autograd import (
    bind,
    bind_split,
    is_differentiated,
    left_to_eager,
    staged,
)
from fusee.backends.kept import CompiledAten, Keeping, name_of, tensors_kept
from fusee.backends.report import (
    REFUSES,
    CompiledGraph,
    ExternRow,
    KernelRow,
    Report,
    captured_source,
    first_line,
    remember,
)
from fusee.codegen import HostArguments
from fusee.config import Options
from fusee.errors import InputError, MissingFake, TraceError
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
from fusee.runtime import gc_paused
from fusee.runtime.cache import GRADIENTS, KEPT
from fusee.runtime.change_detection import why_not_derivable
from fusee.targets import TARGETS, Target, target_at
from fusee.targets.cpu import TARGET as CPU

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
    target: Target = CPU,
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
        body = staged(aten, part, example_inputs, refuse)
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
    loaded = target.load(emitted, build, tensors_kept(*tensors), options)
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
    if keep is not None:
        keep(CompiledAten(build.salt(), emitted, *tensors))
    return loaded.run


def compile_native(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object] | Options
) -> CompiledGraph:
    """Compile a captured graph for the machine where its tensors are.

    raises   OptionError; MissingPackage without llvmlite; MissingFake for an operator without meta
    """
    parsed = Options.parse(options)
    report = Report(name_of(parsed))
    is_open = gm.meta.get(KEPT) if parsed.cache else None
    kept = None if is_open is None else Keeping(is_open, example_inputs, parsed, report)
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
                marked, outputs = gm.graph.output_node().meta, split.joint.aten.outputs
                of_leaves = [outputs[k] for k in marked.get(GRADIENTS, ())]
                how["gradients"] = [x.position for x in of_leaves if isinstance(x, Fresh)]
                aten = split.forward
                how["keep"] = kept and kept.of(aten, target, report, split)
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
                given["keep"] = kept and kept.of(aten, target, report)
                run = compile_aten(aten, example_inputs, parsed, report, **given)
                call = bind(gm, aten, run, report)
            log.publish("time", "", str(report.stages_ms))
            log.publish("kernels", "", lambda: str(report))
            remember(report)
            found = CompiledGraph(call, report)
            found.kept = None if kept is None else kept.begin
            return found
        except TraceError as error:
            if isinstance(error, MissingFake) or REFUSES in gm.meta:
                raise
            again = partial(compile_native, options=parsed)
            return left_to_eager(gm, example_inputs, report, error, again)


# Sizes that are open count as these times the first call's: a graph runs as it was captured where
# that costs less at all of them.
_TIMES = (1, 1 / 64, 64)


def _costs_less(
    aten: AtenGraph, halves: Sequence[AtenGraph], options: Options, target: Target, report: Report
) -> bool:
    """Whether the calls of a graph as it was captured cost less than what it is compiled as."""
    if aten.is_staged:
        return False
    given = zip(halves[0].placeholders, halves[0].inputs) if options.derive_weights else ()
    static = {x for x, spec in given if spec.is_static}
    nodes = [x for x in aten.graph.nodes if x.op == "call_function"]
    better = (lacks_heads(x) or "improved" in x.meta or target.improves(x, static) for x in nodes)
    if any(better):
        return False
    if any(getattr(x.target, "namespace", "") == "fusee" for x in nodes):
        return False  # loops and branches: torch 2.11's own gradient of `scan` is wrong
    if options.memory_budget < 1 or any("recompute" in x.meta for x in nodes):
        return False  # eager would save more than was asked for
    times = _TIMES if aten.symbols else _TIMES[:1]
    bills = [bill(aten, halves, supported(), target.prices, n) for n in times]
    report.bill = bills[0]
    if not (options.prices and all(found.is_captured for found in bills)):
        for x, pair in bills[0].singles.items() if options.prices and not aten.symbols else ():
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
    target: Target = CPU,
    keeps: Callable[[OpOverload], bool] = lambda op: False,
    decompositions: Table | None = None,
    more: Sequence[Pass] = (),
) -> Split:
    """The graph with its gradients, as two graphs of operators that we compile.

    keeps            operators that are kept whole besides ours
    decompositions   of operators that are not kept, ours or not
    more             what else rewrites it before it is known what is saved
    raises           TraceError for an operator without a form, before anything has run
    """
    known = supported().union(WHOLE).difference(decompositions or ())
    passes = (*target.joint_passes(options), *more)
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
    target: Target = CPU,
    kept: Keeping | None = None,
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
    return target_at(next((x for x in found if x != cpu), cpu))
