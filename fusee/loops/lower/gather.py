"""Reading and writing at indices that are data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusee.loops.ir import Value, cast, check, where
from fusee.loops.lower.formulas import test
from fusee.loops.lower.shape import expand, reshape
from fusee.loops.lower.strides import Shape
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Index, Lowering, Tensor
from fusee.sym.expr import Size

OUT_OF_RANGE = "index out of range in self"


def place(lowering: Lowering, index: Value, size: Size, wraps: bool = False) -> Size:
    """A checked data-dependent index into `size` elements. Only some ops let negatives wrap."""
    number = cast(index, torch.int64)
    if number.op == "index" and not wraps:
        pass
    elif not wraps and index.dtype.is_signed:
        # `check` wraps negatives, so they are sent out of range
        number = where(test("lt", number, 0), lowering.values.index(size), number)
    checked = check(number, size, lowering.message(OUT_OF_RANGE))
    return lowering.values.indirect(checked, size)


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

    def at(ix: Index) -> Value:
        row = place(call.lowering, indices.at(ix[:rank]), weight.shape[0])
        return weight.at((row, *ix[rank:]))

    return _gathered(call, at, weight, indices)


def _gathered(call: Call, at: Any, x: Tensor, *indices: Tensor) -> Tensor:
    for tensor in indices:
        if call.lowering.is_heavy(tensor):
            call.lowering.realise(tensor)
    meta = call.meta
    return call.lowering.computed(meta.shape, x.dtype, at, (x, *indices), meta.strides)


@lowers(*named("index_select"))
def _index_select(call: Call, x: Tensor, dim: int, index: Tensor) -> Tensor:
    if not x.shape:
        return x
    dim %= len(x.shape)
    flat = index if index.shape else reshape(index, (1,))

    def at(ix: Index) -> Value:
        row = place(call.lowering, flat.at((ix[dim],)), x.shape[dim])
        return x.at((*ix[:dim], row, *ix[dim + 1 :]))

    return _gathered(call, at, x, flat)


@lowers(*named("gather"))
def _gather(call: Call, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    if not x.shape or not index.shape:
        source = reshape(x, (1,)) if not x.shape else x
        picked = index if index.shape else reshape(index, (1,))

        def flat(ix: Index) -> Value:
            where_to = ix if ix else (0,)
            return source.at((place(call.lowering, picked.at(where_to), source.shape[0]),))

        return _gathered(call, flat, source, picked)
    dim %= len(x.shape)

    def at(ix: Index) -> Value:
        row = place(call.lowering, index.at(ix), x.shape[dim])
        return x.at((*ix[:dim], row, *ix[dim + 1 :]))

    return _gathered(call, at, x, index)


@lowers(*named("take"))
def _take(call: Call, x: Tensor, index: Tensor) -> Tensor:
    flat = reshape(x, (_numel(x.shape),))

    def at(ix: Index) -> Value:
        return flat.at((place(call.lowering, index.at(ix), flat.shape[0], wraps=True),))

    return _gathered(call, at, flat, index)


def _numel(shape: Shape) -> Size:
    total: Size = 1
    for size in shape:
        total = total * size
    return total


# ------------------------------------------------------------------------------ index lists


def _has_mask(
    call: Call, x: Tensor, indices: Sequence[Tensor | None], *_: Any, **__: Any
) -> str | None:
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices):
        return "boolean masks select a number of elements that only the data knows"
    return None


class Indexing:
    """How aten.index maps the result's index to the source's."""

    def __init__(self, lowering: Lowering, x: Tensor, indices: Sequence[Tensor | None]) -> None:
        self.lowering, self.shape = lowering, x.shape
        self.tensors = {k: t for k, t in enumerate(indices) if t is not None}
        self.common: Shape = ()
        for tensor in self.tensors.values():
            self.common = _broadcast(self.common, tensor.shape)
        self.wide = {k: expand(t, self.common) for k, t in self.tensors.items()}
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
        for k, size in enumerate(self.shape):
            if k in self.wide:
                places.append(place(self.lowering, self.wide[k].at(at), size, wraps=True))
            else:
                places.append(next(rest))
        return tuple(places)


def _broadcast(a: Shape, b: Shape) -> Shape:
    wide = max(len(a), len(b))
    a, b = (1,) * (wide - len(a)) + a, (1,) * (wide - len(b)) + b
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


@lowers(*named("index _unsafe_index", "Tensor"), unless=_has_mask)
def _index(call: Call, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    if all(t is None for t in indices):
        return x
    how = Indexing(call.lowering, x, indices)
    return _gathered(call, lambda ix: x.at(how.source(ix)), x, *how.tensors.values())
