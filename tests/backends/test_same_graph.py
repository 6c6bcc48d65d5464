"""Versions that differ in what they check, and not in what they compute, share a compiled graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee.backends.report import form


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mode, self.factor = "one", 2.0
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "unheard of":
            return x
        return x * self.weight * self.factor


def graphs(name: str) -> int:
    return len(fusee.report(name))


def test_a_fact_that_changes_no_call_compiles_nothing() -> None:
    module = Scaled()
    fast = fusee.compile(module, name="same graph, one")
    x = torch.randn(3, 4)
    for mode in ("one", "two", "three"):
        module.mode = mode
        assert torch.equal(fast(x), module(x))
    assert graphs("same graph, one") == 1
    module.factor = -0.0
    assert torch.equal(fast(x).signbit(), module(x).signbit())
    module.factor = 0.0
    assert torch.equal(fast(x).signbit(), module(x).signbit())
    assert graphs("same graph, one") >= 2


def test_modes_and_inputs_tell_graphs_apart() -> None:
    module = Scaled()
    fast = fusee.compile(module, name="same graph, two")
    x = torch.randn(3, 4)
    fast(x)
    with torch.no_grad():
        assert not fast(x).requires_grad
    assert graphs("same graph, two") == 2
    fast(x[:2])
    assert graphs("same graph, two") == 3


def test_a_copy_has_its_own() -> None:
    module = Scaled()
    fast = fusee.compile(module, name="same graph, three")
    x = torch.randn(3, 4)
    with torch.no_grad():
        fast(x)
        other = copy.deepcopy(fast)
        other.weight.mul_(3)
        assert torch.equal(other(x), 3 * fast(x))
    assert graphs("same graph, three") == 2


@pytest.mark.parametrize("twice", [True, False])
def test_inputs_that_share_memory_are_told_apart(twice: bool) -> None:
    forms: list[Any] = []

    def keep(gm: Any, examples: Any) -> Any:
        forms.append(form(gm, examples))
        return gm.forward

    x = torch.randn(4)
    fusee.compile(lambda a, b: a + b, backend=keep)(x, x[:] if twice else x.clone())
    fusee.compile(lambda a, b: a + b, backend=keep)(x, x.clone())
    assert (forms[0] == forms[1]) is not twice


def test_what_has_no_form() -> None:
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    assert form(gm, [torch.ones(2, 2)]) is None
