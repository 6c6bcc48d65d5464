"""Adapter to torch's ONNX exporter: an fx graph of ATen calls as an ONNX model.

torch.onnx.export takes a program, which it captures and decomposes once more, in seconds. What is
used here is the exporter's own translation of a graph that is decomposed already, and its registry
of ONNX functions by ATen operator. Tested with torch 2.11 and 2.13, onnxscript 0.7; private are
    torch.onnx._internal.exporter    _core._translate_fx_graph, _registration.ONNXRegistry,
                                     _registration.OnnxDecompMeta, _ir_passes.add_opset_imports,
                                     _torchlib._torchlib_registry.get_torchlib_ops
    onnxscript._framework_apis       get_torchlib_ops, made for the exporter

All of it is imported when the first graph is translated: that takes a second.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.torch_api import OpOverload, op_name

__all__ = ["element_type", "is_translated", "model_of"]

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
