"""Options of the backends openvino and openvino_ts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from fusee.aten.canonicalize import taken_apart
from fusee.aten.torch_api import OpOverload, is_composite
from fusee.backends.openvino import api
from fusee.backends.registry import EngineOptions, operators
from fusee.config import knob
from fusee.errors import FuseeWarning, OptionError, warn


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
