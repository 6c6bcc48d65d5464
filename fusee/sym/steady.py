"""Functions of a size that give the same number for many: a root, a logarithm, rounded or compared.

What one gives is a number, and the version holds for all sizes that give it: `math.isqrt(n)` that
is 5 says `25 <= n <= 35`. So it is with every function that only grows, or only falls; where it
changes is found by asking it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from fusee.sym.expr import Size, hint, mod
from fusee.sym.ranges import COMPARISONS

_FAR = 2**40  # more than sizes are

# With numbers for all operands but one.
_GROW = {
    float, math.sqrt, math.log, math.log2, math.log10, math.log1p, math.exp, math.expm1,
    operator.add, operator.sub, operator.mul, operator.neg,
}  # fmt: skip


def steady(env: Any, a: Size, function: Callable[[int], Any]) -> Any:
    """What a function gives for a size; from here on that is so in all calls."""
    at, ends = hint(a), env.limits(a)
    value = function(at)
    for op, step, end in ((">=", -1, ends[0]), ("<=", 1, ends[1])):
        last = _last(function, value, at, step, end)
        if last is not None and last != end:
            env.holds(a, op, last)
    return value


def _last(function: Any, value: Any, at: int, step: int, end: int | None) -> int | None:
    """The last integer, from one on, for which a function gives the same; None: there is none."""

    def is_same(count: int) -> bool:
        n = at + step * count
        try:
            return (end is None or (end - n) * step >= 0) and bool(function(n) == value)
        except (ValueError, OverflowError, ZeroDivisionError):
            return False

    near, far = 0, 1
    while is_same(far):
        near, far = far, 2 * far
        if far > _FAR:
            return None
    while far - near > 1:
        middle = (near + far) // 2
        near, far = (middle, far) if is_same(middle) else (near, middle)
    return at + step * near


def common_divisor(env: Any, a: Size, number: int) -> int:
    """math.gcd() of a size and a number that is none, from here on the same in all calls."""
    found = math.gcd(hint(a), number)
    rest = abs(number) // found
    if found > 1:
        env.holds(mod(a, found), "==", 0)
    for p in range(2, rest + 1):
        if rest % p == 0:
            env.holds(mod(a, found * p), "!=", 0)
            while rest % p == 0:
                rest //= p
    return found


def rounded(x: Any, function: Callable[[float], int]) -> int:
    """What rounds a float that is computed from sizes, from here on the same in all calls."""
    if (found := _curve(x)) is None:
        return function(x.guarded())
    size, below = found
    return int(steady(x.env, size, lambda n: function(below(n))))


def compared(x: Any, op: str, other: Any) -> bool:
    """`x op other` of such floats, from here on the same in all calls."""
    found, known = _curve(x), other.maybe_as_float()
    compare = COMPARISONS[op]
    if found is None or known is None or op in ("==", "!="):
        return compare(x.guarded(), other.guarded())
    size, below = found
    return bool(steady(x.env, size, lambda n: compare(below(n), known)))


def _curve(x: Any) -> tuple[Size, Callable[[int], float]] | None:
    """A float as a function of one size that only grows or only falls; None: another one."""
    if x.kind is int:
        low, _ = x.env.limits(x.size)
        return None if low is None or low < 0 or x.is_constant() else (x.size, lambda n: n)
    known = [y.maybe_as_int() if y.kind is int else y.maybe_as_float() for y in x.operands]
    if known.count(None) != 1:
        return None
    k = known.index(None)
    of = x.operands[k]
    is_of_size = of.kind is int or of.function is float  # which is not negative
    if x.function is operator.truediv:
        grows = k == 0 or is_of_size
    else:
        grows = x.function in _GROW or (x.function is operator.pow and k == 0 and is_of_size)
    inner = _curve(of) if grows else None
    if inner is None:
        return None
    size, below = inner
    return size, lambda n: x.function(*(below(n) if y is None else y for y in known))
