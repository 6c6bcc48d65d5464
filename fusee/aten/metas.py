"""Meta results of common operators: faster than torch's, and with the strides of CPU kernels.

torch's meta kernels in Python take a millisecond, and those that ask for the device take a meta
tensor for a CUDA one. Each function here gives what the CPU kernel gives; whatever it isn't sure
of (symbolic sizes, unusual strides) it leaves to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.aten.torch_api import OpOverload

__all__ = [
    "BINARY",
    "COMPARING",
    "FLOAT_BINARY",
    "FLOAT_UNARY",
    "METAS",
    "overload",
    "suggested_layout",
]

aten = torch.ops.aten

Meta = Callable[..., Any]

METAS: dict[OpOverload, Meta] = {}


def _meta(*ops: OpOverload) -> Callable[[Meta], Meta]:
    def register(function: Meta) -> Meta:
        METAS.update(dict.fromkeys(ops, function))
        return function

    return register


def _empty(shape: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _broadcast(*shapes: Sequence[Any]) -> Sequence[Any]:
    found: Sequence[Any] = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return found


def _laid_out(
    shape: Sequence[Any], dtype: torch.dtype, layout: torch.memory_format
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=layout)


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch.empty_like, which takes 100 us on meta tensors, for the layouts that are common."""
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=dtype, device="meta")
    if _is_dense(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
    return torch.empty_like(x, dtype=dtype)


def _is_dense(x: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _is_known(x: torch.Tensor) -> bool:
    return all(type(n) is int for n in x.shape)


# ------------------------------------------------------------------------------ pointwise

FLOAT_UNARY = (
    "relu gelu silu mish tanh sigmoid exp expm1 exp2 log log2 log10 log1p sqrt rsqrt sin cos tan"
    " asin acos atan sinh cosh asinh acosh atanh erf erfc erfinv neg abs reciprocal floor ceil"
    " round trunc frac sign square hardswish hardsigmoid leaky_relu elu celu selu hardtanh softplus"
    " log_sigmoid clamp clamp_min clamp_max threshold hardshrink softshrink"
).split()
FLOAT_BINARY = "div.Tensor div.Scalar pow.Tensor_Scalar pow.Tensor_Tensor atan2".split()
BINARY = (
    "add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar rsub.Scalar rsub.Tensor"
    " maximum minimum fmod.Scalar remainder.Scalar fmod.Tensor remainder.Tensor"
    " bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor"
).split()
COMPARING = [f"{op}.{kind}" for op in "eq ne lt le gt ge".split() for kind in ("Tensor", "Scalar")]


def overload(name: str) -> OpOverload:
    """`add.Tensor` -> aten.add.Tensor, `relu` -> aten.relu.default."""
    packet, _, kind = name.partition(".")
    found: OpOverload = getattr(getattr(aten, packet), kind or "default")
    return found


def _layout_of(
    operands: Sequence[torch.Tensor],
) -> tuple[Sequence[int], torch.Tensor | None] | None:
    """The shape of a pointwise result and the operand whose layout it has (None: row-major).

    None if the operands' strides leave it to TensorIterator.
    """
    first = operands[0]
    if all(x.shape == first.shape and x.stride() == first.stride() for x in operands[1:]):
        return first.shape, first
    if all(x.is_contiguous() for x in operands):
        return _broadcast(*(x.shape for x in operands)), None
    return None


def _pointwise(op: OpOverload, is_unary: bool, to_bool: bool, is_float: bool) -> Meta:
    """A meta for `op`: at once where shapes, strides and dtypes are plain, else by torch."""

    def meta(*args: Any, **kwargs: Any) -> Any:
        # A number may stand for either operand of a binary operator.
        operands = [x for x in args[: 1 if is_unary else 2] if isinstance(x, torch.Tensor)]
        if not all(map(_is_known, operands)):
            return op(*args, **kwargs)
        dtype = operands[0].dtype if is_unary else torch.result_type(args[0], args[1])
        layout = _layout_of(operands) if dtype.is_floating_point or not is_float else None
        if layout is None:
            return op(*args, **kwargs)
        shape, like = layout
        dtype = torch.bool if to_bool else dtype
        return _empty(shape, dtype) if like is None else _like(like, dtype)

    return meta


for _names, _is_unary, _to_bool, _is_float in (
    (FLOAT_UNARY, True, False, True),
    (FLOAT_BINARY, False, False, True),
    (BINARY, False, False, False),
    (COMPARING, False, True, False),
):
    for _name in _names:
        _op = overload(_name)
        METAS[_op] = _pointwise(_op, _is_unary, _to_bool, _is_float)


@_meta(aten.where.self)
def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    operands = [condition, a, b]
    layout = _layout_of(operands) if all(map(_is_known, operands)) and a.dtype == b.dtype else None
    if layout is None:
        return aten.where.self(condition, a, b)
    shape, like = layout
    return _empty(shape, a.dtype) if like is None else _like(like, a.dtype)


@_meta(aten.cat.default)
def _cat(tensors: Sequence[torch.Tensor], axis: int = 0) -> Any:
    first = tensors[0]
    rank = first.dim()
    if rank == 0 or not all(
        _is_known(x) and x.dim() == rank and x.dtype == first.dtype for x in tensors
    ):
        return aten.cat.default(tensors, axis)
    shape = list(first.shape)
    axis %= rank
    for x in tensors[1:]:
        if any(m != n for i, (m, n) in enumerate(zip(x.shape, shape)) if i != axis):
            return aten.cat.default(tensors, axis)
    shape[axis] = sum(x.shape[axis] for x in tensors)
    layouts = {suggested_layout(x) for x in tensors}
    layout = layouts.pop() if len(layouts) == 1 else torch.contiguous_format
    return _laid_out(shape, first.dtype, layout)


# ------------------------------------------------------------------------------ layouts


def suggested_layout(x: torch.Tensor) -> torch.memory_format:
    """What at::Tensor::suggest_memory_format says: channels-last only if strides say nothing else.

    source   c10/core/MemoryFormat.h, is_channels_last_strides_2d_s4 and _3d_s5
    """
    if x.dim() == 4 and _is_channels_last(x, (1, 3, 2, 0)):
        return torch.channels_last
    if x.dim() == 5 and _is_channels_last(x, (1, 4, 3, 2, 0)):
        return torch.channels_last_3d
    return torch.contiguous_format


def _is_channels_last(x: torch.Tensor, order: tuple[int, ...]) -> bool:
    size, stride = x.shape, x.stride()
    least: Any = 0
    if stride[1] == 0:
        return False
    for axis in order:
        if size[axis] == 0 or stride[axis] < least:
            return False
        if axis == 0 and least == stride[1]:  # N111 is row-major
            return False
        least = stride[axis]
        if size[axis] > 1:
            least = least * size[axis]
    return True


# ------------------------------------------------------------------------------ contractions


@_meta(aten.linear.default)
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1] or x.dtype != weight.dtype:
        raise RuntimeError(
            f"linear: {list(x.shape)} {x.dtype} does not fit {list(weight.shape)} {weight.dtype}"
        )
    return _empty((*x.shape[:-1], *weight.shape[:-1]), x.dtype)


@_meta(aten.convolution.default)
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
    shape: list[Any] = [x.shape[0], channels]
    for i, (n, k) in enumerate(zip(x.shape[2:], weight.shape[2:])):
        reach = dilation[i] * (k - 1)
        if transposed:
            shape.append((n - 1) * stride[i] - 2 * padding[i] + reach + extra[i] + 1)
        else:
            shape.append((n + 2 * padding[i] - reach - 1) // stride[i] + 1)
    if min(shape[2:]) < 0:
        raise RuntimeError(f"convolution: the result would have the size {shape}")
    if x.dim() == 3:  # runs as a two-dimensional one
        layout = _convolution_layout(x.unsqueeze(2), weight.unsqueeze(2))
        return _laid_out((*shape[:2], 1, shape[2]), x.dtype, layout).squeeze(2)
    return _laid_out(shape, x.dtype, _convolution_layout(x, weight))


def _convolution_layout(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    found = suggested_layout(x)
    return suggested_layout(weight) if found is torch.contiguous_format else found


@_meta(aten.scaled_dot_product_attention.default)
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
        return _like(q, q.dtype)
    batch = _broadcast(q.shape[:-2], k.shape[:-2]) if not enable_gqa else q.shape[:-2]
    return _empty((*batch, q.shape[-2], v.shape[-1]), q.dtype)


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


@_meta(aten.embedding.default)
def _embedding(
    weight: torch.Tensor,
    index: torch.Tensor,
    padding: int = -1,
    by_frequency: bool = False,
    sparse: bool = False,
) -> Any:
    if weight.dim() != 2:
        return aten.embedding.default(weight, index, padding, by_frequency, sparse)
    return _empty((*index.shape, weight.shape[1]), weight.dtype)


# ------------------------------------------------------------------------------ normalisation


@_meta(aten._softmax.default, aten._log_softmax.default)
def _softmax(x: torch.Tensor, axis: int, to_float: bool) -> torch.Tensor:
    return _empty(x.shape, x.dtype)


@_meta(aten.native_layer_norm.default)
def _native_layer_norm(
    x: torch.Tensor,
    shape: Sequence[Any],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    outer = x.dim() - len(shape)
    if list(x.shape[outer:]) != list(shape):
        raise RuntimeError(f"layer_norm over {list(shape)} of a tensor of size {list(x.shape)}")
    rows = [*x.shape[:outer], *[1] * len(shape)]
    dtype = _statistics_dtype(x, weight, bias)
    return _empty(x.shape, x.dtype), _empty(rows, dtype), _empty(rows, dtype)


@_meta(aten.native_group_norm.default)
def _native_group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: Any,
    channels: Any,
    pixels: Any,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    dtype = _statistics_dtype(x, weight, bias)
    out = _laid_out(x.shape, x.dtype, suggested_layout(x))
    return out, _empty((n, groups), dtype), _empty((n, groups), dtype)


def _statistics_dtype(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.dtype:
    """float32 if the parameters are wider than x, as in mixed precision."""
    is_mixed = any(p is not None and p.dtype != x.dtype for p in parameters)
    return torch.float32 if is_mixed else x.dtype


@_meta(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return _batch_normalised(x, rest[:4], (0,))


@_meta(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return _batch_normalised(x, rest[:2], (x.shape[1],))


@_meta(aten._native_batch_norm_legit_functional.default)
def _batch_norm_functional(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> tuple[torch.Tensor, ...]:
    rows = (x.shape[1],) if training else (0,)
    found = _batch_normalised(x, (weight, bias, mean, var), rows)
    return *found, _like(mean, mean.dtype), _like(var, var.dtype)


def _batch_normalised(
    x: torch.Tensor, parameters: Sequence[torch.Tensor | None], rows: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    dtype = _statistics_dtype(x, *parameters)
    out = _laid_out(x.shape, x.dtype, suggested_layout(x))
    return out, _empty(rows, dtype), _empty(rows, dtype)


# ------------------------------------------------------------------------------ factorisations


@_meta(aten._linalg_svd.default)
def _svd(x: torch.Tensor, full: bool = False, vectors: bool = True, **kwargs: Any) -> Any:
    u, s, v = aten._linalg_svd.default(x, full, vectors, **kwargs)
    return u, s, _empty(v.mT.shape, v.dtype).mT if vectors else v  # LAPACK's is column-major


# ------------------------------------------------------------------------------ pooling


@_meta(aten.max_unpool2d.default)
def _max_unpool2d(x: torch.Tensor, index: torch.Tensor, size: Sequence[Any]) -> torch.Tensor:
    return _laid_out((*x.shape[:-2], *size), x.dtype, suggested_layout(x))


# ------------------------------------------------------------------------------ places


@_meta(aten.nonzero_static.default)
def _nonzero_static(x: torch.Tensor, *, size: Any, fill_value: int = -1) -> torch.Tensor:
    return _empty((size, x.dim()), torch.int64)
