"""What floats that only data knows can be: whether Python may compute with them after the graph.

Only what cannot raise is put off: later it would come too late. A float of at most 32 bits bounds
what is made of it, so that neither its square overflows nor a root of a sum of squares is complex.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import torch

_MOST = sys.float_info.max
# Between which numbers a float lies that is neither NaN nor infinite. An infinite one has a sign
# that numbers between them have; for neither does anything raise that does not for these.
Range = tuple[float, float]


def result_range(function: Any, operands: tuple[Any, ...]) -> Range | None:
    """Between which numbers a function's float lies; None: it may raise, or be no float."""
    if function in (torch.Tensor.item, operator.getitem):
        x = operands[0]  # what holds it, or what `tolist()` gives of that
        dtype = (x if isinstance(x, torch.Tensor) else x.made[1]).dtype
        limit = torch.finfo(dtype).max if dtype.is_floating_point else _MOST
        return -limit, limit
    (low, high), *more = map(_of, operands)
    if function in (min, max):
        kinds = {getattr(x, "kind", type(x)) for x in operands}  # of integers it might be one
        lows, highs = zip((low, high), *more)
        return (min(lows), max(highs)) if more and kinds == {float} else None
    if function in (abs, math.fabs):
        return 0.0, max(-low, high)
    if function is math.sqrt:
        return (0.0, math.sqrt(high)) if low >= 0 else None
    if function is operator.neg:
        return -high, -low
    return _of_two(function, (low, high), *more, *operands[1:])


def _of(x: Any) -> Range:
    if type(x) in (int, float):
        return (float(x), float(x)) if abs(x) <= _MOST else (-_MOST, _MOST)
    return getattr(x, "range", None) or (-_MOST, _MOST)


def _of_two(function: Any, x: Range, y: Range = (0.0, 0.0), by: Any = None) -> Range | None:
    """The same of an operator; `by` is its second operand, which `y` is about."""
    low, high = x
    if function is round:  # to integers, without `by`; the largest floats are rounded to none
        is_sure = type(by) is int and by >= 0 and max(-low, high) < _MOST / 2
        return (low - 1, high + 1) if is_sure else None
    if function is operator.pow:
        if type(by) not in (int, float) or not 0 <= by <= 64 or (low < 0 and by % 1):
            return None
        try:
            return (low**by if by % 2 else 0.0), max(-low, high) ** by
        except OverflowError:
            return None
    if function is operator.truediv:
        if y[0] <= 0 <= y[1]:
            return None
        return (0.0, _MOST) if low >= 0 and y[0] > 0 else (-_MOST, _MOST)
    if function is operator.mul:
        ends = [a * b for a in x for b in y]
        least, most = min(ends), max(ends)
    else:
        y = (-y[1], -y[0]) if function is operator.sub else y
        # what may be infinite takes the whole sum with it
        least = low + y[0] if low >= 0 and y[0] >= 0 else min(low + y[0], -1.0)
        most = high + y[1] if high <= 0 and y[1] <= 0 else max(high + y[1], 1.0)
    return max(least, -_MOST), min(most, _MOST)
