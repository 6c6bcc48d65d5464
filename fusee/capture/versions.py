"""Finds the entry for a call among many, by the values that tell them apart.

A place with few entries tries their checks in turn. Where there are more, one of the facts that
all of them have tells most of them apart: an integer, a size, the object that an argument is. Its
value in a call leads to the few entries that were made for that value.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from typing import Any

from fusee.capture.expressions import Source
from fusee.capture.facts import GONE, At, Fact
from fusee.capture.origin import variable

__all__ = ["FEW", "Index"]

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
        exec(f"def read({listed}):\n{body}    return {text}\n", names)
        read: Callable[..., Hashable] = names["read"]
        return read


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
