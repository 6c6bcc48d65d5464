"""The check of one entry, and relations between sizes in it.

Facts about what dicts hold are watched, the others are looked at. Those about tensors
that are new at each call are one call of machine code, with what holds between their sizes.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusee.capture.guards import Fact, Facts, Look, TensorMatch, Values
from fusee.capture.sources import Origin, SizeOf, Source, StrideOf, looking
from fusee.capture.watched import Watched
from fusee.runtime import process
from fusee.runtime.change_detection import (
    CheckTable,
    Open,
    Read,
    available,
    can_watch,
    changed,
    differs,
)
from fusee.sym.expr import Size, Steps, Symbol, coefficient, substitute, symbols
from fusee.sym.ranges import COMPARISONS

_FEW = 8  # facts that are looked at as quickly as they are watched


@process.paused()
def compile_check(
    facts: Facts,
    parameters: list[str],
    names: dict[str, Any],
    conditions: list[str],
    values: Values,
) -> tuple[Callable[..., bool], Callable[[], str]]:
    """The check as a function of the locals, and what gives its source.

    conditions   about global state, with `names` for what they use
    values       the locals, for which all facts hold now
    """
    if not available():
        check, text = facts.compile(parameters, names, conditions)
        return check, lambda: text
    seen, watched, others = Watched(), Facts(kinds=facts.kinds), Facts(kinds=facts.kinds)
    for fact in facts.rows:
        (watched if fact.watched(seen) else others).rows.append(fact)
    if len(watched.rows) < _FEW:
        watched.rows, others.rows = [], facts.rows
    fresh = _fresh(others, [*facts.rows], values)
    whole = functools.cache(functools.partial(watched.compile, [], {}, []))
    if watched.rows:
        seen.start(watched.rows, lambda: whole()[0]())
        names = {**names, "_changed": changed(), "_watched": seen}
        conditions = [*conditions, "_changed(_watched.address) < 0 or _watched.look()"]
    if fresh is not None:
        names = {**names, "_differs": differs(), "_table": fresh[1]}
    check, text = others.compile(parameters, names, conditions)

    def source() -> str:
        if fresh is None and not watched.rows:
            return text
        listed = [] if fresh is None else [f"# _table: {fact}" for fact in fresh[0]]
        looked = whole()[1] if watched.rows else ""
        return "\n".join([text, *listed, "# _watched.look():", looked])

    return check, source


def _fresh(
    others: Facts, known: Sequence[Fact], values: Values
) -> tuple[list[Fact], CheckTable] | None:
    """Takes facts about tensors and their sizes out of `others` that machine code looks at.

    None if they are few, and no size is open.
    """
    look = looking(values)
    closed: dict[Fact, torch.Tensor | None] = {}
    opened: dict[Fact, Open] = {}
    for fact in others.rows:
        if fact.is_listed():
            x = look(fact.origin)
            if isinstance(fact, TensorMatch) and None in (*fact.value.size, *fact.value.stride):
                if can_watch(x):
                    opened[fact] = Open(x, fact.value.size, fact.value.stride)
            elif x is None or can_watch(x):
                closed[fact] = x
    if not opened and len(closed) < _FEW:
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
        if type(look(origin)) is not int:
            return None
        if not isinstance(origin, (SizeOf, StrideOf)):
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
    taken = [*closed, *opened, *related]
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


@dataclass(frozen=True)
class Condition:
    """`function` of sizes: what a backend relied on, and no Relation says. `text` has its names."""

    function: Callable[..., bool]
    text: str
    names: tuple[tuple[str, Symbol], ...]
    origins: Mapping[Symbol, Origin] = field(compare=False)

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        return tuple(symbol for _, symbol in self.names)

    def condition(self, source: Source) -> str:
        given = ", ".join(source.variable(self.origins[symbol]) for symbol in self.symbols)
        return f"{source.constant(self.function)}({given})"

    def holds(self, given: Mapping[Symbol, Any]) -> bool:
        return self.function(*(given[symbol] for symbol in self.symbols))

    def __str__(self) -> str:
        words = {name: str(self.origins[symbol]) for name, symbol in self.names}
        return re.sub(r"\w+", lambda found: words.get(found[0], found[0]), self.text)


class SizeCondition(Fact):
    """A Condition of the size at its origin and of others."""

    TORCH, REMEDY = "SHAPE_ENV", "sizes that go the same way there"

    def conditions(self, at: str, source: Source) -> list[str]:
        return [self.value.condition(source)]

    def holds(self, look: Look) -> bool:
        known = self.value
        return bool(known.holds({symbol: look(known.origins[symbol]) for symbol in known.symbols}))

    def found(self, look: Look) -> str:
        return self._numbers(lambda symbol: look(self.value.origins[symbol]))

    def _numbers(self, value: Callable[[Symbol], Any]) -> str:
        return ", ".join(f"{self.value.origins[s]} = {value(s)}" for s in self.value.symbols)

    def moved(self, at: Callable[[Origin], Origin]) -> Relation | Condition:
        known: Relation | Condition = self.value
        return replace(known, origins={symbol: at(x) for symbol, x in known.origins.items()})

    def miss(self, found: Any) -> str:
        then = self._numbers(lambda symbol: symbol.hint)
        return f"{self.value} held with {then}, and does not with {found}"

    def __str__(self) -> str:
        return str(self.value)


class SizeRelation(SizeCondition):
    """A Relation of the size at its origin, or the stride, to others."""

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


def in_words(a: Size, names: Mapping[Symbol, Any], within: bool = False) -> str:
    """A size as people write it: `2*x.size(0) % 8`. within: as an operand of something else"""
    if isinstance(a, int):
        return str(a)

    def atom(x: Any) -> str:
        if isinstance(x, Symbol):
            return str(names.get(x, x))
        if x.op in ("min", "max"):
            return f"{x.op}({in_words(x.a, names)}, {in_words(x.b, names)})"
        text = f"{in_words(x.a, names, True)} {x.op} {in_words(x.b, names, True)}"
        return f"({text})" if within or a.terms != {(x,): 1} else text

    text = ""
    for factors, scale in a.terms.items():
        sign = " - " if scale < 0 else " + "
        text += sign if text else sign.strip(" +")
        numbers = [str(abs(scale))] if abs(scale) != 1 or not factors else []
        text += "*".join([*numbers, *map(atom, factors)])
    return f"({text})" if within and len(a.terms) > 1 else text


def size_source(
    a: Size,
    origins: Mapping[Symbol, Origin],
    source: Source,
    read: Mapping[Symbol, str] = types.MappingProxyType({}),
) -> str:
    """Python for a size, given where its symbols come from; `read`: those that are expressions."""
    named = {s: Symbol(read.get(s) or source.variable(origins[s])).expr for s in symbols(a)}
    text = str(substitute(a, named))
    for name in ("min", "max"):
        if f"{name}(" in text:
            text = text.replace(f"{name}(", f"{source.python(name)}(")
    return text
