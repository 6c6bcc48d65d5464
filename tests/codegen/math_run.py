"""Runs one function of codegen.llvm.math over tensors: nothing around it but a loop."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from fusee.codegen.llvm.math import MathFunction
from fusee.codegen.llvm.types import HELD, vector
from fusee.runtime.jit import Function, compile_one

Run = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
)


def module(function: MathFunction, operands: int, dtype: torch.dtype, lanes: int) -> str:
    """IR of kernel(out, x0, x1, n, times), n a multiple of lanes, the whole done `times` times."""
    kind, scalar = vector(HELD[dtype], lanes), HELD[dtype]
    body = [
        f"%p{i} = getelementptr {scalar}, ptr {name}, i64 %k"
        for i, name in enumerate(("%out", "%in0", "%in1"))
    ]
    body += [f"%x{i} = load {kind}, ptr %p{i + 1}, align 4" for i in range(operands)]
    given = ", ".join(f"{kind} %x{i}" for i in range(operands))
    body += [
        f"%y = call {kind} @{function.symbol}({given})",
        f"store {kind} %y, ptr %p0, align 4",
    ]
    head = "\n".join(dict.fromkeys(function.declares))
    lines = "\n".join(f"  {line}" for line in body)
    return f"""{head}
{function.define or ""}
define void @kernel(ptr noalias %out, ptr noalias %in0, ptr noalias %in1, i64 %n, i64 %times) {{
entry:
  br label %again
again:
  %t = phi i64 [ 0, %entry ], [ %u, %done ]
  br label %loop
loop:
  %k = phi i64 [ 0, %again ], [ %next, %loop ]
{lines}
  %next = add i64 %k, {lanes}
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  %u = add i64 %t, 1
  %once.more = icmp slt i64 %u, %times
  br i1 %once.more, label %again, label %exit
exit:
  ret void
}}
"""


class Compiled:
    """A function as machine code of the host."""

    def __init__(self, found: MathFunction, operands: int, dtype: torch.dtype, lanes: int) -> None:
        self.code: Function = compile_one(module(found, operands, dtype, lanes))
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
