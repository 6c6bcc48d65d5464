"""Python's own constructs, captured whole: functions, exceptions, managers."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors
# ruff: noqa: B012, C416, UP028

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.capturing.same import same

T = Any
X = torch.arange(6.0).reshape(2, 3) - 2


# ------------------------------------------------------------------------------ functions


def closures(x: T) -> T:
    k = 2

    def inner(y: T, *, by: int = 3) -> T:
        return y * k + by

    def count() -> int:
        nonlocal k
        k += 1
        return k

    first = inner(x)
    return first, count(), inner(x, by=5), [f(x) for f in [lambda y, i=i: y + i for i in range(2)]]


def signature(a: T, /, b: T, c: int = 2, *rest: T, d: int = 4, **more: T) -> T:
    return a + b * c + sum(rest) * d, more


def calls(x: T) -> T:
    args, kwargs = [x, x], {"d": 3, "e": x}
    return signature(x, *args, **kwargs), signature(*args, 5, x, x), signature(x, b=x)


def starred(x: T) -> T:
    first, *middle, last = x, 1, 2, x + 1
    (a, b), c = [1, 2], 3
    return [*middle, *range(2)], {"a": first, "b": last}, {*middle}, (*middle, a, b, c)


def comprehensions(x: T) -> T:
    rows = [row * k for k, row in enumerate(x) if k != 5]
    table = {k: v for k, v in zip("ab", rows)}
    odd = {k % 3 for k in range(7)}
    return rows, table, odd, [[i * j for i in range(2)] for j in range(3)]


def recursion(x: T) -> T:
    def power(y: T, n: int) -> T:
        return y if n == 0 else power(y * x, n - 1)

    return power(x, 4)


def generators(x: T) -> T:
    def inner(n: int) -> Iterator[Any]:
        got = yield x * n
        return got

    def outer() -> Iterator[Any]:
        for k in range(2):
            yield k
        result = yield from inner(3)
        yield result
        yield from [x, 7]

    made = outer()
    taken = [next(made), next(made), next(made)]
    taken.append(made.send(x + 1))
    return taken, list(made), sum(y.sum() for y in x), next(iter([]), 3)


def closing_generators(x: T) -> T:
    log = []

    def numbers() -> Iterator[int]:
        try:
            for k in range(9):
                yield k
        finally:
            log.append("closed")

    made = numbers()
    next(made)
    made.close()
    other = numbers()
    next(other)
    try:
        other.throw(KeyError("x"))
    except KeyError as error:
        log.append(str(error))
    return x, log


# ------------------------------------------------------------------------------ exceptions


class Odd(ValueError):
    def __init__(self, amount: int) -> None:
        super().__init__(f"odd: {amount}")
        self.amount = amount


def exceptions(x: T) -> T:
    log = []

    def risky(k: int) -> int:
        try:
            if k == 1:
                raise Odd(k)
            if k == 2:
                return [1][5]
            log.append("fine")
        except IndexError as error:
            log.append(str(error))
            raise RuntimeError("no such") from error
        else:
            log.append("else")
        finally:
            log.append("finally")
        return k

    for k in range(3):
        try:
            log.append(risky(k))
        except (Odd, KeyError) as error:
            log.append((error.amount, error.args))
        except RuntimeError as error:
            log.append(type(error.__cause__).__name__)
    return x + 1, log


def returns_in_finally(x: T) -> T:
    def one() -> T:
        for k in range(3):
            try:
                if k == 1:
                    continue
                return x * k
            finally:
                if k == 0:
                    break
        return x - 1

    return one()


def missing(x: T) -> T:
    found = []
    for get in (
        lambda: {}["a"],
        lambda: [][0],
        lambda: x.nothing,
        lambda: undefined_name,  # noqa: F821
        lambda: int("a"),
        lambda: 1 / 0,
        lambda: signature(),
        lambda: (1, 2).index(3),
        lambda: math.sqrt(-1),
        lambda: None + 1,
        lambda: len(3),
        lambda: next(iter([])),
    ):
        try:
            get()
        except Exception as error:  # noqa: BLE001  # any will do
            found.append((type(error), str(error)))
    return x, found


# ------------------------------------------------------------------------------ managers


class Manager:
    def __init__(self, log: list[Any], swallows: bool = False) -> None:
        self.log = log
        self.swallows = swallows

    def __enter__(self) -> Manager:
        self.log.append("in")
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        self.log.append(kind and kind.__name__)
        return self.swallows


@contextlib.contextmanager
def scaled(log: list[Any], by: float) -> Iterator[float]:
    log.append("begin")
    try:
        yield by
    finally:
        log.append("end")


def managers(x: T) -> T:
    log: list[Any] = []
    with Manager(log) as one, scaled(log, 2.0) as by:
        x = x * by
        log.append(one.swallows)
    with Manager(log, swallows=True):
        raise KeyError("gone")
    with contextlib.suppress(ValueError), contextlib.nullcontext(3) as three:
        int("x")
    with contextlib.ExitStack() as stack:
        stack.enter_context(Manager(log))
        stack.callback(log.append, "called")
    return x, log, three


def grad_modes(x: T) -> T:
    states = [torch.is_grad_enabled()]
    with torch.no_grad():
        a = x * 2
        states.append(torch.is_grad_enabled())
        with torch.enable_grad():
            b = x * 3
    with torch.set_grad_enabled(False):
        c = x * 4
    return a, b, c, a.requires_grad, b.requires_grad, states


@torch.no_grad()
def decorated_no_grad(x: T) -> T:
    return x * 2


def calls_decorated(x: T) -> T:
    return decorated_no_grad(x), x * 3


def autocast(x: T) -> T:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = x @ x.T
        with torch.autocast("cpu", enabled=False):
            exact = x @ x.T
    return inside, exact, x @ x.T, torch.is_autocast_enabled("cpu")


def profiled(x: T) -> T:
    with torch.profiler.record_function("part"):
        return x + 1


PROGRAMS = [
    closures, calls, starred, comprehensions, recursion, generators, closing_generators,
    exceptions, returns_in_finally, missing, managers, grad_modes, calls_decorated,
    decorated_no_grad, autocast, profiled,
]  # fmt: skip


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_whole(fn: Callable[..., Any], grad: bool) -> None:
    same(fn, X.clone().requires_grad_(grad))
