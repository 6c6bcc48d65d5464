"""How values of each dtype are held in registers and in memory, and their literals.

bfloat16 and float16 are held as float32 that are exactly representable in the narrow type; a bool
is an i1. Memory holds a bool as a byte of 0 or 1, bfloat16 as its bits, float16 as LLVM's half, or
as its bits where the processor has no conversions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from fusee.runtime.llvm_text import Level, mangled, splat, vector

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
    def has_fused(self) -> bool:
        """True if products and sums are one instruction, with one rounding."""
        return not {"fma", "neon"}.isdisjoint(self.features)

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


# ---------------------------------------------------------------------------- target


class Target:
    """Where instructions go: a level, for a machine, `lanes` at a time."""

    __slots__ = ("level", "machine", "lanes")

    def __init__(self, level: Level, machine: Machine, lanes: int) -> None:
        self.level, self.machine, self.lanes = level, machine, lanes

    def kind(self, dtype: torch.dtype) -> str:
        return vector(HELD[dtype], self.lanes)

    def word(self, value: int) -> str:
        """An i32 in all lanes."""
        return splat("i32", value, self.lanes)

    def intrinsic(self, name: str, kind: str, *operands: str, flag: str = "") -> str:
        """Call llvm.<name> on operands of scalar type `kind`; `flag` is a last i1 operand."""
        full = vector(kind, self.lanes)
        given = [(full, operand) for operand in operands]
        if flag:
            given.append(("i1", flag))
        return self.level.call(full, f"llvm.{name}.{mangled(kind, self.lanes)}", *given)

    def convert(self, op: str, x: str, source: str, result: str) -> str:
        """A conversion instruction between scalar types `source` and `result`."""
        return self.level.op(
            f"{op} {vector(source, self.lanes)} {x} to {vector(result, self.lanes)}"
        )

    def select(self, condition: str, kind: str, x: str, y: str) -> str:
        full = vector(kind, self.lanes)
        mask = vector("i1", self.lanes)
        return self.level.op(f"select {mask} {condition}, {full} {x}, {full} {y}")
