"""The joint trace: eager's own autograd, run on the tracer's twins.

The captured graph runs on twins as in fusee.aten.trace, but with autograd between the program and
the tracer: what the tracer sees are the operators that have a derivative, and what torch.autograd
.grad then runs on tangent twins are eager's backward formulas, recorded into the same graph. Grad
mode, detach, custom Functions and the errors of wrong in-place writes are therefore autograd's own.
Operators that torch composes of others are taken apart above the tracer (functions.py).
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.decompose import Table, keep_core
from fusee.aten.functional import Value
from fusee.aten.graph import AtenGraph, Mutation, OutputSpec, ViewOfInput, ViewOfOutput
from fusee.aten.nodes import failed, run_nodes
from fusee.aten.outputs import Results, flatten
from fusee.aten.sources import Inputs
from fusee.aten.tidy import merge_equal, remove_dead
from fusee.aten.torch_api import OpOverload, active, autocast_restored, python_dispatcher
from fusee.aten.trace import start
from fusee.aten.tracer import Tracer
from fusee.autodiff.functions import HIGHER_ORDER, AboveAutograd, needs_devices
from fusee.autodiff.joint import Joint
from fusee.autodiff.sparse import why_not
from fusee.autodiff.torch_api import current_node_number, gradients, next_node_number
from fusee.sym.expr import Size
from fusee.sym.parts import hint

__all__ = ["trace_joint"]

aten = torch.ops.aten


def trace_joint(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    keep: Callable[[OpOverload], bool] = keep_core,
    decompositions: Table | None = None,
    overlapping: bool = False,
) -> Joint:
    """Forward and backward of `gm` called with inputs like these, with grad mode on.

    keep, decompositions, overlapping   as in fusee.aten.trace
    raises                 TraceError, MissingFake as fusee.aten.trace; TraceError where eager's
                           forward or backward would raise
    """
    leaves = _Leaves()
    tracer, inputs = start(
        gm,
        example_inputs,
        keep,
        decompositions,
        kind=JointTracer,
        prepare=leaves.prepare,
        with_devices=needs_devices(gm),
    )
    ambient = torch.is_autocast_enabled(inputs.device.type)
    symbolic = python_dispatcher() if tracer.b.to_size is not None else contextlib.nullcontext()
    with autocast_restored(), torch.enable_grad(), symbolic:
        returned = run_nodes(tracer, gm, gm.graph, inputs.given, inputs.attribute)
        finish = _Finish(tracer, inputs, leaves, returned)
        if not overlapping:
            inputs.check_aliases((*finish.rebinds, *finish.mutations))
        with torch.autocast("cpu", enabled=False):
            finish.backward()
    torch.clear_autocast_cache()  # twins that autocast has cast
    return finish.joint(ambient)


class JointTracer(Tracer):  # type: ignore[no-untyped-call]  # torch's own hook
    """The tracer below autograd. It knows which line's backward runs.

    is_backward  backward formulas run now
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.functions = AboveAutograd(self)
        self.above = self.functions
        self.higher_order = HIGHER_ORDER
        self.is_backward = False
        self._first: list[int] = []
        self._lines: list[str | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.is_backward:
            number, is_function = current_node_number()
            self.b.stack_trace = self._line(number)
            self.b.marks["function"] = number if is_function else None
        elif not self._lines or self._lines[-1] is not self.b.stack_trace:
            self._first.append(next_node_number())
            self._lines.append(self.b.stack_trace)
        # what we ask twins for is no call of the program's: `functions` need not see it
        with torch._C.DisableTorchFunction():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _line(self, number: int | None) -> str | None:
        if number is None:
            return None
        # an operator's node has its number before the operator comes here
        return self._lines[min(bisect_right(self._first, number), len(self._lines) - 1)]

    def look_at_autocast(self) -> None:
        """Autocast is above autograd, and acts by itself on twins that say where they are."""
        if self.device.type != "cpu" and torch.is_autocast_enabled(self.device.type):
            raise self.b.unsupported(f"autocast on {self.device.type}")


class _Inner(torch.autograd.Function):
    """Makes a tensor one that something computed, in place."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("the gradient ends at the tensor, before what computed it")


class _Leaves:
    """The twins of inputs that require grad.

    edges    per input: what torch.autograd.grad takes for it
    origins  per input: its grad_fn before the program ran
    """

    def __init__(self) -> None:
        self.edges: dict[int, Any] = {}
        self.origins: dict[int, Any] = {}
        self._token = torch.empty((), device="meta", requires_grad=True)

    def prepare(self, index: int, twin: Tensor, example: Tensor) -> None:
        if not example.requires_grad:
            return
        if example.is_leaf:
            twin.requires_grad_()
            self.edges[index] = twin
        else:
            with torch.enable_grad():
                _Inner.apply(self._token, twin)  # type: ignore[no-untyped-call]
            self.edges[index] = torch.autograd.graph.get_gradient_edge(twin)
        self.origins[index] = twin.grad_fn


class _Finish:
    """From the program's end on: its results, then the backward and the gradients."""

    def __init__(self, tracer: JointTracer, inputs: Inputs, leaves: _Leaves, returned: Any):
        self.tracer, self.b, self.inputs, self.leaves = tracer, tracer.b, inputs, leaves
        self.flat: list[Any] = []
        self.structure = flatten(returned, self.flat)
        for leaf in self.flat:
            if isinstance(leaf, Tensor):
                tracer.value(leaf)
        self.results = Results(self.b, inputs.values, inputs.to_size)
        mutations = self.results.mutations()
        self.rebinds = tuple(m for m in mutations if self._is_differentiable(m))
        self.mutations = tuple(m for m in mutations if m not in self.rebinds)
        self.outputs = self.results.outputs(self.flat)
        self.forward_results = len(self.results.nodes)
        unknown = {m.position for m in self.mutations}
        self.tangents = tuple(
            position
            for position, x in enumerate(self.results.tensors)
            if x.requires_grad and position not in unknown
        )
        self.gradients: list[int | None] = []

    def _is_differentiable(self, mutation: Mutation) -> bool:
        """Whether autograd knows of what was written to an input."""
        value = self.inputs.values[mutation.index]
        assert value is not None
        return value.tensor.grad_fn is not self.leaves.origins.get(mutation.index)

    def backward(self) -> None:
        """Record the backward of all results that require grad, and append the gradients.

        raises   TraceError where eager's backward raises
        """
        b, inputs = self.b, self.inputs
        outer = len(inputs.values)
        ends = [self.results.tensors[position] for position in self.tangents]
        given = [inputs.add_tangent(b.values[id(x)]) for x in ends]
        self.parts = _parts(ends, set(self.leaves.origins.values()))
        self.tracer.is_backward = True
        b.marks["backward"] = True
        edges = self.leaves.edges
        try:
            with active(self.tracer), self.tracer.functions:
                found = gradients(ends, list(edges.values()), given) if ends else ()
        except RuntimeError as error:
            raise failed(self.tracer, "backward", error) from error
        by_index = dict(zip(edges, found))
        places: dict[int, int] = {}
        for index in range(outer):
            gradient = by_index.get(index)
            if gradient is None:
                self.gradients.append(None)
                continue
            if id(gradient) not in places:
                target = inputs.values[index]
                assert target is not None
                value = self.tracer.value(gradient)
                value = _settled(self.tracer, value, target.tensor, inputs.to_size)
                places[id(gradient)] = self.results.position(value)
            self.gradients.append(places[id(gradient)])

    def joint(self, no_autocast: bool) -> Joint:
        b, inputs = self.b, self.inputs
        b.graph.output(tuple(self.results.nodes))
        remove_dead(b.graph)
        merge_equal(b.graph, self.results.memory)
        reason = why_not(b.graph)
        if reason is not None:
            raise b.unsupported(reason)
        aten_graph = AtenGraph(
            graph=b.graph,
            constants=b.constants,
            inputs=inputs.specs(),
            outputs=self.outputs,
            mutations=self.mutations,
            structure=self.structure,
            symbols=inputs.symbols(),
            to_size=inputs.to_size,
            no_autocast=no_autocast,
            from_start=frozenset(b.from_start),
        )
        return Joint(
            aten=aten_graph,
            forward_results=self.forward_results,
            tangents=self.tangents,
            gradients=tuple(self.gradients),
            rebinds=tuple((m.index, m.position) for m in self.rebinds),
            detached=tuple(map(self._is_detached, self.flat, self.outputs)),
            parts=self.parts,
            unreached=tuple(
                index
                for index, gradient in enumerate(self.gradients)
                if gradient is None and self.leaves.origins.get(index) is not None
            ),
        )

    def _is_detached(self, x: Any, spec: OutputSpec) -> bool:
        """Whether an output shares the memory of another tensor, but not its place in autograd."""
        if isinstance(spec, ViewOfInput):
            value = self.inputs.values[spec.index]
            assert value is not None
            of = value.tensor
        elif isinstance(spec, ViewOfOutput):
            of = self.results.tensors[spec.position]
        else:
            return False
        base = x._base
        return not (x.requires_grad or (base is not None and (base is of or base is of._base)))


def _parts(ends: Sequence[Tensor], origins: set[Any]) -> tuple[int, ...]:
    """Joint.parts of these results: they differ where no node of autograd is below both."""
    part = list(range(len(ends)))
    first: dict[Any, int] = dict.fromkeys(origins, -1)
    for number, end in enumerate(ends):
        row = [end.grad_fn]
        while row:
            node = row.pop()
            if node is None or not node.next_functions or node in first:
                other = first.get(node, -1)
                if other >= 0 and part[other] != part[number]:
                    part = [part[other] if x == part[number] else x for x in part]
                continue
            first[node] = number
            row += [below for below, _ in node.next_functions]
    return tuple(part)


def _settled(t: Tracer, gradient: Value, target: Tensor, to_size: Callable[[Any], Size]) -> Value:
    """`gradient`, copied if it doesn't lie in memory as autograd keeps the gradient of `target`.

    source   torch/csrc/autograd/utils/grad_layout_contract.h: dense tensors give their strides
    """
    x = gradient.tensor
    steps = [hint(to_size(step)) for step in target.stride()]
    order = sorted(range(target.dim()), key=lambda axis: -steps[axis])
    if not _is_dense(target, order):
        order = list(range(target.dim()))
    if _is_dense(x, order):
        return gradient
    inverse = [order.index(axis) for axis in range(len(order))]
    with active(t), torch.no_grad():
        copy = x.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)
    return t.value(copy)


def _is_dense(x: Tensor, order: Sequence[int]) -> bool:
    """Whether `x` fills its memory without gaps, its axes in this order from the outermost in."""
    step: Any = 1
    for axis in reversed(order):
        size = x.shape[axis]
        if type(size) is int and size == 1:
            continue
        if x.stride(axis) != step:
            return False
        step = step * size
    return True
