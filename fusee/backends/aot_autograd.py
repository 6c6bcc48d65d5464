"""Backends made of a user's own compilers for the forward and the backward graph.

    my = fusee.backends.aot(fw_compiler=mine)       # mine(gm, example_inputs) -> callable
    model = fusee.compile(model, backend=my)

A compiler gets a functional graph of ATen operators as a GraphModule, and the inputs it will be
called with as examples: twins without data for what is computed first. What it returns is called
with the graph's inputs and returns the graph's results, as a tuple. Mutations, views and autograd
are around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from fusee.aten.graph import AtenGraph, around, executable
from fusee.aten.trace import trace
from fusee.autodiff.autograd_function import Run
from fusee.autodiff.joint import Joint, Split
from fusee.autodiff.partition import differentiate, partition
from fusee.backends.report import Report, first_line
from fusee.backends.runtime_wrapper import bind, bind_split, is_differentiated
from fusee.errors import TraceError

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
    raises       (when it compiles) TraceError for a graph without a functional ATen form, and for
                 one with symbolic sizes: GraphModules hold numbers
    source       torch._dynamo.backends.common.aot_autograd, and functorch's aot_module
    """

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report = Report("aot", first_line(gm))
        compile_backward = bw_compiler or fw_compiler
        if not is_differentiated(gm, example_inputs):
            graph = trace(gm, example_inputs)
            return bind(gm, graph, _by(fw_compiler, graph.flat()), report, spread=False)
        split = differentiate(gm, example_inputs, halved=partition)
        forward = _by(fw_compiler, split.forward)
        return bind_split(gm, split, forward, partial(_by, compile_backward), report)

    compile_graph.__dict__["takes_symbols"] = False
    return compile_graph


def _by(compiler: GraphCompiler, graph: AtenGraph) -> Run:
    """A graph compiled by a compiler of graph modules.

    raises   TraceError for symbolic sizes
    """
    if graph.symbols:
        raise TraceError(
            f"the graph has symbolic sizes ({', '.join(graph.symbols)})",
            did="stopped before compiling",
            remedy="dynamic=False, or the backend 'aot_eager'",
        )
    examples = [node.meta["val"] for node in graph.placeholders]
    call = around(graph, compiler(graph.module, examples))
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

    raises   TraceError if the graph has no functional ATen form
    """
    report = Report("aot_eager", first_line(gm))
    if not is_differentiated(gm, example_inputs):
        graph = trace(gm, example_inputs)
        return bind(gm, graph, executable(graph.flat()), report)
    split = differentiate(gm, example_inputs)
    return bind_split(gm, split, _run(split.forward), _run, report)


def _run(graph: AtenGraph) -> Run:
    call = executable(graph)
    return lambda inputs: call(*inputs)
