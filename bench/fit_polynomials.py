"""Where the coefficients of fusee/codegen/llvm/math.py come from: prints all of them.

    python -m bench.fit_polynomials

Minimax fits by Remez exchange on a fine grid. After a fit its lowest coefficient is rounded to
float32 and kept; the others are fitted again to what it leaves, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mpmath  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.longdouble]
_POINTS = 3001


@dataclass(frozen=True)
class Fit:
    """q(x) of `count` coefficients near goal(x) for low <= x <= high, errors times weight(x)."""

    name: str
    low: float
    high: float
    count: int
    goal: Callable[[mpmath.mpf], mpmath.mpf]
    weight: Callable[[mpmath.mpf], mpmath.mpf]


def _root(function: Callable[[mpmath.mpf], mpmath.mpf]) -> Callable[[mpmath.mpf], mpmath.mpf]:
    """Of the square of the variable."""
    return lambda square: function(mpmath.sqrt(square))


_HALF_LN2 = 0.34657359 * 1.002
_QUARTER_PI = (0.78539816 * 1.002) ** 2
FITS = [
    Fit("_EXP", -_HALF_LN2, _HALF_LN2, 5,
        lambda x: (mpmath.expm1(x) - x) / x**2, lambda x: x**2 / mpmath.exp(x)),
    Fit("_EXPM1", -_HALF_LN2, _HALF_LN2, 6,
        lambda x: (mpmath.expm1(x) - x) / x**2, lambda x: x**2 / mpmath.expm1(x)),
    Fit("_EXP2", -0.501, 0.501, 6,
        lambda x: (2**x - 1) / x, lambda x: x / 2**x),
    Fit("_LOG", 2**-0.5 - 1.0001, 2**0.5 - 0.9999, 9,
        lambda x: (mpmath.log1p(x) - x) / x**2, lambda x: x**2 / mpmath.log1p(x)),
    Fit("_SIN", 1e-4, _QUARTER_PI, 3,
        _root(lambda x: (mpmath.sin(x) - x) / x**3), _root(lambda x: x**3 / mpmath.sin(x))),
    Fit("_COS", 1e-4, _QUARTER_PI, 3,
        _root(lambda x: (mpmath.cos(x) - 1 + x**2 / 2) / x**4),
        _root(lambda x: x**4 / mpmath.cos(x))),
    Fit("_TANH", 1e-4, 1.001, 7,
        _root(lambda x: (mpmath.tanh(x) - x) / x**3), _root(lambda x: x**3 / mpmath.tanh(x))),
    Fit("_ERF", 1e-4, 1.001, 7,
        _root(lambda x: (mpmath.erf(x) - x) / x), _root(lambda x: x / mpmath.erf(x))),
    Fit("_LOG2_ERFC", 0.999, 4.0, 6,
        lambda x: mpmath.log(mpmath.erfc(x), 2) / x,
        lambda x: mpmath.erfc(x) * mpmath.log(2) * x),
]  # fmt: skip


def rounded_fit(fit: Fit) -> tuple[list[np.float32], float]:
    """The coefficients, lowest first, and the largest weighted error."""
    x = np.linspace(fit.low, fit.high, _POINTS).astype(np.longdouble)
    x += np.longdouble(1e-12)  # 0 itself is a removable gap of most goals
    rest, weight = _on_grid(fit.goal, x), _on_grid(fit.weight, x)
    found: list[np.float32] = []
    for power in range(fit.count):
        best = remez(x, rest, weight, range(power, fit.count))
        found.append(np.float32(best[0]))
        rest = rest - np.longdouble(found[-1]) * x**power
    return found, float(np.max(np.abs(rest * weight)))


def _on_grid(function: Callable[[mpmath.mpf], mpmath.mpf], x: Reals) -> Reals:
    with mpmath.workdps(40):
        values = [mpmath.nstr(function(mpmath.mpf(str(point))), 25) for point in x]
    return np.array([np.longdouble(value) for value in values])


def remez(x: Reals, goal: Reals, weight: Reals, powers: range) -> Reals:
    """The coefficients of `powers` whose largest weighted error on the grid is least."""
    basis = np.stack([x**power for power in powers], 1)
    count = len(powers)
    nodes = np.round((1 - np.cos(np.pi * np.arange(count + 1) / count)) / 2 * (len(x) - 1))
    at = nodes.astype(int).tolist()
    best, least = np.zeros(count, np.longdouble), np.inf
    for _ in range(60):
        coefficients = _levelled(basis[at] * weight[at, None], goal[at] * weight[at])
        error = (basis @ coefficients - goal) * weight
        worst = float(np.max(np.abs(error)))
        if worst < least:
            best, least = coefficients, worst
        following = _alternating(error, count + 1)
        if len(following) <= count or following == at:
            break
        at = following
    return best


def _levelled(basis: Reals, goal: Reals) -> Reals:
    """Coefficients whose errors at the nodes are equal in size and alternate in sign."""
    count = len(goal)
    matrix, right = mpmath.matrix(count, count), mpmath.matrix(count, 1)
    for row in range(count):
        for column in range(count - 1):
            matrix[row, column] = mpmath.mpf(str(basis[row, column]))
        matrix[row, count - 1] = (-1) ** row
        right[row] = mpmath.mpf(str(goal[row]))
    with mpmath.workdps(40):
        solution = mpmath.lu_solve(matrix, right)
        return np.array([np.longdouble(str(solution[k])) for k in range(count - 1)])


def _alternating(error: Reals, count: int) -> list[int]:
    """`count` places where the error is extreme, with alternating signs."""
    changes = np.flatnonzero(np.diff(np.sign(error))) + 1
    pieces = np.split(np.arange(len(error)), changes)
    at = [int(piece[np.argmax(np.abs(error[piece]))]) for piece in pieces]
    while len(at) > count:
        sizes = np.abs(error[at])
        if len(at) == count + 1:
            at.pop(0 if sizes[0] < sizes[-1] else -1)
            continue
        least = int(np.argmin(sizes[1:-1])) + 1
        other = least - 1 if sizes[least - 1] < sizes[least + 1] else least + 1
        at = [place for k, place in enumerate(at) if k not in (least, other)]
    return at


if __name__ == "__main__":
    for fit in FITS:
        coefficients, error = rounded_fit(fit)
        print(f"{fit.name}: {', '.join(str(c) for c in coefficients)}  # error {error:.2g}")
