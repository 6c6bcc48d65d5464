"""What a call returns, from the tensors that the traced program returned.

Tensors of one storage are returned as one result and views of it, so that they share memory as
eager's do. Every other result has memory of its own: never an input's, never another result's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusee.aten.functional import Builder, Store, Value
from fusee.aten.graph import (
    Constant,
    Fresh,
    InputItself,
    Mutation,
    OutputItself,
    OutputSpec,
    Sym,
    ViewOfInput,
    ViewOfOutput,
)
from fusee.sym.expr import Size, known_ge
from fusee.sym.parts import hint, product

__all__ = ["Results", "flatten"]

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        aten.view.default,
        aten.view.dtype,
        aten.expand.default,
        aten.permute.default,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.diagonal.default,
        aten.unfold.default,
        aten.as_strided.default,
        aten.view_as_real.default,
        aten.view_as_complex.default,
        aten._conj.default,
        aten._neg_view.default,
    }
)


class Results:
    """The flat tuple that the graph returns, in the making."""

    def __init__(self, b: Builder, inputs: list[Value | None], to_size: Callable[[Any], Size]):
        self.b = b
        self.inputs = inputs
        self.to_size = to_size
        self.nodes: list[fx.Node] = []
        self.tensors: list[torch.Tensor] = []
        self.memory: dict[fx.Node, Store] = {}
        self.returned: dict[int, int] = {}
        self.carriers: dict[int, tuple[int, Value]] = {}

    def mutations(self) -> tuple[Mutation, ...]:
        """One for each input whose storage was written to."""
        found = []
        for index, value in enumerate(self.inputs):
            if value is not None and value.store.version > 0:
                found.append(Mutation(index, self.position(value)))
        return tuple(found)

    def outputs(self, leaves: list[Any]) -> tuple[OutputSpec, ...]:
        """The spec of each returned leaf. Call once, after `mutations`."""
        self._choose_carriers([self.b.values[id(x)] for x in leaves if id(x) in self.b.values])
        return tuple(self._output(i, x) for i, x in enumerate(leaves))

    def _output(self, i: int, x: Any) -> OutputSpec:
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return Sym(self.to_size(x))
        if not isinstance(x, torch.Tensor):
            return Constant(x)
        if id(x) in self.returned:
            return OutputItself(self.returned[id(x)])
        self.returned[id(x)] = i
        value = self.b.values[id(x)]
        store, tensor = value.store, value.tensor
        size = tuple(map(self.to_size, tensor.shape))
        stride = tuple(map(self.to_size, tensor.stride()))
        if store.origin is not None:
            base = self.inputs[store.origin]
            assert base is not None
            if value is base:
                return InputItself(store.origin)
            offset = self._offset(tensor, base.tensor)
            bits = _bits(tensor, base.tensor)
            return ViewOfInput(store.origin, size, stride, offset, tensor.dtype, bits)
        position, carrier = self.carriers[id(store)]
        if carrier is value:
            return Fresh(position, size, stride)
        offset = self._offset(tensor, carrier.tensor)
        bits = _bits(tensor, carrier.tensor)
        return ViewOfOutput(position, size, stride, offset, tensor.dtype, bits)

    def _offset(self, view: torch.Tensor, base: torch.Tensor) -> Size:
        start = base.storage_offset()
        if view.dtype.itemsize != base.dtype.itemsize:
            start = start * base.dtype.itemsize // view.dtype.itemsize
        return self.to_size(view.storage_offset() - start)

    def _choose_carriers(self, values: list[Value]) -> None:
        """For each storage that is returned, the tensor whose memory holds the others'."""
        groups: dict[int, dict[int, Value]] = {}
        for value in values:
            if value.store.origin is None:
                groups.setdefault(id(value.store), {})[id(value)] = value
        for key, group in groups.items():
            # where autograd is traced, what it knows of carries what is detached from it
            members = sorted(group.values(), key=lambda v: not v.tensor.requires_grad)
            base = members[0].store.base
            carrier = members[0]
            if len(members) > 1 or not self._is_dense(carrier):
                whole = [v for v in members if self._is_whole(v, base)]
                carrier = whole[0] if whole else base
            self.carriers[key] = (self.position(carrier), carrier)

    def _is_dense(self, value: Value) -> bool:
        size = [self.to_size(n) for n in value.tensor.shape]
        return _is_non_overlapping(size, [self.to_size(s) for s in value.tensor.stride()])

    def _is_whole(self, value: Value, base: Value) -> bool:
        """Whether every element of the storage is one of `value`, once."""
        x, y = value.tensor, base.tensor
        counts = [product(map(self.to_size, t.shape)) for t in (x, y)]
        return x.dtype == y.dtype and counts[0] == counts[1] and self._is_dense(value)

    def position(self, value: Value) -> int:
        """Append a result: what `value` holds, in memory that no other storage has."""
        node = self.b.node(value)
        root = _root(node)
        if root.op in ("placeholder", "get_attr") or self.memory.get(root, value.store) is not (
            value.store
        ):
            node = self.b.copy(node, value)
            root = node
        self.memory[root] = value.store
        self.nodes.append(node)
        self.tensors.append(value.tensor)
        return len(self.nodes) - 1


def _bits(view: torch.Tensor, base: torch.Tensor) -> tuple[str, ...]:
    """What is to be called on elements of `base` for those of `view`."""
    flips = []
    if view.dtype.is_complex and view.is_conj() != (base.dtype.is_complex and base.is_conj()):
        flips.append("conj")
    if view.is_neg() != base.is_neg():
        flips.append("_neg_view")
    return tuple(flips)


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` would share if eager ran the graph."""
    while node.target in _VIEWS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _is_non_overlapping(size: Sequence[Size], stride: Sequence[Size]) -> bool:
    """Whether no two elements share memory, as far as it can be told from the strides alone."""
    if 0 in size:
        return True
    expected: Size = 1
    for step, count in sorted(zip(stride, size), key=lambda pair: hint(pair[0])):
        if count == 1:
            continue
        if not known_ge(step, expected):
            return False
        expected = step * (count - 1) + 1
    return True


def flatten(x: Any, leaves: list[Any]) -> Callable[[list[Any]], Any]:
    """Append the leaves of nested tuples, lists and dicts; the function that rebuilds the nest."""
    if isinstance(x, (tuple, list)):
        parts = [flatten(item, leaves) for item in x]
        kind = type(x)
        if hasattr(x, "_fields"):
            return lambda values: kind(*(part(values) for part in parts))
        if kind is tuple:
            return lambda values: tuple([part(values) for part in parts])
        return lambda values: [part(values) for part in parts]
    if isinstance(x, dict):
        rows = {name: flatten(item, leaves) for name, item in x.items()}
        return lambda values: {name: part(values) for name, part in rows.items()}
    at = len(leaves)
    leaves.append(x)
    return lambda values: values[at]
