"""Operators that autograd calls, traced whole: their vals are what eager returns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusee.aten import WHOLE
from fusee.loops.lower import supported
from tests.aten.harness import assert_functional, assert_same_call, assert_vals, run, traced

aten = torch.ops.aten
ROWS, LAST = torch.contiguous_format, torch.channels_last
MASKS = [[True] * 3, [False, True, True], [True, False, False]]

Case = tuple[str, Any, list[Any]]


def image(*shape: int, layout: torch.memory_format = ROWS) -> Tensor:
    return torch.randn(shape).to(memory_format=layout)


def convolutions(a: torch.memory_format, b: torch.memory_format) -> Iterator[Case]:
    def case(stride: int, pad: int, dilation: int, transposed: bool, groups: int, mask: Any) -> Any:
        rest = ([stride] * 2, [pad] * 2, [dilation] * 2, transposed, [0, 0], groups, mask)
        return lambda g, x, w: aten.convolution_backward(g, x, w, [g.shape[1]], *rest)

    x, g = image(2, 4, 8, 12, layout=a), image(2, 6, 8, 12, layout=b)
    w, small = image(6, 4, 3, 3, layout=b), image(4, 1, 3, 3, layout=b)
    for mask in MASKS:
        yield "3x3", case(1, 1, 1, False, 1, mask), [g, x, w]
    yield "dilated", case(1, 2, 2, False, 1, MASKS[0]), [g, x, image(6, 4, 3, 3)]
    yield "1x1", case(1, 0, 1, False, 1, MASKS[0]), [g, x, image(6, 4, 1, 1, layout=b)]
    yield "transposed", case(1, 1, 1, True, 1, MASKS[0]), [g, x, image(4, 6, 3, 3, layout=b)]
    yield "in groups", case(2, 1, 1, False, 4, MASKS[0]), [image(2, 4, 4, 6, layout=a), x, small]


def norms(a: torch.memory_format, b: torch.memory_format) -> Iterator[Case]:
    x, g, c = image(2, 4, 8, 12, layout=a), image(2, 4, 8, 12, layout=b), torch.rand(4)
    for mask in MASKS:
        for training in (True, False):
            rest = (training, 1e-5, mask)
            yield (
                "batch_norm",
                lambda g, x, c, m, v, r=rest: aten.native_batch_norm_backward(
                    g, x, c, m, v, m, v, *r
                ),
                [g, x, c, torch.rand(4), torch.rand(4)],
            )
    yield (
        "group_norm",
        lambda g, x, m, r, w: aten.native_group_norm_backward(
            g, x, m, r, w, 2, 4, 96, 2, [True] * 3
        ),
        [g, x, torch.randn(2, 2), torch.rand(2, 2), c],
    )
    rows = [torch.rand(2, 4, 8, 1), torch.rand(2, 4, 8, 1), torch.rand(12), torch.rand(12)]
    yield (
        "layer_norm",
        lambda g, x, m, r, w, b: aten.native_layer_norm_backward(
            g, x, [12], m, r, w, b, [True] * 3
        ),
        [g, x, *rows],
    )
    for dim in (1, -1):
        yield (
            "softmax",
            lambda g, y, dim=dim: aten._softmax_backward_data(g, y, dim, y.dtype),
            [g, x],
        )
        yield (
            "log_softmax",
            lambda g, y, dim=dim: aten._log_softmax_backward_data(g, y, dim, y.dtype),
            [g, x],
        )


def windows(a: torch.memory_format, b: torch.memory_format) -> Iterator[Case]:
    x, g = image(2, 4, 8, 12, layout=a), image(2, 4, 4, 6, layout=b)
    _, places = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    window = ([3, 3], [2, 2], [1, 1])
    yield (
        "max_pool",
        lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, *window, [1, 1], False, i),
        [g, x, places],
    )
    yield (
        "avg_pool",
        lambda g, x: aten.avg_pool2d_backward(g, x, *window, False, True, None),
        [g, x],
    )
    padded = image(2, 4, 10, 13, layout=b)
    for pads in (aten.reflection_pad2d_backward, aten.replication_pad2d_backward):
        yield "pads", lambda g, x, op=pads: op(g, x, [1, 0, 2, 0]), [padded, x]
    small, (_, chosen) = image(2, 4, 3, 5, layout=b), aten.adaptive_max_pool2d(x, [3, 5])
    yield "adaptive_avg", lambda g, x: aten._adaptive_avg_pool2d_backward(g, x), [small, x]
    yield (
        "adaptive_max",
        lambda g, x, i: aten.adaptive_max_pool2d_backward(g, x, i),
        [image(2, 4, 3, 5), x, chosen],
    )
    for name in ("nearest2d", "bilinear2d", "bicubic2d"):
        op = getattr(aten, f"upsample_{name}_backward")
        aligned = () if name == "nearest2d" else (False,)
        yield (
            name,
            lambda g, op=op, aligned=aligned: op(g, [8, 12], [2, 4, 4, 6], *aligned, 2.0, 2.0),
            [x],
        )


def pointwise(a: torch.memory_format, b: torch.memory_format) -> Iterator[Case]:
    x, g = image(2, 4, 8, 12, layout=a), image(2, 4, 8, 12, layout=b)
    yield "gelu", lambda g, x: aten.gelu_backward(g, x), [g, x]
    yield "threshold", lambda g, x: aten.threshold_backward(g, x, 0), [g, x]
    yield "glu", lambda g, x: aten.glu_backward(g, x, 1), [image(2, 2, 8, 12, layout=b), x]
    yield "log_sigmoid", lambda g, x: aten.log_sigmoid_forward(x), [g, x]
    yield "mse", lambda g, x: aten.mse_loss_backward(g, x, x, 0), [g, x]
    yield "huber", lambda g, x: aten.huber_loss_backward(g, x, x, 0, 0.5), [g, x]
    yield "smooth_l1", lambda g, x: aten.smooth_l1_loss_backward(g, x, x, 0, 0.5), [g, x]
    unit = x.sigmoid()
    yield "bce", lambda g, x: aten.binary_cross_entropy_backward(g, x, x, None, 0), [g, unit]


LAYOUTS = [(a, b) for a in (ROWS, LAST) for b in (ROWS, LAST)]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", [convolutions, norms, windows, pointwise])
def test_what_gradients_look_like(family: Any, layouts: Any) -> None:
    for name, fn, args in family(*layouts):
        _check(name, fn, args)


def test_attention() -> None:
    wide, split = torch.randn(2, 4, 16, 8), torch.randn(2, 16, 4, 8).transpose(1, 2)
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    for x in (wide, split):
        out, lse = flash(x, x, x)
        _check("attention", lambda q: flash(q, q, q), [x])
        _check(
            "attention",
            lambda g, q, o, n: backward(g, q, q, q, o, n, 0.0, False),
            [out, x, out, lse],
        )


def test_scattered() -> None:
    rows, index = torch.randn(3, 4, 5), torch.randint(0, 10, (3, 4))
    for padding, by_frequency in ((-1, False), (1, True)):
        rest = (10, padding, by_frequency)
        _check(
            "embedding", lambda g, i, r=rest: aten.embedding_dense_backward(g, i, *r), [rows, index]
        )
    blocks = torch.randn(2, 4, 8, 5, 3)
    _check("unfold", lambda g: aten.unfold_backward(g, [2, 4, 8, 12], 3, 3, 2), [blocks])


def _check(name: str, fn: Any, args: list[Any]) -> None:
    graph = traced(fn, *args, keep=(supported() | WHOLE).__contains__)
    assert_functional(graph)
    assert_vals(graph, args)
    assert_same_call(lambda *given: run(graph, given), fn, args)


@pytest.mark.parametrize("name", ["add", "mul", "div"])
def test_lists_with_one_tensor(name: str) -> None:
    kwargs = {"alpha": 2} if name == "add" else {}  # without it, torch takes the tensor's number

    def fn(a: Tensor, b: Tensor, x: Tensor) -> Any:
        return getattr(torch, f"_foreach_{name}")([a, b], x, **kwargs)

    def in_place(a: Tensor, b: Tensor, x: Tensor) -> None:
        getattr(torch, f"_foreach_{name}_")([a, b], x, **kwargs)

    for call in (fn, in_place):
        _check(name, call, [torch.randn(3, 4), torch.randn(5), torch.tensor(1.5)])


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_lists_with_a_factor_each(name: str) -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor, factors: Tensor) -> Any:
        return getattr(torch, f"_foreach_{name}")([a, b], [c, d], [c, d], factors)

    lists = [torch.rand(3, 4), torch.rand(5), torch.rand(3, 4), torch.rand(5)]
    graph = traced(fn, *lists, torch.tensor([0.5, 2.0]))
    assert_functional(graph)
    # eager reads the factors, which meta tensors cannot give
    want = fn(lists[0], lists[1], lists[2], lists[3], torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(run(graph, [*lists, torch.tensor([0.5, 2.0])]), want)


# ------------------------------------------------------------------------------ scaled losses


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_a_scaled_loss(dtype: torch.dtype, bad: float) -> None:
    def fn(a: Tensor, b: Tensor, found: Tensor, inverse: Tensor) -> Any:
        a, b = a.clone(), b.clone()
        torch._amp_foreach_non_finite_check_and_unscale_([a, b], found, inverse)
        return a, b

    args = [torch.tensor([[bad, 1], [2, 3]]).to(dtype).t(), torch.tensor(2.0)]
    for found in (0.0, 1.0):
        given = [*args, torch.tensor([found]), torch.tensor([0.3])]
        _check("unscale", fn, given)


@pytest.mark.parametrize("scale", [0.1, 65536.0, 3e38])
@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_scale_of_a_loss(scale: float, found: float, steps: int) -> None:
    def fn(scale: Tensor, steps: Tensor, found: Tensor) -> Any:
        given = torch._amp_update_scale_(scale, steps, found, 1.1, 0.3, 2)
        return given is scale, scale * 1

    args = [torch.tensor(scale), torch.tensor(steps, dtype=torch.int32), torch.tensor(found)]
    _check("update", fn, args)
