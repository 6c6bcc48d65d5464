"""Functionalisation by storage: a traced program may write to tensors, its graph never does.

A meta tensor shares its storage with exactly those tensors that eager's would share it with, so
the storages give the alias sets. One of the tensors of a storage is its base; every other one was
made from a tensor of the same storage by a view operator, which we remember.

A write to tensor t with new contents n then becomes, along t's chain of views down to the base,
the functional inverse of each view (slice -> slice_scatter, transpose -> transpose, ...). What
comes out is the base's new node. All other tensors of the storage are stale from then on; a stale
tensor that is used again is made anew from its parent.

Kept at all times: a node's val has the strides of the eager tensor that it stands for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fusee.aten.torch_api import OpOverload, same_ints, storage_id
from fusee.aten.twins import Twins, is_opaque
from fusee.errors import TraceError, user_line
from fusee.sym.expr import Size

__all__ = ["Builder", "Store", "Value", "inverts"]

aten = torch.ops.aten

View = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


class Store:
    """One storage. `version` counts the writes to it; `origin` is the input that it belongs to."""

    __slots__ = ("base", "version", "origin", "device", "frozen")

    def __init__(self, base: Value, device: torch.device) -> None:
        self.base = base
        self.version = 0
        self.device = device
        self.origin: int | None = None
        self.frozen: str | None = None  # why nothing may write here


class Value:
    """One traced tensor: its meta twin, and the node that computes it while `version` is current.

    `view` is None for an alias of the whole parent; `pick` makes the node on first use; `real` is
    the tensor of the program that it was lifted from.
    """

    __slots__ = ("tensor", "store", "version", "parent", "view", "_node", "pick", "real")

    def __init__(self, tensor: torch.Tensor, node: fx.Node | None) -> None:
        self.tensor = tensor
        self._node = node
        self.version = 0
        self.parent: Value | None = None
        self.view: View | None = None
        self.pick: tuple[fx.Node, int] | None = None
        self.real: torch.Tensor | None = None
        self.store: Store


Inverse = Callable[["Builder", Value, fx.Node], fx.Node]
_INVERSES: dict[OpOverload, Inverse] = {}


def inverts(*ops: OpOverload) -> Callable[[Inverse], Inverse]:
    """Register how new contents of a view change its parent: (builder, view, contents) -> node."""

    def register(function: Inverse) -> Inverse:
        for op in ops:
            _INVERSES[op] = function
        return function

    return register


class Builder:
    """The functional graph under construction, and the tensors it stands for.

    values    keyed by id: each Value keeps its tensors alive, so ids stay unique
    to_size   turns the SymInts among arguments into sizes of ours; None if there are none
    """

    def __init__(self, twins: Twins, to_size: Callable[[Any], Size] | None) -> None:
        self.twins = twins
        self.to_size = to_size
        self.graph = fx.Graph()
        self.values: dict[int, Value] = {}
        self.stack_trace: str | None = None
        self.constants: dict[str, torch.Tensor] = {}
        self.marks: dict[str, Any] = {}  # more entries for the meta of new nodes
        self.has_opaque = False  # whether any tensor is one
        self.from_start: set[int] = set()  # as AtenGraph's

    # -------------------------------------------------------------------------- nodes

    def emit(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        val: Any,
        device: torch.device,
    ) -> fx.Node:
        """Append a node that calls `op` on nodes and literals; `val` is its meta result."""
        if self.to_size is not None:
            args, kwargs = _with_sizes((args, kwargs), self.to_size)
        name = op._schema.name.partition("::")[2]  # shorter than fx's, and ten times as quick
        node = self.graph.create_node("call_function", op, args, kwargs, name)
        node.meta = {
            "val": val,
            "device": device,
            "stack_trace": self.stack_trace,
            **self.marks,
        }
        return node

    def constant(self, x: torch.Tensor) -> fx.Node:
        """Append the node of a real tensor that the graph holds."""
        name = f"_constant{len(self.constants)}"
        self.constants[name] = x.detach()
        node = self.graph.create_node("get_attr", name)
        val = self.twins.empty(x.shape, x.stride(), x.dtype, x.device)
        node.meta = {"val": val, "device": x.device, "stack_trace": self.stack_trace}
        return node

    def copy(self, node: fx.Node, value: Value) -> fx.Node:
        """Append a copy of `node` in memory of its own, with the strides of `value`."""
        op = aten.clone.default
        val = op(value.tensor)
        if same_ints(val.stride(), value.tensor.stride()):
            return self.emit(op, (node,), {}, value.tensor, value.store.device)
        args = (node, node)
        return self.emit(aten.copy.default, args, {}, value.tensor, value.store.device)

    def apply(self, op: OpOverload, node: fx.Node, *args: Any) -> fx.Node:
        """Append `op` of one node, its val computed from that node's. No mode may be active."""
        val = op(node.meta["val"], *args)
        return self.emit(op, (node, *args), {}, val, node.meta["device"])

    def reshape(self, node: fx.Node, shape: list[Any]) -> fx.Node:
        """Append a view of that shape, after a copy if the strides of the node's val need it."""
        val = node.meta["val"]
        if same_ints(val.shape, shape):
            return node
        if storage_id(val.reshape(shape)) != storage_id(val):
            kwargs = {"memory_format": torch.contiguous_format}
            copy = aten.clone.default(val, **kwargs)
            node = self.emit(aten.clone.default, (node,), kwargs, copy, node.meta["device"])
        return self.apply(aten.view.default, node, shape)

    # -------------------------------------------------------------------------- values

    def fresh(self, tensor: torch.Tensor, node: fx.Node | None, device: torch.device) -> Value:
        """Register a tensor with a storage of its own."""
        value = Value(tensor, node)
        value.store = Store(value, device)
        self.has_opaque = self.has_opaque or is_opaque(tensor)
        self.values[id(tensor)] = value
        return value

    def alias(self, tensor: torch.Tensor, parent: Value, view: View | None) -> Value:
        """Register a view of `parent`, or with view=None another tensor that is all of it."""
        value = Value(tensor, None)
        value.parent, value.view, value.store = parent, view, parent.store
        value.version = -1
        self.has_opaque = self.has_opaque or is_opaque(tensor)
        self.values[id(tensor)] = value
        return value

    def node(self, value: Value) -> fx.Node:
        """The node that holds the present contents of `value`."""
        store = value.store
        at, stale = value, []
        while at.version != store.version:
            stale.append(at)
            assert at.parent is not None, "the base of a storage is never stale"
            at = at.parent
        if at._node is None:
            assert at.pick is not None
            source, index = at.pick
            made = self.graph.create_node("call_function", operator.getitem, (source, index))
            made.meta = {**source.meta, "val": at.tensor}
            at._node = made
        made = at._node
        for view in reversed(stale):
            if view.view is not None:
                op, args, kwargs = view.view
                made = self.emit(op, (made, *args), kwargs, view.tensor, store.device)
            view._node, view.version = made, store.version
        return made

    # -------------------------------------------------------------------------- writes

    def write(self, value: Value, contents: fx.Node) -> None:
        """From here on `value` holds `contents`, of the same shape and dtype; so do its aliases."""
        store = value.store
        if store.frozen is not None:
            raise self.unsupported(store.frozen)
        at, node = value, contents
        while at.parent is not None:
            if at.view is not None:
                inverse = _INVERSES.get(at.view[0])
                if inverse is None:
                    raise self.unsupported(f"a write through {at.view[0]} has no functional form")
                node = inverse(self, at, node)
            at = at.parent
        if not _same_layout(node.meta["val"], at.tensor):
            args = (self.node(at), node)
            node = self.emit(aten.copy.default, args, {}, at.tensor, store.device)
        store.version += 1
        at._node, at.version = node, store.version
        plain = not (value.tensor.is_conj() or value.tensor.is_neg())
        if value is not at and plain and _same_layout(contents.meta["val"], value.tensor):
            value._node, value.version = contents, store.version

    def replace(self, value: Value, tensor: torch.Tensor, old: torch.Tensor) -> Value:
        """`tensor`, until now `value`, gets another geometry; `old` stands for it in its views."""
        for node in self.graph.nodes:
            val = node.meta.get("val")
            if val is tensor:
                node.meta["val"] = old
            elif isinstance(val, (tuple, list)) and any(x is tensor for x in val):
                node.meta["val"] = type(val)([old if x is tensor else x for x in val])
        value.tensor = old
        self.values[id(old)] = value
        del self.values[id(tensor)]
        return value

    def unsupported(self, reason: str, remedy: str | None = None) -> TraceError:
        """The error for a program that has no functional ATen graph."""
        return TraceError(
            reason,
            where=user_line(self.stack_trace),
            did="stopped tracing this graph; the caller may run it eagerly",
            remedy=remedy,
        )


def _with_sizes(x: Any, to_size: Callable[[Any], Size]) -> Any:
    """Arguments with each SymInt as a Size. Other symbolic numbers become constants and guards."""
    if isinstance(x, torch.SymInt):
        return to_size(x)
    if isinstance(x, torch.SymFloat):
        return float(x)
    if isinstance(x, torch.SymBool):
        return bool(x)
    if isinstance(x, (list, tuple)):
        return type(x)([_with_sizes(item, to_size) for item in x])
    if isinstance(x, dict):
        return {name: _with_sizes(item, to_size) for name, item in x.items()}
    return x


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides wherever strides matter."""
    left, right = a.stride(), b.stride()
    if same_ints(left, right):
        return True
    return all(
        same_ints((p,), (q,)) or (type(n) is int and n <= 1)
        for n, p, q in zip(a.shape, left, right)
    )


# ------------------------------------------------------------------------------ inverses


@inverts(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default)
@inverts(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _reshape(b: Builder, view: Value, contents: fx.Node) -> fx.Node:
    assert view.parent is not None
    return b.reshape(contents, list(view.parent.tensor.shape))


@inverts(aten.expand.default)
def _expand(b: Builder, view: Value, contents: fx.Node) -> fx.Node:
    assert view.parent is not None
    if view.parent.tensor.numel() != view.tensor.numel():
        raise b.unsupported("an in-place write to an expanded tensor")
    return b.reshape(contents, list(view.parent.tensor.shape))


@inverts(aten.permute.default)
def _permute(b: Builder, view: Value, contents: fx.Node) -> fx.Node:
    assert view.view is not None
    dims = view.view[1][0]
    inverse = [0] * len(dims)
    for to, source in enumerate(dims):
        inverse[source] = to
    return b.apply(aten.permute.default, contents, inverse)


@inverts(aten.t.default, aten.transpose.int)
def _transpose(b: Builder, view: Value, contents: fx.Node) -> fx.Node:
    assert view.view is not None
    return b.apply(view.view[0], contents, *view.view[1])


@inverts(aten.view.dtype)
def _bits(b: Builder, view: Value, contents: fx.Node) -> fx.Node:
    assert view.parent is not None
    before, after = view.parent.tensor.dtype, view.tensor.dtype
    if before.itemsize != after.itemsize:
        raise b.unsupported(f"a write through a view of {before} as {after}")
    return b.apply(aten.view.dtype, contents, before)


# Views across complex numbers, and what gives the parent's contents from theirs.
_COMPLEX = {
    aten.view_as_real.default: aten.view_as_complex.default,
    aten.view_as_complex.default: aten.view_as_real.default,
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


@inverts(*_COMPLEX)
def _across(b: Builder, view: Value, contents: fx.Node) -> fx.Node:
    assert view.view is not None
    return b.apply(_COMPLEX[view.view[0]], contents)


_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}


@inverts(*_SCATTERS)
def _scatter(b: Builder, view: Value, contents: fx.Node) -> fx.Node:
    assert view.parent is not None and view.view is not None
    parent = view.parent
    op, args, kwargs = view.view
    operands = (b.node(parent), contents, *args)
    return b.emit(_SCATTERS[op], operands, kwargs, parent.tensor, parent.store.device)
