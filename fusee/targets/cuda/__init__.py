"""NVIDIA's GPUs: loops as LLVM IR for many threads, layers as calls of ATen."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from fusee.aten.attention import fuse_attention
from fusee.aten.rewriter import Pass
from fusee.autodiff.min_cut import Prices
from fusee.codegen import HostArguments, HostCode, Launch
from fusee.codegen.llvm import KernelCode
from fusee.codegen.simt import emit_kernel, with_any_pointers
from fusee.config import Options
from fusee.errors import TraceError
from fusee.loops import Kernel, Message, Profile
from fusee.loops.lower import ExternSpec
from fusee.loops.memory import Plan
from fusee.runtime.jit import Build
from fusee.runtime.launch import LaunchFrame
from fusee.source import HALVES, with_names
from fusee.targets import PRODUCTS, Emitted, Kept, Loaded, Target, load_graph
from fusee.targets.cuda.device import Device, gpu_at, late_error
from fusee.targets.cuda.launch import (
    MISALIGNED,
    Beside,
    Joined,
    KernelBuild,
    first_code,
    prepare,
    rows_of,
    runner,
)
from fusee.targets.cuda.passes import (
    EFFICIENT,
    EFFICIENT_BACKWARD,
    ROW,
    biases_apart,
    channels_last,
    efficient_attention,
    efficient_attention_backward,
    even_rows,
    few_keys,
    heads_of_groups,
    in_one_order,
    joint_channels_last,
    layers_of_rows,
    long_scans,
    masks_as_read,
    numbers_home,
    one_key,
    patches_as_products,
    rows_as_sums,
)
from fusee.targets.cuda.recording import (
    Recording,
    Replayer,
    Together,
    may_drop,
    may_grow,
    why_launched,
    written_inputs,
)

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
    kept=1 << 15,
    gathers=1 << 24,
    pairs=True,
    raises=False,
)


_aten = torch.ops.aten


_CALLS = {
    **PRODUCTS,
    _aten.linear.default: ExternSpec(_aten.linear.default, exact=True, owns=True),
    _aten.scaled_dot_product_attention.default: ExternSpec(few_keys, exact=True),
    EFFICIENT: ExternSpec(efficient_attention, exact=True),
    EFFICIENT_BACKWARD: ExternSpec(efficient_attention_backward, exact=True),
}

# By GPU; bench/prices.py writes it.
PRICES = Path(__file__).with_name("prices_by_gpu.json")
# In the unit of its prices.
_MICROSECOND = 40_000_000


class CUDA(Target):
    """See fusee.targets.Target.

    gpu       the one that graphs are compiled for, if it is known
    together  what recordings of a graph share, and of its backward
    """

    profile = PROFILE
    # Of one with 4 TB/s, where eager's host takes 5 us for a call, ours 15 and a training call 60.
    prices = Prices(
        hold=15,
        step=1,
        call=5 * _MICROSECOND,
        run=15 * _MICROSECOND,
        train=60 * _MICROSECOND,
        near=1.0,
        own={"": (1.0, 1.0), **json.loads(PRICES.read_text())["h200"]},
        unit=_MICROSECOND,
        beside=True,
    )

    def __init__(self, gpu: Device | None = None) -> None:
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
        super().prepare()
        if self.gpu is not None:
            prepare(self.gpu)

    def passes(self, options: Options) -> Sequence[Pass]:
        return (
            partial(numbers_home, home=self.device),
            partial(fuse_attention, dtypes=HALVES, few=True, row=ROW),
            patches_as_products,
            biases_apart,
            channels_last,
            heads_of_groups,
            one_key,
            masks_as_read,
            rows_as_sums,
            even_rows,
            layers_of_rows,
            long_scans,
            in_one_order,
        )

    def joint_passes(self, options: Options) -> Sequence[Pass]:
        return (joint_channels_last,)

    def call_of(self, op: OpOverload) -> ExternSpec | None:
        return _CALLS.get(op)

    def settings(self) -> Hashable:
        cuda: Any = torch.backends.cuda
        kernels = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
        return (torch.backends.cudnn.allow_tf32, *kernels)

    def build(self, options: Options) -> KernelBuild:
        assert self.gpu is not None
        return KernelBuild(self.gpu, use_disk=options.cache, check=options.check)

    def code_of(
        self, messages: Sequence[Message], options: Options
    ) -> Callable[[Kernel], KernelCode]:
        return partial(emit_kernel, first=first_code(messages))

    def batches(self, plan: Plan) -> Joined:
        return Joined(plan)

    def own(self, plan: Plan, launches: Sequence[Launch], arguments: HostArguments) -> Recording:
        rows, written = rows_of(plan, launches), written_inputs(plan, arguments)
        never, grows, drops = why_launched(plan), may_grow(plan), may_drop(plan)
        return Recording(never, rows, written, grows, drops)

    def load(self, emitted: Emitted, build: Build, kept: Kept, options: Options) -> Loaded:
        gpu, recording = self.gpu, emitted.own
        assert gpu is not None and isinstance(recording, Recording)
        gpu.messages.update(enumerate(emitted.messages, first_code(emitted.messages)))
        arguments, call = emitted.arguments, _Call(gpu, emitted.host, partial(self.build, options))
        function, uses = load_graph(emitted.host, build, kept, call.names(), gpu.arena)
        why = recording.never
        if not options.graphs:
            why = "options={'graphs': False}"
        elif not arguments.spread and arguments.saved is None and arguments.saves is None:
            why = "it is a part of a graph that runs in stages"
        elif arguments.followed:
            why = "what derives from weights is looked at in each call"
        if why is not None:
            return Loaded(call.telling(function), lambda: f"never: {why}", uses)
        recorded: Callable[..., Sequence[Any]] = function
        if recording.rows:
            beside = Beside(call.run, recording.rows, gpu.together)
            recorded = with_names(function, run=beside)
        about = recording, arguments, gpu, call.stream, call.waiting, self.together
        replayer = Replayer(function, recorded, *about)
        return Loaded(call.telling(replayer), replayer.described, uses)


TARGET = CUDA()


class _Call:
    """What a host function calls on a GPU.

    waiting  frames that no call uses, by stream: what is on its way on one stream still uses its
             memory, so that a call on another gets its own
    """

    def __init__(self, gpu: Device, host: HostCode, build: Callable[[], KernelBuild]) -> None:
        self.gpu, self.host, self.build = gpu, host, build
        self.run, self.host_names = runner(gpu)(), gpu.host_names()
        self.stream: Callable[[], int] = self.host_names["threads"]
        self.waiting: defaultdict[int, list[Any]] = defaultdict(list)
        self.recorded: dict[int, Any] = {}  # frames that CUDA graphs point to

    def names(self) -> Mapping[str, Any]:
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
            # from a launch with an odd pointer on: its accesses are narrow now, and stay so
            launch = frame.launch
            spec, build = self.host.layout.launches[launch], self.build()
            build.add(with_any_pointers([*self.host.functions.values()][spec.function]))
            frame.replace(launch, build.finish()[0], spec.align & 0xFFFF_FFFF)
            runs = re.findall(r"run\(frame\.state, (\d+), (\d+)", self.host.source)
            end = next(int(end) for first, end in runs if int(first) <= launch < int(end))
            status = self.run(frame.state, launch, end, self.stream())
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
