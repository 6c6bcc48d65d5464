"""Sizes, strides and dtypes of backward formulas against the CPU's kernels, in both layouts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fusee.fake import Twins

aten = torch.ops.aten
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def geometry(out: Any) -> list[Any]:
    """Strides of axes with one element say nothing, and kernels choose them freely."""
    items = out if isinstance(out, (tuple, list)) else (out,)
    return [None if x is None else (tuple(x.shape), x.dtype, steps(x)) for x in items]


def steps(x: Tensor) -> list[int]:
    return [stride for size, stride in zip(x.shape, x.stride()) if size > 1]


def check(op: Any, *args: Any) -> None:
    twins = [x.to("meta") if isinstance(x, Tensor) else x for x in args]
    assert geometry(Twins().run(op, tuple(twins), {})) == geometry(op(*args)), op


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=3)))
def test_gradients(layouts: tuple[torch.memory_format, ...]) -> None:
    of_x, of_w, of_g = layouts
    x, g = (torch.rand(2, 8, 6, 6).to(memory_format=layout) for layout in (of_x, of_g))
    for window, groups in ((3, 1), (1, 1), (3, 8)):
        w = torch.rand(8, 8 // groups, window, window).to(memory_format=of_w)
        around = [window // 2] * 2
        rest = ([8], [1, 1], around, [1, 1], False, [0, 0], groups, [True] * 3)
        check(aten.convolution_backward.default, g, x, w, *rest)
    s = torch.rand(8)
    check(aten.native_batch_norm_backward.default, g, x, s, s, s, s, s, True, 1e-5, [True] * 3)
    rows = torch.rand(2, 8, 6, 1)
    pair = torch.rand(6), torch.rand(6)
    check(aten.native_layer_norm_backward.default, g, x, [6], rows, rows, *pair, [True] * 3)
    check(aten._softmax_backward_data.default, g, x, 1, torch.float32)
    more = {"threshold": (0.0,), "leaky_relu": (0.1, False), "hardtanh": (-1.0, 1.0)}
    names = "threshold gelu silu sigmoid tanh hardswish hardsigmoid leaky_relu hardtanh mish"
    for name in names.split():
        check(getattr(aten, f"{name}_backward").default, g, x, *more.get(name, ()))


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("layouts", list(itertools.product((False, True), repeat=3)))
def test_gradients_of_convolutions(layouts: tuple[bool, ...], rank: int) -> None:
    """Channels first, or last."""

    def image(*size: int, is_last: bool) -> Tensor:
        x = torch.rand(*size)
        return x.movedim(1, -1).contiguous().movedim(-1, 1) if is_last else x

    steps = [2] * rank, [1] * rank, [1] * rank
    for count, groups, transposed in itertools.product((1, 2), (1, 4), (False, True)):
        x = image(count, 8, *(5, 6, 7)[:rank], is_last=layouts[0])
        w = image(8, 8 // groups, *[3] * rank, is_last=layouts[1])
        how = *steps, transposed, [0] * rank, groups
        y = aten.convolution.default(x, w, None, *how)
        check(aten.convolution.default, x, w, None, *how)
        g = image(*y.shape, is_last=layouts[2])
        check(aten.convolution_backward.default, g, x, w, [8], *how, [True] * 3)


def test_attention() -> None:
    q = torch.rand(2, 5, 4, 8).transpose(1, 2)
    for x in (q, q.contiguous()):
        check(aten._scaled_dot_product_flash_attention_for_cpu.default, x, x, x)
