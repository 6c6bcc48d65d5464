"""Reading and writing at indices that are data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusee.loops.ir import Value, cast, check
from fusee.loops.lower.demands import demand
from fusee.loops.lower.shape import reshape
from fusee.loops.lower.strides import Shape
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Index, Lowering, Tensor
from fusee.sym.expr import Size
from fusee.sym.parts import product


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
