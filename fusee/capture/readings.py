"""Numbers that a program takes out of tensors: `x.tolist()`, and `x.item()` if torch's
`capture_scalar_outputs` says so.

They are read after the graph, from what it gives: the program can move them, return them and do
arithmetic with them. Where it needs the value of one, the graph ends.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from fusee.capture.numbers import Number, converted
from fusee.capture.torch_api import dynamo_switch

__all__ = ["read"]

# Each is a line of what runs after the graph.
_MOST = 256

_SCALARS = {"item": None, "__float__": float, "__int__": int}


def read(recorder: Any, name: str, args: tuple[Any, ...]) -> Any:
    """What a method gives that shows values of a tensor; None if the graph ends there."""
    x = args[0]
    kind = float if x.is_floating_point() else int
    is_number = kind is float or x.dtype in _INTEGERS
    is_main = recorder.is_main and not recorder.seen and x.layout is torch.strided
    if len(args) > 1 or not is_number or not is_main:
        return None
    if name == "tolist" and x.numel() <= _MOST:
        values = _values(recorder, x)
        listed = Number(None, frozenset(), list, (torch.Tensor.tolist, values))
        taken = [
            _number(recorder, values, k, kind, (operator.getitem, listed, k))
            for k in range(x.numel())
        ]
        return _nested(iter(taken), tuple(x.shape))
    if name not in _SCALARS or x.numel() != 1 or not dynamo_switch("capture_scalar_outputs"):
        return None
    values = _values(recorder, x)
    found = _number(recorder, values, 0, kind, (torch.Tensor.item, values))
    return converted(found, _SCALARS[name] or kind)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _values(recorder: Any, x: torch.Tensor) -> Any:
    """What a tensor holds now, in a tensor that nothing writes to."""
    flat = recorder.call(torch.Tensor.reshape, (recorder.call(torch.detach, (x,), {}), (-1,)), {})
    return recorder.call(torch.clone, (flat,), {})


def _number(recorder: Any, values: Any, k: int, kind: type, made: tuple[Any, ...]) -> Number:
    """One of `values`. An integer may be more than the double that a graph has for it."""
    recorder.has_numbers = True

    def write() -> Any:
        one = recorder.call(operator.getitem, (values, k), {})
        return recorder.item(one).node

    return Number(write if kind is float else None, frozenset(), kind, made, is_late=True)


def _nested(items: Any, shape: tuple[int, ...]) -> Any:
    if not shape:
        return next(items)
    return [_nested(items, shape[1:]) for _ in range(shape[0])]
