"""The CUDA pipeline on a machine without a GPU: kernels run on numpy's SIMT machine."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusee.autodiff.min_cut import Prices
from fusee.codegen.llvm import KernelCode
from fusee.codegen.simt import emit_kernel
from fusee.codegen.simt.teams import COUNTER_BYTES
from fusee.config import Options
from fusee.loops import Buffer, Kernel, LoopGraph, Profile, View
from fusee.loops.lower.tensor import copied
from fusee.loops.memory import Plan
from fusee.runtime.jit import Build
from fusee.sym import Size, Symbol, substitute, symbols
from fusee.targets import Emitted, Kept, Loaded
from tests.backends.test_targets import Reference
from tests.targets.cuda.machine import Machine


def number(size: Size, sizes: Mapping[Symbol, int]) -> int:
    found = substitute(size, dict(sizes))
    assert isinstance(found, int), found
    return found


def launch(
    code: KernelCode, tensors: Mapping[Buffer, Tensor], sizes: Mapping[Symbol, int]
) -> tuple[int, int]:
    """Run one kernel; the status that it left."""
    total, threads = number(code.total, sizes), number(code.units, sizes)
    status, page = torch.zeros(2, dtype=torch.int64), torch.zeros(256, dtype=torch.int64)
    if total == 0:
        return 0, 0
    machine = Machine(code.module, total, threads)
    page[0] = machine.buffer(status.numpy(), watched=False)
    params = [number(p, sizes) for p in code.params]
    shared = torch.zeros(number(code.shared, sizes), dtype=torch.uint8)
    shared[COUNTER_BYTES:] = 255
    pointers = [
        *(flat(tensors[b]) for b in code.buffers),
        *([shared.numpy()] if len(shared) else []),
    ]
    try:
        machine.run([*pointers, page.numpy(), *params])
    except IndexError:
        assert status[0]
    assert not shared[:COUNTER_BYTES].any()
    return int(status[0]), int(status[1])


def flat(tensor: Tensor) -> Any:
    """The memory from the tensor's first element to its last, shared.

    By its address: what numpy() has shown can no longer be resized.
    """
    size = (
        0
        if 0 in tensor.shape
        else 1 + sum((n - 1) * k for n, k in zip(tensor.shape, tensor.stride(), strict=True))
    )
    memory = ctypes.c_uint8 * (size * tensor.element_size())
    return np.ctypeslib.as_array(memory.from_address(tensor.data_ptr()))


class Simulated(Reference):
    """See fusee.targets.Target."""

    prices = Prices()

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.codes: list[KernelCode] = []

    def load(self, emitted: Emitted, build: Build, kept: Kept, options: Options) -> Loaded:
        arguments, plan = emitted.arguments, emitted.own
        graph = plan.schedule.graph
        codes = {k: emit_kernel(k) for k in plan.schedule.items if isinstance(k, Kernel)}
        self.codes += codes.values()
        place = {buffer: k for k, buffer in enumerate(arguments.buffers)}

        def run(inputs: Sequence[Any]) -> Sequence[Any]:
            rest = iter(kept.current(tuple(inputs)).tensors)
            tensors = {
                x: inputs[place[x]] if x.role == "input" else next(rest)
                for x in graph.inputs
                if isinstance(x, Buffer)
            }
            shapes = [x.shape if isinstance(x, Buffer) else (x.expr,) for x in graph.inputs]
            named = {s.name: s for shape in shapes for n in shape for s in symbols(n)}
            sizes = {
                named.get(name, Symbol(name)): inputs[k] if axis is None else inputs[k].size(axis)
                for name, (k, axis) in arguments.sizes.items()
            }
            with torch.no_grad():
                return _Call(graph, tensors, sizes).run(plan, codes)

        return Loaded((lambda *inputs: run(inputs)) if arguments.spread else run)


class _Call:
    def __init__(
        self, graph: LoopGraph, tensors: dict[Buffer, Tensor], sizes: Mapping[Symbol, int]
    ) -> None:
        self.graph, self.tensors, self.sizes = graph, tensors, sizes

    def run(self, plan: Plan, codes: Mapping[Kernel, KernelCode]) -> tuple[Any, ...]:
        for item in plan.schedule.items:
            if isinstance(item, Kernel):
                code = codes[item]
                for buffer in code.buffers:
                    self._allocate(buffer)
                status, value = launch(code, self.tensors, self.sizes)
                if status:
                    kind, text, _, size = self.graph.messages[status - 1]
                    raise kind(text.format(value, size=size))
                continue
            args, kwargs = self._given(item.args), self._given(item.kwargs)
            if item.out:
                outs = [self._allocate(b) for b in item.results if b is not None]
                item.call(*args, **kwargs, out=outs[0] if len(outs) == 1 else tuple(outs))
                continue
            found = item.call(*args, **kwargs)
            several = isinstance(found, (tuple, list))
            for result, x in zip(item.results, found if several else (found,)):
                if result is not None:
                    strides = [number(n, self.sizes) for n in result.strides]
                    self.tensors[result] = x if item.shares else copied(x, x.shape, strides)
        return tuple(self._given(list(self.graph.outputs)))

    def _allocate(self, buffer: Buffer) -> Tensor:
        if buffer not in self.tensors:
            shape = [number(n, self.sizes) for n in buffer.shape]
            strides = [number(n, self.sizes) for n in buffer.strides]
            made = torch.empty_strided(shape, strides, dtype=buffer.dtype)
            if buffer.dtype.is_floating_point:
                made.fill_(float("nan"))
            self.tensors[buffer] = made
        return self.tensors[buffer]

    def _given(self, tree: Any) -> Any:
        if isinstance(tree, View):
            shape, strides = (
                [number(n, self.sizes) for n in x] for x in (tree.shape, tree.strides)
            )
            base = self._allocate(tree.buffer)
            offset = number(tree.offset, self.sizes) + base.storage_offset()
            return base.as_strided(shape, strides, offset)
        if isinstance(tree, dict):
            return {key: self._given(x) for key, x in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(self._given, tree))
        return number(tree, self.sizes) if hasattr(tree, "terms") else tree
