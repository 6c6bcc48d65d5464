"""Scans whose step is a function of the program's: `fusee::associative_scan(xs, combine)`.

    ys[0] = xs[0];  ys[t] = combine(ys[t - 1], xs[t])        of tuples of tensors, along axis 0

`combine` is text, so that equal scans are equal calls wherever they come from: the calls of ATen
that the function makes on what came before and the present element, each a row. It is associative
and goes element by element, so a loop carries what came before along the axis, in registers. Of
halves it is made in float32: rounded at each step, a long sum would cease to grow.

source   Blelloch, Prefix sums and their applications, 1990
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusee.loops.operators import named, opmath

T = torch.Tensor
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
    function = parsed(combine)

    def joined(*operands: T) -> list[T]:
        return function.values(operands, lambda call, args, kwargs: call.op(*args, **kwargs))

    found = _tree([x.to(opmath(x.dtype)) for x in xs], joined)
    return [y.to(x.dtype).contiguous() for x, y in zip(xs, found, strict=True)]


def _tree(xs: list[T], joined: Callable[..., list[T]]) -> list[T]:
    """Of each pair first, which gives every second result; the others come one element later."""
    count = len(xs[0])
    if count < 2:
        return xs
    odd = _tree(joined(*(x[:-1:2] for x in xs), *(x[1::2] for x in xs)), joined)
    after = joined(*(x[: (count - 1) // 2] for x in odd), *(x[2::2] for x in xs))
    even = [torch.cat([x[:1], y]) for x, y in zip(xs, after, strict=True)]
    pairs = [torch.stack([x[: count // 2], y], 1) for x, y in zip(even, odd, strict=True)]
    rest = [x[count // 2 :] for x in even]
    return [torch.cat([x.flatten(0, 1), y]) for x, y in zip(pairs, rest, strict=True)]


def _run(xs: Sequence[T], combine: str) -> list[T]:
    """The same in memory of its own."""
    pairs = zip(xs, associative_scan(xs, combine), strict=True)
    return [y.clone() if y.data_ptr() == x.data_ptr() else y for x, y in pairs]


_make: Any = torch.library.Library  # torch does not annotate it
_library = _make("fusee", "FRAGMENT")
_library.define("associative_scan(Tensor[] xs, str combine) -> Tensor[]")
_library.impl("associative_scan", _run, "CompositeExplicitAutograd")
_library.impl(
    "associative_scan",
    lambda xs, text: [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs],
    "Meta",
)
SCAN: Any = torch.ops.fusee.associative_scan.default
