"""ATen's views, copies and casts. None of them moves an element by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusee.loops.ir import Value
from fusee.loops.lower.shape import (
    converted,
    diagonal,
    expand,
    flip,
    narrow,
    permute,
    reshape,
    select,
    slice_start,
    squeeze,
    unsqueeze,
)
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Index, Strided, Tensor
from fusee.sym.expr import Size

aten = torch.ops.aten

# ------------------------------------------------------------------------------ aten


@lowers(aten.permute.default)
def _permute(call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
    return permute(x, dims)


@lowers(aten.transpose.int)
def _transpose(call: Call, x: Tensor, dim0: int, dim1: int) -> Tensor:
    if not x.shape:
        return x
    dims = list(range(len(x.shape)))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute(x, dims)


@lowers(aten.t.default, aten.numpy_T.default)
def _t(call: Call, x: Tensor) -> Tensor:
    return permute(x, range(len(x.shape))[::-1])


@lowers(aten.movedim.int)
def _movedim(call: Call, x: Tensor, source: int, destination: int) -> Tensor:
    dims = list(range(len(x.shape)))
    dims.insert(destination % len(dims), dims.pop(source))
    return permute(x, dims)


@lowers(*named("expand broadcast_to expand_as expand_copy"))
def _expand(call: Call, x: Tensor, *_: object, implicit: bool = False) -> Tensor:
    return expand(x, call.meta.shape)


@lowers(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.ravel.default,
    aten.view_copy.default,
)
def _reshape(call: Call, x: Tensor, *_: object) -> Tensor:
    return reshape(x, call.meta.shape)


@lowers(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: Call, x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    rank = len(x.shape)
    if dim is None:
        dims = range(rank)
    else:
        dims = [d % max(rank, 1) for d in ([dim] if isinstance(dim, int) else dim)]  # type: ignore[assignment]
    return squeeze(x, [d for d in dims if d < rank and x.shape[d] == 1])


@lowers(aten.unsqueeze.default)
def _unsqueeze(call: Call, x: Tensor, dim: int) -> Tensor:
    return unsqueeze(x, dim % (len(x.shape) + 1))


@lowers(aten.select.int)
def _select(call: Call, x: Tensor, dim: int, index: Size) -> Tensor:
    dim %= len(x.shape)
    if isinstance(index, int) and index < 0:
        index = x.shape[dim] + index
    return select(x, dim, index)


@lowers(aten.slice.Tensor)
def _slice(
    call: Call,
    x: Tensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> Tensor:
    dim %= len(x.shape)
    return narrow(x, dim, slice_start(start, x.shape[dim]), call.meta.shape[dim], step)


@lowers(aten.narrow.default)
def _narrow(call: Call, x: Tensor, dim: int, start: Size, length: Size) -> Tensor:
    dim %= len(x.shape)
    return narrow(x, dim, slice_start(start, x.shape[dim]), length)


@lowers(aten.flip.default)
def _flip(call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
    return flip(x, dims)


@lowers(aten.diagonal.default)
def _diagonal(call: Call, x: Tensor, offset: Size = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return diagonal(x, call.meta.shape, offset, dim1, dim2)


@lowers(aten.unfold.default)
def _unfold(call: Call, x: Tensor, dimension: int, size: Size, step: Size) -> Tensor:
    if not x.shape:
        return expand(unsqueeze(x, 0), call.meta.shape)
    dim = dimension % len(x.shape)

    def recipe(s: Strided) -> Strided:
        steps = (*s.strides[:dim], s.strides[dim] * step, *s.strides[dim + 1 :], s.strides[dim])
        return Strided(s.buffer, steps, s.offset)

    def index_map(ix: Index) -> Index:
        return (*ix[:dim], ix[dim] * step + ix[-1], *ix[dim + 1 : -1])

    return call.lowering.view(x, call.meta.shape, index_map, recipe)


@lowers(aten.as_strided.default)
def _as_strided(
    call: Call,
    x: Tensor,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Tensor:
    lowering = call.lowering
    strides, begin = call.layout_of(0)
    storage = lowering.realise(x, strides)
    offset = storage.offset
    storage.buffer.bounded = storage.buffer.role not in ("input", "derived", "constant")
    if storage_offset is not None:
        # torch counts from the start of the storage, and x may begin later
        offset = offset + storage_offset - begin
    return lowering.stored(Strided(storage.buffer, tuple(stride), offset), call.meta.shape)


# ------------------------------------------------------------------------------ several results


def _cuts(x: Tensor, dim: int, sizes: Sequence[Size]) -> tuple[Tensor, ...]:
    parts = []
    start: Size = 0
    for size in sizes:
        parts.append(narrow(x, dim, start, size))
        start = start + size
    return tuple(parts)


@lowers(
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
    aten.split_copy.Tensor,
    aten.split_with_sizes_copy.default,
)
def _split(call: Call, x: Tensor, sections: object, dim: int = 0) -> tuple[Tensor, ...]:
    dim %= len(x.shape)
    return _cuts(x, dim, [meta.shape[dim] for meta in call.metas])


@lowers(aten.unbind.int, aten.unbind_copy.int)
def _unbind(call: Call, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    dim %= len(x.shape)
    return tuple(select(x, dim, k) for k in range(len(call.metas)))


# ------------------------------------------------------------------------------ copies and casts


@lowers(
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.lift.default,
    aten.positive.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    aten._conj.default,
    aten.conj.default,
    aten.real.default,
)
def _same(call: Call, x: Tensor, *_: object, memory_format: object = None) -> Tensor:
    return x


@lowers(aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other)
def _to_copy(call: Call, x: Tensor, *_: object, **options: object) -> Tensor:
    return converted(x, call.meta.dtype)


@lowers(aten.copy.default)
def _copy(call: Call, x: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    return expand(converted(src, x.dtype), x.shape)


@lowers(aten.repeat.default)
def _repeat(call: Call, x: Tensor, repeats: Sequence[Size]) -> Tensor:
    """Each dimension is broadcast to (times, size), then both become one."""
    lead = len(repeats) - len(x.shape)
    paired: list[Size] = []
    spread: list[Size] = []
    for k, times in enumerate(repeats):
        size = 1 if k < lead else x.shape[k - lead]
        paired += [1, size]
        spread += [times, size]
    wide = expand(reshape(x, tuple(paired)), tuple(spread))
    return reshape(wide, call.meta.shape)


def _resizes(call: Call, x: Tensor, dtype: torch.dtype) -> str | None:
    if x.dtype.itemsize != dtype.itemsize or torch.bool in (x.dtype, dtype):
        return "a view of another element size"
    return None


@lowers(*named("view", "dtype"), unless=_resizes)
def _view_dtype(call: Call, x: Tensor, dtype: torch.dtype) -> Tensor:
    def at(ix: Index) -> Value:
        value = x.at(ix)
        return value.table.make("bitcast", (value,), dtype) if x.dtype is not dtype else value

    return call.lowering.computed(x.shape, dtype, at, (x,), call.meta.strides)
