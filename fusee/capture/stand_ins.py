"""What stands in for C functions that take objects of any kind, call back, or know torch's state.

C code must not look into objects from outside on its own: it would read without guards. So
iteration, sorting and conversion ask the machine for each step.
"""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import itertools
import operator
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from fusee.capture import attributes
from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.frame import Suspended
from fusee.capture.iterators import is_finite_iterator
from fusee.capture.torch_api import (
    FIXED_ANSWERS,
    STATE_QUERIES,
    FakeTensor,
    set_grad_enabled,
)
from fusee.capture.world import CONTAINERS, is_scalar

__all__ = ["SPECIAL", "Stand", "sort_key", "special"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Stand = Callable[[Capturing, Args, Kwargs], Any]

SPECIAL: dict[Any, Stand] = {}
_function: Any


def special(function: Any) -> Stand | None:
    """What stands in for a function, if something does."""
    try:
        return SPECIAL.get(function)
    except TypeError:  # not hashable: an instance with its own __eq__
        return None


def _for(*functions: Any) -> Callable[[Stand], Stand]:
    def register(stand: Stand) -> Stand:
        SPECIAL.update(dict.fromkeys(functions, stand))
        return stand

    return register


# ------------------------------------------------------------------------------ about objects


@_for(isinstance)
def _isinstance(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    obj, kinds = args
    if isinstance(obj, FakeTensor):
        return _is_tensor_of(obj, kinds)
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        meta = type(kind)
        if isinstance(kind, type) and meta is not type and kind not in type(obj).__mro__:
            custom = attributes.class_lookup(m, meta, "__instancecheck__")
            if isinstance(custom, types.FunctionType) and not _is_abc(custom):
                if m.truth(m.call(custom, (kind, obj), {})):
                    return True
                continue
        if isinstance(obj, kind):
            return True
    return False


def _is_abc(function: types.FunctionType) -> bool:
    return function.__module__ in ("abc", "_py_abc", "typing", "torch.nn.parameter", "torch")


def _is_tensor_of(obj: Any, kinds: Any) -> bool:
    if isinstance(kinds, tuple):
        return any(_is_tensor_of(obj, kind) for kind in kinds)
    if kinds is FakeTensor:
        return False
    return isinstance(obj, kinds)


@_for(issubclass)
def _issubclass(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    return issubclass(*args)


@_for(getattr)
def _getattr(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    obj, name, *default = args
    if not default:
        return m.attribute(obj, name)
    try:
        return m.attribute(obj, name)
    except AttributeError:
        return default[0]


@_for(hasattr)
def _hasattr(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    try:
        m.attribute(*args)
    except AttributeError:
        return False
    return True


@_for(setattr)
def _setattr(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    m.store_attribute(*args)


@_for(delattr)
def _delattr(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    m.delete_attribute(*args)


@_for(object.__setattr__)
def _object_setattr(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    attributes.store_plainly(m, *args)


@_for(object.__getattribute__)
def _object_getattribute(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return attributes._of_instance(m, *args)


@_for(type)
def _type(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1:
        return (
            m.attribute(args[0], "__class__") if isinstance(args[0], FakeTensor) else type(args[0])
        )
    made = type(*args, **kwargs)
    m.made_classes.add(made)
    return made


@_for(super)
def _super(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    if not args:
        f = m.frames[-1]
        first = f.code.co_varnames[0]
        owner = m.load_cell(f, first) if first in f.cells else f.locals[first]
        args = (m.load_cell(f, "__class__"), owner)
    return super(*args)


@_for(id)
def _id(m: Capturing, args: Args, kwargs: Kwargs) -> int:
    (obj,) = args
    if m.is_outside(obj) and not isinstance(obj, (type, types.FunctionType, torch.nn.Module)):
        raise GraphBreak("id() of an object from outside differs from call to call")
    return id(obj)


@_for(hash)
def _hash(m: Capturing, args: Args, kwargs: Kwargs) -> int:
    method = attributes.python_method(m, args[0], "__hash__")
    return hash(*args) if method is None else m.call(method, args, {})


@_for(callable)
def _callable(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    return callable(*args)


@_for(vars)
def _vars(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    if not args:
        raise GraphBreak("vars() without an argument")
    return m.attribute(args[0], "__dict__")


@_for(globals, locals, eval, exec, compile, open, input, breakpoint, __import__, dir)
def _refused(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    raise GraphBreak("a builtin that reaches beyond its arguments")


@_for(print)
def _print(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    raise GraphBreak("print() shows what is known only when the graph has run", "remove the print")


# ------------------------------------------------------------------------------ iteration


@_for(len)
def _len(m: Capturing, args: Args, kwargs: Kwargs) -> int:
    (x,) = args
    method = attributes.python_method(m, x, "__len__")
    if method is not None:
        return int(m.call(method, (x,), {}))
    if isinstance(x, CONTAINERS):
        return m.length(x)
    return len(x)


@_for(iter)
def _iter(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return m.iterate(args[0]) if len(args) == 1 else iter(*args)


@_for(next)
def _next(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1:
        return m.next(args[0])
    try:
        return m.next(args[0])
    except StopIteration:
        return args[1]


class _Driven:
    """An iterator that asks the machine for each element, for C code that iterates."""

    def __init__(self, m: Capturing, iterator: Any) -> None:
        self.m = m
        self.iterator = iterator

    def __iter__(self) -> _Driven:
        return self

    def __next__(self) -> Any:
        return self.m.next(self.iterator)


def _iterable(m: Capturing, x: Any) -> Any:
    """An iterable that C code may go through."""
    if isinstance(x, (Suspended, FakeTensor)):
        return x
    iterator = m.iterate(x)
    if m.is_outside(iterator) and is_finite_iterator(iterator):
        return m.world.opened(iterator)
    is_python = attributes.python_method(m, iterator, "__next__") is not None
    return _Driven(m, iterator) if is_python else iterator


def _collecting(function: Any) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        if not args:
            return function(**kwargs)
        first = m.items(args[0])
        if function in (any, all):
            return function(m.truth(x) for x in first)
        if function is sum:
            total = kwargs.get("start", args[1] if len(args) > 1 else 0)
            for x in first:
                total = m.binary(0, total, x)
            return total
        return function(first, *args[1:], **kwargs)

    return stand


for _function in (list, tuple, set, frozenset, sum, any, all, dict.fromkeys, collections.deque):
    SPECIAL[_function] = _collecting(_function)


@_for(tuple.__new__)
def _new_tuple(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    cls, *items = args
    return tuple.__new__(cls, *(m.items(x) for x in items), **kwargs)


def _lazily(function: Any) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        return function(*(_iterable(m, x) for x in args), **kwargs)

    return stand


for _function in (zip, itertools.chain, itertools.product):
    SPECIAL[_function] = _lazily(_function)


@_for(itertools.chain.from_iterable)
def _chain_all(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return itertools.chain.from_iterable(_iterable(m, x) for x in m.items(args[0]))


@_for(enumerate)
def _enumerate(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return enumerate(_iterable(m, args[0]), *args[1:], **kwargs)


@_for(itertools.islice)
def _islice(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return itertools.islice(_iterable(m, args[0]), *args[1:])


def _natively(function: Any) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        return function(*args, **kwargs)

    return stand


for _function in (itertools.repeat, itertools.count, range, slice, object, property, staticmethod):
    SPECIAL[_function] = _natively(_function)
SPECIAL[classmethod] = _natively(classmethod)
SPECIAL[types.MethodType] = _natively(types.MethodType)
SPECIAL[functools.partial] = _natively(functools.partial)
SPECIAL[inspect.signature] = _natively(inspect.signature)
SPECIAL[typing.cast] = lambda m, args, kwargs: args[1]


@_for(map)
def _map(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    function, *iterables = args
    rows = zip(*(_iterable(m, x) for x in iterables))
    return (m.call(function, row, {}) for row in rows)


@_for(filter)
def _filter(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    function, iterable = args
    given = _iterable(m, iterable)
    if function is None:
        return (x for x in given if m.truth(x))
    return (x for x in given if m.truth(m.call(function, (x,), {})))


@_for(functools.reduce)
def _reduce(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    function, iterable, *start = args
    items = m.items(iterable)
    total = start[0] if start else items.pop(0)
    for x in items:
        total = m.call(function, (total, x), {})
    return total


@_for(reversed)
def _reversed(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    method = attributes.python_method(m, args[0], "__reversed__")
    return m.call(method, args, {}) if method else reversed(m.plain(args[0]))


@functools.total_ordering
class _Key:
    """A value that C code sorts by comparing on the machine."""

    __slots__ = ("m", "value")

    def __init__(self, m: Capturing, value: Any) -> None:
        self.m = m
        self.value = value

    def __lt__(self, other: _Key) -> bool:
        return self.m.truth(self.m.compare("<", self.value, other.value))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Key)
        return self.m.truth(self.m.compare("==", self.value, other.value))

    __hash__ = None  # type: ignore[assignment]


def sort_key(m: Capturing, key: Any) -> Callable[[Any], Any]:
    """A key by which C code sorts as the program would."""
    return lambda x: _Key(m, x if key is None else m.call(key, (x,), {}))


@_for(sorted)
def _sorted(m: Capturing, args: Args, kwargs: Kwargs) -> list[Any]:
    reverse = m.truth(kwargs.get("reverse", False))
    return sorted(m.items(args[0]), key=sort_key(m, kwargs.get("key")), reverse=reverse)


def _extreme(function: Any) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        items = m.items(args[0]) if len(args) == 1 else list(args)
        if not items and "default" in kwargs:
            return kwargs["default"]
        return function(items, key=sort_key(m, kwargs.get("key")))

    return stand


SPECIAL[min] = _extreme(min)
SPECIAL[max] = _extreme(max)


def _mapping(kind: Any) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        made = kind()
        if args:
            is_mapping = isinstance(args[0], dict) or attributes.python_method(m, args[0], "keys")
            pairs = m.mapping(args[0]) if is_mapping else map(m.items, m.items(args[0]))
            made.update(pairs)
        made.update(kwargs)
        return made

    return stand


SPECIAL[dict] = _mapping(dict)
SPECIAL[collections.OrderedDict] = _mapping(collections.OrderedDict)


@_for(collections.defaultdict)
def _defaultdict(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return collections.defaultdict(*args[:1], *(m.mapping(x) for x in args[1:]), **kwargs)


# ------------------------------------------------------------------------------ operators


@_for(operator.getitem)
def _getitem(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return m.subscript(*args)


@_for(operator.setitem)
def _setitem(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return m.store_subscript(*args)


@_for(bool, operator.truth)
def _bool(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    return m.truth(args[0]) if args else False


def _as_text(conversion: str) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> str:
        if len(args) != 1 or kwargs:
            return str(*args, **kwargs)
        return m.format(args[0], conversion, None)

    return stand


SPECIAL[str] = _as_text("s")
SPECIAL[repr] = _as_text("r")


def _to_number(kind: Any, method: str) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        if args and attributes.python_method(m, args[0], method) is not None:
            return m.call(m.special(args[0], method), (), {})
        return kind(*args, **kwargs)

    return stand


SPECIAL[int] = _to_number(int, "__int__")
SPECIAL[float] = _to_number(float, "__float__")


@_for(copy.copy)
def _copy(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    (x,) = args
    if isinstance(x, CONTAINERS) and type(x) in (list, dict, set, collections.deque):
        return m.plain(x).copy()
    if is_scalar(x):
        return x
    raise GraphBreak(f"copying a {type(x).__qualname__}")


# ------------------------------------------------------------------------------ torch's state


@_for(set_grad_enabled)
def _set_grad_enabled(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    m.world.recorder.graph.call_function(set_grad_enabled, args)
    set_grad_enabled(*args)


def _always(value: Any) -> Stand:
    return lambda m, args, kwargs: value


SPECIAL.update((function, _always(value)) for function, value in FIXED_ANSWERS.items())
SPECIAL.update((function, _natively(function)) for function in STATE_QUERIES)


@_for(torch.compiler.is_exporting)
def _is_exporting(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    return m.policy.is_exporting


@_for(torch.is_tensor)
def _is_tensor(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    return isinstance(args[0], torch.Tensor)
