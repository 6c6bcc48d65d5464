"""A target is one class and one row: here a machine that runs loops in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload

import fusee
from fusee.aten.rewriter import Pass
from fusee.autodiff.min_cut import Prices
from fusee.backends.report import live_reports
from fusee.codegen import HostArguments, HostCode
from fusee.config import Options
from fusee.errors import FuseeWarning
from fusee.loops import Buffer, Kernel, Message, Profile
from fusee.loops.lower import ExternSpec
from fusee.loops.memory import Plan
from fusee.runtime.jit import Build
from fusee.runtime.launch import FrameSpec
from fusee.sym import Symbol, symbols
from fusee.targets import TARGETS, Emitted, Kept, Loaded, Target
from fusee.targets.cuda import CUDA
from tests.loops.interpret import interpret


class Reference(Target):
    """See fusee.targets.Target."""

    profile = Profile()
    device = torch.device("cpu")
    prices = Prices(hold=1000)  # memory is scarce: whatever may be is computed again

    def prepare(self) -> None: ...

    def passes(self, options: Options) -> Sequence[Pass]:
        return ()

    def call_of(self, op: OpOverload) -> ExternSpec | None:
        return None

    def settings(self) -> None: ...

    def build(self, options: Options) -> Build:
        return Build(use_disk=False)

    def code_of(self, messages: Sequence[Message], options: Options) -> NoReturn:
        raise AssertionError("kernels are interpreted")

    def emit(
        self,
        plan: Plan,
        arguments: HostArguments,
        build: Build,
        options: Options,
        timed: Callable[[str], AbstractContextManager[object]],
    ) -> tuple[Emitted, Mapping[Kernel, str]]:
        kernels = [x for x in plan.schedule.items if isinstance(x, Kernel)]
        host = HostCode("", {}, {}, FrameSpec((), 0), False)
        messages = plan.schedule.graph.messages
        return Emitted(host, arguments, messages, plan), dict.fromkeys(kernels, "interpreted")

    def load(self, emitted: Emitted, build: Build, kept: Kept, options: Options) -> Loaded:
        arguments, graph = emitted.arguments, emitted.own.schedule.graph
        place = {buffer: k for k, buffer in enumerate(arguments.buffers)}

        def run(inputs: Sequence[Any]) -> Sequence[Any]:
            rest = iter(kept.current(tuple(inputs)).tensors)
            given = [
                inputs[place[x]] if x.role == "input" else next(rest)
                for x in graph.inputs
                if isinstance(x, Buffer)
            ]
            shapes = [x.shape if isinstance(x, Buffer) else (x.expr,) for x in graph.inputs]
            named = {s.name: s for shape in shapes for n in shape for s in symbols(n)}
            sizes = {
                named.get(name, Symbol(name)): inputs[k] if axis is None else inputs[k].size(axis)
                for name, (k, axis) in arguments.sizes.items()
            }
            with torch.no_grad():
                return tuple(interpret(graph, given, sizes=sizes))

        return Loaded((lambda *inputs: run(inputs)) if arguments.spread else run)


REFERENCE: Target = Reference()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.last(F.gelu(self.norm(self.first(x)))), -1)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "cpu", REFERENCE)


def test_inference_on_another_target(reference: None) -> None:
    net, x = Net().eval(), torch.randn(5, 6)
    compiled = fusee.compile(net)
    with torch.no_grad():
        for given in (x, x + 1):
            torch.testing.assert_close(compiled(given), net(given))
    rows = live_reports()[-1].kernels
    assert rows and {row.function for row in rows} == {"interpreted"}


def test_training_on_another_target(reference: None) -> None:
    net, x = Net(), torch.randn(5, 6)
    found = []
    for call in (fusee.compile(net), net):
        net.zero_grad()
        loss = (call(x) * torch.arange(3.0)).sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
    torch.testing.assert_close(*found)
    backward = live_reports()[-1].backward
    assert backward is not None and {row.function for row in backward.kernels} == {"interpreted"}


def test_writes_and_sizes_that_calls_bring(reference: None) -> None:
    def step(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.sum(0))
        return x.cumsum(0) / x.shape[0]

    compiled = fusee.compile(step, dynamic=True)
    for rows in (3, 4, 7):
        x, ours, theirs = torch.randn(rows, 4), torch.zeros(4), torch.zeros(4)
        torch.testing.assert_close(compiled(x, ours), step(x, theirs))
        torch.testing.assert_close(ours, theirs)


def test_an_amd_gpu_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "cpu", CUDA())  # so that its tensors are on one
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.warns(FuseeWarning, match="an AMD GPU, and code is generated for NVIDIA's"):
        assert torch.equal(fusee.compile(torch.sin)(torch.ones(3)), torch.ones(3).sin())


def test_a_machine_without_a_target_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "cuda"):
        monkeypatch.delitem(TARGETS, device)
    monkeypatch.setitem(TARGETS, "xpu", REFERENCE)
    with pytest.warns(FuseeWarning, match="is on cpu, and code is generated for the XPU"):
        assert torch.equal(fusee.compile(torch.sin)(torch.ones(3)), torch.ones(3).sin())
