"""The versions of one place: entries, and how the one for a call is found.

A place with few entries tries their checks in turn. Where there are more, one of the facts that
all of them have tells most of them apart: an integer, a size, the object that an argument is. Its
value in a call leads to the few entries that were made for that value.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from fusee.capture.captured import Captured, Place
from fusee.capture.guards import GONE, At, Fact, TensorFact, describe, is_one_more
from fusee.capture.sources import Source, variable
from fusee.source import define


def _remedy(fact: Fact, found: Any) -> str:
    """What to do about a guard that keeps failing."""
    if fact.kind == "related" and fact.value.fixes() is not None:
        return "do not ask for the number there (a loop over range(), a key), or give it one value"
    is_number = fact.kind == "equals" and type(found) in (int, float)
    is_size = isinstance(found, TensorFact) and found.is_like(fact.value)
    if is_number or is_size:
        return "dynamic=None or True, mark_dynamic, a backend that takes symbols (docs/compile.md)"
    what = {
        "related": "sizes that go the same way there",
        "tensor": "tensors of one dtype, device and number of axes",
        "is": "the same object at each call",
        "type": "objects of one class",
        "length": "containers of one length",
    }
    return f"give {what.get(fact.kind, 'it one value')}, or raise recompile_limit"


@dataclass
class Entry:
    """One way to run from a place on. `run` is None if Python runs it.

    times    milliseconds of each stage
    number   grows with each entry of the process
    """

    captured: Captured
    check: Callable[..., bool]
    check_source: Callable[[], str]
    run: Callable[..., Any] | None
    compiled: Callable[..., Any] | None = None
    times: dict[str, float] = field(default_factory=dict)
    number: int = field(default_factory=itertools.count().__next__)


@dataclass
class Site:
    """All entries of one place.

    index    finds them, if they are many
    is_last  whether the one with symbols was made that comes after the limit
    missed   what the last call without an entry missed, in words, and what was there
    steps    for how many such calls in a row that was one more
    growing  the fact that such calls missed
    """

    place: Place
    entries: list[Entry] = field(default_factory=list)
    index: Index | None = None
    is_full: bool = False
    is_last: bool = False
    is_met: bool = False
    missed: tuple[str, Any] | None = None
    steps: int = 0
    growing: Fact | None = None

    def find(self, values: dict[str, Any]) -> Entry | None:
        given = values.values()
        few = self.entries if self.index is None else self.index.candidates(*given)
        return next((entry for entry in few if entry.check(*given)), None)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        if len(self.entries) > FEW:
            self.index = self.index or Index(self.place.parameters)
            self.index.add(self.entries)

    def clear(self) -> None:
        self.entries.clear()
        self.index, self.is_full, self.is_last, self.is_met = None, False, False, False
        self.missed, self.steps, self.growing = None, 0, None

    def grows(self, values: dict[str, Any]) -> bool:
        """Whether a size, or an int, has been one more at each of the last calls: a cache's length.

        Two versions show it; to compile each of the others would never be of use again.
        """
        facts = self.entries[-1].captured.facts
        if self.growing is not None:  # it alone is looked at: this comes at every token
            return bool(facts.found(self.growing, values) != self.growing.value)
        if (missed := facts.first_miss(values)) is None:
            return False
        fact, found = missed
        words = f"{fact.kind} {fact.origin}"
        last, before = self.missed or ("", None)
        before = before if last == words else None
        is_step = is_one_more(fact.kind, fact.value if before is None else before, found)
        self.steps = self.steps + 1 if is_step else 0
        self.missed = words, found
        self.growing = fact if self.steps >= 2 else None
        return self.growing is not None

    def why_full(self, values: dict[str, Any]) -> tuple[str, str]:
        """What kept versions from being of use, with what to do; and the user's line."""
        missed = [found for e in self.entries if (found := e.captured.facts.first_miss(values))]
        if not missed:
            return "", ""
        counts = Counter((fact.kind, str(fact.origin)) for fact, _ in missed)
        (chosen, count), *_ = counts.most_common()
        fact, found = next(x for x in missed[::-1] if (x[0].kind, str(x[0].origin)) == chosen)
        told = f"{count} of them could not be used: {describe(fact, found)}"
        return f"; {told}. To do: {_remedy(fact, found)}", fact.where


# ---------------------------------------------------------------------------- index


FEW = 4  # so many checks in turn take no longer than a look-up

_Key = tuple[str, str]


def _value(fact: Fact) -> Hashable:
    """What an object has if the fact holds for it."""
    return _KINDS[fact.kind][1](fact.value)


def _exactly(x: Any) -> Hashable:
    return type(x), repr(x) if isinstance(x, (float, complex)) else x


# By the kind of a fact: the value of an object, and that of the object for which the fact holds.
_KINDS: dict[str, tuple[Callable[[Any], Hashable], Callable[[Any], Hashable]]] = {
    "equals": (_exactly, _exactly),
    "tensor": (lambda x: tuple(x.shape), lambda known: known.size),
    "length": (len, lambda known: known),
    "type": (type, lambda known: known),
    "is": (id, id),
}


class Index:
    """Entries of one place, by the value of one fact.

    parameters   the variables that a check takes
    """

    def __init__(self, parameters: list[str]) -> None:
        self.parameters = parameters
        self.key: _Key | None = None
        self.read: Callable[..., Hashable] = lambda *given: None
        self.found: dict[Hashable, list[Any]] = {}
        self.others: list[Any] = []
        self.made_for = 0

    def add(self, entries: list[Any]) -> None:
        """Take the last of all entries in; choose anew what tells them apart at each doubling."""
        if len(entries) >= 2 * self.made_for:
            self._choose(entries)
            self.made_for = len(entries)
            for entry in entries:
                self._place(entry)
        else:
            self._place(entries[-1])

    def candidates(self, *given: Any) -> list[Any]:
        """The entries that may be good for a call."""
        try:
            return self.found.get(self.read(*given), self.others)
        except GONE:
            return self.others

    def _place(self, entry: Any) -> None:
        fact = _by_key(entry).get(self.key) if self.key else None
        if fact is None:
            self.others.append(entry)
            for listed in self.found.values():
                listed.append(entry)
        else:
            self.found.setdefault(_value(fact), [*self.others]).append(entry)

    def _choose(self, entries: list[Any]) -> None:
        counts: Counter[_Key] = Counter()
        values: dict[_Key, set[Hashable]] = defaultdict(set)
        facts: dict[_Key, Fact] = {}
        for entry in entries:
            for key, fact in _by_key(entry).items():
                counts[key] += 1
                values[key].add(_value(fact))
                facts[key] = fact
        whole = [key for key, count in counts.items() if count == len(entries)]
        self.key = max(whole, key=lambda key: len(values[key]), default=None)
        self.found, self.others = {}, []
        if self.key is not None:
            self.read = self._reader(facts[self.key], entries[0].captured.facts.kinds)

    def _reader(self, fact: Fact, kinds: dict[Any, type]) -> Callable[..., Hashable]:
        """A function of the variables that gives the value of the fact's object."""
        source = Source(kinds)
        text = f"_value({source.expression(fact.origin)})"
        body = "".join(f"    {line}\n" for line in source.lines)
        listed = ", ".join(map(variable, self.parameters))
        names = {**source.names, "_value": _KINDS[fact.kind][0]}
        return define(f"def read({listed}):\n{body}    return {text}\n", "read", "versions", names)


def _by_key(entry: Any) -> dict[_Key, Fact]:
    """An entry's facts about what can be looked up, the first of each kind and object."""
    found: dict[_Key, Fact] = {}
    for fact in entry.captured.facts.rows:
        if fact.kind in _KINDS and not isinstance(fact.value, At) and _is_hashable(fact):
            found.setdefault((fact.kind, str(fact.origin)), fact)
    return found


def _is_hashable(fact: Fact) -> bool:
    try:
        hash(_value(fact))
    except TypeError:
        return False
    return True
