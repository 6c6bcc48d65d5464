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

    def source(self, source: Source) -> str:
        """Python that says whether it holds."""
        left, right = (size_source(x, self.origins, source) for x in (self.a, self.b))
        return f"{left} {self.op} {right}"

    def __str__(self) -> str:
        named = {s: Symbol(str(self.origins[s])).expr for s in (*symbols(self.a), *symbols(self.b))}
        return f"{substitute(self.a, named)} {self.op} {substitute(self.b, named)}"


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
        named = {s: Symbol(str(self.origins[s])).expr for s in symbols(self.size)}
        return f"of stride {substitute(self.size, named)} along axis {self.axis}"


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
