"""A part of a graph as Python source: called with torch alone, in this process or another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusee.aten.torch_api import recurrent_layer, without_autocast

__all__ = ["Order", "PartSource", "function", "inverse"]

Order = tuple[int, ...]


@dataclass(frozen=True)
class PartSource:
    """What runs a part whose results are all new tensors, with eager ATen.

    source        of the function `graph`; constants are globals
    orders        of each result, the permutation that makes its strides row-major
    no_autocast   operators must not cast: casts are in the source
    """

    source: str
    orders: tuple[Order, ...]
    no_autocast: bool

    def bind(self, constants: Mapping[str, torch.Tensor]) -> Callable[..., tuple[Any, ...]]:
        """The part as a function of its inputs."""
        body = function(self.source, constants)

        def call(*inputs: Any) -> tuple[torch.Tensor, ...]:
            guard = without_autocast() if self.no_autocast else contextlib.nullcontext()
            with torch.no_grad(), guard:
                return tuple(
                    x.permute(order).contiguous().permute(inverse(order))
                    for x, order in zip(body(*inputs), self.orders, strict=True)
                )

        return call


def function(source: str, constants: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
    """What `fusee.aten.source.function_source` wrote, to be called."""
    names: dict[str, Any] = {"torch": torch, "recurrent_layer": recurrent_layer, **constants}
    exec(compile(source, "<fusee aten graph>", "exec"), names)
    found: Callable[..., Any] = names["graph"]
    return found


def inverse(order: Order) -> Order:
    """The permutation that undoes `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
