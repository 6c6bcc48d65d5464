"""Windows over images: pooling.

A small window is written out as one expression over its elements, so that it fuses with what is
around it; larger ones are reductions over the window. Elements outside of the image are never read:
their loads are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.loops.ir import Loop, Value, cast, op
from fusee.loops.lower.formulas import const
from fusee.loops.lower.masked import inside, masked
from fusee.loops.lower.numbers import opmath
from fusee.loops.lower.reduce import count_of, divided_by, reduce
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Index, Tensor
from fusee.loops.scalar import identity
from fusee.sym.expr import Size, Symbol, floordiv, maximum, minimum

# Windows of at most this many elements are written out.
UNROLLED = 16


class Windows:
    """The sliding windows of one pooling call over the last dimensions of a tensor.

    out      first output dimension that windows slide along
    places   for offsets within the window: the index of the element in each dimension
    """

    def __init__(
        self,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        rank = len(kernel)
        self.x, self.lowering = x, x.lowering
        self.first = len(x.shape) - rank
        self.sizes = x.shape[self.first :]
        self.kernel = list(kernel)
        self.stride, self.padding, self.dilation = stride, padding, dilation

    def places(self, ix: Index, offsets: Sequence[Size]) -> list[Size]:
        return [
            i * s - p + k * d
            for i, s, p, k, d in zip(
                ix[self.first :], self.stride, self.padding, offsets, self.dilation, strict=True
            )
        ]

    def mask(self, places: Sequence[Size]) -> Value | None:
        """Whether the element is inside of the image; None if it always is."""
        found: Value | None = None
        for place, size in zip(places, self.sizes, strict=True):
            found = inside(self.lowering, place, size, found)
        return found

    def element(self, ix: Index, places: Sequence[Size], outside: float | int) -> Value:
        """The element in opmath, `outside` where there is none."""
        compute = opmath(self.x.dtype)
        value = self.x.at((*ix[: self.first], *places))
        mask = self.mask(places)
        if mask is not None:
            other = self.lowering.number(outside, value.dtype)
            value = masked(value, mask, other)
        return cast(value, compute)

    @property
    def count(self) -> int:
        total = 1
        for n in self.kernel:
            total *= n
        return total

    def offsets(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = [()]
        for n in self.kernel:
            found = [(*head, k) for head in found for k in range(n)]
        return found

    def axes(self) -> list[Symbol]:
        """Reduce axes over the window."""
        return [self.lowering.axis(f"r{k}", n) for k, n in enumerate(self.kernel)]


def _pairs(value: int | Sequence[int], rank: int) -> list[int]:
    """A number for each dimension; one number stands for all."""
    if isinstance(value, int):
        return [value] * rank
    return list(value) * rank if len(value) == 1 else list(value)


def _windows(
    x: Tensor, rank: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1
) -> Windows:
    kernel = _pairs(kernel, rank)
    stride = kernel if stride is None or stride in ([], ()) else _pairs(stride, rank)
    x.lowering.realise(x)  # each element is read by several windows
    return Windows(x, kernel, stride, _pairs(padding, rank), _pairs(dilation, rank))


def _reduced(
    call: Call,
    windows: Windows,
    kind: str,
    dtype: torch.dtype,
    acc_dtype: torch.dtype,
    value_at: Callable[[Index, list[Size]], Value],
    which_at: Callable[[list[Size]], Value] | None = None,
) -> Tensor:
    """A reduction over each window, as a loop over the window's axes."""
    lowering, shape = call.lowering, call.metas[0].shape
    axes = windows.axes()
    index = lowering.axes(shape)
    places = windows.places(
        index, [0 if n == 1 else a.expr for a, n in zip(axes, windows.kernel, strict=True)]
    )
    value = cast(value_at(index, places), opmath(windows.x.dtype))
    acc = lowering.accumulator(kind, acc_dtype)
    buffer = lowering.buffer(shape, dtype, lowering.like_loads(value, shape, call.metas[0].strides))
    lowering.emit(
        Loop(
            buffer,
            lowering.axis_symbols(shape),
            buffer.index(index),
            value,
            tuple(axis for axis in axes if axis.hi != 1),
            acc,
            which=None if which_at is None else which_at(places),
        )
    )
    return lowering.whole(buffer)


# ------------------------------------------------------------------------------ maximum


def _max_pool(
    call: Call,
    x: Tensor,
    rank: int,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> tuple[Tensor, Tensor | None]:
    windows = _windows(x, rank, kernel, stride, padding, dilation)
    lowest = identity("max", x.dtype)
    dtype = x.dtype

    def element(ix: Index, places: list[Size]) -> Value:
        return windows.element(ix, places, lowest)

    if windows.count <= UNROLLED:

        def at(ix: Index) -> Value:
            best: Value | None = None
            for offsets in windows.offsets():
                value = element(ix, windows.places(ix, offsets))
                best = value if best is None else op("maximum", best, value)
            assert best is not None
            return cast(best, dtype)

        result = call.lowering.computed(call.metas[0].shape, dtype, at, (x,), call.metas[0].strides)
    else:
        result = _reduced(call, windows, "max", dtype, opmath(dtype), element)
    if len(call.metas) == 1 or not call.used[1]:
        return result, None

    def flat(places: list[Size]) -> Value:
        """Where the element is in its image. Places outside stand for the nearest one inside."""
        total: Size = 0
        for place, size in zip(places, windows.sizes, strict=True):
            total = total * size + minimum(maximum(place, 0), size - 1)
        return call.lowering.values.index(total)

    if windows.count == 1:
        return result, call.lowering.computed(
            call.metas[1].shape, torch.int64, lambda ix: flat(windows.places(ix, [0] * rank))
        )
    return result, _reduced(call, windows, "argmax", torch.int64, torch.int64, element, flat)


@lowers(*named("max_pool2d_with_indices max_pool3d_with_indices"))
def _max_pool_with_indices(
    call: Call,
    x: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    rank = 3 if "3d" in str(call.op) else 2
    result, places = _max_pool(call, x, rank, kernel_size, stride, padding, dilation)
    return result, result if places is None else places


@lowers(*named("max_pool1d max_pool2d max_pool3d"))
def _max_pool_alone(
    call: Call,
    x: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    rank = int(str(call.op).partition("max_pool")[2][0])
    return _max_pool(call, x, rank, kernel_size, stride, padding, dilation)[0]


# ------------------------------------------------------------------------------ average


def _avg_pool(
    call: Call,
    x: Tensor,
    rank: int,
    kernel: Any,
    stride: Any,
    padding: Any,
    include_pad: bool,
    divisor: int | None,
) -> Tensor:
    windows = _windows(x, rank, kernel, stride, padding)
    dtype = call.meta.dtype
    compute = opmath(dtype)
    quotient = "div" if dtype.is_floating_point else "truncdiv"
    total: Callable[[Index], Value]

    def element(ix: Index, places: list[Size]) -> Value:
        return windows.element(ix, places, 0)

    if windows.count <= UNROLLED:

        def total(ix: Index) -> Value:
            found: Value | None = None
            for offsets in windows.offsets():
                value = element(ix, windows.places(ix, offsets))
                found = value if found is None else op("add", found, value)
            assert found is not None
            return found

        operands = (x,)
    else:
        sums = _reduced(call, windows, "sum", compute, compute, element)
        total, operands = sums.at, (sums,)

    def at(ix: Index) -> Value:
        value = total(ix)
        if divisor is not None:
            return cast(op(quotient, value, const(value, divisor)), dtype)
        return cast(op(quotient, value, _divisor(windows, ix, include_pad, compute)), dtype)

    return call.lowering.computed(call.meta.shape, dtype, at, operands, call.meta.strides)


def _divisor(windows: Windows, ix: Index, include_pad: bool, dtype: torch.dtype) -> Value:
    """How many elements a window averages: those in the image, or in the padded image."""
    count: Size = 1
    for k, (i, size) in enumerate(zip(ix[windows.first :], windows.sizes, strict=True)):
        pad = windows.padding[k]
        start = i * windows.stride[k] - pad
        end = minimum(start + windows.kernel[k], size + pad)
        if not include_pad:
            start, end = maximum(start, 0), minimum(end, size)
        count = count * (end - start)
    return windows.lowering.values.index(count, dtype)


def _avg(rank: int) -> Callable[..., Tensor]:
    def handler(
        call: Call,
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        return _avg_pool(
            call, x, rank, kernel_size, stride, padding, count_include_pad, divisor_override
        )

    return handler


def _by_zero(call: Call, *args: Any, divisor_override: int | None = None, **_: Any) -> str | None:
    divisor = args[6] if len(args) > 6 else divisor_override
    return "ATen refuses a divisor of zero" if divisor == 0 else None


for _rank in (1, 2, 3):
    lowers(*named(f"avg_pool{_rank}d"), unless=_by_zero)(_avg(_rank))


# ------------------------------------------------------------------------------ adaptive


def _uneven(call: Call, x: Tensor, output_size: Sequence[Size]) -> str | None:
    """Windows of unequal length are looped over to the longest, which only ints can tell."""
    sizes = x.shape[len(x.shape) - len(output_size) :]
    if all(isinstance(n, int) for n in (*sizes, *output_size)):
        return None
    return None if all(n == 1 for n in output_size) else "adaptive windows of unknown sizes"


@lowers(
    *named("_adaptive_avg_pool2d _adaptive_avg_pool3d"),
    *named("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    unless=_uneven,
)
def _adaptive_avg_pool(call: Call, x: Tensor, output_size: Sequence[Size]) -> Tensor:
    first = len(x.shape) - len(output_size)
    sizes = x.shape[first:]
    if all(n == 1 for n in output_size):
        dims = list(range(first, len(x.shape)))
        compute = opmath(x.dtype)
        return reduce(x, dims, "sum", compute, x.dtype, None, divided_by(count_of(x, dims)))
    pairs = [(int(str(n)), int(str(m))) for n, m in zip(sizes, output_size, strict=True)]
    if all(m != 0 and n % m == 0 for n, m in pairs):
        steps = [n // m for n, m in pairs]
        return _avg_pool(call, x, len(pairs), steps, steps, 0, True, None)
    return _uneven_average(call, x, first, pairs)


def _uneven_average(call: Call, x: Tensor, first: int, pairs: list[tuple[int, int]]) -> Tensor:
    """Output i averages elements floor(i*n/m) to ceil((i+1)*n/m) - 1 of n, for m outputs."""
    lowering, dtype = call.lowering, call.meta.dtype
    lowering.realise(x)
    compute = opmath(dtype)
    widths = [max(-((-(i + 1) * n) // m) - i * n // m for i in range(m)) for n, m in pairs]
    index = lowering.axes(call.meta.shape)
    places: list[Size] = []
    mask: Value | None = None
    count: Size = 1
    reduced: list[Symbol] = []
    for k, ((n, m), width) in enumerate(zip(pairs, widths, strict=True)):
        i = index[first + k]
        start = floordiv(i * n, m)
        end = floordiv(i * n + n + m - 1, m)
        axis = lowering.axis(f"r{k}", width)
        step: Size = 0 if width == 1 else axis.expr
        reduced += [] if width == 1 else [axis]
        places.append(start + step)
        mask = inside(lowering, places[-1], end, mask)
        count = count * (end - start)
    value = x.at((*index[:first], *places))
    if mask is not None:
        value = masked(value, mask, const(value, 0))
    acc = lowering.accumulator("sum", compute)
    total = lowering.values.acc(acc)
    result = cast(op("div", total, lowering.values.index(count, compute)), dtype)
    shape = call.meta.shape
    buffer = lowering.buffer(shape, dtype, lowering.like_loads(value, shape, call.meta.strides))
    lowering.emit(
        Loop(
            buffer,
            lowering.axis_symbols(shape),
            buffer.index(index),
            cast(value, compute),
            tuple(reduced),
            acc,
            result,
        )
    )
    return lowering.whole(buffer)
