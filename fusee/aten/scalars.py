"""Floats that a graph reads from tensors: a learning rate, a count of steps.

`x.item()` becomes a Scalar: the tensor it was read from, as float64, in which Python computes too.
Where a torch call takes one as a number, the call becomes one on tensors: the number has the
precision in which ATen computes for the other operands, and never decides the result's dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusee.errors import TraceError

__all__ = ["Scalar", "holds_scalar", "is_read", "on_tensors", "read", "returned"]

_HALF = (torch.bfloat16, torch.float16)


class Scalar:
    """A Python float of the program, as a float64 tensor without axes.

    known   what torch.compile has for it, which becomes a guard when it is made a float
    """

    __slots__ = ("known", "value")

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.known: Any = None

    def like(self, x: Tensor) -> Tensor:
        """As ATen has a number that meets `x`."""
        dtype = torch.result_type(x, 1.0)
        return self.value.to(torch.float32 if dtype in _HALF else dtype)


def is_read(call: Any, args: Any) -> bool:
    """Whether a call reads a float from a tensor."""
    return call is torch.Tensor.item and args[0].dim() == 0 and args[0].is_floating_point()


def read(x: Tensor) -> Scalar:
    return Scalar(x.detach().to(torch.float64))


def holds_scalar(args: Any) -> bool:
    """Whether a Scalar is among arguments."""
    return any(
        type(x) is Scalar or (isinstance(x, (list, tuple)) and holds_scalar(x)) for x in args
    )


def returned(x: Any) -> Any:
    """The float itself in place of a Scalar: torch.compile guards it. raises TraceError"""
    if type(x) is not Scalar:
        return x
    if not isinstance(x.known, torch.SymFloat):
        raise TraceError(
            "a call needs the value of a float that the graph reads from a tensor",
            did="stopped tracing this graph; the caller may run it eagerly",
        )
    return float(x.known)


def on_tensors(call: Any) -> Callable[..., Any] | None:
    """What stands for a call that takes Scalars; None if nothing does."""
    if call in _ARITHMETIC:
        return _arithmetic(call)
    full = call.__name__
    name = full.strip("_").removeprefix("foreach_")
    form = _FORMS.get(name) or _FORMS.get(name.removeprefix("i"))
    if form is None:
        return None
    writes = name not in _FORMS or (full.endswith("_") and not full.endswith("__"))
    one = _writing(form) if writes else _keeping_dtype(form)
    return _for_each(one) if "foreach" in full else one


# ------------------------------------------------------------------------------ between numbers

_ARITHMETIC: dict[Any, Callable[..., Tensor]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.true_divide,
    operator.pow: torch.pow,
    operator.neg: torch.neg,
}


def _arithmetic(call: Any) -> Callable[..., Any]:
    def compute(*operands: Any) -> Any:
        if any(isinstance(x, Tensor) for x in operands):
            x, y = operands
            if isinstance(x, Scalar):
                return _cast(call(x.like(y), _widened(y)), torch.result_type(y, 1.0))
            return _cast(call(_widened(x), y.like(x)), torch.result_type(x, 1.0))
        numbers = [x.value if isinstance(x, Scalar) else x for x in operands]
        return Scalar(call(*numbers))

    return compute


# ------------------------------------------------------------------------------ with tensors


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _widened(x: Any) -> Any:
    """As ATen computes with it: a half is rounded once, at the end."""
    return x.to(torch.float32) if isinstance(x, Tensor) and x.dtype in _HALF else x


def _number(x: Any, like: Tensor) -> Any:
    return x.like(like) if isinstance(x, Scalar) else x


def _scaled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Addition or subtraction of what may be scaled."""

    def form(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
        y, alpha = _number(y, x), _number(alpha, x)
        return function(x, y * alpha if isinstance(alpha, Tensor) or alpha != 1 else y)

    return form


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: function(x, _number(y, x))


def _addcmul(x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return torch.add(x, _number(value, x) * a * b)


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return torch.add(x, _number(value, x) * a / b)


def _lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    return torch.lerp(x, end, _cast(_number(weight, x), x.dtype).expand_as(x))


_FORMS: dict[str, Callable[..., Tensor]] = {
    "add": _scaled(torch.add),
    "sub": _scaled(torch.sub),
    "mul": _binary(torch.mul),
    "multiply": _binary(torch.mul),
    "div": _binary(torch.true_divide),
    "truediv": _binary(torch.true_divide),
    "divide": _binary(torch.true_divide),
    "true_divide": _binary(torch.true_divide),
    "pow": _binary(torch.pow),
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
}


def _keeping_dtype(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtype = torch.result_type(x, 1.0)
        for other in args:
            if isinstance(other, Tensor):
                dtype = torch.promote_types(dtype, torch.result_type(x, other))
        return _cast(form(*map(_widened, (x, *args)), **kwargs), dtype)

    return call


def _writing(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: x.copy_(form(*map(_widened, (x, *args)), **kwargs))


def _for_each(one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """One call for each tensor of lists; what is no list is the same for all."""

    def call(xs: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        def at(argument: Any, k: int) -> Any:
            return argument[k] if isinstance(argument, (list, tuple)) else argument

        return [
            one(x, *(at(a, k) for a in args), **{key: at(a, k) for key, a in kwargs.items()})
            for k, x in enumerate(xs)
        ]

    return call
