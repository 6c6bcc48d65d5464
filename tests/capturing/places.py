"""Everything that a program can read, found by walking, and ways to change each piece of it."""

from __future__ import annotations

import collections
import copy
import enum
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["CHANGES", "DELETE", "Place", "places"]

DELETE = object()


class Place(NamedTuple):
    """Where a value is kept.

    kind   attr, item, cell, or the name of a function's attribute that is a tuple of defaults
    """

    path: str
    owner: Any
    kind: str
    key: Any

    @property
    def value(self) -> Any:
        if self.kind == "attr":
            return self.owner.__dict__.get(self.key, getattr(self.owner, self.key))
        if self.kind == "cell":
            return self.owner.cell_contents
        return self.owner[self.key]

    def put(self, value: Any) -> None:
        """Store `value`, or delete what is there."""
        if self.kind == "attr":
            is_slot = isinstance(self.owner, type) or self.key not in vars(self.owner)
            if is_slot:
                delattr(self.owner, self.key) if value is DELETE else setattr(
                    self.owner, self.key, value
                )
            elif value is DELETE:
                del vars(self.owner)[self.key]
            else:
                vars(self.owner)[self.key] = value
        elif self.kind == "cell":
            if value is DELETE:
                del self.owner.cell_contents
            else:
                self.owner.cell_contents = value
        elif value is DELETE:
            del self.owner[self.key]
        else:
            self.owner[self.key] = value

    def undo(self) -> Callable[[], None]:
        """What puts everything back, the order of the owner's items included."""
        before = self.value
        kept = self.owner if self.kind == "item" else getattr(self.owner, "__dict__", None)
        whole = copy.copy(kept) if isinstance(kept, (dict, list)) else None

        def put_back() -> None:
            if isinstance(kept, list):
                kept[:] = whole  # type: ignore[assignment]
            elif isinstance(kept, dict) and "__builtins__" not in kept:
                kept.clear()
                kept.update(whole)  # type: ignore[arg-type]
            else:
                self.put(before)

        return put_back


def places(roots: dict[str, Any], module: str) -> list[Place]:
    """Every place that is reached from `roots` through objects, and through code of `module`."""
    found: list[Place] = []
    seen: set[int] = set()
    queue = collections.deque(roots.items())
    while queue:
        path, x = queue.popleft()
        if id(x) in seen:
            continue
        seen.add(id(x))
        for place in _inside(path, x, module):
            found.append(place)
            try:
                queue.append((place.path, place.value))
            except (ValueError, AttributeError):  # an empty cell or slot
                found.pop()
    return found


def _inside(path: str, x: Any, module: str) -> Iterator[Place]:
    if isinstance(x, types.FunctionType):
        if x.__module__ == module:
            for name, cell in zip(x.__code__.co_freevars, x.__closure__ or ()):
                yield Place(f"{path}.<{name}>", cell, "cell", None)
            yield from _items(f"{path}.kwdefaults", x.__kwdefaults__ or {})
    elif isinstance(x, type):
        if x.__module__ == module and not issubclass(x, enum.Enum):
            for name, value in list(vars(x).items()):
                if not name.startswith("__") or isinstance(value, types.FunctionType):
                    yield Place(f"{path}.{name}", x, "attr", name)
    elif isinstance(x, (dict, list)):
        yield from _items(path, x)
    elif isinstance(x, (types.ModuleType, torch.Tensor)):
        return
    else:
        for name in getattr(x, "__dict__", {}):
            yield Place(f"{path}.{name}", x, "attr", name)
        for name in getattr(type(x), "__slots__", ()):
            yield Place(f"{path}.{name}", x, "attr", name)


def _items(path: str, x: Any) -> Iterator[Place]:
    for key in list(x) if isinstance(x, dict) else range(len(x)):
        if not str(key).startswith("__"):
            yield Place(f"{path}[{key!r}]", x, "item", key)


# ------------------------------------------------------------------------------ changes

Change = Callable[[Any], Any]


def _of(*kinds: type) -> Callable[[Change], Change]:
    """A change that leaves values of other kinds as they are."""

    def only(change: Change) -> Change:
        return lambda x: change(x) if type(x) in kinds else x

    return only


def _reordered(x: dict[Any, Any]) -> dict[Any, Any]:
    return dict(reversed(x.items()))


def _copied(x: Any) -> Any:
    """An object of the same class with the same contents."""
    if type(x).__module__ == "builtins" or isinstance(x, (type, types.ModuleType)):
        return x
    return copy.copy(x)


CHANGES: dict[str, Change] = {
    "deleted": lambda x: DELETE,
    "more": _of(int, float)(lambda x: x + 1),
    "less": _of(int, float)(lambda x: -x - 1),
    "as float": _of(int)(float),
    "as bool": _of(int)(bool),
    "the other": _of(bool)(lambda x: not x),
    "as int": _of(bool, float)(int),
    "nan": _of(float)(lambda x: float("nan")),
    "longer text": _of(str)(lambda x: x + "!"),
    "none": lambda x: None,
    "tensor plus one": _of(torch.Tensor)(lambda x: x + 1),
    "tensor as double": _of(torch.Tensor)(lambda x: x.detach().double()),
    "tensor of one element": _of(torch.Tensor)(lambda x: x.detach()[:1]),
    "tensor that needs grad": _of(torch.Tensor)(lambda x: x.detach().clone().requires_grad_()),
    "tensor with gaps": _of(torch.Tensor)(lambda x: torch.stack([x, x], -1)[..., 0]),
    "parameter": _of(torch.Tensor)(lambda x: torch.nn.Parameter(x.detach())),
    "integers": _of(torch.Tensor)(lambda x: x.detach().int()),
    "longer": _of(list)(lambda x: [*x, 1]),
    "shorter": _of(list)(lambda x: x[:-1]),
    "reversed": _of(list)(lambda x: x[::-1]),
    "as tuple": _of(list)(tuple),
    "as list": _of(tuple)(list),
    "one more key": _of(dict)(lambda x: {**x, "more": 1}),
    "reordered": _of(dict)(_reordered),
    "no keys": _of(dict)(lambda x: {}),
    "ordered": _of(dict)(collections.OrderedDict),
    "copied": _copied,
    "another element": _of(set)(lambda x: {*x, 9}),
    "another function": _of(types.FunctionType)(lambda x: lambda *args, **kwargs: 5),
    "a tensor": _of(int, float)(lambda x: torch.tensor(float(x))),
}
