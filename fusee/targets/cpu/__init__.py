"""The CPU: loops as LLVM IR with explicit vectors, layers as calls of oneDNN and ATen.

The overload `torch.ops.aten.mm.out` costs 3 to 5 us a call, the builtin `torch.mm` 1 to 2 us with
the same arguments (benchmarks.md, Externs). With `out` the result goes straight into the arena:
nothing is allocated, and no fresh page is touched. Operators without a row are called by their
overload. `out` needs grad mode off where a parameter is among the arguments.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from fusee import log
from fusee.aten.rewriter import Pass, fuse_attention
from fusee.aten.torch_api import recurrent_layer
from fusee.aten.weights import fold_norm
from fusee.autodiff.joint import REDRAWN
from fusee.autodiff.min_cut import Prices
from fusee.codegen.host import HostArguments, HostCode, emit_host
from fusee.codegen.llvm.kernel import KernelCode, emit_kernel
from fusee.config import Options
from fusee.fake.rules import LAYERS
from fusee.loops.ir import Buffer, Kernel, Message, Profile
from fusee.loops.lower.graph import ExternSpec
from fusee.loops.memory import Plan
from fusee.loops.schedule import form
from fusee.runtime import jit, random
from fusee.runtime.change_detection import DerivedSet
from fusee.runtime.jit import Build, Function, prepare
from fusee.runtime.launch import Frames, LaunchFrame, Program, runner
from fusee.runtime.llvm_text import Machine
from fusee.source import define
from fusee.targets import Built, Kept
from fusee.targets.cpu.onednn import (
    channels_last,
    for_any_size,
    packed,
    postops,
    prepack,
    upcast,
)

aten = torch.ops.aten

PASSES: tuple[Pass, ...] = (fold_norm, upcast, fuse_attention, channels_last, prepack, postops)

# What keeps results derived from parameters; without it only what helps by itself runs.
_NEEDS_DERIVED: frozenset[Pass] = frozenset({fold_norm, prepack, postops})


class CPU:
    """See fusee.targets.Target."""

    # 16: points that give work to the threads of a processor; float32 elements of its widest
    # vector. What LLVM compiles takes longer the larger it is, and processors overlap the next
    # vector's work with this one's only in short bodies. Gathers are made lane by lane.
    profile = Profile(parallel=16, lanes=8, wide=16, gather=12)
    prices = Prices()

    def prepare(self) -> None:
        prepare()

    def passes(self, options: Options) -> Sequence[Pass]:
        return [p for p in PASSES if options.derive_weights or p not in _NEEDS_DERIVED]

    def call_of(self, op: OpOverload) -> ExternSpec | None:
        if op.namespace == "mkldnn":
            return _packed_rows().get(op) or ExternSpec(op, owns=True)
        return ExternSpec(op) if op.namespace == "mkl" else EXTERNS.get(op)

    def build(
        self,
        plan: Plan,
        arguments: HostArguments,
        kept: Kept,
        options: Options,
        timed: Callable[[str], AbstractContextManager[object]],
    ) -> Built:
        with timed("emit"):
            codes, functions = _emit(plan, options)
        with timed("host"):
            host = emit_host(plan, codes, arguments)
            log.publish("host", "", host.source)
        used = [functions[code.name] for code in host.functions]
        run = bind_host(host, used, plan.schedule.graph.messages, kept, options.threads)
        return Built(run, {kernel: code.name for kernel, code in codes.items()})


# ---------------------------------------------------------------------------- externs


# `out` only where the kernel writes into the given memory itself, of any row stride, and where what
# it writes does not depend on the strides of the result.
EXTERNS: dict[OpOverload, ExternSpec] = {
    aten.mm.default: ExternSpec(torch.mm, torch.mm),
    aten.bmm.default: ExternSpec(torch.bmm, torch.bmm),
    aten.addmm.default: ExternSpec(torch.addmm, torch.addmm),
    aten.baddbmm.default: ExternSpec(torch.baddbmm, torch.baddbmm),
    aten.mv.default: ExternSpec(torch.mv, torch.mv),
    aten.addmv.default: ExternSpec(torch.addmv, torch.addmv),
    aten.convolution.default: ExternSpec(torch.convolution),
    aten.linear.default: ExternSpec(aten.linear.default),
    aten.scaled_dot_product_attention.default: ExternSpec(
        aten.scaled_dot_product_attention.default
    ),
    aten.mkldnn_rnn_layer.default: ExternSpec(recurrent_layer, exact=True),
    # `torch.lstm` of aten.lstm.input
    **{
        op: ExternSpec(getattr(torch, op._schema.name.partition("::")[2]), exact=True)
        for op in LAYERS
    },
    # machine code of ours
    aten.bernoulli.p: ExternSpec(torch.bernoulli, random.bernoulli),
    REDRAWN: ExternSpec(random.redrawn),
}


@functools.cache
def _packed_rows() -> dict[OpOverload, ExternSpec]:
    ops = packed()
    if ops is None:
        return {}
    alone, summed = ExternSpec(ops.conv, owns=True), ExternSpec(ops.conv_binary, owns=True)
    alone = replace(alone, any_size=replace(alone, call=for_any_size(ops.conv)))
    summed = replace(summed, in_place=ops.conv_binary_inplace, operand=1)
    calls = for_any_size(ops.conv_binary), for_any_size(ops.conv_binary_inplace)
    summed = replace(summed, any_size=replace(summed, call=calls[0], in_place=calls[1]))
    return {ops.conv: alone, ops.conv_binary: summed}


# ---------------------------------------------------------------------------- machine code


def _emit(plan: Plan, options: Options) -> tuple[dict[Kernel, KernelCode], dict[str, Function]]:
    machine = Machine(jit.host_target().features, options.vector_bits)
    build = Build(use_disk=options.cache, check=options.check)
    named: dict[str, KernelCode] = {}
    forms: dict[Hashable, tuple[KernelCode, list[Buffer]]] = {}
    codes: dict[Kernel, KernelCode] = {}
    for item in plan.schedule.items:
        if not isinstance(item, Kernel):
            continue
        key, buffers = form(item)
        if key not in forms:
            forms[key] = emit_kernel(item, machine), buffers
        twin, theirs = forms[key]
        ours = dict(zip(theirs, buffers, strict=True))
        code = replace(twin, buffers=tuple(ours[b] for b in twin.buffers))
        codes[item] = code
        if named.setdefault(code.name, code) is code:
            build.add(code.module)
    return codes, dict(zip(named, build.finish(), strict=True))


def bind_host(
    host: HostCode,
    functions: Sequence[Function],
    messages: Sequence[Message],
    kept: Kept,
    threads: int,
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The host function, bound to what it runs with: its kernels and the tensors that are kept."""
    program = Program(functions, host.layout)
    waiting: list[Any] = []  # what no call uses; its pop and append are atomic

    def checkout(sizes: tuple[int, ...]) -> Any:
        frames = Frames(program)
        return frames if host.layout.inputs else frames[sizes]

    def fail(status: int, frame: LaunchFrame) -> None:
        kind, text = messages[status - 1]
        raise kind(text.format(frame.value))

    names: dict[str, Any] = {
        **host.names,
        "take": waiting.pop,
        "give": waiting.append,
        "checkout": checkout,
        "run": runner(),
        "threads": itertools.repeat(threads).__next__ if threads else torch.get_num_threads,
        "weights": kept,
        "same": kept.same if isinstance(kept, DerivedSet) else None,
        "fail": fail,
    }
    return define(host.source, "call", "host", names)
