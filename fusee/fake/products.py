"""Of matrix products, convolutions, attention, look-ups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusee.fake.rules import Op, aten, broadcast, empty, laid_out, like, meta, suggested_layout

# ---------------------------------------------------------------------------- contractions


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


# ---------------------------------------------------------------------------- fourier
# Of Fourier transforms where MKL computes them: its batches come first, in the order of strides.
#
# source aten/src/ATen/native/mkl/SpectralOps.cpp


def _transformed(
    x: torch.Tensor, size: Sequence[Any], dims: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """What _exec_fft gives for a transform of these dimensions, in this order."""
    steps = x.stride()
    batch = sorted((d for d in range(x.dim()) if d not in dims), key=lambda d: -steps[d])
    strides = [0] * x.dim()
    step: Any = 1
    for d in reversed((*batch, *dims)):
        strides[d] = step
        step = step * size[d]
    return torch.empty_strided(size, strides, dtype=dtype, device="meta")


def _sorted(x: torch.Tensor, dims: Sequence[int]) -> list[int]:
    steps = x.stride()
    return sorted(dims, key=lambda d: -steps[d])


def _real_to_complex(
    x: torch.Tensor, dims: Sequence[int], normalization: int, onesided: bool
) -> Any:
    *others, last = dims
    size = list(x.shape)
    if onesided:
        size[last] = size[last] // 2 + 1
    return _transformed(x, size, [*_sorted(x, others), last], x.dtype.to_complex())


def _complex_to_real(
    x: torch.Tensor, dims: Sequence[int], normalization: int, last_size: Any
) -> Any:
    *others, last = dims
    if others:
        x = _transformed(x, x.shape, _sorted(x, others), x.dtype)
    size = list(x.shape)
    size[last] = last_size
    return _transformed(x, size, [last], x.dtype.to_real())


if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
    meta(aten._fft_r2c.default)(_real_to_complex)
    meta(aten._fft_c2r.default)(_complex_to_real)


# ---------------------------------------------------------------------------- gradients
# Of backward formulas: gradients lie in memory as what they are gradients of, or row by row.


@meta(aten.native_layer_norm_backward.default)
def _layer_norm(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[Any],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    parts = (x, weight, bias)
    return tuple(
        empty(part.shape, part.dtype) if part is not None and asked else None
        for part, asked in zip(parts, mask)
    )


@meta(aten.native_batch_norm_backward.default)
def _batch_norm(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor | None,
    invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    dtype = x.dtype if weight is None else weight.dtype
    channels = (x.shape[1],)
    return (
        laid_out(x.shape, x.dtype, suggested_layout(x)) if mask[0] else None,
        empty(channels, dtype) if mask[1] else None,
        empty(channels, dtype) if mask[2] else None,
    )


@meta(aten.native_group_norm_backward.default)
def _group_norm(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    n: Any,
    channels: Any,
    pixels: Any,
    groups: int,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    dtype = x.dtype if weight is None else weight.dtype
    return (
        laid_out(x.shape, x.dtype, suggested_layout(x)) if mask[0] else None,
        empty((channels,), dtype) if mask[1] else None,
        empty((channels,), dtype) if mask[2] else None,
    )


@meta(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax(grad: torch.Tensor, out: torch.Tensor, axis: int, dtype: torch.dtype) -> torch.Tensor:
    return empty(grad.shape, dtype)


@meta(aten.mse_loss_backward.default, aten.huber_loss_backward.default)
@meta(aten.smooth_l1_loss_backward.default, aten.glu_backward.default)
@meta(aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default)
@meta(aten.fractional_max_pool3d_backward.default)
def _row_by_row(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return empty(x.shape, x.dtype)


@meta(aten.binary_cross_entropy_backward.default)
def _as_input(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return like(x, x.dtype)


@meta(aten.log_sigmoid_forward.default)
def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return empty(x.shape, x.dtype), empty(x.shape, x.dtype)


@meta(aten.convolution_backward.default)
def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Sequence[Any] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Any:
    if x.dim() != 4:
        given = (stride, padding, dilation, transposed, extra, groups, mask)
        return aten.convolution_backward.default(grad, x, weight, bias, *given)
    layout = suggested_layout(x)
    if layout is torch.contiguous_format:
        layout = suggested_layout(weight)
    return (
        laid_out(x.shape, x.dtype, layout) if mask[0] else None,
        laid_out(weight.shape, weight.dtype, layout) if mask[1] else None,
        empty((grad.shape[1],), weight.dtype) if mask[2] else None,
    )


# ---------------------------------------------------------------------------- recurrent
# Of recurrent layers: ATen runs all their time steps in one call.

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")

LAYERS: tuple[Op, ...] = tuple(getattr(aten, name).input for name in _NAMES)


class Result(NamedTuple):
    size: Sequence[Any]
    stride: Sequence[Any]
    dtype: torch.dtype


def layer_results(x: torch.Tensor, states: Any, *options: Any) -> list[Result]:
    """The output of all steps, and the states after the last one."""
    *_, bidirectional, batch_first = options
    states = [states] if isinstance(states, torch.Tensor) else states
    width = states[0].shape[2] * (2 if bidirectional else 1)
    first, second = x.shape[:2]
    # the kernel works along time; with the batch first its result is transposed
    stride = (width, first * width, 1) if batch_first else (second * width, width, 1)
    results = [Result((first, second, width), stride, x.dtype)]
    for state in states:
        size = state.shape
        results.append(Result(size, (size[1] * size[2], size[2], 1), x.dtype))
    return results


@meta(*LAYERS)
def _layer(*args: Any) -> Any:
    results = layer_results(*args)
    return tuple(torch.empty_strided(*r[:2], dtype=r.dtype, device="meta") for r in results)


@meta(aten.mkldnn_rnn_layer.default)
def _onednn_layer(x: torch.Tensor, *rest: Any) -> Any:
    hidden, cell, hidden_size = rest[4], rest[5], rest[9]
    states = [empty(s.shape, s.dtype) for s in (hidden, cell)]
    return empty((*x.shape[:2], hidden_size), x.dtype), *states, empty((0,), torch.uint8)
