"""What dicts give: items, and what `__missing__` makes of keys that are not there.

C code would run the `__missing__` of a class, or the factory of a defaultdict, out of the machine's
sight.
"""

from __future__ import annotations

import collections
from typing import Any

from fusee.capture import grads
from fusee.capture.attributes import ask
from fusee.capture.capturing import AS_NUMBERS, COMPARED, Capturing
from fusee.capture.facts import ABSENT
from fusee.capture.torch_api import FakeTensor
from fusee.capture.world import is_scalar

__all__ = ["METHODS", "item"]


def item(m: Capturing, container: dict[Any, Any], key: Any) -> Any:
    """What `dict.__getitem__` does."""
    found = _there(m, container, key)
    if found is ABSENT:
        found = ask(m, container, "__missing__", key)
    if found is ABSENT and isinstance(container, collections.defaultdict):
        return _made(m, container, key)
    if found is ABSENT:
        raise KeyError(key)
    return found


def _there(m: Capturing, container: dict[Any, Any], key: Any) -> Any:
    if not m.is_outside(container):
        m.look((key,), COMPARED + AS_NUMBERS)
        return dict.get(container, m.plain(key), ABSENT)
    mirror = m.world.mirror(container)
    if isinstance(key, FakeTensor) and mirror.copy is None and not mirror.writes:
        return grads.item_by_tensor(m, mirror, key)
    if not is_scalar(key) and mirror.copy is None:
        m.world.whole(container)
    return m.world.get(mirror, key)


def _made(m: Capturing, container: Any, key: Any) -> Any:
    """What `defaultdict.__missing__` does."""
    factory = m.world.slot(container, "default_factory")
    if factory is None:
        raise KeyError(key)
    value = m.call(factory, (), {})
    m.store_subscript(container, key, value)
    return value


# Methods in C that are these.
METHODS = {"__getitem__": item, "__missing__": _made}
