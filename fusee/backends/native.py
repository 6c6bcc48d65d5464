"""The backend "fusee": our compiler. The pipeline is the list PIPELINE; read this file first.

A graph goes down as a Compilation, each step adding its result:

    trace    fx graph of torch calls   -> functional fx graph of ATen ops     fusee.aten
    weights  what depends on parameters alone is split off, packed, folded    fusee.aten.passes
    lower    ATen ops                  -> loops and calls to ATen             fusee.loops.lower
    fuse     loops                     -> kernels                             fusee.loops.fusion
    memory   intermediates             -> places in one arena                 fusee.loops.memory
    emit     kernels                   -> LLVM IR -> machine code             fusee.codegen.llvm
    host     all of it                 -> one Python function                 fusee.codegen.host

A graph that is differentiated goes down as two (runtime_wrapper.py). What this is not made for,
such as other devices, runs eagerly:
decided here, before anything runs, with the reason in the report and one warning.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fusee import log
from fusee.aten import control_flow
from fusee.aten.canonicalize import Table
from fusee.aten.externs import WHOLE, ExternSpec, extern_of
from fusee.aten.graph import AtenGraph, must_run
from fusee.aten.passes import Derived, run_passes
from fusee.aten.passes.weights import parts
from fusee.aten.torch_api import OpOverload
from fusee.aten.trace import trace
from fusee.autodiff.joint import Joint, Split
from fusee.autodiff.joint_passes import REDRAWN
from fusee.autodiff.partition import partition
from fusee.autodiff.trace import trace_joint
from fusee.backends.graph_cache import captured_source
from fusee.backends.report import CompiledGraph, ExternRow, KernelRow, Report, first_line, remember
from fusee.backends.runtime_wrapper import (
    Finish,
    Half,
    apart,
    describe,
    finishing,
    from_start,
    is_differentiated,
    train,
)
from fusee.codegen.host import Arguments, HostCode, emit_host
from fusee.codegen.llvm.kernel import KernelCode, emit_kernel
from fusee.codegen.llvm.types import Machine
from fusee.config import Options
from fusee.errors import FuseeWarning, MissingFake, TraceError, warn
from fusee.loops.check import check_graph, check_plan, check_schedule
from fusee.loops.fusion import Schedule, fuse
from fusee.loops.ir import Buffer, Extern, Kernel, LoopGraph, Message, show_kernel, show_step
from fusee.loops.lower.graph import InputLayout, lower
from fusee.loops.lower.tensor import contiguous, supported
from fusee.loops.memory import (
    Plan,
    plan_memory,
    reuse_operands,
    show_plan,
    take_out_large,
    take_out_shared,
)
from fusee.loops.schedule import form
from fusee.runtime import collector, jit, random, weights
from fusee.runtime.jit import Build, Function, prepare
from fusee.runtime.launch import Frame, Program, runner
from fusee.runtime.weights import why_not_derivable

# ---------------------------------------------------------------------------- call
# The callable of a compiled graph: the host function, bound to what it runs with.
#
# It gives the host function its inputs and kept tensors (derived weights, constants).


def bind_call(
    gm: fx.GraphModule,
    aten: AtenGraph,
    derived: Derived | None,
    loops: LoopGraph,
    host: HostCode,
    functions: Sequence[Function],
    threads: int,
    *,
    consumes: bool = False,
) -> Callable[..., Any]:
    """The callable that takes the graph's inputs; in a list, which it empties, if it `consumes`.

    raises (when called)   as eager does for an index outside of its dimension, a divisor of zero
    """
    program = Program(functions, host.layout)
    names: dict[str, Any] = {
        **host.names,
        "checkout": program.checkout,
        "checkin": program.checkin,
        "run": runner(),
        "threads": (lambda: threads) if threads else torch.get_num_threads,
        "kept": _kept(aten, derived, loops),
        "fail": _failing(loops.messages),
    }
    exec(compile(host.source, "<fusee host>", "exec"), names)
    call: Callable[[Sequence[Any]], tuple[Any, ...]] = names["call"]
    finish = finishing(aten)
    if consumes:
        return call if finish is None else lambda inputs: finish((*inputs,), call(inputs))
    if any(spec.attribute is not None for spec in aten.inputs):
        return _with_attributes(gm, aten, call, finish)
    if finish is None:
        return lambda *inputs: call(inputs)
    return lambda *inputs: finish(inputs, call(inputs))


def _with_attributes(
    gm: fx.GraphModule, aten: AtenGraph, call: Callable[..., Any], finish: Finish | None
) -> Callable[..., Any]:
    """Tensors that the captured module holds itself follow the caller's."""

    def with_attributes(*inputs: Any) -> Any:
        everything = (*inputs, *aten.attributes(gm))
        results = call(everything)
        return results if finish is None else finish(everything, results)

    return with_attributes


Kept = tuple[int, tuple[Tensor, ...]]


def _kept(
    aten: AtenGraph, derived: Derived | None, loops: LoopGraph
) -> Callable[[tuple[Any, ...]], Kept]:
    """A function of the inputs: a version, and the tensors that are kept between calls."""
    constants = tuple(
        aten.constants[b.name]
        for b in loops.inputs
        if isinstance(b, Buffer) and b.role == "constant"
    )
    if derived is None or not derived.sources:
        fixed = () if derived is None else derived.compute(())
        always: Kept = (1, fixed + constants)
        return lambda inputs: always
    split = parts(derived)
    known = weights.DerivedSet([weights.Derived(one.sources, one.compute) for _, one in split])
    places = [place for positions, _ in split for place in positions]
    order = sorted(range(len(places)), key=places.__getitem__)
    latest: tuple[weights.Snapshot | None, Kept] = (None, (0, ()))

    def kept(inputs: tuple[Any, ...]) -> Kept:
        nonlocal latest
        snapshot = known.current(inputs)
        of, found = latest  # one object, so that another thread's is whole
        if of is not snapshot:
            found = snapshot.version, tuple(snapshot.tensors[k] for k in order) + constants
            latest = snapshot, found
        return found

    return kept


def _failing(messages: Sequence[Message]) -> Callable[[int, Frame], None]:
    def fail(status: int, frame: Frame) -> None:
        kind, text = messages[status - 1]
        raise kind(text.format(frame.value))

    return fail


# ---------------------------------------------------------------------------- native


_numbers = itertools.count()

# In training what one half is done with is what the other saves: larger intermediates than this are
# tensors of their own, given back after their last reader as eager does.
_LARGE_BYTES = 2**17


class Compilation:
    """One graph on its way down. Each step of the pipeline sets the fields it is named for."""

    aten: AtenGraph
    derived: Derived | None
    loops: LoopGraph
    schedule: Schedule
    plan: Plan
    codes: dict[Kernel, KernelCode]
    functions: dict[str, Function]
    host: HostCode

    def __init__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report
    ) -> None:
        self.gm, self.example_inputs = gm, example_inputs
        self.options, self.report = options, report
        self.consumes = False
        self.large_bytes: int | None = None


def _trace(c: Compilation) -> None:
    keep = (supported() | WHOLE).__contains__
    c.aten = trace(c.gm, c.example_inputs, keep=keep, overlapping=True)
    log.publish("aten", "", lambda: str(c.aten))


def _weights(c: Compilation) -> None:
    specs = []
    for spec in c.aten.inputs:
        reason = None
        if spec.is_static and spec.attribute is None:
            reason = why_not_derivable(c.example_inputs[spec.index])
        if reason is not None:
            c.report.notes.append(f"nothing is derived from {spec.name}: {reason}")
            spec = dataclasses.replace(spec, is_static=False)
        specs.append(spec)
    c.aten.inputs = tuple(specs)
    c.derived, notes = run_passes(c.aten, c.options)
    c.report.passes += notes
    log.publish("passes", "", lambda: "\n".join([*notes, "", str(c.aten)]))
    log.publish("weights", "", lambda: str(c.derived))


# Calls that are machine code of ours.
_OWN = {
    torch.ops.aten.bernoulli.p: ExternSpec(torch.bernoulli, random.bernoulli),
    REDRAWN: ExternSpec(random.redrawn),
}


def _call_of(op: OpOverload) -> ExternSpec | None:
    return _OWN.get(op) or extern_of(op)


def _lower(c: Compilation) -> None:
    targets = c.derived.targets if c.derived is not None else ()
    inputs = [
        InputLayout(
            spec.name,
            spec.dtype,
            spec.size,
            # packed weights have no strides; the calls that they go to take them whole
            spec.stride or contiguous(spec.size),
            "derived" if spec.index in targets else "input",
        )
        for spec in c.aten.inputs
        if spec.dtype is not None
    ]
    writes = {mutation.position: mutation.index for mutation in c.aten.mutations}
    c.loops = lower(
        c.aten.graph,
        inputs,
        constants=c.aten.constants,
        size_of=c.aten.to_size,
        extern_of=_call_of,
        must_run=must_run,
        writes=writes,
    )
    c.report.notes += c.loops.notes
    log.publish("loops", "", lambda: "\n\n".join(map(show_step, c.loops.steps)))


def _fuse(c: Compilation) -> None:
    c.schedule = fuse(c.loops, merge=c.options.fuse)
    log.publish("fusion", "", lambda: _show_schedule(c.schedule))


def _memory(c: Compilation) -> None:
    reuse_operands(c.loops, c.schedule)
    take_out_shared(c.schedule)
    if c.large_bytes is not None:
        take_out_large(c.schedule, c.large_bytes)
    c.plan = plan_memory(c.schedule)
    log.publish("memory", "", lambda: show_plan(c.plan))


def _emit(c: Compilation) -> None:
    machine = Machine(jit.host_target().features, c.options.vector_bits)
    build = Build(use_disk=c.options.cache, check=c.options.check)
    codes: dict[str, KernelCode] = {}
    forms: dict[Hashable, tuple[KernelCode, list[Buffer]]] = {}
    c.codes = {}
    for item in c.schedule.items:
        if not isinstance(item, Kernel):
            continue
        key, buffers = form(item)
        if key not in forms:
            forms[key] = emit_kernel(item, machine), buffers
        twin, theirs = forms[key]
        ours = dict(zip(theirs, buffers, strict=True))
        code = dataclasses.replace(twin, buffers=tuple(ours[b] for b in twin.buffers))
        c.codes[item] = code
        if codes.setdefault(code.name, code) is code:
            build.add(code.module)
    c.functions = dict(zip(codes, build.finish(), strict=True))


def _host(c: Compilation) -> None:
    targets = c.derived.targets if c.derived is not None else ()
    named = {b.name: b for b in c.loops.inputs if isinstance(b, Buffer) and b.role == "input"}
    arguments = Arguments(
        [named.get(spec.name) for spec in c.aten.inputs if spec.index not in targets],
        {name: (source.index, source.axis) for name, source in c.aten.symbols.items()},
        c.consumes,
    )
    c.host = emit_host(c.loops, c.schedule, c.plan, c.codes, arguments)
    log.publish("host", "", c.host.source)


class Step(NamedTuple):
    """One step of the pipeline: its name in reports, what takes it, what verifies its result."""

    name: str
    take: Callable[[Compilation], None]
    check: Callable[[Compilation], None] | None = None


PIPELINE = (
    Step("trace", _trace),
    Step("weights", _weights),
    Step("lower", _lower, lambda c: check_graph(c.loops)),
    Step("fuse", _fuse, lambda c: check_schedule(c.loops, c.schedule)),
    Step("memory", _memory, lambda c: check_plan(c.loops, c.schedule, c.plan)),
    Step("emit", _emit),
    Step("host", _host),
)


def compile_native(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> CompiledGraph:
    """Compile a captured graph for the CPU.

    raises   OptionError; MissingPackage without llvmlite; MissingFake for an operator without meta
    """
    parsed = Options.parse(options)
    prepare()
    report = Report(parsed.name or f"graph_{next(_numbers)}", first_line(gm))
    with log.graph(report.name):
        log.publish("graph", "", lambda: captured_source(gm))
        reason = _why_eager(gm, example_inputs)
        if reason is None:
            try:
                plain = not is_differentiated(gm, example_inputs)
                if not plain:
                    call = compile_training(gm, example_inputs, parsed, report)
                else:
                    c = Compilation(gm, example_inputs, parsed, report)
                    call = _compile(c, PIPELINE)
                    written = {mutation.index for mutation in c.aten.mutations}
                    call = apart(gm, call, c.aten.inputs, written, report)
                    call = from_start(gm, call, c.aten, report)
                log.publish("time", "", str(report.stages_ms))
                log.publish("kernels", "", lambda: str(report))
                remember(report)
                return CompiledGraph(call, report, plain=plain)
            except MissingFake:
                raise
            except TraceError as error:
                reason = error.what
                report.where = error.where or report.where
        return _run_eagerly(gm, report, reason)


control_flow.COMPILERS.append(lambda graph, inputs: compile_native(graph, inputs, {}))


def compile_aten(
    aten: AtenGraph,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report,
    *,
    consumes: bool = False,
    large_bytes: int | None = None,
) -> Callable[..., Any]:
    """Compile a graph that is traced already, and reads nothing from a module; changes it.

    example_inputs   one per InputSpec; only those that are static are looked at
    report           receives the kernels, and the time of each stage on top of what it has
    consumes         the function takes a list instead of arguments, and lets go of each input as
                     soon as nothing reads it any more
    large_bytes      larger intermediates are no part of the arena, which is kept between calls
    raises           as compile_native
    """
    prepare()
    c = Compilation(fx.GraphModule({}, fx.Graph()), example_inputs, options, report)
    c.aten, c.consumes, c.large_bytes = aten, consumes, large_bytes
    return _compile(c, PIPELINE[1:])


def compile_training(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report,
    keeps: Callable[[OpOverload], bool] = lambda op: False,
    compile_forward: Callable[[AtenGraph], Half] | None = None,
    decompositions: Table | None = None,
) -> Callable[..., Any]:
    """The graph with its backward.

    keeps            operators that are kept whole besides ours
    compile_forward  an engine's; the backward is ours
    decompositions   of operators that are not kept, ours or not
    raises           TraceError for an operator without a form, before anything has run
    """
    begin = time.perf_counter()
    known = supported().union(WHOLE).difference(decompositions or ())
    # saved values lie as eager's: a forward in another layout would copy each of them
    options = dataclasses.replace(options, channels_last=False)
    with collector.paused():
        joint = trace_joint(
            gm,
            example_inputs,
            keep=lambda op: op in known or keeps(op),
            decompositions=decompositions,
            overlapping=True,
        )
    report.stages_ms["trace"] = (time.perf_counter() - begin) * 1e3
    log.publish("aten", "joint", lambda: str(joint.aten))

    def cut(joint: Joint) -> Split:
        begin = time.perf_counter()
        with collector.paused():
            split = partition(joint, budget=options.memory_budget)
        report.stages_ms["partition"] = (time.perf_counter() - begin) * 1e3
        report.notes.append(describe(split))
        return split

    def forward(graph: AtenGraph) -> Callable[..., Any]:
        return compile_aten(graph, example_inputs, options, report, large_bytes=_LARGE_BYTES)

    def backward(graph: AtenGraph) -> Callable[..., Any]:
        report.backward = Report(f"{report.name}.backward")
        with log.graph(report.name):  # with several results this is at the first backward
            return compile_aten(
                graph, (), options, report.backward, consumes=True, large_bytes=_LARGE_BYTES
            )

    tell = report.notes.append
    written = {m.index for m in joint.aten.mutations} | {index for index, _ in joint.rebinds}
    call = train(gm, joint, cut, compile_forward or forward, backward, consumes=True, tell=tell)
    call = apart(gm, call, joint.aten.inputs, written, report)
    return from_start(gm, call, joint.aten, report)


def _compile(c: Compilation, steps: Sequence[Step]) -> Callable[..., Any]:
    stages = c.report.stages_ms
    with collector.paused():
        for step in steps:
            begin = time.perf_counter()
            step.take(c)
            stages[step.name] = stages.get(step.name, 0.0) + (time.perf_counter() - begin) * 1e3
            if c.options.check and step.check is not None:
                begin = time.perf_counter()
                step.check(c)
                stages["check"] = stages.get("check", 0.0) + (time.perf_counter() - begin) * 1e3
    _fill_report(c)
    functions = [c.functions[code.name] for code in c.host.functions]
    threads = c.options.threads
    return bind_call(
        c.gm,
        c.aten,
        c.derived,
        c.loops,
        c.host,
        functions,
        threads,
        consumes=c.consumes,
    )


def _why_eager(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
    made = [node.meta.get("example_value") for node in gm.graph.nodes]
    for x in (*example_inputs, *made):
        if isinstance(x, Tensor) and x.device.type != "cpu":
            return f"a tensor is on {x.device}, and code is generated for the CPU only"
    return None


def _run_eagerly(gm: fx.GraphModule, report: Report, reason: str) -> CompiledGraph:
    report.eager = reason
    remember(report)
    what = f"{report.name} runs eagerly: {reason}"
    warn(FuseeWarning, what, where=report.where, did="nothing was compiled")
    return CompiledGraph(gm.forward, report)


def _fill_report(c: Compilation) -> None:
    firsts: dict[str, Kernel] = {}  # one loop nest per function
    for item in c.schedule.items:
        if isinstance(item, Extern):
            c.report.externs.append(ExternRow(item.name, item.reason, item.origin))
        else:
            code = c.codes[item]
            show = partial(show_kernel, firsts.setdefault(code.name, item))
            c.report.kernels.append(KernelRow(code.name, item.origin, show))
    total = c.plan.total_bytes
    c.report.arena_bytes = total if isinstance(total, int) else None


def _show_schedule(schedule: Schedule) -> str:
    items = [
        f"{item.name}(...)" if isinstance(item, Extern) else show_kernel(item)
        for item in schedule.items
    ]
    return "\n\n".join([*items, "# stayed apart", *(f"# {row}" for row in schedule.refusals)])
