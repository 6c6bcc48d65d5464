"""What stands in for C functions that take objects of any kind, or know torch's state.

C code must not look into objects from outside on its own: it would read without guards.
"""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import itertools
import operator
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from fusee.capture import attributes
from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.frame import Suspended
from fusee.capture.numbers import Number
from fusee.capture.torch_api import (
    FIXED_ANSWERS,
    STATE_QUERIES,
    STATE_SWITCHES,
    FakeTensor,
)
from fusee.capture.world import CONTAINERS, is_scalar

__all__ = ["BY_CODE", "SPECIAL", "Args", "Kwargs", "Stand", "special", "stands_for"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Stand = Callable[[Capturing, Args, Kwargs], Any]

SPECIAL: dict[Any, Stand] = {}
# By id of the code that closures share: `(function, capturing, args, kwargs) -> result`.
BY_CODE: dict[int, Callable[..., Any]] = {}
_function: Any


def special(function: Any) -> Stand | None:
    """What stands in for a function, if something does."""
    if type(function) is types.FunctionType:
        of_code = BY_CODE.get(id(function.__code__))
        if of_code is not None:
            return functools.partial(of_code, function)
    try:
        return SPECIAL.get(function)
    except TypeError:  # not hashable: an instance with its own __eq__
        return None


def stands_for(*functions: Any) -> Callable[[Stand], Stand]:
    def register(stand: Stand) -> Stand:
        SPECIAL.update(dict.fromkeys(functions, stand))
        return stand

    return register


# ------------------------------------------------------------------------------ about objects


@stands_for(isinstance)
def _isinstance(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    obj, kinds = args
    if isinstance(obj, FakeTensor):
        return _is_tensor_of(obj, kinds)
    if isinstance(obj, Suspended):
        return issubclass(types.GeneratorType, kinds)
    if type(obj) is Number:
        return issubclass(float, kinds)
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


@stands_for(issubclass)
def _issubclass(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    return issubclass(*args)


@stands_for(getattr)
def _getattr(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    obj, name, *default = args
    if not default:
        return m.attribute(obj, name)
    try:
        return m.attribute(obj, name)
    except AttributeError:
        return default[0]


@stands_for(hasattr)
def _hasattr(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    try:
        m.attribute(*args)
    except AttributeError:
        return False
    return True


@stands_for(setattr)
def _setattr(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    m.store_attribute(*args)


@stands_for(delattr)
def _delattr(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    m.delete_attribute(*args)


@stands_for(object.__setattr__)
def _object_setattr(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    attributes.store_plainly(m, *args)


@stands_for(object.__getattribute__)
def _object_getattribute(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return attributes._of_instance(m, *args)


@stands_for(type)
def _type(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1 and isinstance(args[0], Suspended):
        return types.GeneratorType
    if len(args) == 1 and type(args[0]) is Number:
        return float
    if len(args) == 1:
        return (
            m.attribute(args[0], "__class__") if isinstance(args[0], FakeTensor) else type(args[0])
        )
    made = type(*args, **kwargs)
    m.made_classes.add(made)
    return made


@stands_for(super)
def _super(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    if not args:
        f = m.frames[-1]
        first = f.code.co_varnames[0]
        owner = m.load_cell(f, first) if first in f.cells else f.locals[first]
        args = (m.load_cell(f, "__class__"), owner)
    return super(*args)


@stands_for(id)
def _id(m: Capturing, args: Args, kwargs: Kwargs) -> int:
    (obj,) = args
    if m.is_outside(obj) and not isinstance(obj, (type, types.FunctionType, torch.nn.Module)):
        raise GraphBreak("id() of an object from outside differs from call to call")
    return id(obj)


@stands_for(sys.exc_info)
def _exc_info(m: Capturing, args: Args, kwargs: Kwargs) -> tuple[Any, Any, Any]:
    error = m.handled
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


@stands_for(sys.exception)
def _exception(m: Capturing, args: Args, kwargs: Kwargs) -> BaseException | None:
    return m.handled


@stands_for(hash)
def _hash(m: Capturing, args: Args, kwargs: Kwargs) -> int:
    method = attributes.python_method(m, args[0], "__hash__")
    return hash(*args) if method is None else m.call(method, args, {})


@stands_for(vars(types.FunctionType)["__get__"])
def _bind(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    function, obj, *_ = args
    return function if obj is None else types.MethodType(function, obj)


@stands_for(callable)
def _callable(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    return callable(*args)


@stands_for(vars)
def _vars(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    if not args:
        raise GraphBreak("vars() without an argument")
    return m.attribute(args[0], "__dict__")


@stands_for(globals, locals, eval, exec, compile, open, input, breakpoint, __import__, dir)
def _refused(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    raise GraphBreak("a builtin that reaches beyond its arguments")


@stands_for(print)
def _print(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    raise GraphBreak("print() shows what is known only when the graph has run", "remove the print")


def _natively(function: Any) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        return function(*args, **kwargs)

    return stand


for _function in (itertools.repeat, itertools.count, range, slice, object, property, staticmethod):
    SPECIAL[_function] = _natively(_function)
SPECIAL[classmethod] = _natively(classmethod)
for _function in (
    types.MethodType,
    operator.itemgetter,
    operator.attrgetter,
    operator.methodcaller,
):
    SPECIAL[_function] = _natively(_function)


def _resuming(function: Any) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        if m.is_outside(args[0]):
            raise GraphBreak("going on with a generator from outside")
        return function(*args)

    return stand


for _function in (Suspended.send, Suspended.throw, Suspended.close, Suspended.__next__):
    SPECIAL[_function] = _resuming(_function)
SPECIAL[functools.partial] = _natively(functools.partial)
SPECIAL[inspect.signature] = _natively(inspect.signature)
SPECIAL[typing.cast] = lambda m, args, kwargs: args[1]


# ------------------------------------------------------------------------------ operators


@stands_for(operator.getitem)
def _getitem(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return m.subscript(*args)


@stands_for(operator.is_)
def _is(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return m.identical(*args)


@stands_for(operator.is_not)
def _is_not(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return not m.identical(*args)


@stands_for(operator.setitem)
def _setitem(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return m.store_subscript(*args)


@stands_for(bool, operator.truth)
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


@stands_for(copy.copy)
def _copy(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    (x,) = args
    if isinstance(x, CONTAINERS) and type(x) in (list, dict, set, collections.deque):
        return m.plain(x).copy()
    if is_scalar(x):
        return x
    raise GraphBreak(f"copying a {type(x).__qualname__}")


# ------------------------------------------------------------------------------ torch's state


_profiled: Any = torch.profiler.record_function
SPECIAL[_profiled] = _natively(_profiled)
SPECIAL[_profiled.__enter__] = lambda m, args, kwargs: args[0]  # a graph has no parts to name
SPECIAL[_profiled.__exit__] = lambda m, args, kwargs: None


def _switching(function: Any) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        m.world.recorder.graph.call_function(function, args)
        return function(*args)

    return stand


def _always(value: Any) -> Stand:
    return lambda m, args, kwargs: value


SPECIAL.update((function, _always(value)) for function, value in FIXED_ANSWERS.items())
SPECIAL.update((function, _natively(function)) for function in STATE_QUERIES)
SPECIAL.update((function, _switching(function)) for function in STATE_SWITCHES)


@stands_for(torch.compiler.is_exporting)
def _is_exporting(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    return m.policy.is_exporting


@stands_for(torch.is_tensor)
def _is_tensor(m: Capturing, args: Args, kwargs: Kwargs) -> bool:
    return isinstance(args[0], torch.Tensor)
