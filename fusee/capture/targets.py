"""What there is to compile in a function, a bound method, a module or any other callable."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from fusee.capture.policy import innermost
from fusee.capture.torch_api import has_global_hooks

__all__ = ["HOOKS", "as_function", "call_module", "is_plain", "is_suspending", "target_of"]

HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_SUSPENDING = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def target_of(x: Callable[..., Any]) -> tuple[types.FunctionType, tuple[Any, ...]]:
    """The Python function that a call of `x` runs, and what it gets before the arguments."""
    x = innermost(x)
    if isinstance(x, types.FunctionType):
        return x, ()
    if isinstance(x, types.MethodType) and isinstance(x.__func__, types.FunctionType):
        return innermost(x.__func__), (x.__self__,)
    if isinstance(x, nn.Module):
        forward = type(x).forward
        if is_plain(x) and isinstance(forward, types.FunctionType):
            return innermost(forward), (x,)
        return as_function(call_module), (x,)
    method = inspect.getattr_static(type(x), "__call__", None)
    if isinstance(method, types.FunctionType):
        return method, (x,)
    return calling(x), ()


def is_plain(module: nn.Module) -> bool:
    """Whether calling a module is calling its class's `forward`."""
    return (
        type(module).__call__ is nn.Module.__call__
        and "forward" not in module.__dict__
        and not any(getattr(module, name) for name in HOOKS)
        and not has_global_hooks()
    )


def is_suspending(function: types.FunctionType) -> bool:
    """Whether a function is asynchronous or a generator: it does not run to its end when called."""
    return bool(function.__code__.co_flags & _SUSPENDING)


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module with all that happens around its `forward`."""
    return module(*args, **kwargs)


def calling(target: Callable[..., Any]) -> types.FunctionType:
    """A Python function that calls what is none."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    call.__name__ = getattr(target, "__name__", type(target).__name__)
    call.__qualname__ = getattr(target, "__qualname__", call.__name__)
    return as_function(call)


def as_function(x: Any) -> types.FunctionType:
    """What `def` makes, called by its type."""
    return x  # type: ignore[no-any-return]
