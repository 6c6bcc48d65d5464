"""Who hears of an error: handlers of the program's, and branches that do nothing but raise."""

from __future__ import annotations

import builtins
from collections.abc import Iterable

import torch

from fusee.capture.bytecode import Program
from fusee.capture.frame import Frame
from fusee.capture.sources import is_trusted
from fusee.capture.torch_api import FakeTensor

# Branches on a tensor's value of which one side raises: `assert mask.any()`, `if bad: raise ...`.
#
# The graph checks the value, and what follows is the other side. Where the check fails the piece
# has changed nothing (graph_break.py): Python runs it again, and raises what the program raises.

# After these it is not sure that the instructions that follow run, or what becomes of an error.
_LEAVING = ("JUMP", "FOR_ITER", "SEND", "YIELD", "RETURN", "RERAISE", "BEFORE_WITH")


def raising_truth(program: Program, at: int) -> bool | None:
    """The truth for which the jump at an index leads to nothing but an error; None: neither."""
    jump = program.instructions[at]
    if jump.target < 0 or not jump.name.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    sides = {jump.name.endswith("IF_TRUE"): jump.target, jump.name.endswith("IF_FALSE"): at + 1}
    found = [truth for truth, index in sides.items() if _raises(program, index)]
    return found[0] if len(found) == 1 else None


def _raises(program: Program, index: int) -> bool:
    for instruction in program.instructions[index:]:
        if instruction.name == "RAISE_VARARGS":
            return True
        if any(part in instruction.name for part in _LEAVING):
            return False
        if instruction.value == "StopIteration":  # not an error to whoever asks for more
            return False
    return False


def is_caught(frames: Iterable[Frame]) -> bool:
    """Whether a handler takes an error that is raised where these stand, other than a `with`."""
    for f in frames:
        handler = f.program.handler(f.at)
        if handler is None:
            continue
        taken = f.program.instructions[handler.target : handler.target + 2]
        if [instruction.name for instruction in taken] != ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            return True
    return False


def is_heard(frames: Iterable[Frame]) -> bool:
    """Whether an error that is raised where these stand may end there, in code of the program's.

    `finally` passes it on: as where nobody hears of it, what Python did since the call is left out.
    """
    for f in frames:
        handler = f.program.handler(f.at) if f.program.handlers else None
        while handler is not None:
            first, second, *_ = f.program.instructions[handler.target :]
            if first.name == "PUSH_EXC_INFO" and second.name == "WITH_EXCEPT_START":
                leave = f.stack[handler.depth - 1]
                home = type(getattr(leave, "__self__", None)).__module__
                if home == "contextlib" or not is_trusted(home):
                    return True
            elif first.name == "PUSH_EXC_INFO" and _takes(f, handler.target):
                return True
            handler = f.program.handler(handler.target)
    return False


_ENDS = {"CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT", "RERAISE"}
_BY_VALUES = (IndexError, ValueError, RuntimeError, AssertionError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]


def _takes(f: Frame, at: int) -> bool:
    """Whether the handler that begins here may take what a call raises for its values."""
    taken = f.program.instructions
    while True:
        at = next(k for k in range(at, len(taken)) if taken[k].name in _ENDS)
        if taken[at].name != "CHECK_EXC_MATCH":
            return taken[at].name != "RERAISE"
        asked = taken[at - 1]
        name = str(asked.value) if asked.name == "LOAD_GLOBAL" else ""
        kind = f.globals.get(name, vars(builtins).get(name))
        if not isinstance(kind, type) or any(issubclass(one, kind) for one in _BY_VALUES):
            return True
        at = taken[at + 1].target


def condition(x: FakeTensor, wanted: bool) -> torch.Tensor | None:
    """What holds where the truth of `x` is as wanted; None if nothing may check it in a graph.

    A failed check ends a GPU's context.
    """
    if x.device.type != "cpu" or x.numel() != 1:
        return None
    if not wanted:
        return torch.logical_not(x)
    return x if x.dtype is torch.bool else torch.ne(x, 0)
