"""The backend "onnxrt": regions as ONNX models, run by ONNX Runtime.

    claim    the exporter has a function for the operator, and the runtime takes the model of this
             one call: asked by making a session of it, once for equal calls
    compile  one model for the region; parameters are initialisers in torch's own memory
    call     inputs and outputs are bound where they are: nothing is copied

Initialisers are constants to the runtime, which packs and folds them. A parameter that changes
means a session anew; if it keeps changing, as in training, parameters become inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten.decompose import keep_core
from fusee.aten.explicit import explicit, single
from fusee.aten.externs import WHOLE
from fusee.aten.graph import AtenGraph, Fresh
from fusee.aten.operators import is_view
from fusee.backends.followed import Declined, Followed
from fusee.backends.intervals import bounds
from fusee.backends.onnx_api import element_type, is_translated, model_of
from fusee.backends.onnx_claims import REFUSED, why_not
from fusee.backends.onnx_options import OnnxOptions
from fusee.backends.openvino_claims import indexed
from fusee.backends.regions import Region, RegionCall
from fusee.backends.report import CompiledGraph
from fusee.backends.split_run import compile_with
from fusee.config import Options

__all__ = ["OnnxRuntime", "compile_onnxrt"]

aten = torch.ops.aten

# How often a region's session is made for new values of its parameters before they are inputs.
_SESSIONS = 2


def compile_onnxrt(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> CompiledGraph:
    """Compile a captured graph for ONNX Runtime.

    raises   OptionError; MissingFake for an operator that doesn't say what it returns
    """
    parsed = OnnxOptions.parse(options)
    options_of_ours = Options(name=parsed.name)
    return compile_with(OnnxRuntime(parsed), gm, example_inputs, options_of_ours)


class OnnxRuntime:
    """The engine, with one compiled function's options."""

    name = "onnxrt"

    def __init__(self, options: OnnxOptions) -> None:
        self.options = options
        self.device = ", ".join(name for name, _ in options.providers)
        self.probed: dict[Any, str | None] = {}

    def keeps(self, op: OpOverload) -> bool:
        # taken apart, what is refused would come back in pieces
        return op in WHOLE or op in REFUSED or (keep_core(op) and is_translated(op))

    def claim(self, node: fx.Node) -> str | None:
        op = node.target
        assert isinstance(op, OpOverload)
        if op in self.options.disabled:
            return "the option disabled_ops names it"
        if op is not aten.squeeze.dims and not is_translated(op):
            return "the exporter has no ONNX function for it"
        reason = why_not(node)
        if reason is not None:
            return reason
        for val in _tensors(node):
            if val.numel() == 0:
                return "a tensor without elements has no memory to bind"
        for other in (node, *node.all_input_nodes):
            device = torch.device(other.meta.get("device") or "cpu")
            if device.type != "cpu":
                return f"it is on {device}, and sessions are given memory of the CPU"
        key = (op, _form(node.args, is_view(op)), _form(node.kwargs, False))
        if key not in self.probed:
            self.probed[key] = self._probe(node)
        return self.probed[key]

    def _probe(self, node: fx.Node) -> str | None:
        """What the exporter and the runtime say of this call alone."""
        try:
            self.options.session_of(model_of(single(node), {}, {}), {}, probe=True)
        except Exception as error:  # noqa: BLE001  # any failure is the answer
            lines = str(error.__cause__ or error).strip().splitlines()
            return lines[0] if lines else type(error).__name__
        return None

    def compile(self, region: Region) -> RegionCall:
        return _RegionCall(region, self.options)


def _tensors(node: fx.Node) -> list[Tensor]:
    """What a call takes and gives, less the results that nobody uses."""
    used = [user for user in node.users if user.target is operator.getitem] or [node]
    vals = [other.meta["val"] for other in (*node.all_input_nodes, *used)]
    return [val for val in vals if isinstance(val, Tensor)]


def _form(arg: Any, is_shape: bool) -> Any:
    """Equal for arguments that the exporter and the runtime treat alike."""
    if isinstance(arg, fx.Node):
        val = arg.meta["val"]
        return (val.dtype, val.dim()) if isinstance(val, Tensor) else type(val)
    if isinstance(arg, (tuple, list)):
        return tuple(_form(one, is_shape) for one in arg)
    if isinstance(arg, Mapping):
        return tuple((name, _form(one, is_shape)) for name, one in arg.items())
    return type(arg) if is_shape else repr(arg)


class _Session:
    """A session and its bindings, one per call at a time."""

    def __init__(
        self, model: bytes, weights: Mapping[str, Tensor], region: AtenGraph, options: OnnxOptions
    ) -> None:
        self.session = options.session_of(model, weights)
        self.free: list[Any] = []
        self.inputs = [
            (spec.index, spec.name, None if spec.dtype is None else element_type(spec.dtype))
            for spec in region.inputs
            if spec.name not in weights
        ]
        self.inputs = [row for row in self.inputs if row[1] in _names(self.session.get_inputs())]
        dtypes = [node.meta["val"].dtype for node in region.results]
        self.outputs = [
            (name, dtype, element_type(dtype))
            for name, dtype in zip(_names(self.session.get_outputs()), dtypes, strict=True)
        ]

    def run(self, inputs: tuple[Any, ...], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        binding = self.free.pop() if self.free else self.session.io_binding()
        kept = []  # what must live until the session has run
        for index, name, kind in self.inputs:
            x = inputs[index]
            if kind is None:
                x, kind = torch.tensor(x), _INT64
            x = x if x.is_contiguous() else x.contiguous()
            kept.append(x)
            binding.bind_input(name, "cpu", 0, kind, x.shape, x.data_ptr())
        results = []
        for (name, dtype, kind), size in zip(self.outputs, sizes, strict=True):
            x = torch.empty(size, dtype=dtype)
            binding.bind_output(name, "cpu", 0, kind, size, x.data_ptr())
            results.append(x)
        self.session.run_with_iobinding(binding)
        self.free.append(binding)
        return results


_INT64 = 7  # onnx.TensorProto.INT64


def _names(arguments: Sequence[Any]) -> list[str]:
    return [argument.name for argument in arguments]


class _RegionCall:
    """One region as it is called."""

    def __init__(self, region: Region, options: OnnxOptions) -> None:
        graph = region.graph
        self.sizes = _sizes_of(region)
        position = {node: k for k, node in enumerate(graph.placeholders)}
        found = [row for node in region.calls() for row in indexed(node)]
        # ONNX counts negative indices from the end, ATen refuses those of most operators
        self.indices = sorted({position[x] for x, low, _ in found if low == 0 and x in position})

        def session(given: Mapping[int, Tensor]) -> _Session:
            weights = {graph.inputs[k].name: x for k, x in given.items()}
            model = model_of(explicit(graph), weights, graph.constants)
            return _Session(model, weights, graph, options)

        computed = any(low == 0 and x not in position for x, low, _ in found)
        taken_for = bounds(region) if computed else []
        self.made = Followed(region.fixed(), taken_for, region.examples, session, _SESSIONS)

    def __call__(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        for k in self.indices:
            if inputs[k].numel() and int(inputs[k].min()) < 0:
                raise Declined
        made = self.made.current(inputs)
        try:
            return made.executable.run(inputs, self.sizes(inputs))
        except Exception as error:  # the runtime's own classes, which it makes no names for
            if "out of data bounds" in str(error):
                raise Declined from error  # an index: our compiler raises what eager does
            raise


def _sizes_of(region: Region) -> Callable[[tuple[Any, ...]], Sequence[Sequence[int]]]:
    """A function of the inputs: the sizes of the results, once none is known to be 0."""
    graph = region.graph
    sizes: Any = [spec.size for spec in graph.outputs if isinstance(spec, Fresh)]
    if not graph.symbols:
        return lambda inputs: sizes
    lines = ["def sizes(inputs):"]
    for name, source in graph.symbols.items():
        size = "" if source.axis is None else f".size({source.axis})"
        lines.append(f"    {name} = inputs[{source.index}]{size}")
    lines += [f"    if {size} < 1: raise Declined" for size in region.open_sizes()]
    lines.append(f"    return {[list(size) for size in sizes]!r}")
    names: dict[str, Any] = {"Declined": Declined}
    exec(compile("\n".join(lines), "<fusee sizes>", "exec"), names)
    found: Callable[[tuple[Any, ...]], Sequence[Sequence[int]]] = names["sizes"]
    return found
