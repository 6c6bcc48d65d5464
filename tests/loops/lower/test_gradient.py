"""Gradients of single operators, as autograd calls them, against eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.loops.lower.against_eager import check_op

aten = torch.ops.aten

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]

# What is around the corners of every formula.
POINTS = [-30.0, -6.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 2.5, 3.0, 6.0, 25.0]

# operator -> arguments after the gradient and the input
POINTWISE: dict[Any, Sequence[tuple[Any, ...]]] = {
    aten.sigmoid_backward.default: [()],
    aten.tanh_backward.default: [()],
    aten.gelu_backward.default: [()],
    aten.silu_backward.default: [()],
    aten.mish_backward.default: [()],
    aten.softplus_backward.default: [(1.0, 20.0), (2.0, 3.0)],
    aten.logit_backward.default: [(), (0.1,)],
    aten.threshold_backward.default: [(0,), (0.5,)],
    aten.hardtanh_backward.default: [(-1.0, 1.0), (0.0, 6.0)],
    aten.hardswish_backward.default: [()],
    aten.hardsigmoid_backward.default: [()],
    aten.leaky_relu_backward.default: [(0.1, False), (0.1, True)],
    aten.hardshrink_backward.default: [(0.5,)],
    aten.softshrink_backward.default: [(0.5,)],
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("op", POINTWISE, ids=str)
def test_pointwise(op: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([*POINTS, float("inf"), -float("inf"), float("nan")], dtype=dtype)
    grad = torch.linspace(-2, 3, len(x), dtype=dtype)
    for rest in POINTWISE[op]:
        check_op(op, grad, x, *rest)
        check_op(op, grad.expand(2, -1).T, x.expand(2, -1).T, *rest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_pointwise(dtype: torch.dtype) -> None:
    x = torch.tensor(POINTS, dtype=dtype)
    grad = torch.linspace(-2, 3, len(x), dtype=dtype)
    check_op(aten.gelu_backward.default, grad, x, approximate="tanh")
    for is_result in (False, True):
        check_op(aten.elu_backward.default, grad, 1.5, 1.2, 0.7, is_result, x)
    _, buffer = aten.log_sigmoid_forward(x)
    check_op(aten.log_sigmoid_backward.default, grad, x, buffer)
    check_op(aten._prelu_kernel_backward.default, grad, x, torch.full_like(x, 0.3))
    check_op(aten.native_dropout_backward.default, grad, x > 0, 1.25)
    image = torch.randn(2, 6, 4, dtype=dtype)
    for dim in (0, 1, -1):
        shape = [n // 2 if k == dim % 3 else n for k, n in enumerate(image.shape)]
        check_op(aten.glu_backward.default, torch.randn(shape, dtype=dtype), image, dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_distances(reduction: int, dtype: torch.dtype) -> None:
    x, target = torch.randn(4, 5, dtype=dtype), torch.randn(4, 5, dtype=dtype)
    target[0, 0], target[0, 1] = x[0, 0] + 0.5, x[0, 1] - 0.5
    grad = torch.randn(4, 5, dtype=dtype) if reduction == 0 else torch.tensor(1.7, dtype=dtype)
    check_op(aten.mse_loss_backward.default, grad, x, target, reduction)
    both = grad.double(), target, target.double() + 1e-9
    check_op(aten.mse_loss_backward.default, *both, reduction)
    check_op(aten.huber_loss_backward.default, grad, x, target, reduction, 0.5)
    check_op(aten.smooth_l1_loss_backward.default, grad, x, target, reduction, 0.5)
    check_op(aten.soft_margin_loss_backward.default, grad, x * 8, target.sign(), reduction)
    p, q = x.sigmoid(), target.sigmoid()
    p[1, 0], p[1, 1] = 0, 1
    for weight in (None, torch.rand(5, dtype=dtype)):
        check_op(aten.binary_cross_entropy_backward.default, grad, p, q, weight, reduction)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 7, 3, 4)], ids=str)
def test_likelihood(
    shape: tuple[int, ...], reduction: int, weighted: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, dtype=dtype)
    rest = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(0, 7, rest)
    weight = torch.rand(7, dtype=dtype) if weighted else None
    suffix = "2d" if len(shape) == 4 else ""
    forward = getattr(aten, f"nll_loss{suffix}_forward").default
    backward = getattr(aten, f"nll_loss{suffix}_backward").default
    ignored = (-100, int(target.flatten()[0])) if len(shape) > 1 else (-100,)
    for index in ignored:
        check_op(forward, x, target, weight, reduction, index)
        loss, total = forward(x, target, weight, reduction, index)
        check_op(backward, loss * 3, x, target, weight, reduction, index, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax(dtype: torch.dtype) -> None:
    for shape, dim in (((5, 70), -1), ((3, 9, 4), 1), ((6,), 0)):
        grad, x = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        check_op(aten._softmax_backward_data.default, grad, x.softmax(dim), dim, dtype)
        check_op(aten._log_softmax_backward_data.default, grad, x.log_softmax(dim), dim, dtype)


ALL = [True, True, True]
MASKS = [ALL, [False, True, True], [True, False, False], [True, False, True]]
CASES: list[tuple[Any, list[bool]]] = [(torch.float32, mask) for mask in MASKS]
CASES += [(dtype, ALL) for dtype in (torch.float64, torch.bfloat16, "mixed")]


@pytest.mark.parametrize(("dtype", "mask"), CASES, ids=str)
def test_layer_norm(dtype: Any, mask: list[bool]) -> None:
    data = torch.bfloat16 if dtype == "mixed" else dtype
    other = torch.float32 if dtype == "mixed" else dtype
    x, grad = torch.randn(3, 5, 33, dtype=data), torch.randn(3, 5, 33, dtype=data)
    for shape in ([33], [5, 33], [3, 5, 33]):
        weight, bias = torch.randn(shape, dtype=other), torch.randn(shape, dtype=other)
        _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, 1e-5)
        op = aten.native_layer_norm_backward.default
        check_op(op, grad, x, shape, mean, rstd, weight, bias, mask)
    if mask == ALL:
        _, mean, rstd = aten.native_layer_norm(x, [33], None, None, 1e-5)
        check_op(op, grad, x, [33], mean, rstd, None, None, [True, False, False])
        check_op(op, grad.mT.contiguous().mT, x, [33], mean, rstd, None, None, [True, False, False])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("dtype", "mask"), CASES[:-1], ids=str)
def test_group_norm(dtype: torch.dtype, mask: list[bool], layout: torch.memory_format) -> None:
    x = torch.randn(3, 6, 4, 5, dtype=dtype).to(memory_format=layout)
    grad = torch.randn(3, 6, 4, 5, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(6, dtype=dtype)
    if not mask[0] and layout is torch.channels_last:
        pytest.skip("eager crashes")
    for w in (weight, None) if mask == MASKS[2] else (weight,):
        _, mean, rstd = aten.native_group_norm(x, w, None, 3, 6, 20, 2, 1e-5)
        op = aten.native_group_norm_backward.default
        check_op(op, grad, x, mean, rstd, w, 3, 6, 20, 2, mask)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("dtype", "mask"), CASES, ids=str)
def test_batch_norm(
    dtype: Any, mask: list[bool], layout: torch.memory_format, training: bool
) -> None:
    data = torch.bfloat16 if dtype == "mixed" else dtype
    other = torch.float32 if dtype == "mixed" else dtype
    x = torch.randn(3, 6, 4, 5, dtype=data).to(memory_format=layout)
    grad = torch.randn(3, 6, 4, 5, dtype=data).to(memory_format=layout)
    weight, mean, var = torch.randn(6), torch.randn(6), torch.rand(6)
    weight, mean, var = weight.to(other), mean.to(other), var.to(other)
    args = (mean.clone(), var.clone(), training, 0.1, 1e-5)
    _, save_mean, save_rstd = aten.native_batch_norm(x, weight, weight, *args)
    op = aten.native_batch_norm_backward.default
    for w in (weight, None) if not mask[1] and dtype != "mixed" else (weight,):
        check_op(op, grad, x, w, mean, var, save_mean, save_rstd, training, 1e-5, mask)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows(dtype: torch.dtype, layout: torch.memory_format) -> None:
    def image(height: int, width: int) -> Tensor:
        return torch.randn(2, 4, height, width, dtype=dtype).to(memory_format=layout)

    x = image(8, 12)
    average = aten.avg_pool2d_backward.default
    check_op(average, image(4, 4), x, [2, 3], [2, 3], [0, 0], False, True, None)
    check_op(average, image(4, 6), x, [2], [], [0], True, False, 7)
    adaptive = aten._adaptive_avg_pool2d_backward.default
    for size in ((1, 1), (4, 6), (8, 12)):
        check_op(adaptive, image(*size), x)
    nearest = aten.upsample_nearest2d_backward.default
    check_op(nearest, image(16, 36), [16, 36], [2, 4, 8, 12], 2.0, 3.0)
    check_op(nearest, image(16, 12), [16, 12], [2, 4, 8, 12])


def test_windows_that_overlap_are_atens() -> None:
    x = torch.randn(2, 4, 8, 12)
    name = "avg_pool2d_backward"
    op = aten.avg_pool2d_backward.default
    grad = torch.randn(2, 4, 4, 6)
    graph = check_op(op, grad, x, [3], [2], [1], False, True, None, allow=[name])
    assert any("overlap" in note for note in graph.notes)
    check_op(op, torch.randn(2, 4, 3, 5), x, [3], [3], [1], True, True, None, allow=[name])
    check_op(op, torch.randn(2, 4, 2, 4), x, [3], [3], [0], False, True, None, allow=[name])
    grad = torch.randn(2, 4, 3, 5)
    name = "_adaptive_avg_pool2d_backward"
    check_op(aten._adaptive_avg_pool2d_backward.default, grad, x, allow=[name])
    name, op = "upsample_nearest2d_backward", aten.upsample_nearest2d_backward.default
    grad, size = torch.randn(2, 4, 9, 25), [2, 4, 8, 12]
    check_op(op, grad, [9, 25], size, allow=[name])
    check_op(op, torch.randn(2, 4, 16, 24), [16, 24], size, 2.1, 2.0, allow=[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size, step", [(1, 1), (3, 1), (2, 2), (2, 3), (5, 2), (0, 1), (7, 7)])
def test_windows_of_unfold(size: int, step: int, dtype: torch.dtype) -> None:
    for dim in (0, 1, -1):
        shape = (7, 9, 8)
        grad = torch.randn_like(torch.ones(shape, dtype=dtype).unfold(dim, size, step))
        check_op(aten.unfold_backward.default, grad, shape, dim, size, step)
        check_op(aten.unfold_backward.default, grad.transpose(0, -1).contiguous().transpose(0, -1),
                 shape, dim, size, step)  # fmt: skip


def test_many_windows_of_unfold_are_atens() -> None:
    grad = torch.randn(31, 10)
    check_op(aten.unfold_backward.default, grad, (40,), 0, 10, 1, allow=["unfold_backward"])
