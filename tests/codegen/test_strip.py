"""Reductions down columns: rows outside, vectors inside, partial sums of chunks of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusee.backends import lookup
from tests.aten.harness import one_node
from tests.check import check

SHAPES = [(1024, 200), (37, 5), (5000, 17), (17, 1100)]


def several(x: Tensor) -> Any:
    """Accumulators of all kinds, one that reads another, and rows that are stored."""
    return x.sum(0), x.amax(0), x.argmin(0), (x > 0).any(0), x.var(0), torch.softmax(x, 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_columns(shape: tuple[int, int]) -> None:
    check(several, torch.randn(shape), capture="fx")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x = (torch.randn(200, 150) * 8).to(dtype)
    check(lambda x: (x.sum(0), x.amax(0), x.argmax(0), x * 2 - x.amin(0)), x, capture="fx")


def test_inner_axes() -> None:
    x = torch.randn(3, 40, 6, 7)
    check(lambda x: (x.softmax(1), x.sum((0, 2)), x.sum(1), x.cumsum(1), x.max(1)), x, capture="fx")
    image = torch.randn(8, 70, 20, 20).to(memory_format=torch.channels_last)
    check(lambda x: (x.sum((0, 2, 3)), x.relu() - x.mean((0, 2, 3), True)), image, capture="fx")


def kernels_of(fn: Any, *args: Tensor) -> Any:
    compiled: Any = lookup("fusee")(one_node(fn, list(args)), list(args))
    return compiled.report().kernels


def test_few_columns_are_summed_in_chunks_of_rows() -> None:
    def total(x: Tensor) -> Tensor:
        return x.sum(0)

    assert len(kernels_of(total, torch.randn(4096, 64))) == 2
    assert len(kernels_of(total, torch.randn(64, 64))) == 1


def test_sum_takes_in_what_it_adds_up() -> None:
    def bias(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sigmoid(x)
        return y, y.sum((0, 1))

    x = torch.randn(8, 32, 512)
    check(bias, x, capture="fx")
    assert len(kernels_of(bias, x)) == 2


def test_sizes_left_open() -> None:
    """Chunks are as long as the example's rows suggest; other calls have fewer or more of them."""
    a = torch.randn
    again = [(a(3, 200),), (a(77, 33),), (a(2000, 5),)]
    check(lambda x: (x.sum(0), x.softmax(0)), a(600, 200), dynamic=True, again=again)
    again = [(a(2, 3, 300),), (a(16, 200, 7),)]
    check(lambda x: x.sum((0, 1)), a(8, 64, 300), dynamic=True, again=again)
