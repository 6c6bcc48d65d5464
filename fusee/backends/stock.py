"""The entry points of stock torch.compile: torch.compile(m, backend="fusee", options={...})."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fusee.backends.native import CompiledGraph, compile_native
from fusee.backends.registry import lookup
from fusee.errors import OptionError

__all__ = ["compile_fx", "compile_openvino"]


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> CompiledGraph:
    """A backend of stock torch.compile, which gives each use its own options.

    raises   OptionError; MissingPackage; MissingFake
    source   docs "Custom Backends" of PyTorch: the group torch_dynamo_backends
    """
    _check_mode("fusee", mode)
    return compile_native(gm, example_inputs, options or {})


def compile_openvino(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """`fusee_openvino`: our backend "openvino", whose plain name is upstream's in stock torch.

    raises   OptionError; MissingPackage; MissingFake
    """
    _check_mode("fusee_openvino", mode)
    made: Callable[..., Any] = lookup("openvino", options)(gm, example_inputs)
    return made


def _check_mode(name: str, mode: str | None) -> None:
    if mode not in (None, "default"):
        raise OptionError(
            f"the backend {name!r} has no modes, but got mode={mode!r}",
            did="stopped before compiling",
            remedy="options={...}; docs/options.md lists them",
        )
