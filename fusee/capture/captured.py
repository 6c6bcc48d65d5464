"""What a capture gives: the piece of a function that runs as a graph, and what it relies on."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from fusee.capture.bytecode import parameters
from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import GONE, At, Fact, Facts, compile_check
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

    def check(self, values: Mapping[str, Any]) -> tuple[Callable[..., bool], Callable[[], str]]:
        """The function that says whether a call may use this, and its source.

        values   the locals that it was captured with
        """
        conditions, names = self.conditions
        for origin, value, where in self.symbols.facts() if self.symbols else ():
            self.facts.add("related", origin, value, functools.partial(str, where))
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


class Keeper(Protocol):
    """Keeps captures for other processes: fusee/persist."""

    def find(self, place: Place, values: Mapping[str, Any], policy: Policy) -> Captured | None: ...
    def keep(
        self, captured: Captured, compiled: Any, values: Mapping[str, Any], policy: Policy
    ) -> None: ...


# ---------------------------------------------------------------------------- versions
# Finds the entry for a call among many, by the values that tell them apart.
#
# A place with few entries tries their checks in turn. Where there are more, one of the facts that
# all of them have tells most of them apart: an integer, a size, the object that an argument is. Its
# value in a call leads to the few entries that were made for that value.

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
