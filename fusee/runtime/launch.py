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
               after it are not run; `run` returns the code, LaunchFrame.value the other word

total and units are numbers that are computed from the sizes. Up to `units` threads share the
iterations, each of them a multiple of `align` unless it has the last part; with one unit the launch
runs on the calling thread. A kernel copes with begin = end = 0 if its launch may have total 0.

Everything that depends on sizes alone is in a LaunchFrame. A frame belongs to one call at a time:

    frame = frames[sizes]
    if run(frame.state, 0, 3, threads, 0, x.data_ptr(), 1, out.data_ptr()):
        raise ...
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from fusee.runtime import jit
from fusee.runtime.jit import Early, Function, answer, builtin, number, raised
from fusee.runtime.llvm_text import STEP_WORDS, Step, Writer, evaluation, step_words

# ---------------------------------------------------------------------------- runner
# The builtin that runs launches: machine code that Python calls like any C function.
#
#     run(state, first, last, threads, slot, pointer, slot, pointer, ...) -> int
#
# stores the pointers in the table of the frame at address `state`, then runs its launches [first,
# last) in order. Returns 0, or the code of the first kernel that reported one; launches after it
# are not run. Wrong arguments raise before anything is run. A launch with two or more units of work
# runs on a team of `threads`; when the launches have several units in all, Python's lock is
# released meanwhile. The memory that it walks through is laid out by LaunchFrame in launch.py:
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


def _team() -> str:
    """One thread of a team: its share of the iterations is a whole number of `align`.

    All threads take part although some may find nothing to do: libgomp ends threads when a team is
    smaller than the one before.
    """
    top = Writer().top
    op = top.op
    thread, team = (
        op(f"sext i32 {top.call('i32', f'omp_get_{name}')} to i64")
        for name in ("thread_num", "num_threads")
    )
    total, units, align = (top.load("i64", "%launch", word) for word in (5, 6, 7))

    def quotient(x: str, y: str) -> str:
        """x / y, rounded up."""
        more = op(f"add i64 {x}, {op(f'sub i64 {y}, 1')}")
        return op(f"udiv i64 {more}, {y}")

    share = quotient(total, top.extreme("smin", team, units))
    share = op(f"mul i64 {quotient(share, align)}, {align}")
    begin = op(f"mul i64 {share}, {thread}")
    end = top.extreme("smin", op(f"add i64 {begin}, {share}"), total)
    function, pointers, params = (top.load("ptr", "%launch", word) for word in (0, 3, 4))
    with top.unless(op(f"icmp sge i64 {begin}, {end}")):
        given = f"ptr {pointers}, ptr {params}, i64 {begin}, i64 {end}, i64 {thread}"
        top.do(f"call void {function}({given})")
    return top.writer.module("define internal void @team(ptr %launch) nounwind", "void")


def gather(writer: Writer, one: str, table: str, status: str) -> str:
    """Where a launch's pointers lie one after the other, that of the status last."""
    level = writer.top
    slots, pointers, count = (
        level.load("ptr", one, 1),
        level.load("ptr", one, 3),
        level.load("i64", one, 2),
    )
    with writer.each("0", count) as k:
        inner = writer.top
        found = inner.load("ptr", table, inner.load("i64", slots, k))
        inner.store("ptr", found, pointers, k)
    level.store("ptr", status, pointers, count)
    return pointers


# Writes what runs launches, before the first; gives what writes one, in a level of its own, from
# the launch's address and those of the frame's state and table; and what comes after the last.
Launched = tuple[Callable[[str, str, str], None], Callable[[], None]]
Launching = Callable[[Writer, str], Launched]


def _on_threads(has_team: bool, writer: Writer, threads: str) -> Launched:
    """Launches run here, or on a team of threads if there is work for several."""
    size = writer.top.op(f"trunc i64 {threads} to i32") if has_team else ""

    def write(one: str, state: str, table: str) -> None:
        level = writer.top
        function, params = level.load("ptr", one), level.load("ptr", one, 4)
        total, units = level.load("i64", one, 5), level.load("i64", one, 6)
        pointers, parallel = gather(writer, one, table, state), None
        if size:
            several = level.op(f"icmp sgt i64 {units}, 1"), level.op(f"icmp sgt i32 {size}, 1")
            parallel = level.either("i1", "and", *several)
        with level.unless(parallel):
            given = f"ptr {pointers}, ptr {params}, i64 0, i64 {total}, i64 0"
            level.do(f"call void {function}({given})")
        if parallel is not None:
            with level.unless(level.op(f"xor i1 {parallel}, true")):
                team = (("ptr", "@team"), ("ptr", one), ("i32", size), ("i32", "0"))
                level.call("void", "GOMP_parallel", *team)

    return write, lambda: None


def run_unit(launching: Launching) -> str:
    """`run` as a unit. See above, and THE KERNEL ABI."""
    writer = Writer()
    top = writer.top
    op, load = top.op, top.load

    def wrong(condition: str, error: str, words: str) -> None:
        writer.top.leave(condition, lambda: raised(writer.top, error, words))

    takes = "run takes (state, first, last, threads) and pairs (slot, pointer)"
    odd = op(f"icmp ne i64 {op('and i64 %count, 1')}, 0")
    few = op("icmp slt i64 %count, 4")
    wrong(op(f"or i1 {odd}, {few}"), "TypeError", takes)
    word, first, last, threads = (number(top, k) for k in range(4))
    wrong(op(f"icmp eq i64 {word}, 0"), "TypeError", takes)
    state = op(f"inttoptr i64 {word} to ptr")
    table, launches = load("ptr", state, 2), load("ptr", state, 3)
    count, slots = load("i64", state, 4), load("i64", state, 5)
    sides = ((first, "0"), (last, first), (count, last))
    outside = [op(f"icmp slt i64 {x}, {least}") for x, least in sides]
    wrong(top.either("i1", "or", *outside), "IndexError", "run: the frame has no such launches")

    with writer.each("4", "%count", 2) as k:
        level = writer.top
        slot = number(level, k)
        wrong(
            level.op(f"icmp uge i64 {slot}, {slots}"),
            "IndexError",
            "run: the frame has no such slot",
        )
        level.store("i64", number(level, level.op(f"add i64 {k}, 1")), table, slot)
    with writer.loop(first, last, 1, [("i64", "0")]) as (k, (so_far,), work):
        level = writer.top
        units = level.load("i64", launches, level.op(f"add i64 {level.op(f'mul i64 {k}, 8')}, 6"))
        work.append(level.op(f"add i64 {so_far}, {units}"))
    top.store("i64", "0", state)
    light = op(f"icmp slt i64 {work[0]}, {_UNITS_TO_RELEASE}")
    held = top.chosen(light, "null", lambda: top.call("ptr", "PyEval_SaveThread"), "ptr")
    write, end = launching(writer, threads)
    with writer.each(first, last) as k:
        level = writer.top
        failed = level.op(f"icmp ne i64 {level.load('i64', state)}, 0")
        one = level.at(launches, k, "[8 x i64]")
        with level.unless(failed):
            write(one, state, table)
    end()
    with top.unless(op(f"icmp eq ptr {held}, null")):
        top.call("void", "PyEval_RestoreThread", ("ptr", held))
    return answer(top, load("i64", state))


def openmp() -> dict[str, int]:
    """Addresses in the OpenMP runtime that ATen runs on, so that no two sets of threads fight for
    processors; none if torch was built without one, and kernels use one thread.

    libtorch_cpu is linked against one runtime, which its own name look-up finds even when the
    process holds another. Both libgomp and LLVM's libomp offer these functions.
    """
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
    if not all(hasattr(jit.libtorch(), name) for name in names):
        return {}
    casts = {name: ctypes.cast(jit.libtorch()[name], ctypes.c_void_p) for name in names}
    return {name: address.value or 0 for name, address in casts.items()}


@Early
def runner() -> Callable[..., int]:
    """The process's `run`, as described above."""
    imports = openmp()
    text = run_unit(functools.partial(_on_threads, bool(imports)))
    return builtin("run", (_team() if imports else "") + text, imports)


# ---------------------------------------------------------------------------- program


_ALIGN_BYTES = 64
_MORE_BYTES = 1 << 20  # an arena that grows has as much to spare


class StepResult(NamedTuple):
    """A number of a frame that differs with the sizes: which of its steps gives it."""

    number: int


Number = int | StepResult


class LaunchSpec(NamedTuple):
    """One call of a kernel.

    function  index into the program's functions
    slots     indices in the frame's pointer table, in the order of the kernel's pointers
    total     parallel iterations; units: how many threads that is work for; align: a part's
              multiple
    """

    function: int
    slots: tuple[int, ...]
    params: tuple[Number, ...]
    total: Number
    units: Number
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
    views    those that are the same for all sizes
    inputs   how many sizes there are; steps: what is computed of them
    sized    from the sizes to the views that differ with them
    """

    launches: tuple[LaunchSpec, ...]
    slots: int
    arena_bytes: Number = 0
    scratch: tuple[tuple[int, Number], ...] = ()
    views: tuple[ViewSpec, ...] = ()
    inputs: int = 0
    steps: tuple[Step, ...] = ()
    sized: Callable[..., tuple[ViewSpec, ...]] | None = None


class LaunchFrame:
    """The memory of one call in progress.

    state    the address that `run` takes first
    views    tensors in the arena, in the order of the spec's views; sized: those that are made anew
    sizes    what it is for
    version  free for the caller: of what `bind` was called with last; 0 at first
    """

    __slots__ = ("_functions", "_words", "arena", "sized", "sizes", "state", "version", "views")

    arena: Tensor
    sizes: tuple[int, ...]
    views: tuple[Tensor, ...]
    sized: tuple[Tensor, ...]

    def __init__(self, functions: Sequence[Function], words: array[int]) -> None:
        self._functions, self._words = functions, words  # whose code the launches point to
        self.state: int = words.buffer_info()[0]
        self.version = 0

    @property
    def value(self) -> int:
        """What the kernel that reported a code wrote beside it."""
        return self._words[1]

    @property
    def launch(self) -> int:
        """The number of the launch whose address was written there."""
        return (self._words[1] - self._words[3]) // (8 * LAUNCH_WORDS)

    def replace(self, launch: int, function: Function, align: int) -> None:
        """From now on a launch runs another function, with another `align`."""
        self._functions = (*self._functions, function)
        at = (self._words[3] - self.state) // 8 + LAUNCH_WORDS * launch
        self._words[at], self._words[at + 7] = function.address, align

    def bind(self, version: int, pointers: Iterable[tuple[int, int]]) -> None:
        """Set (slot, pointer) pairs that stay for the calls to come."""
        for slot, pointer in pointers:
            self._words[STATE_WORDS + slot] = pointer
        self.version = version


class Frames(dict[tuple[int, ...], LaunchFrame]):
    """Frames by sizes, for one call at a time: they share an arena.

    One for sizes that are new is made where it is asked for; if there are many it takes the place
    of the oldest, in whose words only what differs with the sizes is written.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.arena: Tensor | None = None
        self.views: tuple[Tensor, ...] = ()

    def __missing__(self, sizes: tuple[int, ...]) -> LaunchFrame:
        program = self.program
        if len(self) < program.most_sizes:
            frame = LaunchFrame(program.functions, program.words[:])
        else:
            frame = self.pop(next(iter(self)))
        arena = self.arena
        address, held = (0, 0) if arena is None else (arena.data_ptr(), arena.numel())
        needed = program.fit(frame.state, address, *sizes)
        if arena is None or needed > held or held > max(program.most_bytes, 2 * needed):
            self.clear()  # what they point to goes
            # the next one may be larger
            more = 0 if arena is None else max(needed // 16, min(needed, _MORE_BYTES))
            size = -(-(needed + more) // _ALIGN_BYTES) * _ALIGN_BYTES  # elements of any dtype
            self.arena = arena = program.arena(size)
            program.fit(frame.state, arena.data_ptr(), *sizes)
            self.views = _views(arena, program.spec.views)
        frame.arena, frame.views, frame.sizes = arena, self.views, sizes
        sized = program.spec.sized
        frame.sized = () if sized is None else _views(arena, sized(*sizes))
        self[sizes] = frame
        return frame


class Program:
    """What frames are built from.

    functions   what LaunchSpec.function indexes
    most_sizes  how many different sizes to keep frames for
    most_bytes  an arena above this is given back when a call needs less than half of it
    arena       memory of so many bytes
    """

    def __init__(
        self,
        functions: Sequence[Function],
        spec: FrameSpec,
        *,
        most_sizes: int = 32,
        most_bytes: int = 2**31,
        arena: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.functions = tuple(functions)
        self.spec = spec
        self.most_sizes, self.most_bytes = most_sizes, most_bytes
        self.arena = arena or _arena
        self.words, self._layout = _lay_out(spec, [one.address for one in functions])
        self.fit = functools.partial(fitter(), self._layout.buffer_info()[0])


def _arena(size: int) -> Tensor:
    # the caller may be in inference mode, where tensors are made that others may not write to
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.empty(size + _ALIGN_BYTES, dtype=torch.uint8)
        start = -whole.data_ptr() % _ALIGN_BYTES
        return whole[start : start + size]


def _views(arena: Tensor, specs: Sequence[ViewSpec]) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    flat: dict[torch.dtype, tuple[Tensor, int]] = {}
    if not specs:
        return ()
    with torch.inference_mode(False), torch.no_grad():
        for offset_bytes, dtype, size, stride in specs:
            if dtype not in flat:
                whole = arena.view(dtype)
                flat[dtype] = whole, int(whole.storage_offset())
            whole, start = flat[dtype]
            place = start + offset_bytes // dtype.itemsize
            found.append(torch.as_strided(whole, size, stride, place))
    return tuple(found)


def _lay_out(spec: FrameSpec, addresses: Sequence[int]) -> tuple[array[int], array[int]]:
    """A frame's words, as far as they are the same for all; and for `fit` what the others are.

    Of a frame: state, pointer table, launches, then what launches point to.
    """
    table = STATE_WORDS
    launches = table + spec.slots
    parts = launches + LAUNCH_WORDS * len(spec.launches)
    count = parts + sum(2 * len(one.slots) + 1 + len(one.params) for one in spec.launches)
    words = array("q", bytes(8 * count))
    steps = [*spec.steps]
    inside: list[int] = []  # pairs (word, words from the beginning)
    of_steps: list[int] = []  # pairs (word, number)
    of_arena: list[int] = []  # the same, from where the arena begins

    def number(value: Number) -> int:
        if isinstance(value, StepResult):
            return value.number
        steps.append(("number", 0, 0, value))
        return spec.inputs + len(steps) - 1

    def put(at: int, values: Sequence[Number]) -> None:
        for word, value in enumerate(values, at):
            if isinstance(value, StepResult):
                of_steps.extend((word, value.number))
            else:
                words[word] = value

    inside += (2, table, 3, launches)
    put(4, (len(spec.launches), spec.slots))
    for slot, offset in spec.scratch:
        of_arena += (table + slot, number(offset))
    for k, one in enumerate(spec.launches):
        slots, at = parts, launches + LAUNCH_WORDS * k
        pointers = slots + len(one.slots)
        params = pointers + len(one.slots) + 1
        parts = params + len(one.params)
        put(slots, one.slots)
        put(params, one.params)
        put(at, (addresses[one.function], 0, len(one.slots), 0, 0, one.total, one.units))
        put(at + 7, (max(one.align, 1),))
        inside += (at + 1, slots, at + 3, pointers, at + 4, params)
    needed = number(spec.arena_bytes)
    pairs = [inside, of_steps, of_arena]
    head = (spec.inputs, len(steps), needed, *(len(some) // 2 for some in pairs))
    return words, array("q", [*head, *step_words(steps), *itertools.chain(*pairs)])


_LAYOUT_WORDS = 6


@Early
def fitter() -> Callable[..., int]:
    """The builtin `fit(layout, state, arena, size, ...)`: writes a frame's words for sizes.

    layout   the address of the second that `_lay_out` gives
    arena    the address of the memory that the frame's offsets count from
    returns  the bytes that they take of it
    """
    writer = Writer()
    top = writer.top
    op, load = top.op, top.load
    sizes = "fit: other sizes asked"
    top.leave(op("icmp slt i64 %count, 3"), lambda: raised(top, "TypeError", sizes))
    layout, state = (op(f"inttoptr i64 {number(top, k)} to ptr") for k in (0, 1))
    base, arena = number(top, 1), number(top, 2)
    inputs, steps, needed, *counts = (load("i64", layout, k) for k in range(_LAYOUT_WORDS))
    other = op(f"icmp ne i64 {inputs}, {op('sub i64 %count, 3')}")
    top.leave(other, lambda: raised(top, "TypeError", sizes))
    total = op(f"add i64 {inputs}, {steps}")
    numbers = op(f"alloca i64, i64 {total}")
    with writer.each("0", inputs) as k:
        level = writer.top
        level.store("i64", number(level, level.op(f"add i64 {k}, 3")), numbers, k)
    at = top.at(layout, 8 * _LAYOUT_WORDS)
    given = f"ptr {at}, i64 {steps}, ptr {numbers}, ptr {top.at(numbers, inputs, 'i64')}"
    top.do(f"call void @evaluate({given})")
    at = top.at(at, steps, f"[{STEP_WORDS} x i64]")
    for kind, count in enumerate(counts):
        with writer.each("0", count) as k:
            level = writer.top
            pair = level.at(at, k, "[2 x i64]")
            word, value = level.load("i64", pair), level.load("i64", pair, 1)
            if kind:
                value = level.load("i64", numbers, value)
            else:
                value = level.op(f"add i64 {base}, {level.op(f'mul i64 {value}, 8')}")
            if kind == 2:
                value = level.op(f"add i64 {arena}, {value}")
            level.store("i64", value, state, word)
        at = top.at(at, count, "[2 x i64]")
    return builtin("fit", evaluation() + answer(top, load("i64", numbers, needed)))


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
    outside = temporarily_clear_interpreter_stack()  # a first call may come within torch.vmap
    with outside, torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        tensor = torch.zeros(_ODD_OFFSET + 1)
        storage = tensor.untyped_storage()
        moved = tensor.as_strided((1,), (1,), _ODD_OFFSET)
        detached, other = _words(tensor.detach()._cdata), _words(tensor.data._cdata)
        words = _words(tensor._cdata)
        size = Tensor.__basicsize__ // 8
        impl = _only(range(size), lambda k: _words(id(tensor), size)[k] == tensor._cdata)
        place = _only(range(_TENSOR_WORDS), lambda k: words[k] == storage._cdata)
        offset = _only(range(_TENSOR_WORDS), lambda k: _words(moved._cdata)[k] == _ODD_OFFSET)
        # detach() shares the counter, .data has one of its own
        counter = _only(
            range(_TENSOR_WORDS),
            lambda k: words[k] == detached[k] != other[k] and words[k] % 8 == 0,
        )
        if impl is None or place is None or offset is None or counter is None:
            return None
        # the first word with the data's address, also where another object owns the memory
        common = {*range(_STORAGE_WORDS)}
        for one in (torch.zeros(3), torch.frombuffer(bytearray(8), dtype=torch.uint8)):
            memory = one.untyped_storage()
            there = _words(memory._cdata, _STORAGE_WORDS)
            common &= {k for k in common if there[k] == memory.data_ptr()}
        data = min(common, default=None)
        candidates = [8, 12, 16, 20]
        for _ in range(3):
            tensor.zero_()
            candidates = [k for k in candidates if word(words[counter] + k, 4) == tensor._version]
        version = candidates[0] if len(candidates) == 1 else None
        if data is None or version is None:
            return None
        found = Layout(8 * impl, 8 * place, 8 * offset, 8 * counter, 8 * data, version)
        return found if all(found_right(found, x) for x in _samples()) else None


def _samples() -> Iterable[Tensor]:
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    yield parameter
    yield torch.zeros(2, 3, 4).add_(1).transpose(0, 2)[1:]
    parameter.detach().mul_(2).add_(1)
    yield parameter
    parameter.data = torch.zeros(10, 4)[4:]
    yield parameter
    yield torch.zeros((), dtype=torch.int64)


def found_right(found: Layout, tensor: Tensor) -> bool:
    """Whether these offsets tell the truth about a tensor."""
    impl = word(id(tensor) + found.impl)
    storage = word(impl + found.storage)
    return (
        impl == tensor._cdata
        and storage == tensor.untyped_storage()._cdata
        and word(storage + found.data) == tensor.untyped_storage().data_ptr()
        and word(impl + found.offset) == tensor.storage_offset()
        and word(word(impl + found.counter) + found.version, 4) == tensor._version
    )


def _only(places: Iterable[int], fits: Callable[[int], bool]) -> int | None:
    found = [k for k in places if fits(k)]
    return found[0] if len(found) == 1 else None


def _words(address: int, count: int = _TENSOR_WORDS) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def word(address: int, size: int = 8) -> int:
    kind = ctypes.c_uint64 if size == 8 else ctypes.c_uint32
    return int(kind.from_address(address).value)


# ---------------------------------------------------------------------------- allocate
# Adapter to torch's cheapest allocation. Tested with torch 2.13; the name exists in 2.11 to 2.15.
#
#   torch._C._dynamo.guards._empty_strided_cpu   torch.empty_strided without the parsing of options
#
# It takes a third of the time, and a graph with many results makes many tensors.

Sizes = tuple[int, ...]


# (size, stride, dtype) -> a tensor on the CPU; torch's public function where the name has gone
empty_strided: Callable[[Sizes, Sizes, torch.dtype], Tensor] = getattr(
    torch._C._dynamo.guards,
    "_empty_strided_cpu",
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
)
