"""The entry points of stock torch.compile: torch.compile(m, backend="fusee", options={...}).

A mode of torch.compile's is taken, and changes nothing: ours have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fusee.backends.native import compile_native
from fusee.backends.registry import check_mode, lookup
from fusee.backends.report import CompiledGraph

__all__ = ["compile_fx", "compile_onnxrt", "compile_openvino", "compile_openvino_ts"]


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
    check_mode(mode)
    return compile_native(gm, example_inputs, options or {})


def _named(name: str) -> Callable[..., Callable[..., Any]]:
    """A backend of ours, for stock torch, where its own name is another one's or nobody's."""

    def compile_named(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, object] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        check_mode(mode)
        made: Callable[..., Any] = lookup(name, options)(gm, example_inputs)
        return made

    compile_named.__name__ = f"fusee_{name}"
    return compile_named


compile_openvino, compile_openvino_ts = _named("openvino"), _named("openvino_ts")
compile_onnxrt = _named("onnxrt")
