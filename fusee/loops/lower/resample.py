"""Upsampling: every output is a weighted sum of input elements around its source point.

Source points are computed in float32 (float64 for float64) from the output's index, by ATen's rules
(aten/src/ATen/native/UpSample.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.loops.ir import Value, cast, op
from fusee.loops.lower.formulas import const
from fusee.loops.lower.numbers import opmath
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Index, Lowering, Tensor
from fusee.sym.expr import Size, floordiv

# One source element in one dimension: its index and its weight.
Tap = tuple[Size, Value | None]


def _number(lowering: Lowering, x: float, dtype: torch.dtype) -> Value:
    return lowering.number(x, dtype)


def _bounded(x: Value, size: Size) -> Value:
    """An int64 clamped to the indices of a dimension."""
    low = op("maximum", x, const(x, 0))
    return op("minimum", low, x.table.index(size - 1))


def _as_index(lowering: Lowering, x: Value, size: Size) -> Size:
    return lowering.values.indirect(x, size)


# ------------------------------------------------------------------------------ nearest


def _nearest(
    lowering: Lowering, i: Size, size: Size, out: Size, scale: float | None, exact: bool
) -> Size:
    """floor(i * size/out), or of (i + 1/2) * size/out - 1/2 rounded: in float32, as ATen."""
    if isinstance(i, int) and not exact:
        return 0
    if isinstance(size, int) and isinstance(out, int) and out % size == 0:
        if _divides_exactly(size, out, scale, exact):
            return floordiv(i, out // size)
    wide = torch.float32
    ratio = _ratio(lowering, size, out, scale, wide)
    at = lowering.values.index(i, wide)
    if exact:
        at = op("add", at, const(at, 0.5))
    found = cast(op("floor", op("mul", at, ratio)), torch.int64)
    return _as_index(lowering, op("minimum", found, lowering.values.index(size - 1)), size)


def _divides_exactly(size: int, out: int, scale: float | None, exact: bool) -> bool:
    """Whether float32 arithmetic gives i // (out // size) for every output index i."""
    i = torch.arange(out)
    at = i.float() + (0.5 if exact else 0.0)
    ratio = torch.tensor(size / out if scale is None else 1.0 / scale, dtype=torch.float32)
    found = (at * ratio).floor().long().clamp(max=size - 1)
    return bool((found == i // (out // size)).all())


def _ratio(
    lowering: Lowering, size: Size, out: Size, scale: float | None, dtype: torch.dtype
) -> Value:
    """Input steps per output step."""
    if scale is not None and scale > 0:
        return _number(lowering, 1.0 / scale, dtype)
    top, bottom = lowering.values.index(size, dtype), lowering.values.index(out, dtype)
    if isinstance(size, int) and isinstance(out, int):
        exact = torch.tensor(float(size), dtype=dtype) / torch.tensor(float(out), dtype=dtype)
        return lowering.values.const(exact.item(), dtype)
    return op("div", top, bottom)


def _upsample_nearest(call: Call, x: Tensor, scales: Sequence[float | None], exact: bool) -> Tensor:
    lowering, meta = call.lowering, call.meta
    first = len(x.shape) - len(scales)
    _once(x)

    def at(ix: Index) -> Value:
        places = [
            _nearest(lowering, ix[first + k], x.shape[first + k], meta.shape[first + k], s, exact)
            for k, s in enumerate(scales)
        ]
        return x.at((*ix[:first], *places))

    return lowering.computed(meta.shape, x.dtype, at, (x,), meta.strides)


def _once(x: Tensor) -> None:
    """Elements are read many times: costly ones are computed first."""
    if x.lowering.is_heavy(x):
        x.lowering.realise(x)


def _scales(rank: int, given: Any) -> list[float | None]:
    """Scale factors of a .vec overload: one for each dimension."""
    if given is None:
        return [None] * rank
    return list(given)


def _register_nearest(name: str, exact: bool) -> None:
    for rank in (1, 2, 3):

        def vec(
            call: Call, x: Tensor, output_size: Any, scale_factors: Any = None, _rank: int = rank
        ) -> Tensor:
            return _upsample_nearest(call, x, _scales(_rank, scale_factors), exact)

        def plain(
            call: Call, x: Tensor, output_size: Any, *scales: Any, _rank: int = rank, **given: Any
        ) -> Tensor:
            found = [*scales, *given.values()]
            return _upsample_nearest(call, x, found or [None] * _rank, exact)

        lowers(*named(f"{name}{rank}d", "vec"))(vec)
        lowers(*named(f"{name}{rank}d"))(plain)


_register_nearest("upsample_nearest", False)
_register_nearest("_upsample_nearest_exact", True)

# ------------------------------------------------------------------------------ linear and cubic


def _source(
    lowering: Lowering,
    i: Size,
    size: Size,
    out: Size,
    scale: float | None,
    align: bool,
    cubic: bool,
    dtype: torch.dtype,
) -> Value:
    """The source point of output index i."""
    at = lowering.values.index(i, dtype)
    if align:
        if out == 1:
            return const(at, 0)
        if isinstance(size, int) and isinstance(out, int):
            exact = torch.tensor(float(size - 1), dtype=dtype) / (out - 1)
            ratio = lowering.values.const(exact.item(), dtype)
        else:
            ratio = op(
                "div", lowering.values.index(size - 1, dtype), lowering.values.index(out - 1, dtype)
            )
        return op("mul", at, ratio)
    ratio = _ratio(lowering, size, out, scale, dtype)
    half = const(at, 0.5)
    point = op("sub", op("mul", ratio, op("add", at, half)), half)
    return point if cubic else op("maximum", point, const(point, 0))


def _linear_taps(lowering: Lowering, point: Value, size: Size) -> list[Tap]:
    low = op("minimum", cast(point, torch.int64), lowering.values.index(size - 1))
    high = op("minimum", op("add", low, const(low, 1)), lowering.values.index(size - 1))
    right = op("minimum", op("sub", point, cast(low, point.dtype)), const(point, 1))
    right = op("maximum", right, const(point, 0))
    left = op("sub", const(point, 1), right)
    return [
        (_as_index(lowering, low, size), left),
        (_as_index(lowering, high, size), right),
    ]


def _cubic_taps(lowering: Lowering, point: Value, size: Size) -> list[Tap]:
    """Keys' kernel with a = -0.75."""
    a = -0.75
    floor = op("floor", point)
    base = cast(floor, torch.int64)
    t = op("sub", point, floor)
    one, two = const(t, 1), const(t, 2)

    def near(d: Value) -> Value:
        slope = op("sub", op("mul", const(d, a + 2), d), const(d, a + 3))
        return op("add", op("mul", op("mul", slope, d), d), one)

    def far(d: Value) -> Value:
        inner = op("sub", op("mul", const(d, a), d), const(d, 5 * a))
        inner = op("add", op("mul", inner, d), const(d, 8 * a))
        return op("sub", op("mul", inner, d), const(d, 4 * a))

    rest = op("sub", one, t)
    weights = [far(op("add", t, one)), near(t), near(rest), far(op("sub", two, t))]
    taps: list[Tap] = []
    for k, weight in enumerate(weights):
        place = _bounded(op("add", base, const(base, k - 1)), size)
        taps.append((_as_index(lowering, place, size), weight))
    return taps


def _interpolated(
    call: Call, x: Tensor, align: bool, scales: Sequence[float | None], cubic: bool
) -> Tensor:
    lowering, meta = call.lowering, call.meta
    lowering.realise(x)
    first = len(x.shape) - len(scales)
    compute = opmath(x.dtype)
    kinds = _cubic_taps if cubic else _linear_taps

    def taps(ix: Index, k: int) -> list[Tap]:
        dim = first + k
        if not cubic and meta.shape[dim] == x.shape[dim] and scales[k] in (None, 1.0):
            return [(ix[dim], None)]
        point = _source(
            lowering, ix[dim], x.shape[dim], meta.shape[dim], scales[k], align, cubic, compute
        )
        return kinds(lowering, point, x.shape[dim])

    def weighted(ix: Index, fixed: tuple[Size, ...], rest: list[list[Tap]]) -> Value:
        if not rest:
            return cast(x.at((*ix[:first], *fixed)), compute)
        total: Value | None = None
        for place, weight in rest[0]:
            value = weighted(ix, (*fixed, place), rest[1:])
            value = value if weight is None else op("mul", weight, value)
            total = value if total is None else op("add", total, value)
        assert total is not None
        return total

    def at(ix: Index) -> Value:
        every = [taps(ix, k) for k in range(len(scales))]
        return cast(weighted(ix, (), every), meta.dtype)

    return lowering.computed(meta.shape, meta.dtype, at, (x,), meta.strides)


def _bytes(call: Call, x: Tensor, *_: Any, **__: Any) -> str | None:
    return None if x.dtype.is_floating_point else "images of bytes are ATen's, in fixed point"


def _register_interpolation(name: str, rank: int, cubic: bool) -> None:
    def vec(
        call: Call, x: Tensor, output_size: Any, align_corners: bool, scale_factors: Any = None
    ) -> Tensor:
        return _interpolated(call, x, align_corners, _scales(rank, scale_factors), cubic)

    def plain(
        call: Call, x: Tensor, output_size: Any, align_corners: bool, *scales: Any, **given: Any
    ) -> Tensor:
        found: list[Callable[..., Any] | float | None] = [*scales, *given.values()]
        return _interpolated(call, x, align_corners, found or [None] * rank, cubic)  # type: ignore[arg-type]

    lowers(*named(name, "vec"), unless=_bytes)(vec)
    lowers(*named(name), unless=_bytes)(plain)


_register_interpolation("upsample_linear1d", 1, False)
_register_interpolation("upsample_bilinear2d", 2, False)
_register_interpolation("upsample_trilinear3d", 3, False)
_register_interpolation("upsample_bicubic2d", 2, True)
