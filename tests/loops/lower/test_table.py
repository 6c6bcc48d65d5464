"""The tables are complete: each core ATen op is lowered, or stays a call for a stated reason."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload

from fusee.loops.lower import supported
from fusee.loops.lower.tensor import HANDLERS, REASONS
from fusee.loops.operators import named

aten = torch.ops.aten

# Not for this table: sizes are read in Python, out= and in-place forms are gone after tracing.
ELSEWHERE = {
    aten._native_batch_norm_legit.default,
    aten.atan2.out,
    *named("resize_ sym_is_contiguous"),  # core in torch 2.11 only; tracing resolves them
    aten.sym_numel.default,
    aten.sym_size.int,
    aten.sym_storage_offset.default,
    aten.sym_stride.int,
    aten.var.dim,  # ATen composes it: it comes as var.correction
    # Tracing records another spelling (fusee/aten/canonicalize.py): view, full and squeeze.dims.
    aten.alias.default,
    aten.scalar_tensor.default,
    aten.squeeze.dim,
}


def core() -> Iterator[OpOverload]:
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            if torch.Tag.core in op.tags:
                yield op


def test_core_opset_is_covered() -> None:
    missing = [op for op in core() if op not in HANDLERS and op not in REASONS]
    assert set(missing) <= ELSEWHERE, sorted(map(str, set(missing) - ELSEWHERE))


def test_an_op_is_lowered_or_called_but_not_both() -> None:
    assert not set(HANDLERS) & set(REASONS)
    assert supported() == frozenset(HANDLERS)
    assert all(REASONS.values())
