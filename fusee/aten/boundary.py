"""Where the tensors of a program come from: its arguments, its module's attributes, constants."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fusee.aten import (
    AtenGraph,
    Constant,
    Fresh,
    InputItself,
    InputSpec,
    Mutation,
    OutputItself,
    OutputSpec,
    Sym,
    SymbolSource,
    ViewOfInput,
    ViewOfOutput,
    geometry_of,
    memory_root,
    merge_equal,
    shown_symbols,
    tensor_input,
)
from fusee.aten.mutation import join_parts
from fusee.aten.torch_api import TorchSymbols, below_autograd, is_state, is_twin, why_not_dense
from fusee.aten.tracer import Builder, Storage, TracedTensor
from fusee.errors import TraceError
from fusee.fake import with_bits
from fusee.fake.layouts import extent, may_repeat
from fusee.sym import Expr, Size, hint, known_ge, only_symbol, product
from fusee.sym.shape_env import wrapped

# What is done to the twin of each input: (index, twin, what the input is like).
Prepare = Callable[[int, Tensor, Tensor], None]


class Inputs:
    """The placeholders of the graph, and the meta twins of what comes in.

    given    what the captured graph is run with, one per placeholder of it
    values   of each input, None if it is no tensor; those read from the module last
    """

    def __init__(
        self,
        b: Builder,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        to_size: TorchSymbols,
        prepare: Prepare | None = None,
    ) -> None:
        self.b = b
        self.prepare = prepare
        self.gm = gm
        self.to_size = to_size
        self.given: list[Any] = []
        self.values: list[TracedTensor | None] = []
        self.examples: list[Any] = []
        self._specs: list[InputSpec] = []
        self._last: fx.Node | None = None
        self._names: dict[int, str] | None = None
        placeholders = gm.graph.find_nodes(op="placeholder")
        if len(placeholders) != len(examples):
            raise TraceError(f"{len(examples)} inputs for {len(placeholders)} placeholders")
        for node, example in zip(placeholders, examples):
            b.stack_trace = node.stack_trace
            is_buffer = node.meta.get("is_buffer", False)  # as capture found it
            self._add(node.target, example, node.meta.get("example_value"), is_static=is_buffer)
        b.stack_trace = None
        devices = [v.store.device for v in self.values if v is not None]
        self.device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

    def _add(
        self,
        name: str,
        example: Any,
        fake: Any,
        attribute: str | None = None,
        device: torch.device | None = None,
        is_static: bool = False,
    ) -> Any:
        """Append a placeholder; what stands for it while tracing.

        device   where a call has it, if not where the example is
        """
        index = len(self._specs)
        with self.b.graph.inserting_after(self._last):  # the first at the end
            node = self._last = self.b.graph.placeholder(name)
        self.examples.append(example)
        if not isinstance(example, Tensor):
            given = fake if isinstance(fake, torch.SymInt) else example
            symbol = self.to_size(given) if isinstance(given, torch.SymInt) else None
            if isinstance(given, (torch.SymFloat, torch.SymBool)):
                raise self.b.unsupported(f"the input {name} is a symbolic {type(given).__name__}")
            node.meta = {"val": given}
            self._specs.append(InputSpec(index, name, None, (), (), 0, None, symbol=symbol))
            self.values.append(None)
            self.given.append(given)
            return given
        reason = why_not_dense(example)
        if reason is not None:
            raise self.b.unsupported(f"the input {name} is {reason}")
        shaped = fake if isinstance(fake, Tensor) else example
        known = [n if type(n) is int else m for n, m in zip(shaped.shape, example.shape)]
        if known != list(example.shape) or shaped.dim() != example.dim():
            raise self.b.unsupported(f"the graph changes the shape of the input {name}")
        device = device or example.device
        twin = with_bits(self._twin(shaped, example.dtype, device), example, apart=True)
        if self.prepare is not None:
            self.prepare(index, twin, example)
        node.meta = {"val": twin, "device": device, "stack_trace": None}
        value = self.b.fresh(twin, node, device)
        value.store.origin = index
        self._specs.append(
            tensor_input(
                index,
                name,
                twin,
                device,
                self.to_size,
                offset=self.to_size(twin.storage_offset()),
                is_static=is_static or attribute is not None or is_state(example),
                attribute=attribute,
            )
        )
        self.values.append(value)
        self.given.append(twin)
        return twin

    def _twin(self, shaped: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A twin of the geometry of `shaped`."""
        offset = shaped.storage_offset()
        if type(offset) is int and offset == 0:
            return self.b.twins.empty(shaped.shape, shaped.stride(), dtype, device)
        whole = offset + extent(shaped.shape, shaped.stride())
        flat = self.b.twins.empty((whole,), (1,), dtype, device)
        with below_autograd():  # to autograd it is no view
            return flat.as_strided(shaped.shape, shaped.stride(), offset)

    def add_tangent(self, like: TracedTensor) -> Tensor:
        """Append an input of the geometry of `like`, to come with the backward."""
        name = f"tangent_{len(self._specs)}"
        resolved = self._twin(like.tensor, like.tensor.dtype, like.store.device)
        found: Tensor = self._add(name, resolved, None, device=like.store.device)
        return found

    # -------------------------------------------------------------------------- the module's own

    def attribute(self, module: torch.nn.Module, target: str) -> Any:
        """The value of a get_attr node of `module`: tensors become inputs of the graph."""
        value: Any = operator.attrgetter(target)(module)
        if not isinstance(value, Tensor):
            return value
        if module is self.gm:
            self._known().setdefault(id(value), target)
        return (self.b.values.get(id(value)) or self.lift(value)).tensor

    def lift(self, x: Tensor) -> TracedTensor:
        """The TracedTensor of a tensor that the program did not compute."""
        if is_twin(x):
            raise self.b.unsupported("a tensor without data that does not come from this graph")
        name = self._known().get(id(x))
        if name is None:
            if (reason := why_not_dense(x)) is not None:
                raise self.b.unsupported(f"the graph holds a constant that is {reason}")
            node = self.b.constant(x)
            value = self.b.fresh(node.meta["val"], node, x.device)
            value.store.frozen = "a write to a tensor that is a constant of the graph"
        else:
            self._add(name.replace(".", "_"), x, None, attribute=name)
            found = self.values[-1]
            assert found is not None
            value = found
        value.real = x  # else another constant may come to live under its id
        self.b.values[id(x)] = value
        return value

    def _known(self) -> dict[int, str]:
        if self._names is None:
            self._names = {}
            for rows in (self.gm.named_parameters, self.gm.named_buffers):
                for name, x in rows(remove_duplicate=False):
                    self._names.setdefault(id(x), name)
        return self._names

    # -------------------------------------------------------------------------- results

    def specs(self) -> tuple[InputSpec, ...]:
        """The inputs, with what tracing found out about their sizes: `s0 - 2 == 1`."""
        if self.to_size.env is None:
            return tuple(self._specs)
        return tuple(map(self._settled, self._specs, self.b.graph.find_nodes(op="placeholder")))

    def _settled(self, spec: InputSpec, node: fx.Node) -> InputSpec:
        given = node.meta["val"]
        if isinstance(given, Tensor):
            size, stride = geometry_of(given, self.to_size)
            return replace(spec, size=size, stride=stride, offset=self.to_size(spec.offset))
        return spec if spec.symbol is None else replace(spec, symbol=self.to_size(given))

    def symbols(
        self, specs: Sequence[InputSpec], unbacked: Mapping[str, SymbolSource]
    ) -> dict[str, SymbolSource]:
        """Where a call reads each symbol, inputs or results. raises TraceError if none shows it."""
        found = {**shown_symbols(specs), **unbacked}
        for name, symbol in self.to_size.by_name.items():
            if name not in found and only_symbol(self.to_size(symbol.expr)) is symbol:
                raise TraceError(f"no input has the size {name}, which the graph computes with")
        return found


# ---------------------------------------------------------------------------- outputs
# What a call returns, from the tensors that the traced program returned.
#
# Tensors of one storage are returned as one result and views of it, so that they share memory as
# eager's do. Every other result has memory of its own: never an input's, never another result's.

aten = torch.ops.aten


class Results:
    """The flat tuple that the graph returns, in the making; first what the traced program gave.

    leaves      what is in the nest that the program returned; `outputs` has the spec of each
    mutations   one for each input whose storage was written to
    """

    def __init__(self, inputs: Inputs, returned: Any) -> None:
        self.b, self.to_size = inputs.b, inputs.to_size
        self.given, self.inputs = inputs, inputs.values
        self.leaves: list[Any] = []
        self.structure = flatten(returned, self.leaves)
        for leaf in self.leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in self.b.values:
                inputs.lift(leaf)
        self.nodes: list[fx.Node] = []
        self.tensors: list[Tensor] = []
        self.memory: dict[fx.Node, Storage] = {}
        self.returned: dict[int, int] = {}
        self.carriers: dict[int, tuple[int, TracedTensor]] = {}
        self.mutations = tuple(
            Mutation(index, self.position(value), not value.store.is_counted)
            for index, value in enumerate(self.inputs)
            if value is not None and value.store.version > 0
        )
        for mutation in self.mutations:
            value = self.inputs[mutation.index]
            assert value is not None
            if may_repeat(value.tensor):  # whose other elements nothing here would change
                raise self.b.unsupported("a write to an input whose elements share memory")
        self._choose_carriers([self.b.values[id(x)] for x in self.leaves if id(x) in self.b.values])
        self.outputs = tuple(self._output(i, x) for i, x in enumerate(self.leaves))
        self.unbacked = self._unbacked()

    def graph(self, mutations: tuple[Mutation, ...], no_autocast: bool) -> AtenGraph:
        """What was traced, without dead and equal calls. Call it last, once.

        mutations   those that whoever calls the graph makes
        """
        b = self.b
        b.graph.output(tuple(self.nodes))
        join_parts(b.graph)
        self._settle()
        merge_equal(b.graph, self.memory)
        specs = self.given.specs()
        return AtenGraph(
            graph=b.graph,
            constants=b.constants,
            inputs=specs,
            outputs=self.outputs,
            mutations=mutations,
            structure=self.structure,
            symbols=self.given.symbols(specs, self.unbacked),
            to_size=self.to_size,
            no_autocast=no_autocast,
            from_start=frozenset(b.from_start),
            required=b.required(),
        )

    def _settle(self) -> None:
        """Write sizes with what was found out since: of arguments and results, by a backward."""
        if not self.to_size.by_name:
            return
        for node in self.b.graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), self._settled)
        outputs = list[OutputSpec]()
        for spec in self.outputs:
            names = [] if isinstance(spec, Constant) else [f.name for f in fields(spec)]
            settled = {n: map_aggregate(getattr(spec, n), self._settled) for n in names}
            outputs.append(replace(spec, **settled))
        self.outputs = tuple(outputs)

    def _settled(self, leaf: Any) -> Any:
        return self.to_size(leaf) if isinstance(leaf, Expr) else leaf

    def _output(self, i: int, x: Any) -> OutputSpec:
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return Sym(self.to_size(x))
        if not isinstance(x, Tensor):
            return Constant(x)
        if id(x) in self.returned:
            return OutputItself(self.returned[id(x)])
        self.returned[id(x)] = i
        value = self.b.values[id(x)]
        store, tensor = value.store, value.tensor
        size, stride = geometry_of(tensor, self.to_size)
        if store.origin is None:
            position, carrier = self.carriers[id(store)]
            if carrier is value:
                return Fresh(position, size, stride)
            where = self._offset(tensor, carrier.tensor), tensor.dtype
            return ViewOfOutput(position, size, stride, *where, _bits(tensor, carrier.tensor))
        base = self.inputs[store.origin]
        assert base is not None
        if value is base:
            return InputItself(store.origin)
        bits, at, apart = _bits(tensor, base.tensor), value, ""
        while at.apart != "data" and at.parent is not None:
            apart, at = apart or at.apart, at.parent
        if apart := at.apart or apart:  # autograd does not know what it shares memory with
            bits = (*bits, apart)
        where = self._offset(tensor, base.tensor), tensor.dtype
        return ViewOfInput(store.origin, size, stride, *where, bits)

    def _offset(self, view: Tensor, base: Tensor) -> Size:
        start = base.storage_offset()
        if view.dtype.itemsize != base.dtype.itemsize:
            start = start * base.dtype.itemsize // view.dtype.itemsize
        return self.to_size(view.storage_offset() - start)

    def _choose_carriers(self, values: list[TracedTensor]) -> None:
        """For each storage that is returned, the tensor whose memory holds the others'."""
        groups: dict[int, dict[int, TracedTensor]] = {}
        for value in values:
            if value.store.origin is None:
                groups.setdefault(id(value.store), {})[id(value)] = value
        for key, group in groups.items():
            # where autograd is traced, what it knows of carries what is detached from it
            members = sorted(group.values(), key=_is_unknown)
            base = members[0].store.base
            carrier = members[0]
            if len(members) > 1 or not self._is_dense(carrier):
                # torch.zeros and its like give the program what is detached from the base
                family = [v for v in self.b.values.values() if v.store is base.store]
                # a gradient must find it by the same way as what it carries
                root = _root(members[0])
                family = sorted((base, *family), key=lambda v: _root(v) is not root)
                family = sorted((*members, *family), key=_is_unknown)
                carrier = next((v for v in family if self._is_whole(v, base)), base)
            if members[0].tensor.requires_grad and not carrier.tensor.requires_grad:
                # made within an operator, below autograd: its gradient would be lost
                raise self.b.unsupported("a result that is a part of what an operator computed")
            self.carriers[key] = (self.position(carrier), carrier)

    def _is_dense(self, value: TracedTensor) -> bool:
        size = [self.to_size(n) for n in value.tensor.shape]
        # Whether no two elements share memory, as far as it can be told from the strides alone
        stride = [self.to_size(s) for s in value.tensor.stride()]
        if 0 in size:
            return True
        expected: Size = 1
        block: Size = 1  # what a step is that leaves nothing out
        for step, count in sorted(zip(stride, size), key=lambda pair: hint(pair[0])):
            if count == 1:
                continue
            if step != block and not known_ge(step, expected):
                return False
            expected, block = step * (count - 1) + 1, step * count
        return True

    def _is_whole(self, value: TracedTensor, base: TracedTensor) -> bool:
        """Whether every element of the storage is one of `value`, once."""
        x, y = value.tensor, base.tensor
        counts = [product(map(self.to_size, t.shape)) for t in (x, y)]
        return x.dtype == y.dtype and counts[0] == counts[1] and self._is_dense(value)

    def _unbacked(self) -> dict[str, SymbolSource]:
        """Where a call reads the symbols that only data knows: what shows one becomes a result."""
        found, env = {}, self.b.twins.env
        assert env is not None or not self.b.shown
        for symbol, (node, axis) in self.b.shown.items():
            if node not in self.nodes:
                self.nodes.append(node)
                self.tensors.append(node.meta["val"])
            number = wrapped(env, symbol.expr)  # type: ignore[arg-type]
            found[symbol.name] = SymbolSource(self.nodes.index(node), axis, number)
        return found

    def position(self, value: TracedTensor, *, shares: bool = False) -> int:
        """Append a result: what `value` holds, in memory that no other storage has.

        shares   it may be in an input's
        """
        node = self.b.node(value)
        root = memory_root(node)
        is_given = not shares and root.op in ("placeholder", "get_attr")
        if is_given or self.memory.get(root, value.store) is not value.store:
            node = self.b.copy(node, value)
            root = node
        self.memory[root] = value.store
        self.nodes.append(node)
        self.tensors.append(value.tensor)
        return len(self.nodes) - 1


def _root(value: TracedTensor) -> Tensor:
    """What autograd takes a value to be a view of."""
    of = value.tensor._base
    return value.tensor if of is None else of


def _is_unknown(value: TracedTensor) -> bool:
    """Whether autograd, where it is traced, knows nothing of it."""
    return not value.tensor.requires_grad


def _bits(view: Tensor, base: Tensor) -> tuple[str, ...]:
    """What is to be called on elements of `base` for those of `view`."""
    flips = []
    if view.dtype.is_complex and view.is_conj() != (base.dtype.is_complex and base.is_conj()):
        flips.append("conj")
    if view.is_neg() != base.is_neg():
        flips.append("_neg_view")
    return tuple(flips)


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
