"""Generators of a program: what they give, take and raise, also across the end of a graph."""

from __future__ import annotations

import collections.abc
import contextlib
import sys
import types
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.same import Traced, same, shape_of

Case = Callable[[Tensor, list[str]], Any]


def _running(x: Tensor, log: list[str]) -> Generator[Tensor, int, int]:
    try:
        y = yield x + 1
        yield x * y
    finally:
        log.append("closed")
    return 5


def _break() -> None:
    sys.stdout.write("")


def _answered(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except (TypeError, ValueError, RuntimeError, StopIteration) as error:
        return type(error), str(error)


def returns(x: Tensor, log: list[str]) -> Any:
    made = _running(x, log)
    return next(made), made.send(3), _answered(lambda: next(made)), _answered(lambda: next(made))


def throws(x: Tensor, log: list[str]) -> Any:
    made = _running(x, log)
    return next(made), _answered(lambda: made.throw(ValueError("thrown"))), list(made)


def closes(x: Tensor, log: list[str]) -> Any:
    made: Any = _running(x, log)
    next(made)
    made.close()
    return x + 3, made.__name__, isinstance(made, types.GeneratorType)


def sends_too_early(x: Tensor, log: list[str]) -> Any:
    return x, _answered(lambda: _running(x, log).send(1))


def ignores_its_end(x: Tensor, log: list[str]) -> Any:
    def stays() -> Generator[Tensor, None, None]:
        try:
            yield x
        except GeneratorExit:
            yield x

    made = stays()
    next(made)
    return x + 1, _answered(made.close)


def half_way_at_a_break(x: Tensor, log: list[str]) -> Any:
    made = _running(x, log)
    first = next(made)
    _break()
    return first, made.send(2), list(made)


def not_begun_at_a_break(x: Tensor, log: list[str]) -> Any:
    def starred(*more: Tensor, by: int = 2) -> Generator[Any, int, None]:
        given = yield sum(more) * by
        yield given

    made = starred(x, x, by=4)
    _break()
    return next(made), made.send(7), list(made)


def ended_at_a_break(x: Tensor, log: list[str]) -> Any:
    made = (x + k for k in range(3))
    found = list(made)
    _break()
    return found, list(made)


@pytest.mark.parametrize("case", [
    returns, throws, closes, sends_too_early, ignores_its_end, half_way_at_a_break,
    not_begun_at_a_break, ended_at_a_break,
])  # fmt: skip
def test_like_eager(case: Case) -> None:
    traced, x = Traced(case), torch.arange(3.0)
    for _ in range(2):
        logs: list[list[str]] = [[], []]
        assert shape_of(traced(x, logs[1])) == shape_of(case(x, logs[0]))
        assert logs[1] == logs[0]


def _left_by_an_error(x: Tensor, log: list[str]) -> Any:
    for y in _running(x, log):
        left = 2
        while left:  # where a graph ends, the loop's generator is on the stack
            _break()
            left -= 1
        raise ValueError(y.shape)


def test_an_error_ends_the_generator_of_a_loop() -> None:
    traced, x = Traced(_left_by_an_error), torch.arange(3.0)
    for _ in range(2):
        log: list[str] = []
        with pytest.raises(ValueError) as caught:
            traced(x, log)
        assert log == ["closed"] and caught.tb is not None  # which shows all frames


class _Steps(collections.abc.Sequence[int]):
    """Its iterator is a generator of the standard library's that handles IndexError."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: Any) -> Any:
        if k >= 4:
            raise IndexError
        return k


_STEPS = _Steps()


def _matching(x: Tensor) -> Generator[Tensor, None, None]:
    try:
        try:
            yield x + 1
        except (ValueError, KeyError):
            yield x * 2
    except RuntimeError as error:
        yield x * len(str(error))


def _delegating(x: Tensor) -> Generator[Tensor, None, None]:
    try:
        yield from _matching(x)
    except ValueError:
        return


def finds_one_of_several(x: Tensor) -> Tensor:
    return x * 2 if any(k == 1 for k in _STEPS) else x


def takes_the_first(x: Tensor) -> Tensor:
    return next(_matching(x)) + next(_delegating(x))


def leaves_a_loop(x: Tensor) -> Tensor:
    for y in _delegating(x):
        x = y * 3
        break
    return x


@pytest.mark.parametrize("fn", [finds_one_of_several, takes_the_first, leaves_a_loop])
def test_a_dropped_generator_that_handles_no_exit_ends_no_graph(fn: Any) -> None:
    assert len(same(fn, torch.ones(2)).graphs) == 1


def _taking_all(log: list[str]) -> Generator[int, None, None]:
    try:
        yield 1
    except BaseException:
        log.append("all")
        raise


def _taking_exits(log: list[str]) -> Generator[int, None, None]:
    try:
        try:
            yield 1
        except ValueError:
            log.append("never")
    except (KeyError, GeneratorExit):
        log.append("exit")


def _within(log: list[str]) -> Generator[int, None, None]:
    with contextlib.ExitStack() as stack:
        stack.callback(log.append, "left")
        yield 1


@pytest.mark.parametrize("made", [_taking_all, _taking_exits, _within])
def test_a_dropped_generator_that_handles_its_exit_is_closed_in_time(made: Any) -> None:
    def fn(x: Tensor, log: list[str]) -> Tensor:
        first = next(made(log))
        log.append("after")
        return x + first

    told = []
    for run in (fn, Traced(fn)):
        for _ in range(2):
            log: list[str] = []
            told.append((run(torch.ones(2), log).tolist(), log))
    assert told[:2] == told[2:]


def _waiting(steps: int) -> Generator[int, None, None]:
    yield 1
    try:
        raise OSError("own")
    except OSError:
        yield from (2 for _ in range(steps))
        raise


def _thrown(waits: int, broken: bool) -> None:
    given = _waiting(2)
    for _ in range(waits):
        next(given)
    if broken:
        _break()
    try:
        raise KeyError("of the caller")
    except KeyError:
        given.throw(ValueError("thrown")) if waits % 3 else [*given]


def _raising(broken: bool) -> Generator[Any, None, None]:
    yield repr(sys.exc_info()[1])
    if broken:
        _break()
    raise ValueError("raised")


def _handled(waits: int, broken: bool) -> None:
    try:
        raise KeyError("of the caller")
    except KeyError:
        if broken:
            _break()
        if waits > 1:
            print(*_raising(broken), end="")
        for text in _raising(waits == 1):
            Tensor.sum(text)


def _grouped(waits: int, broken: bool) -> None:
    found: list[Exception] = [ValueError(1)]
    group = ExceptionGroup("several", found)
    found.append(KeyError(waits))
    if broken:
        _break()
    raise group


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("waits", [0, 1, 2, 3])
@pytest.mark.parametrize("raises", [_thrown, _handled, _grouped])
def test_what_an_exception_knows(raises: Any, waits: int, broken: bool) -> None:
    """Its context is what was handled where it was raised; what is thrown into a generator has
    what that was handling itself."""
    told = []
    for run in (raises, Traced(raises)):
        for _ in range(2):
            with pytest.raises(Exception) as caught:
                run(waits, broken)
            error: BaseException | None = caught.value
            known: list[Any] = []
            while error is not None:
                known.append((repr(error), error.args))
                error = error.__context__
            told.append(repr(known))
    assert told[:2] == told[2:]


def test_an_iterator_from_outside_that_goes_no_further() -> None:
    def fn(pool: set[int]) -> Any:
        for k in pool.copy():
            pool.discard(k)
            try:
                for item in pool:
                    pool.add(item + 2)
            except RuntimeError:
                pool.add(-k)
        return sorted(pool)

    runs: tuple[Any, ...] = fn, Traced(fn)
    pools = {1, 2, 5}, {1, 2, 5}
    for _ in range(3):
        for run, pool in zip(runs, pools):
            pool.add(8)
            run(pool)
        assert pools[0] == pools[1]
