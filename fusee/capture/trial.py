"""Whether Python takes less time for a function that ends graphs than its pieces do.

What a graph spares is known by prices; what lies between two graphs is Python's, compiled or not,
and takes whatever it takes. So both are measured, by calls that the program makes anyway.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from fusee import log

_WARM = 16  # calls before it, which compile
_TURNS = "pccppccppcpccpcp"  # Python's and the pieces': no program alternates like this
_MOST_S = 0.05  # of longer calls what lies between graphs is no large part
_SPARED = 0.9  # Python's time over the pieces', from which on it is not worth a change


class Trial:
    """Of one entry of a function's beginning, which it gives to Python or lets be."""

    __slots__ = ("begin", "calls", "entry", "least", "name", "turn")

    def __init__(self, entry: Any, name: str) -> None:
        self.entry, self.name = entry, name
        self.calls, self.begin, self.turn = -_WARM, 0.0, "c"
        self.least = {"p": float("inf"), "c": float("inf")}

    def is_pythons(self) -> bool:
        """A call begins: whether Python is to run it."""
        at = self.calls
        self.calls, self.turn = at + 1, _TURNS[at % len(_TURNS)] if at >= 0 else "c"
        self.begin = time.perf_counter()
        return self.turn == "p"

    def note(self, result: Any) -> Any:
        """The call has come to its end, with this result."""
        took = time.perf_counter() - self.begin
        if self.calls <= -_WARM // 2:
            return result
        is_sure = not torch.are_deterministic_algorithms_enabled()
        is_sure &= not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if took > _MOST_S or not is_sure:
            self.entry.trial = None
            return result
        if self.calls > 0:
            self.least[self.turn] = min(took, self.least[self.turn])
        if self.calls >= len(_TURNS):
            self.entry.trial = None
            python, pieces = self.least["p"] * 1e6, self.least["c"] * 1e6
            told = f"{python:.1f} us by Python, {pieces:.1f} in pieces"
            if python < _SPARED * pieces:
                self.entry.run = None
                told += ": Python runs such calls"
            log.publish("guards", self.name, told)
        return result


def begin_trial(owner: Any, site: Any, entry: Any) -> None:
    """Measure both for a new entry, where Python does the same as its pieces."""
    if owner.varies.asks_compiling:
        owner.is_tried = False
        for one in owner.start.entries:
            one.trial = None
    elif owner.is_tried and site is owner.start and entry.captured.stop and entry.run:
        entry.trial = Trial(entry, owner.name)
