"""flex_attention: the functions that change scores and mask them are graphs, in one node.

The node calls what eager runs: all scores at once, the functions mapped over batch, head, query and
key by vmap, softmax, and the sum of values. A backend that traces it sees these calls, and autograd
differentiates them; where blocks are masked as a whole, they are computed and masked.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import traceback

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.effects import BODY, effects
from fusee.capture.numbers import Number
from fusee.capture.stand_ins import SPECIAL, Args, Kwargs
from fusee.torch_functions.torch_api import higher_order
from fusee.torch_functions.transforms import Body, run_body

__all__: list[str] = []

T = torch.Tensor


def _call(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    query, key, value, score_mod, block_mask, scale, *_ = (*args, *kwargs.values())
    if type(scale) is Number:
        scale.need()
    working = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch._C.DisableTorchFunction(), m.world.mode:
        score = torch.empty((), dtype=working, device=query.device)
        places = tuple(torch.empty((), dtype=torch.int64, device=query.device) for _ in range(4))
    scoring = _body(m, score_mod, (score, *places))
    masking = _body(m, block_mask[-1], places)
    count = len(scoring.outside)

    def flex_attention(query: T, key: T, value: T, *outside: T) -> tuple[T, T, T]:
        scored = _mapped(scoring, (0,), outside[:count])
        masked = _mapped(masking, (), outside[count:])
        return _attention(query, key, value, scale, working, scored, masked)

    setattr(flex_attention, BODY, [*scoring.calls, *masking.calls])
    given = (query, key, value, *scoring.outside, *masking.outside)
    return m.world.recorder.call_whole(flex_attention, given, {})


def _body(m: Capturing, function: Any, given: tuple[Any, ...]) -> Body:
    m.world.recorder.by_index += 1
    try:
        body = run_body(m, "flex_attention", function, given, {}, None)
    finally:
        m.world.recorder.by_index -= 1
    if len(body.results) != 1 or any(effects(n) & {"writes", "draws"} for n in body.calls):
        raise GraphBreak(
            f"the function {body.name} under flex_attention does more than compute a number"
        )
    return body


def _mapped(body: Body, before: tuple[int, ...], outside: tuple[T, ...]) -> Callable[..., T]:
    """The function for all scores at once."""

    def function(*given: T) -> T:
        found: T = body.module.forward(*given, *outside)[0]
        return found

    for k in reversed(range(4)):
        axes = tuple(0 if j == k else None for j in range(4))
        function = torch.vmap(function, in_dims=(*before, *axes))
    return function


def _attention(
    query: T,
    key: T,
    value: T,
    scale: float,
    working: torch.dtype,
    scored: Callable[..., T],
    masked: Callable[..., T],
) -> tuple[T, T, T]:
    """What eager gives: the result; log2 of the sums of exponentials; the largest scores, likewise.

    source   torch/_higher_order_ops/flex_attention.py, math_attention, of which it is the formula
    """
    groups = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    key, value = (x.expand(query.size(0), *x.shape[1:]) for x in (key, value))
    scores = query.to(working) @ key.to(working).transpose(-2, -1)
    places = [torch.arange(n, device=scores.device) for n in scores.shape]
    scores = (scores * scale).to(working)
    hidden = masked(*places).logical_not()
    scores = scored(scores, *places).to(working).masked_fill(hidden, -math.inf)
    empty = (scores == -math.inf).all(-1)
    sums = scores.logsumexp(-1).masked_fill(empty, -math.inf)
    weights = scores.softmax(-1).masked_fill(empty.unsqueeze(-1), 0.0)
    out = weights.to(query.dtype) @ value.to(query.dtype)
    order = sorted(range(4), key=query.stride().__getitem__, reverse=True)
    out = out.permute(order).contiguous().permute([order.index(k) for k in range(4)])
    return out, sums / math.log(2), scores.amax(-1) / math.log(2)


if hasattr(higher_order, "flex_attention"):
    SPECIAL[higher_order.flex_attention] = _call
# it names nodes for tracers of torch's
SPECIAL[traceback.annotate] = lambda m, args, kwargs: contextlib.nullcontext()
