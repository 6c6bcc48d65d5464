"""OpenVINO as an engine: claims of operators, conversion to its models, options, the disk cache.

Here is the adapter to its runtime: devices, compiled models, calls. Tested with openvino 2026.4.1.
It gets by with OpenVINO's extension module; the package around that is for those who convert
(`graph.py`). No other module touches either.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
from torch import Tensor

from fusee.errors import BackendError

# ---------------------------------------------------------------------------- openvino bindings
# OpenVINO's extension module, imported without the Python package around it.
#
# Whoever runs a model needs no more. The package itself imports all operator sets, a converter and
# telemetry, for several times as long: it is left to whoever converts a model.
#
# Tested with openvino 2026.4.1, whose extension is `openvino._pyopenvino` (since 2023.2). Where the
# extension cannot be had like this, the package is imported.

_PACKAGE = "openvino"
_EXTENSION = "openvino._pyopenvino"
_lock = threading.Lock()


@functools.cache
def bindings() -> Any:
    """The extension module. raises ImportError if there is none"""
    with _lock:
        found = None if _PACKAGE in sys.modules else _alone()
    return importlib.import_module(_EXTENSION) if found is None else found


def _alone() -> Any:
    if _EXTENSION in sys.modules:
        return sys.modules[_EXTENSION]
    package = importlib.util.find_spec(_PACKAGE)
    if os.name == "nt" or package is None or package.submodule_search_locations is None:
        return None  # on Windows the package says where its libraries are
    spec = PathFinder.find_spec(_EXTENSION, list(package.submodule_search_locations))
    if spec is None or spec.loader is None or _load is None:
        return None
    sys.meta_path.insert(0, _Attach())
    try:
        return _load(spec)
    except ImportError:
        return None


# As an import does, with the lock of that name: another thread may import the package meanwhile.
# Not public: tested with Python 3.11 to 3.13; where it is gone, the package is imported.
_load: Callable[[ModuleSpec], Any] | None
_load = getattr(importlib.import_module("importlib._bootstrap"), "_load", None)


class _Attach:
    """Makes the extension an attribute of its package once that is imported, as Python does.

    It stays: whoever takes a finder out while others look through the list makes them miss one.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Finds nothing. The package's own imports come here while it is made."""
        package, extension = sys.modules.get(_PACKAGE), sys.modules.get(_EXTENSION)
        if package is not None and extension is not None:
            vars(package).setdefault("_pyopenvino", extension)


# ---------------------------------------------------------------------------- openvino api


@functools.cache
def _core() -> Any:
    return bindings().Core()


def identity(device: str) -> str:
    """What a compiled blob depends on, apart from the model: package and device."""
    names = [f"{one}={full_name(one)}" for one in base_devices(device) or devices()]
    return " ".join([bindings().get_version(), *names])


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
        ov = bindings()
        x = ov.op.Parameter(ov.Type.f32, ov.PartialShape([1]))
        try:
            _core().compile_model(ov.Model([x.output(0)], [x], "probe"), device, dict(config))
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


# ------------------------------------------------------------------------------ execution


def element_of(dtype: torch.dtype) -> Any:
    return getattr(bindings().Type, _TYPES[dtype])


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
            if element != element_of(dtype) or (rank.is_static and rank.get_length() != wanted):
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
                request.set_input_tensor(k, wrap(x))
            for k, x in enumerate(outputs):
                request.set_output_tensor(k, wrap(x))
            request.start_async({}, None)
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
    ov = bindings()
    try:
        results = []
        ops = importlib.import_module("openvino.opset13")
        for port, (dtype, _) in zip(model.outputs, outputs, strict=True):
            value = port.get_node().input_value(0)
            element = element_of(dtype)
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
        return _core().import_model(wrap(blob), device, dict(config)), blob
    except (RuntimeError, TypeError) as error:
        raise BackendError(f"a cached model cannot be read: {last_line(error)}") from error


def wrap(x: Tensor) -> Any:
    """An OpenVINO tensor in the same memory, which infer requests do not keep alive."""
    if x.dtype == torch.bfloat16:  # numpy has none
        return bindings().Tensor(x.view(torch.int16).numpy(), list(x.shape), element_of(x.dtype))
    return bindings().Tensor(x.numpy(), shared_memory=True)
