"""Backends that compile nothing, the first two steps of any bisection.

`eager` runs the captured graph as it is: what differs from plain PyTorch is capture. `aot_eager`
runs its functional ATen form on eager kernels, backward included: what differs from `eager` is
fusee.aten and fusee.autodiff.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fusee.aten.graph import AtenGraph
from fusee.aten.interpret import executable
from fusee.aten.trace import trace
from fusee.autodiff.partition import partition
from fusee.autodiff.trace import trace_joint
from fusee.backends.apart import apart, from_start
from fusee.backends.report import Report, first_line
from fusee.backends.training import is_differentiated, train


def run_captured(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """The captured graph itself."""
    call: Callable[..., Any] = gm.forward
    return call


def _with_attributes(
    run: Callable[..., Any], aten: AtenGraph, gm: fx.GraphModule, *inputs: Any
) -> Any:
    return run(*inputs, *aten.attributes(gm))


def run_aten(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """The functional ATen graph on eager kernels, and its backward if anything requires grad.

    raises   TraceError if the graph has no functional ATen form
    """
    report = Report("aot_eager", first_line(gm))
    if is_differentiated(gm, example_inputs):
        joint = trace_joint(gm, example_inputs, overlapping=True)
        aten = joint.aten
        call = train(gm, joint, partition, executable, executable)
        written = {m.index for m in aten.mutations} | {index for index, _ in joint.rebinds}
    else:
        aten = trace(gm, example_inputs, overlapping=True)
        run = executable(aten)
        call = functools.partial(_with_attributes, run, aten, gm)
        written = {mutation.index for mutation in aten.mutations}
    return from_start(gm, apart(gm, call, aten.inputs, written, report), aten, report)
