"""Adapter to the package openvino and its PyTorch frontend: no other module touches them.

Tested with openvino 2026.4.1. Not public there: `openvino.frontend.pytorch.fx_decoder` and
`ts_decoder` (since 2023.2). Importing takes 0.3 s and happens when a function is first compiled.
"""

from __future__ import annotations

import functools
import importlib
import io
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.backends.packed import Packed
from fusee.errors import BackendError

__all__ = [
    "Executable",
    "Size",
    "base_devices",
    "check_config",
    "compile_model",
    "convert_fx",
    "convert_traced",
    "devices",
    "fill",
    "full_name",
    "identity",
    "import_blob",
]

# A fixed size, or the bounds of one that calls may choose.
Size = int | tuple[int, int]


@functools.cache
def _openvino() -> Any:
    return importlib.import_module("openvino")


@functools.cache
def _core() -> Any:
    return _openvino().Core()


@functools.cache
def _frontend() -> Any:
    manager = importlib.import_module("openvino.frontend").FrontEndManager()
    return manager.load_by_framework("pytorch")


def identity(device: str) -> str:
    """What a compiled blob depends on, apart from the model: package and device."""
    names = [f"{one}={full_name(one)}" for one in base_devices(device) or devices()]
    return " ".join([_openvino().__version__, *names])


# ------------------------------------------------------------------------------ devices, config


def full_name(device: str) -> str | None:
    """What a device calls itself; None if it is not there."""
    try:
        return str(_core().get_property(device, "FULL_DEVICE_NAME"))
    except RuntimeError:
        return None


def devices() -> list[str]:
    """The devices that OpenVINO finds, by loading all its plugins: "CPU", "GPU.0", ..."""
    return list(_core().available_devices)


def base_devices(device: str) -> list[str]:
    """The devices that a name such as "MULTI:GPU,CPU" is made of; none for "AUTO"."""
    kind, _, listed = device.partition(":")
    if not listed:
        return [] if kind in ("AUTO", "MULTI", "HETERO") else [kind]
    # "AUTO:-GPU" is all devices but one
    return [name.split("(")[0] for name in listed.split(",") if not name.startswith("-")]


def check_config(device: str, config: Mapping[str, object]) -> str | None:
    """What OpenVINO finds wrong with a configuration, or None."""
    key = device, repr(sorted(config.items()))
    if key not in _checked:
        ov = _openvino()
        ops = importlib.import_module("openvino.opset13")
        x = ops.parameter([1], ov.Type.f32)
        try:
            _core().compile_model(ov.Model([ops.relu(x)], [x], "probe"), device, dict(config))
            _checked[key] = None
        except (RuntimeError, TypeError) as error:
            _checked[key] = last_line(error)
    return _checked[key]


_checked: dict[tuple[str, str], str | None] = {}


def last_line(error: BaseException) -> str:
    """OpenVINO's reason: what follows the places in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith("Exception from ")]
    return (said or lines or [type(error).__name__])[-1]


# ------------------------------------------------------------------------------ conversion


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
        port.get_node().set_element_type(_element(dtype))
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
            element = _element(weight.scale.dtype)
            value = ops.convert(_constant(weight.q), element)
            if weight.zero is not None:
                value = ops.subtract(value, ops.convert(_constant(weight.zero), element))
            value = ops.multiply(value, _constant(weight.scale))
            rows = ops.constant([weight.q.shape[0], -1], _element(torch.int64))
            value = ops.reshape(value, rows, special_zero=False)
            if weight.axis == 0:
                value = ops.transpose(value, ops.constant([1, 0], _element(torch.int64)))
        parameter.output(0).replace(value.output(0))
        model.remove_parameter(parameter)


def _constant(x: Tensor) -> Any:
    """A constant of its own memory; bytes of four bits as such."""
    ops = importlib.import_module("openvino.opset13")
    x = x.detach().contiguous()
    if x.dtype == torch.uint8 and x.numel() % 2 == 0 and int(x.max()) < 16:
        pairs = x.view(-1, 2)
        halves = (pairs[:, 0] | pairs[:, 1] << 4).numpy()
        ov = _openvino()
        return ops.constant(ov.Tensor(halves, list(x.shape), ov.Type.u4), shared_memory=False)
    return ops.constant(_wrap(x), shared_memory=False)


def _convert(decoder: Any) -> Any:
    try:
        frontend = _frontend()
        return frontend.convert(frontend.load(decoder))
    except Exception as error:
        raise BackendError(f"it cannot be converted: {last_line(error)}\n{error}") from error


def _shape(sizes: Sequence[Size]) -> Any:
    ov = _openvino()
    return ov.PartialShape([n if isinstance(n, int) else ov.Dimension(*n) for n in sizes])


def _element(dtype: torch.dtype) -> Any:
    return getattr(_openvino().Type, _TYPES[dtype])


_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "boolean",
}


# ------------------------------------------------------------------------------ execution


class Executable:
    """A compiled model and its infer requests: one for each call that runs at the same time."""

    def __init__(
        self,
        compiled: Any,
        outputs: Sequence[tuple[torch.dtype, int]],
        memory: Tensor | None = None,
    ) -> None:
        """outputs   dtype and rank of each, which are checked; memory   what the model uses

        raises   BackendError
        """
        self.compiled, self.memory = compiled, memory
        self._free: list[Any] = []
        self._lock = threading.Lock()
        found = [(port.element_type, port.partial_shape.rank) for port in compiled.outputs]
        if len(found) != len(outputs):
            raise BackendError(f"it has {len(found)} results instead of {len(outputs)}")
        for k, ((element, rank), (dtype, wanted)) in enumerate(zip(found, outputs)):
            if element != _element(dtype) or (rank.is_static and rank.get_length() != wanted):
                raise BackendError(f"result {k} became {element} of rank {rank}, not {dtype}")

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Run with row-major tensors, whose memory is used as it is.

        raises   BackendError with what OpenVINO says
        """
        with self._lock:
            request = self._free.pop() if self._free else None
        if request is None:
            request = self.compiled.create_infer_request()
        inputs = [x.detach().contiguous() for x in inputs]  # alive until the request is done
        try:
            for k, x in enumerate(inputs):
                request.set_input_tensor(k, _wrap(x))
            for k, x in enumerate(outputs):
                request.set_output_tensor(k, _wrap(x))
            request.start_async()
            request.wait()
        except RuntimeError as error:
            raise BackendError(f"{last_line(error)}\n{error}") from error
        with self._lock:
            self._free.append(request)

    def blob(self) -> bytes:
        """The compiled model, for `import_blob`. raises BackendError where devices have none"""
        try:
            stream: io.BytesIO = self.compiled.export_model()
        except RuntimeError as error:
            raise BackendError(f"compiled models cannot be kept: {last_line(error)}") from error
        return stream.getvalue()

    def primitives(self) -> dict[str, int]:
        """How often each kind of executed primitive runs: "FullyConnected brgemm_avx2 f32" -> 3."""
        found: Counter[str] = Counter()
        for op in self.compiled.get_runtime_model().get_ordered_ops():
            info = op.get_rt_info()
            row = [str(info[key].value) for key in _INFO if key in info]
            found[" ".join(row)] += 1
        return dict(found)


_INFO = ("layerType", "primitiveType", "runtimePrecision")


def compile_model(
    model: Any,
    device: str,
    config: Mapping[str, object],
    outputs: Sequence[tuple[torch.dtype, int]],
) -> Executable:
    """Compile for a device, results in the dtypes of `outputs`. raises BackendError"""
    ov = _openvino()
    try:
        results = []
        ops = importlib.import_module("openvino.opset13")
        for port, (dtype, _) in zip(model.outputs, outputs, strict=True):
            value = port.get_node().input_value(0)
            element = _element(dtype)
            same = value.element_type == element
            results.append(value if same else ops.convert(value, element).output(0))
        model = ov.Model(results, model.get_parameters(), "region")
        compiled = _core().compile_model(model, device, dict(config))
    except RuntimeError as error:
        raise BackendError(f"it cannot be compiled: {last_line(error)}\n{error}") from error
    return Executable(compiled, outputs)


def import_blob(blob: Tensor, device: str, config: Mapping[str, object]) -> tuple[Any, Tensor]:
    """A model of the bytes that `blob` gave, and its memory: they. raises BackendError"""
    try:
        return _core().import_model(_wrap(blob), device, dict(config)), blob
    except (RuntimeError, TypeError) as error:
        raise BackendError(f"a cached model cannot be read: {last_line(error)}") from error


def _wrap(x: Tensor) -> Any:
    """An OpenVINO tensor in the same memory, which infer requests do not keep alive."""
    if x.dtype == torch.bfloat16:  # numpy has none
        return _openvino().Tensor(x.view(torch.int16).numpy(), list(x.shape), _element(x.dtype))
    return _openvino().Tensor(x.numpy(), shared_memory=True)
