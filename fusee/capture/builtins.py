"""What stands in for C functions that take objects of any kind, or know torch's state.

C code must not look into objects from outside on its own: it would read without guards.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import logging
import operator
import os
import re
import sys
import threading
import types
import typing
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.node import map_aggregate

from fusee.capture import attributes, symbols
from fusee.capture.attributes import AS_NUMBERS, COMPARED, Capturing, ask, store_plainly
from fusee.capture.bytecode import Line
from fusee.capture.dynamic import Computed, Number, before_graph, converted, is_array, read
from fusee.capture.frame import ABSENT, BINARY, METHODS_IN_C, UNARY, is_scalar, room, variables
from fusee.capture.graph_break import Breaking, GraphBreak
from fusee.capture.guards import EqualsMatch, IdMatch
from fusee.capture.inputs import DELETED
from fusee.capture.mirrors import Called, Later, by_identity, show_address
from fusee.capture.policy import asked_again, protocol_names
from fusee.capture.sources import Held, Local, ResultOf, by_function, given_by, is_trusted
from fusee.capture.symbols import concrete, is_open, operated, whole_text
from fusee.capture.torch_api import (
    DEVICES,
    FIXED_ANSWERS,
    STATE_QUERIES,
    STATE_SWITCHES,
    SWITCHED_BY,
    FakeTensor,
    State,
    call_impl,
    enter_inference_mode,
    no_torch_function,
    set_default_dtype,
)
from fusee.source import Args, Function, Kwargs, Rules
from fusee.sym.ranges import COMPARISONS

# ---------------------------------------------------------------------------- stand ins


Stand = Function  # takes the machine, and then what the function takes

SPECIAL: Rules[Any, Stand] = Rules()
stands_for, stands_for_each = SPECIAL.rule, SPECIAL.rule_of_each
# By id of the code that closures share: they get the function before all else.
BY_CODE: Rules[int, Stand] = Rules()
# By module and name, likewise: of packages that only a program imports.
BY_NAME: Rules[tuple[str, str], Stand] = Rules()
# By the class of a function in C, likewise.
BY_TYPE: Rules[type, Stand] = Rules()


def special(function: Any) -> Stand | None:
    """What stands in for a function, if something does."""
    if (found := by_function(SPECIAL, function)) is not None:
        return found
    is_python = type(function) is types.FunctionType
    of_all = BY_CODE.get(id(function.__code__)) if is_python else BY_TYPE.get(type(function))
    if of_all is None and is_python:
        of_all = BY_NAME.get((function.__module__, function.__qualname__))
    return None if of_all is None else functools.partial(of_all, function)


@functools.lru_cache(maxsize=4096)
def refuses(function: Any, count: int, *names: str) -> bool:
    """Whether a method in C refuses so many arguments and these names."""
    is_in_c = isinstance(function, METHODS_IN_C)
    text = function.__text_signature__ if is_in_c else None
    if not text:
        return False  # nobody knows
    space = collections.ChainMap[str, Any]({}, sys.modules)  # defaults are parts of modules
    try:  # inspect parses the text itself, which takes five times as long
        exec(f"def method{text.replace('$', '')}: ...", {}, space)
        inspect.signature(space["method"]).bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return True
    except (SyntaxError, NameError, AttributeError):  # as of `<unrepresentable>`
        pass
    return False


# ------------------------------------------------------------------------------ about objects


@stands_for(isinstance)
def _isinstance(m: Capturing, obj: Any, kinds: Any, /) -> bool:
    if isinstance(kinds, tuple):
        return any(_isinstance(m, obj, kind) for kind in kinds)
    is_number = issubclass(type(obj), Computed) or is_open(obj)
    own = m.kind_of(obj) if is_number or type(obj) is FakeTensor else type(obj)
    meta = type(kinds)
    if not isinstance(kinds, type) or (meta is not type and kinds is not own):
        custom = attributes.class_lookup(m, meta, "__instancecheck__")
        if isinstance(custom, types.FunctionType) and custom.__module__ not in _OF_ABCS:
            return m.truth(m.call(custom, kinds, obj))
    if is_number:
        return issubclass(own, kinds)
    for kind in typing.get_args(kinds) if type(kinds) is types.UnionType else (kinds,):
        asked_again(m, own, kind, obj)
    if type(obj) is not FakeTensor:
        return isinstance(obj, kinds)
    if kinds is torch.nn.Buffer and _getattr(m, obj, "_is_buffer", False):
        return True
    if (names := protocol_names(kinds)) is not None:  # a stand-in has more
        return all(hasattr(own, name) for name in names)
    return kinds is not FakeTensor and (isinstance(obj, kinds) or issubclass(own, kinds))


@stands_for(issubclass)
def _issubclass(m: Capturing, cls: Any, kinds: Any, /) -> bool:
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        asked_again(m, cls, kind)
    return issubclass(cls, kinds)


_OF_ABCS = ("abc", "_py_abc", "typing", "torch.nn.parameter", "torch")


@stands_for(getattr)
def _getattr(m: Capturing, obj: Any, name: str, /, *default: Any) -> Any:
    try:
        return m.attribute(obj, name)
    except AttributeError:
        if not default:
            raise
        return default[0]


@stands_for(hasattr)
def _hasattr(m: Capturing, obj: Any, name: str, /) -> bool:
    return _getattr(m, obj, name, ABSENT) is not ABSENT


@stands_for(type)
def _type(m: Capturing, obj: Any, /, *body: Any, **kwargs: Any) -> Any:
    if not body:
        is_fake = type(obj) is FakeTensor
        return m.attribute(obj, "__class__") if is_fake else m.kind_of(obj)
    if len(body) != 2 or not all(map(isinstance, body, (tuple, dict))):
        return type(obj, *body, **kwargs)  # the TypeError
    bases, namespace = map(m.plain, body)
    refuse_hooks(obj, bases, namespace)
    of_caller = m.frames[-1].globals.get("__name__")
    named = {} if of_caller is None else {"__module__": of_caller}
    made = type(obj, bases, {**namespace, **named, **namespace}, **kwargs)
    m.made_classes.add(made)
    return made


def refuse_hooks(name: str, bases: Any, namespace: Any, meta: type = type) -> None:
    """End the graph before a class whose making runs code of the program's within `type`."""
    metas = {meta, *map(type, bases)}
    hooks = [
        (x, hook) for x in metas for hook in ("__call__", "__new__", "__init__", "__prepare__")
    ]
    hooks += [(base, "__init_subclass__") for base in bases]
    hooks += [(type(item), "__set_name__") for item in namespace.values()]
    for owner, hook in hooks:
        found = getattr(owner, hook, None)
        found = getattr(found, "__func__", found)
        if isinstance(found, types.FunctionType) and not is_trusted(found.__module__):
            raise GraphBreak(f"making the class {name} calls {found.__qualname__}")


@stands_for(id)
def _id(m: Capturing, obj: Any, /) -> int:
    real, at = m.world.inputs.get(id(obj), (obj, m.world.origin(obj)))  # guards a module
    is_fixed = isinstance(obj, (type, types.ModuleType, torch.nn.Module, torch.optim.Optimizer))
    is_tensor = type(obj) is FakeTensor
    if m.frames[-1].globals is vars(copy):  # which no one else looks at
        return id(obj)
    if not (is_fixed or is_scalar(obj)):
        if at is None and not is_tensor:
            if type(obj) is not types.FunctionType:  # torch._dynamo asks for its own
                show_address(m.world, obj)
        elif at is None or isinstance(at if is_tensor else at.root, Local):
            raise GraphBreak("id() of an object from outside differs from call to call")
        else:
            m.world.fact(IdMatch, at, real)
    m.world.passing.append("an address")
    return id(real)


@stands_for(sys.exc_info)
def _exc_info(m: Capturing) -> tuple[Any, Any, Any]:
    error = handled(m)
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


def handled(m: Capturing) -> BaseException | None:
    if m.handled is None:
        if sys.exception() is not None:
            raise GraphBreak("whoever calls the compiled function is handling an exception")
        m.world.fact(EqualsMatch, given_by(sys.exception, "the exception that is handled"), None)
    return m.handled


@stands_for(hash)
def _hash(m: Capturing, x: Any, /) -> int:
    if (found := ask(m, x, "__hash__")) is not ABSENT:
        return attributes.by_c(hash, "__hash__", concrete(found))  # type: ignore[no-any-return]
    if type(x) is FakeTensor:
        return _id(m, x)  # type: ignore[no-any-return]
    x = concrete(x)
    if any(type(part) is FakeTensor for part in attributes.flat(x)):
        raise GraphBreak("the hash of a tensor differs from call to call")
    m.look((x,), COMPARED)
    for part in by_identity(x):
        _id(m, part)  # which it is made of
    m.world.passing.append("a hash")
    return hash(x)


SPECIAL[print] = Breaking(
    "print() shows what is known only when the graph has run", "remove the print"
)
stands_for(eval, exec, compile, open, input, breakpoint, __import__, dir)(
    Breaking("a builtin that reaches beyond its arguments")
)


@stands_for(globals)
def _globals(m: Capturing) -> Any:
    names = m.frames[-1].globals
    module = names.get("__name__", "")
    m.world.mirror_of_globals(names, module)
    return m.world.hold(names, module)


@stands_for(locals)
def _locals(m: Capturing) -> Any:
    if m.frames[-1].code.co_freevars:
        raise GraphBreak("locals() with variables of a function around")
    return variables(m)


@stands_for(vars)
def _vars(m: Capturing, obj: Any = ABSENT, /) -> Any:
    if obj is ABSENT:
        return _locals(m)
    found = _getattr(m, obj, "__dict__", ABSENT)
    return vars(0) if found is ABSENT else found  # the TypeError


@stands_for_each(
    itertools.repeat, itertools.count, slice, object, property, staticmethod, classmethod,
    types.MethodType, operator.itemgetter, operator.attrgetter, operator.methodcaller,
    functools.partial, callable,
    torch.profiler.record_function, *STATE_QUERIES,
)  # fmt: skip
def _natively(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    m.look(args if function in (itertools.count, itertools.repeat) else (), AS_NUMBERS)
    return function(*args, **kwargs)


@stands_for(inspect.signature)
def _signature(m: Capturing, function: Any, /, **kwargs: Any) -> inspect.Signature:
    at = m.world.origin(function.__func__ if type(function) is types.MethodType else function)
    if at is not None and not isinstance(at, Held):
        raise GraphBreak("the signature of what may be another function at the next call")
    return inspect.signature(function, **kwargs)


@stands_for_each(*SWITCHED_BY)
def _asked_of_state(function: Any, m: Capturing) -> Any:
    found = function()
    if any(node.target in SWITCHED_BY[function] for node in m.recorder.graph.nodes):
        return found  # the program itself has set it
    place: Any = given_by(function, f"{function.__name__}()")
    if type(found) is list:
        m.world.gives(place, tuple, "", tuple(found))
        return found
    return m.world.load(found, place)


@stands_for_each(*DEVICES)
def _is_there(function: Any, m: Capturing) -> int:
    found: int = function()
    m.recorder.answers.append((function, (), {}, found))
    return found


# ------------------------------------------------------------------------------ operators


def _operator(name: str, kind: Any) -> Function:
    return lambda m, *operands: getattr(m, name)(kind, *operands)


# What is an operation of the machine's, or of attributes.py's, on the same operands.
SPECIAL.update({
    setattr: lambda m, obj, name, x, /: m.store_attribute(obj, name, x),
    delattr: lambda m, obj, name, /: m.delete_attribute(obj, name),
    object.__setattr__: store_plainly,
    object.__delattr__: lambda m, x, name, /: store_plainly(m, x, name, DELETED),
    object.__getattribute__: attributes.of_instance,
    object.__eq__: lambda m, x, other, /: m.identical(x, other) or NotImplemented,
    object.__hash__: lambda m, x, /: _id(m, x) and object.__hash__(x),
    operator.getitem: lambda m, x, key, /: m.subscript(x, key),
    operator.setitem: lambda m, x, key, item, /: m.store_subscript(x, key, item),
    operator.delitem: lambda m, x, key, /: m.delete_subscript(x, key),
    operator.contains: lambda m, x, item, /: m.contains(x, item),
    operator.is_: lambda m, x, other, /: m.identical(x, other),
    operator.is_not: lambda m, x, other, /: not m.identical(x, other),
    operator.truth: lambda m, x, /: m.truth(x),
    **{f: _operator("binary", kind) for kind, f in enumerate(BINARY)},
    **{f: _operator("unary", kind) for kind, f in UNARY.items()},
    **{f: _operator("compare", symbol) for symbol, f in COMPARISONS.items()},
    super: attributes.super_of,
    sys.exception: handled,
    sys.getrecursionlimit: lambda m: m.world.load(room.now, given_by(sys.getrecursionlimit)),
    threading.get_ident: lambda m: m.world.load(
        threading.get_ident(), given_by(threading.get_ident)
    ),
    torch.compiler.is_exporting: lambda m: m.policy.is_exporting,
    # a graph has no parts to name
    torch.profiler.record_function.__enter__: lambda m, manager: manager,
    torch.profiler.record_function.__exit__: lambda m, *args: None,
})  # fmt: skip


@stands_for_each(*(vars(kind)["__get__"] for kind in (types.FunctionType, *METHODS_IN_C)))
def _bound(get: Any, m: Capturing, *given: Any) -> Any:
    """A function or a method in C with what it is of: `object.__setattr__.__get__(x)`."""
    return get(*given)


@stands_for(attributes.through)
def _through(m: Capturing, found: Any, name: str, obj: Any, /, *args: Any) -> Any:
    return m.call(attributes.bound(m, found, obj, type(obj), name), *args)


BY_TYPE[typing.NewType] = lambda kind, m, x, /: x


@stands_for(
    *(vars(kind)["__get__"] for kind in (types.GetSetDescriptorType, types.MemberDescriptorType))
)
def _of_descriptor(m: Capturing, found: Any, obj: Any, kind: Any = None, /) -> Any:
    """What a descriptor in C gives: `type.__dict__["__mro__"].__get__(cls)`, say."""
    if found.__objclass__ is type and isinstance(obj, type):
        return found.__get__(obj)  # whatever the class of the class has under this name
    raise GraphBreak(f"{found.__name__} of a class in C is read through its descriptor")


@stands_for(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling)
def _is_compiling(m: Capturing) -> bool:
    f = m.frames[-1]
    if f.code is call_impl.__code__:  # told so, it does not call such hooks where `forward` raises
        hooks = m.attribute(m.load_cell(f, "self"), "_forward_hooks_always_called")
        if m.truth(hooks):
            return False
    m.asks_compiling = True
    if not is_trusted(m.frames[-1].globals.get("__name__", "")):
        m.world.varies.asks_compiling = True
    return m.is_compiling


@stands_for_each(str, repr)
def _as_text(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs:
        m.look(args)
        return function(*args, **kwargs)
    return m.format(args[0], "s" if function is str else "r", None)


@stands_for(os.fspath)
def _fspath(m: Capturing, path: Any) -> Any:
    found = ask(m, path, "__fspath__")
    return os.fspath(path) if found is ABSENT else found


@stands_for_each(int, float)
def _to_number(kind: Any, m: Capturing, x: Any = 0, /, *base: Any, **kwargs: Any) -> Any:
    if not base and not kwargs and is_open(x):
        return symbols.converted(x, kind)
    if type(x) is FakeTensor and (base or kwargs):
        return kind(object(), *base, **kwargs)  # the TypeError
    method = f"__{kind.__name__}__"
    if is_array(x) and not (base or kwargs or x.known) and x.is_number():
        x = x.tensor
    elif (found := ask(m, x, method)) is not ABSENT:
        return found
    if type(x) is FakeTensor:
        return m.call(getattr(x, method))  # C code would refuse a Number
    if type(x) is Number:
        found = None if x.kind is kind else before_graph(m.world, kind, x)
        return converted(x, kind) if found is None else found
    m.look((x, *base), AS_NUMBERS)
    return kind(x, *base, **kwargs)


@stands_for(bool)
def _to_bool(m: Capturing, x: Any = False, /) -> Any:
    recorder, found = m.recorder, x
    if type(x) is FakeTensor and not m.modes:
        with no_torch_function():
            found = read(recorder, "item", (x,))
    if type(found) is Number and found.is_late:
        return converted(found, bool)
    if not symbols.is_unbacked(found):
        return m.truth(x)
    recorder.has_numbers = True
    return Number(None, frozenset(), bool, (bool, found), is_late=True)


SPECIAL[map_aggregate] = lambda m, a, fn: map_aggregate(m.deep(a), Called(m, fn))


# ------------------------------------------------------------------------------ checks of sizes


@stands_for(torch._check_with)
def _check_with(m: Capturing, error_type: Any, cond: Any, message: Any = None) -> None:
    """A check of torch's, whose own code imports sympy. Where it fails, eager says what it says."""
    is_late = type(cond) is torch.SymBool or (type(cond) is Number and cond.kind is bool)
    if is_late and m.asserts(cond, True):
        return
    if not (type(cond) is bool or is_late) or not m.truth(cond):
        raise GraphBreak("a check of torch's fails", raises=True)


@stands_for(getattr(torch._check_is_size, "__wrapped__", torch._check_is_size))
def _check_is_size(m: Capturing, i: Any, message: Any = None, *, max: Any = None) -> None:
    _check_with(m, RuntimeError, operated(operator.ge, i, 0))
    if max is not None:
        _check_with(m, RuntimeError, operated(operator.le, i, max))


@stands_for(torch._has_compatible_shallow_copy_type)
def _may_take_data(m: Capturing, x: Any, other: Any) -> bool:
    """Whether `x.data = other` is possible: of FakeTensors it always seems so.

    source   c10/core/TensorImpl.h, has_compatible_shallow_copy_type
    """
    if m.modes:
        raise GraphBreak("a mode hears whether a tensor may take the data of another")
    with no_torch_function():
        kinds = [(t.device.type == "meta", t.layout) for t in (x, other)]
    return kinds[0] == kinds[1]


# ------------------------------------------------------------------------------ torch's state


@stands_for_each(*STATE_SWITCHES)
def _switch(function: Any, m: Capturing, *args: Any) -> Any:
    m.recorder.graph.call_function(function, args)
    return function(*args)


@stands_for_each(*FIXED_ANSWERS)
def _answer(function: Any, *_: Any, **__: Any) -> Any:
    return FIXED_ANSWERS[function]


@stands_for_each(set_default_dtype, *dict.fromkeys(itertools.chain(*SWITCHED_BY.values())))
def _set_state(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> None:
    if not m.recorder.is_main:
        raise GraphBreak("torch's state is switched in a function of a call")
    # as it was is what the graph ends with
    for get, setters in SWITCHED_BY.items():
        if function in setters:
            m.call(get)
    args = tuple(m.plain(x) for x in args)
    function(*args, **kwargs)
    m.recorder.graph.call_function(function, args, kwargs)


# Tensors that are made in inference mode are of another kind, so a graph runs in it wholly, its
# piece entering the mode around the graph, or has a part without gradients in its place, as long as
# nothing shows that: `Anew`. While it is captured the mode is really on.
_mode: Any = torch.inference_mode


@stands_for(_mode.__enter__)
def _enter(m: Capturing, manager: Any) -> None:
    before = State.now()
    m.regions.append((manager, enter_inference_mode(m.attribute(manager, "mode"))))
    m.recorder.switch(before, State.now())  # it switches gradients, too


@stands_for(_mode.__exit__, warnings.catch_warnings.__exit__)
def leave_region(m: Capturing, manager: Any, *error: Any) -> None:
    if not m.regions or m.regions[-1][0] is not manager:
        raise GraphBreak(f"a {type(manager).__name__}, which began before this graph, ends here")
    _, context = m.regions.pop()
    within = State.now()
    context.__exit__(None, None, None)
    m.recorder.switch(within, State.now())  # the end of inference mode ends autocast, too
    if getattr(context, "said", None):
        raise GraphBreak("a torch call warns where the program records it")


@contextlib.contextmanager
def left(m: Capturing) -> Iterator[None]:
    """Leaves, at the end, what the program entered, and lets no more of it run."""
    try:
        yield
    finally:
        m.is_over = True
        while m.regions:
            m.regions.pop()[1].__exit__(None, None, None)


# ---------------------------------------------------------------------------- library
# What stands in for functions of Python's library: re, warnings, logging, frames, weakref, and what
# changes a class.
#
# Warnings and records of a log come after the graph, from the program's own lines, as long as no
# code of the program's gets them: a handler, a filter or a stream of its own ends the graph.


@stands_for_each(
    re.match, re.search, re.fullmatch, re.sub, re.subn, re.split, re.findall, re.finditer,
    re.compile, re.escape,
)  # fmt: skip
def on_text(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """A function of `re`, or a method of a pattern or match."""

    def shown(x: Any) -> Any:
        if callable(x) and "sub" in function.__name__:  # what to put in place of a match
            return lambda match: whole_text(m.call(x, match))
        return str.__str__(x) if isinstance(x, str) else whole_text(x)

    if any(type(x) is re.RegexFlag and x & re.DEBUG for x in (*args, *kwargs.values())):
        raise GraphBreak("a pattern is printed as it is compiled")
    args, kwargs = tuple(map(shown, args)), {key: shown(x) for key, x in kwargs.items()}
    if not all(is_scalar(x) or callable(x) for x in (*args, *kwargs.values())):
        raise GraphBreak(f"re.{function.__name__}() of more than texts and patterns")
    found = function(*args, **kwargs)
    return iter([*found]) if function.__name__ == "finditer" else found


@stands_for_each(
    vars(dataclasses)["_process_class"], functools.total_ordering, typing.runtime_checkable,
)  # fmt: skip
def _of_made_class(function: Any, m: Capturing, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What only changes a class: one that the program made is real, others are not changed."""
    if cls not in m.made_classes:
        raise GraphBreak(f"{function.__qualname__}() of a class from outside")
    made = function(cls, *args, **kwargs)
    m.made_classes.add(made)
    return made


@stands_for(collections.namedtuple)
def _namedtuple(m: Capturing, /, *args: Any, **kwargs: Any) -> type:
    kwargs.setdefault("module", m.frames[-1].globals.get("__name__"))
    args = tuple(x if is_scalar(x) else tuple(m.items(x)) for x in args)  # as they are now
    made: type = m.world.made(collections.namedtuple, *args, **kwargs)
    m.made_classes.add(made)
    return made


@stands_for(weakref.ref)
def _reference(m: Capturing, obj: Any, callback: Any = None, /) -> Any:
    """A weak reference is real: on the machine objects live as long as they do in Python."""
    if callback is not None:
        raise GraphBreak("a weak reference that tells the program when its object is gone")
    if isinstance(obj, Computed) or type(obj) is types.GeneratorType:
        raise GraphBreak(f"a weak reference to a {m.kind_of(obj).__name__} of the graph")
    return weakref.ref(obj)


# ------------------------------------------------------------------------------ frames


class _Unknown:
    """An attribute of a frame that only Python knows."""

    def __get__(self, frame: Any, kind: Any = None) -> Any:
        raise GraphBreak("the variables of a frame, or who called the compiled function")


class _Standing(types.SimpleNamespace):
    """What sys._getframe gives: of a frame on the machine what a program asks it for."""

    f_back = f_locals = f_lasti = f_trace = f_builtins = _Unknown()
    __qualname__ = "frame"


@stands_for(sys._getframe)
def _getframe(m: Capturing, depth: int = 0, /) -> Any:
    if depth >= len(m.frames):
        raise GraphBreak("the frame of whoever called the compiled function")
    f = m.frames[-1 - depth]
    names, module = f.globals, f.globals.get("__name__", "")
    m.world.mirror_of_globals(names, module)
    found = _Standing(f_code=f.code, f_lineno=f.instruction.line)
    found.f_globals = m.world.hold(names, module)
    if depth + 1 < len(m.frames):
        found.__dict__["f_back"] = _getframe(m, depth + 1)
    return found


_module_name: Any = getattr(sys, "_getframemodulename", _getframe)  # from 3.12 on
SPECIAL[_module_name] = lambda m, depth=0: _getframe(m, depth).f_globals["__name__"]

# ------------------------------------------------------------------------------ what is said


def say_later(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> None:
    """Call a function after the graph, from the lines that the program is at."""
    for x in (*args, *kwargs.values()):
        origin = m.world.origin(x)
        if isinstance(x, logging.Logger) and origin is not None:
            m.world.fact(IdMatch, origin, x)
        elif not is_scalar(x) and not isinstance(x, type):
            raise GraphBreak("what is said of an object may be another thing after the graph")
    m.world.later.append(Later(function, args, kwargs, [Line.of(f) for f in m.frames]))


_warnings: Any = warnings
_SEEN = "code of the program's takes what is said, and may tell others"


def _sink() -> Any:
    """The list that warnings are appended to; else whether code of the program's gets them."""
    show = inspect.unwrap(_warnings._showwarnmsg_impl)  # as long as a capture hears them
    if warnings.showwarning is not _warnings._showwarning_orig:
        return True
    if isinstance(show, types.BuiltinFunctionType):
        return show.__self__ if type(show.__self__) is list else True
    return show.__module__ != "warnings" or not _is_in_c(sys.stderr)


def _is_in_c(stream: Any) -> bool:
    return stream is None or isinstance(stream.write, types.BuiltinFunctionType)


class _Caught(warnings.catch_warnings):
    """What the program entered, on during a capture since torch calls warn; records in `said`."""

    said: Any = None

    def __enter__(self) -> Any:
        self.said = super().__enter__()
        return self.said


def _is_caught(m: Capturing) -> bool:
    return any(type(context) is _Caught for _, context in m.regions)


@stands_for(warnings.catch_warnings.__enter__)
def _catch_warnings(m: Capturing, manager: Any) -> Any:
    """A graph has it wholly or not at all, and the program's own warnings end the graph."""
    if m.attribute(manager, "_module") is not warnings:
        raise GraphBreak("warnings.catch_warnings() of another module")
    if m.truth(m.attribute(manager, "_entered")):
        raise GraphBreak("what catches warnings is entered twice")
    m.call(setattr, manager, "_entered", True)  # which classes built on it read
    context = _Caught(record=m.truth(m.attribute(manager, "_record")))
    context.__enter__()
    m.regions.append((manager, context))
    if (given := m.attribute(manager, "_filter")) is not None:
        warnings.simplefilter(*given)
    return context.said


@stands_for_each(warnings.simplefilter, warnings.filterwarnings, warnings.resetwarnings)
def _filter(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> None:
    if not _is_caught(m):
        raise GraphBreak(f"warnings.{function.__name__}() acts on all that follows")
    function(*args, **kwargs)


@stands_for(warnings.warn)
def _warn(
    m: Capturing, message: Any, category: Any = None, stacklevel: Any = 1, source: Any = None
) -> None:
    if _is_caught(m):
        kind = type(message) if isinstance(message, Warning) else category or UserWarning
        action, text, of, module, line = warnings.filters[0]
        if action == "ignore" and issubclass(kind, of) and not (text or module or line):
            return
        raise GraphBreak("a warning within warnings.catch_warnings()")
    if type(stacklevel) is not int or stacklevel > len(m.frames):
        raise GraphBreak("a warning that names the line of whoever called the compiled function")
    sink = given_by(_sink, "what warnings go to")
    if m.world.is_changed_inside(warnings) or m.world.said_to(_sink(), sink):
        raise GraphBreak(_SEEN)
    say_later(m, warnings.warn, (message, category, stacklevel, source), {})


_LEVELS = {
    getattr(owner, name): level
    for owner in (logging, logging.Logger)
    for name, level in (
        ("debug", 10), ("info", 20), ("warning", 30), ("warn", 30), ("error", 40),
        ("critical", 50), ("log", None),
    )
}  # fmt: skip


@stands_for_each(*_LEVELS)
def _logs(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> None:
    is_method, level = "." in function.__qualname__, _LEVELS[function]
    logger, *said = args if is_method else (m.world.hold(logging.root, "root logger"), *args)
    at = said[0] if level is None else level
    origin = m.world.origin(logger)
    if origin is None or type(at) is not int or {"exc_info", "stack_info"} & {*kwargs}:
        raise GraphBreak("logging with what is known only as the program runs")
    if not is_method:
        place = ResultOf(origin, _has_handlers, "whether there are handlers of ")
        if not m.world.load(_has_handlers(logger), place):
            raise GraphBreak("logging sets itself up when it is called for the first time")
    if m.world.is_changed_inside(*_asked(logger)):
        raise GraphBreak("logging, of which the program has changed something before")
    asked = ResultOf(origin, functools.partial(_who_sees, at), "what is logged by ")
    seen_by = m.world.load(_who_sees(at, logger), asked)
    if seen_by == "the program":
        raise GraphBreak(_SEEN)
    if seen_by:
        say_later(m, function, args, kwargs)


def _has_handlers(logger: logging.Logger) -> bool:
    return bool(logger.handlers)


def _asked(logger: logging.Logger) -> list[Any]:
    """The loggers, their lists and the handlers that decide about a record."""
    found: list[Any] = [logger.manager]
    at: logging.Logger | None = logger
    while at is not None:
        found += [at, at.handlers, *at.handlers]
        at = at.parent if at.propagate else None
    return found


_FILES = ("FileHandler", "RotatingFileHandler", "TimedRotatingFileHandler")


def _who_sees(level: int, logger: logging.Logger) -> str:
    """Who gets to know of a record: nobody (""), "others", or "the program"."""
    if not logger.isEnabledFor(level):
        return ""
    is_plain = type(logger) in (logging.Logger, logging.RootLogger) and not logger.filters
    is_plain &= logging.getLogRecordFactory() is logging.LogRecord
    for handler in (x for x in _asked(logger) if isinstance(x, logging.Handler)):
        # it only writes text to a stream in C
        kind, is_own = type(handler), vars(handler).keys() & {"emit", "handle", "format"}
        is_plain &= kind in (logging.NullHandler, logging.StreamHandler) or (
            kind.__module__ in ("logging", "logging.handlers") and kind.__name__ in _FILES
        )
        is_plain &= type(handler.formatter) in (type(None), logging.Formatter)
        is_plain &= _is_in_c(getattr(handler, "stream", None))
        is_plain &= not (handler.filters or is_own)
    return "others" if is_plain else "the program"
