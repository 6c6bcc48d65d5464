"""What needs no input is computed ahead; nothing else is, and nothing is lost by it."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fusee.aten import AtenGraph
from fusee.aten.weights import fold
from fusee.config import Options
from tests.aten.passes.graphs import Build, in_layout, run

aten = torch.ops.aten


def steps(build: Build, count: int) -> fx.Node:
    return build.call(aten.arange.start_step, 0, count, dtype=torch.float32, device="cpu")


def targets(graph: AtenGraph) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


def folded(build: Build, *results: fx.Node) -> list[str]:
    """The calls that are left, once the results are seen to be the same."""
    graph = build.done(*results)
    before = run(in_layout(graph), build.values)  # of a copy
    fold(graph, Options())
    for want, got in zip(before, run(graph, build.values), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert all("val" in n.meta for n in graph.graph.nodes if n.op == "get_attr")
    return targets(graph)


def test_what_needs_no_input_is_a_constant() -> None:
    build = Build()
    x = build.input(torch.randn(4))
    table = build.constant(torch.randn(4))
    known = build.call(aten.log.default, build.call(aten.add.Tensor, steps(build, 4), 1))
    known = build.call(aten.mul.Tensor, known, table)
    assert folded(build, build.call(aten.mul.Tensor, x, known)) == ["aten.mul.Tensor"]


def test_parameters_views_fills_and_results_stay() -> None:
    build = Build()
    x, w = build.input(torch.randn(3, 4)), build.weight(4)
    row = build.call(aten.unsqueeze.default, build.call(aten.exp.default, steps(build, 4)), 0)
    y = build.call(aten.add.Tensor, x, build.call(aten.exp.default, w))
    y = build.call(aten.mul.Tensor, y, build.call(aten.expand.default, row, [3, 4]))
    y = build.call(aten.add.Tensor, y, steps(build, 4))
    known = build.call(aten.sin.default, steps(build, 4))
    left = folded(build, y, known)
    assert left.count("aten.exp.default") == 1, "the parameter's"
    assert left.count("aten.sin.default") == 1, "a result is new memory in each call"
    assert {"aten.unsqueeze.default", "aten.expand.default", "aten.arange.start_step"} < set(left)


@pytest.mark.parametrize(("count", "is_folded"), [(2**18, True), (2**18 + 1, False)])
def test_large_constants_are_not_kept(count: int, is_folded: bool) -> None:
    build = Build()
    x = build.input(torch.randn(count))
    y = build.call(aten.add.Tensor, x, build.call(aten.sin.default, steps(build, count)))
    assert ("aten.sin.default" not in folded(build, y)) is is_folded


def test_many_parameters_allow_larger_constants() -> None:
    build = Build()
    count = 2**18 + 1
    x, w = build.input(torch.randn(count)), build.weight(2**23)
    y = build.call(aten.add.Tensor, x, build.call(aten.sin.default, steps(build, count)))
    total = build.call(aten.add.Tensor, y, build.call(aten.select.int, w, 0, 0))
    assert "aten.sin.default" not in folded(build, total)


def test_what_raises_or_is_random_stays() -> None:
    build = Build()
    x = build.input(torch.randn(2))
    index = build.call(aten._to_copy.default, steps(build, 2), dtype=torch.int64)
    wrong = build.call(aten.embedding.default, build.constant(torch.randn(1, 2)), index)
    noise = build.call(aten.rand_like.default, steps(build, 2))
    y = build.call(aten.add.Tensor, build.call(aten.add.Tensor, x, wrong), noise)
    graph = build.done(y)
    fold(graph, Options())
    assert {"aten.embedding.default", "aten.rand_like.default"} < set(targets(graph))
    with pytest.raises(IndexError):
        run(graph, build.values)
