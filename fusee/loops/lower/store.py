"""What a graph leaves behind: fresh outputs with eager's strides, and inputs written in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fusee.loops.ir import Buffer, Extern, Value, View
from fusee.loops.lower.strides import same_strides
from fusee.loops.lower.table import DTYPES
from fusee.loops.lower.tensor import Lowering, Strided, Tensor
from fusee.sym.expr import Size


class Outputs:
    """Collects outputs in order; `finish` stores into inputs after everything else."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.owners: dict[Buffer, object] = {}  # buffers that are returned, and for whom
        self.writes: list[tuple[Tensor, Tensor]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []

    def plain(self, value: Any) -> None:
        self.lowering.graph.outputs.append(value)

    def fresh(self, tensor: Tensor, strides: tuple[Size, ...], owner: object) -> None:
        """Memory that nobody else has, with exactly these strides. One owner may come again."""
        storage = self._place(tensor, strides)
        buffer = storage.buffer
        is_ours = buffer.role in ("scratch", "extern", "result")
        if not is_ours or self.owners.setdefault(buffer, owner) is not owner:
            copy = self.lowering.copy if tensor.dtype in DTYPES else self._copied
            storage = copy(tensor, strides)
            buffer = storage.buffer
            self.owners[buffer] = owner
        if buffer.role == "scratch":
            buffer.role = "result"
        self.plain(View(buffer, tensor.shape, strides, storage.offset))

    def _copied(self, tensor: Tensor, strides: tuple[Size, ...]) -> Strided:
        """A new tensor, of ATen's, with the elements of one that only ATen reads."""
        buffer = self.lowering.buffer(tensor.shape, tensor.dtype, strides, "extern")
        given = self.lowering.window(tensor), tensor.shape, strides
        step = Extern("aten.copy_", _laid_out, given, {}, (buffer,))
        step.reason, step.origin = "tensors that only ATen reads", self.lowering.origin
        self.lowering.graph.steps.append(step)
        return Strided(buffer, strides, 0)

    def _place(self, tensor: Tensor, strides: tuple[Size, ...]) -> Strided:
        storage = tensor.storage
        if storage is None:
            return self.lowering.realise(tensor, strides)
        if same_strides(tensor.shape, storage.strides, strides):
            return storage
        return self.lowering.copy(tensor, strides)

    # -------------------------------------------------------------------------- inputs

    def write(self, tensor: Tensor, target: Tensor, by_aten: bool) -> None:
        """In the end, `target` (an input) holds the values of `tensor`.

        by_aten   only ATen knows what is in these tensors
        """
        (self.copies if by_aten else self.writes).append((tensor, target))
        storage = _storage(target)
        self.plain(View(storage.buffer, target.shape, storage.strides, storage.offset))

    def finish(self) -> None:
        written = {_storage(target).buffer for _, target in self.writes}
        ready: list[tuple[Tensor, Tensor]] = []
        for tensor, target in self.writes:
            if not self._is_direct(tensor, target, written):
                tensor = self._detached(tensor, written)
            ready.append((tensor, target))
        for tensor, target in ready:
            self._store(tensor, _storage(target))
        for tensor, target in self.copies:
            self._copy(tensor, target)

    def _copy(self, tensor: Tensor, target: Tensor) -> None:
        windows = self.lowering.window(target), self.lowering.window(tensor)
        step = Extern("aten.copy_", torch.Tensor.copy_, windows, {}, ())
        step.mutates = (windows[0].buffer,)
        step.reason, step.origin = "it writes tensors that only ATen reads", self.lowering.origin
        self.lowering.graph.steps.append(step)

    def _is_direct(self, tensor: Tensor, target: Tensor, written: set[Buffer]) -> bool:
        """True if it reads no input that is written, but for the element that it replaces."""
        own = _storage(target)
        if tensor.reads() & written - {own.buffer}:
            return False
        for value, place in self._stores(tensor, own):
            for load in self.lowering.loads(value):
                if load.attr[0] is own.buffer and load.attr[1] != place:
                    return False
        return True

    def _stores(self, tensor: Tensor, target: Strided) -> Iterator[tuple[Value, Size]]:
        pieces = tensor.pieces
        if tensor.storage is None and pieces is not None:
            for start, piece in zip(pieces.starts, pieces.tensors, strict=True):
                offset = target.offset + start * target.strides[pieces.dim]
                yield from self._stores(piece, Strided(target.buffer, target.strides, offset))
        elif all(size != 0 for size in tensor.shape):
            index = self.lowering.axes(tensor.shape)
            yield tensor.at(index), self.lowering.offset(target, index)

    def _detached(self, tensor: Tensor, written: set[Buffer]) -> Tensor:
        """The same values in memory that no write changes."""
        storage = tensor.storage
        if storage is None:
            storage = self.lowering.realise(tensor)
        if storage.buffer in written:
            storage = self.lowering.copy(tensor, tensor.eager_strides)
        return self.lowering.stored(storage, tensor.shape)

    def _store(self, tensor: Tensor, target: Strided) -> None:
        pieces = tensor.pieces
        if tensor.storage is None and pieces is not None:
            for start, piece in zip(pieces.starts, pieces.tensors, strict=True):
                offset = target.offset + start * target.strides[pieces.dim]
                self._store(piece, Strided(target.buffer, target.strides, offset))
        elif not self._is_there(tensor, target):
            self.lowering.write_into(tensor, target)

    def _is_there(self, tensor: Tensor, target: Strided) -> bool:
        """True if storing would put each element where it already is."""
        storage = tensor.storage
        return (
            storage is not None
            and storage.buffer is target.buffer
            and storage.offset == target.offset
            and same_strides(tensor.shape, storage.strides, target.strides)
        )


def _laid_out(x: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=x.dtype, device=x.device).copy_(x)


def _storage(target: Tensor) -> Strided:
    storage = target.storage
    assert storage is not None
    return storage
