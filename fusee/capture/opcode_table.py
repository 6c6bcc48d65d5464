"""The tables that opcodes register in: one per Python version, and what versions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusee.capture.bytecode import Instruction
from fusee.capture.frame import Frame

__all__ = ["COMMON", "V311", "V312", "V313", "Handler", "op"]

Handler = Callable[[Frame, Instruction], Any]

COMMON: dict[str, Handler] = {}
V311: dict[str, Handler] = {}
V312: dict[str, Handler] = {}
V313: dict[str, Handler] = {}


def op(*tables: dict[str, Handler], name: str = "") -> Callable[[Handler], Handler]:
    """Register a handler, under its own name unless told, for some versions or for all."""

    def register(function: Handler) -> Handler:
        for one in tables or (COMMON,):
            one[name or function.__name__] = function
        return function

    return register
