"""Regions of a program in which a graph break is an error, or is none.

Plain Python that is captured like the user's own: what is in force is an attribute of an object
from outside, so that it holds in the graphs, between them, and in functions that are called there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from fusee.capture.world import World

__all__ = ["error_on_graph_break", "is_error"]


F = TypeVar("F", bound=Callable[..., Any])


class _State:
    is_error: bool | None


_state = _State()
_state.is_error = None  # as fullgraph says


class error_on_graph_break:
    """Within it a graph break raises GraphBreakError (True) or splits the function (False).

    As a decorator or a context manager, inside a compiled function or around its parts. It goes
    before `fullgraph`.

    source   torch._dynamo.error_on_graph_break
    """

    def __init__(self, error_on_graph_break: bool) -> None:
        self.is_error = error_on_graph_break
        self.before: bool | None = None

    def __enter__(self) -> None:
        self.before = _state.is_error
        _state.is_error = self.is_error

    def __exit__(self, *error: object) -> None:
        _state.is_error = self.before

    def __call__(self, function: F) -> F:
        wanted = self.is_error

        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with error_on_graph_break(wanted):
                return function(*args, **kwargs)

        within.__dict__["_fusee_inlined"] = True
        return within  # type: ignore[return-value]


def is_error(world: World) -> bool | None:
    """What error_on_graph_break says where a capture stands; None if nothing."""
    mirror = world.mirrors.get(id(_state.__dict__))
    written = {} if mirror is None else mirror.writes if mirror.copy is None else mirror.copy
    found: bool | None = written.get("is_error", _state.is_error)
    return found


for _function in ("__init__", "__enter__", "__exit__"):
    error_on_graph_break.__dict__[_function].__dict__["_fusee_inlined"] = True
