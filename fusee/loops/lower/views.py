"""ATen's views, copies and casts. None of them moves an element by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusee.loops import Value, cast, check, const, contiguous, rewrite, where
from fusee.loops.lower.tensor import (
    Index,
    Lowering,
    NotLowered,
    Number,
    OpCall,
    Pieces,
    Shape,
    Strided,
    Tensor,
    dense,
    lowers,
    stride_order,
)
from fusee.sym import (
    Size,
    divides,
    floordiv,
    hint,
    known_eq,
    known_ge,
    known_lt,
    maximum,
    minimum,
    mod,
    product,
)

# ---------------------------------------------------------------------------- shape
# Views as index maps: strides where they can say it, closures over the index where not.


def _apart(x: Tensor, shape: Shape, dim: int, view: Callable[[Tensor], Tensor]) -> Tensor:
    """The same view of each piece of `x`, side by side along `dim`."""
    assert x.pieces is not None
    parts = tuple(map(view, x.pieces.tensors))
    return x.lowering.beside(shape, parts[0].dtype, Pieces(dim, x.pieces.starts, parts))


def resized(shape: Shape, dim: int, size: Size) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _rearranged(
    x: Tensor,
    shape: Shape,
    sources: Sequence[int | None],
    step: Callable[[Strided, Shape], Size] = lambda s, shape: 0,
) -> Tensor:
    """Each dimension of the result is one of `x`; None: there the same elements again and again.

    Dimensions of `x` that are no source have one element.

    step   the stride of the others
    """
    is_again = any(k is None and size != 1 for k, size in zip(sources, shape, strict=True))
    if is_again and x.lowering.is_heavy(x, by_loads=False):
        x.lowering.realise(x)
    place = {k: at for at, k in enumerate(sources) if k is not None}

    def recipe(s: Strided) -> Strided:
        steps = tuple(step(s, x.shape) if k is None else s.strides[k] for k in sources)
        return Strided(s.buffer, steps, s.offset)

    def index_map(ix: Index) -> Index:
        return tuple(ix[place[k]] if k in place else 0 for k in range(len(x.shape)))

    if x.pieces is not None and (dim := x.pieces.dim) in place:
        own = place[dim]
        return _apart(
            x,
            shape,
            own,
            lambda piece: _rearranged(piece, resized(shape, own, piece.shape[dim]), sources, step),
        )
    return x.lowering.view(x, shape, index_map, recipe)


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    order = [dim % len(x.shape) for dim in dims]
    if order == list(range(len(order))):
        return x
    return _rearranged(x, tuple(x.shape[dim] for dim in order), order)


def expand(x: Tensor, shape: Shape) -> Tensor:
    """Broadcast: new dimensions in front, dimensions of size 1 repeated."""
    lead = len(shape) - len(x.shape)
    if shape == x.shape:
        return x
    own = enumerate(zip(x.shape, shape[lead:], strict=True))
    kept = [None if is_repeated(size, wide) else k for k, (size, wide) in own]
    return _rearranged(x, shape, [None] * lead + kept)


def is_repeated(size: Size, wide: Size) -> bool:
    """Whether broadcasting repeats an axis. Of an open size that is 1 in the first call, and the
    other's is not, capture has made sure that it is in each ((n + 2) // 3 of n = 2)."""
    return (size == 1 and wide != 1) or (size != wide and hint(size) == 1 != hint(wide))


def narrow(x: Tensor, dim: int, start: Size, length: Size, step: Size = 1) -> Tensor:
    """Elements start, start + step, ... of one dimension."""
    if known_eq(length, x.shape[dim]) and start == 0:
        return x
    shape = resized(x.shape, dim, length)

    def recipe(s: Strided) -> Strided:
        steps = resized(s.strides, dim, s.strides[dim] * step)
        return Strided(s.buffer, steps, s.offset + start * s.strides[dim])

    pieces = x.pieces
    if pieces is not None and x.storage is None:
        if dim != pieces.dim:
            return _apart(x, shape, pieces.dim, lambda t: narrow(t, dim, start, length, step))
        for begin, piece in zip(pieces.starts, pieces.tensors, strict=True):
            is_inside = known_ge(start, begin) and known_ge(
                begin + piece.shape[dim], start + length
            )
            if step == 1 and is_inside:
                return narrow(piece, dim, start - begin, length)
    return x.lowering.view(x, shape, lambda ix: resized(ix, dim, start + ix[dim] * step), recipe)


def select(x: Tensor, dim: int, index: Size) -> Tensor:
    return squeeze(narrow(x, dim, index, 1), (dim,))


def squeeze(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Without the given dimensions, all of size 1."""
    kept = [k for k in range(len(x.shape)) if k not in dims]
    return _rearranged(x, tuple(x.shape[k] for k in kept), kept) if dims else x


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    def step(s: Strided, shape: Shape) -> Size:
        return s.strides[dim] * shape[dim] if dim < len(shape) else 1

    own = range(len(x.shape))
    sources = [*own[:dim], None, *own[dim:]]
    return _rearranged(x, (*x.shape[:dim], 1, *x.shape[dim:]), sources, step)


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
            grow_left = divides(p, q) or (not divides(q, p) and known_lt(p, q))
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
        steps: list[Size] = [1] * len(shape)
        known = {k for _, b in groups for k in b}
        for a, b in groups:
            last = s.strides[a[-1]]
            inner = contiguous([x.shape[k] for k in a])
            if any(not known_eq(s.strides[k], n * last) for k, n in zip(a, inner, strict=True)):
                return None
            for k, n in zip(b, contiguous([shape[k] for k in b]), strict=True):
                steps[k] = n * last
        after: Size = 1
        for k in reversed(range(len(steps))):  # those of size 1 lie as in a contiguous tensor
            steps[k] = after if k not in known else steps[k]
            after = steps[k] * shape[k]
        return Strided(s.buffer, tuple(steps), s.offset)

    if x.pieces is not None and x.storage is None:
        apart = _reshape_pieces(x, x.pieces, shape, groups)
        if apart is not None:
            return apart
    return x.lowering.view(x, shape, index_map, recipe)


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
                reshape(piece, resized(shape, b[0], floordiv(n, inner)))
                for piece, n in zip(pieces.tensors, sizes, strict=True)
            )
            starts = tuple(floordiv(n, inner) for n in pieces.starts)
            return x.lowering.beside(shape, x.dtype, Pieces(b[0], starts, parts))
    return None


def converted(x: Tensor, dtype: torch.dtype, asked: bool = False) -> Tensor:
    if x.dtype is dtype:
        return x
    if x.pieces is not None and x.storage is None:
        return _apart(x, x.shape, x.pieces.dim, lambda piece: converted(piece, dtype, asked))

    def at(index: Index) -> Value:
        return cast(x.at(index), dtype, asked)

    return x.lowering.computed(x.shape, dtype, at, (x,), x.strides)


# ---------------------------------------------------------------------------- aten
# Of operators with several spellings tracing records one (aten/canonicalize.py).


lowers("permute")(lambda call, x, dims: permute(x, dims))
lowers("expand expand_copy")(lambda call, x: expand(x, call.meta.shape))
lowers("view reshape view_copy")(lambda call, x: reshape(x, call.meta.shape))
lowers("unsqueeze")(lambda call, x, dim: unsqueeze(x, dim % (len(x.shape) + 1)))
lowers("squeeze.dims")(lambda call, x, dims: squeeze(x, dims))
lowers("flip")(lambda call, x, dims: flip(x, dims))
lowers("diagonal")(
    lambda call, x, offset, dim1, dim2: diagonal(x, call.meta.shape, offset, dim1, dim2)
)
lowers("clone lift_fresh_copy")(lambda call, x: x)
lowers("_to_copy")(lambda call, x: converted(x, call.meta.dtype, asked=True))
lowers("copy")(lambda call, x, src: expand(converted(src, x.dtype, asked=True), x.shape))


@lowers("select.int")
def _select(call: OpCall, x: Tensor, dim: int, index: Size) -> Tensor:
    dim %= len(x.shape)
    return select(x, dim, wrapped(index, x.shape[dim]))


def wrapped(index: Size, size: Size) -> Size:
    """An index, which may be counted from the end."""
    return size + index if isinstance(index, int) and index < 0 else index


@lowers("slice.Tensor")
def _slice(
    call: OpCall, x: Tensor, dim: int, start: Size | None, end: object, step: Size
) -> Tensor:
    dim %= len(x.shape)
    return narrow(x, dim, slice_start(start, x.shape[dim]), call.meta.shape[dim], step)


@lowers("unfold")
def _unfold(call: OpCall, x: Tensor, dimension: int, size: Size, step: Size) -> Tensor:
    if not x.shape:
        return expand(unsqueeze(x, 0), call.meta.shape)
    dim = dimension % len(x.shape)

    def recipe(s: Strided) -> Strided:
        steps = (*resized(s.strides, dim, s.strides[dim] * step), s.strides[dim])
        return Strided(s.buffer, steps, s.offset)

    def index_map(ix: Index) -> Index:
        return resized(ix, dim, ix[dim] * step + ix[-1])[:-1]

    return call.lowering.view(x, call.meta.shape, index_map, recipe)


@lowers("as_strided")
def _as_strided(
    call: OpCall, x: Tensor, size: object, stride: Sequence[Size], storage_offset: Size | None
) -> Tensor:
    lowering = call.lowering
    strides, begin = call.layout_of(0)
    storage = lowering.realise(x, strides)
    storage.buffer.bounded = storage.buffer.role not in ("input", "derived", "constant")
    # torch counts from the start of the storage, and x may begin later
    further = 0 if storage_offset is None else storage_offset - begin
    place = Strided(storage.buffer, tuple(stride), storage.offset + further)
    return lowering.stored(place, call.meta.shape)


@lowers("split.Tensor split_copy.Tensor split_with_sizes split_with_sizes_copy")
def _split(call: OpCall, x: Tensor, sections: object, dim: int) -> tuple[Tensor, ...]:
    dim %= len(x.shape)
    parts = []
    start: Size = 0
    for meta in call.metas:
        parts.append(narrow(x, dim, start, meta.shape[dim]))
        start = start + meta.shape[dim]
    return tuple(parts)


@lowers("unbind.int unbind_copy.int")
def _unbind(call: OpCall, x: Tensor, dim: int) -> tuple[Tensor, ...]:
    dim %= len(x.shape)
    return tuple(select(x, dim, k) for k in range(len(call.metas)))


@lowers("repeat")
def _repeat(call: OpCall, x: Tensor, repeats: Sequence[Size]) -> Tensor:
    """Each dimension is broadcast to (times, size), then both become one."""
    own = (1,) * (len(repeats) - len(x.shape)) + x.shape
    paired = tuple(n for size in own for n in (1, size))
    spread = tuple(n for times, size in zip(repeats, own, strict=True) for n in (times, size))
    return reshape(expand(reshape(x, paired), spread), call.meta.shape)


@lowers("view.dtype")
def _view_dtype(call: OpCall, x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype.itemsize != dtype.itemsize or torch.bool in (x.dtype, dtype):
        raise NotLowered("a view of another element size")

    def at(ix: Index) -> Value:
        value = x.at(ix)
        return value.table.make("bitcast", (value,), dtype) if x.dtype is not dtype else value

    return call.computed(at, x)


# ---------------------------------------------------------------------------- masked
# Reading where there may be nothing: loads behind masks.


def masked(value: Value, mask: Value, other: Value) -> Value:
    """`value` where `mask`, else `other`; nothing below `value` is read or refused elsewhere."""
    if mask.op == "const":
        return value if mask.attr else other
    table = value.table
    if value.op == "load" and not value.args and not value.operands:
        buffer, index = value.attr
        return table.load(buffer, index, mask, other)

    def guard(inner: Value) -> Value | None:
        if inner.op == "check":
            size, *about = inner.attr
            return check(where(mask, inner.args[0], 0), maximum(size, 1), *about)
        if inner.op != "load":
            return None
        buffer, index = inner.attr
        if inner.args:
            return table.load(buffer, index, mask & inner.args[0], inner.args[1])
        return table.load(buffer, index, mask, table.const(0, inner.dtype))

    return where(mask, rewrite([value], None, guard)[value], other)


def inside(lowering: Lowering, i: Size, size: Size, mask: Value | None = None) -> Value | None:
    """`mask` and 0 <= i < size; None where that is known."""
    index = lowering.values.index
    if not known_ge(i, 0):
        mask = index(i) >= 0 if mask is None else mask & (index(i) >= 0)
    if not known_lt(i, size):
        test = index(i) < index(size)
        mask = test if mask is None else mask & test
    return mask


def only_inside(
    lowering: Lowering, value: Value, places: Iterable[Size], sizes: Iterable[Size], fill: Any = 0
) -> Value:
    """`value`, read where each place is within the axis of its size; else a number."""
    mask: Value | None = None
    for place, size in zip(places, sizes, strict=True):
        mask = inside(lowering, place, size, mask)
    return value if mask is None else masked(value, mask, const(value, fill))


def pad_constant(x: Tensor, shape: Shape, before: Sequence[Size], fill: Number) -> Tensor:
    """`x` with `before` elements of `fill` in front of each dimension, and the rest behind."""
    lowering = x.lowering
    other = lowering.number(fill, x.dtype)

    def at(ix: Index) -> Value:
        places = tuple(i - n for i, n in zip(ix, before, strict=True))
        mask: Value | None = None
        for k, place in enumerate(places):
            if shape[k] != x.shape[k] or before[k] != 0:
                mask = inside(lowering, place, x.shape[k], mask)
        value = x.at(places)
        return value if mask is None else masked(value, mask, other)

    return lowering.computed(shape, x.dtype, at, (x,))


# ---------------------------------------------------------------------------- grow
# Concatenations that grow: cat([a, b]), cat([a, b, c]), ... share one buffer.
#
# Each is the beginning of the longest. The buffer has the longest one's shape, every part is
# written once, when the first concatenation that has it is lowered, and each concatenation is a
# slice of the buffer. Without this, a dense block with n layers would copy its first part n times.


@dataclass(eq=False)
class Growth:
    """One family of concatenations along `dim`; `length` is the longest's size there."""

    dim: int
    length: Size = 0
    whole: Tensor | None = None
    written: int = 0  # how many parts are in the buffer
    end: Size = 0  # where they end

    def take(self, parts: Sequence[Tensor]) -> Tensor:
        """The concatenation of `parts`, those written before and new ones."""
        lowering = parts[0].lowering
        if self.whole is None:
            first = parts[0]
            shape = (*first.shape[: self.dim], self.length, *first.shape[self.dim + 1 :])
            order = stride_order(first.shape, lowering.realise(first).strides)
            self.whole = lowering.whole(lowering.buffer(shape, first.dtype, dense(shape, order)))
        storage = self.whole.storage
        assert storage is not None
        total: Size = 0
        for position, part in enumerate(parts):
            if position >= self.written:
                offset = storage.offset + self.end * storage.strides[self.dim]
                lowering.write_into(part, Strided(storage.buffer, storage.strides, offset))
                self.written += 1
                self.end = self.end + part.shape[self.dim]
            total = total + part.shape[self.dim]
        return narrow(self.whole, self.dim, 0, total)


def growing(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[Growth, fx.Node]]:
    """The family of each concatenation that has one, with the family's longest member."""
    found: dict[fx.Node, tuple[Growth, fx.Node]] = {}
    families: dict[tuple[Any, ...], list[Any]] = {}
    for node in nodes:
        parts: Any = node.args[0] if node.target is torch.ops.aten.cat.default else ()
        kinds = {(part.meta["val"].dtype, part.meta["val"].dim()) for part in parts}
        if len(parts) > 1 and len(kinds) == 1 and (rank := node.meta["val"].dim()):
            dim: Any = [*node.args[1:], node.kwargs.get("dim", 0)][0]
            families.setdefault((*parts[:2], dim % rank), []).append(node)
    for (*_, dim), family in families.items():
        longest = max(family, key=lambda node: len(node.args[0]))
        members = [n for n in family if n.args[0] == longest.args[0][: len(n.args[0])]]
        if len(members) > 1:
            found.update(dict.fromkeys(members, (Growth(dim), longest)))
    return found
