"""What meta results are made of: the table of functions, empty tensors, layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# ---------------------------------------------------------------------------- table


aten = torch.ops.aten

Op = Any  # an OpOverload
Meta = Callable[..., Any]

METAS: dict[Op, Meta] = {}


def meta(*ops: Op) -> Callable[[Meta], Meta]:
    """Registers a function that gives the results of operators."""

    def register(function: Meta) -> Meta:
        METAS.update(dict.fromkeys(ops, function))
        return function

    return register


def overload(name: str) -> Op:
    """`add.Tensor` -> aten.add.Tensor, `relu` -> aten.relu.default."""
    packet, _, kind = name.partition(".")
    found: Op = getattr(getattr(aten, packet), kind or "default")
    return found


def empty(shape: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def broadcast(*shapes: Sequence[Any]) -> Sequence[Any]:
    """torch.broadcast_shapes, which imports sympy at its first call and takes long.

    raises   RuntimeError
    """
    rank = max(map(len, shapes))
    found = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if found[axis] == 1:
                found[axis] = size
            elif size not in (1, found[axis]):
                raise RuntimeError(f"sizes {', '.join(map(str, shapes))} do not broadcast")
    return found


def laid_out(shape: Sequence[Any], dtype: torch.dtype, layout: torch.memory_format) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=layout)


def like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch.empty_like, which takes 100 us on meta tensors and imports sympy at its first call."""
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=dtype, device="meta")
    strides = x.stride() if is_dense(x) else _dense_strides(x)
    return torch.empty_strided(x.shape, strides, dtype=dtype, device="meta")


def _dense_strides(x: torch.Tensor) -> list[int]:
    """Strides without gaps, of axes in the order of those of `x` as far as that is certain.

    source   at::infer_dense_strides, aten/src/ATen/ExpandUtils.cpp
    """
    size, stride = x.shape, x.stride()
    order = list(range(x.dim()))[::-1]
    for i in range(1, len(order)):
        place = i
        for k in range(i - 1, -1, -1):
            a, b = order[k], order[place]
            if stride[a] == 0 or stride[b] == 0:
                continue  # either may come first
            if (stride[a], size[a]) > (stride[b], size[b]):
                order[k], order[place] = b, a
                place = k
            elif stride[a] < stride[b]:
                break
    found, step = [0] * len(order), 1
    for axis in order:
        found[axis] = step
        step *= max(size[axis], 1)
    return found


def is_dense(x: torch.Tensor) -> bool:
    """Whether the elements of `x`, of known sizes, fill its memory without gaps."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


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


# ---------------------------------------------------------------------------- pointwise
# Of operators that work element by element.


def _is_known(x: torch.Tensor) -> bool:
    return all(type(n) is int for n in x.shape)


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
        return broadcast(*(x.shape for x in operands)), None
    return None


def _pointwise(op: Op, is_unary: bool, to_bool: bool, is_float: bool) -> Meta:
    """A meta for `op`: at once where shapes, strides and dtypes are plain, else by torch."""

    def result(*args: Any, **kwargs: Any) -> Any:
        # A number may stand for either operand of a binary operator.
        operands = [x for x in args[: 1 if is_unary else 2] if isinstance(x, torch.Tensor)]
        if not all(map(_is_known, operands)):
            return op(*args, **kwargs)
        dtype = operands[0].dtype if is_unary else torch.result_type(args[0], args[1])
        layout = _layout_of(operands) if dtype.is_floating_point or not is_float else None
        if layout is None:
            return op(*args, **kwargs)
        shape, model = layout
        dtype = torch.bool if to_bool else dtype
        return empty(shape, dtype) if model is None else like(model, dtype)

    return result


for _names, _is_unary, _to_bool, _is_float in (
    (FLOAT_UNARY, True, False, True),
    (FLOAT_BINARY, False, False, True),
    (BINARY, False, False, False),
    (COMPARING, False, True, False),
    (("logical_not",), True, True, False),
    (("bitwise_not",), True, False, False),
):
    for _name in _names:
        _op = overload(_name)
        METAS[_op] = _pointwise(_op, _is_unary, _to_bool, _is_float)

# The backward of pointwise operators, by which operand their result is laid out as.
_LIKE_GRADIENT = "gelu silu sigmoid tanh hardswish hardsigmoid hardtanh mish".split()
_LIKE_OPERAND = "threshold leaky_relu".split()


def _gradient(op: Op, place: int) -> Meta:
    def result(grad: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        model = (grad, x)[place]
        plain = grad.shape == x.shape and grad.dtype == x.dtype and _is_known(x)
        return like(model, x.dtype) if plain and is_dense(model) else op(grad, x, *args, **kwargs)

    return result


for _place, _names in enumerate((_LIKE_GRADIENT, _LIKE_OPERAND)):
    for _name in _names:
        _op = overload(f"{_name}_backward")
        METAS[_op] = _gradient(_op, _place)


@meta(aten.where.self)
def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    operands = [condition, a, b]
    layout = _layout_of(operands) if all(map(_is_known, operands)) and a.dtype == b.dtype else None
    if layout is None:
        return aten.where.self(condition, a, b)
    shape, model = layout
    return empty(shape, a.dtype) if model is None else like(model, a.dtype)


@meta(aten.cat.default)
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
    return laid_out(shape, first.dtype, layout)


@meta(aten.stack.default)
def _stack(tensors: Sequence[torch.Tensor], axis: int = 0) -> Any:
    kinds = {(tuple(x.shape), x.dtype, x.is_contiguous()) for x in tensors}
    rank = tensors[0].dim() + 1 if tensors else 0
    if len(kinds) != 1 or not tensors[0].is_contiguous() or axis not in range(-rank, rank):
        return aten.stack.default(tensors, axis)
    shape = list(tensors[0].shape)
    shape.insert(axis % rank, len(tensors))
    return empty(shape, tensors[0].dtype)


# ---------------------------------------------------------------------------- reductions
# Of reductions, pooling, and copies.

# ------------------------------------------------------------------------------ reductions


def _reduced(x: torch.Tensor, axes: Sequence[int] | int | None, keep: bool) -> list[Any] | None:
    """The shape; None if an axis is not one of `x`, which is torch's to say."""
    rank = x.dim()
    given = (axes,) if isinstance(axes, int) else axes or range(rank)
    if not all(-rank <= axis < rank for axis in given):
        return None
    gone = {axis % rank for axis in given}
    if len(gone) != len(given):
        return None
    return [1 if i in gone else n for i, n in enumerate(x.shape) if keep or i not in gone]


def _sum_like(op: Any, is_mean: bool) -> Meta:
    def result(
        x: torch.Tensor,
        axes: Sequence[int] | None = None,
        keep: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        shape = _reduced(x, axes, keep)
        summed = dtype or x.dtype
        is_inexact = summed.is_floating_point or summed.is_complex
        if shape is None or (is_mean and not is_inexact):
            return op(x, axes, keep, dtype=dtype)
        return empty(shape, summed if is_inexact or dtype else torch.int64)

    return result


meta(aten.sum.dim_IntList)(_sum_like(aten.sum.dim_IntList, False))
meta(aten.mean.dim)(_sum_like(aten.mean.dim, True))


@meta(aten.sum.default)
def _sum(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _sum_like(aten.sum.dim_IntList, False)(x, dtype=dtype)


@meta(aten.mean.default)
def _mean(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _sum_like(aten.mean.dim, True)(x, dtype=dtype)


def _extreme(op: Any) -> Meta:
    def result(x: torch.Tensor, axes: Sequence[int] = (), keep: bool = False) -> Any:
        shape = _reduced(x, axes, keep)
        if shape is None or x.numel() == 0:
            return op(x, axes, keep)
        return empty(shape, x.dtype)

    return result


meta(aten.amax.default)(_extreme(aten.amax.default))
meta(aten.amin.default)(_extreme(aten.amin.default))


def _place_of_extreme(op: Any) -> Meta:
    def result(x: torch.Tensor, axis: int | None = None, keep: bool = False) -> Any:
        shape = _reduced(x, axis, keep)
        if shape is None or x.numel() == 0:
            return op(x, axis, keep)
        return empty(shape, torch.int64)

    return result


meta(aten.argmax.default)(_place_of_extreme(aten.argmax.default))
meta(aten.argmin.default)(_place_of_extreme(aten.argmin.default))


@meta(aten.cumsum.default)
def _cumsum(x: torch.Tensor, axis: int, *, dtype: torch.dtype | None = None) -> Any:
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    return empty(x.shape, dtype or x.dtype)


# ------------------------------------------------------------------------------ pooling


def _pooled(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> list[Any] | None:
    """The shape; None for what torch has something to say about.

    source   aten/src/ATen/native/Pool.h, pooling_output_shape
    """
    if x.dim() not in (3, 4) or 0 in x.shape:
        return None
    shape = list(x.shape[:-2])
    for i, n in enumerate(x.shape[-2:]):
        k, p, d = (row[i % len(row)] for row in (kernel, padding, dilation))
        step = (stride or kernel)[i % len(stride or kernel)]
        if step <= 0 or d <= 0 or p < 0 or 2 * p > (k - 1) * d + 1:
            return None
        reach = n + 2 * p - d * (k - 1) - 1
        size = (reach + (step - 1 if ceil else 0)) // step + 1
        if ceil and (size - 1) * step >= n + p:
            size -= 1
        if size < 1:
            return None
        shape.append(size)
    return shape


@meta(aten.max_pool2d_with_indices.default)
def _max_pool2d(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> Any:
    shape = _pooled(x, kernel, stride, padding, dilation, ceil)
    if shape is None:
        return aten.max_pool2d_with_indices.default(x, kernel, stride, padding, dilation, ceil)
    layout = suggested_layout(x)
    return laid_out(shape, x.dtype, layout), laid_out(shape, torch.int64, layout)


@meta(aten.avg_pool2d.default)
def _avg_pool2d(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil: bool = False,
    *rest: Any,
) -> Any:
    shape = _pooled(x, kernel, stride, padding, (1,), ceil)
    if shape is None:
        return aten.avg_pool2d.default(x, kernel, stride, padding, ceil, *rest)
    return laid_out(shape, x.dtype, suggested_layout(x))


@meta(aten._adaptive_avg_pool2d.default)
def _adaptive_avg_pool2d(x: torch.Tensor, size: Sequence[Any]) -> Any:
    if x.dim() not in (3, 4) or len(size) != 2 or 0 in x.shape:
        return aten._adaptive_avg_pool2d.default(x, size)
    return laid_out((*x.shape[:-2], *size), x.dtype, suggested_layout(x))


@meta(aten.max_unpool2d.default)
def _max_unpool2d(x: torch.Tensor, index: torch.Tensor, size: Sequence[Any]) -> torch.Tensor:
    return laid_out((*x.shape[:-2], *size), x.dtype, suggested_layout(x))


# ------------------------------------------------------------------------------ copies


@meta(aten.clone.default)
def _clone(x: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> Any:
    if memory_format in (None, torch.preserve_format):
        return like(x, x.dtype)
    return laid_out(x.shape, x.dtype, memory_format)


@meta(aten._to_copy.default)
def _to_copy(x: Any, **kwargs: Any) -> Any:
    if not isinstance(x, torch.Tensor):  # a number that functorch has made a tensor of
        x = torch.scalar_tensor(x, device="meta")
    if kwargs.get("device") == x.device:
        del kwargs["device"]
    if set(kwargs) <= {"dtype", "non_blocking"}:
        return like(x, kwargs.get("dtype") or x.dtype)
    return aten._to_copy.default(x, **kwargs)


def _of_one(op: Any, is_like: bool) -> Meta:
    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") not in (None, x.device) or not {*kwargs} <= _SETTINGS:
            return op(x, *args, **kwargs)
        dtype = kwargs.get("dtype") or x.dtype
        return like(x, dtype) if is_like else empty(args[0], dtype)

    return run


_SETTINGS = {"dtype", "device", "pin_memory"}
for _reduction_name in ("empty_like", "zeros_like", "ones_like", "full_like"):
    meta(overload(_reduction_name))(_of_one(overload(_reduction_name), is_like=True))
for _reduction_name in ("new_empty", "new_zeros", "new_ones", "new_full"):
    meta(overload(_reduction_name))(_of_one(overload(_reduction_name), is_like=False))


# ---------------------------------------------------------------------------- normalisation
# Of normalisations, and of what has no other place.

_ROWS = torch.contiguous_format


@meta(aten._softmax.default, aten._log_softmax.default)
def _softmax(x: torch.Tensor, axis: int, to_float: bool) -> torch.Tensor:
    return empty(x.shape, x.dtype)


@meta(aten.native_layer_norm.default)
def _native_layer_norm(
    x: torch.Tensor,
    shape: Sequence[Any],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    outer = x.dim() - len(shape)
    sizes = [list(p.shape) for p in (weight, bias) if p is not None]
    if not shape or any(size != list(shape) for size in (list(x.shape[outer:]), *sizes)):
        raise RuntimeError(f"layer_norm over {list(shape)} of a tensor of size {list(x.shape)}")
    rows = [*x.shape[:outer], *[1] * len(shape)]
    dtype = _statistics_dtype(x, weight, bias)
    return empty(x.shape, x.dtype), empty(rows, dtype), empty(rows, dtype)


@meta(aten.native_group_norm.default)
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
    sizes = {p.numel() for p in (weight, bias) if p is not None}
    if type(channels) is int and (sizes - {channels} or channels % groups):
        raise RuntimeError(f"group_norm of {channels} channels in {groups} groups, weights {sizes}")
    dtype = _statistics_dtype(x, weight, bias)
    out = laid_out(x.shape, x.dtype, suggested_layout(x))
    return out, empty((n, groups), dtype), empty((n, groups), dtype)


def _statistics_dtype(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.dtype:
    """float32 if the parameters are wider than x, as in mixed precision."""
    is_mixed = any(p is not None and p.dtype != x.dtype for p in parameters)
    return torch.float32 if is_mixed else x.dtype


@meta(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return _batch_normalised(x, rest[:4], (0,))


@meta(aten.native_batch_norm.default)
def _batch_norm_whole(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> tuple[torch.Tensor, ...]:
    rows = (x.shape[1],) if training else (0,)
    return _batch_normalised(x, (weight, bias, mean, var), rows)


@meta(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return _batch_normalised(x, rest[:2], (x.shape[1],))


@meta(aten._native_batch_norm_legit_functional.default)
def _batch_norm_functional(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> tuple[torch.Tensor, ...]:
    rows = (x.shape[1],) if training else (0,)
    found = _batch_normalised(x, (weight, bias, mean, var), rows)
    return *found, like(mean, mean.dtype), like(var, var.dtype)


def _batch_normalised(
    x: torch.Tensor, parameters: Sequence[torch.Tensor | None], rows: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    dtype = _statistics_dtype(x, *parameters)
    out = laid_out(x.shape, x.dtype, suggested_layout(x))
    return out, empty(rows, dtype), empty(rows, dtype)


def _in_the_layout_of_x(op: Op) -> Meta:
    """Of a kernel that fills the memory format which its operand suggests."""

    def result(x: torch.Tensor, *args: Any) -> torch.Tensor:
        found: torch.Tensor = op(x, *args)
        layout = suggested_layout(x)
        return found if layout == _ROWS else laid_out(found.shape, x.dtype, layout)

    return result


for _overload in (
    *(aten.reflection_pad2d.default, aten.reflection_pad3d.default),
    *(aten.replication_pad2d.default, aten.replication_pad3d.default),
):
    METAS[_overload] = _in_the_layout_of_x(_overload)


@meta(aten.roll.default)
def _roll(x: torch.Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Any:
    found, layout = aten.roll.default(x, shifts, dims), suggested_layout(x)
    # a cat of two parts for each axis: an empty part suggests rows
    if layout == _ROWS or not dims or any(s % x.shape[d] == 0 for s, d in zip(shifts, dims)):
        return found
    return laid_out(x.shape, x.dtype, layout)


@meta(aten._linalg_svd.default)
def _svd(x: torch.Tensor, full: bool = False, vectors: bool = True, **kwargs: Any) -> Any:
    u, s, v = aten._linalg_svd.default(x, full, vectors, **kwargs)
    return u, s, empty(v.mT.shape, v.dtype).mT if vectors else v  # LAPACK's is column-major


@meta(aten.linalg_eig.default)
def _eig(x: torch.Tensor) -> Any:
    values, vectors = aten.linalg_eig.default(x)
    return values, vectors.mT.contiguous().mT  # column-major, as LAPACK writes them


@meta(aten.nonzero_static.default)
def _nonzero_static(x: torch.Tensor, *, size: Any, fill_value: int = -1) -> torch.Tensor:
    return empty((size, x.dim()), torch.int64)
