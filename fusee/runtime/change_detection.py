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

from fusee.runtime.launch import builtin, layout

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

# changed(table) -> index of the first dict, owner, tensor or list that changed, or -1. The table
# holds 64-bit words: the number of dicts and owners, for each an address and the word that was
# there (a dict's version, or where an owner's dict is), the number of tensors, their rows, the
# number of lists, and for each its address, its length and those of its elements.
_CHANGED = """
define ptr @kernel(ptr %self, ptr %args, i64 %n) {
  %arg = load ptr, ptr %args
  %address = call i64 @PyLong_AsSsize_t(ptr %arg)
  %table = inttoptr i64 %address to ptr
  %count = load i64, ptr %table
  br label %loop
loop:
  %i = phi i64 [0, %0], [%next, %same]
  %more = icmp slt i64 %i, %count
  %twice = shl i64 %i, 1
  %at = add i64 %twice, 1
  %entry = getelementptr i64, ptr %table, i64 %at
  br i1 %more, label %look, label %tensors
look:
  %word.at = load ptr, ptr %entry
  %word = load i64, ptr %word.at
  %noted.at = getelementptr i64, ptr %entry, i64 1
  %noted = load i64, ptr %noted.at
  %is.same = icmp eq i64 %word, %noted
  br i1 %is.same, label %same, label %found
same:
  %next = add i64 %i, 1
  br label %loop
found:
  br label %answer
tensors:
  %rows = load i64, ptr %entry
  %first = getelementptr i64, ptr %entry, i64 1
  br label %row.loop
row.loop:
  %j = phi i64 [0, %tensors], [%j.next, %row.same]
  %j.more = icmp slt i64 %j, %rows
  br i1 %j.more, label %row.look, label %lists
row.look:
  %row.at = mul i64 %j, ROW
  %row = getelementptr i64, ptr %first, i64 %row.at
ROW_TEXT
  br i1 %row.is.same, label %row.same, label %row.found
row.same:
  %j.next = add i64 %j, 1
  br label %row.loop
row.found:
  %j.index = add i64 %count, %j
  br label %answer
lists:
  %all.rows = mul i64 %rows, ROW
  %lists.at = getelementptr i64, ptr %first, i64 %all.rows
  %lists.count = load i64, ptr %lists.at
  %list.first = getelementptr i64, ptr %lists.at, i64 1
  %before.lists = add i64 %count, %rows
  br label %list.loop
list.loop:
  %l = phi i64 [0, %lists], [%l.next, %list.same]
  %list.at = phi ptr [%list.first, %lists], [%list.after, %list.same]
  %l.more = icmp slt i64 %l, %lists.count
  br i1 %l.more, label %list.look, label %none
list.look:
  %list = load ptr, ptr %list.at
  %length.at = getelementptr i64, ptr %list.at, i64 1
  %length = load i64, ptr %length.at
  %elements = getelementptr i64, ptr %list.at, i64 2
  %size.at = getelementptr i8, ptr %list, i64 LIST_SIZE
  %size = load i64, ptr %size.at
  %items.at = getelementptr i8, ptr %list, i64 LIST_ITEMS
  %items = load ptr, ptr %items.at
  %same.size = icmp eq i64 %size, %length
  br i1 %same.size, label %item.loop, label %list.found
item.loop:
  %m = phi i64 [0, %list.look], [%m.next, %item.look]
  %differing = phi i64 [0, %list.look], [%differs.more, %item.look]
  %m.more = icmp slt i64 %m, %length
  br i1 %m.more, label %item.look, label %items.done
item.look:
  %item.at = getelementptr i64, ptr %items, i64 %m
  %item = load i64, ptr %item.at
  %element.at = getelementptr i64, ptr %elements, i64 %m
  %element = load i64, ptr %element.at
  %item.differs = xor i64 %item, %element
  %differs.more = or i64 %differing, %item.differs
  %m.next = add i64 %m, 1
  br label %item.loop
items.done:
  %list.is.same = icmp eq i64 %differing, 0
  br i1 %list.is.same, label %list.same, label %list.found
list.same:
  %l.next = add i64 %l, 1
  %list.after = getelementptr i64, ptr %elements, i64 %length
  br label %list.loop
list.found:
  %l.index = add i64 %before.lists, %l
  br label %answer
none:
  br label %answer
answer:
  %result = phi i64 [-1, %none], [%i, %found], [%j.index, %row.found], [%l.index, %list.found]
  %object = call ptr @PyLong_FromSsize_t(i64 %result)
  ret ptr %object
}
@zero = internal constant i8 0
declare i64 @PyLong_AsSsize_t(ptr)
declare ptr @PyLong_FromSsize_t(i64)
"""

# differs(table, list) -> index of the first element unlike its row, or -1. The table holds the
# number of rows, and those; the list has as many elements.
_DIFFERS = """
define ptr @kernel(ptr %self, ptr %args, i64 %n) {
  %arg = load ptr, ptr %args
  %address = call i64 @PyLong_AsSsize_t(ptr %arg)
  %table = inttoptr i64 %address to ptr
  %rows = load i64, ptr %table
  %first = getelementptr i64, ptr %table, i64 1
  %list.at = getelementptr ptr, ptr %args, i64 1
  %list = load ptr, ptr %list.at
  %items.at = getelementptr i8, ptr %list, i64 LIST_ITEMS
  %items = load ptr, ptr %items.at
  br label %loop
loop:
  %j = phi i64 [0, %0], [%next, %same]
  %more = icmp slt i64 %j, %rows
  br i1 %more, label %look, label %none
look:
  %item.at = getelementptr ptr, ptr %items, i64 %j
  %tensor = load ptr, ptr %item.at
  %row.at = mul i64 %j, FRESH_ROW
  %row = getelementptr i64, ptr %first, i64 %row.at
  %class.at = getelementptr i8, ptr %tensor, i64 OBJECT_CLASS
  %class = load i64, ptr %class.at
  %noted.class = load i64, ptr %row
  %same.class = icmp eq i64 %class, %noted.class
  br i1 %same.class, label %kind, label %found
kind:
  %kind.at = getelementptr i64, ptr %row, i64 1
  %kind.word = load i64, ptr %kind.at
  %is.tensor = icmp ne i64 %kind.word, 0
  br i1 %is.tensor, label %compare, label %same
compare:
ROW_TEXT
  br i1 %row.is.same, label %same, label %found
same:
  %next = add i64 %j, 1
  br label %loop
found:
  br label %answer
none:
  br label %answer
answer:
  %result = phi i64 [-1, %none], [%j, %found]
  %object = call ptr @PyLong_FromSsize_t(i64 %result)
  ret ptr %object
}
@zero = internal constant i8 0
declare i64 @PyLong_AsSsize_t(ptr)
declare ptr @PyLong_FromSsize_t(i64)
"""

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
    return _word(id(x) + _VERSION_OFFSET)


def _word(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


def _row(tensor: torch.Tensor) -> list[int]:
    places = _places()
    assert places is not None, "can_watch() says so before"
    impl = _word(id(tensor) + places.impl)
    autograd = _word(impl + places.autograd)
    requires = ctypes.c_uint8.from_address(autograd + places.requires).value if autograd else 0
    return [id(tensor), impl, autograd, requires, *(_word(impl + at) for at in places.words)]


@functools.cache
def changed() -> Callable[[int], int]:
    """The builtin `changed(watch.address)`."""
    made: Callable[[int], int] = builtin("changed", _with_rows(_CHANGED, known_before=True))
    return made


@functools.cache
def differs() -> Callable[[int, list[Any]], int]:
    """The builtin `differs(table.address, objects)`. Only where can_watch() says so."""
    made: Callable[[int, list[Any]], int]
    made = builtin("differs", _with_rows(_DIFFERS, known_before=False))
    return made


def _with_rows(text: str, *, known_before: bool) -> str:
    places = _places()
    row = "  %row.is.same = icmp eq i64 0, 1"
    if places is not None:
        row = ("\n  %tensor = load ptr, ptr %row" if known_before else "") + _row_text(
            places, known_before
        )
    numbers = {
        "OBJECT_CLASS": _OBJECT_CLASS,
        "LIST_SIZE": _LIST_SIZE,
        "LIST_ITEMS": _LIST_ITEMS,
        "FRESH_ROW": _FRESH_ROW,
        "ROW": _ROW,
    }
    text = text.replace("ROW_TEXT", row)
    for name, number in numbers.items():
        text = text.replace(name, str(number))
    return text


def _row_text(places: _Places, known_before: bool) -> str:
    """Compare one row: differences are or-ed together, and looked at once.

    known_before   whether it must be the very object that was noted
    """
    lines = f"""
  %impl.at = getelementptr i8, ptr %tensor, i64 {places.impl}
  %impl = load ptr, ptr %impl.at
  %impl.word = ptrtoint ptr %impl to i64
  %autograd.at = getelementptr i8, ptr %impl, i64 {places.autograd}
  %autograd = load ptr, ptr %autograd.at
  %autograd.word = ptrtoint ptr %autograd to i64
  %has.none = icmp eq ptr %autograd, null
  %requires.there = getelementptr i8, ptr %autograd, i64 {places.requires}
  %requires.at = select i1 %has.none, ptr @zero, ptr %requires.there
  %requires = load i8, ptr %requires.at
  %requires.word = zext i8 %requires to i64
"""
    start = 1 if known_before else 2
    terms = ["%requires.word"]
    if known_before:
        terms = ["%impl.word", "%autograd.word", *terms]
    for k, at in enumerate(places.words):
        lines += f"  %w{k}.at = getelementptr i8, ptr %impl, i64 {at}\n"
        lines += f"  %w{k} = load i64, ptr %w{k}.at\n"
        if k == _FLAGS and not known_before:
            lines += f"  %m{k} = and i64 %w{k}, {_DTYPE_AND_DEVICE}\n"
        terms.append(f"%m{k}" if k == _FLAGS and not known_before else f"%w{k}")
    total = "0"
    for k, term in enumerate(terms):
        lines += f"  %noted{k}.at = getelementptr i64, ptr %row, i64 {k + start}\n"
        lines += f"  %noted{k} = load i64, ptr %noted{k}.at\n"
        lines += f"  %differs{k} = xor i64 {term}, %noted{k}\n"
        lines += f"  %all{k} = or i64 {total}, %differs{k}\n"
        total = f"%all{k}"
    return lines + f"  %row.is.same = icmp eq i64 {total}, 0"


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
    if _word(id(filled) + _OBJECT_CLASS) != id(list) or _word(id(filled) + _LIST_SIZE) != 2:
        return False
    if _word(_word(id(filled) + _LIST_ITEMS) + 8) != id(first):
        return False
    return len({first, second, third, _version(probe)}) == 4


def pointer(owner: Any) -> int | None:
    """The address of the word that points to an object's `__dict__`; None if it is elsewhere."""
    kind = type(owner)
    offset = _MANAGED_DICT_OFFSET if kind.__flags__ & _MANAGED_DICT else kind.__dictoffset__
    if not offset or (offset < 0 and offset != _MANAGED_DICT_OFFSET):
        return None
    names = object.__getattribute__(owner, "__dict__")  # from now on it is an object
    return id(owner) + offset if _word(id(owner) + offset) == id(names) else None


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
            (_word(plain._cdata + 8 * k), _word(parameter._cdata + 8 * k))
            for k in range(_AUTOGRAD_WORDS)
        ]
        at = [k for k, (without, with_grad) in enumerate(pairs) if without == 0 < with_grad]
        if len(at) != 1:
            return None
        autograd = _word(parameter._cdata + 8 * at[0])
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
        found = [_word(x._cdata + at) for at in places.words]
        found[_FLAGS] &= _DTYPE_AND_DEVICE
        return found

    x = torch.zeros(2, 3)
    others = [torch.zeros(3, 2), x.t(), x.double(), x.unsqueeze(0), x[:, :2], x.to("meta")]
    others += [torch.zeros(2, 3, dtype=torch.int32), x.as_strided((2, 3), (1, 2))]
    same = facts(x) == facts(torch.ones(2, 3)) == facts(torch.ones(9)[3:].view(2, 3))
    sizes = [_word(x._cdata + at) for at in places.words[:3]] == [2, 2, 3]
    return same and sizes and all(facts(x) != facts(other) for other in others)


def _bytes(address: int) -> bytes:
    return bytes((ctypes.c_uint8 * _AUTOGRAD_BYTES).from_address(address))
