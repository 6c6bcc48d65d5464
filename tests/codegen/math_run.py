"""Runs one function of codegen.llvm.math over tensors: nothing around it but a loop."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from fusee.codegen.llvm.math import math_function
from fusee.runtime.jit import Function, compile_one
from fusee.runtime.llvm_text import HELD, InsertPoint, Machine, Writer, vector

Run = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
)


def module(name: str, operands: int, dtype: torch.dtype, lanes: int, machine: Machine) -> str:
    """IR of kernel(out, x0, x1, n, times), n a multiple of lanes, the whole done `times` times."""
    kind, scalar, writer = vector(HELD[dtype], lanes), HELD[dtype], Writer()
    with writer.each("0", "%times"), writer.each("0", "%n", lanes) as k:
        level = writer.top
        places = [level.at(f"%{which}", k, scalar) for which in ("out", "in0", "in1")]
        given = [level.op(f"load {kind}, ptr {at}, align 4") for at in places[1 : operands + 1]]
        result = math_function(InsertPoint(level, machine, lanes), name, dtype, given)
        writer.top.do(f"store {kind} {result}, ptr {places[0]}, align 4")
    pointers = ", ".join(f"ptr noalias %{name}" for name in ("out", "in0", "in1"))
    return writer.module(f"define void @kernel({pointers}, i64 %n, i64 %times)", "void")


class Compiled:
    """A function as machine code of the host."""

    def __init__(
        self, name: str, operands: int, dtype: torch.dtype, lanes: int, machine: Machine
    ) -> None:
        self.code: Function = compile_one(module(name, operands, dtype, lanes, machine))
        self.call: Callable[..., None] = Run(self.code.address)
        self.lanes = lanes

    def __call__(self, *inputs: torch.Tensor, times: int = 1) -> torch.Tensor:
        """The function of whole vectors of `inputs`; `times` makes it measurable."""
        count = inputs[0].numel() // self.lanes * self.lanes
        out = torch.empty(count, dtype=inputs[0].dtype)
        if count:
            dense = [x.contiguous() for x in (*inputs, inputs[0])[:2]]
            pointers = [x.data_ptr() for x in dense]
            self.call(out.data_ptr(), *pointers, count, times)
        return out
