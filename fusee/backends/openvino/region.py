"""One region in OpenVINO as it is called, and its models on disk: all that needs no graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusee.aten.canonicalize import taken_apart
from fusee.aten.torch_api import OpOverload, is_composite
from fusee.backends import openvino as api
from fusee.backends.openvino import Executable
from fusee.backends.regions import Bound, CompiledRegion, Declined, Followed
from fusee.backends.registry import EngineOptions, operators
from fusee.backends.report import CompiledGraph
from fusee.backends.resume import Ahead, Resuming, find, name_of
from fusee.config import knob
from fusee.errors import BackendError, FuseeWarning, OptionError, warn
from fusee.runtime.cache import Sidecar, content_key
from fusee.source import define

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
        _check_device(self.device)
        problem = api.check_config(self.device, self.properties) if self.config else None
        if problem is not None:
            raise OptionError(
                f"config: OpenVINO refuses {dict(self.config)!r} on {self.device}: {problem}",
                remedy="docs.openvino.ai lists the properties of each device",
            )

    @property
    def properties(self) -> dict[str, Any]:
        """`config` on top of our defaults, which follow torch's number of threads."""
        ours: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if self.device == "CPU":  # which takes these: to ask costs as much as a small model
            ours["INFERENCE_NUM_THREADS"] = torch.get_num_threads()
            ours["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # else inputs are rounded to 8 bits
        elif api.check_config(self.device, ours) is not None:
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


def _check_device(device: str) -> None:
    if device == "CPU" and api.full_name(device) is not None:
        return
    there = api.devices()
    if (kind := device.rstrip(":")) in ("MULTI", "HETERO"):
        raise OptionError(
            f"{device!r} names no devices", remedy=f"'{kind}:{','.join(there)}', for instance"
        )
    kinds = {name.partition(".")[0] for name in there}
    for name in api.base_devices(device):
        if name not in there and name not in kinds:
            raise OptionError(
                f"the device {name!r} is not there",
                remedy=f"devices here: {', '.join([*there, 'AUTO'])}",
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
        device = api.identity(options.device)
        return [options.backend, device, torch.__version__, options.device, str(config)]

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
        return api.import_blob(blob, options.device, options.properties)

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
    recompile: Callable[[Sequence[Any]], Any],
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
    return how.resume(sidecar, name_of(models.kept_for, examples), examples, recompile)
