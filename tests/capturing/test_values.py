"""Objects that C code looks at: a changed value is seen, or the graph ends; never is it kept."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import operator
import re
import types
import typing
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from tests.capturing.same import Traced, same, shape_of

T = Any


class Text(str):
    __slots__ = ()


class Count(int):
    pass


class Bare:
    pass


class Row(list):
    pass


@dataclasses.dataclass(order=True, unsafe_hash=True)
class Point:
    v: int


class Asked:
    """Methods in Python, for C code to call."""

    def __init__(self, v: int) -> None:
        self.v = v

    def __eq__(self, other: object) -> bool:
        return self.v == getattr(other, "v", other)

    def __hash__(self) -> int:
        return self.v

    def __repr__(self) -> str:
        return f"asked {self.v}"

    def __index__(self) -> int:
        return self.v

    __int__ = __len__ = __index__

    def __float__(self) -> float:
        return self.v / 2

    def __iter__(self) -> Any:
        return iter([self.v])


KINDS: dict[str, Callable[[int], Any]] = {
    "float32 of numpy": numpy.float32,
    "float64 of numpy": numpy.float64,
    "int64 of numpy": numpy.int64,
    "array": lambda v: numpy.array([v]),
    "text": Text,
    "count": Count,
    "decimal": decimal.Decimal,
    "fraction": fractions.Fraction,
    "bytes": lambda v: bytearray([v] * v),
    "proxy": lambda v: types.MappingProxyType({v: v, "a": v}),
    "frozen set": lambda v: frozenset([v]),
    "values": lambda v: {v: v}.values(),
    "space": lambda v: types.SimpleNamespace(v=v),
    "point": Point,
    "bare": lambda v: [object(), Bare(), Bare()][v - 3],
    "list in C": lambda v: Row([v, [v]]),
    "asked": Asked,
    "pair": lambda v: (Asked(v), numpy.int64(v)),
    "list": lambda v: [Asked(v), datetime.timedelta(v)],
    "deque": lambda v: collections.deque([Point(v)]),
    "error": lambda v: ValueError(v),
    "error of a float": lambda v: ValueError("a", float(v)),
    "error of a list": lambda v: KeyError([v]),
    "error of an error": lambda v: ValueError(ValueError((v, 1))),
}

LOOKS = """
    float(o); int(o); str(o); f'{o}'; '%s' % (o,); '{}'.format(o); repr({0: o}); str([o]); len(o);
    o == c; o != c; c == o; [o] == [c]; (o, 1) == (c, 1); {0: o} == {0: c}; o in [c]; c in (o,);
    {o: 1}.get(c); c in {o}; {(o,): 1}.get((c,)); sorted([o, c]); max(o, c); min([c, o]);
    [c].count(o); [c].index(o); complex(o); 1 if o else 2; o + o; 2 * o; -o; [0, 0] * o;
    [1, 2, 3, 4, 5, 6][o]; [1, 2, 3, 4, 5, 6][o:]; list(range(o)); list(map(str, [o])); sum([o]);
    list(reversed(o)); x[o]; x * o; torch.full((2,), o); x + float(o); list(o); 3 in o; bytes(o);
    {hash(o): 1}.get(hash(c));
    torch.tensor([o]); x[:o]; isinstance(o, (int, str)); f'{o!r:>9}'; divmod(o, 2); o.v; x.fill_(o)
""".split(";")


def told(call: Callable[..., Any], make: Callable[[int], Any], v: int) -> Any:
    try:
        result = call(torch.arange(1.0, 7.0), make(v), make(4))
    except Exception as error:  # noqa: BLE001  # the exception is what is compared
        result = type(error)
    return re.sub("0x[0-9a-f]+", "", repr(result))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_what_c_code_looks_at(kind: str) -> None:
    for look in LOOKS:
        names: dict[str, Any] = {"torch": torch}
        exec(f"def looking(x, o, c):\n    y = x + 1\n    return {look.strip()}, y", names)
        traced = Traced(names["looking"])
        for v in (3, 4, 5):
            want = told(names["looking"], KINDS[kind], v)
            assert told(traced, KINDS[kind], v) == want, (look, v, traced.stops)


def test_numbers_of_numpy_are_constants() -> None:
    scale = numpy.float64(0.5)
    traced = Traced(lambda x: x * scale + numpy.float32(2))
    for _ in range(2):
        torch.testing.assert_close(traced(torch.ones(2)), torch.full((2,), 2.5))
    assert [
        node.args[1] for node in traced.graphs[0].graph.nodes if node.op == "call_function"
    ] == [0.5, 2.0]


def test_what_is_not_equal() -> None:
    class Odd(list):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

    def differ(x: T, a: T, b: T, c: T) -> T:
        return x + 1, a != 3, a != b, b != a, a != None, a == None, c != c, c == 3  # noqa: E711

    traced = Traced(differ)
    for v in (3, 4, 3):
        given = torch.ones(2), Asked(v), Point(3), Odd([v])
        assert traced(*given)[1:] == differ(*given)[1:]


def test_an_iterator_of_a_dict_that_has_grown() -> None:
    def counts(table: T, x: T) -> T:
        table["n"] = 3
        seen = []
        for key in table:
            if x.sum() > 0:
                seen.append(key)
        return seen, x

    for fn in (counts, Traced(counts)):
        assert fn({"a": 1, "b": 2}, torch.ones(2))[0] == ["a", "b", "n"]


class Checking:
    """In the place of a class: isinstance asks it."""

    def __init__(self) -> None:
        self.answer = True

    def __instancecheck__(self, x: object) -> bool:
        return self.answer


def test_an_instance_that_isinstance_asks() -> None:
    def asks(x: T, kind: T, y: T) -> T:
        return x + 1, isinstance(x, kind), isinstance(y, (int, kind)), isinstance(3, kind)

    traced, kind = Traced(asks), Checking()
    for kind.answer in (True, False, True):
        assert traced(torch.ones(2), kind, "a")[1:] == asks(torch.ones(2), kind, "a")[1:]


def test_a_key_is_looked_for_among_keys_alone() -> None:
    def takes(x: T, **given: T) -> T:
        return x + 1 if "old" in given or given.__contains__("new") else x - 1

    traced = Traced(lambda x, config: takes(x + 1, config=config))
    traced(torch.ones(2), Point(3))
    assert len(traced.graphs) == 1


_BY_KIND = {typing.Union: "either", typing.ClassVar: "of the class", list: "several"}


@pytest.mark.parametrize("kind", [typing.ClassVar, list, None, typing.Any])
def test_a_dict_with_types_and_special_forms_as_keys(kind: Any) -> None:
    def fn(x: torch.Tensor) -> Any:
        return x + 1, _BY_KIND.get(kind), [*_BY_KIND.values()]

    assert len(same(fn, torch.ones(2)).graphs) == 1


class _Held:
    """What C code may move, and may not look into."""

    def __init__(self) -> None:
        self.parts = {"scale": 3}


_HELD = _Held()


def test_update_looks_at_the_keys_of_a_dict_alone() -> None:
    def fn(x: torch.Tensor) -> Any:
        made = {"first": 1}
        made.update({"held": _HELD, "x": x})
        made |= {"more": _HELD}
        made.update(first=_HELD)
        return x * made["held"].parts["scale"], made["first"] is made["more"], list(made)

    assert len(same(fn, torch.ones(2)).graphs) == 1


@pytest.mark.parametrize(
    "program",
    [
        lambda x, s: x[s] + 1,
        lambda x, s: [10, 20, 30, 40][s] + [x],
        lambda x, s: (x[s.start : s.stop], s, s.step),
        lambda x, s: x.view(2, 2)[s, 1],
        lambda x, s: (x + 1)[{"s": s}["s"]],
        lambda x, s: range(9)[s].start * x,
    ],
)
def test_the_ends_of_a_slice_from_outside_are_looked_at(program: Callable[..., T]) -> None:
    x, traced = torch.arange(4.0), Traced(program)
    for s in (slice(0, 2), slice(1, 3), slice(1, 3, 2), slice(None, 1), slice(0, 2)):
        want, got = program(x, s), traced(x, s)
        assert str(got) == str(want) and not traced.stops
        assert type(got) is not tuple or got[1] is s
    assert len(traced.graphs) <= 4


class Shown:
    def __init__(self, of: T) -> None:
        self.of = of


class Truth(Shown):
    def __bool__(self) -> T:
        return self.of


class Length(Shown):
    def __len__(self) -> T:
        return self.of


@pytest.mark.parametrize("kind", [Truth, Length])
@pytest.mark.parametrize("of", [True, False, 0, 1, -1, 1.5, "", None, 2**70])
def test_what_python_refuses_as_a_truth(kind: type, of: T) -> None:
    same(lambda x, kind: x + 1 if kind(of) else x - 1, torch.ones(2), kind)


# ------------------------------------------------------------------------------ tensors

PARAMETER = torch.nn.Parameter(torch.ones(2))


def attempted(x: T) -> T:
    try:
        return x * x.mark
    except AttributeError as error:
        return x + len(str(error))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * getattr(x, "mark", 1),
        lambda x: x * 2 if hasattr(x, "mark") else x,
        attempted,
        lambda x: x * len(vars(x)),
        lambda x: (setattr(x, "mark", 5), x * getattr(x, "mark", 1))[1],
        lambda x: x * getattr(PARAMETER, "mark", 1),
        lambda x: x * 2 if hasattr(x, "fake_mode") or hasattr(x, "real_tensor") else x,
    ],
)
def test_what_a_program_has_put_on_a_tensor_is_looked_at(fn: Callable[[T], T]) -> None:
    traced = Traced(fn)
    for mark in (3, None, 4, None, 3):
        given = []
        for _ in range(2):
            x = torch.ones(2)
            for marked in (x, PARAMETER):
                marked.__dict__.pop("mark", None)
                if mark is not None:
                    marked.mark = mark
            given.append(x)
        torch.testing.assert_close(traced(given[0]), fn(given[1]))
        assert vars(given[0]) == vars(given[1])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.apply_(lambda v: v + 1) * 2,
        lambda x: x.map_(x.clone(), lambda a, b: a + b) * 2,
        lambda x: x.share_memory_().is_shared(),
        lambda x: x.is_pinned(),
    ],
)
def test_what_reads_memory_runs_in_python(fn: Callable[[T], T]) -> None:
    same(fn, torch.ones(2), breaks=True)


def test_c_code_that_asks_for_a_number_ends_the_graph() -> None:
    def program(x: T) -> T:
        text = "%.3f of %5d"
        return text % (x.sum(), 7), math.floor(x.sum()), math.sqrt(x.sum()), x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(program, torch.ones(3), breaks=True)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: operator.mod("%s", x),
        lambda x: Text("%a") % x,
        lambda x: {x: hash(x), (x,): hash((x, 1))},
    ],
)
def test_what_shows_a_tensor_is_asked_of_the_tensor_itself(program: Callable[[T], T]) -> None:
    x, traced = torch.ones(2), Traced(program)
    assert shape_of(traced(x)) == shape_of(program(x))


def test_tensors_have_no_divmod() -> None:
    traced = Traced(lambda x, n: divmod(x, n))
    for n in (1, 2, 3):
        with pytest.raises(TypeError, match="divmod"):
            traced(torch.ones(2), n)


class Counted:
    """What it is added to is noted; it is never made anew."""

    def __init__(self) -> None:
        self.total = 1

    def __iadd__(self, other: T) -> T:
        self.total = self.total + other
        return self


def test_an_object_takes_a_tensor_in_place() -> None:
    def program(owner: T, x: T) -> T:
        before = owner
        owner += x
        return before is owner, owner.total

    same(program, Counted(), torch.tensor(2))
    for number in (Count(3), 3, 2.5):
        same(lambda x, number=number: operator.iadd(number, x), torch.tensor(2))


def test_what_is_set_through_a_weak_proxy_is_set_once() -> None:
    owner = Bare()

    def program(x: T) -> T:
        proxy = weakref.proxy(owner)
        proxy.count = proxy.count + 1
        del proxy.text
        return x + proxy.count

    traced = Traced(program)
    for k in range(3):
        owner.count, owner.text = 10 * k, "a"
        assert traced(torch.zeros(1)).item() == 10 * k + 1
        assert vars(owner) == {"count": 10 * k + 1}


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    "asked",
    [
        lambda n: (n == Level.HIGH, n != Level.HIGH, Count(3) == n),
        lambda n: (Level.HIGH in [n, 2], n in [Level.HIGH], Count(3) in (n, 1)),
        lambda n: ((n, 1) == (Level.HIGH, 1), [n] == [Level.HIGH], n in [3 + 0j]),
        lambda n: ([n, 3].count(Level.HIGH), [n, 3].index(Count(3))),
    ],
)
def test_a_number_that_varies_beside_one_of_a_class_of_its_own(asked: Callable[[T], T]) -> None:
    traced = Traced(asked)
    for n in (1, 2, 3, 4, 3):
        assert traced(n) == asked(n)
