"""Calls that repeat become CUDA graphs: one call of the driver for all launches of a graph.

A Replayer stands around a host function. What holds:

- The first call of some sizes runs directly, so that libraries are warm, and so does each call that
  cannot be replayed: while the user records, while another thread replays, on a graph that the
  driver refused to record (the report says why). A training graph's first call returns its memory.
- A recording reads inputs where they were when it was made. An input that has come from elsewhere
  is copied in from then on, a large one once _PLACES recordings were made; what it is copied to is
  the recording's, until nothing reads it any more. What the graph writes
  to, and what overlaps itself, is not: each place of it is a recording of its own.
- Results are new tensors at each call. They share memory as they do in a direct call, with inputs
  and with each other; what a recording writes is copied out.
- Gradients are handed out where the recording of a backward or a whole step wrote them. Whoever has
  one keeps it: what might write there is recorded anew, and gradients are copied out from then on.
- What a forward saves for its backward is lent: it stays where the recording wrote it, and is read
  there. As long as anybody has it, no forward is replayed.
- Recordings of one stream share an arena and a pool, since one runs after the other; both live as
  long as a recording points to them. A forward and its backward share the pool: what the one has
  given back when its recording ends, the other takes. What a forward lends is not given back, so
  that recordings made later leave it alone; one made earlier is not replayed while it is wanted.
- The recording of a backward takes over what its forward lends, where nobody else has it: memory of
  values that nothing reads any more is used again. It is replayed where that is so again; while
  what was taken is wanted, no other recording is.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain, repeat
from itertools import count as numbers_from
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusee.aten.torch_api import borrowed, storage_id
from fusee.codegen import HostArguments
from fusee.codegen.llvm import KernelCode
from fusee.codegen.simt import emit_kernel
from fusee.fake.layouts import extent, is_dense
from fusee.loops import Buffer, Extern, Kernel, Phase, Store, Values
from fusee.loops.memory import Plan, size_bytes
from fusee.loops.schedule import writes
from fusee.runtime.launch import Frames, FrameSpec, LaunchSpec, Program
from fusee.source import picker
from fusee.sym import Symbol, hint, substitute
from fusee.targets.cuda.device import Device
from fusee.targets.cuda.launch import KernelBuild, batched, runner

# Inputs above this are read where they are, in so many places: a recording of a large graph takes a
# thousand times as long as the copy.
_LARGE_BYTES, _PLACES = 8 << 20, 3
# What torch's segments that grow are multiples of.
_SEGMENT_BYTES = 20 << 20
# Recordings of one stream, of which the one unused for longest makes room; sizes whose last places
# are known.
_MOST, _MOST_SIZES = 8, 64
# Microseconds of the host: what a launch, a call of ATen, and a replay with its copies take
# (docs/benchmarks.md, GPUs). A graph whose launches cost less is launched.
_LAUNCH, _CALL, _REPLAY = 3.4, 8.0, 22.0

Key = tuple[Any, ...]
Result = Callable[[Sequence[Any], Sequence[Tensor]], Any]


class _CudaGraph(NamedTuple):
    """
    moved    inputs that are copied in, by `bring`; brought: those that come from the CPU
    fresh    make memory for what the graph leaves, and `take` copies it there; `results` are made
             of the inputs and that
    lent     what it has left for a backward to read; gradients: what it hands out where it wrote
             them; None: nothing
    taken    what its forward lent, if it took that over
    arena    is pointed to
    number   of recordings, those made earlier have lower ones
    """

    replay: Callable[[], None]
    moved: Sequence[int]
    bring: Callable[[Sequence[Tensor]], None]
    brought: Sequence[tuple[int, Tensor]]
    fresh: Sequence[Callable[[], Tensor]]
    take: Callable[[Sequence[Tensor]], None]
    lent: _Lent | None
    gradients: _Gradients | None
    taken: _Lent | None
    results: Result
    arena: Tensor
    number: int


class _Held:
    """Values that stay where the recording of a number wrote them, for others to read there."""

    def __init__(self, values: Sequence[Tensor], gpu: Device, number: int) -> None:
        self.values, self.number = values, number
        self._count = gpu.holders(values)
        self._own = self._count()

    def is_wanted(self) -> bool:
        return self._count() != self._own


class _Gradients(_Held):
    """Those of a recording. They keep their memory, also when the recording has gone."""

    def __init__(self, values: Sequence[Tensor], gpu: Device, number: int) -> None:
        super().__init__(values, gpu, number)
        self._places = [*map(Tensor.data_ptr, values)]

    def is_wanted(self) -> bool:
        """Also where somebody has resized one."""
        return super().is_wanted() or [*map(Tensor.data_ptr, self.values)] != self._places


class _Lent(_Held):
    """What a forward's recording leaves for its backward.

    values    do not keep their memory
    owners    keep it, until a backward's recording takes it over
    is_spent  whether the recording must be made anew: its memory was taken, and another backward is
              recorded
    """

    def __init__(self, owners: Sequence[Tensor], gpu: Device, number: int) -> None:
        super().__init__([*map(borrowed, owners)], gpu, number)
        self.owners, self.is_spent = dict(enumerate(owners)), False
        self._places = {storage_id(x): n for n, x in enumerate(self.values)}
        self._with_one = [n + 1 for n in self._own]

    def has_one_reader(self) -> bool:
        """Whether one has all of the values, and no other any of them."""
        return self._count() == self._with_one

    def places(self, inputs: Sequence[Any], among: Sequence[int]) -> Mapping[int, int]:
        """Which of a backward's inputs are which values; none unless it alone has all of them."""
        if not self.has_one_reader():
            return {}
        storages = {k: storage_id(inputs[k]) for k in among}
        found = {k: self._places[x] for k, x in storages.items() if x in self._places}
        return found if len(found) == len(self.values) else {}


class _RecordingPool:
    """Memory of recordings on one stream.

    users      the recordings of a forward, of its backwards
    lent       what the forward's recording that was replayed last has left
    gradients  what was handed out
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.users: list[Mapping[Key, _CudaGraph]] = []
        self.lent: _Lent | None = None
        self.gradients: list[_Gradients] = []

    def wanted(self) -> _Lent | None:
        if self.lent is not None and not self.lent.is_wanted():
            self.lent = None
        return self.lent

    def outstanding(self) -> int:
        """The highest number of recordings whose gradients somebody has; -1: nobody has any."""
        self.gradients = [x for x in self.gradients if x.is_wanted()]
        return max((x.number for x in self.gradients), default=-1)


class Together:
    """What a forward's calls and those of its backwards share: one runs after the other, and the
    memory of recordings, by stream.

    spent      how many forwards' recordings were made anew since their memory was taken over
    copies_all whether gradients are copied out: somebody had some of them at a later call
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pools: dict[int, _RecordingPool] = {}
        self.numbers, self.spent, self.copies_all = numbers_from(), 0, False


class _OneStream:
    """Recordings of a stream.

    moved   inputs that come from the CPU, or have come from several places; placed: the others
    before  of sizes: how many direct calls there were, and where inputs lay in the last
    made    of sizes: how many recordings were made since an input is copied in
    frames  what recorded launches point to
    """

    def __init__(self, pool: _RecordingPool, tensors: Sequence[int], moved: Sequence[int]) -> None:
        self.pool, self.placed = pool, tensors
        self.moved: tuple[int, ...] = ()
        self.made = Counter[Key]()
        self.move(moved)
        self.recordings: dict[Key, _CudaGraph] = {}
        self.before: dict[Key, tuple[int, list[int]]] = {}
        self.frames: Any = None
        pool.users.append(self.recordings)

    def move(self, more: Iterable[int]) -> None:
        self.moved = tuple(sorted({*self.moved, *more}))
        self.made.clear()
        self.placed = [k for k in self.placed if k not in self.moved]
        self.pick = picker(self.placed)


class Replayer:
    """A host function, its calls recorded where that pays.

    recorded the same function, with launches that the graph is to be made of
    about    what is known of its schedule
    waiting  frames that no call uses, by stream
    refused  why nothing is recorded, if so
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Any]],
        recorded: Callable[..., Sequence[Any]],
        about: Recording,
        arguments: HostArguments,
        gpu: Device,
        stream: Callable[[], int],
        waiting: Mapping[int, list[Any]],
        together: Together,
    ) -> None:
        self.run, self.gpu, self.stream, self.waiting = run, gpu, stream, waiting
        self.recorded, self.together = recorded, together
        self.written, self.grows, self.drops = about.written, about.grows, about.drops
        self.refuse, self.spread = arguments.refuse, arguments.spread
        self.saved, self.saves = arguments.saved, arguments.saves
        self.gradients = arguments.gradients
        self.sizes = [*arguments.sizes.values()]
        self.brought = tuple(arguments.brought)
        self.tensors = [k for k, b in enumerate(arguments.buffers) if b is not None]
        self.seen_first = 2 if self.sizes else 1  # direct calls before one is recorded
        self.streams: dict[int, _OneStream] = {}
        self.refused: str | None = None
        self.replayed = 0
        # a step's first call has the most memory, and other uses for none of it
        self.is_warm = not self.gradients and self.saves is None

    def described(self) -> str:
        """For the report."""
        count = sum(len(one.recordings) for one in self.streams.values())
        said = f"{count} CUDA graphs, {self.replayed} calls replayed"
        return said if self.refused is None else f"{said}; none any more: {self.refused}"

    def __call__(self, *given: Any) -> Sequence[Any]:
        inputs = given if self.spread else given[0]
        one, lock = self.streams.get(self.stream()), self.together.lock
        if self.refused is not None or self.gpu.capturing() or not lock.acquire(False):
            return self.run(*given)
        try:
            if one is None:
                pools, stream = self.together.pools, self.stream()
                if stream not in pools:
                    pools[stream] = _RecordingPool(self.gpu.pool())
                one = self.streams[stream] = _OneStream(pools[stream], self.tensors, self.brought)
            lent = one.pool.wanted()
            if lent is not None and self.saved is None:
                return self.run(*given)
            key = self._key(one, inputs)
            found = one.recordings.pop(key, None)
            if found is None or self._is_old(found, lent, one.pool.outstanding()):
                found = self._made_new(one, inputs, lent)
                key = self._key(one, inputs)  # another input may be copied in by now
            elif not self._is_safe(found, lent):
                one.recordings[key] = found
                return self.run(*given)
            if found is None:
                return self._launched(given)
            one.recordings[key] = found  # the one used last is the last
            if found.lent is not None:
                one.pool.lent = found.lent
            if found.gradients is not None:
                one.pool.gradients.append(found.gradients)
            return self._replayed(found, inputs)
        finally:
            lock.release()

    def _launched(self, given: tuple[Any, ...]) -> Sequence[Any]:
        if self.is_warm:
            return self.run(*given)
        self.is_warm = True
        self.gpu.give_back()  # else what stays lies amid that: an optimizer's state, too
        with self.gpu.growing():
            results = self.run(*given)
        if self.gradients:
            self.gpu.give_back()
        return results

    def _replayed(self, found: _CudaGraph, inputs: Sequence[Any]) -> Sequence[Any]:
        if self.refuse is not None and torch.is_grad_enabled():
            self.refuse(inputs)
        if found.moved:
            found.bring([inputs[k] for k in found.moved])
        if found.brought:
            with torch.no_grad():
                for k, mine in found.brought:
                    mine.copy_(inputs[k])
        found.replay()
        self.replayed += 1
        fresh = [make() for make in found.fresh]
        if fresh:
            found.take(fresh)
        results: Sequence[Any] = found.results(inputs, fresh)
        if self.saved is not None:
            inputs.clear()  # type: ignore[attr-defined]  # a backward's is a list
        return results

    def _is_old(self, found: _CudaGraph, lent: _Lent | None, outstanding: int) -> bool:
        """Whether a recording may write to what others read, or its own values have no memory."""
        if found.number <= outstanding:
            self.together.copies_all = True
            return True
        if lent is not None and found.number < lent.number:
            return True
        return found.lent is not None and found.lent.is_spent

    def _is_safe(self, found: _CudaGraph, lent: _Lent | None) -> bool:
        """Whether what is lent, if it was taken over, is read by nobody but this call."""
        if lent is None or found.taken is not lent:
            return found.taken is None and (lent is None or bool(lent.owners))
        return lent.has_one_reader()

    # ------------------------------------------------------------------------------ keys

    def _sizes_of(self, inputs: Sequence[Any]) -> Key:
        return tuple(
            [inputs[k] if axis is None else inputs[k].size(axis) for k, axis in self.sizes]
        )

    def _key(self, one: _OneStream, inputs: Sequence[Any]) -> Key:
        places = map(Tensor.data_ptr, one.pick(inputs))
        return (self._sizes_of(inputs), self._copies_as_eager(one, inputs), *places)

    def _copied(self, one: _OneStream) -> list[int]:
        return [k for k in one.moved if k not in self.brought]

    def _copies_as_eager(self, one: _OneStream, inputs: Sequence[Any]) -> bool:
        """Whether the copies of inputs, which are aligned, give dropout the same numbers."""
        return not self.drops or all(_is_aligned(inputs[k]) for k in self._copied(one))

    def _made_new(
        self, one: _OneStream, inputs: Sequence[Any], lent: _Lent | None
    ) -> _CudaGraph | None:
        """A new recording for this call; None if it is to run directly."""
        sizes = self._sizes_of(inputs)
        places = [inputs[k].data_ptr() for k in self.tensors]
        count, last = one.before.pop(sizes, (0, places))
        one.before[sizes] = count + 1, places
        if len(one.before) > _MOST_SIZES:
            del one.before[next(iter(one.before))]
        elsewhere = {k for k, a, b in zip(self.tensors, last, places, strict=True) if a != b}
        elsewhere.difference_update(one.moved)
        values = {} if lent is None else lent.places(inputs, self.saved or ())
        elsewhere.difference_update(values)  # which stay where they are
        is_often = bool(values) or one.made[sizes] >= _PLACES
        movable = {k for k in elsewhere if self._is_movable(k, inputs[k], is_often)}
        if movable:
            self._drop(one, len(one.recordings))
            one.move(movable)
        if count < self.seen_first or elsewhere - movable:
            return None
        if not self._copies_as_eager(one, inputs):
            return None
        if lent is not None and not lent.owners:
            if values and not lent.is_spent:
                lent.is_spent = True
                self.together.spent += 1
            return None
        one.made[sizes] += 1
        return self._record(one, inputs, lent, values)

    def _is_movable(self, k: int, x: Tensor, is_often: bool) -> bool:
        """Not what a forward has saved: when that is replayed, too, it stays where it is."""
        if x.device != self.gpu.device or k in self.written or k in (self.saved or ()):
            return False
        is_read_as_is = is_dense(x) and not (x.is_conj() or x.is_neg())
        is_read_as_is &= not self.drops or _is_aligned(x)
        return is_read_as_is and (is_often or x.nbytes <= _LARGE_BYTES)

    def _drop(self, one: _OneStream, count: int) -> None:
        if count <= 0:
            return
        self.gpu.wait()  # a graph may be on its way
        for key in [*one.recordings][:count]:
            del one.recordings[key]
        if not any(one.pool.users):  # a pool ends with the last one that uses it
            one.pool.handle = self.gpu.pool()

    # ------------------------------------------------------------------------------ recording

    def _record(
        self, one: _OneStream, inputs: Sequence[Any], lent: _Lent | None, values: Mapping[int, int]
    ) -> _CudaGraph | None:
        """values   of inputs: which of what is lent, if all of that may be taken over"""
        if one.frames is None:
            with suppress(IndexError):  # a thread that runs directly has it
                one.frames = self.waiting[self.stream()].pop()
            if one.frames is None:
                return None
        if self.sizes:
            one.frames[self._sizes_of(inputs)]  # its memory is no recording's
        self._drop(one, len(one.recordings) - _MOST + 1)
        if lent is None:  # else the program had what is free, and will between the same two calls
            self.gpu.give_back()
        given, own = list(inputs), dict[int, Callable[[], Tensor]]()
        with torch.inference_mode(False), torch.no_grad():  # others write to them, in any mode
            for k in self.brought:
                given[k] = self.gpu.like(inputs[k])()
        moved = self._copied(one)
        own.update({k: self.gpu.like(inputs[k]) for k in moved})
        if lent is not None and values and self.together.spent < _PLACES:
            own.update({k: partial(lent.owners.pop, n) for k, n in values.items()})
        else:
            lent = None

        def run(mine: list[Any]) -> Sequence[Any]:
            """On the stream that records: its frame is that of all recordings."""
            self.waiting[self.stream()].append(one.frames)
            return self.recorded(*mine) if self.spread else self.recorded(mine)

        try:
            with self.gpu.growing() if self.grows else nullcontext():
                found = self.gpu.record(run, given, own, one.pool.handle)
            # where these lay, results may lie by now
            mine = [None if k in found.freed else x for k, x in enumerate(found.inputs)]
            held: Sequence[Tensor] = [*self._held(mine, found.results)]
            left: list[Tensor] = []
            made = [_result_of(x, mine, held, found.results, left) for x in found.results]
        except RuntimeError as error:
            self.refused = str(error).partition("\n")[0]
            if lent is not None:
                lent.is_spent = True
            return None
        bring = Copies(self.gpu, [found.inputs[k] for k in moved], True, self.stream)
        brought = [(k, given[k]) for k in self.brought]
        left = [*map(borrowed, left)]  # what is copied out at once is the pool's again
        take = Copies(self.gpu, left, False, self.stream)
        fresh = [*map(self.gpu.like, left)]
        number = next(self.together.numbers)
        lends = _Lent(held, self.gpu, number) if held and not self.gradients else None
        gradients = _Gradients(held, self.gpu, number) if held and self.gradients else None
        held = held if lends is None else lends.values
        gather = _gathered(made, held, len(mine) + len(held) + len(left))
        about = lends, gradients, lent, gather, one.frames.arena
        return _CudaGraph(found.replay, moved, bring, brought, fresh, take, *about, number)

    def _held(self, mine: Sequence[Any], results: Sequence[Any]) -> Iterator[Tensor]:
        """Results that stay where they are: what is saved for a backward and nobody else gets, and
        gradients that are alone in their memory."""
        if self.saves is not None:
            others = [x for x in (*mine, *results[: self.saves]) if isinstance(x, Tensor)]
            for x in results[self.saves :]:
                if isinstance(x, Tensor) and x.numel() and not any(_shared(x, y) for y in others):
                    yield x
        if self.gradients and not self.together.copies_all:
            tensors = [x for x in (*mine, *results) if isinstance(x, Tensor) and x.numel()]
            sharing = Counter(map(_place, tensors))
            handed = (results[k] for k in self.gradients)
            yield from (x for x in handed if isinstance(x, Tensor) and sharing[_place(x)] == 1)


def _is_aligned(x: Tensor) -> bool:
    """Whether ATen's dropout draws numbers for several elements at a time."""
    return x.data_ptr() % 16 == 0


def _gathered(made: Sequence[int | Result], lent: Sequence[Tensor], count: int) -> Result:
    """What makes all results, in loops of C: a backward has hundreds.

    made   per result its place among inputs, what is lent and what is fresh, `count` in all; or
           what makes it
    """
    others, last = [x for x in made if callable(x)], numbers_from(count)
    pick = picker([next(last) if callable(x) else x for x in made])

    def gather(inputs: Sequence[Any], fresh: Sequence[Tensor]) -> Sequence[Any]:
        more = [make(inputs, fresh) for make in others]
        results: Sequence[Any] = pick((*inputs, *map(Tensor.detach, lent), *fresh, *more))
        return results

    return gather


def _result_of(
    x: Any, mine: Sequence[Any], lent: Sequence[Tensor], results: Sequence[Any], left: list[Tensor]
) -> int | Result:
    """Where a later call has the result `x` among its inputs, what is lent and what is fresh; or
    how it makes it. What is to be copied for it joins `left`.
    """
    if not isinstance(x, Tensor):
        return lambda inputs, fresh: x
    size, stride, offset = x.size(), x.stride(), x.storage_offset()
    for k, y in enumerate((*mine, *lent)):
        if x is y:
            return k
    if x.is_conj() or x.is_neg():
        raise RuntimeError("a result is conjugated or negated when it is read")
    for k, y in enumerate(mine):
        if isinstance(y, Tensor) and _shared(x, y):
            more = offset - y.storage_offset()
            return lambda inputs, fresh: inputs[k].as_strided(
                size, stride, inputs[k].storage_offset() + more
            )
    if not x.numel():
        return lambda inputs, fresh: x.new_empty_strided(size, stride)
    partners = [y for y in results if isinstance(y, Tensor) and _shared(x, y)]
    if len(partners) == 1 and is_dense(x):
        left.append(x)
        return len(mine) + len(lent) + len(left) - 1
    number = next((n for n, y in enumerate(left) if _shared(x, y)), len(left))
    if number == len(left):
        first = partners[0]
        if any(x.dtype != first.dtype for x in partners):
            raise RuntimeError("results of different dtypes share memory")
        starts = [x.storage_offset() for x in partners]
        ends = [x.storage_offset() + extent(x.shape, x.stride()) for x in partners]
        left.append(first.as_strided((max(ends) - min(starts),), (1,), min(starts)))
    start = offset - left[number].storage_offset()
    return lambda inputs, fresh: fresh[number].as_strided(size, stride, start)


def _place(x: Tensor) -> int:
    """Of what is borrowed, too, where that lies which it was borrowed of."""
    return x.untyped_storage().data_ptr()


def _shared(x: Tensor, y: Tensor) -> bool:
    return x.numel() > 0 and _place(x) == _place(y)


class Recording(NamedTuple):
    """What a Replayer needs to know of a schedule.

    never    why it is not recorded, if so
    rows     launches that may run beside each other
    written  the inputs that it writes to
    grows    its tensors may be more than a segment of torch's that grows is at least
    drops    ATen's dropout is called, which draws other numbers for tensors that are not aligned
    """

    never: str | None
    rows: Sequence[range]
    written: frozenset[int]
    grows: bool
    drops: bool


def may_grow(plan: Plan) -> bool:
    """Whether tensors of a graph may fill a segment: of little memory most would be left over."""
    made = {buffer for item in plan.schedule.items for buffer in writes(item)}
    sizes = (hint(size_bytes(b)) for b in made if b.role in ("extern", "large", "result"))
    return sum(sizes) > _SEGMENT_BYTES


def written_inputs(plan: Plan, arguments: HostArguments) -> frozenset[int]:
    written = {b for item in plan.schedule.items for b in writes(item)}
    return frozenset(k for k, b in enumerate(arguments.buffers) if b in written)


# cuSOLVER waits for the GPU here, and fails once more at the call that runs instead.
_FAILS_LATER = frozenset({"aten._linalg_eigh.default"})


def may_drop(plan: Plan) -> bool:
    return "aten.native_dropout.default" in _names(plan)


def _names(plan: Plan) -> set[str]:
    return {item.name for item in plan.schedule.items if isinstance(item, Extern)}


def why_launched(plan: Plan) -> str | None:
    """Why a graph is not recorded: it can't be, or launching costs the host less than a replay."""
    items = plan.schedule.items
    if not _FAILS_LATER.isdisjoint(_names(plan)):
        return "a recording that it ends would end its next call, too"
    apart = [item.name for item in items if isinstance(item, Extern) and item.apart]
    if apart:
        return f"{apart[0]} runs on the CPU, and would be done once"
    kernels = sum(isinstance(item, Kernel) for item in items)
    if _LAUNCH * kernels + _CALL * (len(items) - kernels) <= _REPLAY:
        return "its launches cost less than a replay"
    return None


# ---------------------------------------------------------------------------- copies
# Copies of many tensors in few launches: what comes into a recording, and what leaves it.

# One launch makes at most so many; fewer are filled up to a power of two with copies of nothing, so
# that there are few kernels.
_MOST_COPIED = 64
# The types of what is copied, by its bytes: the first that these are a multiple of.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


class Copies:
    """Into or out of tensors that stay where they are.

    stay     dense ones; into: whether they are written to
    stream   the present one
    """

    def __init__(
        self, gpu: Device, stay: Sequence[Tensor], into: bool, stream: Callable[[], int]
    ) -> None:
        self.stay, self.into, self.stream, self.run = stay, into, stream, runner(gpu)()
        build = KernelBuild(gpu, use_disk=True, check=False)
        launches: list[LaunchSpec] = []
        for dtype in _WORDS:
            own = [k for k, x in enumerate(stay) if _words(x)[0] is dtype]
            for first in range(0, len(own), _MOST_COPIED):
                launches.append(
                    self._launch(build, len(launches), dtype, own[first:][:_MOST_COPIED])
                )
        self.count = len(launches)
        spec = FrameSpec(tuple(launches), 2 * len(stay) + 2)
        self.frame = Frames(Program(build.finish(), spec))[()]
        self.frame.bind(1, ((2 * k, x.data_ptr()) for k, x in enumerate(stay)))

    def _launch(
        self, build: KernelBuild, function: int, dtype: torch.dtype, numbers: Sequence[int]
    ) -> LaunchSpec:
        code, source, target = _kernel(dtype)
        here, there = (target, source) if self.into else (source, target)
        sizes = [_words(self.stay[k])[1] for k in numbers]
        sizes += repeat(0, (1 << (len(numbers) - 1).bit_length()) - len(numbers))
        codes = []
        for size in sizes:
            params = tuple(substitute(n, {_COUNT: size}) for n in code.params)
            total = substitute(code.total, {_COUNT: size})
            codes.append(code._replace(params=params, total=total))
        joined = batched(codes)
        build.add(joined.module)
        slots = []
        for k in chain(numbers, repeat(len(self.stay), len(sizes) - len(numbers))):
            place = {here: 2 * k, there: 2 * k + 1}
            slots += [place[buffer] for buffer in code.buffers]
        # all sizes are known by now
        total, threads, *words = map(hint, (joined.total, joined.units, *joined.params))
        return LaunchSpec(function, tuple(slots), tuple(words), total, threads, joined.align)

    def __call__(self, others: Sequence[Tensor]) -> None:
        """Values of `others` come in, or go there: as many, of the same layouts."""
        odd = range(1, 2 * len(others), 2)
        pointers = chain.from_iterable(zip(odd, map(Tensor.data_ptr, others), strict=True))
        if self.run(self.frame.state, 0, self.count, self.stream(), *pointers):
            # some of them begin where accesses of 16 bytes must not
            given, taken = (others, self.stay) if self.into else (self.stay, others)
            with torch.no_grad():
                torch._foreach_copy_(list(taken), list(given))


_COUNT = Symbol("n")


def _words(x: Tensor) -> tuple[torch.dtype, int]:
    """What a tensor is copied as."""
    dtype = next(d for d in _WORDS if x.nbytes % d.itemsize == 0)
    return dtype, x.nbytes // dtype.itemsize


@functools.cache
def _kernel(dtype: torch.dtype) -> tuple[KernelCode, Buffer, Buffer]:
    """A copy of _COUNT words, from the one buffer to the other."""
    shape = (_COUNT.expr,)
    source, target = (Buffer(name, dtype, shape, (1,), "extern") for name in ("x", "y"))
    at = Symbol("i", hi=_COUNT.expr)
    store = Store(target, at.expr, Values().load(source, at.expr))
    return emit_kernel(Kernel((at,), [Phase((), [store])], at)), source, target
