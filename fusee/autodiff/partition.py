"""A joint graph becomes a forward and a backward: what is saved, and what is computed once more.

prepare   values take fewer bytes, constants depend on no tensor     fusee/autodiff/prepare.py
choose    a minimum cut                                              fusee/autodiff/choice.py
split     the two graphs                                             fusee/autodiff/split.py
"""

from __future__ import annotations

from fusee.autodiff.choice import Choice, Facts, choose
from fusee.autodiff.costs import Costs, Kind, kind
from fusee.autodiff.joint import Joint, Split
from fusee.autodiff.prepare import prepare
from fusee.autodiff.split import split

__all__ = ["partition", "saved_bytes"]

_UTMOST = 2.0**20  # a scarcity at which no work is too much
_STEPS = 8  # of the search between scarcities


def partition(joint: Joint, *, budget: float = 1.0) -> Split:
    """The two graphs of a joint one, which is rewritten in place to need less memory.

    budget   1.0: calls to ATen are never repeated. 0.0: all is repeated that can be. Between: the
             share of the memory between these two that saved values may take, in bytes
    raises   CheckError if nothing can be saved so that the backward could run
    """
    prepare(joint)
    facts = Facts(joint, Costs(joint.aten))
    return split(joint, facts, _within(facts, budget))


def saved_bytes(facts: Facts, choice: Choice) -> int:
    """Bytes that live until the backward for its sake alone. Unwritten inputs live anyway."""
    return sum(
        facts.costs.bytes(node)
        for node in choice.saved
        if kind(node) is not Kind.INPUT or node in facts.written
    )


def _within(facts: Facts, budget: float) -> Choice:
    """The choice of least work whose saved values fit the budget."""
    best = choose(facts, None)
    if budget >= 1:
        return best
    least = choose(facts, _UTMOST)
    floor, full = (saved_bytes(facts, choice) for choice in (least, best))
    limit = floor + budget * max(0, full - floor)
    if budget <= 0:
        return least
    low, high = 1.0, 1024.0
    best = least
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        choice = choose(facts, middle)
        if saved_bytes(facts, choice) <= limit:
            best, high = choice, middle
        else:
            low = middle
    return best
