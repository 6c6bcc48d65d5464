"""Passes over graphs whose sizes are known only by the call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fusee.aten import WHOLE
from fusee.aten.trace import trace
from fusee.aten.weights import run_passes
from fusee.config import Options
from fusee.targets.cpu import CPU
from fusee.targets.cpu.onednn import for_any_size, order, packed
from tests.aten.harness import run
from tests.aten.passes.graphs import kept
from tests.compare import assert_same


class Network(nn.Module):
    """A convolution, its norm, a residual sum and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.more = nn.Conv2d(8, 8, 3, 1, 1)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.images(x)
        y = (y + self.more(y)).flatten(2).transpose(1, 2)
        return self.second(self.first(y).relu()).sum(1)


@pytest.mark.skipif(packed() is None, reason="this build has no oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_graph_for_many_sizes(dtype: torch.dtype) -> None:
    module = Network().eval().to(dtype)
    exact = copy.deepcopy(module).double()
    compiled: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        aten = trace(gm, inputs, keep=WHOLE.__contains__)
        derived, _ = run_passes(aten, Options(), CPU().passes(Options()))
        assert derived and aten.symbols
        compiled.append(aten)
        return lambda *given: run(aten, [*given, *kept(derived, given)])

    step = torch.compile(module, backend=backend, dynamic=True)
    with torch.no_grad():
        for shape in ((2, 3, 16, 16), (3, 3, 16, 16), (5, 3, 20, 12)):
            x = torch.randn(*shape).to(dtype)
            assert_same(step(x), module(x), lambda: exact(x.double()))  # noqa: B023  called at once
    targets = [str(n.target) for n in compiled[0].graph.nodes if n.op == "call_function"]
    assert not any("batch_norm" in t or "aten.convolution" in t for t in targets)
    assert any(n.meta.get("packed") for n in compiled[0].graph.nodes)
    assert len(compiled) <= 2


@pytest.mark.skipif(packed() is None, reason="this build has no oneDNN")
@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (4, 2), (16, 1)])
def test_a_packed_weight_meets_each_size_in_its_order(groups: int, stride: int) -> None:
    ops = packed()
    assert ops is not None
    weight, given = torch.randn(32, 16 // groups, 3, 3), ([1, 1], [stride] * 2, [1, 1], groups)
    opaque: Any = ops.reorder_conv(weight, *given, [2, 16, 12, 12])
    alone, summed = for_any_size(ops.conv), for_any_size(ops.conv_binary)
    for size in (12, 7, 40, 12, 1):
        x = torch.randn(3, 16, size, size).to(memory_format=torch.channels_last)
        want = torch.convolution(
            x, weight, None, given[1], given[0], given[2], False, (0, 0), groups
        )
        held = tuple(map(tuple, given[:3]))
        got = alone(x, opaque, None, *held, groups, "none", [], "")
        torch.testing.assert_close(got, want)
        if size == 1 and torch.__version__ < "2.13":
            continue  # whose oneDNN cannot add to one pixel
        got = summed(x, want, opaque, None, *held, groups, "add", None, None, [], None)
        torch.testing.assert_close(got, want + want)
        again = ops.reorder_conv(weight, *given, [3, 16, size, size])
        assert order(opaque.by_size[x.shape[2:], *held, groups]) == order(again)
    assert len(opaque.by_size) == 4
    orders = {tuple(order(made)) for made in opaque.by_size.values()}
    assert len(orders) == len({id(made) for made in opaque.by_size.values()})
