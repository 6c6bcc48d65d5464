"""The state of one capture, and attributes as Python finds them, each step guarded."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch

from fusee.capture import mirrors, symbols
from fusee.capture.bytecode import is_reading
from fusee.capture.dynamic import VALUES, Computed, Varying
from fusee.capture.frame import (
    ABSENT,
    CONTAINERS,
    FIXED,
    METHODS_IN_C,
    SCALARS,
    Frame,
    Semantics,
    is_scalar,
    own_super,
    room,
)
from fusee.capture.graph_break import GraphBreak, Opaque
from fusee.capture.guards import Length
from fusee.capture.inputs import DELETED, World
from fusee.capture.mirrors import SHOW_ARGS, dict_class, empty_like, got, pairs_of, shown_in
from fusee.capture.policy import Policy
from fusee.capture.sources import (
    C_DESCRIPTORS,
    FIELD,
    IN_C,
    Held,
    ResultOf,
    in_classes,
    is_data_descriptor,
    is_trusted,
    keeps_in_c,
    length,
    missing,
    names_operators,
    own_dict,
    python_getattribute,
    tells_dict,
)
from fusee.capture.symbols import OPEN, concrete, is_open
from fusee.capture.torch_api import FakeTensor, own_classes, run_for_real
from fusee.source import Function, Rules

# ---------------------------------------------------------------------------- capturing


# Methods by which C code compares objects, shows them, and takes them for numbers or more.
COMPARED = tuple(f"__{name}__" for name in "eq ne hash lt le gt ge".split())
SHOWN = ("__repr__", "__str__", "__format__")
AS_NUMBERS = tuple(f"__{name}__" for name in "index int float complex bool".split())
_COMPUTED = tuple(
    f"__{name}__" for name in "bytes abs round floor ceil trunc divmod rdivmod pow rpow".split()
)
AS_VALUES = (
    *(f"__{name}__" for name in "iter next len getitem add radd mul rmul".split()),
    *_COMPUTED, *COMPARED, *SHOWN, *AS_NUMBERS,
)  # fmt: skip

# What an object is asked for itself.
_CALLED_BY_C = frozenset((*_COMPUTED, *COMPARED, *SHOWN, *AS_NUMBERS))

_OURS = (FakeTensor, Computed, *OPEN)  # they raise by themselves
_WITHOUT_METHODS = (*_OURS, types.ModuleType)
_KNOWN = (types.MethodType, types.CellType, slice, *FIXED, *VALUES)
_FUNCTION = types.FunctionType
_COPIED = (*CONTAINERS, tuple, types.MappingProxyType)


@functools.lru_cache(maxsize=4096)
def _is_users(module: str) -> bool:
    return not (is_trusted(module) or module.partition(".")[0] == "fusee")


def flat(*args: Any) -> Iterator[Any]:
    """Arguments, and the elements of lists and tuples among them."""
    for x in args:
        yield from x if type(x) in (list, tuple) else (x,)


class Capturing(Semantics):
    """The state of one capture.

    policy         what users have said about functions
    world          what lies outside; recorder: its graph
    made_classes   classes that the program itself made
    in_classes     what was found in others, by name
    generators     those that it made and that are alive, each with the frame that is its body
    regions        objects of torch.inference_mode, warnings.catch_warnings and what else no graph
                   ends within, that it is within, and what leaves them
    modes          torch function modes that it is within, the innermost last
    deepest        how many frames it may have within one another
    checks         what branches that raise rely on; None if they end the graph
    is_compiling   what torch.compiler.is_compiling() says; `asks_compiling`: whether it was asked
    expects        lets the graph check what only data knows; False: no graph may
    asserts        the same of the truth, or falsity, of a number or tensor
    ask_length     asks how many elements there will be, as C code does that makes room for them
    """

    is_python = False
    expects: Callable[[Any], bool]
    asserts: Callable[[Any, bool], bool]
    ask_length: Callable[[Any], None]

    def __init__(self, policy: Policy, varies: Varying | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.world = World(self, varies or Varying())
        self.recorder = self.world.recorder
        if self.world.varies.reads_sizes:
            self.world.mode.env = self.world.symbols.env
        self.recorder.reads_numbers = self.world.varies.reads_numbers
        self.deepest = room.left
        self.made_classes = self.world.made_classes
        self.in_classes: dict[tuple[type, str], tuple[Any]] = {}
        # dropped, one is closed at once
        self.generators = weakref.WeakKeyDictionary[Generator[Any, Any, Any], Frame]()
        self.regions: list[tuple[Any, Any]] = []
        self.modes: list[Any] = []
        self.is_compiling, self.asks_compiling = True, False
        self.within: tuple[str, ...] = ()  # functional transforms; "grad" if it has a backward
        self.checks: list[Any] | None = []
        self.failed: tuple[int, str] = 0, ""  # the last error, by id, and its line
        self._said: tuple[Callable[[], Frame | None], int, str] = lambda: None, 0, ""

    def where(self) -> str:
        """The innermost line of the user's code."""
        if not self.frames:
            return ""
        top, (frame, at, text) = self.frames[-1], self._said
        if frame() is not top or at != top.at:
            frames = reversed(self.frames)
            users = (f for f in frames if _is_users(str(f.globals.get("__name__") or "")))
            text = next(users, top).where
            self._said = weakref.ref(top), top.at, text
        return text

    def left_by(self, f: Frame, error: BaseException) -> None:
        if self.failed[0] != id(error):  # the error itself would keep its frames
            self.failed = id(error), self.where()
        is_called = f is not self.frames[0] and isinstance(error, Exception)
        if is_called and any(map(self.is_closed, f.locals.values())):
            raise GraphBreak("an error keeps a generator within try or with until it is handled")

    def is_generator(self, x: Any) -> bool:
        """Whether `x` is a generator whose body runs on the machine."""
        return type(x) is types.GeneratorType and x in self.generators

    def is_closed(self, x: Any) -> bool:
        """Whether a generator that was made here runs once more when nobody has it."""
        if not self.is_generator(x) or inspect.getgeneratorstate(x) != inspect.GEN_SUSPENDED:
            return False
        return not self.generators[x].closes_in_silence()

    def length(self, x: Any) -> int:
        """len() of a list, dict, set or deque; of one from outside it becomes a fact."""
        if not self.is_outside(x):
            return length(x)
        mirror = self.world.mirror(x)
        if mirror.copy is not None or mirror.writes or mirror.tail:
            return length(self.world.whole(x))
        self.world.fact(Length, mirror.origin, found := length(x))
        return found

    def tensor_operator(self, function: Function, *operands: Any) -> Any:
        """An operator with a tensor among its operands, in the graph as the operator."""
        if function is operator.setitem and isinstance(operands[-1], Computed):
            kind = operands[-1].kind  # torch takes Python's numbers there, and integers of NumPy
            if not (issubclass(kind, float | complex) or hasattr(kind, "__index__")):
                raise GraphBreak(f"a {kind.__name__} put into a tensor")

        def shown(x: Any, is_place: bool) -> Any:
            if type(x) is tuple:  # a key of several
                return tuple(shown(part, is_place) for part in x)
            return x.number(is_place) if isinstance(x, Computed) else self.plain(x)

        is_item = function in (operator.getitem, operator.setitem)
        operands = tuple(shown(x, is_item and k == 1) for k, x in enumerate(operands))
        for x in operands:
            if function is operator.mod and isinstance(x, (str, bytes, bytearray)):
                raise GraphBreak("printing a tensor needs its values")
            if hasattr(type(x), "__torch_function__") and not isinstance(x, torch.Tensor):
                raise GraphBreak(f"a {type(x).__qualname__} in an operator with a tensor")
            self.look((x.start, x.stop, x.step) if type(x) is slice else (x,), AS_NUMBERS)
        if self.world.seen or self.modes:  # torch finds which function these are asked about
            return function(*operands)
        return self.recorder.call(function, *operands)

    def kind_of(self, x: Any) -> Any:
        """The class that the program sees."""
        if id(x) in self.world.seen:
            return self.world.seen[id(x)]
        if issubclass(type(x), Computed):
            return x.kind
        if is_open(x):
            return symbols.kind_of(x)
        if type(x) is FakeTensor:
            return torch.nn.Parameter if getattr(x, "_is_param", False) else torch.Tensor
        return type(x)

    def set_in_dict(self, obj: Any, name: str, value: Any) -> None:
        """Write to the instance's own attributes."""
        mirror = self.world.attributes(obj)
        if mirror is not None:
            self.world.set(mirror, name, value)
        elif value is DELETED:
            del own_dict(obj)[name]
        else:
            object.__setattr__(obj, name, value)

    # ---------------------------------------------------------------------- for C code

    def is_outside(self, x: Any) -> bool:
        """Whether an object came from outside and is not a fixed one."""
        return self.world.origin(x) is not None and not issubclass(type(x), (*_OURS, tuple))

    def plain(self, x: Any) -> Any:
        """What C code may see of `x`: a container from outside as its copy."""
        if isinstance(x, CONTAINERS) and self.is_outside(x):
            return self.world.whole(x)
        if type(x) is types.MappingProxyType:
            return mirrors.shown_proxy(self.world, x)
        if type(x) is tuple and any(issubclass(type(item), CONTAINERS) for item in x):
            return tuple(self.plain(item) for item in x)
        return x

    def in_order(self, x: Any) -> Any:
        """The same, for what goes through it: the order of a set from outside is a fact then."""
        if isinstance(x, set) and self.is_outside(x):
            return mirrors.in_order(self.world, x)
        if id(x) in self.world.frozen:
            mirrors.read_order(self.world, x)
        return self.plain(x)

    def look(self, objects: Iterable[Any], methods: tuple[str, ...] = ()) -> None:
        """End the graph if C code would read of objects from outside what no guard knows.

        methods   those that C code calls, of what containers hold too: in Python they would run
                  out of the machine's sight. None: it reads the objects themselves alone
        """
        todo, seen, is_held = list(objects), set(), False
        is_hash = "__hash__" in methods
        while todo:
            x = todo.pop()
            cls = type(x)
            if is_hash:
                self.world.hash((x,))
            if is_held and isinstance(x, (Computed, *OPEN)):
                raise GraphBreak("C code would look at numbers that an exception holds")
            if is_scalar(x) or (id(x), is_held) in seen or issubclass(cls, _OURS):
                continue
            seen.add((id(x), is_held))
            if "__repr__" in methods and issubclass(cls, (set, frozenset)):
                mirrors.read_order(self.world, x)
            if "__repr__" in methods and cls is types.MethodType:
                todo.append(x.__self__)
            is_container = issubclass(cls, (*CONTAINERS, tuple))
            is_outside = self.is_outside(x)
            if methods and is_container:
                kind = next(kind for kind in (*CONTAINERS, tuple) if issubclass(cls, kind))
                if is_outside and kind is not tuple:
                    self.world.whole(x)  # all its elements are facts now
                    if self.world.mirror(x).is_changed():
                        raise GraphBreak("C code would look at a container before it is changed")
                shown = self.plain(x) if is_held else x
                todo += dict.values(shown) if kind is dict else kind.__iter__(shown)
            if not is_outside:
                self._look_within(x, methods)
                is_compared = methods and cls is types.SimpleNamespace  # by what it holds
                held = shown_in(x) if is_compared or "__repr__" in methods else ()
                todo += held
                concrete(self.deep(held))  # which makes facts of it
                continue
            is_known = is_container or issubclass(cls, _KNOWN)
            is_state = not is_known and keeps_in_c(cls)
            # what has a comparison of object's own is compared by identity
            is_state &= methods is not COMPARED or any(
                getattr(cls, m, None) is not getattr(object, m, None) for m in methods
            )
            if is_state and issubclass(cls, BaseException) and cls.__str__ in SHOW_ARGS:
                todo.append(self.world.slot(x, "args"))
                is_state, is_held = False, True
            # what tells its address is another text at the next call
            is_state |= "__repr__" in methods and getattr(cls, "__repr__", 0) is object.__repr__
            if is_state or any(type(getattr(cls, m, None)) is _FUNCTION for m in methods):
                raise GraphBreak(f"C code would look at a {cls.__qualname__} from outside")

    def _look_within(self, x: Any, methods: tuple[str, ...]) -> None:
        """End the graph if C code would run a method of the program's that does more than read."""
        cls: Any = type(x)
        if "__repr__" in methods and cls.__repr__ is object.__repr__:
            mirrors.show_address(self.world, x)
        if is_trusted(cls.__module__):
            return
        for name in _CALLED_BY_C.intersection(methods):
            method = getattr(cls, name, None)
            if type(method) is _FUNCTION and not is_reading(method):
                raise GraphBreak(f"C code would call {method.__qualname__}")
            if type(method) is _FUNCTION:
                symbols.settle(x)

    def hashed(self, keys: Sequence[Any]) -> list[Any]:
        self.look(keys, COMPARED)
        return [concrete(key) for key in keys]

    def writable(self, x: Any) -> Any:
        return self.plain(x)

    def append(self, x: list[Any], value: Any) -> None:
        append = self.world.append if type(x) is list and self.is_outside(x) else list.append
        append(x, value)

    def deep(self, x: Any) -> Any:
        """What C code that looks into containers within containers may see of `x`."""
        if not issubclass(type(x), _COPIED) or type(type(x).__hash__) is _FUNCTION:
            return x  # a copy would be another key
        shown = self.plain(x)
        if isinstance(shown, dict):
            if any(issubclass(type(item), (*CONTAINERS, tuple)) for item in dict.values(shown)):
                made = empty_like(shown)
                items = ((key, self.deep(item)) for key, item in pairs_of(shown))
                dict_class(made).update(made, items)
                return made
        elif type(shown) in (list, tuple) and any(
            issubclass(type(item), (*CONTAINERS, tuple)) for item in shown
        ):
            return type(shown)(self.deep(item) for item in shown)
        return shown


# ---------------------------------------------------------------------------- attributes
# Attributes as Python finds them, each step guarded.
#
# source https://docs.python.org/3/howto/descriptor.html#technical-tutorial

_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


def class_lookup(m: Capturing, cls: type, name: str) -> Any:
    """What the first class in the order of resolution holds that has `name`; or ABSENT."""
    known = m.in_classes.get((cls, name))
    if known is None:
        items = (m.world.class_item(base, name) for base in cls.__mro__)
        known = (next((item for item in items if item is not ABSENT), ABSENT),)
        if cls not in m.made_classes:
            m.in_classes[cls, name] = known
    return known[0]


def python_method(m: Capturing, obj: Any, name: str) -> Function | None:
    """The method of a class, but for C's own: a function, or what gives one to each instance."""
    cls = type(obj)  # not isinstance(): that asks the object for its class, by code of the program
    if cls.__flags__ & IN_C or issubclass(cls, _WITHOUT_METHODS):
        return None
    if cls.__module__.startswith(("fusee.capture", "fusee.torch_functions")):
        return None  # ours, such as a generator on the machine
    found = class_lookup(m, cls, name)
    if isinstance(found, METHODS_IN_C):  # C's by another name: `__getattr__ = dict.get`
        return found if found.__name__ != name else None
    kind: Any = type(found)
    if kind is _FUNCTION or found is ABSENT:
        return None if found is ABSENT else found
    is_asked = name not in _REFUSING if found is None else issubclass(kind, _GIVING)
    is_asked |= not kind.__flags__ & IN_C or kind.__name__ == "cython_function_or_method"
    return functools.partial(through, found, name) if is_asked else None


# Of C: what calls the program in place of a method. As one of these None says that there is none.
_GIVING = (
    property, staticmethod, classmethod, types.MethodType, functools.partial,
    type(functools.lru_cache(int)),
)  # fmt: skip
_REFUSING = frozenset("__hash__ __iter__ __contains__ __reversed__ __fspath__".split())


def through(found: Any, name: str, obj: Any, /, *args: Any) -> Any:
    """Call what a class holds under a name, as a method of an instance."""
    kind: Any = type(found)
    return (kind.__get__(found, obj, type(obj)) if hasattr(kind, "__get__") else found)(*args)


def ask(m: Capturing, obj: Any, name: str, *args: Any) -> Any:
    """What a method gives that is written in Python; ABSENT if the class has none."""
    method = python_method(m, obj, name)
    return ABSENT if method is None else m.call(method, obj, *args)


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"attribute name must be string, not {type(name).__name__!r}")


def by_c(function: Callable[[Any], Any], name: str, found: Any) -> Any:
    """What C code makes of what a method gave: an error if it is none of its kind."""
    return function(type("", (), {name: lambda *_: found})())


def lookup(m: Capturing, obj: Any, name: str) -> Any:
    """`obj.name`."""
    _check_name(name)
    try:
        return _lookup(m, obj, name)
    except AttributeError as error:
        if error.name is None and error.obj is None:
            error.name, error.obj = name, obj
        raise


def _lookup(m: Capturing, obj: Any, name: str) -> Any:
    kind = type(obj)
    if kind in READERS:
        return READERS[kind](m, obj, name)
    if issubclass(kind, _WITH_DERIVED):
        base: Any = next(x for x in _WITH_DERIVED if issubclass(kind, x))
        return READERS[base](m, obj, name)
    if kind is types.MethodType and name not in _OF_METHODS:
        return _lookup(m, obj.__func__, name)
    custom = python_method(m, obj, "__getattribute__")
    try:
        return got(m, custom, obj, name) if custom else of_instance(m, obj, name)
    except AttributeError:
        fallback = python_method(m, obj, "__getattr__")
        if fallback is None and type(class_lookup(m, kind, "__getattr__")) is _IN_CPP:
            raise GraphBreak(f"{kind.__qualname__}.__getattr__ is C++'s") from None
        if fallback is None:
            raise
    # not above: errors would have another as context
    if fallback is not torch.nn.Module.__getattr__:
        return m.call(fallback, obj, name)
    for table_name in _MODULE_TABLES:  # without interpreting it for each parameter and child
        if (table := _in_dict(m, obj, table_name)) is not ABSENT:
            own = m.world.origin(table) is None
            found = table.get(name, ABSENT) if own else m.world.get(m.world.mirror(table), name)
            if found is not ABSENT:
                return found
    raise missing(kind, name)


# What bound methods have themselves; all else is their function's.
_OF_METHODS = {*vars(object), *vars(types.MethodType)} - {"__doc__"}
# What pybind11 makes a method of a class with.
_IN_CPP = type(torch._C.CompilationUnit.__dict__["__getattr__"])


# ------------------------------------------------------------------------------ kinds of objects


# What reads attributes of objects of a class, `(m, obj, name)`; of others Python's rules do.
READERS: Rules[type, Function] = Rules()
READERS[Computed] = lambda m, obj, name: obj.attribute(m, name)
READERS.update(dict.fromkeys(OPEN, lambda m, obj, name: symbols.attribute(obj, name)))
_WITH_DERIVED = (Computed, types.ModuleType, type, enum.Enum, torch.Size)


@READERS.rule(FakeTensor)
def _of_tensor(m: Capturing, obj: Any, name: str) -> Any:
    m.world.mirrors.only_reads = False
    if name == "__class__":
        return m.kind_of(obj)
    if id(obj) in m.world.seen:  # a subclass and an instance's own attributes come first
        kind = m.world.seen[id(obj)]
        if name == "__dict__":
            raise GraphBreak("all attributes of a tensor")
        found = _in_own_classes(m, kind, name)
        if not is_data_descriptor(found) and not hasattr(torch.Tensor, name):
            value = m.world.get(mirrors.put_on(m, obj), name)
            if value is not ABSENT:
                return value
        if found is not ABSENT:
            return bound(m, found, obj, kind, name)
    if name == "device" and (m.modes or id(obj) in m.world.seen):
        return torch._C.TensorBase.device.__get__(obj)  # FakeTensor has one that asks nobody
    # which torch does not ask classes about; FakeTensor has a tolist() that asks each element
    if name in ("as_subclass", "numpy", "tolist"):
        return types.MethodType(getattr(torch.Tensor, name), obj)
    if name in ("grad", "_grad"):
        return mirrors.read_grad(m, obj)
    if name == "__dict__":
        mirror = mirrors.put_on(m, obj)
        if id(obj) in m.world.put_on:  # of a tensor that the graph computes
            return mirror.copy
        return m.world.know(mirror.obj, mirror.origin)
    kind = m.kind_of(obj)
    if name in ("__module__", "__doc__", "__annotations__"):  # which its class has
        return getattr(kind, name)
    own = vars(torch.nn.Parameter).get(name) if kind is torch.nn.Parameter else None
    if isinstance(own, types.FunctionType):
        return types.MethodType(own, obj)
    text = f"'{kind.__name__}' object has no attribute {name!r}"
    if hasattr(torch.Tensor, name):  # a stand-in has more
        try:
            return getattr(obj, name)
        except AttributeError as error:
            text = str(error).replace("FakeTensor", "Tensor")
    value = m.world.get(mirrors.put_on(m, obj), name)  # what somebody has put there
    if value is not ABSENT:
        return value
    raise AttributeError(text)  # not above: it would have a context


@READERS.rule(types.ModuleType)
def _of_module(m: Capturing, obj: types.ModuleType, name: str) -> Any:
    own = _own_of_module(obj)
    mirror, is_property = m.world.mirrors.get(id(obj.__dict__)), is_data_descriptor(own.get(name))
    is_written = mirror is not None and name in mirror.writes
    is_plain = is_trusted(obj.__name__) and not (is_written or is_property)
    if is_plain and names_operators(obj):
        getattr(obj, name)  # which puts it where it is looked for: it may be another one later
    elif is_plain or name == "__dict__":
        return m.world.hold_from_trusted(getattr(obj, name), obj.__name__, name)
    if not is_written and "__getattribute__" in own:
        place = ResultOf(Held(obj, obj.__name__), operator.attrgetter(name), f"{name} of ")
        return m.world.load(run_for_real(getattr, obj, name), place)
    if name in own and (is_property or name not in obj.__dict__):
        return bound(m, own[name], obj, type(obj), name)
    names = m.world.mirror_of_globals(obj.__dict__, obj.__name__)
    found = m.world.get(names, name)
    if found is not ABSENT:
        return found
    if "__getattr__" in own:
        return m.call(own["__getattr__"], obj, name)
    if (fallback := m.world.get(names, "__getattr__")) is ABSENT:
        raise AttributeError(f"module {obj.__name__!r} has no attribute {name!r}")
    return m.call(fallback, name)


def _own_of_module(obj: types.ModuleType) -> dict[str, Any]:
    """What classes in Python say of their module's attributes."""
    return {name: x for cls in type(obj).__mro__[-3::-1] for name, x in vars(cls).items()}


@READERS.rule(type)
def _of_class(m: Capturing, cls: type, name: str) -> Any:
    meta = type(cls)
    if name in ("__name__", "__qualname__", "__module__", "__mro__", "__bases__"):
        return getattr(cls, name)
    if name == "__dict__":
        return m.world.made(vars, cls)
    if name == "__annotations__":
        getattr(cls, name)  # none is inherited: a class without gets a dict of its own
    found = class_lookup(m, cls, name)
    is_own = found is not ABSENT and not isinstance(found, types.DynamicClassAttribute)
    is_first = is_own and not is_data_descriptor(getattr(meta, name, None))
    in_meta = ABSENT if meta is type or is_first else class_lookup(m, meta, name)
    is_users = type(in_meta) is property and not is_trusted(meta.__module__)
    if is_users or isinstance(in_meta, types.FunctionType):
        return bound(m, in_meta, cls, meta, name)
    if not is_own:
        return getattr(cls, name)  # of enums, abc; or raises
    if isinstance(found, (classmethod, staticmethod)):
        return bound(m, found, cls, cls, name)
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
    args = args or own_super(m)
    if (kind := type(args[-1])) is Opaque:
        raise args[-1].met()
    if python_getattribute(kind) and args[1:] and not issubclass(kind, (*_OURS, type, args[0])):
        raise GraphBreak("super() of an object that says which class it has")
    if kind is FakeTensor:
        return Super(__thisclass__=args[0], __self__=args[1])
    return super(*args)


@READERS.rule(super, Super)
def _of_super(m: Capturing, obj: Any, name: str) -> Any:
    start, owner = obj.__thisclass__, obj.__self__
    of_class = issubclass(type(owner), type) and issubclass(owner, start)
    kind = owner if of_class else m.kind_of(owner)
    for base in kind.__mro__[kind.__mro__.index(start) + 1 :]:
        found = m.world.class_item(base, name)
        if found is ABSENT:
            continue
        if of_class and isinstance(found, (types.FunctionType, property)):
            return found
        if isinstance(found, C_DESCRIPTORS):
            raise GraphBreak(f"{name} of a class in C is read through super()")
        return bound(m, found, owner, kind, name)
    raise AttributeError(f"'super' object has no attribute {name!r}")


@READERS.rule(
    *SCALARS, *CONTAINERS, tuple, frozenset, types.FunctionType, types.BuiltinFunctionType, slice,
    enum.Enum,
)  # fmt: skip
def _of_plain(m: Capturing, obj: Any, name: str) -> Any:
    if name == "maxlen" and type(obj) is collections.deque:
        return m.world.slot(obj, name)
    if isinstance(obj, enum.Enum) and name not in vars(obj):
        if type(found := class_lookup(m, type(obj), name)) in (property, types.FunctionType):
            return bound(m, found, obj, type(obj), name)
    if isinstance(obj, types.FunctionType):
        if name == "__dict__":
            return of_instance(m, obj, name)
        if name not in _FUNCTION_SLOTS and (found := _in_dict(m, obj, name)) is not ABSENT:
            return found
        if name in _NOT_OF_CODE and not isinstance(m.world.origin(obj), Held):
            return m.world.slot(obj, name)
    return getattr(obj, name)


# What functions of one code may differ in; and what else lies in none's dict.
_NOT_OF_CODE = frozenset(
    "__name__ __qualname__ __module__ __doc__ __defaults__ __kwdefaults__ __closure__"
    " __annotations__".split()
)
_FUNCTION_SLOTS = {*_NOT_OF_CODE, "__code__", "__get__", "__globals__", "__call__", "__class__"}


def of_instance(m: Capturing, obj: Any, name: str) -> Any:
    """What object.__getattribute__ gives."""
    _check_name(name)
    cls = type(obj)
    if name == "__class__" and not any(name in vars(base) for base in cls.__mro__[:-1]):
        return cls
    if name == "__dict__" and not tells_dict(cls):
        mirror = m.world.attributes(obj)
        if mirror is None:
            return own_dict(obj)
        return m.world.know(mirror.obj, m.world.origin(mirror.obj) or mirror.origin)
    found = class_lookup(m, cls, name)
    if found is not ABSENT and is_data_descriptor(found) and hasattr(type(found), "__get__"):
        return bound(m, found, obj, cls, name)
    value = _in_dict(m, obj, name)
    if value is not ABSENT:
        return value
    if found is not ABSENT:
        return bound(m, found, obj, cls, name)
    in_c: Any = cls.__getattribute__
    if in_c is not object.__getattribute__ and not python_getattribute(cls):
        with contextlib.suppress(AttributeError):
            in_c(obj, name)
            raise GraphBreak(f"C code knows the attributes of a {cls.__qualname__}")
    # a variable for it would be a cycle: the error knows this frame
    raise missing(cls, name, name=name, obj=obj)


def _in_dict(m: Capturing, obj: Any, name: str) -> Any:
    """What an instance's own attributes hold under a name; or ABSENT."""
    mirror = m.world.attributes(obj)
    if mirror is not None:
        return m.world.get(mirror, name)
    has_own = type(obj).__dictoffset__ and m.world.origin(obj) is None
    return own_dict(obj).get(name, ABSENT) if has_own else ABSENT


# ------------------------------------------------------------------------------ descriptors


def bound(m: Capturing, found: Any, obj: Any, cls: type, name: str) -> Any:
    """What a descriptor, or anything else that a class holds, gives for an instance."""
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, obj)
    if type(found) is types.WrapperDescriptorType:
        return found.__get__(obj, cls)
    words = f"{cls.__qualname__}.{name}"
    if isinstance(found, classmethod):
        inner = found.__func__
        is_function = isinstance(inner, types.FunctionType) or not hasattr(type(inner), "__get__")
        if is_function or sys.version_info >= (3, 13):
            return types.MethodType(inner, cls)
        return bound(m, inner, cls, cls, name)  # a property of the class, or a method
    if isinstance(found, staticmethod):
        return m.world.hold(found.__func__, words)
    if isinstance(found, property):
        if found.fget is None:
            raise AttributeError(f"property {name!r} of {cls.__qualname__!r} object has no getter")
        return m.call(m.world.hold(found.fget, words), obj)
    if isinstance(found, C_DESCRIPTORS):
        if isinstance(obj, torch.autograd.graph.Node) and "saved" in name:
            raise GraphBreak(
                f"{name} of a node of autograd may be what a hook of the program gives"
            )
        return m.world.slot(obj, name)
    if isinstance(found, functools.cached_property):
        value = m.call(m.world.hold(found.func, words), obj)
        m.set_in_dict(obj, name, value)
        return value
    if not hasattr(type(found), "__get__"):
        return found
    is_plain = type(found).__module__ == "functools" or type(found) is FIELD
    if is_plain or type(found).__module__.startswith("fusee."):
        return found.__get__(obj, cls)
    value = ask(m, found, "__get__", obj, cls)
    if value is ABSENT and inspect.ismethoddescriptor(found):  # of C: Python's have one, too
        return found.__get__(obj, cls)
    if value is ABSENT:
        raise GraphBreak(f"a descriptor of class {type(found).__qualname__} is not known")
    return value


# ------------------------------------------------------------------------------ writing


def store(m: Capturing, obj: Any, name: str, value: Any) -> None:
    """`obj.name = value`, or `del obj.name` for DELETED."""
    obj = concrete(obj) if is_open(obj) else obj  # a SymInt would take any
    if type(obj) is FakeTensor:
        if id(obj) in m.world.seen and not hasattr(torch.Tensor, name):
            kind = m.world.seen[id(obj)]
            if value is DELETED or is_data_descriptor(_in_own_classes(m, kind, name)):
                raise GraphBreak(
                    f"the attribute {name} of a {kind.__qualname__} is deleted, or a property"
                )
        if mirrors.store_grad(m, obj, name, value):
            return
        if name in ("grad", "_grad") and value is not DELETED:
            mirrors.write_grad(m, obj, value)
        elif hasattr(torch.Tensor, name):
            raise GraphBreak(f"setting the attribute {name} of a tensor")
        else:
            if value is DELETED and m.world.get(mirrors.put_on(m, obj), name) is ABSENT:
                raise missing(m.kind_of(obj), name, obj)
            m.world.set(mirrors.put_on(m, obj), name, value)
        return
    if issubclass(type(obj), Computed):
        raise GraphBreak(f"setting the attribute {name} of a {obj.kind.__name__}")
    if issubclass(type(obj), types.ModuleType):
        own = _own_of_module(obj)
        found = in_classes(type(obj), name)
        is_own = is_data_descriptor(found) or {"__setattr__", "__delattr__"} & {*own}
        if is_own and (name in own or not is_trusted(obj.__name__)):
            raise GraphBreak(f"setting {name} of a module, which its class takes care of")
        m.world.set(m.world.mirror_of_globals(obj.__dict__, obj.__name__), name, value)
        return
    if issubclass(type(obj), type):
        if m.world.origin(obj) is None and obj in m.made_classes:
            delattr(obj, name) if value is DELETED else setattr(obj, name, value)
            return
        raise GraphBreak(f"setting the attribute {name} of a class")
    which, *given = ("__delattr__",) if value is DELETED else ("__setattr__", value)
    if ask(m, obj, which, name, *given) is ABSENT:
        store_plainly(m, obj, name, value)


def of_slot(m: Capturing, obj: Any, name: str) -> Any:
    """What lies in a slot; or ABSENT."""
    try:
        return m.world.slot(obj, name)
    except AttributeError:
        return ABSENT


def store_plainly(m: Capturing, obj: Any, name: str, value: Any) -> None:
    """What object.__setattr__ and object.__delattr__ do."""
    _check_name(name)
    found = class_lookup(m, type(obj), name)
    if found is not ABSENT and is_data_descriptor(found):
        which, *given = ("delete", obj) if value is DELETED else ("set", obj, value)
        if isinstance(found, property):
            function = found.fdel if value is DELETED else found.fset
            if function is None:
                what, kind = "deleter" if value is DELETED else "setter", type(obj).__qualname__
                raise AttributeError(f"property {name!r} of {kind!r} object has no {what}")
            m.call(m.world.hold(function, name), *given)
            return
        if ask(m, found, f"__{which}__", *given) is not ABSENT:
            return
        is_slot = type(found) is types.MemberDescriptorType
        is_slot = is_slot and not found.__objclass__.__flags__ & IN_C  # some of C are read-only
        if m.world.origin(obj) is not None and not is_slot:
            raise GraphBreak(f"setting {name} through {type(found).__qualname__}")
        if value is DELETED and is_slot and of_slot(m, obj, name) is ABSENT:
            raise AttributeError(name)
        m.world.set_slot(obj, name, value)
        return
    if value is DELETED and _in_dict(m, obj, name) is ABSENT:
        if not type(obj).__dictoffset__:
            object.__delattr__(obj, name)  # has its own words, and nothing to delete
        raise missing(type(obj), name, obj)
    m.set_in_dict(obj, name, value)
