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

import ctypes
import functools
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fusee.runtime import jit
from fusee.runtime.jit import Function

# ---------------------------------------------------------------------------- runner
# The builtin that runs launches: machine code that Python calls like any C function.
#
#     run(state, first, last, threads, slot, pointer, slot, pointer, ...) -> int
#
# stores the pointers in the table of the frame at address `state`, then runs its launches [first,
# last) in order. Returns 0, or the code of the first kernel that reported one; launches after it
# are not run. Wrong arguments raise before anything is run. A launch with two or more units of work
# runs on a team of `threads`; when the launches have several units in all, Python's lock is
# released meanwhile. The memory that it walks through is laid out by Frame in launch.py:
#
#     state   code, value, table, launches, number of launches, number of slots
#     launch  function, slots, number of slots, pointers, params, total, units, align
#
# all of them 64-bit words.

STATE_WORDS = 6
LAUNCH_WORDS = 8

# Units of work above which other Python threads may run: giving up the lock costs less than 0.1 us,
# but having it back may take another thread's switch interval.
_UNITS_TO_RELEASE = 4

_METH_FASTCALL = 0x80

_C_API = (
    "PyLong_AsSsize_t",
    "PyLong_FromSsize_t",
    "PyErr_Occurred",
    "PyTuple_GetItem",
    "PyErr_SetString",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)

# One thread of a team: its share of the iterations is a whole number of `align`. All threads take
# part although some may find nothing to do: libgomp ends threads when a team is smaller than the
# one before.
_TEAM = """
define internal void @team(ptr %launch) nounwind {
  %thread32 = call i32 @omp_get_thread_num()
  %thread = sext i32 %thread32 to i64
  %team32 = call i32 @omp_get_num_threads()
  %team = sext i32 %team32 to i64
  %total.at = getelementptr i64, ptr %launch, i64 5
  %total = load i64, ptr %total.at
  %units.at = getelementptr i64, ptr %launch, i64 6
  %units = load i64, ptr %units.at
  %align.at = getelementptr i64, ptr %launch, i64 7
  %align = load i64, ptr %align.at
  %active = call i64 @llvm.smin.i64(i64 %team, i64 %units)
  %up = add i64 %total, %active
  %up1 = sub i64 %up, 1
  %share = udiv i64 %up1, %active
  %aligned = add i64 %share, %align
  %aligned1 = sub i64 %aligned, 1
  %blocks = udiv i64 %aligned1, %align
  %chunk = mul i64 %blocks, %align
  %begin = mul i64 %chunk, %thread
  %stop = add i64 %begin, %chunk
  %end = call i64 @llvm.smin.i64(i64 %stop, i64 %total)
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %work, label %done
work:
  %function = load ptr, ptr %launch
  %pointers.at = getelementptr i64, ptr %launch, i64 3
  %pointers = load ptr, ptr %pointers.at
  %params.at = getelementptr i64, ptr %launch, i64 4
  %params = load ptr, ptr %params.at
  call void %function(ptr %pointers, ptr %params, i64 %begin, i64 %end, i64 %thread)
  br label %done
done:
  ret void
}
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i64 @llvm.smin.i64(i64, i64)
"""

_ON_TEAM = """
  %parallel = and i1 %many.units, %many.threads
  br i1 %parallel, label %on.team, label %alone
on.team:
  call void @GOMP_parallel(ptr @team, ptr %launch, i32 %threads32, i32 0)
  br label %ran
"""

_RUN = """
define internal i1 @failed(i64 %value) nounwind {
  %odd = icmp eq i64 %value, -1
  br i1 %odd, label %ask, label %no
ask:
  %error = call ptr @PyErr_Occurred()
  %is = icmp ne ptr %error, null
  ret i1 %is
no:
  ret i1 false
}

define ptr @kernel(ptr %self, ptr %args, i64 %count) nounwind {
entry:
  %odd.count = and i64 %count, 1
  %even = icmp eq i64 %odd.count, 0
  %enough = icmp sge i64 %count, 4
  %right = and i1 %even, %enough
  br i1 %right, label %read, label %wrong.arguments
read:
  %arg0 = load ptr, ptr %args
  %arg1.at = getelementptr ptr, ptr %args, i64 1
  %arg1 = load ptr, ptr %arg1.at
  %arg2.at = getelementptr ptr, ptr %args, i64 2
  %arg2 = load ptr, ptr %arg2.at
  %arg3.at = getelementptr ptr, ptr %args, i64 3
  %arg3 = load ptr, ptr %arg3.at
  %state.word = call i64 @PyLong_AsSsize_t(ptr %arg0)
  %state = inttoptr i64 %state.word to ptr
  %state.failed = call i1 @failed(i64 %state.word)
  br i1 %state.failed, label %raised, label %read.first
read.first:
  %null = icmp eq ptr %state, null
  br i1 %null, label %wrong.arguments, label %read.numbers
read.numbers:
  %first = call i64 @PyLong_AsSsize_t(ptr %arg1)
  %first.failed = call i1 @failed(i64 %first)
  br i1 %first.failed, label %raised, label %read.last
read.last:
  %last = call i64 @PyLong_AsSsize_t(ptr %arg2)
  %last.failed = call i1 @failed(i64 %last)
  br i1 %last.failed, label %raised, label %read.threads
read.threads:
  %threads = call i64 @PyLong_AsSsize_t(ptr %arg3)
  %threads.failed = call i1 @failed(i64 %threads)
  br i1 %threads.failed, label %raised, label %check
check:
  %threads32 = trunc i64 %threads to i32
  %many.threads = icmp sgt i64 %threads, 1
  %table.at = getelementptr i64, ptr %state, i64 2
  %table = load ptr, ptr %table.at
  %launches.at = getelementptr i64, ptr %state, i64 3
  %launches = load ptr, ptr %launches.at
  %number.at = getelementptr i64, ptr %state, i64 4
  %number = load i64, ptr %number.at
  %slots.at = getelementptr i64, ptr %state, i64 5
  %slots = load i64, ptr %slots.at
  %from.zero = icmp sge i64 %first, 0
  %ordered = icmp sle i64 %first, %last
  %inside = icmp sle i64 %last, %number
  %fine0 = and i1 %from.zero, %ordered
  %fine = and i1 %fine0, %inside
  br i1 %fine, label %pairs, label %wrong.launches

pairs:
  %k = phi i64 [ 4, %check ], [ %k.next, %set ]
  %more.pairs = icmp slt i64 %k, %count
  br i1 %more.pairs, label %pair, label %weigh
pair:
  %slot.at = getelementptr ptr, ptr %args, i64 %k
  %slot.object = load ptr, ptr %slot.at
  %slot = call i64 @PyLong_AsSsize_t(ptr %slot.object)
  %slot.failed = call i1 @failed(i64 %slot)
  br i1 %slot.failed, label %raised, label %pair.slot
pair.slot:
  %known = icmp ult i64 %slot, %slots
  br i1 %known, label %pair.pointer, label %wrong.slot
pair.pointer:
  %k1 = add i64 %k, 1
  %pointer.at = getelementptr ptr, ptr %args, i64 %k1
  %pointer.object = load ptr, ptr %pointer.at
  %pointer = call i64 @PyLong_AsSsize_t(ptr %pointer.object)
  %pointer.failed = call i1 @failed(i64 %pointer)
  br i1 %pointer.failed, label %raised, label %set
set:
  %place = getelementptr ptr, ptr %table, i64 %slot
  store i64 %pointer, ptr %place
  %k.next = add i64 %k, 2
  br label %pairs

weigh:
  %w = phi i64 [ %first, %pairs ], [ %w.next, %weigh.one ]
  %work = phi i64 [ 0, %pairs ], [ %work.next, %weigh.one ]
  %more.weights = icmp slt i64 %w, %last
  br i1 %more.weights, label %weigh.one, label %start
weigh.one:
  %w.word = mul i64 %w, 8
  %w.units.word = add i64 %w.word, 6
  %w.units.at = getelementptr i64, ptr %launches, i64 %w.units.word
  %w.units = load i64, ptr %w.units.at
  %work.next = add i64 %work, %w.units
  %w.next = add i64 %w, 1
  br label %weigh
start:
  store i64 0, ptr %state
  %heavy = icmp sge i64 %work, UNITS_TO_RELEASE
  br i1 %heavy, label %release, label %launch.loop
release:
  %thread.state = call ptr @PyEval_SaveThread()
  br label %launch.loop

launch.loop:
  %held = phi ptr [ null, %start ], [ %thread.state, %release ], [ %held, %next ]
  %l = phi i64 [ %first, %start ], [ %first, %release ], [ %l.next, %next ]
  %more = icmp slt i64 %l, %last
  br i1 %more, label %launch.one, label %finish
launch.one:
  %l.word = mul i64 %l, 8
  %launch = getelementptr i64, ptr %launches, i64 %l.word
  %function = load ptr, ptr %launch
  %l.slots.at = getelementptr i64, ptr %launch, i64 1
  %l.slots = load ptr, ptr %l.slots.at
  %l.count.at = getelementptr i64, ptr %launch, i64 2
  %l.count = load i64, ptr %l.count.at
  %pointers.at = getelementptr i64, ptr %launch, i64 3
  %pointers = load ptr, ptr %pointers.at
  %params.at = getelementptr i64, ptr %launch, i64 4
  %params = load ptr, ptr %params.at
  %total.at = getelementptr i64, ptr %launch, i64 5
  %total = load i64, ptr %total.at
  %units.at = getelementptr i64, ptr %launch, i64 6
  %units = load i64, ptr %units.at
  br label %gather
gather:
  %g = phi i64 [ 0, %launch.one ], [ %g.next, %gather.one ]
  %more.slots = icmp slt i64 %g, %l.count
  br i1 %more.slots, label %gather.one, label %gathered
gather.one:
  %g.slot.at = getelementptr i64, ptr %l.slots, i64 %g
  %g.slot = load i64, ptr %g.slot.at
  %g.from = getelementptr ptr, ptr %table, i64 %g.slot
  %g.pointer = load ptr, ptr %g.from
  %g.to = getelementptr ptr, ptr %pointers, i64 %g
  store ptr %g.pointer, ptr %g.to
  %g.next = add i64 %g, 1
  br label %gather
gathered:
  %status.to = getelementptr ptr, ptr %pointers, i64 %l.count
  store ptr %state, ptr %status.to
  %many.units = icmp sgt i64 %units, 1
  ON_TEAM
alone:
  call void %function(ptr %pointers, ptr %params, i64 0, i64 %total, i64 0)
  br label %ran
ran:
  %code = load i64, ptr %state
  %good = icmp eq i64 %code, 0
  br i1 %good, label %next, label %finish
next:
  %l.next = add i64 %l, 1
  br label %launch.loop

finish:
  %released = icmp ne ptr %held, null
  br i1 %released, label %acquire, label %answer
acquire:
  call void @PyEval_RestoreThread(ptr %held)
  br label %answer
answer:
  %result = load i64, ptr %state
  %object = call ptr @PyLong_FromSsize_t(i64 %result)
  ret ptr %object

wrong.arguments:
  %type.error.at = load ptr, ptr @PyExc_TypeError
  call void @PyErr_SetString(ptr %type.error.at, ptr @ArgumentError)
  ret ptr null
wrong.slot:
  %index.error = load ptr, ptr @PyExc_IndexError
  call void @PyErr_SetString(ptr %index.error, ptr @SlotError)
  ret ptr null
wrong.launches:
  %index.error.too = load ptr, ptr @PyExc_IndexError
  call void @PyErr_SetString(ptr %index.error.too, ptr @LaunchError)
  ret ptr null
raised:
  ret ptr null
}
@PyExc_TypeError = external global ptr
@PyExc_IndexError = external global ptr
declare i64 @PyLong_AsSsize_t(ptr)
declare ptr @PyLong_FromSsize_t(i64)
declare ptr @PyErr_Occurred()
declare void @PyErr_SetString(ptr, ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
"""


_MESSAGES = {
    "ArgumentError": "run takes (state, first, last, threads) and pairs (slot, pointer)",
    "SlotError": "run: the frame has no such slot",
    "LaunchError": "run: the frame has no such launches",
}


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@functools.cache
def runner() -> Callable[..., int]:
    """The process's `run`, as described above."""
    pool = jit.pool()
    imports = {}
    if pool is not None:
        imports["GOMP_parallel"] = pool.parallel
        imports["omp_get_thread_num"] = pool.thread
        imports["omp_get_num_threads"] = pool.team
    text = _RUN.replace("UNITS_TO_RELEASE", str(_UNITS_TO_RELEASE))
    for symbol, words in _MESSAGES.items():
        text += f'@{symbol} = internal constant [{len(words) + 1} x i8] c"{words}\\00"\n'
    if pool is not None:
        text = text.replace("ON_TEAM", _ON_TEAM) + _TEAM
    else:
        text = text.replace("ON_TEAM", "br label %alone")
    found: Callable[..., int] = builtin("run", text, imports)
    return found


# What Python's C API needs to stay where it is: method definitions, and the code they point to.
_kept: list[tuple[_MethodDef, jit.Function]] = []


def builtin(name: str, text: str, imports: dict[str, int] | None = None) -> Any:
    """A Python builtin from IR text. It stays for the life of the process.

    text     a unit (see jit) whose @kernel(ptr self, ptr args, i64 n) is a METH_FASTCALL function
    imports  addresses of what it calls, besides the process's and Python's C API
    """
    known = {**_c_api(), **(imports or {})}
    function = jit.compile_one(text, known)
    definition = _MethodDef(name.encode(), function.address, _METH_FASTCALL, None)
    _kept.append((definition, function))
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return make(ctypes.addressof(definition), None, None)


@functools.cache
def _c_api() -> dict[str, int]:
    """Addresses in this interpreter; the process may hold another one that is found by name."""
    found = {}
    for name in _C_API:
        found[name] = ctypes.cast(ctypes.pythonapi[name], ctypes.c_void_p).value or 0
    for name in ("PyExc_TypeError", "PyExc_IndexError"):
        found[name] = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.pythonapi, name))
    return found


# ---------------------------------------------------------------------------- program


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

    def waiting(self, sizes: tuple[int, ...] = ()) -> list[Frame]:
        """The frames for `sizes` that no call uses. It stays the list as long as no others come."""
        return self._frames.setdefault(sizes, [])

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


# ---------------------------------------------------------------------------- layout
# Where a tensor keeps its facts in memory, for machine code that must know them in nanoseconds.
#
# Adapter to torch's private memory layout (tested with 2.13). No offset is written down here: each
# is found by comparing the memory of tensors whose facts Python tells, and confirmed on others.
# Where that finds no clear answer there is no Layout, and what relies on it is not done.

# Both objects are larger than this in every version supported.
_TENSOR_WORDS = 20
_STORAGE_WORDS = 6
_ODD_OFFSET = 12347


class Layout(NamedTuple):
    """Offsets in bytes. `version` is 4 bytes wide, all else 8."""

    impl: int  # Python object -> C++ tensor
    storage: int  # C++ tensor -> storage
    offset: int  # in the C++ tensor: storage offset in elements
    counter: int  # C++ tensor -> version counter; null in inference tensors
    data: int  # storage -> first byte
    version: int  # in the version counter: what Tensor._version reads


@functools.cache
def layout() -> Layout | None:
    """The layout of this process's torch, or None if it cannot be told for sure."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        found = _find()
        return found if found is not None and all(map(found_right(found), _samples())) else None


def _find() -> Layout | None:
    tensor = torch.zeros(_ODD_OFFSET + 1)
    storage = tensor.untyped_storage()
    moved = tensor.as_strided((1,), (1,), _ODD_OFFSET)
    detached, other = _words(tensor.detach()._cdata), _words(tensor.data._cdata)
    words = _words(tensor._cdata)
    size = torch.Tensor.__basicsize__ // 8
    impl = _only(range(size), lambda k: _words(id(tensor), size)[k] == tensor._cdata)
    place = _only(range(_TENSOR_WORDS), lambda k: words[k] == storage._cdata)
    offset = _only(range(_TENSOR_WORDS), lambda k: _words(moved._cdata)[k] == _ODD_OFFSET)
    # detach() shares the counter, .data has one of its own
    counter = _only(
        range(_TENSOR_WORDS), lambda k: words[k] == detached[k] != other[k] and words[k] % 8 == 0
    )
    if impl is None or place is None or offset is None or counter is None:
        return None
    data = _data_word()
    version = _version_offset(tensor, words[counter])
    if data is None or version is None:
        return None
    return Layout(8 * impl, 8 * place, 8 * offset, 8 * counter, 8 * data, version)


def _data_word() -> int | None:
    """The first word with the data's address, also where another object owns the memory."""
    found = []
    for tensor in (torch.zeros(3), torch.frombuffer(bytearray(8), dtype=torch.uint8)):
        storage = tensor.untyped_storage()
        words = _words(storage._cdata, _STORAGE_WORDS)
        found.append([k for k, word in enumerate(words) if word == storage.data_ptr()])
    common = sorted(set(found[0]) & set(found[1]))
    return common[0] if common else None


def _version_offset(tensor: Tensor, counter: int) -> int | None:
    candidates = [8, 12, 16, 20]
    for _ in range(3):
        tensor.zero_()
        candidates = [k for k in candidates if _word(counter + k, 4) == tensor._version]
    return candidates[0] if len(candidates) == 1 else None


def _samples() -> Iterable[Tensor]:
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    yield parameter
    yield torch.zeros(2, 3, 4).add_(1).transpose(0, 2)[1:]
    parameter.detach().mul_(2).add_(1)
    yield parameter
    parameter.data = torch.zeros(10, 4)[4:]
    yield parameter
    yield torch.zeros((), dtype=torch.int64)


def found_right(found: Layout) -> Callable[[Tensor], bool]:
    """A check that these offsets tell the truth about a tensor."""

    def check(tensor: Tensor) -> bool:
        impl = _word(id(tensor) + found.impl)
        storage = _word(impl + found.storage)
        return (
            impl == tensor._cdata
            and storage == tensor.untyped_storage()._cdata
            and _word(storage + found.data) == tensor.untyped_storage().data_ptr()
            and _word(impl + found.offset) == tensor.storage_offset()
            and _word(_word(impl + found.counter) + found.version, 4) == tensor._version
        )

    return check


def _only(places: Iterable[int], fits: Callable[[int], bool]) -> int | None:
    found = [k for k in places if fits(k)]
    return found[0] if len(found) == 1 else None


def _words(address: int, count: int = _TENSOR_WORDS) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _word(address: int, size: int = 8) -> int:
    kind = ctypes.c_uint64 if size == 8 else ctypes.c_uint32
    return int(kind.from_address(address).value)


# ---------------------------------------------------------------------------- allocate
# Adapter to torch's cheapest allocation. Tested with torch 2.13; the name exists in 2.11 to 2.15.
#
#   torch._C._dynamo.guards._empty_strided_cpu   torch.empty_strided without the parsing of options
#
# It takes a third of the time, and a graph with many results makes many tensors.

Sizes = tuple[int, ...]


def _plain(size: Sizes, stride: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


# (size, stride, dtype) -> a tensor on the CPU; torch's public function where the name has gone
empty_strided: Callable[[Sizes, Sizes, torch.dtype], Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cpu", _plain
)
