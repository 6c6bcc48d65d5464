"""The elementary functions of the scalar vocabulary as LLVM calls, for any number of lanes.

A function comes from the first of these that has it:

    1. an LLVM intrinsic, where that is an instruction (sqrt, floor, copysign, ...);
    2. our own code (polynomials.py), where it was measured faster than the call it replaces;
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fusee.codegen.llvm.polynomials import FORMULAS, LIMITS, NEEDS_FUSED, Code
from fusee.codegen.llvm.types import HELD, Machine, literal, mangled, vector

__all__ = ["MathFunction", "exported_by_torch", "math_function"]


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
