"""Dicts under watch: every kind of change is seen, and nothing else is."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from fusee.runtime.watch import Watch, available, changed

pytestmark = pytest.mark.skipif(not available(), reason="dicts have no version in this Python")


class Holder:
    def __init__(self) -> None:
        self.kept = 1


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another value": lambda d: d.__setitem__("kept", 2),
    "an equal value": lambda d: d.__setitem__("kept", True),
    "one more": lambda d: d.__setitem__("more", 1),
    "one less": lambda d: d.__delitem__("kept"),
    "update": lambda d: d.update(kept=3),
    "setdefault": lambda d: d.setdefault("more", 1),
    "pop": lambda d: d.pop("kept"),
    "clear": lambda d: d.clear(),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("of", ["instance", "dict", "module"])
def test_changes_are_seen(name: str, of: str) -> None:
    holders: dict[str, Any] = {"instance": Holder(), "module": types.ModuleType("one")}
    names: dict[str, Any] = holders[of].__dict__ if of in holders else {}
    names["kept"] = 1
    watch = Watch([{}, names, {}])
    assert changed()(watch.address) == -1
    CHANGES[name](names)
    assert changed()(watch.address) == 1
    watch.note()
    assert changed()(watch.address) == -1


def test_attributes_that_are_set_are_seen() -> None:
    holder = Holder()
    watch = Watch([holder.__dict__])
    for _ in range(100):  # the interpreter specialises the store meanwhile
        assert changed()(watch.address) == -1
        holder.kept += 1
        assert changed()(watch.address) == 0
        watch.note()


def test_reading_is_no_change() -> None:
    holder = Holder()
    watch = Watch([holder.__dict__])
    assert (holder.kept, list(holder.__dict__), len(vars(holder))) == (1, ["kept"], 1)
    assert changed()(watch.address) == -1
