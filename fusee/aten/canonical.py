"""Operators that are another spelling of one that we want to see whole.

    layer_norm -> native_layer_norm        conv2d -> convolution        softmax.int -> _softmax
Each rule does what torch's composite kernel does on the CPU, in fewer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.aten.always import convert
from fusee.aten.torch_api import OpOverload
from fusee.aten.tracer import Args, Kwargs, Rule, Tracer
from fusee.sym.metas.recurrent import LAYERS
from fusee.sym.metas.table import suggested_layout

__all__ = ["CANONICAL"]

aten = torch.ops.aten

CANONICAL: dict[OpOverload, Rule] = {}

_ROWS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
_TRANSPOSED = {
    aten.conv_transpose1d.default: 1,
    aten.conv_transpose2d.input: 2,
    aten.conv_transpose3d.input: 3,
}


def _rule(*ops: OpOverload) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        CANONICAL.update(dict.fromkeys(ops, function))
        return function

    return register


def bound(op: OpOverload, args: Args, kwargs: Kwargs) -> list[Any]:
    """All arguments in the order of the schema, defaults filled in."""
    arguments = op._schema.arguments
    found = list(args)
    for argument in arguments[len(args) :]:
        found.append(kwargs.get(argument.name, argument.default_value))
    return found


# ------------------------------------------------------------------------------ convolution


@_rule(*_ROWS)
def _conv(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    x, weight, bias, stride, padding, dilation, groups = bound(op, args, kwargs)
    rank = _ROWS[op]
    if x.dtype.is_complex:  # four convolutions, or three
        return t.composite(op, args, kwargs)
    batched = x.dim() == rank + 2
    if not batched:
        x = t.call(aten.unsqueeze.default, x, 0)
    out = t.call(
        aten.convolution.default,
        x,
        weight,
        bias,
        _each(stride, rank),
        _each(padding, rank),
        _each(dilation, rank),
        False,
        [0] * rank,
        groups,
    )
    return out if batched else t.call(aten.squeeze.dim, out, 0)


@_rule(*_TRANSPOSED)
def _conv_transpose(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    x, weight, bias, stride, padding, extra, groups, dilation = bound(op, args, kwargs)
    rank = _TRANSPOSED[op]
    if x.dtype.is_complex:
        return t.composite(op, args, kwargs)
    batched = x.dim() == rank + 2
    if not batched:
        x = t.call(aten.unsqueeze.default, x, 0)
    out = t.call(
        aten.convolution.default,
        x,
        weight,
        bias,
        _each(stride, rank),
        _each(padding, rank),
        _each(dilation, rank),
        True,
        _each(extra, rank),
        groups,
    )
    return out if batched else t.call(aten.squeeze.dim, out, 0)


def _each(given: Sequence[int], rank: int) -> list[int]:
    return list(given) * rank if len(given) == 1 else list(given)


# ------------------------------------------------------------------------------ norms


@_rule(aten.layer_norm.default)
def _layer_norm(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    x, shape, weight, bias, eps, _ = bound(op, args, kwargs)
    return t.call(aten.native_layer_norm.default, x, list(shape), weight, bias, eps)[0]


@_rule(aten.group_norm.default)
def _group_norm(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    x, groups, weight, bias, eps, _ = bound(op, args, kwargs)
    meta = t.value(x).tensor
    x = t.call(aten.contiguous.default, x, memory_format=suggested_layout(meta))
    n, channels = meta.shape[0], meta.shape[1]
    pixels: Any = 1
    for size in meta.shape[2:]:
        pixels = pixels * size
    found = t.call(
        aten.native_group_norm.default, x, weight, bias, n, channels, pixels, groups, eps
    )
    return found[0]


@_rule(aten.batch_norm.default)
def _batch_norm(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    x, weight, bias, mean, var, training, momentum, eps, _ = bound(op, args, kwargs)
    return batch_norm(t, x, weight, bias, mean, var, training, momentum, eps)[0]


def batch_norm(
    t: Tracer,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Batch normalisation, with the running statistics written when training."""
    if mean is None or var is None:
        op = aten._native_batch_norm_legit.no_stats
        found = t.call(op, x, weight, bias, True, momentum, eps)
    elif not training:
        op = aten._native_batch_norm_legit_no_training.default
        found = t.call(op, x, weight, bias, mean, var, momentum, eps)
    else:
        op = aten._native_batch_norm_legit.default
        found = t.call(op, x, weight, bias, mean, var, True, momentum, eps)
    return tuple(found)


# ------------------------------------------------------------------------------ softmax


@_rule(aten.softmax.int, aten.log_softmax.int)
def _softmax(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    x, axis, dtype = bound(op, args, kwargs)
    kernel = aten._softmax.default if op is aten.softmax.int else aten._log_softmax.default
    if dtype is not None:
        x = convert(t, x, dtype, None)
    return t.call(kernel, x, axis, False)


@_rule(aten._safe_softmax.default)
def _safe_softmax(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    x, axis, dtype = bound(op, args, kwargs)
    out = t.call(aten.softmax.int, x, axis, dtype)
    masked = t.call(aten.all.dim, t.call(aten.eq.Scalar, x, float("-inf")), axis, True)
    zero = t.call(aten.full.default, [], 0, dtype=out.dtype, device=t.device)
    return t.call(aten.where.self, masked, zero, out)


# ------------------------------------------------------------------------------ recurrent layers


@_rule(*LAYERS)
def _recurrent(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    # whole, as ATen runs them; but autocast casts what they are made of
    return t.composite(op, args, kwargs) if t.autocast else t.record(op, args, kwargs)


# ------------------------------------------------------------------------------ factorisations


@_rule(aten.linalg_svdvals.default)
def _svdvals(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    # torch's own composition asks for vectors too while a dispatch mode is on, by another algorithm
    return t.call(aten._linalg_svd.default, args[0], False, False, **kwargs)[1]
