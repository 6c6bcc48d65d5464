"""Backends that compile nothing, the first two steps of any bisection.

`eager` runs the captured graph as it is: what differs from plain PyTorch is capture. `aot_eager`
runs its functional ATen form on eager kernels, backward included: what differs from `eager` is
fusee.aten and fusee.autodiff.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fusee.aten.interpret import executable
from fusee.aten.trace import trace
from fusee.autodiff.partition import partition
from fusee.autodiff.trace import trace_joint
from fusee.backends.training import is_differentiated, train


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
    if is_differentiated(gm, example_inputs):
        joint = trace_joint(gm, example_inputs)
        return train(gm, joint, partition, executable, executable)
    graph = trace(gm, example_inputs)
    call = executable(graph)
    if all(spec.attribute is None for spec in graph.inputs):
        return call
    return lambda *inputs: call(*inputs, *graph.attributes(gm))
