"""Updates by our own kernels: as near to float64 as eager's, and compiled once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee.backends.native import compile_native
from fusee.errors import FuseeWarning

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
}
SHAPES = [(7, 5), (5,), (16, 16), (), (3, 4, 2)]
RATES = [0.05, 0.04, 0.03, 0.02, 0.01]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def trained(kind: Any, options: dict[str, Any], dtype: torch.dtype, compiled: bool) -> Any:
    """An optimizer after five steps with gradients that do not depend on the parameters."""
    params = parameters(dtype)
    optimizer = kind(params, lr=1.0, **options)
    step = fusee.compile(optimizer.step, fullgraph=True) if compiled else optimizer.step
    for rate in RATES:
        for p in params:
            p.grad = torch.randn(p.shape).to(dtype)
        optimizer.param_groups[0]["lr"] = rate
        if compiled:
            with fusee.compiler.set_stance("default" if rate > 0.03 else "fail_on_recompile"):
                step()
        else:
            step()
    return optimizer


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_near_to_float64_as_eager(name: str, foreach: bool) -> None:
    kind, options = OPTIMIZERS[name]
    options = {**options, "foreach": foreach}
    exact = trained(kind, options, torch.float64, False)
    eager = trained(kind, options, torch.float32, False)
    ours = trained(kind, options, torch.float32, True)
    for k, p in enumerate(ours.param_groups[0]["params"]):
        wanted = exact.param_groups[0]["params"][k].double()
        limit = 2 * (eager.param_groups[0]["params"][k] - wanted).abs().max() + 1e-6
        assert (p - wanted).abs().max() <= limit
    _same_state(ours.state_dict(), eager.state_dict())


def _same_state(ours: dict[str, Any], eager: dict[str, Any]) -> None:
    assert ours["param_groups"] == eager["param_groups"]
    assert list(ours["state"]) == list(eager["state"])
    for key, state in eager["state"].items():
        assert list(ours["state"][key]) == list(state)
        for name, value in state.items():
            torch.testing.assert_close(ours["state"][key][name], value)


def test_bfloat16_rounds_as_eager_does() -> None:
    kind, options = OPTIMIZERS["adamw"]
    eager = trained(kind, options, torch.bfloat16, False)
    ours = trained(kind, options, torch.bfloat16, True)
    pairs = zip(ours.param_groups[0]["params"], eager.param_groups[0]["params"], strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)


def test_an_update_is_one_kernel_for_each_parameter() -> None:
    params = parameters(torch.float32)[:3]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(params)
    compiled: list[Any] = []

    def backend(gm: Any, examples: list[Tensor]) -> Any:
        compiled.append(compile_native(gm, examples, {}))
        return compiled[-1]

    fusee.compile(optimizer.step, backend=backend)()
    (graph,) = compiled
    assert graph.report().eager is None and not graph.report().externs
    bodies = [row.body for row in graph.report().kernels]
    assert len(bodies) == len(params) + 1  # one for the counts of steps of all


def test_a_whole_training_step() -> None:
    """The form of PyTorch's introduction to torch.compile."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    networks = [network, copy.deepcopy(network)]
    optimizers = [torch.optim.Adam(one.parameters()) for one in networks]

    def train(model: nn.Module, optimizer: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad(True)
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        loss.backward()
        optimizer.step()
        return loss

    compiled = fusee.compile(train)
    for _ in range(4):
        data = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
        ours = compiled(networks[0], optimizers[0], data)
        theirs = train(networks[1], optimizers[1], data)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for mine, other in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=5e-3, rtol=1e-3)


def test_a_scheduler_within_the_step_compiles_nothing_anew() -> None:
    made = []
    for compiled in (False, True):
        torch.manual_seed(0)
        network = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def train(network: nn.Module, optimizer: Any, scheduler: Any, x: Tensor) -> None:
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()
            scheduler.step()

        step = fusee.compile(train) if compiled else train
        for k in range(6):
            with fusee.compiler.set_stance("default" if k < 3 else "fail_on_recompile"):
                step(network, optimizer, scheduler, torch.randn(2, 4))
        made.append((scheduler.get_last_lr(), list(network.parameters())))
    assert made[0][0] == made[1][0]
    torch.testing.assert_close(made[1][1], made[0][1])


def test_torch_compile_takes_the_rate_as_an_input() -> None:
    made = []
    for compiled in (False, True):
        params = parameters(torch.float32)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = torch.optim.SGD(params, lr=0.1)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        step: Any = torch.compile(optimizer.step, backend="fusee") if compiled else optimizer.step
        for rate in RATES:
            optimizer.param_groups[0]["lr"] = rate
            step()
        made.append(params)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch asks for it
def test_compiled_autograd_of_torch_runs_eagerly() -> None:
    """It hands over what the forward saved as one list, and takes gradients that it wrote."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.warns(FuseeWarning, match="compiled autograd's graphs run eagerly"):
        for rows in (3, 3, 6):
            loss = model(torch.randn(rows, 5)).square().mean()
            want = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            model.zero_grad()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="fusee")):
                loss.backward()
            torch.testing.assert_close([p.grad for p in model.parameters()], [*want])


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_torch_dynamo_was_here_before(kind: str) -> None:
    # its first use disables _init_group of all optimizers, and their fused forms, for itself
    torch._dynamo.eval_frame.TorchPatcher.patch()
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = torch.ones(3)
    fused = kind == "fused"
    optimizer = torch.optim.AdamW([parameter], lr=0.1, foreach=not fused, fused=fused)
    step = fusee.compile(optimizer.step, fullgraph=True)
    step()
    assert parameter.max() < 1


class Lazily(torch.optim.Optimizer):
    """A user's own, which makes the state of a parameter when it first has a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                p.add_(state["mean"].sign(), alpha=-group["lr"] / state["step"])


@pytest.mark.filterwarnings("error")
def test_state_that_an_optimizer_of_the_users_makes() -> None:
    made = []
    for compiles in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(n)) for n in range(1, 13)]
        optimizer = Lazily(params)
        step: Any = fusee.compile(optimizer.step, fullgraph=True) if compiles else optimizer.step
        for k in range(5):
            for p in params[k == 0 :]:  # the first one's state comes later than the others'
                p.grad = torch.randn(p.shape)
            if k == 3:
                params.append(nn.Parameter(torch.randn(20)))
                optimizer.add_param_group({"params": params[-1:]})
            step()
        made.append(optimizer)
    eager, ours = made
    assert [*map(len, ours.state.values())] == [*map(len, eager.state.values())]
    _same_state(ours.state_dict(), eager.state_dict())
    for a, b in zip(*(x.param_groups[0]["params"] for x in made), strict=True):
        torch.testing.assert_close(a, b)
