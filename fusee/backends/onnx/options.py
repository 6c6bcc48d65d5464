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
from fusee.backends.registry import check_names, label, operators, wrong
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


_DID = "stopped before compiling"
_CPU = "CPUExecutionProvider"
_KNOWN = ("providers", "provider_options", "session_options", "disabled_ops", "name")
_ENTRIES = "session_config_entries"
# Threads of a session that wait for work would take the cores from those of torch.
_SPIN = "session.intra_op.allow_spinning"


@dataclass(frozen=True)
class OnnxOptions:
    """Options of one compiled function: fusee.compile(m, backend="onnxrt", options={...}).

    providers   names of execution providers with their options, in the order of preference
    session     attributes of onnxruntime.SessionOptions, and `session_config_entries`
    disabled    operators left to our compiler
    """

    providers: tuple[tuple[str, Mapping[str, Any]], ...]
    session: Mapping[str, Any]
    disabled: frozenset[OpOverload]
    name: str

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> OnnxOptions:
        """The options that a user gave, or the defaults.

        raises   OptionError for an unknown option, a wrong value, or a provider that this build of
                 onnxruntime has not
        """
        check_names("an option", given, _KNOWN)
        session = _mapping(given, "session_options")
        _check_session(session)
        disabled = operators("disabled_ops", given.get("disabled_ops", ()))
        return cls(_providers(given), session, disabled, label(given))

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
        for name, value in self.session.items():
            if name != _ENTRIES:
                setattr(options, name, _enum(getattr(options, name), value))
        for key, entry in {_SPIN: "0", **self.session.get(_ENTRIES, {})}.items():
            options.add_session_config_entry(key, entry)
        if probe:
            options.log_severity_level = 4
            options.intra_op_num_threads = 1
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.optimized_model_filepath = ""
            options.enable_profiling = False
        if weights:
            options.add_external_initializers(list(weights), list(map(_shared, weights.values())))
        names = [name for name, _ in self.providers]
        return runtime.InferenceSession(
            model, options, providers=names, provider_options=[dict(o) for _, o in self.providers]
        )


def check(given: Mapping[str, Any]) -> None:
    """Refuse wrong options, before anything is compiled.

    raises   OptionError
    """
    OnnxOptions.parse(given)


def _runtime() -> Any:
    return importlib.import_module("onnxruntime")


def _shared(tensor: Tensor) -> Any:
    """An OrtValue in a row-major tensor's memory, which it does not keep alive."""
    make = _runtime().OrtValue
    if tensor.dtype is torch.bfloat16:
        words = tensor.view(torch.uint16).numpy()
        return make.ortvalue_from_numpy_with_onnx_type(words, element_type(tensor.dtype))
    return make.ortvalue_from_numpy(tensor.numpy())


def _providers(given: Mapping[str, Any]) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Names and options, from either of the forms that onnxruntime takes."""
    listed = given.get("providers", [_CPU])
    if isinstance(listed, str) or not isinstance(listed, Sequence) or not listed:
        raise wrong("providers", listed, f"a list of providers, such as [{_CPU!r}]")
    beside = given.get("provider_options", [{}] * len(listed))
    if not isinstance(beside, Sequence) or len(beside) != len(listed):
        raise wrong("provider_options", beside, "a list of dicts, one for each of providers")
    available = _runtime().get_available_providers()
    found = []
    for row, more in zip(listed, beside, strict=True):
        name, own = row if isinstance(row, tuple) and len(row) == 2 else (row, {})
        if not isinstance(name, str) or not isinstance(own, Mapping):
            raise wrong("providers", row, "a name, or a name and its options")
        if not isinstance(more, Mapping):
            raise wrong("provider_options", more, "a dict")
        if name not in available:
            raise OptionError(
                f"onnxruntime has no provider {name!r} here",
                did=_DID,
                remedy=f"available: {', '.join(available)}; other builds have others",
            )
        found.append((name, {**own, **more}))
    return tuple(found)


def _mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise wrong(name, value, "a dict")
    return value


def _check_session(given: Mapping[str, Any]) -> None:
    defaults = _runtime().SessionOptions()
    known = [n for n in dir(defaults) if n[0] != "_" and not callable(getattr(defaults, n))]
    check_names("a session option", given, [*known, _ENTRIES])
    for name, value in given.items():
        if name == _ENTRIES:
            entries = _mapping(given, _ENTRIES).items()
            if not all(isinstance(key, str) and isinstance(x, str) for key, x in entries):
                raise wrong(_ENTRIES, value, "a dict of texts")
            continue
        default = getattr(defaults, name)
        if hasattr(type(default), "__members__"):
            choices = type(default).__members__
            if value not in choices and not isinstance(value, type(default)):
                raise wrong(name, value, f"one of {', '.join(choices)}")
        elif type(value) is not type(default):
            raise wrong(name, value, type(default).__name__)


def _enum(default: Any, value: Any) -> Any:
    return (
        type(default).__members__[value]
        if isinstance(value, str) and hasattr(type(default), "__members__")
        else value
    )
