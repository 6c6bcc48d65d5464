"""Scans whose step is a function of the program's: `fusee::associative_scan(xs, combine)`.

    ys[0] = xs[0];  ys[t] = combine(ys[t - 1], xs[t])        of tuples of tensors, along axis 0

`combine` is text, so that equal scans are equal calls wherever they come from: the calls of ATen
that the function makes on what came before and the present element, each a row. It is associative
and goes element by element, so a loop carries what came before along the axis, in registers. Of
halves it is made in float32: rounded at each step, a long sum would cease to grow.

The function runs once on tensors without data, and what it calls must go element by element.
Whether it is associative is tried with numbers: a scan with one that is not has the order of
PyTorch's own.

torch.utils._python_dispatch   sees the calls

source   Blelloch, Prefix sums and their applications, 1990
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusee.loops.operators import is_pointwise, named, opmath
from fusee.source import Args

T = Tensor
Apply = Callable[..., Any]


class CombineCall(NamedTuple):
    """A call of a function: operands are numbers of values, as `%3`."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    dtype: torch.dtype

    @property
    def op(self) -> Any:
        (found,) = named(self.name)
        return found


class Combine(NamedTuple):
    """A function of 2 n values, numbered from 0; each call gives the next one."""

    calls: tuple[CombineCall, ...]
    results: tuple[int, ...]

    @property
    def text(self) -> str:
        rows = [[c.name, c.args, c.kwargs, str(c.dtype)] for c in self.calls]
        return json.dumps([rows, self.results])

    def values(self, operands: Sequence[Any], apply: Apply) -> list[Any]:
        """Its results, where `apply(call, args, kwargs)` does what a call says."""
        known = list(operands)

        def held(x: Any) -> Any:
            if isinstance(x, list):
                return [held(item) for item in x]
            if isinstance(x, str) and x.startswith("%"):
                return known[int(x[1:])]
            is_dtype = isinstance(x, str) and x.startswith("torch.")
            return getattr(torch, x.removeprefix("torch.")) if is_dtype else x

        for call in self.calls:
            kwargs = {key: held(x) for key, x in call.kwargs.items()}
            known.append(apply(call, held(call.args), kwargs))
        return [known[k] for k in self.results]

    def __call__(self, *operands: T) -> list[T]:
        """Its results by ATen."""
        return self.values(operands, lambda call, args, kwargs: call.op(*args, **kwargs))


@functools.cache
def parsed(text: str) -> Combine:
    """The function that a text is of."""
    rows, results = json.loads(text)
    calls = (CombineCall(name, args, kw, getattr(torch, kind[6:])) for name, args, kw, kind in rows)
    return Combine(tuple(calls), tuple(results))


# ---------------------------------------------------------------------------- operator


def associative_scan(xs: Sequence[T], combine: str) -> list[T]:
    """The scan by calls of ATen, in the order in which PyTorch makes them in eager mode.

    In a captured graph it stands for itself: who cannot make a loop of it runs or traces this.
    """
    found = _tree([x.to(opmath(x.dtype)) for x in xs], parsed(combine))
    return [y.to(x.dtype).contiguous() for x, y in zip(xs, found, strict=True)]


def _tree(xs: list[T], joined: Combine) -> list[T]:
    """Of each pair first, which gives every second result; the others come one element later."""
    count = len(xs[0])
    if count < 2:
        return [x.clone() for x in xs]
    odd = _tree(joined(*(x[:-1:2] for x in xs), *(x[1::2] for x in xs)), joined)
    after = joined(*(x[: (count - 1) // 2] for x in odd), *(x[2::2] for x in xs))
    even = [torch.cat([x[:1], y]) for x, y in zip(xs, after, strict=True)]
    pairs = [torch.stack([x[: count // 2], y], 1) for x, y in zip(even, odd, strict=True)]
    rest = [x[count // 2 :] for x in even]
    return [torch.cat([x.flatten(0, 1), y]) for x, y in zip(pairs, rest, strict=True)]


_make: Any = torch.library.Library  # torch does not annotate it
_library = _make("fusee", "FRAGMENT")
_library.define("associative_scan(Tensor[] xs, str combine) -> Tensor[]")
_library.impl("associative_scan", associative_scan, "CompositeExplicitAutograd")
_library.impl(
    "associative_scan",
    lambda xs, text: [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs],
    "Meta",
)
SCAN: Any = torch.ops.fusee.associative_scan.default


# ---------------------------------------------------------------------------- function

# Calls that a function may make at most: a kernel holds them all.
_MOST = 32
# What a tensor is filled with has no place.
_FILLED = frozenset("zeros_like ones_like full_like".split())
_OF_PLACES = frozenset("device layout pin_memory memory_format".split())
# Of these the result may be all of the operand, as it is.
_SAME = frozenset("detach alias clone view _unsafe_view expand permute transpose squeeze".split())


class _NotPointwise(Exception):
    """The function does more than to go element by element."""


class _Recorder(TorchDispatchMode):
    """The calls that a function makes on operands of one shape."""

    def __init__(self, operands: Sequence[T]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.count = operands[0].shape, len(operands)
        self.held = list(operands)  # alive, so that ids are unique
        self.numbers = {id(x): k for k, x in enumerate(operands)}
        self.calls: list[CombineCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        name = schema.name.partition("::")[2]
        out = func(*args, **kwargs)
        if func.namespace == "prim":  # what it asks of a tensor's kind
            return out
        if not isinstance(out, T) or out.shape != self.shape:
            raise _NotPointwise
        self.held.append(out)
        if name in _SAME and out.stride() == args[0].stride():
            self.numbers[id(out)] = self.number(args[0])
            return out
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if schema.is_mutable or draws or not (is_pointwise(func) or name in _FILLED):
            raise _NotPointwise
        overload = "" if func._overloadname == "default" else f".{func._overloadname}"
        given = [self.written(x) for x in args]
        more = {key: self.written(x) for key, x in kwargs.items() if key not in _OF_PLACES}
        self.calls.append(CombineCall(f"{name}{overload}", given, more, out.dtype))
        self.numbers[id(out)] = self.count + len(self.calls) - 1
        return out

    def number(self, x: Any) -> int:
        if id(x) not in self.numbers:
            raise _NotPointwise  # of a tensor from outside of the function
        return self.numbers[id(x)]

    def written(self, x: Any) -> Any:
        if isinstance(x, T):
            return f"%{self.number(x)}"
        if isinstance(x, torch.dtype):
            return str(x)
        if isinstance(x, (list, tuple)):
            return [self.written(item) for item in x]
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        raise _NotPointwise


def combine_of(function: Any, dtypes: Sequence[torch.dtype], rank: int) -> Combine | None:
    """A function of tensors of these dtypes as calls of ATen; None if it is not of this kind.

    It gives a result for each pair of operands, of its dtype, and is associative.
    """
    wide = [*map(opmath, dtypes)]
    if any(dtype.is_complex for dtype in dtypes):
        return None
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            combine = _calls_of(function, wide, rank)
            if wide != [*dtypes]:
                _calls_of(function, dtypes, rank)
            return combine if _is_associative(combine.text, tuple(wide)) else None
    except (_NotPointwise, RuntimeError, TypeError, ValueError, IndexError):
        return None  # of such operands; whoever calls it with others finds out himself


def _calls_of(function: Any, dtypes: Sequence[torch.dtype], rank: int) -> Combine:
    operands = [torch.empty([2] * rank, dtype=x, device="meta") for x in (*dtypes, *dtypes)]
    with _Recorder(operands) as recorder:
        found = function(*operands)
    results = found if isinstance(found, (list, tuple)) else [found]
    if [x.dtype for x in results] != [*dtypes] or len(recorder.calls) > _MOST:
        raise _NotPointwise
    return Combine(tuple(recorder.calls), tuple(map(recorder.number, results)))


@functools.cache
def _is_associative(text: str, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether it is for some numbers, or at least for zeros, ones and what is between."""
    combine = parsed(text)
    random = torch.Generator().manual_seed(0)

    def some(dtype: torch.dtype, lowest: int) -> T:
        if dtype.is_floating_point:
            x = torch.rand(3, 32, generator=random, dtype=torch.promote_types(dtype, torch.float64))
            return x if lowest >= 0 else 4 * x - 2
        x = torch.randint(0 if dtype is torch.uint8 else lowest, 2, (3, 32), generator=random)
        return x.to(dtype)

    def holds(lowest: int) -> bool:
        a, b, c = zip(*(some(dtype, lowest).unbind() for dtype in dtypes))
        left, right = combine(*combine(*a, *b), *c), combine(*a, *combine(*b, *c))
        pairs = zip(left, right, strict=True)
        return all(torch.allclose(x.double(), y.double(), 1e-4, 1e-6, True) for x, y in pairs)

    return holds(-2) or holds(0)
