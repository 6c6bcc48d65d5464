"""The state space scan of Mamba-2 models: segment sums, masks and products of large broadcasts.

Its values were once printed as trees, which never ended.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusee
from tests.autodiff.steps import compare
from tests.check import check


def segment_sum(x: Tensor) -> Tensor:
    size = x.shape[-1]
    seen = torch.ones(size, size, dtype=torch.bool)
    x = x[..., None].expand(*x.shape, size).masked_fill(~seen.tril(-1), 0).cumsum(-2)
    return x.masked_fill(~seen.tril(), -torch.inf)


def chunked_scan(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """x [batch, chunks, steps, heads, width], a the same without width, b and c without heads."""
    a = a.permute(0, 3, 1, 2)
    sums = a.cumsum(-1)
    scores = (c[:, :, :, None] * b[:, :, None]).sum(-1)
    weights = scores[..., None] * segment_sum(a).exp().permute(0, 2, 3, 4, 1)
    inside = (weights[..., None] * x[:, :, None]).sum(3)
    ends = (sums[..., -1:] - sums).exp().permute(0, 2, 3, 1)
    states = (b[:, :, :, None, None] * (ends[..., None] * x)[..., None]).sum(2)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1).permute(0, 2, 1, 3, 4)
    between = segment_sum(F.pad(sums[..., -1], (1, 0))).exp()
    moved = (between[..., None, None] * states[:, :, None]).sum(3)[:, :, :-1]
    read = (c[:, :, :, None, None] * moved.permute(0, 2, 1, 3, 4)[:, :, None]).sum(-1)
    return inside + read * sums.exp().permute(0, 2, 3, 1)[..., None]


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    x, a = torch.randn(2, 3, 8, 4, 5), -torch.rand(2, 3, 8, 4)
    return [x, a, torch.randn(2, 3, 8, 6), torch.randn(2, 3, 8, 6)]


def test_a_scan_in_chunks() -> None:
    check(chunked_scan, *operands())
    compare(chunked_scan, *(x.requires_grad_() for x in operands()))


@pytest.mark.parametrize("layers", [2, 6])
def test_it_compiles_in_a_moment(layers: int) -> None:
    def deep(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        for _ in range(layers):
            x = F.silu(chunked_scan(x, a, b, c)) + x
        return x

    begin = time.process_time()
    with torch.no_grad():
        fusee.compile(deep, fullgraph=True)(*operands())
    assert time.process_time() - begin < 20
