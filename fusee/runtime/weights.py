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
from fusee.runtime.launch import (
    Layout,
    answer,
    answered,
    argument,
    builtin,
    differing,
    layout,
    number,
    raised,
)
from fusee.runtime.llvm_text import Level, Writer

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


def _same(known: Layout) -> str:
    """`same` as a unit."""
    writer = Writer()
    top = writer.top
    writer.declares["Three"] = '@Three = internal constant [17 x i8] c"three arguments!\\00"'
    top.leave(top.op("icmp ne i64 %count, 3"), lambda: raised(top, "TypeError", "Three"))
    state = top.op(f"inttoptr i64 {number(top, 0)} to ptr")
    inputs, fill = argument(top, 1), top.op(f"icmp ne i64 {number(top, 2)}, 0")
    look = top.op(f"xor i1 {fill}, true")

    def row(k: str, _: list[str]) -> list[str]:
        level = writer.top
        op, load = level.op, level.load
        first = op(f"mul i64 {k}, {_ROW_WORDS}")
        place = level.at(state, op(f"add i64 {first}, 1"), "i64")
        given = ("ptr", inputs), ("i64", load("i64", place))
        x = level.call("ptr", "PyTuple_GetItem", *given)
        level.leave(op(f"icmp eq ptr {x}, null"), lambda: "ptr null")

        def leave_if(differs: str) -> None:
            found = op(f"and i1 {differs}, {look}")
            level.leave(found, lambda: answered(level, op(f"add i64 {k}, 1")))

        leave_if(op(f"icmp ne ptr {x}, {load('ptr', place, _OBJECT)}"))
        impl = load("ptr", x, known.impl, "i8")
        storage = load("ptr", impl, known.storage, "i8")
        counter = load("ptr", impl, known.counter, "i8")
        facts = [
            op(f"ptrtoint ptr {storage} to i64"),
            load("i64", storage, known.data, "i8"),
            load("i64", impl, known.offset, "i8"),
            op(f"zext i32 {load('i32', counter, known.version, 'i8')} to i64"),
            op(f"ptrtoint ptr {counter} to i64"),
        ]
        leave_if(differing(level, place, 2, facts))
        content = _content(level, *(load(("i64", "ptr")[k == 8], place, k) for k in range(8, 12)))
        leave_if(differing(level, place, 7, [content]))

        def note() -> None:
            level.store("ptr", x, place, _OBJECT)
            for k, fact in enumerate([*facts, content], 2):
                level.store("i64", fact, place, k)

        level.unless(look, note)
        return []

    writer.loop("0", top.load("i64", state), 1, [], row)
    return answer(top, "0")


def _content(level: Level, start: str, step: str, probes: str, single: str) -> str:
    """A number made from words that lie `step` bytes apart, and from the first `single` bytes."""
    writer = level.writer

    def word(_: str, carried: list[str]) -> list[str]:
        inner, (place, before) = writer.top, carried
        mixed = inner.op(f"xor i64 {before}, {inner.load('i64', place)}")
        product = inner.op(f"mul i64 {mixed}, -7046029254386353131")
        high = inner.op(f"lshr i64 {product}, 29")
        return [inner.at(place, step), inner.op(f"xor i64 {product}, {high}")]

    def byte(k: str, carried: list[str]) -> list[str]:
        inner = writer.top
        value = inner.op(f"zext i8 {inner.load('i8', start, k, 'i8')} to i64")
        return [inner.op(f"xor i64 {inner.op(f'mul i64 {carried[0]}, 257')}, {value}")]

    _, words = writer.loop("0", probes, 1, [("ptr", start), ("i64", "1")], word)
    return writer.loop("0", single, 1, [("i64", words)], byte)[0]


@functools.cache
def same_as_recorded() -> Callable[[int, tuple[Tensor, ...], int], int]:
    """The builtin `same(state, inputs, fill)`.

    With fill 0: 0 if all rows at `state` still hold, else 1 + the first row that does not. With
    fill 1 it writes what it finds into the rows; every input that they name must be derivable.
    """
    found = layout()
    assert found is not None, "DerivedSet is only for tensors that are derivable"
    same: Callable[[int, tuple[Tensor, ...], int], int] = builtin("same", _same(found))
    return same
