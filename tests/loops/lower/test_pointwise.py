"""Pointwise ops against eager: every dtype eager accepts, promotion, special values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.loops.lower.against_eager import check

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -2.5,
    3.0,
    1e-3,
    25.0,
    float("inf"),
    -float("inf"),
    float("nan"),
]


def values(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.tensor(SPECIAL).to(dtype)
    if dtype is torch.bool:
        return torch.tensor([True, False, True, False])
    low = 0 if dtype is torch.uint8 else -128
    return torch.tensor([low, 0, 1, 2, 3, 7, 100, 127]).to(dtype)


UNARY: list[Callable[[Tensor], Any]] = [
    torch.neg, torch.abs, torch.sign, torch.square, torch.reciprocal, torch.sqrt, torch.rsqrt,
    torch.exp, torch.expm1, torch.log, torch.log1p, torch.sin, torch.tanh, torch.erf, torch.sigmoid,
    torch.floor, torch.round, torch.trunc, torch.frac, torch.isnan, torch.isfinite, torch.isinf,
    torch.signbit, torch.logical_not, torch.nan_to_num, torch.sinc,
    F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, F.mish, F.softplus, F.elu,
    F.selu, F.celu, F.leaky_relu, F.hardswish, F.hardsigmoid, F.hardtanh, F.relu6, F.logsigmoid,
    F.softsign, F.hardshrink, F.softshrink, F.tanhshrink,
    lambda x: x**2, lambda x: x**3, lambda x: x**0.5, lambda x: x**-1, lambda x: x**1.7,
    lambda x: 2.0**x, lambda x: x.clamp(-1, 2), lambda x: x.clamp(min=0.5), lambda x: x + 2,
    lambda x: 2.7 * x, lambda x: x / 3, lambda x: x // 2, lambda x: x % 3, lambda x: 1 - x,
    lambda x: x > 0.3, lambda x: x == 1, lambda x: x.masked_fill(x > 0, 7),
    lambda x: torch.round(x, decimals=2), lambda x: torch.logit(x, 1e-3),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unary_on_floats(dtype: torch.dtype) -> None:
    check(lambda x: [fn(x) for fn in UNARY], values(dtype))


def accepted(fns: list[Callable[..., Any]], *args: Tensor) -> list[Callable[..., Any]]:
    found = []
    for fn in fns:
        try:
            fn(*args)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        found.append(fn)
    return found


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_unary_on_integers(dtype: torch.dtype) -> None:
    fns = accepted(UNARY, values(dtype))
    assert len(fns) > 20
    check(lambda x: [fn(x) for fn in fns], values(dtype))


BINARY: list[Callable[[Tensor, Tensor], Any]] = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.fmax,
    torch.fmin,
    torch.remainder, torch.fmod, torch.floor_divide, torch.atan2, torch.hypot, torch.copysign,
    torch.eq, torch.ne, torch.lt, torch.ge, torch.logical_and, torch.logical_or, torch.logical_xor,
    torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, torch.xlogy, torch.logaddexp,
    torch.heaviside, torch.nextafter,
    lambda x, y: torch.add(x, y, alpha=2), lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    lambda x, y: torch.div(x, y, rounding_mode="floor"), lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.addcmul(x, x, y, value=0.5),
    lambda x, y: torch.addcdiv(x, x, y), lambda x, y: torch.bitwise_left_shift(x, y),
    lambda x, y: torch.bitwise_right_shift(x, y), lambda x, y: x.clamp(y), lambda x, y: x**y,
    lambda x, y: torch.rsub(x, y),
]  # fmt: skip


def pairs(
    dtype: torch.dtype, other: torch.dtype, zero_divides: bool = True
) -> tuple[Tensor, Tensor]:
    a, b = values(dtype), values(other)
    if not zero_divides:
        b = b[b != 0]
    both = torch.tensor(list(itertools.product(range(len(a)), range(len(b)))))
    return a[both[:, 0]], b[both[:, 1]]


@pytest.mark.parametrize(
    "dtype", [*FLOATS, torch.int64, torch.int8, torch.uint8, torch.bool], ids=str
)
def test_binary(dtype: torch.dtype) -> None:
    whole = not dtype.is_floating_point and dtype is not torch.bool
    x, y = pairs(dtype, dtype, zero_divides=not whole)
    if whole and dtype.is_signed:  # the quotient of the lowest number and -1 has no place
        x, y = x[(x != -128) | (y != -1)], y[(x != -128) | (y != -1)]
    fns = accepted(BINARY, x, y)
    assert len(fns) > 12
    check(lambda x, y: [fn(x, y) for fn in fns], x, y, allow=["pow.Tensor_Tensor"])


MIXED = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", MIXED, ids=str)
@pytest.mark.parametrize("other", MIXED, ids=str)
def test_promotion(dtype: torch.dtype, other: torch.dtype) -> None:
    x, y = pairs(dtype, other)
    fns: list[Callable[..., Any]] = [
        torch.add, torch.mul, torch.true_divide, torch.eq, torch.lt, torch.maximum,
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: x + y[2], lambda x, y: x * y[2], lambda x, y: x < y[2],
    ]  # fmt: skip
    fns = accepted(fns, x, y)
    check(lambda x, y: [fn(x, y) for fn in fns], x, y)


def test_broadcasting_and_strides() -> None:
    x = torch.randn(4, 6, 8).transpose(0, 2)
    y, z = torch.randn(6, 1), torch.randn(8, 1, 4)[::1]
    check(lambda x, y, z: (x + y * z, x * 2, (x + y).relu() * x), x, y, z)
    check(lambda x: x + 1, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    check(lambda x: x * 2, torch.randn(3, 1).expand(3, 5))
    check(lambda x: x * 2, torch.randn(12)[::3])


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (1, 1, 1), (3, 1, 2)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    check(lambda x: (x + 1, x.exp() * x, x.sum(), x.to(torch.float16)), torch.randn(shape))


def test_each_op_rounds_to_its_dtype() -> None:
    x = torch.randn(64).bfloat16()
    graph = check(lambda x: (x * 3.3 + x) * x - 0.7, x)
    assert len(graph.steps) == 1


def test_zero_division_is_reported() -> None:
    with pytest.raises(IndexError, match="ZeroDivisionError"):
        check(lambda x, y: x // y, torch.tensor([1, 2]), torch.tensor([1, 0]))
