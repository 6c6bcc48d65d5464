"""What a call in a graph may have for an argument: what fx prints as Python that gives it again."""

from __future__ import annotations

import cmath
import enum
import math
import types
from typing import Any

import torch
from torch import fx

from fusee.capture.breaks import GraphBreak
from fusee.capture.numbers import NUMPY, Number
from fusee.capture.torch_api import OpOverload

__all__ = ["printable"]

# torch takes these classes for dtypes; fx prints them as `<class 'int'>`.
_DTYPES = {
    bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128,
}  # fmt: skip
_PRINTED = (
    types.NoneType, types.EllipsisType, bool, bytes, range, enum.Enum, torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool, fx.Node,
    OpOverload, Number, *NUMPY,
)  # fmt: skip
# Of the user's classes of numbers and texts torch sees what they hold.
_HELD: dict[type, Any] = {int: int.__index__, float: float.__float__, str: str.__str__}


def printable(x: Any) -> Any:
    """The argument, or what torch takes for it.

    raises   GraphBreak for what has no text
    """
    if type(x) in (int, float, str) or isinstance(x, NUMPY):
        return x
    for kind, held in _HELD.items():
        if isinstance(x, kind) and type(x) is not bool:
            return held(x)
    if isinstance(x, complex) and not _has_text(x):
        raise GraphBreak(f"the number {x} has no text in Python that gives it again")
    if isinstance(x, (complex, *_PRINTED)):
        return x
    if isinstance(x, type) and x in _DTYPES:
        return _DTYPES[x]
    if type(x) is type(torch.FloatTensor):  # x.type(torch.DoubleTensor)
        return f"{x.__module__}.{x.__name__}"
    raise GraphBreak(
        f"an argument of class {type(x).__qualname__} has no text in a graph",
        "give numbers, texts, dtypes, devices and tensors to torch's functions",
    )


def _has_text(x: complex) -> bool:
    zeros = [part for part in (x.real, x.imag) if part == 0]
    return cmath.isfinite(x) and all(math.copysign(1, zero) > 0 for zero in zeros)
