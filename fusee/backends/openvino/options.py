"""Options of the backends openvino and openvino_ts, as OpenVINO documents them, but checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusee.aten.canonicalize import taken_apart
from fusee.aten.torch_api import OpOverload, is_composite
from fusee.backends.openvino import api
from fusee.backends.registry import check_names, label, operators, wrong
from fusee.errors import FuseeWarning, OptionError, SettingError, warn

_DEVICE = "OPENVINO_TORCH_BACKEND_DEVICE"
_CACHING = "OPENVINO_TORCH_MODEL_CACHING"
_CACHE_DIR = "OPENVINO_TORCH_CACHE_DIR"


@dataclass(frozen=True)
class OpenVINOOptions:
    """The options of one compiled function.

    device          CPU, GPU, GPU.0, NPU, AUTO, MULTI:GPU,CPU, HETERO:GPU,CPU, ...
    aot_autograd    training works, with the forward pass in OpenVINO
    model_caching   keep compiled models on disk, in the folder `cache_dir`
    decompositions  operators that are taken apart even if OpenVINO has them
    disabled_ops    operators that PyTorch runs
    config          properties of OpenVINO, by name
    name            what reports call the function

    source   docs.openvino.ai/torchcompile
    """

    device: str = "CPU"
    aot_autograd: bool = False
    model_caching: bool = False
    cache_dir: Path = Path("cache")
    decompositions: frozenset[OpOverload] = frozenset()
    disabled_ops: frozenset[OpOverload] = frozenset()
    config: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> OpenVINOOptions:
        """Options on top of OPENVINO_TORCH_* variables. raises OptionError, SettingError"""
        check_names("an option", given, list(_READ))
        values = _from_environment()
        values.update({name: _READ[name](name, value) for name, value in given.items()})
        found = cls(**values)
        _check_device(found.device)
        return _with_config(found)


def check(given: Mapping[str, object]) -> None:
    """Refuse wrong options. raises OptionError, SettingError"""
    OpenVINOOptions.parse(given)


def check_ts(given: Mapping[str, object]) -> None:
    """As `check`, with a note that the backend is deprecated."""
    check(given)
    warn(
        FuseeWarning,
        "the backend 'openvino_ts' goes through TorchScript, which torch gives up",
        did="compiles with it nevertheless",
        remedy="backend='openvino' takes the same options",
    )


def is_caching(given: Mapping[str, object]) -> bool:
    """Whether compiled models are kept for the next process."""
    values = {**_from_environment(), **given}
    return values.get("model_caching", False) is True


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    if device := os.environ.get(_DEVICE):
        values["device"] = device
    if (caching := os.environ.get(_CACHING)) is not None:
        if caching.strip().lower() not in ("", "0", "1", "true", "false", "on", "off", "yes", "no"):
            raise SettingError(
                f"{_CACHING}={caching!r} is neither true nor false",
                did="stopped before compiling",
                remedy="unset it, or set it to True",
            )
        values["model_caching"] = caching.strip().lower() in ("1", "true", "on", "yes")
    if folder := os.environ.get(_CACHE_DIR):
        values["cache_dir"] = Path(folder)
    return values


# ------------------------------------------------------------------------------ reading

_REMEDY = "docs/openvino.md describes each option"


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _takes(name, "a device name such as 'CPU'", value)
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _takes(name, "True or False", value)
    return value


def _folder(name: str, value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise _takes(name, "a path", value)
    return Path(os.fspath(value))


def _operators(name: str, value: object) -> frozenset[OpOverload]:
    return operators(name, value, _REMEDY)


def _taken_apart(name: str, value: object) -> frozenset[OpOverload]:
    """Of an operator's overloads those that have a decomposition; one must."""
    wanted = _operators(name, value)
    packets = {op.overloadpacket for op in wanted if _is_composed(op)}
    for op in sorted(wanted, key=str):
        if op.overloadpacket not in packets:
            raise _wrong(f"{name}: torch has none for {op}", "leave it out")
    return frozenset(filter(_is_composed, wanted))


def _is_composed(op: OpOverload) -> bool:
    return taken_apart(op) is not None or is_composite(op)


def _properties(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _takes(name, "a dict of OpenVINO properties", value)
    return dict(value)


_READ: dict[str, Callable[[str, object], Any]] = {
    "device": _text,
    "aot_autograd": _flag,
    "model_caching": _flag,
    "cache_dir": _folder,
    "decompositions": _taken_apart,
    "disabled_ops": _operators,
    "config": _properties,
    "name": lambda name, value: label({name: value}),
}


# ------------------------------------------------------------------------------ what OpenVINO has


def _check_device(device: str) -> None:
    if device == "CPU" and api.full_name(device) is not None:
        return
    there = api.devices()
    if device.rstrip(":") in ("MULTI", "HETERO"):
        raise _wrong(
            f"{device!r} names no devices",
            f"'{device.rstrip(':')}:{','.join(there)}', for instance",
        )
    kinds = {name.partition(".")[0] for name in there}
    for name in api.base_devices(device):
        if name not in there and name not in kinds:
            listed = ", ".join([*there, "AUTO"])
            raise _wrong(f"the device {name!r} is not there", f"devices here: {listed}")


def _with_config(options: OpenVINOOptions) -> OpenVINOOptions:
    """With the defaults of ours, once OpenVINO has accepted the whole."""
    config: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
    if options.device == "CPU":  # which takes these: to ask costs as much as a small model
        config["INFERENCE_NUM_THREADS"] = torch.get_num_threads()
        config["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # else inputs are rounded to 8 bits
    elif api.check_config(options.device, config) is not None:
        config = {}  # a device without float32, such as an NPU
    config.update(options.config)
    problem = api.check_config(options.device, config) if options.config else None
    if problem is not None:
        raise _wrong(
            f"config: OpenVINO refuses {dict(options.config)!r} on {options.device}: {problem}",
            "docs.openvino.ai lists the properties of each device",
        )
    return OpenVINOOptions(**{**vars(options), "config": config})


def _takes(name: str, what: str, value: object) -> OptionError:
    return wrong(name, value, what, _REMEDY)


def _wrong(what: str, remedy: str) -> OptionError:
    return OptionError(what, did="stopped before compiling", remedy=remedy)
