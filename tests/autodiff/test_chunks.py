"""Losses of wide products, which a memory budget makes work on a chunk of rows at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusee
from tests.autodiff.test_memory import peak

ROWS, WIDTH, CLASSES = 512, 32, 4096
Loss = Callable[..., Tensor]


def head(
    *,
    shift: bool = False,
    cast: bool = False,
    cap: float = 0,
    weighted: bool = False,
    **options: Any,
) -> Loss:
    """A linear layer and cross_entropy, with what models do between them."""

    def loss(h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(h, w, b)
        if cast and logits.dtype is torch.bfloat16:
            logits = logits.float()
        if cap:
            logits = cap * torch.tanh(logits / cap)
        if shift:
            logits, y = logits[:, :-1], y[:, 1:]
        if "ignore_index" in options:
            y = y.clamp(0)
        given = weight.to(logits.dtype) if weighted else None
        flat = logits.reshape(-1, logits.size(-1))
        found = F.cross_entropy(flat, y.reshape(-1), given, **options)
        return found if found.dim() == 0 else found.square().sum()

    return loss


def by_hand(h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, weight: Tensor) -> Tensor:
    """Two losses of the same logits, and no operator that is a loss."""
    logits = F.linear(h, w, b)
    all_of, labels = logits.logsumexp(-1), y.clamp(0).unsqueeze(-1)
    return (all_of - logits.gather(2, labels).squeeze(-1)).sum() + all_of.square().mean()


def entropy(h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, weight: Tensor) -> Tensor:
    logs = F.linear(h, w, b).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()


LOSSES = {
    "mean": head(),
    "sum": head(reduction="sum"),
    "none": head(reduction="none"),
    "ignored": head(ignore_index=7),
    "shift": head(shift=True),
    "cast": head(shift=True, cast=True),
    "weighted": head(shift=True, cast=True, weighted=True),
    "smoothed": head(shift=True, cast=True, label_smoothing=0.1),
    "capped": head(shift=True, cast=True, cap=5.0, reduction="sum"),
    "by hand": by_hand,
    "entropy": entropy,
}


def operands(dtype: torch.dtype, bias: bool = True) -> list[Any]:
    torch.manual_seed(0)
    h, w = torch.randn(2, ROWS // 2, WIDTH), torch.randn(CLASSES, WIDTH) * 0.3
    tensors = [x.to(dtype) for x in (h, w, torch.randn(CLASSES))]
    y = torch.randint(0, CLASSES, (2, ROWS // 2))
    y[0, :20] = -100
    y[1, 30:60] = 7
    return [*tensors[: 2 + bias], *[None] * (not bias), y, torch.rand(CLASSES) + 0.5]


def outcome(loss: Loss, given: list[Any], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x if x is None else x.detach().to(dtype).requires_grad_() for x in given[:3]]
    found = loss(*leaves, *given[3:])
    (found * 1.5).backward()
    return [found.detach(), *(x.grad for x in leaves if x is not None)]


def as_near(
    ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor], dtype: torch.dtype
) -> None:
    """Checks that results are as near to exact ones as eager's."""
    for x, y, z in zip(ours, theirs, exact, strict=True):
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        floor = 2 * torch.finfo(dtype).eps * z.norm()
        assert (x.double() - z).norm() <= max(2 * (y.double() - z).norm(), floor)


def chunked(loss: Any) -> bool:
    return any(re.search(r"in \d+ chunks", str(report)) for report in fusee.report(loss))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_as_near_as_eager_s(
    name: str, dtype: torch.dtype, bias: bool
) -> None:
    loss, given = LOSSES[name], operands(dtype, bias)
    step = fusee.compile(loss, options={"memory_budget": 0.5})
    ours, theirs = outcome(step, given, dtype), outcome(loss, given, dtype)
    assert chunked(step)
    exact = outcome(loss, given, torch.float64)
    as_near(ours, theirs, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mean", "sum", "cast", "smoothed", "by hand"])
def test_one_chunk_is_in_memory(name: str, dtype: torch.dtype) -> None:
    given = operands(dtype)
    peaks = []
    for budget in (0.5, 1.0):
        step = fusee.compile(LOSSES[name], options={"memory_budget": budget})
        outcome(step, given, dtype)
        assert chunked(step) is (budget < 1)
        leaves = [x.detach().requires_grad_() for x in given[:3]]

        def call(step: Any = step, leaves: Any = leaves) -> None:
            for x in leaves:
                x.grad = None
            step(*leaves, *given[3:]).backward()

        peaks.append(peak(call))
    assert peaks[0] < peaks[1] / 3
    assert peaks[0] < ROWS * CLASSES * 4 / 3


def test_a_whole_step_works_by_chunks() -> None:
    def train(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        w.grad = None
        loss = F.cross_entropy(F.linear(h, w).flatten(0, 1), y.flatten())
        loss.backward()
        return loss.detach()

    h, w, _, y, _ = operands(torch.float32)
    step = fusee.compile(train, options={"memory_budget": 0.5})
    found = []
    for function in (train, step):
        leaf = w.clone().requires_grad_()
        found.append((function(h, leaf, y), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=3e-5, atol=1e-6)
    assert chunked(step)


def test_a_label_out_of_bounds_is_eager_s_error() -> None:
    given = operands(torch.float32)
    given[3][1, 200] = CLASSES
    step = fusee.compile(LOSSES["mean"], options={"memory_budget": 0.5})
    with pytest.raises(IndexError) as theirs:
        outcome(LOSSES["mean"], given, torch.float32)
    with pytest.raises(IndexError) as ours:
        outcome(step, given, torch.float32)
    assert str(ours.value) == str(theirs.value)


def returned(h: Tensor, w: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten()), logits


def dropped(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(F.linear(h, w).flatten(0, 1), 0.1), y.flatten())


def mixed(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Each row needs the others."""
    logits = F.linear(h, w).flatten(0, 1)
    return F.cross_entropy(logits - logits.mean(0), y.flatten())


def layer(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """No loss is computed of the product, but a layer's result."""
    return (F.gelu(F.linear(h, w)) @ w).square().mean()


@pytest.mark.parametrize("loss", [returned, dropped, mixed, layer])
def test_left_alone(loss: Loss) -> None:
    h, w, _, y, _ = operands(torch.float32)
    found = []
    step = fusee.compile(loss, options={"memory_budget": 0.5})
    for function in (loss, step):
        leaves = [x.clone().requires_grad_() for x in (h, w)]
        torch.manual_seed(1)
        out: Any = function(*leaves, y)
        (out[0] if isinstance(out, tuple) else out).backward()
        found.append([x.grad for x in leaves])
    torch.testing.assert_close(found[0], found[1], rtol=3e-5, atol=1e-6)
    assert not chunked(step)
