"""Of operators that work element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusee.sym.metas.table import (
    METAS,
    Meta,
    Op,
    aten,
    broadcast,
    empty,
    is_dense,
    laid_out,
    like,
    meta,
    overload,
    suggested_layout,
)


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
