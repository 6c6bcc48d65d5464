"""A GPU that is none: its driver is Python, its memory the CPU's, its kernels numpy's."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusee.aten.torch_api import borrowed, storage_holders, storage_id
from fusee.fake.layouts import extent
from fusee.loops import Message
from fusee.targets.cuda import launch, recording
from fusee.targets.cuda.device import Device, Recorded
from tests.targets.cuda.machine import Machine

_WORD = ctypes.c_void_p
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, _WORD, *[ctypes.c_uint] * 7, _WORD, _WORD, ctypes.POINTER(_WORD)
)
_CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, _WORD)


_LEAST = 1 << 24  # what is above is an address: no test has as many elements


class FakeGpu(Device):
    """See Device, of which nothing is left that calls CUDA.

    recorded  how many CUDA graphs were made; replayed: how often one ran
    refuses   why recording fails, if it does
    launches  name of a kernel, blocks, threads, stream, of each launch in order
    streams   what the present stream is
    beside    how many launches ran side by side, each time
    """

    capability, device = 90, torch.device("cpu")

    def __init__(self, index: int) -> None:
        self.index = index
        self.words = torch.zeros(2, dtype=torch.int64)
        self.messages: dict[int, Message] = {}
        self.page = torch.zeros(512, dtype=torch.int64)
        self.page[0] = self.words.data_ptr()
        self.texts: list[str] = []
        self.launches: list[tuple[int, int, int, int]] = []
        self.status, self.stream, self.depth = 0, 7, 0
        self.allocated: dict[int, int] = {}  # bytes by address
        self.unknown = 0  # bytes that autograd may have here, even where ours were freed
        self.arenas: list[Tensor] = []
        self.is_capturing, self.is_recording, self.refuses = False, False, ""
        self.recorded = self.replayed = self.waits = 0
        self.beside: list[int] = []  # how many launches at once
        self.held: list[Tensor] = []
        self.own: list[Tensor] = []  # what keeps memory of recordings
        self.pools: list[object] = []
        self.copied: list[int] = []  # how many tensors at once
        self.given_back = 0  # how often
        self._kept = (_LAUNCH(self._launch), _CONTEXT(self._push), _CONTEXT(self._pop))
        names = ("cuLaunchKernel", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
        self.imports = {
            name: ctypes.cast(function, _WORD).value or 0
            for name, function in zip(names, self._kept, strict=True)
        }
        self.imports |= {"fusee_context": 99, "fusee_page": self.page.data_ptr()}

    def load(self, code: bytes, name: str) -> int:
        self.texts.append(code.decode())
        return len(self.texts)

    def uses(self, function: int) -> str:
        return f"function {function}"

    def linker(self) -> str:
        raise AssertionError("nothing is assembled here")

    def link(self, texts: Sequence[bytes], capability: int) -> tuple[bytes, str]:
        raise AssertionError("nothing is assembled here")

    def host_names(self) -> Mapping[str, Any]:
        return {"threads": lambda: self.stream, "empty_strided": self._empty}

    def known(self, *tensors: Tensor) -> None:
        """Memory that kernels may touch."""
        for x in tensors:
            before = x.storage_offset() * x.dtype.itemsize
            self.allocated[x.data_ptr()] = int(x.untyped_storage().nbytes()) - int(before)

    def _empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        found = torch.empty_strided(size, stride, dtype=dtype)
        self.known(found)
        return found

    # --------------------------------------------------------------------- CUDA graphs

    def capturing(self) -> bool:
        return self.is_capturing

    @contextmanager
    def growing(self) -> Iterator[None]:
        yield

    def give_back(self) -> None:
        self.given_back += 1

    def pool(self) -> object:
        self.pools.append(object())
        return self.pools[-1]

    def record(
        self,
        call: Callable[[list[Any]], Sequence[Any]],
        given: Sequence[Any],
        own: Mapping[int, Callable[[], Tensor]],
        pool: Any,
    ) -> Recorded:
        """No kernel runs while it is recorded; a replay runs all of it over the same memory.

        The call's own holds nonsense after each replay: others may be there by then.
        """
        given = [*given]
        for k, make in own.items():
            self.own.append(make())
            given[k] = borrowed(self.own[-1])
        self.held += [x for x in given if isinstance(x, Tensor)]
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.is_recording = True
        try:
            results = self._on_side(partial(call, [*given]))
        finally:
            self.is_recording = False
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for x, y in zip(results, self._on_side(partial(call, [*given])), strict=True):
                if isinstance(x, Tensor) and x is not y:
                    x.copy_(y)
            given_back = {x.data_ptr() for x in results if isinstance(x, Tensor)}
            for x in map(given.__getitem__, own):
                if x.data_ptr() not in given_back:
                    x.as_strided((extent(x.shape, x.stride()),), (1,)).view(torch.uint8).fill_(0x7F)

        return Recorded(replay, results, given, set())

    def _on_side(self, call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        before = self.stream, self.is_capturing
        self.stream, self.is_capturing = 99, True
        try:
            return call()
        finally:
            self.stream, self.is_capturing = before

    def holders(self, tensors: Sequence[Tensor]) -> Callable[[], list[int]]:
        """Without those that a replay runs over: a graph has addresses alone."""
        count, places = storage_holders(tensors), [*map(storage_id, tensors)]

        def others() -> list[int]:
            held = Counter(map(storage_id, self.held))
            return [n - held[place] for n, place in zip(count(), places, strict=True)]

        return others

    def like(self, x: Tensor) -> Callable[[], Tensor]:
        return partial(self._empty, x.size(), x.stride(), x.dtype)

    def together(self, calls: Sequence[Callable[[int], int]]) -> int:
        assert self.is_recording or self.is_capturing
        self.beside.append(len(calls))
        order = reversed([*enumerate(calls)])  # any would do
        found = [call(self.stream + 100 * k) for k, call in order]
        return next((status for status in found if status), 0)

    def wait(self) -> None:
        self.waits += 1

    def described(self, status: int) -> str:
        return f"status {status}"

    def arena(self, size: int) -> Tensor:
        whole = torch.zeros(size + 64, dtype=torch.uint8)
        self.arenas.append(whole[-whole.data_ptr() % 64 :][:size])
        return self.arenas[-1]

    # ------------------------------------------------------------------------------ driver

    def _push(self, context: int) -> int:
        assert context == 99
        self.depth += 1
        return 0

    def _pop(self, place: int) -> int:
        self.depth -= 1
        return 0

    def _launch(self, function: int, *rest: Any) -> int:
        x, _, _, threads, _, _, shared, stream, params, extra = rest
        assert self.depth == 1 and not shared and not params
        assert extra[0] == 1 and extra[2] == 2 and not extra[4]
        size = ctypes.c_int64.from_address(extra[3]).value
        words = (ctypes.c_int64 * (size // 8)).from_address(extra[1])
        if self.is_recording:
            return 0
        self.launches.append((function, x, threads, stream or 0))
        if self.status:
            return self.status
        self._run(Machine(self.texts[function - 1], x, threads), words)
        return 0

    def _run(self, machine: Machine, words: Iterable[int]) -> None:
        given: list[Any] = []
        if machine.takes_rows:  # pointers and numbers in one
            rows = [machine.buffer(self._memory(w)) if w > _LEAST else w for w in words]
            given.append(np.array(rows, np.int64))
        else:
            for (kind, _), word in zip(machine.arguments, words, strict=True):
                given.append(self._memory(word) if kind == "ptr" else word)
        host = machine.buffer(self.words.numpy(), watched=False)
        self.page[0] = host
        try:
            machine.run(given)
        except IndexError:
            self.status = 710

    def _memory(self, address: int) -> Any:
        if address == self.page.data_ptr():
            return self.page.numpy()
        length = self.allocated.get(address)
        for arena in self.arenas:
            start = arena.data_ptr()
            if start <= address < start + arena.numel():
                length = start + arena.numel() - address
        length = self.unknown if length is None else max(length, self.unknown)
        assert length or address in self.allocated, "memory that nobody has allocated"
        if not length:
            return np.zeros(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


class WatchedCopies(recording.Copies):
    """What it launches is no launch of a test's."""

    def __init__(
        self, gpu: Device, stay: Sequence[Tensor], into: bool, stream: Callable[[], int]
    ) -> None:
        assert isinstance(gpu, FakeGpu)
        super().__init__(gpu, stay, into, lambda: gpu.stream)
        self.gpu = gpu

    def __call__(self, others: Sequence[Tensor]) -> None:
        gpu, stay = self.gpu, self.stay
        assert all(x.stride() == y.stride() for x, y in zip(stay, others, strict=True))
        gpu.copied.append(len(stay))
        gpu.known(*stay, *others)
        before = len(gpu.launches)
        super().__call__(others)
        del gpu.launches[before:]


_numbers = iter(range(1000, 100_000))


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU whose machine code is the text that was to become machine code."""
    monkeypatch.setattr(launch, "linker", lambda: None)
    monkeypatch.setattr(launch, "version", lambda: "none")
    monkeypatch.setattr(recording, "Copies", WatchedCopies)
    monkeypatch.setattr(launch, "to_code", lambda text, *rest: text.encode())
    return FakeGpu(next(_numbers))
