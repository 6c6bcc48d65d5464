"""Operators on lists whose second operand is a tensor: one operator for each tensor of the list.

torch's own device-independent kernels of all others call these. Of these they read the operand's
value first, which a graph cannot.
"""

from __future__ import annotations

from typing import Any

import torch

from fusee.aten.torch_api import OpOverload
from fusee.aten.tracer import Args, Kwargs, Rule, Tracer

__all__ = ["FOREACH"]

aten = torch.ops.aten

_BINARY = {
    aten._foreach_add.Tensor: aten.add.Tensor,
    aten._foreach_mul.Tensor: aten.mul.Tensor,
    aten._foreach_div.Tensor: aten.div.Tensor,
}
_SCALED = {
    aten._foreach_addcmul.Tensor: aten.mul.Tensor,
    aten._foreach_addcdiv.Tensor: aten.div.Tensor,
}


def _binary(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensors, other = args[:2]
    return [t.call(_BINARY[op], x, other, **kwargs) for x in tensors]


def _scaled(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """x + factor * a * b, or x + factor * a / b, with a factor for each tensor."""
    found = []
    for k, (x, a, b) in enumerate(zip(*args[:3], strict=True)):
        if x.dtype not in (torch.float32, torch.float64):
            raise t.b.unsupported(f"{op} of {x.dtype}, whose steps ATen does not round")
        factor = t.call(aten.select.int, args[3], 0, k)
        product = t.call(_SCALED[op], t.call(aten.mul.Tensor, a, factor), b)
        found.append(t.call(aten.add.Tensor, x, product))
    return found


FOREACH: dict[OpOverload, Rule] = {
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_SCALED, _scaled),
}
