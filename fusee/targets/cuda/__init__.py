"""NVIDIA's GPUs: loops as LLVM IR for many threads, layers as calls of ATen."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fusee.aten.attention import fuse_attention
from fusee.aten.rewriter import Pass
from fusee.aten.torch_api import borrowed, is_freed, storage_holders
from fusee.autodiff.min_cut import Prices
from fusee.codegen import HostArguments, HostCode
from fusee.codegen.simt import emit_kernel, with_any_pointers
from fusee.config import Options
from fusee.errors import CompileError, MissingPackage, TraceError
from fusee.loops import Kernel, Message, Profile
from fusee.loops.lower import ExternSpec
from fusee.loops.memory import Plan
from fusee.runtime import gc_paused
from fusee.runtime.jit import Build
from fusee.runtime.launch import LaunchFrame
from fusee.source import HALVES, with_names
from fusee.targets import (
    PRODUCTS,
    Emitted,
    Kept,
    Loaded,
    Target,
    emit_graph,
    load_graph,
    names_of,
)
from fusee.targets.cuda.launch import (
    MISALIGNED,
    MOST,
    Beside,
    Gpu,
    Joined,
    KernelBuild,
    Recorded,
    first_code,
    late_error,
    prepare,
    refused,
    rows_of,
    runner,
)
from fusee.targets.cuda.passes import (
    ROW,
    biases_apart,
    channels_last,
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
    Copies,
    Recording,
    Replayer,
    Together,
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
    _aten.linear.default: ExternSpec(_aten.linear.default, exact=True, owns=True),
    _aten.scaled_dot_product_attention.default: ExternSpec(few_keys, exact=True),
    _EFFICIENT: ExternSpec(_attention, exact=True),
    _EFFICIENT_BACKWARD: ExternSpec(_attention_backward, exact=True),
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

    def emit(
        self,
        plan: Plan,
        arguments: HostArguments,
        build: Build,
        options: Options,
        timed: Callable[[str], AbstractContextManager[object]],
    ) -> tuple[Emitted, Mapping[Kernel, str]]:
        messages = plan.schedule.graph.messages
        emit = partial(emit_kernel, first=first_code(messages))
        host, launches = emit_graph(plan, arguments, emit, build, timed, Joined(plan))
        rows, written = rows_of(plan, launches), written_inputs(plan, arguments)
        own = Recording(why_launched(plan), rows, written, may_grow(plan))
        return Emitted(host, arguments, messages, own), names_of(launches)

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

    def __init__(self, gpu: Gpu, host: HostCode, build: Callable[[], KernelBuild]) -> None:
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
        spec, build = self.host.layout.launches[launch], self.build()
        build.add(with_any_pointers([*self.host.functions.values()][spec.function]))
        frame.replace(launch, build.finish()[0], spec.align & 0xFFFF_FFFF)
        runs = re.findall(r"run\(frame\.state, (\d+), (\d+)", self.host.source)
        end = next(int(end) for first, end in runs if int(first) <= launch < int(end))
        return self.run(frame.state, launch, end, self.stream())


# ------------------------------------------------------------------------------ device
# One GPU: what its driver and torch do for us. Nothing else calls CUDA's driver.
#
# Adapter to libcuda (names of CUDA 12 and 13) and to torch's allocator and streams. Nothing here
# runs before a graph with tensors on a GPU is compiled. Kernels stay loaded as long as the process
# lives: some of them may be recorded in graphs of the user's, or be on their way.

Sizes = tuple[int, ...]
# Numbers of the driver's: attributes of functions, options and inputs of its linker.
_REGISTERS, _LOCAL_BYTES = 4, 3
_ERROR_LOG, _ERROR_LOG_BYTES, _PTX = 5, 6, 1
_LOG_BYTES = 1 << 13


@functools.cache
def _driver() -> ctypes.CDLL:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingPackage("NVIDIA's driver cannot be loaded", remedy="install NVIDIA's driver")


def _described(status: int) -> str:
    words = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(words))
    return (words.value or b"an error without a name").decode()


def _ask(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise CompileError(f"{name}: {_described(status)}", did="stopped; nothing was run")


class Device:
    """A GPU by its number.

    capability  such as 90
    device      as torch calls it
    imports     what machine code that launches kernels refers to, by name
    words       two numbers that a kernel leaves for the host, when it refuses an index
    messages    of all graphs, by their number: the first of these words
    """

    # Of what is made when the first graph is compiled: memory that all threads may read and write,
    # beginning with the address of `words`.
    _PAGE_WORDS = 512
    _recording = threading.Lock()  # of all GPUs: how memory is asked for then is the process's

    def __init__(self, index: int) -> None:
        self.index = index
        major, minor = torch.cuda.get_device_capability(index)
        self.capability = 10 * major + minor
        self.device = torch.device("cuda", index)
        context = ctypes.c_void_p()
        _ask("cuInit", 0)
        _ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
        self._context = context
        with torch.inference_mode(False), torch.no_grad():
            self.words = torch.zeros(2, dtype=torch.int64).pin_memory()
            page = torch.zeros(self._PAGE_WORDS, dtype=torch.int64)
            page[0] = self.words.data_ptr()
            self._page = page.to(self.device)
        self.messages: dict[int, Message] = {}
        self._stream: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, index)
        atexit.register(self._tell)
        names = ("cuLaunchKernel", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
        functions = {name: ctypes.cast(getattr(_driver(), name), ctypes.c_void_p) for name in names}
        self.imports = {name: function.value or 0 for name, function in functions.items()}
        self.imports |= {"fusee_context": context.value or 0, "fusee_page": self._page.data_ptr()}

    def _tell(self) -> None:
        """At the end of a process: CUDA's own message may be all that the program has raised."""
        if error := late_error(self.words, self.messages):
            print(f"fusee: {error}", file=sys.stderr)

    def load(self, code: bytes, name: str) -> int:
        """A function of machine code, ready to be launched."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self._current():
            _ask("cuModuleLoadData", ctypes.byref(module), code)
            _ask("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function.value or 0

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        _ask("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def uses(self, function: int) -> str:
        """Of each thread: its registers, and what did not fit them."""
        found = [ctypes.c_int() for _ in "rl"]
        with self._current():
            for value, attribute in zip(found, (_REGISTERS, _LOCAL_BYTES), strict=True):
                given = ctypes.c_int(attribute), ctypes.c_void_p(function)
                _ask("cuFuncGetAttribute", ctypes.byref(value), *given)
        return f"{found[0].value} registers, {found[1].value} bytes spilled"

    # ---- linking

    def linker(self) -> str:
        """The version of `link`."""
        version = ctypes.c_int()
        _ask("cuDriverGetVersion", ctypes.byref(version))
        return f"driver {version.value}"

    def link(self, texts: Sequence[bytes], capability: int) -> tuple[bytes, str]:
        """See launch.link: by the driver, which knows the GPU of its context."""
        words = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(words), _LOG_BYTES)
        state, code, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        driver = _driver()
        with self._current():
            _ask("cuLinkCreate_v2", 2, options, values, ctypes.byref(state))
            try:
                status = 0
                for text in texts:
                    given = _PTX, text + b"\0", ctypes.c_size_t(len(text) + 1), b"part"
                    status = status or driver.cuLinkAddData_v2(state, *given, 0, None, None)
                found = ctypes.byref(code), ctypes.byref(size)
                status = status or driver.cuLinkComplete(state, *found)
                if status:
                    raise refused("NVIDIA's driver", words.value, status)
                return ctypes.string_at(code, size.value), ""
            finally:
                _ask("cuLinkDestroy", state)

    def host_names(self) -> Mapping[str, Any]:
        """What the host function calls of torch."""
        bring = partial(Tensor.to, device=self.device, non_blocking=True)
        return {"threads": self._stream, "empty_strided": self._empty_strided, "bring": bring}

    @functools.cached_property
    def _empty_strided(self) -> Callable[[Sizes, Sizes, torch.dtype], Tensor]:
        """Without the parsing of options, where there is no other GPU to be the present one."""
        found = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
        if found is not None and torch.cuda.device_count() == 1:
            return found  # type: ignore[no-any-return]
        device = self.device
        return lambda *given: torch.empty_strided(*given[:2], dtype=given[2], device=device)

    # ---- CUDA graphs

    @functools.cached_property
    def _streams(self) -> list[Any]:
        """That of recordings, always the same: torch gives memory of one stream to no other; and
        those for branches."""
        return [torch.cuda.Stream(self.index) for _ in range(MOST)]  # type: ignore[no-untyped-call]

    def capturing(self) -> bool:
        """Whether somebody records what is launched now."""
        return torch.cuda.is_current_stream_capturing()

    def pool(self) -> Any:
        """Memory that recordings may share, of which one runs after the other."""
        return torch.cuda.graph_pool_handle()

    def record(
        self,
        call: Callable[[list[Any]], Sequence[Any]],
        given: Sequence[Any],
        own: Mapping[int, Callable[[], Tensor]],
        pool: Any,
    ) -> Recorded:
        """See launch.Recorded.

        own      in place of what is given, by number, what makes the call's own: of the pool, and
                 again the pool's as soon as the call lets go of it
        raises   RuntimeError if it does what cannot be recorded; nothing has run
        """
        seen, freed, mine = [*given], dict[int, Callable[[], bool]](), [*given]

        def whole() -> Sequence[Any]:
            with torch.inference_mode(False), torch.no_grad():  # others write to them, in any mode
                for k, make in own.items():
                    mine[k] = make()
                    seen[k], freed[k] = borrowed(mine[k]), is_freed(mine[k])
            return call(mine)

        side = torch.cuda.stream(self._streams[0])
        with self._recording, torch.cuda.device(self.index), gc_paused(), side:
            try:
                replay, results = _recorded(whole, pool)
            except RuntimeError:
                # torch goes on to take its generator for one that is recorded: a recording
                # that ends well ends that, too
                _recorded(partial(torch.zeros, 1, device=self.device), None)
                raise
        return Recorded(replay, results, seen, {k for k, ask in freed.items() if ask()})

    def growing(self) -> contextlib.AbstractContextManager[None]:
        """Within, what is taken lies in one segment, not in many with room left in each."""
        return _growing()

    def give_back(self) -> None:
        """What torch has and nobody uses, to the GPU: recordings can take none of that."""
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def together(self, calls: Sequence[Callable[[int], int]]) -> int:
        """Calls with streams beside each other, within `record`; their first status but 0."""
        main: Any = torch.cuda.current_stream(self.index)
        start, status = main.record_event(), calls[0](main.cuda_stream)
        for call, stream in zip(calls[1:], self._streams[1:], strict=False):
            stream.wait_event(start)
            status = status or call(stream.cuda_stream)
            main.wait_event(stream.record_event())
        return status

    def holders(self, tensors: Sequence[Tensor]) -> Callable[[], list[int]]:
        """What counts the tensors in the memory of each of some."""
        return storage_holders(tensors)

    def like(self, x: Tensor) -> Callable[[], Tensor]:
        """What makes memory laid out as that of a tensor."""
        return partial(self._empty_strided, tuple(x.size()), x.stride(), x.dtype)

    def copies(self, stay: Sequence[Tensor], into: bool) -> Callable[[Sequence[Tensor]], None]:
        """What copies into, or out of, tensors that stay where they are."""
        return Copies(self, stay, into, self._stream)

    def wait(self) -> None:
        """Until nothing is on its way."""
        torch.cuda.synchronize(self.index)

    def described(self, status: int) -> str:
        """What the driver says of a status that is not 0."""
        return _described(status)

    def arena(self, size: int) -> Tensor:
        """So many bytes, at least an element: 0 at first, for blocks that count each other."""
        # memory of 0 bytes is not cleared: that would be a node of a graph that the user records
        make = torch.zeros if size else torch.empty
        with torch.inference_mode(False), torch.no_grad():
            return make(max(size, 16), dtype=torch.uint8, device=self.device)


def _recorded(call: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
    graph = torch.cuda.CUDAGraph()
    # the libraries' workspaces become the pool's, and are made anew for others
    torch._C._cuda_clearCublasWorkspaces()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        results = call()
    finally:
        graph.capture_end()
        torch._C._cuda_clearCublasWorkspaces()
    return graph.replay, results


@contextlib.contextmanager
def _growing() -> Iterator[None]:
    """Within, a pool's memory is one segment that grows, not many with room left in each.

    source   torch's page on CUDA semantics, `expandable_segments`
    """
    # torch 2.11 tells nobody what was set behind the environment's back
    ask: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    before = ask() if ask else next(filter(None, map(os.environ.get, names)), "")
    if sys.platform != "linux" or "backend:" in before:
        yield
        return
    change = torch._C._accelerator_setAllocatorSettings
    change(f"{before},expandable_segments:True".removeprefix(","))
    try:
        yield
    finally:
        change(before or "expandable_segments:False")


@functools.cache
def gpu_at(index: int) -> Device:
    """The GPU of a number."""
    return Device(index)
