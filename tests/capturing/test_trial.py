"""Functions that end graphs: whether Python takes less time for them is measured."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fusee
from fusee.capture import between
from fusee.capture.captured import Captured
from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy, as_function

X = torch.arange(4.0)
CALLS = 60
OVER = 1 + between._WARM + len(between._TURNS)  # the first call compiles


def program(x: torch.Tensor, log: list[float]) -> torch.Tensor:
    y = x + 1
    log.append(random.random())
    if y.sum() < 0:
        raise ValueError("negative")
    return y * 2


def asking(x: torch.Tensor, log: list[float]) -> torch.Tensor:
    y = x + 1
    log.append(random.random())
    if y.sum() < 0:
        raise ValueError("negative")
    return y * (2 if torch.compiler.is_compiling() else 2.0)


class Clock:
    """Time passes where a graph runs, and where Python calls the function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, graph_s: float) -> None:
        self.now, self.graph_s, self.graphs = 0.0, graph_s, 0
        monkeypatch.setattr(between, "time", types.SimpleNamespace(perf_counter=lambda: self.now))

    def backend(self, gm: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.graphs += 1
            self.now += self.graph_s
            return gm.forward(*args)

        return run

    def calls(self, function: Any, *, is_tried: bool = True) -> list[int]:
        """How many graphs ran in each call of the function, which gives what eager gives."""
        made = CompiledFunction(function, self.backend, Policy(), is_tried=is_tried)
        counts, logs = list[int](), (list[float](), list[float]())
        for k in range(CALLS):
            before, results = self.graphs, list[torch.Tensor]()
            for call, log in zip((function, made), logs):
                random.seed(k)
                results.append(call(X * k, log))
            torch.testing.assert_close(*results)
            counts.append(self.graphs - before)
        assert logs[0] == logs[1]
        with pytest.raises(ValueError, match="negative"):
            made(-9 * X, [])
        return counts


def test_python_runs_what_takes_longer_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Clock(monkeypatch, 1e-5).calls(program)
    assert all(counts[: between._WARM])
    assert counts[between._WARM : OVER].count(0) == between._TURNS.count("p")
    assert not any(counts[OVER:])


def test_pieces_stay_where_they_take_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Clock(monkeypatch, 0.0).calls(program)
    assert counts.count(0) == between._TURNS.count("p")
    assert all(counts[OVER:])


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_tried_that_may_differ_or_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks whether it is compiled, reproducible runs, calls that are long by themselves."""
    assert all(Clock(monkeypatch, 1e-5).calls(asking))
    assert all(Clock(monkeypatch, 1e-5).calls(program, is_tried=False))
    assert all(Clock(monkeypatch, 1.0).calls(program))
    with deterministic():
        assert all(Clock(monkeypatch, 1e-5).calls(program))


def in_the_tenth(x: torch.Tensor, counts: dict[str, int], log: list[float]) -> torch.Tensor:
    """Each tenth call ends the graph."""
    counts["n"] += 1
    if counts["n"] % 10 == 0:
        log.append(random.random())
    return x * 2 + 1


def test_other_versions_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1e-5)
    function = as_function(in_the_tenth)
    made = CompiledFunction(function, clock.backend, Policy(), is_tried=True)
    counts = {"n": 0}
    for k in range(600):
        before = clock.graphs
        torch.testing.assert_close(made(X * k, counts, []), X * k * 2 + 1)
        is_tenth = counts["n"] % 10 == 0
        assert is_tenth or clock.graphs > before
    assert counts["n"] == 600
    assert any(e.run is None for e in made.start.entries)


def returns(rewards: list[float]) -> torch.Tensor:
    total = 0.0
    out: list[float] = []
    for one in reversed(rewards):
        total = one + 0.9 * total
        out.insert(0, total)
    return torch.tensor(out).cumsum(0)


def test_a_check_of_many_numbers_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fusee.compile(returns)
    site = fast.__globals__["_site"]
    for k in range(CALLS):
        given = [float(k + j) for j in range(8)]
        torch.testing.assert_close(fast(given), returns(given))
    assert all(e.trial is None for e in site.entries)
    assert "abs" not in site.entries[-1].check_source() or site.entries[-1].run is not None


def test_what_another_process_captured_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not known whether it asks if it is compiled."""

    class Kept(Captured):
        pass

    made = CompiledFunction(
        as_function(program), Clock(monkeypatch, 0.0).backend, Policy(), is_tried=True
    )
    made(X, [])
    (entry,) = made.start.entries
    assert entry.trial is not None
    entry.captured.__class__, entry.trial = Kept, None
    between.begin_trial(made, made.start, entry, {"x": X, "log": []})
    assert entry.trial is None


@pytest.mark.parametrize("is_on", [True, False])
def test_the_option_prices(is_on: bool) -> None:
    fast = fusee.compile(program, options={"prices": is_on})
    for _ in range(CALLS):
        torch.testing.assert_close(fast(X, []), program(X, []))
    site = fast.__globals__["_site"]
    assert all(e.trial is None for e in site.entries)
    assert is_on or all(e.run is not None for e in site.entries)
