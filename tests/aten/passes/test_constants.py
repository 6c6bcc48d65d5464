"""What depends on parameters alone leaves the graph, and nothing else does."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusee.aten import Mutation
from fusee.aten.weights import run_passes
from fusee.config import Options
from fusee.targets.cpu import CPU
from tests.aten.passes.graphs import Build, Passed, through_passes
from tests.check import check

aten = torch.ops.aten


def test_static_part_becomes_inputs_of_its_own() -> None:
    build = Build()
    x, w = build.input(torch.randn(4, 8)), build.weight(4, 8)
    known = build.call(aten.sin.default, build.call(aten.exp.default, w))
    y = build.call(aten.mul.Tensor, x, known)
    passed = through_passes(build, y)
    passed.check()
    assert passed.targets == ["aten.mul.Tensor"]
    assert [(one.sources, one.targets) for one in passed.derived] == [((1,), (2,))]
    assert passed.aten.inputs[2].is_static
    assert passed.aten.inputs[2].index == 2


def test_new_values_of_a_parameter_are_followed() -> None:
    build = Build()
    x, w = build.input(torch.randn(4, 8)), build.weight(8)
    passed = through_passes(build, build.call(aten.add.Tensor, x, build.call(aten.exp.default, w)))
    values = [build.values[0], torch.zeros(8)]
    torch.testing.assert_close(passed.run(values)[0], values[0] + 1)


def test_views_of_parameters_and_fills_stay() -> None:
    build = Build()
    x, w = build.input(torch.randn(4, 8)), build.weight(8, 8)
    y = build.call(aten.mm.default, x, build.call(aten.t.default, w))
    y = build.call(aten.add.Tensor, y, build.call(aten.full.default, [4, 8], 2.0))
    passed = through_passes(build, y)
    passed.check()
    assert passed.derived == ()


def test_a_view_of_something_derived_stays_outside() -> None:
    build = Build()
    x, w = build.input(torch.randn(64, 8)), build.weight(8)
    wide = build.call(aten.expand.default, build.call(aten.exp.default, w), [64, 8])
    passed = through_passes(build, build.call(aten.add.Tensor, x, wide))
    passed.check()
    assert passed.targets == ["aten.expand.default", "aten.add.Tensor"]
    assert passed.aten.inputs[2].size == (8,)


def test_what_would_grow_memory_is_computed_at_each_call() -> None:
    build = Build()
    x = build.input(torch.randn(1024, 1024))
    a, b = build.weight(1024, 1), build.weight(1024)
    grown = build.call(aten.mul.Tensor, build.call(aten.exp.default, a), b)
    passed = through_passes(build, build.call(aten.add.Tensor, x, grown))
    passed.check()
    assert passed.targets == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert [spec.size for spec in passed.aten.inputs[3:]] == [(1024, 1)]
    assert any("bytes to keep" in note for note in passed.notes)


def test_random_operators_stay() -> None:
    build = Build()
    x, w = build.input(torch.randn(4, 8)), build.weight(4, 8)
    noise = build.call(aten.bernoulli.p, build.call(aten.exp.default, w), 0.5)
    aten_graph = build.done(build.call(aten.add.Tensor, x, noise))
    derived, _ = run_passes(aten_graph, Options(), CPU().passes(Options()))
    assert len(derived) == len(derived[0].targets) == 1
    assert "aten.bernoulli.p" in [str(n.target) for n in aten_graph.graph.nodes]


def test_what_the_graph_writes_to_is_not_static() -> None:
    build = Build()
    x, w = build.input(torch.randn(8)), build.weight(8)
    new = build.call(aten.add.Tensor, w, x)
    y = build.call(aten.add.Tensor, x, build.call(aten.exp.default, w))
    passed = Passed(build, build.done(y, new, mutations=[Mutation(1, 1)]))
    assert passed.derived == ()


def test_constants_of_the_graph_are_static() -> None:
    build = Build()
    x, c = build.input(torch.randn(8)), build.constant(torch.randn(8))
    passed = through_passes(build, build.call(aten.add.Tensor, x, build.call(aten.exp.default, c)))
    passed.check()
    assert passed.targets == ["aten.add.Tensor"]
    assert [one.sources for one in passed.derived] == [()]


def test_a_static_result_of_the_graph_is_derived() -> None:
    build = Build()
    w = build.weight(8)
    passed = through_passes(build, build.call(aten.exp.default, w))
    passed.check()
    assert passed.targets == []


def test_items_of_a_derived_tuple() -> None:
    build = Build()
    x, w = build.input(torch.randn(8)), build.weight(4, 8)
    found = build.call(aten.max.dim, w, 0)
    item = build.call(operator.getitem, found, 0)
    passed = through_passes(build, build.call(aten.add.Tensor, x, item))
    passed.check()
    assert passed.targets == ["aten.add.Tensor"]


def test_without_derived_weights_the_graph_keeps_its_inputs() -> None:
    build = Build()
    x, w = build.input(torch.randn(4, 8)), build.weight(8, 8)
    y = build.call(aten.linear.default, x, build.call(aten.exp.default, w), None)
    passed = through_passes(build, y, derive_weights=False)
    passed.check()
    assert len(passed.aten.inputs) == 2


@pytest.mark.parametrize("rounds", [3])
def test_equal_graphs_give_equal_notes(rounds: int) -> None:
    notes = []
    for _ in range(rounds):
        build = Build()
        x, w = build.input(torch.randn(4, 8)), build.weight(8, 8)
        notes.append(through_passes(build, build.call(aten.linear.default, x, w, None)).notes)
    assert notes[0] == notes[1] == notes[2] != []


class _OfParameters(nn.Module):
    """A convolution of a parameter, read beside an input."""

    def __init__(self, conv: nn.Module, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.image, self.conv, self.then = nn.Parameter(torch.randn(1, 8, 6, 6)), conv, then
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.then(self.conv(self.image))


@pytest.mark.parametrize(
    "conv",
    [
        lambda: nn.Conv2d(8, 12, 3, padding=1),
        lambda: nn.Conv2d(8, 12, 1, stride=2),
        lambda: nn.Conv2d(8, 12, 3, groups=4),
    ],
    ids=["plain", "stride", "groups"],
)
@pytest.mark.parametrize(
    "then",
    [lambda y: y, torch.relu, lambda y: y.view(12, -1).exp()],
    ids=["itself", "relu", "view"],
)
def test_what_is_derived_lies_as_eager_has_it(
    conv: Callable[[], nn.Module], then: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    check(_OfParameters(conv(), then), torch.randn(()))
