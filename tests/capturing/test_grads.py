"""Gradients of what a graph computes, asked for behind it: each result knows those before it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee.errors import FuseeWarning
from tests.capturing.same import Traced
from tests.compare import assert_same

LINEAR = nn.Linear(4, 4)
LOG: list[str] = []
grad: Any = torch.autograd.grad  # takes any iterable


def said() -> None:
    LOG.append("a break")
    print(end="")


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    y = LINEAR(x).sin()
    return y, y.exp().sum()


def in_pieces(x: Tensor) -> tuple[Tensor, Tensor]:
    y = LINEAR(x).sin()
    said()
    return y, y.exp().sum()


def ask(loss: Tensor, y: Tensor) -> Any:
    return torch.autograd.grad(loss, y)


def listed(x: Tensor) -> Any:
    y, loss = both(x)
    return torch.autograd.grad(loss, [y])


def by_a_view_of_a_dict(x: Tensor) -> Any:
    y, loss = both(x)
    return grad(loss, {"y": y}.values())


def by_a_generator(x: Tensor) -> Any:
    y, loss = both(x)
    return grad(loss, (t for t in [y]))


def by_a_filter(x: Tensor) -> Any:
    y, loss = both(x)
    return grad(loss, filter(lambda t: t.requires_grad, [y]))


def by_an_edge(x: Tensor) -> Any:
    y, loss = both(x)
    return grad(loss, torch.autograd.graph.get_gradient_edge(y))


def behind_a_break(x: Tensor) -> Any:
    y, loss = both(x)
    said()
    return torch.autograd.grad(loss, y)


def by_another_function(x: Tensor) -> Any:
    y, loss = both(x)
    said()
    return ask(loss, y)


def of_a_callee_in_pieces(x: Tensor) -> Any:
    y, loss = in_pieces(x)
    return torch.autograd.grad(loss, y)


def several_in_a_chain(x: Tensor) -> Any:
    y = LINEAR(x).sin()
    z = y.exp()
    loss = (z * y).sum()
    said()
    return torch.autograd.grad(loss, [y, z])


def inputs_of_backward(x: Tensor) -> Any:
    y, loss = both(x)
    said()
    loss.backward(inputs=[y])
    return y.grad


def a_hook(x: Tensor) -> Any:
    y, loss = both(x)
    said()
    seen: list[Tensor] = []
    y.register_hook(seen.append)
    loss.backward()
    return seen


def a_kept_gradient(x: Tensor) -> Any:
    y, loss = both(x)
    said()
    y.retain_grad()
    loss.backward()
    return y.grad


def an_attention_map(x: Tensor) -> Any:
    y, loss = both(x)
    best = loss.item()
    (gradient,) = torch.autograd.grad(loss, y)
    return (gradient * y).relu().sum(), round(best, 3)


def steps_of_an_inner_loop(x: Tensor) -> Any:
    fast: dict[str, Tensor] = dict(LINEAR.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(LINEAR, fast, (x,)).square().mean()
        found = grad(loss, fast.values(), create_graph=True)
        fast = {key: p - 0.1 * g for (key, p), g in zip(fast.items(), found)}
    loss = torch.func.functional_call(LINEAR, fast, (x,)).square().mean()
    return torch.autograd.grad(loss, [*LINEAR.parameters()])


def after_a_write(x: Tensor) -> Any:
    y = LINEAR(x).sin()
    z = y.cos()
    z.mul_(2)
    loss = z.sum()
    said()
    return torch.autograd.grad(loss, [y, z])


def written_into_another(x: Tensor) -> Any:
    y = LINEAR(x).sin()
    z = LINEAR(x) * 2
    z[0] = y[1]
    loss = z.square().sum()
    said()
    return torch.autograd.grad(loss, [y, z])


def parts_of_one(x: Tensor) -> Any:
    y = LINEAR(x).sin()
    first, second = y.chunk(2, 1)
    loss = (first * second).sum()
    said()
    return torch.autograd.grad(loss, [first, y])


CASES = [
    listed, by_a_view_of_a_dict, by_a_generator, by_a_filter, by_an_edge, behind_a_break,
    by_another_function, of_a_callee_in_pieces, several_in_a_chain, inputs_of_backward, a_hook,
    a_kept_gradient, an_attention_map, steps_of_an_inner_loop, after_a_write, written_into_another,
    parts_of_one,
]  # fmt: skip


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_gradients_of_results(function: Callable[[Tensor], Any]) -> None:
    compiled = fusee.compile(function, options={"prices": False})
    for size in (2, 2, 3, 3):
        x = torch.randn(size, 4)
        LINEAR.zero_grad()
        want = function(x)
        LINEAR.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error", FuseeWarning)  # nothing runs eagerly
            got = compiled(x)
        assert_same(got, want)


class Net(nn.Module):
    """A model whose gradients somebody around it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x).relu()
        return self.head(h), h


class Trainer:
    def __init__(self) -> None:
        self.net = Net()

    def penalty(self, loss: Tensor, h: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss, h, create_graph=True)
        return found.square().sum()

    def step(self, x: Tensor) -> list[Tensor]:
        said()
        out, h = self.net(x)
        said()
        loss = out.logsumexp(1).sum()
        return [*torch.autograd.grad(loss + self.penalty(loss, h), [*self.net.parameters()])]


def test_a_method_that_asks_for_what_a_module_gave() -> None:
    trainer = Trainer()
    compiled = fusee.compile(trainer.step, options={"prices": False})
    for size in (2, 2, 3):
        x = torch.randn(size, 4)
        assert_same(compiled(x), trainer.step(x))


def test_what_nobody_asks_for_stays_one_graph() -> None:
    def step(x: Tensor) -> Any:
        y, loss = both(x)
        said()
        loss.backward()
        return y

    compiled = fusee.compile(step, options={"prices": False})
    compiled(torch.randn(2, 4))
    assert len(fusee.report(compiled)) == 1


def quantises(x: Tensor, codes: Tensor) -> Tensor:
    """As vector quantisers do whose codes are means of what was near them."""
    distances = x.pow(2).sum(1, keepdim=True) - 2 * x @ codes.t() + codes.pow(2).sum(1)
    nearest = distances.argmin(1)
    taken = codes[nearest]
    with torch.no_grad():
        codes.mul_(0.9)
    print(end="")
    return (x - taken).square().sum()


def test_a_graph_gives_no_gradient_of_what_nobody_reads() -> None:
    found, compiled = Traced(quantises), fusee.compile(quantises)
    gradients: list[Any] = []
    for run in (quantises, found, compiled):
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that the first graph runs eagerly
            run(x, torch.ones(4, 3).cumsum(0)).backward()
        gradients.append(x.grad)
    assert len(found.graphs) == 2
    assert all(torch.equal(one, gradients[0]) for one in gradients)


def test_who_looks_at_frames_finds_what_nobody_reads() -> None:
    def looks(x: Tensor) -> Any:
        y = x.exp()  # noqa: F841
        x.detach().mul_(2)
        print(end="")
        return sorted(inspect.currentframe().f_locals)  # type: ignore[union-attr]

    assert fusee.compile(looks)(torch.ones(2, requires_grad=True)) == ["x", "y"]
