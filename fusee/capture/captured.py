"""What a capture gives: the piece of a function that runs as a graph, and what it relies on; and
the versions of one place, among which a call finds its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from fusee.capture.bytecode import parameters
from fusee.capture.check import Relation, SizeCondition, SizeRelation, compile_check
from fusee.capture.dynamic import Varying
from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import GONE, Fact, Facts, Values
from fusee.capture.policy import Policy
from fusee.capture.sources import Origin, Source, variable
from fusee.capture.torch_api import MODE_STACK, without_function_modes
from fusee.source import define

# ---------------------------------------------------------------------------- captured


@dataclass(frozen=True)
class Place:
    """Where a capture starts: a function's beginning, or between two of its instructions.

    of_code   the function is any of its code, and comes with each call as ".f"
    at        index of the instruction; -1 for the beginning
    depth     values on the stack
    names     local variables that are bound
    cells     variables of its own that inner functions share
    handled   whether an exception is being handled
    """

    function: types.FunctionType
    at: int = -1
    depth: int = 0
    names: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    handled: bool = False
    of_code: bool = False

    @property
    def parameters(self) -> list[str]:
        """What is alive here, in the order in which check and run take it."""
        first = [".f"] * self.of_code
        if self.at < 0:
            return first + parameters(self.function.__code__)
        own = [*(f".s{k}" for k in range(self.depth)), *(f".c_{n}" for n in self.cells)]
        return [*first, *self.names, *own, *[".h"] * self.handled]

    @property
    def variables(self) -> list[str]:
        """As `parameters`, by the names that generated code has for them."""
        return [variable(name) for name in self.parameters]


def tells_of_its_end(x: Any) -> bool:
    """Whether code of the program's may run when nobody has `x` any more."""
    if type(x) is types.GeneratorType:
        return x.gi_frame is not None and bool(x.gi_code.co_exceptiontable)
    is_asked = hasattr(type(x), "__del__")
    return is_asked or any(_calls_back(ref, x) for ref in weakref.getweakrefs(x))


def _calls_back(ref: Any, x: Any) -> bool:
    """Whether a weak reference or proxy of `x` has a callback."""
    if type(ref) in weakref.ProxyTypes:
        # its attributes are those of `x`; all proxies without a callback are one
        return weakref.proxy(x) is not ref
    return ref.__callback__ is not None


@dataclass
class Captured:
    """What a capture found.

    graph      the fx graph of torch calls; None if there are none
    examples   the real tensors that it was captured with, in the order of its placeholders
    inputs     where they came from
    run        given the compiled graph, makes the function that runs this piece
    stop       why and before which instruction it ends; None if the function returned
    eager      why Python runs all of it instead; "" if it doesn't
    is_around  whether what the function calls is compiled nevertheless
    grad       whether the graph runs with gradients
    inference  whether it runs in inference mode; None if that is as it was
    taken      what was read without a guard, by module and name
    answers    what functions gave that are said to be constant: `(function, args, kwargs, result)`
    effects    lines of its source that change objects besides tensors
    symbols    the sizes that vary, and what the graph relies on about them
    passing    what it has seen that another process would see differently; "" if nothing
    """

    place: Place
    facts: Facts
    conditions: tuple[list[str], dict[str, Any]]
    graph: fx.GraphModule | None = None
    examples: list[torch.Tensor] = field(default_factory=list)
    inputs: list[Origin] = field(default_factory=list)
    source: str = ""
    names: dict[str, Any] = field(default_factory=dict)
    stop: GraphBreak | None = None
    at: int = -1
    keywords: tuple[str, ...] = ()
    eager: str = ""
    is_around: bool = False
    grad: bool = True
    inference: bool | None = None
    breaks: list[GraphBreak] = field(default_factory=list)
    taken: dict[tuple[str, str], Any] = field(default_factory=dict)
    answers: list[tuple[Any, ...]] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)
    passing: str = ""
    symbols: Any = None

    def check(self, values: Values) -> tuple[Callable[..., bool], Callable[[], str]]:
        """The function that says whether a call may use this, and its source.

        values   the locals that it was captured with
        """
        conditions, names = self.conditions
        for origin, value, where in self.symbols.facts() if self.symbols else ():
            kind = SizeRelation if isinstance(value, Relation) else SizeCondition
            self.facts.add(kind, origin, value, functools.partial(str, where))
        with torch._C.DisableTorchFunction():
            found = compile_check(self.facts, self.place.variables, names, conditions, values)
        if not MODE_STACK.length():
            return found
        check, source = found

        def unseen(*values: Any) -> bool:  # by the modes that are on
            with torch._C.DisableTorchFunction():
                return check(*values)

        return unseen, source

    @property
    def raises(self) -> bool:
        """Whether it ends where the program raises."""
        return self.stop is not None and self.stop.raises

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """The modes of torch in which the graph runs, for a backend that asks for them."""
        found = self.inference
        inference = torch.is_inference_mode_enabled() if found is None else found
        with (  # without modes first: they are told of gradients that are switched
            without_function_modes(), torch.inference_mode(inference),
            torch.set_grad_enabled(self.grad),
        ):  # fmt: skip
            yield

    def compiled(self, compile_graph: Callable[..., Any]) -> Callable[..., Any] | None:
        """What a backend makes of the graph; None if there is none."""
        if self.graph is None:
            return None
        with self.modes():
            found: Callable[..., Any] = compile_graph(self.graph, self.examples)
            return found

    def run(self, graph: Callable[..., Any] | None, nested: Any = None) -> Callable[..., Any]:
        """The function that runs this piece with `graph` as its compiled graph.

        nested   as Between has it
        """
        names = {**self.names, "_graph": graph, "_nested": nested}
        return define(self.source, "run", "segment", names)


class CaptureKeeper(Protocol):
    """Keeps captures for other processes: fusee/persist."""

    def find(
        self, place: Place, values: Values, policy: Policy, varies: Varying
    ) -> Captured | None: ...
    def keep(
        self, captured: Captured, compiled: Any, values: Values, policy: Policy, varies: Varying
    ) -> None: ...


# ---------------------------------------------------------------------------- versions
# The versions of one place: entries, and how the one for a call is found.
#
# A place with few entries tries their checks in turn. Where there are more, one of the facts that
# all of them have tells most of them apart: an integer, a size, the object that an argument is. Its
# value in a call leads to the few entries that were made for that value.

_Key = tuple[type[Fact], str]  # a kind, and whose fact it is


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
    missed   what the last call without an entry missed, and what was there
    steps    for how many such calls in a row that was one more
    growing  the fact that such calls missed
    """

    place: Place
    entries: list[Entry] = field(default_factory=list)
    index: Index | None = None
    is_full: bool = False
    is_last: bool = False
    is_met: bool = False
    missed: tuple[_Key, Any] | None = None
    steps: int = 0
    growing: Fact | None = None

    def find(self, values: Values) -> Entry | None:
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

    def grows(self, values: Values) -> bool:
        """Whether a size, or an int, has been one more at each of the last calls: a cache's length.

        Two versions show it; to compile each of the others would never be of use again.
        """
        facts = self.entries[-1].captured.facts
        if self.growing is not None:  # it alone is looked at: this comes at every token
            return bool(facts.found(self.growing, values) != self.growing.value)
        if (missed := facts.first_miss(values)) is None:
            return False
        fact, found = missed
        key = type(fact), str(fact.origin)
        last, before = self.missed or (None, None)
        before = before if last == key else None
        is_step = fact.is_one_more(fact.value if before is None else before, found)
        self.steps = self.steps + 1 if is_step else 0
        self.missed = key, found
        self.growing = fact if self.steps >= 2 else None
        return self.growing is not None

    def why_full(self, values: Values) -> tuple[str, str]:
        """What kept versions from being of use, with what to do; and the user's line."""
        missed = [found for e in self.entries if (found := e.captured.facts.first_miss(values))]
        if not missed:
            return "", ""
        by_key = {(type(x[0]), str(x[0].origin)): x for x in missed}
        counts = Counter((type(fact), str(fact.origin)) for fact, _ in missed)
        (chosen, count), *_ = counts.most_common()
        fact, found = by_key[chosen]
        told = f"{count} of them could not be used: {fact.miss(found)}"
        return f"; {told}. To do: {fact.remedy(found)}", fact.where


# ---------------------------------------------------------------------------- index


FEW = 4  # so many checks in turn take no longer than a look-up


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
        known = _by_key(entry).get(self.key) if self.key else None
        if known is None:
            self.others.append(entry)
            for listed in self.found.values():
                listed.append(entry)
        else:
            self.found.setdefault(known[1], [*self.others]).append(entry)

    def _choose(self, entries: list[Any]) -> None:
        counts: Counter[_Key] = Counter()
        values: dict[_Key, set[Hashable]] = defaultdict(set)
        facts: dict[_Key, Fact] = {}
        for entry in entries:
            for key, (fact, value) in _by_key(entry).items():
                counts[key] += 1
                values[key].add(value)
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
        names = {**source.names, "_value": fact.INDEX[0]}
        return define(f"def read({listed}):\n{body}    return {text}\n", "read", "versions", names)


def _by_key(entry: Any) -> dict[_Key, tuple[Fact, Hashable]]:
    """An entry's facts about what can be looked up, and that; the first of each kind and object."""
    found: dict[_Key, tuple[Fact, Hashable]] = {}
    for fact in entry.captured.facts.rows:
        if fact.INDEX:
            with contextlib.suppress(TypeError):  # no key of a dict
                hash(value := fact.INDEX[1](fact.value))
                found.setdefault((type(fact), str(fact.origin)), (fact, value))
    return found
