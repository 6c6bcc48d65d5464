"""The statement `match`; exception groups; and values that are alive where graphs end."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy
from tests.capturing.same import Traced, same

T = Any
X = torch.arange(6.0).reshape(2, 3) - 2


@dataclasses.dataclass
class Point:
    a: T
    b: T = 0


class Lazy(Point):
    __match_args__ = ("a", "total")

    @property
    def total(self) -> T:
        return self.a + self.b


class Wrong:
    __match_args__ = ("a", 3)

    def __init__(self, **named: T) -> None:
        self.__dict__.update(named)


def matches(subject: T, x: T) -> T:
    match subject:
        case None | True:
            return x, "singleton"
        case 0 | 2.5:
            return x * 2, "number"
        case "relu" | "gelu" as name if len(name) == 4:
            return getattr(torch, name)(x), name
        case str(text):
            return x, text.upper()
        case []:
            return x, "empty"
        case [Point(a=1), *rest]:
            return x + len(rest), rest
        case [first, (second, third)] | (first, second, third, _):
            return x + first, second, third
        case {"kind": "scale", "by": int() | float() as by, **more}:
            return x * by, more
        case {"kind": kind}:
            return x, kind
        case Lazy(1, 3):
            return x, "lazy"
        case Point(torch.Tensor() as a, 7 as b):
            return x + a, b
        case Point(a, 4 | 5):
            return x * a, "four"
        case Point(a=torch.Tensor(shape=(rows, _)), b=8):
            return x, rows
        case Wrong(_, 1):
            return x, "never"
        case _:
            return x - 1, type(subject).__name__


SUBJECTS = [
    None, 0, 2.5, "relu", "tanh", [], [Point(1), 2, 3], [1, (2, 3)], (1, 2, 3, 4),
    {"kind": "scale", "by": 3, "other": X}, {"kind": "shift"}, {}, Lazy(1, 2), Lazy(2, 2),
    Point(X, 7), Point(X, 8), Point(2, 4), Point(2, 6), collections.deque([1, (2, 3)]), Wrong(),
    {1, 2}, Wrong(a=1),
]  # fmt: skip


@pytest.mark.parametrize("k", range(len(SUBJECTS)))
def test_match(k: int) -> None:
    same(matches, SUBJECTS[k], X)


def positions(subject: T) -> T:
    match subject:
        case Point(_, _, _):
            return 1
        case Point(1, a=2):
            return 2


def test_match_between_graphs() -> None:
    def on_a_value(x: T) -> T:
        match [x.sum().item(), Point(x, 1)]:
            case [-3.0, Point(a, 1)]:
                y = a * 2
            case _:
                y = x
        return y + 1

    same(on_a_value, X, breaks=True)
    same(on_a_value, X + 1, breaks=True)
    same(positions, Point(1))


# ------------------------------------------------------------------------------ groups


def groups(x: T, kinds: T) -> T:
    try:
        y = x + 1
        if x.sum() < 0:
            raise ExceptionGroup("several", [kind("each") for kind in kinds])
    except* ValueError as found:
        y = x + len(found.exceptions)
    except* KeyError:
        y = y + 3
    return y


def test_exception_groups() -> None:
    told: list[str] = []

    def backend(gm: T, examples: T) -> T:
        return gm.forward

    fast = CompiledFunction(groups, backend, Policy(), notice=lambda text, where: told.append(text))
    for x, kinds in ((X, [ValueError]), (X, [ValueError, KeyError, ValueError]), (-X, [])):
        torch.testing.assert_close(fast(x, kinds), groups(x, kinds))
    assert not told
    with pytest.raises(ExceptionGroup, match="several"):
        fast(X - 9, [TypeError])
    for kinds in ([ValueError, OSError], [KeyError, OSError, TypeError]):
        with pytest.raises(ExceptionGroup) as found:
            fast(X - 9, kinds)
        assert [type(part) for part in found.value.exceptions] == [
            kind for kind in kinds if kind in (OSError, TypeError)
        ]
    around = CompiledFunction(lambda x: groups(x * 2, [ValueError]) + 1, backend, Policy())
    torch.testing.assert_close(around(X), groups(X * 2, [ValueError]) + 1)


def naked(x: T, kind: T) -> T:
    try:
        raise kind("each")
    except* ValueError as found:
        y = x * len(found.exceptions)
    return y


def raised_again(x: T, kinds: T) -> T:
    try:
        raise ExceptionGroup("several", [kind("each") for kind in kinds])
    except* ValueError:
        raise
    except* KeyError as found:
        raise found
    except* TypeError as found:
        raise OSError("another") from found
    finally:
        x.add_(1)
    return x


def nested_groups(x: T) -> T:
    several = [KeyError("a"), ExceptionGroup("inner", [KeyError("b"), ValueError("c")])]
    try:
        raise ExceptionGroup("outer", several)
    except* KeyError as found:
        y = x * len(found.exceptions)
        print(end="")
    except* ValueError as found:
        y = y + len(found.exceptions)
    else:
        y = x
    return y * 2


def shown_group(error: BaseException) -> T:
    parts = [shown_group(part) for part in getattr(error, "exceptions", ())]
    return type(error), str(error), parts, type(error.__cause__), type(error.__context__)


@pytest.mark.parametrize(
    "program, given",
    [
        (naked, ValueError), (naked, OSError), (raised_again, [ValueError]),
        (raised_again, [ValueError, OSError, ValueError]), (raised_again, [KeyError, OSError]),
        (raised_again, [TypeError, ValueError, KeyError, MemoryError]),
    ],
)  # fmt: skip
def test_what_leaves_an_except_star(program: T, given: T) -> None:
    fast, results = Traced(program), []
    for call in (program, fast, fast):
        try:
            results.append(call(X.clone(), given).tolist())
        except Exception as error:  # noqa: BLE001  # it is compared
            results.append(shown_group(error))
    assert results[0] == results[1] == results[2]


def test_except_star_around_a_break() -> None:
    same(nested_groups, X, breaks=True)


# ------------------------------------------------------------------------------ alive at a break


def over_parameters(module: T, x: T) -> T:
    found = []
    for name, parameter in module.named_parameters():
        if parameter.sum() > -100:
            found.append(name)
    for parameter in module.parameters():
        x = x + parameter.mean() if parameter.sum() > 0 else x - 1
    for child in module.children():
        if x.sum() > -100:
            found.append(type(child).__name__)
    return x, found


def views_of_dicts(table: T, x: T) -> T:
    own = collections.OrderedDict(a=1, b=x)
    names, values, items = own.keys(), table.values(), own.items()
    table["more"] = 3
    if x.sum() < 100:
        own["c"] = 2
    table["last"] = 4
    return list(names), list(values), list(items), isinstance(names, type(own.keys()))


def changes_what_it_goes_through(table: T, log: T, x: T) -> T:
    for key in table:
        log.append(key)
        table["more"] = 3
        if x.sum() > 100:
            break
    return x


def changes_it_after_a_break(table: T, log: T, x: T) -> T:
    for k, (key, value) in enumerate(table.items()):
        if x.sum() > 100:
            break
        log.append(key)
        table["more"] = value + k
    return x


def changes_values_only(table: T, x: T) -> T:
    for key in table:
        if x.sum() < 100:
            table[key] = x + 1
    return [*table]


def test_an_iterator_that_has_come_to_nothing() -> None:
    traced = Traced(changes_what_it_goes_through)
    late, traced_late = changes_it_after_a_break, Traced(changes_it_after_a_break)
    for fn in (changes_what_it_goes_through, traced, traced, late, traced_late, traced_late):
        table, log = {"first": 1}, []
        with pytest.raises(RuntimeError, match="changed size"):
            fn(table, log, X)
        assert log == ["first"] and len(table) == 2


def test_what_is_alive_at_a_break() -> None:
    same(
        over_parameters, nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), X, breaks=True
    )
    same(views_of_dicts, {"first": 1}, X, breaks=True)
    same(changes_values_only, {"first": 1, "second": 2, "third": 3}, X, breaks=True)


# ------------------------------------------------------------------------------ cells


def test_cells_that_become_one() -> None:
    def pair(shared: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:

        def counter() -> tuple[Callable[[], None], Callable[[], int]]:
            count = 0

            def up() -> None:
                nonlocal count
                count += 1

            return up, lambda: count

        up, own = counter()
        return up, own if shared else counter()[1]

    def step(up: T, read: T, x: T) -> T:
        up()
        return x + read(), read()

    traced = Traced(step)
    for shared in (False, True, False, True):
        torch.testing.assert_close(traced(*pair(shared), X), step(*pair(shared), X))
