"""Writing at indices that are data, or through views: a copy, then stores into it in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusee.loops.ir import Loop, Mode, Value, cast, op
from fusee.loops.lower.arithmetic import choose
from fusee.loops.lower.formulas import const
from fusee.loops.lower.gather import ROW, Indexing, Places, Refused, along
from fusee.loops.lower.numbers import opmath
from fusee.loops.lower.pointwise import Operand
from fusee.loops.lower.shape import converted, diagonal, expand, narrow, reshape, slice_start
from fusee.loops.lower.strides import Shape
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Index, Strided, Tensor
from fusee.loops.scalar import identity
from fusee.sym.expr import Size

Target = Callable[[Index], Index]
Element = Callable[[Index], Value]


class Scatter:
    """A copy of `x`, or `x` itself if it may be overwritten, that is stored into.

    Halves accumulate in float32 and are rounded at the end.
    """

    def __init__(self, call: Call, x: Tensor, accumulates: bool) -> None:
        self.dtype, self.lowering = x.dtype, x.lowering
        compute = opmath(x.dtype) if accumulates else x.dtype
        if call.overwrites and compute is x.dtype and x.storage is not None:
            self.storage = x.storage
        else:
            x = converted(x, compute)
            self.storage = self.lowering.copy(x, self.lowering.choose_strides(x))
        self.tensor = self.lowering.stored(self.storage, x.shape)

    def store(
        self,
        shape: Shape,
        target: Target,
        element: Element,
        mode: Mode,
        colliding: Sequence[int],
    ) -> None:
        """For each index of `shape`: combine element(index) into target(index).

        `colliding` are the dimensions along which two indices may have one target.
        """
        index = self.lowering.axes(shape)
        if any(size == 0 for size in shape):
            return
        ordered = tuple(self.lowering.axis(f"i{k}", shape[k]) for k in colliding if shape[k] != 1)
        self.lowering.emit(
            Loop(
                self.storage.buffer,
                self.lowering.axis_symbols(shape),
                self.lowering.offset(self.storage, target(index)),
                cast(element(index), self.storage.buffer.dtype),
                mode=mode,
                ordered=ordered,
            )
        )

    def result(self) -> Tensor:
        return converted(self.tensor, self.dtype)


def _element(call: Call, x: Operand, shape: Shape) -> Element:
    """Reads an operand that is broadcast to `shape`, or a number."""
    if isinstance(x, Tensor):
        wide = expand(x, shape) if x.shape != shape else x
        return wide.at
    value = call.lowering.number(x, call.meta.dtype)
    return lambda ix: value


# ------------------------------------------------------------------------------ scatter

MODES: dict[str | None, Mode] = {
    None: "set",
    "add": "add",
    "sum": "add",
    "multiply": "mul",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
}
STARTS = {"sum": "sum", "prod": "prod", "amax": "max", "amin": "min"}


def _scatter(
    call: Call,
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Operand,
    reduce: str | None = None,
    include_self: bool = True,
) -> Tensor:
    shape = x.shape
    if not shape:
        x = reshape(x, (1,))
    if not index.shape:
        index = reshape(index, (1,))
    if isinstance(src, Tensor):
        src = reshape(src, (1,)) if not src.shape else src
        src = converted(src, x.dtype)
    dim %= len(x.shape)
    lowering = call.lowering
    lowering.realise(index)
    mode = MODES[reduce]
    rows = Places(index, x.shape[dim], along(dim))
    scatter = Scatter(call, x, mode != "set")

    def target(ix: Index) -> Index:
        return (*ix[:dim], rows.at(ix), *ix[dim + 1 :])

    if not include_self:
        assert reduce is not None
        start = identity(STARTS[reduce], scatter.tensor.dtype)
        fresh = lowering.values.const(start, scatter.tensor.dtype)
        scatter.store(index.shape, target, lambda ix: fresh, "set", [dim])
    element = src.at if isinstance(src, Tensor) else _element(call, src, index.shape)
    scatter.store(index.shape, target, element, mode, [dim])
    return reshape(scatter.result(), shape)


def _odd(call: Call, x: Tensor, *args: Any, **kwargs: Any) -> str | None:
    if x.dtype is torch.bool:
        return "bool is combined as ATen does it"
    if "mean" in (*args, *kwargs.values()):
        return "a mean over collisions needs their number"
    return None


@lowers(*named("scatter", "src", "value"))
def _scatter_set(call: Call, x: Tensor, dim: int, index: Tensor, src: Operand) -> Tensor:
    return _scatter(call, x, dim, index, src)


@lowers(*named("scatter", "reduce", "value_reduce"), unless=_odd)
def _scatter_combine(
    call: Call, x: Tensor, dim: int, index: Tensor, src: Operand, *, reduce: str
) -> Tensor:
    return _scatter(call, x, dim, index, src, reduce)


@lowers(*named("scatter_add"), unless=_odd)
def _scatter_add(call: Call, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _scatter(call, x, dim, index, src, "sum")


@lowers(*named("scatter_reduce", "two"), unless=_odd)
def _scatter_reduce(
    call: Call,
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    return _scatter(call, x, dim, index, src, reduce, include_self)


# ------------------------------------------------------------------------------ index_put


def _masks(
    call: Call,
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> str | None:
    if accumulate and x.dtype is torch.bool:
        return "bool is combined as ATen does it"
    masks = [t for t in indices if t is not None and t.dtype in (torch.bool, torch.uint8)]
    if not masks or _is_fill(x, indices, values, accumulate):
        return None
    return "boolean masks select a number of elements that only the data knows"


def _is_fill(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> bool:
    """x[mask] = one number."""
    mask = indices[0] if len(indices) == 1 else None
    single = mask is not None and mask.dtype is torch.bool and not accumulate
    return single and all(n == 1 for n in values.shape)


@lowers(*named("index_put _unsafe_index_put"), unless=_masks)
def _index_put(
    call: Call,
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    if _is_fill(x, indices, values, accumulate):
        mask = indices[0]
        assert mask is not None
        wide = reshape(mask, (*mask.shape, *([1] * (len(x.shape) - len(mask.shape)))))
        return choose(call, wide, reshape(values, ()), x)
    for tensor in indices:
        if tensor is not None:
            call.lowering.realise(tensor)
    how = Indexing(x, indices)
    scatter = Scatter(call, x, accumulate)
    source = expand(values, how.result)
    colliding = range(how.front, how.front + len(how.common))
    mode: Mode = "add" if accumulate else "set"
    scatter.store(how.result, how.source, source.at, mode, colliding)
    return scatter.result()


# ------------------------------------------------------------------------------ index_add and kin


def _along(
    call: Call,
    x: Tensor,
    dim: int,
    index: Tensor,
    shape: Shape,
    element: Element,
    mode: Mode,
    refused: Refused,
) -> Tensor:
    """One row of x after another, at the places that `index` names along `dim`."""
    call.lowering.realise(index)
    rows = Places(index, x.shape[dim], refused)
    scatter = Scatter(call, x, mode != "set")

    def target(ix: Index) -> Index:
        return (*ix[:dim], rows.at((ix[dim],)), *ix[dim + 1 :])

    scatter.store(shape, target, element, mode, [dim])
    return scatter.result()


def _flat(x: Tensor) -> Tensor:
    return x if x.shape else reshape(x, (1,))


@lowers(*named("index_add"), unless=_odd)
def _index_add(
    call: Call, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1
) -> Tensor:
    shape, x, index, source = x.shape, _flat(x), _flat(index), _flat(source)
    dim %= len(x.shape)
    compute = opmath(x.dtype)

    def element(ix: Index) -> Value:
        value = cast(source.at(ix), compute)
        return value if alpha == 1 else op("mul", value, const(value, alpha))

    refused = ROW if len(x.shape) == 1 else along(dim)
    return reshape(_along(call, x, dim, index, source.shape, element, "add", refused), shape)


@lowers(*named("index_copy"))
def _index_copy(call: Call, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    shape, x, index, source = x.shape, _flat(x), _flat(index), _flat(source)
    dim %= len(x.shape)
    refused = along(dim, IndexError)
    refused = replace(refused, text=f"index_copy_(): {refused.text}")
    return reshape(_along(call, x, dim, index, source.shape, source.at, "set", refused), shape)


@lowers(*named("index_fill", "int_Scalar", "int_Tensor"))
def _index_fill(call: Call, x: Tensor, dim: int, index: Tensor, value: Operand) -> Tensor:
    shape, x, index = x.shape, _flat(x), _flat(index)
    dim %= len(x.shape)
    rows: Shape = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    filled = converted(value, x.dtype) if isinstance(value, Tensor) else value
    element = _element(call, filled, rows)
    refused = along(dim, IndexError, wraps=True)
    return reshape(_along(call, x, dim, index, rows, element, "set", refused), shape)


# ------------------------------------------------------------------------------ through views


def _through(call: Call, x: Tensor, src: Tensor, seen: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy of `x` in which the view seen(copy) is replaced by `src`."""
    scatter = Scatter(call, x, False)
    target = seen(scatter.tensor).storage
    assert target is not None
    call.lowering.write_into(expand(converted(src, x.dtype), src.shape), target)
    return scatter.tensor


def _misfit(
    call: Call, x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> str | None:
    sizes = [n for n in x.shape if isinstance(n, int)]
    if len(sizes) != len(x.shape):
        return None
    into = torch.empty(sizes, device="meta").diagonal(offset, dim1, dim2)
    return None if into.shape == src.shape else "ATen refuses a source of another size"


@lowers(*named("diagonal_scatter"), unless=_misfit)
def _diagonal_scatter(
    call: Call, x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    return _through(call, x, src, lambda t: diagonal(t, src.shape, offset, dim1, dim2))


def strided_slice_scatter(
    call: Call, x: Tensor, src: Tensor, dim: int, start: Size | None, step: Size
) -> Tensor:
    """slice_scatter with a step."""
    begin = slice_start(start, x.shape[dim])
    return _through(call, x, src, lambda t: narrow(t, dim, begin, src.shape[dim], step))


@lowers(*named("as_strided_scatter"))
def _as_strided_scatter(
    call: Call,
    x: Tensor,
    src: Tensor,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Tensor:
    lowering = call.lowering
    strides, begin = call.layout_of(0)
    storage = lowering.copy(x, strides)
    offset: Size = 0 if storage_offset is None else storage_offset - begin
    target = Strided(storage.buffer, tuple(stride), storage.offset + offset)
    lowering.write_into(converted(src, x.dtype), target)
    return lowering.stored(storage, x.shape)
