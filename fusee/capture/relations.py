"""Facts about sizes that vary: relations between them, and strides that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusee.capture.sources import Origin, Source
from fusee.sym.expr import Size, Symbol, coefficient, substitute, symbols
from fusee.sym.shape_env import COMPARISONS


@dataclass(frozen=True)
class Related:
    """The value of a "related" fact: `a op b`, of sizes over symbols that come from `origins`."""

    a: Size
    op: str
    b: Size
    origins: Mapping[Symbol, Origin]

    def __hash__(self) -> int:
        return hash((self.a, self.op, self.b))

    def fixes(self) -> Symbol | None:
        """The symbol that it makes a number of; None if it makes none."""
        if self.op != "==" or not isinstance(self.b, int) or isinstance(self.a, int):
            return None
        of = [*symbols(self.a)]
        return of[0] if len(of) == 1 and coefficient(self.a, of[0]) is not None else None

    def holds(self, found: Any, look: Callable[[Origin], Any]) -> bool:
        """Whether it is so now."""
        left, right = (_now(x, self.origins, look) for x in (self.a, self.b))
        return COMPARISONS[self.op](left, right)

    def then(self) -> str:
        """The numbers that it held with when it was captured."""
        return self._numbers(lambda symbol: symbol.hint)

    def now(self, look: Callable[[Origin], Any]) -> str:
        """The numbers that there are now."""
        return self._numbers(lambda symbol: look(self.origins[symbol]))

    def _numbers(self, value: Callable[[Symbol], Any]) -> str:
        named = dict.fromkeys((*symbols(self.a), *symbols(self.b)))
        return ", ".join(f"{self.origins[symbol]} = {value(symbol)}" for symbol in named)

    def source(self, source: Source) -> str:
        """Python that says whether it holds."""
        left, right = (size_source(x, self.origins, source) for x in (self.a, self.b))
        return f"{left} {self.op} {right}"

    def __str__(self) -> str:
        return f"{in_words(self.a, self.origins)} {self.op} {in_words(self.b, self.origins)}"


@dataclass(frozen=True)
class Strided:
    """The value of a "stride" fact: the stride of `axis` is `size`."""

    axis: int
    size: Size
    origins: Mapping[Symbol, Origin]

    def __hash__(self) -> int:
        return hash((self.axis, self.size))

    def holds(self, found: Any, look: Callable[[Origin], Any]) -> bool:
        """Whether it is so now."""
        return bool(found.stride(self.axis) == _now(self.size, self.origins, look))

    def __str__(self) -> str:
        return f"of stride {in_words(self.size, self.origins)} along axis {self.axis}"


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


def _now(a: Size, origins: Mapping[Symbol, Origin], look: Callable[[Origin], Any]) -> Size:
    """The number that a size is, given what is at the origins of its symbols."""
    return substitute(a, {symbol: look(origins[symbol]) for symbol in symbols(a)})


def size_source(a: Size, origins: Mapping[Symbol, Origin], source: Source) -> str:
    """Python for a size, given where its symbols come from."""
    named = {s: Symbol(source.variable(origins[s])).expr for s in symbols(a)}
    text = str(substitute(a, named))
    for name in ("min", "max"):
        if f"{name}(" in text:
            text = text.replace(f"{name}(", f"{source.python(name)}(")
    return text
