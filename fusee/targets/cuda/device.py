"""One GPU: what its driver and torch do for us. Nothing else calls CUDA's driver.

Adapter to libcuda (names of CUDA 12 and 13) and to torch's allocator and streams. Nothing here
runs before a graph with tensors on a GPU is compiled. Kernels stay loaded as long as the process
lives: some of them may be recorded in graphs of the user's, or be on their way.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusee.aten.torch_api import borrowed, is_freed, storage_holders
from fusee.errors import CompileError, LateError, MissingPackage
from fusee.loops import Message
from fusee.runtime import gc_paused

# Branches of a row: more would not fit a GPU side by side.
MOST = 4


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


def refused(who: str, words: bytes, status: int) -> CompileError:
    said = words.rstrip(b"\0").decode(errors="replace").strip()
    return CompileError(
        f"{who} refused generated code: {said or f'status {status}'}",
        did="stopped; nothing was run",
        remedy="report this as a bug of Fusee, with the output of FUSEE_LOG=llvm",
    )


def late_error(words: Tensor, messages: Mapping[int, Message]) -> LateError | None:
    """What kernels have left for the host, if one has refused a value."""
    code, value = words.tolist()
    if code not in messages:
        return None
    _, text, origin, size = messages[code]
    remedy = "call it with tensors on the CPU: there the error comes from its line"
    return LateError(text.format(value, size=size), where=f"in {origin}", remedy=remedy)


class Recorded(NamedTuple):
    """A call as a CUDA graph.

    replay   launches it at once
    results  what the call gave
    inputs   what it reads; its own do not keep their memory
    freed    which of these it has let go of: others may lie there by now
    """

    replay: Callable[[], None]
    results: Sequence[Any]
    inputs: list[Any]
    freed: set[int]


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
        """See Recorded.

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

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
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


@functools.cache
def gpu_at(index: int) -> Device:
    """The GPU of a number."""
    return Device(index)
