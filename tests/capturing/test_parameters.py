"""Integers that vary from call to call as parameters of operators: strides, powers, axes."""

# mypy: ignore-errors

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusee
from fusee.errors import FuseeWarning

T = Any
torch.manual_seed(0)
WEIGHTS = torch.nn.ParameterList([torch.randn(6, n, *[3] * m) for n, m in ((6, 2), (1, 2), (6, 1))])
CONV, PLANE, ROW = WEIGHTS
CLASSES, INDEX = torch.tensor([0, 3, 5, 2]), torch.tensor([1, 0, 2])

PROGRAMS: dict[str, Callable[[Tensor, int], Any]] = {
    "stride": lambda x, k: F.conv2d(x, CONV, stride=k),
    "padding": lambda x, k: F.conv2d(x, CONV, padding=k),
    "dilation": lambda x, k: F.conv2d(x, CONV, padding=2, dilation=k),
    "of two axes": lambda x, k: F.conv2d(x, CONV, stride=(k, 1), padding=(0, k)),
    "groups": lambda x, k: F.conv2d(x, CONV[:, : 6 // k], groups=k),
    "by planes": lambda x, k: F.conv2d(x, PLANE, stride=k, groups=6).relu(),
    "one axis": lambda x, k: F.conv1d(x[..., 0], ROW, stride=k, padding=k),
    "transposed": lambda x, k: F.conv_transpose2d(x, CONV, stride=k),
    "maxima": lambda x, k: F.max_pool2d(x, k, stride=1, padding=k // 2),
    "maxima of rows": lambda x, k: F.max_pool1d(x[..., 0], k, padding=k // 2),
    "means": lambda x, k: F.avg_pool2d(x, k, 1, k // 2, count_include_pad=False),
    "norms": lambda x, k: F.lp_pool2d(x.abs() + 1, k, 2),
    "unfold": lambda x, k: F.unfold(x, 3, stride=k, padding=1),
    "groups of a norm": lambda x, k: F.group_norm(x, k),
    "reflected": lambda x, k: F.pad(x, (k, 1, 0, k), mode="reflect"),
    "resized": lambda x, k: F.interpolate(x, scale_factor=k, mode="bilinear"),
    "shuffled": lambda x, k: F.pixel_shuffle(torch.cat([x] * (k * k), 1), k),
    "power": lambda x, k: x.abs() ** k,
    "exponent": lambda x, k: k**x,
    "squares": lambda x, k: torch.pow(x, k).sum(k),
    "power of integers": lambda x, k: (x * 9).long() ** k + x.sum().detach().long() * 0,
    "softshrink": lambda x, k: F.softshrink(x * 4, k),
    "threshold": lambda x, k: F.threshold(x, k / 4, k),
    "ignored": lambda x, k: F.cross_entropy(x[:, :, 0, 0], CLASSES, ignore_index=k),
    "ignored pixels": lambda x, k: F.nll_loss(
        x.log_softmax(1), (torch.arange(256) % 6).view(4, 8, 8), ignore_index=k
    ),
    "smoothed": lambda x, k: F.cross_entropy(x[:, :, 0, 0], CLASSES, label_smoothing=k / 10),
    "axis": lambda x, k: x.softmax(k).sum(k - 1),
    "places": lambda x, k: x.roll(k, -1).tril(k - 2).topk(k)[0],
    "steps": lambda x, k: x[:, ::k, ::k].sum((1, 2)),
    "a cut and a step": lambda x, k: x[:, k:, ::k].sum(2),
    "diagonal": lambda x, k: torch.diag_embed(x.diagonal(k - 2, 2, 3), k),
    "norm": lambda x, k: torch.linalg.vector_norm(x, k, -1),
    "correction": lambda x, k: x.std(-1, correction=k),
    "alpha": lambda x, k: torch.zeros(4, 6).index_add(0, INDEX, x[:3, :, 0, 0], alpha=k),
    "filled": lambda x, k: x.masked_fill(x > 0, k) + torch.full((8,), k),
    "decimals": lambda x, k: torch.round(x.detach(), decimals=k) + x,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("learns", [False, True])
def test_an_integer_that_varies(name: str, learns: bool) -> None:
    program = PROGRAMS[name]
    compiled = fusee.compile(program)
    for k in (1, 2, 3):
        x = torch.linspace(-2, 2, 4 * 6 * 8 * 8).cos().view(4, 6, 8, 8).requires_grad_(learns)
        found = []
        for run in (program, compiled):
            WEIGHTS.zero_grad()
            with torch.set_grad_enabled(learns), warnings.catch_warnings():
                warnings.simplefilter("error", FuseeWarning)
                made = run(x, k)
                leaves = [x, *WEIGHTS] if made.requires_grad else []
                if leaves:
                    tangent = torch.arange(made.numel()).view(made.shape).cos()
                    given = torch.autograd.grad(made, leaves, tangent, allow_unused=True)
                    made = made, *given
            found.append(made)
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
