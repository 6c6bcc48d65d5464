"""From traced graphs to callables, and backends made of a user's own compilers for these graphs.

    my = fusee.backends.aot(fw_compiler=mine)       # mine(gm, example_inputs) -> callable
    model = fusee.compile(model, backend=my)

A compiler gets a functional graph of ATen operators as a GraphModule, and the inputs it will be
called with as examples: twins without data for what is computed first. What it returns is called
with the graph's inputs and returns the graph's results, as a tuple. Mutations, views and autograd
are around it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fusee import log
from fusee.aten import (
    AtenGraph,
    InputSpec,
    OtherSizes,
    around,
    executable,
    is_pure,
    must_run,
    returning,
    used_symbols,
)
from fusee.aten.rewriter import GraphPart, body_lines, computing_sizes, cut
from fusee.aten.torch_api import begins_gradients, laid_out
from fusee.aten.trace import trace
from fusee.autodiff import Joint, Split
from fusee.autodiff.autograd_function import Run, differentiable
from fusee.autodiff.partition import differentiate, partition
from fusee.backends.report import CompiledGraph, Report, apart, first_line, is_refused, remember
from fusee.errors import BackendError, FuseeWarning, MissingFake, OptionError, TraceError, warn
from fusee.fake.layouts import extent, known
from fusee.runtime.cache import Unread
from fusee.source import HostSource, listed

# ---------------------------------------------------------------------------- two graphs


GraphCompiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Sequence[Any]]]


def aot(
    *,
    fw_compiler: GraphCompiler,
    bw_compiler: GraphCompiler | None = None,
    partition: Callable[[Joint], Split] = partition,
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A backend for fusee.compile and torch.compile from functions that compile ATen graphs.

    bw_compiler  for backward graphs; None: fw_compiler
    partition    from a joint graph to the two; ours saves and recomputes by a minimum cut
    raises       (when it compiles) TraceError for a graph without a functional ATen form
    source       torch._dynamo.backends.common.aot_autograd, and functorch's aot_module
    """

    for one in (fw_compiler, bw_compiler or fw_compiler, partition):
        if not callable(one):
            raise OptionError(
                f"compilers are functions (gm, example_inputs), not {type(one).__name__}",
                remedy="aot(fw_compiler=mine)",
            )

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        both = partial(_by, fw_compiler), partial(_by, bw_compiler or fw_compiler)
        return _by_aten("aot", gm, example_inputs, *both, partition)

    return compile_graph


def _by_aten(
    name: str,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    forward: Callable[[AtenGraph], Run],
    backward: Callable[[AtenGraph], Run],
    halved: Callable[[Joint], Split] = partition,
) -> Callable[..., Any]:
    """A captured graph, given what makes functions of its forward and of its backward."""
    report = Report(name, first_line(gm))
    if not is_differentiated(gm, example_inputs):
        graph = trace(gm, example_inputs)
        return bind(gm, graph, forward(graph.flat()), report, spread=False)
    split = differentiate(gm, example_inputs, halved=halved)
    run = forward(split.forward)
    return bind_split(gm, split, run, lambda of: backward(of.backward), report)


def _by(compiler: GraphCompiler, graph: AtenGraph) -> Run:
    """A graph compiled by a compiler of graph modules; open sizes are calls in it."""
    module = computing_sizes(graph) if graph.symbols else graph.module
    compiled = compiler(module, [node.meta["val"] for node in graph.placeholders])
    if not callable(compiled):
        raise BackendError(
            f"a compiler of graphs returned {type(compiled).__name__}, which cannot be called",
            where=first_line(module),
            remedy="return a function of the graph's inputs that gives its results, as a tuple",
        )
    call = around(graph, compiled)
    return lambda inputs: call(*inputs)


# ---------------------------------------------------------------------------- eager
# Backends that compile nothing, the first two steps of any bisection.
#
# `eager` runs the captured graph as it is: what differs from plain PyTorch is capture. `aot_eager`
# runs its functional ATen form on eager kernels, backward included: what differs from `eager` is
# fusee.aten and fusee.autodiff.


def run_captured(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """The captured graph itself."""
    call: Callable[..., Any] = gm.forward
    return call


def run_aten(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """The functional ATen graph on eager kernels, and its backward if anything requires grad.

    Without such a form the graph runs as it was captured, with a warning.
    """
    try:
        return _by_aten("aot_eager", gm, example_inputs, _run, _run)
    except MissingFake:
        raise
    except TraceError as error:
        again = partial(run_aten, options=options)
        return left_to_eager(gm, example_inputs, Report("aot_eager"), error, again)


def left_to_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    report: Report,
    error: TraceError,
    compile_graph: Callable[..., Any],
) -> CompiledGraph:
    """The captured graph in parts around the call that has no functional ATen form; itself, if it
    cannot be cut there, or the call is about to raise. Of the one the user is told."""
    report.where = error.where or first_line(gm)
    remember(report)
    is_raising = error.__cause__ is not None and is_refused(gm, example_inputs)
    parts = None if is_raising else apart(gm, error.call, compile_graph, example_inputs)
    if parts is not None:
        report.notes.append(f"a part runs as it was captured: {error.what}")
        return CompiledGraph(parts, report)
    report.eager = error.what
    if not is_raising:
        what = f"{report.name} runs eagerly: {error.what}"
        warn(FuseeWarning, what, where=report.where, did="nothing was compiled")
    return CompiledGraph(gm.forward, report)


def _run(graph: AtenGraph) -> Run:
    call = executable(graph)
    return lambda inputs: call(*inputs)


# ---------------------------------------------------------------------------- runtime wrappers
# From compiled graphs to the callable that takes a captured one's place.
#
#     bind         one graph: the module's own tensors go in, views and aliases are taken again
#     bind_split   a forward and a backward: one torch.autograd.Function
#
# In either case calls in which inputs lie as no graph takes them to run the captured graph itself.
# A graph in which sizes show in the course of a call runs in stages.

Call = Callable[..., Any]


def is_differentiated(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether grad mode is on, and anything that goes in requires grad.

    raises   TraceError if grad mode is on in a part of the graph alone
    """
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    given = (*tensors, *gm.parameters(), *gm.buffers())
    wanted = any(x.requires_grad for x in given)
    if wanted and not torch.is_grad_enabled() and begins_gradients(gm.graph):
        raise TraceError("gradients are switched on within the graph")
    return wanted and torch.is_grad_enabled()


Captured = fx.GraphModule | Unread


def _count(gm: Captured) -> int:
    """How many inputs there are; the module's own tensors follow."""
    return gm.count if isinstance(gm, Unread) else len(gm.graph.find_nodes(op="placeholder"))


def bind(
    gm: Captured,
    aten: AtenGraph,
    run: Call,
    report: Report,
    *,
    spread: bool = True,
    count: int | None = None,
) -> Call:
    """The callable that takes the graph's inputs.

    run      runs `aten`, writes included
    spread   whether it takes the inputs as arguments, not in a list
    count    how many results it gives; None: those of the graph
    """
    module = None if isinstance(gm, Unread) else gm
    call = returning(aten, run, spread=spread, module=module, count=count)
    return _guard(gm, aten, {mutation.index for mutation in aten.mutations}, report, call)


def bind_split(
    gm: Captured,
    split: Split,
    forward: Run,
    compile_backward: Callable[[Split], Run | None],
    report: Report,
) -> Call:
    """The callable that takes the graph's inputs, and whose results know their backward.

    Of several results a loss seldom uses all, and those that it doesn't use cost nothing when the
    backward is compiled without them. That is known at the first backward; with one result, now.

    forward           runs split.forward
    compile_backward  as for `differentiable`
    """
    joint, aten = split.joint, split.joint.aten

    def tell(note: str) -> None:
        report.notes.append(note)
        log.publish("kernels", "", note)

    backward = functools.cache(compile_backward)
    if joint.tangents:
        if len(joint.tangents) == 1:
            backward(split)
        run = differentiable(gm, split, forward, backward, tell)
    else:
        run = torch.no_grad()(lambda *inputs: forward(inputs))  # out= refuses what requires grad
    call = returning(
        replace(aten, mutations=()),
        run,
        module=None if isinstance(gm, Unread) else gm,
        count=joint.forward_results,
        rebinds=joint.rebinds,
        detached=joint.detached,
    )
    return _guard(gm, aten, joint.written, report, call)


def _guard(
    gm: Captured, aten: AtenGraph, written: Collection[int], report: Report, call: Call
) -> Call:
    """A call with the checks of this file around it."""
    call = _with_known_sizes(gm, call, aten, report)
    call = _without_overlap(gm, call, aten.inputs, written, report)
    return _without_offsets(gm, call, aten, report)


# ---------------------------------------------------------------------------- sizes


def _with_known_sizes(gm: Captured, call: Call, aten: AtenGraph, report: Report) -> Call:
    """`call` where sizes that only data knows are as its graph takes them to be, `gm` elsewhere.

    They are not where eager raises, or for sizes of 0 that nobody thinks of. If the first calls all
    have others, the user is told.
    """
    if not aten.required:
        return call
    draws = any(n.op == "call_function" and not is_pure(n) for n in aten.graph.nodes)
    is_on_gpu = any(spec.device is not None and spec.device.type == "cuda" for spec in aten.inputs)
    tell = _telling(report)
    others: int | None = 0  # calls with other sizes, before one with these
    unless = ", ".join(map(str, aten.required))

    def checked(*given: Any) -> Any:
        nonlocal others
        generators = (torch.default_generator, *(torch.cuda.default_generators * is_on_gpu))
        before = [(one, one.get_state()) for one in generators * draws]
        try:
            found = call(*given)
        except OtherSizes:
            for generator, state in before:
                generator.set_state(state)
            others = None if others is None else others + 1
            if others == _OTHERS:
                tell(
                    f"sizes that only the data knows are not such that {unless}",
                    "leave the lines with such sizes out of the compiled function",
                )
            return gm.forward(*given)
        others = None
        return found

    report.notes.append(f"calls run eagerly unless {unless}")
    return checked


# So many calls are no accident.
_OTHERS = 16


# ---------------------------------------------------------------------------- apart
# Calls in which inputs lie as no graph takes them to: they run the captured graph itself.
#
# A graph is compiled as if its inputs lay apart: what it writes to one it does not see in another.
# So each call of a graph that writes to inputs looks where they lie; a call in which they overlap
# runs the captured graph itself, operator by operator, as eager does. So does one in which an input
# lies inside a larger storage, if the graph counts offsets from its beginning.


def _without_overlap(
    gm: Captured,
    call: Call,
    inputs: Sequence[InputSpec],
    written: Collection[int],
    report: Report,
) -> Call:
    """`call` where inputs lie apart, `gm` where one of those that are written to does not.

    written  the inputs that `call` writes to
    """
    count = _count(gm)
    specs = [(s, s.dtype.itemsize) for s in inputs[:count] if s.dtype is not None]
    if len(specs) < 2 or not written:
        return call
    places = [s.index for s, _ in specs]
    reaches = [extent(s.size, s.stride) * itemsize for s, itemsize in specs]
    is_known = known(reaches)
    pick: Callable[[Sequence[Any]], Sequence[Tensor]] = operator.itemgetter(*places)
    address = Tensor.data_ptr
    changes = [k in written for k in places]
    latest: Any = None  # where all lay in the last call in which they lay apart
    tell = _telling(report)

    def checked(*given: Any) -> Any:
        nonlocal latest
        tensors = pick(given)
        at = [*map(address, tensors)]
        where = at if is_known else [(x.data_ptr(), x.shape, x.stride()) for x in tensors]
        if where != latest:
            bytes_of = reaches
            if not is_known:
                bytes_of = [extent(x.shape, x.stride()) * x.element_size() for x in tensors]
            found = _overlapping(at, [*map(operator.add, at, bytes_of)], changes)
            if found is not None:
                one, other = (inputs[places[k]].name for k in found)
                tell(
                    f"the inputs {one} and {other} share memory, and {one} is written to",
                    f"pass {other}.clone(), if it needs not see what is written",
                )
                return gm.forward(*given)
            latest = where
        return call(*given)

    return checked


def _without_offsets(gm: Captured, call: Call, aten: AtenGraph, report: Report) -> Call:
    """`call` where inputs begin their memory, as offsets in its graph take them to; `gm` else."""
    asked = [aten.inputs[k] for k in sorted(aten.from_start)]
    if not asked:
        return call
    count = _count(gm)
    tell = _telling(report)

    def inside(given: Sequence[Any]) -> str | None:
        for spec in asked:
            if spec.index >= count and spec.attribute is None:
                return spec.name  # a tangent: where it lies shows only in the backward
            x: Any = given[spec.index] if spec.index < count else None
            if spec.attribute is not None:
                x = operator.attrgetter(spec.attribute)(gm)
            if x.storage_offset():
                return spec.name
        return None

    def checked(*given: Any) -> Any:
        name = inside(given)
        if name is None:
            return call(*given)
        what = f"as_strided of {name}, which starts inside a larger storage"
        tell(what, "give as_strided a copy, or index instead")
        return gm.forward(*given)

    return checked


def _overlapping(
    at: Sequence[int], ends: Sequence[int], changes: Sequence[bool]
) -> tuple[int, int] | None:
    """The positions of one that is written to and of one that it overlaps, if there are any."""
    order = sorted(range(len(at)), key=at.__getitem__)
    starts, before = map(at.__getitem__, order[1:]), map(ends.__getitem__, order)
    if all(map(operator.le, before, starts)):  # an optimizer has thousands
        return None
    reaches: dict[bool, int] = {}  # of all so far, and of those written to: which ends last
    for k in order:
        if ends[k] == at[k]:
            continue
        latest = reaches.get(changes[k])
        for kind in (True,) if not changes[k] else (True, False):
            other = reaches.get(kind)
            if other is not None and at[k] < ends[other]:
                return (k, other) if changes[k] else (other, k)
        if latest is None or ends[k] > ends[latest]:
            reaches[changes[k]] = k
    return None


def _telling(report: Report) -> Callable[[str, str], None]:
    """Takes why a call runs eagerly, and what to do; only of the first one is the user told."""
    told: list[str] = []

    def tell(what: str, remedy: str) -> None:
        if told:
            return
        told.append(what)
        report.notes.append(f"calls run eagerly: {what}")
        warn(
            FuseeWarning,
            f"a call of {report.name} runs eagerly: {what}",
            where=report.where,
            did="the captured graph ran operator by operator, as every such call will",
            remedy=remedy,
        )

    return tell


# ---------------------------------------------------------------------------- stages
# Runs a graph in which sizes show that only the data knows, stage by stage.
#
# An operator that gives such a size runs by itself, on eager's kernel, and the size is read off
# its result; so is an integer off the tensor that holds it. What needs a size comes in a later
# stage than what shows it. A stage is one part, compiled as any graph with open sizes: it has a
# memory plan of its own, and frames for the sizes seen last. What depends on no such size is in the
# first stage, and sizes that depend on none of each other are all read before the second.

# Compiles a part, given the whole graph's inputs among its own: what takes a list of inputs.
CompilePart = Callable[[AtenGraph, list[Any]], Callable[[tuple[Any, ...]], Sequence[Any]]]
Refuse = Callable[[Sequence[Any]], None]


def levels(aten: AtenGraph) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Per stage: the calls of its part, and the calls that run by themselves after it."""
    shown: dict[fx.Node, list[str]] = {}
    for name, at in aten.symbols.items():
        if at.unbacked is not None:
            shown.setdefault(aten.results[at.index], []).append(name)
    level: dict[fx.Node, int] = {}
    alone: set[fx.Node] = set()
    of_symbol: dict[str, int] = {}
    latest = 0  # of what must run in the program's order
    for node in aten.graph.nodes:
        if node.op != "call_function":
            continue
        given = node.all_input_nodes
        picks = node.target is operator.getitem and given[0] in alone
        after = [level.get(x, 0) + (x in alone and not picks) for x in given]
        if picks or node.meta.get("alone"):
            alone.add(node)
        else:
            used = used_symbols([node], aten.to_size)
            after += [of_symbol.get(name, 0) for name in used]
        level[node] = max([*after, latest if must_run(node) else 0])
        if must_run(node):
            latest = level[node]
        of_symbol.update((name, level[node] + 1) for name in shown.get(node, ()))
    count = max(level.values(), default=-1) + 1
    found: list[tuple[list[fx.Node], list[fx.Node]]] = [([], []) for _ in range(count)]
    for node, number in level.items():
        found[number][node in alone].append(node)
    return found


def staged(
    aten: AtenGraph, compiled: CompilePart, examples: Sequence[Any], refuse: Refuse | None = None
) -> Callable[..., Sequence[Any]]:
    """What runs a graph stage by stage, writes included: from its inputs to its results.

    examples   one per InputSpec
    refuse     looks at inputs where grad mode is on
    """
    steps: list[GraphPart | fx.Node] = []
    for together, alone in levels(aten):
        steps += [*cut(aten, [(False, tuple(together))]), *alone]
    name = {node: f"x{k}" for k, node in enumerate(aten.placeholders)}
    names = {"torch": torch, "laid_out": laid_out, "no_grad": torch.no_grad}
    given, names["OtherSizes"] = listed(name.values()), OtherSizes
    known: dict[Any, Any] = dict(zip(aten.placeholders, examples))
    for k, step in enumerate(steps):
        if isinstance(step, fx.Node):
            names[f"part{k}"] = step.target
        else:
            names[f"part{k}"] = compiled(step.graph, [known.get(x) for x in step.inputs])
    for node in aten.graph.find_nodes(op="get_attr"):
        name[node] = f"c{len(name)}"
        names[name[node]] = aten.constants[str(node.target)]
    write = HostSource("body", given[1:-1], "x{}".format, **names)
    if refuse is not None:
        write.names.update(is_grad_enabled=torch.is_grad_enabled, refuse=refuse)
        write.add(f"if is_grad_enabled(): refuse({given})")
    write.read_symbols(aten.symbols)
    write.add(*body_lines(aten, steps, name))
    if aten.mutations:  # what takes errors asks for it: all writes to inputs come last
        write.names["first_write"] = write.lines.index("    with no_grad():") + 1
    return write.function("body")
