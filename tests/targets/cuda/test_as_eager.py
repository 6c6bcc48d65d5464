"""What differs between GPUs and CPUs in eager, compiled on a GPU: where results lie, what is drawn
and what is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import fusee
from fusee.backends.report import live_reports

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def agree(fn: Callable[..., Any], *args: Any, calls: int = 1) -> None:
    """By kernels, where calls would be cheaper too: values, strides and what is written."""
    given = pytree.tree_map_only(Tensor, Tensor.cuda, args)
    mine, theirs = copy.deepcopy(given), copy.deepcopy(given)
    compiled = fusee.compile(fn, options={"cache": False, "prices": False})
    for call in range(calls):
        torch.manual_seed(call)
        got = compiled(*mine)
        torch.manual_seed(call)
        want = fn(*theirs)
        torch.testing.assert_close((got, mine), (want, theirs), check_stride=True)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


LAYOUTS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "group norm": (lambda x: F.group_norm(_last(x), 2) * 2, (3, 8, 4, 6)),
    "a roll": (lambda x: _last(x).roll(1, 3), (3, 8, 4, 6)),
    "group norm of columns": (lambda x: F.group_norm(_last(x), 1), (3, 7, 1, 7)),
    "products that are added": (
        lambda x: torch.baddbmm(x.mT, x.mT, x, alpha=2).diff(dim=0), (4, 5, 5)),
    "a cell": (
        lambda x: torch.gru_cell(x.t(), x.t(), (x @ x.t()).tile(3, 1), (x @ x.t()).tile(3, 1)),
        (3, 2)),
    "combinations": (lambda x: torch.combinations(x[0]) * 2, (3, 8)),
    "transforms of what is transposed": (
        lambda x: (torch.fft.fft2(x.mT), torch.fft.fftn(x.movedim(0, -1)), torch.fft.rfft2(x.mT)),
        (4, 4, 5, 6)),
    "few rows in one place": (lambda x: F.linear(x[0].expand(2, 2, 8), x) * 2, (3, 8)),
    "parts of copies": (
        lambda x: (
            x.expand(2, 5, 5).diagonal_scatter(x[:, :2] * 2),
            x.expand(2, 5, 5).slice_scatter(x[None] * 2, 0, 1),
            x.expand(2, 5, 5).select_scatter(x * 2, 0, 1)),
        (5, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_lie_as_there(name: str) -> None:
    fn, shape = LAYOUTS[name]
    agree(fn, torch.randn(shape))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("unique", [torch.unique, torch.unique_consecutive])
def test_unique_parts_lie_as_there(unique: Callable[..., Tensor], dim: int) -> None:
    agree(lambda x: (unique(x, dim=dim), unique(x, dim=dim) * 2), torch.randint(0, 3, (2, 3, 4)))


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: F.dropout(x, 0.4, inplace=True) * 2,
    "of all, in place": lambda x: F.dropout(x, 1.0, inplace=True) * 2,
    "of none, in place": lambda x: F.dropout(x, 0.0, inplace=True) * 2,
    "alpha, in place": lambda x: F.alpha_dropout(x, 0.4, True, inplace=True) * 2,
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_in_place_draws_what_eager_draws(name: str) -> None:
    agree(DROPOUTS[name], torch.randn(16, 33), calls=3)


def test_dropout_of_what_is_not_aligned() -> None:
    """ATen draws for four elements at a time where it may; copies for replays are aligned."""

    def fn(x: Tensor) -> Any:
        return F.dropout(x, 0.4), x.quantile(0.3, 0).logsumexp(0)

    compiled, memory = fusee.compile(fn, options={"prices": False}), torch.randn(8, 5, 9).cuda()
    for k in (0, 0, 0, 1, 1, 0, 2, 1):
        x, found = memory.clone()[k:][:5], []
        for call in (compiled, fn):
            torch.manual_seed(k)
            found.append(call(x))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_numbers_that_vary_between_two_tensors(dtype: torch.dtype) -> None:
    def fn(x: Tensor, y: Tensor, s: float) -> Any:
        return x.lerp(y, s), torch._foreach_lerp((x, y), (y, x), s), x.lerp_(y, s)

    compiled = fusee.compile(fn, options={"prices": False})
    for s in (0.5, 0.3, 0.7):
        x, y = torch.randn(2, 8, 16, device="cuda", dtype=dtype)
        mine = x.clone()
        torch.testing.assert_close(compiled(mine, y, s), fn(x, y, s))
        torch.testing.assert_close(mine, x)


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "mm": lambda x: x @ x, "bmm": lambda x: x[None] @ x[None], "mv": lambda x: x @ x[0],
    "dot": lambda x: x[0] @ x[0], "addmm": lambda x: torch.addmm(x, x, x),
    "linear": lambda x: F.linear(x, x), "baddbmm": lambda x: torch.baddbmm(*[x[None]] * 3),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_integers_are_refused_as_there(name: str, dtype: torch.dtype) -> None:
    x = torch.ones(3, 3, device="cuda", dtype=dtype)
    for call in (PRODUCTS[name], fusee.compile(PRODUCTS[name])):
        with pytest.raises((RuntimeError, NotImplementedError), match="not implemented for"):
            call(x)


@pytest.mark.parametrize("name", ["eigvalsh", "svdvals", "inv", "det"])
def test_linear_algebra_again_and_again(name: str) -> None:
    """What a recording cannot have runs directly, and so does its next call."""
    run = getattr(torch.linalg, name)
    agree(lambda x: run(x @ x.mT + 1) * 2, torch.randn(7, 7), calls=4)


@pytest.mark.parametrize("heads", [(1, 17, 16, 3), (16, 1, 5, 1), (2, 2, 5, 24), (16, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_attention_of_heads_that_are_not_aligned(
    heads: tuple[int, ...], dtype: torch.dtype
) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=x @ x.mT)

    x = torch.randn(heads, device="cuda").to(dtype)
    compiled = fusee.compile(fn, options={"cache": False, "prices": False})
    torch.testing.assert_close(compiled(x), fn(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("keys", [2, 5, 6, 16])
def test_gradients_of_attention_of_sizes_that_vary(keys: int) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=x @ x.mT)

    compiled = fusee.compile(fn, dynamic=True, options={"prices": False, "cache": False})
    for n in (3, 7):
        x = torch.randn(n, 4, keys, 8, device="cuda", requires_grad=True)
        found = (torch.autograd.grad(call(x).square().sum(), x) for call in (compiled, fn))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_linear_layer_of_sizes_that_vary(rows: int) -> None:
    compiled = fusee.compile(lambda x, n: F.linear(x.new_ones(rows, n), x), dynamic=True)
    for n in (3, 7):
        x = torch.randn(5, n, device="cuda")
        torch.testing.assert_close(compiled(x, n), F.linear(x.new_ones(rows, n), x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (2, 4, 16, 16)], ids=str)
def test_attention_without_gradients_beside_what_has_some(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """ATen gives None for what its backward alone would read."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, F.scaled_dot_product_attention(y, y, y)

    x = torch.randn(3, device="cuda", requires_grad=True)
    y = torch.randn(shape, device="cuda", dtype=dtype)
    made, attention = fusee.compile(fn, options={"prices": False, "cache": False})(x, y)
    made.sum().backward()
    torch.testing.assert_close(attention, fn(x, y)[1], rtol=2e-2, atol=2e-2)


def test_rows_of_attention_that_are_one_element_apart() -> None:
    compiled = fusee.compile(lambda x: F.scaled_dot_product_attention(x, x, x), dynamic=True)
    for n in (129, 512):
        x = torch.randn(n, n, 1, device="cuda").mT
        want = F.scaled_dot_product_attention(x, x, x)
        torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("view", [torch.neg, torch._neg_view, Tensor.t], ids=["", "negated", "t"])
def test_attention_of_sizes_that_vary_is_one_graph(view: Callable[[Tensor], Tensor]) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    compiled = fusee.compile(fn, dynamic=True, options={"prices": False, "cache": False})
    gc.collect()
    before = len(live_reports())
    for n in (5, 16, 7):
        x = view(torch.randn(8, 8 * n, device="cuda")).reshape(n, 8, 8)
        torch.testing.assert_close(compiled(x), fn(x), check_stride=True)
    assert len(live_reports()) == before + 1
