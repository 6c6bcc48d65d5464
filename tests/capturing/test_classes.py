"""Classes of every kind, captured whole."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.capturing.same import same

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
