"""Floats that a graph computes: read from tensors, as a learning rate is, or made of open sizes.

`x.item()` becomes a Scalar: the tensor it was read from, as float64, in which Python computes
too. Where a torch call takes one as a number, the call becomes one on tensors: the number has the
precision in which ATen computes for the other operands, and never decides the result's dtype.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusee.aten.torch_api import guarded_float, sym_sqrt
from fusee.errors import TraceError
from fusee.fake.open_composites import spaced
from fusee.fake.torch_python import opmath
from fusee.source import HALVES, Args, leaves
from fusee.sym.ranges import FUNCTIONS
from fusee.sym.shape_env import FloatNode, Node, wrapped


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
        return self.value.to(opmath(dtype))


def is_read(call: Any, args: Any) -> bool:
    """Whether a call reads a float from a tensor."""
    return call is Tensor.item and args[0].dim() == 0 and args[0].is_floating_point()


def read(x: Tensor) -> Scalar:
    return Scalar(x.detach().to(torch.float64))


def of_sizes(call: Any) -> Callable[..., Any] | None:
    """What computes a float from open sizes as a Scalar; None if `call` is no such function."""
    form = _OF_SIZES.get(call) or _OF_FLOATS.get(call)
    if form is None:
        return None

    def compute(*args: Any) -> Scalar:
        found = Scalar(form(*(torch.scalar_tensor(x, dtype=torch.float64) for x in args)))
        found.known = call(*args)
        return found

    return compute


def with_scalars(args: Args) -> Args | None:
    """Arguments with Scalars for floats of sizes whose value is open; None: there are none."""
    open_floats = [
        type(x) is torch.SymFloat
        and isinstance(x.node, FloatNode)
        and x.node.maybe_as_float() is None
        for x in args
    ]
    if not any(open_floats) or isinstance(args[0], torch.SymFloat):
        return None
    return tuple(Scalar(_computed(x.node)) if found else x for x, found in zip(args, open_floats))


def _computed(node: Any) -> Tensor:
    if not isinstance(node, FloatNode):
        return torch.scalar_tensor(wrapped(node.env, node.size), dtype=torch.float64)
    if not any(isinstance(x, Node) for x in node.operands):
        return torch.scalar_tensor(node.value, dtype=torch.float64)
    run = _AS_PYTHON.get(node.function) or _OF_FLOATS.get(node.function, node.function)
    return run(*map(_computed, node.operands))


_AS_PYTHON: dict[Any, Callable[..., Tensor]] = {
    float: Tensor.clone,
    min: torch.minimum,
    max: torch.maximum,
}
_OF_SIZES: dict[Any, Callable[..., Tensor]] = {
    operator.truediv: torch.true_divide,
    torch.sym_float: Tensor.clone,
}
# Of one number.
_OF_FLOATS: dict[Any, Callable[[Tensor], Tensor]] = {
    sym_sqrt: torch.sqrt,
    **{x: getattr(torch, x.__name__) for x in FUNCTIONS},
}


def holds_scalar(args: Any) -> bool:
    """Whether a Scalar is among arguments."""
    return any(type(x) is Scalar for x in leaves(args))


def returned(x: Any) -> Any:
    """The float itself in place of a Scalar: torch.compile guards it. raises TraceError"""
    if type(x) is not Scalar:
        return x
    if not isinstance(x.known, torch.SymFloat):
        raise TraceError("a call needs the value of a float that the graph reads from a tensor")
    return guarded_float(x.known)


def passed(x: Any) -> Any:
    """What a call that knows no Scalars is given for one: a float of open sizes stays open in what
    the call is made of, another one becomes its value. raises TraceError"""
    known = x.known if type(x) is Scalar else None
    is_open = isinstance(known, torch.SymFloat) and isinstance(known.node, FloatNode)
    return known if is_open else returned(x)


def on_tensors(call: Any) -> Callable[..., Any] | None:
    """What stands for a call that takes Scalars; None if nothing does."""
    if call in _CHOSEN:

        def choose(*both: Any) -> Scalar:
            x, y = (z.value if type(z) is Scalar else z for z in both)
            return Scalar(torch.where(_CHOSEN[call](y, x), y, x))

        return choose
    if call in _OF_FLOATS:
        return lambda x: Scalar(_OF_FLOATS[call](x.value))
    if call in _ARITHMETIC:

        def compute(*operands: Any) -> Any:
            if any(isinstance(x, Tensor) for x in operands):
                x, y = operands
                if isinstance(x, Scalar):
                    return _cast(call(x.like(y), _widened(y)), torch.result_type(y, 1.0))
                return _cast(call(_widened(x), y.like(x)), torch.result_type(x, 1.0))
            x, *more = (x.value if isinstance(x, Scalar) else x for x in operands)
            if call in _TURNED and not isinstance(x, Tensor):  # in Python this takes twice as long
                return Scalar(_TURNED[call](*more, x))
            return Scalar(call(x, *more))

        return compute
    full = call.__name__
    name = full.strip("_").removeprefix("foreach_")
    form = _FORMS.get(name) or _FORMS.get(name.removeprefix("i"))
    is_in_place = full.endswith("_") and not full.endswith("__")
    if form is None:
        found = _OTHERS.get(full.strip("_"))
        if found is None or not is_in_place:
            return found
        return lambda x, *args, **kwargs: _put(x, found(x, *args, **kwargs))
    writes = name not in _FORMS or is_in_place
    one = _widening(form, writes)
    if "foreach" not in full:
        return one

    def each(xs: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        """One call for each tensor of lists; what is no list is the same for all."""

        def at(argument: Any, k: int) -> Any:
            return argument[k] if isinstance(argument, (list, tuple)) else argument

        return [
            one(x, *(at(a, k) for a in args), **{key: at(a, k) for key, a in kwargs.items()})
            for k, x in enumerate(xs)
        ]

    return each


_ARITHMETIC = frozenset(
    getattr(operator, x) for x in "add sub mul truediv floordiv pow neg".split()
)
_TURNED: dict[Any, Callable[..., Tensor]] = {
    operator.sub: torch.rsub,
    operator.pow: lambda exponent, x: torch.pow(x, exponent),
}
# By Python the second only where it is the less, or the greater: never a NaN there.
_CHOSEN: dict[Any, Callable[..., Tensor]] = {torch.sym_min: operator.lt, torch.sym_max: operator.gt}


# ------------------------------------------------------------------------------ with tensors


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _widened(x: Any) -> Any:
    """As ATen computes with it: a half is rounded once, at the end."""
    return x.to(torch.float32) if isinstance(x, Tensor) and x.dtype in HALVES else x


def _number(x: Any, like: Tensor) -> Any:
    return x.like(like) if isinstance(x, Scalar) else x


def _factor(x: Any, like: Tensor, *others: Tensor) -> Any:
    """ATen makes a factor of integers an integer."""
    dtypes = [torch.result_type(like, other) for other in others]
    is_cut = not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    found = _number(x, like)
    return found.trunc() if is_cut and isinstance(x, Scalar) else found


def _scaled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Addition or subtraction of what may be scaled."""

    def form(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
        y, alpha = _number(y, x), _number(alpha, x)
        return function(x, y * alpha if isinstance(alpha, Tensor) or alpha != 1 else y)

    return form


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: function(x, _number(y, x))


_FORMS: dict[str, Callable[..., Tensor]] = {
    "add": _scaled(torch.add),
    "sub": _scaled(torch.sub),
    **dict.fromkeys(("mul", "multiply"), _binary(torch.mul)),
    **dict.fromkeys(("div", "truediv", "divide", "true_divide"), _binary(torch.true_divide)),
    "pow": _binary(torch.pow),
    "rsub": lambda x, y, alpha=1: _number(y, x) - x * alpha,
    "addcmul": lambda x, a, b, value=1: torch.add(x, _factor(value, x, a, b) * a * b),
    "addcdiv": lambda x, a, b, value=1: torch.add(x, _number(value, x) * a / b),
    "lerp": lambda x, end, weight: torch.lerp(x, end, _number(weight, x).to(x).expand_as(x)),
}


def _bound(x: Tensor, clamp: Callable[..., Tensor], end: Any) -> Tensor:
    return x if end is None else _rounded(clamp)(x, end)


def _spaced(start: Any, end: Any, steps: Any, *, dtype: Any = None, **named: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_floating_point:
        return torch.linspace(returned(start), returned(end), steps, dtype=dtype, **named)
    wide = torch.promote_types(dtype, torch.float32)
    first, last = (x.value.to(wide) if type(x) is Scalar else x for x in (start, end))
    return _cast(spaced(first, last, steps, dtype=wide, **named), dtype)


def _compared(call: Callable[..., Tensor]) -> Callable[..., Any]:
    """Two numbers are compared by torch.compile's symbols, which guard what is asked of them."""

    def compare(x: Any, y: Any) -> Any:
        if isinstance(x, Tensor) or isinstance(y, Tensor):
            return call(_number(x, y), _number(y, x))
        return getattr(operator, call.__name__)(_symbol(x), _symbol(y))

    return compare


def _symbol(x: Any) -> Any:
    """What torch.compile has for a number."""
    return x.known if type(x) is Scalar and isinstance(x.known, torch.SymFloat) else returned(x)


def _rounded(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of a number that ATen gives the dtype of the other operand, a half too."""

    def have(x: Any, like: Any) -> Any:
        other = 1.0 if isinstance(like, Scalar) else like
        return x.value.to(torch.result_type(other, 1.0)) if isinstance(x, Scalar) else x

    return lambda x, y: call(have(x, y), have(y, x))


def _full(size: Any, value: Scalar, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return value.value.to(dtype or torch.get_default_dtype()).expand(size).clone()


# Of results in dtypes of their own.
_OTHERS: dict[str, Callable[..., Any]] = {
    **{x: _compared(getattr(torch, x)) for x in ("gt", "ge", "lt", "le", "eq", "ne")},
    **{x: _rounded(getattr(torch, x)) for x in ("remainder", "fmod")},
    "mod": _rounded(torch.remainder),
    "floor_divide": lambda x, y: on_tensors(operator.floordiv)(x, y),  # type: ignore[misc]
    "clamp": lambda x, min=None, max=None: _bound(
        _bound(x, torch.clamp_min, min), torch.clamp_max, max
    ),
    "clamp_min": lambda x, min: _rounded(torch.clamp_min)(x, min),
    "clamp_max": lambda x, max: _rounded(torch.clamp_max)(x, max),
    "setitem": lambda x, at, value: operator.setitem(x, at, value.value.to(x.dtype)),
    "full": _full,
    **dict.fromkeys(("scalar_tensor", "tensor"), functools.partial(_full, ())),
    "linspace": _spaced,
    "new_full": lambda x, size, value: _full(size, value, dtype=x.dtype),
    "where": lambda c, x, y: _rounded(lambda x, y: torch.where(c, x, y))(x, y),
    "masked_fill": lambda x, mask, value: x.masked_fill(mask, value.value.to(x.dtype)),
}


def _put(x: Tensor, found: Tensor) -> Tensor:
    if not torch.can_cast(found.dtype, x.dtype):
        raise RuntimeError(f"result type {found.dtype} can't be cast to {x.dtype}")
    return x.copy_(found)


def _widening(form: Callable[..., Tensor], writes: bool) -> Callable[..., Tensor]:
    """On wider operands; what it gives has the operands' dtype, or is written to the first."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = form(*map(_widened, (x, *args)), **kwargs)
        if writes:
            return _put(x, found)
        dtype = torch.result_type(x, 1.0) if holds_scalar(args) else x.dtype
        for other in args:
            if isinstance(other, Tensor):
                dtype = torch.promote_types(dtype, torch.result_type(x, other))
        return _cast(found, dtype)

    return call
