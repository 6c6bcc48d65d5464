"""Backends that compile nothing, the first two steps of any bisection.

`eager` runs the captured graph as it is: what differs from plain PyTorch is capture. `aot_eager`
runs its functional ATen form on eager kernels: what differs from `eager` is fusee.aten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusee.aten.interpret import executable
from fusee.aten.trace import trace
from fusee.errors import TraceError


def run_captured(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """The captured graph itself."""
    call: Callable[..., Any] = gm.forward
    return call


def run_aten(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """The functional ATen graph on eager kernels; inference only.

    raises   TraceError if the graph needs gradients or has no functional ATen form
    """
    if torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
    ):
        raise TraceError(
            "an input requires grad, and aot_eager traces inference only",
            did="stopped before compiling",
            remedy="call under torch.no_grad(), or use the backend 'eager'",
        )
    graph = trace(gm, example_inputs)
    call = executable(graph)
    if all(spec.attribute is None for spec in graph.inputs):
        return call
    return lambda *inputs: call(*inputs, *graph.attributes(gm))
