"""Programs with branches on a tensor's value of which one side raises.

Not beside their tests, whose asserts pytest writes anew.
"""

# Programs under test: mistakes are meant.
# mypy: ignore-errors

from __future__ import annotations

import math

import torch
from torch import nn


def with_message(x):
    b = x.sin()
    assert x[0] == 3, "the first is three"
    return x.cos() + b


def without_message(x):
    assert (x > 0).all()
    return x * 2


def a_number_as_truth(x):
    assert x.sum()
    return x + 1


def of_two(x):
    with torch.no_grad():
        assert (x > 0).all() and x.sum() < 100, x.shape
        return x * 3


def of_one_of_two(x):
    if (x < 0).any() or (x > 9).any():
        raise ValueError(f"{x.min()} is out of range")
    return x * 2


def negated(x):
    if not x.sum():
        raise KeyError("zero")
    return x * 3


def checked(x):
    if torch.isnan(x / x).any():
        raise RuntimeError(torch.isnan(x / x).sum())
    return x / x


def in_torchs_own(x):
    return nn.functional.gaussian_nll_loss(x, x.roll(1), x)


def in_a_callee(x):
    return checked(x) + checked(x + 1)


def effects_before(x):
    log = []
    log.append(x.shape)
    y = torch.rand(3)
    assert x.mean() < 3.5, log
    return x + y, log


def caught(x):
    try:
        assert (x > 0).all()
    except AssertionError:
        return x - 1
    return x + 1


def within_finally(x):
    log = []
    try:
        assert (x > 0).all(), log
    finally:
        log.append("over")
    return x + 1, log


def after_a_write(x):
    x.add_(1)
    assert (x > 0).all(), "not positive"
    return x * 2


class Until:
    def __init__(self, x):
        self.x, self.k = x, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.k += 1
        if self.x.sum() < self.k * 5:
            raise StopIteration
        return self.x * self.k


def asked_for_more(x):
    return list(Until(x))


def of_numbers(x):
    y = x.mean().item()
    if not math.isfinite(y) or math.isnan(y):
        raise ValueError(f"mean is {y}")
    if x[0].item() < 0:
        raise ValueError("negative")
    assert x.any().item(), "all are zero"
    return x * 2, y


def of_a_double(x):
    """0.1 is another number in float32."""
    if (x[0] * 0 + 0.1).item() == 0.1:
        raise ValueError("as float32")
    return x + 1


class Checking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        assert torch.isfinite(x).all(), "not finite"
        return self.linear(x).relu()
