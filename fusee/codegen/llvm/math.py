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

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fusee.runtime.jit import libtorch
from fusee.runtime.llvm_text import HELD, InsertPoint, Writer, literal, mangled, vector
from fusee.source import Rules

# ---------------------------------------------------------------------------- polynomials
# Elementary functions of float32 as straight-line LLVM IR, free of calls.
#
# Each is range reduction and one or two polynomials, the textbook schemes of Cody and Waite
# ("Software Manual for the Elementary Functions", 1980) and Muller ("Elementary Functions", 2016).
# The coefficients are our own minimax fits; `python -m bench.fit_polynomials` prints them. Results
# are right for every float32: NaN, infinities, zeros, denormal operands and results. What errors
# they have is stated beside the tests that sweep all of them.
#
# Every operation is a plain IEEE one. With `fused` products and sums are one instruction; without,
# two, and the constants of the reductions are short enough for their products to be exact.

# Their reductions need exact products, and hold for |x| up to this, or this times |y|, only.
NEEDS_FUSED = frozenset({"sin", "cos", "fmod"})
LIMITS = {"sin": 1e5, "cos": 1e5, "fmod": 2.0**22}

_LOG2_E = 1.4426950408889634
_LOG2_E_LOW = 1.925963033500011e-8  # what float32 loses of it
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


def _arithmetic(name: str) -> Callable[[Code, str, str], str]:
    return lambda c, x, y: c.line(f"{name} {c.reals} {x}, {y}")


class Code:
    """float32 arithmetic by name. Values are operands: registers, or what `real`, `whole` make."""

    def __init__(self, t: InsertPoint) -> None:
        self.t, self.line = t, t.op
        self.fused = t.machine.has_fused
        kinds = ("float", "i32", "i1")
        self.reals, self.wholes, self.bits = (vector(kind, t.lanes) for kind in kinds)

    # -- operands

    def real(self, number: float) -> str:
        return _real(number, self.t.lanes)

    def whole(self, number: int) -> str:
        return literal(number, torch.int32, self.t.lanes)

    # -- float32

    add, sub, mul, div = map(_arithmetic, ("fadd", "fsub", "fmul", "fdiv"))

    def neg(self, x: str) -> str:
        return self.line(f"fneg {self.reals} {x}")

    def fma(self, x: str, y: str, z: str) -> str:
        """x y + z, rounded once or twice."""
        if not self.fused:
            return self.add(self.mul(x, y), z)
        return self.t.intrinsic("fma", "float", x, y, z)

    def polynomial(self, x: str, coefficients: Sequence[float]) -> str:
        """Horner's scheme, lowest coefficient first."""
        total = self.real(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            total = self.fma(total, x, self.real(c))
        return total

    def magnitude(self, x: str) -> str:
        return self.t.intrinsic("fabs", "float", x)

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

    def times_power(self, x: str, n: str, vanishes: str) -> str:
        """x 2^n in two steps, so that results may overflow and be denormal; 0 where it vanishes.

        A product that is too small for any number takes a processor 100 cycles and more, and masks
        of attention make such: there the second factor is 0.
        """
        half = self.int("ashr", n, 1)
        rest = self.select(vanishes, self.real(0.0), self.power(self.int("sub", n, half)))
        return self.mul(self.mul(x, self.power(half)), rest)


@functools.cache  # no formula has -0.0, which would be 0.0 here
def _real(number: float, lanes: int) -> str:
    return literal(number, torch.float32, lanes)


def _sum(c: Code, x: str, y: str) -> tuple[str, str]:
    """x + y and what its rounding lost; x is 0 or no smaller than y (Dekker)."""
    total = c.add(x, y)
    return total, c.sub(y, c.sub(total, x))


def _exp_reduced(c: Code, x: str) -> tuple[str, str]:
    """n and r with x = n ln(2) + r."""
    n, real = c.rounded(x, c.real(_LOG2_E))
    r = c.fma(real, c.real(-_LN2_HIGH), x)
    return n, c.fma(real, c.real(-_LN2_LOW), r)


def _exp_core(c: Code, r: str) -> str:
    """e^r - 1"""
    return c.fma(c.mul(r, r), c.polynomial(r, _EXP), r)


FORMULAS: Rules[str, Callable[..., str]] = Rules()


@FORMULAS.rule("exp")
def _exp(c: Code, x: str) -> str:
    if c.t.machine.is_simt:
        return each_lane(c.t, torch.float32, [x], lambda one, args: _exp_simt(Code(one), *args))
    n, r = _exp_reduced(c, c.at_least(c.at_most(x, 89.0), -104.0))
    vanishes = c.compare("olt", x, c.real(-104.0))
    return c.times_power(c.add(_exp_core(c, r), c.real(1.0)), n, vanishes)


def _exp_simt(c: Code, x: str) -> str:
    """2^n 2^r by a GPU's instruction for powers of two; the error is 2 ulp.

    n + 126 is what a fraction that saturates makes of 252, so that no x needs a test: where n is at
    its end, r has the rest. A sum with 2^23 + 2^22 has n + 127 in the bits that become an exponent.
    """
    call, real = c.t.level.call, c.real
    lifted = real(_MAGIC + 1)
    share = c.fma(x, real(_LOG2_E / 252), real(0.5))
    share = call("float", "llvm.nvvm.saturate.f", ("float", share))
    given = (("float", y) for y in (share, real(252.0), lifted))
    sum_ = call("float", "llvm.nvvm.fma.rm.f", *given)
    n = c.sub(sum_, real(_MAGIC + 127))
    r = c.fma(x, real(_LOG2_E), c.neg(n))
    r = c.fma(x, real(_LOG2_E_LOW), r)
    power = _by_gpu(c.t, "ex2.approx.ftz.f32", r)
    return c.mul(power, c.cooked(c.int("shl", c.raw(sum_), 23)))


def _by_gpu(t: InsertPoint, name: str, *operands: str) -> str:
    """An instruction of GPUs for float32 that is good to some ulp: a power of two, an inverse; a
    quotient, without the branch that an exact one takes."""

    def write(one: InsertPoint, given: Sequence[str]) -> str:
        return one.level.call("float", f"llvm.nvvm.{name}", *(("float", x) for x in given))

    return each_lane(t, torch.float32, operands, write)


def rough_quotient(t: InsertPoint, x: str, y: str) -> str:
    return _by_gpu(t, "div.full", x, y)


@FORMULAS.rule("exp2")
def _exp2(c: Code, x: str) -> str:
    clamped = c.at_least(c.at_most(x, 129.0), -151.0)
    n, real = c.rounded(clamped, c.real(1.0))
    vanishes = c.compare("olt", x, c.real(-151.0))
    return c.times_power(_exp2_core(c, c.sub(clamped, real)), n, vanishes)


def _exp2_core(c: Code, r: str) -> str:
    return c.fma(r, c.polynomial(r, _EXP2), c.real(1.0))


@FORMULAS.rule("expm1")
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


@FORMULAS.rule("log")
def _log(c: Code, x: str) -> str:
    tiny = c.compare("olt", x, c.real(2.0**-126))
    normal = c.select(tiny, c.mul(x, c.real(2.0**23)), x)
    bits = _split(c, normal)
    exponent = _to_real(c, c.int("ashr", bits, 23))
    exponent = c.select(tiny, c.sub(exponent, c.real(23.0)), exponent)
    mantissa = c.cooked(c.int("sub", c.raw(normal), c.int("and", bits, -0x800000)))
    return _log_ends(c, _log_core(c, c.sub(mantissa, c.real(1.0)), exponent), x)


@FORMULAS.rule("log1p")
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


@FORMULAS.rule("sin")
def _sin(c: Code, x: str) -> str:
    y = _sine(c, c.magnitude(x), 0)
    return c.cooked(c.int("xor", c.raw(y), c.sign(x)))


@FORMULAS.rule("cos")
def _cos(c: Code, x: str) -> str:
    return _sine(c, c.magnitude(x), 1)


@FORMULAS.rule("tanh")
def _tanh(c: Code, x: str) -> str:
    size = c.magnitude(x)
    if c.t.machine.is_simt:
        far = _far_tanh(c, size)
    else:
        n, r = _exp_reduced(c, c.at_most(c.add(size, size), 20.0))
        power = c.power(n)
        sum_ = c.fma(_exp_core(c, r), power, c.add(power, c.real(1.0)))  # e^2x + 1
        far = c.sub(c.real(1.0), c.div(c.real(2.0), sum_))
    square = c.mul(x, x)
    near = c.fma(c.mul(square, size), c.polynomial(square, _TANH), size)
    return _odd(c, x, size, near, far)


def _odd(c: Code, x: str, size: str, near: str, far: str) -> str:
    """An odd function of x by what it is of |x|: `near` below 1, `far` from there on."""
    y = c.select(c.compare("olt", size, c.real(1.0)), near, far)
    return c.signed(y, c.sign(x))


def _far_tanh(c: Code, size: str) -> str:
    """1 - 2 / (e^2x + 1) by a GPU's instructions, to 3e-7."""
    power = _by_gpu(c.t, "ex2.approx.ftz.f32", c.at_most(c.mul(size, c.real(2 * _LOG2_E)), 29.0))
    share = _by_gpu(c.t, "rcp.approx.ftz.f", c.add(power, c.real(1.0)))
    return c.fma(c.real(-2.0), share, c.real(1.0))


def rough_tanh(t: InsertPoint, x: str) -> str:
    """Of float32 on a GPU, to 2^-15: the result is to be rounded to 16 bits."""
    c = Code(t)
    size = c.magnitude(x)
    y = c.select(c.compare("olt", size, c.real(2.0**-7)), size, _far_tanh(c, size))
    return c.signed(y, c.sign(x))


@FORMULAS.rule("erf")
def _erf(c: Code, x: str) -> str:
    size = c.magnitude(x)
    square = c.mul(x, x)
    near = c.fma(size, c.polynomial(square, _ERF), size)
    capped = c.at_most(size, 4.0)
    slope = c.polynomial(capped, _LOG2_ERFC)
    if c.t.machine.is_simt:
        far = c.sub(c.real(1.0), _by_gpu(c.t, "ex2.approx.ftz.f32", c.mul(capped, slope)))
    else:
        n, real = c.rounded(capped, slope)
        power = _exp2_core(c, c.fma(capped, slope, c.neg(real)))
        far = c.fma(c.neg(power), c.power(n), c.real(1.0))
    return _odd(c, x, size, near, far)


@FORMULAS.rule("fmod")
def _fmod(c: Code, x: str, y: str) -> str:
    """Exact: a rounded quotient is at most one too large, and then the rest's sign is wrong."""
    size, by, sign = c.magnitude(x), c.magnitude(y), c.sign(x)
    times = c.t.intrinsic("trunc", "float", c.div(size, by))
    rest = c.fma(c.neg(times), by, size)
    rest = c.select(c.compare("olt", rest, c.real(0.0)), c.add(rest, by), rest)
    # of an infinite divisor the product is NaN
    return c.signed(c.select(c.compare("oeq", times, c.real(0.0)), size, rest), sign)


# ---------------------------------------------------------------------------- math


_PURE = "nounwind willreturn memory(none)"

# To even in the default rounding mode, which torch never leaves.
_INTRINSICS = {"round": "rint"}
_INTRINSICS |= {name: name for name in ("sqrt", "floor", "ceil", "trunc", "copysign", "fma")}

# op -> (suffix of SLEEF's name that tells its precision, operands); it and C agree on the rest
_LIBRARY = {
    **dict.fromkeys((
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
        "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "lgamma",
    ), ("_u10", 1)),
    "erfc": ("_u15", 1), "pow": ("_u10", 2), "atan2": ("_u10", 2), "hypot": ("_u05", 2),
    "fmod": ("", 2), "nextafter": ("", 2),
}  # fmt: skip

# A function of CUDA's library, as a kernel names it.
DEVICE = "fusee_"

# Exact in the operands' own format, and wrong or pointless by way of float64.
_EXACT = frozenset({"fmod", "nextafter"})

# Where |x| is larger than this, or than this many times |y|, SLEEF overflows before the result
# does, and its fmod is NaN (float32, float64).
_LIMITS = {
    "sinh": (88.0, 709.0),
    "cosh": (88.0, 709.0),
    "asinh": (2.0**60, 2.0**500),
    "acosh": (2.0**60, 2.0**500),
    "lgamma": (2.0**100, 2.0**1000),
    "fmod": (2.0**100, 2.0**900),
}


@functools.cache
def exported_by_torch(symbol: str) -> bool:
    """True if libtorch_cpu exports `symbol`; which ones it does differs by platform and build."""
    return hasattr(libtorch(), symbol)


def math_function(t: InsertPoint, name: str, dtype: torch.dtype, args: Sequence[str]) -> str:
    """Op `name` of the vocabulary on values of `dtype`.

    Raises KeyError for a name that has no row.
    """
    if name in _INTRINSICS:
        return t.intrinsic(_INTRINSICS[name], HELD[dtype], *args)
    if name == "rsqrt" and t.machine.is_simt and dtype is torch.float32:
        # a GPU's instruction, as in CUDA's rsqrtf: 2 ulp
        return each_lane(
            t, dtype, args,
            lambda one, x: one.level.call("float", "llvm.nvvm.rsqrt.approx.f", ("float", x[0])),
        )  # fmt: skip
    if name == "rsqrt":
        root = t.intrinsic("sqrt", HELD[dtype], *args)
        return t.op(f"fdiv {t.kind(dtype)} {literal(1.0, dtype, t.lanes)}, {root}")
    call = _Elementary(t, name, dtype, args)
    write = _Elementary.own if call.is_own() else _Elementary.library
    if (name, dtype) in t.level.writer.outlined and not call.is_one():
        return call.apart(name, "noinline", write)
    return write(call)


Write = Callable[[InsertPoint, Sequence[str]], str]


class _Elementary(NamedTuple):
    """A function of the vocabulary that is no intrinsic, of some arguments."""

    t: InsertPoint
    name: str
    dtype: torch.dtype
    args: Sequence[str]

    def is_own(self) -> bool:
        known = self.dtype is torch.float32 and self.name in FORMULAS
        return known and (self.t.machine.has_fused or self.name not in NEEDS_FUSED)

    def is_one(self) -> bool:
        """Whether the whole function is one call of a library's."""
        if self.is_own() or self.name in _LIMITS:
            return False
        found = self._sleef()
        if found is not None:
            return found[1] == self.t.lanes
        return self.t.lanes == 1 and (self.dtype is torch.float64 or self.name in _EXACT)

    def apart(self, name: str, how: str, write: Callable[[_Elementary], str]) -> str:
        """A call of a function of its own, whose body `write` writes."""
        t = self.t
        kind, declares = t.kind(self.dtype), t.level.writer.declares
        symbol = f"fusee.{name}.{mangled(HELD[self.dtype], t.lanes)}"
        if symbol not in declares:
            inner, given = Writer(), [f"%x{i}" for i in range(len(self.args))]
            there = InsertPoint(inner.top, t.machine, t.lanes)
            result = write(self._replace(t=there, args=given))
            parameters = ", ".join(f"{kind} {x}" for x in given)
            head = f"define internal {kind} @{symbol}({parameters}) {how} {_PURE}"
            declares |= inner.declares
            declares[symbol] = inner.define(head, f"{kind} {result}")
        return t.op(f"call {kind} @{symbol}({', '.join(f'{kind} {x}' for x in self.args)})")

    def own(self) -> str:
        value = FORMULAS[self.name](Code(self.t), *self.args)
        if self.name not in LIMITS:
            return value
        return self._guarded(value, LIMITS[self.name], _Elementary.library)

    def library(self) -> str:
        """SLEEF, with the C library where it fails, or the C library alone: CUDA's on a GPU."""
        found = self._sleef()
        if found is None:
            return self.libm()
        value = self._resized(*found)
        if self.name not in _LIMITS:
            return value
        return self._guarded(
            value, _LIMITS[self.name][self.dtype is torch.float64], _Elementary.libm
        )

    def _guarded(self, near: str, limit: float, far: Callable[[_Elementary], str]) -> str:
        """`near` in lanes where |x| <= limit, or limit |y|; `far` in others, if there are any."""
        t, held, kind = self.t, HELD[self.dtype], self.t.kind(self.dtype)
        sizes = [t.intrinsic("fabs", held, x) for x in self.args]
        bound = literal(limit, self.dtype, t.lanes)
        if len(sizes) == 2:
            bound = t.op(f"fmul {kind} {sizes[1]}, {bound}")
        each = every = t.op(f"fcmp ole {kind} {sizes[0]}, {bound}")
        if t.lanes > 1:
            reduce = f"llvm.vector.reduce.and.v{t.lanes}i1"
            every = t.level.call("i1", reduce, (vector("i1", t.lanes), each))

        def slow() -> str:
            if far is _Elementary.library and (t.machine.is_simt or self.is_one()):
                other = far(self)
            else:
                other = self.apart(f"{self.name}_{far.__name__}", "cold noinline", far)
            return t.select(each, held, near, other)

        return t.level.chosen(every, near, slow, kind)

    def _sleef(self) -> tuple[str, int] | None:
        """The symbol that suits best, and its lanes."""
        if self.t.machine.is_simt:
            return None
        letter, precision = "f" if self.dtype is torch.float32 else "d", _LIBRARY[self.name][0]
        usable: dict[int, str] = {}
        has = self.t.machine.features
        variants: list[tuple[int, str]] = []  # lanes of floats, widest first
        if "avx512f" in has:
            variants.append((16, "avx512f"))
        if "avx" in has:
            variants.append((8, "avx2" if {"avx2", "fma"} <= has else "avx"))
        if "neon" in has:
            variants.append((4, "advsimd"))
        half = self.dtype is torch.float64
        for lanes, variant in variants:
            width = lanes // 2 if half else lanes
            plain = f"Sleef_{self.name}{letter}{width}{precision}"
            # the variant itself where it can be had: the plain name jumps through a pointer
            direct = f"{plain}{variant}" if precision else f"{plain}_{variant}"
            found = next((s for s in (direct, plain) if exported_by_torch(s)), None)
            if found is not None:
                usable[width] = found
        if not usable:
            return None
        wide_enough = [width for width in usable if width >= self.t.lanes]
        width = min(wide_enough) if wide_enough else max(usable)
        return usable[width], width

    def _resized(self, symbol: str, width: int) -> str:
        """Calls of a function of `width` lanes; spare lanes repeat real ones."""
        t, args, held = self.t, self.args, HELD[self.dtype]
        wide = vector(held, width)
        call = functools.partial(t.level.call, wide, symbol, attributes=_PURE)
        if width == t.lanes:
            return call(*((wide, x) for x in args))
        results = []
        for first in range(0, t.lanes, width):
            given = []
            for x in args:
                kind = t.kind(self.dtype)
                if t.lanes == 1:
                    kind, x = wide, t.op(f"insertelement {wide} poison, {held} {x}, i64 0")
                picks = [(first + k) % t.lanes for k in range(width)]
                given.append((wide, t.level.shuffle(kind, x, "poison", picks)))
            results.append(call(*given))
        if t.lanes == 1:
            return t.op(f"extractelement {wide} {results[0]}, i64 0")
        if t.lanes < width:
            return t.level.shuffle(wide, results[0], "poison", range(t.lanes))
        while len(results) > 1:
            pairs = zip(results[::2], results[1::2], strict=True)
            kind, width = vector(held, width), 2 * width
            results = [t.level.shuffle(kind, *pair, range(width)) for pair in pairs]
        return results[0]

    def libm(self) -> str:
        """Lane by lane. lgamma's global sign is the one effect; nobody reads it."""
        held, is_simt = HELD[self.dtype], self.t.machine.is_simt
        widened = self.dtype is torch.float32 and self.name not in _EXACT and not is_simt
        inner = "double" if widened else held
        symbol = self.name + "f" * (inner == "float")
        if is_simt:
            symbol = f"{DEVICE}{symbol}"

        def write(one: InsertPoint, given: Sequence[str]) -> str:
            op = one.op
            wide = [op(f"fpext float {x} to double") if widened else x for x in given]
            value = one.level.call(inner, symbol, *((inner, x) for x in wide), attributes=_PURE)
            return op(f"fptrunc double {value} to float") if widened else value

        return each_lane(self.t, self.dtype, self.args, write)


def each_lane(t: InsertPoint, dtype: torch.dtype, args: Sequence[str], write: Write) -> str:
    """What `write` makes of each lane."""
    if t.lanes == 1:
        return write(t, args)
    kind, whole = t.kind(dtype), "poison"
    one = t.of(1)
    for lane in range(t.lanes):
        given = [t.op(f"extractelement {kind} {x}, i64 {lane}") for x in args]
        value = write(one, given)
        whole = t.op(f"insertelement {kind} {whole}, {HELD[dtype]} {value}, i64 {lane}")
    return whole
