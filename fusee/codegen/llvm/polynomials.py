"""Elementary functions of float32 as straight-line LLVM IR, free of calls.

Each is range reduction and one or two polynomials, the textbook schemes of Cody and Waite
("Software Manual for the Elementary Functions", 1980) and Muller ("Elementary Functions", 2016).
The coefficients are our own minimax fits; `python -m bench.fit_polynomials` prints them. Results
are right for every float32: NaN, infinities, zeros, denormal operands and results. BOUNDS states
the errors; tests sweep all of them.

Every operation is a plain IEEE one. With `fused` products and sums are one instruction; without,
two, and the constants of the reductions are short enough for their products to be exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fusee.codegen.llvm.types import literal, mangled, vector

__all__ = ["BOUNDS", "Code", "FORMULAS", "LIMITS", "NEEDS_FUSED"]

# Largest error in units in the last place: with fused multiply-add, and without. Measured on ten
# million operands each and rounded up.
BOUNDS: dict[str, tuple[float, float]] = {
    "exp": (1.05, 1.05),
    "exp2": (0.9, 1.15),
    "expm1": (1.1, 1.15),
    "log": (0.95, 0.95),
    "log1p": (0.95, 0.95),
    "sin": (1.05, 1.0),  # the second is SLEEF's
    "cos": (1.05, 1.0),
    "tanh": (1.0, 1.15),
    "erf": (1.0, 1.3),
}

# Their reductions need exact products, and hold for |x| up to this only.
NEEDS_FUSED = frozenset({"sin", "cos"})
LIMITS = {"sin": 1e5, "cos": 1e5}

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # 9 bits: exact times any exponent
_LN2_LOW = -2.12194440054690583e-4
_TWO_OVER_PI = 0.6366197723675814
_PI_HALVES = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100059018e-15)
# Added to a small number it leaves the nearest integer in the low bits of the sum.
_MAGIC = 12582912.0
_ONE_BITS = 0x3F800000
_SQRT_HALF_BITS = 0x3F3504F3

# e^r = 1 + r + r^2 q(r), |r| <= ln(2)/2, to 3.5e-9 of e^r.
_EXP = (0.49999994, 0.16666515, 0.041668244, 0.0083692465, 0.0013823039)
# The same to 4.7e-10 of e^r - 1.
_EXPM1 = (0.5, 0.16666666, 0.041666467, 0.008333642, 0.0013934992, 0.0001966736)
# 2^r = 1 + r q(r), |r| <= 1/2, to 5.4e-9.
_EXP2 = (0.69314724, 0.24022655, 0.055502806, 0.009617136, 0.0013412792, 0.00015760156)
# log(1 + f) = f + f^2 q(f), sqrt(1/2) <= 1 + f <= sqrt(2), to 4.2e-9 of log(1 + f).
_LOG = (
    -0.49999988, 0.33333325, -0.250016, 0.20002013, -0.16608767, 0.14180896, -0.13244441,
    0.12910366, -0.076250926,
)  # fmt: skip
# sin r = r + r^3 q(r^2) and cos r = 1 - r^2/2 + r^4 q(r^2), |r| <= pi/4, to 4.2e-9 and 1.2e-10.
_SIN = (-0.16666654, 0.008332106, -0.00019507883)
_COS = (0.041666646, -0.0013887308, 2.4432104e-05)
# tanh x = x + x^3 q(x^2), |x| <= 1, to 4.8e-9.
_TANH = (
    -0.33333296, 0.13332345, -0.0538797, 0.021486163, -0.007945173, 0.002300574, -0.0003582004,
)  # fmt: skip
# erf x = x + x q(x^2), |x| <= 1, to 1.4e-9.
_ERF = (
    0.12837917, -0.37612626, 0.11283579, -0.026853347, 0.005187162, -0.0007997853, 7.806904e-05,
)  # fmt: skip
# log2(1 - erf x) = x q(x), 1 <= x <= 4, to 2.5e-9 of 1.
_LOG2_ERFC = (-1.628047, -0.91732967, -0.15162589, 0.03287544, -0.004592868, 0.0003032961)


class Code:
    """The body of one function over `lanes` float32 values, as numbered instructions.

    Values are IR operands: "%3", or a constant made by `real` and `whole`.
    """

    def __init__(self, lanes: int, fused: bool) -> None:
        self.fused = fused
        self.lanes = lanes
        self.reals, self.wholes = vector("float", lanes), vector("i32", lanes)
        self.bits = vector("i1", lanes)
        self.lines: list[str] = []
        self.declares: dict[str, None] = {}
        self._count = 0

    def line(self, text: str) -> str:
        self._count += 1
        self.lines.append(f"%v{self._count} = {text}")
        return f"%v{self._count}"

    # -- operands

    def real(self, number: float) -> str:
        return literal(number, torch.float32, self.lanes)

    def whole(self, number: int) -> str:
        return literal(number, torch.int32, self.lanes)

    # -- float32

    def add(self, x: str, y: str) -> str:
        return self.line(f"fadd {self.reals} {x}, {y}")

    def sub(self, x: str, y: str) -> str:
        return self.line(f"fsub {self.reals} {x}, {y}")

    def mul(self, x: str, y: str) -> str:
        return self.line(f"fmul {self.reals} {x}, {y}")

    def neg(self, x: str) -> str:
        return self.line(f"fneg {self.reals} {x}")

    def div(self, x: str, y: str) -> str:
        return self.line(f"fdiv {self.reals} {x}, {y}")

    def fma(self, x: str, y: str, z: str) -> str:
        """x y + z, rounded once or twice."""
        if not self.fused:
            return self.add(self.mul(x, y), z)
        return self.intrinsic("fma", x, y, z)

    def intrinsic(self, name: str, *operands: str) -> str:
        kind, symbol = self.reals, f"llvm.{name}.{mangled('float', self.lanes)}"
        self.declares[f"declare {kind} @{symbol}({', '.join([kind] * len(operands))})"] = None
        return self.line(f"call {kind} @{symbol}({', '.join(f'{kind} {x}' for x in operands)})")

    def polynomial(self, x: str, coefficients: Sequence[float]) -> str:
        """Horner's scheme, lowest coefficient first."""
        total = self.real(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            total = self.fma(total, x, self.real(c))
        return total

    def magnitude(self, x: str) -> str:
        return self.intrinsic("fabs", x)

    def compare(self, how: str, x: str, y: str) -> str:
        return self.line(f"fcmp {how} {self.reals} {x}, {y}")

    def select(self, condition: str, x: str, y: str) -> str:
        return self.line(f"select {self.bits} {condition}, {self.reals} {x}, {self.reals} {y}")

    def at_most(self, x: str, limit: float) -> str:
        """The smaller; NaN stays."""
        bound = self.real(limit)
        return self.select(self.compare("ogt", x, bound), bound, x)

    def at_least(self, x: str, limit: float) -> str:
        bound = self.real(limit)
        return self.select(self.compare("olt", x, bound), bound, x)

    # -- bit patterns

    def raw(self, x: str) -> str:
        return self.line(f"bitcast {self.reals} {x} to {self.wholes}")

    def cooked(self, i: str) -> str:
        return self.line(f"bitcast {self.wholes} {i} to {self.reals}")

    def int(self, op: str, i: str, j: str | int) -> str:
        other = self.whole(j) if isinstance(j, int) else j
        return self.line(f"{op} {self.wholes} {i}, {other}")

    def sign(self, x: str) -> str:
        return self.int("and", self.raw(x), -0x80000000)

    def signed(self, x: str, sign: str) -> str:
        """`x`, not negative, with a sign bit added."""
        return self.cooked(self.int("or", self.raw(x), sign))

    # -- powers of two

    def rounded(self, x: str, factor: str) -> tuple[str, str]:
        """The integer nearest to x factor: as the low bits of a word, and as a float."""
        magic = self.real(_MAGIC)
        sum_ = self.fma(x, factor, magic)
        return self.raw(sum_), self.sub(sum_, magic)

    def power(self, n: str) -> str:
        """2^n for -126 <= n <= 127 in the low bits of `n`."""
        return self.cooked(self.int("add", self.int("shl", n, 23), _ONE_BITS))

    def times_power(self, x: str, n: str) -> str:
        """x 2^n in two steps, so that results may overflow and be denormal."""
        half = self.int("ashr", n, 1)
        return self.mul(self.mul(x, self.power(half)), self.power(self.int("sub", n, half)))


def _sum(c: Code, x: str, y: str) -> tuple[str, str]:
    """x + y and what its rounding lost; x is 0 or no smaller than y (Dekker)."""
    total = c.add(x, y)
    return total, c.sub(y, c.sub(total, x))


def _exp_reduced(c: Code, x: str) -> tuple[str, str]:
    """n and r with x = n ln(2) + r."""
    n, real = c.rounded(x, c.real(_LOG2_E))
    r = c.fma(real, c.real(-_LN2_HIGH), x)
    return n, c.fma(real, c.real(-_LN2_LOW), r)


def _exp_core(c: Code, r: str, coefficients: Sequence[float]) -> str:
    """e^r - 1"""
    return c.fma(c.mul(r, r), c.polynomial(r, coefficients), r)


def _exp(c: Code, x: str) -> str:
    n, r = _exp_reduced(c, c.at_least(c.at_most(x, 89.0), -104.0))
    return c.times_power(c.add(_exp_core(c, r, _EXP), c.real(1.0)), n)


def _exp2(c: Code, x: str) -> str:
    clamped = c.at_least(c.at_most(x, 129.0), -151.0)
    n, real = c.rounded(clamped, c.real(1.0))
    return c.times_power(_exp2_core(c, c.sub(clamped, real)), n)


def _exp2_core(c: Code, r: str) -> str:
    return c.fma(r, c.polynomial(r, _EXP2), c.real(1.0))


def _expm1(c: Code, x: str) -> str:
    x_ = c.at_least(c.at_most(x, 89.0), -20.0)
    n, real = c.rounded(x_, c.real(_LOG2_E))
    high = c.fma(real, c.real(-_LN2_HIGH), x_)
    r, lost = _sum(c, high, c.mul(real, c.real(-_LN2_LOW)))
    # halved: 2^n alone would overflow before the result does
    scale = c.power(c.int("sub", n, 1))
    sum_, lost_too = _sum(c, c.sub(scale, c.real(0.5)), c.mul(scale, r))
    tail = c.fma(c.mul(r, r), c.polynomial(r, _EXPM1), lost)
    y = c.add(sum_, c.fma(scale, tail, lost_too))
    return c.signed(c.add(y, y), c.sign(x))


def _log_core(c: Code, f: str, exponent: str, rest: str | None = None) -> str:
    """log(1 + f + rest) + exponent ln(2), where `rest` is a rounding error of f."""
    sum_, lost = _sum(c, c.mul(exponent, c.real(_LN2_HIGH)), f)
    if rest is not None:
        lost = c.add(lost, c.sub(rest, c.mul(rest, f)))
    small = c.fma(c.mul(f, f), c.polynomial(f, _LOG), c.mul(exponent, c.real(_LN2_LOW)))
    return c.add(sum_, c.add(small, lost))


def _split(c: Code, x: str) -> str:
    """The bits of x with those of the exponent such that sqrt(1/2) <= mantissa < sqrt(2)."""
    return c.int("sub", c.raw(x), _SQRT_HALF_BITS)


def _to_real(c: Code, i: str) -> str:
    return c.line(f"sitofp {c.wholes} {i} to {c.reals}")


def _log_ends(c: Code, y: str, x: str) -> str:
    """`y` where 0 < x < inf; elsewhere log(x): x itself if inf or NaN, -inf at 0, NaN below."""
    ends = c.select(c.compare("oeq", x, c.real(0.0)), c.real(float("-inf")), x)
    ends = c.select(c.compare("olt", x, c.real(0.0)), c.real(float("nan")), ends)
    usual = c.line(
        f"and {c.bits} {c.compare('ogt', x, c.real(0.0))}, "
        f"{c.compare('olt', x, c.real(float('inf')))}"
    )
    return c.select(usual, y, ends)


def _log(c: Code, x: str) -> str:
    tiny = c.compare("olt", x, c.real(2.0**-126))
    normal = c.select(tiny, c.mul(x, c.real(2.0**23)), x)
    bits = _split(c, normal)
    exponent = _to_real(c, c.int("ashr", bits, 23))
    exponent = c.select(tiny, c.sub(exponent, c.real(23.0)), exponent)
    mantissa = c.cooked(c.int("sub", c.raw(normal), c.int("and", bits, -0x800000)))
    return _log_ends(c, _log_core(c, c.sub(mantissa, c.real(1.0)), exponent), x)


def _log1p(c: Code, x: str) -> str:
    sum_ = c.add(x, c.real(1.0))
    bits = _split(c, sum_)
    exponent = _to_real(c, c.int("ashr", bits, 23))
    # 1 + f = (1 + x) 2^-k, without the rounding of 1 + x; 2^-k in quarters, as k may be 128
    scale = c.cooked(c.int("sub", c.whole(0x40800000), c.int("and", bits, -0x800000)))
    quarter = c.real(0.25)
    shift = c.fma(scale, quarter, c.real(-1.0))
    f, rest = _sum(c, shift, c.mul(c.mul(x, quarter), scale))
    y = _log_ends(c, _log_core(c, f, exponent, rest), sum_)
    small = c.compare("olt", c.magnitude(x), c.real(2.0**-30))
    return c.select(small, x, y)


def _sine(c: Code, x: str, turns: int) -> str:
    """sin(x + turns pi/2) for 0 <= x <= LIMITS."""
    n, real = c.rounded(x, c.real(_TWO_OVER_PI))
    high = c.fma(real, c.real(-_PI_HALVES[0]), x)
    r = c.fma(real, c.real(-_PI_HALVES[1]), high)
    lost = c.fma(real, c.real(-_PI_HALVES[1]), c.sub(high, r))
    # close to a multiple of pi/2 the difference is rounded itself, and r is good enough
    near = c.compare("olt", c.magnitude(r), c.real(2.0**-6))
    lost = c.select(near, c.real(0.0), lost)
    rest = c.fma(real, c.real(-_PI_HALVES[2]), lost)
    quadrant = c.int("add", n, turns) if turns else n
    square = c.mul(r, r)
    sine = c.add(r, c.fma(c.mul(square, r), c.polynomial(square, _SIN), rest))
    one, half = c.real(1.0), c.real(-0.5)
    first = c.fma(half, square, one)
    lost = c.fma(r, c.neg(rest), c.fma(half, square, c.sub(one, first)))
    cosine = c.add(first, c.fma(c.mul(square, square), c.polynomial(square, _COS), lost))
    odd = c.line(f"icmp ne {c.wholes} {c.int('and', quadrant, 1)}, {c.whole(0)}")
    flip = c.int("and", c.int("shl", quadrant, 30), -0x80000000)
    return c.cooked(c.int("xor", c.raw(c.select(odd, cosine, sine)), flip))


def _sin(c: Code, x: str) -> str:
    y = _sine(c, c.magnitude(x), 0)
    return c.cooked(c.int("xor", c.raw(y), c.sign(x)))


def _cos(c: Code, x: str) -> str:
    return _sine(c, c.magnitude(x), 1)


def _tanh(c: Code, x: str) -> str:
    size = c.magnitude(x)
    double = c.at_most(c.add(size, size), 20.0)
    n, r = _exp_reduced(c, double)
    power = c.power(n)
    sum_ = c.fma(_exp_core(c, r, _EXP), power, c.add(power, c.real(1.0)))  # e^2x + 1
    far = c.sub(c.real(1.0), c.div(c.real(2.0), sum_))
    square = c.mul(x, x)
    near = c.fma(c.mul(square, size), c.polynomial(square, _TANH), size)
    y = c.select(c.compare("olt", size, c.real(1.0)), near, far)
    return c.signed(y, c.sign(x))


def _erf(c: Code, x: str) -> str:
    size = c.magnitude(x)
    square = c.mul(x, x)
    near = c.fma(size, c.polynomial(square, _ERF), size)
    capped = c.at_most(size, 4.0)
    slope = c.polynomial(capped, _LOG2_ERFC)
    n, real = c.rounded(capped, slope)
    power = _exp2_core(c, c.fma(capped, slope, c.neg(real)))
    far = c.fma(c.neg(power), c.power(n), c.real(1.0))
    y = c.select(c.compare("olt", size, c.real(1.0)), near, far)
    return c.signed(y, c.sign(x))


FORMULAS: dict[str, Callable[[Code, str], str]] = {
    "exp": _exp,
    "exp2": _exp2,
    "expm1": _expm1,
    "log": _log,
    "log1p": _log1p,
    "sin": _sin,
    "cos": _cos,
    "tanh": _tanh,
    "erf": _erf,
}
