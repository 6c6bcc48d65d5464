"""Where an object came from: the expression that finds it again at the next call.

    Local("x")                      x
    Item(Dict(Local("x")), "scale") x.scale
    Held(module)                    an object known by identity: a module, a function, a class

An origin yields the guard on an object, the code that hands it to a graph or rebuilds it, and the
words in which reports name it.
"""

from __future__ import annotations

import builtins
import collections
import ctypes
import functools
import operator
import re
import sys
import threading
import types
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from fusee.source import Args
from fusee.sym import Atom, Size, Symbol, substitute, symbols
from fusee.sym.ranges import COMPARISONS

V = TypeVar("V")

# ---------------------------------------------------------------------------- origin


_TRUSTED = frozenset(
    "torch numpy math cmath operator functools itertools collections contextlib typing abc enum"
    " dataclasses copy re inspect types warnings logging os sys random builtins weakref threading"
    " importlib string numbers time traceback _operator _functools _collections _collections_abc"
    " typing_extensions heapq".split()
)

IN_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: a class in C, as a rule
ON_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class in Python, but for some
_MOST_NAMED = 24  # parts of an origin in the name of an input


@functools.lru_cache(maxsize=4096)
def is_trusted(module: str | None) -> bool:
    """Whether what a module holds is taken as constant: torch's own names and Python's."""
    return module is not None and module.partition(".")[0] in _TRUSTED


def by_function(table: Mapping[Any, V], function: Any) -> V | None:
    """What a table has of what is called, whose hash may be a method of the program's."""
    kind, by_identity = type(function), cast(Any, object.__hash__)
    is_alone = kind.__hash__ is by_identity or kind is types.BuiltinFunctionType
    return table.get(function) if is_alone or kind.__module__ == "torch._ops" else None


# A module whose functions break at each turn of a loop: what they call is compiled alone.
CALLING = "torch.optim.swa_utils"
# Modules of torch and of Python whose functions run what the program gave them, or its modules.
_PASS_ON = tuple(
    "torch.nn.modules. torch.nn.parallel. torch.nn.utils. torch.utils._contextlib"
    " torch.utils.checkpoint torch.amp. contextlib functools".split()
)


@functools.lru_cache(maxsize=4096)
def is_python(module: str) -> bool:
    """Whether functions of a module run in Python: nothing of the program's is behind them."""
    is_known = is_trusted(home := module.partition(".")[0]) or home in sys.stdlib_module_names
    return is_known and not module.startswith(_PASS_ON)


def names_operators(module: types.ModuleType) -> bool:
    """Whether it is a namespace of operators that are registered while the program runs."""
    home, _, name = module.__name__.rpartition(".")
    return home == "torch.ops" and name not in ("aten", "prims", "prim", "higher_order")


def is_data_descriptor(found: Any) -> bool:
    """Whether what a class holds comes before an instance's own attributes."""
    kind = type(found)
    return hasattr(kind, "__set__") or hasattr(kind, "__delete__")


@dataclass(frozen=True, eq=False)
class Origin:
    """An expression; each kind is a class, one way to get at an object. Equal only to itself.

    SOURCE   its Python source, given that of its parent and that of the constant that it needs
    WORDS    how reports name it
    HOLDS    the field with that constant, if it needs one
    """

    SOURCE: ClassVar[str]
    WORDS: ClassVar[str]
    HOLDS: ClassVar[str] = ""

    def code(self, parent: str, source: Source) -> str:
        """Python source of the object, given that of what it is a part of."""
        constant = source.constant(getattr(self, self.HOLDS)) if self.HOLDS else ""
        return self.SOURCE.format(self, parent=parent, constant=constant)

    def find(self, of: Any) -> Any:
        """The object, given what it is a part of, or the variables. Runs no code of the user's."""
        raise NotImplementedError

    def way(self) -> tuple[Any, ...] | None:
        """How another process gets at the object that is held, as persist/references.py has it."""
        return None

    def words_after(self, parent: str) -> str:
        """How reports name it, given how they name what it is a part of."""
        return self.WORDS.format(self, parent=parent)

    def __str__(self) -> str:
        return _words(self.path())

    @property
    def parent(self) -> Origin | None:
        return None

    @property
    def root(self) -> Origin:
        """What all of this is a part of."""
        return self.path()[0]

    def path(self) -> list[Origin]:
        """What all of this is a part of, what is a part of that, and so on to this."""
        return self.beyond(())

    def beyond(self, known: Container[Origin]) -> list[Origin]:
        """The end of the path: this, and what it is a part of up to what is known."""
        found: list[Origin] = []
        at: Origin | None = self
        while at is not None and at not in known:
            found.append(at)
            at = at.parent
        return found[::-1]


def variable(name: str) -> str:
    """How generated code calls a variable: its own names begin with an underscore.

    name   of the program's variable; ".s0" and the like for what has none
    """
    if name.startswith("."):
        return f"_{name[1:]}"
    if not name.isidentifier():  # code that was generated, as pytest's `@py_assert1`
        return "_n" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in name)
    return f"p{name}" if name.lstrip("p").startswith("_") else name


@dataclass(frozen=True, eq=False)
class Local(Origin):
    """A variable of the function that is compiled: a parameter, or a value alive at a break."""

    name: str
    SOURCE, WORDS = "{0.variable}", "{0.name}"

    @property
    def variable(self) -> str:
        return variable(self.name)

    def find(self, of: Any) -> Any:
        return of[self.name]


@dataclass(frozen=True, eq=False)
class Held(Origin):
    """An object that the entry holds itself, since a guard has made sure that it is this one."""

    value: Any
    words: str
    SOURCE, WORDS, HOLDS = "{constant}", "{0.words}", "value"

    def find(self, of: Any) -> Any:
        return self.value

    def way(self) -> tuple[Any, ...] | None:
        if type(self.value) is not dict:
            return None
        module = sys.modules.get(self.value.get("__name__", ""))
        is_its_own = module is not None and module.__dict__ is self.value
        return ("part", module, "__dict__") if is_its_own else None


@dataclass(frozen=True, eq=False)
class ClassDict(Held):
    """What a class itself holds; `value` is a view of it, another one each time it is asked for."""

    cls: type

    def way(self) -> tuple[Any, ...]:
        return "part", self.cls, "__dict__"


@dataclass(frozen=True, eq=False)
class Part(Origin):
    """What is found in, or computed from, the object at another origin."""

    of: Origin

    @property
    def parent(self) -> Origin | None:
        return self.of


@dataclass(frozen=True, eq=False)
class Attr(Part):
    """An attribute that is found without looking into a dict: a slot, a tensor's `grad`."""

    name: str
    SOURCE = WORDS = "{parent}.{0.name}"

    def find(self, of: Any) -> Any:
        return getattr(of, self.name)


def of_code(origin: Origin) -> types.FunctionType | None:
    """The function that the entry holds and whose code this is, if it is one's."""
    held = origin.of if isinstance(origin, Attr) and origin.name == "__code__" else None
    return held.value if isinstance(held, Held) and type(held.value) is types.FunctionType else None


C_DESCRIPTORS = types.MemberDescriptorType, types.GetSetDescriptorType
# Of a namedtuple's class.
FIELD: type = type(collections.namedtuple("_Pair", "one other").one)  # type: ignore[attr-defined]
_generic_dict: Any = ctypes.pythonapi.PyObject_GenericGetDict
_generic_dict.restype = ctypes.py_object
_generic_dict.argtypes = ctypes.py_object, ctypes.c_void_p


def own_dict(obj: Any) -> Any:
    """`__dict__` of an instance, whatever its class makes of attributes."""
    if tells_dict(type(obj)):
        return _generic_dict(obj, None)
    base = threading.local if issubclass(type(obj), threading.local) else object
    return base.__getattribute__(obj, "__dict__")


def python_getattribute(cls: Any) -> bool:
    """Whether code of the program's says what attributes an instance has, `__dict__` among them."""
    return type(getattr(cls, "__getattribute__", None)) is types.FunctionType


_UNSAID = object()


def missing(cls: type, what: str, deleted: Any = _UNSAID, **about: Any) -> AttributeError:
    """The error of an attribute that is not there; Python 3.13 says what was to be deleted."""
    if deleted is not _UNSAID and sys.version_info >= (3, 13):
        about = {"name": what, "obj": deleted}
    is_named_whole = cls.__flags__ & IN_C and cls.__module__ != "builtins"
    kind = f"{cls.__module__}.{cls.__qualname__}" if is_named_whole else cls.__name__
    return AttributeError(f"{kind!r} object has no attribute {what!r}", **about)


def keeps_in_c(cls: Any) -> bool:
    """Whether instances hold in C what no attribute shows: C code has made a class of theirs. Of
    torch's only what nobody may write to counts."""
    kinds = types.WrapperDescriptorType, types.MethodDescriptorType
    for base in cls.__mro__[:-1]:
        if base.__flags__ & IN_C:
            return True
        if is_trusted(base.__module__) or base.__module__ == "pybind11_builtins":
            continue
        if any(isinstance(x, kinds) and x.__objclass__ is base for x in vars(base).values()):
            return True
    return False


def in_classes(cls: type, name: str, default: Any = None) -> Any:
    """What the first class in the order of resolution holds that has a name."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), default)


def tells_dict(cls: Any) -> bool:
    """Whether a class has a `__dict__` of its own, which is not where its instances' lie."""
    found = in_classes(cls, "__dict__")
    return not (isinstance(found, C_DESCRIPTORS) or (found is None and not cls.__dictoffset__))


def writer(cls: Any, deletes: bool) -> Any:
    """C's function that writes an attribute of an instance, or deletes it."""
    name, kind = f"__{'del' if deletes else 'set'}attr__", types.WrapperDescriptorType
    return next(x for base in cls.__mro__ if type(x := vars(base).get(name)) is kind)


def dict_code(cls: Any, of: str, source: Source) -> str:
    """Code for what `own_dict` gives for an instance."""
    is_told = python_getattribute(cls) or tells_dict(cls)
    return f"{source.constant(own_dict)}({of})" if is_told else f"{of}.__dict__"


@dataclass(frozen=True, eq=False)
class Dict(Attr):
    """The dict that holds the attributes of an instance."""

    name: str = "__dict__"

    def code(self, parent: str, source: Source) -> str:
        return dict_code(source.kind(self.of), parent, source)

    def find(self, of: Any) -> Any:
        return own_dict(of)


@dataclass(frozen=True, eq=False)
class Cell(Part):
    """The contents of a closure's cell."""

    name: str
    SOURCE, WORDS = "{parent}.cell_contents", "{0.name}"

    def find(self, of: Any) -> Any:
        return of.cell_contents


_NOTHING = object()  # stands for an element that is not there: no fact holds of it


@dataclass(frozen=True, eq=False)
class Item(Part):
    """An element of a list, tuple or dict."""

    key: Any

    def code(self, parent: str, source: Source) -> str:
        raw, key = source.raw(self.of), source.constant(self.key)
        if raw and issubclass(source.names[raw], dict):  # which would ask `__missing__`
            return f"{raw}.get({parent}, {key}, {source.constant(_NOTHING)})"
        return f"{raw}.__getitem__({parent}, {key})" if raw else f"{parent}[{key}]"

    def find(self, of: Any) -> Any:
        raw: Any = raw_class(type(of))
        if raw in (None, type(of)):
            return of[self.key]
        is_dict = issubclass(raw, dict)
        return raw.get(of, self.key, _NOTHING) if is_dict else raw.__getitem__(of, self.key)

    def words_after(self, parent: str) -> str:
        if isinstance(self.of, Dict) and isinstance(self.key, str):
            return f"{parent.removesuffix(f'.{self.of.name}')}.{self.key}"
        return f"{parent}[{self.key!r}]"


@dataclass(frozen=True, eq=False)
class KeyedItem(Item):
    """An element of a dict whose key is an object: `words` are shown for it."""

    words: str

    def words_after(self, parent: str) -> str:
        return f"{parent}[{self.words}]"


@dataclass(frozen=True, eq=False)
class ResultOf(Part):
    """What a function gives for another source: `tuple` of the keys of a dict, for one."""

    function: Any
    words: str
    SOURCE, WORDS, HOLDS = "{constant}({parent})", "{0.words}({parent})", "function"

    def find(self, of: Any) -> Any:
        return self.function(of)


@dataclass(frozen=True, eq=False)
class Several(Origin):
    """A tuple of objects, each found at its own origin."""

    parts: tuple[Origin, ...]

    def code(self, parent: str, source: Source) -> str:
        return f"({', '.join(map(source.variable, self.parts))},)"

    def words_after(self, parent: str) -> str:
        return ", ".join(map(str, self.parts))


def at_key(both: tuple[dict[Any, Any], Any]) -> Any:
    """What a dict has at a key that is told apart by identity."""
    return dict.get(*both, _NOTHING)


@dataclass(frozen=True, eq=False)
class FoundBy(ResultOf):
    """An element of a dict whose key is what lies at another origin: `of` are both."""

    def words_after(self, parent: str) -> str:
        both: Any = self.of
        return "{}[{}]".format(*both.parts)


class Operand(NamedTuple):
    """The number of that index, or what a step made: steps count on from the numbers."""

    place: int


class Computation(NamedTuple):
    """What the last step makes of numbers. Operands are Operands and constants.

    kind   None, or the class of numbers: then it is whether it makes one of these, and never raises
    """

    steps: tuple[tuple[Callable[..., Any], Args], ...]
    kind: type | None = None

    def __call__(self, numbers: tuple[float, ...]) -> Any:
        found: list[Any] = [*numbers]
        try:
            for function, given in self.steps:
                known = [found[x.place] if type(x) is Operand else x for x in given]
                found.append(function(*known))
        except (ArithmeticError, ValueError):
            if self.kind is None:
                raise
            return False
        return found[-1] if self.kind is None else type(found[-1]) is self.kind

    def words(self, names: list[str]) -> str:
        """`(2 * p) > q`, given how the numbers are called."""
        found = [*names]
        for function, given in self.steps:
            shown = [found[x.place] if type(x) is Operand else repr(x) for x in given]
            sign = _SIGNS.get(function)
            text = f"{function.__name__}({', '.join(shown)})"
            found.append(text if sign is None else f"({f' {sign} '.join(shown)})")
        return found[-1][1:-1] if sign else found[-1]


_SIGNS: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/",
    operator.floordiv: "//", operator.mod: "%", operator.pow: "**",
    **{function: sign for sign, function in COMPARISONS.items()},
}  # fmt: skip


class WrittenSteps:
    """The steps from sizes to what is computed of them.

    places      the symbols that these are made of, each with a number of its own
    left        how many steps there may be; below 0 there are too many, and some are missing
    """

    def __init__(self, simplified: Callable[[Size], Size]) -> None:
        self.simplified, self.left = simplified, 32
        self.places: dict[Symbol, None] = {}
        self._steps: list[tuple[Any, Args]] = []

    def computation(self) -> Computation:
        """All of it: first the symbols."""
        first = {symbol: Operand(k) for k, symbol in enumerate(self.places)}

        def placed(x: Any) -> Any:
            return Operand(len(first) + x.place) if type(x) is Operand else first.get(x, x)

        rows = ((function, tuple(map(placed, given))) for function, given in self._steps)
        return Computation(tuple(rows))

    def step(self, function: Any, operands: Iterable[Any]) -> Any:
        """What a function gives for nodes of open numbers, and numbers."""
        self.left -= 1
        given = (*map(self._of, operands),) if self.left >= 0 else ()
        return self._step(function, *given)

    def _step(self, function: Any, *given: Any) -> Operand:
        self._steps.append((function, given))
        return Operand(len(self._steps) - 1)

    def _of(self, x: Any) -> Any:
        if (kind := getattr(x, "kind", None)) is int:
            return self._size(self.simplified(x.size))
        if kind is float:
            found = x.maybe_as_float()
            return self.step(x.function, x.operands) if found is None else found
        return x

    def _size(self, a: Size) -> Any:
        self.left -= 1
        if isinstance(a, int) or self.left < 0:
            return a
        terms = []
        for mono, scale in a.terms.items():
            factors = [*map(self._atom, mono), *([scale] if scale != 1 or not mono else [])]
            terms.append(functools.reduce(functools.partial(self._step, operator.mul), factors))
        return functools.reduce(functools.partial(self._step, operator.add), terms)

    def _atom(self, atom: Atom) -> Any:
        if isinstance(atom, Symbol):
            self.places[atom] = None
            return atom
        return self._step(_CALLS[atom.op], self._size(atom.a), self._size(atom.b))


_CALLS = {
    "//": operator.floordiv, "%": operator.mod, "min": min, "max": max, "&": operator.and_,
    "<<": operator.lshift,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class ComputedAt(ResultOf):
    """What a Computation gives for numbers from outside: `of` are all of them."""

    of: Several

    def words_after(self, parent: str) -> str:
        return self.words


@functools.cache
def given_by(function: Callable[[], Any], words: str = "") -> ResultOf:
    """What a function of the process gives."""
    return ResultOf(Held(function, words), operator.call, "")


@dataclass(frozen=True, eq=False)
class OfAxis(Part):
    """What a method of a tensor says of an axis."""

    axis: int
    METHOD: ClassVar[str]
    SOURCE = WORDS = "{parent}.{0.METHOD}({0.axis})"

    def find(self, of: Any) -> Any:
        return getattr(of, self.METHOD)(self.axis)


class SizeOf(OfAxis):
    """A size of a tensor."""

    METHOD = "size"


class StrideOf(OfAxis):
    """A stride of a tensor."""

    METHOD = "stride"


@dataclass(frozen=True, eq=False)
class ReadOf(Part):
    """What a method of a tensor gives: the number in it, or its address."""

    method: str
    SOURCE = WORDS = "{parent}.{0.method}()"

    def find(self, of: Any) -> Any:
        return getattr(of, self.method)()


def is_remade(function: types.FunctionType, known: Origin | None, origin: Origin) -> bool:
    """Whether another function of the same code may come by the next time: a lambda argument."""
    if known is not None:
        return not isinstance(known, Held)
    return isinstance(origin.root, Local) and is_made_anew(function)


def is_made_anew(function: types.FunctionType) -> bool:
    """Whether it is a lambda or a closure, and nobody told a compiler of this very one."""
    return "<" in function.__qualname__ and not any(map(_MARK.match, function.__dict__))


_MARK = re.compile("_(torchdynamo|dynamo|fusee)")


def is_buffer(origin: Origin) -> bool:
    """Whether this is where a module keeps a buffer."""
    place = origin.parent
    if not isinstance(place, Item) or type(place.key) is not str:  # the recorder compares tensors
        return False
    return place.key == "_buffers" and isinstance(place.of, Dict)


def input_name(origin: Origin) -> str:
    """Words for a tensor that is an input of a graph: the end of its path, if that is long."""
    text = _words(origin.path()[-_MOST_NAMED:])
    return text.replace("._parameters", "").replace("._modules", "").replace("._buffers", "")


def _words(path: Iterable[Origin]) -> str:
    text = ""
    for part in path:
        text = part.words_after(text)
    return text


# ---------------------------------------------------------------------------- expressions
# Python source of expressions over origins: what checks and rebuilding code are written with.


class Source:
    """Python source of expressions over origins, with the constants they need.

    An origin that is used more than once is a variable; those of held objects are constants.

    kinds   the classes of containers, by origin
    known   names of variables that are there, by origin
    """

    def __init__(
        self, kinds: dict[Origin, type] | None = None, known: dict[Origin, str] | None = None
    ) -> None:
        self.kinds = kinds or {}
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self._constants: dict[int, str] = {}
        self._variables = known or {}

    def constant(self, value: Any) -> str:
        """A name, or a literal, for `value`."""
        is_one = value is None or isinstance(value, bool)
        if type(value) is int:  # programs may ask with `is`: Python has these once
            is_one |= -6 < value < 257
        elif type(value) is str:
            is_one = len(value) < 2 or (value.isascii() and value.replace("_", "a").isalnum())
        if is_one:
            return repr(value)
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = f"_k{len(self._constants)}"
            self.names[name] = value
        return name

    def python(self, name: str) -> str:
        """A name for a builtin that no parameter of the user's hides."""
        self.names[f"_{name}"] = getattr(builtins, name)
        return f"_{name}"

    def expression(self, origin: Origin) -> str:
        """Source of the object at `origin`; what it is a part of becomes a variable."""
        found = self._variables.get(origin)
        if found is not None:
            return found
        return origin.code("" if origin.parent is None else self.variable(origin.parent), self)

    def raw(self, origin: Origin) -> str:
        """The class in C below a container's class, which may act in Python; else "".

        Guards must neither run the user's code nor make what a defaultdict lacks.
        """
        kind = self.kind(origin)
        raw = None if kind is None else raw_class(kind)
        return "" if raw is None or raw is kind else self.constant(raw)

    def kind(self, origin: Origin) -> type | None:
        """The class of the object at an origin, if that is a fact."""
        return type(origin.value) if isinstance(origin, Held) else self.kinds.get(origin)

    def variable(self, origin: Origin) -> str:
        """A name that holds the object at `origin` from here on."""
        for part in origin.beyond(self._variables):
            text = part.code("" if part.parent is None else self._variables[part.parent], self)
            self._variables[part] = text if text.isidentifier() else self.once(text)
        return self._variables[origin]

    def once(self, text: str) -> str:
        """A name for the value of an expression."""
        if text.isidentifier():
            return text
        name = f"_v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name


# ---------------------------------------------------------------------------- objects
# The objects themselves, found without running code of the user's.


def looking(
    values: Mapping[str, Any], kinds: Mapping[Origin, type] = types.MappingProxyType({})
) -> Callable[[Origin], Any]:
    """A function that finds the object at an origin; it raises one of `GONE` if there is none.

    kinds   classes without which nothing is a part: code of the user's might say what is
    """
    known: dict[Origin, Any] = {}

    def look(origin: Origin) -> Any:
        for part in () if origin in known else origin.beyond(known):
            of = part.parent
            if of is not None and type(known[of]) is not kinds.get(of, type(known[of])):
                raise TypeError(f"{of} is no {kinds[of].__qualname__}")
            if isinstance(part, Several):
                known[part] = tuple(map(looking(values, kinds), part.parts))  # no cycle
            else:
                known[part] = part.find(values if of is None else known[of])
        return known[origin]

    return look


def is_empty(cell: types.CellType) -> bool:
    """Whether a variable of a function around has no value."""
    return cell == types.CellType()


def has(name: str, obj: Any) -> bool:
    """Whether there is something in a slot."""
    try:
        object.__getattribute__(obj, name)
    except AttributeError:
        return False
    return True


_CONTAINERS = (collections.OrderedDict, dict, list, tuple, set, collections.deque)


def raw_class(kind: type) -> type | None:
    """The class in C whose methods look into a container of this class; None if it is none."""
    if kind is dict or kind is tuple:
        return kind
    return next((c for c in _CONTAINERS if issubclass(kind, c)), None)


def length(x: Any) -> int:
    """How many elements a container holds, whatever its class says of it."""
    raw: Any = raw_class(type(x))
    return len(x) if raw is None else raw.__len__(x)


def in_words(a: Size, names: Mapping[Symbol, Any], within: bool = False) -> str:
    """A size as people write it: `2*x.size(0) % 8`. within: as an operand of something else"""
    if isinstance(a, int):
        return str(a)

    def atom(x: Any) -> str:
        if isinstance(x, Symbol):
            return str(names.get(x, x))
        if x.op in ("min", "max"):
            return f"{x.op}({in_words(x.a, names)}, {in_words(x.b, names)})"
        text = f"{in_words(x.a, names, True)} {x.op} {in_words(x.b, names, True)}"
        return f"({text})" if within or a.terms != {(x,): 1} else text

    text = ""
    for factors, scale in a.terms.items():
        sign = " - " if scale < 0 else " + "
        text += sign if text else sign.strip(" +")
        numbers = [str(abs(scale))] if abs(scale) != 1 or not factors else []
        text += "*".join([*numbers, *map(atom, factors)])
    return f"({text})" if within and len(a.terms) > 1 else text


def size_source(
    a: Size,
    origins: Mapping[Symbol, Origin],
    source: Source,
    read: Mapping[Symbol, str] = types.MappingProxyType({}),
) -> str:
    """Python for a size, given where its symbols come from; `read`: those that are expressions."""
    found = {s: read.get(s) or source.variable(origins[s]) for s in symbols(a)}
    named = {s: Symbol(text, s.lo).expr for s, text in found.items()}
    text = str(substitute(a, named))
    for name in ("min", "max"):
        if f"{name}(" in text:
            text = text.replace(f"{name}(", f"{source.python(name)}(")
    return text
