"""All that can be told of some objects, as lines of text that two runs can be compared by."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["Portrait"]

_PLAIN = (int, float, complex, bool, str, bytes, type(None), range, slice, torch.dtype, torch.Size)
_LAZY = (types.GeneratorType, map, filter, zip, enumerate)
_EMPTY: tuple[Any, ...] = ([], (), {}, {}.items(), {}.values(), set(), range(0))
_ITERATORS = tuple(type(iter(x)) for x in _EMPTY)


class Portrait:
    """Lines `path: words`. An object that was met before is named by its number, so aliasing shows.

    drain   iterators are run to their end and their elements told; they are used up by that
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._seen: dict[Any, int] = {}
        self._keep: list[Any] = []
        self._storages: dict[int, int] = {}

    def add(self, path: str, x: Any) -> None:
        """Tell of `x` and of all that it reaches."""
        if type(x) in _PLAIN:
            self._say(path, f"{type(x).__name__} {x!r}")
            return
        if isinstance(x, (type, types.ModuleType, types.BuiltinFunctionType)):
            owner = getattr(x, "__self__", None)
            self._say(path, f"{type(x).__name__} {getattr(x, '__qualname__', x)}")
            if owner is not None and not isinstance(owner, types.ModuleType):
                self.add(f"{path}.__self__", owner)
            return
        self._keep.append(x)
        if isinstance(x, (tuple, frozenset)):
            # known by their contents: a compiled program may make equal ones anew
            self._say(path, f"{type(x).__name__} of {len(x)}")
            self._add_parts(path, x)
            return
        found = self._seen.get(id(x))
        if found is not None:
            self._say(path, f"again #{found}")
            return
        number = self._seen[id(x)] = len(self._seen)
        if isinstance(x, torch.Tensor):
            self._say(path, f"#{number} {self._tensor(x)}")
            self.add(f"{path}.grad", x.grad if x.is_leaf else None)
            return
        self._say(path, f"#{number} {_title(x)}")
        self._add_parts(path, x)

    def _add_parts(self, path: str, x: Any) -> None:
        for name, part in self._parts(path, x):
            self.add(f"{path}{name}", part)

    def _say(self, path: str, words: str) -> None:
        self.lines.append(f"{path}: {words}")

    def _tensor(self, x: torch.Tensor) -> str:
        storage = x.untyped_storage()
        self._keep.append(storage)
        which = self._storages.setdefault(storage.data_ptr(), len(self._storages))
        return (
            f"{type(x).__name__} {x.dtype} {list(x.shape)} strides {list(x.stride())}"
            f" in storage {which}+{x.storage_offset()} grad {x.requires_grad} leaf {x.is_leaf}"
            f" = {x.detach().tolist()}"
        )

    def _parts(self, path: str, x: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(x, types.FunctionType):
            yield ".__defaults__", x.__defaults__
            yield ".__kwdefaults__", x.__kwdefaults__
            for name, cell in zip(x.__code__.co_freevars, x.__closure__ or ()):
                yield f".<{name}>", cell
        elif isinstance(x, types.CellType):
            yield "", _contents(x)
        elif isinstance(x, types.MethodType):
            yield ".__func__", x.__func__
            yield ".__self__", x.__self__
        elif isinstance(x, dict):
            for k, (key, item) in enumerate(dict.items(x)):
                yield f".key{k}", key
                yield f"[{key!r}]" if type(key) in _PLAIN else f".item{k}", item
        elif isinstance(x, (set, frozenset)):
            for k, item in enumerate(sorted(x, key=repr)):
                yield f".element{k}", item
        elif isinstance(x, (list, tuple)) or type(x).__name__ == "deque":
            for k, item in enumerate(x):
                yield f"[{k}]", item
        elif isinstance(x, (*_LAZY, *_ITERATORS)) or type(x).__name__ == "Suspended":
            yield from self._drained(x)
        yield from _attributes(x)

    def _drained(self, x: Any) -> Iterator[tuple[str, Any]]:
        k = 0
        while k < 20:
            try:
                item = next(x)
            except StopIteration as stop:
                yield ".end", stop.value
                return
            except Exception as error:  # noqa: BLE001  # the exception is what is compared
                yield ".raised", error
                return
            yield f".next{k}", item
            k += 1


def _title(x: Any) -> str:
    if isinstance(x, types.FunctionType):
        return f"function {x.__name__} {x.__qualname__}"
    if isinstance(x, types.GeneratorType) or type(x).__name__ == "Suspended":
        return "generator"
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty cell"


def _attributes(x: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(x, BaseException):
        yield ".str()", str(x)
        yield ".args", x.args
        yield ".__cause__", x.__cause__
        yield ".__context__", type(x.__context__).__name__
    for name, value in getattr(x, "__dict__", {}).items():
        yield f".{name}", value
    for base in type(x).__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            yield f".{name}", getattr(x, name, "unset slot")
