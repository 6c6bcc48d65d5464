"""Several launches of one kernel as one: what an optimizer does with each of its parameters.

    define ptx_kernel void @k_<hash>(ptr byval([n x i64]) %rows)

The words are the pointers of all launches, the status, the first block of each launch, and the
sizes of all. A block finds the launch that it belongs to, and goes on as one of that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace

from fusee.codegen.llvm.kernel import KernelCode
from fusee.sym.expr import Size

# A launch takes arguments of so many bytes on all GPUs.
_MOST_BYTES = 4096
_HEAD = re.compile(r"define ptx_kernel void @\w+\((.*)\) (.*) \{\nstart:\n")
_BLOCK = "call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()"


def most_launches(code: KernelCode) -> int:
    """How many launches of a kernel can be one; blocks that count each other are told apart by
    nobody."""
    if code.shared != 0:
        return 1
    return (_MOST_BYTES // 8 - 1) // (len(code.buffers) + len(code.params) + 1)


def batched(codes: Sequence[KernelCode]) -> KernelCode:
    """One kernel for launches of equal ones, at most `most_launches`."""
    first, count = codes[0], len(codes)
    head = _HEAD.match(first.text)
    assert head is not None and all(code.name == first.name for code in codes)
    names = [argument.split()[-1] for argument in head[1].split(", ")]
    at = names.index("%status")
    pointers, sizes = names[:at], names[at + 1 :]
    starts = count * at + 1
    words = starts + count * (1 + len(sizes))
    lines: list[str] = []

    def load(kind: str, name: str, row: str, first: int) -> None:
        """A word, `first` behind that of number `row`."""
        lines.append(f"{name}.in = add i64 {row}, {first}")
        lines.append(f"{name}.at = getelementptr i64, ptr %rows, i64 {name}.in")
        lines.append(f"{name} = load {kind}, ptr {name}.at, align 8")

    lines += [f"%ctaid = {_BLOCK}", "%grid = zext i32 %ctaid to i64"]
    found = "0"
    for k in reversed(range((count - 1).bit_length())):
        lines += [
            f"%next{k} = add i64 {found}, {1 << k}",
            f"%there{k} = icmp ult i64 %next{k}, {count}",
            f"%try{k} = select i1 %there{k}, i64 %next{k}, i64 {found}",
        ]
        load("i64", f"%start{k}", f"%try{k}", starts)
        lines += [
            f"%begun{k} = icmp ule i64 %start{k}, %grid",
            f"%found{k} = select i1 %begun{k}, i64 %try{k}, i64 {found}",
        ]
        found = f"%found{k}"
    load("i64", "%begin", found, starts)
    lines += ["%within = sub i64 %grid, %begin", "%block = trunc i64 %within to i32"]
    for kind, ours, begin in (("ptr", pointers, 0), ("i64", sizes, starts + count)):
        if ours:
            lines.append(f"%row.{kind} = mul i64 {found}, {len(ours)}")
        for k, name in enumerate(ours):
            load(kind, f"{name}.any" if kind == "ptr" else name, f"%row.{kind}", begin + k)
    load("ptr", "%status.any", "0", count * at)
    for name in (*pointers, "%status"):  # they are the GPU's own memory
        lines.append(f"{name}.own = addrspacecast ptr {name}.any to ptr addrspace(1)")
        lines.append(f"{name} = addrspacecast ptr addrspace(1) {name}.own to ptr")
    body = first.text[head.end() :].replace(_BLOCK, "add i32 %block, 0")
    text = "\n".join(["first:", *lines, "br label %start", "start:", body])
    given = f"(ptr byval([{words} x i64]) align 8 %rows) {head[2]}"
    name = f"k_{hashlib.sha256(f'{given}{text}'.encode()).hexdigest()[:20]}"
    begins: list[Size] = [0]
    for code in codes:
        begins.append(begins[-1] + code.total)
    return replace(
        first,
        name=name,
        text=f"define ptx_kernel void @{name}{given} {{\n{text}",
        buffers=tuple(b for code in codes for b in code.buffers),
        params=(*begins[:-1], *(n for code in codes for n in code.params)),
        total=begins[-1],
        align=8 * words | first.align >> 32 << 32,
    )
