"""Element-wise ATen ops: how operands are brought to one dtype and shape, and the table of ops.

ATen computes every op in one dtype: the result's, float32 for bfloat16 and float16, or, for ops
that return bool, what its operands promote to. Each op rounds to its result's dtype at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fusee.loops.ir import Value, cast
from fusee.loops.lower.numbers import literal, opmath
from fusee.loops.lower.shape import narrow
from fusee.loops.lower.strides import Shape
from fusee.loops.lower.table import HANDLERS, REFUSALS, Call, Refusal
from fusee.loops.lower.tensor import Index, Lowering, Number, Pieces, Tensor
from fusee.sym.expr import Expr, known_eq

Operand = Tensor | Number
Scalar = Callable[..., Value]

# ------------------------------------------------------------------------------ promotion


def _rank(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 2 if dtype.is_floating_point else 1


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """torch's rule for a group of operands that outranks another."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    if _rank(lower) > _rank(higher):
        return torch.promote_types(higher, lower)
    return higher


def _number_dtype(x: Number) -> torch.dtype:
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, float):
        return torch.get_default_dtype()
    if isinstance(x, Value) and x.dtype.is_floating_point:
        return torch.get_default_dtype()
    return torch.int64


def promote(operands: Sequence[Operand]) -> torch.dtype:
    """torch.result_type: tensors with dimensions, then those without, then numbers."""
    groups: list[torch.dtype | None] = [None, None, None]
    for x in operands:
        if isinstance(x, Tensor):
            level, dtype = (0 if x.shape else 1), x.dtype
        else:
            level, dtype = 2, _number_dtype(x)
        known = groups[level]
        groups[level] = dtype if known is None else torch.promote_types(known, dtype)
    result = _combine(_combine(groups[0], groups[1]), groups[2])
    assert result is not None
    return result


# ------------------------------------------------------------------------------ operands


def reader(
    lowering: Lowering, x: Operand, shape: Shape, common: torch.dtype, compute: torch.dtype
) -> Callable[[Index], Value]:
    """Reads the operand, broadcast to `shape`, in the dtype `compute`.

    A full tensor's elements pass through `common` on their way; numbers and tensors without
    dimensions go there directly, since ATen reads them in its computing dtype.
    """
    if not isinstance(x, Tensor):
        value = lowering.number(x, compute)
        return lambda ix: value
    if x.shape == shape:
        if x.dtype is common or x.dtype is compute:
            return lambda ix: cast(x.at(ix), compute)
        return lambda ix: cast(cast(x.at(ix), common), compute)
    if not x.shape:
        return lambda ix: cast(x.at(()), compute)
    if lowering.is_costly(x):
        lowering.realise(x)
    lead = len(shape) - len(x.shape)
    keep = [None if size == 1 else lead + k for k, size in enumerate(x.shape)]

    def read(ix: Index) -> Value:
        value = x.at(tuple(0 if k is None else ix[k] for k in keep))
        return cast(cast(value, common), compute)

    return read


def pointwise(
    lowering: Lowering,
    operands: Sequence[Operand],
    fn: Scalar,
    shape: Shape,
    dtype: torch.dtype,
    common: torch.dtype | None = None,
    strides: tuple[Any, ...] | None = None,
) -> Tensor:
    """fn over operands broadcast to `shape`, computed in `common`'s opmath, rounded to `dtype`."""
    common = dtype if common is None else common
    compute = opmath(common)
    tensors = [x for x in operands if isinstance(x, Tensor)]
    apart = _in_pieces(operands, shape)
    if apart is not None:
        dim, starts, parts = apart
        results = tuple(
            pointwise(lowering, part, fn, part_shape, dtype, common) for part, part_shape in parts
        )
        result = lowering.beside(shape, dtype, Pieces(dim, starts, results))
        result.strides = strides
        return result
    readers = [reader(lowering, x, shape, common, compute) for x in operands]

    def at(ix: Index) -> Value:
        return cast(fn(*[read(ix) for read in readers]), dtype)

    return lowering.computed(shape, dtype, at, tensors, strides)


def _in_pieces(
    operands: Sequence[Operand], shape: Shape
) -> tuple[int, tuple[Any, ...], list[tuple[list[Operand], Shape]]] | None:
    """Operands cut alike, if one of them lies in pieces and the others can be cut where it is."""
    model: Pieces | None = None
    dim = -1
    for x in operands:
        if isinstance(x, Tensor) and x.pieces is not None and x.storage is None:
            place = len(shape) - len(x.shape) + x.pieces.dim
            if model is None:
                model, dim = x.pieces, place
            elif place != dim or x.pieces.starts != model.starts:
                return None
    if model is None:
        return None
    own = model.tensors[0]
    lead = len(shape) - len(own.shape)
    parts: list[tuple[list[Operand], Shape]] = []
    for start, piece in zip(model.starts, model.tensors, strict=True):
        length = piece.shape[dim - lead]
        cut: list[Operand] = []
        for x in operands:
            place = dim if not isinstance(x, Tensor) else dim - len(shape) + len(x.shape)
            if isinstance(x, Tensor) and place >= 0 and known_eq(x.shape[place], shape[dim]):
                cut.append(narrow(x, place, start, length))
            else:
                cut.append(x)
        parts.append((cut, (*shape[:dim], length, *shape[dim + 1 :])))
    return dim, model.starts, parts


# ------------------------------------------------------------------------------ rows


def row(
    overloads: Sequence[OpOverload],
    fn: Scalar,
    operands: int | tuple[int, ...] = 1,
    *,
    rounds: bool = False,
    returns_bool: bool = False,
    unless: Refusal | None = None,
) -> None:
    """Register pointwise ops that compute `fn`.

    operands      how many of the leading arguments are operands, or their positions; the other
                  arguments go to fn by position after them and by name
    returns_bool  computed in the dtype that the operands promote to, not in the result's
    rounds        numbers are first rounded to the result's dtype, as ATen does for these ops
    """
    places = tuple(range(operands)) if isinstance(operands, int) else operands

    def handler(call: Call, *args: Any, **kwargs: Any) -> Tensor:
        chosen = [args[k] for k in places]
        rest = [arg for k, arg in enumerate(args) if k not in places]
        meta = call.meta
        common = promote(chosen) if returns_bool else meta.dtype
        if rounds or returns_bool:
            chosen = [_round(call.lowering, x, common) for x in chosen]
        bound: Scalar = fn
        if rest or kwargs:

            def bound(*values: Value) -> Value:
                return fn(*values, *rest, **kwargs)

        return pointwise(call.lowering, chosen, bound, meta.shape, meta.dtype, common, meta.strides)

    for overload in overloads:
        HANDLERS[overload] = handler
        if unless is not None:
            REFUSALS[overload] = unless


def _round(lowering: Lowering, x: Operand, dtype: torch.dtype) -> Operand:
    if isinstance(x, (int, float)):
        return literal(x, dtype)
    if isinstance(x, (Value, Expr)):
        return cast(lowering.number(x, torch.float64 if dtype.is_floating_point else dtype), dtype)
    if not x.shape and x.dtype is not dtype:
        return pointwise(lowering, [x], lambda v: v, (), dtype)
    return x
