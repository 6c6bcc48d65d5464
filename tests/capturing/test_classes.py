"""Classes of every kind, captured whole."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch import nn

import fusee
from fusee.capture.policy import as_function
from tests.capturing.same import Traced, same

T = Any
X = torch.arange(6.0).reshape(2, 3) - 2


class Base:
    kind = "base"
    made = 0

    def __init__(self, x: T) -> None:
        self.x = x

    def apply(self, y: T) -> T:
        return self.x + y

    @property
    def doubled(self) -> T:
        return self.x * 2

    @doubled.setter
    def doubled(self, value: T) -> None:
        self.x = value / 2

    @classmethod
    def create(cls, x: T) -> Base:
        return cls(x)

    @staticmethod
    def fixed() -> int:
        return 3

    def __call__(self, y: T) -> T:
        return self.apply(y)


class Derived(Base):
    kind = "derived"

    def apply(self, y: T) -> T:
        return super().apply(y) * self.fixed()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("auto_"):
            return name[5:]
        raise AttributeError(name)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: T) -> None:
        self.a = a


class Number:
    def __init__(self, value: T) -> None:
        self.value = value

    def __add__(self, other: Any) -> Number:
        return Number(self.value + getattr(other, "value", other))

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and self.value is other.value

    def __hash__(self) -> int:
        return 7

    def __lt__(self, other: Number) -> bool:
        return bool(self.value < other.value)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, k: int) -> T:
        return (self.value, k)[k]

    def __contains__(self, item: Any) -> bool:
        return item == "here"

    def __bool__(self) -> bool:
        return False

    def __neg__(self) -> Number:
        return Number(-self.value)

    def __repr__(self) -> str:
        return "a number"

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


class Positive:
    """A descriptor."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = "_" + name

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return getattr(obj, self.name)

    def __set__(self, obj: Any, value: Any) -> None:
        if value < 0:
            raise ValueError(f"{value} is negative")
        setattr(obj, self.name, value)


class Described:
    size = Positive()

    @functools.cached_property
    def costly(self) -> int:
        return self.size * 100


def classes(x: T) -> T:
    d = Derived.create(x)
    d.doubled = x
    slotted = Slotted(x)
    slotted.b = 3
    del slotted.b
    return (
        d(x), d.doubled, d.auto_name, d.kind, Base.fixed(), slotted.a, hasattr(slotted, "b"),
        isinstance(d, Base), issubclass(Derived, Base), type(d) is Derived, d, slotted,
        hasattr(d, "other"), getattr(d, "other", None), callable(d), vars(d), d.__class__.__name__,
    )  # fmt: skip


def operators_of_classes(x: T) -> T:
    n = Number(x)
    shown = f"{n} {n!r} {n!s:>10}"
    total = sum([n, n, 1])
    return (
        (n + 1).value, (1 + n).value, n == Number(x), n != n, len(n), n[0], "here" in n, not n,
        (-n).value, shown, total.value, list(n), {n: 1}[n],
    )  # fmt: skip


def descriptors(x: T) -> T:
    made = Described()
    made.size = 4
    try:
        made.size = -1
    except ValueError as error:
        return x * made.size, made.costly, made.costly, str(error)


class Counted(type):
    """A metaclass."""

    def __call__(cls, *args: Any) -> Any:
        made = super().__call__(*args)
        made.count = len(args)
        return made


class WithMeta(metaclass=Counted):
    def __init__(self, x: T) -> None:
        self.x = x


class Allocated:
    one = None

    def __new__(cls, *args: Any) -> Any:
        made = super().__new__(cls)
        made.args = args
        return made


class Table(dict):
    def __getitem__(self, key: str) -> T:
        return super().__getitem__(key)

    def __missing__(self, key: str) -> int:
        return 7


def rare_classes(x: T) -> T:
    made, table = WithMeta(x), Table(a=x)
    table["b"] = 1
    space = types.SimpleNamespace(a=x)
    space.b = space.a * 2
    return made.x, made.count, Allocated(x).args, table["z"], list(table), table, space


def class_made_inside(x: T) -> T:
    class Local(Base):
        factor = 2

        def apply(self, y: T) -> T:
            return super().apply(y) * self.factor

    return Local(x).apply(x), Local.__name__, isinstance(Local(x), Base)


@dataclasses.dataclass
class Config:
    width: int
    names: list[str] = dataclasses.field(default_factory=list)
    scale: float = 0.5

    def __post_init__(self) -> None:
        self.area = self.width**2


@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    a: int
    b: int = 2


class Pair(NamedTuple):
    left: Any
    right: Any = 1


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"

    @property
    def short(self) -> str:
        return self.value[0]


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def records(x: T) -> T:
    c = Config(3)
    c.names.append("a")
    pair = Pair(x)
    left, right = pair
    return (
        c, Frozen(1), Frozen(1) == Frozen(1, 2), Frozen(1) < Frozen(2),
        dataclasses.replace(c, width=9), pair, pair._replace(right=x), left * right, pair.left,
        Color("red"), Color.BLUE.short,
        Color["RED"].name, Level.HIGH + 1, [color.value for color in Color], Level.LOW < Level.HIGH,
        dataclasses.asdict(Frozen(3)), [f.name for f in dataclasses.fields(c)],
    )  # fmt: skip


def class_written_inside(x: T) -> T:
    class Made:
        k = 1

    made = Made()
    before = made.k, hasattr(made, "new")
    Made.k = 2
    Made.new = x
    written = made.k, made.new
    del Made.new
    return before, written, hasattr(made, "new"), x * Made.k


PROGRAMS = [
    classes, operators_of_classes, descriptors, rare_classes, records, class_made_inside,
    class_written_inside,
]  # fmt: skip


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_whole(fn: Callable[..., Any], grad: bool) -> None:
    same(fn, X.clone().requires_grad_(grad))


# ------------------------------------------------------------------------------ called by C


class Telling:
    """Tells a list which of its methods run."""

    def __init__(self, told: list[str], value: int = 1) -> None:
        self.told = told
        self.value = value

    def __index__(self) -> int:
        self.told.append("index")
        return self.value

    def __float__(self) -> float:
        self.told.append("float")
        return float(self.value)

    def __hash__(self) -> int:
        self.told.append("hash")
        return 5

    def __eq__(self, other: object) -> bool:
        self.told.append("eq")
        return self.value == getattr(other, "value", other)

    def __lt__(self, other: Telling) -> bool:
        self.told.append("lt")
        return self.value < other.value

    def __repr__(self) -> str:
        self.told.append("repr")
        return "Telling"

    def __floor__(self) -> int:
        self.told.append("floor")
        return self.value


# By what is computed of `k`, a function that makes one.
BY_C = """
    [1, 2, 3][k()] | [1, 2, 3][:k()] | list(range(k())) | [1, 2].pop(k()) | [1, 2].insert(k(), 3)
    [1] * k() | "ab" * k() | {k(): 1}[k()] | {k(): 1}.get(k()) | {k(): 1}.pop(k()) | len({k(), k()})
    dict.fromkeys([k(), k()]).keys() == 1 | k() in [0, k()] | [0, k()].index(1) | [k()].remove(k())
    [k()] == [k()] | (k(), 1) < (k(2), 1) | [x.value for x in sorted([k(2), k()])] | "%s" % k()
    "{!r}".format(k()) | f"{k()}{[k()]}" | math.sqrt(k()) | math.floor(k()) | hex(k())
    list(enumerate([1], k())) | dict([(k(), 1), (k(), 2)]).get(1) | x[k()]
    list(itertools.repeat(1, k())) | list(itertools.islice([1, 2], k())) | frozenset([k()]) == {k()}
"""


@pytest.mark.parametrize("text", [part.strip() for part in BY_C.replace("\n", "|").split("|")])
def test_methods_that_c_code_calls_run_in_their_place(text: str) -> None:
    if not text:
        return
    names = {"math": math, "itertools": itertools, "Telling": Telling, "functools": functools}
    exec(
        f"""
def program(x, told):
    k = functools.partial(Telling, told)
    y = x + 1
    told.append("before")
    found = {text}
    told.append("after")
    return y * 2, found
""",
        names,
    )
    traced = Traced(as_function(names["program"]))
    for _ in range(2):
        eagers: list[str] = []
        want, told = names["program"](X, eagers), list[str]()  # type: ignore[operator]
        got = traced(X, told)
        assert told == eagers and str(got) == str(want), traced.stops


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    number: int
    name: str = "a"


def plain_methods(x: T) -> T:
    table = {Key(1): x, Key(2): x * 2}
    return table[Key(2)] + sorted(table)[0].number, [Key(1)] == [Key(1)], Key(3) in {Key(3)}


def test_methods_that_only_read_stay_in_the_graph() -> None:
    same(plain_methods, X)


class Couple(tuple):
    pass


class Named(collections.namedtuple("_Named", "a b")):
    pass


def tuples_with_attributes(x: T) -> T:
    pair, named = Couple([x, 1]), Named(x * 2, 3)
    pair.own = named.own = [x + 1]
    return pair, named, pair.own, torch.max(x, 0)


def grows_as_it_is_asked(x: T) -> T:
    items, ends, seen, table = [1], collections.deque([1], maxlen=3), {1}, {0: 1}
    items.extend(filter(lambda k: k in items, range(3)))
    ends.extendleft(k + ends[0] for k in range(4))
    seen.update(len(seen) + k for k in range(3))
    table.update((len(table) + k, k) for k in range(3))

    def raising() -> Any:
        yield x * 2
        raise ValueError

    with contextlib.suppress(ValueError):
        items.extend(raising())
    return x + 1, items, ends, seen, table


def attributes_of_tensors(x: T, k: int) -> T:
    if hasattr(x, "tag"):
        return x.tag * 2
    x.tag = y = x + k
    y.note = [x, k]
    y.gone = 1
    del y.gone
    assert not hasattr(y, "gone") and not hasattr(y.view(-1), "note")
    print(end="")
    return y, y.note[1], x.__dict__["tag"] is y


@pytest.mark.parametrize("program", [tuples_with_attributes, grows_as_it_is_asked])
def test_what_is_kept_of_tuples_and_iterators(program: T) -> None:
    same(program, X)


def test_attributes_that_programs_put_on_tensors() -> None:
    traced = Traced(attributes_of_tensors)
    for k in (1, 1, 2):
        x, eagers = X.clone(), X.clone()
        for _ in range(2):
            got, want = traced(x, k), attributes_of_tensors(eagers, k)
            assert str(got) == str(want), traced.stops
        assert x.tag.note[0] is x and vars(x.tag).keys() == {"note"}


def test_what_comes_before_an_exit_is_done() -> None:
    def program(x: T, done: T) -> T:
        done.append(x + 1)
        try:
            raise SystemExit(3)
        finally:
            done.append("left")

    traced, done = Traced(program), list[Any]()
    for _ in range(2):
        with pytest.raises(SystemExit):
            traced(X, done)
    assert len(done) == 4 and torch.equal(done[0], X + 1)


class Odd(tuple):
    def __getitem__(self, k: int) -> str:
        return "odd"

    def __iter__(self) -> Any:
        return iter([7, 8])

    def __len__(self) -> int:
        return 77


def tuples_from_outside(named: T, odd: T) -> T:
    named.found = named.a + named.b
    named.turn = getattr(named, "turn", 0) + 1
    return named, named.found * 2, named.turn, odd[0], len(odd), [*odd], tuple.__getitem__(odd, 0)


def test_tuples_from_outside_are_themselves() -> None:
    traced, named, eagers = Traced(tuples_from_outside), Named(X, 2), Named(X, 2)
    for _ in range(3):
        got = traced(named, Odd([X, 3]))
        want = tuples_from_outside(eagers, Odd([X, 3]))
        assert str(got) == str(want) and got[0] is named and vars(named).keys() == {"found", "turn"}


class Doubling:
    def __set__(self, obj: Any, value: int) -> None:
        obj.__dict__["held"] = obj.__dict__.get("held", 0) + value * 2

    def __get__(self, obj: Any, kind: Any = None) -> int:
        return obj.__dict__["held"]

    def __delete__(self, obj: Any) -> None:
        obj.__dict__["held"] = -1


class Holding:
    held = Doubling()


def written_by_descriptors(x: T, holding: T) -> T:
    holding.held = 10
    y = x + holding.held
    del holding.held
    own = Holding()
    own.held = holding.held
    return y, own.held, torch.return_types.max((x, y)), list.__new__(Couplings)


class Couplings(list):
    pass


class Once:
    def __init__(self, made: T) -> None:
        self.made = made

    def __get__(self, obj: Any, kind: Any = None) -> T:
        obj.kept = self.made(obj)
        return obj.kept


class Keeping:
    kept = Once(lambda self: self.x.sigmoid())

    def __init__(self, x: T) -> None:
        self.x = x


def written_by_what_only_gets(x: T, keeping: T) -> T:
    return x + keeping.kept, keeping.kept, keeping


def test_descriptors_that_write() -> None:
    same(written_by_descriptors, X, Holding())
    keeping = Keeping(X)
    same(written_by_what_only_gets, X, keeping)


class Shadowed(Slotted):
    """Its property hides the slot, which is empty or not (pathlib's paths of 3.13 are such)."""

    __slots__ = ("c",)

    @property
    def b(self) -> int:
        return 5


@pytest.mark.parametrize("is_full", [False, True])
def test_slots_behind_properties(is_full: bool) -> None:
    slot: Any = vars(Slotted)["b"]

    def made(x: T) -> Any:
        found: Any = Shadowed(x + 1)
        found.c = x * 2
        if is_full:
            slot.__set__(found, x * 3)
        return found

    told = [
        (type(y), y.a, y.b, y.c, slot.__get__(y) if is_full else None)
        for y in (Traced(made)(X), made(X))
    ]
    torch.testing.assert_close(told[0][1:4], told[1][1:4])
    assert str(told[0]) == str(told[1])


@pytest.mark.parametrize(
    "call",
    [
        lambda: isinstance(1, int, more=True), lambda: getattr(1, "q", default=3),
        lambda: next(iter([]), default=1), lambda: hash(x=1), lambda: any(iterable=[]),
        lambda: len(obj=[]),
    ],
)  # fmt: skip
def test_builtins_refuse_names(call: T) -> None:
    def program(x: T) -> T:
        return x + 1, call()

    same(program, X)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: operator.setitem(x, 0), lambda x: sys.exception(1), lambda x: sys.exc_info(1),
        lambda x: x.as_subclass(), lambda x: torch.nn.Parameter(x, True, 1),
    ],
)  # fmt: skip
def test_what_no_stand_in_expects_raises_as_in_python(call: T) -> None:
    def program(x: T) -> T:
        try:
            return call(x)
        except TypeError as error:
            return x + 1, str(error)

    same(program, X, breaks=True)


made_of: list[T] = []


class Registered:
    def __init_subclass__(cls, tag: str = "none", **kwargs: T) -> None:
        made_of.append(tag)


def test_a_class_that_is_made_with_keywords_tells_its_base_each_time() -> None:
    def program(x: T) -> T:
        class Made(Registered, tag="t"):
            value = x + 1

        made_of.append("used")
        return Made().value

    traced = Traced(program)
    for calls in range(1, 4):
        assert torch.equal(traced(X), X + 1)
        assert made_of == ["t", "used"] * calls


class Identified(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.ones(2, 3)

    def forward(self, x: T, known: int) -> T:
        return x * 2 if known == id(self.state) else x


def test_the_id_of_a_tensor_is_its_own() -> None:
    module = Identified()
    traced = Traced(Identified.forward)
    for _ in range(2):
        for known in (id(module.state), 5, id(module.state)):
            assert torch.equal(traced(module, X, known), module(X, known))
        module.state = torch.ones(2, 3)


# ---------------------------------------------------------------------------- tables of classes


class Left: ...


class Right(Left): ...


TABLE: dict[Any, Any] = {(Left, Right): torch.sin, (Right, Right): torch.cos, frozenset({1}): 3}
SHAPES: dict[Any, Any] = {}


def by_classes(x: torch.Tensor, kind: type) -> Any:
    found = [function(x) for (a, _), function in [*TABLE.items()][:2] if issubclass(kind, a)]
    return found, TABLE[kind, Right](x), TABLE.get((kind, kind)), (1, 2) in TABLE, len(TABLE)


def by_shape(x: torch.Tensor) -> Any:
    key = x.shape, x.dtype
    if key not in SHAPES:
        SHAPES[key] = len(SHAPES)
    return x + SHAPES[key]


def test_keys_that_are_tuples_of_classes() -> None:
    x = torch.randn(3)
    assert not same(by_classes, x, Left).stops and not same(by_classes, x, Right).stops
    loc = torch.randn(3)
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence
    assert not same(lambda x: kl(normal(x, 1.0), normal(0.0, 2.0)), loc).stops


def test_entries_under_shapes() -> None:
    """Each call reads and writes the entry of its own key, and no other is relied on."""
    compiled = fusee.compile(by_shape)
    dtypes = [torch.float64, torch.float32, torch.int64]
    found = []
    for call in (compiled, by_shape):
        SHAPES.clear()
        given = [torch.ones(2, dtype=dtypes[n % 3]) for n in range(6)]
        found.append(([call(x).tolist() for x in given], dict(SHAPES)))
    assert found[0] == found[1]
    TABLE[Left, Right] = torch.tan
    torch.testing.assert_close(
        fusee.compile(by_classes)(torch.ones(2), Left)[1], torch.ones(2).tan()
    )
    TABLE[Left, Right] = torch.sin


class Attributes(dict[str, Any]):
    """A dict with attributes, as many programs write one."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


class Lenient(Attributes):
    __getattr__ = dict.get  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Attributes, Lenient])
def test_methods_in_c_under_another_name_are_those_that_attributes_ask(kind: Any) -> None:
    kept = kind(scale=2.0)

    def fn(x: torch.Tensor) -> Any:
        made = kind(a=x)
        made.b = made.a * kept.scale
        made.n = 1
        made.n += 1
        del made.a
        try:
            missing = made.absent
        except KeyError as error:
            missing = repr(error)
        kept.last = made.b
        return made.b, list(made), vars(made), missing, made, hasattr(made, "keys")

    traced = same(fn, torch.ones(2))
    assert len(traced.graphs) == 1 and not traced.stops
    assert "last" in kept and not vars(kept)


class Scaled(type):
    """Says of each class what only its metaclass knows."""

    @property
    def scale(cls) -> Any:
        return cls.own * 2  # type: ignore[attr-defined]


class OfScaled(metaclass=Scaled):
    own, scale = 2, 5  # a property of the metaclass goes before an attribute of the class


def test_a_property_of_a_metaclass_goes_first() -> None:
    compiled = fusee.compile(lambda x: x * OfScaled.scale, fullgraph=True)
    for own in (2, 3):
        OfScaled.own = own
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), own * 2.0))


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_what_all_modules_are_called_by_is_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, plain = nn.Sequential(nn.Tanh(), nn.ReLU()), getattr(nn.Module, name)
    compiled, x = fusee.compile(lambda x: layers(x)), torch.ones(3)
    want = layers(x)
    torch.testing.assert_close(compiled(x), want)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, name, lambda *args: plain(*args) * 2)
        torch.testing.assert_close(compiled(x), layers(x))
        assert not torch.equal(layers(x), want)
    torch.testing.assert_close(compiled(x), want)


@typing.runtime_checkable
class HasScale(Protocol):
    scale: int


def test_a_protocol_asks_for_attributes_at_each_call() -> None:
    thing = types.SimpleNamespace()

    class Own:
        pass

    own = Own()

    def fn(x: torch.Tensor) -> Any:
        known = [isinstance(one, HasScale) for one in (thing, own, x, 3)]
        return x * (2 if known[1] else 3), known

    compiled = fusee.compile(fn, fullgraph=True)
    x = torch.ones(2)
    for change in (lambda: None, lambda: setattr(own, "scale", 1), lambda: delattr(own, "scale")):
        change()
        got, want = compiled(x), fn(x)
        assert torch.equal(got[0], want[0]) and got[1] == want[1]


FACTORS = {"of": 2}


class Mode(enum.Enum):
    ONE, TWO = 1, 2

    @property
    def factor(self) -> int:
        return self.value * FACTORS["of"]

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_members_of_enums_run_what_their_class_says(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = fusee.compile(lambda x: Mode.ONE.factor * Mode.TWO.scaled(x), fullgraph=True)
    for factor in (2, 3):
        monkeypatch.setitem(FACTORS, "of", factor)
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), factor * factor * 2.0))
