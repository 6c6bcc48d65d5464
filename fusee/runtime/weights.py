"""What depends on parameters alone: computed once, and again when a parameter changes.

Each call asks whether every parameter is the same object, with the same memory, the same `_version`
and the same content at a few places. The last of these is for `p.data.mul_(2)`, which leaves no
other trace; a change through `.data` that misses all the places looked at is not noticed. One
builtin asks all of it for all parameters.

A tensor that comes to live where a dead one was must not look the same. Weak references would tell,
but torch refuses to swap the content of tensors that have one. Instead each snapshot keeps the
parameters' version counters, and only these, alive: no other tensor can have the same ones.
"""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusee.errors import FuseeWarning, warn
from fusee.log import publish
from fusee.runtime.launch import Layout, builtin, layout

__all__ = ["Derived", "DerivedSet", "Fixed", "Snapshot", "why_not_derivable"]

# Words of 8 bytes looked at in each parameter: the first, the last, and between.
_PROBES = 4

_PLAIN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Derived(NamedTuple):
    """One computation on parameters.

    inputs   positions of the parameters among the graph's inputs
    compute  from these parameters, detached, to the tensors that kernels and calls use
    """

    inputs: tuple[int, ...]
    compute: Callable[[list[Tensor]], Sequence[Tensor]]


class Snapshot:
    """All derived tensors as of some moment, and what tells whether they still hold.

    version  counts the snapshots of one set, from 1
    groups   what each Derived computed; tensors: all of it, as DerivedSet arranges it
    state    the address of `words`, for the builtin that `same_as_recorded` gives
    """

    __slots__ = ("anchors", "groups", "state", "tensors", "version", "words")

    def __init__(
        self,
        version: int,
        groups: tuple[tuple[Tensor, ...], ...],
        tensors: tuple[Tensor, ...],
        words: array[int],
        anchors: list[Tensor],
    ) -> None:
        self.version, self.groups, self.tensors = version, groups, tensors
        self.words, self.anchors = words, anchors
        self.state: int = words.buffer_info()[0]


class Fixed:
    """Tensors that are kept between calls, and follow no input."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.snapshot = Snapshot(1, (), tensors, array("q"), [])

    def current(self, inputs: tuple[Tensor, ...]) -> Snapshot:
        """As DerivedSet has it."""
        return self.snapshot


class DerivedSet:
    """Keeps what several Derived computed, for one compiled function.

    Does not keep its parameters alive. May be used from any thread; a call keeps the snapshot it
    got, whatever others change.

    arrange   from all that was computed, in the order of `derived`, to the tensors of a Snapshot
    snapshot  the latest; `same` tells whether it holds. The first one holds for no inputs
    """

    def __init__(
        self,
        derived: Sequence[Derived],
        arrange: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = tuple,
    ) -> None:
        self.derived, self.arrange = tuple(derived), arrange
        self.positions = sorted({k for one in derived for k in one.inputs})
        self._lock = threading.Lock()
        self._warned = False
        self.same = same_as_recorded()
        rows = array("q", (len(self.positions), *_UNKNOWN * len(self.positions)))
        self.snapshot = Snapshot(0, (), (), rows, [])

    def current(self, inputs: tuple[Tensor, ...]) -> Snapshot:
        """What derives from the parameters among `inputs`, all the inputs of the graph.

        raises   whatever a computation raises; the next call tries again
        """
        snapshot = self.snapshot
        return self.refreshed(inputs) if self.same(snapshot.state, inputs, 0) else snapshot

    def refreshed(self, inputs: tuple[Tensor, ...]) -> Snapshot:
        """What derives from them now that the latest snapshot does not hold."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            old = self.snapshot
            if not self.same(old.state, inputs, 0):
                return old  # another thread was here
            # recorded before computing: what changes meanwhile is noticed by the next call
            words, anchors = self._record(inputs)
            changed = self._changed(old, words)
            groups = tuple(
                old.groups[k]
                if old.version and changed.isdisjoint(one.inputs)
                else tuple(one.compute([inputs[position].detach() for position in one.inputs]))
                for k, one in enumerate(self.derived)
            )
            tensors = self.arrange(tuple(tensor for group in groups for tensor in group))
            version = old.version + 1
            publish("weights", f"version {version}", lambda: f"inputs changed: {sorted(changed)}")
            self.snapshot = Snapshot(version, groups, tensors, words, anchors)
            return self.snapshot

    def _record(self, inputs: tuple[Tensor, ...]) -> tuple[array[int], list[Tensor]]:
        words = array("q", (len(self.positions),))
        for position in self.positions:
            words.extend(_row(position, inputs[position]))
        if not self._can_follow(inputs):
            return words, []  # no row holds, so every call computes anew
        anchors = [_anchor(inputs[position]) for position in self.positions]
        self.same(words.buffer_info()[0], inputs, 1)
        return words, anchors

    def _can_follow(self, inputs: tuple[Tensor, ...]) -> bool:
        for position in self.positions:
            reason = why_not_derivable(inputs[position])
            if reason is None:
                continue
            if not self._warned:
                self._warned = True
                warn(
                    FuseeWarning,
                    f"a parameter (input {position}) cannot be followed: {reason}",
                    did="computed what depends on parameters, and will at each call",
                    remedy="load parameters outside of torch.inference_mode()",
                )
            return False
        return True

    def _changed(self, old: Snapshot, words: array[int]) -> set[int]:
        if not old.version or words[1 + _OBJECT] == 0:
            return set(self.positions)
        rows = [slice(k, k + _ROW_WORDS) for k in range(1, len(words), _ROW_WORDS)]
        pairs = zip(self.positions, rows, strict=True)
        return {position for position, row in pairs if words[row] != old.words[row]}


def why_not_derivable(tensor: Tensor) -> str | None:
    """Why nothing can be derived from a parameter, or None if it can be."""
    if layout() is None:
        return "the memory layout of this torch is not known"
    if type(tensor) not in _PLAIN_TYPES:
        return f"it is a {type(tensor).__name__}"
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return f"it is a {tensor.layout} tensor on {tensor.device}"
    if tensor.is_inference():
        return "it is an inference tensor, whose changes leave no trace"
    return None


def _anchor(tensor: Tensor) -> Tensor:
    """Something that shares the tensor's version counter but not its memory."""
    anchor = tensor.detach()
    anchor.data = torch.empty(0, dtype=tensor.dtype)
    return anchor


# A row: position among the inputs, then what is compared, then where to look at the content.
_ROW_WORDS = 12
_OBJECT = 1
_UNKNOWN = (0,) * _ROW_WORDS  # the first input, and no object that it would have to be


def _row(position: int, tensor: Tensor) -> list[int]:
    count = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    bytes_ = count * tensor.itemsize if tensor.numel() else 0
    probes = min(_PROBES, bytes_ // 8)
    step = (bytes_ - 8) // (probes - 1) if probes > 1 else 0
    single = bytes_ if bytes_ < 8 else 0
    return [position, 0, 0, 0, 0, 0, 0, 0, tensor.data_ptr(), step, probes, single]


_SAME = """
define ptr @kernel(ptr %self, ptr %args, i64 %count) nounwind {
entry:
  %three = icmp eq i64 %count, 3
  br i1 %three, label %read, label %wrong
read:
  %arg0 = load ptr, ptr %args
  %arg1.at = getelementptr ptr, ptr %args, i64 1
  %inputs = load ptr, ptr %arg1.at
  %arg2.at = getelementptr ptr, ptr %args, i64 2
  %arg2 = load ptr, ptr %arg2.at
  %state.word = call i64 @PyLong_AsSsize_t(ptr %arg0)
  %fill.word = call i64 @PyLong_AsSsize_t(ptr %arg2)
  %fill = icmp ne i64 %fill.word, 0
  %error = call ptr @PyErr_Occurred()
  %fine = icmp eq ptr %error, null
  br i1 %fine, label %begin, label %raised
begin:
  %state = inttoptr i64 %state.word to ptr
  %rows = load i64, ptr %state
  br label %rows.loop

rows.loop:
  %k = phi i64 [ 0, %begin ], [ %k.next, %row.done ]
  %more = icmp slt i64 %k, %rows
  br i1 %more, label %one, label %same
one:
  %k.word = mul i64 %k, ROW_WORDS
  %k.next = add i64 %k, 1
  %row.word = add i64 %k.word, 1
  %row = getelementptr i64, ptr %state, i64 %row.word
  %position = load i64, ptr %row
  %object = call ptr @PyTuple_GetItem(ptr %inputs, i64 %position)
  %missing = icmp eq ptr %object, null
  br i1 %missing, label %raised, label %identity
identity:
  %object.at = getelementptr i64, ptr %row, i64 1
  %object.old = load ptr, ptr %object.at
  %object.same = icmp eq ptr %object, %object.old
  %look = or i1 %object.same, %fill
  br i1 %look, label %facts, label %changed
facts:
  %impl.at = getelementptr i8, ptr %object, i64 IMPL
  %impl = load ptr, ptr %impl.at
  %storage.from = getelementptr i8, ptr %impl, i64 STORAGE
  %storage = load i64, ptr %storage.from
  %storage.ptr = inttoptr i64 %storage to ptr
  %data.from = getelementptr i8, ptr %storage.ptr, i64 DATA
  %data = load i64, ptr %data.from
  %offset.from = getelementptr i8, ptr %impl, i64 OFFSET
  %offset = load i64, ptr %offset.from
  %counter.from = getelementptr i8, ptr %impl, i64 COUNTER
  %counter.word = load i64, ptr %counter.from
  %counter = inttoptr i64 %counter.word to ptr
  %count.from = getelementptr i8, ptr %counter, i64 VERSION
  %version32 = load i32, ptr %count.from
  %version = zext i32 %version32 to i64
  %storage.at = getelementptr i64, ptr %row, i64 2
  %storage.old = load i64, ptr %storage.at
  %data.at = getelementptr i64, ptr %row, i64 3
  %data.old = load i64, ptr %data.at
  %offset.at = getelementptr i64, ptr %row, i64 4
  %offset.old = load i64, ptr %offset.at
  %version.at = getelementptr i64, ptr %row, i64 5
  %version.old = load i64, ptr %version.at
  %counter.at = getelementptr i64, ptr %row, i64 6
  %counter.old = load i64, ptr %counter.at
  %storage.differs = xor i64 %storage, %storage.old
  %data.differs = xor i64 %data, %data.old
  %offset.differs = xor i64 %offset, %offset.old
  %version.differs = xor i64 %version, %version.old
  %counter.differs = xor i64 %counter.word, %counter.old
  %differ0 = or i64 %storage.differs, %data.differs
  %differ1 = or i64 %offset.differs, %version.differs
  %differ2 = or i64 %differ0, %differ1
  %differ = or i64 %differ2, %counter.differs
  %facts.same = icmp eq i64 %differ, 0
  %look.on = or i1 %facts.same, %fill
  br i1 %look.on, label %content, label %changed

content:
  %start.at = getelementptr i64, ptr %row, i64 8
  %start = load ptr, ptr %start.at
  %step.at = getelementptr i64, ptr %row, i64 9
  %step = load i64, ptr %step.at
  %probes.at = getelementptr i64, ptr %row, i64 10
  %probes = load i64, ptr %probes.at
  %single.at = getelementptr i64, ptr %row, i64 11
  %single = load i64, ptr %single.at
  br label %words
words:
  %w = phi i64 [ 0, %content ], [ %w.next, %word ]
  %place = phi ptr [ %start, %content ], [ %place.next, %word ]
  %hash = phi i64 [ 1, %content ], [ %hash.next, %word ]
  %more.words = icmp slt i64 %w, %probes
  br i1 %more.words, label %word, label %bytes
word:
  %value = load i64, ptr %place, align 1
  %mixed = xor i64 %hash, %value
  %product = mul i64 %mixed, -7046029254386353131
  %high = lshr i64 %product, 29
  %hash.next = xor i64 %product, %high
  %w.next = add i64 %w, 1
  %place.next = getelementptr i8, ptr %place, i64 %step
  br label %words
bytes:
  %b = phi i64 [ 0, %words ], [ %b.next, %byte ]
  %sum = phi i64 [ %hash, %words ], [ %sum.next, %byte ]
  %more.bytes = icmp slt i64 %b, %single
  br i1 %more.bytes, label %byte, label %compare
byte:
  %byte.at = getelementptr i8, ptr %start, i64 %b
  %byte8 = load i8, ptr %byte.at
  %byte64 = zext i8 %byte8 to i64
  %shifted = mul i64 %sum, 257
  %sum.next = xor i64 %shifted, %byte64
  %b.next = add i64 %b, 1
  br label %bytes
compare:
  %hash.at = getelementptr i64, ptr %row, i64 7
  %hash.old = load i64, ptr %hash.at
  br i1 %fill, label %store, label %decide
decide:
  %hash.same = icmp eq i64 %sum, %hash.old
  br i1 %hash.same, label %row.done, label %changed
store:
  store ptr %object, ptr %object.at
  store i64 %storage, ptr %storage.at
  store i64 %data, ptr %data.at
  store i64 %offset, ptr %offset.at
  store i64 %version, ptr %version.at
  store i64 %counter.word, ptr %counter.at
  store i64 %sum, ptr %hash.at
  br label %row.done
row.done:
  br label %rows.loop

same:
  %zero = call ptr @PyLong_FromSsize_t(i64 0)
  ret ptr %zero
changed:
  %which = call ptr @PyLong_FromSsize_t(i64 %k.next)
  ret ptr %which
wrong:
  %type.error = load ptr, ptr @PyExc_TypeError
  call void @PyErr_SetString(ptr %type.error, ptr @WrongArguments)
  ret ptr null
raised:
  ret ptr null
}
@WrongArguments = internal constant [17 x i8] c"three arguments!\\00"
@PyExc_TypeError = external global ptr
declare i64 @PyLong_AsSsize_t(ptr)
declare ptr @PyLong_FromSsize_t(i64)
declare ptr @PyTuple_GetItem(ptr, i64)
declare ptr @PyErr_Occurred()
declare void @PyErr_SetString(ptr, ptr)
"""


@functools.cache
def same_as_recorded() -> Callable[[int, tuple[Tensor, ...], int], int]:
    """The builtin `same(state, inputs, fill)`.

    With fill 0: 0 if all rows at `state` still hold, else 1 + the first row that does not. With
    fill 1 it writes what it finds into the rows; every input that they name must be derivable.
    """
    found = layout()
    assert found is not None, "DerivedSet is only for tensors that are derivable"
    text = _SAME.replace("ROW_WORDS", str(_ROW_WORDS))
    for field in Layout._fields:
        text = text.replace(f"i64 {field.upper()}\n", f"i64 {getattr(found, field)}\n")
    same: Callable[[int, tuple[Tensor, ...], int], int] = builtin("same", text)
    return same
