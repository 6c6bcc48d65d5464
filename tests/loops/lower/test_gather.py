"""Reading and writing at indices that are data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusee.loops import Loop
from tests.loops.interpret import IndexOutOfRange
from tests.loops.lower.against_eager import check

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(shape) * 4).abs().to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_gathers(dtype: torch.dtype, kind: torch.dtype) -> None:
    x, i = some(dtype, 4, 6, 8), torch.tensor([0, 3, 2]).to(kind)
    j = torch.tensor([[1], [-2]]).to(kind)
    check(lambda x, i, j: (x[:, i], x[i, i], x[i, :, i], x[j, i], x[:, j, :2]), x, i, j)
    check(lambda x, i: (x.index_select(1, i), F.embedding(i, x[:, 0])), x, i)


def test_gathers_with_long_indices() -> None:
    x, i = torch.randn(4, 6), torch.randint(0, 4, (3, 5))
    check(
        lambda x, i: (x.gather(0, i), x.gather(1, i), x.take(i), x.take_along_dim(i[:, :1], 0)),
        x,
        i,
    )
    check(lambda x, i: (x * 2 + 1)[i].sum(-1), x, i)
    check(lambda x: x.gather(0, torch.tensor(0)), torch.tensor(3.0))


@pytest.mark.parametrize("index", [6, -7])
def test_indices_out_of_range_are_reported(index: int) -> None:
    with pytest.raises(IndexOutOfRange, match="out of bounds"):
        check(lambda x, i: x[i], torch.randn(6), torch.tensor([index]))


def test_negative_indices_do_not_wrap_where_eager_refuses_them() -> None:
    with pytest.raises(IndexOutOfRange):
        check(lambda x, i: x.index_select(0, i + 0), torch.randn(6), torch.tensor([-1]))


def test_what_is_beside_a_pad_is_not_asked_for_its_index() -> None:
    """Places that are counted go on beyond the end there, and divisors are zeros."""
    x, y = torch.randn(5), torch.arange(1, 6)

    def padded(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        i = torch.arange(5)
        found = x[i], x.gather(0, i), x.index_select(0, i), x.take(i), y // y
        return *(F.pad(part, (1, 4)) for part in found), F.pad(F.embedding(i, x[:, None]), (0, 1))

    check(padded, x, y)
    check(lambda x: F.avg_pool1d(x[torch.arange(5)][None], 3, 2, 1), x)
    with pytest.raises(IndexOutOfRange, match="out of bounds"):
        check(lambda x: F.pad(x[torch.arange(6)], (1, 4)), x)


def test_masks_stay_calls() -> None:
    check(lambda x: x.where(x > 0, 0.0) + 1, torch.randn(4, 6))
    check(lambda x: x.index_put((x > 0,), torch.tensor(1.0)), torch.randn(4, 6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatters(dtype: torch.dtype) -> None:
    x, s = some(dtype, 4, 6), some(dtype, 4, 5)
    i = torch.randint(0, 4, (3, 5))
    check(lambda x, i, s: (x.scatter(0, i, s), x.scatter(1, i, 2), x.scatter_add(1, i, s)), x, i, s)
    for kind in ("sum", "prod", "amax", "amin"):
        check(lambda x, i, s: x.scatter_reduce(1, i, s, kind), x, i, s)  # noqa: B023
        check(lambda x, i, s: x.scatter_reduce(0, i, s, kind, include_self=False), x, i, s)  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_put(dtype: torch.dtype) -> None:
    x, v = some(dtype, 4, 6), some(dtype, 3, 6)
    i = torch.tensor([0, 3, 1])
    check(lambda x, i, v: (x.index_put((i,), v), x.index_put((i, i), v[:, 0])), x, i, v)
    twice = torch.tensor([0, 3, 3])
    check(lambda x, i, v: x.index_put((i,), v, accumulate=True), x, twice, v)
    check(lambda x, i, v: (x.index_add(0, i, v), x.index_add(0, i, v, alpha=2)), x, twice, v)
    check(lambda x, i, v: (x.index_copy(0, i, v), x.index_fill(1, i, 3)), x, i, v)
    check(lambda x, i, v: x.t().put(i[:, None] - 4, v[:, :1]), x, i, v)
    check(lambda x, i, v: x.put(i[:, None] - 4, v[:, :1], accumulate=True), x, twice, v)


def test_colliding_axes_are_ordered() -> None:
    graph = check(
        lambda x, i, s: x.scatter_add(1, i, s),
        torch.zeros(4, 6),
        torch.randint(0, 6, (4, 5)),
        torch.randn(4, 5),
    )
    copy, scatter = graph.steps
    assert isinstance(copy, Loop) and isinstance(scatter, Loop)
    assert scatter.mode == "add" and [axis.name for axis in scatter.ordered] == ["i1"]
    assert scatter.buffer is copy.buffer


def test_scatters_through_views() -> None:
    x, s = torch.randn(4, 6), torch.randn(6)
    check(lambda x, s: torch.diagonal_scatter(x, s[:4]), x, s)
    check(lambda x, s: torch.slice_scatter(x, s[None, :3].expand(4, 3), 1, 0, 6, 2), x, s)
    check(lambda x, s: torch.slice_scatter(x, s[None], 0, 1, 2) + 1, x, s)
    check(lambda x, s: torch.select_scatter(x, s, 0, -1), x, s)
    check(lambda x, s: torch.as_strided_scatter(x, s[:3], (3,), (2,), 1), x, s)
