"""Runs an AtenGraph with eager ATen: what every later form of the graph is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusee.aten.graph import (
    AtenGraph,
    Constant,
    Fresh,
    InputItself,
    OutputItself,
    OutputSpec,
    Sym,
    ViewOfInput,
    ViewOfOutput,
)
from fusee.aten.part_source import PartSource, function
from fusee.aten.source import function_source
from fusee.aten.torch_api import without_autocast
from fusee.sym.expr import Size, Symbol
from fusee.sym.parts import hint, substitute, symbols

__all__ = [
    "around",
    "executable",
    "executable_anywhere",
    "part_source",
    "read_symbols",
    "retyped",
    "run",
]

aten = torch.ops.aten

increment_version = torch.autograd.graph.increment_version

Values = Mapping[str, int]


def run(graph: AtenGraph, inputs: Sequence[Any]) -> Any:
    """What the traced program returns for these inputs, which it may write to.

    inputs   one per InputSpec: the caller's arguments, then `graph.attributes(module)`
    """
    return executable(graph)(*inputs)


def executable(graph: AtenGraph) -> Callable[..., Any]:
    """`run` with the graph compiled to Python once, for many calls."""
    return around(graph, function(_source(graph), graph.constants))


def _source(graph: AtenGraph) -> str:
    source = function_source(graph)
    if graph.graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        source = source.replace("torch.ops.aten.mkldnn_rnn_layer.default", "recurrent_layer")
    return source


def around(graph: AtenGraph, body: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """`executable` with another function that computes the graph's results from its inputs."""

    def call(*inputs: Any) -> Any:
        guard = without_autocast() if graph.no_autocast else contextlib.nullcontext()
        with torch.no_grad(), guard:
            results = body(*inputs)
            for mutation in graph.mutations:
                inputs[mutation.index].copy_(results[mutation.position])
                increment_version(inputs[mutation.index])  # copy_ may run below autograd
            values = read_symbols(graph, inputs)
            returned: list[Any] = []
            for spec in graph.outputs:
                returned.append(_output(spec, inputs, results, returned, values))
        return graph.structure(returned)

    return call


def executable_anywhere(graph: AtenGraph) -> Callable[..., Any]:
    """`executable` of a part, for kernels that choose other strides than tracing knows; changes it.

    Tracing knows what the CPU's kernels choose; those of other devices may differ. Results have
    the strides that tracing knows.
    """
    return part_source(graph).bind(graph.constants)


def part_source(graph: AtenGraph) -> PartSource:
    """What `executable_anywhere` runs, but for the constants; changes the graph."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    for node in graph.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        source = node.args[0]
        val = source.meta["val"]
        with graph.graph.inserting_before(node):
            sizes: Any = [tuple(map(graph.to_size, row)) for row in (val.shape, val.stride())]
            empty = graph.graph.call_function(aten.new_empty_strided.default, (source, *sizes))
            laid_out = graph.graph.call_function(aten.copy.default, (empty, source))
        for made in (empty, laid_out):
            made.meta = dict(source.meta)
        node.replace_input_with(source, laid_out)
    orders = []
    for k, spec in enumerate(graph.outputs):
        assert isinstance(spec, Fresh) and spec.position == k
        steps = [hint(step) for step in spec.stride]
        orders.append(tuple(sorted(range(len(steps)), key=lambda k: -steps[k])))
    return PartSource(_source(graph), tuple(orders), graph.no_autocast)


def read_symbols(graph: AtenGraph, inputs: Sequence[Any]) -> dict[str, int]:
    """The value of each symbol in this call."""
    return {
        name: inputs[source.index]
        if source.axis is None
        else inputs[source.index].size(source.axis)
        for name, source in graph.symbols.items()
    }


def _output(
    spec: OutputSpec,
    inputs: Sequence[Any],
    results: Sequence[torch.Tensor],
    returned: Sequence[Any],
    values: Values,
) -> Any:
    if isinstance(spec, Fresh):
        return results[spec.position]
    if isinstance(spec, InputItself):
        return inputs[spec.index]
    if isinstance(spec, OutputItself):
        return returned[spec.index]
    if isinstance(spec, ViewOfInput):
        return _view(inputs[spec.index], spec, values)
    if isinstance(spec, ViewOfOutput):
        return _view(results[spec.position], spec, values)
    return _number(spec.expr, values) if isinstance(spec, Sym) else _constant(spec)


def _constant(spec: Constant) -> object:
    return spec.value


def _view(base: torch.Tensor, spec: ViewOfInput | ViewOfOutput, values: Values) -> torch.Tensor:
    size = [_number(n, values) for n in spec.size]
    stride = [_number(n, values) for n in spec.stride]
    view = retyped(base, size, stride, _number(spec.offset, values), spec.dtype)
    for name in spec.bits:
        view = getattr(torch, name)(view)
    return view


def retyped(
    base: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """A view of `base`, `offset` elements of `dtype` after its first one."""
    if dtype == base.dtype:
        return base.as_strided(size, stride, base.storage_offset() + offset)
    if base.dtype.is_complex and dtype is base.dtype.to_real():
        parts = torch.view_as_real(base.conj() if base.is_conj() else base)
        return parts.as_strided(size, stride, parts.storage_offset() + offset)
    if dtype.is_complex and base.dtype is dtype.to_real():
        start = base.storage_offset() + 2 * offset
        return torch.view_as_complex(
            base.as_strided((*size, 2), (*(2 * step for step in stride), 1), start)
        )
    start = base.storage_offset() * base.dtype.itemsize // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=base.device)
    return view.set_(base.untyped_storage(), start + offset, size, stride)


def _number(size: Size, values: Values) -> int:
    if isinstance(size, int):
        return size
    known: dict[Symbol, Size] = {s: values[s.name] for s in symbols(size)}
    found = substitute(size, known)
    assert isinstance(found, int)
    return found
