"""The elementary functions of the scalar vocabulary as LLVM calls, for any number of lanes.

A function comes from the first of these that has it:

    1. an LLVM intrinsic, where that is an instruction (sqrt, floor, copysign, ...);
    2. our own code (math.py), where it was measured faster than the call it replaces;
    3. SLEEF inside libtorch_cpu, at most 1.0 ulp off (erfc 1.5), what ATen itself calls; a
       width that SLEEF lacks is split into or padded to one that it has;
    4. the C library, lane by lane; float32 through float64, for its float32 functions may be
       several ulp off. It also serves where SLEEF overflows too early, on a cold path.

All are free of traps and take any bit pattern, so lanes that a mask excludes may hold garbage.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusee.codegen.llvm.types import HELD, Machine, literal, mangled, vector

# ---------------------------------------------------------------------------- polynomials
# Elementary functions of float32 as straight-line LLVM IR, free of calls.
#
# Each is range reduction and one or two polynomials, the textbook schemes of Cody and Waite
# ("Software Manual for the Elementary Functions", 1980) and Muller ("Elementary Functions", 2016).
# The coefficients are our own minimax fits; `python -m bench.fit_polynomials` prints them. Results
# are right for every float32: NaN, infinities, zeros, denormal operands and results. BOUNDS states
# the errors; tests sweep all of them.
#
# Every operation is a plain IEEE one. With `fused` products and sums are one instruction; without,
# two, and the constants of the reductions are short enough for their products to be exact.

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


# ---------------------------------------------------------------------------- math


@dataclass(frozen=True)
class MathFunction:
    """How to call one function: `symbol` takes and returns vectors, scalars if of one lane.

    `declares` are the lines that the module needs once; `define` is the text of an internal
    function, needed once as well, or None where `symbol` is external.
    """

    symbol: str
    declares: tuple[str, ...]
    define: str | None = None


_PURE = "nounwind willreturn memory(none)"
_INLINED = f"alwaysinline {_PURE}"
_COLD = f"cold noinline {_PURE}"
HAS_FUSED = frozenset({"fma", "neon"})  # either has fused multiply-add

_INTRINSICS = {
    "sqrt": ("sqrt", 1),
    "floor": ("floor", 1),
    "ceil": ("ceil", 1),
    "trunc": ("trunc", 1),
    "round": ("rint", 1),  # to even in the default rounding mode, which torch never leaves
    "copysign": ("copysign", 2),
    "fma": ("fma", 3),
}

# op -> (SLEEF's name, its precision suffix, the C library's name, operands)
_LIBRARY = {
    "exp": ("exp", "_u10", "exp", 1),
    "exp2": ("exp2", "_u10", "exp2", 1),
    "expm1": ("expm1", "_u10", "expm1", 1),
    "log": ("log", "_u10", "log", 1),
    "log2": ("log2", "_u10", "log2", 1),
    "log10": ("log10", "_u10", "log10", 1),
    "log1p": ("log1p", "_u10", "log1p", 1),
    "sin": ("sin", "_u10", "sin", 1),
    "cos": ("cos", "_u10", "cos", 1),
    "tan": ("tan", "_u10", "tan", 1),
    "asin": ("asin", "_u10", "asin", 1),
    "acos": ("acos", "_u10", "acos", 1),
    "atan": ("atan", "_u10", "atan", 1),
    "sinh": ("sinh", "_u10", "sinh", 1),
    "cosh": ("cosh", "_u10", "cosh", 1),
    "tanh": ("tanh", "_u10", "tanh", 1),
    "asinh": ("asinh", "_u10", "asinh", 1),
    "acosh": ("acosh", "_u10", "acosh", 1),
    "atanh": ("atanh", "_u10", "atanh", 1),
    "erf": ("erf", "_u10", "erf", 1),
    "erfc": ("erfc", "_u15", "erfc", 1),
    "lgamma": ("lgamma", "_u10", "lgamma", 1),
    "pow": ("pow", "_u10", "pow", 2),
    "atan2": ("atan2", "_u10", "atan2", 2),
    "hypot": ("hypot", "_u05", "hypot", 2),
    "fmod": ("fmod", "", "fmod", 2),
    "nextafter": ("nextafter", "", "nextafter", 2),
}

# Exact in the operands' own format, and wrong or pointless by way of float64.
_EXACT = frozenset({"fmod", "nextafter"})

# Where |x| is larger than this, SLEEF overflows before the result does (float32, float64).
_SLEEF_LIMITS = {
    "sinh": (88.0, 709.0),
    "cosh": (88.0, 709.0),
    "asinh": (2.0**60, 2.0**500),
    "acosh": (2.0**60, 2.0**500),
    "lgamma": (2.0**100, 2.0**1000),
}
# Where |x| is larger than this many times |y|, SLEEF's fmod is NaN.
_FMOD_LIMITS = (2.0**100, 2.0**900)


def math_function(
    name: str,
    dtype: torch.dtype,
    lanes: int,
    cpu: Machine,
    exported: Callable[[str], bool] | None = None,
) -> MathFunction:
    """The function that computes op `name` of the vocabulary on `lanes` values of `dtype`.

    `exported` tells whether a symbol can be linked from libtorch; by default libtorch is asked.
    Raises KeyError for a name or dtype that has no row.
    """
    return _chosen(name, dtype, lanes, cpu.features, exported or exported_by_torch)


# A model asks for the same few functions again and again, and their text takes a while to write.
@functools.cache
def _chosen(
    name: str,
    dtype: torch.dtype,
    lanes: int,
    features: frozenset[str],
    exported: Callable[[str], bool],
) -> MathFunction:
    kind = _Kind(dtype, lanes)
    if name in _INTRINSICS:
        return _intrinsic(name, kind)
    if name == "rsqrt":
        return _rsqrt(kind)
    fused = not HAS_FUSED.isdisjoint(features)
    if dtype is torch.float32 and name in FORMULAS and (fused or name not in NEEDS_FUSED):
        return _own(name, kind, fused, features, exported)
    return _called(name, kind, f"fusee.{name}.{kind.mangled}", features, exported)


@dataclass(frozen=True)
class _Kind:
    """`lanes` values of a dtype, as LLVM spells them."""

    dtype: torch.dtype
    lanes: int

    @property
    def scalar(self) -> str:
        return HELD[self.dtype]

    @property
    def text(self) -> str:
        return vector(self.scalar, self.lanes)

    @property
    def mangled(self) -> str:
        return mangled(self.scalar, self.lanes)

    def splat(self, number: float) -> str:
        return literal(number, self.dtype, self.lanes)


def _declare(result: str, symbol: str, operands: int, attributes: str = "") -> str:
    return f"declare {result} @{symbol}({', '.join([result] * operands)}) {attributes}".rstrip()


def _define(symbol: str, kind: _Kind, operands: int, body: list[str], how: str = _INLINED) -> str:
    """An internal function of parameters %x0, %x1, ..."""
    parameters = ", ".join(f"{kind.text} %x{i}" for i in range(operands))
    lines = "\n".join(line if line.endswith(":") else f"  {line}" for line in body)
    return f"define internal {kind.text} @{symbol}({parameters}) {how} {{\n{lines}\n}}\n"


def _call(kind: str, symbol: str, operands: list[str]) -> str:
    return f"call {kind} @{symbol}({', '.join(f'{kind} {x}' for x in operands)})"


# ------------------------------------------------------------------------- instructions


def _intrinsic(name: str, kind: _Kind) -> MathFunction:
    intrinsic, operands = _INTRINSICS[name]
    symbol = f"llvm.{intrinsic}.{kind.mangled}"
    return MathFunction(symbol, (_declare(kind.text, symbol, operands),))


def _rsqrt(kind: _Kind) -> MathFunction:
    root = _intrinsic("sqrt", kind)
    body = [
        f"%s = {_call(kind.text, root.symbol, ['%x0'])}",
        f"%r = fdiv {kind.text} {kind.splat(1.0)}, %s",
        f"ret {kind.text} %r",
    ]
    symbol = f"fusee.rsqrt.{kind.mangled}"
    return MathFunction(symbol, root.declares, _define(symbol, kind, 1, body))


# ---------------------------------------------------------------------------- our code


def _own(
    name: str, kind: _Kind, fused: bool, has: frozenset[str], exported: Callable[[str], bool]
) -> MathFunction:
    code = Code(kind.lanes, fused)
    value = FORMULAS[name](code, "%x0")
    symbol = f"fusee.{name}.{kind.mangled}"
    if name not in LIMITS:
        body = [*code.lines, f"ret {kind.text} {value}"]
        return MathFunction(symbol, tuple(code.declares), _define(symbol, kind, 1, body))
    far = _called(name, kind, f"{symbol}.far", has, exported, _COLD)
    declares = tuple(code.declares)
    return _guarded(symbol, kind, 1, (code.lines, value, declares), far, LIMITS[name])


def _guarded(
    symbol: str,
    kind: _Kind,
    operands: int,
    near: tuple[list[str], str, tuple[str, ...]],
    far: MathFunction,
    limit: float,
) -> MathFunction:
    """`near` in lanes where |x| <= limit, or limit |y|; `far` in others, called if there are any.

    `near` is code, its value's name and what it declares.
    """
    fabs = f"llvm.fabs.{kind.mangled}"
    declares = [_declare(kind.text, fabs, 1)]
    names = [f"%x{i}" for i in range(operands)]
    body = [f"%size{i} = {_call(kind.text, fabs, [x])}" for i, x in enumerate(names)]
    bound = kind.splat(limit)
    if operands == 2:
        body.append(f"%bound = fmul {kind.text} %size1, {bound}")
        bound = "%bound"
    body.append(f"%each = fcmp ole {kind.text} %size0, {bound}")
    every = "%each"
    if kind.lanes > 1:
        reduce = f"llvm.vector.reduce.and.v{kind.lanes}i1"
        declares.append(f"declare i1 @{reduce}(<{kind.lanes} x i1>)")
        body.append(f"%all = call i1 @{reduce}(<{kind.lanes} x i1> %each)")
        every = "%all"
    lines, value, own = near
    body = [*lines, *body, f"br i1 {every}, label %done, label %some"]
    body += ["some:", f"%slow = {_call(kind.text, far.symbol, names)}"]
    bits = vector("i1", kind.lanes)
    body.append(f"%mixed = select {bits} %each, {kind.text} {value}, {kind.text} %slow")
    body += ["br label %done", "done:"]
    # without a name the first block is %0
    body.append(f"%y = phi {kind.text} [ {value}, %0 ], [ %mixed, %some ]")
    body.append(f"ret {kind.text} %y")
    declares += [*own, *far.declares]
    define = (far.define or "") + _define(symbol, kind, operands, body)
    return MathFunction(symbol, tuple(dict.fromkeys(declares)), define)


# ------------------------------------------------------------------------------- SLEEF


@functools.cache
def _libtorch() -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}
    return ctypes.CDLL(str(folder / name.get(sys.platform, "libtorch_cpu.so")))


@functools.cache
def exported_by_torch(symbol: str) -> bool:
    """True if libtorch_cpu exports `symbol`; which ones it does differs by platform and build."""
    return hasattr(_libtorch(), symbol)


def _called(
    name: str,
    kind: _Kind,
    symbol: str,
    has: frozenset[str],
    exported: Callable[[str], bool],
    how: str = _INLINED,
) -> MathFunction:
    """SLEEF, with the C library where it fails, or the C library alone; defined as `symbol`."""
    operands = _LIBRARY[name][3]
    single = kind.dtype is torch.float32
    limits = _FMOD_LIMITS if name == "fmod" else _SLEEF_LIMITS.get(name)
    sleef = _sleef(name, kind, symbol if limits is None else f"{symbol}.near", has, exported, how)
    if sleef is None:
        return _libm(name, kind, symbol, how)
    if limits is None:
        return sleef
    far = _libm(name, kind, f"{symbol}.far", _COLD)
    names = [f"%x{i}" for i in range(operands)]
    near = ([f"%value = {_call(kind.text, sleef.symbol, names)}"], "%value", sleef.declares)
    guarded = _guarded(symbol, kind, operands, near, far, limits[0 if single else 1])
    define = (sleef.define or "") + (guarded.define or "")
    return MathFunction(symbol, guarded.declares, define)


def _sleef_widths(dtype: torch.dtype, has: frozenset[str]) -> list[tuple[int, str]]:
    """Lanes of SLEEF's variants that this processor runs, with the variant's name, widest first."""
    found: list[tuple[int, str]] = []
    if "avx512f" in has:
        found.append((16, "avx512f"))
    if "avx" in has:
        found.append((8, "avx2" if {"avx2", "fma"} <= has else "avx"))
    if "neon" in has:
        found.append((4, "advsimd"))
    half = dtype is torch.float64
    return [(lanes // 2 if half else lanes, variant) for lanes, variant in found]


def _sleef(
    name: str,
    kind: _Kind,
    symbol: str,
    has: frozenset[str],
    exported: Callable[[str], bool],
    how: str,
) -> MathFunction | None:
    sleef, precision, _, operands = _LIBRARY[name]
    letter = "f" if kind.dtype is torch.float32 else "d"
    usable: dict[int, str] = {}
    for width, variant in _sleef_widths(kind.dtype, has):
        plain = f"Sleef_{sleef}{letter}{width}{precision}"
        # the variant itself where it can be had: the plain name jumps through a pointer
        direct = f"{plain}{variant}" if precision else f"{plain}_{variant}"
        found = next((s for s in (direct, plain) if exported(s)), None)
        if found is not None:
            usable[width] = found
    if not usable:
        return None
    wide_enough = [width for width in usable if width >= kind.lanes]
    width = min(wide_enough) if wide_enough else max(usable)
    wide = _Kind(kind.dtype, width)
    declare = _declare(wide.text, usable[width], operands, _PURE)
    if width == kind.lanes:
        return MathFunction(usable[width], (declare,))
    body = _resized(usable[width], kind, wide, operands)
    return MathFunction(symbol, (declare,), _define(symbol, kind, operands, body, how))


def _shuffle(name: str, kind: str, a: str, b: str, picks: list[int]) -> str:
    mask = ", ".join(f"i32 {i}" for i in picks)
    return f"%{name} = shufflevector {kind} {a}, {kind} {b}, <{len(picks)} x i32> <{mask}>"


def _resized(symbol: str, kind: _Kind, wide: _Kind, operands: int) -> list[str]:
    """The body for `kind` by calls of a function of `wide`; spare lanes repeat real ones."""
    lines: list[str] = []
    results: list[str] = []
    for first in range(0, kind.lanes, wide.lanes):
        given: list[str] = []
        for i in range(operands):
            source, text = f"%x{i}", kind.text
            if kind.lanes == 1:
                text = wide.text
                lines.append(f"%s{i} = insertelement {text} poison, {kind.text} {source}, i64 0")
                source = f"%s{i}"
            picks = [(first + k) % kind.lanes for k in range(wide.lanes)]
            given.append(f"%a{i}_{first}")
            lines.append(_shuffle(given[-1][1:], text, source, "poison", picks))
        lines.append(f"%r{first} = {_call(wide.text, symbol, given)}")
        results.append(f"%r{first}")
    if kind.lanes == 1:
        lines.append(f"%y = extractelement {wide.text} %r0, i64 0")
        return [*lines, f"ret {kind.text} %y"]
    if kind.lanes < wide.lanes:
        lines.append(_shuffle("y", wide.text, "%r0", "poison", list(range(kind.lanes))))
        return [*lines, f"ret {kind.text} %y"]
    return lines + _joined(results, wide)


def _joined(parts: list[str], kind: _Kind) -> list[str]:
    """Concatenates vectors pairwise and returns the whole."""
    lines: list[str] = []
    while len(parts) > 1:
        halves = list(zip(parts[::2], parts[1::2], strict=True))
        parts = [f"%j{kind.lanes}_{k}" for k in range(len(halves))]
        picks = list(range(2 * kind.lanes))
        lines += [
            _shuffle(part[1:], kind.text, a, b, picks)
            for part, (a, b) in zip(parts, halves, strict=True)
        ]
        kind = _Kind(kind.dtype, 2 * kind.lanes)
    return [*lines, f"ret {kind.text} {parts[0]}"]


# --------------------------------------------------------------------------- C library


def _libm(name: str, kind: _Kind, symbol: str, how: str) -> MathFunction:
    """Lane by lane. lgamma's global sign is the one effect; nobody reads it."""
    _, _, function, operands = _LIBRARY[name]
    single = kind.dtype is torch.float32
    widened = single and name not in _EXACT
    if single and not widened:
        function += "f"
    inner = "double" if widened else kind.scalar
    declare = _declare(inner, function, operands, _PURE)
    if kind.lanes == 1 and not widened:
        return MathFunction(function, (declare,))
    lines: list[str] = []
    whole = "poison"
    for lane in range(kind.lanes):
        given = []
        for i in range(operands):
            value = f"%x{i}"
            if kind.lanes > 1:
                lines.append(f"%e{i}_{lane} = extractelement {kind.text} {value}, i64 {lane}")
                value = f"%e{i}_{lane}"
            if widened:
                lines.append(f"%w{i}_{lane} = fpext float {value} to double")
                value = f"%w{i}_{lane}"
            given.append(value)
        value = f"%c{lane}"
        lines.append(f"{value} = {_call(inner, function, given)}")
        if widened:
            lines.append(f"%t{lane} = fptrunc double {value} to float")
            value = f"%t{lane}"
        if kind.lanes == 1:
            whole = value
        else:
            into = f"{kind.text} {whole}, {kind.scalar} {value}"
            lines.append(f"%v{lane} = insertelement {into}, i64 {lane}")
            whole = f"%v{lane}"
    lines.append(f"ret {kind.text} {whole}")
    return MathFunction(symbol, (declare,), _define(symbol, kind, operands, lines, how))
