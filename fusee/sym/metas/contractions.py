"""Of matrix products, convolutions, attention, look-ups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusee.sym.metas.table import aten, broadcast, empty, laid_out, like, meta, suggested_layout


@meta(aten.linear.default)
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1] or x.dtype != weight.dtype:
        raise RuntimeError(
            f"linear: {list(x.shape)} {x.dtype} does not fit {list(weight.shape)} {weight.dtype}"
        )
    return empty((*x.shape[:-1], *weight.shape[:-1]), x.dtype)


@meta(aten.mm.default)
def _mm(a: torch.Tensor, b: torch.Tensor) -> Any:
    return _product(2, a, b) if _fit(2, a, b) else aten.mm.default(a, b)


@meta(aten.bmm.default)
def _bmm(a: torch.Tensor, b: torch.Tensor) -> Any:
    return _product(3, a, b) if _fit(3, a, b) else aten.bmm.default(a, b)


@meta(aten.addmm.default)
def _addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **scales: Any) -> Any:
    if _fit(2, a, b) and _spreads(c, (a.shape[0], b.shape[1])) and c.dtype == a.dtype:
        return _product(2, a, b)
    return aten.addmm.default(c, a, b, **scales)


@meta(aten.baddbmm.default)
def _baddbmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **scales: Any) -> Any:
    if _fit(3, a, b) and _spreads(c, (*a.shape[:2], b.shape[2])) and c.dtype == a.dtype:
        return _product(3, a, b)
    return aten.baddbmm.default(c, a, b, **scales)


def _fit(rank: int, a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.dim() == b.dim() == rank or a.dtype != b.dtype:
        return False
    return a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]


def _product(rank: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return empty((*a.shape[: rank - 1], b.shape[-1]), a.dtype)


def _spreads(x: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Whether `x` broadcasts to a shape."""
    if x.dim() > len(shape):
        return False
    return all(m in (1, n) for m, n in zip(x.shape, shape[len(shape) - x.dim() :]))


@meta(aten.convolution.default)
def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
) -> torch.Tensor:
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.dim() != weight.dim() or x.shape[1] != expected or x.dtype != weight.dtype:
        raise RuntimeError(
            f"convolution: {list(x.shape)} {x.dtype} does not fit {list(weight.shape)}"
            f" {weight.dtype} in {groups} groups"
        )
    each = (stride, padding, dilation, extra)
    stride, padding, dilation, extra = (
        row if len(row) > 1 else [*row] * (x.dim() - 2) for row in each
    )
    shape: list[Any] = [x.shape[0], channels]
    for i, (n, k) in enumerate(zip(x.shape[2:], weight.shape[2:])):
        reach = dilation[i] * (k - 1)
        if transposed:
            shape.append((n - 1) * stride[i] - 2 * padding[i] + reach + extra[i] + 1)
        else:
            shape.append((n + 2 * padding[i] - reach - 1) // stride[i] + 1)
    if min(shape[2:]) < 0:
        raise RuntimeError(f"convolution: the result would have the size {shape}")
    if x.dim() == 3:  # runs as a two-dimensional one, on rows: at::_convolution makes x contiguous
        layout = suggested_layout(weight.unsqueeze(2))
        return laid_out((*shape[:2], 1, shape[2]), x.dtype, layout).squeeze(2)
    return laid_out(shape, x.dtype, _convolution_layout(x, weight))


def _convolution_layout(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    found = suggested_layout(x)
    return suggested_layout(weight) if found is torch.contiguous_format else found


@meta(aten.scaled_dot_product_attention.default)
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if _uses_flash(q, k, v, mask, dropout, enable_gqa):
        return like(q, q.dtype)
    batch = broadcast(q.shape[:-2], k.shape[:-2]) if not enable_gqa else q.shape[:-2]
    return empty((*batch, q.shape[-2], v.shape[-1]), q.dtype)


def _uses_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    enable_gqa: bool,
) -> bool:
    """Whether the CPU runs its flash kernel, whose result is laid out as the query is.

    source   aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, use_flash_attention_cpp
    """
    if dropout > 0 or not q.dim() == k.dim() == v.dim() == 4:
        return False
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] or q.shape[0] != k.shape[0]:
        return False
    if not enable_gqa and not q.shape[1] == k.shape[1] == v.shape[1]:
        return False
    if q.shape[-2] == 0 or k.shape[-2] == 0 or v.shape[-2] == 0:
        return False
    operands = [q, k, v] if mask is None else [q, k, v, mask]
    return all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in operands)


@meta(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _flash_attention(q: torch.Tensor, *rest: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, rows, _ = q.shape
    return like(q, q.dtype), empty((batch, rows, heads), dtype).transpose(1, 2)


@meta(aten.gather.default)
def _gather(x: torch.Tensor, axis: int, index: torch.Tensor, **kwargs: Any) -> Any:
    if x.dim() != index.dim() or index.dtype != torch.int64:
        return aten.gather.default(x, axis, index, **kwargs)
    return empty(index.shape, x.dtype)


@meta(aten.index.Tensor)
def _index(x: torch.Tensor, indices: list[torch.Tensor | None]) -> Any:
    given = [index for index in indices if index is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return None  # how many elements there are is a matter of values: torch's mode says so
    are_first = len(given) == len(indices) <= x.dim() and x.is_contiguous()
    if not are_first or any(i.dtype != torch.int64 or not i.is_contiguous() for i in given):
        return aten.index.Tensor(x, indices)
    return empty((*broadcast(*(i.shape for i in given)), *x.shape[len(given) :]), x.dtype)


@meta(aten.embedding.default)
def _embedding(
    weight: torch.Tensor,
    index: torch.Tensor,
    padding: int = -1,
    by_frequency: bool = False,
    sparse: bool = False,
) -> Any:
    if weight.dim() != 2:
        return aten.embedding.default(weight, index, padding, by_frequency, sparse)
    return empty((*index.shape, weight.shape[1]), weight.dtype)
