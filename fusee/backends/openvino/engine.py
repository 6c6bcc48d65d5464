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
from fusee.backends.openvino.claims import indexed, is_folded, is_known, stays_whole, why_not
from fusee.backends.openvino.graph import decodable, distinct, find_origins, gather
from fusee.backends.openvino.options import OpenVINOOptions
from fusee.backends.openvino.region import Models, RegionCall, RegionSpec
from fusee.backends.regions import HEAD, LARGEST_SIZE, Region, bounds
from fusee.backends.resume import digest
from fusee.backends.split_run import compile_with
from fusee.config import Options
from fusee.errors import BackendError, FuseeWarning, user_line, warn

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


class OpenVINO:
    """The engine of one compiled function."""

    def __init__(self, options: OpenVINOOptions, name: str = "openvino") -> None:
        self.options = options
        self.name = name
        self.device = options.device
        self.models = Models(options, name)

    def keeps(self, op: OpOverload) -> bool:
        whole = is_known(op) or stays_whole(op) or op in WHOLE
        return whole and op not in self.options.decompositions

    def table(self) -> Table:
        """How the operators of the option `decompositions` are taken apart."""
        found = {op: taken_apart(op) for op in self.options.decompositions}
        return {op: function for op, function in found.items() if function is not None}

    def claim(self, node: fx.Node) -> str | None:
        if node.target in self.options.disabled_ops:
            return "the option disabled_ops names it"
        return None if HEAD in node.meta else why_not(node)

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

    def compile(self, region: Region) -> RegionCall:
        spec = _spec(region, self.options.model_caching)

        def make(weights: Mapping[int, Tensor]) -> Executable:
            key = self.models.key(spec, weights)
            found = self.models.find(key, spec)
            if found is None:
                model = self._convert(region, weights)
                config = self.options.config
                found = api.compile_model(model, self.device, config, spec.outputs)
                self.models.keep(key, found)
            return found

        return RegionCall(spec, region.examples, make)

    def _convert(self, region: Region, weights: Mapping[int, Tensor]) -> Any:
        results, _ = distinct(region.graph)
        inputs = [
            (spec.dtype or torch.int64, [_bounds(n) for n in spec.size])
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


def _bounds(size: Any) -> graph.Size:
    # without an upper bound: memory for the product of three would overflow, which is an error
    return size if isinstance(size, int) else (1, -1)


# ------------------------------------------------------------------------------ calls


def _spec(region: Region, is_kept: bool) -> RegionSpec:
    """is_kept   whether its model is"""
    graph = region.graph
    results, places = distinct(graph)
    return RegionSpec(
        graph=digest([*_parts(graph), str(places)]) if is_kept else "",
        fixed=region.fixed(),
        bounds=tuple(bounds(region)),
        outputs=tuple((node.meta["val"].dtype, node.meta["val"].dim()) for node in results),
        places=tuple(places) if places != list(range(len(results))) else None,
        prepare=_prepare(region),
        times=None if find_origins(graph) else _MOST_COMPILES,
    )


def _parts(graph: AtenGraph) -> list[str | Tensor]:
    return [python_source(graph), str(graph.inputs), *graph.constants.values()]


def _prepare(region: Region) -> str:
    """Source of `RegionSpec.prepare`.

    OpenVINO doesn't look whether an index is in range, and may crash on what has no elements;
    claims took sizes for less than a bound.
    """
    graph = region.graph
    lines = ["def prepare(inputs):"]
    for name, source in graph.symbols.items():
        size = "" if source.axis is None else f".size({source.axis})"
        lines.append(f"    {name} = inputs[{source.index}]{size}")
        least = -LARGEST_SIZE if source.axis is None else 1
        lines.append(f"    if not {least} <= {name} <= {LARGEST_SIZE}: raise Declined")
    lines += [f"    if {size} < 1: raise Declined" for size in region.open_sizes()]
    position = {node: k for k, node in enumerate(graph.placeholders)}
    for node in region.calls():
        for index, low, size in indexed(node):
            if index in position:
                at = position[index]
                lines.append(f"    check(inputs[{at}], {low}, {graph.to_size(size)})")
    made = []
    for node in distinct(graph)[0]:
        val = node.meta["val"]
        sizes = "".join(f"{graph.to_size(n)}, " for n in val.shape)
        made.append(f"empty(({sizes}), dtype={val.dtype})")
    lines.append(f"    return [{', '.join(made)}]")
    return "\n".join(dict.fromkeys(lines))


# ------------------------------------------------------------------------------ backends


def compile_openvino(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """Compile a captured graph. raises OptionError, SettingError"""
    return _compile(OpenVINO(OpenVINOOptions.parse(options)), gm, example_inputs)


def compile_openvino_ts(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """Compile a captured graph, its regions by way of TorchScript."""
    return _compile(OpenVINO(OpenVINOOptions.parse(options), "openvino_ts"), gm, example_inputs)


def _compile(
    engine: OpenVINO, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    training = engine.options.aot_autograd
    return compile_with(
        engine,
        gm,
        example_inputs,
        Options(name=engine.options.name),
        decompositions=engine.table(),
        training=training,
        prepare=engine.prepare,
        kept_for=engine.models.kept_for,
    )
