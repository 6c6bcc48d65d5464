"""ATen's reductions: sums, moments, extremes, truth, vector norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusee.loops.ir import Value, cast, op, where
from fusee.loops.lower.formulas import abs_, const, is_true, test
from fusee.loops.lower.numbers import opmath
from fusee.loops.lower.pointwise import pointwise
from fusee.loops.lower.reduce import (
    Map,
    count_of,
    divided_by,
    dropped,
    normal_dims,
    position,
    prepared,
    reduce,
)
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Tensor

# ------------------------------------------------------------------------------ sums


def _sum_like(
    call: Call, x: Tensor, dims: Any, keepdim: bool, kind: str, after: Map | None
) -> Tensor:
    dtype = call.meta.dtype
    chosen = normal_dims(dims, len(x.shape))
    result = reduce(x, chosen, kind, opmath(dtype), dtype, lambda v: cast(v, dtype), after)
    return dropped(result, chosen, keepdim)


@lowers(*named("sum", "dim_IntList"))
def _sum_dims(call: Call, x: Tensor, dim: Any, keepdim: bool = False, **_: object) -> Tensor:
    return _sum_like(call, x, dim, keepdim, "sum", None)


@lowers(*named("sum"))
def _sum(call: Call, x: Tensor, **_: object) -> Tensor:
    return _sum_like(call, x, None, False, "sum", None)


@lowers(*named("prod", "default", "dim_int"))
def _prod(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, **_: object) -> Tensor:
    return _sum_like(call, x, dim, keepdim, "prod", None)


@lowers(*named("mean", "default", "dim"))
def _mean(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, **_: object) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    return _sum_like(call, x, dims, keepdim, "sum", divided_by(count_of(x, dims)))


def _variance(
    call: Call, x: Tensor, dim: Any, correction: Any, keepdim: bool, finish: Map | None
) -> tuple[Tensor, Tensor]:
    dims = normal_dims(dim, len(x.shape))
    correction = 1 if correction is None else correction
    if isinstance(correction, float) and correction.is_integer():
        correction = int(correction)
    mean, spread = mean_and_squares(x, dims, correction, finish)
    dtype = call.meta.dtype
    return tuple(  # type: ignore[return-value]
        pointwise(x.lowering, [t], lambda v: v, t.shape, dtype) if t.dtype is not dtype else t
        for t in (dropped(spread, dims, keepdim), dropped(mean, dims, keepdim))
    )


def _sqrt(x: Value) -> Value:
    return op("sqrt", x)


@lowers(*named("var", "correction"))
def _var(
    call: Call, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    return _variance(call, x, dim, correction, keepdim, None)[0]


@lowers(*named("std", "correction"))
def _std(
    call: Call, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    return _variance(call, x, dim, correction, keepdim, _sqrt)[0]


@lowers(*named("var_mean", "correction"))
def _var_mean(
    call: Call, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _variance(call, x, dim, correction, keepdim, None)


@lowers(*named("std_mean", "correction"))
def _std_mean(
    call: Call, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _variance(call, x, dim, correction, keepdim, _sqrt)


@lowers(*named("var std", "default", "dim"))
def _var_unbiased(
    call: Call, x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False
) -> Tensor:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    finish = _sqrt if "std" in str(call.op) else None
    return _variance(call, x, dim, int(unbiased), keepdim, finish)[0]


@lowers(*named("logsumexp"))
def _logsumexp(call: Call, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    dtype = call.meta.dtype
    compute = opmath(dtype)
    x = pointwise(x.lowering, [x], lambda v: v, x.shape, compute) if x.dtype is not compute else x
    prepared(x, 2)
    # an infinite maximum is left out: inf - inf is NaN, but exp(inf) and exp(-inf) are right
    top = reduce(x, dims, "max", compute, compute, None, _finite_or_zero)
    shifted = pointwise(
        x.lowering, [x, top], lambda v, m: op("exp", op("sub", v, m)), x.shape, compute
    )
    total = reduce(shifted, dims, "sum", compute, compute, None, lambda v: op("log", v))
    result = pointwise(x.lowering, [total, top], lambda a, b: op("add", a, b), total.shape, dtype)
    return dropped(result, dims, keepdim)


def _finite_or_zero(x: Value) -> Value:
    return where(op("eq", op("abs", x), const(x, float("inf"))), const(x, 0), x)


def mean_and_squares(
    x: Tensor, dims: Sequence[int], correction: Any, finish: Map | None
) -> tuple[Tensor, Tensor]:
    """The mean, and finish(variance), both with the reduced dimensions kept, in opmath."""
    compute = opmath(x.dtype)
    prepared(x, 2)
    count = count_of(x, dims)
    mean = reduce(x, dims, "sum", compute, compute, None, divided_by(count))
    centred = pointwise(
        x.lowering,
        [x, mean],
        lambda v, m: op("mul", op("sub", v, m), op("sub", v, m)),
        x.shape,
        compute,
    )

    def variance(total: Value) -> Value:
        free = count - correction if isinstance(correction, int) else None
        if isinstance(free, int):
            below = const(total, max(free, 0))
        elif free is not None:
            below = op("maximum", total.table.index(free, total.dtype), const(total, 0))
        else:
            left = op("sub", total.table.index(count, total.dtype), const(total, correction))
            below = op("maximum", left, const(total, 0))
        value = op("div", total, below)
        return value if finish is None else finish(value)

    return mean, reduce(centred, dims, "sum", compute, compute, None, variance)


# ------------------------------------------------------------------------------ extremes


def extreme(x: Tensor, dims: Sequence[int], high: bool) -> Tensor:
    if x.dtype is torch.bool:
        return reduce(x, dims, "any" if high else "all", torch.bool, torch.bool)
    return reduce(x, dims, "max" if high else "min", opmath(x.dtype), x.dtype)


@lowers(*named("amax"))
def _amax(call: Call, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    return dropped(extreme(x, dims, True), dims, keepdim)


@lowers(*named("amin"))
def _amin(call: Call, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    return dropped(extreme(x, dims, False), dims, keepdim)


@lowers(*named("aminmax"))
def _aminmax(
    call: Call, x: Tensor, *, dim: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = normal_dims(dim, len(x.shape))
    prepared(x, 2)
    low, high = extreme(x, dims, False), extreme(x, dims, True)
    return dropped(low, dims, keepdim), dropped(high, dims, keepdim)


@lowers(*named("max"))
def _max_all(call: Call, x: Tensor) -> Tensor:
    dims = normal_dims(None, len(x.shape))
    return dropped(extreme(x, dims, True), dims, False)


@lowers(*named("min"))
def _min_all(call: Call, x: Tensor) -> Tensor:
    dims = normal_dims(None, len(x.shape))
    return dropped(extreme(x, dims, False), dims, False)


@lowers(*named("max", "dim"))
def _max_dim(call: Call, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme_and_place(x, dim, keepdim, True, call.used[1])


@lowers(*named("min", "dim"))
def _min_dim(call: Call, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme_and_place(x, dim, keepdim, False, call.used[1])


def _extreme_and_place(
    x: Tensor, dim: int, keepdim: bool, high: bool, placed: bool
) -> tuple[Tensor, Tensor]:
    dims = normal_dims(dim, len(x.shape))
    prepared(x, 2)
    best = dropped(extreme(x, dims, high), dims, keepdim)
    if not placed:
        return best, best
    place = position(x, dims, "argmax" if high else "argmin")
    return best, dropped(place, dims, keepdim)


def _arg(call: Call, x: Tensor, dim: int | None, keepdim: bool, kind: str) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    return dropped(position(x, dims, kind), dims, keepdim)


@lowers(*named("argmax"))
def _argmax(call: Call, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(call, x, dim, keepdim, "argmax")


@lowers(*named("argmin"))
def _argmin(call: Call, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(call, x, dim, keepdim, "argmin")


# ------------------------------------------------------------------------------ truth


def _truth(call: Call, x: Tensor, dim: Any, keepdim: bool, kind: str) -> Tensor:
    # an empty list of dimensions reduces nothing here
    dims = [] if isinstance(dim, (list, tuple)) and not dim else normal_dims(dim, len(x.shape))
    return dropped(reduce(x, dims, kind, torch.bool, call.meta.dtype, is_true), dims, keepdim)


@lowers(*named("any", "default", "dim", "dims"))
def _any(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _truth(call, x, dim, keepdim, "any")


@lowers(*named("all", "default", "dim", "dims"))
def _all(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _truth(call, x, dim, keepdim, "all")


@lowers(*named("count_nonzero", "default", "dim_IntList"))
def _count_nonzero(call: Call, x: Tensor, dim: Any = None) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    counted = reduce(
        x, dims, "sum", torch.int64, torch.int64, lambda v: cast(is_true(v), torch.int64)
    )
    return dropped(counted, dims, False)


# ------------------------------------------------------------------------------ vector norms


def _norm(call: Call, x: Tensor, order: Any, dim: Any, keepdim: bool) -> Tensor:
    dims = normal_dims(dim, len(x.shape))
    dtype = call.meta.dtype
    order = 2.0 if order is None else float(order)
    kind, before, after = _norm_maps(order)
    if order != 0 and dims and all(x.shape[k] == 1 for k in dims):
        kind, before, after = _norm_maps(1)  # of one number: its absolute value, unrounded

    def element(v: Value) -> Value:
        return before(abs_(cast(v, opmath(dtype))))

    return dropped(reduce(x, dims, kind, opmath(dtype), dtype, element, after), dims, keepdim)


def _norm_maps(order: float) -> tuple[str, Map, Map | None]:
    if order == float("inf"):
        return "max", lambda v: v, None
    if order == float("-inf"):
        return "min", lambda v: v, None
    if order == 0:
        return "sum", lambda v: where(test("ne", v, 0), const(v, 1), const(v, 0)), None
    if order == 1:
        return "sum", lambda v: v, None
    if order == 2:
        return "sum", lambda v: op("mul", v, v), _sqrt
    return (
        "sum",
        lambda v: op("pow", v, const(v, order)),
        lambda v: op("pow", v, const(v, 1 / order)),
    )


@lowers(*named("linalg_vector_norm"))
def _vector_norm(
    call: Call, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: object
) -> Tensor:
    return _norm(call, x, ord, dim, keepdim)


@lowers(*named("norm", "ScalarOpt_dim", "Scalar"))
def _norm_dims(call: Call, x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _norm(call, x, p, dim, keepdim)
