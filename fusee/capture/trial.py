"""Whether Python takes less time for a function than its pieces do.

What a graph spares is known by prices; what lies between two graphs is Python's, compiled or not,
and takes whatever it takes, and numbers are made tensors before a graph. So both are measured, by
calls that the program makes anyway.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from fusee import log
from fusee.capture.captured import Captured
from fusee.capture.dynamic import as_tensor
from fusee.capture.guards import Facts, IdMatch, TypeMatch, Values
from fusee.capture.sources import ComputedAt, Local
from fusee.capture.torch_api import dynamo_switch

_WARM = 16  # calls before it, which compile
_TURNS = "pccppccppcpccpcp"  # Python's and the pieces': no program alternates like this
_MOST_S = 0.05  # of longer calls what lies between graphs is no large part
_SPARED = 0.9  # Python's time over the pieces', from which on it is not worth a change


class Trial:
    """Of one entry of a function's beginning, which it gives to Python or lets be."""

    __slots__ = ("begin", "calls", "check_s", "entry", "least", "name", "site", "turn")

    def __init__(self, entry: Any, site: Any, name: str, values: Values) -> None:
        self.entry, self.site, self.name = entry, site, name
        self.calls, self.begin, self.turn = -_WARM, 0.0, "c"
        self.least = {"p": float("inf"), "c": float("inf")}
        self.check_s = float("inf")  # nearly all of which Python's calls go without
        for _ in range(3):
            begin = time.perf_counter()
            entry.check(*values.values())
            self.check_s = min(self.check_s, time.perf_counter() - begin)

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
            python, pieces = self.least["p"] * 1e6, (self.least["c"] + self.check_s) * 1e6
            told = f"{python:.1f} us by Python, {pieces:.1f} in pieces"
            if python < _SPARED * pieces:
                _leave(self.entry, self.site)
                told += ": Python runs such calls"
            log.publish("guards", self.name, told)
        return result


def _leave(entry: Any, site: Any) -> None:
    """Let Python run an entry, whatever code it comes to and whatever numbers decide on branches.

    What else tells versions apart stays: others may take less time in pieces.
    """
    captured = entry.captured
    rows = [
        fact
        for fact in captured.facts.rows
        if isinstance(fact.origin, Local)
        or (not isinstance(fact, (IdMatch, TypeMatch)) and not isinstance(fact.origin, ComputedAt))
    ]
    told = "its calls are short, and Python takes less time for them than its pieces did"
    facts = Facts(rows, captured.facts.kinds)
    entry.captured = left = replace(captured, facts=facts, stop=None, eager=told)
    left.leave_to_python()

    def check(*given: Any) -> bool:  # made by the arguments of the next call that it is good for
        values = dict(zip(left.place.parameters, given))
        if left.facts.first_miss(values) is not None:
            return False
        entry.check, entry.check_source = left.check(values)
        if entry is site.entries[0]:
            site.quick, site.run = left.quick(values), None
        return bool(entry.check(*given))

    entry.run, entry.check = None, check


def begin_trial(owner: Any, site: Any, entry: Any, values: Values) -> None:
    """Measure both for a new entry, where Python does the same as its pieces."""
    if owner.varies.asks_compiling:
        owner.is_tried = False
        for one in owner.start.entries:
            one.trial = None
    elif owner.is_tried and site is owner.start and entry.run and entry.quick is None:
        # of one that another process captured it is not known what it asks
        is_own = type(entry.captured) is Captured
        if is_own and (entry.captured.stop or any(map(_is_made_tensor, entry.captured.inputs))):
            entry.trial = Trial(entry, site, owner.name, values)


def _is_made_tensor(origin: Any) -> bool:
    """Whether it is a number, of which each call makes a tensor."""
    return getattr(origin, "function", None) is as_tensor


def is_left(owner: Any, values: Values) -> bool:
    """Whether a call that all checks have refused is Python's, as those before it were."""
    first = next(iter(values.values()), None)
    is_others = issubclass(type(first), torch.nn.Module) and first is not owner.owner()
    if is_others or not owner.start.is_full or dynamo_switch("error_on_recompile"):
        return False
    found = (entry.captured for entry in owner.start.entries)
    return all(len(one.replaced) == one.settled for one in found)
