"""Twins: tensors without data that stand for the program's tensors while it is traced.

Plain meta tensors are quick, and right with the results of fusee.fake where theirs are not
the CPU's.
But few of torch's meta kernels accept symbolic sizes; with these the twins are torch's FakeTensors,
of the mode that already holds the sizes' facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fusee.aten.torch_api import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    python_dispatcher,
    same_ints,
)
from fusee.fake.products import LAYERS, layer_results
from fusee.fake.rules import BINARY, COMPARING, FLOAT_BINARY, FLOAT_UNARY, METAS, overload

# ---------------------------------------------------------------------------- geometry
# Sizes and strides of results by formula, for operators on tensors with symbolic sizes.
#
# torch's FakeTensor decomposes and guards its way to a result, some hundred milliseconds an
# operator. The operators here have results whose geometry is an operand's, or row-major: no guard
# is needed. Each function returns None where that is not so, and torch decides.

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


# ---------------------------------------------------------------------------- twins


_META = torch.device("meta")


def is_opaque(x: torch.Tensor) -> bool:
    """Whether only ATen reads `x`: complex numbers, or real ones that are negated when read."""
    return x.dtype.is_complex or x.is_neg()


def holds_opaque(args: Iterable[Any]) -> bool:
    """Whether one of these arguments is opaque, or has such a tensor in it."""
    for x in args:
        if isinstance(x, torch.Tensor):
            if is_opaque(x):
                return True
        elif isinstance(x, (list, tuple)) and holds_opaque(x):
            return True
    return False


class Twins(Protocol):
    """Makes twins, and runs operators on them. No tracer may be active."""

    def empty(
        self, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def view(self, op: OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The twin of a view. Whether it shares the storage of `x` is the caller's to know."""
        ...


class MetaTwins:
    """For sizes that are all known."""

    def empty(
        self, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=_META)

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        return (METAS.get(op) or op)(*args, **kwargs)

    def view(self, op: OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = op(x, *args, **kwargs)
        return out


class FakeTwins:
    """For symbolic sizes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def empty(
        self, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # Under the mode torch.empty_strided takes 2 ms, most of it for a cache that never hits.
        data = torch.empty_strided(size, stride, dtype=dtype, device=_META)
        return FakeTensor(self.mode, data, device)

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        formula = GEOMETRY.get(op)
        found = formula(*args, **kwargs) if formula is not None else None
        if found is not None:
            device = next(x.device for x in args if isinstance(x, torch.Tensor))
            made = [self.empty(*geometry, device) for geometry in found]
            return made[0] if len(made) == 1 else tuple(made)
        with python_dispatcher(), self.mode:
            return op(*args, **kwargs)

    def view(self, op: OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        formula = VIEWS.get(op)
        if formula is not None and same_ints((x.storage_offset(),), (0,)):
            found = formula(x, *args, **kwargs)
            if found is not None:
                return self.empty(*found, x.device)
        out: torch.Tensor = op(x, *args, **kwargs)
        return out
