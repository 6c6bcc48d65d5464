"""What a call becomes: inlined, recorded in the graph, run natively, or a graph break.

a Python function            its bytecode runs on the machine
a function of torch          natively, under the recorder, which writes it into the graph
a class                      __new__ natively, __init__ on the machine
a C function that is known   natively, on copies of what came from outside
any other                    a graph break
"""

from __future__ import annotations

import builtins
import contextvars
import copy
import datetime
import enum
import functools
import inspect
import itertools
import json
import math
import operator
import os
import re
import sys
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from fusee.capture import attributes, containers, symbols
from fusee.capture.attributes import AS_NUMBERS, AS_VALUES, COMPARED, Capturing, class_lookup, flat
from fusee.capture.builtins import (
    BY_TYPE,
    on_text,
    refuse_hooks,
    refuses,
    special,
    stands_for,
    stands_for_each,
)
from fusee.capture.containers import METHODS, sort_key
from fusee.capture.dynamic import (
    NUMPY,
    Computed,
    Number,
    asked_by_c,
    before_graph,
    compute,
    holds_number,
    is_array,
    need_values,
    takes_late,
)
from fusee.capture.frame import (
    ABSENT,
    CALLED_IN_C,
    CONTAINERS,
    METHODS_IN_C,
    Frame,
    begun,
    called,
    is_iterable,
    is_scalar,
)
from fusee.capture.graph_break import Forbidden, GraphBreak, Unready
from fusee.capture.guards import Empty, IdMatch, Length
from fusee.capture.mirrors import VIEWS, Stepping, class_of, new_tuple
from fusee.capture.policy import HOOKS, original
from fusee.capture.sources import IN_C, Held, ResultOf, is_trusted
from fusee.capture.symbols import concrete, holds_open, is_open, operated
from fusee.capture.torch_api import (
    FOR_DYNAMO,
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    has_global_hooks,
    is_graph_function,
    is_the_programs,
    marks_static,
    pytree,
    scripted,
)
from fusee.fake.torch_python import moved
from fusee.source import Args, Kwargs

# ---------------------------------------------------------------------------- natives
# C functions: which run natively while a program is captured.
#
# A C function may see containers from outside only as their copies, and instances from outside not
# at all, since it could read anything of them without a guard. What is neither here nor in
# builtins.py ends the graph.

_PURE: set[Any] = {
    abs, round, divmod, pow, ord, chr, hex, oct, bin, ascii, format, len, math.prod,
    sys.intern, str.maketrans, bytes.maketrans,
    # os.path.normpath and splitroot, or what they call
    *(vars(sys.modules[os.name]).get(name) for name in ("_path_normpath", "_path_splitroot_ex")),
}  # fmt: skip
_BY_METHOD = {
    abs: "__abs__", round: "__round__", format: "__format__", math.floor: "__floor__",
    math.ceil: "__ceil__", math.trunc: "__trunc__", operator.index: "__index__",
}  # fmt: skip
_PURE_MODULES = frozenset(
    "math cmath _operator itertools _bisect _struct unicodedata numpy.lib.array_utils".split()
)
_DATES = (datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
_PURE_CLASSES = (
    slice, range, complex, bytes, bytearray, memoryview, torch.Size, torch.device, torch.dtype,
    torch.finfo, torch.iinfo, *_DATES,
)  # fmt: skip
_METHOD_OWNERS = (
    str, bytes, int, float, complex, bool, tuple, frozenset, range, slice, types.MappingProxyType,
    re.Pattern, re.Match, BaseException, *_DATES, *CONTAINERS, *VIEWS,
)  # fmt: skip
_OF_NOW = ("now", "utcnow", "today")


def call_native(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A C function without a stand-in."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType) and owner is not torch._C:
        owner = None
        name = _BY_METHOD.get(function)
        if name and args and (found := attributes.ask(m, args[0], name, *args[1:])) is not ABSENT:
            return found
    home = getattr(getattr(function, "__objclass__", None), "__name__", "")
    if isinstance(owner, (FakeTensor, *NUMPY)):  # whose stand-ins are those of a class's methods
        of = torch.Tensor if type(owner) is FakeTensor else type(owner)
        stand = special(getattr(of, function.__name__, None))
        if stand is not None:
            return stand(m, owner, *args, **kwargs)
    if type(owner) is FakeTensor or (args and home in ("TensorBase", "Tensor")):
        return on_tensors(m, function, args, kwargs)
    is_unbound = isinstance(function, METHODS_IN_C)
    error = args[0] if is_unbound and args else owner
    if isinstance(error, BaseException) and m.is_outside(error):
        if function.__name__ not in ("__str__", "__repr__"):
            raise _unknown(function)  # its `__init__` or `add_note` changes it
    if is_unbound:
        return _unbound(m, function, args, kwargs)
    if isinstance(owner, contextvars.ContextVar) and function.__name__ == "get" and not kwargs:
        return containers.context_value(m, owner, *args)
    if isinstance(owner, type) and function.__name__ == "__subclasses__":
        classes: list[type] = type.__subclasses__(owner)
        place = ResultOf(Held(owner, owner.__qualname__), type.__subclasses__, "the subclasses of ")
        m.world.fact(Length, place, len(classes))
        return [m.world.load(one, m.world.item(place, k)) for k, one in enumerate(classes)]
    if isinstance(owner, type) and owner in _METHOD_OWNERS and owner not in CONTAINERS:
        if function.__name__ in _OF_NOW:
            raise _unknown(function)
        return _run(m, function, args, kwargs)  # int.from_bytes
    if owner is not None and function.__name__ == "__reduce_ex__":
        return containers.reduced(m, owner)
    if owner is not None and isinstance(owner, _METHOD_OWNERS):
        return _method(m, function, owner, args, kwargs)
    is_pure = function in _PURE if isinstance(function, types.BuiltinFunctionType) else False
    if is_pure or getattr(function, "__module__", None) in _PURE_MODULES:
        return _run(m, function, args, kwargs)
    is_torchs = owner is torch._C or str(getattr(function, "__module__", "")).startswith("torch._C")
    if is_torchs and _QUERY.match(function.__name__) and all(map(is_scalar, args)) and not kwargs:
        if is_scalar(found := function(*args)):
            asked = functools.partial(function, *args)
            return m.world.load(found, ResultOf(Held(asked, function.__name__), operator.call, ""))
    raise _unknown(function)


# What they give is torch's state: a fact.
_QUERY = re.compile("_get_|_is_|_has_|_are_|get_|is_|has_|_accelerator_get")


def _run(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """C code that may look at all that it is given."""
    args, kwargs = tuple(m.deep(x) for x in args), {k: m.deep(x) for k, x in kwargs.items()}
    try:
        if any(map(holds_open, (args, kwargs))):
            return symbols.called(function, args, kwargs)
        if m.recorder.has_numbers and not kwargs and any(type(x) is Number for x in args):
            if function is divmod and all(type(x) is Number or is_scalar(x) for x in args):
                return tuple(m.call(part, *args) for part in (operator.floordiv, operator.mod))
            if (found := before_graph(m.world, function, *args)) is not None:
                return found
            if takes_late(function, args):
                return compute(m.recorder.graph, function, args)
        m.look((*args, *kwargs.values()), AS_VALUES)
        return asked_by_c(m.recorder, function, *args, **kwargs)
    except Exception:
        given = flat(*args, *kwargs.values())
        if not any(isinstance(x, Computed) for x in given):
            raise
        # that it is none of Python's may be what C refuses
        raise GraphBreak(f"{function.__name__}() needs a number that the graph computes") from None


@stands_for(range)
def _range(m: Capturing, *args: Any) -> Any:
    """Of a loop in steps of several, up to an open end, only the number of turns is relied on."""
    f = m.frames[-1]
    if len(args) == 3 and type(args[0]) is type(args[2]) is int and abs(args[2]) > 1:
        start, end, step = args
        is_loop = f.program.instructions[f.next].name == "GET_ITER"  # else the end may be seen
        if is_loop and type(end) is torch.SymInt and not symbols.is_unbacked(end):
            turns = (end - start + step - (1 if step > 0 else -1)) // step
            return range(start, start + concrete(turns if turns > 0 else 0) * step, step)
    return call_class(m, range, args, {})


@stands_for_each(json.dumps, json.loads)
def _as_json(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    leaves = pytree.tree_leaves([*map(m.deep, args), *kwargs.values()])
    if not all(is_scalar(x) or is_open(x) for x in leaves):
        raise GraphBreak(f"json.{function.__name__}() of more than numbers and texts")
    return _run(m, function, args, kwargs)


def _unknown(function: Any) -> GraphBreak:
    name = getattr(function, "__qualname__", None) or repr(function)
    module = getattr(function, "__module__", None)
    full = f"{module}.{name}" if module and module != "builtins" else name
    return GraphBreak(
        f"{full} is not Python code, and not known to be free of effects",
        "move the call out of the compiled function, or see fusee.compiler.allow_in_graph",
    )


def on_tensors(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function of torch, run as torch runs it: the recorder sees what it does."""

    def shown(x: Any) -> Any:
        if isinstance(x, Computed):
            return x.number()
        x = m.deep(x)
        if type(x) in (list, tuple) and any(map(is_array, x)):
            return type(x)(item.number() if is_array(item) else item for item in x)
        return x

    given, named = tuple(map(shown, args)), {key: shown(x) for key, x in kwargs.items()}
    leaves = list(flat(*given, *named.values()))
    # torch would ask an object that is no tensor what becomes of a call with it
    others = (x for x in leaves if not isinstance(x, (FakeTensor, type, TorchFunctionMode)))
    own = next((x for x in others if hasattr(type(x), "__torch_function__")), None)
    if own is None:
        m.look((*given, *named.values()), AS_NUMBERS)
    if m.recorder.has_numbers and (holds_number(given) or holds_number(named)):
        owner = getattr(function, "__self__", None)
        if m.world.seen or m.modes:
            why = "a float that the graph computes beside subclasses of torch.Tensor, modes"
            raise GraphBreak(why)
        if type(owner) is FakeTensor:
            given, function = (owner, *given), getattr(torch.Tensor, function.__name__)
        if type(function) is types.FunctionType:
            need_values(given, named)
        return m.recorder.call(function, *given, **named)
    if own is not None:
        if m.world.seen:
            raise GraphBreak(f"a {type(own).__qualname__} beside subclasses of torch.Tensor")
        method = m.attribute(own, "__torch_function__")
        result = m.call(method, function, (type(own),), given, named)
        if result is not NotImplemented:
            return result
        raise GraphBreak(f"{type(own).__qualname__}.__torch_function__ leaves a call to others")
    function = function if any(isinstance(x, torch.Tensor) for x in leaves) else moved(function)
    with m.world.mode:
        try:
            return function(*given, **named) if named else function(*given)
        except TypeError:
            if not holds_open((given, named)):
                raise
        # torch takes an open number for a float, but not in a list of floats (`scale_factor`)
        return function(*concrete(given), **concrete(named))


@stands_for_each(
    torch.split, torch.Tensor.split, torch.split_with_sizes, torch.ops.aten.split_with_sizes,
    torch.ops.aten.split_with_sizes.default,
)  # fmt: skip
def _split(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """Sizes of parts that only data knows: the graph checks what torch would."""
    given: Any = (*args, None, None, None)
    x, sizes, *rest = given
    parts = m.plain(sizes)
    if type(x) is FakeTensor and isinstance(parts, (list, tuple)) and holds_open(parts):
        whole = x.shape[kwargs.get("dim", rest[0] or 0)]
        *ends, total = itertools.accumulate(parts, functools.partial(operated, operator.add))
        checks: list[Any] = [(operator.eq, total, whole)]  # which says what the last part is
        checks += [(operator.ge, n, 0) for n in parts if is_open(n)]
        for check in (*checks, *((operator.le, end, whole) for end in ends)):
            holds = operated(*check)
            if type(holds) is torch.SymBool and holds.node.is_pending():
                m.expects(holds)
    return on_tensors(m, function, args, kwargs)


def _method(m: Capturing, function: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """A bound method of a builtin container, number or string."""
    name = function.__name__
    of_class = getattr(type(owner), name, None)
    if refuses(of_class, len(args) + 1, *kwargs):
        return function(*args, **kwargs)  # the TypeError
    if type(owner) is types.MappingProxyType:
        if name == "get" and type(args[0]) is str and (cls := class_of(m.world, owner)) is not None:
            found = m.world.class_item(cls, args[0])
            return (*args[1:], None)[0] if found is ABSENT else found
        function = getattr(m.plain(owner), name)
    if isinstance(owner, (re.Pattern, re.Match)):
        return on_text(function, m, *args, **kwargs)
    is_outside = m.is_outside(owner) and isinstance(owner, CONTAINERS)
    if is_outside and name == "append" and type(owner) is list and len(args) == 1 and not kwargs:
        return m.append(owner, *args)
    if is_outside or (isinstance(owner, dict) and name in METHODS):
        # by the class in C that has it: a subclass may have another one in Python
        home = next(c for c in type(owner).__mro__ if c.__flags__ & IN_C and name in c.__dict__)
        return _unbound(m, home.__dict__[name], (owner, *args), kwargs)
    return _with_iterables(m, function, name, args, kwargs)


# These look at nothing that they move.
_MOVE = frozenset(
    "append appendleft extend extendleft insert pop popleft popitem clear copy reverse"
    " rotate keys values items __len__ __init__ __iter__ move_to_end __iadd__".split()
)

_BY_KEY = {"insert", "move_to_end", "pop", "rotate"}  # but at a key, or a place

_TAKE_ITERABLES = frozenset(
    "extend update union intersection difference symmetric_difference join issubset"
    " issuperset isdisjoint intersection_update difference_update fromkeys extendleft"
    " __init__ __iadd__ __ior__".split()
)


def _with_iterables(m: Capturing, function: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    if name == "sort":
        key, reverse = kwargs.get("key"), m.truth(kwargs.get("reverse", False))
        return function(key=sort_key(m, key), reverse=reverse)
    takes_sets = name == "__ior__" and isinstance(function.__self__, set)
    if name in _TAKE_ITERABLES and not takes_sets:
        if isinstance(function.__self__, dict) and name != "fromkeys" and len(args) == 1:
            args = tuple(containers.pairs(m, x) for x in args)
        asks = isinstance(function.__self__, list)
        args = tuple(_shown(m, x, asks) for x in args)
        if name == "join" and len(args) == 1:
            if not is_iterable(args[0]):
                return function(*args)  # the TypeError
            args = ([*args[0]],)
    if name == "pop" and isinstance(function.__self__, set):
        m.world.popped[id(function.__self__)] = function.__self__
        m.world.passing.append("the order of a set")
    found = NotImplemented if kwargs else symbols.method(function.__self__, name, args)
    if found is not NotImplemented:
        return found
    if name not in _TAKE_ITERABLES and name not in _MOVE:
        args, kwargs = concrete(tuple(m.deep(x) for x in args)), concrete(kwargs)
    if name not in _MOVE:
        owner: Any = function.__self__
        compares = isinstance(owner, (*CONTAINERS, tuple, frozenset, *VIEWS))
        looked = (*args, *kwargs.values(), (*owner,) if isinstance(owner, VIEWS) else owner)
        if isinstance(owner, dict) and (name[:2] != "__" or name in ("__contains__", "__ior__")):
            more = args[:1]
            if name in ("update", "__ior__") and isinstance(args[:1] and args[0], dict):
                more = tuple(args[0])
            looked = (*more, *dict.keys(owner))  # not at what they hold
        looked = tuple(x for x in looked if type(x) is not types.GeneratorType)
        m.look(looked, COMPARED + AS_NUMBERS if compares else AS_VALUES)
    elif name in _BY_KEY and args:
        owner = function.__self__
        m.look((args[0], *(owner if isinstance(owner, dict) else ())), COMPARED + AS_NUMBERS)
    return function(*args, **kwargs)


def _shown(m: Capturing, x: Any, asks: bool) -> Any:
    if isinstance(x, dict) or is_scalar(x):
        return m.plain(x)
    # what runs as an iterator is asked may look at what has come so far
    is_lazy = hasattr(type(x), "__next__") and not m.is_outside(x)
    if is_lazy:
        iterator = m.iterate(x)
        if asks:
            m.ask_length(x)

        def coming() -> Iterator[Any]:
            for item in Stepping(m, iterator):
                m.look((item,), COMPARED + AS_NUMBERS)
                yield item

        return coming()
    return m.listed(x) if asks else m.items(x)


def _unbound(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """`dict.__getitem__(self, key)` and the like: what super() gives for a builtin class."""
    if not args or refuses(function, len(args), *kwargs):
        return function(*args, **kwargs)  # the TypeError
    owner, *rest = args
    name = function.__name__
    if isinstance(owner, CONTAINERS):
        if isinstance(owner, dict) and name in METHODS and len(rest) == 1:
            return METHODS[name](m, owner, *rest)
        is_lookup = name == "get" and isinstance(owner, dict)
        is_known = rest and (is_scalar(rest[0]) or issubclass(type(rest[0]), type))
        if m.is_outside(owner) and is_lookup and is_known:
            found = m.world.get(m.world.mirror(owner), rest[0])
            return (*rest[1:], None)[0] if found is ABSENT else found
        if name in containers.CHANGE_SETS and isinstance(owner, set) and m.is_outside(owner):
            return containers.change_set(m, function, owner, *rest)
        shown = (m.plain if name in containers.ASK_SETS else m.in_order)(owner)
        return _with_iterables(m, function.__get__(shown, type(shown)), name, tuple(rest), kwargs)
    if function in (tuple.__getitem__, tuple.__len__, tuple.__iter__):  # which run no methods
        return function(m.plain(owner), *map(concrete, rest))
    if isinstance(owner, _METHOD_OWNERS) or is_scalar(owner) or is_open(owner):
        return _run(m, function, args, kwargs)
    if function is object.__init__:
        return function(*args, **kwargs)  # which only refuses more than it takes
    raise _unknown(function)


def call_class(m: Capturing, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """A class in C: its constructor runs natively if it only computes."""
    if issubclass(cls, (BaseException, types.SimpleNamespace)):
        return cls(*args, **kwargs)
    if cls.__module__ == "torch.return_types" and len(args) == 1 and not kwargs:
        return new_tuple(cls, m.items(args[0]))
    is_enum = type(cls).__name__ in ("EnumMeta", "EnumType")
    if is_enum or issubclass(cls, _PURE_CLASSES) or cls.__module__ in _PURE_MODULES:
        return _run(m, cls, args, kwargs)
    raise _unknown(cls)


# ---------------------------------------------------------------------------- calls


# torch functions in Python that run natively, under the recorder.
_NATIVE_MODULES = frozenset(
    "torch.nn.functional torch.functional torch._tensor torch._jit_internal torch.jit"
    " torch._VF torch.fft torch.linalg torch.special torch.overrides torch._utils"
    " torch._ops torch.utils._pytree torch._library.custom_ops".split()
)

# Those of these are given objects, too.
_OF_OBJECTS = ("torch.utils._pytree", "torch._library.custom_ops")

# But for what tells how the program runs, and what branches on values, to raise.
_IN_PYTHON = (torch._utils.is_compiling, torch.nn.functional.gaussian_nll_loss)


def _of_partial(m: Capturing, function: Any, name: str) -> Any:
    """What a partial is made of, though its class may have an attribute of that name."""
    member = getattr(functools.partial, name)
    if getattr(type(function), name) is member:
        return m.world.slot(function, name)
    real, origin = member.__get__(function), m.world.origin(function)
    if origin is None:
        return real
    return m.world.load(real, ResultOf(origin, member.__get__, f"{name} of "))


def call(m: Capturing, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`."""
    if type(function) is types.MethodType:
        return call(m, function.__func__, function.__self__, *args, **kwargs)
    if type(function) is types.MethodWrapperType and type(function.__self__) is not FakeTensor:
        owner: Any = function.__self__
        if function.__name__ == "__next__" and not args:
            return m.next(owner)
        if type(owner) is types.GetSetDescriptorType and args and type(args[0]) is FakeTensor:
            return on_tensors(m, function, args, kwargs)  # torch.Tensor.shape.__get__
        args = (owner, *args)
        function = vars(function.__objclass__)[function.__name__]
    inner = original(function)
    if type(function) is torch.jit.ScriptFunction:
        inner, args, kwargs = scripted(m.call, function, args, kwargs)
    if inner is not None:
        if id(function) not in m.world.made_by:  # by the program: so is what is in it
            m.world.hold(inner, str(m.world.origin(function)))
        return _instead(m, -1, call(m, inner, *args, **kwargs))
    stand = m.policy.replacement(function) or special(function)
    if m.world.mirrors.only_reads:
        m.world.mirrors.called(function, stand)
    if stand is not None:
        if symbols.Text in map(type, args):  # few functions know open numbers in them
            if not (function in _TAKE_TEXTS or getattr(function, "__module__", "") == "logging"):
                args = tuple(map(symbols.whole_text, args))
        try:
            return _instead(m, m.enters, stand(m, *args, **kwargs))
        except TypeError as error:
            if getattr(error.__traceback__, "tb_next", None) is not None:
                raise
        if isinstance(function, types.BuiltinFunctionType) and function.__module__ == "builtins":
            return function(*args, **kwargs)  # the TypeError
        raise GraphBreak(f"{called(function)} is given arguments that capture does not expect")
    if type(function) is types.FunctionType:
        return _call_function(m, function, args, kwargs)
    if issubclass(type(function), type):
        return _call_class(m, function, args, kwargs)
    if issubclass(type(function), functools.partial):
        target, before, named = (_of_partial(m, function, x) for x in ("func", "args", "keywords"))
        return call(m, target, *before, *args, **{**m.plain(named), **kwargs})
    if issubclass(type(function), (OpOverload, OpOverloadPacket)):
        return on_tensors(m, function, args, kwargs)
    method = attributes.python_method(m, function, "__call__")
    if method is not None and hasattr(type(function), "__getattr__"):
        if not isinstance(function, torch.nn.Module):  # it might answer what is asked below
            return call(m, method, function, *args, **kwargs)
    if is_graph_function(function):
        return on_tensors(m, function, args, kwargs)
    if m.is_generator(getattr(function, "__self__", None)):  # its `send`, say
        return function(*args, **kwargs)
    if issubclass(type(function), CALLED_IN_C):
        return call_native(m, function, args, kwargs)
    if issubclass(type(function), torch.nn.Module):
        return _call_module(m, function, args, kwargs)
    if type(function) is FakeTensor:
        raise TypeError("'Tensor' object is not callable")
    if method is not None:
        return call(m, method, function, *args, **kwargs)
    return call_native(m, function, args, kwargs)


def _instead(m: Capturing, before: int, found: Any) -> Any:
    """What was run instead gave this; `before`: how often a function had been entered."""
    m.is_replaced |= m.enters > before
    return found


_TAKE_TEXTS = {
    isinstance, type, str, print, copy.copy, copy.deepcopy, functools.partial, operator.add,
    operator.mod, warnings.warn,
}  # fmt: skip

# ------------------------------------------------------------------------------ functions


def _is_read(m: Capturing, x: Any) -> bool:
    """Whether code of the program's runs for `x`, or more is read of it than a guard would say."""
    if type(x) in (list, tuple, dict):
        shown = m.plain(x)
        return any(_is_read(m, part) for part in (shown.values() if type(x) is dict else shown))
    runs = hasattr(type(x), "__next__") or (callable(x) and not isinstance(x, (type, FakeTensor)))
    return runs or (m.is_outside(x) and not isinstance(x, (type, *CONTAINERS)))


def _call_function(m: Capturing, function: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    is_native = function.__module__ in _NATIVE_MODULES and function not in _IN_PYTHON
    has_number = m.world.numbers and holds_number((*args, kwargs))  # which torch refuses
    if is_native and function.__module__ in _OF_OBJECTS:
        is_native = not any(_is_read(m, x) for x in (args, kwargs))
    if is_native and not has_number:
        return on_tensors(m, function, args, kwargs)
    if (function.__module__, function.__qualname__) in FOR_DYNAMO:
        return None
    if marks_static(function) and args and type(args[0]) is FakeTensor:
        index = kwargs.get("index", (*args[1:], None)[0])
        axes = range(args[0].dim()) if index is None else [index] if type(index) is int else index
        concrete(tuple(args[0].shape[k] for k in axes))
        return None
    refused = m.policy.refusal(function)
    if isinstance(refused, Forbidden) and not m.is_compiling:  # the program has not been told
        refused = GraphBreak(refused.reason, refused.remedy)
    if refused is not None:
        raise refused
    f = frame_of(m, function, args, kwargs)
    flags = f.code.co_flags
    if flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE):
        raise GraphBreak(f"{function.__qualname__} is asynchronous")
    if flags & inspect.CO_GENERATOR:
        made = begun(f)
        m.generators[made] = f
        return made
    if len(m.frames) > m.deepest:
        raise Unready  # Python has more frames than these, and raises
    return f.run() if m.recorder.calls else f.run_first()


def frame_of(m: Capturing, function: types.FunctionType, args: Args, kwargs: Kwargs) -> Frame:
    """A frame of `function`, its parameters bound, its closure known."""
    m.world.know_cells(function)
    frame, origin = Frame.of(m, function), m.world.origin(function)
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    if defaults and isinstance(origin, Held):  # one fact for all: the tuple cannot change
        place = m.world.place(function, "__defaults__")
        m.world.fact(IdMatch, place, defaults)
        defaults = tuple(
            x if is_scalar(x) else m.world.load(x, m.world.item(place, k))
            for k, x in enumerate(defaults)
        )
    elif defaults and origin is not None:
        defaults = m.world.load(defaults, m.world.place(function, "__defaults__"))
    if named and origin is not None:
        named = m.plain(m.world.load(named, m.world.place(function, "__kwdefaults__")))
    try:
        return frame.bind(defaults, named, args, kwargs)
    except TypeError:  # a default that is given later would be taken
        for name in ("__defaults__", "__kwdefaults__") if origin else ():
            m.plain(m.world.load(getattr(function, name), m.world.place(function, name)))
        raise


BY_TYPE[weakref.ref] = lambda ref, m: m.world.referent(ref)


# ------------------------------------------------------------------------------ modules


def _call_module(m: Capturing, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """A module without hooks is its `forward`; one with hooks runs torch's own __call__."""
    if has_global_hooks():
        raise GraphBreak("hooks for all modules are registered", "register them on one module")
    call_method = class_lookup(m, type(module), "__call__")
    is_torchs = call_method is torch.nn.Module._wrapped_call_impl
    implementation = class_lookup(m, torch.nn.Module, "_call_impl")
    if not is_torchs or is_the_programs(implementation):  # which programs replace for all modules
        return call(m, call_method, module, *args, **kwargs)
    mirror = m.world.attributes(module)
    names = module.__dict__ if mirror is None else mirror.obj
    is_clean = mirror is None or not any(name in mirror.writes for name in HOOKS)
    if not is_clean or any(names.get(name) for name in HOOKS):
        return call(m, torch.nn.Module._call_impl, module, *args, **kwargs)
    if mirror is not None:
        for name in HOOKS:
            if name in names:
                m.world.fact(Empty, m.world.part(mirror, name), names[name])
    # Python goes through functions of nn.Module
    return _instead(m, -1, call(m, m.attribute(module, "forward"), *args, **kwargs))


@stands_for(LazyModuleMixin._infer_parameters)
def _infer_parameters(m: Capturing, module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The hook by which the first call of a lazy module makes its parameters."""
    if m.is_outside(module):
        raise Unready
    hook: Any = LazyModuleMixin._infer_parameters
    return _call_function(m, hook, (module, *args), kwargs)


# ------------------------------------------------------------------------------ classes


def _call_class(m: Capturing, cls: type, args: Args, kwargs: Kwargs) -> Any:
    meta = type(cls)
    if isinstance(cls, enum.EnumMeta) and (len(args) > 1 or "names" in kwargs):
        kwargs = {"module": m.frames[-1].globals.get("__name__"), **kwargs}  # a class is made
    members: Any = cls
    if isinstance(cls, enum.EnumMeta) and members._missing_.__module__ != "enum":
        m.world.passing.append("a member that a class looks for itself")
    if isinstance(cls, enum.EnumMeta) or cls.__flags__ & IN_C:
        return call_class(m, cls, args, kwargs)
    if issubclass(cls, torch.Tensor):
        m.world.allow(cls)
    if meta is not type:
        custom = class_lookup(m, meta, "__call__")
        if isinstance(custom, types.FunctionType):
            return call(m, custom, cls, *args, **kwargs)
        if isinstance(custom, type):  # a TypedDict is made by dict
            return call(m, custom, *args, **kwargs)
    return make_instance(m, cls, *args, **kwargs)


@stands_for(vars(type)["__call__"])
def make_instance(m: Capturing, cls: type, /, *args: Any, **kwargs: Any) -> Any:
    """What type.__call__ does."""
    if isinstance(getattr(cls, "__del__", None), types.FunctionType):
        raise GraphBreak(f"a {cls.__qualname__} is made, whose end runs code of the program's")
    new = class_lookup(m, cls, "__new__")
    new = new.__func__ if isinstance(new, staticmethod) else new
    init = class_lookup(m, cls, "__init__")
    if isinstance(new, types.FunctionType) or special(new) is not None:
        obj = call(m, new, cls, *args, **kwargs)
    elif new is object.__new__:
        if getattr(cls, "__abstractmethods__", None):
            return cls()  # the TypeError
        obj = object.__new__(cls)
        if init is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
    elif issubclass(cls, torch.autograd.Function):
        obj = new(cls)
    elif issubclass(cls, (*CONTAINERS, tuple, str, int, float, BaseException)):
        obj = new(cls, *(m.plain(x) for x in args), **kwargs)
    else:
        return call_class(m, cls, args, kwargs)
    if cls not in (kind := m.kind_of(obj)).__mro__:  # whatever its class says it is
        return obj
    init = class_lookup(m, kind, "__init__")
    if isinstance(init, types.FunctionType):
        result = call(m, init, obj, *args, **kwargs)
        if result is not None:
            raise TypeError(f"__init__() should return None, not {type(result).__name__!r}")
    elif init is not object.__init__ and init is not ABSENT:
        init(obj, *(m.plain(x) for x in args), **kwargs)
    return obj


@stands_for(builtins.__build_class__)
def build_class(m: Capturing, body: Any, name: str, /, *bases: Any, **kwargs: Any) -> type:
    """What the statement `class` does.

    source   https://docs.python.org/3/reference/datamodel.html#customizing-class-creation
    """
    theirs = (x for x in bases if not is_trusted(type(x).__module__))  # not those of typing
    is_asked = any(hasattr(x, "__mro_entries__") for x in theirs)
    resolved = call(m, types.resolve_bases, bases) if is_asked else types.resolve_bases(bases)
    refuse_hooks(
        name, resolved, {}, kwargs.get("metaclass", type(resolved[0]) if resolved else type)
    )
    meta, namespace, keywords = types.prepare_class(name, resolved, kwargs)
    f = frame_of(m, body, (), {})
    f.names = namespace
    cell = f.run()
    if resolved != bases and "__orig_bases__" not in namespace:
        namespace["__orig_bases__"] = bases
    refuse_hooks(name, resolved, namespace, meta)
    made: type = meta(name, resolved, namespace, **keywords)
    if isinstance(cell, types.CellType):
        assert cell.cell_contents is made
    m.made_classes.add(made)
    return made
