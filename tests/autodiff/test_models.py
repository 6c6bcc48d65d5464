"""Whole models in train mode: some steps against eager, float64 arbitrates. All of them:
scripts/train_models.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.autodiff.steps import check_training
from tests.models import zoo

SGD = lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)  # noqa: E731
ADAMW = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)  # noqa: E731


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


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_convolutional(optimizer: Any) -> None:
    torch.manual_seed(0)
    module = Convolutional()
    batches = [[torch.randn(8, 3, 16, 16), torch.randint(5, (8,))] for _ in range(5)]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    check_training(module, loss, batches, optimizer=optimizer)


@pytest.mark.parametrize("name", ["gpt2"])
def test_language_model(name: str) -> None:
    module, args, kwargs = zoo.load(name, "test")

    def loss(model: nn.Module, *given: Any) -> Tensor:
        out: Tensor = model(*given, **kwargs)[0]
        return out.square().mean()

    check_training(module.train(), loss, [list(args)] * 3, optimizer=SGD)
