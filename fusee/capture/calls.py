"""What a call becomes: inlined, recorded in the graph, run natively, or a graph break.

a Python function            its bytecode runs on the machine
a function of torch          natively, under the recorder, which writes it into the graph
a class                      __new__ natively, __init__ on the machine
a C function that is known   natively, on copies of what came from outside (natives.py)
any other                    a graph break
"""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import types
import weakref
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from fusee.capture import attributes, natives
from fusee.capture.breaks import GraphBreak, Unready
from fusee.capture.capturing import Capturing
from fusee.capture.facts import ABSENT
from fusee.capture.frame import OPCODES, Frame, suspended
from fusee.capture.library import say_later
from fusee.capture.origin import Held
from fusee.capture.policy import original
from fusee.capture.stand_ins import Args, Kwargs, refuse_hooks, stands_for
from fusee.capture.targets import HOOKS
from fusee.capture.torch_api import (
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    has_global_hooks,
    is_bookkeeping,
    is_graph_function,
)
from fusee.capture.world import CONTAINERS, is_scalar

__all__ = ["call", "frame_of"]

# Python frames of ours per frame of the user's; CPython allows 1000.
_DEEPEST = 60

# torch functions in Python that run natively, under the recorder.
_NATIVE_MODULES = {
    "torch.nn.functional", "torch.functional", "torch._tensor", "torch._jit_internal", "torch.jit",
    "torch._VF", "torch.fft", "torch.linalg", "torch.special", "torch.overrides", "torch._utils",
    "torch._ops", "torch.jit._trace", "torch.jit._script", "torch.library", "torch.utils._pytree",
    "torch._library.custom_ops",
}  # fmt: skip

_C_CALLABLES = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType,
)  # fmt: skip


def call(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """`function(*args, **kwargs)`."""
    if type(function) is types.MethodType:
        return call(m, function.__func__, (function.__self__, *args), kwargs)
    if type(function) is types.MethodWrapperType and not isinstance(function.__self__, FakeTensor):
        is_getter = isinstance(function.__self__, types.GetSetDescriptorType)
        if is_getter and args and isinstance(args[0], FakeTensor):  # torch.Tensor.shape.__get__
            return natives.on_tensors(m, function, args, kwargs)
        args, function = (
            (function.__self__, *args),
            vars(function.__objclass__)[function.__name__],
        )
    inner = original(function)
    if inner is not None:
        return call(m, m.world.hold(inner, str(m.world.origin(function))), args, kwargs)
    if type(function) is torch.jit.ScriptFunction:
        inner = getattr(function, "_torchdynamo_inline", None)
        if inner is not None:  # the function that was scripted
            return call(m, m.world.hold(inner, str(m.world.origin(function))), args, kwargs)
    replaced = m.policy.replacement(function)
    if replaced is not None:
        return replaced(m, args, kwargs)
    special = natives.special(function)
    if special is not None:
        return special(m, args, kwargs)
    if type(function) is types.FunctionType:
        return _call_function(m, function, args, kwargs)
    if isinstance(function, type):
        return _call_class(m, function, args, kwargs)
    if isinstance(function, functools.partial):
        return _call_partial(m, function, args, kwargs)
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return natives.on_tensors(m, function, args, kwargs)
    method = attributes.python_method(m, function, "__call__")
    if method is not None and hasattr(type(function), "__getattr__"):
        if not isinstance(function, torch.nn.Module):  # it might answer what is asked below
            return call(m, method, (function, *args), kwargs)
    if is_graph_function(function):
        return natives.on_tensors(m, function, args, kwargs)
    if m.is_generator(getattr(function, "__self__", None)):  # its `send`, say
        return function(*args, **kwargs)
    if isinstance(function, _C_CALLABLES):
        return natives.call(m, function, args, kwargs)
    if isinstance(function, functools._lru_cache_wrapper):
        return _call_cached(m, function, args, kwargs)
    if type(function) is weakref.ref:
        return m.world.referent(function)
    if isinstance(function, torch.nn.Module):
        return _call_module(m, function, args, kwargs)
    if isinstance(function, FakeTensor):
        raise TypeError("'Tensor' object is not callable")
    if method is not None:
        return call(m, method, (function, *args), kwargs)
    return natives.call(m, function, args, kwargs)


# ------------------------------------------------------------------------------ functions


def _call_function(m: Capturing, function: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    if function.__module__ in _NATIVE_MODULES and not _takes_functions(function, args, kwargs):
        return natives.on_tensors(m, function, args, kwargs)
    if is_bookkeeping(function):
        return None
    refused = m.policy.refusal(function)
    if refused is not None:
        raise refused
    f = frame_of(m, function, args, kwargs)
    flags = f.code.co_flags
    if flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE):
        raise GraphBreak(f"{function.__qualname__} is asynchronous")
    if flags & inspect.CO_GENERATOR:
        while f.instruction.name != "RETURN_GENERATOR":
            OPCODES[f.instruction.name](f, f.instruction)
            f.at += 1
        f.at += 1
        made = suspended(f)
        m.generators[made] = f
        return made
    if len(m.frames) > _DEEPEST:
        raise GraphBreak("calls are nested too deeply to be inlined")
    return f.run()


def _takes_functions(function: types.FunctionType, args: Args, kwargs: Kwargs) -> bool:
    """Whether it is one of pytree's that runs code of the program's, which the machine must run."""
    return function.__module__ == "torch.utils._pytree" and any(
        hasattr(type(x), "__next__") or (callable(x) and not isinstance(x, (type, FakeTensor)))
        for x in (*args, *kwargs.values())
    )


def frame_of(m: Capturing, function: types.FunctionType, args: Args, kwargs: Kwargs) -> Frame:
    """A frame of `function`, its parameters bound, its closure known."""
    m.world.know_cells(function)
    return Frame.of(m, function).bind(*_defaults(m, function), args, kwargs)


def _defaults(m: Capturing, function: types.FunctionType) -> tuple[Args, Kwargs]:
    """The default values, those of a function from outside loaded under guards."""
    defaults = function.__defaults__ or ()
    keyword_defaults = function.__kwdefaults__ or {}
    origin = m.world.origin(function)
    if origin is None:
        return defaults, keyword_defaults
    if defaults:
        place = m.world.place(function, "__defaults__")
        if isinstance(origin, Held):  # one fact for all: the tuple cannot change
            m.world.fact("is", place, defaults)
            defaults = tuple(
                x if is_scalar(x) else m.world.load(x, m.world.item(place, k))
                for k, x in enumerate(defaults)
            )
        else:
            defaults = m.world.load(defaults, place)
    if keyword_defaults:
        place = m.world.place(function, "__kwdefaults__")
        keyword_defaults = m.plain(m.world.load(keyword_defaults, place))
    return defaults, keyword_defaults


def _call_partial(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    target = m.world.slot(function, "func")
    before = m.world.slot(function, "args")
    named = m.world.slot(function, "keywords")
    return call(m, target, (*before, *args), {**m.plain(named), **kwargs})


def _call_cached(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function with a cache: called again, as long as nobody could tell."""
    before, said = m.world.changes(), len(m.world.later)
    result = call(m, m.world.slot(function, "__wrapped__"), args, kwargs)
    if m.world.changes() == before and is_scalar(result):
        return result
    del m.world.later[said:]
    if result is None and m.world.changes() == before:
        say_later(m, function, args, kwargs)  # it warns, once
        return None
    raise GraphBreak("a function under lru_cache does more than compute numbers or strings")


# ------------------------------------------------------------------------------ modules


def _call_module(m: Capturing, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """A module without hooks is its `forward`; one with hooks runs torch's own __call__."""
    if has_global_hooks():
        raise GraphBreak("hooks for all modules are registered", "register them on one module")
    call_method = attributes.class_lookup(m, type(module), "__call__")
    if call_method is not torch.nn.Module.__call__:
        return call(m, call_method, (module, *args), kwargs)
    mirror = m.world.attributes(module)
    names = module.__dict__ if mirror is None else mirror.obj
    is_clean = mirror is None or not any(name in mirror.writes for name in HOOKS)
    if not is_clean or any(names.get(name) for name in HOOKS):
        return call(m, torch.nn.Module._call_impl, (module, *args), kwargs)
    if mirror is not None:
        for name in HOOKS:
            if name in names:
                m.world.fact("empty", m.world.part(mirror, name), names[name])
    return call(m, m.attribute(module, "forward"), args, kwargs)


@stands_for(LazyModuleMixin._infer_parameters)
def _infer_parameters(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    """The hook by which the first call of a lazy module makes its parameters."""
    if m.is_outside(args[0]):
        raise Unready
    hook: Any = LazyModuleMixin._infer_parameters
    return _call_function(m, hook, args, kwargs)


# ------------------------------------------------------------------------------ classes


def _call_class(m: Capturing, cls: type, args: Args, kwargs: Kwargs) -> Any:
    meta = type(cls)
    if isinstance(cls, enum.EnumMeta) or cls.__flags__ & (1 << 8):
        return natives.call_class(m, cls, args, kwargs)
    if issubclass(cls, torch.Tensor):
        m.world.allow(cls)
    if meta is not type:
        custom = attributes.class_lookup(m, meta, "__call__")
        if isinstance(custom, types.FunctionType):
            return call(m, custom, (cls, *args), kwargs)
        if isinstance(custom, type):  # a TypedDict is made by dict
            return call(m, custom, args, kwargs)
    return make_instance(m, cls, args, kwargs)


def make_instance(m: Capturing, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """What type.__call__ does."""
    new = attributes.class_lookup(m, cls, "__new__")
    new = new.__func__ if isinstance(new, staticmethod) else new
    init = attributes.class_lookup(m, cls, "__init__")
    if isinstance(new, types.FunctionType) or natives.special(new) is not None:
        obj = call(m, new, (cls, *args), kwargs)
    elif new is object.__new__:
        if getattr(cls, "__abstractmethods__", None):
            return cls()  # the TypeError
        obj = object.__new__(cls)
        if init is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
    elif issubclass(cls, (*CONTAINERS, tuple, str, int, float, BaseException)):
        obj = new(cls, *(m.plain(x) for x in args), **kwargs)
    else:
        return natives.call_class(m, cls, args, kwargs)
    if not issubclass(m.kind_of(obj), cls):
        return obj
    if isinstance(init, types.FunctionType):
        result = call(m, init, (obj, *args), kwargs)
        if result is not None:
            raise TypeError(f"__init__() should return None, not {type(result).__name__!r}")
    elif init is not object.__init__ and init is not ABSENT:
        init(obj, *(m.plain(x) for x in args), **kwargs)
    return obj


def build_class(m: Capturing, args: Args, kwargs: Kwargs) -> type:
    """What the statement `class` does.

    source   https://docs.python.org/3/reference/datamodel.html#customizing-class-creation
    """
    body, name, *bases = args
    resolved = types.resolve_bases(tuple(bases))
    refuse_hooks(
        name, resolved, {}, kwargs.get("metaclass", type(resolved[0]) if resolved else type)
    )
    meta, namespace, keywords = types.prepare_class(name, resolved, kwargs)
    f = frame_of(m, body, (), {})
    f.names = namespace
    cell = f.run()
    if resolved != tuple(bases) and "__orig_bases__" not in namespace:
        namespace["__orig_bases__"] = tuple(bases)
    refuse_hooks(name, resolved, namespace, meta)
    made: type = meta(name, resolved, namespace, **keywords)
    if isinstance(cell, types.CellType):
        assert cell.cell_contents is made
    m.made_classes.add(made)
    return made


natives.SPECIAL[builtins.__build_class__] = build_class
natives.SPECIAL[vars(type)["__call__"]] = lambda m, args, kwargs: make_instance(
    m, args[0], args[1:], kwargs
)
