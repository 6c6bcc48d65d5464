"""Functions of torch that take known sizes alone, of others that do not.

torch composes these in C++, and asks there for the numbers that sizes are. The steps are its own,
so that results, gradients and strides are. What a function here does not know is torch's as before.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusee.fake.layouts import (
    broadcast,
    equal,
    is_empty,
    is_row_major,
    is_transforming,
    let_be_equal,
)
from fusee.fake.open_sizes import POOLS
from fusee.fake.rules import attention
from fusee.fake.torch_python import FORMS, moved
from fusee.source import Rules

_nn = torch._C._nn
# By function of torch. It runs itself where its form returns None.
_FORMS: Rules[Any, Callable[..., Any]] = Rules(POOLS)

# ---------------------------------------------------------------------------- matrix products
# Matrix products of open sizes, from operators that have rules.
#
# torch runs its own decompositions of these in Python where sizes are open, which import sympy. The
# steps are theirs, so that gradients and strides are.
#
# source   torch._decomp.decompositions.matmul; at::native::linear, aten/src/ATen/native/Linear.cpp


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
    is_turned = b.dim() > a.dim()
    x, y = (b, a) if is_turned else (a, b)
    # a batch of matrices is one tall matrix, times the other
    if y.dim() <= 2 and (y.requires_grad or (a.dim() != 2 and (is_empty(x) or is_row_major(x)))):
        x, y = (x.mT, y.t() if y.dim() == 2 else y) if is_turned else (x, y)
        flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        if y.dim() == 1:
            return torch.mv(flat, y).view(x.shape[:-1])
        made = torch.mm(flat, y).view([*x.shape[:-1], y.shape[1]])
        return made.mT.contiguous() if is_turned else made
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear"""
    if x.dim() == 2 and bias is not None:
        return torch.addmm(bias, x, weight.t())
    made = matmul(x, weight.t())
    return made if bias is None else made + bias


# ---------------------------------------------------------------------------- rows


@_FORMS.rule(torch.kron, Tensor.kron)
def _kron(a: Tensor, b: Tensor) -> Tensor:
    rank = max(a.dim(), b.dim())
    outer, inner = ([1] * (rank - x.dim()) + [*x.shape] for x in (a, b))
    x = a.reshape([n for m in outer for n in (m, 1)])
    y = b.reshape([n for m in inner for n in (1, m)])
    return (x * y).reshape([m * n for m, n in zip(outer, inner)])


@_FORMS.rule(torch.linspace)
def _linspace(start: Any, end: Any, steps: Any, *, dtype: Any = None, **named: Any) -> Any:
    dtype = dtype or torch.get_default_dtype()
    if isinstance(start, Tensor) or isinstance(end, Tensor) or dtype not in _WHOLE_FLOATS:
        return None
    return spaced(start, end, steps, dtype=dtype, **named)


def spaced(start: Any, end: Any, steps: Any, **named: Any) -> Tensor:
    """torch.linspace between numbers, or floating tensors that hold one."""
    at = torch.arange(steps, **named)
    greatest: Any = torch.sym_max
    step, half = (end - start) / greatest(steps - 1, 1), greatest(steps // 2, 1)
    return torch.where(at < half, start + at * step, end - (steps - 1 - at) * step)


_WHOLE_FLOATS = (torch.float32, torch.float64)


@_FORMS.rule(torch.isin)
def _isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Tensor | None:
    """By places in a sorted row: torch asks the sizes which of two ways is the faster one."""
    if not isinstance(elements, Tensor) or not isinstance(test_elements, Tensor):
        return None
    dtype = torch.result_type(elements, test_elements)
    x, row = elements.to(dtype), test_elements.to(dtype).flatten().sort()[0]
    if row.shape[0] == 0:
        return torch.full_like(x, invert, dtype=torch.bool)
    at = torch.searchsorted(row, x.contiguous()).clamp(max=row.shape[0] - 1)
    return (row[at] == x) ^ invert


@_FORMS.rule(_nn.multilabel_margin_loss)
def _multilabel_margin(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """torch's form in Python counts what stands behind the last label.

    source   aten/src/ATen/native/LossMultiLabelMargin.cpp
    """
    let_be_equal(x.shape, target.shape)
    if not equal(x.shape, target.shape):
        raise RuntimeError("inconsistent target size of multilabel_margin_loss()")
    is_label = (target >= 0).cumprod(-1) > 0
    at = torch.where(is_label, target, 0)
    classes = torch.arange(x.shape[-1], device=x.device)
    is_target = ((at.unsqueeze(-1) == classes) & is_label.unsqueeze(-1)).any(-2)
    is_wrong = is_label.unsqueeze(-1) & ~is_target.unsqueeze(-2)
    margins = (1 - x.gather(-1, at).unsqueeze(-1) + x.unsqueeze(-2)).relu()
    found = torch.where(is_wrong, margins, 0).sum((-1, -2)) / x.shape[-1]
    return (found, found.mean(), found.sum())[reduction]


@_FORMS.rule(_nn.pad_sequence)
def _pad_sequence(
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """torch._C._nn.pad_sequence, which asks of each two lengths which is the greater one."""
    longest: Any = functools.reduce(torch.sym_max, [x.shape[0] for x in sequences])
    rows = []
    for x in sequences:
        missing = longest - x.shape[0]
        ends = (0, missing) if padding_side == "right" else (missing, 0)
        rows.append(F.pad(x, (*(0, 0) * (x.dim() - 1), *ends), value=padding_value))
    return torch.stack(rows, 0 if batch_first else 1)


@_FORMS.rule(torch.affine_grid_generator)
def _affine_grid(theta: Tensor, size: Sequence[Any], align_corners: bool) -> Tensor | None:
    """source   aten/src/ATen/native/AffineGridGenerator.cpp"""
    batch, _, *image = size
    if theta.dim() != 3 or theta.dtype not in _WHOLE_FLOATS or not 2 <= len(image) <= 3:
        return None
    rank, named = len(image), dict[str, Any](dtype=theta.dtype, device=theta.device)
    rows = []
    for k, n in enumerate(reversed(image)):
        if not n > 1:
            places = torch.zeros(n, **named)
        else:
            places = spaced(-1, 1, n, **named)
            places = places if align_corners else places * (n - 1) / n
        view = [1] * rank
        view[rank - 1 - k] = n
        rows.append(places.view(view).expand(image))
    points = torch.stack([*rows, torch.ones(image, **named)], -1).view(1, -1, rank + 1)
    grid = points.expand(batch, math.prod(image), rank + 1).bmm(theta.transpose(1, 2))
    return grid.view([batch, *image, rank])


def _window(run: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """source   aten/src/ATen/native/TensorFactories.cpp"""

    def window(n: Any, *how: Any, dtype: Any = None, **named: Any) -> Tensor | None:
        dtype = dtype or torch.get_default_dtype()
        is_known = type(n) is int or dtype not in _WHOLE_FLOATS or not n > 1
        return None if is_known else run(n, *how, dtype=dtype, **named)

    return window


@_FORMS.rule(torch.hann_window, alpha=0.5, beta=0.5)
@_FORMS.rule(torch.hamming_window)
@_window
def _hamming(
    n: Any, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, **named: Any
) -> Tensor:
    at: Tensor = torch.arange(n + periodic, **named) * (2 * math.pi / (n + periodic - 1))
    return (at.cos() * -beta + alpha).narrow(0, 0, n)


@_FORMS.rule(torch.blackman_window)
@_window
def _blackman(n: Any, periodic: bool = True, **named: Any) -> Tensor:
    at: Tensor = torch.arange(n + periodic, **named) * (math.pi / (n + periodic - 1))
    return ((at * 4).cos() * 0.08 - (at * 2).cos() * 0.5 + 0.42).narrow(0, 0, n)


@_FORMS.rule(torch.bartlett_window)
@_window
def _bartlett(n: Any, periodic: bool = True, **named: Any) -> Tensor:
    last = n + periodic - 1
    at = torch.arange(last + 1, **named)
    return torch.where(at <= last // 2, at * (2 / last), 2 - at * (2 / last)).narrow(0, 0, n)


@_FORMS.rule(F.one_hot)
def _one_hot(tensor: Tensor, num_classes: Any = -1) -> Tensor | None:
    """As on a CPU: a tensor without data is compared with each class by torch, in the order of its
    axes, and any class passes."""
    if type(num_classes) is int and num_classes < 1:
        return None
    zeros = torch.zeros([*tensor.shape, num_classes], dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


@_FORMS.rule(torch.tril_indices, is_upper=False)
@_FORMS.rule(torch.triu_indices, is_upper=True)
def _triangle(
    row: Any, col: Any, offset: Any = 0, *, is_upper: bool, **named: Any
) -> Tensor | None:
    if type(row) is type(col) is type(offset) is int:
        return None
    dtype, device = named.pop("dtype", torch.int64), named.get("device")
    mask = torch.arange(col, device=device) - torch.arange(row, device=device).unsqueeze(1)
    inside: Tensor = mask >= offset if is_upper else mask <= offset
    # how many elements are not above a diagonal
    least: Any = torch.sym_min
    most: Any = torch.sym_max
    diagonal = offset - 1 if is_upper else offset
    first = least(col, 1 + diagonal) if diagonal > 0 else int(row + diagonal > 0)
    last = most(0, least(col, row + diagonal))
    sloped = last - first + 1
    full = most(0, most(0, least(row, row + diagonal)) - sloped)
    count = (first + last) * sloped // 2 + full * col
    count = row * col - count if is_upper else count
    found = inside.nonzero_static(size=count if count != 0 else 0)
    return found.t().contiguous().to(dtype)


# the gradient of the one is zeros of a known size
_FORMS.rule(torch.sgn, Tensor.sgn)(
    lambda input: (torch.sgn if input.is_complex() else torch.sign)(input)
)


@_FORMS.rule(torch.repeat_interleave, Tensor.repeat_interleave)
def _repeated(x: Tensor, repeats: Any = None, dim: int | None = None, **_: Any) -> None:
    if isinstance(repeats, Tensor) and repeats.dim() == 1:
        let_be_equal((x.numel() if dim is None else x.shape[dim],), repeats.shape)


# ---------------------------------------------------------------------------- norms


def _fits(x: Tensor, axes: Sequence[int]) -> bool:
    """Whether these are axes of `x`, each once. If not, torch has the error."""
    rank = x.dim()
    return all(-rank <= k < rank for k in axes) and len({k % rank for k in axes}) == len(axes)


@_FORMS.rule(torch.linalg.matrix_norm)
def _matrix_norm(
    A: Tensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, **named: Any
) -> Any:
    """source   aten/src/ATen/native/LinearAlgebra.cpp, linalg_matrix_norm"""
    dtype = named.get("dtype")
    known = ("fro", "nuc") if isinstance(ord, str) else (1, -1, 2, -2, math.inf, -math.inf)
    is_usual = A.dim() > 1 and len(dim) == 2 and _fits(A, dim) and ord in known
    if named.get("out") is not None or not is_usual:
        return None
    rank = A.dim()
    first, last = (k % rank for k in dim)
    if ord == "fro":
        return torch.linalg.vector_norm(A, 2, (first, last), keepdim, dtype=dtype)
    if ord in ("nuc", 2, -2):
        order = [*(k for k in range(rank) if k not in (first, last)), first, last]
        values = torch.linalg.svdvals((A if dtype is None else A.to(dtype)).permute(order))
        if ord == "nuc":
            found = values.sum(-1, keepdim)
        else:
            found = values.amax(-1, keepdim) if ord > 0 else values.amin(-1, keepdim)
        back = sorted(range(rank), key=order.__getitem__)
        return found.unsqueeze(-1).permute(back) if keepdim else found
    if ord in (math.inf, -math.inf):
        first, last = last, first
    sums = torch.linalg.vector_norm(A, 1.0, (first,), keepdim, dtype=dtype)
    if not keepdim and first < last:
        last -= 1
    return sums.amax(last, keepdim) if ord > 0 else sums.amin(last, keepdim)


@_FORMS.rule(torch.linalg.norm)
def _norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    axes = (dim,) if isinstance(dim, int) else dim
    is_of_matrices = len(axes) == 2 if axes is not None else A.dim() == 2
    if ord is None or not is_of_matrices:
        return None
    return _matrix_norm(A, ord, axes or (0, 1), keepdim, **named)


# ---------------------------------------------------------------------------- statistics


@_FORMS.rule(torch.combinations)
def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor | None:
    """source   aten/src/ATen/native/Itertools.cpp"""
    if input.dim() != 1 or r < 1:
        return None
    n = input.shape[0]
    count: Any = 1
    for k in range(r):
        count = count * (n + k if with_replacement else n - k)
    at = torch.arange(n, device=input.device)
    mask: Tensor = torch.ones([n] * r, dtype=torch.bool, device=input.device)
    for k in range(r - 1):
        a = at.view([-1 if i == k else 1 for i in range(r)])
        b = at.view([-1 if i == k + 1 else 1 for i in range(r)])
        mask = mask & (a <= b if with_replacement else a < b)
    places = mask.nonzero_static(size=count // math.factorial(r))
    return input[places.contiguous()]  # on GPUs they lie column by column


_BETWEEN = {"linear": None, "midpoint": None, "lower": torch.floor, "higher": torch.ceil}
_BETWEEN["nearest"] = torch.round


_QUANTILES = torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile


@_FORMS.rule(*_QUANTILES[:2], skips=False)
@_FORMS.rule(*_QUANTILES[2:], skips=True)
def _quantile(
    input: Tensor,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    out: Any = None,
    skips: bool,
) -> Any:
    """Of one number; torch 2.11 asks how many elements there are.

    source   aten/src/ATen/native/Sorting.cpp, quantile_compute
    """
    is_usual = type(q) is float and 0 <= q <= 1 and input.dtype in _WHOLE_FLOATS
    is_usual = is_usual and interpolation in _BETWEEN and out is None and input.dim() > 0
    if not is_usual or is_empty(input) or not _fits(input, () if dim is None else (dim,)):
        return None
    x = input.flatten() if dim is None else input.movedim(dim, -1)
    x, last = x.sort(-1)[0], x.shape[-1] - 1
    part = torch.scalar_tensor(q, dtype=x.dtype, device=x.device)
    if skips:
        rank = (part * (x.isnan().logical_not().sum(-1, True) - 1)).clamp(min=0)
    else:
        rank = torch.where(x.isnan().any(-1, True), last, part * last)
    rounded = _BETWEEN[interpolation]
    rank = rank if rounded is None else rounded(rank)
    below = rank.to(torch.int64)
    found = x.gather(-1, below)
    if rounded is None:
        weight = torch.full_like(rank, 0.5) if interpolation == "midpoint" else rank - below
        found = found.lerp(x.gather(-1, rank.ceil().to(torch.int64)), weight)
    if dim is None:
        return found.view([1] * input.dim()) if keepdim else found.squeeze(-1)
    return found.movedim(-1, dim) if keepdim else found.squeeze(-1)


# ---------------------------------------------------------------------------- products


@_FORMS.rule(torch.linalg.multi_dot)
def _multi_dot(tensors: Sequence[Tensor], *, out: Any = None) -> Any:
    """The cheapest order is a relation of sizes, as it is eager's."""
    ranks = [x.dim() for x in tensors]
    ends = {*ranks[:1], *ranks[-1:]}
    if out is not None or len(ranks) < 2 or {*ranks[1:-1]} - {2} or ends - {1, 2}:
        return None
    first, *_, last = tensors
    rows = [*tensors]
    rows[0] = first.unsqueeze(0) if first.dim() == 1 else first
    rows[-1] = last.unsqueeze(-1) if last.dim() == 1 else last
    size = [x.shape[0] for x in rows] + [rows[-1].shape[1]]
    count = len(rows)
    cost: dict[tuple[int, int], Any] = {(k, k): 0 for k in range(count)}
    cut: dict[tuple[int, int], int] = {}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            places = range(i, j) if count > 3 else reversed(range(i, j))  # which is first if equal
            for k in places:
                price = cost[i, k] + cost[k + 1, j] + size[i] * size[k + 1] * size[j + 1]
                if (i, j) not in cost or price < cost[i, j]:
                    cost[i, j], cut[i, j] = price, k

    def product(i: int, j: int) -> Tensor:
        k = cut.get((i, j))
        return rows[i] if k is None else torch.mm(product(i, k), product(k + 1, j))

    made = product(0, count - 1)
    return made.view([*first.shape[:-1], *(last.shape[1:] if last.dim() > 1 else ())])


# ---------------------------------------------------------------------------- parts


@_FORMS.rule(torch.gradient)
def _gradient(input: Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Any:
    """source   aten/src/ATen/native/ReduceOps.cpp, gradient_helper, gradient_helper_float"""
    axes = [*range(input.dim())] if dim is None else [dim] if isinstance(dim, int) else [*dim]
    is_list = isinstance(spacing, (list, tuple))
    steps = [*spacing] if is_list else [1 if spacing is None else spacing] * len(axes)
    is_usual = _fits(input, axes) and len(steps) == len(axes) and edge_order in (1, 2)
    is_usual = is_usual and all(
        h.dim() == 1 and bool(h.shape[0] == input.shape[k])
        if isinstance(h, Tensor)
        else type(h) in (int, float)
        for k, h in zip(axes, steps)
    )
    if not is_usual or not all(input.shape[k] > edge_order for k in axes):
        return None
    return tuple(
        _by_places(input, k, h, edge_order)
        if isinstance(h, Tensor)
        else _by_step(input, k, h, edge_order)
        for k, h in zip(axes, steps)
    )


def _by_step(input: Tensor, axis: int, h: Any, edge_order: int) -> Tensor:
    def at(start: int) -> Any:
        return input.narrow(axis, start % input.shape[axis], 1)

    inner = input.shape[axis] - 2
    center = (input.narrow(axis, 2, inner) - input.narrow(axis, 0, inner)) / h
    if edge_order == 1:
        first, last = (at(1) - at(0)) / h, (at(-1) - at(-2)) / h
    else:
        first = (-1.5 * at(0) + 2 * at(1) - 0.5 * at(2)) / h
        last = (0.5 * at(-3) - 2 * at(-2) + 1.5 * at(-1)) / h
    return torch.cat([first, center / 2, last], axis)


def _by_places(input: Tensor, axis: int, places: Tensor, edge_order: int) -> Tensor:
    count = input.shape[axis]
    width = places.narrow(0, 1, count - 1) - places.narrow(0, 0, count - 1)

    def part(start: Any, length: Any = 1) -> Tensor:
        return input.narrow(axis, start % count, length)

    def weighted(weights: Sequence[Tensor], start: Any, length: Any = 1) -> Any:
        return sum(w * part(start % count + k, length) for k, w in enumerate(weights))

    shape = [1] * input.dim()
    shape[axis] = count - 2
    x, y = width.narrow(0, 0, count - 2), width.narrow(0, 1, count - 2)
    inner = -y / (x * (x + y)), (y - x) / (x * y), x / (y * (x + y))
    size = part(0, count - 2).shape  # so that none asks whether there is one place
    center = weighted([w.view(shape).expand(size) for w in inner], 0, count - 2)
    if edge_order == 1:
        first, last = (part(1) - part(0)) / width[0], (part(-1) - part(-2)) / width[-1]
    else:
        x, y = width[0], width[1]
        first = weighted((-(2 * x + y) / (x * (x + y)), (x + y) / (x * y), -x / (y * (x + y))), 0)
        x, y = width[-1], width[-2]
        last = weighted((x / (y * (x + y)), -(x + y) / (x * y), (2 * x + y) / (x * (x + y))), -3)
    return torch.cat([first, center, last], axis)


@_FORMS.rule(torch.take_along_dim, Tensor.take_along_dim)
def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor | None:
    """source   aten/src/ATen/native/TensorAdvancedIndexing.cpp"""
    rank = input.dim()
    is_plain = indices.dtype is torch.int64 and indices.dim() == rank
    if dim is None or not is_plain or dim not in range(-rank, rank):
        return None
    dim %= rank

    def expanded(x: Tensor, other: Tensor) -> Tensor:
        size = [*other.shape]
        size[dim] = x.shape[dim]
        return x.expand(broadcast(size, x.shape))

    places = expanded(indices, input)
    places = places.remainder(input.shape[dim]) if _WRAPS else places
    return expanded(input, indices).gather(dim, places)


# Whether take_along_dim takes any place modulo a length, as since torch 2.12 or 2.13.
try:
    _WRAPS = bool(torch.take_along_dim(torch.ones(1), torch.tensor([-1]), 0)[0] == 1)
except (RuntimeError, IndexError):
    _WRAPS = False


@_FORMS.rule(torch.masked_select, Tensor.masked_select)
def _masked_select(input: Tensor, mask: Tensor) -> Tensor | None:
    """With a gradient: that of an index has rules."""
    if not (input.requires_grad and torch.is_grad_enabled()) or mask.dtype is not torch.bool:
        return None
    size: list[Any] = broadcast(input.shape, mask.shape)
    return input.expand(size)[mask.expand(size)]


@_FORMS.rule(torch.block_diag)
def _block_diag(*tensors: Tensor) -> Any:
    """source   aten/src/ATen/native/TensorShape.cpp"""
    if not tensors or any(x.dim() > 2 for x in tensors):
        return None
    blocks = [x.reshape(1, -1) if x.dim() < 2 else x for x in tensors]
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in blocks))
    wide, rows = sum(x.shape[1] for x in blocks), []
    before: Any = 0
    for x in blocks:
        after = wide - before - x.shape[1]
        rows.append(F.pad(x.to(dtype), (before, after)))
        before = before + x.shape[1]
    return torch.cat(rows)


# ---------------------------------------------------------------------------- losses and rows


@_FORMS.rule(_nn.cross_entropy_loss)
def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Of probabilities, with weights of classes.

    source   aten/src/ATen/native/LossNLL.cpp, cross_entropy_loss_prob_target
    """
    axis = min(input.dim() - 1, 1)
    is_usual = weight is not None and input.dim() == target.dim() > 0 and weight.dim() == 1
    if (
        not is_usual
        or weight is None
        or input.shape != target.shape
        or not target.is_floating_point()
        or weight.shape[0] != input.shape[axis]
        or is_empty(input)
    ):
        return None
    classes, row = input.shape[axis], [1] * input.dim()
    row[axis] = classes
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    terms = torch.log_softmax(input, axis) * target * weight.view(row)
    if reduction == 0:
        return -terms.sum(axis)
    return -terms.sum() / (input.numel() // classes) if reduction == 1 else -terms.sum()


@_FORMS.rule(torch.embedding_bag)
def _embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, *options: Any, **named: Any
) -> Any:
    """A place of padding from the end on is a number for ATen."""
    names = "scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx"
    given = {**dict(zip(names.split(), options)), **named}
    place = given.pop("padding_idx", None)
    if place is None or not 0 <= place < weight.shape[0]:
        return None
    rows = torch._embedding_bag if weight.requires_grad else torch._embedding_bag_forward_only
    return rows(weight, indices.contiguous(), offsets.contiguous(), **given, padding_idx=place)


@_FORMS.rule(torch.istft, Tensor.istft)
def _istft(input: Tensor, *args: Any, **named: Any) -> Tensor:
    """torch's kernel in Python does not ask whether windows are nowhere zero together."""
    given = {**dict(zip("n_fft hop_length _ window center".split(), args)), **named}
    window, n = given.get("window"), given["n_fft"]
    made: Tensor = moved(torch._refs.istft)(input, *args, **named)
    if window is not None:
        frames, hop, more = input.shape[-1], given.get("hop_length") or n // 4, n - window.shape[0]
        squares = F.pad(window.detach().square(), (more // 2, more - more // 2))
        size, start = [1, n + hop * (frames - 1)], n // 2 if given.get("center", True) else 0
        whole = torch.ops.aten.unfold_backward(squares.expand(1, frames, n), size, 1, n, hop)
        least = whole[:, start : start + made.shape[-1]].abs().min()
        torch._assert_async(least > 1e-11, "window overlap add min: 1")
    return made


@_FORMS.rule(torch.dropout)
def _dropout(input: Tensor, p: float, train: bool) -> Tensor | None:
    """torch's form in Python copies what nothing is dropped of, whatever `p` is."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p:g}")
    return None if train and p else input


# ---------------------------------------------------------------------------- running products


def _learns(input: Tensor) -> bool:
    """Whether an autograd function of ours is to stand for a call."""
    return input.requires_grad and torch.is_grad_enabled() and not is_transforming()


class _Prod(torch.autograd.Function):
    """A product over one axis. Eager divides by each factor where nothing is zero, or else scans.

    Here rows without a zero divide. A lone zero gets the product of the others; the rest of its
    row has no gradient, nor has anything where two are zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> Tensor:
        made = torch.prod(x, axis, True)
        ctx.axis = axis
        ctx.save_for_backward(x, made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, made), (grad,) = ctx.saved_tensors, grads
        if torch.is_grad_enabled():  # what follows has no gradient of its own at zeros
            again = torch.prod(x, ctx.axis, True)
            return torch.autograd.grad(again, x, grad, create_graph=True)[0], None
        is_zero = x == 0
        zeros = is_zero.sum(ctx.axis, True, dtype=torch.int32)
        others = x.masked_fill(is_zero, 1).prod(ctx.axis, True)
        rest = torch.where(is_zero & (zeros == 1), others, made)
        return torch.where(zeros == 0, grad * made / x, grad * rest), None


@_FORMS.rule(torch.prod, Tensor.prod)
def _prod(input: Tensor, *given: Any, **named: Any) -> Any:
    """Of floats along an axis or of all of them without a loop or a look at values."""
    places = {**dict(zip(("dim", "keepdim"), given)), **named}
    dim, dtype = places.get("dim"), places.get("dtype") or input.dtype
    is_plain = input.is_floating_point() and dtype.is_floating_point and input.dim() > 0
    is_axis = dim is None or (type(dim) is int and _fits(input, (dim,)))
    if not (is_plain and _learns(input) and is_axis) or len(given) > 2 or {*named} - _OF_PROD:
        return None
    x = input if dtype is input.dtype else input.to(dtype)
    if dim is None:
        return _Prod.apply(x.flatten(), 0).squeeze(0)  # type: ignore[no-untyped-call]
    made = _Prod.apply(x, dim)  # type: ignore[no-untyped-call]
    return made if places.get("keepdim") else made.squeeze(dim)


_OF_PROD = {"dim", "keepdim", "dtype"}


class _Cumprod(torch.autograd.Function):
    """torch.cumprod, and its gradient without a loop over a length.

    source   torch/csrc/autograd/FunctionsManual.cpp, cumprod_backward
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        made = torch.cumprod(x, dim)
        ctx.dim = dim
        ctx.save_for_backward(x, made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, made), dim = ctx.saved_tensors, ctx.dim

        def from_here(terms: Tensor) -> Tensor:
            return terms.flip(dim).cumsum(dim).flip(dim)

        is_zero = x == 0
        zeros = is_zero.cumsum(dim)
        is_first = is_zero & (zeros == 1)
        without = torch.cumprod(x.masked_fill(is_first, 1), dim)  # the first zero of a row
        before = from_here(made * grads[0]) / x
        at_zero = torch.where(is_first, from_here(without * grads[0]), 0)
        return torch.where(zeros == 0, before, at_zero), None


@_FORMS.rule(torch.cumprod, Tensor.cumprod)
def _cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    is_plain = input.is_floating_point() and dtype in (None, input.dtype) and input.dim() > 0
    if not (is_plain and _learns(input)):
        return None
    return _Cumprod.apply(input, dim)  # type: ignore[no-untyped-call]


@_FORMS.rule(torch.linalg.vander)
def _vander(x: Tensor, *, N: Any = None) -> Any:
    """source   aten/src/ATen/native/BatchLinearAlgebra.cpp, linalg_vander"""
    if x.dim() < 1 or not x.is_floating_point() or not (n := x.shape[-1] if N is None else N) > 1:
        return None
    powers = IN_OTHERS[torch.cumprod](x.unsqueeze(-1).expand(*x.shape, n - 1), -1)
    return torch.cat([torch.ones_like(x).unsqueeze(-1), powers], -1)


# ---------------------------------------------------------------------------- places
# `x[key]` with integers that are open, whose numbers C++ would ask for.


def of_place(function: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """The form of a call that takes what is at an open place; None: it is another one."""
    if function is not operator.getitem or not isinstance(args[0], Tensor):
        return None
    return _item if is_place_open(args[1]) else None


def is_place_open(key: Any) -> bool:
    """Whether an integer that is open is among indices that are integers and slices."""
    parts = key if type(key) is tuple else (key,)
    plain = int, slice, torch.SymInt, types.EllipsisType, types.NoneType
    return any(type(x) is torch.SymInt for x in parts) and all(type(x) in plain for x in parts)


def places_of(
    key: Any, dims: int, is_open: Callable[[Any], bool]
) -> tuple[tuple[Any, ...], list[tuple[int, Any]]]:
    """An index of so many dimensions without its open places, () where it takes all; and these,
    the last one first, each with its axis in what that gives."""
    parts, axis, places = key if type(key) is tuple else (key,), 0, []
    rest = dims - sum(part is not None and part is not Ellipsis for part in parts)
    for part in parts:
        if is_open(part):
            places.append((axis, part))
        axis += rest if part is Ellipsis else type(part) is not int
    whole = tuple(slice(None) if is_open(part) else part for part in parts)
    is_left = any(part is not Ellipsis and part != slice(None) for part in whole)
    return whole if is_left else (), places[::-1]


def _item(x: Tensor, key: Any) -> Tensor:
    whole, places = places_of(key, x.dim(), lambda part: type(part) is torch.SymInt)
    part = x[whole] if whole else x
    with contextlib.suppress(IndexError):  # C++ says it in its own words
        for place, index in places:
            part = torch.select(part, place, index)
        return part
    return x[key]


def _or_itself(function: Any, form: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        found = form(*args, **kwargs)
        return function(*args, **kwargs) if found is None else found

    return run


IN_OTHERS: dict[Any, Callable[..., Any]] = {
    function: _or_itself(function, form) for function, form in _FORMS.items()
}
FORMS.update(IN_OTHERS)
COMPOSITES: dict[Any, Callable[..., Tensor]] = {
    **IN_OTHERS,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, operator.matmul), matmul),
    torch.ops.aten.matmul.default: matmul,
    torch._C._nn.linear: linear,
}
# Whose own steps ask for values, of known sizes too.
WITHOUT_VALUES = {of: IN_OTHERS[of] for of in (torch.istft, Tensor.istft)}
# For capture, of open sizes, and what gives the same of known ones: torch 2.11's quantile compares
# its own tensors.
LONGER = {**COMPOSITES, _nn.scaled_dot_product_attention: attention}
SHORTER: dict[Any, Callable[..., Tensor]] = {
    _nn.scaled_dot_product_attention: attention,
    **{of: IN_OTHERS[of] for of in _QUANTILES},
    **WITHOUT_VALUES,
}
