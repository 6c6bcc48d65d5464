"""What there is to compile in a function, a bound method, a module or any other callable."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from fusee.capture.policy import innermost
from fusee.capture.torch_api import has_global_hooks
from fusee.capture.tracebacks import standing_at

__all__ = ["HOOKS", "as_function", "is_plain", "is_suspending", "target_of", "whole_call"]

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
        return whole_call(type(x)), (x,)
    method = inspect.getattr_static(type(x), "__call__", None)
    if isinstance(method, types.FunctionType):
        return innermost(method), (x,)
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


def whole_call(cls: type[nn.Module], method: str = "__call__") -> types.FunctionType:
    """A function `(module, *args, **kwargs)` that does all that surrounds a module's `forward` too.

    It has the name of the class, and stands at the line at which `forward` begins, so that whatever
    speaks of it speaks of the user's module.
    """
    text = "module" if method == "__call__" else f"module.{method}"
    tree = ast.parse(f"lambda module, /, *args, **kwargs: {text}(*args, **kwargs)", mode="eval")
    forward: Any = getattr(innermost(cls.forward), "__code__", whole_call.__code__)
    name = cls.__name__ if issubclass(cls, fx.GraphModule) else cls.__qualname__
    code = standing_at(tree, forward.co_filename, forward.co_firstlineno, name)
    return types.FunctionType(code, {"__name__": cls.__module__})


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
