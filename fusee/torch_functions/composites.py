"""Functions of torch that ask for a value of a tensor, or of a number that varies, or lack a fake
kernel: by others.

Each goes by torch's own formula, which its source names, where no mode of the user's hears of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fusee.capture import calls
from fusee.capture.attributes import Capturing
from fusee.capture.builtins import Stand, stands_for_each
from fusee.capture.dynamic import Number
from fusee.capture.torch_api import FakeTensor, shape_as_tensor
from fusee.source import Args, Kwargs


def composes(*functions: Any) -> Callable[[Stand], Stand]:
    """`stands_for_each`, where nothing hears which functions are called."""

    def register(stand: Stand) -> Stand:
        def unheard(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
            if m.modes or m.world.seen:
                return calls.on_tensors(m, function, args, kwargs)
            return stand(function, m, *args, **kwargs)

        stands_for_each(*functions)(unheard)
        return stand

    return register


@composes(shape_as_tensor)
def _shape_as_tensor(function: Any, m: Capturing, x: Any) -> Any:
    return m.call(torch.tensor, [*m.attribute(x, "shape")], dtype=torch.int64, device="cpu")


@composes(torch.Tensor.dim_order)
def _dim_order(function: Any, m: Capturing, x: Any, **kwargs: Any) -> Any:
    """Torch does not tell `__torch_function__` of its keyword."""
    return m.world.recorder.call(function, x, **kwargs)


@composes(F.one_hot)
def _one_hot(function: Any, m: Capturing, x: Any, num_classes: Any = -1) -> Any:
    if type(num_classes) is int and num_classes == -1 and m.world.recorder.reads_numbers:
        num_classes = m.call(torch.Tensor.item, m.call(torch.Tensor.max, x)) + 1
    return calls.on_tensors(m, function, (x, num_classes), {})


# torch's own ask for the value of a tensor: whether observations are left after the correction.


@composes(torch.cov, torch.Tensor.cov)
def _cov(function: Any, m: Capturing, x: Any, *, correction: Any = 1, **weights: Any) -> Any:
    """source   aten/src/ATen/native/Correlation.cpp"""
    is_plain = not weights and isinstance(x, FakeTensor) and x.dtype is not torch.bool
    rows = m.call(torch.Tensor.view, x, (1, -1)) if is_plain and x.dim() < 2 else x
    count = m.attribute(rows, "shape")[1] if is_plain and rows.dim() == 2 else 0
    if not is_plain or not m.truth(count > correction):
        return calls.on_tensors(m, function, (x,), {"correction": correction, **weights})
    mean = m.call(operator.truediv, m.call(torch.Tensor.sum, rows, 1, True), count)
    rest = m.call(operator.sub, rows, mean)
    made = m.call(torch.mm, rest, m.call(torch.conj, m.call(torch.t, rest)))
    return m.call(torch.squeeze, m.call(operator.truediv, made, count - correction))


@composes(torch.corrcoef, torch.Tensor.corrcoef)
def _corrcoef(function: Any, m: Capturing, x: Any) -> Any:
    if not isinstance(x, FakeTensor) or x.dim() not in (1, 2):
        return calls.on_tensors(m, function, (x,), {})
    made = _cov(torch.cov, m, x)
    if not made.dim():
        return m.call(operator.truediv, made, made)
    spread = m.call(torch.diagonal, made)
    spread = m.call(torch.sqrt, m.call(torch.real, spread) if made.is_complex() else spread)
    for axis in (1, 0):
        made = m.call(operator.truediv, made, m.call(torch.unsqueeze, spread, axis))
    if not made.is_complex():
        return m.call(torch.clip, made, -1, 1)
    parts = [m.call(torch.clip, m.call(part, made), -1, 1) for part in (torch.real, torch.imag)]
    return m.call(torch.complex, *parts)


@composes(torch.kaiser_window)
def _kaiser(
    function: Any, m: Capturing, n: Any, periodic: Any = True, beta: Any = 12.0, **named: Any
) -> Any:
    """source   aten/src/ATen/native/TensorFactories.cpp, kaiser_window, which has no fake kernel"""
    made = named.get("dtype") or torch.get_default_dtype()
    is_usual = made in (torch.float32, torch.float64) and {*named} <= {"dtype", "device"}
    if not is_usual or type(periodic) is not bool or not m.truth(n > 1):
        return calls.on_tensors(m, function, (n, periodic, beta), named)
    half, given = (n + periodic - 1) / 2, {**named, "dtype": made}
    at = m.call(torch.arange, n + periodic, **given)
    at = m.call(operator.truediv, m.call(operator.sub, at, half), half)
    root = m.call(torch.sqrt, m.call(operator.sub, 1, m.call(torch.square, at)))
    whole = m.call(torch.i0, m.call(torch.full, (), beta, **given))
    window = m.call(operator.truediv, m.call(torch.i0, m.call(operator.mul, root, beta)), whole)
    return m.call(torch.Tensor.narrow, window, 0, 0, n) if periodic else window


# torch takes a number as a parameter there. One that varies is a factor of ones, or a tensor.


_OPEN = Number, torch.SymFloat


def _argument(place: int, name: str, args: Args, kwargs: Kwargs) -> Any:
    """An argument, whichever way it is given; None if it is not."""
    return args[place] if len(args) > place else kwargs.get(name)


def _with(value: Any, place: int, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with another value for that one."""
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


_FILLS = {torch.full: 1, torch.full_like: 1, torch.Tensor.new_full: 2}


@composes(*_FILLS)
def _full(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """source   aten/src/ATen/native/TensorFactories.cpp"""
    given = _FILLS[function], "fill_value", args, kwargs
    value = _argument(*given)
    if type(value) in _OPEN and "out" not in kwargs:
        ones = calls.on_tensors(m, function, *_with(m.kind_of(value)(1), *given))
        if ones.is_floating_point() and not ones.requires_grad and _fits(m, value, ones.dtype):
            return m.call(torch.Tensor.mul_, ones, value)
    return calls.on_tensors(m, function, args, kwargs)  # by way of the value


def _fits(m: Capturing, value: Any, dtype: torch.dtype) -> bool:
    """Whether torch does not refuse a number from outside as too large, which is a fact then."""
    if type(value) is torch.SymFloat or not value.origins or dtype is torch.float64:
        return True
    return bool(m.truth(m.call(operator.le, m.call(abs, value), torch.finfo(dtype).max)))


_METHODS = {"fill_": 1, "masked_fill": 2, "masked_fill_": 2, "index_fill": 3, "index_fill_": 3}
_INTO = {getattr(torch.Tensor, name): place for name, place in _METHODS.items()}
_INTO |= {torch.fill_: 1, torch.masked_fill: 2, torch.index_fill: 3}


@composes(*_INTO)
def _filled(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """source   aten/src/ATen/native/TensorAdvancedIndexing.cpp, which makes a tensor of it too"""
    given = _INTO[function], "value", args, kwargs
    value = _argument(*given)
    x: Any = args[0] if args else None
    if type(value) in _OPEN and isinstance(x, FakeTensor) and x.is_floating_point():
        value = m.call(torch.full, (), value, dtype=x.dtype, device=x.device)
        args, kwargs = _with(value, *given)
    return calls.on_tensors(m, function, args, kwargs)
