"""associative_scan: one node, where its function goes element by element and nothing is
differentiated; our backend makes a loop of it (fusee/loops/associative.py), and others trace the
tree of calls that it runs. Else PyTorch's own tree is captured.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from fusee.capture.attributes import Capturing
from fusee.capture.builtins import SPECIAL, stands_for
from fusee.capture.graph_break import GraphBreak, associative_scan, combine_of
from fusee.capture.torch_api import (
    FakeTensor,
    generic_scan,
    higher_order,
)
from fusee.torch_functions.higher_order import effects_of, run_body

# The same function, which nothing stands for.
_TREE: Any = types.FunctionType(
    generic_scan.__code__, generic_scan.__globals__, argdefs=generic_scan.__defaults__
)


@stands_for(generic_scan)
def _associative_scan(
    m: Capturing, /, operator: Any, leaves: Any, dim: Any = 0, additional_inputs: Any = ()
) -> Any:
    xs, more = m.items(leaves), m.items(additional_inputs)
    combine = None if more or dim != 0 else _combine(m, operator, xs)
    if combine is None:
        return m.call(_TREE, operator, leaves, dim, additional_inputs)
    with torch._C.DisableTorchFunction(), m.world.mode:
        results = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    m.world.recorder.write(associative_scan, "", (list(xs), combine), {}, results)
    return results


SPECIAL[higher_order.associative_scan] = lambda m, /, combine_fn, xs, additional_inputs: (
    _associative_scan(m, combine_fn, xs, 0, additional_inputs)
)


def _combine(m: Capturing, operator: Any, xs: Sequence[Any]) -> str | None:
    """The function of a scan as text, if it is one of elements."""
    if m.within or m.modes or m.policy.is_exporting:
        return None
    if not xs or any(type(x) is not FakeTensor for x in xs):
        return None
    with torch._C.DisableTorchFunction():
        first = xs[0]
        if torch.is_autocast_enabled(first.device.type) or not first.dim():
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
            return None
        if any(x.shape != first.shape or x.device != first.device for x in xs):
            return None
        if first.shape[0] < 2:  # they are given back as they are
            return None
    before = effects_of(m)
    try:
        body = run_body(m, "associative_scan", operator, (*xs, *xs), {}, None)
    except GraphBreak:
        if effects_of(m) != before:
            raise
        return None  # it is captured where it is called, or ends the graph there
    with torch._C.DisableTorchFunction():
        if body.outside or any(leaf is not None for leaf in body.leaves):
            return None
        dtypes, rank = [x.dtype for x in xs], first.dim()
    found = combine_of(body.module, dtypes, rank)
    return None if found is None else found.text
