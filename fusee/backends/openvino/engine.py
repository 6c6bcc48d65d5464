"""The backends openvino and openvino_ts: regions in OpenVINO, the rest in our own compiler.

Parameters and buffers become constants of the compiled model, which share torch's memory. A region
whose parameters changed is compiled again; one whose parameters keep changing takes them as inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.canonicalize import Table, taken_apart
from fusee.aten.graph import AtenGraph, python_source
from fusee.aten.operators import WHOLE
from fusee.aten.torch_api import OpOverload
from fusee.backends.openvino import api, graph
from fusee.backends.openvino.api import Executable
from fusee.backends.openvino.claims import is_folded, is_known, stays_whole, why_not
from fusee.backends.openvino.graph import decodable, distinct, find_origins, gather
from fusee.backends.openvino.options import OpenVINOOptions
from fusee.backends.openvino.region import Models, RegionCall, RegionSpec
from fusee.backends.regions import (
    HEAD,
    LARGEST_SIZE,
    CompiledRegion,
    Engine,
    Region,
    bounds,
    indexed,
)
from fusee.errors import BackendError, FuseeWarning, user_line, warn
from fusee.runtime.cache import content_key
from fusee.source import HostSource, listed

# ---------------------------------------------------------------------------- openvino ts
# A region as TorchScript, by torch.jit.trace: the older way into OpenVINO.
#
# The TorchScript frontend knows the operators that programs call, not those they are made of: these
# are spelt as the former.

aten = torch.ops.aten


def scripted(graph: AtenGraph, weights: Mapping[int, Tensor], results: Sequence[fx.Node]) -> Any:
    """The graph up to these results as TorchScript, with the inputs in `weights` as its own.

    raises   BackendError if it has symbolic sizes, which tracing would fix
    """
    if graph.symbols:
        raise BackendError("tracing for TorchScript fixes all sizes, and this region has open ones")
    gm = decodable(graph, weights, results)
    run = _Spelling(gm)
    examples = [
        torch.zeros(spec.size, dtype=spec.dtype)  # type: ignore[arg-type]  # no symbols: ints
        for spec in graph.inputs
        if spec.index not in weights
    ]

    class Region(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return run.run(*given)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch says that TorchScript is deprecated; so do we
        trace: Callable[..., Any] = torch.jit.trace
        return trace(Region(), tuple(examples), check_trace=False)


class _Spelling(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spelt = _SPELT.get(target)
        return spelt(*args, **kwargs) if spelt is not None else target(*args, **kwargs)


def _squeeze(x: Tensor, axes: list[int]) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.squeeze(axis)
    return x


def _to_copy(x: Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    return x.to(dtype if dtype is not None else x.dtype, copy=True)


# Of several results only the first is used: the claims see to that.
_SPELT: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: lambda x, axis, half: torch.softmax(x, axis),
    aten._safe_softmax.default: lambda x, axis, dtype=None: torch.softmax(x, axis, dtype),
    aten._log_softmax.default: lambda x, axis, half: torch.log_softmax(x, axis),
    aten._to_copy.default: _to_copy,
    aten.squeeze.dims: _squeeze,
    aten.native_layer_norm.default: lambda *args: (torch.layer_norm(*args),),
    aten.native_group_norm.default: lambda x, w, b, n, c, hw, groups, eps: (
        torch.group_norm(x, groups, w, b, eps),
    ),
    aten._native_batch_norm_legit_no_training.default: lambda x, w, b, mean, var, momentum, eps: (
        torch.batch_norm(x, w, b, mean, var, False, momentum, eps, False),
    ),
}


# ---------------------------------------------------------------------------- openvino


# How often a region is compiled for new values of its parameters before they become inputs.
_MOST_COMPILES = 3


class OpenVINO(Engine):
    """The engine of one compiled function."""

    options: OpenVINOOptions

    def __init__(self, options: OpenVINOOptions) -> None:
        super().__init__(options)
        self.name, self.device = options.backend, options.device
        self.models = Models(options)

    def keeps(self, op: OpOverload) -> bool:
        whole = is_known(op) or stays_whole(op) or op in WHOLE
        return whole and op not in self.options.decompositions

    def decompositions(self) -> Table:
        found = {op: taken_apart(op) for op in self.options.decompositions}
        return {op: function for op, function in found.items() if function is not None}

    def claim(self, node: fx.Node) -> str | None:
        return None if HEAD in node.meta else why_not(node)

    @property
    def trains(self) -> bool:
        return self.options.aot_autograd

    def kept_for(self) -> Sequence[str]:
        return self.models.kept_for

    def prepare(self, graph: AtenGraph, examples: Sequence[Any]) -> None:
        """Weights that are unpacked on each call stay packed."""
        folded = next((node for node in graph.graph.nodes if is_folded(node)), None)
        if folded is not None:
            warn(
                FuseeWarning,
                "this model is quantised, and its weights were folded into integers already",
                where=user_line(folded.meta.get("stack_trace")),
                did="gives OpenVINO floating point: no layer with such a weight runs as int8",
                remedy="convert_pt2e(model, fold_quantize=False)",
            )
        if self.name == "openvino":
            gather(graph, examples, self.options.disabled_ops.__contains__)

    def compile(self, region: Region) -> CompiledRegion:
        spec = _spec(region, self.options.model_caching)

        def make(weights: Mapping[int, Tensor]) -> Executable:
            key = self.models.key(spec, weights)
            found = self.models.find(key, spec)
            if found is None:
                model = self._convert(region, weights)
                config = self.options.properties
                found = api.compile_model(model, self.device, config, spec.outputs)
                self.models.keep(key, found)
            return found

        call = RegionCall(spec, region.examples, make)
        return CompiledRegion(call, spec, call.primitives)

    def _convert(self, region: Region, weights: Mapping[int, Tensor]) -> Any:
        results, _ = distinct(region.graph)
        inputs = [
            # without an upper bound: memory for the product of three would overflow, an error
            (spec.dtype or torch.int64, [n if isinstance(n, int) else (1, -1) for n in spec.size])
            for spec in region.graph.inputs
            if spec.index not in weights
        ]
        if self.name == "openvino_ts":
            return graph.convert_traced(scripted(region.graph, weights, results), inputs)
        origins = find_origins(region.graph)
        computed = [origin.weight for origin in origins]
        vals = [node.meta["val"] for node in computed]
        inputs += [(val.dtype, list(val.shape)) for val in vals]
        gm = decodable(region.graph, weights, results, computed)
        model = graph.convert_fx(gm, inputs)
        values = region.values(weights)
        graph.fill(model, [origin.packed(values) for origin in origins])
        return model


# ------------------------------------------------------------------------------ calls


def _spec(region: Region, is_kept: bool) -> RegionSpec:
    """is_kept   whether its model is"""
    graph = region.graph
    results, places = distinct(graph)
    parts: list[str | Tensor] = [python_source(graph), str(graph.inputs), *graph.constants.values()]
    return RegionSpec(
        graph=content_key(*parts, str(places)) if is_kept else "",
        fixed=region.fixed(),
        bounds=tuple(bounds(region)),
        outputs=tuple((node.meta["val"].dtype, node.meta["val"].dim()) for node in results),
        places=tuple(places) if places != list(range(len(results))) else None,
        prepare=_prepare(region),
        times=None if find_origins(graph) else _MOST_COMPILES,
    )


def _prepare(region: Region) -> str:
    """Source of `RegionSpec.prepare`.

    OpenVINO doesn't look whether an index is in range, and may crash on what has no elements;
    claims took sizes for less than a bound.
    """
    graph = region.graph
    write = HostSource("prepare", "inputs")
    write.read_symbols(graph.symbols)
    for name, place in graph.symbols.items():
        least = -LARGEST_SIZE if place.axis is None else 1
        write.add(f"if not {least} <= {name} <= {LARGEST_SIZE}: raise Declined")
    write.add(*(f"if {size} < 1: raise Declined" for size in region.open_sizes()))
    position = {node: k for k, node in enumerate(graph.placeholders)}
    checks = (
        f"check({write.input(position[index])}, {low}, {graph.to_size(size)})"
        for node in region.calls()
        for index, low, size in indexed(node)
        if index in position
    )
    write.add(*dict.fromkeys(checks))
    vals = [node.meta["val"] for node in distinct(graph)[0]]
    made = [f"empty({listed(map(graph.to_size, x.shape))}, dtype={x.dtype})" for x in vals]
    write.add(f"return [{', '.join(made)}]")
    return str(write)
