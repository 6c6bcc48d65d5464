"""Runs kernels: launches, the memory they work on, and frames that are built once per sizes.

THE KERNEL ABI

    void kernel(void** pointers, int64_t* params, int64_t begin, int64_t end, int64_t thread)

    pointers   one per slot of the launch, in its order, then one more: the status, int64_t[2]
    params     sizes, strides and offsets, as the launch gives them; read only
    begin end  the kernel's part of the launch's parallel iterations [0, total): never empty when
               several threads run; any part may be given to any thread
    thread     0 <= thread < the number of threads; parts of one call have different ones
    status     a kernel that meets a bad index writes what it was to status[1], then a code other
               than 0 to status[0], and goes on without touching memory out of bounds. Launches
               after it are not run; `run` returns the code, Frame.value the other word

total, grain and align are numbers that the frame's builder computes from the sizes. A thread gets
about `grain` iterations or more, and a multiple of `align` unless it has the last part; with total
<= grain the launch runs on the calling thread. A kernel copes with begin = end = 0 if its launch
may have total 0.

Everything that depends on sizes alone is in a Frame. A frame belongs to one call at a time:

    frame = program.checkout(sizes)
    try:
        if run(frame.state, 0, 3, threads, 0, x.data_ptr(), 1, out.data_ptr()):
            raise ...
    finally:
        program.checkin(frame)
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusee.runtime.jit import Function
from fusee.runtime.runner import LAUNCH_WORDS, STATE_WORDS, runner

__all__ = ["Frame", "FrameSpec", "LaunchSpec", "Program", "ViewSpec", "runner"]

_ALIGN_BYTES = 64


class LaunchSpec(NamedTuple):
    """One call of a kernel.

    function  index into the program's functions
    slots     indices in the frame's pointer table, in the order of the kernel's pointers
    total     parallel iterations; grain: how many are worth a thread; align: a part's multiple
    """

    function: int
    slots: tuple[int, ...]
    params: tuple[int, ...]
    total: int
    grain: int
    align: int = 1


class ViewSpec(NamedTuple):
    """A tensor in the arena, for calls on whole tensors. Its elements begin at offset_bytes."""

    offset_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class FrameSpec(NamedTuple):
    """What a frame is made of.

    slots    length of the pointer table
    scratch  (slot, offset in the arena) of the slots that never change
    """

    launches: tuple[LaunchSpec, ...]
    slots: int
    arena_bytes: int = 0
    scratch: tuple[tuple[int, int], ...] = ()
    views: tuple[ViewSpec, ...] = ()


class Frame:
    """The memory of one call in progress.

    state    the address that `run` takes first
    views    tensors in the arena, in the order of the spec's views
    version  free for the caller: of what `bind` was called with last; 0 at first
    """

    __slots__ = (
        "_functions",
        "_words",
        "arena",
        "size_bytes",
        "sizes",
        "state",
        "version",
        "views",
    )

    def __init__(
        self, spec: FrameSpec, functions: Sequence[Function], sizes: tuple[int, ...] = ()
    ) -> None:
        self._functions = functions  # whose code the launches point to
        self.sizes = sizes
        self.version = 0
        self.size_bytes = spec.arena_bytes
        # the caller may be in inference mode, where tensors are made that others may not write to
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.empty(spec.arena_bytes + _ALIGN_BYTES, dtype=torch.uint8)
            self.arena = whole[-whole.data_ptr() % _ALIGN_BYTES :]
            self.views = tuple(_view(self.arena, view) for view in spec.views)
        addresses = [function.address for function in functions]
        self._words = _lay_out(spec, addresses, self.arena.data_ptr())
        self.state: int = self._words.buffer_info()[0]

    @property
    def value(self) -> int:
        """What the kernel that reported a code wrote beside it."""
        return self._words[1]

    def bind(self, version: int, pointers: Iterable[tuple[int, int]]) -> None:
        """Set (slot, pointer) pairs that stay for the calls to come."""
        for slot, pointer in pointers:
            self._words[STATE_WORDS + slot] = pointer
        self.version = version


class Program:
    """Builds and keeps frames. `checkout` and `checkin` may be called from any thread.

    functions   what LaunchSpec.function indexes
    build       from sizes to the frame for them
    most_sizes  how many different sizes to keep frames for; those used longest ago go first
    most_bytes  how many bytes of arenas to keep; the sizes used last are always kept
    """

    def __init__(
        self,
        functions: Sequence[Function],
        build: Callable[[tuple[int, ...]], FrameSpec],
        *,
        most_sizes: int = 8,
        most_bytes: int = 2**31,
    ) -> None:
        self.functions = tuple(functions)
        self.build = build
        self.most_sizes = most_sizes
        self.most_bytes = most_bytes
        self._frames: dict[tuple[int, ...], list[Frame]] = {}  # least recently used first
        self._bytes: dict[tuple[int, ...], int] = {}  # of all frames made for these sizes
        self._lock = threading.Lock()
        # One attribute, so that a thread never pairs sizes with another's frames. list.pop and
        # list.append are atomic with or without Python's lock.
        self._recent: tuple[tuple[int, ...] | None, list[Frame]] = (None, [])

    def checkout(self, sizes: tuple[int, ...] = ()) -> Frame:
        """A frame for `sizes` that no other call uses until it is checked in."""
        recent, frames = self._recent
        if frames and recent == sizes:
            try:
                return frames.pop()
            except IndexError:  # another thread took the last one
                pass
        return self._find(sizes)

    def checkin(self, frame: Frame) -> None:
        """Give a frame back."""
        frames = self._frames.get(frame.sizes)
        if frames is not None:  # else these sizes were evicted meanwhile
            frames.append(frame)

    def _find(self, sizes: tuple[int, ...]) -> Frame:
        with self._lock:
            frames = self._frames.pop(sizes, [])
            self._frames[sizes] = frames
            self._recent = (sizes, frames)
            if frames:
                return frames.pop()
        frame = Frame(self.build(sizes), self.functions, sizes)
        with self._lock:
            self._bytes[sizes] = self._bytes.get(sizes, 0) + frame.size_bytes
            self._evict(sizes)
        return frame

    def _evict(self, latest: tuple[int, ...]) -> None:
        for sizes in list(self._frames):
            if len(self._frames) <= self.most_sizes and self.held_bytes <= self.most_bytes:
                break
            if sizes != latest:
                del self._frames[sizes]
                self._bytes.pop(sizes, None)

    @property
    def held_bytes(self) -> int:
        """Bytes of the arenas of all frames, in use or not."""
        return sum(self._bytes.values())


def _view(arena: Tensor, spec: ViewSpec) -> Tensor:
    count = 1 + sum((n - 1) * step for n, step in zip(spec.size, spec.stride, strict=True))
    if 0 in spec.size:
        count = 0
    stop = spec.offset_bytes + count * spec.dtype.itemsize
    flat = arena[spec.offset_bytes : stop].view(spec.dtype)
    return flat.as_strided(spec.size, spec.stride)


def _lay_out(spec: FrameSpec, addresses: Sequence[int], arena: int) -> array[int]:
    """One block of words: state, pointer table, launches, then what launches point to."""
    table = STATE_WORDS
    launches = table + spec.slots
    parts = launches + LAUNCH_WORDS * len(spec.launches)
    count = parts + sum(2 * len(one.slots) + 1 + len(one.params) for one in spec.launches)
    words = array("q", bytes(8 * count))
    base = words.buffer_info()[0]
    words[2] = base + 8 * table
    words[3] = base + 8 * launches
    words[4] = len(spec.launches)
    words[5] = spec.slots
    for slot, offset in spec.scratch:
        words[table + slot] = arena + offset
    for number, one in enumerate(spec.launches):
        slots = parts
        pointers = slots + len(one.slots)
        params = pointers + len(one.slots) + 1
        parts = params + len(one.params)
        words[slots:pointers] = array("q", one.slots)
        words[params:parts] = array("q", one.params)
        at = launches + LAUNCH_WORDS * number
        units = -(-one.total // max(one.grain, 1))
        words[at : at + LAUNCH_WORDS] = array(
            "q",
            (
                addresses[one.function],
                base + 8 * slots,
                len(one.slots),
                base + 8 * pointers,
                base + 8 * params,
                one.total,
                units,
                max(one.align, 1),
            ),
        )
    return words
