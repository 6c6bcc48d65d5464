"""How values of each dtype are held in registers and in memory, and their literals.

bfloat16 and float16 are held as float32 that are exactly representable in the narrow type; a bool
is an i1. Memory holds a bool as a byte of 0 or 1, bfloat16 as its bits, float16 as LLVM's half, or
as its bits where the processor has no conversions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

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
