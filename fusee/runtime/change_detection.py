"""Whether any of many dicts, lists or tensors has changed, at a few nanoseconds for each.

CPython 3.11 and 3.12 give each dict a version, unique in the process, at every change. Machine
code compares the versions of all dicts of a table with those noted before. From 3.13 on dicts have
no version: `available` is False there, and callers look at what the dicts hold.

Of a tensor it compares what says its class of results: the words with sizes, strides, dtype,
device and dispatch keys, and whether it requires a gradient. Values are not looked at. Of a list
it compares the elements by identity.

Tensors that are other objects at each call, such as gradients, are held against a table of the same
words: `differs`.

source   PEP 509; CPython's Include/cpython/dictobject.h (ma_version_tag); c10/core/TensorImpl.h
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusee.runtime.launch import (
    answer,
    answered,
    argument,
    builtin,
    differing,
    layout,
    number,
    word,
)
from fusee.runtime.llvm_text import Level, Writer

_VERSION_OFFSET = 24  # bytes, after the reference count, the type and the number of items

# Sizes and strides of more dimensions lie elsewhere.
_MOST_DIMENSIONS = 5
# Words before the storage offset: number of dimensions, five sizes, five strides. After it: number
# of elements, dtype and device, dispatch keys.
_BEFORE, _AFTER = 11, 3
_AUTOGRAD_WORDS, _AUTOGRAD_BYTES = 8, 160
# A row: Python object, C++ tensor, autograd's part of it, requires_grad, then the words.
_ROW = 4 + _BEFORE + _AFTER

# The word with dtype and device also has flags that follow from the others, and bits never written.
_FLAGS, _DTYPE_AND_DEVICE = _BEFORE + 1, (1 << 40) - 1
# A row of a Table: class, whether there is more to compare, requires_grad, then the words.
_FRESH_ROW = 3 + _BEFORE + _AFTER

# Where most instances point to their `__dict__` (Include/internal/pycore_object.h); others have an
# offset of their class's own.
_MANAGED_DICT, _MANAGED_DICT_OFFSET = 1 << 4, -24

# Offsets in bytes in CPython's objects; `available` tries them out.
_OBJECT_CLASS, _LIST_SIZE, _LIST_ITEMS = 8, 16, 24


class _Places(NamedTuple):
    """Offsets in bytes: where a tensor's facts lie."""

    impl: int  # Python object -> C++ tensor
    autograd: int  # C++ tensor -> autograd's part
    requires: int  # in autograd's part: one byte
    words: tuple[int, ...]  # in the C++ tensor


class Watch:
    """Notes the versions of some dicts, the facts of some tensors and the elements of some lists.

    Keeps all of them alive.

    owners   objects, each with the dict that is its `__dict__`; each has a `pointer`
    """

    def __init__(
        self,
        dicts: Sequence[dict[Any, Any]],
        tensors: Sequence[torch.Tensor] = (),
        lists: Sequence[list[Any]] = (),
        owners: Sequence[tuple[Any, dict[Any, Any]]] = (),
    ) -> None:
        self.dicts = list(dicts)
        words = [len(self.dicts) + len(owners)]
        for one in self.dicts:
            words += (id(one) + _VERSION_OFFSET, _version(one))
        for owner, its in owners:
            words += (pointer(owner) or 0, id(its))
        words.append(len(tensors))
        for tensor in tensors:
            words += _row(tensor)
        words.append(len(lists))
        for some in lists:
            words += (id(some), len(some), *map(id, some))
        self._keep = [tensors, lists, [list(some) for some in lists], owners]
        self._words = (ctypes.c_uint64 * len(words))(*words)
        self.address = ctypes.addressof(self._words)

    def note(self, k: int) -> None:
        """What the dict number `k` holds now is what it should."""
        self._words[2 + 2 * k] = _version(self.dicts[k])


class Table:
    """What the elements of a list should be: None, or tensors with these facts and this class."""

    def __init__(self, examples: Sequence[torch.Tensor | None]) -> None:
        words = [len(examples)]
        for x in examples:
            row = [id(type(x)), 0, 0, *[0] * (_BEFORE + _AFTER)]
            if x is not None:
                _, _, _, requires, *facts = _row(x)
                facts[_FLAGS] &= _DTYPE_AND_DEVICE
                row = [id(type(x)), 1, requires, *facts]
            words += row
        self._words = (ctypes.c_uint64 * len(words))(*words)
        self.address = ctypes.addressof(self._words)


def _version(x: dict[Any, Any]) -> int:
    return word(id(x) + _VERSION_OFFSET)


def _row(tensor: torch.Tensor) -> list[int]:
    places = _places()
    assert places is not None, "can_watch() says so before"
    impl = word(id(tensor) + places.impl)
    autograd = word(impl + places.autograd)
    requires = ctypes.c_uint8.from_address(autograd + places.requires).value if autograd else 0
    return [id(tensor), impl, autograd, requires, *(word(impl + at) for at in places.words)]


@functools.cache
def changed() -> Callable[[int], int]:
    """The builtin `changed(watch.address)`: which dict, owner, tensor or list changed first, or -1.

    A Watch holds 64-bit words: the number of dicts and owners, for each an address and the word
    that was there (a dict's version, or where an owner's dict is), the number of tensors, their
    rows, the number of lists, and for each its address, its length and those of its elements.
    """
    writer, places = Writer(), _places()
    top = writer.top
    table = top.op(f"inttoptr i64 {number(top, 0)} to ptr")
    count = top.load("i64", table)

    def pair(k: str, _: list[str]) -> list[str]:
        level = writer.top
        at = level.at(level.at(table, level.op(f"shl i64 {k}, 1"), "i64"), 8)
        word = level.load("i64", level.load("ptr", at))
        level.leave(differing(level, at, 1, [word]), lambda: answered(level, k))
        return []

    writer.loop("0", count, 1, [], pair)
    tensors = top.at(top.at(table, top.op(f"shl i64 {count}, 1"), "i64"), 8)
    rows, first = top.load("i64", tensors), top.at(tensors, 8)

    def row(k: str, _: list[str]) -> list[str]:
        level = writer.top
        at = level.at(first, k, f"[{_ROW} x i64]")
        if places is not None:  # else there are no rows
            impl, autograd, facts = _facts(level, places, level.load("ptr", at))
            words = [level.op(f"ptrtoint ptr {x} to i64") for x in (impl, autograd)]
            differs = differing(level, at, 1, [*words, *facts])
            level.leave(differs, lambda: answered(level, level.op(f"add i64 {count}, {k}")))
        return []

    writer.loop("0", rows, 1, [], row)
    lists = top.at(first, rows, f"[{_ROW} x i64]")

    _compare_lists(writer, lists, top.op(f"add i64 {count}, {rows}"))
    made: Callable[[int], int] = builtin("changed", answer(top, "-1"))
    return made


def _compare_lists(writer: Writer, lists: str, before: str) -> None:
    """The last part of `changed`; `before` is the number of dicts, owners and tensors."""

    def one(k: str, carried: list[str]) -> list[str]:
        level = writer.top
        found, length = level.load("ptr", carried[0]), level.load("i64", carried[0], 1)
        elements = level.at(carried[0], 16)
        items = level.load("ptr", found, _LIST_ITEMS, "i8")

        def leave_if(differs: str) -> None:
            level.leave(differs, lambda: answered(level, level.op(f"add i64 {before}, {k}")))

        def item(m: str, bits: list[str]) -> list[str]:
            inner = writer.top
            pair = inner.load("i64", items, m), inner.load("i64", elements, m)
            here = inner.op(f"xor i64 {pair[0]}, {pair[1]}")
            return [inner.op(f"or i64 {bits[0]}, {here}")]

        size = level.load("i64", found, _LIST_SIZE, "i8")
        leave_if(level.op(f"icmp ne i64 {size}, {length}"))
        (bits,) = writer.loop("0", length, 1, [("i64", "0")], item)
        leave_if(level.op(f"icmp ne i64 {bits}, 0"))
        return [level.at(elements, length, "i64")]

    top = writer.top
    writer.loop("0", top.load("i64", lists), 1, [("ptr", top.at(lists, 8))], one)


@functools.cache
def differs() -> Callable[[int, list[Any]], int]:
    """The builtin `differs(table.address, objects)`: the first element unlike its row, or -1.

    A Table holds the number of its rows, and those; the list has as many elements. Only where
    can_watch() says so.
    """
    writer, places = Writer(), _places()
    assert places is not None, "can_watch() says so before"
    top = writer.top
    table = top.op(f"inttoptr i64 {number(top, 0)} to ptr")
    items = top.load("ptr", argument(top, 1), _LIST_ITEMS, "i8")
    first = top.at(table, 8)

    def row(k: str, _: list[str]) -> list[str]:
        level = writer.top
        at = level.at(first, k, f"[{_FRESH_ROW} x i64]")
        tensor = level.load("ptr", items, k)

        def compare() -> None:
            *_, facts = _facts(level, places, tensor)
            word = facts[1 + _FLAGS]
            facts[1 + _FLAGS] = level.op(f"and i64 {word}, {_DTYPE_AND_DEVICE}")
            level.leave(differing(level, at, 2, facts), lambda: answered(level, k))

        kind = level.load("i64", tensor, _OBJECT_CLASS, "i8")
        level.leave(differing(level, at, 0, [kind]), lambda: answered(level, k))
        level.unless(level.op(f"icmp eq i64 {level.load('i64', at, 1)}, 0"), compare)
        return []

    writer.loop("0", top.load("i64", table), 1, [], row)
    made: Callable[[int, list[Any]], int] = builtin("differs", answer(top, "-1"))
    return made


def _facts(level: Level, places: _Places, tensor: str) -> tuple[str, str, list[str]]:
    """The C++ tensor, autograd's part of it; whether it requires a gradient, and its words."""
    level.writer.declares["zero"] = "@zero = internal constant i8 0"
    impl = level.load("ptr", tensor, places.impl, "i8")
    autograd = level.load("ptr", impl, places.autograd, "i8")
    none = level.op(f"icmp eq ptr {autograd}, null")
    there = level.at(autograd, places.requires)
    there = level.op(f"select i1 {none}, ptr @zero, ptr {there}")
    requires = level.op(f"zext i8 {level.load('i8', there)} to i64")
    return impl, autograd, [requires, *(level.load("i64", impl, at, "i8") for at in places.words)]


@functools.cache
def available() -> bool:
    """Whether this Python's dicts have versions: tried out, since a build may differ."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13):
        return False
    probe: dict[str, Any] = {"a": 1}
    first = _version(probe)
    if _version(probe) != first:
        return False
    probe["a"] = 2
    second = _version(probe)
    probe["b"] = 3
    third = _version(probe)
    del probe["b"]
    filled = [probe, first]
    if word(id(filled) + _OBJECT_CLASS) != id(list) or word(id(filled) + _LIST_SIZE) != 2:
        return False
    if word(word(id(filled) + _LIST_ITEMS) + 8) != id(first):
        return False
    return len({first, second, third, _version(probe)}) == 4


def pointer(owner: Any) -> int | None:
    """The address of the word that points to an object's `__dict__`; None if it is elsewhere."""
    kind = type(owner)
    offset = _MANAGED_DICT_OFFSET if kind.__flags__ & _MANAGED_DICT else kind.__dictoffset__
    if not offset or (offset < 0 and offset != _MANAGED_DICT_OFFSET):
        return None
    names = object.__getattribute__(owner, "__dict__")  # from now on it is an object
    return id(owner) + offset if word(id(owner) + offset) == id(names) else None


def can_watch(tensor: torch.Tensor) -> bool:
    """Whether all that matters of a tensor lies where it is looked for."""
    return tensor.dim() <= _MOST_DIMENSIONS and _places() is not None


@functools.cache
def _places() -> _Places | None:
    """Found in this process's torch and tried out; None if something is not where it should be."""
    known = layout()
    if known is None:
        return None
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        plain, parameter = torch.zeros(3), torch.zeros(3).requires_grad_()
        pairs = [
            (word(plain._cdata + 8 * k), word(parameter._cdata + 8 * k))
            for k in range(_AUTOGRAD_WORDS)
        ]
        at = [k for k, (without, with_grad) in enumerate(pairs) if without == 0 < with_grad]
        if len(at) != 1:
            return None
        autograd = word(parameter._cdata + 8 * at[0])
        before = _bytes(autograd)
        parameter.requires_grad_(False)
        toggled = [k for k, (x, y) in enumerate(zip(before, _bytes(autograd))) if x != y]
        if len(toggled) != 1:
            return None
        start = known.offset - 8 * _BEFORE
        after = known.offset + 8
        offsets = (*range(start, known.offset, 8), *range(after, after + 8 * _AFTER, 8))
        places = _Places(known.impl, 8 * at[0], toggled[0], offsets)
        return places if _tells_apart(places) else None


def _tells_apart(places: _Places) -> bool:
    def facts(x: torch.Tensor) -> list[int]:
        found = [word(x._cdata + at) for at in places.words]
        found[_FLAGS] &= _DTYPE_AND_DEVICE
        return found

    x = torch.zeros(2, 3)
    others = [torch.zeros(3, 2), x.t(), x.double(), x.unsqueeze(0), x[:, :2], x.to("meta")]
    others += [torch.zeros(2, 3, dtype=torch.int32), x.as_strided((2, 3), (1, 2))]
    same = facts(x) == facts(torch.ones(2, 3)) == facts(torch.ones(9)[3:].view(2, 3))
    sizes = [word(x._cdata + at) for at in places.words[:3]] == [2, 2, 3]
    return same and sizes and all(facts(x) != facts(other) for other in others)


def _bytes(address: int) -> bytes:
    return bytes((ctypes.c_uint8 * _AUTOGRAD_BYTES).from_address(address))
