"""Results that the loss does not use: no gradient comes through them, and none is made of zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fusee
from fusee import backends
from tests.autodiff.steps import BACKENDS, compare, compiled

Results = tuple[Tensor, ...]


def rand(*size: int) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(sum(size))).requires_grad_()


def loss_and_logits(x: Tensor, w: Tensor) -> Results:
    logits = x @ w
    return logits.exp().sum(), logits, logits.t()[1:]


def sums(x: Tensor, w: Tensor) -> Results:
    h = (x * w).tanh()
    return h * 2, (h.t() + 1).t() * w, h.view(-1)[3:], torch.cat([h, w], 1)


def parts(x: Tensor, w: Tensor) -> Results:
    a, b, c = (x @ w).t().contiguous().t().unbind(0)
    return a * b, torch.stack([b, c]), torch.std_mean(x, 0)[0], c.expand(2, 3)


class Twofold(torch.autograd.Function):
    """Has a backward that is not zero for gradients of zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Results:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return (grads[0] + 1) * 2 + (grads[1] + 5) * 3


def own_function(x: Tensor, w: Tensor) -> Results:
    a, b = Twofold.apply(x * w)
    return a, b, w.sin()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [loss_and_logits, sums, parts, own_function])
def test_each_result_alone_and_all(function: Callable[..., Results], backend: str) -> None:
    """The gradients are eager's, and None where they are."""
    inputs = rand(3, 3), rand(3, 3).detach().add(1).requires_grad_()
    for k in range(len(function(*inputs))):

        def loss(results: list[Tensor], k: int = k) -> Tensor:
            return results[k].sum()

        compare(function, *inputs, backend=backend, loss=loss)
    compare(function, *inputs, backend=backend)


def test_an_infinite_derivative_of_another_result() -> None:
    def roots(x: Tensor) -> Results:
        return x.sqrt(), x * 3

    x = torch.zeros(4, requires_grad=True)
    compiled(roots)(x)[1].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0] * 4


def test_a_result_whose_gradients_are_zero_requires_them() -> None:
    fn = fusee.compile(lambda x: (x.sin(), x.round()), options={"prices": False})
    for x in (rand(3), rand(3) * 1):
        assert all(y.requires_grad for y in fn(x))


def test_symbolic_sizes() -> None:
    def step(x: Tensor, w: Tensor) -> Results:
        return (x @ w).sum(), (x * 2).t() + 1, x.sin()

    call = compiled(step, dynamic=True)
    for rows in (3, 5):
        for k in range(3):
            x, w = rand(rows, 4), rand(4, 2)
            found = torch.autograd.grad(call(x, w)[k].sum(), [x, w], allow_unused=True)
            expected = torch.autograd.grad(step(x, w)[k].sum(), [x, w], allow_unused=True)
            torch.testing.assert_close(found, expected)


def test_one_backward_for_each_set_of_results_that_a_loss_used() -> None:
    made: list[fx.GraphModule] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made.append(gm)
        return gm.forward

    def count(target: Any) -> int:
        return len(made[-1].graph.find_nodes(op="call_function", target=target))

    torch._dynamo.reset()
    step = torch.compile(loss_and_logits, backend=backends.aot(fw_compiler=compiler))
    x, w = rand(3, 3), rand(3, 3)
    for _ in range(2):
        step(x, w)[0].backward()
    assert len(made) == 2
    assert count(torch.ops.aten.add.Tensor) == count(torch.ops.aten.full.default) == 0
    for _ in range(2):
        torch.stack([y.sum() for y in step(x, w)]).sum().backward()
    assert len(made) == 3 and count(torch.ops.aten.add.Tensor) == 1


def test_a_piece_that_no_loss_came_through() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        steps = (x.detach() * w).exp().ceil()
        count = int(steps.sum())  # ends the first graph, all of whose results the second compares
        return (x * (torch.arange(count)[:, None, None] < steps)).sum()

    for backend in BACKENDS:
        x, w = rand(3, 4), rand(3, 4)
        fusee.compile(f, backend=backend)(x, w).backward()
        assert x.grad is not None and w.grad is None


def test_a_write_to_a_result_that_the_loss_did_not_use() -> None:
    """What the backward of another result saved may be written to between two graphs."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        loss, other = (x * 2).sum(), y.sum()
        print(end="")
        y.mul_(2)
        return loss, other

    compiled = fusee.compile(fn)
    for _ in range(2):
        ours, theirs = (torch.tensor([0.5, -1.0], requires_grad=True) for _ in range(2))
        found, wanted = compiled(ours), fn(theirs)
        for k in range(2):
            found[0].backward(retain_graph=k == 0)
            wanted[0].backward(retain_graph=k == 0)
        torch.testing.assert_close(ours.grad, theirs.grad)
        for result in (found[1], wanted[1]):
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                result.backward()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kept", [False, True])
def test_passes_that_keep_the_graph_free_no_part(first: int, kept: bool) -> None:
    def fn(x: Tensor) -> Results:
        return x.exp() * 2, x.sin().sum()

    told: list[list[Any]] = []
    for call in (fn, fusee.compile(fn)):
        x = rand(3)
        said: list[Any] = []
        results = call(x)
        steps = [(first, kept), *((1 - first, keep) for keep in (True, True, False, False))]
        for number, keep in [*steps, (first, False), (first, False)]:
            try:
                results[number].sum().backward(retain_graph=keep)
            except RuntimeError as error:
                said.append(str(error)[:40])
            else:
                assert x.grad is not None
                said.append(x.grad.clone())
        told.append(said)
    for want, got in zip(*told, strict=True):
        assert type(want) is type(got), told
        torch.testing.assert_close(got, want) if isinstance(want, Tensor) else None
