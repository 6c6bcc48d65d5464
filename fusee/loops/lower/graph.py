"""A functional ATen fx graph becomes a LoopGraph.

Nodes are lowered in order; each result is lazy until something needs it in memory: an output, an
Extern, a reduction, or many uses of a costly value (tensor.py). What has no lowering is known from
the tables (table.py, extern.py) before any node is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusee.loops.ir import Buffer, LoopGraph, Role
from fusee.loops.lower import (
    activation,
    aggregate,
    arithmetic,
    cat,
    fill,
    gather,
    gradient,
    loss,
    norm,
    norm_gradient,
    pool,
    random,
    resample,
    scan,
    scatter,
    view,
    window_gradient,
)
from fusee.loops.lower.demands import make_checks
from fusee.loops.lower.extern import ExternSpec, Laid, extern
from fusee.loops.lower.grow import growing
from fusee.loops.lower.shape import narrow
from fusee.loops.lower.store import Outputs
from fusee.loops.lower.table import DTYPES, HANDLERS, Call, refusal, supported, unlowered
from fusee.loops.lower.tensor import Lowering, Meta, Tensor
from fusee.loops.origin import origin
from fusee.sym.expr import Expr, Size, Symbol

__all__ = ["InputLayout", "lower", "supported"]

# importing these modules fills the tables
RULES = (
    activation, aggregate, arithmetic, cat, fill, gather, gradient, loss, norm, norm_gradient, pool,
    random, resample, scan, scatter, view, window_gradient,
)  # fmt: skip


@dataclass(frozen=True)
class InputLayout:
    """A tensor that the graph is given: the caller's, derived from parameters, or a constant."""

    name: str
    dtype: torch.dtype
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    role: Role = "input"


def lower(
    graph: fx.Graph,
    inputs: Sequence[InputLayout],
    *,
    constants: Mapping[str, torch.Tensor] | None = None,
    size_of: Callable[[Any], Size],
    extern_of: Callable[[OpOverload], ExternSpec | None],
    must_run: Callable[[fx.Node], bool],
    writes: Mapping[int, int] | None = None,
) -> LoopGraph:
    """Lower a functional graph.

    inputs     one per tensor placeholder, in order
    constants  what get_attr nodes name; those in use follow as inputs of role "constant"
    size_of    an int or SymInt of the graph as a Size
    extern_of  how to call an op that has no lowering; None: the overload itself is called
    must_run   whether a call must be made, its errors included, though nobody uses its results
    writes     output position -> placeholder position: the value is stored into that input after
               all else, and the output is a View of the input
    """
    writes = writes or {}
    return _Lowerer(graph, inputs, constants or {}, size_of, extern_of, must_run, writes).run()


class _Lowerer:
    def __init__(
        self,
        graph: fx.Graph,
        inputs: Sequence[InputLayout],
        constants: Mapping[str, torch.Tensor],
        size_of: Callable[[Any], Size],
        extern_of: Callable[[OpOverload], ExternSpec | None],
        must_run: Callable[[fx.Node], bool],
        writes: Mapping[int, int],
    ) -> None:
        self.graph, self.constants = graph, constants
        self.size_of, self.extern_of, self.must_run = size_of, extern_of, must_run
        self.writes = writes
        self.lowering = Lowering()
        self.env: dict[fx.Node, Any] = {}
        self.readers: dict[Buffer, list[fx.Node]] = {}  # of inputs: what was computed from them
        self.layouts = list(inputs)
        self.uses: dict[fx.Node, int] = {}
        self.placeholders: list[Tensor | None] = []
        self.opaque: set[int] = set()  # their positions among the placeholders
        self.results: list[Any] = []

    def run(self) -> LoopGraph:
        nodes = list(self.graph.nodes)
        self.growing = {node: x for node, x in growing(nodes).items() if _opaque(node) is None}
        self.replaced = self._replaced(nodes)
        self._count_uses(nodes)
        for node in nodes:
            if node.op == "placeholder":
                if _opaque(node) is not None:
                    self.opaque.add(len(self.placeholders))
                self._placeholder(node)
        for node in nodes:
            if node.op == "get_attr":
                self._constant(node)
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._output(node)
        make_checks(self.lowering)
        return self.lowering.graph

    def _replaced(self, nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """For each value that an input takes in the end: the input's placeholder."""
        placeholders = [node for node in nodes if node.op == "placeholder"]
        (returned,) = [node.args[0] for node in nodes if node.op == "output"]
        assert isinstance(returned, (tuple, list))
        found = {}
        for position, index in self.writes.items():
            value = returned[position]
            if isinstance(value, fx.Node) and value not in found:
                found[value] = placeholders[index]
        return found

    # -------------------------------------------------------------------------- uses

    def _count_uses(self, nodes: list[fx.Node]) -> None:
        """How many times each value is computed if it stays lazy; views pass uses on."""
        for node in reversed(nodes):
            total = 0
            for user in node.users:
                if user.op == "output":
                    total += 1
                elif _passes_on(user):
                    total += self.uses[user]
                elif self.uses[user] or self.must_run(user):
                    total += 1
            self.uses[node] = total

    # -------------------------------------------------------------------------- inputs

    def _placeholder(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)):
            size = self.size_of(value)
            self.env[node] = size
            symbol = _only_symbol(size)
            if symbol is not None:
                self.lowering.graph.inputs.append(symbol)
            self.placeholders.append(None)
            return
        if not isinstance(value, torch.Tensor):
            self.env[node] = value
            self.placeholders.append(None)
            return
        layout = self.layouts.pop(0)
        self.env[node] = self._input(layout)
        self.placeholders.append(self.env[node])

    def _input(self, layout: InputLayout) -> Tensor:
        buffer = Buffer(layout.name, layout.dtype, layout.shape, layout.strides, layout.role)
        self.lowering.graph.inputs.append(buffer)
        return self.lowering.whole(buffer)

    def _constant(self, node: fx.Node) -> None:
        value = self.constants[str(node.target)]
        if value.dim() == 0 and value.dtype in DTYPES and value.device.type == "cpu":
            number = self.lowering.values.const(value.item(), value.dtype)
            self.env[node] = self.lowering.computed((), value.dtype, lambda ix: number)
            return
        shape, strides = tuple(value.shape), tuple(value.stride())
        self.env[node] = self._input(
            InputLayout(str(node.target), value.dtype, shape, strides, "constant")
        )

    # -------------------------------------------------------------------------- calls

    def _call(self, node: fx.Node) -> None:
        if not self.uses[node] and not self.must_run(node):
            return
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            self.env[node] = self.size_of(value)
            return
        if node in self.growing:
            self.env[node] = self._grow(node)
            self._note_readers(node)
            return
        args = tuple(self._argument(arg) for arg in node.args)
        kwargs = {key: self._argument(arg) for key, arg in node.kwargs.items()}
        op: Any = node.target
        if not isinstance(op, OpOverload):
            self.env[node] = op(*args, **kwargs)  # getitem of several results, sums of sizes
            self._note_readers(node)
            return
        self.lowering.origin = origin(node)
        many = isinstance(value, (tuple, list))
        metas = [self._meta(v) for v in (value if isinstance(value, (tuple, list)) else (value,))]
        if not op._schema.returns:
            metas = []
        results = self._lower(node, op, metas, args, kwargs)
        for k, meta in enumerate(metas):
            result = results[k]
            if result is not None and meta is not None:
                results[k] = self._finish(result, meta, self.uses[node])
        self.env[node] = tuple(results) if many else results[0] if results else None
        self._note_readers(node)

    def _note_readers(self, node: fx.Node) -> None:
        for tensor in _tensors(self.env[node]):
            for buffer in tensor.reads():
                if buffer.role == "input":
                    self.readers.setdefault(buffer, []).append(node)

    def _grow(self, node: fx.Node) -> Tensor:
        growth, longest = self.growing[node]
        if growth.length == 0:
            meta = self._meta(longest.meta["val"])
            assert meta is not None
            growth.length = meta.shape[growth.dim]
        self.lowering.origin = origin(node)
        return growth.take(self._argument(node.args[0]))

    def _lower(
        self,
        node: fx.Node,
        op: OpOverload,
        metas: list[Meta | None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Tensor | None]:
        reason = opaque = _opaque(node)
        if reason is None and op in HANDLERS:
            known = tuple(meta for meta in metas if meta is not None)
            used = self._used(node, len(metas))
            layouts, overwrites = self._layouts(node), self._overwrites(node)
            call = Call(self.lowering, op, known, used, layouts, self.extern_of, overwrites)
            reason = refusal(op, call, args, kwargs)
            if reason is None and not _is_view(op):
                nothing = bool(known) and all(0 in meta.shape for meta in known)
                if nothing and not self.must_run(node):
                    return [None if meta is None else self._empty(meta) for meta in metas]
                empty = nothing or any(0 in x.shape for x in args if isinstance(x, Tensor))
                if empty and self.must_run(node):
                    reason = "ATen may refuse operands without elements"
                if any(len(x.shape) > 64 for x in args if isinstance(x, Tensor)):
                    reason = "ATen refuses more than 64 axes"
            if reason is None:
                result = HANDLERS[op](call, *args, **kwargs)
                return [result] if isinstance(result, Tensor) else list(result)
        elif reason is None:
            reason = unlowered(op)
        spec = self.extern_of(op) if opaque is None else None
        self.lowering.graph.notes.append(f"{op!s}: {reason}")
        return extern(
            self.lowering,
            op,
            tuple(metas),
            tuple(self._laid(arg) for arg in node.args),
            {key: self._laid(arg) for key, arg in node.kwargs.items()},
            spec,
            node.meta.get("layout"),
            reason or "",
            writes_inputs=bool(self.writes),
        )

    def _empty(self, meta: Meta) -> Tensor:
        """Without elements there is nothing to lower, whatever the arguments are."""
        zero = self.lowering.values.const(0, meta.dtype)
        return self.lowering.computed(meta.shape, meta.dtype, lambda ix: zero)

    def _finish(self, result: Tensor, meta: Meta, uses: int) -> Tensor:
        # a size that had a formula in the operands may have been found to be a number since
        for dim, (formula, size) in enumerate(zip(result.shape, meta.shape, strict=True)):
            if isinstance(size, int) and not isinstance(formula, int):
                result = narrow(result, dim, 0, size)
        result.origin = result.origin or self.lowering.origin
        if result.strides is None and result.storage is None and result.shape == meta.shape:
            result.strides = meta.strides
        self.lowering.settle(result, uses)
        return result

    def _used(self, node: fx.Node, count: int) -> tuple[bool, ...]:
        if count == 1:
            return (True,)
        taken = {user.args[1] for user in node.users if self.uses[user]}
        return tuple(k in taken for k in range(count))

    def _overwrites(self, node: fx.Node) -> bool:
        """True if `node` makes the new value of the input that is its first argument.

        Storing into the input at once saves two copies of it, and is right if nothing later sees
        the old value. What was not computed yet but reads it is computed now.
        """
        source = self.replaced.get(node)
        if source is None or not isinstance(node.args[0], fx.Node) or node.args[0] is not source:
            return False
        buffer = self.env[source].storage.buffer
        operands = _inputs(node.args[1:]) | _inputs(node.kwargs.values())
        readers: list[Tensor] = []
        for other in (source, *self.readers.get(buffer, ())):
            for tensor in _tensors(self.env[other]):
                if buffer not in tensor.reads():
                    continue
                waiting = [user for user in other.users if user not in self.env]
                if other in operands or any(user is not node for user in waiting):
                    if tensor.storage is not None:
                        return False
                    readers.append(tensor)
        for tensor in readers:
            self.lowering.realise(tensor)
        return True

    def _layouts(self, node: fx.Node) -> Callable[[int], tuple[tuple[Size, ...], Size]]:
        def layout_of(position: int) -> tuple[tuple[Size, ...], Size]:
            source = node.args[position]
            assert isinstance(source, fx.Node)
            value = source.meta["val"]
            strides = tuple(self._size(n) for n in value.stride())
            return strides, self._size(value.storage_offset())

        return layout_of

    def _meta(self, value: Any) -> Meta | None:
        if not isinstance(value, torch.Tensor):
            return None
        shape = tuple([n if type(n) is int else self.size_of(n) for n in value.shape])
        if value.layout is not torch.strided:
            return Meta(shape, value.dtype, ())
        strides = tuple([n if type(n) is int else self.size_of(n) for n in value.stride()])
        return Meta(shape, value.dtype, strides)

    def _size(self, value: Any) -> Size:
        return value if type(value) is int else self.size_of(value)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return [self._argument(item) for item in arg]
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.size_of(arg)  # refuses all but integers
        return arg

    def _laid(self, arg: Any) -> Any:
        """An argument of an Extern: tensors with eager's strides."""
        if isinstance(arg, (list, tuple)):
            return [self._laid(item) for item in arg]
        value = self._argument(arg)
        if not isinstance(value, Tensor):
            return value
        meta = self._meta(arg.meta["val"])
        assert meta is not None
        return Laid(value, meta.strides if len(meta.strides) == len(value.shape) else None)

    def _output(self, node: fx.Node) -> None:
        returned = node.args[0]
        assert isinstance(returned, (tuple, list))
        self.lowering.origin = "output"
        outputs = Outputs(self.lowering)
        for position, arg in enumerate(returned):
            value = self._argument(arg)
            if position in self.writes:
                target = self.writes[position]
                outputs.write(value, self._written(target), by_aten=target in self.opaque)
            elif isinstance(value, Tensor):
                assert isinstance(arg, fx.Node)
                meta = self._meta(arg.meta["val"])
                assert meta is not None
                outputs.fresh(value, meta.strides, arg)
            else:
                outputs.plain(value)
        outputs.finish()

    def _written(self, position: int) -> Tensor:
        target = self.placeholders[position]
        assert isinstance(target, Tensor)
        return target


def _inputs(args: Iterable[Any]) -> set[fx.Node]:
    """The nodes among arguments."""
    found: set[fx.Node] = set()
    for arg in args:
        if isinstance(arg, fx.Node):
            found.add(arg)
        elif isinstance(arg, (list, tuple)):
            found |= _inputs(arg)
    return found


def _only_symbol(size: Size) -> Symbol | None:
    if isinstance(size, Expr) and len(size.terms) == 1:
        ((mono, coef),) = size.terms.items()
        if coef == 1 and len(mono) == 1 and isinstance(mono[0], Symbol):
            return mono[0]
    return None


def _passes_on(node: fx.Node) -> bool:
    """True for views: using them is using what they are views of."""
    if node.op != "call_function":
        return False
    return not isinstance(node.target, OpOverload) or _is_view(node.target)


def _is_view(op: OpOverload) -> bool:
    handler = HANDLERS.get(op)
    return handler is not None and handler.__module__ == view.__name__


def _opaque(node: fx.Node) -> str | None:
    """Why no loop may read or write the tensors of a call: only ATen knows what is in them."""
    own = node.meta.get("val")
    several = own if isinstance(own, (tuple, list)) else (own,)
    for val in (*several, *(source.meta.get("val") for source in node.all_input_nodes)):
        if isinstance(val, torch.Tensor):
            if val.dtype not in DTYPES:
                return f"tensors of {str(val.dtype).removeprefix('torch.')}"
            if val.is_neg():
                return "tensors that are negated when they are read"
    return None


def _tensors(value: Any) -> list[Tensor]:
    several = value if isinstance(value, (tuple, list)) else (value,)
    return [x for x in several if isinstance(x, Tensor)]
