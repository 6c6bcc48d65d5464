"""On a GPU: steps of training, with all that surrounds a backward pass, beside eager ones.

python -m pytest tests/targets/cuda/test_training.py
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusee
from tests.autodiff.test_chunks import LOSSES, as_near, chunked, operands, outcome

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore:.*capturable"),
]

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TF32 rounds too much for steps to be compared; a kernel that fails belongs to its test."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    torch.cuda.synchronize()


STEPS = 6
Call = Callable[..., Any]
Parameters = Iterable[nn.Parameter]


class Net(nn.Module):
    """A convolution, batch norm, attention with dropout, a tied weight and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32)
        self.attend = nn.MultiheadAttention(32, 4, 0.1, False, batch_first=True)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.scale = nn.LayerNorm(32), nn.Parameter(torch.ones(32), requires_grad=False)
        self.head = nn.Linear(32, 64)
        self.head.weight = self.up.weight  # tied

    def block(self, x: Tensor) -> Tensor:
        x = x + self.attend(x, x, x, need_weights=False)[0]
        hidden = F.dropout(F.gelu(self.up(x)), 0.1, self.training)
        return self.norm(x + self.down(hidden)) * self.scale

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(images))).flatten(2).transpose(1, 2)
        return self.head(self.block(x)).mean(1)


class Checkpointed(Net):
    def block(self, x: Tensor) -> Tensor:
        return checkpoint(super().block, x, use_reentrant=False)


def batch(k: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(k)
    images = torch.randn(8, 3, 8, 8, generator=made)
    return images.to(DEVICE), torch.randint(0, 64, (8,), generator=made).to(DEVICE)


def adam(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def trained(
    step: Callable[[Call, nn.Module, torch.optim.Optimizer, int], Any],
    way: str,
    make: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Parameters], torch.optim.Optimizer] = adam,
    **how: Any,
) -> tuple[Any, ...]:
    """Losses, parameters and buffers after some steps. way: eager, the model compiled, or all."""
    torch.manual_seed(0)
    module = make().to(DEVICE)
    made = optimizer(p for p in module.parameters() if p.requires_grad)
    call: Any = fusee.compile(module, **how) if way == "model" else module

    def once(k: Any) -> Any:
        return step(call, module, made, k)

    run = fusee.compile(once, **how) if way == "step" else once
    losses = []
    for k in range(STEPS):
        torch.manual_seed(k)
        losses.append(run(k))
    return losses, [x.detach() for x in module.state_dict().values()]


def agree(step: Any, *ways: str, **how: Any) -> None:
    want = trained(step, "eager", **{k: how[k] for k in ("make", "optimizer") if k in how})
    for way in ways or ("model", "step"):
        torch.testing.assert_close(trained(step, way, **how), want, rtol=2e-3, atol=2e-4)


def plain(call: Call, module: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> Tensor:
    images, classes = batch(k)
    optimizer.zero_grad()
    loss = F.cross_entropy(call(images), classes)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Lion(torch.optim.Optimizer):
    """A user's own, written with foreach."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            for p in used:
                if not self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
            grads, means = [p.grad for p in used], [self.state[p]["m"] for p in used]
            updates = torch._foreach_lerp(means, grads, 0.1)
            torch._foreach_sign_(updates)
            torch._foreach_add_(used, updates, alpha=-group["lr"])
            torch._foreach_lerp_(means, grads, 0.01)


class Muon(torch.optim.Optimizer):
    """Products within a step: matrices of orthogonal updates."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad
                if g.dim() == 2:
                    g = g / (g.norm() + 1e-7)
                    for _ in range(3):
                        square = g @ g.T
                        g = 3.4445 * g + (-4.775 * square + 2.0315 * square @ square) @ g
                p.add_(g, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": adam,
    "adam without foreach": lambda ps: torch.optim.Adam(ps, lr=1e-3, foreach=False),
    "fused adam": lambda ps: torch.optim.Adam(ps, lr=1e-3, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.9),
    "lion": Lion,
    "muon": Muon,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    agree(plain, "step", optimizer=OPTIMIZERS[name])


def test_a_rate_that_changes() -> None:
    def step(call: Call, module: Any, optimizer: Any, k: int) -> Tensor:
        optimizer.param_groups[0]["lr"] = 1e-3 / (k + 1)
        return plain(call, module, optimizer, k)

    agree(step)


def test_accumulation_and_clipping() -> None:
    def step(call: Call, module: Any, optimizer: Any, k: int) -> Tensor:
        optimizer.zero_grad(set_to_none=k % 2 == 0)
        for part in range(2):
            images, classes = batch(10 * k + part)
            (F.cross_entropy(call(images), classes) / 2).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        return norm.detach()

    # by the usual eps the sign of a gradient of nearly nothing decides on a whole step
    agree(step, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4))


def test_several_losses_and_forwards_before_a_backward() -> None:
    def step(call: Call, module: Any, optimizer: Any, k: int) -> Tensor:
        optimizer.zero_grad()
        (a, classes), (b, _) = batch(k), batch(k + 100)
        first, second = call(a), call(b)
        F.cross_entropy(first, classes).backward(retain_graph=True)
        loss = F.mse_loss(second, first.detach()) + first.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    agree(step)


def test_a_scaler_that_meets_an_overflow() -> None:
    def over(dtype: torch.dtype) -> Any:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, enabled=True)

        def step(call: Call, module: Any, optimizer: Any, k: int) -> Tensor:
            images, classes = batch(k)
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype):
                loss = F.cross_entropy(call(images), classes) * (1e30 if k == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return torch.tensor(scaler.get_scale())

        return step

    want = trained(over(torch.float16), "eager")
    got = trained(over(torch.float16), "model")
    assert got[0] == want[0]
    assert len({x.item() for x in want[0]}) > 1, "nothing overflowed"
    torch.testing.assert_close(got[1], want[1], rtol=5e-2, atol=5e-3)


def test_regions_that_are_computed_again() -> None:
    agree(plain, make=Checkpointed)
    agree(plain, "model", options={"memory_budget": 0.2})


def test_hooks() -> None:
    heard: list[float] = []

    def hooked() -> nn.Module:
        net = Net()
        net.up.weight.register_hook(lambda grad: grad * 0.5)
        net.down.bias.register_post_accumulate_grad_hook(
            lambda p: heard.append(p.grad.sum().item())
        )
        return net

    agree(plain, make=hooked)
    assert len(heard) == 3 * STEPS
    torch.testing.assert_close(heard[STEPS:], heard[:STEPS] * 2, rtol=2e-3, atol=2e-4)


def test_sparse_gradients() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(500, 32, sparse=True), nn.Linear(32, 64)

        def forward(self, images: Tensor) -> Tensor:
            rows = images[:, 0, 0].abs().mul(100).long() % 500
            return self.head(torch.tanh(self.table(rows)).mean(1))

    agree(plain, "model", make=Words, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))


@pytest.mark.parametrize("way", ["model", "step"])
def test_memory_stays(way: str) -> None:
    module = Net().to(DEVICE)
    optimizer, reserved = adam(p for p in module.parameters() if p.requires_grad), []
    call: Any = fusee.compile(module) if way == "model" else module

    def step(images: Tensor, classes: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(call(images), classes)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = fusee.compile(step) if way == "step" else step
    for k in range(100):
        run(*batch(k))
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[20]


def test_gradients_outlive_the_next_step() -> None:
    module = Net().to(DEVICE)
    compiled, kept = fusee.compile(module), []
    for k in range(5):
        images, classes = batch(k)
        module.zero_grad(set_to_none=True)
        F.cross_entropy(compiled(images), classes).backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        kept.append((grads, copy.deepcopy(grads)))
    for grads, copies in kept:
        torch.testing.assert_close(grads, copies, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_chunks_of_rows(name: str, dtype: torch.dtype) -> None:
    given = [x if x is None else x.to(DEVICE) for x in operands(dtype)]
    step = fusee.compile(LOSSES[name], options={"memory_budget": 0.5})
    theirs, exact = (outcome(LOSSES[name], given, kind) for kind in (dtype, torch.float64))
    for _ in range(3):  # the second is recorded
        as_near(outcome(step, given, dtype), theirs, exact, dtype)
    assert chunked(step)


@pytest.mark.parametrize("name", ["mean", "cast", "by hand"])
def test_one_chunk_of_rows_is_in_memory(name: str) -> None:
    given = [x if x is None else x.to(DEVICE) for x in operands(torch.float32)]
    peaks = []
    for budget in (0.5, 1.0):
        step = fusee.compile(LOSSES[name], options={"memory_budget": budget, "graphs": False})
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            outcome(step, given, torch.float32)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < peaks[1] / 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_end_graphs_in_training_alone(kind: Callable[..., nn.RNNBase]) -> None:
    """cuDNN's own, with the weights in its buffer; what is around them is compiled."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 16)
            self.layers = kind(16, 32, 2, batch_first=True, bidirectional=True)
            self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 8))

        def forward(self, ids: Tensor) -> Tensor:
            found, _ = self.layers(F.silu(self.words(ids)))
            return self.head(found)

    eager = Tagger().to(DEVICE)
    ours = copy.deepcopy(eager)
    ours.layers.flatten_parameters()  # a copy has each weight apart
    compiled = fusee.compile(ours)
    assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    for length in (12, 12, 7):
        ids = torch.randint(0, 50, (4, length), device=DEVICE)
        results = [model(ids) for model in (eager, compiled)]
        for result in results:
            result.float().tanh().sum().backward()
        assert_close(results[1], results[0])
        for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
            assert_close(p.grad, q.grad)
    stops = fusee.explain(compiled)(ids).breaks  # in the layer, and in what calls it
    assert stops and all("cuDNN" in stop.reason for stop in stops)
    with torch.no_grad():
        assert_close(compiled(ids), eager(ids))
        assert not fusee.explain(compiled)(ids).breaks
