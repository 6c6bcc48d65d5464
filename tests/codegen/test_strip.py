"""Reductions down columns: rows outside, vectors inside, partial sums of chunks of rows."""

from __future__ import annotations

import ctypes
import mmap
import sys
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


# ---------------------------------------------------------------------------- scans along rows

SCANS = {
    "cumsum": lambda x: (x.cumsum(-1), x.cumsum(1) * 2 + x),
    "cumprod": lambda x: x.clamp(0, 2).cumprod(-1),
    "cummax": lambda x: (x.cummax(-1), x.cummin(-1)),
}
FLOATS = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_scans_along_rows(name: str, dtype: torch.dtype, bits: int) -> None:
    for shape in [(5, 37), (3, 16), (9, 7), (2, 3, 130), (1, 64)]:
        x = (torch.randn(shape) * 3).abs().to(dtype)
        check(SCANS[name], x, capture="fx", options={"vector_bits": bits})


def test_products_of_a_scan_are_made_in_eagers_order() -> None:
    x = torch.tensor([[1e-30, *[1e30, 1e-30] * 20]], dtype=torch.float64) ** 10
    check(lambda x: x.cumprod(1), x, capture="fx")


# ---------------------------------------------------------------------------- every n-th element


@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool], ids=str
)
def test_every_nth_element(dtype: torch.dtype, bits: int) -> None:
    for apart in (2, 3, 5, 8, 9):
        x = (torch.randn(3, 67 * apart) * 8).to(dtype)
        check(
            lambda x, n=apart: (x[..., ::n] + 1, x[..., n - 1 :: n] + 2),
            x, capture="fx", options={"vector_bits": bits},
        )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="its way to forbid a page")
def test_nothing_is_read_behind_the_last_element() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    array = (ctypes.c_char * (2 * page)).from_buffer(memory)
    end = ctypes.addressof(array) + page
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(page), 0) == 0
    try:
        for dtype in (torch.float32, torch.uint8):
            whole = torch.frombuffer(memory, dtype=dtype, count=page // dtype.itemsize)
            for apart in (2, 3, 4, 7):
                x = whole[(whole.numel() - 1) % apart :: apart]
                assert x[-1:].data_ptr() == end - dtype.itemsize
                check(lambda x: x + 1, x, capture="fx")
    finally:
        libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(page), 3)


def test_group_norm_of_channels_last_reads_whole_lines() -> None:
    for groups in (1, 4, 16, 32):
        x = torch.randn(3, 32, 12, 11).to(memory_format=torch.channels_last)
        check(lambda x, n=groups: torch.group_norm(x, n), x, capture="fx")
    image = torch.randn(8, 64, 56, 56).to(memory_format=torch.channels_last)
    kernels = kernels_of(lambda x: torch.group_norm(x, 8), image)
    long = [text for text in (row.show() for row in kernels) if "range(112)" in text]
    assert len(long) == 2 and all("in range(64):  # lanes" in text for text in long)


def test_few_long_rows_are_summed_along_themselves() -> None:
    (chunks, _) = kernels_of(lambda x: x.sum(1), torch.randn(4, 50257 // 2 * 2))[:2]
    assert "# lanes" not in chunks.show()
