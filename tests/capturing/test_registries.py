"""What torch and Python keep: variables that a module assigns, functions of classes, contexts."""

from __future__ import annotations

import contextvars
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fusee
from tests.capturing.same import Traced, same


def test_parametrizations_are_kept_as_long_as_torch_keeps_them() -> None:
    module, x = parametrizations.weight_norm(nn.Linear(4, 4)), torch.randn(3, 4)
    weight = module.parametrizations["weight"].original0
    fast = fusee.compile(module)
    with torch.no_grad():
        for _ in range(3):
            with parametrize.cached():
                for _ in range(2):
                    torch.testing.assert_close(fast(x), module(x))
            weight.mul_(2)
            torch.testing.assert_close(fast(x), module(x))  # by another weight than the kept one


def test_a_cache_of_parametrizations_within_is_no_version_at_each_call() -> None:
    module = parametrizations.weight_norm(nn.Linear(4, 4))

    def fn(x: torch.Tensor) -> Any:
        with parametrize.cached():
            return module(x) + module(module(x))

    traced, x = Traced(fn), torch.randn(3, 4)
    for _ in range(4):
        torch.testing.assert_close(traced(x), fn(x))
        assert not parametrize._cache
    assert traced.entries <= 2


class Own:
    pass


@functools.singledispatch
def doubled(x: Any) -> Any:
    return x


@doubled.register
def _(x: torch.Tensor) -> Any:
    return x * 2


@doubled.register
def _(x: list) -> Any:
    return [doubled(y) for y in x]


class Methods:
    @functools.singledispatchmethod
    def of(self, x: Any) -> Any:
        return 0

    @of.register
    def _(self, x: torch.Tensor) -> Any:
        return x.sin()


def test_functions_by_class_are_chosen_in_the_graph() -> None:
    def fn(x: torch.Tensor) -> Any:
        return doubled([x, 3, [x]]), Methods().of(x), Methods().of(3)

    assert len(same(fn, torch.ones(3)).graphs) == 1


def test_a_function_that_is_registered_later_is_a_fact() -> None:
    def fn(x: torch.Tensor, own: Own) -> Any:
        found = doubled(own)
        return x if found is own else x + found

    traced, x, own = Traced(fn), torch.ones(3), Own()
    assert traced(x, own).tolist() == [1.0] * 3
    doubled.register(Own, lambda _: 7)
    assert traced(x, own).tolist() == [8.0] * 3
    assert not traced.stops


SCALE = contextvars.ContextVar("scale", default=1.0)
SHIFT: contextvars.ContextVar[Any] = contextvars.ContextVar("shift")


def test_what_a_context_holds_is_a_fact() -> None:
    def fn(x: torch.Tensor) -> Any:
        return x * SCALE.get() + SHIFT.get(0)

    def within() -> None:
        traced, x = Traced(fn), torch.ones(3)
        for scale, shift in (1.0, None), (3.0, None), (3.0, 5), (1.0, torch.ones(3)):
            SCALE.set(scale)
            if shift is not None:
                SHIFT.set(shift)
            assert torch.equal(traced(x), fn(x))
        SHIFT.set(torch.ones(3) * 9)
        assert torch.equal(traced(x), fn(x))
        assert not traced.stops

    contextvars.copy_context().run(within)


def test_a_context_that_holds_nothing() -> None:
    traced = Traced(lambda x: x + SHIFT.get())
    for _ in range(2):
        with pytest.raises(LookupError):
            traced(torch.ones(3))


def test_methods_in_c_are_bound() -> None:
    put = object.__setattr__.__get__

    def fn(x: torch.Tensor) -> Any:
        own = Own()
        put(own)("size", x * 2)  # as attrs' frozen classes do
        return own.__dict__["size"] + dict.get.__get__({"a": 3})("a")

    assert len(same(fn, torch.ones(3)).graphs) == 1
