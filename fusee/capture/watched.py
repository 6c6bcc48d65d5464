"""What facts were found through: whether one of these dicts, lists and tensors has changed.

Most facts of a model are about the attributes and parameters of its modules. Where dicts have
versions (runtime/change_detection.py) all of these together are one call, as long as nothing
changed. Of a dict that changed the items that facts lead through are looked at; if one of them
is another object, all facts are, and noted anew.
"""

from __future__ import annotations

import collections
import gc
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.capture.frame import ABSENT
from fusee.capture.sources import Dict, Held, Item, Origin
from fusee.runtime.change_detection import Watch, can_watch, changed, pointer

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
UNCHANGING = (*_DICTS, list, tuple, set, frozenset)  # classes that an instance cannot leave
_PLAIN = (int, bool, str, float)
_A_FLOAT = object()  # stands for any float


class Watched:
    """What was there when each fact said what it was found through.

    _through   by dict: what it holds where facts lead through it, ABSENT included
    _wholly    by dict: its keys, where they are a fact
    """

    def __init__(self) -> None:
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

    def tensor(self, origin: Origin) -> bool:
        """That a tensor has other sizes."""
        found = self._object(origin)
        if is_seen := found is not ABSENT and can_watch(found):
            self._tensors.append(found)
        return is_seen

    # ---------------------------------------------------------------------- changes

    def start(self, facts: Sequence[Any], check: Callable[[], bool]) -> None:
        """Begin to watch. The facts hold now; `check` looks at all of them."""
        self._facts, self._check, self._objects = facts, check, {}
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
        if not self._check():
            return False
        self._forget()
        for fact in self._facts:
            fact.watched(self)
        self.start(self._facts, self._check)
        return True

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
            owner = self._object(origin.of)
            if owner is ABSENT or pointer(owner) is None:
                return ABSENT  # another `__dict__` could not be noticed
            found = owner, object.__getattribute__(owner, "__dict__")
            return self._owners.setdefault(id(owner), found)[1]
        of = self._container(origin.of) if isinstance(origin, Item) else None
        if of is None or not isinstance(origin, Item):
            return ABSENT
        if isinstance(of, dict):
            found = self._through[id(of)][origin.key] = dict.get(of, origin.key, ABSENT)
            return found
        return of[origin.key] if origin.key in range(len(of)) else ABSENT
