"""The private API of torch that stand-ins for its functions need. Tested with torch 2.11 to 2.13.

torch._numpy             NumPy's functions on tensors
torch.ops.higher_order   operators that take functions
torch._shape_as_tensor   sizes, as a tensor
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

higher_order: Any = torch.ops.higher_order
shape_as_tensor: Any = torch._shape_as_tensor


@functools.cache
def _torch_numpy() -> Any:
    return importlib.import_module("torch._numpy")


def as_array(tensor: torch.Tensor) -> Any:
    """What functions of torch._numpy take for a tensor."""
    return _torch_numpy().ndarray(tensor)


def tensor_of(x: Any) -> torch.Tensor | None:
    """The tensor behind what torch._numpy gives; None if it is no array."""
    found: torch.Tensor | None = x.tensor if isinstance(x, _torch_numpy().ndarray) else None
    return found


@functools.cache
def counterparts() -> dict[Any, Any]:
    """NumPy's functions and methods -> torch._numpy's, which have the same names."""
    numpy, made = sys.modules["numpy"], _torch_numpy()
    found: dict[Any, Any] = {}
    for name in ("", "linalg", "fft"):
        theirs, torchs = (getattr(x, name) if name else x for x in (numpy, made))
        for key, function in vars(torchs).items():
            if key[0] != "_" and callable(function) and callable(getattr(theirs, key, None)):
                found[getattr(theirs, key)] = function
    for key, function in vars(made.ndarray).items():
        for kind in {numpy.ndarray, numpy.generic, *numpy.sctypeDict.values()}:
            if key[:2] != "__" and callable(function) and hasattr(kind, key):
                found[getattr(kind, key)] = function
    return found


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class _Explicit(TorchFunctionMode):
    """Data without a dtype get NumPy's: torch._numpy switches torch's default for them instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {
            key: _DTYPES.get(x, x) if key == "dtype" else x for key, x in (kwargs or {}).items()
        }
        if func is torch.as_tensor and not isinstance(args[0], torch.Tensor):
            data = sys.modules["numpy"].asarray(args[0])
            dtype = kwargs.get("dtype") or getattr(torch, data.dtype.name)
            if isinstance(args[0], (bool, int, float, complex)):
                return torch.full((), args[0], dtype=dtype)
            kwargs = {"dtype": dtype}
        return func(*args, **kwargs)


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Within it torch._numpy has NumPy's default dtypes; it would import torch._dynamo for them."""
    space: Any = importlib.import_module("torch._numpy._dtypes_impl")
    before = space._default_dtypes
    space._default_dtypes = space.DefaultDTypes(torch.float64, torch.complex128, torch.int64)
    try:
        with _Explicit():
            yield
    finally:
        space._default_dtypes = before
