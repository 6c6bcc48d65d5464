"""What C code asks of the program's objects, and in which order it goes through containers."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors
# ruff: noqa

from __future__ import annotations

import bisect
import collections
import dataclasses
import datetime
import functools
import inspect
import io
import itertools
import operator
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fusee.capture.builtins import refuses
from tests.capturing.same import Traced, shape_of

LOG: list[Any] = []


class Hinted:
    """An iterator that says how much is left."""

    def __init__(self, k):
        self.k = k

    def __iter__(self):
        LOG.append("iter")
        return self

    def __next__(self):
        if self.k <= 0:
            raise StopIteration
        self.k -= 1
        return self.k

    def __length_hint__(self):
        LOG.append("hint")
        return self.k


class Sized(Hinted):
    def __iter__(self):
        LOG.append("made")
        return Hinted(self.k)

    def __len__(self):
        LOG.append("len")
        return self.k


class Keyed:
    def __init__(self, held):
        self.held = held

    def keys(self):
        LOG.append("keys")
        return self.held.keys()

    def __getitem__(self, key):
        LOG.append(key)
        return self.held[key]


class Number:
    """Each of its methods tells that it was asked."""

    def __init__(self, k):
        self.k = k

    def _told(self, *more):
        LOG.append(self.k)
        return self.k

    __index__ = __abs__ = __floor__ = __ceil__ = __trunc__ = __round__ = _told


def star(*given):
    return len(given)


def collects(x):
    one = Sized(2)
    found = [list(one), [*one], (*one,), tuple(one), star(*one), star(1, *one), sorted(one)]
    found += [{*one}, set(one), sum(one), max(one), list(Hinted(3)), operator.length_hint(one)]
    grown = [0]
    grown.extend(one)
    grown.extend(Hinted(1))
    grown += one
    grown[1:2] = one
    a, b = one
    c, *d = one
    return x + len(found), found, grown, a, b, c, d


def counting(k):
    while True:
        LOG.append(k)
        yield k
        k += 1


def unpacks(x):
    """No more is taken than tells that there is too much."""
    for broken in (False, True):
        for endless in (counting(3), itertools.count()):
            if broken:
                print(end="")
            try:
                a, b = endless
            except ValueError as error:
                LOG.append(str(error))
    return x + 1


def grows(x, box, mapping):
    items, table = [1], {"a": 1}
    items += box
    table |= mapping
    table.update(mapping)
    return x * sum(items), table


def places(x, at):
    items = [1, 2, 3]
    found = [items[at], items[at:], operator.index(at), abs(at), round(at)]
    items[at] = 5
    del items[at]
    return x + 1, found, items


def sorts(x, n):
    bisect.insort(SORTED, n)
    bisect.insort_left(SORTED, -n, key=lambda k: k)
    same = operator.iadd(SORTED, [[n]]) is SORTED
    operator.setitem(SORTED, 0, n)
    operator.delitem(SORTED, 1)
    return x + 1, same, SORTED.pop()


SORTED = [1, 3, 5]
QUEUE = collections.deque([1, 2, 3])
SET = {8, 0, 1}


def turns(x):
    """A deque may be given other elements while a loop goes through it, and nothing else."""
    for k in QUEUE:
        print(end="")
        QUEUE[0] = k
        x = x + k
    for change in (lambda: QUEUE.append(9), lambda: (QUEUE.append(9), QUEUE.pop())):
        try:
            for k in QUEUE:
                print(end="")
                change()
        except RuntimeError as error:
            LOG.append(str(error))
    QUEUE.pop()
    return x, [*QUEUE]


def goes_through_a_set(x):
    LOG.append([k for k in SET])
    for k in SET:
        print(end="")
        SET.discard(k)
        SET.add(k)
        x = x + k
    try:
        for k in SET:
            print(end="")
            SET.add(k + 10)
    except RuntimeError as error:
        LOG.append(str(error))
    LOG.append([*SET])
    SET.discard(18), SET.discard(10), SET.discard(11)
    return x


def shows(x, held):
    return x + 1, "%r" % held, "%s" % (held,)


def _logging(items):
    for item in items:
        LOG.append(item)
        yield item


class Summed(int):
    def __radd__(self, other):
        LOG.append("radd")
        return int.__add__(self, other)


def asks_in_turn(x, more):
    found = functools.reduce(lambda a, b: LOG.append("add") or a + b, _logging([1, 2, 3]))
    found += sum(_logging([Summed(1), Summed(2)]))
    found += max(_logging([1, 3, 2]), key=lambda a: LOG.append("key") or -a)
    lists = itertools.chain.from_iterable(_logging([[1, 2], [3]]))
    LOG.append(next(lists))
    return x + found, 2 in _logging([1, 2, 3]), 2 in more, [*more]


CALLS: list[tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = [
    (collects, lambda k: ()),
    (unpacks, lambda k: ()),
    (grows, lambda k: (Sized(k), Keyed({"b": k}))),
    (places, lambda k: (Number(k % 3),)),
    (sorts, lambda k: (k,)),
    (turns, lambda k: ()),
    (goes_through_a_set, lambda k: ()),
    (shows, lambda k: (([1, [k]],),)),
    (asks_in_turn, lambda k: (_logging([1, 2, 3, 4]),)),
]


@pytest.mark.parametrize(("fn", "given"), CALLS, ids=[fn.__name__ for fn, _ in CALLS])
def test_as_c_asks(fn: Callable[..., Any], given: Callable[[int], tuple[Any, ...]]) -> None:
    traced, told = Traced(fn), []
    for run in (fn, traced):
        LOG.clear()
        SORTED[:] = [1, 3, 5]
        QUEUE.clear(), QUEUE.extend([1, 2, 3])
        for k in (1, 2, 3, 1):
            LOG.append(run(torch.ones(2), *given(k)))
        told.append(shape_of([LOG, SORTED, QUEUE, SET]))
    assert told[0] == told[1], traced.stops


def test_how_many_elements_a_deque_keeps_is_a_fact() -> None:
    def fn(x, queue):
        queue.extend([7, 8])
        return x + len(queue)

    told = []
    for run in (fn, Traced(fn)):
        queues = [collections.deque([7, 8], most) for most in (2, 5, None, 3)]
        told.append(str(([run(torch.ones(1), queue) for queue in queues], queues)))
    assert told[0] == told[1]


def test_an_equal_set_in_another_order() -> None:
    def fn(x, some):
        return x + 1, [*some], 1 in some

    traced = Traced(fn)
    for some in ({8, 0}, {0, 8}, {1, 2}, {True, 2}, {1.0, 2}):
        assert str(traced(torch.ones(1), some)) == str(fn(torch.ones(1), some))


def test_what_a_set_gives_first_hangs_on_what_it_gave_before() -> None:
    given = [{1, 2, 5}, {1, 2, 5}]

    def pops(x, some):
        own = {1, 2, 5}
        found = [own.pop()]
        own.add(8)
        print(end="")
        own.add(16)
        return x + 1, some.pop(), found + [own.pop(), own.pop()], own

    traced = Traced(pops)
    for k in (8, 16, 24):
        for some in given:
            some.add(k)
        want, got = (fn(torch.ones(1), some) for fn, some in zip((pops, traced), given))
        assert str(got) == str(want), traced.stops


class Adding:
    """Its methods tell that they were asked, and know integers alone."""

    def __init__(self, k):
        self.k = k

    def _asked(name):
        def method(self, other):
            LOG.append((name, self.k))
            return self.k + other if isinstance(other, int) else NotImplemented

        return method

    __add__, __radd__, __iadd__ = _asked("add"), _asked("radd"), _asked("iadd")
    __lt__, __gt__, __eq__ = _asked("lt"), _asked("gt"), _asked("eq")


class Named:
    """Equal by a number; who asks is told, and it has no hash."""

    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        LOG.append(("eq", self.n))
        return isinstance(other, Named) and self.n == other.n


@dataclasses.dataclass
class Held:
    n: int
    held: object = None


ONE, OTHER = ([Named(1), Named(2)] for _ in range(2))
TREE, SAME = (Held(1, Held(2, [Held(3)])) for _ in range(2))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x + 1, ONE == OTHER, ONE != OTHER, ONE == [*ONE, 3], ONE == ONE),  # noqa: PLR0124
        lambda x: (x + 1, tuple(ONE) == (*OTHER, 3), ONE == [OTHER[0], 3], (ONE,) == (OTHER,)),
        lambda x: (x + 1, [Named(x.shape[0])] == [Named(3)], [x.shape[0], ONE] == [3, OTHER]),
        lambda x: (x + 1, TREE == SAME, [TREE] == [SAME], Held(x.shape[0], TREE) == Held(4, SAME)),
        lambda x: (x + 1, ONE[1] in OTHER, Named(9) in tuple(ONE), 3 in ONE, OTHER in [0, ONE]),
    ],
)
def test_what_lists_hold_is_compared_by_methods_in_python(fn):
    traced = Traced(fn)
    for n in (3, 4, 5):
        outcomes = []
        for call in (fn, traced):
            LOG.clear()
            outcomes.append((call(torch.ones(n))[1:], [*LOG]))
        assert outcomes[0] == outcomes[1]
    assert not traced.stops, traced.stops


class Hashed(torch.nn.Linear):
    """Equal to all, and its hash is a function's: whoever looks for it in a table finds that."""

    def __hash__(self):
        LOG.append("hash")
        return hash(len)

    def __eq__(self, other):
        LOG.append("eq")
        return True


def test_what_is_called_is_not_hashed():
    layer, other = Hashed(2, 2), torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer, other)
    traced = Traced(lambda x: model(x) + layer(x))
    LOG.clear()
    x = torch.ones(3, 2)
    torch.testing.assert_close(traced(x), other(layer(x)) + layer(x))
    assert not traced.stops
    assert not LOG


class Twice:
    """C repeats a sequence as often, once its methods do not know."""

    def __index__(self):
        return 2

    def __mul__(self, other):
        return NotImplemented

    __rmul__ = __mul__


def test_sequences_are_repeated_by_an_index() -> None:
    def fn(x):
        return x + 1, "a" * Twice(), Twice() * [0], (0,) * Twice()

    assert Traced(fn)(torch.ones(1)) == fn(torch.ones(1))


class Derived(Adding):
    __radd__, __gt__ = Adding._asked("own radd"), Adding._asked("own gt")


def operates(x, one):
    found = []
    others = (1, 1.5, "a", None, [1], (1,), {}, one, Adding(5), Derived(6))
    for a, b in [*((one, y) for y in others), *((y, one) for y in others)]:
        for symbol in ("+", "+=", "<", "=="):
            try:
                if symbol == "+=":
                    a += b
                    found.append(a)
                else:
                    of = {"+": operator.add, "<": operator.lt, "==": operator.eq}
                    found.append(of[symbol](a, b))
            except TypeError as error:
                found.append(str(error))
    return x + 1, [str(y) for y in found]


@pytest.mark.parametrize("kind", [Adding, Derived])
def test_no_operator_is_asked_twice_or_out_of_turn(kind: type) -> None:
    traced = Traced(operates)
    for k in (2, 3, 2):
        told = []
        for run in (operates, traced):
            LOG.clear()
            told.append((str(run(torch.ones(1), kind(k))), [*LOG]))
        assert told[0] == told[1], traced.stops


def test_a_set_from_outside_that_is_changed_has_eagers_order() -> None:
    def one_by_one(x, some, k):
        some.discard(1), some.add(17 + k * 8), some.add(1)
        return x + len(some), 17 in some

    def whole(x, some, k):
        some.update(i * 8 for i in range(k + 3))
        some |= {9, k + 25}
        some.symmetric_difference_update([1, 2, 3])
        some -= {2}
        return x + 1, {33} - some, some & {8, 16, 9}, sorted(some)

    def amid(x, some, k):
        found = []
        for item in some:
            found.append(item)
            some.discard(item), some.add(item + 8)
            if len(found) > 6:
                break
        return x + 1, found

    def in_part(x, some, k):
        some.update([1, k + 30, []])
        return x

    def by_itself(x, some, k):
        some.update(some), some.add(8)
        if k:
            some ^= some
            some |= {16, k * 8}
        return x, len(some)

    for fn in (one_by_one, whole, amid, in_part, by_itself):
        given, traced = [{1, 2, 5}, {1, 2, 5}], Traced(fn)
        for k in range(3):
            told = []
            for run, some in zip((fn, traced), given):
                try:
                    found = run(torch.ones(1), some, k)
                except TypeError as error:
                    found = error
                told.append(str((found, some)))
            assert told[0] == told[1], traced.stops


SEARCHES = [
    lambda x, y, l: x in [y, x],
    lambda x, y, l: x in [None, x, y],
    lambda x, y, l: x in (1, x),
    lambda x, y, l: l[1] in l,
    lambda x, y, l: l[0] in l,
    lambda x, y, l: (z := x * 2, z in [z, y], z not in (y, z)),
    lambda x, y, l: x in collections.deque([y, x]),
    lambda x, y, l: [x] in [[y], [x]],
    lambda x, y, l: ([x, y].index(x), [x].count(x), (y, x).index(x)),
    lambda x, y, l: x in {1: x, 2: y}.values(),
    lambda x, y, l: ("a" in [x, "a"], None in [x, None]),
]


@pytest.mark.parametrize("search", SEARCHES)
def test_tensors_are_looked_for_in_order(search: Callable[..., Any]) -> None:
    """By identity and then by ==, which has no truth: an element before is asked first."""

    def outcome(call: Callable[..., Any]) -> Any:
        x, y = torch.ones(2), torch.zeros(2)
        try:
            return shape_of(call(x, y, [y, x]))
        except RuntimeError as error:
            return str(error)

    assert outcome(Traced(search)) == outcome(search)


THROUGH = {
    "zip": lambda a, b: zip(a, b),
    "zip of one": lambda a, b: zip(b),
    "zip of enumerate": lambda a, b: zip(enumerate(b)),
    "enumerate": lambda a, b: enumerate(b),
    "map": lambda a, b: map(lambda p, q: p, a, b),
    "filter": lambda a, b: filter(None, b),
    "reversed": lambda a, b: reversed(b),
}


@pytest.mark.parametrize("kind", THROUGH)
def test_a_list_shrinks_while_an_iterator_of_it_crosses_a_break(kind: str) -> None:
    def shrinks(x, a, b):
        turns = 0
        for _ in THROUGH[kind](a, b):
            turns += 1
            if turns == 1:
                print(end="")
            x = x * 2
            a.append(turns)
            del b[0]
        return x, turns

    told = []
    for run in (shrinks, Traced(shrinks)):
        a, b = [7, 8], [1, 2, 3, 4]
        told.append((str(run(torch.ones(1), a, b)), a, b))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "fn",
    [
        lambda v, n: struct.pack("<If", n, v),
        lambda v, n: struct.pack("<f", v),
        lambda v, n: datetime.timedelta(n, v),
        lambda v, n: datetime.timedelta(hours=v),
        lambda v, n: [*itertools.islice("abcd", n)],
    ],
)
@pytest.mark.parametrize("is_array", [False, True])
def test_c_code_that_takes_numbers_of_python_alone(fn: Callable[..., Any], is_array: bool) -> None:
    """It ends the graph, and nobody is told that the program raised."""

    def program(x):
        if is_array:
            return fn(x.numpy().sum(), x.numpy().astype(np.int64)[0]), x + 1
        return fn(float(x.sum()), len(x)), x + 1

    traced = Traced(program)
    for x in (torch.tensor([1.5, 2.0]), torch.tensor([2.0, 0.25]), torch.ones(3)):
        try:
            want = program(x)
        except TypeError as error:
            with pytest.raises(TypeError, match=re.escape(str(error))):
                traced(x)
            continue
        got = traced(x)
        assert got[0] == want[0] and torch.equal(got[1], want[1])
    assert not any("raises" in stop for stop in traced.stops) or is_array, traced.stops


_METHODS = [
    dict.get, dict.update, list.append, list.index, list.sort, str.encode, str.split, tuple.count,
    int.to_bytes, io.TextIOWrapper.seek, object.__setattr__, torch.Tensor.as_subclass,
]  # fmt: skip


@pytest.mark.parametrize("method", _METHODS, ids=lambda method: method.__qualname__)
def test_what_methods_in_c_refuse(method: Any) -> None:
    for count, names in itertools.product(range(6), ((), ("key",), ("encoding", "errors"))):
        wanted = False
        try:
            inspect.signature(method).bind(*[None] * count, **dict.fromkeys(names))
        except TypeError:
            wanted = True
        except ValueError:  # nobody knows
            pass
        assert refuses(method, count, *names) is wanted
