"""Options of the backend "onnxrt", under ONNX Runtime's own names, and sessions made with them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusee.aten.torch_api import OpOverload
from fusee.backends.engine_options import check_names, label, operators, wrong
from fusee.backends.onnx_api import element_type
from fusee.errors import OptionError

__all__ = ["OnnxOptions", "check"]

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
