"""Gradients of softmax and of normalisation: sums along rows, then sums along columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fusee.loops.ir import Value, op
from fusee.loops.lower.formulas import const
from fusee.loops.lower.norm import channels, per_channel
from fusee.loops.lower.numbers import opmath
from fusee.loops.lower.pointwise import Scalar, pointwise
from fusee.loops.lower.reduce import count_of, normal_dims, prepared, reduce
from fusee.loops.lower.shape import converted, reshape
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Meta, Tensor
from fusee.sym.expr import Size, floordiv

Gradients = list[Tensor | None]  # a tensor for each result that is wanted, None for the others

# ------------------------------------------------------------------------------ softmax


def _softmax_backward(call: Call, grad: Tensor, y: Tensor, dim: int, summed: Scalar) -> Tensor:
    """From the gradient and the result, `summed` being what is added up along `dim`."""
    compute = opmath(y.dtype)
    dims = normal_dims(dim, len(y.shape))
    prepared(grad, 2)
    terms = pointwise(call.lowering, [grad, y], summed, y.shape, compute)
    total = reduce(terms, dims, "sum", compute, compute)
    is_log = "log" in str(call.op)

    def fn(g: Value, v: Value, t: Value) -> Value:
        if is_log:
            return op("sub", g, op("mul", op("exp", v), t))
        return op("mul", op("sub", g, t), v)

    meta = call.meta
    operands = [grad, y, total]
    return pointwise(call.lowering, operands, fn, y.shape, meta.dtype, compute, meta.strides)


@lowers(*named("_softmax_backward_data"))
def _of_softmax(call: Call, grad: Tensor, y: Tensor, dim: int, dtype: Any) -> Tensor:
    return _softmax_backward(call, grad, y, dim, lambda g, v: op("mul", g, v))


@lowers(*named("_log_softmax_backward_data"))
def _of_log_softmax(call: Call, grad: Tensor, y: Tensor, dim: int, dtype: Any) -> Tensor:
    return _softmax_backward(call, grad, y, dim, lambda g, v: g)


# ------------------------------------------------------------------------------ rows


def _wanted(call: Call, mask: Sequence[bool]) -> Iterator[Meta | None]:
    """The meta of each result; None where the mask says that nobody wants it."""
    metas = iter(call.metas)
    return (next(metas) if wanted else None for wanted in mask)


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean) * rstd in opmath."""
    return pointwise(
        x.lowering,
        [x, mean, rstd],
        lambda v, m, r: op("mul", op("sub", v, m), r),
        x.shape,
        opmath(x.dtype),
    )


def _product(x: Tensor, *others: Tensor | None) -> Tensor:
    """In opmath; None counts as 1."""

    def fn(v: Value, *rest: Value) -> Value:
        for w in rest:
            v = op("mul", v, w)
        return v

    operands = [x, *(t for t in others if t is not None)]
    return pointwise(x.lowering, operands, fn, x.shape, opmath(x.dtype))


def _total(x: Tensor, dims: Sequence[int], meta: Meta | None) -> Tensor | None:
    """The sum of `x`, which is in opmath, as a result; None if nobody wants it."""
    if meta is None:
        return None
    return reshape(reduce(x, dims, "sum", x.dtype, meta.dtype), meta.shape)


def _share(plain: Value, turned: Value, normal: Value, count: Size) -> Value:
    """What all elements of a row have to give: the divisions do not depend on the element."""
    number = plain.table.index(count, plain.dtype)
    return op("add", op("div", plain, number), op("mul", normal, op("div", turned, number)))


def _of_rows(
    call: Call,
    meta: Meta,
    grad: Tensor,
    weight: Tensor | None,
    normal: Tensor,
    rstd: Tensor,
    dims: Sequence[int],
) -> Tensor:
    """rstd * (g - mean(g) - n * mean(g * n)) for g = grad * weight, n the normalised rows."""
    scaled = _product(grad, weight)
    compute = scaled.dtype
    plain = reduce(scaled, dims, "sum", compute, compute)
    turned = reduce(_product(scaled, normal), dims, "sum", compute, compute)
    count = count_of(scaled, dims)

    def fn(g: Value, n: Value, r: Value, a: Value, b: Value) -> Value:
        return op("mul", r, op("sub", g, _share(a, b, n, count)))

    operands = [scaled, normal, rstd, plain, turned]
    return pointwise(call.lowering, operands, fn, grad.shape, meta.dtype, compute)


@lowers(*named("native_layer_norm_backward"))
def _layer_norm_backward(
    call: Call,
    grad: Tensor,
    x: Tensor,
    shape: Sequence[Size],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> Gradients:
    outer = len(x.shape) - len(shape)
    rows, columns = list(range(outer)), list(range(outer, len(x.shape)))
    prepared(grad, 2)
    prepared(x, 2)
    normal = _normalised(x, mean, rstd)
    of_x, of_weight, of_bias = _wanted(call, mask)
    return [
        None if of_x is None else _of_rows(call, of_x, grad, weight, normal, rstd, columns),
        _total(_product(grad, normal), rows, of_weight),
        _total(converted(grad, normal.dtype), rows, of_bias),
    ]


@lowers(*named("native_group_norm_backward"))
def _group_norm_backward(
    call: Call,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: Size,
    C: Size,
    HxW: Size,
    group: int,
    mask: Sequence[bool],
) -> Gradients:
    prepared(grad, 2)
    prepared(x, 2)
    each = floordiv(x.shape[1], group)
    normal = _normalised(x, per_channel(mean, x, group), per_channel(rstd, x, group))
    split = (x.shape[0], group, each, *x.shape[2:])
    inner = list(range(2, len(split)))
    of_x, of_weight, of_bias = _wanted(call, mask)
    found: Tensor | None = None
    if of_x is not None:
        scaled = _product(grad, None if weight is None else channels(x, weight))
        ones = (x.shape[0], group, *([1] * len(inner)))
        found = _of_rows(
            call,
            of_x,
            reshape(scaled, split),
            None,
            reshape(normal, split),
            reshape(rstd, ones),
            inner,
        )
        found = reshape(found, x.shape)
    rest = [k for k in range(len(x.shape)) if k != 1]
    return [
        found,
        _total(_product(grad, normal), rest, of_weight),
        _total(converted(grad, normal.dtype), rest, of_bias),
    ]


# ------------------------------------------------------------------------------ channels


def _as(x: Tensor, meta: Meta | None) -> Tensor | None:
    return None if meta is None else converted(reshape(x, meta.shape), meta.dtype)


def _batch_norm_backward(
    call: Call,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    training: bool,
    mask: Sequence[bool],
) -> Gradients:
    rest = [k for k in range(len(x.shape)) if k != 1]
    prepared(grad, 2)
    prepared(x, 2)
    rstd = channels(x, rstd)
    scale = None if weight is None else channels(x, weight)
    normal = _normalised(x, channels(x, mean), rstd)
    of_x, of_weight, of_bias = _wanted(call, mask)
    found: Tensor | None = None
    plain = reduce(converted(grad, normal.dtype), rest, "sum", normal.dtype, normal.dtype)
    turned = reduce(_product(grad, normal), rest, "sum", normal.dtype, normal.dtype)
    count = count_of(x, rest)

    def fn(g: Value, n: Value, r: Value, a: Value, b: Value, *w: Value) -> Value:
        if training:
            g = op("sub", g, _share(a, b, n, count))
        return op("mul", g, op("mul", r, w[0]) if w else r)

    if of_x is not None:
        operands = [grad, normal, rstd, plain, turned, *([] if scale is None else [scale])]
        found = pointwise(
            call.lowering, operands, fn, x.shape, of_x.dtype, normal.dtype, of_x.strides
        )
    return [
        found,
        _as(turned, of_weight),
        _as(plain, of_bias),
    ]


@lowers(*named("native_batch_norm_backward batch_norm_backward"))
def _native_batch_norm_backward(
    call: Call,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    training: bool,
    eps: float,
    mask: Sequence[bool],
    reserve: Tensor | None = None,
) -> Gradients:
    if training:
        assert save_mean is not None and save_invstd is not None
        return _batch_norm_backward(call, grad, x, weight, save_mean, save_invstd, True, mask)
    assert running_mean is not None and running_var is not None
    rstd = pointwise(
        call.lowering,
        [running_var],
        lambda v: op("rsqrt", op("add", v, const(v, eps))),
        running_var.shape,
        opmath(x.dtype),
    )
    return _batch_norm_backward(call, grad, x, weight, running_mean, rstd, False, mask)
