"""Twins: tensors without data that stand for the program's tensors while it is traced.

Plain meta tensors are quick, and right with the results of fusee.sym.metas where theirs are not
the CPU's.
But few of torch's meta kernels accept symbolic sizes; with these the twins are torch's FakeTensors,
of the mode that already holds the sizes' facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from fusee.aten.geometry import GEOMETRY, VIEWS
from fusee.aten.torch_api import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    python_dispatcher,
    same_ints,
)
from fusee.sym.metas import METAS

__all__ = ["FakeTwins", "MetaTwins", "Twins", "holds_opaque", "is_opaque"]

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
