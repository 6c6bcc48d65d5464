"""The entry point of stock torch.compile: torch.compile(m, backend="fusee", options={...})."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fusee.backends.native import CompiledGraph, compile_native
from fusee.errors import OptionError

__all__ = ["compile_fx"]


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
    if mode not in (None, "default"):
        raise OptionError(
            f"the backend 'fusee' has no modes, but got mode={mode!r}",
            did="stopped before compiling",
            remedy="options={...}; docs/options.md lists them",
        )
    return compile_native(gm, example_inputs, options or {})
