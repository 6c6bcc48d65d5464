"""Numbers beside NumPy's arrays in a graph, as inputs of it or as facts, and what is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from fusee.capture.dynamic import Number, is_array
from fusee.capture.guards import EqualsMatch
from fusee.capture.symbols import is_unbacked

np: Any = sys.modules.get("numpy")  # torch imports it, where there is one


def is_row(x: Any) -> bool:
    """Whether it is no number, but a sequence or an array."""
    return isinstance(getattr(x, "shadow", x), (list, tuple, np.ndarray))


def fixed(m: Any, x: Any) -> Any:
    """An integer of NumPy's from outside, from here on the same in all calls: torch divides by no
    0, and has no powers below 0."""
    for made, origin, _, real in m.world.arrays.values():
        if made is x and isinstance(real, np.integer):
            m.world.fact(EqualsMatch, origin, real)
            return real
    return x


def as_elements(m: Any, given: list[Any], element: Callable[[Any, Any, Any], Any]) -> list[Any]:
    """Operands with numbers that vary as elements of the arrays beside them, if these are floats.

    To NumPy a number of Python's has the dtype of such an array.

    element   makes one of a number and a dtype
    """
    arrays = [x for x in given if is_array(x)]
    dtypes = {x.shadow.dtype for x in arrays} - {np.dtype(bool)}
    if len(dtypes) != 1 or (dtype := next(iter(dtypes))).kind != "f":
        return given
    return [element(m, x, dtype) if _varies(x) else x for x in given]


def _varies(x: Any) -> bool:
    if type(x) is torch.SymInt:
        return not is_unbacked(x)
    return type(x) is Number and x.kind is float and not x.is_late
