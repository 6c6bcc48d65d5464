"""What a capture gives: the piece of a function that runs as a graph, and what it relies on; and
the versions of one place, among which a call finds its own."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fusee.capture.bytecode import call_from, kept_by, parameters
from fusee.capture.frame import ABSENT
from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import (
    GONE,
    EqualsMatch,
    Fact,
    Facts,
    IdMatch,
    Look,
    TensorFact,
    TensorMatch,
    Values,
    fails,
    follows,
)
from fusee.capture.mirrors import Later, coming
from fusee.capture.sources import (
    Held,
    Item,
    Local,
    OfAxis,
    Origin,
    SizeOf,
    Source,
    in_words,
    looking,
    of_code,
    size_source,
    variable,
)
from fusee.capture.torch_api import MODE_STACK, OF_PRICE, no_torch_function, without_function_modes
from fusee.capture.watched import Watched, quick_check
from fusee.runtime import gc_paused
from fusee.runtime.change_detection import (
    CheckTable,
    Open,
    Read,
    available,
    can_watch,
    changed,
    differs,
)
from fusee.source import Function, HostSource, define
from fusee.sym import Size, Steps, Symbol, coefficient, substitute, symbols
from fusee.sym.ranges import COMPARISONS

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
    is_simple = not weakref.getweakrefcount(x) and type(x) not in _HOLDING
    if is_simple and not issubclass(type(x), types.GeneratorType | BaseException):  # no proxy's
        return hasattr(type(x), "__del__")
    row, known = [x], set()
    while row:
        x = row.pop()
        if id(x) in known:
            continue
        is_generator = type(x) is types.GeneratorType
        if is_generator and x.gi_frame is not None and x.gi_code.co_exceptiontable:
            return True
        if is_generator or type(x) in _HOLDING:
            known.add(id(x))
            row += (y for y in gc.get_referents(x) if type(y) is not types.FunctionType)
        elif issubclass(type(x), BaseException):
            known.add(id(x))
            row += (y for _, kept in kept_by(x) for part in kept for y in part.values())
        elif issubclass(type(x), types.BuiltinFunctionType | type):
            # torch.sin, which others watch and nobody lets go of; a class, which is watched once it
            # was asked for as an abstract one's, and is within a ring that only gc ends
            continue
        elif hasattr(type(x), "__del__") or any(_calls_back(r, x) for r in weakref.getweakrefs(x)):
            return True
    return False


# Iterators that end with what they go through, and what they, or frames, have that in.
_HOLDING = {
    types.CellType,
    enumerate,
    filter,
    map,
    tuple,
    zip,
    *filter(inspect.isclass, vars(itertools).values()),
}


def _calls_back(ref: Any, x: Any) -> bool:
    """Whether a weak reference or proxy of `x` has a callback."""
    if type(ref) in weakref.ProxyTypes:
        return weakref.proxy(x) is not ref  # all without a callback are one; it looks like `x`
    # dictionaries of torch's and of ours forget tensors and modules that are gone: nobody sees when
    callback: Any = ref.__callback__
    if type(ref.__callback__) is weakref.finalize:
        callback = getattr(callback.peek()[1], "func", callback.peek()[1])  # of a partial
    return callback is not None and not str(callback.__module__).startswith(("torch.", "fusee."))


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
    is_plain   whether the graph is all of a function that Python itself would take as long to run
               as the captured program does
    begun      what is taken out of optimizers' states if it is discarded, or its first run raises
    said       what torch's code warned of, while it ran on stand-ins
    replaced   as Watched has it; `settled`: how much of it the check knows
    """

    place: Place
    facts: Facts
    conditions: dict[str, Any]
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
    is_plain: bool = False
    symbols: Any = None
    said: list[Later] = field(default_factory=list)
    begun: list[tuple[dict[Any, Any], torch.Tensor]] = field(default_factory=list)
    replaced: set[tuple[int, Any]] = field(default_factory=set)
    settled: int = 0

    def take_back(self) -> None:
        """Take out of optimizers' states what the capture has put there."""
        while self.begun:
            state, param = self.begun.pop()
            state.pop(param, None)

    def leave_to_python(self) -> None:
        """Let all calls for which the graph costs the same use this: Python will run them."""
        self.conditions = {k: x for k, x in self.conditions.items() if k in OF_PRICE}

    def check(self, values: Values) -> tuple[Callable[..., bool], Callable[[], str]]:
        """The function that says whether a call may use this, and its source.

        values   the locals that it was captured with
        """
        for origin, value, where in self.symbols.facts() if self.symbols else ():
            kind = SizeRelation if isinstance(value, Relation) else EqualsMatch
            self.facts.add(kind, origin, value, functools.partial(str, where))
        with no_torch_function():
            self.settled = len(self.replaced)
            given = self.facts, self.place.variables, self.conditions, values
            found = compile_check(*given, self.replaced)
        if not MODE_STACK.length():
            return found
        check, source = found

        def unseen(*values: Any) -> bool:  # by the modes that are on
            with no_torch_function():
                return check(*values)

        return unseen, source

    def quick(self, values: Values) -> Callable[..., int] | None:
        """The check as one builtin, below 0 where it holds, for the code that the function has now;
        None if it asks for what that cannot."""
        is_of_objects = any(not issubclass(x, torch.Tensor) for x in self.facts.kinds.values())
        if is_of_objects or not available() or MODE_STACK.length() or self.stop is not None:
            return None
        own, others = self.place.function, Facts()
        owners, named = [(own, own.__code__)], list[tuple[dict[str, Any], str, Any]]()
        for fact in self.facts.rows:
            x: Any = fact.origin
            function = of_code(x)
            is_global = isinstance(x, Item) and type(x.key) is str and isinstance(fact, IdMatch)
            if is_global and isinstance(x.of, Held) and type(x.of.value) is dict:
                named.append((x.of.value, x.key, fact.value))
            elif function is not None:
                owners.append((function, fact.value))
            else:
                others.rows.append(fact)
        fresh = _fresh(others, others.rows, values)
        listed = [x.name if isinstance(x, Local) else "" for x in others.listed]
        is_all = not others.rows and listed == self.place.parameters
        if fresh is None or not is_all:
            return None
        return quick_check(self.conditions, named, owners, fresh[1])

    @property
    def raises(self) -> bool:
        """Whether it ends where the program raises."""
        return self.stop is not None and self.stop.raises

    @property
    def is_once(self) -> bool:
        """Whether it ends where the next call need not."""
        return self.stop is not None and self.stop.once

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """The modes of torch in which the graph runs, for a backend that asks for them."""
        inference = torch.is_inference_mode_enabled() if self.inference is None else self.inference
        with (  # without modes first: they are told of gradients that are switched
            without_function_modes(), torch.inference_mode(inference),
            torch.set_grad_enabled(self.grad),
        ):  # fmt: skip
            yield

    def compiled(self, compile_graph: Function) -> Function | None:
        """What a backend makes of the graph; None if there is none."""
        if self.graph is None:
            return None
        with self.modes():
            found: Function = compile_graph(self.graph, self.examples)
            return found

    def run(self, graph: Function | None, nested: Any = None) -> Function:
        """The function that runs this piece with `graph` as its compiled graph.

        nested   as Between has it
        """
        if not getattr(graph, "is_captured", False):  # else its own calls warn
            for function, args, kwargs, lines in self.said:
                call_from(lines, function, *args, **kwargs)
        names = {**self.names, "_graph": graph, "_nested": nested}
        return define(self.source, "run", "segment", names)


# ---------------------------------------------------------------------------- versions
# The versions of one place: entries, and how the one for a call is found.
#
# A place with few entries tries their checks in turn. Where there are more, one of the facts that
# all of them have tells most of them apart: an integer, a size, an object. Its value in a call
# leads to the few entries that were made for that value.

_Key = tuple[type[Fact], str]  # a kind, and whose fact it is


@dataclass
class Entry:
    """One way to run from a place on. `run` is None if Python runs it.

    quick    `check` as a builtin, below 0 where it holds; None if it is more than that
    times    milliseconds of each stage
    number   grows with each entry of the process
    made_at  the turn of its function; is_found: whether another turn found it
    trial    while it is not known if Python takes less time, what measures it
    """

    captured: Captured
    check: Callable[..., bool]
    check_source: Callable[[], str]
    run: Function | None
    compiled: Function | None = None
    quick: Callable[..., int] | None = None
    times: dict[str, float] = field(default_factory=dict)
    number: int = field(default_factory=itertools.count().__next__)
    made_at: int = 0
    is_found: bool = False
    trial: Any = None

    def is_settled(self, values: Values) -> bool:
        """Whether it is good by a new check, which no longer watches what the program replaces."""
        captured = self.captured
        if len(captured.replaced) == captured.settled or captured.facts.misses(values):
            return False
        self.check, self.check_source = captured.check(values)
        return self.check(*values.values())


@dataclass
class Site:
    """All entries of one place.

    alive    what is alive there, if it is no beginning
    index    finds them, if they are many
    quick    the first one's, and run
    is_last  whether the one with symbols was made that comes after the limit
    is_passed  whether one that ends for what happens once was left out
    missed   what the last call without an entry missed, and what was there
    steps    for how many such calls in a row that was one more
    growing  the fact that such calls missed
    """

    place: Place
    entries: list[Entry] = field(default_factory=list)
    index: Index | None = None
    quick: Callable[..., int] | None = None
    run: Function | None = None
    is_full: bool = False
    is_last: bool = False
    is_met: bool = False
    is_passed: bool = False
    missed: tuple[_Key, Any] | None = None
    steps: int = 0
    growing: Fact | None = None
    alive: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.alive = self.place.parameters if self.place.at >= 0 else []

    def find(self, values: Values, turn: int, is_tried: bool = False) -> Entry | None:
        """What is good for a call; `is_tried` where the checks have just refused it."""
        given = values.values()
        for entry in self.entries if self.index is None else self.index.candidates(*given):
            if (not is_tried and entry.check(*given)) or entry.is_settled(values):
                entry.is_found |= entry.made_at != turn
                return entry
        return None

    def add(self, entry: Entry) -> None:
        if entry.captured.is_once and not self.is_passed:
            self.is_passed = True  # the next call is captured anew
            return
        self.entries.append(entry)
        self.quick, self.run = self.entries[0].quick, self.entries[0].run
        if len(self.entries) > FEW:
            self.index = self.index or Index(self.place.parameters, self.entries)
            self.index.add()

    def clear(self) -> None:
        self.entries.clear()
        self.index = self.quick = self.run = None
        self.is_full = self.is_last = self.is_met = self.is_passed = False
        self.missed, self.steps, self.growing = None, 0, None

    def count(self, values: Values, limit: int, turn: int) -> int:
        """How many entries there are; once many, without those for other modules of a loop that
        a later turn found: others' may be made at each call."""
        if self.place.at < 0 or not limit <= len(self.entries) < limit * _MOST_TURNS:
            return len(self.entries)
        with no_torch_function():
            seen = [e.captured.facts for e in self.entries if e.is_found or e.made_at == turn]
            rows = [(filter(_is_of_turn, x.rows), x.looking(values)) for x in seen]
            return len(self.entries) - sum(any(fails(x, at) for x in turns) for turns, at in rows)

    def grows(self, values: Values) -> bool:
        """Whether a size, or an int, has been one more at each of the last calls (a cache's
        length), or what a break has just made another text or float: a loss that is printed.

        Two versions show it; to compile each of the others would never be of use again.
        """
        facts = self.entries[-1].captured.facts
        if self.growing is not None:  # it alone is looked at: this comes at every token
            return bool(facts.found(self.growing, values) != self.growing.value)
        if (missed := facts.first_miss(values)) is None:
            return False
        fact, found = missed
        key = fact.key
        last, before = self.missed or (None, None)
        if last != key:  # another one has changed
            self.steps, before = 0, fact.value
        self.steps = self.steps + 1 if fact.is_one_more(before, found) else 0
        # any other object would be let go of late, an error with all that its frames have
        self.missed = key, found if type(found) in (int, float, str, TensorFact) else None
        self.growing = fact if self.steps >= 2 else None
        return self.growing is not None

    def why_full(self, values: Values) -> tuple[str, str]:
        """What kept versions from being of use, with what to do; and the user's line."""
        missed = [found for e in self.entries if (found := e.captured.facts.first_miss(values))]
        if not missed:
            return "", ""
        by_key = {fact.key: (fact, found) for fact, found in missed}
        counts = Counter(fact.key for fact, _ in missed)
        (chosen, count), *_ = counts.most_common()
        fact, found = by_key[chosen]
        told = f"{count} of them could not be used: {fact.miss(found)}"
        return f"; {told}. To do: {fact.remedy(found)}", fact.where


# Turns of a loop that ends graphs: it goes on at one place after each of its modules.
_MOST_TURNS = 32


def _is_of_turn(fact: Fact) -> bool:
    """Whether it says which module a loop has come to, or comes to next."""
    if not (isinstance(fact, IdMatch) and isinstance(fact.value, torch.nn.Module)):
        return False
    is_variable = isinstance(fact.origin, Local)
    return is_variable or any(getattr(x, "function", None) is coming for x in fact.origin.path())


# ---------------------------------------------------------------------------- index


FEW = 4  # so many checks in turn take no longer than a look-up


class Index:
    """Entries of one place, by the value of one fact.

    parameters   the variables that a check takes
    entries      all of them
    """

    def __init__(self, parameters: list[str], entries: list[Any]) -> None:
        self.parameters = parameters
        self.entries = entries
        self.key: _Key | None = None
        self.read: Callable[..., Hashable] = lambda *given: None
        self.found: dict[Hashable, list[Any]] = {}
        self.others: list[Any] = []
        self.made_for = 0

    def add(self) -> None:
        """Take the last of all entries in; choose anew what tells them apart at each doubling."""
        entries = self.entries
        if len(entries) >= 2 * self.made_for:
            self._choose(entries)
            self.made_for = len(entries)
            for entry in entries:
                self._place(entry)
        else:
            self._place(entries[-1])

    def candidates(self, *given: Any) -> list[Any]:
        """The entries that may be good for a call."""
        if MODE_STACK.length():  # the program's would hear what is read
            return self.entries
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
        facts, kinds = dict[_Key, Fact](), dict[_Key, dict[Any, type]]()
        for entry in entries:
            for key, (fact, value) in _by_key(entry).items():
                counts[key] += 1
                values[key].add(value)
                facts[key] = fact
                kinds[key] = entry.captured.facts.kinds
        # which leaves the fewest to be checked: those of one value, and those it says nothing of
        price = {k: counts[k] / len(values[k]) + len(entries) - counts[k] for k in counts}
        self.key = min(price, key=price.__getitem__, default=None)
        self.found, self.others = {}, []
        if self.key is not None:
            self.read = self._reader(facts[self.key], kinds[self.key])

    def _reader(self, fact: Fact, kinds: dict[Any, type]) -> Callable[..., Hashable]:
        """A function of the variables that gives the value of the fact's object."""
        source = Source(kinds)
        for origin in fact.origin.path()[:-1]:
            if kind := kinds.get(origin):  # code of the user's might say what others' parts are
                other = f"type({source.variable(origin)}) is not {source.constant(kind)}"
                source.lines.append(f"if {other}: raise TypeError")
        text = f"return _value({source.expression(fact.origin)})"
        listed = ", ".join(map(variable, self.parameters))
        made = HostSource("read", listed, _value=fact.INDEX[0], **source.names)
        made.add(*source.lines, text)
        return made.function("versions")


def _by_key(entry: Any) -> dict[_Key, tuple[Fact, Hashable]]:
    """An entry's facts about what can be looked up, and that; the first of each kind and object."""
    found: dict[_Key, tuple[Fact, Hashable]] = {}
    for fact in entry.captured.facts.rows:
        if fact.INDEX:
            with contextlib.suppress(TypeError):  # no key of a dict
                hash(value := fact.INDEX[1](fact.value))
                if value is not ABSENT:
                    found.setdefault(fact.key, (fact, value))
    return found


# ---------------------------------------------------------------------------- check
# The check of one entry, and relations between sizes in it.
#
# Facts about what dicts hold are watched, the others are looked at. Those about tensors
# that are new at each call are one call of machine code, with what holds between their sizes.

_FEW = 8  # facts that are looked at as quickly as they are watched


@gc_paused()
def compile_check(
    facts: Facts,
    parameters: list[str],
    state: dict[str, Any],
    values: Values,
    replaced: set[tuple[int, Any]],
) -> tuple[Callable[..., bool], Callable[[], str]]:
    """The check as a function of the locals, and what gives its source.

    state        torch's, as `state_conditions` has it
    values       the locals, for which all facts hold now
    replaced     as Watched has it; once it has grown, another check is quicker
    """
    if not available():
        check, text = facts.compile(parameters, state)
        return check, lambda: text
    seen, watched, others = Watched(replaced), Facts(kinds=facts.kinds), Facts(kinds=facts.kinds)
    for fact in facts.rows:
        (watched if fact.watched(seen) else others).rows.append(fact)
    if len(watched.rows) < _FEW:
        watched.rows, others.rows = [], facts.rows
    fresh = _fresh(others, [*facts.rows], values)
    names: dict[str, Any] = {}
    if watched.rows:
        seen.start(watched)
        names |= {"_changed": changed(), "_watched": seen}
    if fresh is not None:
        names |= {"_differs": differs(), "_table": fresh[1]}
    check, text = others.compile(parameters, state, names)

    def source() -> str:
        listed = [f"# _table: {fact}" for fact in (fresh[0] if fresh else ())]
        return "\n".join([text, *listed, *(f"# _watched: {fact}" for fact in watched.rows)])

    return check, source


def _fresh(
    others: Facts, known: Sequence[Fact], values: Values
) -> tuple[list[Fact], CheckTable] | None:
    """Takes facts about tensors and their sizes out of `others` that machine code looks at; None if
    there are none."""
    look = looking(values)
    closed: dict[Fact, torch.Tensor | None] = {}
    opened: dict[Fact, Open] = {}
    for fact in others.rows:
        if fact.is_listed():
            try:
                x = look(fact.origin)
            except GONE:  # an optimizer's state, which a step that raised has taken back
                continue
            if isinstance(fact, TensorMatch) and None in (*fact.value.size, *fact.value.stride):
                if can_watch(x):
                    opened[fact] = Open(x, fact.value.size, fact.value.stride)
            elif x is None or can_watch(x):
                closed[fact] = x
    if not opened and not closed:
        return None
    others.listed = listed = [fact.origin for fact in (*closed, *opened)]
    elements = {origin: k for k, origin in enumerate(listed)}
    tensors = {fact.origin for fact in known if isinstance(fact, TensorMatch)}

    def element(origin: Origin) -> int:
        if origin not in elements:
            elements[origin] = len(listed)
            listed.append(origin)
        return elements[origin]

    def place(origin: Origin) -> Read | None:
        if not isinstance(origin, OfAxis):
            return Read(element(origin), "int")
        if origin.of not in tensors or not can_watch(look(origin.of)):
            return None
        kind = "size" if isinstance(origin, SizeOf) else "stride"
        return Read(element(origin.of), kind, origin.axis)

    read: dict[Origin, Read] = {}
    related: list[SizeRelation] = []
    for fact in others.rows:
        if isinstance(fact, SizeRelation):
            places = {origin: place(origin) for origin in fact.reads()}
            if None not in places.values():
                read.update({origin: one for origin, one in places.items() if one is not None})
                related.append(fact)
    names = {origin: str(k) for k, origin in enumerate(read)}
    steps = Steps(names.values())
    required = [fact.compared(steps, names) for fact in related]
    seen = {fact.origin for fact in (*closed, *opened) if isinstance(fact, TensorMatch)}
    taken = [*closed, *opened, *related, *(x for x in others.rows if follows(x, seen))]
    gone = set(taken)
    others.rows = [fact for fact in others.rows if fact not in gone]
    table = CheckTable(
        [*closed.values()], [*opened.values()], [*read.values()], [*steps.rows], required
    )
    return taken, table


# ---------------------------------------------------------------------------- relations
# What holds between sizes that vary.


@dataclass(frozen=True)
class Relation:
    """`a op b`, of sizes over symbols that come from `origins`."""

    a: Size
    op: str
    b: Size
    origins: Mapping[Symbol, Origin] = field(compare=False)

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        return tuple(dict.fromkeys((*symbols(self.a), *symbols(self.b))))

    def condition(self, source: Source) -> str:
        """Python that holds as long as it does."""
        left, right = (size_source(x, self.origins, source) for x in (self.a, self.b))
        return f"{left} {self.op} {right}"

    def holds(self, given: Mapping[Symbol, Any]) -> bool:
        """Whether it does for these values."""
        return COMPARISONS[self.op](substitute(self.a, given), substitute(self.b, given))

    def fixes(self) -> Symbol | None:
        """The symbol that it makes a number of; None if it makes none."""
        if self.op != "==" or not isinstance(self.b, int) or isinstance(self.a, int):
            return None
        of = [*symbols(self.a)]
        return of[0] if len(of) == 1 and coefficient(self.a, of[0]) is not None else None

    def __str__(self) -> str:
        return f"{in_words(self.a, self.origins)} {self.op} {in_words(self.b, self.origins)}"


class SizeRelation(Fact):
    """A Relation of the size at its origin, or the stride, to others."""

    TORCH = "SHAPE_ENV"

    def conditions(self, at: str, source: Source) -> list[str]:
        return [self.value.condition(source)]

    def holds(self, look: Look) -> bool:
        known: Relation = self.value
        return known.holds({symbol: look(known.origins[symbol]) for symbol in known.symbols})

    def found(self, look: Look) -> str:
        return self._numbers(lambda symbol: look(self.value.origins[symbol]))

    def _numbers(self, value: Callable[[Symbol], Any]) -> str:
        return ", ".join(f"{self.value.origins[s]} = {value(s)}" for s in self.value.symbols)

    def moved(self, at: Callable[[Origin], Origin]) -> Relation:
        known: Relation = self.value
        return replace(known, origins={symbol: at(x) for symbol, x in known.origins.items()})

    def miss(self, found: Any) -> str:
        then = self._numbers(lambda symbol: symbol.hint)
        return f"{self.value} held with {then}, and does not with {found}"

    def __str__(self) -> str:
        return str(self.value)

    def reads(self) -> Iterable[Origin]:
        return [self.value.origins[symbol] for symbol in self.value.symbols]

    def compared(self, steps: Steps, names: Mapping[Origin, str]) -> int:
        known: Relation = self.value
        named = {s: Symbol(names[known.origins[s]], s.lo).expr for s in known.symbols}
        return steps.compared(substitute(known.a, named), known.op, substitute(known.b, named))

    def varying(self, found: Any) -> Iterable[tuple[str, bool, Any, Any]]:
        if (symbol := self.value.fixes()) is not None:
            yield str(self.value.origins[symbol]), False, None, None

    def remedy(self, found: Any) -> str:
        if self.value.fixes() is None:
            return Fact.remedy(self, found)
        return "do not ask for the number there (a loop over range(), a key), or give it one value"
