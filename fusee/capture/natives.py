"""C functions: which run natively while a program is captured.

A C function may see containers from outside only as their copies, and instances from outside not at
all, since it could read anything of them without a guard. What is neither here nor in stand_ins.py
ends the graph.
"""

from __future__ import annotations

import math
import operator
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fusee.capture import dicts
from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import AS_NUMBERS, AS_VALUES, COMPARED, Capturing
from fusee.capture.facts import ABSENT
from fusee.capture.iteration import sort_key
from fusee.capture.numbers import Computed, holds_number, need_values
from fusee.capture.origin import Call, Held
from fusee.capture.stand_ins import SPECIAL, Args, Kwargs, special
from fusee.capture.torch_api import FakeTensor
from fusee.capture.world import CONTAINERS, is_scalar

__all__ = ["SPECIAL", "call", "call_class", "on_tensors", "special", "with_numbers"]

_PURE: set[Any] = {
    abs, round, divmod, pow, ord, chr, hex, oct, bin, ascii, format, len, math.prod, complex, bytes,
    sys.intern,
}  # fmt: skip
_PURE_MODULES = {"math", "cmath", "_operator", "itertools", "_bisect", "_struct", "unicodedata"}
_PURE_CLASSES = (
    slice, range, complex, bytes, bytearray, memoryview, torch.Size, torch.device, torch.dtype,
    torch.finfo, torch.iinfo,
)  # fmt: skip
_METHOD_OWNERS = (
    str, bytes, int, float, complex, bool, tuple, frozenset, range, slice, types.MappingProxyType,
    re.Pattern, re.Match, BaseException, *CONTAINERS,
)  # fmt: skip


def call(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A C function without a stand-in."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        owner = None
    if _is_of_tensors(function, owner, args):
        return on_tensors(m, function, args, kwargs)
    if isinstance(function, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return _unbound(m, function, args, kwargs)
    if isinstance(owner, type) and function.__name__ == "__subclasses__":
        return _subclasses(m, owner)
    if isinstance(owner, type) and owner in _METHOD_OWNERS and owner not in CONTAINERS:
        return _run(m, function, args, kwargs)  # int.from_bytes
    if owner is not None and isinstance(owner, _METHOD_OWNERS):
        return _method(m, function, owner, args, kwargs)
    if isinstance(function, (operator.attrgetter, operator.itemgetter, operator.methodcaller)):
        return _getter(m, function, args, kwargs)
    is_pure = function in _PURE if isinstance(function, types.BuiltinFunctionType) else False
    if is_pure or getattr(function, "__module__", None) in _PURE_MODULES:
        return _run(m, function, args, kwargs)
    raise _unknown(function)


def _subclasses(m: Capturing, cls: type) -> list[type]:
    found: list[type] = type.__subclasses__(cls)
    place = Call(Held(cls, cls.__qualname__), type.__subclasses__, "the subclasses of ")
    m.world.fact("length", place, len(found))
    return [m.world.load(one, m.world.item(place, k)) for k, one in enumerate(found)]


def _run(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """C code that may look at all that it is given."""
    args, kwargs = tuple(m.deep(x) for x in args), {k: m.deep(x) for k, x in kwargs.items()}
    m.look((*args, *kwargs.values()), AS_VALUES)
    return function(*args, **kwargs)


def _unknown(function: Any) -> GraphBreak:
    name = getattr(function, "__qualname__", None) or repr(function)
    module = getattr(function, "__module__", None)
    full = f"{module}.{name}" if module and module != "builtins" else name
    return GraphBreak(
        f"{full} is not Python code, and not known to be free of effects",
        "move the call out of the compiled function, or see fusee.compiler.allow_in_graph",
    )


def _is_of_tensors(function: Any, owner: Any, args: Args) -> bool:
    if isinstance(owner, FakeTensor):
        return True
    home = getattr(function, "__objclass__", None)
    return home is not None and home.__name__ in ("TensorBase", "Tensor") and bool(args)


def on_tensors(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function of torch, run as torch runs it: the recorder sees what it does."""
    given = tuple(x.number() if isinstance(x, Computed) else m.deep(x) for x in args)
    named = {key: m.deep(x) for key, x in kwargs.items()}
    m.look((*given, *named.values()), AS_NUMBERS)
    if m.world.recorder.has_numbers and (holds_number(given) or holds_number(named)):
        return with_numbers(m, function, given, named)
    own = next((x for x in _flat((*given, *named.values())) if _is_overloaded(x)), None)
    if own is not None:
        if m.world.seen:
            raise GraphBreak(f"a {type(own).__qualname__} beside subclasses of torch.Tensor")
        method = m.attribute(type(own), "__torch_function__")
        result = m.call(method, (function, (type(own),), given, named), {})
        if result is not NotImplemented:
            return result
        raise GraphBreak(f"{type(own).__qualname__}.__torch_function__ leaves a call to others")
    with m.world.mode:
        return function(*given, **named) if named else function(*given)


def _flat(args: Args) -> Iterator[Any]:
    for x in args:
        yield from x if type(x) in (list, tuple) else (x,)


def _is_overloaded(x: Any) -> bool:
    """Whether torch would ask an object that is no tensor what becomes of a call with it."""
    kind = type(x)
    is_asked = not isinstance(x, (FakeTensor, type, TorchFunctionMode))
    return is_asked and hasattr(kind, "__torch_function__")


def with_numbers(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A torch call among whose arguments are floats that the graph computes."""
    owner = getattr(function, "__self__", None)
    if m.world.seen or m.modes:
        raise GraphBreak("a float that the graph computes beside subclasses of torch.Tensor, modes")
    if isinstance(owner, FakeTensor):
        args, function = (owner, *args), getattr(torch.Tensor, function.__name__)
    if type(function) is types.FunctionType:
        need_values(args, kwargs)
    return m.world.recorder.call(function, args, kwargs)


def _method(m: Capturing, function: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """A bound method of a builtin container, number or string."""
    name = function.__name__
    if isinstance(owner, (re.Pattern, re.Match)) and not all(map(is_scalar, args)):
        raise _unknown(function)
    is_outside = m.is_outside(owner) and isinstance(owner, CONTAINERS)
    if is_outside and name == "append" and type(owner) is list and len(args) == 1 and not kwargs:
        return m.append(owner, *args)
    if is_outside or (isinstance(owner, dict) and name in dicts.METHODS):
        # by the class in C that has it: a subclass may have another one in Python
        home = next(c for c in type(owner).__mro__ if c.__flags__ & _IN_C and name in c.__dict__)
        return _unbound(m, home.__dict__[name], (owner, *args), kwargs)
    return _with_iterables(m, function, name, args, kwargs)


_IN_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


# These look at nothing that they move.
_MOVE = {
    "append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "clear",
    "copy", "reverse", "rotate", "keys", "values", "items", "__len__", "__init__", "__iter__",
    "move_to_end", "__iadd__",
}  # fmt: skip

_TAKE_ITERABLES = {
    "extend", "update", "union", "intersection", "difference", "symmetric_difference", "join",
    "issubset", "issuperset", "isdisjoint", "intersection_update", "difference_update", "fromkeys",
    "extendleft", "__init__", "__iadd__", "__ior__",
}  # fmt: skip


def _with_iterables(m: Capturing, function: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    if name == "sort":
        key, reverse = kwargs.get("key"), m.truth(kwargs.get("reverse", False))
        return function(key=sort_key(m, key), reverse=reverse)
    if name in _TAKE_ITERABLES:
        args = tuple(
            x if isinstance(x, dict) and not m.is_outside(x) else _shown(m, x) for x in args
        )
    elif name not in _MOVE:
        args = tuple(m.deep(x) for x in args)
    if name not in _MOVE:
        owner: Any = function.__self__
        compares = isinstance(owner, (*CONTAINERS, tuple, frozenset))
        looked = (*args, *kwargs.values(), owner)
        if isinstance(owner, dict) and (name[:2] != "__" or name in ("__contains__", "__ior__")):
            more = args[:1]
            if name in ("update", "__ior__") and isinstance(args[:1] and args[0], dict):
                more = tuple(args[0])
            looked = (*more, *dict.keys(owner))  # not at what they hold
        m.look(looked, COMPARED + AS_NUMBERS if compares else AS_VALUES)
    return function(*args, **kwargs)


def _shown(m: Capturing, x: Any) -> Any:
    if isinstance(x, dict) or is_scalar(x):
        return m.plain(x)
    return m.items(x)


def _unbound(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """`dict.__getitem__(self, key)` and the like: what super() gives for a builtin class."""
    owner, *rest = args
    name = function.__name__
    if isinstance(owner, CONTAINERS):
        if isinstance(owner, dict) and name in dicts.METHODS:
            return dicts.METHODS[name](m, owner, *rest)
        is_lookup = name == "get" and isinstance(owner, dict)
        if m.is_outside(owner) and is_lookup and is_scalar(rest[0]):
            found = m.world.get(m.world.mirror(owner), rest[0])
            return (*rest[1:], None)[0] if found is ABSENT else found
        shown = m.plain(owner)
        bound = function.__get__(shown, type(shown))
        return _with_iterables(m, bound, name, tuple(rest), kwargs)
    if isinstance(owner, (*_METHOD_OWNERS, BaseException)) or is_scalar(owner):
        return _run(m, function, args, kwargs)
    if name in ("__init__", "__init_subclass__") and function is object.__init__:
        return None
    if (
        name in ("__eq__", "__ne__", "__hash__")
        and getattr(function, "__objclass__", None) is object
    ):
        return function(*args)
    raise _unknown(function)


def _getter(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    (obj,) = args
    _, parts = function.__reduce__()
    if isinstance(function, operator.methodcaller):
        return m.call(m.attribute(obj, parts[0]), parts[1:], {})
    found = []
    for part in parts:
        value = obj
        if isinstance(function, operator.itemgetter):
            value = m.subscript(value, part)
        else:
            for name in part.split("."):
                value = m.attribute(value, name)
        found.append(value)
    return found[0] if len(found) == 1 else tuple(found)


def call_class(m: Capturing, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """A class in C: its constructor runs natively if it only computes."""
    if issubclass(cls, (BaseException, types.SimpleNamespace)):
        return cls(*args, **kwargs)
    is_enum = type(cls).__name__ in ("EnumMeta", "EnumType")
    if is_enum or issubclass(cls, _PURE_CLASSES) or cls.__module__ in _PURE_MODULES:
        return _run(m, cls, args, kwargs)
    raise _unknown(cls)
