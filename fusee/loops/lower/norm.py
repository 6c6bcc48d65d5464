"""Softmax and normalisation: reductions whose results scale the elements they came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fusee.loops.ir import Value, op
from fusee.loops.lower.pointwise import Scalar, const, pointwise
from fusee.loops.lower.reduce import Map, count_of, mean_and_squares, normal_dims, prepared, reduce
from fusee.loops.lower.tensor import Call, Meta, Shape, Tensor, lowers, named, opmath
from fusee.loops.lower.views import converted, expand, reshape
from fusee.sym.expr import Size, floordiv, product

# ---------------------------------------------------------------------------- norm


# ------------------------------------------------------------------------------ softmax


def _exponentials(call: Call, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """x in opmath, its maximum, and exp(x - maximum), along one dimension."""
    lowering = call.lowering
    x = converted(x, opmath(call.meta.dtype))
    prepared(x, 3)
    dims = normal_dims(dim, len(x.shape))
    top = reduce(x, dims, "max", x.dtype, x.dtype)
    powers = pointwise(
        lowering, [x, top], lambda v, m: op("exp", op("sub", v, m)), x.shape, x.dtype
    )
    return x, top, powers, dims


def softmax(call: Call, x: Tensor, dim: int) -> Tensor:
    _, _, powers, dims = _exponentials(call, x, dim)
    total = reduce(powers, dims, "sum", powers.dtype, powers.dtype)
    meta = call.meta
    return pointwise(
        call.lowering,
        [powers, total],
        lambda a, b: op("div", a, b),
        meta.shape,
        meta.dtype,
        powers.dtype,
        meta.strides,
    )


def log_softmax(call: Call, x: Tensor, dim: int) -> Tensor:
    x, top, powers, dims = _exponentials(call, x, dim)
    total = reduce(powers, dims, "sum", x.dtype, x.dtype, None, lambda v: op("log", v))
    meta = call.meta
    return pointwise(
        call.lowering,
        [x, top, total],
        lambda v, m, t: op("sub", op("sub", v, m), t),
        meta.shape,
        meta.dtype,
        x.dtype,
        meta.strides,
    )


@lowers(*named("_softmax"))
def _softmax(call: Call, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    return softmax(call, x, dim)


@lowers(*named("_log_softmax"))
def _log_softmax(call: Call, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    return log_softmax(call, x, dim)


@lowers(*named("_safe_softmax"))
def _safe_softmax(call: Call, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of nothing but -inf give 0."""
    x = x if dtype is None else converted(x, dtype)
    _, top, powers, dims = _exponentials(call, x, dim)
    total = reduce(powers, dims, "sum", powers.dtype, powers.dtype)

    def fn(a: Value, b: Value, m: Value) -> Value:
        empty = op("eq", m, const(m, float("-inf")))
        table = a.table
        return table.make("where", (empty, const(a, 0), op("div", a, b)), a.dtype)

    meta = call.meta
    return pointwise(
        call.lowering, [powers, total, top], fn, meta.shape, meta.dtype, powers.dtype, meta.strides
    )


# ------------------------------------------------------------------------------ norms


def _rsqrt_of(eps: float) -> Map:
    return lambda v: op("rsqrt", op("add", v, const(v, eps)))


def normalised(
    call: Call,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """(x - mean) * rstd * weight + bias, in opmath, rounded once."""
    affine = [t for t in (weight, bias) if t is not None]

    def fn(v: Value, m: Value, r: Value, *rest: Value) -> Value:
        y = op("mul", op("sub", v, m), r)
        if weight is not None:
            y = op("mul", y, rest[0])
        return y if bias is None else op("add", y, rest[-1])

    meta = call.meta
    operands = [x, mean, rstd, *affine]
    compute = opmath(x.dtype)
    return pointwise(call.lowering, operands, fn, x.shape, meta.dtype, compute, meta.strides)


@lowers(*named("native_layer_norm"))
def _layer_norm(
    call: Call,
    x: Tensor,
    shape: Sequence[Size],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rank = len(x.shape)
    dims = list(range(rank - len(shape), rank))
    prepared(x, 3)
    mean, rstd = mean_and_squares(x, dims, 0, _rsqrt_of(eps))
    result = normalised(call, x, mean, rstd, weight, bias)
    return result, *_statistics(call, mean, rstd)  # type: ignore[return-value]


def _statistics(call: Call, *found: Tensor) -> tuple[Tensor, ...]:
    """The second and third result, in the shape and dtype that eager gives them."""
    results = []
    for meta, tensor in zip(call.metas[1:], found, strict=False):
        results.append(reshape(converted(tensor, meta.dtype), meta.shape))
    return tuple(results)


def _group_norm_result(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    split: Shape = (x.shape[0], groups, floordiv(x.shape[1], groups), *x.shape[2:])
    prepared(x, 3)
    grouped = reshape(x, split)
    dims = list(range(2, len(split)))
    mean, rstd = mean_and_squares(grouped, dims, 0, _rsqrt_of(eps))

    affine = [None if t is None else channels(x, t) for t in (weight, bias)]
    wide = [per_channel(t, x, groups) for t in (mean, rstd)]
    return normalised(call, x, *wide, *affine), mean, rstd


def per_channel(t: Tensor, x: Tensor, groups: int) -> Tensor:
    """A number per image and group, spread over the channels of `x`."""
    batch, count = x.shape[:2]
    ones = [1] * (len(x.shape) - 2)
    grouped = reshape(t, (batch, groups, 1, *ones))
    wide = expand(grouped, (batch, groups, floordiv(count, groups), *ones))
    return reshape(wide, (batch, count, *ones))


@lowers(*named("native_group_norm"))
def _group_norm(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: Size,
    C: Size,
    HxW: Size,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    result, mean, rstd = _group_norm_result(call, x, weight, bias, group, eps)
    return result, *_statistics(call, mean, rstd)  # type: ignore[return-value]


def _rms(
    call: Call, x: Tensor, rank: int, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = list(range(len(x.shape) - rank, len(x.shape)))
    compute = opmath(x.dtype)
    prepared(x, 2)
    eps = torch.finfo(compute).eps if eps is None else eps
    count = product(x.shape[k] for k in dims)

    def finish(v: Value) -> Value:
        mean = op("div", v, v.table.index(count, v.dtype))
        return op("rsqrt", op("add", mean, const(v, eps)))

    rstd = reduce(x, dims, "sum", compute, compute, lambda v: _square(v, compute), finish)

    def fn(v: Value, r: Value, *w: Value) -> Value:
        y = op("mul", v, r)
        return op("mul", y, w[0]) if w else y

    operands = [x, rstd] if weight is None else [x, rstd, weight]
    meta = call.meta
    result = pointwise(call.lowering, operands, fn, x.shape, meta.dtype, compute, meta.strides)
    return result, rstd


def _square(v: Value, compute: torch.dtype) -> Value:
    wide = v if v.dtype is compute else v.table.make("cast", (v,), compute)
    return op("mul", wide, wide)


@lowers(*named("rms_norm"))
def _rms_norm(
    call: Call,
    x: Tensor,
    shape: Sequence[Size],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    return _rms(call, x, len(shape), weight, eps)[0]


@lowers(*named("_fused_rms_norm"))
def _fused_rms_norm(
    call: Call, x: Tensor, shape: Sequence[Size], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    result, rstd = _rms(call, x, len(shape), weight, eps)
    return result, *_statistics(call, rstd)  # type: ignore[return-value]


# ------------------------------------------------------------------------------ batch norm


def channels(x: Tensor, t: Tensor) -> Tensor:
    """A number per channel, beside the images `x`."""
    return reshape(t, (1, t.shape[0], *([1] * (len(x.shape) - 2))))


def _batch_norm_inference(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
) -> Tensor:
    """ATen folds the statistics into one factor and one summand per channel first; so do we."""
    affine = [t for t in (weight, bias) if t is not None]

    def fn(v: Value, m: Value, s: Value, *rest: Value) -> Value:
        alpha = op("rsqrt", op("add", s, const(s, eps)))
        if weight is not None:
            alpha = op("mul", alpha, rest[0])
        beta = op("neg", op("mul", m, alpha))
        if bias is not None:
            beta = op("sub", rest[-1], op("mul", m, alpha))
        return op("add", op("mul", v, alpha), beta)

    operands = [x, *(channels(x, t) for t in (mean, var, *affine))]
    meta = call.meta
    compute = opmath(x.dtype)
    return pointwise(call.lowering, operands, fn, x.shape, meta.dtype, compute, meta.strides)


def _empty(call: Call, position: int) -> Tensor:
    meta = call.metas[position]
    zero = call.lowering.values.const(0, meta.dtype)
    return call.lowering.computed(meta.shape, meta.dtype, lambda ix: zero)


@lowers(*named("_native_batch_norm_legit_no_training"))
def _batch_norm(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    result = _batch_norm_inference(call, x, weight, bias, running_mean, running_var, eps)
    return result, _empty(call, 1), _empty(call, 2)


def _running(call: Call, old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """The running statistic after this batch."""

    def fn(v: Value, n: Value) -> Value:
        return op("add", op("mul", n, const(n, momentum)), op("mul", v, const(v, 1 - momentum)))

    return pointwise(call.lowering, [old, new], fn, old.shape, old.dtype)


def _batch_norm_training(
    call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result; then per channel the mean, the reciprocal deviation and the unbiased variance."""
    dims = [k for k in range(len(x.shape)) if k != 1]
    prepared(x, 3)
    mean, var = mean_and_squares(x, dims, 0, None)
    rstd = pointwise(call.lowering, [var], _rsqrt_of(eps), var.shape, var.dtype)
    call.lowering.realise(rstd)
    affine = [None if t is None else channels(x, t) for t in (weight, bias)]
    result = normalised(call, x, mean, rstd, affine[0], affine[1])
    count = product(x.shape[k] for k in dims)

    def unbiased(v: Value) -> Value:
        whole, free = v.table.index(count, v.dtype), v.table.index(count - 1, v.dtype)
        return op("mul", v, op("div", whole, free))

    spread = pointwise(call.lowering, [var], unbiased, var.shape, var.dtype)
    flat = [reshape(t, (x.shape[1],)) for t in (mean, rstd, spread)]
    return result, flat[0], flat[1], flat[2]


@lowers(*named("_native_batch_norm_legit", "no_stats"))
def _batch_norm_no_stats(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    result, mean, rstd, _ = _batch_norm_training(call, x, weight, bias, eps)
    return result, *_statistics(call, mean, rstd)  # type: ignore[return-value]


@lowers(*named("_native_batch_norm_legit_functional"))
def _batch_norm_functional(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    if not training:
        result = _batch_norm_inference(call, x, weight, bias, running_mean, running_var, eps)
        return result, _empty(call, 1), _empty(call, 2), running_mean, running_var
    result, mean, rstd, spread = _batch_norm_training(call, x, weight, bias, eps)
    new_mean = _running(call, running_mean, mean, momentum)
    new_var = _running(call, running_var, spread, momentum)
    return (result, *_statistics(call, mean, rstd), new_mean, new_var)


# ---------------------------------------------------------------------------- norm gradient
# Gradients of softmax and of normalisation: sums along rows, then sums along columns.

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
