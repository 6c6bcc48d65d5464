"""NVIDIA's GPUs: loops as LLVM IR for many threads, layers as calls of ATen."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten.rewriter import Pass
from fusee.autodiff.min_cut import Prices
from fusee.codegen import HostArguments, HostCode
from fusee.codegen.simt import emit_kernel, with_any_pointers
from fusee.config import Options
from fusee.errors import TraceError
from fusee.loops import Message, Profile
from fusee.loops.lower import ExternSpec
from fusee.loops.memory import Plan
from fusee.runtime.jit import prepare
from fusee.runtime.launch import LaunchFrame
from fusee.source import with_names
from fusee.targets import PRODUCTS, Built, Kept, link_graph
from fusee.targets.cuda.device import gpu_at
from fusee.targets.cuda.launch import (
    MISALIGNED,
    Beside,
    Joined,
    KernelBuild,
    Launches,
    late_error,
    rows_of,
    runner,
)
from fusee.targets.cuda.passes import (
    channels_last,
    even_rows,
    heads_of_groups,
    joint_channels_last,
    long_scans,
    numbers_home,
    one_key,
    patches_as_products,
    rows_as_sums,
)
from fusee.targets.cuda.recording import Recordable, Replayer, Together, why_launched

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
    raises=False,
)


_aten = torch.ops.aten
_EFFICIENT = _aten._scaled_dot_product_efficient_attention.default
_EFFICIENT_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default


def _attention(query: Tensor, *operands: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Its seed and offset are on the GPU always: a kernel leaves them there if it is recorded,
    and else on the CPU. source: aten/src/ATen/native/transformers/cuda/attention.cu"""
    result, logsumexp, *drawn = _EFFICIENT(query, *operands, **kwargs)
    seed, offset = (x.to(query.device) for x in drawn)
    return result, logsumexp, seed, offset


def _attention_backward(*operands: Any, **kwargs: Any) -> Any:
    """Reads the seed and the offset where a kernel does: on the CPU, unless it is recorded."""
    *before, seed, offset, dropout = operands[:10]
    if dropout and not torch.cuda.is_current_stream_capturing():
        seed, offset = seed.cpu(), offset.cpu()
    return _EFFICIENT_BACKWARD(*before, seed, offset, dropout, *operands[10:], **kwargs)


_CALLS = {
    **PRODUCTS,
    _EFFICIENT: ExternSpec(_attention, exact=True),
    _EFFICIENT_BACKWARD: ExternSpec(_attention_backward, exact=True),
}

# Of graphs with messages: their messages' numbers begin with this, 16 bits further left.
_codes = itertools.count(1)
# In the unit of its prices.
_MICROSECOND = 40_000_000


class Gpu(Launches, Recordable, Protocol):
    """What a graph needs of a GPU; see device.Device."""

    device: torch.device
    words: Tensor
    messages: dict[int, Message]

    def host_names(self) -> Mapping[str, Any]: ...

    def arena(self, size: int) -> Tensor: ...

    def described(self, status: int) -> str: ...

    def together(self, calls: Sequence[Callable[[int], int]]) -> int: ...


class CUDA:
    """See fusee.targets.Target.

    gpu       the one that graphs are compiled for, if it is known
    together  what recordings of a graph share, and of its backward
    """

    profile = PROFILE
    # Of one with 4 TB/s, where eager's host takes 5 us for a call, ours 15 and a training call 60.
    # Not measured call by call, as the CPU's are.
    prices = Prices(
        hold=10,
        call=5 * _MICROSECOND,
        run=15 * _MICROSECOND,
        train=60 * _MICROSECOND,
        near=1.0,
        own={"": (1.0, 1.0)},
        unit=_MICROSECOND,
    )

    def __init__(self, gpu: Gpu | None = None) -> None:
        self.gpu, self.together = gpu, Together()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda") if self.gpu is None else self.gpu.device

    def at(self, device: torch.device) -> CUDA:
        if self.gpu is not None:
            return CUDA(self.gpu)
        if torch.version.hip is not None:
            raise TraceError("a tensor is on an AMD GPU, and code is generated for NVIDIA's")
        return CUDA(gpu_at(device.index or 0))

    def prepare(self) -> None:
        prepare()

    def passes(self, options: Options) -> Sequence[Pass]:
        return (
            partial(numbers_home, home=self.device),
            patches_as_products,
            channels_last,
            heads_of_groups,
            one_key,
            rows_as_sums,
            even_rows,
            long_scans,
        )

    def joint_passes(self, options: Options) -> Sequence[Pass]:
        return (joint_channels_last,)

    def improves(self, node: fx.Node, static: Collection[fx.Node]) -> bool:
        return False

    def call_of(self, op: OpOverload) -> ExternSpec | None:
        return _CALLS.get(op)

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
        call, messages = _Call(gpu, options), plan.schedule.graph.messages
        first = next(_codes) << 16
        gpu.messages.update(enumerate(messages, first))
        emit = partial(emit_kernel, first=first)
        build = KernelBuild(gpu, use_disk=options.cache, check=options.check)
        joined = Joined(plan)
        built = link_graph(plan, arguments, kept, emit, build, call.names, timed, gpu.arena, joined)
        why = why_launched(plan)
        if not options.graphs:
            why = "options={'graphs': False}"
        elif not arguments.spread and arguments.saved is None and arguments.saves is None:
            why = "it is a part of a graph that runs in stages"
        elif arguments.followed:
            why = "what derives from weights is looked at in each call"
        if why is not None:
            run = call.telling(built.run)
            return built._replace(run=run, replays=lambda: f"never: {why}")
        run = built.run
        rows = rows_of(plan, call.host.launches)
        if rows:
            run = with_names(run, run=Beside(call.run, rows, gpu.together))
        waiting = call.stream, call.waiting
        replayer = Replayer(built.run, run, plan, arguments, gpu, *waiting, self.together)
        return built._replace(run=call.telling(replayer), replays=replayer.described)


class _Call:
    """What a host function calls on a GPU.

    waiting  frames that no call uses, by stream: what is on its way on one stream still uses its
             memory, so that a call on another gets its own
    """

    host: HostCode

    def __init__(self, gpu: Gpu, options: Options) -> None:
        self.gpu, self.options = gpu, options
        self.run, self.host_names = runner(gpu), gpu.host_names()
        self.stream: Callable[[], int] = self.host_names["threads"]
        self.waiting: defaultdict[int, list[Any]] = defaultdict(list)
        self.recorded: dict[int, Any] = {}  # frames that CUDA graphs point to

    def names(self, host: HostCode) -> Mapping[str, Any]:
        self.host = host
        own = {"take": self.take, "give": self.give, "run": self.run, "fail": self.fail}
        return {**self.host_names, **own}

    def take(self) -> Any:
        return self.waiting[self.stream()].pop()

    def give(self, frame: Any) -> None:
        if self.gpu.capturing():
            self.recorded[id(frame)] = frame
        else:
            self.waiting[self.stream()].append(frame)

    def fail(self, status: int, frame: LaunchFrame) -> None:
        while status == MISALIGNED:
            status = self._continued(frame)
        if status:
            raise RuntimeError(f"a kernel could not be launched: {self.gpu.described(-status)}")

    def telling(self, run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """`run`; an error of CUDA's, which any call may raise, gives way to what a kernel left, of
        this or another graph."""

        def call(*given: Any) -> Sequence[Any]:
            try:
                return run(*given)
            except RuntimeError:
                if error := late_error(self.gpu.words, self.gpu.messages):
                    raise error from None
                raise

        return call

    def _continued(self, frame: LaunchFrame) -> int:
        """From a launch with an odd pointer on: its accesses are narrow now, and stay so."""
        launch = frame.launch
        code = self.host.launches[launch].code
        build = KernelBuild(self.gpu, use_disk=self.options.cache, check=self.options.check)
        build.add(with_any_pointers(code.module))
        frame.replace(launch, build.finish()[0], code.align & 0xFFFF_FFFF)
        runs = re.findall(r"run\(frame\.state, (\d+), (\d+)", self.host.source)
        end = next(int(end) for first, end in runs if int(first) <= launch < int(end))
        return self.run(frame.state, launch, end, self.stream())
