"""Embeddings with sparse=True: gradients are eager's sparse tensors, and all else is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusee
from tests.autodiff.steps import BACKENDS, compiled, copies

ROWS = torch.tensor([[1, 2], [2, 0]])


def one(w: Tensor, x: Tensor) -> Tensor:
    return F.embedding(ROWS, w, sparse=True).sin() @ x


def padded(w: Tensor, x: Tensor) -> Tensor:
    return F.embedding(ROWS, w, padding_idx=2, sparse=True).sin() @ x


def twice(w: Tensor, x: Tensor) -> Tensor:
    a, b = (F.embedding(ROWS + k, w, sparse=True) for k in range(2))
    return (a * b).exp() @ x


def tied(w: Tensor, x: Tensor) -> Tensor:
    return (F.embedding(ROWS, w, sparse=True) @ x).tanh() @ w.t()


def itself(w: Tensor, x: Tensor) -> Tensor:
    return F.embedding(ROWS[0], w, sparse=True)


def two_results(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return F.embedding(ROWS, w, sparse=True).cos(), F.embedding(ROWS[1], w * 1, sparse=False) @ x


def gradients(function: Callable[..., Any], given: list[Tensor]) -> list[Any]:
    out = function(*given)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given, allow_unused=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [one, padded, twice, tied, itself, two_results])
def test_gradients(function: Callable[..., Any], backend: str) -> None:
    torch.manual_seed(0)
    given = [torch.randn(5, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]
    call = compiled(function, backend)
    for _ in range(2):
        for ours, theirs in zip(gradients(call, given), gradients(function, given), strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is None:
                continue
            assert ours.layout is theirs.layout
            if theirs.is_sparse:
                assert ours.is_coalesced() == theirs.is_coalesced()
                assert torch.equal(ours._indices(), theirs._indices())
                ours, theirs = ours._values(), theirs._values()
            torch.testing.assert_close(ours, theirs)


def test_what_becomes_of_a_sparse_gradient_in_the_graph() -> None:
    def step(w: Tensor) -> Tensor:
        return F.embedding(ROWS, w * 2, sparse=True).sum()

    torch._dynamo.reset()
    found = []
    for call in (step, torch.compile(step, backend="fusee")):
        w = torch.ones(5, 4, requires_grad=True)
        call(w).backward()
        assert w.grad is not None
        found.append(w.grad.to_dense())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD])
def test_training_steps(make: Any) -> None:
    torch.manual_seed(0)
    weights = nn.Embedding(6, 4, sparse=True).weight.detach()
    found = []
    for wrap in (fusee.compile, lambda step: step):
        model = nn.Embedding(6, 4, sparse=True, _weight=copies([weights])[0])
        optimizer = make(model.parameters(), lr=0.1)

        def step(model: nn.Module, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(ROWS).sin().square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        found.append(([run(model).item() for _ in range(4)], model.weight.detach()))
    (ours, x), (theirs, y) = found
    assert ours == pytest.approx(theirs, rel=1e-5)
    torch.testing.assert_close(x, y)


def test_a_tangent_that_is_sparse() -> None:
    linear, x = torch.nn.Linear(4, 2), torch.randn(3, 4, requires_grad=True)
    run = fusee.compile(linear, options={"prices": False})
    for _ in range(2):
        tangent = torch.eye(3, 2).to_sparse()
        (got,), (want,) = (torch.autograd.grad(f(x), x, tangent) for f in (run, linear))
        torch.testing.assert_close(got, want)
