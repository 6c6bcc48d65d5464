"""Derived weights fall into parts that share no parameter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusee.aten.weights import Derived
from fusee.backends import lookup
from tests.aten.passes.graphs import Build, through_passes

aten = torch.ops.aten


def test_what_shares_no_parameter_is_apart() -> None:
    """Of four parameters two meet; what comes from a constant alone is in each part that reads it,
    and one by itself."""
    build = Build()
    x = build.input(torch.randn(2, 2))
    first, second, third, fourth = (build.weight(2) for _ in range(4))
    constant = build.constant(torch.tensor([2.0, 4.0]))
    shared = build.call(aten.neg.default, constant)
    met = build.call(aten.stack.default, [build.call(aten.exp.default, first), third])
    rows = (
        build.call(aten.mul.Tensor, met, shared),
        build.call(aten.mul.Tensor, second, shared),
        build.call(aten.sqrt.default, constant),
        build.call(aten.abs.default, fourth),
    )
    y = x
    for row in rows:
        y = build.call(aten.add.Tensor, y, row)
    passed = through_passes(build, y)
    passed.check()
    assert [(one.sources, one.targets) for one in passed.derived] == [
        ((1, 3), (5,)),
        ((2,), (6,)),
        ((), (7,)),
        ((4,), (8,)),
    ]
    done = [(step.name, step.done) for one in passed.derived for step in one.steps if step.done]
    assert [name.partition("_")[0] for name, _ in done] == ["stack", "mul", "mul"]


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
