"""Reductions, scans, softmax and norms against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusee
from fusee.loops import Loop
from fusee.loops.associative import SCAN, combine_of
from tests.loops.lower.against_eager import check, check_op, lowered

aten = torch.ops.aten

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

REDUCTIONS: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda x: (
        x.sum(),
        x.sum(1),
        x.sum((0, 2), keepdim=True),
        x.sum(1, dtype=torch.float32),
    ),
    "prod": lambda x: (x.prod(), x.prod(1)),
    "amax": lambda x: (x.amax(1), x.amin((0, 1)), x.max(), x.min()),
    "max": lambda x: (x.max(1), x.min(-1, keepdim=True)),
    "argmax": lambda x: (x.argmax(), x.argmax(1), x.argmin(-1, keepdim=True)),
    "any": lambda x: (x.any(), x.all(1), (x > 0).any(-1), (x > 0).all((0, 1))),
    "count": lambda x: (torch.count_nonzero(x), torch.count_nonzero(x, 1)),
    "cumsum": lambda x: (x.cumsum(0), x.cumsum(-1), x.cumprod(1)),
    "cummax": lambda x: (x.cummax(1), x.cummin(-1)),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
}
MOMENTS: dict[str, Callable[[Tensor], object]] = {
    "mean": lambda x: (x.mean(), x.mean(1), x.mean((0, 2), keepdim=True)),
    "var": lambda x: (x.var(), x.var(1, correction=0), x.std((0, 2)), torch.var_mean(x, 1)),
    "logsumexp": lambda x: (x.logsumexp(1), x.logsumexp((0, 1))),
    "norm": lambda x: (
        x.norm(), x.norm(1, 1), x.norm(float("inf"), 1), torch.linalg.vector_norm(x, 3.5, -1),
        torch.linalg.vector_norm(x, 0),
    ),
    "softmax": lambda x: (x.softmax(-1), x.softmax(0), x.log_softmax(1)),
    "layer_norm": lambda x: F.layer_norm(x, (6, 8)[1:]),
    "group_norm": lambda x: F.group_norm(x, 3),
}  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool], ids=str
)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 8) * 3
    fn = REDUCTIONS[name]
    x = x.abs().to(dtype) if dtype in (torch.uint8, torch.bool) else x.to(dtype)
    try:
        fn(x)
    except (RuntimeError, NotImplementedError):
        pytest.skip("eager refuses")
    check(fn, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name: str, dtype: torch.dtype) -> None:
    check(MOMENTS[name], torch.randn(4, 6, 8).to(dtype))


@pytest.mark.parametrize("name", [*REDUCTIONS, *MOMENTS])
def test_reduction_of_a_computed_permuted_tensor(name: str) -> None:
    fn = {**REDUCTIONS, **MOMENTS}[name]
    check(lambda x: fn(x.permute(2, 0, 1) * 2 + 1), torch.randn(6, 8, 4))


def test_special_values() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, nan, 2.0], [inf, -inf, 3.0], [-inf, -inf, -inf], [inf, inf, 1.0]])
    check(
        lambda x: (x.amax(1), x.argmax(1), x.logsumexp(1), x.softmax(1), x.cummax(1), x.sum(1)), x
    )


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 0), (2, 1, 1)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    check(lambda x: (x.sum(), x.mean(), x.prod(), x.any()), x)
    if shape:
        check(lambda x: (x.sum(0), x.cumsum(0), x.softmax(0), x.all(-1)), x)


def _recurrence(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
    return a * c, c * b + d


def _weighted(m: Tensor, s: Tensor, n: Tensor, t: Tensor) -> Any:
    top = torch.maximum(m, n)
    return top, s * torch.exp(m - top) + t * torch.exp(n - top)


def _latest(f: Tensor, x: Tensor, g: Tensor, y: Tensor) -> Any:
    return f | g, torch.where(g, y, x)


FOLDS: dict[str, tuple[Any, tuple[torch.dtype, ...]]] = {
    "recurrence": (_recurrence, (torch.float32, torch.float32)),
    "of two dtypes": (_recurrence, (torch.bfloat16, torch.float32)),
    "of halves": (_recurrence, (torch.float16, torch.float16)),
    "weights": (_weighted, (torch.float64, torch.float64)),
    "integers": (torch.add, (torch.int32,)),
    "the latest": (_latest, (torch.bool, torch.float32)),
    "the right one": (lambda x, y: y, (torch.float32,)),
    "filled": (lambda x, y: x + y + torch.zeros_like(x), (torch.float32,)),
}


@pytest.mark.parametrize("shape", [(6, 3, 4), (7,), (1, 3), (3, 0)])
@pytest.mark.parametrize("name", FOLDS)
def test_scans_by_a_function(name: str, shape: tuple[int, ...]) -> None:
    function, dtypes = FOLDS[name]
    combine = combine_of(function, dtypes, len(shape))
    assert combine is not None
    xs = [(torch.randn(shape) * 2).to(dtype) for dtype in dtypes]
    check(lambda *xs: [x.clone() for x in SCAN([*xs], combine.text)], *xs)
    check(lambda *xs: SCAN([*xs], combine.text)[-1].clone(), *xs)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x @ y,
        lambda x, y: x * y + y,  # not associative
        lambda x, y: x.mul_(y),
        lambda x, y: x + y.flip(0),
        lambda x, y: x + y + torch.ones(2, 2),
        lambda x, y: (x + y).double(),
        lambda x, y: x + y + torch.rand_like(x),
        lambda x, y: (x + y)[0],
    ],
)
def test_functions_that_are_not_of_elements_make_no_loop(function: Any) -> None:
    assert combine_of(function, [torch.float32], 2) is None


def test_affine_norms() -> None:
    x, w, b = torch.randn(2, 4, 5, 6), torch.randn(4), torch.randn(4)
    for dtype in FLOATS:
        inference = aten._native_batch_norm_legit_no_training.default
        kind = torch.float32 if dtype.itemsize == 2 else dtype
        rows = [t.to(kind) for t in (w, b, b, w.abs())]
        check_op(inference, x.to(dtype), *rows, 0.1, 1e-5)
    check(lambda x, w, b: F.group_norm(x, 2, w, b), x, w, b)
    y = torch.randn(3, 4)
    check(lambda y, w, b: F.layer_norm(y, (4,), w, b), y, w, b)
    for dtype in FLOATS:
        check_op(aten.rms_norm.default, y.to(dtype), [4], w.to(dtype), 1e-5)
        check_op(aten.rms_norm.default, y.to(dtype), [4])
        check_op(aten._fused_rms_norm.default, y.to(dtype), [4], w.to(dtype), None)


def test_batch_norm_in_training() -> None:
    x, w = torch.randn(3, 4, 5), torch.randn(4)
    op = aten._native_batch_norm_legit_functional.default
    check_op(op, x, w, w, w, w.abs(), True, 0.1, 1e-5)
    check_op(aten._native_batch_norm_legit.no_stats, x, w, None, True, 0.1, 1e-5)


def test_errors_of_a_batch_norms_channels_do_not_add_up() -> None:
    # all variances are in one binade, where `+ eps` in float32 rounds them to the same side
    x = torch.randn(2, 512, 11, 11, generator=torch.Generator().manual_seed(0)) / 2

    def root(x: Tensor) -> Tensor:
        found = aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)[2]
        assert isinstance(found, Tensor)
        return found

    exact = root(x.double())
    for images in (x, x.contiguous(memory_format=torch.channels_last)):
        far = (fusee.compile(root)(images) - exact) / exact
        assert far.mean().abs() < 5e-9 and far.square().mean().sqrt() < 4.5e-8


def test_factors_of_channels_that_lie_last_are_computed_once() -> None:
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    rows = torch.randn(8), torch.rand(8), torch.randn(8), torch.randn(8)
    op = aten._native_batch_norm_legit_no_training.default
    for images, axes in ((x, [1, 1, 4]), (x.contiguous(), [4])):
        graph = lowered(lambda *x: op(*x, 0.1, 1e-5)[0], images, *rows)
        assert [len(s.axes) for s in graph.steps if isinstance(s, Loop)] == axes
        check_op(op, images, *rows, 0.1, 1e-5)


def test_safe_softmax() -> None:
    x = torch.randn(3, 4)
    x[1] = -float("inf")
    check_op(aten._safe_softmax.default, x, 1)


def test_softmax_is_three_loops() -> None:
    graph = lowered(lambda x: x.softmax(-1), torch.randn(4, 8))
    assert [bool(s.reduce_axes) for s in graph.steps if isinstance(s, Loop)] == [True, True, False]


@pytest.mark.parametrize("shape", [(70000,), (70, 40, 32), (4096, 20), (17, 4001)])
def test_large_reductions_are_done_in_chunks(shape: tuple[int, ...]) -> None:
    graph = check(lambda x: (x.sum(), x.amax()), torch.randn(shape, dtype=torch.float64))
    assert len(graph.steps) >= 4
    assert max(len(s.axes) for s in graph.steps if isinstance(s, Loop)) >= 1


def test_results_follow_the_layout_of_what_is_read() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    graph = lowered(lambda x: (x.sum(0) * 2).sum(1), x)
    first = graph.steps[0]
    assert isinstance(first, Loop)
    strides = first.buffer.strides
    assert strides[-3:] == (1, 15, 3), strides


def test_rows_of_many_pieces_are_no_chunks() -> None:
    for shape, loops in (((64, 100, 128), 1), ((2, 1000, 1000), 2)):
        graph = lowered(lambda x: x.sum(1), torch.randn(shape))
        assert len([step for step in graph.steps if isinstance(step, Loop)]) == loops


def test_few_points_of_much_are_chunks_as_they_are() -> None:
    # eight rows of 32,768: a chunk is one of them, and needs no axis of its own
    check(lambda x, w: (x * w).sum(), torch.randn(8, 128, 256).double(), torch.randn(256).double())


@pytest.mark.parametrize("shape", [(2, 32, 32, 64), (2, 40, 32, 48), (4, 64, 16, 64)])
def test_a_chunks_axis_is_none_of_the_reduced_ones(shape: tuple[int, ...]) -> None:
    # images in channels-last order: chunks of the rows are as long as the batch
    graph = check(lambda x: (x.sum((0, 1, 2)), x.amax((0, 1, 2))), torch.randn(shape).double())
    assert len(graph.steps) == 4
