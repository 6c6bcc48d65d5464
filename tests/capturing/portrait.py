"""All that can be told of some objects, as lines that two runs can be compared by."""

from __future__ import annotations

import collections.abc
import enum
import logging
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Line", "Portrait", "Unsound"]

_PLAIN = (
    int,
    complex,
    bool,
    str,
    bytes,
    type(None),
    range,
    slice,
    torch.dtype,
    torch.Size,
    torch.device,
)
# Where objects lie, which no two runs have in common: as id() gives it, and as texts have it.
_ADDRESSES = 1 << 40, 1 << 48
_ADDRESS = re.compile("0x[0-9a-f]{9,}")
# The frames in C++ that some errors of torch name, which are those of the caller too.
_FRAMES = re.compile("Exception raised from .*", re.DOTALL)
_LAZY = (types.GeneratorType, map, filter, zip, enumerate)
_EMPTY: tuple[Any, ...] = ([], (), {}, {}.items(), {}.values(), set(), range(0))
_ITERATORS = tuple(type(iter(x)) for x in _EMPTY)


class Unsound(Exception):
    """A tensor reaches beyond its memory: out= has grown it, and then failed to grow that. Or
    a size is negative: resize_() has set it, and then failed."""


class Line(NamedTuple):
    """One thing told: words that must be equal, and numbers that may be allowed to be near.

    path   the words' beginning, where the thing is
    """

    words: str
    numbers: list[Any]
    path: str

    def __str__(self) -> str:
        return f"{self.words} {self.numbers}" if self.numbers else self.words


class Portrait:
    """Lines `path: words`. An object that was met before is named by its number, so aliasing shows.

    drain   iterators are run to their end and their elements told; they are used up by that
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._seen: dict[Any, int] = {}
        self._keep: list[Any] = []
        self._storages: dict[int, int] = {}

    def add(self, path: str, x: Any) -> None:
        """Tell of `x` and of all that it reaches."""
        if isinstance(x, (float, np.floating)):
            self._say(path, type(x).__name__, [float(x)])
            return
        if type(x) is int and _ADDRESSES[0] < x < _ADDRESSES[1]:
            self._say(path, "int, an address")
            return
        if type(x) in _PLAIN or isinstance(x, np.generic):
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
            self._say(path, f"#{number} {self._tensor(x)}", _numbers(x))
            self.add(f"{path}.grad", x.grad if _is_leaf(x) is True else None)
            return
        if isinstance(x, np.ndarray):
            self._say(path, f"#{number} {self._array(x)}", x.astype(object).reshape(-1).tolist())
            return
        self._say(path, f"#{number} {_title(x)}")
        self._add_parts(path, x)

    def _add_parts(self, path: str, x: Any) -> None:
        for name, part in self._parts(path, x):
            self.add(f"{path}{name}", part)

    def _say(self, path: str, words: str, numbers: list[Any] | None = None) -> None:
        words = _ADDRESS.sub("0x", _FRAMES.sub("", words))
        self.lines.append(Line(f"{path}: {words}", numbers or [], path))

    def _tensor(self, x: torch.Tensor) -> str:
        storage = x.untyped_storage()
        self._keep.append(storage)
        if min(x.shape, default=0) < 0:
            raise Unsound
        last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
        if x.numel() and not x.is_meta and (last + 1) * x.element_size() > storage.nbytes():
            raise Unsound
        where = "meta" if x.is_meta else self._place(storage.data_ptr(), storage.nbytes())
        return (
            f"{type(x).__name__} {x.dtype} {list(x.shape)} strides {list(x.stride())}"
            f" in storage {where}+{x.storage_offset()} grad {x.requires_grad} leaf {_is_leaf(x)}"
            f"{' for inference' * x.is_inference()}{'' if x.is_cpu else f' on {x.device}'}"
        )

    def _place(self, address: int, size: int) -> int:
        """The number of a piece of memory; pieces without bytes are one."""
        return self._storages.setdefault(address if size else 0, len(self._storages))

    def _array(self, x: np.ndarray) -> str:
        owner: Any = x
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        start, size = owner.__array_interface__["data"][0], owner.nbytes
        if isinstance(owner.base, torch.Tensor):  # whose memory it has a part of
            storage = owner.base.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
        offset = x.__array_interface__["data"][0] - start if x.size else 0
        where = self._place(start, size if x.size else 0)
        return (
            f"array {x.dtype} {list(x.shape)} strides {list(x.strides)} in storage"
            f" {where}+{offset} writeable {x.flags.writeable}"
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
            kind = collections.OrderedDict if isinstance(x, collections.OrderedDict) else dict
            for k, (key, item) in enumerate(kind.items(x)):
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
        elif isinstance(x, logging.Logger):  # leads to all loggers of the process
            yield ".level", x.level
            yield ".disabled", x.disabled
            return
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


def _numbers(x: torch.Tensor) -> list[Any]:
    """The elements of a tensor."""
    # copied first: one whose `.data` was given a tensor of inference mode has no views
    return [] if x.is_meta else x.detach().clone().reshape(-1).tolist()


def _is_leaf(x: torch.Tensor) -> bool | str:
    try:
        return x.is_leaf
    except RuntimeError:  # a view, made without gradients, of what was written to with them
        return "forbidden"


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
    # what ~flag has found is kept in the member, and no program sees whether it was found before
    left_out = ("_inverted_",) if isinstance(x, enum.Flag) else ()
    own = getattr(x, "__dict__", {})
    for name, value in own.items() if isinstance(own, collections.abc.Mapping) else ():
        if name not in left_out:
            yield f".{name}", value
    for base in type(x).__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            yield f".{name}", getattr(x, name, "unset slot")
