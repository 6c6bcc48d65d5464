"""Runs a function eager and compiled on equal arguments and holds all that it did side by side."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy

__all__ = ["Traced", "same", "shape_of"]

_MODULE_REPR = torch.nn.Module.__repr__


class Traced:
    """A function captured with a backend that runs graphs as they are.

    graphs   those that the backend was given, in order
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.compiled = CompiledFunction(fn, self._backend, Policy())  # type: ignore[arg-type]

    def _backend(self, gm: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        gm.graph.lint()
        assert len(examples) == sum(node.op == "placeholder" for node in gm.graph.nodes)
        self.graphs.append(gm)
        return gm.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    @property
    def functions(self) -> list[CompiledFunction]:
        """The function itself and those that it calls between graphs."""
        found = [self.compiled]
        for one in found:
            found += one.callees
        return found

    @property
    def entries(self) -> int:
        return sum(len(one.entries) for one in self.functions)

    @property
    def stops(self) -> list[str]:
        """Why graphs ended, and why functions ran eagerly."""
        captured = [entry.captured for one in self.functions for entry in one.entries]
        stops = [f"{c.stop.reason} ({c.stop.where})" for c in captured if c.stop is not None]
        return stops + [f"eager: {c.eager}" for c in captured if c.eager]


def same(fn: Callable[..., Any], *args: Any, breaks: bool = False) -> Traced:
    """Eager and compiled, called twice, give equal results, exceptions and changes of arguments.

    breaks   whether more than one graph is expected; never that a function runs eagerly, except
             one that raises
    """
    traced = Traced(fn)
    entries = []
    for _ in range(2):
        torch.manual_seed(0)
        want = _outcome(fn, args)
        torch.manual_seed(0)
        got = _outcome(traced, args)
        assert got == want, traced.stops
        entries.append(traced.entries)
    # modules are known by identity, and these are copies
    is_copied = any(isinstance(x, torch.nn.Module) for x in args)
    assert is_copied or entries[0] == entries[1], [
        e.check_source() for e in traced.compiled.entries
    ]
    raises = want[0] == "raised"
    stops = [stop for stop in traced.stops if not (raises and stop.startswith("it raises"))]
    assert bool(stops) == breaks and not any(s.startswith("eager") for s in stops), stops
    return traced


def _outcome(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    args = copy.deepcopy(args)
    seen: dict[Any, int] = {}
    try:
        result = fn(*args)
    except Exception as error:  # noqa: BLE001  # the exception is what is compared
        causes = []
        cause: BaseException | None = error
        while cause is not None:
            causes.append((type(cause), str(cause)))
            cause = cause.__cause__
        return "raised", causes, shape_of(args, seen)
    return "returned", shape_of(result, seen), shape_of(args, seen)


def shape_of(x: Any, seen: dict[Any, int] | None = None) -> Any:
    """An object as nested tuples: values, types, order, and which parts are one object."""
    seen = {} if seen is None else seen
    if isinstance(x, (torch.Tensor, list, dict, set, types.CellType)) or hasattr(x, "__dict__"):
        if id(x) in seen:
            return "again", seen[id(x)]
        seen[id(x)] = len(seen)
        seen["keep", id(x)] = x
    if isinstance(x, torch.Tensor):
        return _tensor(x, seen)
    return type(x), *_parts(x, seen)


def _parts(x: Any, seen: dict[Any, int]) -> tuple[Any, ...]:
    if isinstance(x, (type, types.ModuleType)):
        return (x.__name__,)
    if isinstance(x, types.FunctionType):
        return x.__qualname__, shape_of((x.__defaults__, x.__closure__, x.__dict__), seen)
    if isinstance(x, types.MethodType):
        return shape_of(x.__self__, seen), shape_of(x.__func__, seen)
    if isinstance(x, types.CellType):
        return (shape_of(x.cell_contents, seen),)
    if isinstance(x, dict):
        kind: Any = collections.OrderedDict if isinstance(x, collections.OrderedDict) else dict
        parts: Any = [(shape_of(k, seen), shape_of(v, seen)) for k, v in kind.items(x)]
    elif isinstance(x, (set, frozenset)):
        parts = sorted(map(repr, x))
    elif isinstance(x, (list, tuple)) or type(x).__name__ == "deque":
        parts = [shape_of(item, seen) for item in x]
    else:
        own_text = getattr(type(x), "__repr__", None) not in (object.__repr__, _MODULE_REPR)
        parts = repr(x) if own_text else ""
    own = getattr(x, "__dict__", {})
    return parts, {key: shape_of(value, seen) for key, value in own.items()}


def _tensor(x: torch.Tensor, seen: dict[Any, int]) -> Any:
    storage = ("storage", x.untyped_storage().data_ptr())
    where = seen.setdefault(storage, len(seen)) if x.numel() else -1
    about = type(x), x.dtype, x.shape, x.stride(), x.requires_grad, x.grad_fn is None, where
    return about, repr(x.detach().tolist())
