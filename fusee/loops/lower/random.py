"""Random numbers: drawn into memory by a call, in program order; the rest is loops."""

from __future__ import annotations

import torch

from fusee.loops.ir import Extern
from fusee.loops.lower.shape import converted
from fusee.loops.lower.table import Call, lowers, named
from fusee.loops.lower.tensor import Number, Tensor


def _other_stream(
    call: Call, x: Tensor, p: Number, *, generator: torch.Generator | None = None
) -> str | None:
    if generator is not None:
        return "a generator of its own"
    if not isinstance(p, (int, float)):
        return "a probability that is no number"
    return None if call.call_of(call.op) is not None else "drawn by ATen"


@lowers(*named("bernoulli", "p"), unless=_other_stream)
def _bernoulli(
    call: Call, x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    """A mask of booleans, whatever the dtype of `x`, whose elements nobody reads."""
    meta, lowering = call.meta, call.lowering
    draw = call.call_of(call.op).out
    buffer = lowering.buffer(meta.shape, torch.bool, meta.strides)
    lowering.graph.steps.append(
        Extern(
            str(call.op),
            draw,
            (p,),
            {},
            (buffer,),
            out=True,
            reason="random numbers of ATen's generator, in eager's order",
            origin=lowering.origin,
        )
    )
    return converted(lowering.whole(buffer), meta.dtype)
