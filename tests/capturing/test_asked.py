"""Errors in Python's own words; objects that say themselves what they have and do."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors
# ruff: noqa: PIE804

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusee.capture.bytecode import assigned_globals
from tests.capturing.same import Traced, same
from tests.capturing.test_found import LOG, alike, opaque


def test_a_generator_that_talks_when_it_is_closed() -> None:
    def fn(x: torch.Tensor) -> Any:
        def talking() -> Iterator[int]:
            try:
                yield 1
                yield 2
            except ValueError as error:
                yield len(str(error))
            finally:
                opaque(1)
                LOG.append("closed")

        made = talking()
        found = [next(made), made.throw(ValueError("three"))]
        made.close()
        return x + 1, found

    same(fn, torch.ones(2), breaks=True)


class Asked:
    """Attributes found by __getattribute__ first, then by __getattr__."""

    def __getattribute__(self, name: str) -> Any:
        return 42 if name == "answer" else object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name == "rest":
            return 7
        raise AttributeError(f"no {name}")


class Wrapped:
    """No tensor, and torch asks it what becomes of calls."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x.tensor if isinstance(x, Wrapped) else x for x in args]
        return cls(func(*given, **(kwargs or {})))


class Telling:
    """Its method is no classmethod, which torch takes as well."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.name, func.__name__, len(args)


def test_both_ways_to_find_an_attribute() -> None:
    same(lambda a, x: (x * a.rest + a.answer, hasattr(a, "other")), Asked(), torch.ones(2))


def test_objects_that_torch_asks() -> None:
    def fn(x: Any, given: Any) -> Any:
        return torch.sin(torch.add(Wrapped(x), 1, alpha=2)).tensor, torch.add(given, x).tensor

    assert len(same(fn, torch.ones(2), Wrapped(torch.ones(2))).graphs) == 1
    same(lambda x: (x.sum(), (x + Wrapped(x)).tensor), torch.ones(2), breaks=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(lambda x, given: (torch.add(given, x), x + 1), torch.ones(2), Telling("a"))


def test_words_of_errors() -> None:
    def fn(x: Any) -> Any:
        def called(a: int, *rest: Any, **named: Any) -> Any:
            return a

        said = []
        for wrong in (
            lambda: called(*3), lambda: called(1, *None), lambda: called(**3), lambda: [*3],
            lambda: called(1, b=2, **{"b": 3}), lambda: called(1, **{2: 3}), lambda: {**3},
        ):  # fmt: skip
            try:
                wrong()
            except TypeError as error:
                said.append(str(error))
        return x, said

    assert len(same(fn, torch.ones(2)).stops) == 0


def test_words_of_torch_s_errors() -> None:
    def fn(x: torch.Tensor) -> Any:
        said: list[Any] = []
        for wrong in (lambda: torch.cat([]), lambda: x @ torch.ones(3), lambda: x.view(7)):
            try:
                wrong()
            except Exception as error:  # noqa: BLE001  # whichever it is
                said.append((type(error), str(error)))
        return x, said

    alike(fn, torch.ones(4))


def test_an_error_that_getattr_raises_has_no_other_behind_it() -> None:
    def fn(x: Any, asked: Any) -> Any:
        try:
            return x, asked.missing
        except AttributeError as error:
            return x + 1, repr(error.__context__)

    same(fn, torch.ones(2), Asked())


def test_what_a_module_holds_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed.reduce_op warns of being asked for anything, its class as well."""

    class Heard:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    module = types.ModuleType("module_that_is_asked")
    vars(module).update(heard=Heard())
    exec("def f():\n    global count\n    count = 1", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert assigned_globals(module.__name__) == {"count"}


class Record:
    """What its class in Python says is written down."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __getitem__(self, key: int) -> torch.Tensor:
        LOG.append(key)
        return self.x

    def __iter__(self) -> Iterator[torch.Tensor]:
        LOG.append("iter")
        return iter([self.x])

    @property
    def grad(self) -> torch.Tensor:
        LOG.append("grad")
        return self.x

    @property
    def shape(self) -> tuple[int, ...]:
        LOG.append("shape")
        return (3,)

    def size(self, *axis: int) -> int:
        LOG.append("size")
        return 3


def _leaf(n: int) -> torch.Tensor:
    x = torch.ones(n, 2, requires_grad=True)
    x.grad = torch.ones(n, 2)
    return x


@pytest.mark.parametrize(
    ("fn", "others"),
    [
        (lambda d: d[0] * 2, [[torch.ones(3)], {0: torch.ones(3)}, [torch.ones(4)]]),
        (lambda d: max(v.sum() for v in d), [[torch.ones(3)], (torch.ones(4),), [_leaf(2)] * 2]),
        (lambda d: d.grad * 2, [_leaf(2), _leaf(3), _leaf(4)]),
        (lambda d: d[0] * d.shape[0], [_leaf(n).to(t) for n in (2, 3) for t in (None, torch.half)]),
    ],
)
def test_objects_are_not_asked_as_if_they_were_of_another_version(fn: Any, others: Any) -> None:
    traced = Traced(fn)
    for other in others * 2:
        for given in (other, Record(torch.ones(len(other)))):
            LOG.clear()
            want, heard = fn(given), [*LOG]
            LOG.clear()
            torch.testing.assert_close(traced(given), want)
            assert heard == LOG, traced.stops
