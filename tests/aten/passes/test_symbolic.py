"""Passes over graphs whose sizes are known only by the call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fusee.aten.graph import WHOLE
from fusee.aten.trace import trace
from fusee.aten.weights import run_passes
from fusee.config import Options
from fusee.targets.cpu import CPU
from fusee.targets.cpu.onednn import is_native, packed
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
    # an order of weights that depends on the image size cannot be chosen; linear layers that the
    # processor multiplies in their own dtype are packed for any size
    assert (dtype is torch.bfloat16 and is_native(dtype)) or not any(
        n.meta.get("packed") for n in compiled[0].graph.nodes
    )
    assert len(compiled) <= 2
