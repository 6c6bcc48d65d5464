"""What processor code is generated for."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fusee.config import settings
from fusee.runtime import llvm

__all__ = ["Cpu", "target"]

_X86_64 = "x86_64-unknown-linux-gnu"
_SSE = ("sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16")
_AVX2 = (*_SSE, "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Cpu:
    """A processor as LLVM names it. `features` are those it has, such as "avx2" or "neon"."""

    triple: str
    name: str
    features: frozenset[str]
    flags: str  # features as a target machine takes them: "+avx2,-avx512f,..."

    @property
    def vector_bits(self) -> int:
        """Width of the widest vector registers."""
        if "avx512f" in self.features:
            return 512
        return 256 if "avx2" in self.features else 128


# What FUSEE_CPU may ask for; "" is the host.
_NAMED = {
    "sse": (_X86_64, "x86-64-v2", _SSE),
    "avx2": (_X86_64, "x86-64-v3", _AVX2),
    "avx512": (_X86_64, "x86-64-v4", _AVX512),
    "neon": ("aarch64-unknown-linux-gnu", "generic", ("neon", "fp-armv8")),
}


def target() -> Cpu:
    """The processor to generate code for: the host's, or the one that FUSEE_CPU names.

    raises   MissingPackage without llvmlite
    """
    return named(settings().cpu)


def named(name: str) -> Cpu:
    """One of the processors that FUSEE_CPU may name; "" is the host's."""
    if not name:
        return _host()
    triple, cpu, features = _NAMED[name]
    return Cpu(triple, cpu, frozenset(features), ",".join(f"+{feature}" for feature in features))


@functools.cache
def _host() -> Cpu:
    triple, cpu, found = llvm.host()
    features = frozenset(name for name, present in found.items() if present)
    flags = ",".join(f"{'+' if found[name] else '-'}{name}" for name in sorted(found))
    return Cpu(triple, cpu, features, flags)
