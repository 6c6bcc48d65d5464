"""What capture does with functions of torch whose bytecode does not say it: stand-ins, by kind.

Capture itself knows Python and what a tensor is. This package registers stand-ins
(`capture/builtins.py`); whoever compiles imports it. Here are functions that ask for a value of a
tensor, or of a number that varies, lack a fake kernel, or make a tensor of many things: each goes
by torch's own formula, which its source names, where no mode of the user's hears of it.
Scans by a function of the program's are here, too.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusee.capture import calls
from fusee.capture.attributes import Capturing
from fusee.capture.builtins import SPECIAL, Stand, stands_for, stands_for_each
from fusee.capture.dynamic import NUMPY, Number, holds_number
from fusee.capture.graph_break import GraphBreak, associative_scan, combine_of
from fusee.capture.symbols import holds_open
from fusee.capture.torch_api import (
    FakeTensor,
    generic_scan,
    infer_size,
    pytree,
    shape_as_tensor,
)
from fusee.capture.torch_api import higher_order as operators
from fusee.source import Args, Kwargs
from fusee.torch_functions import training, triton_kernels  # noqa: F401
from fusee.torch_functions.arrays import Array, torch_dtype, unheard
from fusee.torch_functions.higher_order import effects_of, run_body


def composes(*functions: Any) -> Callable[[Stand], Stand]:
    """`stands_for_each`, where nothing hears which functions are called. What gives None leaves the
    call as it is."""

    def register(stand: Stand) -> Stand:
        def composed(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
            is_heard = m.modes or m.world.seen
            found = None if is_heard else stand(function, m, *args, **kwargs)
            return calls.on_tensors(m, function, args, kwargs) if found is None else found

        stands_for_each(*functions)(composed)
        return stand

    return register


@composes(shape_as_tensor)
def _shape_as_tensor(function: Any, m: Capturing, x: Any) -> Any:
    return m.call(torch.tensor, [*m.attribute(x, "shape")], dtype=torch.int64, device="cpu")


@composes(Tensor.dim_order)
def _dim_order(function: Any, m: Capturing, x: Any, **kwargs: Any) -> Any:
    """Torch does not tell `__torch_function__` of its keyword."""
    return m.world.recorder.call(function, x, **kwargs)


@composes(infer_size)
def _infer_size(function: Any, m: Capturing, *sizes: Any) -> Any:
    is_known = len(sizes) == 2 and all(isinstance(x, torch.Size) for x in sizes)
    return m.call(torch.broadcast_shapes, *sizes) if is_known else function(*sizes)


@composes(F.one_hot)
def _one_hot(function: Any, m: Capturing, x: Any, num_classes: Any = -1) -> Any:
    if type(num_classes) is int and num_classes == -1 and m.world.recorder.reads_numbers:
        num_classes = m.call(Tensor.item, m.call(Tensor.max, x)) + 1
    return calls.on_tensors(m, function, (x, num_classes), {})


# torch's own ask for the value of a tensor: whether observations are left after the correction.


@composes(torch.cov, Tensor.cov)
def _cov(function: Any, m: Capturing, x: Any, *, correction: Any = 1, **weights: Any) -> Any:
    """source   aten/src/ATen/native/Correlation.cpp"""
    is_plain = not weights and isinstance(x, FakeTensor) and x.dtype is not torch.bool
    rows = m.call(Tensor.view, x, (1, -1)) if is_plain and x.dim() < 2 else x
    count = m.attribute(rows, "shape")[1] if is_plain and rows.dim() == 2 else 0
    if not is_plain or not m.truth(count > correction):
        return None
    mean = m.call(operator.truediv, m.call(Tensor.sum, rows, 1, True), count)
    rest = m.call(operator.sub, rows, mean)
    made = m.call(torch.mm, rest, m.call(torch.conj, m.call(torch.t, rest)))
    return m.call(torch.squeeze, m.call(operator.truediv, made, count - correction))


@composes(torch.corrcoef, Tensor.corrcoef)
def _corrcoef(function: Any, m: Capturing, x: Any) -> Any:
    if not isinstance(x, FakeTensor) or x.dim() not in (1, 2):
        return None
    made = m.call(torch.cov, x)
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
        return None
    half, given = (n + periodic - 1) / 2, {**named, "dtype": made}
    at = m.call(torch.arange, n + periodic, **given)
    at = m.call(operator.truediv, m.call(operator.sub, at, half), half)
    root = m.call(torch.sqrt, m.call(operator.sub, 1, m.call(torch.square, at)))
    whole = m.call(torch.i0, m.call(torch.full, (), beta, **given))
    window = m.call(operator.truediv, m.call(torch.i0, m.call(operator.mul, root, beta)), whole)
    return m.call(Tensor.narrow, window, 0, 0, n) if periodic else window


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


_FILLS = {torch.full: 1, torch.full_like: 1, Tensor.new_full: 2}


@composes(*_FILLS)
def _full(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """source   aten/src/ATen/native/TensorFactories.cpp"""
    given = _FILLS[function], "fill_value", args, kwargs
    value = _argument(*given)
    if type(value) in _OPEN and "out" not in kwargs:
        ones = calls.on_tensors(m, function, *_with(m.kind_of(value)(1), *given))
        if ones.is_floating_point() and not ones.requires_grad and _fits(m, value, ones.dtype):
            return m.call(Tensor.mul_, ones, value)
    return None  # by way of the value


def _fits(m: Capturing, value: Any, dtype: torch.dtype) -> bool:
    """Whether torch does not refuse a number from outside as too large, which is a fact then."""
    if type(value) is torch.SymFloat or not value.origins or dtype is torch.float64:
        return True
    return bool(m.truth(m.call(operator.le, m.call(abs, value), torch.finfo(dtype).max)))


_METHODS = {"fill_": 1, "masked_fill": 2, "masked_fill_": 2, "index_fill": 3, "index_fill_": 3}
_INTO = {getattr(Tensor, name): place for name, place in _METHODS.items()}
_INTO |= {torch.fill_: 1, torch.masked_fill: 2, torch.index_fill: 3}


@composes(*_INTO)
def _filled(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """source   aten/src/ATen/native/TensorAdvancedIndexing.cpp, which makes a tensor of it too"""
    given = _INTO[function], "value", args, kwargs
    value = _argument(*given)
    x: Any = args[0] if args else None
    if type(value) not in _OPEN or not isinstance(x, FakeTensor) or not x.is_floating_point():
        return None
    value = m.call(torch.full, (), value, dtype=x.dtype, device=x.device)
    return calls.on_tensors(m, function, *_with(value, *given))


# ---------------------------------------------------------------------------- making
# Tensors that a program makes by a class, `torch.LongTensor([1, 2])`, or of sizes.


_CLASSES = {
    getattr(torch, name): dtype
    for name, dtype in (
        ("Tensor", None), ("FloatTensor", torch.float32), ("DoubleTensor", torch.float64),
        ("HalfTensor", torch.float16), ("BFloat16Tensor", torch.bfloat16),
        ("ByteTensor", torch.uint8), ("CharTensor", torch.int8), ("ShortTensor", torch.int16),
        ("IntTensor", torch.int32), ("LongTensor", torch.int64), ("BoolTensor", torch.bool),
    )
}  # fmt: skip


@stands_for_each(*_CLASSES)
def _by_class(kind: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """What the class makes: of a sequence, its elements; of sizes, what lies there."""
    first = type(args[0]) if len(args) == 1 else None
    given = {"dtype": _CLASSES[kind] or torch.get_default_dtype(), "device": "cpu"}
    with unheard(m):
        if not kwargs and first in (list, tuple):
            items = [x.item() if isinstance(x, NUMPY) else x for x in m.items(args[0])]
            if any(isinstance(x, Array) for x in items):
                alone = (
                    x.tensor if isinstance(x, Array) else m.call(torch.tensor, x) for x in items
                )
                return _stacked(m, [*alone], given)
            return m.call(torch.tensor, items, **given)
        if not kwargs and (first is torch.Size or all(type(x) is int for x in args)):
            return m.call(torch.empty, *(args or (0,)), **given)
    raise GraphBreak(
        f"torch.{kind.__name__} makes a tensor of something else than numbers or sizes"
    )


def _of_tensors(m: Capturing, data: Any, dtype: torch.dtype | None) -> Any:
    """torch.tensor of a list, in which numbers are tensors."""
    items = pytree.tree_leaves(data)
    kinds = {int: torch.int64, float: torch.get_default_dtype(), bool: torch.bool}
    given: list[Any] = [x.dtype if isinstance(x, FakeTensor) else kinds.get(type(x)) for x in items]
    shape, part = [], data
    while isinstance(part, (list, tuple)):
        shape.append(len(part))
        part = part[0] if part else None
    is_even = _is_even(data, shape)
    if m.modes or m.world.seen or None in given or not is_even:
        raise GraphBreak("torch.tensor of a list of more than numbers and tensors of one")
    dtype = dtype or functools.reduce(torch.promote_types, given)
    plain = [x.detach() if isinstance(x, FakeTensor) else m.call(torch.tensor, x) for x in items]
    stacked = _stacked(m, plain, {"dtype": dtype, "device": "cpu"})
    return stacked if len(shape) == 1 else m.call(Tensor.reshape, stacked, shape)


def _is_even(data: Any, shape: list[int]) -> bool:
    """Whether a nested list has this shape."""
    if not shape:
        return not isinstance(data, (list, tuple))
    is_row = isinstance(data, (list, tuple)) and len(data) == shape[0]
    return is_row and all(_is_even(x, shape[1:]) for x in data)


def _stacked(m: Capturing, numbers: list[Tensor], given: Kwargs) -> Any:
    """Of numbers that the graph computes."""
    is_whole = not given["dtype"].is_floating_point
    if any(x.dim() or (x.is_floating_point() and is_whole) for x in numbers):
        raise GraphBreak("a tensor is made of arrays, or an integer of a float")
    return m.call(torch.stack, [m.call(Tensor.to, x, **given) for x in numbers])


_COPIES = {torch.from_numpy: False, torch.as_tensor: False, torch.tensor: True}


@stands_for_each(*_COPIES)
def _from_data(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """torch.tensor and the like."""
    if len(args) == 1 and isinstance(args[0], (list, tuple)) and not {*kwargs} - {"dtype"}:
        data = m.deep(args[0])
        if any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(data)):
            return _of_tensors(m, data, kwargs.get("dtype"))
    if args and isinstance(args[0], NUMPY) and function is not torch.from_numpy and not m.modes:
        dtype = kwargs.get("dtype") or torch_dtype(args[0].dtype)
        if dtype is not None:
            args, kwargs = (args[0].item(), *args[1:]), {**kwargs, "dtype": dtype}
    if not args or not isinstance(args[0], Array):
        is_open = args and (holds_open(args[0]) or holds_number(args[0]))
        is_open = is_open and len(args) == 1 and not m.modes
        is_open = is_open and {*kwargs} <= {"dtype", "device"}
        made = _of_numbers(m, args[0], kwargs) if is_open else None
        return calls.on_tensors(m, function, args, kwargs) if made is None else made
    x, *rest = args
    if rest or {*kwargs} - {"dtype", "device"} or not x.shadow.flags.writeable:  # a scalar's never
        raise GraphBreak(f"torch.{function.__name__} of this {x.kind.__name__}")
    if m.modes and function is not torch.from_numpy:
        raise GraphBreak(f"torch.{function.__name__} of an array within a torch function mode")
    copies = _COPIES[function]
    if not copies and torch.is_inference_mode_enabled():
        raise GraphBreak("a tensor of inference mode that shares an array's memory")
    with unheard(m):
        given = {"dtype": x.tensor.dtype, **kwargs, "copy": copies}
        plain = m.call(Tensor.detach, x.tensor)
        if not x.shadow.size:  # it has no memory, and NumPy's strides
            strides = [step // x.shadow.itemsize for step in x.shadow.strides]
            plain = m.call(plain.new_empty_strided, [*x.shadow.shape], strides)
        found = m.call(Tensor.to, plain, **given) if copies or kwargs else plain
    if not copies:  # torch may write there
        x.known.clear()
    if found is plain and x.shadow.size:
        m.world.of_arrays[id(found)] = found
    return found


def _of_numbers(m: Capturing, x: Any, kwargs: Kwargs) -> Any:
    """The tensor of numbers some of which vary; None of other things."""
    kinds = {*map(m.kind_of, pytree.tree_leaves(x))}
    if not kinds <= {int, float}:
        return None
    usual = torch.get_default_dtype() if float in kinds else torch.int64
    given = {**kwargs, "dtype": kwargs.get("dtype") or usual}

    def made(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return m.call(torch.stack, [*map(made, x)])
        return m.call(torch.full, (), x, **given)

    return made(x)


# ------------------------------------------------------------------------------ scans
# associative_scan: one node, where its function goes element by element and nothing is
# differentiated; our backend makes a loop of it (fusee/loops/associative.py), and others trace the
# tree of calls that it runs. Else PyTorch's own tree is captured.

# The same function, which nothing stands for.
_TREE: Any = types.FunctionType(
    generic_scan.__code__, generic_scan.__globals__, argdefs=generic_scan.__defaults__
)


@stands_for(generic_scan)
def _associative_scan(
    m: Capturing, /, operator: Any, leaves: Any, dim: Any = 0, additional_inputs: Any = ()
) -> Any:
    xs, more = m.items(leaves), m.items(additional_inputs)
    combine = None if more or dim != 0 else _combine(m, operator, xs)
    if combine is None:
        return m.call(_TREE, operator, leaves, dim, additional_inputs)
    with torch._C.DisableTorchFunction(), m.world.mode:
        results = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    m.world.recorder.write(associative_scan, "", (list(xs), combine), {}, results)
    return results


SPECIAL[operators.associative_scan] = lambda m, /, combine_fn, xs, additional_inputs: (
    _associative_scan(m, combine_fn, xs, 0, additional_inputs)
)


def _combine(m: Capturing, operator: Any, xs: Sequence[Any]) -> str | None:
    """The function of a scan as text, if it is one of elements."""
    if m.within or m.modes or m.policy.is_exporting:
        return None
    if not xs or any(type(x) is not FakeTensor for x in xs):
        return None
    with torch._C.DisableTorchFunction():
        first = xs[0]
        if torch.is_autocast_enabled(first.device.type) or not first.dim():
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
            return None
        if any(x.shape != first.shape or x.device != first.device for x in xs):
            return None
        if first.shape[0] < 2:  # they are given back as they are
            return None
    before = effects_of(m)
    try:
        body = run_body(m, "associative_scan", operator, (*xs, *xs), {}, None)
    except GraphBreak:
        if effects_of(m) != before:
            raise
        return None  # it is captured where it is called, or ends the graph there
    with torch._C.DisableTorchFunction():
        if body.outside or any(leaf is not None for leaf in body.leaves):
            return None
        dtypes, rank = [x.dtype for x in xs], first.dim()
    found = combine_of(body.module, dtypes, rank)
    return None if found is None else found.text
