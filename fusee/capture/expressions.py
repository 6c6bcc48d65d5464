"""Python source of expressions over origins: what checks and rebuilding code are written with."""

from __future__ import annotations

import builtins
import collections
import types
from collections.abc import Mapping
from typing import Any

from fusee.capture.origin import Dict, Held, Item, Origin, variable

__all__ = ["Source"]

_CONTAINERS = (list, dict, set, tuple, collections.deque)
_ACTS_ALONE = {*_CONTAINERS, collections.OrderedDict}


class Source:
    """Python source of expressions over origins, with the constants they need.

    An origin that is used more than once is a variable; those of held objects are constants.

    kinds   the classes of containers, by origin
    known   names of variables that are there, by origin
    """

    def __init__(
        self, kinds: dict[Origin, type] | None = None, known: dict[Origin, str] | None = None
    ) -> None:
        self.kinds = kinds or {}
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self._constants: dict[int, str] = {}
        self._variables = known or {}
        self._values: dict[Origin, Any] = {}

    def bind(self, values: Mapping[str, Any]) -> None:
        """Let `now` find the program's variables."""
        self.names.update({variable(name): x for name, x in values.items()})

    def constant(self, value: Any) -> str:
        """A name, or a literal, for `value`."""
        if value is None or isinstance(value, bool) or type(value) is int or type(value) is str:
            return repr(value)
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = f"_k{len(self._constants)}"
            self.names[name] = value
        return name

    def python(self, name: str) -> str:
        """A name for a builtin that no parameter of the user's hides."""
        self.names[f"_{name}"] = getattr(builtins, name)
        return f"_{name}"

    def expression(self, origin: Origin) -> str:
        """Source of the object at `origin`; what it is a part of becomes a variable."""
        found = self._variables.get(origin)
        if found is not None:
            return found
        return self.code(origin, "" if origin.parent is None else self.variable(origin.parent))

    def code(self, origin: Origin, parent: str) -> str:
        """Source of the object at `origin`, given that of what it is a part of."""
        if isinstance(origin, Item):
            raw, key = self.raw(origin.of), self.constant(origin.key)
            return f"{raw}.__getitem__({parent}, {key})" if raw else origin.code(parent, key)
        if isinstance(origin, Dict):
            asks = getattr(self._kind(origin.of), "__getattribute__", None)
            if isinstance(asks, types.FunctionType):  # the user's
                return f"{self.python('object')}.__getattribute__({parent}, '__dict__')"
        constant = "" if origin.constant is None else self.constant(origin.constant)
        return origin.code(parent, constant)

    def raw(self, origin: Origin) -> str:
        """The class in C below a container's class, which may act in Python; else "".

        Guards must neither run the user's code nor make what a defaultdict lacks.
        """
        kind = self._kind(origin)
        if kind is None or kind in _ACTS_ALONE or not issubclass(kind, _CONTAINERS):
            return ""
        return self.constant(next(base for base in kind.__mro__ if base in _ACTS_ALONE))

    def _kind(self, origin: Origin) -> type | None:
        return type(origin.value) if isinstance(origin, Held) else self.kinds.get(origin)

    def variable(self, origin: Origin) -> str:
        """A name that holds the object at `origin` from here on."""
        for part in origin.beyond(self._variables):
            text = self.code(part, "" if part.parent is None else self._variables[part.parent])
            self._variables[part] = text if text.isidentifier() else self.once(text)
        return self._variables[origin]

    def once(self, text: str) -> str:
        """A name for the value of an expression."""
        if text.isidentifier():
            return text
        name = f"_v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def value(self, origin: Origin) -> Any:
        """The object itself, as it was when first asked for. Only where `names` has the locals."""
        for part in origin.beyond(self._values):
            found = None if part.parent is None else self._values[part.parent]
            names = collections.ChainMap({"_found": found}, self.names)
            self._values[part] = eval(self.code(part, "_found"), {}, names)
        return self._values[origin]
