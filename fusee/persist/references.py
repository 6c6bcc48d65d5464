"""How another process finds the objects that a capture relied on.

Where an object is met first, a recipe is written that leads to it from what is there in every
process: modules that are loaded, and the parameters of the function that is compiled. With it goes
what the object is known by: a function by its code, a class by its name, an instance by its class.
What has no recipe, or is known by nothing but its address, cannot be kept.

    ("module", name)               sys.modules
    ("global", module, name)       what a module holds, or Python's builtins
    ("at", origin)                 the object that a fact made sure of
    ("operator", "torch.ops", name)
    ("part", object, name)         an attribute of another: a property's getter, a class's dict
    ("cell", object, k)            a cell of a function's closure
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import importlib
import io
import operator
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

from fusee.capture.bytecode import codes
from fusee.capture.frame import ABSENT, CALLED_IN_C, UNBOUND, Marker, is_scalar
from fusee.capture.guards import GONE, Facts, TensorFact, Values
from fusee.capture.sources import (
    C_DESCRIPTORS,
    FIELD,
    ON_HEAP,
    Computation,
    Held,
    Operand,
    Origin,
    looking,
)
from fusee.runtime.cache import code_key

# ---------------------------------------------------------------------------- naming


class NotKept(Exception):
    """Something cannot be found again by another process; the text says what."""


_WRITTEN = (
    TensorFact, list, tuple, dict, set, frozenset, slice, collections.OrderedDict,
    collections.deque, Computation, Operand,
)  # fmt: skip
# What pickle writes by itself, but for scalars.
_UNASKED = {list, tuple, dict, set, frozenset, bytearray, pickle.PickleBuffer}
_MARKERS = {"ABSENT": ABSENT, "UNBOUND": UNBOUND}
_DICTS = (dict, collections.OrderedDict)

# ------------------------------------------------------------------------------ what it is


def known_by(x: Any) -> Any:
    """What tells in another process whether an object found there is this one. raises NotKept"""
    kind = type(x)
    if is_scalar(x) or kind in (types.UnionType, types.GenericAlias):
        return kind.__qualname__, text_of(x)
    if kind in (OpOverload, OpOverloadPacket):
        return "operator", str(x), str(x._schema) if kind is OpOverload else ""
    if kind is types.FunctionType:
        marks = sorted((key, known_by(mark)) for key, mark in vars(x).items() if is_scalar(mark))
        # what inspect and typing tell of it; what it is called with has facts
        named = *(x.__kwdefaults__ or {}).items(), *x.__annotations__.items()
        told = [
            (key, known_by(y) if is_scalar(y) else _name(y) or type(y).__qualname__)
            for key, y in (*enumerate(x.__defaults__ or ()), *named)
        ]
        return x.__module__, x.__qualname__, code_key(x.__code__), sorted(vars(x)), marks, told
    if isinstance(x, type):
        return "class", [*map(_class, x.__mro__)], kind is not type and _class(kind)
    if isinstance(x, types.ModuleType):
        return "module", x.__name__
    if kind is types.CodeType:
        return "code", code_key(x)
    if kind is Marker:
        return "marker", x.name
    if kind in (tuple, frozenset):
        parts = [*map(known_by, x)]
        return kind.__qualname__, parts if kind is tuple else sorted(parts)
    if kind in _PARTS:
        return kind.__qualname__, [known_by(getattr(x, name)) for name in _PARTS[kind]]
    if kind in _IN_C:
        owner = getattr(x, "__objclass__", None) or getattr(x, "__self__", None)
        home = owner if isinstance(owner, (type, types.ModuleType)) else None
        is_pybind = type(owner).__module__.startswith("pybind11")  # a function's own record
        if owner is not None and home is None and not is_pybind:
            raise NotKept(f"a method of a {type(owner).__qualname__}")
        return kind.__qualname__, getattr(home, "__name__", ""), x.__name__
    if kind in (types.MappingProxyType, types.CellType, *_DICTS):
        return kind.__qualname__
    if kind is FIELD:
        return "field", known_by(x.__reduce__()[1])
    if kind is functools.partialmethod:
        return "method", known_by(x.func), known_by(x.args), known_by((*x.keywords.items(),))
    is_bound = any(type(base).__module__.startswith("pybind11") for base in kind.__mro__)
    if kind.__flags__ & ON_HEAP and not is_bound and not isinstance(x, Tensor):
        in_c = [base for base in kind.__mro__ if not base.__flags__ & ON_HEAP]
        if in_c == [object] or {*in_c} <= {object, dict, list}:  # facts tell the rest
            return "instance", known_by(kind)
    raise NotKept(f"a {kind.__module__}.{kind.__qualname__}")


def _class(cls: type) -> Any:
    """The name of a class; of the program's own with all functions that it holds.

    C code asks a class for methods, and whether it has them, where no fact tells.
    """
    if (known := _looked_at.get(id(cls))) is not None:
        return known[1]
    name, rows = f"{cls.__module__}.{cls.__qualname__}", list[tuple[str, str]]()
    if name.partition(".")[0] not in _LIBRARIES:
        for key, x in vars(cls).items():
            if key not in _LATE:
                parts = [x, *(getattr(x, part) for part in _PARTS.get(type(x), ()))]
                of = [code_key(y.__code__) for y in parts if type(y) is types.FunctionType]
                rows.append((key, " ".join([type(x).__qualname__, *of])))
        rows.sort()
    _looked_at[id(cls)] = cls, (name, rows)
    return name, rows


_looked_at: dict[int, tuple[type, Any]] = {}


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """While this lasts a class is looked at once."""
    try:
        yield
    finally:
        _looked_at.clear()


# What Python adds to a class when it is first asked for.
_LATE = {"__annotations__", "__slotnames__", "_abc_impl"}


def text_of(x: Any) -> str:
    """What Python writes of a number or text. raises NotKept"""
    try:
        return repr(x)
    except ValueError as error:  # an integer has more digits than it writes
        raise NotKept(str(error)) from None


_IN_C = (*CALLED_IN_C, *C_DESCRIPTORS)
_PARTS: dict[type, tuple[str, ...]] = {
    property: ("fget", "fset", "fdel"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    functools.cached_property: ("func",),
    functools._lru_cache_wrapper: ("__wrapped__",),
}


# ------------------------------------------------------------------------------ writing


class Names(pickle.Pickler):
    """Writes one capture, with recipes in place of the objects that it names.

    function   what was compiled
    taken      what was read without a guard, by module and name
    reduce     how to write objects by value, as pickle's `reducer_override`
    """

    def __init__(
        self,
        facts: Facts,
        function: types.FunctionType,
        taken: Mapping[tuple[str, str], Any],
        reduce: Callable[[Any], Any],
    ) -> None:
        self.out = io.BytesIO()
        super().__init__(self.out, protocol=5)
        self.reduce = reduce
        self._ways: dict[int, tuple[Any, ...]] = {}
        self._keep: list[Any] = []
        self._begun: set[int] = set()
        self._named: dict[int, _Named] = {}
        self._add_way(function, ("function",))
        for (module, name), found in taken.items():
            self._add_way(found, ("global", module, name))
        roots = dict.fromkeys(fact.origin.root for fact in facts.rows)
        for held in roots:
            if isinstance(held, Held):
                self._add_way(held.value, held.way())
        for fact in facts.rows:
            self._add_way(fact.value, fact.way())

    def _add_way(self, x: Any, way: tuple[Any, ...] | None) -> None:
        """Note how to get at an object, and at what it holds and never changes."""
        if way is None or is_scalar(x) or id(x) in self._ways:
            return
        self._ways[id(x)] = way
        self._keep.append(x)
        if type(x) is types.FunctionType:
            self._add_way(x.__globals__, ("part", x, "__globals__"))
            for k, cell in enumerate(x.__closure__ or ()):
                self._add_way(cell, ("cell", x, k))
        for name in _PARTS.get(type(x), ()):
            self._add_way(getattr(x, name), ("part", x, name))
        own = _part(x, "__dict__") if type(x).__dictoffset__ else None
        if type(own) is dict:
            self._add_way(own, ("part", x, "__dict__"))

    def persistent_id(self, x: Any) -> _Named | None:
        """Of what pickle writes without asking `reducer_override`."""
        if type(x) not in _UNASKED or (type(x) in _WRITTEN and id(x) not in self._ways):
            return None
        return self._named.setdefault(id(x), _Named(x))

    def reducer_override(self, x: Any) -> Any:
        if x is Resolved.found or x is Resolved.waiting:
            return NotImplemented
        if type(x) is _Named:
            x = x.object
        # What is written is known from then on, so that pickle does not ask again.
        if id(x) in self._begun:
            raise NotKept(f"a {type(x).__qualname__} that leads to itself")
        self._begun.add(id(x))
        if id(x) not in self._ways:
            if isinstance(x, Held) and type(x.value) in _WRITTEN and id(x.value) not in self._ways:
                raise NotKept(f"nothing leads to {x} but its address")
            if isinstance(x, Origin):
                return type(x), (*vars(x).values(),)
            if is_scalar(x) or type(x) in _WRITTEN:
                return NotImplemented
        if (made := self.reduce(x)) is not NotImplemented:
            return made
        is_module = isinstance(x, types.ModuleType) and sys.modules.get(x.__name__) is x
        by_name = ("module", x.__name__) if is_module else _by_name(x)
        return Resolved.found, (by_name or self._ways.get(id(x)) or _nowhere(x), known_by(x))

    def written(self, x: Any) -> bytes:
        """What `Resolved` reads. raises NotKept"""
        try:
            self.dump(x)
        except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
            raise NotKept(str(error)) from None
        return self.out.getvalue()


class _Named(NamedTuple):
    """Stands for an object that pickle would write by value."""

    object: Any


def _nowhere(x: Any) -> NoReturn:
    raise NotKept(f"nothing leads to {_name(x) or type(x).__qualname__} but its address")


def _name(x: Any) -> str | None:
    """The name that an object has of itself; asks no code of the user's."""
    kind = type(x)
    is_named = issubclass(kind, type) or kind in (types.FunctionType, *_IN_C)
    if is_named or kind.__module__.partition(".")[0] == "torch":
        found = getattr(x, "__qualname__", None)
        return found if isinstance(found, str) else None
    return None


def _part(x: Any, name: str) -> Any:
    """An attribute of what has none of the user's code for it."""
    return object.__getattribute__(x, name) if name == "__dict__" else getattr(x, name)


def _by_name(x: Any) -> tuple[str, str, str] | None:
    """Where a function or class is found by its own name."""
    if type(x) in (OpOverload, OpOverloadPacket):  # whose namespace has it once it is asked for
        return "operator", "torch.ops", str(x)
    if type(x) is Marker:
        return ("global", "", x.name) if _MARKERS.get(x.name) is x else _nowhere(x)
    name = _name(x)
    if name is None:
        return None
    for module in (getattr(x, "__module__", None), "builtins"):
        for path in (name, x.__name__):  # pybind's functions have the names of their records
            if isinstance(module, str) and _global(module, path) is x:
                return "global", module, path
    if isinstance(x, type) and x in _OF_PYTHON:
        return "global", "types", _OF_PYTHON[x]
    owner = getattr(x, "__objclass__", None) or getattr(x, "__self__", None)
    found = _by_name(owner) if isinstance(owner, type) else None
    if found is None and isinstance(x, types.BuiltinFunctionType) and hasattr(torch, x.__name__):
        found, name = ("global", "torch", ""), x.__name__
    if found is not None:
        path = f"{found[2]}.{x.__name__}".lstrip(".")
        if _global(found[1], path) is x:
            return "global", found[1], path
    return None


def is_torchs(x: Any) -> bool:
    """Whether an object is torch's or Python's, and runs no code but theirs."""
    if type(x) in (OpOverload, OpOverloadPacket):
        return str(x).startswith("aten.")
    if type(x) is types.FunctionType:
        home = x.__globals__.get("__name__")  # a wrapper takes over the other name
    else:
        home = next(iter((_by_name(x) or ("", ""))[1:]))
    return is_scalar(x) or str(home).partition(".")[0] in _THEIRS


_THEIRS = ("torch", "_operator", "builtins", "math", "fusee")
_OF_PYTHON = {x: name for name, x in vars(types).items() if isinstance(x, type)}


def taken_now(module: str, name: str) -> Any:
    """What a function of a module finds under a name; or ABSENT."""
    found = _global(module, name)
    return found if found is not ABSENT else _global("builtins", name)


def _global(module: str, path: str) -> Any:
    if not module:
        return _MARKERS.get(path, ABSENT)
    if module.startswith("fusee."):  # which capture itself would import
        importlib.import_module(module)
    found: Any = sys.modules.get(module, ABSENT)
    if module.startswith("torch.ops."):  # made when it is asked for
        found, path = torch.ops, f"{module[10:]}.{path}"
    for name in path.split("."):
        found = getattr(found, name, ABSENT)
    return found


# ------------------------------------------------------------------------------ reading


class Resolved(pickle.Unpickler):
    """A capture, with the objects that its recipes lead to in this process.

    It imports nothing but ours: what else is not loaded yet is not there.

    data               what `Names.written` gave; `content` is the object
    function, values   what is compiled, and what it is called with
    graph              stands for the captured graph
    raises             NotKept if something is not there, or is another
    """

    def __init__(
        self, data: bytes, function: types.FunctionType, values: Values, graph: Any
    ) -> None:
        super().__init__(io.BytesIO(data))
        self.function, self.graph = function, graph
        self.look = looking(values)
        try:
            self.content = self.load()
        except (*GONE, pickle.UnpicklingError) as error:  # an enum without such a member, say
            raise NotKept(str(error)) from None

    def found(self, way: tuple[Any, ...], known: Any) -> Any:
        """What a recipe leads to."""
        try:
            found = self._found(*way)
        except GONE:
            found = ABSENT
        if known_by(found) != known:
            raise NotKept(f"what was at {way} is another")
        return found

    def waiting(self) -> Any:
        """The captured graph."""
        return self.graph

    def _found(self, kind: str, *way: Any) -> Any:
        if kind == "function":
            return self.function
        if kind == "module":
            return sys.modules[way[0]]
        if kind == "global":
            return _global(*way)
        if kind == "operator":
            return operator.attrgetter(way[1])(torch.ops)
        if kind == "at":
            return self.look(way[0])
        owner, part = way
        return owner.__closure__[part] if kind == "cell" else _part(owner, part)

    def persistent_load(self, found: Any) -> Any:
        return found

    def find_class(self, module: str, name: str) -> Any:
        for own in (self.found, self.waiting) if module == __name__ else ():
            if name == own.__qualname__:
                return own
        found = _global(module, name)
        if is_scalar(found):  # a dtype, a layout, Ellipsis: by name
            return found
        raise NotKept(f"{module}.{name} in what was kept")


# ---------------------------------------------------------------------------- reached
# What torch's own functions call: programs replace these, too, and no fact says so.
#
# A graph names torch's functions, and that each is the one it was is made sure of. But those in
# Python call others by name, which an earlier process may have had replaced, or a later one.

_LIBRARIES = {"torch", "fusee", "numpy", "typing_extensions", "sympy", *sys.stdlib_module_names}
# What runs only for classes with functions of their own is not looked into, nor Python's library.
_CLOSED = {"torch.overrides", "torch._jit_internal", "torch.jit._script"}

Row = tuple[str, str, str]


def reached(module: fx.GraphModule) -> list[Row]:
    """Module, name and mark of all that a graph's functions call, but for C's own calls.

    raises   NotKept if something of it is not torch's
    """
    found: dict[tuple[str, str], str] = {}
    waiting: list[Any] = []
    for node in module.graph.nodes:
        if is_torchs(node.target):
            waiting.append(node.target)
        name, methods = getattr(node.target, "__name__", ""), list[str]()
        if node.op == "call_function" and vars(operator).get(name) is node.target:
            methods = [f"__{kind}{name.strip('_')}__" for kind in ("", "r", "i")]
        elif node.op == "call_method":
            methods = [node.target]
        for name in methods:
            waiting += _found(found, "torch", f"Tensor.{name}")
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if type(function) is not types.FunctionType or id(function) in seen:
            continue
        seen.add(id(function))
        home = str(function.__globals__.get("__name__"))
        if home.partition(".")[0] not in _LIBRARIES:
            raise NotKept(f"torch's functions call {home}.{function.__qualname__}")
        bound = (cell for cell in function.__closure__ or () if cell != types.CellType())
        waiting += [cell.cell_contents for cell in bound]
        if home not in _CLOSED and home.partition(".")[0] not in sys.stdlib_module_names:
            # each of its names in all that it can mean
            names = {name for code in codes(function.__code__) for name in code.co_names}
            held = map(function.__globals__.get, names)
            owners: list[types.ModuleType] = [x for x in held if _is_open(x)]
            for name in names:
                waiting += _found(found, home, name)
                if hasattr(Tensor, name):
                    waiting += _found(found, "torch", f"Tensor.{name}")
            for owner in owners:
                for name in names:
                    if name in vars(owner) or (owner is torch._VF and hasattr(owner, name)):
                        waiting += _found(found, owner.__name__, name)
                        if _is_open(x := getattr(owner, name)) and x not in owners:
                            owners.append(x)
    return [(*place, mark) for place, mark in found.items()]


def replaced(rows: Iterable[Row]) -> str | None:
    """The first of `reached` that is another now; what is not loaded yet is as it was."""
    for module, name, mark in rows:
        if module in sys.modules and _mark(taken_now(module, name)) != mark:
            return f"{module}.{name}"
    return None


def _found(found: dict[tuple[str, str], str], module: str, name: str) -> Iterator[Any]:
    x = taken_now(module, name)
    if x is not ABSENT and not is_scalar(x) and not isinstance(x, types.ModuleType):
        found[module, name] = _mark(x)
        yield x


def _is_open(x: Any) -> TypeGuard[types.ModuleType]:
    """Whether names are looked for in a module: those of operators appear when they are used."""
    is_module = isinstance(x, types.ModuleType) and sys.modules.get(x.__name__) is x
    return is_module and (type(x) is types.ModuleType or x is torch._VF)


def _mark(x: Any) -> str:
    if type(x) is types.FunctionType:  # others give functions attributes
        known: Any = x.__module__, x.__qualname__, known_by(x.__code__)
    else:
        try:
            known = known_by(x)
        except NotKept:
            known = type(x).__qualname__
    return hashlib.sha1(repr(known).encode()).hexdigest()[:16]
