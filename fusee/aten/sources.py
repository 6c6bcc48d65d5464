"""Where the tensors of a program come from: its arguments, its module's attributes, constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusee.aten.functional import Builder, Value
from fusee.aten.graph import InputSpec, Mutation, SymbolSource
from fusee.aten.torch_api import below_autograd, is_plain, is_state, is_twin, storage_id
from fusee.errors import TraceError
from fusee.sym.expr import Expr, Size
from fusee.sym.fakes import with_bits
from fusee.sym.from_torch import Symbols

__all__ = ["Inputs", "Prepare"]

# What is done to the twin of each input: (index, twin, what the input is like).
Prepare = Callable[[int, torch.Tensor, torch.Tensor], None]


class Inputs:
    """The placeholders of the graph, and the meta twins of what comes in.

    given    what the captured graph is run with, one per placeholder of it
    values   the Value of each input, None if it is no tensor; those read from the module last
    """

    def __init__(
        self,
        b: Builder,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        to_size: Symbols,
        prepare: Prepare | None = None,
    ) -> None:
        self.b = b
        self.prepare = prepare
        self.gm = gm
        self.to_size = to_size
        self.given: list[Any] = []
        self.values: list[Value | None] = []
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
        self.device = self._device()

    def _device(self) -> torch.device:
        devices = [v.store.device for v in self.values if v is not None]
        return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

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
        node = self._placeholder(name)
        self.examples.append(example)
        if not isinstance(example, torch.Tensor):
            given = fake if isinstance(fake, torch.SymInt) else example
            symbol = self.to_size(given) if isinstance(given, torch.SymInt) else None
            if isinstance(given, (torch.SymFloat, torch.SymBool)):
                raise self.b.unsupported(f"the input {name} is a symbolic {type(given).__name__}")
            node.meta = {"val": given}
            self._specs.append(InputSpec(index, name, None, (), (), 0, None, symbol=symbol))
            self.values.append(None)
            self.given.append(given)
            return given
        reason = is_plain(example)
        if reason is not None:
            raise self.b.unsupported(f"the input {name} is {reason}")
        shaped = fake if isinstance(fake, torch.Tensor) else example
        known = [n if type(n) is int else m for n, m in zip(shaped.shape, example.shape)]
        if known != list(example.shape) or shaped.dim() != example.dim():
            raise self.b.unsupported(f"the graph changes the shape of the input {name}")
        device = device or example.device
        twin = with_bits(self._twin(shaped, example.dtype, device), example)
        if self.prepare is not None:
            self.prepare(index, twin, example)
        node.meta = {"val": twin, "device": device, "stack_trace": None}
        value = self.b.fresh(twin, node, device)
        value.store.origin = index
        self._specs.append(
            InputSpec(
                index,
                name,
                twin.dtype,
                tuple(map(self.to_size, twin.shape)),
                tuple(map(self.to_size, twin.stride())),
                self.to_size(twin.storage_offset()),
                device,
                is_static=is_static or attribute is not None or is_state(example),
                attribute=attribute,
            )
        )
        self.values.append(value)
        self.given.append(twin)
        return twin

    def _twin(self, shaped: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A twin of the geometry of `shaped`."""
        offset = shaped.storage_offset()
        if type(offset) is int and offset == 0:
            return self.b.twins.empty(shaped.shape, shaped.stride(), dtype, device)
        extent = offset + 1
        for size, stride in zip(shaped.shape, shaped.stride()):
            if type(size) is int and size == 0:  # no element, whatever the strides are
                extent = offset
                break
            extent = extent + (size - 1) * stride
        flat = self.b.twins.empty((extent,), (1,), dtype, device)
        with below_autograd():  # to autograd it is no view
            return flat.as_strided(shaped.shape, shaped.stride(), offset)

    def add_tangent(self, like: Value) -> torch.Tensor:
        """Append an input of the geometry of `like`, to come with the backward."""
        name = f"tangent_{len(self._specs)}"
        found: torch.Tensor = self._add(name, like.tensor, None, device=like.store.device)
        return found

    def _placeholder(self, name: str) -> fx.Node:
        graph = self.b.graph
        if self._last is None:
            self._last = graph.placeholder(name)
        else:
            with graph.inserting_after(self._last):
                self._last = graph.placeholder(name)
        return self._last

    # -------------------------------------------------------------------------- the module's own

    def attribute(self, module: torch.nn.Module, target: str) -> Any:
        """The value of a get_attr node of `module`: tensors become inputs of the graph."""
        value: Any = module
        for part in target.split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return value
        if module is self.gm:
            self._known().setdefault(id(value), target)
        found = self.b.values.get(id(value))
        return (found or self.lift(value)).tensor

    def lift(self, x: torch.Tensor) -> Value:
        """The Value of a tensor that the program did not compute."""
        if is_twin(x):
            raise self.b.unsupported("a tensor without data that does not come from this graph")
        name = self._known().get(id(x))
        if name is None:
            value = self._constant(x)
        else:
            self._add(name.replace(".", "_"), x, None, attribute=name)
            found = self.values[-1]
            assert found is not None
            value = found
        value.real = x  # else another constant may come to live under its id
        self.b.values[id(x)] = value
        return value

    def _constant(self, x: torch.Tensor) -> Value:
        reason = is_plain(x)
        if reason is not None:
            raise self.b.unsupported(f"the graph holds a constant that is {reason}")
        node = self.b.constant(x)
        value = self.b.fresh(node.meta["val"], node, x.device)
        value.store.frozen = "a write to a tensor that is a constant of the graph"
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
        return tuple(self._specs)

    def symbols(self) -> dict[str, SymbolSource]:
        """Where a call reads each symbol. raises TraceError if no input shows one of them."""
        found: dict[str, SymbolSource] = {}
        for spec in self._specs:
            for axis, size in [(None, spec.symbol), *enumerate(spec.size)]:
                name = _only_symbol(size)
                if name is not None:
                    found.setdefault(name, SymbolSource(spec.index, axis))
        for name in self.to_size.by_name:
            if name not in found:
                raise TraceError(f"no input has the size {name}, which the graph computes with")
        return found

    def check_aliases(self, mutations: Sequence[Mutation]) -> None:
        """raises TraceError if an input that is written to shares its memory with another one."""
        sharing: dict[int, list[int]] = {}
        for index, example in enumerate(self.examples):
            if isinstance(example, torch.Tensor):
                sharing.setdefault(storage_id(example), []).append(index)
        for mutation in mutations:
            for index in sharing[storage_id(self.examples[mutation.index])]:
                if index != mutation.index:
                    names = self._specs[mutation.index].name, self._specs[index].name
                    raise self.b.unsupported(
                        f"the inputs {names[0]} and {names[1]} share memory and are written to"
                    )


def _only_symbol(size: Size | None) -> str | None:
    """The name of the symbol that a size is, if it is nothing else."""
    if isinstance(size, Expr) and len(size.terms) == 1:
        ((factors, count),) = size.terms.items()
        if count == 1 and len(factors) == 1:
            return factors[0].key
    return None
