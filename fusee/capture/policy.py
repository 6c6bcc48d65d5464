"""What users have said about functions: leave it, take it whole, replace it, keep its result."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

__all__ = ["Policy"]


class Policy:
    """Tables by function. One for the process: see fusee.compiler.

    disabled     functions that run eagerly, with the reason that was given
    in_graph     functions that become one node, unlooked-at
    constant     functions that run once; their result is baked in
    substitutes  functions in C and what is traced in their place
    """

    def __init__(self) -> None:
        self.disabled: dict[Any, str] = {}
        self.in_graph: set[Any] = set()
        self.constant: set[Any] = set()
        self.substitutes: dict[Any, Any] = {}

    def replacement(self, function: Any) -> Callable[..., Any] | None:
        """What stands in for a call, `(machine, args, kwargs) -> result`; or None."""
        if not (self.in_graph or self.constant or self.substitutes):
            return None
        try:
            hash(function)
        except TypeError:
            return None
        if function in self.in_graph:
            return lambda m, args, kwargs: m.world.recorder.call_whole(function, args, kwargs)
        if function in self.constant:
            return lambda m, args, kwargs: function(*args, **kwargs)
        if function in self.substitutes:
            other = self.substitutes[function]
            return lambda m, args, kwargs: m.call(m.world.hold(other, other.__name__), args, kwargs)
        return None

    def refusal(self, function: types.FunctionType) -> tuple[str, str] | None:
        """Why a Python function is not inlined, and what to do about it; or None."""
        if function in self.disabled:
            reason = self.disabled[function]
            return f"{function.__qualname__} is disabled{': ' + reason if reason else ''}", ""
        if getattr(function, "_torchdynamo_disable", False):
            given = getattr(function, "_torchdynamo_disable_msg", None)
            return f"{function.__qualname__} is disabled{f': {given}' if given else ''}", ""
        return None
