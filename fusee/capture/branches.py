"""Branches on a tensor's value of which one side raises: `assert mask.any()`, `if bad: raise ...`.

The graph checks the value, and what follows is the other side. Where the check fails the piece has
changed nothing (failures.py): Python runs it again, and raises what the program raises.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fusee.capture.bytecode import Program
from fusee.capture.frame import Frame
from fusee.capture.torch_api import FakeTensor

__all__ = ["condition", "is_caught", "raising_truth"]

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


def condition(x: FakeTensor, wanted: bool) -> torch.Tensor | None:
    """What holds where the truth of `x` is as wanted; None if nothing may check it in a graph.

    A failed check ends a GPU's context.
    """
    if x.device.type != "cpu" or x.numel() != 1:
        return None
    if not wanted:
        return torch.logical_not(x)
    return x if x.dtype is torch.bool else torch.ne(x, 0)
