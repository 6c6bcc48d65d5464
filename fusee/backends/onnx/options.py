"""Options of the backend "onnxrt", under ONNX Runtime's own names, and sessions made with them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.torch_api import OpOverload, op_name
from fusee.backends.registry import EngineOptions
from fusee.config import Knob, knob, taken
from fusee.errors import OptionError

# ---------------------------------------------------------------------------- onnx api
# Adapter to torch's ONNX exporter: an fx graph of ATen calls as an ONNX model.
#
# torch.onnx.export takes a program, which it captures and decomposes once more, in seconds. What is
# used here is the exporter's own translation of a graph that is decomposed already, and its
# registry of ONNX functions by ATen operator. Tested with torch 2.11 and 2.13, onnxscript 0.7;
# private are
#   torch.onnx._internal.exporter    _core._translate_fx_graph, _registration.ONNXRegistry,
#                                    _registration.OnnxDecompMeta, _ir_passes.add_opset_imports,
#                                    _torchlib._torchlib_registry.get_torchlib_ops
#   onnxscript._framework_apis       get_torchlib_ops, made for the exporter
#
# All of it is imported when the first graph is translated: that takes a second.

_EXPORTER = "torch.onnx._internal.exporter."
# The file that a weight would be in; sessions are given the weights themselves.
_FILE = "weights"


def is_translated(op: OpOverload) -> bool:
    """Whether the exporter has an ONNX function for this operator."""
    return _registry().has(op)


def element_type(dtype: torch.dtype) -> int:
    """ONNX's number for a dtype.

    raises   KeyError if ONNX has none
    """
    return int(_import("_core").torch_dtype_to_onnx_dtype(dtype))


def model_of(
    graph: fx.Graph, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor]
) -> bytes:
    """The ONNX model of a graph, serialised. Its outputs are named `output_0`, `output_1`, ...

    graph      placeholders, calls of ATen operators whose node.meta has `val`, and an output
    weights    placeholders that are given to the session as initialisers, by this name
    constants  placeholders whose values are written into the model
    raises     the exporter's errors, as they are
    """
    core, ir = _import("_core"), importlib.import_module("onnx_ir")
    registry = _registry()
    for node in graph.nodes:
        node.meta["nn_module_stack"] = {}  # the exporter logs a line for each node without
        if node.op == "call_function":
            registry.has(node.target)
    model = ir.Model(ir.Graph([], [], nodes=[], name="region"), ir_version=10)
    core._translate_fx_graph(
        graph,
        model,
        graph_like=model.graph,
        owned_graphs={},
        lower="at_conversion",
        registry=registry.found,
    )
    _name_parts(model, ir)
    _move_inputs(model, ir, weights, constants)
    _import("_ir_passes").add_opset_imports(model)
    serialised: bytes = ir.to_proto(model).SerializeToString()
    return serialised


def _name_parts(model: Any, ir: Any) -> None:
    """Nodes are called after the fx node that they come from, outputs by their number."""
    outputs = list(model.graph.outputs)
    taken: set[int] = set()
    for k, value in enumerate(outputs):
        if id(value) in taken or value.producer() is None:
            copy = ir.node("Identity", [value])
            model.graph.append(copy)
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            model.graph.outputs[k] = value = copy.outputs[0]
        taken.add(id(value))
        value.name = f"output_{k}"
    for k, node in enumerate(model.graph):
        source = node.meta.get("node")
        node.name = f"{source.name if source is not None else 'identity'}/{k}"
        node.metadata_props.clear()


def _move_inputs(
    model: Any, ir: Any, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor]
) -> None:
    graph, core = model.graph, _import("_core")
    for value in list(graph.inputs):
        if value.name in weights:
            weight = weights[value.name]
            shape = ir.Shape(tuple(weight.shape))
            value.const_value = ir.ExternalTensor(
                _FILE, 0, weight.nbytes, value.dtype, shape=shape, name=value.name
            )
        elif value.name in constants:
            value.const_value = core.TorchTensor(constants[value.name], name=value.name)
        else:
            continue
        graph.inputs.remove(value)
        graph.initializers[value.name] = value


class _Registry:
    """The exporter's registry with the functions that were asked for.

    Its own constructor reads the signatures of all 500, which takes half a second.
    """

    def __init__(self) -> None:
        registration = _import("_registration")
        self.entry = registration.OnnxDecompMeta
        self.found = registration.ONNXRegistry()
        for entry in _import("_torchlib._torchlib_registry").get_torchlib_ops():
            self.found._register(entry.fx_target, entry)
        self.found._cleanup_registry_based_on_opset_version()
        self.more: dict[str, list[Any]] = {}
        apis = importlib.import_module("torch.onnx._internal._lazy_import").onnxscript_apis
        for function in apis.get_torchlib_ops():
            self.more.setdefault(function.qualified_name, []).append(function)

    def has(self, op: Any) -> bool:
        """Whether there is a function for an operator, or for a function of numbers."""
        name = op_name(op) if isinstance(op, OpOverload) else f"_operator::{op.__name__}"
        for function in self.more.pop(name, ()):
            self.found._register(
                op,
                self.entry(
                    onnx_function=function.function,
                    fx_target=op,
                    signature=None,
                    is_complex=function.is_complex,
                ),
            )
        return bool(self.found.is_registered(op))


@functools.cache
def _registry() -> _Registry:
    return _Registry()


def _import(name: str) -> Any:
    return importlib.import_module(_EXPORTER + name)


# ---------------------------------------------------------------------------- onnx options


_CPU = "CPUExecutionProvider"
_ENTRIES = "session_config_entries"
# Threads of a session that wait for work would take the cores from those of torch.
_SPIN = "session.intra_op.allow_spinning"

Provider = tuple[str, Mapping[str, Any]]


def _providers(value: Any) -> tuple[Provider, ...]:
    """Names and options, from either of the forms that onnxruntime takes. raises ValueError"""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError
    rows: list[Provider] = []
    for row in value:
        match (row, {}) if isinstance(row, str) else row:
            case (str() as name, Mapping() as own):
                rows.append((name, own))
            case _:
                raise ValueError
    return tuple(rows)


def _dicts(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, Sequence) or not all(isinstance(one, Mapping) for one in value):
        raise ValueError
    return tuple(value)


def _texts(value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or {*map(type, [*value, *value.values()])} - {str}:
        raise ValueError
    return value


def _session(value: Any) -> dict[str, Any]:
    """Options of a session, checked by those that onnxruntime has.

    raises   ValueError for no dict; OptionError
    """
    if not isinstance(value, Mapping):
        raise ValueError
    defaults = _runtime().SessionOptions()
    rows = [Knob(_ENTRIES, Mapping, {}, "", takes="a dict of texts", convert=_texts)]
    for name in dir(defaults):
        default = getattr(defaults, name)
        if name[0] != "_" and not callable(default):
            members = getattr(type(default), "__members__", {})
            names = (*members, *members.values())
            rows.append(Knob(name, type(default), default, "onnxruntime's", choices=names))
    return taken(value, rows, "session option")


@dataclass(frozen=True)
class OnnxOptions(EngineOptions):
    """Options of one compiled function: fusee.compile(m, backend="onnxrt", options={...})."""

    providers: tuple[Provider, ...] = knob(
        ((_CPU, {}),),
        "execution providers in the order of preference",
        takes=f"a list of providers, such as [{_CPU!r}], each a name, or a name and its options",
        convert=_providers,
    )
    provider_options: tuple[Mapping[str, Any], ...] = knob(
        (), "more options of each", takes="a list of a dict for each provider", convert=_dicts
    )
    session_options: Mapping[str, Any] = knob(
        dict,
        "attributes of onnxruntime.SessionOptions, and `session_config_entries`",
        convert=_session,
    )

    def __post_init__(self) -> None:
        """raises   OptionError for a provider that this build of onnxruntime has not"""
        available = _runtime().get_available_providers()
        for name, _ in self.providers:
            if name not in available:
                raise OptionError(
                    f"onnxruntime has no provider {name!r} here",
                    remedy=f"available: {', '.join(available)}; other builds have others",
                )
        if len(self.provider_options) not in (0, len(self.providers)):
            raise OptionError(
                f"option 'provider_options' has {len(self.provider_options)} dicts, and must have"
                f" one for each of providers: {len(self.providers)}"
            )

    def session_of(
        self, model: bytes, weights: Mapping[str, Tensor], *, probe: bool = False
    ) -> Any:
        """An InferenceSession. `weights` are shared with it, not copied.

        probe    only find out whether there can be one: nothing is optimised
        raises   onnxruntime's errors, as they are
        """
        runtime = _runtime()
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors, which are raised anyway
        options.intra_op_num_threads = torch.get_num_threads()
        for name, value in self.session_options.items():
            if name != _ENTRIES:
                members = getattr(type(getattr(options, name)), "__members__", {})
                setattr(options, name, members.get(value, value))
        for key, entry in {_SPIN: "0", **self.session_options.get(_ENTRIES, {})}.items():
            options.add_session_config_entry(key, entry)
        if probe:
            options.log_severity_level = 4
            options.intra_op_num_threads = 1
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.optimized_model_filepath = ""
            options.enable_profiling = False
        if weights:
            options.add_external_initializers(list(weights), list(map(_shared, weights.values())))
        beside = self.provider_options or ({},) * len(self.providers)
        return runtime.InferenceSession(
            model,
            options,
            providers=[name for name, _ in self.providers],
            provider_options=[{**own, **more} for (_, own), more in zip(self.providers, beside)],
        )


def _runtime() -> Any:
    return importlib.import_module("onnxruntime")


def _shared(tensor: Tensor) -> Any:
    """An OrtValue in a row-major tensor's memory, which it does not keep alive."""
    make = _runtime().OrtValue
    if tensor.dtype is torch.bfloat16:
        words = tensor.view(torch.uint16).numpy()
        return make.ortvalue_from_numpy_with_onnx_type(words, element_type(tensor.dtype))
    return make.ortvalue_from_numpy(tensor.numpy())
