"""Whether any of many dicts, lists or tensors has changed, at a few nanoseconds for each.

CPython 3.11 and 3.12 give each dict a version, unique in the process, at every change. Machine
code compares the versions of all dicts of a table with those noted before. From 3.13 on dicts have
no version: `available` is False there, and callers look at what the dicts hold.

Of a tensor it compares what says its class of results: the words with sizes, strides, dtype,
device and dispatch keys, and whether it requires a gradient. Values are not looked at. Of a list
it compares the elements by identity.

Tensors that are other objects at each call, such as gradients, are held against a table of the same
words: `differs`. Of sizes that are open it computes what must hold between them.

source   PEP 509; CPython's Include/cpython/dictobject.h (ma_version_tag); c10/core/TensorImpl.h
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import threading
import types
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fusee.errors import FuseeWarning, warn
from fusee.log import publish
from fusee.runtime.jit import Early, answer, answered, argument, builtin, differing, number, raised
from fusee.runtime.launch import layout, word
from fusee.runtime.llvm_text import STEP_WORDS, Level, Step, Writer, evaluation, step_words

_VERSION_OFFSET = 24  # bytes, after the reference count, the type and the number of items

# Sizes and strides of more dimensions lie elsewhere.
_MOST_DIMENSIONS = 5
# Words before the storage offset: number of dimensions, five sizes, five strides. After it: number
# of elements, dtype and device, dispatch keys.
_BEFORE, _AFTER = 11, 3
_AUTOGRAD_WORDS, _AUTOGRAD_BYTES = 8, 160
# Of a view: its flag is the next but one; two functions lie between base and whether it is known.
_VIEW_BEHIND, _KNOWN_BEHIND, _VIEW_BYTES = 2, 48, 240
# A row: Python object, C++ tensor, autograd's part of it, requires_grad, then the words.
_ROW = 4 + _BEFORE + _AFTER

# The word with dtype and device also has flags that follow from the others, and bits never written.
_FLAGS, _DTYPE_AND_DEVICE = _BEFORE + 1, (1 << 40) - 1
# A row of a CheckTable: class, whether there is more to compare, requires_grad, then the words. One
# with open sizes: class, requires_grad, the words, and which of their bits are compared.
_FRESH_ROW = 3 + _BEFORE + _AFTER
_OPEN_ROW = 2 + 2 * (_BEFORE + _AFTER)
_MOST = (1 << 64) - 1

# Where most instances point to their `__dict__` (Include/internal/pycore_object.h); others have an
# offset of their class's own.
_MANAGED_DICT, _MANAGED_DICT_OFFSET = 1 << 4, -24

# Offsets in bytes in CPython's objects; `available` tries them out.
_OBJECT_CLASS, _LIST_SIZE, _LIST_ITEMS = 8, 16, 24


class _Places(NamedTuple):
    """Offsets in bytes: where a tensor's facts lie."""

    impl: int  # Python object -> C++ tensor
    autograd: int  # C++ tensor -> autograd's part
    requires: int  # in autograd's part: one byte, of leaves alone
    node: int  # in autograd's part: what computed the tensor
    view: int  # in autograd's part: one byte, whether it has more, of a view
    base: int  # there: the C++ tensor of whose memory it is a view, if autograd knows
    known: int  # there: one byte, whether autograd knows
    words: tuple[int, ...]  # in the C++ tensor


class Watch:
    """Notes the versions of some dicts, the facts of some tensors and the elements of some lists.

    Keeps all of them alive.

    owners   objects, each with the dict that is its `__dict__` or with its class, or functions with
             their code; each has a `pointer`
    """

    def __init__(
        self,
        dicts: Sequence[dict[Any, Any]],
        tensors: Sequence[Tensor] = (),
        lists: Sequence[list[Any]] = (),
        owners: Sequence[tuple[Any, Any]] = (),
    ) -> None:
        self.dicts = list(dicts)
        words = [len(self.dicts) + len(owners)]
        for one in self.dicts:
            words += (id(one) + _VERSION_OFFSET, _version(one))
        for owner, its in owners:
            words += (pointer(owner, its) or 0, id(its))
        words.append(len(tensors))
        for tensor in tensors:
            words += _row(tensor)
        words.append(len(lists))
        for some in lists:
            words += (id(some), len(some), *map(id, some))
        self._lists, self._elements = lists, [list(some) for some in lists]
        self._keep = tensors, owners
        self._words = (ctypes.c_uint64 * len(words))(*words)
        self.address = ctypes.addressof(self._words)

    def changed_lists(self) -> list[list[Any]]:
        """Those that hold other objects."""
        rows = zip(self._lists, self._elements)
        return [x for x, was in rows if [*map(id, x)] != [*map(id, was)]]

    def note(self, k: int) -> None:
        """What the dict number `k` holds now is what it should."""
        self._words[2 + 2 * k] = _version(self.dicts[k])


class Open(NamedTuple):
    """A tensor of which some sizes and strides may be others: None. No size is 0."""

    example: Tensor
    size: tuple[int | None, ...]
    stride: tuple[int | None, ...]


class Read(NamedTuple):
    """A number that a condition is about.

    element  of the list: a tensor, or an int
    kind     "size" or "stride", at `axis`; "int"
    """

    element: int
    kind: str
    axis: int = 0


class CheckTable:
    """What the elements of a list should be, and what should hold of numbers that they tell.

    examples  the first elements: None, or a tensor with all of these facts and this class
    opened    those after them; further ones are looked at for numbers alone
    read      the numbers, in the order in which `steps` count them
    steps     as fusee/runtime/jit.py has them
    required  the steps, and numbers, that must be 1
    """

    def __init__(
        self,
        examples: Sequence[Tensor | None],
        opened: Sequence[Open] = (),
        read: Sequence[Read] = (),
        steps: Sequence[Step] = (),
        required: Sequence[int] = (),
    ) -> None:
        words = [len(examples)]
        for x in examples:
            row = [id(type(x)), 0, 0, *[0] * (_BEFORE + _AFTER)]
            if x is not None:
                _, _, _, requires, *facts = _row(x)
                facts[_FLAGS] &= _DTYPE_AND_DEVICE
                row = [id(type(x)), 1, requires, *facts]
            words += row
        words.append(len(opened))
        for one in opened:
            _, _, _, requires, *facts = _row(one.example)
            ends = ([0] * (_MOST_DIMENSIONS - len(one.size)) for _ in range(2))
            known = ([0 if n is None else _MOST for n in row] for row in (one.size, one.stride))
            rows = itertools.chain(*(row + end for row, end in zip(known, ends)))
            count = 0 if None in one.size else _MOST
            masks = [_MOST, *rows, count, _DTYPE_AND_DEVICE, _MOST]
            facts = [fact & mask for fact, mask in zip(facts, masks, strict=True)]
            words += [id(type(one.example)), requires, *facts, *masks]
        words += [len(read), len(steps), len(required)]
        places = _places()
        for element, kind, axis in read:
            first = {"int": 0, "size": 1, "stride": 1 + _MOST_DIMENSIONS}[kind]
            words += [element, places.words[first + axis] if places and kind != "int" else 0]
        words += [word & _MOST for word in (*step_words(steps), *required)]
        self.words = (ctypes.c_uint64 * len(words))(*words)
        self.address = ctypes.addressof(self.words)


def _version(x: dict[Any, Any]) -> int:
    return word(id(x) + _VERSION_OFFSET)


def _row(tensor: Tensor) -> list[int]:
    places = _places()
    assert places is not None, "available() says so before"
    impl = word(id(tensor) + places.impl)
    autograd = word(impl + places.autograd)
    requires = _requires(places, impl)
    return [id(tensor), impl, autograd, requires, *(word(impl + at) for at in places.words)]


def _requires(places: _Places, impl: int) -> int:
    """Whether a tensor requires a gradient: 1: as a leaf, 2: it was computed."""
    if not (autograd := word(impl + places.autograd)):
        return 0
    own = _byte(autograd + places.requires) | 2 * bool(word(autograd + places.node))
    # a view's own bits stay as they were when its base comes to require one
    if own or not (_byte(autograd + places.view) and _byte(autograd + places.known)):
        return own
    return _requires(places, word(autograd + places.base))


def _byte(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value


@Early
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
    with writer.each("0", count) as k:
        level = writer.top
        at = level.at(level.at(table, level.op(f"shl i64 {k}, 1"), "i64"), 8)
        word = level.load("i64", level.load("ptr", at))
        level.leave(differing(level, at, 1, [word]), lambda: answered(level, k))
    tensors = top.at(top.at(table, top.op(f"shl i64 {count}, 1"), "i64"), 8)
    rows, first = top.load("i64", tensors), top.at(tensors, 8)
    with writer.each("0", rows) as k:
        level = writer.top
        at = level.at(first, k, f"[{_ROW} x i64]")
        if places is not None:  # else there are no rows
            impl, autograd, facts = _facts(level, places, level.load("ptr", at))
            words = [level.op(f"ptrtoint ptr {x} to i64") for x in (impl, autograd)]
            differs = differing(level, at, 1, [*words, *facts])
            level.leave(differs, lambda: answered(level, level.op(f"add i64 {count}, {k}")))
    lists, before = top.at(first, rows, f"[{_ROW} x i64]"), top.op(f"add i64 {count}, {rows}")
    some = top.load("i64", lists)
    with writer.loop("0", some, 1, [("ptr", top.at(lists, 8))]) as (k, (row,), following):
        level = writer.top
        found, length = level.load("ptr", row), level.load("i64", row, 1)
        elements = level.at(row, 16)
        items = level.load("ptr", found, _LIST_ITEMS, "i8")

        def leave_if(differs: str) -> None:
            level.leave(differs, lambda: answered(level, level.op(f"add i64 {before}, {k}")))

        size = level.load("i64", found, _LIST_SIZE, "i8")
        leave_if(level.op(f"icmp ne i64 {size}, {length}"))
        with writer.loop("0", length, 1, [("i64", "0")]) as (m, (so_far,), bits):
            inner = writer.top
            pair = inner.load("i64", items, m), inner.load("i64", elements, m)
            here = inner.op(f"xor i64 {pair[0]}, {pair[1]}")
            bits.append(inner.op(f"or i64 {so_far}, {here}"))
        leave_if(level.op(f"icmp ne i64 {bits[0]}, 0"))
        following.append(level.at(elements, length, "i64"))
    return builtin("changed", answer(top, "-1"))


@Early
def differs() -> Callable[[int, list[Any]], int]:
    """The builtin `differs(table.address, objects)`: the first element unlike its row, or -1.

    A CheckTable holds the number of its rows, and those; the same of open ones; how many numbers
    are read, steps taken and required, and each of these. The list has as many elements as there
    are rows, and more if numbers are read of others. Where only these are not as they should be the
    answer is the number of rows. Only where can_watch() says so.
    """
    writer = Writer()
    top = writer.top
    table = top.op(f"inttoptr i64 {number(top, 0)} to ptr")
    compare(writer, table, top.load("ptr", argument(top, 1), _LIST_ITEMS, "i8"))
    return builtin("differs", evaluation() + answer(top, "-1"))


def compare(writer: Writer, table: str, items: str) -> None:
    """The body of `differs`: a table of these words, and where the objects are listed."""
    places = _places()
    assert places is not None, "available() says so before"
    top = writer.top
    first, count = top.at(table, 8), top.load("i64", table)
    with writer.each("0", count) as k:
        level = writer.top
        at = level.at(first, k, f"[{_FRESH_ROW} x i64]")
        tensor = _of_class(level, at, items, k)
        with level.unless(level.op(f"icmp eq i64 {level.load('i64', at, 1)}, 0")):
            *_, facts = _facts(level, places, tensor)
            word = facts[1 + _FLAGS]
            facts[1 + _FLAGS] = level.op(f"and i64 {word}, {_DTYPE_AND_DEVICE}")
            level.leave(differing(level, at, 2, facts), lambda: answered(level, k))
    after = top.at(first, count, f"[{_FRESH_ROW} x i64]")
    rows, second = top.load("i64", after), top.at(after, 8)
    with writer.each("0", rows) as k:
        level = writer.top
        at = level.at(second, k, f"[{_OPEN_ROW} x i64]")
        place = level.op(f"add i64 {count}, {k}")
        tensor = _of_class(level, at, items, place)
        *_, (requires, *words) = _facts(level, places, tensor)
        masks = [level.load("i64", at, 2 + len(words) + n) for n in range(len(words))]
        known = [level.op(f"and i64 {word}, {mask}") for word, mask in zip(words, masks)]
        elements = words[_BEFORE]
        wrong = differing(level, at, 1, [requires, *known])
        empty = level.op(f"icmp slt i64 {elements}, 1")
        level.leave(level.op(f"or i1 {wrong}, {empty}"), lambda: answered(level, place))
    total = top.op(f"add i64 {count}, {rows}")
    _compare_numbers(writer, places, items, top.at(second, rows, f"[{_OPEN_ROW} x i64]"), total)


def _of_class(level: Level, row: str, items: str, k: str) -> str:
    """The element number `k`, if its class is that of its row."""
    element = level.load("ptr", items, k)
    kind = level.load("i64", element, _OBJECT_CLASS, "i8")
    level.leave(differing(level, row, 0, [kind]), lambda: answered(level, k))
    return element


def _compare_numbers(writer: Writer, places: _Places, items: str, at: str, total: str) -> None:
    """The last part of `differs`: what numbers are read, and what must hold of them."""
    top = writer.top
    reads, steps, asked = (top.load("i64", at, k) for k in range(3))
    given = top.at(at, 24)
    program = top.at(given, reads, "[2 x i64]")
    required = top.at(program, steps, f"[{STEP_WORDS} x i64]")
    count = top.op(f"add i64 {reads}, {steps}")
    numbers = top.op(f"alloca i64, i64 {count}")
    writer.declares["PyLong_Type"] = "@PyLong_Type = external global ptr"
    with writer.each("0", reads) as k:
        level = writer.top
        pair = level.at(given, k, "[2 x i64]")
        x, place = level.load("ptr", items, level.load("i64", pair)), level.load("i64", pair, 1)
        is_int = level.op(f"icmp eq i64 {place}, 0")

        def leave_if(wrong: str) -> None:
            level.leave(wrong, lambda: answered(level, total))

        def integer() -> str:
            kind = level.load("ptr", x, _OBJECT_CLASS, "i8")
            leave_if(level.op(f"icmp ne ptr {kind}, @PyLong_Type"))
            value = level.call("i64", "PyLong_AsSsize_t", ("ptr", x))
            error = level.call("ptr", "PyErr_Occurred")
            level.call("void", "PyErr_Clear")
            leave_if(level.op(f"icmp ne ptr {error}, null"))  # it has no 64 bits
            return value

        def of_tensor() -> str:
            return level.load("i64", level.load("ptr", x, places.impl, "i8"), place, "i8")

        value = level.chosen(level.op(f"xor i1 {is_int}, true"), "0", integer, "i64")
        value = level.chosen(is_int, value, of_tensor, "i64")
        level.store("i64", value, numbers, k)
    results = top.at(numbers, reads, "i64")
    top.do(f"call void @evaluate(ptr {program}, i64 {steps}, ptr {numbers}, ptr {results})")
    with writer.loop("0", asked, 1, [("i64", "1")]) as (k, (so_far,), all_hold):
        level = writer.top
        bit = level.load("i64", numbers, level.load("i64", required, k))
        all_hold.append(level.op(f"and i64 {so_far}, {bit}"))
    top.leave(top.op(f"icmp eq i64 {all_hold[0]}, 0"), lambda: answered(top, total))


def _facts(level: Level, places: _Places, tensor: str) -> tuple[str, str, list[str]]:
    """The C++ tensor, autograd's part of it; whether it requires a gradient (1: as a leaf, 2: it
    was computed), and its words."""
    impl = level.load("ptr", tensor, places.impl, "i8")
    autograd = level.load("ptr", impl, places.autograd, "i8")
    part = autograd
    for at in (places.view, places.known):
        is_there = level.op(f"icmp ne i8 {_field(level, 'i8', part, at)}, 0")
        part = level.op(f"select i1 {is_there}, ptr {part}, ptr null")
    base = _field(level, "ptr", part, places.base)
    of_base = _own(level, places, _field(level, "ptr", base, places.autograd))
    own = _own(level, places, autograd)
    is_own = level.op(f"icmp ne i64 {own}, 0")
    requires = level.op(f"select i1 {is_own}, i64 {own}, i64 {of_base}")
    return impl, autograd, [requires, *(level.load("i64", impl, at, "i8") for at in places.words)]


def _own(level: Level, places: _Places, autograd: str) -> str:
    """`own` of _requires()."""
    node = _field(level, "i64", autograd, places.node)
    computed = level.op(f"select i1 {level.op(f'icmp ne i64 {node}, 0')}, i8 2, i8 0")
    requires = level.op(f"or i8 {_field(level, 'i8', autograd, places.requires)}, {computed}")
    return level.op(f"zext i8 {requires} to i64")


def _field(level: Level, kind: str, base: str, at: int) -> str:
    """What lies at a place in what a pointer leads to, 0 if it leads nowhere."""
    level.writer.declares["zero"] = "@zero = internal constant i64 0"
    none = level.op(f"icmp eq ptr {base}, null")
    place = level.op(f"select i1 {none}, ptr @zero, ptr {level.at(base, at)}")
    return level.load(kind, place)


@functools.cache
def available() -> bool:
    """Whether dicts have versions, and all else lies where it is looked for.

    Tried out, since a build may differ.
    """
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
    return len({first, second, third, _version(probe)}) == 4 and _places() is not None


def pointer(owner: Any, its: Any = None) -> int | None:
    """The address of the word that points to an object's `__dict__`, or to its class or the code of
    a function, if that is `its`; None if it is elsewhere."""
    if isinstance(its, type):
        return id(owner) + _OBJECT_CLASS
    if isinstance(its, types.CodeType):
        offset = _code_offset()
        return None if offset is None else id(owner) + offset
    kind = type(owner)
    offset = _MANAGED_DICT_OFFSET if kind.__flags__ & _MANAGED_DICT else kind.__dictoffset__
    if not offset or (offset < 0 and offset != _MANAGED_DICT_OFFSET):
        return None
    names = object.__getattribute__(owner, "__dict__")  # from now on it is an object
    return id(owner) + offset if word(id(owner) + offset) == id(names) else None


@functools.cache
def _code_offset() -> int | None:
    """Where a function has its code."""
    places = range(8, types.FunctionType.__basicsize__, 8)
    code = id(pointer.__code__)
    return next((k for k in places if word(id(pointer) + k) == code), None)


def can_watch(tensor: Tensor) -> bool:
    """Whether there is room for all that matters of a tensor, where things are `available`."""
    return tensor.dim() <= _MOST_DIMENSIONS


@functools.cache
def _places() -> _Places | None:
    """Found in this process's torch and tried out; None if something is not where it should be."""
    known = layout()
    if known is None:
        return None
    with (  # a first call may come within torch.vmap
        temporarily_clear_interpreter_stack(),
        torch.inference_mode(False),
        torch._C.DisableTorchFunction(),
    ):
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
        parameter.requires_grad_()
        with torch.enable_grad():
            result = parameter * 2
        computed, function = word(result._cdata + 8 * at[0]), result.grad_fn
        node = word(id(function) + _OBJECT_CLASS + 8)
        nodes = [k for k in range(0, _AUTOGRAD_BYTES, 8) if word(computed + k) == node]
        part = plain[1:]
        view = word(part._cdata + 8 * at[0])
        bases = [k for k in range(0, _VIEW_BYTES, 8) if word(view + k) == plain._cdata]
        if len(toggled) != 1 or len(nodes) != 1 or not bases:
            return None
        is_view, is_known = toggled[0] + _VIEW_BEHIND, bases[0] + _KNOWN_BEHIND
        if (_byte(view + is_view), _byte(view + is_known), _byte(autograd + is_view)) != (1, 1, 0):
            return None
        start = known.offset - 8 * _BEFORE
        after = known.offset + 8
        words = (*range(start, known.offset, 8), *range(after, after + 8 * _AFTER, 8))
        flags = toggled[0], nodes[0], is_view, bases[0], is_known
        places = _Places(known.impl, 8 * at[0], *flags, words)
        return places if _tells_apart(places) else None


def _tells_apart(places: _Places) -> bool:
    def facts(x: Tensor) -> list[int]:
        found = [word(x._cdata + at) for at in places.words]
        found[_FLAGS] &= _DTYPE_AND_DEVICE
        return found

    x = torch.zeros(2, 3, dtype=torch.float32)  # whatever a program has as its default
    others = [torch.zeros(3, 2), x.t(), x.double(), x.unsqueeze(0), x[:, :2], x.to("meta")]
    others += [torch.zeros(2, 3, dtype=torch.int32), x.as_strided((2, 3), (1, 2))]
    same = facts(x) == facts(torch.ones_like(x)) == facts(x.new_ones(9)[3:].view(2, 3))
    sizes = [word(x._cdata + at) for at in places.words[:3]] == [2, 2, 3]
    return same and sizes and all(facts(x) != facts(other) for other in others)


def _bytes(address: int) -> bytes:
    return bytes((ctypes.c_uint8 * _AUTOGRAD_BYTES).from_address(address))


# ---------------------------------------------------------------------------- weights
# What depends on parameters alone: computed once, and again when a parameter changes.
#
# Each call asks whether every parameter is the same object, with the same memory, the same
# `_version` and the same content at a few places. The last of these is for `p.data.mul_(2)`, which
# leaves no other trace; a change through `.data` that misses all the places looked at is not
# noticed. One builtin asks all of it for all parameters.
#
# A tensor that comes to live where a dead one was must not look the same. Weak references would
# tell, but torch refuses to swap the content of tensors that have one. Instead each snapshot keeps
# the parameters' version counters, and only these, alive: no other tensor can have the same ones.


# Words of 8 bytes looked at in each parameter: the first, the last, and between.
_PROBES = 4

_PLAIN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Derivation(NamedTuple):
    """One computation on parameters.

    inputs   positions of the parameters among the graph's inputs
    compute  from these parameters, detached, to the tensors that kernels and calls use
    """

    inputs: tuple[int, ...]
    compute: Callable[[list[Tensor]], Sequence[Tensor]]


class Snapshot:
    """All derived tensors as of some moment, and what tells whether they still hold.

    version  counts the snapshots of one set, from 1
    groups   what each Derivation computed; tensors: all of it, as DerivedSet arranges it
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
    """Keeps what several Derivations computed, for one compiled function.

    Does not keep its parameters alive. May be used from any thread; a call keeps the snapshot it
    got, whatever others change.

    arrange   from all that was computed, in the order of `derived`, to the tensors of a Snapshot
    snapshot  the latest; `same` tells whether it holds. The first one holds for no inputs
    """

    def __init__(
        self,
        derived: Sequence[Derivation],
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
            tensor = inputs[position]
            count = (
                sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                + 1
            )
            bytes_ = count * tensor.itemsize if tensor.numel() else 0
            probes = min(_PROBES, bytes_ // 8)
            step = (bytes_ - 8) // (probes - 1) if probes > 1 else 0
            single = bytes_ if bytes_ < 8 else 0
            words.extend([position, 0, 0, 0, 0, 0, 0, 0, tensor.data_ptr(), step, probes, single])
        if not self._can_follow(inputs):
            return words, []  # no row holds, so every call computes anew
        anchors = [inputs[position].detach() for position in self.positions]
        for anchor in anchors:  # they share version counters, but no memory
            anchor.data = torch.empty(0, dtype=anchor.dtype)
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


# A row: position among the inputs, then what is compared, then where to look at the content.
_ROW_WORDS = 12
_OBJECT = 1
_UNKNOWN = (0,) * _ROW_WORDS  # the first input, and no object that it would have to be


def _content(level: Level, start: str, step: str, probes: str, single: str) -> str:
    """A number made from words that lie `step` bytes apart, and from the first `single` bytes."""
    writer = level.writer
    begin = [("ptr", start), ("i64", "1")]
    with writer.loop("0", probes, 1, begin) as (_, (place, before), words):
        inner = writer.top
        mixed = inner.op(f"xor i64 {before}, {inner.load('i64', place)}")
        product = inner.op(f"mul i64 {mixed}, -7046029254386353131")
        high = inner.op(f"lshr i64 {product}, 29")
        words += [inner.at(place, step), inner.op(f"xor i64 {product}, {high}")]
    with writer.loop("0", single, 1, [("i64", words[1])]) as (k, (before,), found):
        inner = writer.top
        value = inner.op(f"zext i8 {inner.load('i8', start, k, 'i8')} to i64")
        found.append(inner.op(f"xor i64 {inner.op(f'mul i64 {before}, 257')}, {value}"))
    return found[0]


@Early
def same_as_recorded() -> Callable[[int, tuple[Tensor, ...], int], int]:
    """The builtin `same(state, inputs, fill)`.

    With fill 0: 0 if all rows at `state` still hold, else 1 + the first row that does not. With
    fill 1 it writes what it finds into the rows; every input that they name must be derivable.
    """
    known = layout()
    assert known is not None, "DerivedSet is only for tensors that are derivable"
    writer = Writer()
    top = writer.top
    top.leave(top.op("icmp ne i64 %count, 3"), lambda: raised(top, "TypeError", "three arguments!"))
    state = top.op(f"inttoptr i64 {number(top, 0)} to ptr")
    inputs, fill = argument(top, 1), top.op(f"icmp ne i64 {number(top, 2)}, 0")
    look = top.op(f"xor i1 {fill}, true")
    with writer.each("0", top.load("i64", state)) as k:
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
        with level.unless(look):
            level.store("ptr", x, place, _OBJECT)
            for n, fact in enumerate([*facts, content], 2):
                level.store("i64", fact, place, n)
    return builtin("same", answer(top, "0"))
