"""OpenVINO as it runs: devices, compiled models, calls; options, regions, models kept on disk.

That is all that needs no graph. It gets by with OpenVINO's extension module; the package around it
is for those who convert (`graph.py`). No other module touches either. `engine.py` has what OpenVINO
claims, and how it compiles. Tested with openvino 2026.4.1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from fusee.aten.canonicalize import taken_apart
from fusee.aten.torch_api import OpOverload, is_composite
from fusee.backends.regions import Bound, CompiledRegion, Declined, Followed, Pool
from fusee.backends.registry import EngineOptions, operators
from fusee.backends.report import CompiledGraph
from fusee.backends.resume import Ahead, Resuming, find, name_on_disk
from fusee.config import knob
from fusee.errors import BackendError, FuseeWarning, OptionError, choices, warn
from fusee.runtime import when_imported
from fusee.runtime.cache import Sidecar, Unread, content_key
from fusee.source import define

# ---------------------------------------------------------------------------- openvino bindings
# OpenVINO's extension module, imported without the Python package around it.
#
# Whoever runs a model needs no more. The package itself imports all operator sets, a converter and
# telemetry, for several times as long: it is left to whoever converts a model.
#
# Tested with openvino 2026.4.1, whose extension is `openvino._pyopenvino` (since 2023.2). Where the
# extension cannot be had like this, the package is imported.

_PACKAGE = "openvino"
_NAME = "_pyopenvino"
_EXTENSION = f"{_PACKAGE}.{_NAME}"
_lock = threading.Lock()


@functools.cache
def bindings() -> Any:
    """The extension module. raises ImportError if there is none"""
    with _lock:
        is_there = _PACKAGE in sys.modules or _EXTENSION in sys.modules
        package = None if is_there else importlib.util.find_spec(_PACKAGE)
        # on Windows the package says where its libraries are
        folders = None if package is None or os.name == "nt" else package.submodule_search_locations
        spec = None if folders is None else PathFinder.find_spec(_EXTENSION, list(folders))
        if spec is not None and spec.loader is not None and _load is not None:
            with contextlib.suppress(ImportError):
                extension = _load(spec)
                # as Python does: an attribute of its package, once that is imported
                when_imported(_PACKAGE, lambda made: vars(made).setdefault(_NAME, extension))
                return extension
    return importlib.import_module(_EXTENSION)


# As an import does, with the lock of that name: another thread may import the package meanwhile.
# Not public: tested with Python 3.11 to 3.13; where it is gone, the package is imported.
_load: Callable[[ModuleSpec], Any] | None
_load = getattr(importlib.import_module("importlib._bootstrap"), "_load", None)


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
    return getattr(bindings().Type, TYPES[dtype])


TYPES = {
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
        self.requests: Pool[Any] = Pool(compiled.create_infer_request)
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
        request = self.requests.take()
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
        self.requests.give(request)

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
            found[" ".join([str(info[key].value) for key in _INFO if key in info])] += 1
        return dict(found)


_INFO = ("layerType", "primitiveType", "runtimePrecision")


def _begin() -> None:
    """A model is made. raises BackendError in a child of a process that has made some

    OpenVINO gives it executors that its parent had, and waits for their threads.
    """
    if not _processes:
        _processes.append(os.getpid())
    if _processes[0] != os.getpid():
        raise BackendError("its threads are not in a forked process")


# The first process that made a model.
_processes: list[int] = []


def compile_model(
    model: Any,
    device: str,
    config: Mapping[str, object],
    outputs: Sequence[tuple[torch.dtype, int]],
) -> Executable:
    """Compile for a device, results in the dtypes of `outputs`. raises BackendError"""
    _begin()
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
        # OpenVINO 2026.4 fuses attention wrongly where heads are tokens: its kernel takes a
        # Transpose of two axes of one size for none
        by_kind: dict[str, list[Any]] = {}
        for op in model.get_ops() if device == "CPU" else ():
            by_kind.setdefault(op.get_type_name(), []).append(op)
        is_mistaken = _ATTENTION & {*by_kind} and any(map(_is_square, by_kind.get("Transpose", ())))
        wrong = {_FUSED: "DISABLE"} if is_mistaken else {}
        compiled = _core().compile_model(model, device, {**wrong, **config})
    except RuntimeError as error:
        raise BackendError(f"it cannot be compiled: {last_line(error)}\n{error}") from error
    return Executable(compiled, outputs)


# OpenVINO's kernels of several operations: fused elementwise ones, and attention.
_FUSED = "SNIPPETS_MODE"


_ATTENTION = {"Softmax", "ScaledDotProductAttention"}


def _is_square(transpose: Any) -> bool:
    """Whether it only moves axes of one size, and the last only if that is 1 (a crash)."""
    axes, sizes = transpose.input_value(1).get_node(), transpose.get_input_partial_shape(0)
    if axes.get_type_name() != "Constant":
        return False
    order = axes.get_data().tolist()
    moved = [sizes[at] for k, at in enumerate(order) if k != at]
    stays = order[-1:] == [len(order) - 1]
    is_square = bool(moved) and all(n.is_static and n == moved[0] for n in moved)
    return is_square and (stays or moved[0] == 1)


def import_blob(blob: Tensor, device: str, config: Mapping[str, object]) -> tuple[Any, Tensor]:
    """A model of the bytes that `blob` gave, and its memory: they. raises BackendError"""
    _begin()
    try:
        return _core().import_model(wrap(blob), device, dict(config)), blob
    except (RuntimeError, TypeError) as error:
        raise BackendError(f"a cached model cannot be read: {last_line(error)}") from error


def wrap(x: Tensor) -> Any:
    """An OpenVINO tensor in the same memory, which infer requests do not keep alive."""
    memory = _Bytes()  # not x.numpy(): no program could resize `x` after that
    memory.__array_interface__ = {
        "data": (x.data_ptr(), False), "shape": (x.nbytes,), "typestr": "|u1", "version": 3
    }  # fmt: skip
    return bindings().Tensor(numpy.asarray(memory), list(x.shape), element_of(x.dtype))


class _Bytes:
    """What numpy takes for an array: memory at an address."""

    __slots__ = ("__array_interface__",)
    __array_interface__: dict[str, object]


# ---------------------------------------------------------------------------- options
# Options of the backends openvino and openvino_ts.


def _taken_apart(wanted: frozenset[OpOverload]) -> frozenset[OpOverload]:
    """Of an operator's overloads those that have a decomposition; one must."""
    composed = frozenset(op for op in wanted if taken_apart(op) is not None or is_composite(op))
    packets = {op.overloadpacket for op in composed}
    for op in sorted(wanted, key=str):
        if op.overloadpacket not in packets:
            raise OptionError(f"decompositions: torch has none for {op}", remedy="leave it out")
    return composed


@dataclass(frozen=True)
class OpenVINOOptions(EngineOptions):
    """The options of one compiled function, as OpenVINO documents them, but checked.

    source   docs.openvino.ai/torchcompile
    """

    device: str = knob(
        "CPU",
        "CPU, GPU, GPU.0, NPU, AUTO, MULTI:GPU,CPU, HETERO:GPU,CPU, ...",
        env="OPENVINO_TORCH_BACKEND_DEVICE",
        takes="a device name such as 'CPU'",
    )
    aot_autograd: bool = knob(False, "training works, with the forward pass in OpenVINO")
    model_caching: bool = knob(
        False,
        "keep compiled models on disk, in the folder `cache_dir`",
        env="OPENVINO_TORCH_MODEL_CACHING",
    )
    cache_dir: Path = knob(Path("cache"), "see `model_caching`", env="OPENVINO_TORCH_CACHE_DIR")
    decompositions: frozenset[OpOverload] = operators(
        "operators that are taken apart even if OpenVINO has them", _taken_apart
    )
    config: Mapping[str, Any] = knob(
        dict, "properties of OpenVINO, by name", takes="a dict of OpenVINO properties"
    )
    backend: ClassVar[str] = "openvino"

    def __post_init__(self) -> None:
        """raises   OptionError for what OpenVINO does not have here"""
        if self.device != "CPU" or full_name("CPU") is None:
            there = devices()
            if (kind := self.device.rstrip(":")) in ("MULTI", "HETERO"):
                example = f"'{kind}:{','.join(there)}', for instance"
                raise OptionError(f"{self.device!r} names no devices", remedy=example)
            kinds = {name.partition(".")[0] for name in there}
            for name in base_devices(self.device):
                if name not in there and name not in kinds:
                    raise OptionError(
                        f"the device {name!r} is not there",
                        remedy=choices(name, [*there, "AUTO"], "devices here"),
                    )
        is_plain = self.device == "CPU" and not self.config
        problem = None if is_plain else check_config(self.device, self.properties)
        if problem is not None and not self.config:
            raise OptionError(
                f"OpenVINO refuses the device {self.device!r}: {problem}",
                remedy=choices(self.device, [*devices(), "AUTO"], "devices here"),
            )
        if problem is not None:
            raise OptionError(
                f"config: OpenVINO refuses {dict(self.config)!r} on {self.device}: {problem}",
                remedy="docs.openvino.ai lists the properties of each device",
            )

    @property
    def properties(self) -> dict[str, Any]:
        """`config` on top of our defaults, which follow torch's number of threads."""
        ours: dict[str, Any] = {}
        if "EXECUTION_MODE_HINT" not in self.config:  # which chooses a precision
            ours["INFERENCE_PRECISION_HINT"] = "f32"
        if self.device == "CPU":  # which takes these: to ask costs as much as a small model
            ours["INFERENCE_NUM_THREADS"] = torch.get_num_threads()
            ours["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # else inputs are rounded to 8 bits
        elif check_config(self.device, ours) is not None:
            ours = {}  # a device without float32, such as an NPU
        return ours | dict(self.config)


class TorchScriptOptions(OpenVINOOptions):
    """The same, for who goes by way of TorchScript."""

    backend: ClassVar[str] = "openvino_ts"

    def __post_init__(self) -> None:
        super().__post_init__()
        warn(
            FuseeWarning,
            "the backend 'openvino_ts' goes through TorchScript, which torch gives up",
            did="compiles with it nevertheless",
            remedy="backend='openvino' takes the same options",
        )


# ---------------------------------------------------------------------------- region


@dataclass(frozen=True)
class RegionSpec:
    """What calls of a region need besides its compiled model. Can be pickled.

    graph      digest of the region's graph and constants
    fixed      positions of the inputs that are constants of the model
    bounds     what integer buffers among them were taken for
    outputs    dtype and rank of each of the model's results
    places     which of these each result of the region is, ~k for a copy of input k; None: it has
               the same
    prepare    source of `prepare(inputs)`: memory for the model's results, once a call's inputs are
               looked at. It may name `check`, `empty`, `torch` and `Declined`
    times      how often it is compiled for new values of its parameters before they become inputs;
               None: they never do
    """

    graph: str
    fixed: tuple[int, ...]
    bounds: tuple[Bound, ...]
    outputs: tuple[tuple[torch.dtype, int], ...]
    places: tuple[int, ...] | None
    prepare: str
    times: int | None


class Models:
    """The compiled models of one function, on disk where the options say so."""

    def __init__(self, options: OpenVINOOptions) -> None:
        self.options = options
        self.ahead = read_ahead(options)

    @property
    def identity(self) -> list[str]:
        """What all of them depend on: versions, device, configuration."""
        options = self.options
        config = sorted((name, str(value)) for name, value in options.properties.items())
        device = identity(options.device)
        given = options.backend, device, torch.__version__, options.device, str(config)
        return [*given, _FUSED]  # models from before it was ever switched off are not

    @property
    def kept_for(self) -> list[str]:
        """What a split graph depends on besides; nothing if none are kept."""
        if self.ahead is None:
            return []
        options = self.options
        ops = [sorted(map(str, x)) for x in (options.decompositions, options.disabled_ops)]
        return [*self.identity, str(ops), str(options.aot_autograd)]

    def key(self, spec: RegionSpec, weights: Mapping[int, Tensor]) -> str | None:
        """By what the model with these weights is found; None if none are kept."""
        if self.ahead is None:
            return None
        return content_key(*self.identity, spec.graph, str(sorted(weights)), *weights.values())

    def find(self, key: str | None, spec: RegionSpec) -> Executable | None:
        """The model on disk, if there is one that can be used."""
        if self.ahead is None or key is None:
            return None
        try:
            read = self.ahead.get(key)
            if read is None:
                return None
            compiled, memory = read
            found = Executable(compiled, spec.outputs, memory)
        except BackendError as error:
            self.ahead.blobs.refuse(key, error.what)
            return None
        self.ahead.note(key)
        return found

    def keep(self, key: str | None, executable: Executable) -> None:
        """Write a model; where that cannot be, it is told."""
        if self.ahead is None or key is None:
            return
        try:
            self.ahead.blobs.write(key, executable.blob())
            self.ahead.note(key)
        except BackendError as error:
            self.ahead.blobs.tell("is of no use", f"{self.options.device}: {error.what}")


def read_ahead(options: OpenVINOOptions) -> Ahead | None:
    """Models on disk, which are being read from the first call on.

    Not earlier: a process that only forks must have none, since OpenVINO's threads do not survive.
    """
    if not options.model_caching:
        return None

    def load(blob: Tensor) -> Any:
        return import_blob(blob, options.device, options.properties)

    return find(options.cache_dir, options.device, options.properties, load)


class RegionCall:
    """One compiled region. May be called from several threads."""

    def __init__(
        self,
        spec: RegionSpec,
        examples: tuple[Any, ...],
        make: Callable[[Mapping[int, Tensor]], Executable],
    ) -> None:
        """examples   the first call's inputs; make   what runs the region with these constants"""
        self.spec = spec
        self.made = Followed(spec.fixed, spec.bounds, examples, make, spec.times)
        names = {"check": _check, "empty": torch.empty, "torch": torch, "Declined": Declined}
        self.prepare = define(spec.prepare, "prepare", "region", names)

    def primitives(self) -> dict[str, int]:
        """What OpenVINO executes: kinds of primitives, and how often each runs."""
        return self.made.latest.executable.primitives()

    def __call__(self, inputs: tuple[Any, ...]) -> Sequence[Tensor]:
        made = self.made.current(inputs)
        outputs: list[Tensor] = self.prepare(inputs)
        taken = [x for k, x in enumerate(inputs) if k not in made.weights]
        made.executable([x if isinstance(x, Tensor) else torch.tensor(x) for x in taken], outputs)
        if self.spec.places is None:
            return outputs
        given_out: set[int] = set()
        results = []
        for k in self.spec.places:
            if k < 0:
                results.append(inputs[~k].detach().clone(memory_format=torch.contiguous_format))
                continue
            results.append(outputs[k].clone() if k in given_out else outputs[k])
            given_out.add(k)
        return results


def _check(index: Tensor, low: int, size: int) -> None:
    """raises  Declined if an index is out of range: our compiler raises what eager does"""
    if index.numel():
        least, greatest = torch.aminmax(index)
        if least < low or greatest >= size:
            raise Declined


def resume(
    options: OpenVINOOptions,
    sidecar: Sidecar,
    examples: Sequence[Any],
    graph: Unread,
) -> CompiledGraph | None:
    """What another process kept of a graph, as `Backend.resume`."""
    models = Models(options)
    if models.ahead is None:
        return None

    def make(spec: RegionSpec, weights: Mapping[int, Tensor]) -> Executable:
        found = models.find(models.key(spec, weights), spec)
        if found is None:
            raise BackendError("there is no model of these weights on disk")
        return found

    def take_up(spec: RegionSpec, given: tuple[Any, ...]) -> CompiledRegion:
        call = RegionCall(spec, given, functools.partial(make, spec))
        return CompiledRegion(call, spec, call.primitives)

    how = Resuming(options.name or options.backend, options.backend, options.device, take_up)
    return how.resume(sidecar, name_on_disk(models.kept_for, examples), examples, graph.recompile)
