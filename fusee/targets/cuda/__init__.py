"""NVIDIA's GPUs: loops as LLVM IR for many threads, layers as calls of ATen.

Half built: no row of native.TARGETS names it, so tensors on a GPU run eagerly.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten.rewriter import Pass
from fusee.autodiff.min_cut import Prices
from fusee.codegen.host import HostArguments, HostCode
from fusee.codegen.simt.kernel import emit_kernel, with_any_pointers
from fusee.config import Options
from fusee.loops.ir import Message, Profile
from fusee.loops.lower.graph import ExternSpec
from fusee.loops.memory import Plan
from fusee.runtime.jit import prepare
from fusee.runtime.launch import LaunchFrame
from fusee.targets import Built, Kept
from fusee.targets.cuda.device import gpu_at
from fusee.targets.cuda.launch import MISALIGNED, KernelBuild, Launches, runner
from fusee.targets.linking import PRODUCTS, link_graph

# 512: blocks that keep a GPU of 132 processors busy. Registers and arithmetic cost little beside
# memory, so that values are computed again rather than loaded, and loops read many buffers.
PROFILE = Profile(
    parallel=512,
    small=1 << 18,
    lanes=8,
    wide=32,
    reads=32,
    heavy=60,
    again=60,
    reloaded=60,
    many=1 << 17,
    chunk=1 << 13,
    strip=1 << 7,
    rows=32,
    shares=True,
)


class Gpu(Launches, Protocol):
    """What a graph needs of a GPU; see device.Device."""

    words: Tensor

    def host_names(self) -> Mapping[str, Any]: ...

    def arena(self, size: int) -> Tensor: ...

    def described(self, status: int) -> str: ...


class CUDA:
    """See fusee.targets.Target. `gpu`: the one that graphs are compiled for, if it is known."""

    profile = PROFILE
    prices = Prices(hold=10)

    def __init__(self, gpu: Gpu | None = None) -> None:
        self.gpu = gpu

    def at(self, device: torch.device) -> CUDA:
        return self if self.gpu is not None else CUDA(gpu_at(device.index or 0))

    def prepare(self) -> None:
        prepare()

    def passes(self, options: Options) -> Sequence[Pass]:
        return ()

    def improves(self, node: fx.Node, static: Collection[fx.Node]) -> bool:
        return False

    def call_of(self, op: OpOverload) -> ExternSpec | None:
        return PRODUCTS.get(op)

    def build(
        self,
        plan: Plan,
        arguments: HostArguments,
        kept: Kept,
        options: Options,
        timed: Callable[[str], AbstractContextManager[object]],
    ) -> Built:
        gpu = self.gpu
        assert gpu is not None
        messages = plan.schedule.graph.messages

        def names(host: HostCode) -> Mapping[str, Any]:
            return _Call(gpu, host, messages, options).names()

        build = KernelBuild(gpu, use_disk=options.cache, check=options.check)
        return link_graph(plan, arguments, kept, emit_kernel, build, names, timed, gpu.arena)


class _Call:
    """What a host function calls on a GPU."""

    def __init__(
        self, gpu: Gpu, host: HostCode, messages: Sequence[Message], options: Options
    ) -> None:
        self.gpu, self.host, self.messages, self.options = gpu, host, messages, options
        self.run = runner(gpu)
        # What is on its way on one stream still uses its memory: a call on another gets its own.
        self.waiting: defaultdict[int, list[Any]] = defaultdict(list)

    def names(self) -> Mapping[str, Any]:
        found, waiting = dict(self.gpu.host_names()), self.waiting
        self.stream = stream = found["threads"]
        found["take"] = lambda: waiting[stream()].pop()
        found["give"] = lambda frame: waiting[stream()].append(frame)
        return {**found, "run": self.run, "fail": self.fail}

    def fail(self, status: int, frame: LaunchFrame) -> None:
        while status == MISALIGNED:
            status = self._continued(frame)
        if not status:
            return
        code, value = self.gpu.words.tolist()
        if 0 < code <= len(self.messages):
            kind, text = self.messages[code - 1]
            raise kind(text.format(value))
        raise RuntimeError(f"a kernel could not be launched: {self.gpu.described(-status)}")

    def _continued(self, frame: LaunchFrame) -> int:
        """From a launch with an odd pointer on: its accesses are narrow now, and stay so."""
        launch = frame.launch
        code = self.host.codes[launch]
        build = KernelBuild(self.gpu, use_disk=self.options.cache, check=self.options.check)
        build.add(with_any_pointers(code.module))
        frame.replace(launch, build.finish()[0], code.align & 0xFFFF_FFFF)
        runs = re.findall(r"run\(frame\.state, (\d+), (\d+)", self.host.source)
        end = next(int(end) for first, end in runs if int(first) <= launch < int(end))
        return self.run(frame.state, launch, end, self.stream())
