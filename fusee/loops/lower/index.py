"""Reading and writing at indices that are data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusee.loops.ir import Loop, Mode, Value, cast, check, identity, op
from fusee.loops.lower.arithmetic import choose
from fusee.loops.lower.pointwise import Operand, const, demand
from fusee.loops.lower.tensor import (
    Call,
    Index,
    Lowering,
    Pieces,
    Shape,
    Strided,
    Tensor,
    lowers,
    named,
    opmath,
)
from fusee.loops.lower.views import (
    converted,
    diagonal,
    expand,
    flip,
    narrow,
    pad_constant,
    reshape,
    slice_start,
    unsqueeze,
)
from fusee.sym.expr import Expr, Size, known_ge, mod, product

# ---------------------------------------------------------------------------- gather


@dataclass(frozen=True)
class Refused:
    """What an operator says of an index: the exception, with {} for the index, and whether -1 is
    the last one."""

    kind: type[Exception]
    text: str
    wraps: bool = False

    def of(self, lowering: Lowering, index: Value, size: Size) -> Value:
        """The index, checked."""
        message = lowering.message(self.kind, self.text.replace("SIZE", str(size)))
        return check(cast(index, torch.int64), size, message, self.wraps)


ROW = Refused(IndexError, "index out of range in self")
FLAT = Refused(
    IndexError, "out of range: tried to access index {} on a tensor of SIZE elements.", True
)


def along(dim: int, kind: type[Exception] = RuntimeError, *, wraps: bool = False) -> Refused:
    """What is said of an index into a dimension."""
    return Refused(kind, f"index {{}} is out of bounds for dimension {dim} with size SIZE", wraps)


class Places:
    """A tensor of indices into `size` elements: all of them are checked, whichever are used."""

    def __init__(self, index: Tensor, size: Size, refused: Refused) -> None:
        self.index, self.size, self.refused = index, size, refused
        if index.lowering.is_heavy(index):
            index.lowering.realise(index)
        demand(index, self._checked)

    def at(self, ix: Index) -> Size:
        """The data-dependent index that the element at `ix` is."""
        return self.index.lowering.values.indirect(self._checked(self.index.at(ix)), self.size)

    def wide(self, ix: Index) -> Size:
        """The same, for a shape that the tensor is broadcast to."""
        own = ix[len(ix) - len(self.index.shape) :]
        return self.at(
            tuple(0 if n == 1 else i for i, n in zip(own, self.index.shape, strict=True))
        )

    def _checked(self, value: Value) -> Value:
        return self.refused.of(self.index.lowering, value, self.size)


# ------------------------------------------------------------------------------ reading


@lowers(*named("embedding"))
def _embedding(
    call: Call,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    rank = len(indices.shape)
    rows = Places(indices, weight.shape[0], ROW)

    def at(ix: Index) -> Value:
        return weight.at((rows.at(ix[:rank]), *ix[rank:]))

    return _gathered(call, at, weight, indices)


def _gathered(call: Call, at: Any, x: Tensor, *indices: Tensor) -> Tensor:
    meta = call.meta
    return call.lowering.computed(meta.shape, x.dtype, at, (x, *indices), meta.strides)


@lowers(*named("index_select"))
def _index_select(call: Call, x: Tensor, dim: int, index: Tensor) -> Tensor:
    if not x.shape:
        return x
    dim %= len(x.shape)
    flat = index if index.shape else reshape(index, (1,))
    rows = Places(flat, x.shape[dim], ROW)

    def at(ix: Index) -> Value:
        return x.at((*ix[:dim], rows.at((ix[dim],)), *ix[dim + 1 :]))

    return _gathered(call, at, x, flat)


@lowers(*named("gather"))
def _gather(call: Call, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    if not x.shape or not index.shape:
        source = reshape(x, (1,)) if not x.shape else x
        picked = index if index.shape else reshape(index, (1,))
        single = Places(picked, source.shape[0], along(0))
        return _gathered(call, lambda ix: source.at((single.at(ix or (0,)),)), source, picked)
    dim %= len(x.shape)
    rows = Places(index, x.shape[dim], along(dim))

    def at(ix: Index) -> Value:
        return x.at((*ix[:dim], rows.at(ix), *ix[dim + 1 :]))

    return _gathered(call, at, x, index)


@lowers(*named("take"))
def _take(call: Call, x: Tensor, index: Tensor) -> Tensor:
    flat = reshape(x, (product(x.shape),))
    places = Places(index, flat.shape[0], FLAT)
    return _gathered(call, lambda ix: flat.at((places.at(ix),)), flat, index)


# ------------------------------------------------------------------------------ index lists


def _has_mask(
    call: Call, x: Tensor, indices: Sequence[Tensor | None], *_: Any, **__: Any
) -> str | None:
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices):
        return "boolean masks select a number of elements that only the data knows"
    return None


class Indexing:
    """How aten.index maps the result's index to the source's."""

    def __init__(self, x: Tensor, indices: Sequence[Tensor | None]) -> None:
        self.shape = x.shape
        self.tensors = {k: t for k, t in enumerate(indices) if t is not None}
        self.common: Shape = ()
        for tensor in self.tensors.values():
            self.common = _broadcast(self.common, tensor.shape)
        refused = {k: along(k, IndexError, wraps=True) for k in self.tensors}
        self.places = {k: Places(t, x.shape[k], refused[k]) for k, t in self.tensors.items()}
        dims = list(self.tensors)
        adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
        self.front = dims[0] if adjacent else 0  # where the indexed dimensions appear
        rest = [n for k, n in enumerate(x.shape) if k not in self.tensors]
        self.result = (*rest[: self.front], *self.common, *rest[self.front :])

    def source(self, ix: Index) -> Index:
        """The source's index for an index of the result."""
        at = ix[self.front : self.front + len(self.common)]
        rest = iter((*ix[: self.front], *ix[self.front + len(self.common) :]))
        places: list[Size] = []
        for k in range(len(self.shape)):
            places.append(self.places[k].wide(at) if k in self.places else next(rest))
        return tuple(places)


def _broadcast(a: Shape, b: Shape) -> Shape:
    wide = max(len(a), len(b))
    a, b = (1,) * (wide - len(a)) + a, (1,) * (wide - len(b)) + b
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


@lowers(*named("index _unsafe_index", "Tensor"), unless=_has_mask)
def _index(call: Call, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    if all(t is None for t in indices):
        return x
    how = Indexing(x, indices)
    return _gathered(call, lambda ix: x.at(how.source(ix)), x, *how.tensors.values())


# ---------------------------------------------------------------------------- scatter
# Writing at indices that are data, or through views: a copy, then stores into it in order.

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
    first = parts[0]
    shape: Shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    return lowering.beside(shape, first.dtype, Pieces(dim, tuple(starts), tuple(parts)))


def replaced(call: Call, x: Tensor, src: Tensor, dim: int, start: Size) -> Tensor:
    """`x` with `src` in the place that begins at `start`."""
    length = src.shape[dim]
    if call.overwrites:
        place = narrow(x, dim, start, length).storage
        assert place is not None
        call.lowering.write_into(src, place)
        return x
    end = start + length
    before = narrow(x, dim, 0, start)
    after = narrow(x, dim, end, x.shape[dim] - end)
    return beside([before, src, after], dim)


@lowers(*named("cat concat concatenate"))
def _cat(call: Call, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    rank = len(call.meta.shape)
    # torch lets one-dimensional empty tensors pass whatever the others' shapes are
    real = [t for t in tensors if t.shape != (0,) or rank == 1]
    return beside([converted(t, call.meta.dtype) for t in real], dim % rank)


@lowers(*named("stack"))
def _stack(call: Call, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= len(call.meta.shape)
    return beside([unsqueeze(converted(t, call.meta.dtype), dim) for t in tensors], dim)


def _rolls_flat(call: Call, x: Tensor, shifts: Any, dims: Any = ()) -> str | None:
    if not isinstance(dims, int) and len(dims) == 0:
        return "roll of the flattened tensor"
    return None


def _turned(x: Tensor, dim: int, begin: Size) -> Tensor:
    """roll along a dimension that vectors don't run along: the remainder costs next to nothing."""
    size = x.shape[dim]

    def turned(at: Index) -> Index:
        return (*at[:dim], mod(at[dim] + begin, size), *at[dim + 1 :])

    return x.lowering.view(x, x.shape, turned, None)


@lowers(*named("roll"), unless=_rolls_flat)
def _roll(call: Call, x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    for shift, dim in zip(shifts, dims, strict=True):
        place = dim % len(x.shape)
        size = x.shape[place]
        if size != 0 and place != len(x.shape) - 1:
            x = _turned(x, place, -shift % size)
        elif size != 0:
            begin = -shift % size
            x = beside([narrow(x, place, begin, size - begin), narrow(x, place, 0, begin)], place)
    return x


# ------------------------------------------------------------------------------ parts replaced


def _no_such_slice(
    call: Call,
    x: Tensor,
    src: Tensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> str | None:
    size = x.shape[dim]
    if isinstance(size, Expr) or isinstance(start, Expr) or isinstance(end, Expr):
        return None
    if isinstance(step, Expr):
        return None
    there = len(range(size)[start:end:step])
    return None if there == src.shape[dim] else "ATen refuses a source of another size"


def _no_such_place(call: Call, x: Tensor, src: Tensor, dim: int, index: Size) -> str | None:
    size = x.shape[dim]
    if isinstance(index, Expr) or isinstance(size, Expr) or -size <= index < size:
        return None
    return "ATen refuses an index out of range"


@lowers(*named("slice_scatter"), unless=_no_such_slice)
def _slice_scatter(
    call: Call,
    x: Tensor,
    src: Tensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> Tensor:
    dim %= len(x.shape)
    if step != 1:
        return strided_slice_scatter(call, x, src, dim, start, step)
    return replaced(call, x, converted(src, x.dtype), dim, slice_start(start, x.shape[dim]))


@lowers(*named("select_scatter"), unless=_no_such_place)
def _select_scatter(call: Call, x: Tensor, src: Tensor, dim: int, index: Size) -> Tensor:
    dim %= len(x.shape)
    if isinstance(index, int) and index < 0:
        index = x.shape[dim] + index
    return replaced(call, x, unsqueeze(converted(src, x.dtype), dim), dim, index)


# ------------------------------------------------------------------------------ pads


@lowers(*named("constant_pad_nd"))
def _constant_pad(call: Call, x: Tensor, pad: Sequence[Size], value: Any = 0) -> Tensor:
    before: list[Size] = [0] * len(x.shape)
    for k in range(len(pad) // 2):
        before[-1 - k] = pad[2 * k]
    return pad_constant(x, call.meta.shape, before, value)


def _padded(
    x: Tensor, pad: Sequence[int], edge: Callable[[Tensor, int, int, bool], Tensor]
) -> Tensor:
    """Each padded dimension becomes edge, middle, edge; negative pads cut."""
    for k in range(len(pad) // 2):
        dim = len(x.shape) - 1 - k
        before, after = pad[2 * k], pad[2 * k + 1]
        cut_before, cut_after = max(-before, 0), max(-after, 0)
        middle = narrow(x, dim, cut_before, x.shape[dim] - cut_before - cut_after)
        parts = [middle]
        if before > 0:
            parts.insert(0, edge(x, dim, before, True))
        if after > 0:
            parts.append(edge(x, dim, after, False))
        x = beside(parts, dim)
    return x


def _reflected(x: Tensor, dim: int, count: int, front: bool) -> Tensor:
    start = 1 if front else x.shape[dim] - 1 - count
    return flip(narrow(x, dim, start, count), (dim,))


def _replicated(x: Tensor, dim: int, count: int, front: bool) -> Tensor:
    last = narrow(x, dim, 0 if front else x.shape[dim] - 1, 1)
    return expand(last, (*x.shape[:dim], count, *x.shape[dim + 1 :]))


def _cuts_all(call: Call, x: Tensor, padding: Sequence[int]) -> str | None:
    """Padding that takes away more than there is, and adds to it at the other end."""
    for k in range(len(padding) // 2):
        cut = -min(padding[2 * k], 0) - min(padding[2 * k + 1], 0)
        if cut and not known_ge(x.shape[-1 - k], cut + 1):
            return "padding that takes away all there is"
    return None


@lowers(*named("reflection_pad1d reflection_pad2d reflection_pad3d"), unless=_cuts_all)
def _reflection_pad(call: Call, x: Tensor, padding: Sequence[int]) -> Tensor:
    return _padded(x, padding, _reflected)


@lowers(*named("replication_pad1d replication_pad2d replication_pad3d"), unless=_cuts_all)
def _replication_pad(call: Call, x: Tensor, padding: Sequence[int]) -> Tensor:
    return _padded(x, padding, _replicated)
