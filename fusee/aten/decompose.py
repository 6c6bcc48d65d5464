"""Decompositions: what an operator that nobody keeps is made of.

Tables are dicts from operator to a function in simpler operators. torch's own are the last
resort: written for generality, they take a millisecond a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusee.aten.torch_api import (
    OpOverload,
    decomposition_tables,
    further_decompositions,
    is_composite,
)

__all__ = ["Table", "decomposition", "keep_core", "taken_apart"]

aten = torch.ops.aten

Table = Mapping[OpOverload, Callable[..., Any]]

# Not in core ATen, but lowered or called whole.
_KEPT = frozenset(
    {
        aten.linear.default,
        aten.scaled_dot_product_attention.default,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._native_batch_norm_legit.no_stats,
        aten.silu.default,
        aten.mish.default,
        aten.softplus.default,
        aten.hardswish.default,
        aten.hardsigmoid.default,
        aten.baddbmm.default,
        aten.stack.default,
        aten.upsample_nearest2d.vec,
        aten.upsample_bilinear2d.vec,
        aten.upsample_bicubic2d.vec,
        aten.grid_sampler_2d.default,
        aten.roll.default,
    }
)


@functools.cache
def keep_core(op: OpOverload) -> bool:
    """The default policy: core ATen and a few whole operators are kept, random ones always."""
    if op in _KEPT or torch.Tag.core in op.tags:
        return True
    return torch.Tag.nondeterministic_seeded in op.tags and not is_composite(op)


def decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """The function that `op` is decomposed by unless the caller has one, or None."""
    return torch_table().get(op)


def taken_apart(op: OpOverload) -> Callable[..., Any] | None:
    """The function that `op` is decomposed by if someone asks for it, or None."""
    if op is aten._native_batch_norm_legit_no_training.default:
        # torch's goes by way of an operator that tracing takes for this one
        whole = further_decompositions()[aten._native_batch_norm_legit.default]
        return lambda x, w, b, mean, var, momentum, eps: whole(
            x, w, b, mean, var, False, momentum, eps
        )
    return decomposition(op) or further_decompositions().get(op)


# Kernels of these round once in half precision, torch's decompositions after every step.
_EXACT_ONLY_WHOLE = frozenset(
    {
        aten.addr.default,
        aten.linalg_cross.default,
        aten.logit.default,
        aten.upsample_linear1d.default,
        aten.upsample_linear1d.vec,
        aten.upsample_trilinear3d.default,
        aten.upsample_trilinear3d.vec,
    }
)


@functools.cache
def torch_table() -> Table:
    """torch's decompositions down to core ATen, less the inexact and those that draw randomly."""
    return {
        op: function
        for op, function in decomposition_tables().items()
        if op not in _EXACT_ONLY_WHOLE and torch.Tag.nondeterministic_seeded not in op.tags
    }
