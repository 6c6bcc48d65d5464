"""The dispatch mode that records: from an operator on meta tensors to nodes of the graph."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fusee.aten import inverse
from fusee.aten.scalars import on_tensors, with_scalars
from fusee.aten.torch_api import (
    CASTS,
    OpOverload,
    TorchDispatchMode,
    active,
    as_autocast_calls,
    autocast_kind,
    bits_of,
    composite,
    composite_in_python,
    explicit,
    guarded_float,
    holds_opaque,
    is_missing_fake,
    is_opaque,
    op_name,
    storage_id,
)
from fusee.errors import MissingFake, TraceError, user_line
from fusee.fake import Twins
from fusee.fake.layouts import is_written, may_repeat, same_ints, together
from fusee.fake.open_composites import COMPOSITES
from fusee.fake.open_sizes import UNBACKED
from fusee.fake.torch_python import is_pointwise, refuse_dtypes
from fusee.source import Args, Kwargs, NodeGraph, OpRules, mapped, tensors_in
from fusee.sym import Size, Symbol, only_symbol, symbols
from fusee.sym.ranges import Comparison
from fusee.sym.shape_env import size_of, wrapped

# ---------------------------------------------------------------------------- functional
# Functionalisation by storage: a traced program may write to tensors, its graph never does.
#
# A meta tensor shares its storage with exactly those tensors that eager's would share it with, so
# the storages give the alias sets. One of the tensors of a storage is its base; every other one was
# made from a tensor of the same storage by a view operator, which we remember.
#
# A write to tensor t with new contents n then becomes, along t's chain of views down to the base,
# the functional inverse of each view (slice -> slice_scatter, transpose -> transpose, ...). What
# comes out is the base's new node. All other tensors of the storage are stale from then on; a stale
# tensor that is used again is made anew from its parent.
#
# Kept at all times: a node's val has the strides of the eager tensor that it stands for.

aten = torch.ops.aten

View = tuple[OpOverload, Args, Kwargs]
_CPU = torch.device("cpu")


class Storage:
    """One storage. `version` counts the writes to it; `origin` is the input that it belongs to;
    `is_counted` says that one of the writes counts for autograd, which none through `.data` does.
    """

    __slots__ = ("base", "version", "origin", "device", "frozen", "is_counted")

    def __init__(self, base: TracedTensor, device: torch.device) -> None:
        self.base = base
        self.version = 0
        self.is_counted = False
        self.device = device
        self.origin: int | None = None
        self.frozen: str | None = None  # why nothing may write here


class TracedTensor:
    """One traced tensor: its meta twin, and the node that computes it while `version` is current.

    `view` is None for an alias of the whole parent; `pick` makes the node on first use; `real` is
    the tensor of the program that it was lifted from; `apart` is how a value was taken of its
    parent that autograd does not know as its base: "detach", or "data".
    """

    __slots__ = (
        "tensor", "store", "version", "parent", "view", "_node", "pick", "real", "apart"
    )  # fmt: skip

    def __init__(self, tensor: Tensor, node: fx.Node | None) -> None:
        self.tensor = tensor
        self._node = node
        self.version = 0
        self.parent: TracedTensor | None = None
        self.view: View | None = None
        self.pick: tuple[fx.Node, int] | None = None
        self.real: Tensor | None = None
        self.apart = ""
        self.store: Storage


Inverse = Callable[["Builder", TracedTensor, fx.Node], fx.Node]
# How new contents of a view change its parent: (builder, view, contents) -> node.
_INVERSES: OpRules[Inverse] = OpRules()


class Builder:
    """The functional graph under construction, and the tensors it stands for.

    values    keyed by id: each TracedTensor keeps its tensors alive, so ids stay unique
    to_size   turns the SymInts among arguments into sizes of ours; None if there are none
    """

    def __init__(self, twins: Twins, to_size: Callable[[Any], Size] | None) -> None:
        self.twins = twins
        self.to_size = to_size
        self.graph = NodeGraph()
        self.values: dict[int, TracedTensor] = {}
        self.stack_trace: str | None = None
        self.call: fx.Node | None = None  # of the captured graph, while that runs
        self.constants: dict[str, Tensor] = {}
        self.marks: dict[str, Any] = {}  # more entries for the meta of new nodes
        # of a checkpointed region: `(result, operator, args, kwargs)`, whether it saves that
        self.saves: Callable[..., bool] | None = None
        self.has_opaque = False  # whether any tensor is one
        self.devices: set[torch.device] = set()  # where tensors are
        self.known = 0 if twins.env is None else len(twins.env.data.required)  # by capture
        # of unbacked symbols, where they show: a result, and its axis
        self.shown: dict[Symbol, tuple[fx.Node, int | None]] = {}
        self.places_in: dict[Any, fx.Node] = {}  # by tensor, what nonzero() gives for it
        # by what a mask takes of a tensor: the mask, the tensor
        self.taken: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self.from_start: set[int] = set()  # as AtenGraph's
        self.dtype = torch.get_default_dtype()  # where the graph runs

    # -------------------------------------------------------------------------- nodes

    def emit(
        self, op: OpOverload, args: Args, kwargs: Kwargs, val: Any, device: torch.device
    ) -> fx.Node:
        """Append a node that calls `op` on nodes and literals; `val` is its meta result."""
        if self.to_size is not None:
            args, kwargs = with_sizes((args, kwargs), self.to_size)
        name = op._schema.name.partition("::")[2]  # shorter than fx's, and ten times as quick
        node = self.graph.create_node("call_function", op, args, kwargs, name)
        node.meta.update(self.marks, val=val, device=device, stack_trace=self.stack_trace)
        return node

    def sizes(self, node: fx.Node) -> list[Size]:
        """The shape of a node's result."""
        shape: Any = node.meta["val"].shape
        return [n if self.to_size is None else self.to_size(n) for n in shape]

    def constant(self, x: Tensor) -> fx.Node:
        """Append the node of a real tensor that the graph holds."""
        name = f"_constant{len(self.constants)}"
        self.constants[name] = x.detach()
        node = self.graph.create_node("get_attr", name)
        val = self.twins.empty(x.shape, x.stride(), x.dtype, x.device)
        node.meta = {"val": val, "device": x.device, "stack_trace": self.stack_trace}
        return node

    def copy(self, node: fx.Node, value: TracedTensor, over: fx.Node | None = None) -> fx.Node:
        """Append a copy of `node` in memory of its own, with the strides of `value`.

        What is conjugated or negated when it is read is so in the copy, too.

        over   what it takes the place of, if `node` lies otherwise
        """
        found = value.tensor
        bits = bits_of(found)
        for bit in bits:
            node = self.apply(bit, node)
        op, args = aten.clone.default, [node]
        if over is not None or not same_ints(
            self.twins.run(op, (found,), {}).stride(), found.stride()
        ):
            op, args = aten.copy.default, [node if bits or over is None else over, node]
        node = self.emit(op, tuple(args), {}, self.plain(value), value.store.device)
        for bit in bits:
            node = self.apply(bit, node)
        return node

    def apply(self, op: OpOverload, node: fx.Node, *args: Any) -> fx.Node:
        """Append `op` of one node, its val computed from that node's. No mode may be active."""
        val = self.twins.view(op, node.meta["val"], *args)
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

    def fresh(self, tensor: Tensor, node: fx.Node | None, device: torch.device) -> TracedTensor:
        """Register a tensor with a storage of its own."""
        value = self._registered(tensor, node)
        value.store = Storage(value, device)
        self.devices.add(device)
        return value

    def alias(self, tensor: Tensor, parent: TracedTensor, view: View | None) -> TracedTensor:
        """Register a view of `parent`, or with view=None another tensor that is all of it."""
        value = self._registered(tensor, None)
        value.parent, value.view, value.store = parent, view, parent.store
        value.version = -1
        return value

    def _registered(self, tensor: Tensor, node: fx.Node | None) -> TracedTensor:
        self.has_opaque = self.has_opaque or is_opaque(tensor)
        value = self.values[id(tensor)] = TracedTensor(tensor, node)
        return value

    def node(self, value: TracedTensor) -> fx.Node:
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
                if op is aten.as_strided.default:
                    made = self.from_its_start(made, at)
                made = self.emit(op, (made, *args), kwargs, view.tensor, store.device)
            view._node, view.version = made, store.version
        return made

    def from_its_start(self, node: fx.Node, value: TracedTensor) -> fx.Node:
        """What `value` holds, for operators that count from where its memory begins: a copy, if it
        is a part of another's."""
        if not is_written(node.meta["val"].storage_offset(), 0):
            node = value._node = self.copy(node, value)
        return node

    # -------------------------------------------------------------------------- writes

    def write(self, value: TracedTensor, contents: fx.Node) -> None:
        """From here on `value` holds `contents`, of the same shape and dtype; so do its aliases."""
        store = value.store
        if store.frozen is not None:
            raise self.unsupported(store.frozen)
        contents = self._read_as(value, contents)
        at, node, is_counted = value, contents, True
        while at.parent is not None:
            is_counted &= at.apart != "data"
            if at is not value and may_repeat(at.tensor):  # its other elements would not change
                raise self.unsupported("a write to a part of a view whose elements share memory")
            if at.view is not None:
                undo = _INVERSES.get(at.view[0])
                if undo is None:
                    raise self.unsupported(f"a write through {at.view[0]} has no functional form")
                node = undo(self, at, node)
            at = at.parent
        node = self._read_as(at, node)
        if not _same_layout(node.meta["val"], at.tensor):
            node = self.copy(node, at, self.node(at))
        store.version += 1
        store.is_counted |= is_counted
        at._node, at.version = node, store.version
        if (
            value is not at
            and not bits_of(value.tensor)
            and _same_layout(contents.meta["val"], value.tensor)
        ):
            value._node, value.version = contents, store.version

    def _read_as(self, value: TracedTensor, node: fx.Node) -> fx.Node:
        """`node`, conjugated and negated when it is read as `value` is: views count on that."""
        before, after = bits_of(node.meta["val"]), bits_of(value.tensor)
        flips = [of for bit, of in _COMPLEX.items() if (bit in before) != (bit in after)]
        for op in (*before, *flips, *after) if flips else ():
            x: Tensor = node.meta["val"]
            val = self.twins.view(op, x) if op.is_view else self.twins.run(op, (x,), {})
            node = self.emit(op, (node,), {}, val, node.meta["device"])
        return node

    def plain(self, value: TracedTensor) -> Tensor:
        """What an operator that copies `value` gives: neither conjugated nor negated when read."""
        return functools.reduce(
            lambda x, bit: self.twins.view(bit, x), bits_of(value.tensor), value.tensor
        )

    def replace(self, value: TracedTensor, tensor: Tensor, old: Tensor) -> TracedTensor:
        """`tensor`, until now `value`, gets another geometry; `old` stands for it in its views."""
        for node in self.graph.nodes:
            val = node.meta.get("val")
            if val is tensor or (isinstance(val, (tuple, list)) and any(x is tensor for x in val)):
                node.meta["val"] = pytree.tree_map(lambda x: old if x is tensor else x, val)
        value.tensor = old
        self.values[id(old)] = value
        del self.values[id(tensor)]
        return value

    def required(self) -> tuple[Comparison, ...]:
        """What must hold of the unbacked symbols of this graph."""
        env = self.twins.env
        found = [] if env is None else env.data.required[self.known :]
        return tuple({(one.a, one.op, one.b): one for one in found}.values())

    def unsupported(self, reason: str, remedy: str | None = None) -> TraceError:
        """The error for a program that has no functional ATen graph."""
        error = TraceError(reason, where=user_line(self.stack_trace), remedy=remedy)
        error.call = self.call
        return error


def with_sizes(given: Any, to_size: Callable[[Any], Size]) -> Any:
    """Arguments with SymInts as Sizes. Other symbolic numbers become constants and guards."""

    def part(x: Any) -> Any:
        if isinstance(x, torch.SymInt):
            return to_size(x)
        if isinstance(x, torch.SymFloat):
            return guarded_float(x)
        return bool(x) if isinstance(x, torch.SymBool) else x

    return mapped(given, part)


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same strides wherever strides matter."""
    axes = zip(a.shape, a.stride(), b.stride())
    return all((type(n) is int and n <= 1) or is_written(p, q) for n, p, q in axes)


# ------------------------------------------------------------------------------ inverses


@_INVERSES.rule("view unsqueeze squeeze.dims")
def _reshape(b: Builder, view: TracedTensor, contents: fx.Node) -> fx.Node:
    assert view.parent is not None
    return b.reshape(contents, list(view.parent.tensor.shape))


@_INVERSES.rule("expand")
def _expand(b: Builder, view: TracedTensor, contents: fx.Node) -> fx.Node:
    assert view.parent is not None
    if view.parent.tensor.numel() != view.tensor.numel():
        raise b.unsupported("an in-place write to an expanded tensor")
    return _reshape(b, view, contents)


@_INVERSES.rule("permute")
def _permute(b: Builder, view: TracedTensor, contents: fx.Node) -> fx.Node:
    assert view.view is not None
    return b.apply(aten.permute.default, contents, list(inverse(view.view[1][0])))


@_INVERSES.rule("view.dtype")
def _bits(b: Builder, view: TracedTensor, contents: fx.Node) -> fx.Node:
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


@_INVERSES.rule(*_COMPLEX)
def _across(b: Builder, view: TracedTensor, contents: fx.Node) -> fx.Node:
    assert view.view is not None
    return b.apply(_COMPLEX[view.view[0]], contents)


_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}


@_INVERSES.rule(*_SCATTERS)
def _scatter(b: Builder, view: TracedTensor, contents: fx.Node) -> fx.Node:
    assert view.parent is not None and view.view is not None
    parent, (op, args, kwargs) = view.parent, view.view
    b.node(view)  # as_strided of what begins inside its memory copies that
    operands = (b.node(parent), contents, *args)
    return b.emit(_SCATTERS[op], operands, kwargs, b.plain(parent), parent.store.device)


# ---------------------------------------------------------------------------- tracer


_calls = itertools.count()

# What happens to one operator: (tracer, operator, *arguments, **keyword arguments) -> its result.
Rule = Callable[..., Any]


@functools.cache
def _without_default(op: OpOverload) -> list[str]:
    """Keywords that a call must have, None as it may be."""
    keywords = [x for x in op._schema.arguments if x.kwarg_only and not x.has_default_value()]
    return [x.name for x in keywords if isinstance(x.type, torch.OptionalType)]


def _is_wide(given: Any) -> bool:
    return any(x.is_floating_point() or x.is_complex() for x in tensors_in(given))


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Records what runs while it is active. Inside a rule it is not: rules call meta kernels.

    policy      the rule of an operator that comes up for the first time
    opaque_rule the same for operators on complex tensors and lazily negated ones
    lift        makes the TracedTensor of a tensor that the program did not compute
    device      where the graph's inputs are
    here        where the operands of the call at hand are: what the device of a twin means there
    above       sees the functions that the program calls, while autograd is between them and this
    higher_order   what runs a higher-order operator, by name, where it isn't run inline
    """

    def __init__(
        self,
        builder: Builder,
        policy: Callable[[OpOverload], Rule],
        opaque_rule: Callable[[OpOverload], Rule],
        lift: Callable[[Tensor], TracedTensor],
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.b = builder
        self.policy = policy
        self.opaque_rule = opaque_rule
        self.lift = lift
        self.device = self.here = device
        self.rules: dict[OpOverload, Rule] = {}
        self.autocast: frozenset[str] = frozenset()
        self.above: torch.overrides.TorchFunctionMode | None = None
        self.higher_order: Mapping[str, Callable[..., Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True costs 10 us per operator, and nobody compiles the tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (saves := self.b.saves) is not None:
            # A policy is asked about each operator of its region, and not about what that is made
            # of
            self.b.saves, count = None, len(self.b.graph.nodes)
            out = self.__torch_dispatch__(func, types, args, kwargs)
            if saves(out, func, args, kwargs):
                new = len(self.b.graph.nodes) - count
                for node in itertools.islice(reversed(self.b.graph.nodes), new):
                    node.meta["saved"] = True
            self.b.saves = saves
            return out
        if "call" in self.b.marks:
            return self._traced(func, args, kwargs)
        self.stand_at(args)
        refuse_dtypes(func, args, kwargs, self.device)
        self.b.marks["call"] = next(_calls), func._schema.name
        try:
            return self._traced(func, args, kwargs)
        finally:
            del self.b.marks["call"]

    def _traced(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if self.b.to_size is not None and any(type(x) is torch.SymFloat for x in args):
            with active(self):
                given, form = with_scalars(args), on_tensors(func.overloadpacket)
                if given is not None and form is not None:
                    return form(*given, **kwargs)
        if self.b.has_opaque and holds_opaque((args, kwargs)):
            return self.opaque_rule(func)(self, func, *args, **kwargs)
        if self.autocast:
            mixed = self.b.devices != {self.device}
            device = (self.device_of((args, kwargs)) if mixed else self.device).type
            kind = autocast_kind(func, device) if device in self.autocast else None
            if kind is not None:

                def cast(x: Tensor, dtype: torch.dtype) -> Any:
                    """As autocast does: what is on another device stays."""
                    stays = self.value(x).store.device.type != device
                    return x if stays else self.call(torch.ops.aten.to.dtype, x, dtype)

                lower = torch.get_autocast_dtype(device)
                on, self.autocast = self.autocast, frozenset()
                try:
                    func, args, kwargs = as_autocast_calls(func, kind, lower, args, kwargs, cast)
                    return self.rule(func)(self, func, *args, **kwargs)
                finally:
                    self.autocast = on
        return self.rule(func)(self, func, *args, **kwargs)

    # -------------------------------------------------------------------------- for rules

    def rule(self, op: OpOverload) -> Rule:
        found = self.rules.get(op)
        if found is None:
            found = self.rules[op] = self.policy(op)
        return found

    def call(self, op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        """Run `op` as if the program had called it."""
        is_opaque = self.b.has_opaque and holds_opaque(args)
        return (self.opaque_rule if is_opaque else self.rule)(op)(self, op, *args, **kwargs)

    def composite(self, op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        """Run the operators that torch composes `op` of."""
        run = composite if self.b.to_size is None else composite_in_python
        call = self.b.marks.pop("call", None)  # each of them is a call of eager's
        try:
            with active(self):
                if self.b.to_size is not None and op in COMPOSITES:
                    return COMPOSITES[op](*args, **kwargs)
                return run(op, args, kwargs)
        finally:
            if call is not None:
                self.b.marks["call"] = call

    def explicit(self, op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        """Run the operators that the device-independent kernel of `op` calls."""
        with active(self):
            return explicit(op, args, kwargs)

    def look_at_autocast(self) -> None:
        """Take over where autocast is on. In __torch_dispatch__ torch always says that it isn't.

        raises   TraceError if it is on for a device whose lists nobody here knows
        """
        devices = {*CASTS, self.device.type}
        self.autocast = frozenset(x for x in devices if torch.is_autocast_enabled(x))
        if not self.autocast <= CASTS.keys():
            raise self.b.unsupported(f"autocast on {self.device.type}")

    def value(self, x: Tensor) -> TracedTensor:
        found = self.b.values.get(id(x))
        return self.lift(x) if found is None else found

    def node(self, x: Tensor) -> fx.Node:
        """The node that holds the present contents of `x`."""
        return self.b.node(self.value(x))

    def device_of(self, args: Sequence[Any]) -> torch.device:
        """Where eager puts the result of an operator on these arguments."""
        values = map(self.value, tensors_in(args))
        return together((x.tensor, x.store.device) for x in values) or self.here

    def stand_at(self, args: Sequence[Any]) -> None:
        """Take over where the operands of a call are."""
        if self.b.devices != {self.device} and tensors_in(args):
            self.here = self.device_of(args)

    def begin(self) -> None:
        """A call of the captured graph begins."""

    def brought(self, call: Any, args: Args) -> Args:
        """The operands of a call of the program's, where they meet."""
        self.stand_at(args)
        return args

    def record(self, op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        """Append `op` to the graph; its results are new tensors."""
        nodes, metas = self.operands(args)
        named, named_metas = self.named_operands(kwargs)
        for name in _without_default(op):
            named.setdefault(name, None)
            named_metas.setdefault(name, None)
        device = self._place(named, args)
        if "device" in named:
            named_metas["device"] = device
        env = self.b.twins.env
        count = 0 if env is None else len(env.data.made)
        out = self.run_meta(op, metas, named_metas, device)
        is_set = torch.get_default_dtype() is not self.b.dtype and named.get("dtype") is None
        if is_set and _is_wide(out) and not _is_wide((metas, named_metas)):
            if any(x.name == "dtype" and x.kwarg_only for x in op._schema.arguments):
                named["dtype"] = out.dtype
            elif is_pointwise(op) and all(x.dtype is not torch.bool for x in tensors_in(metas)):
                cast = functools.partial(self.call, aten._to_copy.default, dtype=out.dtype)
                wide = (cast(x) if isinstance(x, Tensor) else x for x in args)
                return self.record(op, *wide, **kwargs)
            else:
                raise TraceError(f"{op} is of a default dtype that is set within the graph")
        node = self.b.emit(op, nodes, named, out, device)
        if isinstance(out, Tensor):
            self.adopt(out, node, None, device)
        elif isinstance(out, (tuple, list)):
            for i, item in enumerate(out):
                if isinstance(item, Tensor):
                    self.adopt(item, node, i, device)
        if op in UNBACKED or (env is not None and len(env.data.made) > count):
            node.meta.update(alone=True, recompute="save")  # its size belongs to its one run
            made = {} if env is None else env.data.made  # inputs show the other symbols
            for x in out if isinstance(out, tuple) else (out,):
                for axis, n in enumerate(x.shape):
                    symbol = only_symbol(size_of(n)) if type(n) is torch.SymInt else None
                    if symbol is not None and symbol in made:
                        self.b.shown.setdefault(symbol, (self.node(x), axis))
        return out

    def places(self, mask: Tensor) -> tuple[Tensor, ...]:
        """Where a mask is true: an index for each of its axes."""
        found = self.call(aten.nonzero.default, mask)
        return tuple(self.call(aten.select.int, found, 1, k) for k in range(mask.dim()))

    def number(self, x: Tensor) -> Any:
        """The integer that a tensor holds, an unbacked symbol."""
        env = self.b.twins.env
        assert env is not None
        info = torch.iinfo(x.dtype)
        size = env.data.new(info.min, info.max)
        (symbol,) = symbols(size)
        self.b.shown[symbol] = self.node(x.clone()), None
        return wrapped(env, size)

    def adopt(self, out: Tensor, node: fx.Node, pick: int | None, device: torch.device) -> None:
        """Register `out`, the result of `node` or of its item `pick`."""
        if out.layout is not torch.strided:
            raise self.b.unsupported(f"{node.target} gives a {out.dtype} {out.layout} tensor")
        value = self.b.fresh(out, None if pick is not None else node, device)
        if pick is not None:
            value.pick = (node, pick)

    def run_meta(
        self, op: OpOverload, args: Args, kwargs: Kwargs, device: torch.device = _CPU
    ) -> Any:
        try:
            return self.b.twins.run(op, args, kwargs, device)
        except (NotImplementedError, RuntimeError) as error:
            if not is_missing_fake(error):
                raise
            if op.namespace == "aten" and self.b.twins.mode is None:
                return self.b.twins.by_torch(op, args, kwargs)
            if op.namespace == "aten":
                raise self.b.unsupported(f"torch has no meta kernel for {op}") from error
            raise MissingFake(
                f"{op} does not say what its results look like: it has no fake implementation",
                where=user_line(self.b.stack_trace),
                remedy=f"register a fake kernel: torch.library.register_fake({op_name(op)!r})",
            ) from error

    def literal(self, x: Tensor) -> Any:
        """A new tensor with the elements of a real one that the program wrote down."""
        if id(x) in self.b.values:
            return self.same(x)
        if x.dim() == 0 and not is_opaque(x):
            return self.call(aten.full.default, [], x.item(), dtype=x.dtype, device=x.device)
        node = self.b.constant(x)
        twin = self.b.twins.empty(x.shape, x.stride(), x.dtype, x.device)
        self.b.fresh(twin, node, x.device)
        return twin

    def view(self, op: OpOverload, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The result of a view operator: another tensor on the storage of `x`."""
        parent = self.value(x)
        out = self.b.twins.view(op, parent.tensor, *args, **kwargs)
        self.b.alias(out, parent, (op, args, kwargs))
        return out

    def same(self, x: Tensor) -> Tensor:
        """Another tensor that is all of `x`, as `detach` gives."""
        parent = self.value(x)
        out = self.b.twins.view(aten.alias.default, parent.tensor)
        self.b.alias(out, parent, None)
        return out

    # -------------------------------------------------------------------------- arguments

    def operands(self, args: Sequence[Any]) -> tuple[Args, Args]:
        """Arguments twice: tensors replaced by nodes, and by their meta twins."""
        nodes: list[Any] = []
        metas: list[Any] = []
        for x in args:
            node, meta = self._operand(x)
            nodes.append(node)
            metas.append(meta)
        return tuple(nodes), tuple(metas)

    def named_operands(self, kwargs: Kwargs) -> tuple[Kwargs, Kwargs]:
        nodes: Kwargs = {}
        metas: Kwargs = {}
        for name, x in kwargs.items():
            if x is None or (name == "pin_memory" and not x) or name == "layout":
                if x is not None and x is not torch.strided and name == "layout":
                    raise self.b.unsupported(f"a tensor of layout {x}")
                continue
            nodes[name], metas[name] = self._operand(x)
        return nodes, metas

    def _operand(self, x: Any) -> tuple[Any, Any]:
        if isinstance(x, Tensor):
            value = self.value(x)
            return self.b.node(value), value.tensor
        if isinstance(x, (list, tuple)):
            nodes, metas = self.operands(x)
            return list(nodes), list(metas)
        return x, x

    def _place(self, named: Kwargs, args: Sequence[Any]) -> torch.device:
        """The device of the result: the one that is asked for, or else that of the operands."""
        if "device" not in named:
            return self.device_of(args)
        device = torch.device(named["device"])
        if device.type == "meta":  # code that asked a twin for its device
            device = named["device"] = self.here
        return device
