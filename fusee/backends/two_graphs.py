"""Backends made of a user's own compilers for the forward and the backward graph.

    my = fusee.backends.aot(fw_compiler=mine)       # mine(gm, example_inputs) -> callable
    model = fusee.compile(model, backend=my)

A compiler gets a functional graph of ATen operators as a GraphModule, and the inputs it will be
called with as examples: twins without data for what is computed first. What it returns is called
with the graph's inputs and returns the graph's results, as a tuple. Mutations, views and autograd
are around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fusee.aten.graph import AtenGraph
from fusee.aten.interpret import around
from fusee.aten.trace import trace
from fusee.autodiff.joint import Joint, Split
from fusee.autodiff.partition import partition as min_cut
from fusee.autodiff.trace import trace_joint
from fusee.backends.training import is_differentiated, train
from fusee.errors import TraceError

__all__ = ["aot"]

GraphCompiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Sequence[Any]]]


def aot(
    *,
    fw_compiler: GraphCompiler,
    bw_compiler: GraphCompiler | None = None,
    partition: Callable[[Joint], Split] = min_cut,
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A backend for fusee.compile and torch.compile from functions that compile ATen graphs.

    bw_compiler  for backward graphs; None: fw_compiler
    partition    from a joint graph to the two; ours saves and recomputes by a minimum cut
    raises       (when it compiles) TraceError for a graph without a functional ATen form, and for
                 one with symbolic sizes: GraphModules hold numbers
    source       torch._dynamo.backends.common.aot_autograd, and functorch's aot_module
    """

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if is_differentiated(gm, example_inputs):
            joint = trace_joint(gm, example_inputs)
            _refuse_symbols(joint.aten)
            return train(gm, joint, partition, _by(fw_compiler), _by(bw_compiler or fw_compiler))
        graph = trace(gm, example_inputs)
        _refuse_symbols(graph)
        call = _by(fw_compiler)(graph)
        return lambda *inputs: call(*inputs, *graph.attributes(gm))

    return compile_graph


def _by(compiler: GraphCompiler) -> Callable[[AtenGraph], Callable[..., Any]]:
    """A compiler of graph modules as one of AtenGraphs."""

    def compile_one(graph: AtenGraph) -> Callable[..., Any]:
        examples = [node.meta["val"] for node in graph.placeholders]
        return around(graph, compiler(graph.module, examples))

    return compile_one


def _refuse_symbols(graph: AtenGraph) -> None:
    if graph.symbols:
        raise TraceError(
            f"the graph has symbolic sizes ({', '.join(graph.symbols)})",
            did="stopped before compiling",
            remedy="dynamic=False, or the backend 'aot_eager'",
        )
