"""Attributes as Python finds them, each step guarded.

source   https://docs.python.org/3/howto/descriptor.html#technical-tutorial
"""

from __future__ import annotations

import collections
import functools
import inspect
import types
from typing import Any

import torch

from fusee.capture import grads
from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.facts import ABSENT
from fusee.capture.mirror import Mirror
from fusee.capture.numbers import Computed
from fusee.capture.semantics import own_super
from fusee.capture.torch_api import FakeTensor, own_classes
from fusee.capture.world import CONTAINERS, DELETED, is_scalar, is_trusted

__all__ = [
    "ask", "class_lookup", "delete", "lookup", "of_instance", "python_method", "store",
    "store_plainly", "super_of",
]  # fmt: skip

_FIELD = type(collections.namedtuple("_Pair", "one other").one)  # type: ignore[attr-defined]
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = (*CONTAINERS, tuple, frozenset, types.FunctionType, types.BuiltinFunctionType, slice)


_IN_C = (types.MemberDescriptorType, types.GetSetDescriptorType)


def class_lookup(m: Capturing, cls: type, name: str) -> Any:
    """What the first class in the order of resolution holds that has `name`; or ABSENT."""
    known = m.in_classes.get((cls, name))
    if known is None:
        items = (m.world.class_item(base, name) for base in cls.__mro__)
        known = (next((item for item in items if item is not ABSENT), ABSENT),)
        if cls not in m.made_classes:
            m.in_classes[cls, name] = known
    return known[0]


def python_method(m: Capturing, obj: Any, name: str) -> types.FunctionType | None:
    """The method of a class if it is written in Python."""
    cls = type(obj)
    if cls.__flags__ & (1 << 8) or isinstance(obj, (FakeTensor, types.ModuleType)):
        return None
    if cls.__module__.startswith(("fusee.capture", "fusee.torch_functions")):
        return None  # ours, such as a generator on the machine
    found = class_lookup(m, cls, name)
    return found if isinstance(found, types.FunctionType) else None


def ask(m: Capturing, obj: Any, name: str, *args: Any) -> Any:
    """What a method gives that is written in Python; ABSENT if the class has none."""
    method = python_method(m, obj, name)
    return ABSENT if method is None else m.call(method, (obj, *args), {})


def lookup(m: Capturing, obj: Any, name: str) -> Any:
    """`obj.name`."""
    if isinstance(obj, FakeTensor):
        return _of_tensor(m, obj, name)
    if isinstance(obj, Computed):
        return obj.attribute(m, name)
    if isinstance(obj, types.ModuleType):
        return _of_module(m, obj, name)
    if isinstance(obj, type):
        return _of_class(m, obj, name)
    if type(obj) in (super, Super):
        return _of_super(m, obj, name)
    if type(obj) is types.MethodType and name not in ("__self__", "__func__"):
        return lookup(m, obj.__func__, name)
    if is_scalar(obj) or type(obj) in _PLAIN:
        return _of_plain(m, obj, name)
    custom = python_method(m, obj, "__getattribute__")
    try:
        return m.call(custom, (obj, name), {}) if custom else of_instance(m, obj, name)
    except AttributeError:
        fallback = python_method(m, obj, "__getattr__")
        if fallback is None:
            raise
    if fallback is torch.nn.Module.__getattr__:  # not above: errors would have another as context
        return _in_module_tables(m, obj, name)
    return m.call(fallback, (obj, name), {})


# ------------------------------------------------------------------------------ kinds of objects


def _of_tensor(m: Capturing, obj: Any, name: str) -> Any:
    if name == "__class__":
        return m.kind_of(obj)
    if id(obj) in m.world.seen:
        found = _of_subclass(m, obj, name, *m.world.seen[id(obj)])
        if found is not ABSENT:
            return found
    if name == "device" and (m.modes or id(obj) in m.world.seen):
        return torch._C.TensorBase.device.__get__(obj)  # FakeTensor has one that asks nobody
    if name in ("as_subclass", "numpy"):  # which torch does not ask classes about
        return types.MethodType(getattr(torch.Tensor, name), obj)
    if name.startswith("_dynamo") or name in ("fake_mode", "fake_device", "constant"):
        raise AttributeError(name)
    if name == "grad":
        return grads.read(m, obj)
    try:
        return getattr(obj, name)
    except AttributeError as error:
        raise AttributeError(str(error).replace("FakeTensor", "Tensor")) from None


def _of_subclass(m: Capturing, obj: Any, name: str, kind: type, mirror: Mirror) -> Any:
    """What a subclass of torch.Tensor and an instance's own attributes have; or ABSENT."""
    if name == "__dict__":
        raise GraphBreak("all attributes of a tensor")
    found = _in_own_classes(m, kind, name)
    if not _is_data_descriptor(found) and not hasattr(torch.Tensor, name):
        value = m.world.get(mirror, name)
        if value is not ABSENT:
            return value
        if found is ABSENT:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
    return ABSENT if found is ABSENT else _bound(m, found, obj, kind, name)


def _of_module(m: Capturing, obj: types.ModuleType, name: str) -> Any:
    if is_trusted(obj.__name__) or name == "__dict__":
        return m.world.hold_from_trusted(getattr(obj, name), obj.__name__, name)
    found = m.world.get(m.world.mirror_of_globals(obj.__dict__, obj.__name__), name)
    if found is ABSENT:
        if "__getattr__" in obj.__dict__:
            found = m.world.taken[obj.__name__, name] = getattr(obj, name)
            return found
        raise AttributeError(f"module {obj.__name__!r} has no attribute {name!r}")
    return found


def _of_class(m: Capturing, cls: type, name: str) -> Any:
    meta = type(cls)
    if name in ("__name__", "__qualname__", "__module__", "__mro__", "__dict__", "__bases__"):
        return getattr(cls, name)
    found = class_lookup(m, cls, name)
    if found is ABSENT or isinstance(found, types.DynamicClassAttribute):
        in_meta = ABSENT if meta is type else class_lookup(m, meta, name)
        if isinstance(in_meta, types.FunctionType):
            return types.MethodType(in_meta, cls)
        return getattr(cls, name)  # enum members, abc's slots, or the AttributeError
    if isinstance(found, classmethod):
        return types.MethodType(found.__func__, cls)
    if isinstance(found, staticmethod):
        return m.world.hold(found.__func__, f"{cls.__qualname__}.{name}")
    if isinstance(found, (types.FunctionType, property)) or not hasattr(type(found), "__get__"):
        return found
    return getattr(cls, name)


def _in_own_classes(m: Capturing, kind: type, name: str) -> Any:
    found = (m.world.class_item(x, name) for x in own_classes(kind) if name in x.__dict__)
    return next(found, ABSENT)


class Super(types.SimpleNamespace):
    """super() of a tensor, whose class C code does not know."""


def super_of(m: Capturing, *args: Any) -> Any:
    """`super(...)`."""
    if not args:
        return own_super(m)
    if id(args[-1]) in m.world.seen:
        return Super(__thisclass__=args[0], __self__=args[1])
    return super(*args)


def _of_super(m: Capturing, obj: super, name: str) -> Any:
    shown: Any = obj
    start, owner = shown.__thisclass__, shown.__self__
    of_class = isinstance(owner, type) and issubclass(owner, start)
    kind = owner if of_class else m.kind_of(owner)
    mro = kind.__mro__
    for base in mro[mro.index(start) + 1 :]:
        found = m.world.class_item(base, name)
        if found is ABSENT:
            continue
        if of_class and isinstance(found, types.FunctionType):
            return found
        if isinstance(found, _IN_C):
            raise GraphBreak(f"{name} of a class in C is read through super()")
        return _bound(m, found, owner, kind, name)
    raise AttributeError(f"'super' object has no attribute {name!r}")


def _of_plain(m: Capturing, obj: Any, name: str) -> Any:
    if isinstance(obj, types.FunctionType) and name not in _FUNCTION_SLOTS:
        mirror = m.world.attributes(obj)
        if mirror is not None:
            found = m.world.get(mirror, name)
            if found is not ABSENT:
                return found
    return getattr(obj, name)


_FUNCTION_SLOTS = {
    "__name__", "__qualname__", "__module__", "__doc__", "__code__", "__defaults__", "__get__",
    "__kwdefaults__", "__closure__", "__globals__", "__annotations__", "__call__", "__class__",
}  # fmt: skip


def of_instance(m: Capturing, obj: Any, name: str) -> Any:
    """What object.__getattribute__ gives."""
    cls = type(obj)
    if name == "__class__":
        return cls
    if name == "__dict__":
        mirror = m.world.attributes(obj)
        if mirror is None:
            return obj.__dict__
        return m.world.know(mirror.obj, m.world.origin(mirror.obj) or mirror.origin)
    found = class_lookup(m, cls, name)
    if found is not ABSENT and _is_data_descriptor(found):
        return _bound(m, found, obj, cls, name)
    value = _in_dict(m, obj, name)
    if value is not ABSENT:
        return value
    if found is not ABSENT:
        return _bound(m, found, obj, cls, name)
    raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")


def _in_dict(m: Capturing, obj: Any, name: str) -> Any:
    """What an instance's own attributes hold under a name; or ABSENT."""
    mirror = m.world.attributes(obj)
    if mirror is not None:
        return m.world.get(mirror, name)
    return getattr(obj, "__dict__", {}).get(name, ABSENT)


def _in_module_tables(m: Capturing, obj: Any, name: str) -> Any:
    """torch.nn.Module.__getattr__, without interpreting it for each parameter and child."""
    for table_name in _MODULE_TABLES:
        table = _in_dict(m, obj, table_name)
        if table is not ABSENT:
            is_outside = m.world.origin(table) is not None
            found = (
                m.world.get(m.world.mirror(table), name) if is_outside else table.get(name, ABSENT)
            )
            if found is not ABSENT:
                return found
    raise AttributeError(f"{type(obj).__name__!r} object has no attribute {name!r}")


# ------------------------------------------------------------------------------ descriptors


def _is_data_descriptor(found: Any) -> bool:
    kind = type(found)
    return hasattr(kind, "__set__") or hasattr(kind, "__delete__")


def _bound(m: Capturing, found: Any, obj: Any, cls: type, name: str) -> Any:
    """What a descriptor, or anything else that a class holds, gives for an instance."""
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, obj)
    words = f"{cls.__qualname__}.{name}"
    if isinstance(found, classmethod):
        return types.MethodType(found.__func__, cls)
    if isinstance(found, staticmethod):
        return m.world.hold(found.__func__, words)
    if isinstance(found, property):
        if found.fget is None:
            raise AttributeError(f"property {name!r} of {cls.__name__!r} object has no getter")
        return m.call(m.world.hold(found.fget, words), (obj,), {})
    if isinstance(found, _IN_C):
        return m.world.slot(obj, name)
    if isinstance(found, functools.cached_property):
        value = m.call(m.world.hold(found.func, words), (obj,), {})
        m.set_in_dict(obj, name, value)
        return value
    if not hasattr(type(found), "__get__"):
        return found
    if inspect.ismethoddescriptor(found) or type(found) is _FIELD:
        return found.__get__(obj, cls)
    value = ask(m, found, "__get__", obj, cls)
    if value is ABSENT:
        raise GraphBreak(f"a descriptor of class {type(found).__qualname__} is not known")
    return value


# ------------------------------------------------------------------------------ writing


def store(m: Capturing, obj: Any, name: str, value: Any) -> None:
    """`obj.name = value`, or `del obj.name` for DELETED."""
    if isinstance(obj, FakeTensor):
        if id(obj) in m.world.seen and not hasattr(torch.Tensor, name):
            _store_in_tensor(m, obj, name, value)
            return
        if grads.store(m, obj, name, value):
            return
        if name != "grad" or value is DELETED:
            raise GraphBreak(f"setting the attribute {name} of a tensor")
        grads.write(m, obj, value)
        return
    if isinstance(obj, Computed):
        raise GraphBreak(f"setting the attribute {name} of a {obj.kind.__name__}")
    if isinstance(obj, types.ModuleType):
        m.world.set(m.world.mirror_of_globals(obj.__dict__, obj.__name__), name, value)
        return
    if isinstance(obj, type):
        if m.world.origin(obj) is None and obj in m.made_classes:
            delattr(obj, name) if value is DELETED else setattr(obj, name, value)
            return
        raise GraphBreak(f"setting the attribute {name} of a class")
    which = "__delattr__" if value is DELETED else "__setattr__"
    custom = python_method(m, obj, which)
    if custom is not None:
        m.call(custom, (obj, name) if value is DELETED else (obj, name, value), {})
        return
    store_plainly(m, obj, name, value)


def _store_in_tensor(m: Capturing, obj: Any, name: str, value: Any) -> None:
    kind, mirror = m.world.seen[id(obj)]
    if value is DELETED or _is_data_descriptor(_in_own_classes(m, kind, name)):
        raise GraphBreak(f"the attribute {name} of a {kind.__qualname__} is deleted, or a property")
    m.world.set(mirror, name, value)


def store_plainly(m: Capturing, obj: Any, name: str, value: Any) -> None:
    """What object.__setattr__ and object.__delattr__ do."""
    found = class_lookup(m, type(obj), name)
    if found is not ABSENT and _is_data_descriptor(found):
        if isinstance(found, property):
            function = found.fdel if value is DELETED else found.fset
            if function is None:
                what = "deleter" if value is DELETED else "setter"
                kind = type(obj).__name__
                raise AttributeError(f"property {name!r} of {kind!r} object has no {what}")
            m.world.hold(function, name)
            m.call(function, (obj,) if value is DELETED else (obj, value), {})
            return
        if m.world.origin(obj) is not None and type(found) is not types.MemberDescriptorType:
            raise GraphBreak(f"setting {name} through {type(found).__qualname__}")
        m.world.set_slot(obj, name, value)
        return
    if value is DELETED and _in_dict(m, obj, name) is ABSENT:
        raise AttributeError(f"{type(obj).__name__!r} object has no attribute {name!r}")
    m.set_in_dict(obj, name, value)


def delete(m: Capturing, obj: Any, name: str) -> None:
    """`del obj.name`."""
    store(m, obj, name, DELETED)
