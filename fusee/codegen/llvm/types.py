"""How values of each dtype are held in registers and in memory, and their literals.

bfloat16 and float16 are held as float32 that are exactly representable in the narrow type; a bool
is an i1. Memory holds a bool as a byte of 0 or 1, bfloat16 as its bits, float16 as LLVM's half, or
as its bits where the processor has no conversions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

# ---------------------------------------------------------------------------- types


HELD = {
    torch.bool: "i1",
    torch.uint8: "i8",
    torch.int8: "i8",
    torch.uint16: "i16",
    torch.int16: "i16",
    torch.uint32: "i32",
    torch.int32: "i32",
    torch.uint64: "i64",
    torch.int64: "i64",
    torch.bfloat16: "float",
    torch.float16: "float",
    torch.float32: "float",
    torch.float64: "double",
}

SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})

BITS = {"i1": 1, "i8": 8, "i16": 16, "half": 16, "i32": 32, "float": 32, "i64": 64, "double": 64}

MANGLED = {"half": "f16", "float": "f32", "double": "f64"}


@dataclass(frozen=True)
class Machine:
    """What code is generated for: LLVM's feature names, and the width of a vector register.

    `vector_bits` 0 takes the widest that the features offer.
    """

    features: frozenset[str]
    vector_bits: int = 0

    @property
    def bits(self) -> int:
        if self.vector_bits:
            return self.vector_bits
        if "avx512f" in self.features:
            return 512
        return 256 if "avx2" in self.features else 128

    @property
    def is_x86(self) -> bool:
        return "neon" not in self.features

    @property
    def has_half(self) -> bool:
        return "f16c" in self.features or not self.is_x86

    @property
    def has_gather(self) -> bool:
        """True if gathers are instructions worth using; before AVX-512 scalar loads are as fast."""
        return "avx512f" in self.features

    def can_mask(self, bits: int) -> bool:
        """True if masked loads and stores of such elements are single instructions."""
        if bits >= 32:
            return "avx2" in self.features
        return "avx512bw" in self.features


def memory_type(dtype: torch.dtype, machine: Machine) -> str:
    if dtype is torch.bool:
        return "i8"
    if dtype is torch.bfloat16:
        return "i16"
    if dtype is torch.float16:
        return "half" if machine.has_half else "i16"
    return HELD[dtype]


def vector(kind: str, lanes: int) -> str:
    """The type of `lanes` elements; of one lane the scalar type."""
    return kind if lanes == 1 else f"<{lanes} x {kind}>"


def mangled(kind: str, lanes: int) -> str:
    """The type as intrinsics' names write it: f32, v8i64."""
    name = MANGLED.get(kind, kind)
    return name if lanes == 1 else f"v{lanes}{name}"


def splat(kind: str, number: str, lanes: int) -> str:
    """A literal in all lanes."""
    return number if lanes == 1 else f"splat ({kind} {number})"


def number(value: float | int | bool, dtype: torch.dtype) -> str:
    """A scalar literal. Floats as the bits of a double, which LLVM wants exact."""
    kind = HELD[dtype]
    if kind == "i1":
        return "true" if value else "false"
    if kind == "double":
        return _hexadecimal(float(value))
    if kind == "float":
        # through float32, for literals that lowering gave in full precision
        return _hexadecimal(_to_float32(float(value)))
    wide = int(value)
    return str(wide)


def _to_float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _hexadecimal(value: float) -> str:
    if value != value:
        return "0x7FF8000000000000"
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def literal(value: float | int | bool, dtype: torch.dtype, lanes: int) -> str:
    """A literal of `dtype` in all lanes."""
    return splat(HELD[dtype], number(value, dtype), lanes)


def is_float(dtype: torch.dtype) -> bool:
    return HELD[dtype] in ("float", "double")


# ---------------------------------------------------------------------------- text
# LLVM IR text: one growing basic block per loop level, and the module-level lines it needs.
#
# A Level is the body of one open loop. While an inner loop is being written into its own Level,
# code that does not depend on the inner loop can still be appended to the outer one: the inner
# loop's text follows only when it closes. That is how invariant code ends up outside without a
# later pass.


class Level:
    """The lines of one loop body so far, and what has been computed in it."""

    __slots__ = ("counters", "known", "label", "lines", "writer")

    def __init__(self, writer: Writer, label: str) -> None:
        self.writer = writer
        self.lines: list[str] = []
        self.label = label  # of the basic block that the next line goes to
        self.known: dict[Hashable, str | list[str]] = {}
        self.counters: dict[str, str] = {}  # factor -> the register that holds i times it

    def times(self, factor: str) -> str:
        """The loop's variable times a factor known outside, by one addition per round."""
        found = self.counters.get(factor)
        if found is None:
            self.writer.count += 1
            found = self.counters[factor] = f"%v{self.writer.count}"
        return found

    def op(self, text: str) -> str:
        """Append an instruction; its result's name."""
        self.writer.count += 1
        name = f"%v{self.writer.count}"
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Append an instruction without result."""
        self.lines.append("  " + text)

    def call(self, result: str, symbol: str, *operands: tuple[str, str]) -> str:
        """Call an intrinsic with (type, name) operands; its result's name, "" of void."""
        types = ", ".join(kind for kind, _ in operands)
        self.writer.declares[symbol] = f"declare {result} @{symbol}({types})"
        text = f"call {result} @{symbol}({', '.join(f'{k} {name}' for k, name in operands)})"
        if result != "void":
            return self.op(text)
        self.do(text)
        return ""


class Writer:
    """One function being written: the stack of open levels, innermost last.

    outlined  (op, dtype) of elementary functions that are called: so many calls would be too long
    """

    def __init__(self) -> None:
        self.count = 0
        self.labels = 0
        self.outlined: frozenset[Hashable] = frozenset()
        self.declares: dict[str, str] = {}  # by symbol: LLVM refuses a second declaration
        self.levels = [Level(self, "start")]

    @property
    def top(self) -> Level:
        return self.levels[-1]

    def loop(
        self,
        start: str,
        stop: str,
        step: int,
        carried: Sequence[tuple[str, str]],
        body: Callable[[str, list[str]], list[str]],
    ) -> list[str]:
        """for i in range(start, stop, step), with (type, initial value) carried round.

        `body` gets i and the carried names, writes into the new top level and returns the next
        carried names. Returns their final names. The test stands at the end, so code hoisted
        out of the body runs even if the loop does not.
        """
        self.labels += 1
        number = self.labels
        outer, inner = self.top, Level(self, f"body{number}")
        i = f"%i{number}"
        phis = [f"%c{number}_{k}" for k in range(len(carried))]
        self.levels.append(inner)
        after = body(i, phis)
        counters = []
        for factor, name in inner.counters.items():
            first = outer.op(f"mul i64 {start}, {factor}") if start != "0" else "0"
            by = outer.op(f"mul i64 {factor}, {step}") if step != 1 else factor
            counters.append((name, first, inner.op(f"add i64 {name}, {by}")))
        following = inner.op(f"add nsw i64 {i}, {step}")
        again = inner.op(f"icmp slt i64 {following}, {stop}")
        inner.do(f"br i1 {again}, label %body{number}, label %exit{number}")
        self.levels.pop()
        before = outer.label
        enter = outer.op(f"icmp slt i64 {start}, {stop}")
        outer.do(f"br i1 {enter}, label %body{number}, label %exit{number}")
        outer.lines.append(f"body{number}:")
        outer.do(f"{i} = phi i64 [ {start}, %{before} ], [ {following}, %{inner.label} ]")
        for (kind, first), phi, last in zip(carried, phis, after, strict=True):
            outer.do(f"{phi} = phi {kind} [ {first}, %{before} ], [ {last}, %{inner.label} ]")
        for name, first, last in counters:
            outer.do(f"{name} = phi i64 [ {first}, %{before} ], [ {last}, %{inner.label} ]")
        outer.lines += inner.lines
        outer.lines.append(f"exit{number}:")
        outer.label = f"exit{number}"
        return [
            outer.op(f"phi {kind} [ {first}, %{before} ], [ {last}, %{inner.label} ]")
            for (kind, first), last in zip(carried, after, strict=True)
        ]
