"""Compile time grows with a program's operations, and programs of any length compile."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusee
from bench import growth
from tests.compare import assert_same


def seconds(program: str, mode: str, n: int) -> float:
    begin = time.process_time()
    growth.stages(program, mode, n)
    return time.process_time() - begin


@pytest.mark.parametrize(
    ("program", "mode"),
    [("chain", "inference"), ("recurrence", "inference"), ("layers", "training")],
)
def test_four_times_as_many_operations_take_four_times_as_long(program: str, mode: str) -> None:
    seconds(program, mode, 50)
    small, large = (seconds(program, mode, n) for n in (400, 1600))
    assert large < 6.5 * small


def test_what_comes_of_weights_alone_is_found_in_one_walk() -> None:
    growth.stages("derived", "inference", 50)
    found = growth.stages("derived", "inference", 5000)
    assert found["weights"] < found["trace"]


@pytest.mark.parametrize("program", growth.PROGRAMS)
@pytest.mark.parametrize("mode", growth.MODES)
def test_long_programs_are_right(program: str, mode: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 16), torch.randn(16, 16) / 4
    run = growth.PROGRAMS[program](800 if mode == "inference" else 200)
    results = []
    for call in (fusee.compile(run, fullgraph=True), run):
        weight = w.clone().requires_grad_(mode == "training")
        result = call(x, weight)
        if mode == "training":
            result.sum().backward()
        results.append((result.detach(), weight.grad))
    got, want = results
    if program == "chain":  # sin of a value that is off in its last bits: errors add up
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    else:
        assert_same(got, want)


def test_first_call_of_a_recurrence_of_200_steps() -> None:
    def euler(y: Tensor) -> Tensor:
        for _ in range(200):
            y = y + 0.1 * torch.sin(y)
        return y

    fusee.compile(lambda x: x + 1)(torch.ones(4))
    begin = time.process_time()
    fusee.compile(euler)(torch.rand(4))
    assert time.process_time() - begin < 2


def _turning(x: Tensor) -> Tensor:
    y = x.sin()
    for _ in range(300):
        y = y.unsqueeze(0).squeeze(0).t()
    return y * 2


def _written(x: Tensor) -> Tensor:
    y = x.sin()
    view = y
    for k in range(700):
        view = view.view(2, 6) if k % 2 else view.view(3, 4)
    view.add_(1)
    return y * 2


def _joined(x: Tensor) -> Tensor:
    y = x
    for k in range(100):
        y = torch.cat([y[:, 1:], x[:, :1] + k], 1)
    return y * 2


@pytest.mark.parametrize("run", [_turning, _written, _joined])
@pytest.mark.parametrize("grad", [False, True])
def test_long_chains_of_views_compile(run: Callable[[Tensor], Tensor], grad: bool) -> None:
    results = []
    compiled = fusee.compile(run, fullgraph=True)
    for call in (compiled, run):
        x = torch.arange(12.0).view(3, 4).requires_grad_(grad)
        result = call(x)
        if grad:
            result.sum().backward()
        results.append((result.detach(), x.grad))
    torch.testing.assert_close(*results)
    assert all(report.eager is None for report in fusee.report(compiled))


def test_unrolled_recurrent_network_of_128_steps() -> None:
    cell, x = torch.nn.RNNCell(4, 8), torch.randn(128, 2, 4)

    def run(x: Tensor) -> Tensor:
        state, states = torch.zeros(2, 8), []
        for step in x:
            state = cell(step, state)
            states.append(state)
        return torch.stack(states).sum()

    grads = []
    for call in (run, fusee.compile(run)):
        cell.zero_grad()
        call(x).backward()
        grads.append([p.grad for p in cell.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


class Linked:
    def __init__(self, rest: Linked | None) -> None:
        self.rest, self.scale = rest, torch.ones(2)


def test_linked_objects() -> None:
    head = None
    for _ in range(300):
        head = Linked(head)

    def run(x: Tensor, at: Linked | None) -> Tensor:
        while at is not None:
            x, at = x + at.scale, at.rest
        return x

    compiled = fusee.compile(run, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(torch.zeros(2), head), torch.full((2,), 300.0))


def test_exponent() -> None:
    assert growth.exponent([10, 40], [1.0, 16.0]) == 2


def test_table() -> None:
    rows = {n: {"all": n / 1e3, "fuse": 0.0} for n in (10, 100)}
    shown = growth.table("chain", "inference", rows)
    assert [list(column.cells)[-1] for column in shown.columns] == ["all", "0.010", "0.100", "1.00"]
