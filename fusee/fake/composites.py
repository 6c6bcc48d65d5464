"""Matrix products of open sizes, from operators that have rules.

torch runs its own decompositions of these in Python where sizes are open, which import sympy. The
steps are theirs, so that gradients and strides are.

source   torch._decomp.decompositions.matmul; at::native::linear, aten/src/ATen/native/Linear.cpp
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusee.fake.layouts import broadcast, is_empty, is_row_major


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b"""
    if not a.dim() or not b.dim():
        raise RuntimeError("matmul of a tensor without axes")
    if a.dim() <= 2 and b.dim() <= 2:
        if a.dim() == b.dim() == 1:
            return torch.dot(a, b)
        if b.dim() == 1:
            return torch.mv(a, b)
        return torch.mm(a, b) if a.dim() == 2 else torch.mm(a.unsqueeze(0), b).squeeze(0)
    if _folds(a, b):
        return _folded(a, b)
    if a.dim() == b.dim() == 3 and type(a.shape[0]) is type(b.shape[0]) is int:
        if a.shape[0] != b.shape[0]:
            if a.shape[0] == 1 and a.requires_grad:
                return matmul(a.squeeze(0), b)
            if b.shape[0] == 1 and b.requires_grad:
                return matmul(a, b.squeeze(0))
    batch: list[Any] = broadcast(a.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    left = [1, *a.shape][-2:]
    x = a.expand(*batch, *left).reshape(count, *left)
    right = b.shape[-2:]
    y = b.expand(*batch, *right).reshape(count, *right)
    made = torch.bmm(x, y if b.dim() > 1 else y.unsqueeze(2))
    return made.view([*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.dim() > 1 else ())])


def _folds(a: Tensor, b: Tensor) -> bool:
    """Whether a batch of matrices is one tall matrix, times the other."""
    x, y = (a, b) if a.dim() >= b.dim() else (b, a)
    if x.dim() < 3 or y.dim() > 2:
        return False
    if y.requires_grad:
        return True
    return a.dim() != 2 and (is_empty(x) or is_row_major(x))


def _folded(a: Tensor, b: Tensor) -> Tensor:
    is_turned = b.dim() > a.dim()
    x, y = (b.mT, a.t() if a.dim() == 2 else a) if is_turned else (a, b)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if y.dim() == 1:
        return torch.mv(flat, y).view(x.shape[:-1])
    made = torch.mm(flat, y).view([*x.shape[:-1], y.shape[1]])
    return made.mT.contiguous() if is_turned else made


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear"""
    if x.dim() == 2 and bias is not None:
        return torch.addmm(bias, x, weight.t())
    made = matmul(x, weight.t())
    return made if bias is None else made + bias


COMPOSITES: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys(
        (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, operator.matmul), matmul
    ),
    torch.ops.aten.matmul.default: matmul,
    torch._C._nn.linear: linear,
}
