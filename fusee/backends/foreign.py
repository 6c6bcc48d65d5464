"""Backends of other packages that take whole graphs: they are given the graph as it was captured.

Their packages register with TorchDynamo when they are imported, under the names used here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fusee.backends import dynamo
from fusee.errors import BackendError

__all__ = ["compile_ipex", "compile_tensorrt"]


def compile_tensorrt(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """What torch_tensorrt makes of the graph; it knows the options. raises BackendError"""
    found = _registered("torch_tensorrt", "torch_tensorrt")
    compiled: Callable[..., Any] = found(gm, list(example_inputs), options=dict(options))
    return compiled


def compile_ipex(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """What the Intel extension makes of the graph. raises BackendError"""
    compiled: Callable[..., Any] = _registered("intel_extension_for_pytorch", "ipex")(
        gm, list(example_inputs)
    )
    return compiled


def _registered(package: str, name: str) -> Callable[..., Any]:
    importlib.import_module(package)
    found = dynamo.lookup_backend(name)
    if found is None:
        raise BackendError(
            f"{package} was imported and registered no backend named {name!r}",
            did="stopped before compiling",
            remedy=f"a version of {package} that does",
        )
    return found
