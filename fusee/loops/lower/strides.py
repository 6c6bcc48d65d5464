"""Strides of tensors, in elements: which order of dimensions they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusee.sym.expr import Size, Symbol
from fusee.sym.parts import coefficient, hint

Shape = tuple[Size, ...]


def contiguous(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Row-major strides. Dimensions of size 0 count as 1, as in torch."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (size if size != 0 else 1)
    return tuple(reversed(strides))


def dense(shape: Sequence[Size], order: Sequence[int]) -> tuple[Size, ...]:
    """Strides without holes, dimension order[0] being the widest."""
    strides: list[Size] = [1] * len(shape)
    step: Size = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * (shape[dim] if shape[dim] != 0 else 1)
    return tuple(strides)


def same_strides(shape: Shape, a: Sequence[Size], b: Sequence[Size]) -> bool:
    """True if both place elements alike; strides of dimensions of size 1 say nothing."""
    return all(size == 1 or x == y for size, x, y in zip(shape, a, b, strict=True))


def stride_order(shape: Shape, strides: Sequence[Size]) -> list[int]:
    """Dimensions from the widest stride to the narrowest."""
    return sorted(range(len(shape)), key=lambda k: (-hint(strides[k]), k))


def dense_like(shape: Shape, strides: tuple[Size, ...]) -> tuple[Size, ...]:
    """`strides` if they have no holes and no overlap, else dense ones of the same order."""
    if strides == contiguous(shape):
        return strides
    return dense(shape, stride_order(shape, strides))


def axis_strides(index: Size, axes: dict[int, Symbol]) -> dict[int, int] | None:
    """Each axis's stride in a flat index, at its hint; None unless all of them move it linearly."""
    if isinstance(index, int):
        return None
    strides: dict[int, int] = {}
    for k, axis in axes.items():
        coef: Any = index.terms.get((axis,))
        if coef is None:
            parts = coefficient(index, axis)
            if parts is None or parts[0] == 0:
                return None
            coef = hint(parts[0])
        strides[k] = abs(coef)
    return strides
