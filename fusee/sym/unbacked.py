"""Sizes, and integers, that only data knows: what they are shows when the graph has run so far.

Of such a symbol nothing is answered but what holds for all its values. torch's own code asks for
each size whether it is 0 or 1, and hears that it is neither, as it says of unbacked symbols itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from fusee.errors import TraceError
from fusee.sym.expr import Expr, Size, Symbol, maximum, minimum, substitute, symbols

_GUESS = 4099  # what such a size may be, for decisions of speed


class Unbacked:
    """The unbacked symbols of a ShapeEnv.

    made      the symbols in order, and the lines that made them
    marked    sizes from outside that the program has said to be such: mark_unbacked
    required  what must hold of them in each call: else eager raises, or lays a result out otherwise
    is_asked  whether the program asks now; False: torch does
    refuse    raises for a question that has no answer
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.made: dict[Symbol, str] = {}
        self.marked: set[Symbol] = set()
        self.required: list[Any] = []
        self.is_asked = False
        self.refuse: Callable[[Any], NoReturn] = refuse
        self._counts: dict[int, tuple[torch.Tensor, int, Expr]] = {}  # of masks, by id

    def state(self) -> tuple[Any, ...]:
        return self.made, self.marked, self.required

    def new(self, lo: int = 0, hi: int | None = None) -> Expr:
        """A new symbol that is `lo` to `hi` (inclusive)."""
        symbol = Symbol(self.next_name(), lo, hint=_GUESS)
        self.made[symbol] = self.env.where()
        self.env.bound(symbol, hi)
        return symbol.expr

    def next_name(self) -> str:
        """What the next symbol is called."""
        return f"u{len(self.made) + len(self.marked)}"

    def count(self, mask: torch.Tensor) -> Expr:
        """How many elements of a mask are true: the same for all who ask before it changes."""
        version = 0 if mask.is_inference() else mask._version
        known = None if self.env.is_over else self._counts.get(id(mask))
        if known is None or known[1] != version:
            known = self._counts[id(mask)] = mask, version, self.new()
        return known[2]

    def forget_counts(self) -> None:
        """Tensors are written to that do not tell."""
        self._counts.clear()

    def of(self, *sizes: Size) -> list[Symbol]:
        """The unbacked symbols in these sizes."""
        if not (self.made or self.marked):
            return []
        return [s for a in sizes for s in symbols(a) if s in self.made or s in self.marked]

    def are_marked(self, *sizes: Size) -> bool:
        """Whether each of these is known as soon as there are inputs."""
        return not any(s in self.made for s in self.of(*sizes))

    def answer(self, a: Size, op: str, b: Size, opposite: str) -> bool | None:
        """Whether `a op b`, which is not known; None: as it is now. raises what `refuse` does"""
        guessed = None if self.is_asked else self.guessed(a, op, b)
        if not self.is_asked and self.are_marked(a, b):
            return guessed if op in ("==", "!=") else None
        if guessed is None:
            self.refuse(self.env.relation(a, op, b))
        if op not in ("==", "!=") or self._may_be_negative(a, b):  # it may be a check of bounds
            self.required.append(self.env.relation(a, op if guessed else opposite, b))
        return guessed

    def guessed(self, a: Size, op: str, b: Size) -> bool | None:
        """Whether `a op b` of sizes that are neither 0 nor 1; None if that does not tell."""
        likely: dict[Symbol, Size] = {}
        for s in self.of(a, b):
            low, _ = self.env.limits(s.expr)
            likely[s] = Symbol(s.name, max(low or 0, 2), hint=s.hint).expr
        found: bool | None = self.env.known(substitute(a, likely), op, substitute(b, likely))
        if found is None and isinstance(b, int) and 0 <= b <= 2 and self.env.known(a, ">=", 0):
            found = self.env.known(Symbol("size", 2).expr, op, b)
        return found

    def _may_be_negative(self, *sizes: Size) -> bool:
        """Whether there are numbers in these that are no sizes yet."""
        return any(not self.env.known(s.expr, ">=", 0) for s in self.of(*sizes))

    def require(self, a: Size, op: str, b: Size) -> bool:
        """Let `a op b` hold: where it does not, eager raises. False: it does not now."""
        if self.are_marked(a, b):
            asked, self.is_asked = self.is_asked, False
            found: bool = self.env.holds(a, op, b)
            self.is_asked = asked
            return found
        if self.env.known(a, op, b) is None:
            self.required.append(self.env.relation(a, op, b))
            self.env.note(a, op, b)
        return True

    def filled(self, a: Size) -> None:
        """A stride is a multiple of `a`, which it is not where `a` is 0: eager runs then."""
        if self.of(a) and self.env.known(a, ">=", 1) is None and not self.is_asked:
            self.required.append(self.env.relation(a, ">=", 1))

    def place(self, at: Size, n: Size) -> Size:
        """An index as Python takes it: from the end on. Outside of `n` elements eager raises."""
        self.require(at, "<", n)
        self.require(at, ">=", -n)
        if not self.env.known(at, ">=", 0):
            at = at + n * maximum(minimum(-at, 1), 0)
            for op, end in ((">=", 0), ("<", n)):
                if self.env.known(at, op, end) is None:
                    self.env.note(at, op, end)
        return at

    def inside(self, at: Size, n: Size) -> Size:
        """A bound of a slice of `n` elements as Python takes it: from the end on, cut to them."""
        if not self.env.known(at, ">=", 0):
            at = at + n * maximum(minimum(-at, 1), 0)
        end = at if self.env.known(at, "<=", n) else minimum(at, n)
        return self.least_0(end, at)

    def least_0(self, a: Size, known_by: Size | None = None) -> Size:
        """`max(a, 0)`; `known_by` is negative if `a` is."""
        is_size = self.env.known(a if known_by is None else known_by, ">=", 0)
        return a if is_size else maximum(a, 0)

    # ------------------------------------------------------------------ as a ShapeEnv of torch's

    def evaluate_sym_node(
        self, node: Any, size_oblivious: bool = False, fallback_value: bool = False
    ) -> bool:
        """The answer to a question that torch can do without."""
        is_number = self._may_be_negative(node.a, node.b)
        guessed = None if is_number else self.guessed(node.a, node.op, node.b)
        return fallback_value if guessed is None else guessed

    def _maybe_evaluate_static(self, node: Any) -> bool | None:
        found: bool | None = node.maybe_as_bool()
        return found


def refuse(asked: Any) -> NoReturn:
    """There is no graph that holds for all values of the symbols."""
    raise TraceError(
        f"{asked.asked} only the values of tensors tell",
    )


@dataclass(frozen=True)
class Written:
    """What torch has a sympy expression for: it asks which symbols depend on data."""

    size: Size
    free_symbols: ClassVar[frozenset[Any]] = frozenset()
