"""Losses and their gradients.

source   aten/src/ATen/native/LossNLL.cpp, LossNLL2d.cpp, Loss.cpp, cpu/PointwiseOpsKernel.cpp
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusee.loops.ir import Value, cast, op, where
from fusee.loops.lower.index import Refused
from fusee.loops.lower.pointwise import const, demand, pointwise, test, unless
from fusee.loops.lower.reduce import divided_by, reduce
from fusee.loops.lower.tensor import Call, Index, Tensor, lowers, named, opmath
from fusee.loops.lower.views import reshape
from fusee.sym.expr import product

NONE, MEAN = 0, 1  # at::Reduction; 2 is the sum


def _averaged(call: Call, x: Tensor, reduction: int, value: Value) -> Value:
    """`value` over the number of elements, if the loss is a mean."""
    if reduction != MEAN:
        return value
    return op("div", value, call.lowering.values.index(product(x.shape), value.dtype))


# ------------------------------------------------------------------------------ distances


def _distance_backward(
    formula: Callable[[Value, Any], Value],
) -> Callable[..., Tensor]:
    """The gradient of a loss of x - target; formula(x - target, option) is that of one element."""

    def handler(
        call: Call, grad: Tensor, x: Tensor, target: Tensor, reduction: int, option: Any = None
    ) -> Tensor:
        def fn(g: Value, a: Value, b: Value) -> Value:
            steep = formula(op("sub", a, b), option)
            return op("mul", _averaged(call, x, reduction, steep), g)

        meta = call.meta
        operands = [grad, x, target]
        return pointwise(call.lowering, operands, fn, meta.shape, meta.dtype, None, meta.strides)

    return handler


def _clipped(x: Value, limit: float, slope: Value, inner: Value) -> Value:
    """-slope up to -limit, `inner` in between, slope from limit on."""
    upper = where(test("ge", x, limit), slope, inner)
    return where(test("le", x, -limit), op("neg", slope), upper)


def _huber(x: Value, delta: float) -> Value:
    return _clipped(x, delta, const(x, delta), x)


def _smooth_l1(x: Value, beta: float) -> Value:
    return _clipped(x, beta, const(x, 1), op("div", x, const(x, beta)))


lowers(*named("mse_loss_backward"))(_distance_backward(lambda x, _: op("mul", const(x, 2), x)))
lowers(*named("huber_loss_backward"))(_distance_backward(_huber))
lowers(*named("smooth_l1_loss_backward"))(_distance_backward(_smooth_l1))


@lowers(*named("binary_cross_entropy"))
def _binary_cross_entropy(
    call: Call, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    compute, meta = opmath(call.meta.dtype), call.meta
    message = call.lowering.message(RuntimeError, "all elements of input should be between 0 and 1")

    def probability(a: Value) -> Value:
        inside = op("and", test("ge", a, 0), test("le", a, 1))
        return unless(op("not", inside), message, a)

    def fn(a: Value, b: Value, *w: Value) -> Value:
        a = probability(a)
        yes = op("maximum", op("log", a), const(a, -100))
        no = op("maximum", op("log1p", op("neg", a)), const(a, -100))
        value = op("sub", op("mul", op("sub", b, const(b, 1)), no), op("mul", b, yes))
        return op("mul", value, w[0]) if w else value

    demand(x, lambda v: probability(cast(v, compute)))
    operands = [x, target] if weight is None else [x, target, weight]
    if reduction == NONE:
        return pointwise(call.lowering, operands, fn, meta.shape, meta.dtype, None, meta.strides)
    losses = pointwise(call.lowering, operands, fn, x.shape, compute)
    after = divided_by(product(x.shape)) if reduction == MEAN else None
    dims = list(range(len(x.shape)))
    return reshape(reduce(losses, dims, "sum", compute, meta.dtype, None, after), ())


@lowers(*named("binary_cross_entropy_backward"))
def _binary_cross_entropy_backward(
    call: Call,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    def fn(g: Value, a: Value, b: Value, *w: Value) -> Value:
        spread = op("maximum", op("mul", op("sub", const(a, 1), a), a), const(a, 1e-12))
        value = op("div", op("mul", g, op("sub", a, b)), spread)
        return _averaged(call, x, reduction, op("mul", value, w[0]) if w else value)

    meta = call.meta
    operands = [grad, x, target] if weight is None else [grad, x, target, weight]
    return pointwise(call.lowering, operands, fn, meta.shape, meta.dtype, None, meta.strides)


@lowers(*named("soft_margin_loss_backward"))
def _soft_margin_backward(
    call: Call, grad: Tensor, x: Tensor, target: Tensor, reduction: int
) -> Tensor:
    """-y * z / (1 + z) for z = exp(-y * x): sigmoid(y * x) - 1 would lose all its digits."""

    def fn(g: Value, a: Value, y: Value) -> Value:
        power = op("exp", op("neg", op("mul", y, a)))
        share = op("div", op("mul", y, power), op("add", const(a, 1), power))
        return op("mul", op("neg", _averaged(call, x, reduction, share)), g)

    meta = call.meta
    operands = [grad, x, target]
    return pointwise(call.lowering, operands, fn, meta.shape, meta.dtype, None, meta.strides)


# ------------------------------------------------------------------------------ likelihood


_TARGET = Refused(IndexError, "Target {} is out of bounds.")


def _class_axis(x: Tensor) -> int:
    return min(len(x.shape) - 1, 1)


def _is_kept(target: Value, ignored: int) -> Value:
    return test("ne", target, ignored)


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
        label = where(_is_kept(label, ignored), label, const(label, 0))
        return _TARGET.of(lowering, label, x.shape[axis])

    demand(target, checked)

    def row(ix: Index) -> tuple[Value, Any]:
        label = target.at(ix)
        place = lowering.values.indirect(checked(label), x.shape[axis])
        return _is_kept(cast(label, torch.int64), ignored), place

    def share(ix: Index) -> Value:
        kept, label = row(ix)
        one = lowering.number(1, compute)
        known = one if weight is None else cast(weight.at((label,)), compute)
        return where(kept, known, const(known, 0))

    def loss(ix: Index) -> Value:
        kept, label = row(ix)
        value = op("neg", cast(x.at((*ix[:axis], label, *ix[axis:])), compute))
        if weight is not None:
            value = op("mul", value, cast(weight.at((label,)), compute))
        return where(kept, value, const(value, 0))

    losses = lowering.computed(target.shape, compute, loss, (x, target))
    first, second = call.metas
    if reduction == NONE:
        zero = lowering.number(0, second.dtype)
        found = pointwise(lowering, [losses], lambda v: v, first.shape, first.dtype, compute)
        return found, lowering.computed((), second.dtype, lambda ix: zero)
    shares = lowering.computed(target.shape, compute, share, (target,))
    dims = list(range(len(target.shape)))
    whole = reshape(reduce(shares, dims, "sum", compute, compute), ())
    total = reshape(reduce(losses, dims, "sum", compute, compute), ())

    def finish(t: Value, w: Value) -> Value:
        return op("div", t, w) if reduction == MEAN else t

    found = pointwise(lowering, [total, whole], finish, (), first.dtype, compute)
    return found, pointwise(lowering, [whole], lambda v: v, (), second.dtype, compute)


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
        label = cast(target.at((*ix[:axis], *ix[axis + 1 :])), torch.int64)
        is_it = op("eq", label, lowering.values.index(ix[axis]))
        each = grad.shape and len(x.shape) > 1
        value = cast(grad.at((*ix[:axis], *ix[axis + 1 :]) if each else ()), compute)
        value = op("neg", value)
        if weight is not None:
            value = op("mul", value, cast(weight.at((ix[axis],)), compute))
        if reduction == MEAN:
            value = op("div", value, cast(total_weight.at(()), compute))
        chosen = op("and", is_it, _is_kept(label, ignored))
        return cast(where(chosen, value, const(value, 0)), meta.dtype)

    operands = [t for t in (grad, target, weight, total_weight) if t is not None]
    return lowering.computed(meta.shape, meta.dtype, at, operands, meta.strides)
