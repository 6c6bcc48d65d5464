"""Views as index maps: strides where they can say it, closures over the index where not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusee.loops.ir import cast
from fusee.loops.lower.strides import Shape, contiguous
from fusee.loops.lower.tensor import Index, Pieces, Strided, Tensor
from fusee.sym.expr import (
    Size,
    divides,
    floordiv,
    known_eq,
    known_ge,
    known_lt,
    maximum,
    minimum,
    mod,
)
from fusee.sym.parts import product

# ------------------------------------------------------------------------------ rearranging


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    order = [dim % len(x.shape) for dim in dims]
    shape = tuple(x.shape[dim] for dim in order)
    if order == list(range(len(order))):
        return x
    place = [order.index(dim) for dim in range(len(order))]

    def recipe(s: Strided) -> Strided:
        return Strided(s.buffer, tuple(s.strides[dim] for dim in order), s.offset)

    if x.pieces is not None:
        parts = tuple(permute(piece, order) for piece in x.pieces.tensors)
        pieces = Pieces(place[x.pieces.dim], x.pieces.starts, parts)
        return x.lowering.beside(shape, x.dtype, pieces)
    return x.lowering.view(x, shape, lambda ix: tuple(ix[k] for k in place), recipe)


def expand(x: Tensor, shape: Shape) -> Tensor:
    """Broadcast: new dimensions in front, dimensions of size 1 repeated."""
    lead = len(shape) - len(x.shape)
    if shape == x.shape:
        return x
    repeated = [size == 1 and shape[lead + k] != 1 for k, size in enumerate(x.shape)]
    if any(repeated) or any(size != 1 for size in shape[:lead]):
        # its elements are read again and again
        if x.lowering.is_costly(x):
            x.lowering.realise(x)

    def recipe(s: Strided) -> Strided:
        steps = [0 if again else step for again, step in zip(repeated, s.strides, strict=True)]
        return Strided(s.buffer, (0,) * lead + tuple(steps), s.offset)

    def index_map(ix: Index) -> Index:
        return tuple(0 if again else ix[lead + k] for k, again in enumerate(repeated))

    if x.pieces is not None:
        dim = lead + x.pieces.dim
        parts = tuple(
            expand(piece, _resized(shape, dim, piece.shape[dim - lead]))
            for piece in x.pieces.tensors
        )
        return x.lowering.beside(shape, x.dtype, Pieces(dim, x.pieces.starts, parts))
    return x.lowering.view(x, shape, index_map, recipe)


def _resized(shape: Shape, dim: int, size: Size) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def narrow(x: Tensor, dim: int, start: Size, length: Size, step: Size = 1) -> Tensor:
    """Elements start, start + step, ... of one dimension."""
    if known_eq(length, x.shape[dim]) and start == 0:
        return x
    shape = _resized(x.shape, dim, length)

    def recipe(s: Strided) -> Strided:
        steps = (*s.strides[:dim], s.strides[dim] * step, *s.strides[dim + 1 :])
        return Strided(s.buffer, steps, s.offset + start * s.strides[dim])

    def index_map(ix: Index) -> Index:
        return (*ix[:dim], start + ix[dim] * step, *ix[dim + 1 :])

    if x.pieces is not None and x.storage is None:
        inside = _narrow_pieces(x, x.pieces, dim, start, length, step)
        if inside is not None:
            return inside
    return x.lowering.view(x, shape, index_map, recipe)


def _narrow_pieces(
    x: Tensor, pieces: Pieces, dim: int, start: Size, length: Size, step: Size
) -> Tensor | None:
    if dim != pieces.dim:
        parts = tuple(narrow(piece, dim, start, length, step) for piece in pieces.tensors)
        shape = _resized(x.shape, dim, length)
        return x.lowering.beside(shape, x.dtype, Pieces(pieces.dim, pieces.starts, parts))
    if step != 1:
        return None
    for begin, piece in zip(pieces.starts, pieces.tensors, strict=True):
        if known_ge(start, begin) and known_ge(begin + piece.shape[dim], start + length):
            return narrow(piece, dim, start - begin, length)
    return None


def select(x: Tensor, dim: int, index: Size) -> Tensor:
    return squeeze(narrow(x, dim, index, 1), (dim,))


def squeeze(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Without the given dimensions, all of size 1."""
    gone = set(dims)
    kept = [k for k in range(len(x.shape)) if k not in gone]
    if not gone:
        return x
    shape = tuple(x.shape[k] for k in kept)

    def recipe(s: Strided) -> Strided:
        return Strided(s.buffer, tuple(s.strides[k] for k in kept), s.offset)

    def index_map(ix: Index) -> Index:
        rest = iter(ix)
        return tuple(0 if k in gone else next(rest) for k in range(len(gone) + len(ix)))

    if x.pieces is not None and x.pieces.dim not in gone:
        parts = tuple(squeeze(piece, dims) for piece in x.pieces.tensors)
        return x.lowering.beside(
            shape, x.dtype, Pieces(kept.index(x.pieces.dim), x.pieces.starts, parts)
        )
    return x.lowering.view(x, shape, index_map, recipe)


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    shape = (*x.shape[:dim], 1, *x.shape[dim:])

    def recipe(s: Strided) -> Strided:
        step = s.strides[dim] * x.shape[dim] if dim < len(x.shape) else 1
        return Strided(s.buffer, (*s.strides[:dim], step, *s.strides[dim:]), s.offset)

    if x.pieces is not None:
        place = x.pieces.dim + (dim <= x.pieces.dim)
        parts = tuple(unsqueeze(piece, dim) for piece in x.pieces.tensors)
        return x.lowering.beside(shape, x.dtype, Pieces(place, x.pieces.starts, parts))
    return x.lowering.view(x, shape, lambda ix: (*ix[:dim], *ix[dim + 1 :]), recipe)


def flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    turned = {dim % len(x.shape) for dim in dims} if x.shape else set()

    def index_map(ix: Index) -> Index:
        return tuple(
            x.shape[k] - 1 - i if k in turned and x.shape[k] != 1 else i for k, i in enumerate(ix)
        )

    # a torch tensor has no negative strides, so an Extern could not take them
    return x.lowering.view(x, x.shape, index_map, None)


def diagonal(x: Tensor, shape: Shape, offset: Size, dim1: int, dim2: int) -> Tensor:
    rank = len(x.shape)
    a, b = dim1 % rank, dim2 % rank
    rest = [k for k in range(rank) if k not in (a, b)]
    down, right = maximum(-offset, 0), maximum(offset, 0)

    def recipe(s: Strided) -> Strided:
        start = s.offset + down * s.strides[a] + right * s.strides[b]
        steps = (*(s.strides[k] for k in rest), s.strides[a] + s.strides[b])
        return Strided(s.buffer, steps, start)

    def index_map(ix: Index) -> Index:
        places = dict(zip(rest, ix[:-1], strict=True))
        places[a], places[b] = ix[-1] + down, ix[-1] + right
        return tuple(places[k] for k in range(rank))

    return x.lowering.view(x, shape, index_map, recipe)


def slice_start(start: Size | None, size: Size) -> Size:
    """The first element of a slice, as Python clamps it."""
    if start is None:
        return 0
    if isinstance(start, int) and start < 0:
        return maximum(size + start, 0)
    return minimum(start, size) if isinstance(start, int) and isinstance(size, int) else start


# ------------------------------------------------------------------------------ reshaping


def _groups(src: Shape, dst: Shape) -> list[tuple[list[int], list[int]]]:
    """The finest pairs of runs of dimensions with equal products; size 1 is left out."""
    left = [k for k, size in enumerate(src) if size != 1]
    right = [k for k, size in enumerate(dst) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        a, b = [left[i]], [right[j]]
        p, q = src[left[i]], dst[right[j]]
        i, j = i + 1, j + 1
        while not known_eq(p, q):
            grow_left = _is_smaller(p, q)
            if (grow_left and i < len(left)) or j >= len(right):
                if i >= len(left):
                    break
                a.append(left[i])
                p, i = p * src[left[i]], i + 1
            else:
                b.append(right[j])
                q, j = q * dst[right[j]], j + 1
        groups.append((a, b))
    if groups:
        groups[-1][0].extend(left[i:])
        groups[-1][1].extend(right[j:])
    return groups


def _is_smaller(p: Size, q: Size) -> bool:
    if isinstance(p, int) and isinstance(q, int):
        return p < q
    if divides(p, q):
        return True
    return not divides(q, p) and known_lt(p, q)


def reshape(x: Tensor, shape: Shape) -> Tensor:
    """Row-major reinterpretation. Dimensions that survive keep their index, without division."""
    if shape == x.shape:
        return x
    groups = _groups(x.shape, shape) if 0 not in shape else []

    def index_map(ix: Index) -> Index:
        places: list[Size] = [0] * len(x.shape)
        for a, b in groups:
            if len(a) == 1 and len(b) == 1:
                places[a[0]] = ix[b[0]]
                continue
            flat: Size = 0
            for k, step in zip(b, contiguous([shape[k] for k in b]), strict=True):
                flat = flat + ix[k] * step
            for k in reversed(a[1:]):
                places[k] = mod(flat, x.shape[k])
                flat = floordiv(flat, x.shape[k])
            places[a[0]] = flat
        return tuple(places)

    def recipe(s: Strided) -> Strided | None:
        if 0 in shape:
            return Strided(s.buffer, contiguous(shape), s.offset)
        steps: list[Size | None] = [None] * len(shape)
        for a, b in groups:
            last = s.strides[a[-1]]
            inner = contiguous([x.shape[k] for k in a])
            if any(not known_eq(s.strides[k], n * last) for k, n in zip(a, inner, strict=True)):
                return None
            for k, n in zip(b, contiguous([shape[k] for k in b]), strict=True):
                steps[k] = n * last
        return Strided(s.buffer, _fill_ones(steps, shape), s.offset)

    if x.pieces is not None and x.storage is None:
        apart = _reshape_pieces(x, x.pieces, shape, groups)
        if apart is not None:
            return apart
    return x.lowering.view(x, shape, index_map, recipe)


def _fill_ones(steps: list[Size | None], shape: Shape) -> tuple[Size, ...]:
    """Strides for dimensions of size 1, as a contiguous tensor would have them."""
    after: Size = 1
    for k in reversed(range(len(steps))):
        known = steps[k]
        if known is None:
            known = steps[k] = after
        after = known * shape[k]
    return tuple(step for step in steps if step is not None)


def _reshape_pieces(
    x: Tensor, pieces: Pieces, shape: Shape, groups: list[tuple[list[int], list[int]]]
) -> Tensor | None:
    """Pieces reshaped one by one: their dimension must survive or be split from its front."""
    for a, b in groups:
        if a == [pieces.dim]:
            inner = product(shape[k] for k in b[1:])
            sizes = [piece.shape[pieces.dim] for piece in pieces.tensors]
            if not all(divides(inner, n) for n in (*sizes, *pieces.starts)):
                return None
            parts = tuple(
                reshape(piece, _resized(shape, b[0], floordiv(n, inner)))
                for piece, n in zip(pieces.tensors, sizes, strict=True)
            )
            starts = tuple(floordiv(n, inner) for n in pieces.starts)
            return x.lowering.beside(shape, x.dtype, Pieces(b[0], starts, parts))
    return None


# ------------------------------------------------------------------------------ casting


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype is dtype:
        return x
    if x.pieces is not None and x.storage is None:
        parts = tuple(converted(piece, dtype) for piece in x.pieces.tensors)
        return x.lowering.beside(x.shape, dtype, Pieces(x.pieces.dim, x.pieces.starts, parts))
    return x.lowering.computed(x.shape, dtype, lambda ix: cast(x.at(ix), dtype), (x,), x.strides)
