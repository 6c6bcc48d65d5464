"""Adapter to OpenVINO's PyTorch frontend: graphs become models. Tested with openvino 2026.4.1.

Not public there: `openvino.frontend.pytorch.fx_decoder` and `ts_decoder` (since 2023.2).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.backends.openvino_api import element_of, last_line, wrap
from fusee.backends.openvino_bindings import bindings
from fusee.backends.packed import Packed
from fusee.errors import BackendError

__all__ = ["Size", "convert_fx", "convert_traced", "fill"]

# A fixed size, or the bounds of one that calls may choose.
Size = int | tuple[int, int]


@functools.cache
def _frontend() -> Any:
    manager = importlib.import_module("openvino.frontend").FrontEndManager()
    return manager.load_by_framework("pytorch")


def convert_fx(gm: fx.GraphModule, inputs: Sequence[tuple[torch.dtype, Sequence[Size]]]) -> Any:
    """The model of an fx graph of ATen operators. Attributes become constants, without copies.

    raises   BackendError with what the frontend says
    """
    decoder = importlib.import_module("openvino.frontend.pytorch.fx_decoder")
    shapes = [_shape(sizes) for _, sizes in inputs]
    types = [dtype for dtype, _ in inputs]
    return _convert(decoder.TorchFXPythonDecoder(gm, input_shapes=shapes, input_types=types))


def convert_traced(script: Any, inputs: Sequence[tuple[torch.dtype, Sequence[Size]]]) -> Any:
    """The model of a TorchScript module that torch.jit.trace made."""
    decoder = importlib.import_module("openvino.frontend.pytorch.ts_decoder")
    model = _convert(decoder.TorchScriptPythonDecoder(script, skip_freeze=True))
    for port, (dtype, sizes) in zip(model.inputs, inputs, strict=True):
        port.get_node().set_element_type(element_of(dtype))
        port.get_node().set_partial_shape(_shape(sizes))
    model.validate_nodes_and_infer_types()
    return model


def fill(model: Any, weights: Sequence[Packed | Tensor]) -> None:
    """Constants in place of a model's last inputs; packed ones as its plugins keep them packed."""
    ops = importlib.import_module("openvino.opset13")
    for parameter, weight in zip(model.get_parameters()[-len(weights) :], weights):
        if isinstance(weight, Tensor):
            value = _constant(weight)
        else:
            element = element_of(weight.scale.dtype)
            value = ops.convert(_constant(weight.q), element)
            if weight.zero is not None:
                value = ops.subtract(value, ops.convert(_constant(weight.zero), element))
            value = ops.multiply(value, _constant(weight.scale))
            rows = ops.constant([weight.q.shape[0], -1], element_of(torch.int64))
            value = ops.reshape(value, rows, special_zero=False)
            if weight.axis == 0:
                value = ops.transpose(value, ops.constant([1, 0], element_of(torch.int64)))
        parameter.output(0).replace(value.output(0))
        model.remove_parameter(parameter)


def _constant(x: Tensor) -> Any:
    """A constant of its own memory; bytes of four bits as such."""
    ops = importlib.import_module("openvino.opset13")
    x = x.detach().contiguous()
    if x.dtype == torch.uint8 and x.numel() % 2 == 0 and int(x.max()) < 16:
        pairs = x.view(-1, 2)
        halves = (pairs[:, 0] | pairs[:, 1] << 4).numpy()
        ov = bindings()
        return ops.constant(ov.Tensor(halves, list(x.shape), ov.Type.u4), shared_memory=False)
    return ops.constant(wrap(x), shared_memory=False)


def _convert(decoder: Any) -> Any:
    try:
        frontend = _frontend()
        return frontend.convert(frontend.load(decoder))
    except Exception as error:
        raise BackendError(f"it cannot be converted: {last_line(error)}\n{error}") from error


def _shape(sizes: Sequence[Size]) -> Any:
    ov = bindings()
    return ov.PartialShape([n if isinstance(n, int) else ov.Dimension(*n) for n in sizes])
