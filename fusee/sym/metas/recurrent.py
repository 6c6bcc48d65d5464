"""Of recurrent layers: ATen runs all their time steps in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusee.sym.metas.table import Op, aten, empty, meta

__all__ = ["LAYERS", "Result", "layer_results"]

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")

LAYERS: tuple[Op, ...] = tuple(getattr(aten, name).input for name in _NAMES)


class Result(NamedTuple):
    size: Sequence[Any]
    stride: Sequence[Any]
    dtype: torch.dtype


def layer_results(x: torch.Tensor, states: Any, *options: Any) -> list[Result]:
    """The output of all steps, and the states after the last one."""
    *_, bidirectional, batch_first = options
    states = [states] if isinstance(states, torch.Tensor) else states
    width = states[0].shape[2] * (2 if bidirectional else 1)
    first, second = x.shape[:2]
    # the kernel works along time; with the batch first its result is transposed
    stride = (width, first * width, 1) if batch_first else (second * width, width, 1)
    results = [Result((first, second, width), stride, x.dtype)]
    for state in states:
        size = state.shape
        results.append(Result(size, (size[1] * size[2], size[2], 1), x.dtype))
    return results


@meta(*LAYERS)
def _layer(*args: Any) -> Any:
    results = layer_results(*args)
    return tuple(torch.empty_strided(*r[:2], dtype=r.dtype, device="meta") for r in results)


@meta(aten.mkldnn_rnn_layer.default)
def _onednn_layer(x: torch.Tensor, *rest: Any) -> Any:
    hidden, cell, hidden_size = rest[4], rest[5], rest[9]
    states = [empty(s.shape, s.dtype) for s in (hidden, cell)]
    return empty((*x.shape[:2], hidden_size), x.dtype), *states, empty((0,), torch.uint8)
