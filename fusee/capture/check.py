"""The check of one entry: facts about what dicts hold are watched, the others are looked at.

Most facts of a model are about the attributes and parameters of its modules. Where dicts have
versions (runtime/watch.py) all of these together are one call, as long as nothing changed; after a
change they are looked at once, and noted anew.
"""

from __future__ import annotations

import collections
import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import torch

from fusee.capture.facts import At, Fact, Facts
from fusee.capture.origin import Dict, Held, Item, Origin
from fusee.runtime.watch import Watch, available, can_watch, changed

__all__ = ["compile_check"]

_FEW = 8  # facts that are looked at as quickly as they are watched
_DICTS = (dict, collections.OrderedDict)
_UNCHANGING = (*_DICTS, list, tuple, set, frozenset)  # classes that an instance cannot leave


def compile_check(
    facts: Facts, parameters: list[str], names: dict[str, Any], conditions: list[str]
) -> tuple[Callable[..., bool], Callable[[], str]]:
    """The check as a function of the locals, and what gives its source.

    conditions   about global state, with `names` for what they use
    """
    if not available():
        return _plainly(facts, parameters, names, conditions)
    watched, others = _Watched(facts.kinds), Facts(kinds=facts.kinds)
    for fact in facts.rows:
        (watched.facts if watched.takes(fact) else others).rows.append(fact)
    if len(watched.facts.rows) < _FEW:
        return _plainly(facts, parameters, names, conditions)
    watched.start()
    more = {"_changed": changed(), "_watched": watched}
    condition = "_changed(_watched.address) < 0 or _watched.look()"
    check, text = others.compile(parameters, {**names, **more}, [*conditions, condition])
    return check, lambda: f"{text}\n# _watched.look():\n{watched.compiled[1]}"


def _plainly(
    facts: Facts, parameters: list[str], names: dict[str, Any], conditions: list[str]
) -> tuple[Callable[..., bool], Callable[[], str]]:
    check, text = facts.compile(parameters, names, conditions)
    return check, lambda: text


class _Watched:
    """Facts that hold as long as some dicts do not change."""

    def __init__(self, kinds: dict[Origin, type]) -> None:
        self.facts = Facts(kinds=kinds)
        self.address = 0
        self._dicts: dict[int, tuple[Origin, dict[Any, Any]]] = {}
        self._tensors: list[tuple[Origin, torch.Tensor]] = []

    def takes(self, fact: Fact) -> bool:
        """Whether the fact follows from what dicts hold; notes which ones."""
        if fact.kind in ("absent", "keys", "length"):
            return self._dict(fact.origin) is not None
        if not isinstance(fact.origin, Item) or isinstance(fact.value, (At, set)):
            return False
        names = self._dict(fact.origin.of)
        if names is None:
            return False
        if fact.kind == "tensor":
            tensor = names[fact.origin.key]
            if can_watch(tensor):
                self._tensors.append((fact.origin, tensor))
            return can_watch(tensor)
        if fact.kind not in ("is", "equals", "type", "empty"):
            return False
        if fact.kind == "type":
            return fact.value in _UNCHANGING
        return fact.kind != "empty" or self._dict(fact.origin) is not None

    def start(self) -> None:
        """Begin to watch. The facts hold now."""
        self._watch_anew()

    def _watch_anew(self) -> None:
        dicts = [one for _, one in self._dicts.values()]
        self._watch = Watch(dicts, [tensor for _, tensor in self._tensors])
        self.address = self._watch.address

    def look(self) -> bool:
        """Look at all facts, since a dict changed. If they hold, that is what is watched for."""
        if not self.compiled[0]():
            return False
        before = [*self._dicts.values(), *self._tensors]
        self._dicts = {}
        for origin, one in before:
            if not isinstance(one, torch.Tensor):
                self._dict(origin)
        self._tensors = [(origin, self._object(origin)) for origin, _ in self._tensors]
        after = [*self._dicts.values(), *self._tensors]
        if len(after) == len(before) and all(x is y for (_, x), (_, y) in zip(before, after)):
            self._watch.note()
        else:
            self._watch_anew()
        return True

    @functools.cached_property
    def compiled(self) -> tuple[Callable[..., bool], str]:
        """All facts as a function, made when first needed: most dicts never change."""
        return self.facts.compile([], {}, [])

    # ---------------------------------------------------------------------- dicts

    def _dict(self, origin: Origin) -> dict[Any, Any] | None:
        """The dict at an origin that only held objects and watched dicts lead to."""
        found: Any = None
        if isinstance(origin, Held):
            found = origin.value
            if isinstance(found, types.MappingProxyType):
                found = next((x for x in gc.get_referents(found) if type(x) is dict), None)
        elif isinstance(origin, Dict):
            found = getattr(self._object(origin.of), "__dict__", None)
        elif isinstance(origin, Item):
            found = self._object(origin)
        if type(found) not in _DICTS:
            return None
        self._dicts.setdefault(id(found), (origin, found))
        return found  # type: ignore[no-any-return]

    def _object(self, origin: Origin) -> Any:
        if isinstance(origin, Held):
            return origin.value
        if isinstance(origin, Item):
            names = self._dict(origin.of)
            return None if names is None else names.get(origin.key)
        return None
