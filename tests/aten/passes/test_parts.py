"""Derived weights fall into parts that share no parameter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusee.aten.weights import Derived, DeriveStep, Slot, parts
from fusee.backends import lookup


def call(function: Any, *args: Any, done: tuple[int, ...] = ()) -> DeriveStep:
    return DeriveStep(function.__name__, function, args, {}, done)


def stacked(tensors: list[Tensor], factor: Tensor) -> Tensor:
    return torch.stack(tensors) * factor


def example() -> Derived:
    """Inputs 3, 5, 8 and 9, one constant: 3 and 8 meet, 5 and 9 stay alone."""
    return Derived(
        sources=(3, 5, 8, 9),
        constants=(torch.tensor(2.0),),
        steps=(
            call(torch.neg, Slot(4)),  # 5: from a constant, read by two parts
            call(torch.exp, Slot(0)),  # 6
            call(torch.mul, Slot(1), Slot(5)),  # 7
            call(stacked, [Slot(6), Slot(2)], Slot(5), done=(6, 5)),  # 8
            call(torch.sqrt, Slot(4)),  # 9: from a constant alone
            call(torch.abs, Slot(3)),  # 10
        ),
        results=(8, 7, 9, 10),
        targets=(20, 21, 22, 23),
        opaque=frozenset({1}),
    )


def test_parts_compute_what_the_whole_does() -> None:
    whole = example()
    values = {3: torch.ones(2), 5: torch.full((2,), 3.0), 8: torch.rand(2), 9: -torch.ones(2)}
    want = whole.compute([values[k] for k in whole.sources])
    found = parts(whole)
    assert [(at, one.sources, one.targets, one.opaque) for at, one in found] == [
        ((0,), (3, 8), (20,), frozenset()),
        ((1,), (5,), (21,), frozenset({0})),
        ((2,), (), (22,), frozenset()),
        ((3,), (9,), (23,), frozenset()),
    ]
    for positions, one in found:
        got = one.compute([values[k] for k in one.sources])
        for position, tensor in zip(positions, got, strict=True):
            torch.testing.assert_close(tensor, want[position])


class Net(nn.Module):
    """Two convolutions, one of them folded with its batch norm: two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3)
        self.norm = nn.BatchNorm2d(32)
        self.last = nn.Conv2d(32, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))))


@pytest.mark.parametrize("changed", ["conv", "norm", "last"])
def test_one_changed_parameter_recomputes_its_part_alone(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: Counter[bool] = Counter()  # parts computed: those with the batch norm in them, and others
    compute = Derived.compute

    def counting(self: Derived, sources: Any) -> Any:
        ran[any(step.name == "folded_weight" for step in self.steps)] += 1
        return compute(self, sources)

    monkeypatch.setattr(Derived, "compute", counting)
    torch._dynamo.reset()
    model = Net().eval()
    compiled = torch.compile(model, backend=lookup("fusee"))
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        compiled(x)
        assert ran == {True: 1, False: 1}
        ran.clear()
        compiled(x)
        assert not ran
        getattr(model, changed).weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert ran == {changed != "last": 1}
