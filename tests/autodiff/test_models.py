"""Whole models in train mode: some steps against eager, float64 arbitrates. All of them:
scripts/train_models.py, which wrote tests/models/TRAINING.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.autodiff.training import OPTIMIZERS, check_training
from tests.models import zoo


class Convolutional(nn.Module):
    """What convolutional networks are made of, on images large enough for batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.apart = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16)
        self.point = nn.Conv2d(16, 32, 1)
        self.group = nn.GroupNorm(4, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.stem(x)), inplace=True), 2)
        y = F.hardswish(self.group(self.point(self.apart(y)) + y[:, :1, ::2, ::2]))
        found: Tensor = self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))
        return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_convolutional(optimizer: str) -> None:
    torch.manual_seed(0)
    module = Convolutional()
    batches = [[torch.randn(8, 3, 16, 16), torch.randint(5, (8,))] for _ in range(5)]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    check_training(module, loss, batches, OPTIMIZERS[optimizer])


@pytest.mark.parametrize(
    ("name", "optimizer"), [("mobilenet_v3_small", "sgd"), ("bert", "adamw"), ("gpt2", "sgd")]
)
def test_model(name: str, optimizer: str) -> None:
    """Batch norm and squeeze-and-excitation; attention with a mask; dropout in all of them."""
    row = zoo.MODELS[name]
    settings = {**row.test, "batch": 8, "pixels": 64} if name == "mobilenet_v3_small" else row.test
    torch.manual_seed(0)
    module = row.build(**settings).train()
    args, kwargs = row.inputs(**settings)

    def loss(model: nn.Module, *given: Any) -> Tensor:
        named = dict(zip(kwargs, given[len(args) :], strict=True))
        out = model(*given[: len(args)], **named)
        first: Tensor = out if isinstance(out, Tensor) else out[0]
        return (first - 1).square().mean()

    batches = [[*args, *kwargs.values()]] * 3
    found = check_training(module, loss, batches, OPTIMIZERS[optimizer])
    assert found["first gradients"].eager < 1e-5  # else nothing was shown
