"""Reading and writing at indices that are data."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusee.loops import Loop, Mode, Value, cast, check, identity
from fusee.loops.lower.pointwise import Operand, choose, demand
from fusee.loops.lower.tensor import (
    Index,
    Lowering,
    NotLowered,
    OpCall,
    Pieces,
    Shape,
    Strided,
    Tensor,
    lowers,
)
from fusee.loops.lower.views import (
    converted,
    diagonal,
    expand,
    flip,
    is_repeated,
    narrow,
    pad_constant,
    reshape,
    resized,
    slice_start,
    unsqueeze,
    wrapped,
)
from fusee.loops.operators import opmath
from fusee.sym import Size, known_ge, mod, product

# ---------------------------------------------------------------------------- gather


class Refused(NamedTuple):
    """What an operator says of an index: the exception, with {} for the index and {size} for what
    it must be below, and whether -1 is the last one."""

    kind: type[Exception]
    text: str
    wraps: bool = False

    def of(self, lowering: Lowering, size: Size) -> Callable[[Value], Value]:
        """What checks an index of the operator that is lowered now."""
        told = size if "{size}" in self.text else 0  # equal messages are one
        message = lowering.message(self.kind, self.text, told)
        return lambda index: check(cast(index, torch.int64), size, message, self.wraps)


ROW = Refused(IndexError, "index out of range in self")
FLAT = Refused(
    IndexError, "out of range: tried to access index {} on a tensor of {size} elements.", True
)


def along(dim: int, kind: type[Exception] = RuntimeError, *, wraps: bool = False) -> Refused:
    """What is said of an index into a dimension."""
    text = f"index {{}} is out of bounds for dimension {dim} with size {{size}}"
    return Refused(kind, text, wraps)


class Places:
    """A tensor of indices into `size` elements: all of them are checked, whichever are used."""

    def __init__(self, index: Tensor, size: Size, refused: Refused) -> None:
        self.index, self.size = index, size
        self._checked = refused.of(index.lowering, size)
        if index.lowering.is_heavy(index):
            index.lowering.realise(index)
        demand(self._checked, index)

    def at(self, ix: Index) -> Size:
        """The data-dependent index that the element at `ix` is."""
        return self.index.lowering.values.indirect(self._checked(self.index.at(ix)), self.size)

    def wide(self, ix: Index, shape: Shape) -> Size:
        """The same, for a shape that the tensor is broadcast to."""
        lead = len(ix) - len(self.index.shape)
        own = zip(ix[lead:], self.index.shape, shape[lead:], strict=True)
        return self.at(tuple(0 if n == 1 or is_repeated(n, wide) else i for i, n, wide in own))


# ------------------------------------------------------------------------------ reading


@lowers("embedding")
def _embedding(call: OpCall, weight: Tensor, indices: Tensor) -> Tensor:
    rank = len(indices.shape)
    rows = Places(indices, weight.shape[0], ROW)
    return call.computed(lambda ix: weight.at((rows.at(ix[:rank]), *ix[rank:])), weight, indices)


def _flat(x: Tensor) -> Tensor:
    return x if x.shape else reshape(x, (1,))


@lowers("index_select")
def _index_select(call: OpCall, x: Tensor, dim: int, index: Tensor) -> Tensor:
    one, index = _flat(x), _flat(index)
    dim %= len(one.shape)
    rows = Places(index, one.shape[dim], ROW)

    def at(ix: Index) -> Value:
        ix = ix or (0,)
        return one.at(resized(ix, dim, rows.at((ix[dim],))))

    return call.computed(at, one, index)


@lowers("gather")
def _gather(call: OpCall, x: Tensor, dim: int, index: Tensor) -> Tensor:
    if not x.shape or not index.shape:
        x, index, dim = _flat(x), _flat(index), 0
    dim %= len(x.shape)
    rows = Places(index, x.shape[dim], along(dim))

    def at(ix: Index) -> Value:
        ix = ix or (0,)
        return x.at(resized(ix, dim, rows.at(ix)))

    return call.computed(at, x, index)


@lowers("take")
def _take(call: OpCall, x: Tensor, index: Tensor) -> Tensor:
    flat = reshape(x, (product(x.shape),))
    places = Places(index, flat.shape[0], FLAT)
    return call.computed(lambda ix: flat.at((places.at(ix),)), flat, index)


# ------------------------------------------------------------------------------ index lists


class Indexing:
    """How aten.index maps the result's index to the source's. raises NotLowered for masks"""

    def __init__(self, x: Tensor, indices: Sequence[Tensor | None]) -> None:
        self.shape = x.shape
        self.tensors = {k: t for k, t in enumerate(indices) if t is not None}
        if any(t.dtype in (torch.bool, torch.uint8) for t in self.tensors.values()):
            raise NotLowered("boolean masks select a number of elements that only the data knows")
        self.common: Shape = ()
        for tensor in self.tensors.values():
            sides = itertools.zip_longest(self.common[::-1], tensor.shape[::-1], fillvalue=1)
            self.common = tuple(m if is_repeated(n, m) else n for n, m in sides)[::-1]
        self.places = {
            k: Places(t, x.shape[k], along(k, IndexError, wraps=True))
            for k, t in self.tensors.items()
        }
        dims = list(self.tensors)
        adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
        self.front = dims[0] if adjacent else 0  # where the indexed dimensions appear
        rest = [n for k, n in enumerate(x.shape) if k not in self.tensors]
        self.result = (*rest[: self.front], *self.common, *rest[self.front :])

    def source(self, ix: Index) -> Index:
        """The source's index for an index of the result."""
        at = ix[self.front : self.front + len(self.common)]
        rest = iter((*ix[: self.front], *ix[self.front + len(self.common) :]))
        return tuple(
            self.places[k].wide(at, self.common) if k in self.places else next(rest)
            for k in range(len(self.shape))
        )


@lowers("index.Tensor")
def _index(call: OpCall, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    if all(t is None for t in indices):
        return x
    how = Indexing(x, indices)
    return call.computed(lambda ix: x.at(how.source(ix)), x, *how.tensors.values())


# ---------------------------------------------------------------------------- scatter
# Writing at indices that are data, or through views: a copy, then stores into it in order.

Target = Callable[[Index], Index]
Element = Callable[[Index], Value]


class Scatter:
    """A copy of `x`, or `x` itself if it may be overwritten, that is stored into.

    Halves accumulate in float32 and are rounded at the end.
    """

    def __init__(self, call: OpCall, x: Tensor, accumulates: bool) -> None:
        self.dtype, self.lowering = x.dtype, x.lowering
        compute = opmath(x.dtype) if accumulates else x.dtype
        if call.overwrites and compute is x.dtype and x.storage is not None:
            self.storage = x.storage
        else:
            x = converted(x, compute)
            self.storage = self.lowering.copy(x, self.lowering.choose_strides(x))
        self.tensor = self.lowering.stored(self.storage, x.shape)

    def store(
        self, shape: Shape, target: Target, element: Element, mode: Mode, colliding: Sequence[int]
    ) -> None:
        """For each index of `shape`: combine element(index) into target(index).

        `colliding` are the dimensions along which two indices may have one target.
        """
        index = self.lowering.axes(shape)
        if 0 in shape:
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


def _element(call: OpCall, x: Operand, shape: Shape) -> Element:
    """Reads an operand that is broadcast to `shape`, or a number."""
    if isinstance(x, Tensor):
        return expand(x, shape).at
    value = call.lowering.number(x, call.meta.dtype)
    return lambda ix: value


MODES: dict[str, Mode] = {
    "add": "add",
    "sum": "add",
    "multiply": "mul",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
}


def _combined(x: Tensor, how: str = "add") -> Mode:
    """raises  NotLowered for what ATen combines otherwise than stores do"""
    if x.dtype is torch.bool:
        raise NotLowered("bool is combined as ATen does it")
    if how not in MODES:
        raise NotLowered("a mean over collisions needs their number")
    return MODES[how]


@lowers("scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_reduce.two")
def _scatter(
    call: OpCall,
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Operand,
    by_place: str | None = None,
    *,
    reduce: str | None = None,
    include_self: bool = True,
) -> Tensor:
    reduce = by_place or reduce
    mode: Mode = "set" if reduce is None else _combined(x, reduce)
    rows = Rows(call, x, dim, index)
    places, dtype = rows.index.shape, opmath(x.dtype)
    src = converted(_flat(src), x.dtype) if isinstance(src, Tensor) else src
    element = src.at if isinstance(src, Tensor) else _element(call, src, places)
    stores: list[tuple[Element, Mode]] = [(element, mode)]
    if not include_self:
        assert reduce is not None
        fresh = call.lowering.values.const(identity(reduce.removeprefix("a"), dtype), dtype)
        stores.insert(0, (lambda ix: fresh, "set"))
    return rows.store(places, along(rows.dim), *stores)


lowers("scatter_add")(lambda call, x, dim, index, src: _scatter(call, x, dim, index, src, "sum"))


@lowers("index_put _unsafe_index_put")
def _index_put(
    call: OpCall, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool
) -> Tensor:
    mask = indices[0] if len(indices) == 1 and not accumulate else None
    if mask is not None and mask.dtype is torch.bool and all(n == 1 for n in values.shape):
        wide = reshape(mask, (*mask.shape, *([1] * (len(x.shape) - len(mask.shape)))))
        return choose(call, wide, reshape(values, ()), x)  # x[mask] = one number
    mode: Mode = _combined(x) if accumulate else "set"
    how = Indexing(x, indices)
    for tensor in how.tensors.values():
        call.lowering.realise(tensor)
    scatter = Scatter(call, x, accumulate)
    source = expand(values, how.result)
    colliding = range(how.front, how.front + len(how.common))
    scatter.store(how.result, how.source, source.at, mode, colliding)
    return scatter.result()


# ------------------------------------------------------------------------------ index_add and kin


class Rows:
    """What is stored into `x` along `dim`, at the places that `index` names: one after another.

    index   of one axis; or of all that `x` has, with a place for each element
    """

    def __init__(self, call: OpCall, x: Tensor, dim: int, index: Tensor) -> None:
        self.call, self.shape = call, x.shape
        self.x, self.index = _flat(x), _flat(index)
        self.dim = dim % len(self.x.shape)

    def store(self, shape: Shape, refused: Refused, *stores: tuple[Element, Mode]) -> Tensor:
        self.call.lowering.realise(self.index)
        dim, is_of_all = self.dim, len(self.index.shape) == len(self.x.shape)
        places = Places(self.index, self.x.shape[dim], refused)
        scatter = Scatter(self.call, self.x, any(mode != "set" for _, mode in stores))

        def target(ix: Index) -> Index:
            return resized(ix, dim, places.at(ix if is_of_all else (ix[dim],)))

        for element, mode in stores:
            scatter.store(shape, target, element, mode, [dim])
        return reshape(scatter.result(), self.shape)


@lowers("index_add")
def _index_add(
    call: OpCall, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any
) -> Tensor:
    mode = _combined(x)
    rows, source = Rows(call, x, dim, index), _flat(source)

    def element(ix: Index) -> Value:
        value = cast(source.at(ix), opmath(x.dtype))
        return value if alpha == 1 else value * alpha

    refused = ROW if len(rows.x.shape) == 1 else along(rows.dim)
    return rows.store(source.shape, refused, (element, mode))


@lowers("index_copy")
def _index_copy(call: OpCall, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    rows, source = Rows(call, x, dim, index), _flat(source)
    refused = along(rows.dim, IndexError)
    refused = refused._replace(text=f"index_copy_(): {refused.text}")
    return rows.store(source.shape, refused, (source.at, "set"))


@lowers("index_fill.int_Scalar index_fill.int_Tensor")
def _index_fill(call: OpCall, x: Tensor, dim: int, index: Tensor, value: Operand) -> Tensor:
    rows = Rows(call, x, dim, index)
    shape = resized(rows.x.shape, rows.dim, rows.index.shape[0])
    value = converted(value, x.dtype) if isinstance(value, Tensor) else value
    refused = along(rows.dim, IndexError, wraps=True)
    return rows.store(shape, refused, (_element(call, value, shape), "set"))


@lowers("put")
def _put(call: OpCall, x: Tensor, index: Tensor, source: Tensor, accumulate: bool) -> Tensor:
    mode: Mode = _combined(x) if accumulate else "set"
    count = product(index.shape)
    flat, places = reshape(x, (product(x.shape),)), reshape(index, (count,))
    element = reshape(source, (count,)).at
    return reshape(Rows(call, flat, 0, places).store((count,), FLAT, (element, mode)), x.shape)


# ------------------------------------------------------------------------------ through views


def _through(call: OpCall, x: Tensor, src: Tensor, seen: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy of `x` in which the view seen(copy) is replaced by `src`."""
    scatter = Scatter(call, x, False)
    target = seen(scatter.tensor).storage
    assert target is not None
    call.lowering.write_into(converted(src, x.dtype), target)
    return scatter.tensor


@lowers("diagonal_scatter")
def _diagonal_scatter(
    call: OpCall, x: Tensor, src: Tensor, offset: int, dim1: int, dim2: int
) -> Tensor:
    return _through(call, x, src, lambda t: diagonal(t, src.shape, offset, dim1, dim2))


@lowers("as_strided_scatter")
def _as_strided_scatter(
    call: OpCall,
    x: Tensor,
    src: Tensor,
    size: object,
    stride: Sequence[Size],
    storage_offset: Size | None,
) -> Tensor:
    lowering = call.lowering
    strides, begin = call.layout_of(0)
    storage = lowering.copy(x, strides)
    offset: Size = 0 if storage_offset is None else storage_offset - begin
    target = Strided(storage.buffer, tuple(stride), storage.offset + offset)
    lowering.write_into(converted(src, x.dtype), target)
    return lowering.stored(storage, x.shape)


# ---------------------------------------------------------------------------- cat
# Tensors side by side: cat, stack, roll, and what replaces a part of a tensor by another.


def beside(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """cat: at least one tensor; all of one dtype and, but for `dim`, of one shape."""
    lowering = tensors[0].lowering
    parts: list[Tensor] = []
    for tensor in tensors:
        inner = tensor.pieces
        if inner is not None and inner.dim == dim and tensor.storage is None:
            parts += inner.tensors
        elif tensor.shape[dim] != 0:
            parts.append(tensor)
    if len(parts) < 2:
        return parts[0] if parts else tensors[0]
    starts: list[Size] = []
    total: Size = 0
    for tensor in parts:
        starts.append(total)
        total = total + tensor.shape[dim]
    shape = resized(parts[0].shape, dim, total)
    return lowering.beside(shape, parts[0].dtype, Pieces(dim, tuple(starts), tuple(parts)))


def replaced(call: OpCall, x: Tensor, src: Tensor, dim: int, start: Size) -> Tensor:
    """`x` with `src` in the place that begins at `start`."""
    length = src.shape[dim]
    if call.overwrites:
        place = narrow(x, dim, start, length).storage
        assert place is not None
        call.lowering.write_into(src, place)
        return x
    end = start + length
    before = narrow(x, dim, 0, start)
    return beside([before, src, narrow(x, dim, end, x.shape[dim] - end)], dim)


@lowers("cat concat concatenate")
def _cat(call: OpCall, tensors: Sequence[Tensor], dim: int) -> Tensor:
    rank = len(call.meta.shape)
    # torch lets one-dimensional empty tensors pass whatever the others' shapes are
    real = [t for t in tensors if t.shape != (0,) or rank == 1]
    return beside([converted(t, call.meta.dtype) for t in real], dim % rank)


@lowers("stack")
def _stack(call: OpCall, tensors: Sequence[Tensor], dim: int) -> Tensor:
    dim %= len(call.meta.shape)
    return beside([unsqueeze(converted(t, call.meta.dtype), dim) for t in tensors], dim)


@lowers("roll")
def _roll(call: OpCall, x: Tensor, shifts: Any, dims: Any) -> Tensor:
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        raise NotLowered("roll of a flat tensor")
    shape = x.shape

    def turned(at: Index, dim: int, begin: Size) -> Index:
        return resized(at, dim, mod(at[dim] + begin, shape[dim]))

    for shift, given in zip(shifts, dims, strict=True):
        dim = given % len(shape)
        begin = -shift % shape[dim]
        if dim == len(shape) - 1:
            rest = shape[dim] - begin
            x = beside([narrow(x, dim, begin, rest), narrow(x, dim, 0, begin)], dim)
        else:  # vectors don't run along the dimension: the remainder costs next to nothing
            index_map = functools.partial(turned, dim=dim, begin=begin)
            x = x.lowering.view(x, shape, index_map, None)
    return x


@lowers("slice_scatter")
def _slice_scatter(
    call: OpCall, x: Tensor, src: Tensor, dim: int, start: Size | None, end: object, step: Size
) -> Tensor:
    dim %= len(x.shape)
    begin = slice_start(start, x.shape[dim])
    if step != 1:
        return _through(call, x, src, lambda t: narrow(t, dim, begin, src.shape[dim], step))
    return replaced(call, x, converted(src, x.dtype), dim, begin)


@lowers("select_scatter")
def _select_scatter(call: OpCall, x: Tensor, src: Tensor, dim: int, index: Size) -> Tensor:
    dim %= len(x.shape)
    part = unsqueeze(converted(src, x.dtype), dim)
    return replaced(call, x, part, dim, wrapped(index, x.shape[dim]))


# ------------------------------------------------------------------------------ pads


@lowers("constant_pad_nd")
def _constant_pad(call: OpCall, x: Tensor, pad: Sequence[Size], value: Any) -> Tensor:
    before: list[Size] = [0] * len(x.shape)
    for k in range(len(pad) // 2):
        before[-1 - k] = pad[2 * k]
    return pad_constant(x, call.meta.shape, before, value)


def _register_pad(
    names: str, edge: Callable[[Tensor, int, Size, bool], Tensor], cuts: bool = True
) -> None:
    """Each padded dimension becomes edge, middle, edge; negative pads cut, if they may."""

    def handler(call: OpCall, x: Tensor, padding: Sequence[Size]) -> Tensor:
        if not all((cuts and isinstance(n, int)) or known_ge(n, 0) for n in padding):
            raise NotLowered("padding that may take some away")
        cut = [max(-n, 0) if isinstance(n, int) else 0 for n in padding]
        for k in range(len(padding) // 2):
            both = cut[2 * k] + cut[2 * k + 1]
            if both and not known_ge(x.shape[-1 - k], both + 1):
                raise NotLowered("padding that takes away all there is")
        for k in range(len(padding) // 2):
            dim = len(x.shape) - 1 - k
            before, after = padding[2 * k], padding[2 * k + 1]
            first = cut[2 * k]
            parts = [narrow(x, dim, first, x.shape[dim] - first - cut[2 * k + 1])]
            if not isinstance(before, int) or before > 0:
                parts.insert(0, edge(x, dim, before, True))
            if not isinstance(after, int) or after > 0:
                parts.append(edge(x, dim, after, False))
            x = beside(parts, dim)
        return x

    lowers(names)(handler)


_register_pad(
    "reflection_pad1d reflection_pad2d reflection_pad3d",
    lambda x, dim, count, front: flip(
        narrow(x, dim, 1 if front else x.shape[dim] - 1 - count, count), (dim,)
    ),
)
_register_pad(
    "replication_pad1d replication_pad2d replication_pad3d",
    lambda x, dim, count, front: expand(
        narrow(x, dim, 0 if front else x.shape[dim] - 1, 1), resized(x.shape, dim, count)
    ),
)
_register_pad(
    "_pad_circular",
    lambda x, dim, count, front: narrow(x, dim, x.shape[dim] - count if front else 0, count),
    cuts=False,
)
