"""Tensors side by side: cat, stack, roll, and what replaces a part of a tensor by another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusee.loops.lower.masked import pad_constant
from fusee.loops.lower.scatter import strided_slice_scatter
from fusee.loops.lower.shape import converted, expand, flip, narrow, slice_start, unsqueeze
from fusee.loops.lower.strides import Shape
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Index, Pieces, Tensor
from fusee.sym.expr import Expr, Size, known_ge, mod


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
