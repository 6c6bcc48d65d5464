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

from fusee.aten.decompose import Table, taken_apart
from fusee.aten.externs import WHOLE
from fusee.aten.graph import AtenGraph
from fusee.aten.source import python_source
from fusee.aten.torch_api import OpOverload
from fusee.backends import openvino_api, packed
from fusee.backends.ahead import Ahead, find
from fusee.backends.blobs import digest
from fusee.backends.followed import Followed
from fusee.backends.intervals import LARGEST_SIZE
from fusee.backends.openvino_api import Executable
from fusee.backends.openvino_claims import indexed, is_known, stays_whole, why_not
from fusee.backends.openvino_graph import decodable, distinct
from fusee.backends.openvino_options import OpenVINOOptions
from fusee.backends.openvino_ts import scripted
from fusee.backends.regions import HEAD, Declined, Region, RegionCall
from fusee.backends.split_run import compile_with
from fusee.config import Options
from fusee.errors import BackendError, FuseeWarning, layout

# How often a region is compiled for new values of its parameters before they become inputs.
_MOST_COMPILES = 3


class OpenVINO:
    """The engine of one compiled function."""

    def __init__(self, options: OpenVINOOptions, name: str = "openvino") -> None:
        self.options = options
        self.name = name
        self.device = options.device
        self.ahead = _ahead(options)

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
        if self.name == "openvino":
            packed.gather(graph, examples, self.options.disabled_ops.__contains__)

    def compile(self, region: Region) -> RegionCall:
        return _RegionCall(region, self)

    def executable(self, region: Region, weights: Mapping[int, Tensor]) -> Executable:
        """The region compiled, with these inputs as constants: from the cache if it is there."""
        key = None
        results, _ = distinct(region.graph.results)
        outputs = [(n.meta["val"].dtype, n.meta["val"].dim()) for n in results]
        if self.ahead is not None:
            key = self._key(region, weights)
            try:
                read = self.ahead.get(key)
                if read is not None:
                    compiled, memory = read
                    found = Executable(compiled, outputs, memory)
                    self.ahead.note(key)
                    return found
            except BackendError as error:
                self.ahead.blobs.refuse(key, error.what)
        model = self._convert(region, weights)
        found = openvino_api.compile_model(model, self.device, self.options.config, outputs)
        if self.ahead is not None and key is not None:
            try:
                self.ahead.blobs.write(key, found.blob())
                self.ahead.note(key)
            except BackendError as error:
                self.ahead.blobs.skip(f"{self.device}: {error.what}")
        return found

    def _convert(self, region: Region, weights: Mapping[int, Tensor]) -> Any:
        results, _ = distinct(region.graph.results)
        inputs = [
            (spec.dtype or torch.int64, [_bounds(n) for n in spec.size])
            for spec in region.graph.inputs
            if spec.index not in weights
        ]
        if self.name == "openvino_ts":
            return openvino_api.convert_traced(scripted(region.graph, weights, results), inputs)
        origins = packed.find_origins(region.graph)
        computed = [origin.weight for origin in origins]
        vals = [node.meta["val"] for node in computed]
        inputs += [(val.dtype, list(val.shape)) for val in vals]
        gm = decodable(region.graph, weights, results, computed)
        model = openvino_api.convert_fx(gm, inputs)
        values = region.values(weights)
        openvino_api.fill(model, [origin.packed(values) for origin in origins])
        return model

    def _key(self, region: Region, weights: Mapping[int, Tensor]) -> str:
        graph = region.graph
        config = sorted((name, str(value)) for name, value in self.options.config.items())
        texts = [
            self.name,
            openvino_api.identity(self.device),
            torch.__version__,
            self.device,
            str(config),
            python_source(graph),
            str(graph.inputs),
            str(sorted(weights)),
        ]
        return digest([*texts, *graph.constants.values(), *weights.values()])


def _ahead(options: OpenVINOOptions) -> Ahead | None:
    """Models on disk, which are being read from the first call on.

    Not earlier: a process that only forks must have none, since OpenVINO's threads do not survive.
    """
    if not options.model_caching:
        return None

    def load(blob: Tensor) -> Any:
        return openvino_api.import_blob(blob, options.device, options.config)

    return find(options.cache_dir, options.device, options.config, load)


def _bounds(size: Any) -> openvino_api.Size:
    # without an upper bound: memory for the product of three would overflow, which is an error
    return size if isinstance(size, int) else (1, -1)


# ------------------------------------------------------------------------------ calls


class _RegionCall:
    """One compiled region. May be called from several threads."""

    def __init__(self, region: Region, engine: OpenVINO) -> None:
        results, places = distinct(region.graph.results)
        self.places = places if places != list(range(len(results))) else None
        times = None if packed.find_origins(region.graph) else _MOST_COMPILES

        def make(weights: Mapping[int, Tensor]) -> Executable:
            return engine.executable(region, weights)

        self.made = Followed(region, make, times, bound=True)
        self.prepare = _prepare(region)

    def primitives(self) -> dict[str, int]:
        """What OpenVINO executes: kinds of primitives, and how often each runs."""
        return self.made.latest.executable.primitives()

    def __call__(self, inputs: tuple[Any, ...]) -> Sequence[Tensor]:
        made = self.made.current(inputs)
        outputs = self.prepare(inputs)
        taken = [x for k, x in enumerate(inputs) if k not in made.weights]
        made.executable([x if isinstance(x, Tensor) else torch.tensor(x) for x in taken], outputs)
        if self.places is None:
            return outputs
        given_out: set[int] = set()
        results = []
        for k in self.places:
            results.append(outputs[k].clone() if k in given_out else outputs[k])
            given_out.add(k)
        return results


def _prepare(region: Region) -> Callable[[tuple[Any, ...]], list[Tensor]]:
    """A function of a call's inputs: memory for the results, once the inputs are looked at.

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
    for node in distinct(graph.results)[0]:
        val = node.meta["val"]
        sizes = "".join(f"{graph.to_size(n)}, " for n in val.shape)
        made.append(f"empty(({sizes}), dtype={val.dtype})")
    lines.append(f"    return [{', '.join(made)}]")
    names: dict[str, Any] = {
        "check": _check,
        "empty": torch.empty,
        "torch": torch,
        "Declined": Declined,
    }
    exec("\n".join(dict.fromkeys(lines)), names)
    found: Callable[[tuple[Any, ...]], list[Tensor]] = names["prepare"]
    return found


def _check(index: Tensor, low: int, size: int) -> None:
    """raises  Declined if an index is out of range: our compiler raises what eager does"""
    if index.numel():
        least, greatest = torch.aminmax(index)
        if least < low or greatest >= size:
            raise Declined


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
    )


def begin(options: Mapping[str, object]) -> None:
    """Read what the last process used."""
    _ahead(OpenVINOOptions.parse(options))


def check(options: Mapping[str, object]) -> None:
    """Refuse wrong options. raises OptionError, SettingError"""
    OpenVINOOptions.parse(options)


def check_ts(options: Mapping[str, object]) -> None:
    """As `check`, with a note that the backend is deprecated."""
    OpenVINOOptions.parse(options)
    warnings.warn(
        layout(
            FuseeWarning,
            "the backend 'openvino_ts' goes through TorchScript, which torch gives up",
            did="compiles with it nevertheless",
            remedy="backend='openvino' takes the same options",
        ),
        FuseeWarning,
        stacklevel=4,
    )
