"""Checks without Python: what facts were found through, and functions that take tensors alone.

Most facts of a model are about the attributes and parameters of its modules. Where dicts have
versions (runtime/change_detection.py) all of these together are one call, as long as nothing
changed. Of a dict that changed the items that facts lead through are looked at. If one of them is
another object, and the facts hold, a program replaces it at each call, such as a state: facts about
it are looked at in each call from then on. The check of tensors alone is one builtin.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import itertools
import types
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusee.capture.frame import ABSENT
from fusee.capture.sources import Dict, Held, Item, Origin, of_code
from fusee.capture.torch_api import forward_level, has_global_hooks
from fusee.runtime.change_detection import CheckTable, Watch, can_watch, changed, compare, pointer
from fusee.runtime.jit import answer, answered, bound, builtin, symbol
from fusee.runtime.llvm_text import Level, Writer, evaluation

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_UNCHANGING = (*_DICTS, list, tuple, set, frozenset)  # classes that an instance cannot leave
_PLAIN = (int, bool, str, float)
_A_FLOAT = object()  # stands for any float


class Watched:
    """What was there when each fact said what it was found through.

    replaced   what is not watched, and grows by what is seen to be other objects though all facts
               hold: a container's id and a key; None: a list wholly
    _through   by dict: what it holds where facts lead through it, ABSENT included
    _wholly    by dict: its keys, where they are a fact
    """

    def __init__(self, replaced: set[tuple[int, Any]]) -> None:
        self.address = 0
        self.replaced = replaced
        self._forget()

    def _forget(self) -> None:
        self._dicts: dict[int, dict[Any, Any]] = {}
        self._lists: dict[int, list[Any]] = {}
        self._owners: dict[tuple[int, Any], tuple[Any, Any]] = {}
        self._tensors: list[torch.Tensor] = []
        self._through: dict[int, dict[Any, Any]] = {}
        self._wholly: dict[int, tuple[Any, ...]] = {}
        self._objects: dict[Origin, Any] = {}

    # ---------------------------------------------------------------------- facts
    # Whether it is seen when something is no more as it is now.

    def reaches(self, *origins: Origin) -> bool:
        """That other objects lie at some origins."""
        return all(self._object(origin) is not ABSENT for origin in origins)

    def whole(self, origin: Origin) -> Any:
        """What a container has; gives the container, or None."""
        whole = self._container(origin)
        if isinstance(whole, dict):
            self._wholly[id(whole)] = tuple(whole)
        return whole

    def without(self, origin: Origin, key: Any) -> bool:
        """That a dict has a key."""
        whole = self._container(origin)
        if isinstance(whole, dict):
            self._through[id(whole)][key] = ABSENT
        return isinstance(whole, dict)

    def any_float(self, origin: Item) -> bool:
        """That an item of a dict is no float."""
        of = self._container(origin.of)
        if isinstance(of, dict):
            self._through[id(of)].setdefault(origin.key, _A_FLOAT)
        return isinstance(of, dict)

    def stays(self, origin: Origin) -> bool:
        """That what lies there is of another class."""
        found = self._object(origin)
        if isinstance(origin, Held):  # so it lives as long as this
            self._owners[id(found), type(found)] = found, type(found)
        return found is not ABSENT and (isinstance(origin, Held) or type(found) in _UNCHANGING)

    def tensor(self, origin: Origin) -> bool:
        """That a tensor has other sizes."""
        found = self._object(origin)
        if is_seen := found is not ABSENT and can_watch(found):
            self._tensors.append(found)
        return is_seen

    # ---------------------------------------------------------------------- changes

    def start(self, facts: Any) -> None:
        """Begin to watch what these Facts, which hold now, were found through."""
        self._facts, self._objects, self._is_over = facts, {}, False
        self._may_hold: Callable[[], bool] | None = None  # the check of the fact that was missed
        dicts, lists, owners = (
            [*some.values()] for some in (self._dicts, self._lists, self._owners)
        )
        self._watch = Watch(dicts, self._tensors, lists, owners)
        self.address = self._watch.address

    def look(self) -> bool:
        """Whether the facts hold, since something that is watched has changed. False, too, from
        when something was replaced: a new check, which does not watch it, is to be made."""
        if self._is_over:
            return False
        if self._may_hold is not None and not self._may_hold():
            return False  # what it missed the last time is still missing
        while (k := changed()(self.address)) >= 0:
            if k >= len(self._watch.dicts) or not self._is_as_it_was(self._watch.dicts[k]):
                if self._facts.misses({}):
                    missed = replace(self._facts, rows=[self._facts.missed])
                    self._may_hold, _ = missed.compile([], {})
                    return False
                if replaced := {*self._others()}:
                    self._is_over = True
                    self.replaced |= replaced
                    return False
                self._forget()
                for fact in self._facts.rows:
                    fact.watched(self)
                self.start(self._facts)
                return True
            self._watch.note(k)
        return True

    def _is_as_it_was(self, names: dict[Any, Any]) -> bool:
        """Whether facts lead to the same objects through a dict as before."""
        if not all(_is_like(names, key, was) for key, was in self._through[id(names)].items()):
            return False
        keys = self._wholly.get(id(names))
        return keys is None or keys == tuple(names)

    def _others(self) -> Iterator[tuple[int, Any]]:
        """What is another object than before, in containers that are the same ones."""
        for names in self._watch.dicts:
            through = self._through[id(names)].items()
            yield from ((id(names), x) for x, was in through if not _is_like(names, x, was))
        yield from ((id(some), None) for some in self._watch.changed_lists())

    # ---------------------------------------------------------------------- containers

    def _container(self, origin: Origin) -> dict[Any, Any] | list[Any] | tuple[Any, ...] | None:
        """The container at an origin that only held objects and what is watched lead to."""
        found = self._object(origin)
        if isinstance(found, types.MappingProxyType) and isinstance(origin, Held):
            found = next((x for x in gc.get_referents(found) if type(x) is dict), None)
        if type(found) in _DICTS:
            self._dicts[id(found)] = found
            self._through.setdefault(id(found), {})
        elif type(found) is list and (id(found), None) not in self.replaced:
            self._lists[id(found)] = found
        elif type(found) is not tuple:
            return None
        return found  # type: ignore[no-any-return]

    def _object(self, origin: Origin) -> Any:
        """What is there; ABSENT if nothing is, or nothing that is watched leads there."""
        for part in origin.beyond(self._objects):  # what is a part of the next comes first
            self._objects[part] = self._part(part)
        return self._objects[origin]

    def _part(self, origin: Origin) -> Any:
        if isinstance(origin, Item):  # as most are
            return self._item(origin)
        if isinstance(origin, Held):
            return origin.value
        if (function := of_code(origin)) and pointer(function, function.__code__):
            code = function.__code__
            return self._owners.setdefault((id(function), code), (function, code))[1]
        if isinstance(origin, Dict):
            owner = self._object(origin.of)
            if owner is ABSENT or pointer(owner) is None:
                return ABSENT  # another `__dict__` could not be noticed
            found = owner, object.__getattribute__(owner, "__dict__")
            return self._owners.setdefault((id(owner), None), found)[1]
        return ABSENT

    def _item(self, origin: Item) -> Any:
        of = self._container(origin.of)
        if of is None or (id(of), origin.key) in self.replaced:
            return ABSENT
        if isinstance(of, dict):
            found = self._through[id(of)][origin.key] = dict.get(of, origin.key, ABSENT)
            return found
        return of[origin.key] if origin.key in range(len(of)) else ABSENT


def _is_like(names: dict[Any, Any], key: Any, was: Any) -> bool:
    """Whether an item of a dict is the same object, or an equal number or text."""
    now = dict.get(names, key, ABSENT)
    if now is was or (was is _A_FLOAT and type(now) is float):
        return True
    return type(now) is type(was) and type(now) in _PLAIN and repr(now) == repr(was)


_MOST, _BYTE, _AT, _NO = (1 << 64) - 1, 0xFF, 0, -1
_KEYS: Any = torch._C.DispatchKey
_FRONT = int(_KEYS.FuncTorchDynamicLayerFrontMode)
# Of torch's state on a thread: functions of C++, each with its argument, or what gives that, and
# the bits of its answer; or the word at that address, or its opposite. Adapter to these names of
# libc10 and libtorch, tested with torch 2.11 and 2.13; without one of them there is no quick check.
_STATE: dict[str, list[tuple[str, int | str, int]]] = {
    "grad": [("_ZN3c108GradMode10is_enabledEv", 0, _BYTE)],
    "inference": [("_ZN3c1013InferenceMode10is_enabledEv", 0, _BYTE)],
    "default": [("_ZN3c1031get_default_dtype_as_scalartypeEv", 0, _BYTE)],
    "transforms": [("_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE", _FRONT, _BYTE)],
    "traced": [("_ZN5torch3jit6tracer15getTracingStateEv", 0, _AT)],
    "dispatching": [("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", 0, _MOST)],
    "modes": [("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", 0, _MOST)],
    "autocast": [  # its keys are excluded where it is off
        ("_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE", int(key), _NO)
        for name, key in _KEYS.__members__.items()
        if name.startswith("Autocast")
    ],
    "cache": [("_ZN2at8autocast25is_autocast_cache_enabledEv", 0, _BYTE)],
    **{
        f"as_{device}": [("_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE", kind, _BYTE)]
        for kind, device in enumerate(("cpu", "cuda"))  # as c10::DeviceType has them
    },
    "deterministic": [
        ("_ZNK2at7Context23deterministicAlgorithmsEv", "_ZN2at13globalContextEv", _BYTE)
    ],
}
_DICT_SIZE = 16  # bytes, after the reference count and the type


def quick_check(
    state: Mapping[str, Any],
    found: Sequence[tuple[dict[str, Any], str, Any]],
    codes: Sequence[tuple[types.FunctionType, types.CodeType]],
    table: CheckTable,
) -> Callable[..., int] | None:
    """`differs` of the arguments, which are the table's elements, as a builtin; it gives -1 if also

    state   torch's, as `state_conditions` has it, is so
    found   each dict holds this at its key
    codes   each function has this code

    It keeps none of them alive. None where not all of that is where it is looked for.
    """
    owned = [(pointer(*row) or 0, id(row[1])) for row in codes]
    if "hooked" in state:
        owned += ((id(x) + _DICT_SIZE, 0) for x in has_global_hooks.args[0])
    rows = [(name, row) for name in state for row in _STATE.get(name, ())]
    calls = tuple(row for _, row in rows)
    names = (x for call in calls for x in call if isinstance(x, str))
    is_known = state.keys() <= {*_STATE, "hooked", "forward"} and not state.get("hooked")
    if not is_known or not owned[0][0] or not all(map(symbol, names)):
        return None
    wanted, kind = [], ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)
    for name, (function, given, bits) in rows:
        x = state[name]  # a dtype as its number in C++
        is_dtype = isinstance(x, torch.dtype)
        wanted.append(kind(symbol(function) or 0)(given) & bits if is_dtype else int(x or 0))
    found = [*found, *([(*forward_level, state["forward"])] if "forward" in state else [])]
    words = [*wanted, len(owned), *itertools.chain(*owned)]
    words += [len(found), *(id(x) for row in found for x in row), *table.words]
    made: Callable[..., int] = bound(_quick(calls), array("Q", words).tobytes())
    return made


@functools.cache
def _quick(calls: Sequence[tuple[str, int | str, int]]) -> Any:
    """Of what `quick_check` gives; `self` are its words, as bytes.

    Its calls are written out: as a loop over addresses they take three times as long.
    """
    writer = Writer()
    top = writer.top
    table = top.at("%self", bytes.__basicsize__ - 1)

    for k, (function, given, bits) in enumerate(calls):
        of = top.call("i64", given) if isinstance(given, str) else str(given)
        result = top.call("i64", function, ("i64", of))
        if bits == _AT:
            result = top.load("i64", top.op(f"inttoptr i64 {result} to ptr"))
        elif bits != _MOST:
            result = top.op(f"and i64 {result}, {_BYTE}")
        if bits == _NO:
            result = top.op(f"xor i64 {result}, 1")
        is_other = top.op(f"icmp ne i64 {result}, {top.load('i64', table, k)}")
        top.leave(is_other, lambda: answered(top, "0"))

    def each(at: str, width: int, differs: Callable[[Level, str], str]) -> str:
        """Leaves if one of the rows of words at `at` differs; where what follows them begins."""
        kind, count, first = f"[{width} x i64]", top.load("i64", at), top.at(at, 8)
        with writer.each("0", count) as k:
            level = writer.top
            is_other = differs(level, level.at(first, k, kind))
            level.leave(is_other, lambda: answered(level, "0"))
        return top.at(first, count, kind)

    def word_at(level: Level, at: str) -> str:
        here = level.load("i64", level.load("ptr", at))
        return level.op(f"icmp ne i64 {here}, {level.load('i64', at, 1)}")

    def found(level: Level, at: str) -> str:
        names, key, wanted = (level.load("ptr", at, n) for n in range(3))
        here = level.call("ptr", "PyDict_GetItemWithError", ("ptr", names), ("ptr", key))
        return level.op(f"icmp ne ptr {here}, {wanted}")

    rest = each(each(top.at(table, len(calls), "i64"), 2, word_at), 3, found)
    compare(writer, rest, "%args")
    return builtin("quick", evaluation() + answer(top, "-1"))
