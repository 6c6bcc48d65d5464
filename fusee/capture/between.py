"""Between two graphs: Python's own semantics, except that what is called there is compiled too."""

from __future__ import annotations

import types
from typing import Any

import torch

from fusee.capture.semantics import Semantics
from fusee.capture.targets import is_plain
from fusee.capture.tracebacks import called_from

__all__ = ["Between"]


class Between(Semantics):
    """What instructions mean between the pieces of one compiled function.

    owner   the CompiledFunction
    """

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = owner

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(function) is types.MethodType:
            args, function = (function.__self__, *args), function.__func__
        method = getattr(type(function), "__call__", None)  # noqa: B004  # and what it is
        if isinstance(function, torch.nn.Module) and is_plain(function):
            args, function = (function, *args), type(function).forward
        elif type(method) is types.FunctionType:
            args, function = (function, *args), method
        if type(function) is types.FunctionType:
            function = self.owner.nested(function, args[0] if args else None)
        return super().call(called_from(self.frames[-1], function), args, kwargs)
