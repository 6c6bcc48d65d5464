"""What holds between sizes that vary."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fusee.capture.guards import Fact, Look
from fusee.capture.sources import Origin, Source
from fusee.sym.expr import Size, Steps, Symbol, coefficient, substitute, symbols
from fusee.sym.ranges import COMPARISONS


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

    TORCH, REMEDY = "SHAPE_ENV", "sizes that go the same way there"

    def conditions(self, at: str, source: Source) -> list[str]:
        known: Relation = self.value
        left, right = (size_source(x, known.origins, source) for x in (known.a, known.b))
        return [f"{left} {known.op} {right}"]

    def reads(self) -> Iterable[Origin]:
        return [self.value.origins[symbol] for symbol in self.value.symbols]

    def compared(self, steps: Steps, names: Mapping[Origin, str]) -> int:
        known: Relation = self.value
        named = {s: Symbol(names[known.origins[s]], s.lo).expr for s in known.symbols}
        return steps.compared(substitute(known.a, named), known.op, substitute(known.b, named))

    def holds(self, look: Look) -> bool:
        given = {symbol: look(self.value.origins[symbol]) for symbol in self.value.symbols}
        return COMPARISONS[self.value.op](
            *(substitute(x, given) for x in (self.value.a, self.value.b))
        )

    def found(self, look: Look) -> str:
        return self._numbers(lambda symbol: look(self.value.origins[symbol]))

    def _numbers(self, value: Callable[[Symbol], Any]) -> str:
        return ", ".join(f"{self.value.origins[s]} = {value(s)}" for s in self.value.symbols)

    def moved(self, at: Callable[[Origin], Origin]) -> Relation:
        known: Relation = self.value
        return replace(known, origins={symbol: at(x) for symbol, x in known.origins.items()})

    def varying(self, found: Any) -> Iterable[tuple[str, bool, Any, Any]]:
        if (symbol := self.value.fixes()) is not None:
            yield str(self.value.origins[symbol]), False, None, None

    def miss(self, found: Any) -> str:
        then = self._numbers(lambda symbol: symbol.hint)
        return f"{self.value} held with {then}, and does not with {found}"

    def remedy(self, found: Any) -> str:
        if self.value.fixes() is None:
            return Fact.remedy(self, found)
        return "do not ask for the number there (a loop over range(), a key), or give it one value"

    def __str__(self) -> str:
        return str(self.value)


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
