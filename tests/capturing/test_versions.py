"""Integers that change are inputs, many versions are found at once, and what grows is noticed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee.errors import FuseeWarning
from tests.capturing.same import Traced


def _runs(fn: Callable[..., Any], calls: list[tuple[Any, ...]]) -> int:
    """The number of graphs after these calls, each of which gives eager's result."""
    traced, native = Traced(fn), fusee.compile(fn)
    for args in calls:
        want = fn(*args)
        assert str(traced(*args)) == str(want)
        torch.testing.assert_close(native(*args), want)
    return len(traced.graphs)


X = torch.tensor([0.5, -1.25, 3.0])


@pytest.mark.parametrize(("fn", "graphs"), [
    (lambda x, n: x * n + n / 2 - (n + 1), 2),
    (lambda x, n: x**n, 2),
    (lambda x, n: (x / (1 - 0.5**n), n + 1, -n), 2),
    (lambda x, n: x * n if isinstance(n, int) else x, 2),
    (lambda x, n: x.half() * n, 2),
    # their values are needed: to decide, as a size, for the bits of integers
    (lambda x, n: x + 1 if n % 2 else x - n, 6),
    (lambda x, n: x.repeat(n) + n, 6),
    (lambda x, n: x.long() * n, 6),
])  # fmt: skip
def test_integers(fn: Callable[..., Any], graphs: int) -> None:
    # no neighbours, which would be something that grows
    assert _runs(fn, [(X, n) for n in (1, 4, 2, 7, 3, 9)]) == graphs


def test_integers_that_a_double_does_not_hold() -> None:
    calls = [(X, n) for n in (1, 5, 2**60, 2**60 + 1, 3)]
    assert _runs(lambda x, n: x + n, calls) == 4


def test_a_count_of_calls() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x / self.calls

    module, graphs = Counting(), []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = fusee.compile(module, backend=backend)
    for count in range(1, 8):
        torch.testing.assert_close(compiled(X), X / count)
        assert module.calls == count and type(module.calls) is int
    assert len(graphs) == 2


def test_many_versions_are_found_at_once() -> None:
    def fn(x: Tensor, n: int, unit: str) -> Tensor:
        return x.reshape(n, -1) + len(unit)

    compiled = fusee.compile(fn, backend="eager", recompile_limit=1000)
    calls = [(torch.zeros(2 * n), n, "m") for n in range(1, 300, 2)]
    for args in calls:
        assert compiled(*args).shape == (args[1], 2)

    def seconds(args: tuple[Any, ...]) -> float:
        begin = time.process_time()
        for _ in range(200):
            compiled(*args)
        return time.process_time() - begin

    first, last = (min(seconds(args) for _ in range(5)) for args in (calls[0], calls[-1]))
    assert last < 3 * first
    # what tells those apart is of another kind here
    assert float(compiled(torch.zeros(2), 1, "kg").sum()) == 4.0


def test_what_grows_at_each_call() -> None:
    """A cache that grows by one: two versions, then one notice and no more compiling."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def step(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([cache, x])
        return cache.mean(0), cache

    compiled = fusee.compile(step, backend=backend)
    cache = torch.zeros(1, 3)
    with pytest.warns(FuseeWarning, match="cache grows at each call.*static") as said:
        for count in range(2, 20):
            mean, cache = compiled(X[None], cache)
            torch.testing.assert_close(mean, X * (count - 1) / count)
    assert len(graphs) == 2 and len(said) == 1
