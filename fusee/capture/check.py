"""The check of one entry: facts about what dicts hold are watched, the others are looked at.

Most facts of a model are about the attributes and parameters of its modules. Where dicts have
versions (runtime/watch.py) all of these together are one call, as long as nothing changed. Of a
dict that changed the items that facts lead through are looked at; if one of them is another object,
all facts are, and noted anew. Facts about tensors that are new at each call are one call too.
"""

from __future__ import annotations

import collections
import functools
import gc
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusee.capture.expressions import Source
from fusee.capture.facts import ABSENT, At, Distinct, Fact, Facts, TensorFact
from fusee.capture.origin import Attr, Dict, Held, Item, Origin
from fusee.runtime import collector
from fusee.runtime.watch import Table, Watch, available, can_watch, changed, differs, pointer

__all__ = ["compile_check"]

_FEW = 8  # facts that are looked at as quickly as they are watched
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_UNCHANGING = (*_DICTS, list, tuple, set, frozenset)  # classes that an instance cannot leave
_PLAIN = (int, bool, str, float)
_A_FLOAT = object()  # stands for any float


@collector.paused()
def compile_check(
    facts: Facts,
    parameters: list[str],
    names: dict[str, Any],
    conditions: list[str],
    values: Mapping[str, Any],
) -> tuple[Callable[..., bool], Callable[[], str]]:
    """The check as a function of the locals, and what gives its source.

    conditions   about global state, with `names` for what they use
    values       the locals, for which all facts hold now
    """
    if not available():
        check, text = facts.compile(parameters, names, conditions)
        return check, lambda: text
    watched, others = _Watched(facts.kinds), Facts(kinds=facts.kinds)
    for fact in facts.rows:
        (watched.facts if watched.takes(fact) else others).rows.append(fact)
    if len(watched.facts.rows) < _FEW:
        watched, others = _Watched(facts.kinds), Facts(facts.rows, facts.kinds)
    fresh = _fresh(others, values)
    if watched.facts.rows:
        watched.start()
        names = {**names, "_changed": changed(), "_watched": watched}
        conditions = [*conditions, "_changed(_watched.address) < 0 or _watched.look()"]
    if fresh is not None:
        others.listed = [fact.origin for fact in fresh[0]]
        names = {**names, "_differs": differs(), "_table": fresh[1]}
    check, text = others.compile(parameters, names, conditions)

    def source() -> str:
        if fresh is None and not watched.facts.rows:
            return text
        seen = [] if fresh is None else [f"# _table: {fact}" for fact in fresh[0]]
        looked = watched.compiled[1] if watched.facts.rows else ""
        return "\n".join([text, *seen, "# _watched.look():", looked])

    return check, source


def _fresh(others: Facts, values: Mapping[str, Any]) -> tuple[list[Fact], Table] | None:
    """Takes facts about tensors out of `others` that one call of machine code looks at.

    None if they are few.
    """
    source = Source(others.kinds)
    source.bind(values)
    taken: list[Fact] = []
    found: list[torch.Tensor | None] = []
    for fact in others.rows:
        known, is_grad = fact.value, isinstance(fact.origin, Attr) and fact.origin.name == "grad"
        if fact.kind == "tensor" and isinstance(known, TensorFact):
            if known.requires_grad and not issubclass(known.kind, torch.nn.Parameter):
                continue  # whether it is a leaf matters too
            tensor = source.value(fact.origin)
            if can_watch(tensor):
                taken.append(fact)
                found.append(tensor)
        elif fact.kind == "equals" and known is None and is_grad:
            taken.append(fact)
            found.append(None)
    if len(taken) < _FEW:
        return None
    gone = set(map(id, taken))
    others.rows = [fact for fact in others.rows if id(fact) not in gone]
    return taken, Table(found)


class _Watched:
    """Facts that hold as long as some dicts, lists and tensors do not change.

    _through   by dict: what it holds where facts lead through it, ABSENT included
    _wholly    by dict: its keys, where they are a fact
    """

    def __init__(self, kinds: dict[Origin, type]) -> None:
        self.facts = Facts(kinds=kinds)
        self.address = 0
        self._forget()

    def _forget(self) -> None:
        self._dicts: dict[int, dict[Any, Any]] = {}
        self._lists: dict[int, list[Any]] = {}
        self._owners: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._tensors: list[torch.Tensor] = []
        self._through: dict[int, dict[Any, Any]] = {}
        self._wholly: dict[int, tuple[Any, ...]] = {}
        self._objects: dict[Origin, Any] = {}

    def takes(self, fact: Fact) -> bool:
        """Whether the fact follows from what is watched; notes what that is."""
        if fact.kind in ("absent", "keys", "length"):
            return self._takes_whole(fact)
        if fact.kind == "not" and isinstance(fact.value, At):
            found = self._object(fact.origin), self._object(fact.value.origin)
            return found[0] is not ABSENT and found[1] is not ABSENT
        if isinstance(fact.value, Distinct):
            parts = [self._object(x) for x in (*fact.value.written, *fact.value.others)]
            return all(part is not ABSENT for part in parts)
        if not isinstance(fact.origin, (Item, Dict)) or isinstance(fact.value, (At, set)):
            return False
        if isinstance(fact.origin, Item) and fact.kind == "type" and fact.value is float:
            of = self._container(fact.origin.of)
            if isinstance(of, dict):
                self._through[id(of)].setdefault(fact.origin.key, _A_FLOAT)
            return isinstance(of, dict)
        found = self._object(fact.origin)
        if found is ABSENT:
            return False
        if fact.kind == "tensor":
            if can_watch(found):
                self._tensors.append(found)
            return can_watch(found)
        if fact.kind not in ("is", "equals", "type", "empty"):
            return False
        if fact.kind == "type":
            return fact.value in _UNCHANGING
        return fact.kind != "empty" or self._takes_whole(fact)

    def _takes_whole(self, fact: Fact) -> bool:
        whole = self._container(fact.origin)
        if isinstance(whole, dict):
            if fact.kind == "absent":
                self._through[id(whole)][fact.value] = ABSENT
            else:
                self._wholly[id(whole)] = tuple(whole)
        return whole is not None and (fact.kind == "length" or isinstance(whole, dict))

    def start(self) -> None:
        """Begin to watch. The facts hold now."""
        self._objects = {}
        dicts, lists, owners = (
            [*some.values()] for some in (self._dicts, self._lists, self._owners)
        )
        self._watch = Watch(dicts, self._tensors, lists, owners)
        self.address = self._watch.address

    def look(self) -> bool:
        """Whether the facts hold, since something that is watched has changed."""
        while (k := changed()(self.address)) >= 0:
            if k >= len(self._watch.dicts) or not self._is_as_it_was(self._watch.dicts[k]):
                return self._look_at_all()
            self._watch.note(k)
        return True

    def _is_as_it_was(self, names: dict[Any, Any]) -> bool:
        """Whether facts lead to the same objects through a dict as before."""
        for key, was in self._through[id(names)].items():
            now = dict.get(names, key, ABSENT)
            if now is was or (was is _A_FLOAT and type(now) is float):
                continue
            if type(now) is not type(was) or type(now) not in _PLAIN or repr(now) != repr(was):
                return False
        keys = self._wholly.get(id(names))
        return keys is None or keys == tuple(names)

    def _look_at_all(self) -> bool:
        if not self.compiled[0]():
            return False
        self._forget()
        for fact in self.facts.rows:
            self.takes(fact)
        self.start()
        return True

    @functools.cached_property
    def compiled(self) -> tuple[Callable[..., bool], str]:
        """All facts as a function, made when first needed: most dicts never change."""
        return self.facts.compile([], {}, [])

    # ---------------------------------------------------------------------- containers

    def _container(self, origin: Origin) -> dict[Any, Any] | list[Any] | tuple[Any, ...] | None:
        """The container at an origin that only held objects and what is watched lead to."""
        found = self._object(origin)
        if isinstance(found, types.MappingProxyType) and isinstance(origin, Held):
            found = next((x for x in gc.get_referents(found) if type(x) is dict), None)
        if type(found) in _DICTS:
            self._dicts[id(found)] = found
            self._through.setdefault(id(found), {})
        elif type(found) is list:
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
        if isinstance(origin, Held):
            return origin.value
        if isinstance(origin, Dict):
            return self._dict_of(self._object(origin.of))
        of = self._container(origin.of) if isinstance(origin, Item) else None
        if of is None or not isinstance(origin, Item):
            return ABSENT
        if isinstance(of, dict):
            found = self._through[id(of)][origin.key] = dict.get(of, origin.key, ABSENT)
            return found
        return of[origin.key] if origin.key in range(len(of)) else ABSENT

    def _dict_of(self, owner: Any) -> Any:
        """The `__dict__` that an object has now; ABSENT if another could not be noticed."""
        if id(owner) not in self._owners:
            if owner is ABSENT or pointer(owner) is None:
                return ABSENT
            self._owners[id(owner)] = owner, object.__getattribute__(owner, "__dict__")
        return self._owners[id(owner)][1]
