"""Attributes that a `__getattribute__` in Python gave before, of objects from outside.

Running it again for each layer that reads `config.hidden_size` would give the same, under the same
guards, as long as it only reads, and nothing that it has read was written to.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from fusee.capture.bytecode import only_reads
from fusee.capture.frame import is_scalar
from fusee.capture.mirrors import Mirror
from fusee.capture.sources import is_trusted

_IN_C = {super, isinstance, getattr, hasattr, vars(object)["__getattribute__"]}
_KINDS = type, types.BuiltinFunctionType, types.WrapperDescriptorType


class Mirrors(dict[int, Mirror]):
    """The mirrors of a world, by id of what they are of.

    read     those that the method which runs has asked for; None: none runs, or it does more
    given    by method, object and name: what it gave, and the mirrors that it had asked for
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Mirror] | None = None
        self.given: dict[tuple[Any, int, str], tuple[Any, list[Mirror]]] = {}

    def get(self, key: int, default: Any = None) -> Mirror | None:  # type: ignore[override]
        found: Mirror | None = super().get(key, default)
        if self.read is not None and found is not None:
            self.read.append(found)
        return found

    def __setitem__(self, key: int, mirror: Mirror) -> None:
        super().__setitem__(key, mirror)
        if self.read is not None:
            self.read.append(mirror)

    def called(self, function: Any, stand: Any) -> None:
        """A method that runs calls this; `stand` stands in for it."""
        if type(function) is types.FunctionType:
            is_known = stand is None and not is_trusted(function.__module__)
            is_known = is_known and only_reads(function.__code__)
        elif type(function) in _KINDS:
            is_get = type(getattr(function, "__self__", None)) is dict
            is_known = function in _IN_C or (is_get and function.__name__ == "get")
        else:
            is_known = type(function) is types.MethodType
        if not is_known:
            self.read = None


def got(m: Any, method: Callable[..., Any], obj: Any, name: str) -> Any:
    """`method(obj, name)`, a method that is called `__getattribute__`."""
    mirrors: Mirrors = m.world.mirrors
    key, outer = (method, id(obj), name), mirrors.read
    value, known = mirrors.given.get(key, (None, None))
    try:
        if known is None or not _hold(m, known):
            mirrors.read = []
            value = m.call(method, obj, name)
            known = mirrors.read
            is_outside = m.world.passed_from(obj) is not None
            if known is not None and is_outside and is_scalar(value) and _hold(m, known):
                mirrors.given[key] = value, known
        else:
            mirrors.read = known
        return value
    finally:  # what an outer one reads
        known, mirrors.read = mirrors.read, None
        if outer is not None and known is not None:
            mirrors.read = outer + known


def _hold(m: Any, known: list[Mirror]) -> bool:
    """Whether nothing was written to what these show."""
    is_changed = any(x.copy is not None or x.writes or x.tail or x.done for x in known)
    return not is_changed and not m.world.slots
