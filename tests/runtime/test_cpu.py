"""Processors by feature, and the override for tests."""

from __future__ import annotations

import pytest

from fusee.config import settings
from fusee.errors import SettingError
from fusee.runtime import jit
from fusee.runtime.llvm_text import Machine
from tests.runtime.kernels import SCALED_ADD

VECTOR_ADD = """
define void @kernel(ptr %p) {{
  %x = load <{lanes} x float>, ptr %p
  %y = fadd <{lanes} x float> %x, %x
  store <{lanes} x float> %y, ptr %p
  ret void
}}
"""


def test_host_is_what_llvm_says() -> None:
    host = jit.host_target()
    assert host.name
    bits = Machine(host.features).bits
    assert bits in (128, 256, 512)
    assert ("avx512f" in host.features) == (bits == 512)
    assert ("neon" in host.features) != ("sse2" in host.features)


def test_no_gathers_and_scatters_where_they_are_microcode() -> None:
    assert Machine(frozenset({"avx512f"})).has_gather
    assert not Machine(frozenset({"avx512f", "sse4a"})).has_gather
    assert not Machine(frozenset({"avx2"})).has_gather


def test_masked_loads_are_fetched_ahead_but_on_amds_processors() -> None:
    assert Machine(frozenset({"avx512f"})).fetches_masked
    assert Machine(frozenset({"avx2", "sse4a"})).fetches_masked  # LLVM makes none of a select
    assert not Machine(frozenset({"avx512f", "sse4a"})).fetches_masked


@pytest.mark.parametrize(
    ("name", "bits", "has", "has_not", "register"),
    [
        ("sse", 128, "sse4.1", "avx", "xmm"),
        ("avx2", 256, "fma", "avx512f", "ymm"),
        ("avx512", 512, "avx512bw", "neon", "zmm"),
        ("neon", 128, "neon", "sse2", "v0.4s"),
    ],
)
def test_named_processors(
    environment: pytest.MonkeyPatch, name: str, bits: int, has: str, has_not: str, register: str
) -> None:
    environment.setenv("FUSEE_CPU", name)
    settings.cache_clear()
    target = jit.host_target()
    assert Machine(target.features).bits == bits
    assert has in target.features
    assert has_not not in target.features
    text = VECTOR_ADD.format(lanes=bits // 32)
    assert register in jit.assembly(text, target.triple, target.name, target.flags)
    assert jit.Emitter(target).emit(text)


def test_each_processor_has_its_own_entries(environment: pytest.MonkeyPatch) -> None:
    own = jit.Build().add(SCALED_ADD)
    environment.setenv("FUSEE_CPU", "sse")
    settings.cache_clear()
    assert jit.Build().add(SCALED_ADD) != own


def test_code_for_another_processor_is_not_run(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("FUSEE_CPU", "neon" if "x86" in jit.host()[0] else "sse")
    settings.cache_clear()
    with pytest.raises(SettingError, match="is another processor than this one, which lacks"):
        jit.compile_one(SCALED_ADD)
