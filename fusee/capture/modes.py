"""Torch function modes of the program's: `with torch.device(...)`, `torch.set_default_device`.

The recorder is such a mode itself, and the only one that is really on while a program is captured.
A torch call goes to the innermost of `Capturing.modes` first: its `__torch_function__` runs on the
machine, without it, and what that calls goes to the next one. So a graph has what the modes made of
the program's calls, and runs without them. What a piece enters or leaves is done to torch's own
stack at its end.

source   https://docs.pytorch.org/docs/stable/notes/extending.html#extending-all-torch-api-with-modes
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.origin import Call, Held
from fusee.capture.stand_ins import Args, Kwargs, breaking, stands_for
from fusee.capture.torch_api import MODE_STACK, DeviceContext, function_modes, without_modes

__all__ = ["PLACE", "apply_mode", "load"]

PLACE = Call(Held(function_modes, "the torch function modes"), operator.call, "")
_device: Any = torch.device


def load(m: Capturing, modes: list[Any]) -> None:
    """Guard the modes that a piece begins within; their number is one of its conditions."""
    m.modes = [m.world.load(mode, m.world.item(PLACE, k)) for k, mode in enumerate(modes)]
    if modes:
        m.world.passing.append("a torch function mode")


def apply_mode(m: Capturing, func: Any, kinds: list[type], args: Args, kwargs: Any) -> Any:
    """What the innermost mode makes of a call."""
    mode = m.modes.pop()
    # as torch calls it: without kwargs where its code in C was given none
    given = (func, tuple(kinds), args, *(() if kwargs is None else (kwargs,)))
    try:
        with without_modes(), m.world.recorder:
            result = m.call(m.attribute(mode, "__torch_function__"), given, {})
    finally:
        m.modes.append(mode)
    if result is NotImplemented:
        raise GraphBreak(f"{type(mode).__qualname__}.__torch_function__ leaves a call to others")
    return result


@stands_for(_device.__enter__)
def _enter_device(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    m.modes.append(m.call(m.world.hold(DeviceContext, "torch.device"), args, kwargs))
    return args[0]


@stands_for(_device.__exit__, TorchFunctionMode.__exit__)
def _leave(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    m.modes.pop()


@stands_for(MODE_STACK.pop)
def _pop(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    return m.modes.pop()


@stands_for(TorchFunctionMode.__enter__, MODE_STACK.push)
def _push(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    m.modes += args
    return args[0]


@stands_for(MODE_STACK.length)
def _length(m: Capturing, args: Args, kwargs: Kwargs) -> int:
    return len(m.modes)


@stands_for(MODE_STACK.all)
def _all(m: Capturing, args: Args, kwargs: Kwargs) -> list[Any]:
    return list(m.modes)


stands_for(torch.set_default_device)(breaking("the default device is set for all that follows"))
