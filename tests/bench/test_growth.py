"""Compile time grows with a program's operations, and programs of any length compile."""

from __future__ import annotations

import time

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


def test_exponent() -> None:
    assert growth.exponent([10, 40], [1.0, 16.0]) == 2


def test_table() -> None:
    rows = {n: {"all": n / 1e3, "fuse": 0.0} for n in (10, 100)}
    shown = growth.table("chain", "inference", rows)
    assert [list(column.cells)[-1] for column in shown.columns] == ["all", "0.010", "0.100", "1.00"]
