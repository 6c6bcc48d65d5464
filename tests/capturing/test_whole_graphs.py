"""What ended a graph and need not: each program is one graph, and eager's in all that it does."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors
# ruff: noqa: C405, C406, C420

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import fusee
from tests.capturing.same import Traced, same
from tests.counting import Counting

T = Any
X = torch.arange(3.0)

# ------------------------------------------------------------------------------ iterators


def rows(x: T) -> T:
    return [x, x + 1, x * 2]


def begun(iterator: Iterator[T]) -> T:
    next(iterator)
    return iterator


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: itertools.accumulate(rows(x)),
        lambda x: itertools.accumulate(rows(x), operator.mul),
        lambda x: itertools.accumulate(rows(x), lambda a, b: -1),
        lambda x: itertools.accumulate(map(torch.sin, rows(x)), initial=x),
        lambda x: itertools.starmap(operator.add, [(x, 1), (x, 2)]),
        lambda x: itertools.takewhile(lambda a: a[0] < 2, [(1, x), (1, x), (3, x)]),
        lambda x: itertools.dropwhile(lambda a: a[0] < 2, [(1, x), (2, x), (1, x)]),
        lambda x: itertools.filterfalse(lambda a: a[0] < 2, [(1, x), (2, x), (3, x)]),
        lambda x: itertools.compress(rows(x), [1, 0, 1]),
        lambda x: itertools.islice(rows(x), 1, None),
        lambda x: itertools.repeat(x + 1, 3),
        lambda x: itertools.cycle(rows(x)),
        lambda x: itertools.product(rows(x), [1, 2]),
        lambda x: itertools.permutations(rows(x)),
        lambda x: itertools.combinations(rows(x), 2),
        lambda x: itertools.zip_longest(rows(x), [1], fillvalue=0),
        lambda x: itertools.zip_longest(rows(x), [1], fillvalue=x - 1),
    ],
)
def test_an_iterator_is_given_away_where_it_stands(make: Callable[[T], T], is_begun: bool) -> None:
    def program(x: T) -> T:
        made = make(x)
        return begun(made) if is_begun else made

    traced = Traced(program)
    for _ in range(2):
        want, got = program(X), traced(X)
        assert type(got) is type(want)
        assert str([*itertools.islice(got, 7)]) == str([*itertools.islice(want, 7)])
    assert not traced.stops


def test_functions_of_an_iterator_run_when_they_are_asked() -> None:
    log: list[int] = []

    def logged(a: T, b: T) -> T:
        log.append(len(log))
        return a * len(log) + b

    made = Traced(lambda x: itertools.accumulate(rows(x), logged))(X)
    assert not log
    got = [*made]
    log.clear()
    assert str(got) == str([*itertools.accumulate(rows(X), logged)]) and log == [0, 1]


# ------------------------------------------------------------------------------ sets, classes


class Base:
    pass


FUNCTIONS = frozenset([torch.add, torch.sub, Base])
CHOSEN = {torch.add, "mul", len}


def among(x: T, f: T) -> T:
    y = x + 1 if f in FUNCTIONS else x - 1
    return y * 2 if f in CHOSEN else y


def test_sets_of_functions_are_looked_at() -> None:
    for f in (torch.add, torch.sub, Base, len, "mul", torch.mul):
        assert not same(among, X, f).stops
    traced = Traced(among)
    assert traced(X, len).equal(among(X, len))
    CHOSEN.remove(len)
    try:
        assert traced(X, len).equal(among(X, len))
    finally:
        CHOSEN.add(len)


def test_new_subclasses_are_seen() -> None:
    traced = Traced(lambda x: (x + 1, [cls.__name__ for cls in Base.__subclasses__()]))
    assert traced(X)[1] == []

    class Derived(Base):
        pass

    assert traced(X)[1] == [Derived.__name__] and not traced.stops


# ------------------------------------------------------------------------------ torch


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.LongTensor([3, 2]) + 1,
        lambda x: x + torch.FloatTensor([[1, 2.5, 3]]),
        lambda x: torch.Tensor([1, 2]).double(),
        lambda x: torch.Tensor((x.shape[0], 2)) + 1,
        lambda x: (torch.IntTensor(2, 3).shape, torch.Tensor(torch.Size([4])).shape),
        lambda x: (torch.Tensor().shape, torch.HalfTensor(x.shape).dtype, torch.BoolTensor([True])),
        lambda x: x.numpy(force=True) + 1,
        lambda x: (x * 1j).conj().numpy(force=True),
        lambda x: x.numpy(force=False),
        lambda x: torch._shape_as_tensor(x)[0] + 1,
        lambda x: torch._shape_as_tensor(x.sum()).dtype,
        lambda x: torch.LongTensor([x.to(torch.int16).numpy()[2], x.long().numpy()[1]]),
        lambda x: torch.DoubleTensor([numpy.float32(0.1), 2]),
    ],
)
def test_tensors_and_arrays_made_in_other_words(program: Callable[[T], T]) -> None:
    assert not same(program, X).stops


def test_an_array_of_a_tensor_that_needs_a_gradient() -> None:
    x = X.clone().requires_grad_()
    assert not same(lambda x: (x * 2).numpy(force=True), x).stops


def switched(x: T, is_on: bool) -> T:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    was = torch.are_deterministic_algorithms_enabled(), warns
    torch.use_deterministic_algorithms(is_on, warn_only=not is_on)
    return x + 1, was, torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fusee"])
def test_deterministic_algorithms_are_switched(backend: str) -> None:
    fast = fusee.compile(switched, backend=backend, fullgraph=True)
    try:
        for was, warn_only, is_on in itertools.product([False, True], repeat=3):
            found = []
            for run in (switched, fast):
                torch.use_deterministic_algorithms(was, warn_only=warn_only)
                made = run(X, is_on)
                warns = torch.is_deterministic_algorithms_warn_only_enabled()
                found.append(str((made, torch.are_deterministic_algorithms_enabled(), warns)))
            assert found[0] == found[1]
    finally:
        torch.use_deterministic_algorithms(False)


def without_hooks(x: T, within: Callable[[], Any]) -> Any:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        y = x * 2
        with torch.autograd.graph.disable_saved_tensors_hooks("nor here"):
            y = within() or y.sin()
            said = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return y, said


@pytest.mark.parametrize("within", [lambda: None, lambda: print(end="")])
@pytest.mark.parametrize("backend", ["aot_eager", "fusee"])
def test_hooks_on_saved_tensors_are_disabled(backend: str, within: Callable[[], Any]) -> None:
    is_whole = "print" not in within.__code__.co_names
    fast = fusee.compile(without_hooks, backend=backend, fullgraph=is_whole)
    disabled = torch.autograd.graph.disable_saved_tensors_hooks
    nothing = contextlib.nullcontext()
    for around in (nothing, disabled("a"), disabled("b"), nothing):
        with around:
            said = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
            assert str(fast(X, within)) == str(without_hooks(X, within))
            assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() == said


# ------------------------------------------------------------------------------ lazy modules


class Own(nn.modules.lazy.LazyModuleMixin, nn.Module):
    """Makes a parameter, and a lazy module, at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def initialize_parameters(self, x: T) -> None:
        self.made += 1
        self.weight = nn.Parameter(torch.full(x.shape[-1:], 2.0))
        self.inner = nn.LazyLinear(2)

    def forward(self, x: T) -> T:
        return self.inner(x * self.weight)


@pytest.mark.parametrize(
    "make", [lambda: nn.LazyLinear(2), lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), Own())]
)
def test_a_lazy_module_is_made_by_python(make: Callable[[], nn.Module]) -> None:
    backend, found = Counting(), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make()
        run = fusee.compile(model, backend=backend, fullgraph=True) if compiled else model
        x = torch.rand(3, 3)
        outs = [run(x), run(x), run(x)]
        made = [(type(m).__name__, getattr(m, "made", 0)) for m in model.modules()]
        found.append(str((outs, made, model.state_dict(), torch.rand(1))))
    assert found[0] == found[1]
    assert len(backend.graphs) == 1


# ------------------------------------------------------------------------------ dicts

FACTOR = [1]
LOG: list[Any] = []


def logged_factor() -> T:
    LOG.append(FACTOR[0])
    return FACTOR[0]


class Counted(dict):
    def __missing__(self, key: T) -> T:
        self[key] = logged_factor()
        return self[key] + 1


class Passing(dict):
    def __getitem__(self, key: T) -> T:
        return super().__getitem__(key)

    def __missing__(self, key: T) -> T:
        return key, logged_factor()


def in_a_new_one(x: T, d: T) -> T:
    made = collections.defaultdict(logged_factor)
    return x * made["a"], made, made.__missing__("b"), made.get("c")


def in_a_closure(x: T, d: T) -> T:
    made = collections.defaultdict(lambda: x + logged_factor())
    return made["a"], collections.defaultdict.__getitem__(made, "b"), len(made)


def in_classes_of_its_own(x: T, d: T) -> T:
    one, other = Counted(a=x), Passing(a=x)
    return one["b"], one.__getitem__("b"), dict(one), other["b"], len(other)


def in_one_from_outside(x: T, d: T) -> T:
    d["list"] = d["new"], d.__getitem__("b")
    return x * d["more"]


def not_at_all(x: T, d: T) -> T:
    try:
        return collections.defaultdict()[x.shape]
    except KeyError as error:
        return x + 1, error.args


@pytest.mark.parametrize(
    "program", [in_a_new_one, in_a_closure, in_classes_of_its_own, in_one_from_outside, not_at_all]
)
def test_what_is_missing_is_made_on_the_machine(program: T) -> None:
    traced = Traced(program)
    for factor in (1, 1, 5):
        FACTOR[0], found = factor, []
        for run in (program, traced):
            LOG.clear()
            d = collections.defaultdict(logged_factor)
            found.append(str((run(X, d), d, LOG)))
        assert found[0] == found[1]
    assert not traced.stops


# ------------------------------------------------------------------------------ tensors as keys

KEY, OTHER = nn.Parameter(torch.ones(3)), torch.ones(3)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: x + len({x, y, OTHER}),
        lambda x, y: x + len({k: 1 for k in (x, y)}),
        lambda x, y: x + len({x: 1, y: 2}),
        lambda x, y: x + len(set([x, y])),
        lambda x, y: x + len(dict.fromkeys((x, y, KEY))),
        lambda x, y: x + len(dict([(x, 1), (y, 2)])),
        lambda x, y: x + (y in {x: 1}),
        lambda x, y: x + {KEY: 1, x: 2, OTHER: 3}.get(y, 4),
        lambda x, y: x + len(collections.Counter([x, y, x])),
        lambda x, y: x + len({x}.union([y])),
    ],
)
def test_tensors_told_apart_by_identity_are_guarded(program: Callable[[T, T], T]) -> None:
    traced, (a, b) = Traced(program), (torch.ones(3), torch.ones(3))
    for x, y in ((a, b), (b, a), (a, a), (a, OTHER), (OTHER, OTHER), (b, b), (a, b)):
        assert traced(x, y).equal(program(x, y)), (x is y, y is OTHER)
    assert not traced.stops


def as_keys(x: T, d: T) -> T:
    d["a"] = x + 1
    d[KEY] = 123
    return d["b"], d["a"], d[KEY], [*d.values()]


def asked_for(x: T, d: T) -> T:
    return KEY in d, x in d, d.get(OTHER), x * d[OTHER] if OTHER in d else x


def moved_back(x: T, d: T) -> T:
    d.pop(KEY, None)
    d[KEY] = x
    return x + len(d)


@pytest.mark.parametrize("program", [as_keys, asked_for, moved_back])
def test_a_dict_from_outside_with_tensors_as_keys(program: T) -> None:
    traced, other = Traced(program), torch.ones(3)
    for keys in ([], [KEY], [KEY, OTHER, 3], [other, 3], [OTHER, 3], [KEY, OTHER, 3], [other, KEY]):
        found = []
        for run in (program, traced):
            d = collections.defaultdict(list, {key: k for k, key in enumerate(keys)})
            out = run(X, d)
            found.append(str((out, [(id(key), value) for key, value in d.items()])))
        assert found[0] == found[1]
    assert not traced.stops
