"""Whether a write reads what it has written: eager refuses it, or its order would show.

The rules are those of ATen's TensorIterator. What they call "too hard" to tell passes, as there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusee.aten.tracer import Tracer

__all__ = ["refuse_overlap"]


def refuse_overlap(t: Tracer, op: object, targets: Iterable[Any], operands: Any) -> None:
    """raises  TraceError if elements of a target share memory, or it lies partly over an operand"""
    others = [x for x in pytree.tree_leaves(operands) if isinstance(x, torch.Tensor)]
    for target in pytree.tree_leaves(list(targets)):
        x = t.value(target).tensor
        if not _is_static(x):
            continue
        if any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride())):
            raise t.b.unsupported(f"{op} writes to elements that share memory")
        for other in others:
            value = t.value(other)
            same = value.store is t.value(target).store and value.tensor is not x
            if same and _is_static(value.tensor) and _is_partial(x, value.tensor):
                raise t.b.unsupported(f"{op} writes to memory that it reads as another tensor")


def _is_static(x: torch.Tensor) -> bool:
    return all(type(n) is int for n in (*x.shape, *x.stride(), x.storage_offset()))


def _is_partial(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors of one storage have some memory in common, but not all."""
    if not (a.numel() and b.numel() and _is_dense(a) and _is_dense(b)):
        return False
    (start, end), (first, last) = _range(a), _range(b)
    if (start, end) == (first, last):
        return a.stride() != b.stride()
    return start < last and first < end


def _range(x: torch.Tensor) -> tuple[int, int]:
    start = int(x.storage_offset()) * x.element_size()
    return start, start + int(x.numel()) * x.element_size()


def _is_dense(x: torch.Tensor) -> bool:
    expected = 1
    for step, n in sorted(zip(x.stride(), x.shape)):
        if n != 1:
            if step != expected:
                return False
            expected *= n
    return True
