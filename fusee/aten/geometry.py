"""Sizes and strides of results by formula, for operators on tensors with symbolic sizes.

torch's FakeTensor decomposes and guards its way to a result, some hundred milliseconds an operator.
The operators here have results whose geometry is an operand's, or row-major: no guard is needed.
Each function returns None where that is not so, and torch decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusee.aten.torch_api import OpOverload, same_ints
from fusee.sym.metas.pointwise import BINARY, COMPARING, FLOAT_BINARY, FLOAT_UNARY
from fusee.sym.metas.recurrent import LAYERS, layer_results
from fusee.sym.metas.table import overload

__all__ = ["GEOMETRY", "VIEWS", "Geometry", "is_row_major"]

aten = torch.ops.aten


class Geometry(NamedTuple):
    """One result."""

    size: Sequence[Any]
    stride: Sequence[Any]
    dtype: torch.dtype


Formula = Callable[..., Sequence[Geometry] | None]
View = Callable[..., Geometry | None]

GEOMETRY: dict[OpOverload, Formula] = {}
VIEWS: dict[OpOverload, View] = {}  # views that begin where their operand begins


def _formula(*ops: OpOverload) -> Callable[[Formula], Formula]:
    def register(function: Formula) -> Formula:
        GEOMETRY.update(dict.fromkeys(ops, function))
        return function

    return register


def _view(op: OpOverload) -> Callable[[View], View]:
    def register(function: View) -> View:
        VIEWS[op] = function
        return function

    return register


def _row_major(size: Sequence[Any]) -> tuple[Any, ...]:
    strides: list[Any] = []
    step: Any = 1
    for n in reversed(size):
        strides.append(step)
        step = step * n
    return tuple(reversed(strides))


def is_row_major(x: torch.Tensor) -> bool:
    """Whether the strides are written as those of a contiguous tensor. Leaves no guard behind."""
    return same_ints(x.stride(), _row_major(x.shape))


def _pointwise(is_unary: bool, to_bool: bool, is_float: bool) -> Formula:
    def formula(*args: Any, **_: Any) -> Sequence[Geometry] | None:
        operands = [x for x in args[: 1 if is_unary else 2] if isinstance(x, torch.Tensor)]
        shaped = [x for x in operands if x.dim() > 0] or operands
        first = shaped[0]
        if not all(
            same_ints(x.shape, first.shape) and same_ints(x.stride(), first.stride())
            for x in shaped[1:]
        ):
            return None
        dtype = first.dtype if is_unary else torch.result_type(args[0], args[1])
        if (is_float and not dtype.is_floating_point) or not is_row_major(first):
            return None
        return [Geometry(first.shape, first.stride(), torch.bool if to_bool else dtype)]

    return formula


for _names, _kind in (
    (FLOAT_UNARY, (True, False, True)),
    (FLOAT_BINARY, (False, False, True)),
    (BINARY, (False, False, False)),
    (COMPARING, (False, True, False)),
):
    for _name in _names:
        GEOMETRY[overload(_name)] = _pointwise(*_kind)


@_formula(aten.linear.default)
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Sequence[Geometry] | None:
    if weight.dim() != 2:
        return None
    size = (*x.shape[:-1], weight.shape[0])
    return [Geometry(size, _row_major(size), x.dtype)]


@_formula(aten._softmax.default, aten._log_softmax.default)
def _softmax(x: torch.Tensor, *_: Any) -> Sequence[Geometry] | None:
    return [Geometry(x.shape, x.stride(), x.dtype)] if is_row_major(x) else None


@_formula(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(x: torch.Tensor, *_: Any) -> Sequence[Geometry] | None:
    if not is_row_major(x):
        return None
    nothing = Geometry((0,), (1,), x.dtype)
    return [Geometry(x.shape, x.stride(), x.dtype), nothing, nothing]


@_formula(aten.native_layer_norm.default)
def _layer_norm(x: torch.Tensor, shape: Any, *rest: Any) -> Sequence[Geometry] | None:
    parameters = [p for p in rest if isinstance(p, torch.Tensor)]
    if not is_row_major(x) or any(p.dtype != x.dtype for p in parameters):
        return None
    outer = x.dim() - len(shape)
    rows = (*x.shape[:outer], *[1] * len(shape))
    statistics = Geometry(rows, _row_major(rows), x.dtype)
    return [Geometry(x.shape, x.stride(), x.dtype), statistics, statistics]


@_formula(aten.clone.default)
def _clone(x: torch.Tensor, **kwargs: Any) -> Sequence[Geometry] | None:
    if kwargs.get("memory_format") is not torch.contiguous_format:
        return None
    return [Geometry(x.shape, _row_major(x.shape), x.dtype)]


@_formula(*LAYERS)
def _recurrent(*args: Any) -> Sequence[Geometry] | None:
    return [Geometry(*result) for result in layer_results(*args)]


# ------------------------------------------------------------------------------ views


@_view(aten.view.default)
def _reshaped(x: torch.Tensor, size: Sequence[Any]) -> Geometry | None:
    return Geometry(size, _row_major(size), x.dtype) if is_row_major(x) else None


@_view(aten.permute.default)
def _permuted(x: torch.Tensor, axes: Sequence[int]) -> Geometry | None:
    size, stride = x.shape, x.stride()
    return Geometry([size[k] for k in axes], [stride[k] for k in axes], x.dtype)


@_view(aten.slice.Tensor)
def _narrowed(x: torch.Tensor, axis: int, start: Any, end: Any, step: int) -> Geometry | None:
    if type(start) is not int or start != 0 or step != 1:
        return None
    size = list(x.shape)
    size[axis] = end
    return Geometry(size, x.stride(), x.dtype)
