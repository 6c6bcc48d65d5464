"""What ended graphs of ours and not of TorchDynamo: each is one graph, and does what eager does."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import enum
import functools
import operator
import sys
import threading
import typing
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.capturing.same import Traced, same, shape_of

T = Any
X = torch.arange(3.0)
KEY = typing.TypeVar("KEY")
LOCAL = threading.local()
LOCAL.scale = torch.tensor(2.0)


def keywords_of_pythons(x: T) -> T:
    a = x.clone().random_(**{"from": 1, "to": 5})
    b = x.clone().uniform_(2, to=5)
    return a, b, x.clone().uniform_(**{"from": 1.0})


def attributes_of_a_thread(x: T) -> T:
    LOCAL.__dict__["last"] = x + 1
    return x * LOCAL.scale, LOCAL.last


class Adds:
    def __set__(self, obj: T, value: T) -> None:
        obj.__dict__["field"] = value * 2


class Field:
    field = Adds()


def a_descriptor_that_only_sets(x: T) -> T:
    made = Field()
    made.field = 3
    return x + made.field


def operators_by_name(x: T) -> T:
    class Rank:
        def __init__(self, k: int) -> None:
            self.k = k

        def __lt__(self, other: T) -> bool:
            return self.k < other.k

        def __iadd__(self, other: int) -> T:
            self.k += other
            return self

    rank, items = Rank(1), [1]
    same_rank, same_items = operator.iadd(rank, 2) is rank, operator.iadd(items, [2]) is items
    total = functools.reduce(operator.add, [x, x, 1])
    return operator.pos(x) * +2.5, operator.lt(rank, Rank(2)), same_rank, same_items, items, total


def warnings_caught(x: T) -> T:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("not heard", stacklevel=1)
        return x * 2


def warnings_recorded(x: T) -> T:
    with warnings.catch_warnings(record=True) as said:
        y = x.sin()
    return y, said


def weak_references(x: T) -> T:
    y = x * 2
    first = weakref.ref(x)
    return first() + y, first() is x, y


def numbers_in_tensors(x: T) -> T:
    rows = [[x[0], 2], [x[1], 3.5]]
    return (
        torch.tensor([x.sum(), x[1]]),
        torch.tensor(rows, dtype=torch.float64),
        torch.as_tensor([x[0]]),
    )


def values_for_numbers(x: T) -> T:
    scale = x.sum() + 0.5
    return (
        torch.addcmul(x, x, x, value=scale),
        torch.add(x, x, alpha=x[1]),
        x.clone().addcdiv_(x, x + 1, value=scale),
    )


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1

    @classmethod
    @property
    def ends(cls) -> slice:
        return slice(cls.LOW, cls.HIGH + 1)


def a_property_of_a_class(x: T) -> T:
    return x[Level.ends] * 2


class Hinted:
    pass


Hinted.__annotations__ = {"size": int}


def hints(x: T) -> T:
    return x * len(typing.get_type_hints(Hinted)), dict(vars(Hinted))["__module__"]


def descriptors_of_type(x: T) -> T:
    names = type.__dict__["__dict__"].__get__(Field)
    return x * len(type.__dict__["__mro__"].__get__(Field)), "field" in names


def aggregates(x: T) -> T:
    return torch.fx.node.map_aggregate([x, (x, {"a": 1})], lambda item: item + 1)


def letters_of_a_version(x: T) -> T:
    return x * len([*torch.__version__])


def int_copied(x: T) -> T:
    return x.clone().copy_(1)


def foreach_by_name(x: T) -> T:
    rows = [x.clone()]
    torch._foreach_lerp_(self=rows, tensors1=[x + 1], weights=[x])
    return rows


def state_of_torch(x: T) -> T:
    if torch._C._are_functorch_transforms_active():
        return x
    return x + 1, torch.accelerator.current_accelerator()


PROGRAMS = [
    keywords_of_pythons, attributes_of_a_thread, a_descriptor_that_only_sets, operators_by_name,
    warnings_caught, warnings_recorded, weak_references, numbers_in_tensors, values_for_numbers,
    hints, descriptors_of_type, aggregates, letters_of_a_version, int_copied, foreach_by_name,
    state_of_torch,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=operator.attrgetter("__name__"))
def test_program(program: Callable[[T], T]) -> None:
    assert len(same(program, X).graphs) == 1


def test_weak_references_that_are_given_away() -> None:
    def fn(x: T) -> T:
        made, gone = x * 2, x + 1
        return weakref.ref(x), weakref.ref(made), weakref.ref(gone), made

    traced = Traced(fn)
    first, kept, lost, made = traced(X)
    assert first() is X
    assert kept() is made
    assert lost() is None
    assert traced.stops == []


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python has no such properties any more")
def test_a_property_of_a_class() -> None:
    assert len(same(a_property_of_a_class, X).graphs) == 1


# ------------------------------------------------------------------------------ data


def swapped(x: T, y: T) -> T:
    x.data, y.data = y.data, x.data
    return x * 2, y


def written_behind(x: T, y: T) -> T:
    z, first = x, x + 1
    x.data = y
    x.add_(1)
    return x is z, first, x.sum()


def let_go(x: T, y: T) -> T:
    x.data = y
    y.data = torch.zeros(0)
    return x, y.shape


def of_what_is_made(x: T, y: T) -> T:
    made = x + 1
    view = made[1:]
    made.data = y * 2
    made.mul_(3)
    return made, view, made.shape


@pytest.mark.parametrize("program", [swapped, written_behind, let_go, of_what_is_made])
def test_a_tensor_gets_the_data_of_another(program: Callable[[T, T], T]) -> None:
    assert len(same(program, torch.ones(3), torch.arange(6.0).reshape(2, 3)).graphs) == 1


def test_a_leaf_gets_the_data_of_another() -> None:
    def fn(x: T, y: T) -> T:
        x.data = y
        return x * x

    told = []
    for run in (fn, Traced(fn)):
        x, y = torch.ones(3, requires_grad=True), torch.arange(4.0)
        for _ in range(2):
            run(x, y).sum().backward()
        y.add_(1)
        told.append(shape_of([x, x.grad, y]))
    assert told[0] == told[1]


def test_grads_of_what_is_no_leaf() -> None:
    def fn(x: T, y: T) -> T:
        x._grad = y + 1
        y.grad = x + 2
        return x.grad.data, y._grad.data

    told = []
    traced = Traced(fn)
    for run in (fn, traced):
        x, y = (torch.arange(3.0, requires_grad=True).clone() + k for k in range(2))
        with torch.no_grad():
            told.append(shape_of([run(x, y), x.grad, y.grad]))
    assert told[0] == told[1]
    assert len(traced.graphs) == 1


# ------------------------------------------------------------------------------ keys


class Thing:
    pass


def by_object(x: T, table: T, key: T, other: T) -> T:
    table[other] = x
    return x * table[key], other in table, Thing() in table


def by_type_variable(x: T, table: T, key: T, other: T) -> T:
    return x * table[KEY]


def by_view(x: T, table: T, key: T, other: T) -> T:
    keys, items = table.keys(), table.items()
    return x * len(keys), key in keys, [v for _, v in items]


@pytest.mark.parametrize("program", [by_object, by_type_variable, by_view])
def test_dicts_whose_keys_are_themselves_alone(program: T) -> None:
    told = []
    traced = Traced(program)
    for run in (program, traced):
        found = []
        for is_same in (False, True, False):
            one, other = Thing(), Thing()
            table = {one: 2, KEY: 3}
            found += [run(X, table, one, one if is_same else other), [*map(type, table)]]
        told.append(shape_of(found))
    assert told[0] == told[1]
    assert traced.stops == []


def test_views_of_dicts_from_outside() -> None:
    def fn(x: T, table: T, keys: T) -> T:
        if "c" in keys:
            return x + table["c"]
        for key in keys:
            x = x + table[key]
        return x, keys

    told = []
    traced = Traced(fn)
    for run in (fn, traced):
        table = {"a": 1, "b": 2}
        found = [run(X, table, table.keys())]
        table["c"] = 3
        told.append(shape_of([*found, run(X, table, table.keys())]))
    assert told[0] == told[1]
    assert traced.stops == []
