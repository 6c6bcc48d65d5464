"""Losses and their gradients.

source   aten/src/ATen/native/LossNLL.cpp, LossNLL2d.cpp, Loss.cpp, cpu/PointwiseOpsKernel.cpp
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusee.loops.ir import Value, cast, const, op, where
from fusee.loops.lower.index import Refused
from fusee.loops.lower.pointwise import demand, elementwise, result, unless
from fusee.loops.lower.reduce import divided_by, reduce
from fusee.loops.lower.tensor import Call, Index, Tensor, lowers, opmath
from fusee.loops.lower.views import reshape
from fusee.loops.operators import exp, log, log1p, named
from fusee.sym.expr import product

NONE, MEAN = 0, 1  # at::Reduction; 2 is the sum


def _averaged(x: Tensor, reduction: int, value: Value) -> Value:
    """`value` over the number of elements, if the loss is a mean."""
    return divided_by(product(x.shape))(value) if reduction == MEAN else value


# ---------------------------------------------------------------------------- distances


def _distance_backward(formula: Callable[[Value, Any], Value]) -> Callable[..., Tensor]:
    """The gradient of a loss of x - target; formula(x - target, option) is that of one element."""

    def handler(
        call: Call, grad: Tensor, x: Tensor, target: Tensor, reduction: int, option: Any = None
    ) -> Tensor:
        def fn(g: Value, a: Value, b: Value) -> Value:
            return _averaged(x, reduction, formula(a - b, option)) * g

        return result(call, fn, grad, x, target)

    return handler


def _clipped(x: Value, limit: float, slope: float, inner: Value) -> Value:
    """-slope up to -limit, `inner` in between, slope from limit on."""
    upper = const(x, slope)
    return where(x <= -limit, -upper, where(x >= limit, upper, inner))


lowers(*named("mse_loss_backward"))(_distance_backward(lambda x, _: 2 * x))
lowers(*named("huber_loss_backward"))(
    _distance_backward(lambda x, delta: _clipped(x, delta, delta, x))
)
lowers(*named("smooth_l1_loss_backward"))(
    _distance_backward(lambda x, beta: _clipped(x, beta, 1, x / beta))
)


@lowers(*named("binary_cross_entropy"))
def _binary_cross_entropy(
    call: Call, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> Tensor:
    meta = call.meta
    message = call.lowering.message(RuntimeError, "all elements of input should be between 0 and 1")

    def probability(a: Value) -> Value:
        return unless(~((a >= 0) & (a <= 1)), message, a)

    def fn(a: Value, b: Value, *w: Value) -> Value:
        a = probability(a)
        yes, no = op("maximum", log(a), -100), op("maximum", log1p(-a), -100)
        value = (b - 1) * no - b * yes
        return value * w[0] if w else value

    demand(x, lambda v: probability(cast(v, opmath(meta.dtype))))
    operands = [x, target] if weight is None else [x, target, weight]
    if reduction == NONE:
        return result(call, fn, *operands)
    losses = elementwise(fn, *operands)
    after = divided_by(product(x.shape)) if reduction == MEAN else None
    total = reduce(losses, range(len(x.shape)), dtype=meta.dtype, after=after)
    return reshape(total, ())


@lowers(*named("binary_cross_entropy_backward"))
def _binary_cross_entropy_backward(
    call: Call, grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> Tensor:
    def fn(g: Value, a: Value, b: Value, *w: Value) -> Value:
        value = g * (a - b) / op("maximum", (1 - a) * a, 1e-12)
        return _averaged(x, reduction, value * w[0] if w else value)

    return result(call, fn, grad, x, target, *([] if weight is None else [weight]))


@lowers(*named("soft_margin_loss_backward"))
def _soft_margin_backward(
    call: Call, grad: Tensor, x: Tensor, target: Tensor, reduction: int
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


@lowers(*named("nll_loss_forward nll_loss2d_forward"))
def _nll_loss_forward(
    call: Call, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    lowering, axis = call.lowering, _class_axis(x)
    compute = opmath(x.dtype)
    lowering.realise(target)
    if not target.shape and len(x.shape) == 1:
        target = reshape(target, (1,))
        x = reshape(x, (1, *x.shape))
        axis, reduction = 1, reduction or 2

    def checked(target: Value) -> Value:
        label = cast(target, torch.int64)
        return _TARGET.of(lowering, where(op("ne", label, ignored), label, 0), x.shape[axis])

    demand(target, checked)

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


@lowers(*named("nll_loss_backward nll_loss2d_backward"))
def _nll_loss_backward(
    call: Call,
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
    return lowering.computed(meta.shape, meta.dtype, at, operands, meta.strides)
