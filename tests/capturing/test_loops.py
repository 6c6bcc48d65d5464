"""Loops in which a graph ends: their turns share one version, and do what they do in eager."""

# Programs under test: mistakes are meant.
# mypy: ignore-errors

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusee.capture import interpreter, recorder
from tests.capturing.same import Traced

ROWS = torch.rand(12, 2, generator=torch.Generator().manual_seed(0))


def end():
    sys.stdout.write("")


def over_rows(x):
    y = 0
    for row in x:
        y = y + row.sin()
        end()
        y = y * 2
    return y


def over_numbers(x):
    y = x * 0
    for k in range(12):
        y = y + x * k
        end()
        y = y * 2
    return y


def by_index(x):
    y = 0
    for k in range(12):
        y = y + x[k]
        end()
    return y


def over_pairs(x):
    y = 0
    for k, (a, b) in enumerate(zip(x, x * 2)):
        y = y + a * b * k
        end()
    return y


def appends(x):
    found = []
    for row in x:
        found.append(row * 2)
        end()
    return torch.stack(found), len(found)


def comprehends(x):
    return torch.stack([row * len([end()]) for row in x])


def inner_loops(x):
    y = 0
    for row in x:
        for k in range(6):
            y = y + row * k
            if k == 3:
                end()
    return y


def ends_early(x):
    y = x
    for k in range(12):
        y = y + 1
        end()
        if k == 7:
            break
    else:
        y = y * 3
    return y


def to_the_end(x):
    numbers = iter([1, 2])
    end()
    next(numbers)
    end()
    next(numbers)
    try:
        next(numbers)
    except StopIteration:
        x = x + 7
    end()
    return x, list(numbers)


def takes_the_rest(x):
    numbers = iter(range(12))
    end()
    a = next(numbers)
    end()
    b = next(numbers)
    rest = list(numbers)
    return x * a + b, rest, list(numbers)


def takes_two(x):
    numbers, y = iter(range(12)), x
    end()
    for a in numbers:
        y = y * a + next(numbers)
        end()
    return y


def takes_many(x):
    numbers, y = iter(range(12)), x
    end()
    for a in numbers:
        y = y + a
    return y, list(numbers)


def grows_as_it_goes(x):
    numbers, y = [1, 2, 3], 0
    for k in numbers:
        y = y + x * k
        end()
        if len(numbers) < 10:
            numbers.append(k)
    return y, numbers


def appends_and_looks(x):
    found = [x]
    end()
    found.append(x * 2)
    found.append(found)
    before = len(found), found[-1] is found, found[1]
    found.pop()
    end()
    found.append(found[0] + 1)
    return [*found], before, found[-1]


def appends_under_two_names(x):
    found = [1]
    other = found
    end()
    found.append(2)
    other.append(len(found))
    end()
    found += [x * 2]
    other.append(3)
    return found, other is found


SHARED = [over_rows, over_numbers, by_index, over_pairs, appends, inner_loops, ends_early]
PROGRAMS = [
    *SHARED, comprehends, to_the_end, takes_the_rest, takes_two, takes_many, grows_as_it_goes,
    appends_and_looks, appends_under_two_names,
]  # fmt: skip


def shown(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.tolist()
    return [shown(item) for item in x] if isinstance(x, (tuple, list)) else x


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_in_eager(program: Callable[..., Any]) -> None:
    traced = Traced(program)
    for rows in (ROWS, ROWS, ROWS + 1):
        assert shown(traced(rows)) == shown(program(rows))
    if program in SHARED:  # the first turn, the others, and the end
        assert len(traced.graphs) <= 4, traced.stops


def test_the_end_is_a_fact() -> None:
    """More elements than at the first call, and fewer."""

    def program(x: Any, numbers: Any) -> Any:
        found = iter(numbers)
        end()
        for k in found:
            x = x + k
        return x

    traced = Traced(program)
    for count in (2, 3, 0, 1, 2, 9, 4, 5, 6):
        numbers = [*range(1, count + 1)]
        assert shown(traced(ROWS, numbers)) == shown(program(ROWS, numbers))


def test_a_piece_that_must_end_early_ends_before_a_long_loop() -> None:
    """What raises comes first, so that eager never comes to the loop, which has no end."""

    def fn(x, kept):
        y = F.binary_cross_entropy(x, x)
        for key, _ in itertools.groupby(sorted(kept)):
            for _ in enumerate(kept):
                kept.insert(0, key)
        return y

    traced = Traced(fn)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        traced(torch.full((2,), 2.0), [7, 8])
    assert len(traced.compiled.entries) == 1


def test_a_loop_ends_where_a_number_that_a_condition_tells_is_beyond_64_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "_MOST_CALLS", 200)

    def fn(x: Tensor, n: int) -> Tensor:
        while n == 9 or n > 10:
            n += n
            x = x * n
        return x * n

    traced = Traced(fn)
    for n in (2, 3, 5):
        assert torch.equal(traced(ROWS, n), fn(ROWS, n))
    with pytest.raises(OverflowError, match="too big"):
        traced(ROWS, 9)
    assert "200 calls" not in str(traced.stops), traced.stops


def test_what_may_raise_comes_before_a_loop_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_MANY", 100)
    monkeypatch.setattr(recorder, "_MOST_CALLS", 2000)

    def fn(x: Tensor, many: list[Tensor]) -> list[Tensor]:
        for one in many:
            x.view(one.argmax().item())
            many.append(one)
        return many

    traced = Traced(fn)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        traced(torch.ones(4), [torch.ones(3)])
    assert "2000 calls" not in str(traced.stops), traced.stops
