"""Splitting a graph between an engine and our compiler, with an engine made of eager kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from fusee.aten import executable, returning
from fusee.aten.trace import trace
from fusee.backends.regions import (
    CompiledRegion,
    Engine,
    Region,
    fits,
    interval,
    note_values,
    split,
)
from fusee.backends.report import Report
from fusee.backends.split_run import compile_split
from fusee.config import Options
from fusee.errors import FuseeWarning
from tests.aten.passes.graphs import Build
from tests.check import check

aten = torch.ops.aten


class Eager(Engine):
    """Runs regions with eager kernels; refuses some operators, and can be made to fail."""

    name = "eager_regions"

    def __init__(self, *refused: OpOverload, fails: str = "", at: str = "run") -> None:
        super().__init__()
        self.refused, self.fails, self.at = refused, fails, at
        self.regions: list[Region] = []
        self.calls = 0

    def keeps(self, op: OpOverload) -> bool:
        return torch.Tag.core in op.tags

    def claim(self, node: fx.Node) -> str | None:
        return "it is refused" if node.target in self.refused else None

    def compile(self, region: Region) -> CompiledRegion:
        self.regions.append(region)
        bad = any(self.fails in str(node.target) for node in region.calls()) and self.fails
        if bad and self.at == "compile":
            raise RuntimeError(f"cannot convert {self.fails}")
        call = executable(region.graph)

        def run(inputs: tuple[Any, ...]) -> Sequence[Tensor]:
            self.calls += 1
            for x, spec in zip(inputs, region.graph.inputs, strict=True):
                assert not isinstance(x, Tensor) or spec.is_static or x.is_contiguous()
            if bad:
                raise RuntimeError(f"{self.fails} went wrong")
            results: Sequence[Tensor] = call(*inputs)
            assert all(x.is_contiguous() for x in results)
            return results

        return CompiledRegion(run)


def backend(engine: Eager, report: Report) -> Callable[..., Any]:
    def compile_fx(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = trace(gm, inputs, keep=engine.keeps)
        examples = [*inputs, *graph.attributes(gm)]
        return returning(graph, compile_split(graph, examples, engine, Options(), report).call)

    return compile_fx


def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.tanh(x @ w) + 1
    z = torch.softmax(y, -1) * y.t().sum()
    return z @ w, y.t(), torch.relu(z)


def written(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state.mul_(2).add_(torch.tanh(x @ x))
    return state[1:], torch.tanh(state) @ x


def made(x: Tensor) -> Tensor:
    steps = torch.arange(x.shape[0], dtype=x.dtype)
    return torch.tanh(x * steps).expand(3, x.shape[0]).contiguous() @ torch.outer(x, x)


REFUSED = [(), (aten.tanh.default,), (aten.tanh.default, aten._softmax.default)]


@pytest.mark.parametrize("refused", REFUSED, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_together_are_the_program(refused: tuple[OpOverload, ...], dynamic: bool) -> None:
    x = torch.randn(5, 5)
    programs: list[tuple[Callable[..., Any], tuple[Tensor, ...], tuple[Tensor, ...]]] = [
        (mixed, (x, torch.randn(5, 5)), (torch.randn(7, 7), torch.randn(7, 7))),
        (written, (x, torch.randn(5, 5)), (torch.randn(6, 6), torch.randn(6, 6))),
        (made, (torch.randn(5),), (torch.randn(9),)),
    ]
    for fn, args, more in programs:
        engine, report = Eager(*refused), Report("mixed")
        check(fn, *args, backend=backend(engine, report), dynamic=dynamic, again=[more] * dynamic)
        assert engine.calls, str(report)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layouts_cross_without_copies(layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 12, 12).to(memory_format=layout)
    w = torch.randn(8, 3, 3, 3).to(memory_format=layout)
    engine, report = Eager(aten.sigmoid.default), Report("convolved")
    compiled = backend(engine, report)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(torch.sigmoid(F.conv2d(x, w)), w.transpose(0, 1))

    check(fn, x, w, backend=compiled)
    check(fn, x[:, :, ::2], w, backend=compiled)
    assert len(engine.regions) == 4


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("is_result", [False, True])
def test_strides_of_axes_of_size_one_part_nothing(batch: int, is_result: bool) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(torch.relu(x), 1)
        return y if is_result else F.linear(y.flatten(1).tanh(), w)

    x = torch.randn(batch, 4, 5, 5).to(memory_format=torch.channels_last)
    engine, report = Eager(aten.as_strided.default), Report("pooled")
    check(fn, x, torch.randn(3, 4), backend=backend(engine, report))
    assert len(engine.regions) == 1 and not report.unclaimed


@pytest.mark.parametrize("stride", [(1, 4), (0, 1), (2, 1)])
def test_strides_that_mean_something_stay(stride: tuple[int, int]) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x).as_strided((4, 4), stride).exp() @ x

    engine, report = Eager(aten.as_strided.default), Report("strided")
    check(fn, torch.randn(4, 4), backend=backend(engine, report))
    assert "aten.as_strided.default" in [row.op for row in report.unclaimed]


class Norm(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.seen += y.mean(0)
        return F.dropout(torch.tanh(y), training=True) + self.seen


def test_modules_random_numbers_and_buffers() -> None:
    engine, report = Eager(aten.tanh.default), Report("norm")
    check(Norm(), torch.randn(4, 6), backend=backend(engine, report))
    assert {row.op for row in report.unclaimed} >= {"aten.tanh.default"}
    assert any("random" in row.reason for row in report.unclaimed)


def graph_of(fn: Callable[..., Any], *args: Tensor) -> Any:
    return trace(fx.symbolic_trace(fn), args)


def test_regions_are_maximal_and_have_no_circle() -> None:
    def fn(x: Tensor) -> Tensor:
        a = x @ x
        b = torch.tanh(a)
        return (b @ x) + a  # needs b: must not run with a, though it is next to it

    found = split(graph_of(fn, torch.randn(4, 4)), Eager(aten.tanh.default))
    assert [(claimed, len(nodes)) for claimed, nodes in found.levels] == [
        (True, 1),
        (False, 1),
        (True, 2),
    ]
    assert found.claimed == 3


def test_what_needs_inputs_alone_runs_before_the_region() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x @ x) @ torch.tanh(y)

    found = split(graph_of(fn, torch.randn(4, 4), torch.randn(4, 4)), Eager(aten.tanh.default))
    assert [(claimed, len(nodes)) for claimed, nodes in found.levels] == [(False, 1), (True, 2)]


def test_what_needs_no_input_parts_no_region() -> None:
    def fn(x: Tensor) -> Tensor:
        known = torch.tanh(torch.arange(4) / 4)
        return (x @ x + known) @ x

    engine, report = Eager(aten.tanh.default), Report("known")
    check(fn, torch.randn(4, 4), backend=backend(engine, report))
    assert engine.calls and not report.unclaimed and len(report.regions[0].ops) == 2


def test_integer_constants_are_taken_for_what_they_hold() -> None:
    build = Build()
    constant = build.constant(torch.tensor([8, 14, 9]))
    graph = build.done(build.call(aten.mul.Tensor, constant, 3))
    note_values(graph, [])
    assert interval(constant) == (8, 14) and fits(graph.results[0])


def test_small_regions_are_not_worth_a_call() -> None:
    graph = graph_of(lambda x: torch.tanh(torch.sin(x)) * 2, torch.randn(4))
    found = split(graph, Eager(aten.tanh.default))
    assert [claimed for claimed, _ in found.levels] == [False]
    assert any("too few" in row.reason for row in found.unclaimed)
    whole = split(graph, Eager())
    assert [claimed for claimed, _ in whole.levels] == [True]


@pytest.mark.parametrize(
    ("size", "width", "device", "is_engines"),
    [
        (2048, 8, "CPU", False),  # 16 operations for each element that is copied
        (2048, 256, "CPU", True),
        (64, 8, "CPU", True),  # too little to matter
        (2048, 8, "GPU", True),
    ],
)
def test_regions_that_copy_for_longer_than_they_multiply_are_ours(
    size: int, width: int, device: str, is_engines: bool
) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).view(size, width // 4, 4).permute(2, 0, 1)[::2].exp()
        return y.permute(1, 2, 0) + y.permute(1, 2, 0)

    size *= 64
    x, w = torch.randn(size, width), torch.randn(width, width)
    engine = Eager()
    engine.device = device
    found = split(graph_of(fn, x, w), engine)
    assert [claimed for claimed, _ in found.levels] == [is_engines]
    assert is_engines or all("million elements elsewhere" in row.reason for row in found.unclaimed)


def test_moving_axes_of_size_one_copies_nothing() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.relu(x.permute(1, 0, 2)) + 1

    (found,) = split(graph_of(fn, torch.randn(1, 2048, 1024)), Eager()).levels
    assert found[0]
    (found,) = split(graph_of(fn, torch.randn(2, 2048, 1024)), Eager()).levels
    assert not found[0]


@pytest.mark.parametrize("at", ["compile", "run"])
def test_a_failing_region_is_compiled_by_us(at: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cumsum(torch.tanh(x @ x), 0) @ x

    engine, report = Eager(aten.tanh.default, fails="aten.cumsum.default", at=at), Report("fails")
    x = torch.randn(4, 4)
    with torch.no_grad():
        with pytest.warns(FuseeWarning, match=r"region_1 of fails .* at aten\.cumsum\.default"):
            compiled = backend(engine, report)(fx.symbolic_trace(fn), [x])
            torch.testing.assert_close(compiled(x), fn(x))
        before = engine.calls
        torch.testing.assert_close(compiled(x), fn(x))
    assert engine.calls == before + 1, "the other region stays with the engine"
    assert [row.failed is None for row in report.regions] == [True, False]
    assert "our compiler" in str(report.regions[1])
    assert report.regions[0].calls == 2


WHOLE = """
import sys, torch, fusee
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(9)]).eval()
with torch.no_grad():
    call = fusee.compile(model, backend="openvino")
    call(torch.randn(2, 4))
(report,) = fusee.backends.report.live_reports()
assert report.regions and not report.kernels and not report.externs, report
# the table of operators, in terms of the IR, may be there: shape rules of capture follow from it;
# and the operator that a scan is captured as
table = ("fusee.loops", "fusee.loops.associative", "fusee.loops.operators")
left_out = ("fusee.loops", "fusee.codegen", "fusee.autodiff.trace")
print(*[name for name in sys.modules if name.startswith(left_out) and name not in table])
"""


def test_a_graph_that_is_all_its_own_waits_for_no_import_of_our_compiler() -> None:
    pytest.importorskip("openvino")
    done = subprocess.run([sys.executable, "-c", WHOLE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
