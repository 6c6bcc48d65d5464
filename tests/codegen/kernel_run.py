"""Builds kernels by hand and runs them on tensors, in as many parts as asked."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fusee.codegen.llvm import KernelCode, emit_kernel
from fusee.loops import Buffer, Kernel
from fusee.runtime import jit
from fusee.runtime.jit import Function, compile_one
from fusee.runtime.llvm_text import Machine
from fusee.sym import Size, Symbol, substitute

Run = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
)


@functools.cache
def machine(vector_bits: int = 0) -> Machine:
    return Machine(jit.host_target().features, vector_bits)


def machines() -> list[Machine]:
    """The host, and what it would be with less: all can run here."""
    features = jit.host_target().features
    found = [Machine(features)]
    if "avx2" in features:
        found.append(Machine(features - {"avx2", "avx512f", "avx512bw", "f16c"}, 128))
    return found


def layouts() -> list[Machine]:
    """The machines, one without vectors, and one whose masks and gathers LLVM takes apart.

    The last must call no library functions: those of its width may not run here.
    """
    features = jit.host_target().features
    known = [*machines(), Machine(features, 32)]
    wide = Machine(features - {"sse4a"} | {"avx512f", "avx512bw"}, 512)
    return [*known, wide] if wide.is_x86 else known


def buffer(name: str, tensor: torch.Tensor, role: str = "input") -> Buffer:
    return Buffer(name, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), role)  # type: ignore[arg-type]


@functools.cache
def _compiled(module: str) -> tuple[Function, object]:
    function = compile_one(module)
    return function, Run(function.address)


@dataclass
class Launched:
    code: KernelCode
    status: tuple[int, int]


def number(size: Size, sizes: Mapping[Symbol, int]) -> int:
    found = substitute(size, dict(sizes))
    assert isinstance(found, int), found
    return found


def run(
    kernel: Kernel,
    tensors: Mapping[Buffer, torch.Tensor],
    sizes: Mapping[Symbol, int] | None = None,
    on: Machine | None = None,
    parts: int = 1,
) -> Launched:
    """Emit, compile and run a kernel; `parts` cuts its range as threads would."""
    code = emit_kernel(kernel, on or machine())
    execute(code, tensors, sizes, parts)
    return Launched(code, execute.status)  # type: ignore[attr-defined]


def execute(
    code: KernelCode,
    tensors: Mapping[Buffer, torch.Tensor],
    sizes: Mapping[Symbol, int] | None = None,
    parts: int = 1,
) -> None:
    sizes = sizes or {}
    _, call = _compiled(code.module)
    status = (ctypes.c_int64 * 2)()
    pointers = [tensors[b].data_ptr() for b in code.buffers] + [ctypes.addressof(status)]
    bufs = (ctypes.c_void_p * len(pointers))(*pointers)
    params = (ctypes.c_int64 * max(len(code.params), 1))(*[number(p, sizes) for p in code.params])
    total = number(code.total, sizes)
    cuts = [total * k // parts for k in range(parts + 1)]
    for thread, (begin, end) in enumerate(itertools.pairwise(cuts)):
        call(bufs, params, begin, end, thread)  # type: ignore[operator]
    execute.status = tuple(status)  # type: ignore[attr-defined]


def axes(names: str, shape: Sequence[Size]) -> list[Symbol]:
    return [Symbol(name, 0, n) for name, n in zip(names.split(), shape, strict=True)]
