"""What meta results are made of: the table of functions, empty tensors, layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = [
    "METAS",
    "Op",
    "broadcast",
    "empty",
    "is_dense",
    "laid_out",
    "like",
    "meta",
    "overload",
    "suggested_layout",
]

aten = torch.ops.aten

Op = Any  # an OpOverload
Meta = Callable[..., Any]

METAS: dict[Op, Meta] = {}


def meta(*ops: Op) -> Callable[[Meta], Meta]:
    """Registers a function that gives the results of operators."""

    def register(function: Meta) -> Meta:
        METAS.update(dict.fromkeys(ops, function))
        return function

    return register


def overload(name: str) -> Op:
    """`add.Tensor` -> aten.add.Tensor, `relu` -> aten.relu.default."""
    packet, _, kind = name.partition(".")
    found: Op = getattr(getattr(aten, packet), kind or "default")
    return found


def empty(shape: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def broadcast(*shapes: Sequence[Any]) -> Sequence[Any]:
    """torch.broadcast_shapes, which imports sympy at its first call and takes long.

    raises   RuntimeError
    """
    rank = max(map(len, shapes))
    found = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if found[axis] == 1:
                found[axis] = size
            elif size not in (1, found[axis]):
                raise RuntimeError(f"sizes {', '.join(map(str, shapes))} do not broadcast")
    return found


def laid_out(shape: Sequence[Any], dtype: torch.dtype, layout: torch.memory_format) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=layout)


def like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch.empty_like, which takes 100 us on meta tensors and imports sympy at its first call."""
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=dtype, device="meta")
    strides = x.stride() if is_dense(x) else _dense_strides(x)
    return torch.empty_strided(x.shape, strides, dtype=dtype, device="meta")


def _dense_strides(x: torch.Tensor) -> list[int]:
    """Strides without gaps, of axes in the order of those of `x` as far as that is certain.

    source   at::infer_dense_strides, aten/src/ATen/ExpandUtils.cpp
    """
    size, stride = x.shape, x.stride()
    order = list(range(x.dim()))[::-1]
    for i in range(1, len(order)):
        place = i
        for k in range(i - 1, -1, -1):
            a, b = order[k], order[place]
            if stride[a] == 0 or stride[b] == 0:
                continue  # either may come first
            if (stride[a], size[a]) > (stride[b], size[b]):
                order[k], order[place] = b, a
                place = k
            elif stride[a] < stride[b]:
                break
    found, step = [0] * len(order), 1
    for axis in order:
        found[axis] = step
        step *= max(size[axis], 1)
    return found


def is_dense(x: torch.Tensor) -> bool:
    """Whether the elements of `x`, of known sizes, fill its memory without gaps."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def suggested_layout(x: torch.Tensor) -> torch.memory_format:
    """What at::Tensor::suggest_memory_format says: channels-last only if strides say nothing else.

    source   c10/core/MemoryFormat.h, is_channels_last_strides_2d_s4 and _3d_s5
    """
    if x.dim() == 4 and _is_channels_last(x, (1, 3, 2, 0)):
        return torch.channels_last
    if x.dim() == 5 and _is_channels_last(x, (1, 4, 3, 2, 0)):
        return torch.channels_last_3d
    return torch.contiguous_format


def _is_channels_last(x: torch.Tensor, order: tuple[int, ...]) -> bool:
    size, stride = x.shape, x.stride()
    least: Any = 0
    if stride[1] == 0:
        return False
    for axis in order:
        if size[axis] == 0 or stride[axis] < least:
            return False
        if axis == 0 and least == stride[1]:  # N111 is row-major
            return False
        least = stride[axis]
        if size[axis] > 1:
            least = least * size[axis]
    return True
