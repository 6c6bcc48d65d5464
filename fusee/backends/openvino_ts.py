"""A region as TorchScript, by torch.jit.trace: the older way into OpenVINO.

The TorchScript frontend knows the operators that programs call, not those they are made of: these
are spelt as the former.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.graph import AtenGraph
from fusee.backends.openvino_graph import decodable
from fusee.errors import BackendError

__all__ = ["scripted"]

aten = torch.ops.aten


def scripted(graph: AtenGraph, weights: Mapping[int, Tensor], results: Sequence[fx.Node]) -> Any:
    """The graph up to these results as TorchScript, with the inputs in `weights` as its own.

    raises   BackendError if it has symbolic sizes, which tracing would fix
    """
    if graph.symbols:
        raise BackendError("tracing for TorchScript fixes all sizes, and this region has open ones")
    gm = decodable(graph, weights, results)
    run = _Spelling(gm)
    examples = [
        torch.zeros(spec.size, dtype=spec.dtype)  # type: ignore[arg-type]  # no symbols: ints
        for spec in graph.inputs
        if spec.index not in weights
    ]

    class Region(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return run.run(*given)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch says that TorchScript is deprecated; so do we
        trace: Callable[..., Any] = torch.jit.trace
        return trace(Region(), tuple(examples), check_trace=False)


class _Spelling(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spelt = _SPELT.get(target)
        return spelt(*args, **kwargs) if spelt is not None else target(*args, **kwargs)


def _squeeze(x: Tensor, axes: list[int]) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.squeeze(axis)
    return x


def _to_copy(x: Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    return x.to(dtype if dtype is not None else x.dtype, copy=True)


# Of several results only the first is used: the claims see to that.
_SPELT: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: lambda x, axis, half: torch.softmax(x, axis),
    aten._safe_softmax.default: lambda x, axis, dtype=None: torch.softmax(x, axis, dtype),
    aten._log_softmax.default: lambda x, axis, half: torch.log_softmax(x, axis),
    aten._to_copy.default: _to_copy,
    aten.squeeze.dims: _squeeze,
    aten.native_layer_norm.default: lambda *args: (torch.layer_norm(*args),),
    aten.native_group_norm.default: lambda x, w, b, n, c, hw, groups, eps: (
        torch.group_norm(x, groups, w, b, eps),
    ),
    aten._native_batch_norm_legit_no_training.default: lambda x, w, b, mean, var, momentum, eps: (
        torch.batch_norm(x, w, b, mean, var, False, momentum, eps, False),
    ),
}
