"""Whole training steps: backward between two graphs, and each optimizer's update as one graph."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import fusee
from fusee.capture.entries import live
from tests.capturing.same import Traced

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "sgd nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adam amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"weight_decay": 0.1}),
    "rmsprop centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "loop": {"foreach": False},
    "lists": {"foreach": True},
    "fused": {"fused": True},
}
HAVE_FUSED = ("sgd", "adam", "adamw", "adagrad")
STEPS = 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


Step = Callable[[nn.Module, Any], Callable[..., Tensor]]


def plain_step(model: nn.Module, optimizer: Any) -> Callable[..., Tensor]:
    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return train


class Trained:
    """What five steps make of a network."""

    def __init__(
        self,
        make: Callable[[nn.Module], Any],
        step: Step,
        compiler: Callable[[Any], Any] | None,
        schedule: Callable[[Any], Any] | None = None,
    ) -> None:
        self.model = network()
        self.optimizer = make(self.model)
        scheduler = schedule(self.optimizer) if schedule else None
        run: Any = step(self.model, self.optimizer)
        self.run = run = run if compiler is None else compiler(run)
        torch.manual_seed(1)
        self.losses, self.entries = [], []
        for _ in range(STEPS):
            x, y = torch.randn(6, 4), torch.randn(6, 3)
            self.losses.append(run(x, y).item())
            if scheduler is not None:
                scheduler.step()
            self.entries.append(getattr(run, "entries", 0))

    def check(self, other: Trained) -> None:
        """Equal to what eager has made."""
        torch.testing.assert_close(torch.tensor(self.losses), torch.tensor(other.losses))
        for ours, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(ours.grad, theirs.grad)
        ours, theirs = self.optimizer.state_dict(), other.optimizer.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert list(ours["state"]) == list(theirs["state"])
        for key, state in theirs["state"].items():
            assert list(ours["state"][key]) == list(state)
            for name, value in state.items():
                assert type(ours["state"][key][name]) is type(value), name
                if isinstance(value, Tensor):
                    torch.testing.assert_close(ours["state"][key][name], value)
                else:
                    assert ours["state"][key][name] == value


def both(make: Callable[[nn.Module], Any], step: Step = plain_step, **more: Any) -> Trained:
    """Five steps as graphs, which must equal eager's."""
    ours = Trained(make, step, Traced, **more)
    ours.check(Trained(make, step, None, **more))
    return ours


def optimizer_of(name: str, form: str) -> tuple[Any, dict[str, Any]]:
    """A row of OPTIMIZERS in one of FORMS: its class and options. Skips what torch has not."""
    kind, options = OPTIMIZERS[name]
    if form == "fused" and name.split()[0] not in HAVE_FUSED:
        pytest.skip("torch has no fused form")
    return kind, {"lr": 0.05, **options, **FORMS[form]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_eagers(name: str, form: str) -> None:
    kind, options = optimizer_of(name, form)
    ours = both(lambda model: kind(model.parameters(), **options))
    assert ours.entries[1] == ours.entries[-1]
    assert all("backward" in stop for stop in ours.run.stops), ours.run.stops


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_with_open_sizes_are_compiled(name: str, form: str) -> None:
    """States of optimizers have open sizes, too, which are those of parameters."""
    kind, options = optimizer_of(name, form)
    compiler = functools.partial(fusee.compile, dynamic=True)  # what runs eagerly is warned of
    ours, theirs = (
        Trained(lambda model: kind(model.parameters(), **options), plain_step, compiled)
        for compiled in (compiler, None)
    )
    ours.check(theirs)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "rmsprop", "adagrad"])
def test_a_scheduler_does_not_compile_again(name: str, schedule: str) -> None:
    kind, options = OPTIMIZERS[name]
    ours = both(
        lambda model: kind(model.parameters(), lr=0.05, **options), schedule=SCHEDULES[schedule]
    )
    assert ours.entries[1] == ours.entries[-1]
    assert all("backward" in stop for stop in ours.run.stops), ours.run.stops


def test_an_optimizer_that_branches_on_its_steps_runs_in_python() -> None:
    ours = both(lambda model: torch.optim.RAdam(model.parameters(), lr=0.05))
    assert any("needs a number that the graph computes" in stop for stop in ours.run.stops)


# ------------------------------------------------------------------------------ what is trained


def adamw(model: nn.Module, **more: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.05, **more)


def test_groups_have_their_own_rates() -> None:
    def make(model: Any) -> Any:
        first, second = model[0].parameters(), model[2].parameters()
        groups = [{"params": first}, {"params": second, "lr": 0.2, "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, lr=0.05)

    ours = both(make, schedule=SCHEDULES["step"])
    assert ours.entries[1] == ours.entries[-1]


def test_frozen_parameters_and_parameters_without_gradient() -> None:
    def make(model: Any) -> Any:
        model[0].bias.requires_grad_(False)
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return adamw(model)

    ours = both(make)
    assert ours.entries[1] == ours.entries[-1]


def test_gradients_that_appear_later() -> None:
    def step(model: Any, optimizer: Any) -> Callable[..., Tensor]:
        calls = iter(range(STEPS))

        def train(x: Tensor, y: Tensor, late: bool) -> Tensor:
            optimizer.zero_grad()
            hidden = model[0](x)
            loss = nn.functional.mse_loss(model[2](hidden), y) if late else hidden.square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return lambda x, y: train(x, y, next(calls) > 1)

    both(adamw, step)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("owner", ["optimizer", "foreach", "model"])
def test_zero_grad(owner: str, set_to_none: bool) -> None:
    def step(model: Any, optimizer: Any) -> Callable[..., Tensor]:
        def train(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            (model if owner == "model" else optimizer).zero_grad(set_to_none)
            return loss

        return train

    ours = both(lambda model: adamw(model, foreach=owner == "foreach"), step)
    assert [p.grad is None for p in ours.model.parameters()] == [set_to_none] * 4
    assert ours.entries[1] == ours.entries[-1]


def test_two_steps_in_a_row() -> None:
    def step(model: Any, optimizer: Any) -> Callable[..., Tensor]:
        def train(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step(), optimizer.step()
            return loss

        return train

    both(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), step)
    both(adamw, step)


def test_a_mode_hears_what_the_first_step_makes() -> None:
    heard: list[str] = []

    class Heard(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            heard.append(func.__name__)
            return func(*args, **(kw or {}))

    def train(optimizer: Any, model: Any) -> None:
        with Heard():
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    told = []
    for run in (train, Traced(train)):
        heard.clear()
        model = network()
        run(adamw(model), model)
        told.append([*heard])
    assert told[0] == told[1]


def test_gradients_accumulate_over_parts_of_a_batch() -> None:
    def step(model: Any, optimizer: Any) -> Callable[..., Tensor]:
        def train(x: Tensor, y: Tensor) -> Tensor:
            total = x.new_zeros(())
            for part, wanted in zip(x.chunk(3), y.chunk(3)):
                loss = nn.functional.mse_loss(model(part), wanted) / 3
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return train

    ours = both(adamw, step)
    assert not any(stop.startswith("eager") for stop in ours.run.stops), ours.run.stops
    assert ours.entries[2] == ours.entries[-1]


@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_gradients_are_clipped_in_the_graph_of_the_update(norm: float) -> None:
    def step(model: Any, optimizer: Any) -> Callable[..., Tensor]:
        def train(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm)
            optimizer.step()
            return loss + total.detach()

        return train

    ours = both(adamw, step)
    assert all("backward" in stop for stop in ours.run.stops), ours.run.stops
    assert ours.entries[1] == ours.entries[-1]


def test_hooks_of_parameters_and_autocast() -> None:
    def make(model: Any) -> Any:
        model[0].weight.register_hook(lambda grad: grad * 2)
        return adamw(model)

    def step(model: Any, optimizer: Any) -> Callable[..., Tensor]:
        def train(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            return loss

        return train

    ours = both(make, step)
    assert all("backward" in stop for stop in ours.run.stops), ours.run.stops


def test_hooks_of_the_optimizer_and_a_closure() -> None:
    seen: list[str] = []

    def make(model: Any) -> Any:
        optimizer = adamw(model)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        return optimizer

    def step(model: Any, optimizer: Any) -> Callable[..., Tensor]:
        def train(x: Tensor, y: Tensor) -> Any:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            return optimizer.step(closure)

        return train

    both(make, step)
    assert seen == ["before", "after"] * 2 * STEPS


def test_a_loaded_state_is_gone_on_with() -> None:
    before = Trained(adamw, plain_step, None).optimizer.state_dict()

    def make(model: nn.Module) -> Any:
        optimizer = adamw(model)
        optimizer.load_state_dict(copy.deepcopy(before))
        return optimizer

    ours = both(make)
    assert ours.entries[1] == ours.entries[-1]


def test_the_step_alone_is_one_graph() -> None:
    networks = network(), network()
    optimizers = [adamw(model) for model in networks]
    for model in networks:
        model(torch.ones(2, 4)).sum().backward()
    traced = Traced(optimizers[0].step.__func__)
    for rate in (0.1, 0.2, 0.3):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
        traced(optimizers[0])
        optimizers[1].step()
    assert len(traced.graphs) == 1 and traced.entries == 1
    for ours, theirs in zip(*(model.parameters() for model in networks), strict=True):
        torch.testing.assert_close(ours, theirs)


RATES: list[Callable[[int], float]] = [
    lambda n: 0.1 * 0.9**n,
    lambda n: 0.1 * min(n / 4, 1.0),
    lambda n: 0.05 * (1 + math.cos(math.pi * n / 10)),
    lambda n: 0.1 / math.sqrt(n),
]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_rate_that_the_program_computes_for_each_step(
    kind: Callable[..., torch.optim.Optimizer], rate: Callable[[int], float]
) -> None:
    """It is set within the step that uses it."""

    def training(model: nn.Module) -> Callable[[], Tensor]:
        optimizer, count = kind(model.parameters(), lr=0.5), {"steps": 0}

        def step() -> Tensor:
            count["steps"] += 1
            for group in optimizer.param_groups:
                group["lr"] = rate(count["steps"])
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    models = network(), network()
    models[1].load_state_dict(models[0].state_dict())
    steps = [training(model) for model in models]
    compiled = fusee.compile(steps[1])
    for _ in range(12):
        torch.testing.assert_close(compiled(), steps[0]())
    (one,) = [one for one in live if one.call is compiled]
    stops = [entry.captured.stop for entry in one.start.entries]
    assert len(stops) <= 5 and not any(stops), stops


def test_a_group_that_the_program_changes_further() -> None:
    models = network(), network()
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step(k: int, momentum: float) -> None:
        (group,) = optimizers[k].param_groups
        group["momentum"], group["lr"] = momentum, momentum / 10
        optimizers[k].zero_grad()
        models[k](torch.ones(2, 4)).square().sum().backward()
        optimizers[k].step()

    compiled = fusee.compile(step)
    for momentum in (0.0, 0.9, 0.9, 0.5, 0.0):
        step(0, momentum)
        compiled(1, momentum)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, other)


# ------------------------------------------------------------------------------ gradients


def test_gradients_are_read_and_replaced() -> None:
    def fn(p: Any) -> Any:
        if p.grad is None:
            p.grad = torch.ones_like(p)
            return 0
        p.grad.mul_(2)
        p.grad = p.grad + 1
        return p.grad

    traced = Traced(fn)
    ours: Any = nn.Parameter(torch.zeros(2))
    theirs: Any = nn.Parameter(torch.zeros(2))
    for _ in range(4):
        result, wanted = traced(ours), fn(theirs)
        assert torch.equal(torch.as_tensor(result), torch.as_tensor(wanted))
        assert torch.equal(ours.grad, theirs.grad) and ours.grad.requires_grad is False
        assert ours.grad is result or result == 0
    assert traced.entries == 2 and not traced.stops
    ours.grad = None
    traced(ours)
    assert torch.equal(ours.grad, torch.ones(2)) and traced.entries == 2


def test_a_gradient_unlike_its_tensor_is_pythons() -> None:
    def fn(p: Any, grad: Any) -> None:
        p.grad = grad

    with pytest.raises(RuntimeError, match="attempting to assign a gradient of size"):
        Traced(fn)(nn.Parameter(torch.zeros(2)), torch.zeros(3))
    with pytest.raises(TypeError, match="assigned grad expected to be a Tensor or None"):
        Traced(fn)(nn.Parameter(torch.zeros(2)), 1)


@pytest.mark.parametrize("by_name", [False, True])
def test_what_lbfgs_calls_is_compiled(by_name: bool) -> None:
    def trained(compiles: Callable[..., Any]) -> tuple[Tensor, Any]:
        param = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = torch.optim.LBFGS([param], lr=0.1, max_iter=3)

        def step() -> Any:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = (param - 3).square().sum()
                loss.backward()
                return loss

            return optimizer.step(closure=closure) if by_name else optimizer.step(closure)

        run = compiles(step)
        for _ in range(3):
            run()
        return param.detach(), run

    (want, _), (got, traced) = trained(lambda step: step), trained(Traced)
    assert torch.equal(got, want) and len(traced.graphs) >= 1
    assert not any(stop.startswith("eager") for stop in traced.stops)


# ------------------------------------------------------------------------------ floats


def test_a_float_that_changes_becomes_an_input() -> None:
    def fn(x: Any, by: float) -> Any:
        return x * by + (1 - by) ** 2

    traced, x = Traced(fn), torch.randn(3)
    for by in (0.5, 0.25, 0.125, -1.0, 3.0):
        assert torch.equal(traced(x, by), fn(x, by))
    assert traced.entries == 2
    assert torch.equal(traced(x, 2), fn(x, 2)) and traced.entries == 3  # an int is no float


@pytest.mark.parametrize(
    ("decides", "versions"),
    [
        (lambda x, by: x + 1 if by > 0.3 else x * by, 3),
        (lambda x, by: x + by if 0.2 <= by < 0.6 else x * by, 4),
        (lambda x, by: x * by if by else x, 3),
        (lambda x, by: x * by if not -(2 * by - x.dim()) < 1 - by else x, 3),
        (lambda x, by: x * by if by == math.inf or by != by else x - by, 4),
        (lambda x, by: (by > 0.3, by is by, x * by), 3),
        (lambda x, by: x * by if by * by > by + 0.1 else x, 3),
        (lambda x, by: x if math.sin(by if by < 9 else 1) > 0 else x * by, 5),
    ],
)
def test_a_float_that_decides_has_a_version_for_each_answer(
    decides: Callable[..., Any], versions: int
) -> None:
    traced, x = Traced(decides), torch.randn(3)
    for by in (0.5, 0.25, 0.125, 0.5, 0.0, -0.0, math.inf, math.nan, 1.5, 0.3, -7.0, 0.31, 1e-9):
        ours, theirs = (f(x, by) for f in (traced, decides))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert traced.entries <= versions and not traced.stops


@pytest.mark.parametrize(
    ("made", "versions"),
    [
        (lambda x, by: x * math.exp(-by) + math.sqrt(by) * math.log(by), 2),
        (lambda x, by: x * abs(by - 0.3) + round(by, 2) + by**-1.5, 2),
        (lambda x, by: x / by + (1 - by) / by + 2**by, 2),
        (lambda x, by: x * int(by * 10), 4),  # 0 and 1 are constants
        (lambda x, by: x[: max(1, int(by * 4))] * math.floor(by), 6),
        (lambda x, by: x * (by // 0.25) + by % 0.25, 2),
        (lambda x, by: x.clamp(-by, by) + torch.where(x > by, x, by), 2),
        (lambda x, by: x + torch.linspace(0, by, 3), 2),
        (lambda x, by: nn.functional.gaussian_nll_loss(x, x + 1, x * x, eps=by), 3),
        (lambda x, by: x * (math.isnan(by) or by) + by, 2),
        (lambda x, by: x * min(by, 0.6), 4),
        (lambda x, by: x * by if round(by * 8) % 2 else x, 4),
        (lambda x, by: x * {0.2: 3.0}.get(abs(by - 0.3), 1.0), 9),  # a key is a constant
    ],
)
def test_what_is_made_of_a_float_is_made_before_the_graph(
    made: Callable[..., Any], versions: int
) -> None:
    traced, native, x = Traced(made), fusee.compile(made), torch.randn(3)
    for by in (0.5, 0.25, 0.125, 0.7, 0.3, 1.4, 2.2, 0.01):
        want = made(x, by)
        assert torch.equal(traced(x, by), want)
        torch.testing.assert_close(native(x, by), want)
    assert traced.entries <= versions and not traced.stops


@pytest.mark.parametrize(
    ("shown", "is_open"),
    [
        (lambda by: f"{by:.2f} of {by * 2 + 1:8.2e} {abs(by - 0.3)!r}", True),
        (lambda by: str(by) + "|" + repr(by) + f"{by:>{9}.1%}", True),
        (lambda by: ", ".join([f"{by}", "z"]), True),
        (lambda by: f"{by:d}", True),  # refused of any
        (lambda by: f"{by!s:>9}", False),
        (lambda by: f"{by:.1f}" == "0.5", False),
        (lambda by: {str(by): 1}, False),
    ],
)
def test_texts_of_a_float(shown: Callable[..., Any], is_open: bool) -> None:
    def fn(x: Any, by: float) -> Any:
        try:
            return x * by, shown(by)
        except ValueError as error:
            return x, str(error)

    traced, x = Traced(fn), torch.randn(3)
    for by in (0.5, 0.25, 0.125, 0.7, 1e-9, 3.0):
        assert str(traced(x, by)) == str(fn(x, by))
    assert (traced.entries <= 2) is is_open


@pytest.mark.parametrize(
    ("made", "odd"),
    [
        (lambda x, by: x * (1 / by), 0.0),
        (lambda x, by: x * (3 % by), 0.0),
        (lambda x, by: x * by**-1.5, 0.0),
        (lambda x, by: x * by**-1.5, -2.0),  # complex
        (lambda x, by: x * 10.0 ** (by * 1000), 1.0),
        (lambda x, by: x * math.log(by), -1.0),
        (lambda x, by: x * math.exp(by), 1e4),
        (lambda x, by: x * int(by), math.nan),
        (lambda x, by: x * round(by), math.inf),
    ],
)
def test_what_python_refuses_of_a_float_is_refused(made: Callable[..., Any], odd: float) -> None:
    traced, x = Traced(made), torch.ones(3)
    for by in (0.125, 0.25, 0.1875, odd, 0.0625, odd):
        results = []
        for f in (made, traced):
            try:
                results.append(f(x, by))
            except (ArithmeticError, ValueError) as error:
                results.append((type(error), str(error)))
        assert str(results[0]) == str(results[1])


def test_floats_that_decide_together() -> None:
    def fn(x: Any, a: float, b: float) -> Any:
        return x * a if a - b > b else x + b

    traced, x = Traced(fn), torch.randn(3)
    for a, b in ((0.5, 0.25), (0.25, 0.5), (3.0, 1.0), (1.0, 3.0), (2.0, 1.0), (9.0, 4.5)):
        assert torch.equal(traced(x, a, b), fn(x, a, b))
    assert traced.entries <= 4
    facts = [fact for e in traced.compiled.entries for fact in e.captured.facts.rows]
    assert "(a - b) > b" in {str(fact.origin) for fact in facts}


def test_a_learning_rate_that_decides() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=1.0)

    def step() -> None:
        (group,) = optimizer.param_groups
        with torch.no_grad():
            param.sub_(group["lr"] * (2 if group["lr"] > 0.3 else 1))

    traced, want = Traced(step), 1.0
    for lr in (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.75, 0.875, 0.4375, 0.21875):
        optimizer.param_groups[0]["lr"] = lr
        traced()
        want -= lr * (2 if lr > 0.3 else 1)
    assert torch.equal(param.detach(), torch.full((3,), want)) and traced.entries == 2


@pytest.mark.parametrize(
    "use",
    [
        lambda x, by: x * round(by, 1),
        lambda x, by: f"{by:.2f}",
        lambda x, by: {by: x}[by],
        lambda x, by: nn.functional.dropout(x, by, training=False),
        lambda x, by: (by, [by, by * 2]),
        lambda x, by: x + max(by, 0.2),
        lambda x, by: (isinstance(by, float), type(by), by.is_integer()),
        lambda x, by: torch.full((2,), by),
        lambda x, by: torch.where(x > by, x, by).clamp(min=-by),
        lambda x, by: torch.nn.functional.leaky_relu(x, by) + x.new_tensor(by),
        lambda x, by: by / (by - x) + 2**by + by**x - x.add(x, alpha=by),
    ],
)
def test_floats_that_changed_may_be_used_in_any_way(use: Callable[..., Any]) -> None:
    traced, x = Traced(use), torch.randn(3)
    for by in (0.5, 0.25, 0.125, 0.5):
        ours, theirs = traced(x, by), use(x, by)
        assert type(ours) is type(theirs)
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


def test_a_step_with_a_scaled_loss() -> None:
    def trained(is_compiled: bool) -> tuple[list[float], float, list[Tensor], list[str]]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        run: Any = Traced(step) if is_compiled else step
        found = [float(run(torch.full((2, 4), bad))) for bad in (1.0, 0.5, math.inf, 2.0, 1.0)]
        stops = run.stops if is_compiled else []
        return found[:2] + found[3:], scaler.get_scale(), [*model.parameters()], stops

    want, got = trained(False), trained(True)
    assert got[:2] == want[:2]
    torch.testing.assert_close(got[2], want[2], rtol=0, atol=0)
    assert not any("id()" in stop or stop.startswith("eager") for stop in got[3]), got[3]


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adam])
@pytest.mark.parametrize("make", [Traced, fusee.compile])
def test_a_step_that_is_not_reached_leaves_no_state(make: Any, kind: Any) -> None:
    w = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([w])

    def fn(x: torch.Tensor, at: torch.Tensor) -> None:
        (w[at] * x).sum().backward()
        optimizer.step()

    run = make(fn)
    for at, is_begun in ((9, False), (9, False), (1, True), (9, True)):
        with contextlib.nullcontext() if at == 1 else pytest.raises(IndexError):
            run(torch.ones(1), torch.tensor([at]))
        assert (w in optimizer.state) is is_begun


def test_a_step_that_a_capture_saw_and_its_piece_did_not_leaves_no_state() -> None:
    class Cell(nn.Linear):
        mean: Tensor

        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            self.mean.mul_(0.9)
            return found

    seen: list[Tensor] = []

    def step(f: Any, x: Tensor) -> int:
        cell = Cell(4, 4)
        optimizer = torch.optim.Adam(cell.parameters())

        def fn(x: Tensor) -> None:
            cell.mean = x.detach()
            seen.append(copy.deepcopy(cell)(x))
            cell(x).pow(2).mean().backward()
            optimizer.step()

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            f(fn)(x)
        return len(optimizer.state)

    compiled = functools.partial(fusee.compile, backend="eager")
    assert step(lambda fn: fn, torch.ones(4)) == step(compiled, torch.ones(4)) == 0


def test_what_averaging_weights_calls_is_compiled() -> None:
    """Functions of torch.optim.swa_utils break at each turn of a loop."""

    def training() -> tuple[Callable[[list[Tensor]], Any], nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU())
        average = swa_utils.AveragedModel(model, avg_fn=lambda a, b, n: (a * n + b).div(n + 1))

        def finish(batches: list[Tensor]) -> Any:
            average.update_parameters(model)
            swa_utils.update_bn(batches, average)
            return average(batches[0])

        return finish, average

    (finish, average), (other, expected) = training(), training()
    traced = Traced(finish)
    for n in (5, 5, 6):
        batches = [torch.randn(n, 3), torch.randn(n, 3)]
        torch.testing.assert_close(traced(batches), other(batches))
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(average.state_dict()[key], value)
    names = {one.function.__qualname__ for one in traced.functions if one.entries}
    assert any("avg_fn" in name or "<lambda>" in name for name in names), names
    assert any("forward" in name for name in names), names
