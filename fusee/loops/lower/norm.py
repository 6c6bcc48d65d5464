"""Softmax, normalisation, losses: reductions whose results scale the elements they came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.loops import Value, cast, const, op, where
from fusee.loops.lower.index import Refused
from fusee.loops.lower.pointwise import demand, elementwise, pointwise, promote, result, unless
from fusee.loops.lower.reduce import (
    Map,
    count_of,
    divided_by,
    mean_and_squares,
    normal_dims,
    prepared,
    reduce,
)
from fusee.loops.lower.tensor import Index, Meta, OpCall, Tensor, lowers
from fusee.loops.lower.views import converted, expand, reshape
from fusee.loops.operators import Formula, exp, log, log1p, mul, opmath
from fusee.sym import Size, floordiv, product

# ---------------------------------------------------------------------------- softmax


def _exponentials(call: OpCall, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """x in opmath, its maximum, and exp(x - maximum), along one dimension."""
    x = prepared(converted(x, opmath(call.meta.dtype)))
    dims = normal_dims(dim, x)
    top = reduce(x, dims, "max")
    return x, top, elementwise(lambda v, m: exp(v - m), x, top), dims


@lowers("_softmax")
def _softmax(call: OpCall, x: Tensor, dim: int) -> Tensor:
    _, _, powers, dims = _exponentials(call, x, dim)
    return result(call, lambda a, b: a / b, powers, reduce(powers, dims), common=powers.dtype)


@lowers("_log_softmax")
def _log_softmax(call: OpCall, x: Tensor, dim: int) -> Tensor:
    x, top, powers, dims = _exponentials(call, x, dim)
    total = reduce(powers, dims, after=log)
    return result(call, lambda v, m, t: v - m - t, x, top, total, common=x.dtype)


@lowers("_safe_softmax")
def _safe_softmax(call: OpCall, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    """Rows of nothing but -inf give 0."""
    x = x if dtype is None else converted(x, dtype)
    _, top, powers, dims = _exponentials(call, x, dim)

    def fn(a: Value, b: Value, m: Value) -> Value:
        return where(op("eq", m, float("-inf")), 0, a / b)

    return result(call, fn, powers, reduce(powers, dims), top, common=powers.dtype)


def _softmax_backward(summed: Formula, combined: Formula) -> Callable[..., Tensor]:
    """From the gradient and the result, `summed` being what is added up along `dim`."""

    def handler(call: OpCall, grad: Tensor, y: Tensor, dim: int) -> Tensor:
        compute = opmath(y.dtype)
        total = reduce(elementwise(summed, y, prepared(grad)), normal_dims(dim, y))
        return result(call, combined, grad, y, total, common=compute)

    return handler


lowers("_softmax_backward_data")(
    _softmax_backward(lambda y, grad: grad * y, lambda grad, y, total: (grad - total) * y)
)
lowers("_log_softmax_backward_data")(
    _softmax_backward(lambda y, grad: grad, lambda grad, y, total: grad - exp(y) * total)
)

# ---------------------------------------------------------------------------- forward


def _rsqrt_of(eps: float) -> Map:
    return lambda v: op("rsqrt", v + eps)


def _affine(
    call: OpCall,
    formula: Formula,
    *operands: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """formula(operands) * weight + bias, computed as the first operand is and rounded once."""
    several = len(operands)

    def fn(*values: Value) -> Value:
        y, rest = formula(*values[:several]), values[several:]
        if weight is not None:
            y = y * rest[0]
        return y if bias is None else y + rest[-1]

    x, meta = operands[0], call.meta
    strides = meta.strides if x.shape == meta.shape else None
    given = *operands, weight, bias
    found = pointwise(call.lowering, given, fn, x.shape, meta.dtype, opmath(x.dtype), strides)
    return reshape(found, meta.shape)


def _scaled(v: Value, mean: Value, rstd: Value) -> Value:
    return (v - mean) * rstd


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean) * rstd in opmath."""
    return elementwise(_scaled, x, mean, rstd)


def _statistics(call: OpCall, *found: Tensor) -> list[Tensor]:
    """Results from the second on, in the shape and dtype that eager gives them."""
    return [
        reshape(converted(t, meta.dtype), meta.shape)
        for meta, t in zip(call.metas[1:], found, strict=False)
    ]


@lowers("native_layer_norm")
def _layer_norm(
    call: OpCall,
    x: Tensor,
    shape: Sequence[Size],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> list[Tensor]:
    rank = len(prepared(x).shape)
    mean, rstd = mean_and_squares(x, range(rank - len(shape), rank), 0, _rsqrt_of(eps))
    found = _affine(call, _scaled, x, mean, rstd, weight=weight, bias=bias)
    return [found, *_statistics(call, mean, rstd)]


def _beside(x: Tensor, *given: Tensor | None) -> list[Any]:
    """Tensors with a number per channel, beside the images `x`."""
    ones = [1] * (len(x.shape) - 2)
    return [t and reshape(t, (1, t.shape[0], *ones)) for t in given]


def _per_channel(t: Tensor, x: Tensor, groups: int) -> Tensor:
    """A number per image and group, spread over the channels of `x`.

    Where channels lie last it is one for each channel in memory, too: lanes run along channels.
    Where threads share a group, fusion decides: it may be one kernel.
    """
    batch, count = x.shape[:2]
    ones = [1] * (len(x.shape) - 2)
    grouped = reshape(t, (batch, groups, 1, *ones))
    wide = expand(grouped, (batch, groups, floordiv(count, groups), *ones))
    found = reshape(wide, (batch, count, *ones))
    if _lies_last(x) and not t.lowering.values.profile.shares:
        t.lowering.realise(found)
    return found


def _lies_last(x: Tensor) -> bool:
    """Whether channels lie last, so that lanes are channels."""
    return (x.eager_strides if x.storage is None else x.storage.strides)[1] == 1


def _in_groups(x: Tensor, groups: int) -> Tensor:
    return reshape(x, (x.shape[0], groups, floordiv(x.shape[1], groups), *x.shape[2:]))


@lowers("native_group_norm")
def _group_norm(
    call: OpCall, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, group: int, eps: float
) -> list[Tensor]:
    grouped = _in_groups(prepared(x), group)

    def spread(mean: Tensor) -> Tensor:
        return _in_groups(_per_channel(mean, x, group), group)

    dims = range(2, len(grouped.shape))
    mean, rstd = mean_and_squares(grouped, dims, 0, _rsqrt_of(eps), spread)
    wide = [x, *(_per_channel(t, x, group) for t in (mean, rstd))]
    weight, bias = _beside(x, weight, bias)
    if not _lies_last(x) and not call.lowering.values.profile.shares:
        wide = [grouped, mean, rstd]  # so that a group may be stored while it is near
        weight, bias = (t and _in_groups(t, group) for t in (weight, bias))
    found = _affine(call, _scaled, *wide, weight=weight, bias=bias)
    return [found, *_statistics(call, mean, rstd)]


@lowers("rms_norm _fused_rms_norm")
def _rms_norm(
    call: OpCall, x: Tensor, shape: Sequence[Size], weight: Tensor | None, eps: float | None
) -> Tensor | list[Tensor]:
    dims = range(len(x.shape) - len(shape), len(x.shape))
    least = torch.finfo(opmath(x.dtype)).eps if eps is None else eps
    count = count_of(prepared(x), dims)

    def finish(v: Value) -> Value:
        return op("rsqrt", v / v.table.index(count, v.dtype) + least)

    rstd = reduce(x, dims, before=lambda v: v * v, after=finish)
    found = _affine(call, mul, x, rstd, weight=weight)
    return found if len(call.metas) == 1 else [found, *_statistics(call, rstd)]


# ---------------------------------------------------------------------------- batch norm


def _training(
    call: OpCall, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[list[Tensor], list[Tensor]]:
    """The results; then per channel the mean and the unbiased variance."""
    dims = [k for k in range(len(x.shape)) if k != 1]
    mean, var = mean_and_squares(prepared(x), dims, 0, None)

    def root(v: Value) -> Value:
        # In float32 `+ eps` rounds all variances of one binade to the same side: errors of channels
        # would add up. ATen has float64 here, too, on CPUs.
        return cast(op("rsqrt", cast(v, torch.float64) + eps), v.dtype)

    of_threads = call.lowering.values.profile.shares
    rstd = elementwise(_rsqrt_of(eps) if of_threads else root, var)
    call.lowering.realise(rstd)
    weight, bias = _beside(x, weight, bias)
    found = _affine(call, _scaled, x, mean, rstd, weight=weight, bias=bias)
    count = count_of(x, dims)

    def unbiased(v: Value) -> Value:
        return v * (v.table.index(count, v.dtype) / v.table.index(count - 1, v.dtype))

    flat = [reshape(t, (x.shape[1],)) for t in (mean, rstd, elementwise(unbiased, var))]
    return [found, *_statistics(call, *flat[:2])], [flat[0], flat[2]]


@lowers(
    "_native_batch_norm_legit.no_stats"
    " _native_batch_norm_legit_no_training _native_batch_norm_legit_functional"
)
def _batch_norm(
    call: OpCall,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    running_mean: Any = None,
    running_var: Any = None,
    training: bool = False,
    momentum: float,
    eps: float,
) -> list[Tensor]:
    olds = [running_mean, running_var]
    if training:
        results, batch = _training(call, x, weight, bias, eps)

        def running(old: Value, new: Value) -> Value:
            return new * momentum + old * (1 - momentum)

        pairs = zip(olds, batch) if running_mean is not None else ()
        return [*results, *(elementwise(running, old, new, dtype=old.dtype) for old, new in pairs)]

    def folded(m: Value, s: Value, *rest: Value) -> tuple[Value, Value]:
        """ATen makes one factor and one summand of the statistics first; so do we."""
        alpha = op("rsqrt", s + eps)
        if weight is not None:
            alpha = alpha * rest[0]
        return alpha, -(m * alpha) if bias is None else rest[-1] - m * alpha

    def fn(v: Value, *rest: Value) -> Value:
        alpha, beta = folded(*rest)
        return v * alpha + beta

    given, common = _beside(x, *olds, weight, bias), opmath(x.dtype)
    if _lies_last(x) and not call.lowering.values.profile.shares:  # else lanes compute all of it
        parts = [elementwise(lambda *v, k=k: folded(*v)[k], *given) for k in (0, 1)]
        for part in parts:
            call.lowering.realise(part)
        found = result(call, lambda v, a, b: v * a + b, x, *parts, common=common)
    else:
        found = result(call, fn, x, *given, common=common)
    if all(0 in meta.shape for meta in call.metas[1:3]):  # as on a CPU
        of_batch = [call.lowering.filled((0,), 0, meta.dtype) for meta in call.metas[1:3]]
    else:
        of_batch = _statistics(call, running_mean, elementwise(_rsqrt_of(eps), running_var))
    return [found, *of_batch, *olds][: len(call.metas)]


# ---------------------------------------------------------------------------- gradients
# Gradients of normalisation: sums along rows, then sums along columns.

Gradients = list[Tensor | None]  # a tensor for each result that is wanted, None for the others


def _wanted(call: OpCall, mask: Sequence[bool]) -> list[Meta | None]:
    """The meta of each result; None where the mask says that nobody wants it."""
    metas = iter(call.metas)
    return [next(metas) if wanted else None for wanted in mask]


def _product(x: Tensor, y: Tensor | None) -> Tensor:
    """In opmath; None counts as 1."""
    return converted(x, opmath(x.dtype)) if y is None else elementwise(mul, x, y)


def _totals(
    terms: Sequence[Tensor], dims: Sequence[int], metas: Sequence[Meta | None]
) -> Gradients:
    """The gradients of weight and bias; of the terms the bias's come first."""
    return [
        None if meta is None else reshape(reduce(t, dims, dtype=meta.dtype), meta.shape)
        for t, meta in zip(reversed(terms), metas, strict=True)
    ]


def _terms(grad: Tensor, normal: Tensor) -> list[Tensor]:
    """What bias and weight sum up: grad and grad * normal."""
    return [converted(grad, normal.dtype), _product(grad, normal)]


def _share(plain: Value, turned: Value, normal: Value, count: Size) -> Value:
    """What all elements of a row have to give: the divisions do not depend on the element."""
    number = plain.table.index(count, plain.dtype)
    return plain / number + normal * (turned / number)


def _of_rows(
    scaled: Tensor,
    normal: Tensor,
    rstd: Tensor,
    dims: Sequence[int],
    dtype: torch.dtype,
    sums: Sequence[Tensor] = (),
) -> Tensor:
    """rstd * (g - mean(g) - n * mean(g * n)) for g = scaled, n the normalised rows.

    sums   of g and of g * n, where they are known
    """
    plain, turned = sums or [reduce(t, dims) for t in (scaled, _product(scaled, normal))]
    count = count_of(scaled, dims)

    def fn(g: Value, n: Value, r: Value, a: Value, b: Value) -> Value:
        return r * (g - _share(a, b, n, count))

    return elementwise(fn, scaled, normal, rstd, plain, turned, dtype=dtype)


@lowers("native_layer_norm_backward")
def _layer_norm_backward(
    call: OpCall,
    grad: Tensor,
    x: Tensor,
    shape: Sequence[Size],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    output_mask: Sequence[bool],
) -> Gradients:
    rank = len(x.shape)
    outer = rank - len(shape)
    prepared(grad)
    prepared(x)
    normal = _normalised(x, mean, rstd)
    of_x, *others = _wanted(call, output_mask)
    scaled = _product(grad, weight)
    columns = range(outer, rank)
    found = None if of_x is None else _of_rows(scaled, normal, rstd, columns, of_x.dtype)
    return [found, *_totals(_terms(grad, normal), range(outer), others)]


@lowers("native_group_norm_backward")
def _group_norm_backward(
    call: OpCall,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    group: int,
    output_mask: Sequence[bool],
) -> Gradients:
    prepared(grad)
    prepared(x)
    normal = _normalised(x, *(_per_channel(t, x, group) for t in (mean, rstd)))
    of_x, *others = _wanted(call, output_mask)
    (weight,) = _beside(x, weight)
    rows, rest = _in_groups(_product(grad, weight), group), [0, *range(2, len(x.shape))]
    inner = range(2, len(rows.shape))
    sums: list[Tensor] = []
    terms = _terms(grad, normal)
    if not call.lowering.values.profile.shares:
        # both are made of sums over the pixels of each channel; threads that share a group pass
        # over it once for all
        terms, rest = [reduce(_in_groups(t, group), inner[1:]) for t in terms], [0]
        scale = weight and _in_groups(weight, group)
        sums = [reduce(_product(t, scale), inner[:1]) for t in terms]
    found: Tensor | None = None
    if of_x is not None:
        each = reshape(rstd, (x.shape[0], group, *([1] * len(inner))))
        found = _of_rows(rows, _in_groups(normal, group), each, inner, of_x.dtype, sums)
        found = reshape(found, x.shape)
    return [found, *_totals(terms, rest, others)]


@lowers("native_batch_norm_backward batch_norm_backward")
def _batch_norm_backward(
    call: OpCall,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    rstd: Tensor,
    training: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Gradients:
    if not training:
        mean = running_mean
        rstd = elementwise(_rsqrt_of(eps), running_var, dtype=opmath(x.dtype))
    rest = [k for k in range(len(x.shape)) if k != 1]
    count = count_of(x, rest)
    prepared(grad)
    prepared(x)
    mean, rstd, weight = _beside(x, mean, rstd, weight)
    normal = _normalised(x, mean, rstd)
    of_x, *others = _wanted(call, output_mask)
    plain, turned = (reduce(t, rest) for t in _terms(grad, normal))

    def fn(g: Value, n: Value, r: Value, a: Value, b: Value, *w: Value) -> Value:
        if training:
            g = g - _share(a, b, n, count)
        return g * (r * w[0] if w else r)

    operands = grad, normal, rstd, plain, turned, weight
    return [
        None if of_x is None else result(call, fn, *operands, common=normal.dtype),
        *(
            None if meta is None else converted(reshape(t, meta.shape), meta.dtype)
            for t, meta in zip((turned, plain), others, strict=True)
        ),
    ]


# ---------------------------------------------------------------------------- loss
# Losses and their gradients.
#
# source   aten/src/ATen/native/LossNLL.cpp, LossNLL2d.cpp, Loss.cpp, cpu/PointwiseOpsKernel.cpp


NONE, MEAN = 0, 1  # at::Reduction; 2 is the sum


def _averaged(x: Tensor, reduction: int, value: Value) -> Value:
    """`value` over the number of elements, if the loss is a mean."""
    return divided_by(product(x.shape))(value) if reduction == MEAN else value


def _distance_backward(formula: Callable[[Value, Any], Value]) -> Callable[..., Tensor]:
    """The gradient of a loss of x - target; formula(x - target, option) is that of one element."""

    def handler(
        call: OpCall, grad: Tensor, x: Tensor, target: Tensor, reduction: int, option: Any = None
    ) -> Tensor:
        def fn(g: Value, a: Value, b: Value) -> Value:
            return _averaged(x, reduction, formula(a - b, option)) * g

        return result(call, fn, grad, x, target, common=promote((x, target)))

    return handler


def _clipped(x: Value, limit: float, slope: float, inner: Value) -> Value:
    """-slope up to -limit, `inner` in between, slope from limit on."""
    upper = const(x, slope)
    return where(x <= -limit, -upper, where(x >= limit, upper, inner))


lowers("mse_loss_backward")(_distance_backward(lambda x, _: 2 * x))
lowers("huber_loss_backward")(_distance_backward(lambda x, delta: _clipped(x, delta, delta, x)))
lowers("smooth_l1_loss_backward")(
    _distance_backward(lambda x, beta: _clipped(x, beta, 1, x / beta))
)


@lowers("binary_cross_entropy")
def _binary_cross_entropy(
    call: OpCall, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> Tensor:
    meta = call.meta
    words = "all elements of {} should be between 0 and 1"
    refused = [call.lowering.message(RuntimeError, words.format(x)) for x in ("input", "target")]

    def checked(*given: Value) -> list[Value]:
        numbers = [cast(v, opmath(meta.dtype)) for v in given]
        return [unless(~((v >= 0) & (v <= 1)), text, v) for v, text in zip(numbers, refused)]

    def fn(*given: Value) -> Value:
        a, b = checked(*given[:2])
        yes, no = op("maximum", log(a), -100), op("maximum", log1p(-a), -100)
        value = (b - 1) * no - b * yes
        return value * given[2] if given[2:] else value

    # the first bad place is told, and of two there the input: the last operand is computed first
    demand(lambda a, b: op("add", *reversed(checked(a, b))), x, target)
    if reduction == NONE:
        return result(call, fn, x, target, weight)
    losses = elementwise(fn, x, target, weight)
    after = divided_by(product(x.shape)) if reduction == MEAN else None
    return reshape(reduce(losses, range(len(x.shape)), dtype=meta.dtype, after=after), ())


@lowers("binary_cross_entropy_backward")
def _binary_cross_entropy_backward(
    call: OpCall, grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> Tensor:
    def fn(g: Value, a: Value, b: Value, *w: Value) -> Value:
        value = g * (a - b) / op("maximum", (1 - a) * a, 1e-12)
        return _averaged(x, reduction, value * w[0] if w else value)

    return result(call, fn, grad, x, target, weight)


@lowers("soft_margin_loss_backward")
def _soft_margin_backward(
    call: OpCall, grad: Tensor, x: Tensor, target: Tensor, reduction: int
) -> Tensor:
    """-y * z / (1 + z) for z = exp(-y * x): sigmoid(y * x) - 1 would lose all its digits."""

    def fn(g: Value, a: Value, y: Value) -> Value:
        power = exp(-(y * a))
        return -_averaged(x, reduction, y * power / (1 + power)) * g

    return result(call, fn, grad, x, target)


# ---------------------------------------------------------------------------- likelihood


_TARGET = Refused(IndexError, "Target {} is out of bounds.")


def _class_axis(x: Tensor) -> int:
    return min(len(x.shape) - 1, 1)


@lowers("nll_loss_forward nll_loss2d_forward")
def _nll_loss_forward(
    call: OpCall, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    lowering, axis = call.lowering, _class_axis(x)
    compute = opmath(x.dtype)
    lowering.realise(target)
    if not target.shape and len(x.shape) == 1:
        target = reshape(target, (1,))
        x = reshape(x, (1, *x.shape))
        axis, reduction = 1, reduction or 2

    in_range = _TARGET.of(lowering, x.shape[axis])

    def checked(target: Value) -> Value:
        label = cast(target, torch.int64)
        return in_range(where(op("ne", label, ignored), label, 0))

    demand(checked, target)

    def of_kept(ix: Index, element: Callable[[Any], Value]) -> Value:
        """What `element` makes of the class; 0 where it is ignored."""
        value = target.at(ix)
        found = element(lowering.values.indirect(checked(value), x.shape[axis]))
        return where(op("ne", cast(value, torch.int64), ignored), found, 0)

    def factor(label: Any) -> Value:
        return lowering.number(1, compute) if weight is None else cast(weight.at((label,)), compute)

    def loss(ix: Index) -> Value:
        def element(label: Any) -> Value:
            value = -cast(x.at((*ix[:axis], label, *ix[axis:])), compute)
            return value if weight is None else value * factor(label)

        return of_kept(ix, element)

    losses = lowering.computed(target.shape, compute, loss, (x, target))
    first, second = call.metas
    if reduction == NONE:
        return result(call, lambda v: v, losses, common=compute), lowering.filled(
            (), 0, second.dtype
        )
    shares = lowering.computed(target.shape, compute, lambda ix: of_kept(ix, factor), (target,))
    whole, total = (reshape(reduce(t, range(len(t.shape))), ()) for t in (shares, losses))
    found = elementwise(
        lambda t, w: t / w if reduction == MEAN else t, total, whole, dtype=first.dtype
    )
    return found, elementwise(lambda v: v, whole, dtype=second.dtype)


@lowers("nll_loss_backward nll_loss2d_backward")
def _nll_loss_backward(
    call: OpCall,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: Tensor,
) -> Tensor:
    """Read at each class and not scattered, so that the gradient of log_softmax takes it in."""
    lowering, axis, meta = call.lowering, _class_axis(x), call.meta
    compute = opmath(meta.dtype)
    lowering.realise(target)

    def at(ix: Index) -> Value:
        row = (*ix[:axis], *ix[axis + 1 :])
        label = cast(target.at(row), torch.int64)
        is_it = op("eq", label, lowering.values.index(ix[axis]))
        value = -cast(grad.at(row if grad.shape and len(x.shape) > 1 else ()), compute)
        if weight is not None:
            value = value * cast(weight.at((ix[axis],)), compute)
        if reduction == MEAN:
            value = value / cast(total_weight.at(()), compute)
        return cast(where(is_it & op("ne", label, ignored), value, 0), meta.dtype)

    operands = [t for t in (grad, target, weight, total_weight) if t is not None]
    return call.computed(at, *operands)
