"""Rewrites before a joint graph is cut: values stay, and fewer bytes need to be saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusee.autodiff import prepare
from tests.autodiff.joints import check, joint, operators, saved_names
from tests.autodiff.steps import compare
from tests.autodiff.test_memory import joints

Tensor = torch.Tensor
aten = torch.ops.aten


def _rest(x: Tensor, w: Tensor, t: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """relu and convolution after a norm with result y: its result, gradients of y and w."""
    a = y.relu()
    z = F.conv2d(a, w)
    grads = aten.convolution_backward(
        t, a, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return z, aten.threshold_backward(grads[0], a, 0), grads[1]


def batch_normed(
    x: Tensor, s: Tensor, b: Tensor, m: Tensor, v: Tensor, w: Tensor, t: Tensor
) -> tuple[Any, ...]:
    h = F.conv2d(x, w)
    y, mean, rstd = aten._native_batch_norm_legit(h, s, b, m, v, True, 0.1, 1e-5)
    z, grad, grad_w = _rest(h, w, t, y)
    grads = aten.native_batch_norm_backward(
        grad, h, s, None, None, mean, rstd, True, 1e-5, [True, True, True]
    )
    return z, None, grads[1], grads[2], None, None, grad_w + grads[0].sum()


def group_normed(x: Tensor, s: Tensor, b: Tensor, w: Tensor, t: Tensor) -> tuple[Any, ...]:
    h = F.conv2d(x, w)
    y, mean, rstd = aten.native_group_norm(h, s, b, 2, 4, 81, 2, 1e-5)
    z, grad, grad_w = _rest(h, w, t, y)
    grads = aten.native_group_norm_backward(grad, h, mean, rstd, s, 2, 4, 81, 2, [True, True, True])
    return z, None, grads[1], grads[2], grad_w + grads[0].sum()


X, S, B, W = torch.randn(2, 4, 9, 9), torch.rand(4), torch.rand(4), torch.randn(4, 4, 1, 1)


@pytest.mark.parametrize(
    ("is_batch", "layout"),
    [
        (True, torch.contiguous_format),
        (True, torch.channels_last),
        (False, torch.contiguous_format),
    ],
)
def test_results_of_norms_are_computed_again(is_batch: bool, layout: torch.memory_format) -> None:
    statistics = [torch.zeros(4), torch.ones(4)] if is_batch else []
    given = [X.to(memory_format=layout), S, B, *statistics, W]
    tangents = [torch.randn(2, 4, 9, 9).to(memory_format=layout)]
    step = batch_normed if is_batch else group_normed
    split = check(joint(step, given, tangents), given, tangents)
    large = [s for s in split.backward.inputs[: len(split.saved)] if s.size == (2, 4, 9, 9)]
    assert [s.name for s in large] == ["convolution"], "what goes into the norm, not relu"
    assert "relu" in operators(split.backward)


def test_half_norms_are_computed_in_float32() -> None:
    half = torch.bfloat16
    given = [X.to(half), S, B, torch.zeros(4), torch.ones(4), W.to(half)]
    tangents = [torch.randn(2, 4, 9, 9).to(half)]
    split = check(joint(batch_normed, given, tangents), given, tangents)
    assert operators(split.forward).count("_to_copy") >= 2


def test_places_of_maxima_take_half_the_bytes() -> None:
    def step(x: Tensor, t: Tensor) -> tuple[Any, ...]:
        y, places = aten.max_pool2d_with_indices(x.sin(), [2, 2])
        grad = aten.max_pool2d_with_indices_backward(
            t, x.sin(), [2, 2], [2, 2], [0, 0], [1, 1], False, places
        )
        return y, grad * x.cos()

    given, tangents = [torch.randn(1, 2, 6, 6)], [torch.randn(1, 2, 3, 3)]
    split = check(joint(step, given, tangents), given, tangents)
    kept = split.backward.inputs[: len(split.saved)]
    assert [s.dtype for s in kept] == [torch.float32, torch.int32], saved_names(split)


def qkv(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w.t()).view(4, 3, 8).transpose(0, 1)
    return h[0] * h[1] + h[2]


def halves(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w.t()
    return h[:, :10] * h[:, -10:]


def overlapping(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w.t()
    return h[:, :14] * h[:, 10:]


@pytest.mark.parametrize(("function", "sums"), [(qkv, 0), (halves, 0), (overlapping, 1)])
def test_gradients_of_parts_are_put_together(function: Any, sums: int) -> None:
    inputs = torch.randn(4, 8, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    ((found, _),) = joints(function, *inputs)
    prepare(found)
    backward = [n for n in found.aten.graph.nodes if n.meta.get("backward")]
    assert sum(n.target is aten.add.Tensor for n in backward) == sums
    compare(function, *inputs)
