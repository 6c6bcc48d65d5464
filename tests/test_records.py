"""Our `dataclass` against the standard library's."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from fusee.records import dataclass as ours

NAN = float("nan")


def family(dataclass: Any, **options: Any) -> tuple[type, type]:
    """A class and one below it, made by `dataclass(**options)`."""

    @dataclass(**options)
    class Base:
        a: Any
        b: Any = dataclasses.field(default=2, repr=False)

    @dataclass(**options)
    class Below(Base):
        """With more fields."""

        c: list[int] = dataclasses.field(default_factory=list, compare=False)

        def __repr__(self) -> str:
            return f"below {self.a}"

    return Base, Below


OPTIONS: list[dict[str, bool]] = [
    {},
    {"eq": False},
    {"frozen": True},
    {"frozen": True, "eq": False},
    {"frozen": True, "slots": True},
    {"slots": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_does_what_dataclasses_does(options: dict[str, bool]) -> None:
    seen = []
    for make in (dataclasses.dataclass, ours):
        base, below = family(make, **options)
        objects = [base(1), base(1, 3), base(NAN), below(1), below(1, c=[4])]
        objects += [base(1), dataclasses.replace(objects[1], b=2), base(NAN), below(1)]
        row: list[Any] = [[x == y for x in objects] for y in objects]
        row += [str(x).rpartition(".")[2] for x in objects]
        hashable = base.__hash__ is not None
        row += [hashable, hashable and [[hash(x) == hash(y) for x in objects] for y in objects]]
        row += [hasattr(objects[0], "__dict__"), [f.name for f in dataclasses.fields(below)]]
        row += [dataclasses.astuple(objects[4]), vars(base)["__match_args__"]]
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
            base()
        seen.append(row)
    assert seen[0] == seen[1]


def test_an_own_equality_and_hash_stay() -> None:
    @ours(frozen=True)
    class Name:
        text: str

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Name) and self.text.lower() == other.text.lower()

        def __hash__(self) -> int:
            return hash(self.text.lower())

    assert {Name("A"), Name("a")} == {Name("A")}


@ours(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0


def test_it_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Point(1, 2))) == Point(1, 2)
