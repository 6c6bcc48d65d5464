"""Windows over images: pooling.

A small window is written out as one expression over its elements, so that it fuses with what is
around it; larger ones are reductions over the window. Elements outside of the image are never read:
their loads are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.loops.ir import Loop, Value, cast, identity, op
from fusee.loops.lower.pointwise import const
from fusee.loops.lower.reduce import count_of, divided_by, reduce
from fusee.loops.lower.tensor import Call, Index, Lowering, Tensor, lowers, named, opmath
from fusee.loops.lower.views import inside, masked, reshape
from fusee.sym.expr import Size, Symbol, floordiv, maximum, minimum

# ---------------------------------------------------------------------------- pool


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


# ---------------------------------------------------------------------------- window gradient
# Gradients of pooling and of upsampling, where each element of the image has one window.
#
# Windows that overlap, or that differ in size, are ATen's: it adds to the image window by window.

OVERLAP = "windows that overlap or differ in size: their sums are ATen's"


def _spread(call: Call, grad: Tensor, steps: Sequence[int], divisor: int) -> Tensor:
    """Each element of `grad` divided and repeated over a block of `steps`."""
    meta = call.meta
    first = len(meta.shape) - len(steps)
    compute = opmath(grad.dtype)

    def at(ix: Index) -> Value:
        places = [floordiv(i, n) for i, n in zip(ix[first:], steps, strict=True)]
        value = cast(grad.at((*ix[:first], *places)), compute)
        return cast(op("div", value, const(value, divisor)), meta.dtype)

    return call.lowering.computed(meta.shape, meta.dtype, at, (grad,), meta.strides)


def _for_each_axis(numbers: Sequence[int], rank: int) -> list[int]:
    return list(numbers) * rank if len(numbers) == 1 else list(numbers)


def _steps(large: Sequence[Size], small: Sequence[Size]) -> list[int] | None:
    """How many elements of `large` each of `small` stands for; None if not all for as many."""
    steps = []
    for n, m in zip(large, small, strict=True):
        if not isinstance(n, int) or not isinstance(m, int) or m == 0 or n % m:
            return None
        steps.append(n // m)
    return steps


# ------------------------------------------------------------------------------ averages


def _avg_overlap(
    call: Call,
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *rest: Any,
) -> str | None:
    rank = 2 if "2d" in str(call.op) else 3
    kernel = _for_each_axis(kernel, rank)
    stride = _for_each_axis(stride, rank) if stride else kernel
    steps = _steps(x.shape[len(x.shape) - rank :], grad.shape[len(x.shape) - rank :])
    is_apart = kernel == stride == steps and not any(padding)
    return None if is_apart else OVERLAP


@lowers(*named("avg_pool2d_backward avg_pool3d_backward"), unless=_avg_overlap)
def _avg_pool_backward(
    call: Call,
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    steps = _for_each_axis(kernel, 2 if "2d" in str(call.op) else 3)
    count = 1
    for n in steps:
        count *= n
    return _spread(call, grad, steps, divisor or count)


def _adaptive_steps(call: Call, grad: Tensor, x: Tensor) -> list[int] | None:
    rank = 2 if "2d" in str(call.op) else 3
    first = len(x.shape) - rank
    return _steps(x.shape[first:], grad.shape[first:])


def _adaptive_overlap(call: Call, grad: Tensor, x: Tensor) -> str | None:
    return OVERLAP if _adaptive_steps(call, grad, x) is None else None


@lowers(
    *named("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
    unless=_adaptive_overlap,
)
def _adaptive_avg_pool_backward(call: Call, grad: Tensor, x: Tensor) -> Tensor:
    steps = _adaptive_steps(call, grad, x)
    assert steps is not None
    count = 1
    for n in steps:
        count *= n
    return _spread(call, grad, steps, count)


# ------------------------------------------------------------------------------ upsampling


def _uneven_scale(
    call: Call, grad: Tensor, output: Sequence[Size], size: Sequence[Size], *scales: float | None
) -> str | None:
    steps = _steps(grad.shape[2:], size[2:])
    scales = (*scales, *([None] * (len(size) - 2 - len(scales))))
    if steps is None or any(s not in (None, n) for s, n in zip(scales, steps, strict=True)):
        return OVERLAP
    return None


@lowers(
    *named("upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward"),
    unless=_uneven_scale,
)
def _upsample_nearest_backward(
    call: Call, grad: Tensor, output: Sequence[Size], size: Sequence[Size], *scales: float | None
) -> Tensor:
    shape: list[Size] = list(grad.shape[:2])
    for n, m in zip(grad.shape[2:], size[2:], strict=True):
        shape += [m, floordiv(n, m)]
    blocks = list(range(3, len(shape), 2))
    compute = opmath(grad.dtype)
    total = reduce(reshape(grad, tuple(shape)), blocks, "sum", compute, grad.dtype)
    return reshape(total, call.meta.shape)


# ---------------------------------------------------------------------------- resample
# Upsampling: every output is a weighted sum of input elements around its source point.
#
# Source points are computed in float32 (float64 for float64) from the output's index, by ATen's
# rules (aten/src/ATen/native/UpSample.h).

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
