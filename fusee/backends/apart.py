"""Calls in which an input that a graph writes to overlaps another input.

A graph is compiled as if its inputs lay apart: what it writes to one it does not see in another.
So each call of a graph that writes to inputs looks where they lie; a call in which they overlap
runs the captured graph itself, operator by operator, as eager does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from fusee.aten.graph import InputSpec
from fusee.backends.report import Report
from fusee.errors import FuseeWarning, layout

__all__ = ["apart"]

Call = Callable[..., Any]


def apart(
    gm: fx.GraphModule,
    call: Call,
    inputs: Sequence[InputSpec],
    written: Collection[int],
    report: Report,
) -> Call:
    """`call` where inputs lie apart, `gm` where one of those that are written to does not.

    written  the inputs that `call` writes to
    """
    count = len(gm.graph.find_nodes(op="placeholder"))  # the module's own tensors follow
    places = [s.index for s in inputs[:count] if s.dtype is not None]
    if len(places) < 2 or not written:
        return call
    sizes = [extent(inputs[k].size, inputs[k].stride) for k in places]
    is_known = all(type(size) is int for size in sizes)
    changes = [k in written for k in places]
    latest: Any = None  # where all lay in the last call in which they lay apart
    is_told = False

    def checked(*given: Any) -> Any:
        nonlocal latest, is_told
        at = [given[k].data_ptr() for k in places]
        where = at if is_known else [(given[k].data_ptr(), *_geometry(given[k])) for k in places]
        if where != latest:
            tensors = [given[k] for k in places]
            found = _overlapping(tensors, at, changes)
            if found is not None:
                if not is_told:
                    is_told = True
                    _tell(report, *(inputs[places[k]].name for k in found))
                return gm.forward(*given)
            latest = where
        return call(*given)

    return checked


def extent(size: Sequence[Any], stride: Sequence[Any]) -> Any:
    """Elements from the first to past the last."""
    if any(type(n) is int and n == 0 for n in size):
        return 0
    total: Any = 1
    for n, step in zip(size, stride, strict=True):
        total = total + (n - 1) * step
    return total


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride()


def _overlapping(
    tensors: Iterable[Tensor], at: Sequence[int], changes: Sequence[bool]
) -> tuple[int, int] | None:
    """The positions of one that is written to and of one that it overlaps, if there are any."""
    ends = [start + extent(x.shape, x.stride()) * x.element_size() for start, x in zip(at, tensors)]
    reaches: dict[bool, int] = {}  # of all so far, and of those written to: which ends last
    for k in sorted(range(len(at)), key=at.__getitem__):
        if ends[k] == at[k]:
            continue
        before = reaches.get(changes[k])
        for kind in (True,) if not changes[k] else (True, False):
            other = reaches.get(kind)
            if other is not None and at[k] < ends[other]:
                return (k, other) if changes[k] else (other, k)
        if before is None or ends[k] > ends[before]:
            reaches[changes[k]] = k
    return None


def _tell(report: Report, written: str, other: str) -> None:
    what = f"the inputs {written} and {other} share memory, and {written} is written to"
    report.notes.append(f"calls run eagerly in which {what}")
    warnings.warn(
        layout(
            FuseeWarning,
            f"a call of {report.name} runs eagerly: {what}",
            where=report.where,
            did="the captured graph ran operator by operator, as every such call will",
            remedy=f"pass {other}.clone(), if it needs not see what is written",
        ),
        FuseeWarning,
        stacklevel=3,
    )
