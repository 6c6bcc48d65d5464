"""Kinds of objects, by how a capture guards them: by value, by identity, or part by part."""

from __future__ import annotations

import collections
import enum
import re
import types
import typing
from typing import Any

import torch

from fusee.capture.frame import Marker
from fusee.capture.torch_api import IN_CPP

__all__ = [
    "BOUND_IN_C", "CONTAINERS", "EXACT", "FIXED", "HELD_OWNERS", "IMMUTABLE", "is_named",
    "is_scalar",
]  # fmt: skip

# Guarded by value. Their instances hold nothing else.
_SCALARS = frozenset((
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range, re.Pattern,
))  # fmt: skip
EXACT = (int, bool, str, bytes, type(None))  # == and the class tell all of them apart
# Guarded by identity.
FIXED = (
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, torch.nn.Module,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.CodeType,
    types.GetSetDescriptorType, types.MemberDescriptorType, property, classmethod, staticmethod,
    Marker, torch.optim.Optimizer, types.UnionType, types.GenericAlias, type(typing.ClassVar),
)  # fmt: skip

# Those of modules and classes are fixed themselves.
BOUND_IN_C = (types.BuiltinFunctionType, types.MethodWrapperType)
HELD_OWNERS = (types.ModuleType, type, type(None), IN_CPP)

CONTAINERS = (list, dict, set, collections.deque)
IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


_NAMED = (
    types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ModuleType,
    type,
)  # fmt: skip


def is_named(x: Any) -> bool:
    """Whether `x` is a function, class or module, which == tells from all else."""
    if isinstance(x, types.BuiltinFunctionType):
        return isinstance(x.__self__, HELD_OWNERS)
    return isinstance(x, _NAMED) and type(x).__eq__ is object.__eq__


def is_scalar(x: Any) -> bool:
    """Whether `x` is guarded by its value and needs no origin."""
    return type(x) in _SCALARS or isinstance(x, (enum.Enum, torch.Size))
