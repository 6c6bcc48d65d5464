"""Which ATen ops are lowered, by what, and why the others are not.

@lowers(overload, ...)      a function from the call's arguments to lazy tensors
row(overloads, fn, ...)     a pointwise op: fn from scalar Values to a Value
calls(reason, overload...)  known ops that stay calls to ATen
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

from fusee.loops.lower.tensor import Lowering, Meta
from fusee.sym.expr import Size

# What the vocabulary computes with. Tensors of other dtypes go to ATen.
DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    }
)


@dataclass
class Call:
    """One node of the graph, as its lowering sees it."""

    lowering: Lowering
    op: OpOverload
    metas: tuple[Meta, ...]  # of its results
    used: tuple[bool, ...]  # which results anyone uses
    layouts: Callable[[int], tuple[tuple[Size, ...], Size]]
    call_of: Callable[[OpOverload], Any]  # how to call an op on whole tensors: an ExternSpec
    overwrites: bool = False  # argument 0 is an input, which the result replaces: store in place

    @property
    def meta(self) -> Meta:
        return self.metas[0]

    def layout_of(self, position: int) -> tuple[tuple[Size, ...], Size]:
        """Eager's strides and storage offset of the tensor that is argument `position`."""
        return self.layouts(position)


Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)
# Says why these arguments can't be lowered, or None. Sees the arguments that the handler would.
Refusal = Callable[..., "str | None"]

HANDLERS: dict[OpOverload, Handler] = {}
REFUSALS: dict[OpOverload, Refusal] = {}
REASONS: dict[OpOverload, str] = {}


def lowers(*overloads: OpOverload, unless: Refusal | None = None) -> Callable[[H], H]:
    """Register `handler(call, *args, **kwargs)` for the overloads."""

    def register(handler: H) -> H:
        for overload in overloads:
            HANDLERS[overload] = handler
            if unless is not None:
                REFUSALS[overload] = unless
        return handler

    return register


def calls(reason: str, *overloads: OpOverload) -> None:
    """These ops stay calls to ATen, for that reason."""
    for overload in overloads:
        REASONS[overload] = reason


def named(names: str, *overloads: str) -> list[OpOverload]:
    """The ATen overloads of the named ops that this torch has."""
    found = []
    for name in names.split():
        packet = getattr(torch.ops.aten, name, None)
        for overload in overloads or ("default",):
            if packet is not None and overload in packet.overloads():
                found.append(getattr(packet, overload))
    return found


def refusal(op: OpOverload, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Why this call of an op that has a lowering is not lowered; None if it is."""
    unless = REFUSALS.get(op)
    return None if unless is None else unless(call, *args, **kwargs)


def unlowered(op: OpOverload) -> str:
    """Why an op has no lowering."""
    return REASONS.get(op, "no lowering")


def supported() -> frozenset[OpOverload]:
    """Every ATen overload that has a lowering; these should stay whole in the traced graph."""
    return frozenset(HANDLERS)
