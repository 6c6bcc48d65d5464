"""Pooling and upsampling against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusee.loops import Loop, walk
from tests.loops.lower.against_eager import check, check_op

aten = torch.ops.aten

POOLS: dict[str, Callable[[Tensor], object]] = {
    "max": lambda x: (F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, (2, 3), 1, 0, (1, 2))),
    "max with indices": lambda x: F.max_pool2d(x, (5, 4), 2, 2, return_indices=True),
    "max, ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True),
    "avg": lambda x: (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 5, 1, 2)),
    "avg without pad": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg, ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=5),
    "adaptive": lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (2, 3))),
    "adaptive, uneven": lambda x: F.adaptive_avg_pool2d(x, (4, 7)),
    "of computed": lambda x: F.max_pool2d(F.relu(x * 2 + 1), 3, 2, 1) * 2,
}
LAYOUTS = [torch.contiguous_format, torch.channels_last]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_window(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 6, 9).to(dtype).to(memory_format=layout)
    if "adaptive" not in name:
        check(POOLS[name], x)
    for size in ([1, 1], [2, 3], [4, 7]):
        check_op(aten._adaptive_avg_pool2d.default, x, size)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(12, 18), (7, 5), (18, 27), (6, 9), (1, 1)], ids=str)
def test_upsampling(size: tuple[int, int], dtype: torch.dtype, layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 6, 9).to(dtype).to(memory_format=layout)
    check_op(aten.upsample_nearest2d.vec, x, list(size), None)
    check_op(aten._upsample_nearest_exact2d.vec, x, list(size), None)
    for aligned in (False, True):
        check_op(aten.upsample_bilinear2d.vec, x, list(size), aligned, None)
        check_op(aten.upsample_bicubic2d.vec, x, list(size), aligned, None)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_known_places_of_what_is_resampled(mode: str) -> None:
    """A row that a program picks, and those that a pad mirrors, have numbers in place of axes."""
    x = torch.randn(2, 3, 6, 9)
    for size in ((12, 18), (7, 5), (3, 4)):

        def fn(x: Tensor, size: tuple[int, int] = size) -> tuple[Tensor, ...]:
            y = F.interpolate(x, size, mode=mode)
            picked = y[..., 2], y[:, :, -1], F.pad(y, (2, 1, 0, 1), mode="reflect")
            return (
                *picked,
                F.pad(y, (1, 2, 0, 0), mode="replicate"),
                torch.cat((y[..., 1:2], y), -1),
            )

        check(fn, x)


def test_upsampling_by_factors() -> None:
    x = torch.randn(2, 3, 6, 9)
    for factors in ([2.0, 3.0], [1.7, 0.6], [2.3, 2.3]):
        check_op(aten.upsample_nearest2d.vec, x, None, factors)
        check_op(aten.upsample_bilinear2d.vec, x, None, False, factors)
        check_op(aten.upsample_bicubic2d.vec, x, None, False, factors)
    check_op(aten.upsample_nearest2d.default, x, [12, 20])
    check_op(aten.upsample_bilinear2d.default, x, [12, 20], False, 2.1, 2.3)
    check_op(aten.upsample_linear1d.vec, x[0], None, False, [2.0])
    check_op(aten.upsample_trilinear3d.vec, x[None], [4, 5, 6], True, None)


def test_other_ranks() -> None:
    check(lambda x: (F.max_pool1d(x, 3, 2, 1), F.avg_pool1d(x, 2)), torch.randn(2, 3, 9))
    check(lambda x: (F.max_pool3d(x, 2), F.avg_pool3d(x, 2)), torch.randn(2, 3, 4, 5, 6))
    check(lambda x: F.adaptive_avg_pool1d(x, 4), torch.randn(2, 3, 9))
    x = torch.randn(1, 3, 5, 7, 6)
    check(lambda x: (F.avg_pool3d(x, 3, 2, 1), F.max_pool3d(x, (3, 1, 6), 1)), x)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_large_windows_that_overlap(layout: torch.memory_format) -> None:
    x = torch.randn(2, 4, 13, 11).to(memory_format=layout)
    x[0, 0, 4, 5], x[1, 2, 3, 3] = float("nan"), float("inf")
    for dtype in DTYPES:
        check(lambda x: F.avg_pool2d(x, 5, 2, 2, count_include_pad=False), x.to(dtype))
        check(lambda x: F.max_pool2d(x, (3, 7), 1, (1, 3), (2, 1)), x.to(dtype))
        check(lambda x: F.avg_pool2d(x, (1, 17), (1, 3), (0, 8)), x.to(dtype))


BLOCKS = [
    ((3, 3), (1, 1), (1, 1), (1, 1)), ((2, 3), (2, 1), (0, 2), (1, 1)),
    ((2, 3), (1, 1), (0, 0), (2, 3)), ((4, 2), (1, 1), (0, 0), (4, 2)),
    ((3, 5), (2, 1), (2, 1), (1, 3)), ((3, 3), (1, 1), (0, 0), (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", BLOCKS, ids=str)
def test_blocks_as_columns(given: Any, dtype: torch.dtype, layout: torch.memory_format) -> None:
    """Unfolded and folded: those that overlap, lie apart, or leave some pixels out."""
    x = torch.randn(2, 3, 9, 11).to(dtype).to(memory_format=layout)
    columns = F.unfold(x, *given)
    check_op(aten.im2col.default, x, *given)
    check_op(aten.im2col.default, x[0], *given)
    if given[3] == (1, 1) or given[3] == given[0]:
        check_op(aten.col2im.default, columns, (9, 11), *given)
        check_op(aten.col2im.default, columns[0], (9, 11), *given)


def test_blocks_of_a_column_that_lies_as_a_row() -> None:
    """Strides along axes of one element are anybody's, and a part begins within what is stored."""
    for rows in (2, 3):
        check(lambda x: F.unfold(x.T.tanh().T[None], 2, padding=1), torch.randn(rows, 1))
        check(lambda x: F.unfold(x.tanh()[:, 1:].T[None], 2, padding=1), torch.randn(1, rows + 1))


def test_special_values() -> None:
    x = torch.randn(1, 1, 6, 6)
    x[0, 0, 2, 2], x[0, 0, 5] = float("nan"), -float("inf")
    check(lambda x: F.max_pool2d(x, 2), x)
    lowest = torch.full((1, 1, 3, 3), -float("inf"))
    check(lambda x: F.max_pool2d(x, 2, 1, 1, return_indices=True), lowest)


# kernel, stride, padding, dilation, ceil mode
OVERLAPPING = [
    ([3, 3], [2, 2], [1, 1], [1, 1], False),
    ([2, 2], [2, 2], [0, 0], [1, 1], True),
    ([2, 4], [1, 2], [1, 2], [1, 1], False),
    ([2, 2], [], [0, 0], [3, 2], False),
    ([3, 2], [4, 5], [1, 0], [1, 1], True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("windows", OVERLAPPING, ids=str)
def test_gradients_of_maxima(
    windows: tuple[object, ...], dtype: torch.dtype, layout: torch.memory_format
) -> None:
    x = torch.randn(2, 3, 6, 9).relu().to(dtype).to(memory_format=layout)  # with many equal ones
    x[0, 0, 1:3, 2:4], x[1, 1] = float("nan"), -float("inf")
    y, places = aten.max_pool2d_with_indices.default(x, *windows)
    back = aten.max_pool2d_with_indices_backward.default
    graph = check_op(back, torch.randn_like(y.nan_to_num()), x, *windows, places)
    assert all(isinstance(step, Loop) for step in graph.steps)
    check_op(aten.max_pool2d_with_indices.default, x, *windows)


def test_gradients_of_other_maxima() -> None:
    """Images of three axes; windows that an element has too many of."""
    back = aten.max_pool3d_with_indices_backward.default
    for kernel, is_loop in ((2, True), (3, False)):
        windows = [kernel] * 3, [1] * 3, [0] * 3, [1] * 3, False
        x = torch.randn(2, 3, 4, 5, 6)
        y, places = aten.max_pool3d_with_indices.default(x, *windows)
        allow = () if is_loop else ("max_pool3d_with_indices_backward",)
        graph = check_op(back, torch.randn_like(y), x, *windows, places, allow=allow)
        assert all(isinstance(step, Loop) for step in graph.steps) == is_loop


def test_whole_factors_need_no_data_dependent_index() -> None:
    graph = check_op(aten.upsample_nearest2d.vec, torch.randn(1, 2, 4, 4), None, [2.0, 2.0])
    (loop,) = graph.steps
    assert isinstance(loop, Loop)
    assert not any(value.op == "cast" for value in walk([loop.value]))


def test_windows_of_unequal_length_are_summed_up_axis_by_axis() -> None:
    """Nine elements picked for each of 20 x 20 results took longer than three, twice."""
    x = torch.randn(2, 4, 28, 28).to(memory_format=torch.channels_last)
    graph = check_op(aten._adaptive_avg_pool2d.default, x, [20, 20])
    loops = [step for step in graph.steps if isinstance(step, Loop)]
    assert [len(loop.reduce_axes) for loop in loops if loop.reduce_axes] == [1, 1]
    assert all(loop.buffer.strides[1] == 1 for loop in loops), "channels lie last throughout"
