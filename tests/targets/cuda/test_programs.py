"""Small networks and functions, with all their kernels on the SIMT machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan

import fusee
from fusee.targets import TARGETS
from fusee.targets.cuda import PROFILE
from tests.targets.cuda.simulated import Simulated
from tests.targets.cuda.test_kernels import agree, close, numbers


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "cpu", Simulated(PROFILE))


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


def _images() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    then = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    return nn.Sequential(first, then, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def _words() -> nn.Module:
    return nn.Sequential(nn.Embedding(30, 16), nn.LayerNorm(16), nn.Linear(16, 30))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer": (_encoder, lambda: numbers(2, 7, 32)),
    "images": (_images, lambda: numbers(4, 3, 12, 12)),
    "words": (_words, lambda: torch.randint(0, 30, (4, 9))),
}


@pytest.mark.parametrize("name", NETS)
def test_inference(name: str) -> None:
    make, given = NETS[name]
    net, x = make().eval(), given()
    with torch.no_grad():
        close(fusee.compile(net)(x), net(x), 1e-4)


@pytest.mark.parametrize("name", NETS)
def test_training(name: str) -> None:
    make, given = NETS[name]
    net, x, found = make(), given(), []
    for call in (fusee.compile(net), net):
        net.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
    close(found[0], found[1], 1e-4)


def _adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    v = v.mul_(0.99).addcmul_(g, g, value=0.01)
    return p.addcdiv_(m.lerp_(g, 0.1), v.sqrt() + 1e-8, value=-1e-3)


def _states(dt: Tensor, a: Tensor, x: Tensor) -> Any:
    """A selective state space: a thread carries a state along time, in registers."""
    decay = torch.exp(-a.exp()[:, None] * F.softplus(dt)[..., None])
    combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
    given = decay, dt[..., None] * x[:, None]
    decays, states = associative_scan(combine, given, 2, combine_mode="generic")
    return decays, states.transpose(1, 2).double(), states[:, :, -1]


def _running_weights(x: Tensor) -> Any:
    def combine(a: Any, b: Any) -> Any:
        top = torch.maximum(a[0], b[0])
        return top, a[1] * torch.exp(a[0] - top) + b[1] * torch.exp(b[0] - top)

    given = x, torch.ones_like(x)
    return [
        associative_scan(combine, given, dim, reverse=back, combine_mode="generic")
        for dim, back in ((0, False), (1, True), (-1, False))
    ]


FUNCTIONS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "losses": lambda: (F.cross_entropy, numbers(12, 50), torch.randint(0, 50, (12,))),
    "images": lambda: (
        lambda x: (F.interpolate(x, scale_factor=2, mode="bilinear"), F.avg_pool2d(x, 2)),
        numbers(2, 4, 6, 6),
    ),
    "moved": lambda: (
        lambda x: (F.pixel_shuffle(x, 2), x.roll(1, 2), torch.where(x > 0, x, x * 2)),
        numbers(2, 4, 6, 6),
    ),
    "index_put": lambda: (
        lambda x, i, v: (x.index_put((i,), v, accumulate=True), x[i], x.index_select(0, i)),
        numbers(10, 6), torch.randint(0, 10, (7,)), numbers(7, 6),
    ),
    "an optimizer": lambda: (_adam, *(torch.rand(37) for _ in range(4))),
    "dimensions": lambda: (
        lambda x: (x.var((0, 2)), x.mean((1, 3)), x.sum((0, 2, 3)), x.amax((0, 1))),
        numbers(3, 4, 5, 6),
    ),
    "long": lambda: (lambda x: (x.var((0, 2, 3)), x.sum((0, 2, 3))), numbers(8, 16, 33, 32)),
    "scans": lambda: (
        lambda x: (x.cumprod(-1), x.logcumsumexp(0), x.logsumexp(1)), numbers(5, 9)),
    "long states": lambda: (_states, numbers(2, 3, 130), numbers(3, 8), numbers(2, 130, 8)),
    "long running weights": lambda: (_running_weights, numbers(192, 5)),
    "longer": lambda: (_running_weights, numbers(4096, 2)),
    "states": lambda: (_states, numbers(2, 3, 9), numbers(3, 8), numbers(2, 9, 8)),
    "states of odd size": lambda: (_states, numbers(2, 3, 9), numbers(3, 5), numbers(2, 9, 5)),
    "running weights": lambda: (_running_weights, numbers(3, 7, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    fn, *args = FUNCTIONS[name]()
    agree(fn, *args, tolerance=1e-3)


def test_parts_of_a_conjugated_input_that_are_written() -> None:
    mine, eagers = (torch.arange(6.0).view(2, 3) * (1 + 2j) for _ in range(2))
    fn: Callable[[Tensor], Tensor] = lambda z: z.conj().real.mul_(2)  # noqa: E731
    assert torch.equal(fusee.compile(fn, options={"prices": False})(mine), fn(eagers))
    assert torch.equal(mine, eagers)


def test_weights_whose_sum_is_another_kernels() -> None:
    """What is rounded to 16 bits before a sum is rounded before what the sum divides."""
    x = (numbers(7, 5) * 3).bfloat16()
    fn: Callable[[Tensor], Tensor] = lambda x: ((x + 1) * x).t().softmax(0)  # noqa: E731
    got = fusee.compile(fn, options={"prices": False, "cache": False})(x)
    torch.testing.assert_close(got.float().sum(0), torch.ones(7), rtol=0.01, atol=0)
    torch.testing.assert_close(got, fn(x), rtol=0.01, atol=1e-6)
