"""Windows over images: pooling, its gradients, and resampling.

A small window is written out as one expression over its elements, so that it fuses with what is
around it; larger ones are reductions over the window. Elements outside of the image are never read:
their loads are masked.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fusee.loops import REDUCTIONS, Value, cast, const, contiguous, identity, op, where
from fusee.loops.lower.reduce import count_of, divided_by, prepared, reduce
from fusee.loops.lower.tensor import Index, Lowering, NotLowered, OpCall, Shape, Tensor, lowers
from fusee.loops.lower.views import only_inside, reshape, resized
from fusee.loops.operators import named, opmath
from fusee.sym import Size, floordiv, maximum, minimum, mod

# ---------------------------------------------------------------------------- pool

# Windows of at most this many elements are written out.
UNROLLED = 16


def _rank(call: OpCall) -> int:
    """How many dimensions the images of avg_pool2d have."""
    return next(int(letter) for letter in str(call.op) if letter.isdigit())


def _each(numbers: int | Sequence[int], rank: int) -> list[int]:
    """A number for each dimension; one number stands for all."""
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    return given * rank if len(given) == 1 else given


class Windows:
    """The sliding windows of one pooling call over the last dimensions of a tensor."""

    def __init__(
        self,
        call: OpCall,
        x: Tensor,
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any = 1,
        shape: Shape | None = None,
    ) -> None:
        rank = _rank(call)
        self.shape = call.meta.shape if shape is None else shape
        x.lowering.realise(x)  # each element is read by several windows
        self.x, self.lowering, self.call = x, x.lowering, call
        self.first = len(x.shape) - rank
        self.sizes = x.shape[self.first :]
        self.kernel = _each(kernel, rank)
        self.stride = _each(stride, rank) if stride else self.kernel
        self.padding, self.dilation = _each(padding, rank), _each(dilation, rank)

    def places(self, ix: Index, offsets: Sequence[Size]) -> list[Size]:
        """The index of the element at `offsets` within the window, in each dimension."""
        return [
            i * s - p + k * d
            for i, s, p, k, d in zip(
                ix[self.first :], self.stride, self.padding, offsets, self.dilation, strict=True
            )
        ]

    def element(self, ix: Index, places: Sequence[Size], outside: float | int) -> Value:
        """The element in opmath, `outside` where there is none."""
        value = self.x.at((*ix[: self.first], *places))
        value = only_inside(self.lowering, value, places, self.sizes, outside)
        return cast(value, opmath(self.x.dtype))

    def is_written_out(self) -> bool:
        """Whether the elements of a window are so few that they stand in one expression."""
        known = all(isinstance(n, int) for n in self.kernel)
        return known and math.prod(self.kernel) <= UNROLLED

    def offsets(self) -> list[tuple[int, ...]]:
        """Of each element within its window."""
        return list(itertools.product(*map(range, self.kernel)))

    def combined(self, kind: str, dtype: torch.dtype, outside: float | int) -> Tensor:
        """All elements of each window, by a reduction of the vocabulary."""
        if not self.is_written_out():
            if self.overlap() and not self.lowering.values.profile.shares:
                return self.by_axes(kind, dtype, outside)
            return self.reduced(kind, dtype, opmath(dtype), outside)
        combine = functools.partial(op, REDUCTIONS[kind])

        def at(ix: Index) -> Value:
            values = [self.element(ix, self.places(ix, k), outside) for k in self.offsets()]
            return cast(functools.reduce(combine, values), dtype)

        strides = self.call.meta.strides if self.shape == self.call.meta.shape else None
        return self.lowering.computed(self.shape, dtype, at, (self.x,), strides)

    def overlap(self) -> bool:
        """Whether windows of several axes have elements in common, or are cut off at an edge."""
        pairs = zip(self.stride, self.kernel, strict=True)
        is_apart = all(n == 0 for n in self.padding) and all(s == n for s, n in pairs)
        return not is_apart and sum(n != 1 for n in self.kernel) > 1

    def by_axes(self, kind: str, dtype: torch.dtype, outside: float | int) -> Tensor:
        """The same, one axis after the other: what windows have in common is combined once."""
        total, call = self.x, self.call
        for k in range(self.first, len(total.shape)):
            given = self.kernel, self.stride, self.padding, self.dilation
            kernel, stride, padding, dilation = (
                [n if j == k - self.first else usual for j, n in enumerate(numbers)]
                for numbers, usual in zip(given, (1, 1, 0, 1), strict=True)
            )
            shape = resized(total.shape, k, call.meta.shape[k])
            if shape != total.shape or self.kernel[k - self.first] != 1:
                part = Windows(call, total, kernel, stride, padding, dilation, shape)
                total = part.combined(kind, dtype, outside)
        return total

    def reduced(
        self,
        kind: str,
        dtype: torch.dtype,
        acc_dtype: torch.dtype,
        outside: float | int,
        which: Callable[[list[Size]], Value] | None = None,
    ) -> Tensor:
        """The same as a loop over the axes of the window; `which` numbers an element."""
        index = self.lowering.axes(self.shape)
        axes = [self.lowering.axis(f"r{k}", n) for k, n in enumerate(self.kernel)]
        places = self.places(index, [0 if axis.hi == 1 else axis.expr for axis in axes])
        acc = self.lowering.accumulator(kind, acc_dtype)
        value = self.element(index, places, outside)
        number = None if which is None else which(places)
        reduced, shape = [axis for axis in axes if axis.hi != 1], self.shape
        strides = self.lowering.like_loads(value, shape, self.call.meta.strides)
        return self.lowering.looped(value, dtype, shape, strides, reduced, acc, None, number)


# ---------------------------------------------------------------------------- maximum


@lowers("max_pool2d_with_indices max_pool3d_with_indices max_pool1d max_pool2d max_pool3d")
def _max_pool(
    call: OpCall, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> Tensor | tuple[Tensor, Tensor]:
    windows = Windows(call, x, kernel, stride, padding, dilation)
    lowest = identity("max", x.dtype)
    result = windows.combined("max", x.dtype, lowest)
    if len(call.metas) == 1:
        return result
    if not call.used[1]:
        return result, result

    plane, number = math.prod(windows.sizes), torch.int64
    narrow = torch.int32 if isinstance(plane, int) and plane < 2**31 else number

    def flat(places: list[Size], dtype: torch.dtype = number) -> Value:
        """Where the element is in its image. Places outside stand for the nearest one inside."""
        total: Size = 0
        for place, size in zip(places, windows.sizes, strict=True):
            total = total * size + minimum(maximum(place, 0), size - 1)
        return call.lowering.values.index(total, dtype)

    if not windows.is_written_out():
        return result, windows.reduced("argmax", number, number, lowest, flat)

    def at(ix: Index) -> Value:
        best: Value | None = None
        found: Value | None = None
        for k in windows.offsets():
            places = windows.places(ix, k)
            value, place = windows.element(ix, places, lowest), flat(places, narrow)
            if best is None or found is None:
                best, found = value, place
                continue
            # ATen's kernel takes the first of equal ones, and the last NaN
            found = where((value > best) | op("isnan", value), place, found)
            best = op("maximum", best, value)
        assert found is not None
        return cast(found, number)

    return result, call.lowering.computed(call.meta.shape, number, at, (windows.x,))


# ---------------------------------------------------------------------------- average


@lowers("avg_pool1d avg_pool2d avg_pool3d")
def _avg_pool(
    call: OpCall,
    x: Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    include_pad: bool,
    divisor: int | None = None,
) -> Tensor:
    if divisor == 0:
        raise NotLowered("ATen refuses a divisor of zero")
    windows = Windows(call, x, kernel, stride, padding)
    dtype = call.meta.dtype
    compute = opmath(dtype)
    quotient = "div" if dtype.is_floating_point else "truncdiv"
    total = windows.combined("sum", compute, 0)

    def count(ix: Index) -> Size:
        """How many elements a window averages: those in the image, or in the padded image."""
        found: Size = 1
        for k, (i, size) in enumerate(zip(ix[windows.first :], windows.sizes, strict=True)):
            pad = windows.padding[k]
            start = i * windows.stride[k] - pad
            end = minimum(start + windows.kernel[k], size + pad)
            if not include_pad:
                start, end = maximum(start, 0), minimum(end, size)
            found = found * (end - start)
        return found

    def at(ix: Index) -> Value:
        number = count(ix) if divisor is None else divisor
        return cast(op(quotient, total.at(ix), call.lowering.values.index(number, compute)), dtype)

    return call.computed(at, total)


@lowers(
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d"
    " adaptive_avg_pool3d"
)
def _adaptive_avg_pool(call: OpCall, x: Tensor, output_size: Sequence[Size]) -> Tensor:
    first = len(x.shape) - len(output_size)
    if all(n == 1 for n in output_size):
        dims = range(first, len(x.shape))
        return reduce(x, dims, dtype=x.dtype, after=divided_by(count_of(x, dims)))
    steps = steps_of(x.shape[first:], output_size)
    if steps is not None:
        return _avg_pool(call, x, steps, steps, 0, False, True)
    if not all(isinstance(n, int) for n in (*x.shape[first:], *output_size)):
        raise NotLowered("adaptive windows of unknown sizes")  # who tells the longest?
    # Windows of unequal length, one axis after the other: vectors along the last one pick what has
    # been summed up before.
    lowering, meta, total = call.lowering, call.meta, x
    compute = opmath(meta.dtype)
    for k in range(first, len(x.shape)):
        n, m = x.shape[k], meta.shape[k]
        assert isinstance(n, int) and isinstance(m, int)
        if n == m:
            continue
        lowering.realise(total)
        shape = resized(total.shape, k, m)
        index = [*lowering.axes(shape)]
        start, end = _window(index[k], n, m)
        axis = lowering.axis("r0", max(-((-(i + 1) * n) // m) - i * n // m for i in range(m)))
        index[k] = start + (0 if axis.hi == 1 else axis.expr)
        value = total.at(tuple(index))
        value = only_inside(lowering, value, (index[k],), (end,))
        reduced = [] if axis.hi == 1 else [axis]
        acc = lowering.accumulator("sum", compute)
        value = cast(value, compute)
        strides = lowering.like_loads(value, shape, meta.strides)
        total = lowering.looped(value, compute, shape, strides, reduced, acc)

    def at(ix: Index) -> Value:
        count: Size = 1
        for i, n, m in zip(ix[first:], x.shape[first:], meta.shape[first:], strict=True):
            start, end = _window(i, n, m)
            count = count * (end - start)
        return cast(total.at(ix) / lowering.values.index(count, compute), meta.dtype)

    return call.computed(at, total)


def steps_of(large: Sequence[Size], small: Sequence[Size]) -> list[int] | None:
    """How many elements of `large` each of `small` stands for; None if not all for as many."""
    steps = []
    for n, m in zip(large, small, strict=True):
        if not isinstance(n, int) or not isinstance(m, int) or m == 0 or n % m:
            return None
        steps.append(n // m)
    return steps


def _window(i: Size, n: Size, m: Size) -> tuple[Size, Size]:
    """Where window i of m over n elements begins and ends: floor(i*n/m) and ceil((i+1)*n/m)."""
    return floordiv(i * n, m), floordiv(i * n + n + m - 1, m)


# ---------------------------------------------------------------------------- blocks
# Sliding blocks as columns of a matrix (`unfold`), and columns summed up into images (`fold`).


def _blocks_of(images: Shape, *given: Any) -> Shape:
    """(..., C, kh, kw, oh, ow) for a kernel, dilation, padding and stride."""
    kernel, *rest = (_each(n, 2) for n in given)
    rows = zip(images[-2:], kernel, *rest, strict=True)
    counts = (floordiv(n + 2 * p - d * (k - 1) - 1, s) + 1 for n, k, d, p, s in rows)
    return (*images[:-2], *kernel, *counts)


@lowers("im2col")
def _im2col(
    call: OpCall, x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> Tensor:
    lowering = call.lowering
    if lowering.realise(x).strides[-1] != 1:  # each element is read many times
        x = lowering.stored(lowering.realise(x, contiguous(x.shape)), x.shape)
    windows = Windows(call, x, kernel, stride, padding, dilation)

    def at(ix: Index) -> Value:
        places = windows.places((*ix[:-4], *ix[-2:]), ix[-4:-2])
        return cast(windows.element(ix, places, 0), x.dtype)

    shape = _blocks_of(x.shape, kernel, dilation, padding, stride)
    return reshape(call.lowering.computed(shape, x.dtype, at, (x,)), call.meta.shape)


def _summed(call: OpCall, terms: Iterable[tuple[Value, Sequence[Size], Sequence[Size]]]) -> Value:
    """What the windows that an element is in give it: (value, its places, how many there are)."""
    dtype = call.meta.dtype
    parts = [cast(only_inside(call.lowering, *term), opmath(dtype)) for term in terms]
    return cast(functools.reduce(operator.add, parts), dtype)


@lowers("col2im")
def _col2im(call: OpCall, x: Tensor, size: Any, *given: Any) -> Tensor:
    """Each pixel is the sum over its places within the blocks that it is in: blocks that lie side
    by side, or one that begins at each pixel."""
    kernel, apart, before, stride = (_each(n, 2) for n in given)
    is_apart = kernel == stride and apart == [1, 1] and before == [0, 0]
    if not is_apart and (stride != [1, 1] or math.prod(kernel) > UNROLLED):
        raise NotLowered("a fold adds large blocks")
    shape = _blocks_of(call.meta.shape, *given)
    blocks, counts = reshape(x, shape), shape[-2:]
    call.lowering.realise(blocks)
    every = list(itertools.product(*map(range, kernel)))

    def at(ix: Index) -> Value:
        def term(offsets: Sequence[Size]) -> tuple[Value, list[Size], Shape]:
            rows = zip(ix[-2:], offsets, apart, before, kernel, strict=True)
            places = [floordiv(i, n) if is_apart else i + p - k * d for i, k, d, p, n in rows]
            return blocks.at((*ix[:-2], *offsets, *places)), places, counts

        return _summed(call, map(term, [tuple(map(mod, ix[-2:], kernel))] if is_apart else every))

    return call.computed(at, blocks)


# ---------------------------------------------------------------------------- gradients
# Gradients of pooling and of upsampling, which mostly give each element of the image one window.
#
# Of other windows an element of the image is in several: their sum, if they are few. What many of
# them overlap, or what differs in size, is ATen's: it adds to the image window by window.

OVERLAP = "windows that overlap or differ in size: their sums are ATen's"


@lowers("avg_pool2d_backward avg_pool3d_backward")
@lowers("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward")
def _avg_pool_backward(
    call: OpCall,
    grad: Tensor,
    x: Tensor,
    *,
    kernel_size: Any = None,
    stride: Any = None,
    padding: Sequence[int] = (),
    divisor_override: int | None = None,
) -> Tensor:
    """Each element of `grad` divided and repeated over a block."""
    meta, rank = call.meta, _rank(call)
    first = len(meta.shape) - rank
    steps = steps_of(x.shape[first:], grad.shape[first:])
    given = [_each(n, rank) for n in (kernel_size, stride) if n]
    if steps is None or any(padding) or any(n != steps for n in given):
        raise NotLowered(OVERLAP)
    divisor = divisor_override or math.prod(steps)

    def at(ix: Index) -> Value:
        places = [floordiv(i, n) for i, n in zip(ix[first:], steps, strict=True)]
        value = cast(grad.at((*ix[:first], *places)), opmath(grad.dtype))
        return cast(value / divisor, meta.dtype)

    return call.computed(at, grad)


# Windows that an element may be in along one axis, and in all.
_MOST_WINDOWS = 8


@lowers("unfold_backward")
def _unfold_backward(
    call: OpCall, grad: Tensor, sizes: object, dim: int, size: Size, step: Size
) -> Tensor:
    """Each element is the sum over the windows that it is in: those that begin last before it."""
    meta, lowering = call.meta, call.lowering
    if not meta.shape or not isinstance(size, int) or not isinstance(step, int):
        raise NotLowered("windows whose size varies")
    if size > _MOST_WINDOWS * step:
        raise NotLowered(OVERLAP)
    dim %= len(meta.shape)
    if size == 0:
        return lowering.filled(meta.shape, 0, meta.dtype)

    def at(ix: Index) -> Value:
        def term(back: int) -> tuple[Value, Shape, Shape]:
            window = floordiv(ix[dim], step) - back
            places = window, ix[dim] - window * step
            value = grad.at((*resized(ix, dim, window), places[1]))
            return value, places, (grad.shape[dim], size)

        return _summed(call, map(term, range(-(-size // step))))

    return call.computed(at, grad)


@lowers("max_pool2d_with_indices_backward max_pool3d_with_indices_backward")
def _max_pool_backward(
    call: OpCall,
    grad: Tensor,
    x: Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    places: Tensor,
) -> Tensor:
    """Each element is the sum over the windows that it is in, and is the maximum of."""
    meta, lowering, rank = call.meta, call.lowering, _rank(call)
    rows = [_each(n, rank) for n in (kernel, stride or kernel, dilation)]
    if not all(isinstance(n, int) for numbers in rows for n in numbers):
        raise NotLowered(OVERLAP)
    counts = [-(-((n - 1) * d + 1) // step) for n, step, d in zip(*rows)]  # of windows, at most
    if math.prod(counts) > _MOST_WINDOWS:
        raise NotLowered(OVERLAP)
    for tensor in (grad, places):  # each element is read by several elements of the image
        if lowering.is_heavy(tensor):
            lowering.realise(tensor)
    first, shape, compute = len(meta.shape) - rank, grad.shape, opmath(meta.dtype)

    def at(ix: Index) -> Value:
        flat: Size = 0
        for i, size in zip(ix[first:], meta.shape[first:], strict=True):
            flat = flat * size + i
        own, last = lowering.values.index(flat), list[Size]()
        for i, step, pad in zip(ix[first:], rows[1], _each(padding, rank), strict=True):
            last.append(floordiv(i + pad, step))

        def term(back: Sequence[int]) -> tuple[Value, list[Size], Shape]:
            windows = [i - n for i, n in zip(last, back, strict=True)]
            index = *ix[:first], *windows
            value, place = grad.at(index), cast(places.at(index), torch.int64)
            return where(op("eq", place, own), cast(value, compute), 0), windows, shape[first:]

        return _summed(call, map(term, itertools.product(*map(range, counts))))

    return call.computed(at, grad, places)


@lowers("upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward")
def _upsample_nearest_backward(
    call: OpCall, grad: Tensor, output: Any, size: Sequence[Size], *scales: float | None
) -> Tensor:
    steps = steps_of(grad.shape[2:], size[2:])
    if steps is None or any(s not in (None, n) for s, n in zip(scales, steps, strict=True)):
        raise NotLowered(OVERLAP)
    shape: list[Size] = list(grad.shape[:2])
    for n, m in zip(grad.shape[2:], size[2:], strict=True):
        shape += [m, floordiv(n, m)]
    blocks = range(3, len(shape), 2)
    return reshape(reduce(reshape(grad, tuple(shape)), blocks, dtype=grad.dtype), call.meta.shape)


# ---------------------------------------------------------------------------- resample
# Upsampling: every output is a weighted sum of input elements around its source point.
#
# Source points are computed in float32 (float64 for float64) from the output's index, by ATen's
# rules (aten/src/ATen/native/UpSample.h).

# One source element in one dimension: its index and its weight.
Tap = tuple[Size, "Value | None"]


class Axis(NamedTuple):
    """One resampled dimension: from `size` elements to `out`."""

    lowering: Lowering
    size: Size
    out: Size
    scale: float | None

    def quotient(self, top: Size, bottom: Size, dtype: torch.dtype) -> Value:
        values = self.lowering.values
        if isinstance(top, int) and isinstance(bottom, int):
            exact = torch.tensor(float(top), dtype=dtype) / torch.tensor(float(bottom), dtype=dtype)
            return values.const(exact.item(), dtype)
        return values.index(top, dtype) / values.index(bottom, dtype)

    def ratio(self, dtype: torch.dtype) -> Value:
        """Input steps per output step."""
        if self.scale is not None and self.scale > 0:
            return self.lowering.number(1.0 / self.scale, dtype)
        return self.quotient(self.size, self.out, dtype)

    def element(self, place: Value) -> Size:
        """The index that an int64 is, bounded above."""
        last = self.lowering.values.index(self.size - 1)
        return self.lowering.values.indirect(op("minimum", place, last), self.size)

    def nearest(self, i: Size, exact: bool) -> Size:
        """floor(i * size/out), or of (i + 1/2) * size/out - 1/2 rounded: in float32, as ATen."""
        if isinstance(i, int) and i == 0 and not exact:
            return 0
        if isinstance(self.size, int) and isinstance(self.out, int) and self.out % self.size == 0:
            if self._is_exact(self.size, self.out, exact):
                return floordiv(i, self.out // self.size)
        at = self.lowering.values.index(i, torch.float32)
        at = (at + 0.5 if exact else at) * self.ratio(torch.float32)
        return self.element(cast(op("floor", at), torch.int64))

    def _is_exact(self, size: int, out: int, exact: bool) -> bool:
        """Whether float32 arithmetic gives i // (out // size) for every output index i."""
        i = torch.arange(out)
        quotient = size / out if self.scale is None else 1.0 / self.scale
        at = (i.float() + (0.5 if exact else 0.0)) * torch.tensor(quotient, dtype=torch.float32)
        return bool((at.floor().long().clamp(max=size - 1) == i // (out // size)).all())

    def source(self, i: Size, align: bool, cubic: bool, dtype: torch.dtype) -> Value:
        """The source point of output index i."""
        at = self.lowering.values.index(i, dtype)
        if align:
            if self.out == 1:
                return const(at, 0)
            return at * self.quotient(self.size - 1, self.out - 1, dtype)
        point = self.ratio(dtype) * (at + 0.5) - 0.5
        return point if cubic else op("maximum", point, 0)

    def linear(self, point: Value) -> list[Tap]:
        values = self.lowering.values
        low = op("minimum", cast(point, torch.int64), values.index(self.size - 1))
        right = op("maximum", op("minimum", point - cast(low, point.dtype), 1), 0)
        return [(values.indirect(low, self.size), 1 - right), (self.element(low + 1), right)]

    def cubic(self, point: Value) -> list[Tap]:
        """Keys' kernel with a = -0.75."""
        a = -0.75
        floor = op("floor", point)
        base = cast(floor, torch.int64)
        t = point - floor

        def near(d: Value) -> Value:
            return ((a + 2) * d - (a + 3)) * d * d + 1

        def far(d: Value) -> Value:
            return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

        rest = 1 - t
        weights = far(t + 1), near(t), near(rest), far(2 - t)
        return [
            (self.element(op("maximum", base + (k - 1), 0)), weight)
            for k, weight in enumerate(weights)
        ]


def _axes(call: OpCall, x: Tensor, scales: tuple[Any, ...]) -> list[Axis]:
    """The resampled dimensions. Overloads `vec` have a list of factors, or None."""
    rank = _rank(call)
    if len(scales) == 1 and isinstance(scales[0], (list, tuple)):
        scales = tuple(scales[0])
    given = scales if len(scales) == rank else (None,) * rank
    first = len(x.shape) - rank
    sizes, outs = x.shape[first:], call.meta.shape[first:]
    return [Axis(call.lowering, *row) for row in zip(sizes, outs, given, strict=True)]


def _register_nearest(name: str, exact: bool) -> None:
    def handler(call: OpCall, x: Tensor, output_size: Any, *scales: Any) -> Tensor:
        axes = _axes(call, prepared(x), scales)
        first = len(x.shape) - len(axes)

        def at(ix: Index) -> Value:
            places = [axis.nearest(i, exact) for i, axis in zip(ix[first:], axes, strict=True)]
            return x.at((*ix[:first], *places))

        return call.computed(at, x)

    lowers(named(" ".join(f"{name}{rank}d" for rank in (1, 2, 3)), "default", "vec"))(handler)


_register_nearest("upsample_nearest", False)
_register_nearest("_upsample_nearest_exact", True)


def _register_interpolation(names: str, cubic: bool) -> None:
    def handler(call: OpCall, x: Tensor, output_size: Any, align: bool, *scales: Any) -> Tensor:
        if not x.dtype.is_floating_point:
            raise NotLowered("images of bytes are ATen's, in fixed point")
        call.lowering.realise(x)
        axes = _axes(call, x, scales)
        first = len(x.shape) - len(axes)
        compute = opmath(x.dtype)

        def taps(i: Size, axis: Axis) -> list[Tap]:
            if not cubic and axis.out == axis.size and axis.scale in (None, 1.0):
                return [(i, None)]
            point = axis.source(i, align, cubic, compute)
            return axis.cubic(point) if cubic else axis.linear(point)

        def weighted(place: Index, rest: list[list[Tap]]) -> Value:
            if not rest:
                return cast(x.at(place), compute)
            terms = []
            for i, weight in rest[0]:
                value = weighted((*place, i), rest[1:])
                terms.append(value if weight is None else weight * value)
            return functools.reduce(operator.add, terms)

        def at(ix: Index) -> Value:
            every = [taps(i, axis) for i, axis in zip(ix[first:], axes, strict=True)]
            return cast(weighted(ix[:first], every), call.meta.dtype)

        return call.computed(at, x)

    lowers(named(names, "default", "vec"))(handler)


_register_interpolation("upsample_linear1d upsample_bilinear2d upsample_trilinear3d", False)
_register_interpolation("upsample_bicubic2d", True)
