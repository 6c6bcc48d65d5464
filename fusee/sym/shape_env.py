"""Sizes that are open while a program is captured: torch.SymInts over sizes of ours.

torch asks of a SymInt's node what it needs (`torch/fx/experimental/sym_node.py`, whose protocol any
class may implement; `c10/core/SymNodeImpl.h`). The nodes here hold a `sym.Size`, so that
arithmetic is exact, quick, and imports no sympy. A question that the symbols' ranges leave open
is answered for the values of this call, and becomes a relation: a condition on later calls.
Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from typing import Any

import torch

from fusee.source import Args
from fusee.sym import (
    Atom,
    Call,
    Size,
    Symbol,
    atoms,
    calls_in,
    common_bits,
    floordiv,
    hint,
    linear_in,
    maximum,
    minimum,
    mod,
    power_of_two,
    product,
    substitute,
    symbols,
)
from fusee.sym.ranges import (
    COMPARISONS,
    EXACT,
    FUNCTIONS,
    OPPOSITE,
    STEPS,
    Comparison,
    Form,
    Predicate,
    Ranges,
    Unbacked,
    Written,
    as_quotient,
    as_ratio,
    compared,
    rounded,
    sides,
)


class ShapeEnv:
    """The open sizes of one capture, and what it relied on about them.

    where      gives the user's present line
    is_over    whether the program has ended: text of a size may say how it is computed
    relations  what must hold in later calls beside the symbols' own ranges
    written    conditions beside them: comparisons of floats, and what a backend has asked for
    asker      who asks once the program has ended
    data       those that only data knows
    computed   an integer, or an answer, that Python computes of sizes and floats of them; None:
               there is no way
    """

    def __init__(self, where: Callable[[], str] = str) -> None:
        self.where = where
        self.is_over = False
        self._relations: dict[tuple[Size, str, int | None], Comparison] = {}
        self.written: list[Predicate] = []
        self.asker = "the backend"
        self.data = Unbacked(self)
        self.computed: Callable[[Any, Args], Any] = lambda function, operands: None
        self._equal: dict[Atom, Size] = {}  # what symbols, and divisions, turned out to be
        self._simplified: dict[Size, Size] = {}  # with these
        self._ranges = Ranges()

    @property
    def relations(self) -> list[Comparison]:
        return [*self._relations.values()]

    def symbol(self, name: str, value: int, lo: int = 2, hi: int | None = None) -> Any:
        """A new size that is `value` in this call, and `lo` to `hi` (inclusive) in all."""
        made = Symbol(name, lo, hint=value)  # one that ends below something is an axis
        self._ranges.symbol(made, hi)
        return wrapped(self, made.expr)

    def simplified(self, a: Size) -> Size:
        """`a` with all that is known about symbols that equal one another."""
        if not self._equal or isinstance(a, int):
            return a
        if (found := self._simplified.get(a)) is None:
            is_other = any(s in self._equal for s in (*symbols(a), *calls_in(a)))
            found = self._simplified[a] = substitute(a, self._equal) if is_other else a
        return found

    def known(self, a: Size, op: str, b: Size) -> bool | None:
        """Whether `a op b`, if that is so for all values that the symbols may have."""
        return self._ranges.answer(self._ranges.form(self.simplified(a - b), op))

    def holds(self, a: Size, op: str, b: Size) -> bool:
        """Whether `a op b`; from here on it is so in all calls."""
        if (known := self.known(a, op, b)) is not None:
            return known
        if self.data.of(self.simplified(a - b)):
            answer = self.data.answer(self.simplified(a), op, self.simplified(b), OPPOSITE[op])
            if answer is not None:
                return answer
        found = COMPARISONS[op](hint(self.simplified(a - b)), 0)
        core, op, k = self.note(a, op if found else OPPOSITE[op], b)
        # of two bounds of the same size the later one is the closer one
        relation = Comparison(*sides(core, op, k), self.where())
        self._relations[core, op, k if op == "!=" else None] = relation
        return found

    def rounded(self, x: FloatNode, function: Callable[[float], int]) -> SizeNode:
        """What rounds a float that no size says."""
        return self.computed(function, (x,)) or x.wrap_int(rounded(x, function))

    def relation(self, a: Size, op: str, b: Size) -> Comparison:
        """What the user's present line asks."""
        return Comparison(self.simplified(a), op, self.simplified(b), self.where())

    def value(self, a: Size) -> int:
        """The number that `a` is; from here on it is this one in all calls."""
        found = hint(a)
        data, size = self.data, self.simplified(a)
        if data.of(size) and (data.is_asked or not data.are_marked(size)):
            data.refuse(self.relation(a, "", found))
        self.holds(a, "==", found)
        return found

    def note(self, a: Size, op: str, b: Size) -> Form:
        """From here on `a op b`, which was open; in other words if those say more."""
        form = self._ranges.form(self.simplified(a - b), op)
        assert not isinstance(form, bool)
        core, op, k = self._ranges.note(form)
        if op == "==":
            self._identify(core - k)
        return core, op, k

    def state(self) -> tuple[Any, ...]:
        """All that is known, as values that another one may be given."""
        return self._relations, self._equal, self._ranges.state(), self.data.state()

    def be(self, relations: Any, equal: Any, ranges: Any, data: Any) -> None:
        self._relations, self._equal = relations, equal
        self._ranges.be(*ranges)
        self.data.made, self.data.marked, self.data.required = data

    def bound(self, symbol: Symbol, hi: int | None) -> None:
        """Note the greatest value of a new symbol."""
        self._ranges.symbol(symbol, hi)

    def limits(self, a: Size) -> tuple[int | None, int | None]:
        """The least and the greatest value of `a` (inclusive), as far as they are known."""
        return self._ranges.range(self.simplified(a))

    def _identify(self, difference: Size) -> None:
        """Let a symbol, or else a division, be what an equation says it is, if that is a size.

        Not by numbers that are read later than it: until then they have no value.
        """
        if isinstance(difference, int):
            return
        read = {s: k for k, s in enumerate(self.data.made)}

        def last(*sizes: Size) -> int:
            return max((read.get(s, -1) for a in sizes for s in symbols(a)), default=-1)

        named = sorted(symbols(difference), key=lambda s: (last(s.expr), s.name), reverse=True)
        found: list[Atom] = [*named, *calls_in(difference)]
        for atom in found:
            count, rest = linear_in(difference, atom)
            own = (atom.a, atom.b) if isinstance(atom, Call) else (atom.expr,)
            if count in (1, -1) and atom not in atoms(rest) and last(rest) <= last(*own):
                is_now = -rest if count == 1 else rest
                self._equal = {s: substitute(x, {atom: is_now}) for s, x in self._equal.items()}
                self._equal[atom] = is_now
                self._simplified.clear()
                return


# ---------------------------------------------------------------------------- nodes


def wrapped(env: ShapeEnv, size: Size) -> Any:
    """A size as torch has it: an int, or a SymInt."""
    if isinstance(size, int):
        return size
    return torch.SymInt(SizeNode(env, size))  # type: ignore[no-untyped-call]


def size_of(x: Any) -> Size | None:
    """The size that a SymInt holds; None for one that torch made."""
    node = x.node
    return node.env.simplified(node.size) if type(node) is SizeNode else None


def known_size(x: Any) -> Size:
    """The size of ours that an int or an open number is."""
    found = x if type(x) is int else size_of(x)
    assert found is not None
    return found


def computed_from(size: Size, known: Mapping[str, Any]) -> Any:
    """What a size is of what stands for its symbols, by their names: sizes print as Python."""
    return eval(repr(size), {"min": torch.sym_min, "max": torch.sym_max}, {**known})


def is_unbacked(x: Any) -> bool:
    """Whether `x` is an integer that only data knows."""
    size = size_of(x) if type(x) is torch.SymInt else None
    return size is not None and bool(x.node.env.data.of(size))


class Node:
    """What torch asks of every node.

    kind   int, bool or float: what it stands for
    """

    kind: type = int
    # torch's own nodes have these; None says that there is no ShapeEnv of torch's to ask
    shape_env = None
    constant = None

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env

    @property
    def hint(self) -> Any:
        """The value in this call; nothing is relied on."""
        raise NotImplementedError

    @property
    def _hint(self) -> Any:
        return self.hint

    def guarded(self) -> Any:
        """The value itself."""
        raise NotImplementedError

    def is_int(self) -> bool:
        return self.kind is int

    def is_bool(self) -> bool:
        return self.kind is bool

    def is_float(self) -> bool:
        return self.kind is float

    def clone(self) -> Node:
        return self

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def nested_int(self) -> Any:
        return None

    is_nested_int, is_symbolic = is_constant, has_hint
    maybe_as_int = maybe_as_float = maybe_as_bool = nested_int

    def int_(self, *line: Any) -> int:
        return int(self.guarded())

    def guard_float(self, *line: Any) -> float:
        return float(self.guarded())

    def bool_(self, *line: Any) -> bool:
        return bool(self.guarded())

    guard_int, guard_bool, expect_true = int_, bool_, bool_
    guard_size_oblivious = guard_or_false = guard_or_true = bool_

    def compared(self, op: str, other: Any) -> BoolNode:
        """`self op other`, where both are numbers."""
        raise NotImplementedError

    eq, ne, lt, le, gt, ge = map(
        lambda op: lambda self, other: self.compared(op, other), COMPARISONS
    )

    def wrap_int(self, x: int) -> SizeNode:
        return SizeNode(self.env, int(x))

    def wrap_float(self, x: float) -> FloatNode:
        return FloatNode(self.env, float, (x,), x)

    def wrap_bool(self, x: bool) -> BoolNode:
        return BoolNode(self.env, x, "", 0)

    def str(self) -> str:
        """The program sees the number."""
        return str(self if self.env.is_over else self.guarded())

    _graph_repr = str


class BoolNode(Node):
    """A comparison of two sizes that nobody has asked for yet; or, without `op`, its answer `a`."""

    kind = bool

    def __init__(self, env: ShapeEnv, a: Any, op: str, b: Size) -> None:
        super().__init__(env)
        self.a, self.op, self.b = a, op, b
        self.expr = self  # torch's statically_known_true reads it before it asks for an env

    # torch asks a ShapeEnv where it has an answer of its own if there is none
    @property
    def shape_env(self) -> Unbacked | None:  # type: ignore[override]
        return self.env.data if self.is_pending() else None

    @property
    def _hint(self) -> bool | None:
        return None if self.is_pending() else self.hint

    @property
    def hint(self) -> bool:
        return COMPARISONS[self.op](hint(self.a), hint(self.b)) if self.op else bool(self.a)

    @property
    def size(self) -> int:
        """The number that it is where Python computes with it: `n + True`."""
        return int(self.guarded())

    def guarded(self) -> bool:
        if self.op:
            self.a, self.op = self.env.holds(self.a, self.op, self.b), ""
        return bool(self.a)

    def maybe_as_bool(self) -> bool | None:
        return bool(self.a) if not self.op else self.env.known(self.a, self.op, self.b)

    def relation(self) -> Comparison:
        return self.env.relation(self.a, self.op, self.b)

    def is_pending(self) -> bool:
        """Whether only data knows the answer."""
        return bool(self.op and self.env.data.of(self.a, self.b)) and self.maybe_as_bool() is None

    def expect_true(self, *line: Any) -> bool:
        """What torch checks. Sizes that broadcast need not be equal, so that is no check."""
        is_marked = self.env.data.are_marked(self.a, self.b)
        if not self.is_pending() or (self.op == "==" and not is_marked):
            return self.guarded()
        return self.env.data.require(self.a, self.op, self.b)

    def statically_known_true(self, *line: Any) -> bool:
        return bool(self.maybe_as_bool())

    def sym_not(self) -> BoolNode:
        if not self.op:
            return self.wrap_bool(not self.a)
        return BoolNode(self.env, self.a, OPPOSITE[self.op], self.b)

    @property
    def parts(self) -> tuple[BoolNode, ...]:
        """What all must hold for it to hold."""
        return (self,)

    def and_(self, other: BoolNode) -> BoolNode:
        parts, pending = (*self.parts, *other.parts), list[BoolNode]()
        for part in parts if any(part.is_pending() for part in parts) else ():
            if part.is_pending():
                pending.append(part)
            elif not part.guarded():
                return self.wrap_bool(False)
        if pending:
            return AllNode(self.env, tuple(pending))
        return self.wrap_bool(self.guarded() and other.guarded())

    def or_(self, other: BoolNode) -> BoolNode:
        return self.wrap_bool(self.guarded() or other.guarded())

    sym_and, sym_or = and_, or_

    def sym_ite(self, then: Node, other: Node) -> Node:
        return then if self.guarded() else other

    def sym_int(self) -> SizeNode:
        return self.wrap_int(self.guarded())

    def eq(self, other: Any) -> BoolNode:
        return self.wrap_bool(self.guarded() is other.guarded())

    def ne(self, other: Any) -> BoolNode:
        return self.wrap_bool(self.guarded() is not other.guarded())

    def __str__(self) -> str:
        return f"{self.a} {self.op} {self.b}" if self.op else str(self.a)


class AllNode(BoolNode):
    """Several comparisons that only data answers, and whether all of them hold."""

    def __init__(self, env: ShapeEnv, parts: tuple[BoolNode, ...]) -> None:
        super().__init__(env, None, "", 0)
        self._parts = parts

    @property
    def parts(self) -> tuple[BoolNode, ...]:
        return self._parts

    @property
    def shape_env(self) -> None:  # type: ignore[override]
        return None

    @property
    def hint(self) -> bool:
        return all(part.hint for part in self.parts)

    def guarded(self) -> bool:
        return all(part.guarded() for part in self.parts)

    def maybe_as_bool(self) -> bool | None:
        known = [part.maybe_as_bool() for part in self.parts]
        return False if False in known else None if None in known else True

    def is_pending(self) -> bool:
        return self.maybe_as_bool() is None

    def expect_true(self, *line: Any) -> bool:
        return all(part.expect_true() for part in self.parts)

    def sym_not(self) -> BoolNode:
        return self.wrap_bool(not self.guarded())

    def __str__(self) -> str:
        return " and ".join(map(str, self.parts))


class FloatNode(Node):
    """A float that is computed from sizes: `function(*operands)`, `value` in this call.

    quotient   the two sizes whose quotient it is, rounded once, if it is one: then its floor is a
               size again, and a comparison is one of sizes
    """

    kind = float

    def __init__(
        self,
        env: ShapeEnv,
        function: Any,
        operands: tuple[Any, ...],
        value: float,
        quotient: tuple[Size, Size] | None = None,
    ) -> None:
        super().__init__(env)
        self.function, self.operands, self.value = function, operands, value
        self.quotient = quotient

    @property
    def hint(self) -> float:
        return self.value

    def maybe_as_float(self) -> float | None:
        """The value if it is always this one, as far as the quotient of sizes tells."""
        a, b = self.quotient or (0, 1)
        is_always = self.quotient and self.env.known(a * hint(b), "==", b * hint(a))
        return self.value if is_always or self.operands == (self.value,) else None

    def guarded(self) -> float:
        """Fix the sizes that it was computed from, unless it is always this one."""
        row: list[Any] = [self]
        known = set[int]()
        while row:  # a float may be an operand many times
            x = row.pop()
            if not isinstance(x, FloatNode):
                x.guarded()
            elif id(x) not in known and x.maybe_as_float() is None:
                known.add(id(x))
                row += (y for y in x.operands if isinstance(y, Node))
        return self.value

    def _with(self, function: Callable[..., float], *others: Any) -> FloatNode:
        operands = (self, *others)
        value = function(*(x.hint for x in operands))
        ratios = [ratio for x in operands if (ratio := as_quotient(x)) is not None]
        is_exact = function in EXACT and len(ratios) == len(operands)
        quotient = EXACT[function](*ratios) if is_exact else None
        return FloatNode(self.env, function, operands, value, quotient)

    float_truediv = partialmethod(_with, operator.truediv)

    def truediv(self, other: Any) -> FloatNode:
        """C++'s quotient, which raises nothing."""
        if other.hint:
            return self._with(operator.truediv, other)
        over, sign = self.guarded(), math.copysign(1.0, other.guarded())
        return self.wrap_float(math.copysign(math.inf, over) * sign if over else math.nan)

    sym_min = partialmethod(_with, min)
    sym_max = partialmethod(_with, max)

    def float_pow(self, other: Any) -> FloatNode:
        if other.hint < 0:  # zero has no such power
            self.compared(">", self.wrap_float(0.0)).guarded()
        return self._with(operator.pow, other)

    pow = float_pow  # as C++ asks it

    mod = partialmethod(_with, operator.mod)
    abs = partialmethod(_with, abs)
    add = partialmethod(_with, operator.add)
    sub = partialmethod(_with, operator.sub)
    mul = partialmethod(_with, operator.mul)
    neg = partialmethod(_with, operator.neg)

    def sym_float(self) -> FloatNode:
        return self

    def sym_sqrt(self) -> FloatNode:
        return self.of(math.sqrt)

    def of(self, function: Callable[[float], float]) -> FloatNode:
        """What one of `FUNCTIONS` gives. raises what that raises"""
        op, bound = FUNCTIONS[function]
        if op:
            self.compared(op, self.wrap_float(bound)).expect_true()
        return self._with(function)

    def compared(self, op: str, other: Any) -> BoolNode:
        left, right = as_quotient(self, False), as_quotient(other, False)
        if left is not None and right is not None:
            (a, b), (c, d) = left, right
            if self.env.holds(b, ">", 0) and self.env.holds(d, ">", 0):
                return BoolNode(self.env, a * d, op, c * b)
        return self.wrap_bool(compared(self, op, other))

    def _rounded(self, function: Callable[[float], int]) -> SizeNode:
        """What rounds down or up; exact as long as sizes are below 2^53, which memory sees to."""
        if self.quotient is not None and self.env.holds(self.quotient[1], ">", 0):
            a, b = self.quotient
            if function is math.trunc and not self.env.holds(a, ">=", 0):
                function = math.ceil
            return SizeNode(self.env, -floordiv(-a, b) if function is math.ceil else floordiv(a, b))
        if (scaled := self._scaled(function)) is not None:
            return SizeNode(self.env, scaled)
        return self.env.rounded(self, function)

    def _scaled(self, function: Callable[[float], int]) -> Size | None:
        """What rounds a size times, or over, a number that is not exact, as int(n * 1.7)."""
        if self.function not in (operator.mul, operator.truediv):
            return None
        known = [x.maybe_as_float() for x in self.operands]
        quotient = self.operands[known.index(None)].quotient if known.count(None) == 1 else None
        if quotient is None or quotient[1] != 1:
            return None
        found = as_ratio(self.function, tuple(known), function)
        size, holds, (p, q, exact_to) = quotient[0], self.env.holds, found or (0, 1, -1)
        is_beyond = hint(size) > exact_to
        if is_beyond and hint(size) % q == 0:
            return None
        if not (holds(size, ">=", 0) and holds(size, "<=", q * STEPS if is_beyond else exact_to)):
            return None
        if is_beyond:
            holds(mod(size, q), "!=", 0)
        return -floordiv(-size * p, q) if function is math.ceil else floordiv(size * p, q)

    floor = partialmethod(_rounded, math.floor)
    ceil = partialmethod(_rounded, math.ceil)
    trunc = partialmethod(_rounded, math.trunc)

    def round(self, digits: int | None = None) -> Node:
        """The nearest integer, of two the even one."""
        if (
            digits is None
            and self.quotient is not None
            and self.env.holds(self.quotient[1], ">", 0)
        ):
            a, b = self.quotient
            up = floordiv(2 * a + b, 2 * b)
            is_between = 1 - minimum(mod(2 * a + b, 2 * b), 1)
            return SizeNode(self.env, up - is_between * mod(up, 2))
        if digits is None:
            return self.env.rounded(self, round)
        return self.wrap_float(round(self.guarded(), digits))

    def __str__(self) -> str:
        return str(self.value)


class SizeNode(Node):
    """An integer that is computed from sizes."""

    def __init__(self, env: ShapeEnv, size: Size) -> None:
        super().__init__(env)
        self.size = size

    @property
    def expr(self) -> Written:
        return Written(self.env.simplified(self.size))

    @property
    def hint(self) -> int:
        return hint(self.size)

    def guarded(self) -> int:
        return self.env.value(self.size)

    def _value_hash(self) -> int:
        return hash(self.expr)

    def _value_eq(self, other: object) -> bool:
        return isinstance(other, SizeNode) and self.expr == other.expr

    def maybe_as_int(self) -> int | None:
        size = self.env.simplified(self.size)
        return size if isinstance(size, int) else None

    def is_constant(self) -> bool:
        return isinstance(self.size, int)

    def _made(self, size: Size) -> SizeNode:
        return SizeNode(self.env, size)

    # ------------------------------------------------------------------ arithmetic

    def _with(self, function: Callable[..., Size], *others: SizeNode) -> SizeNode:
        return self._made(function(self.size, *(x.size for x in others)))

    add = partialmethod(_with, operator.add)
    sub = partialmethod(_with, operator.sub)
    mul = partialmethod(_with, operator.mul)
    neg = partialmethod(_with, operator.neg)

    def sym_sum(self, sizes: Sequence[SizeNode]) -> SizeNode:
        return self._made(sum(x.size for x in sizes))

    def int_floordiv(self, other: SizeNode) -> SizeNode:
        """Python's floor."""
        sign = self._sign(other)
        if not sign:
            return self.wrap_int(self.guarded() // other.guarded())
        return self._made(floordiv(self.size * sign, other.size * sign))

    floordiv = int_floordiv

    def mod(self, other: SizeNode) -> SizeNode:
        sign = self._sign(other)
        if not sign:
            return self.wrap_int(self.guarded() % other.guarded())
        if self.env.data.made and self.env.known(self.size, "==", other.size):
            return self.wrap_int(0)  # rows of what a mask takes are whole rows
        return self._made(sign * mod(self.size * sign, other.size * sign))

    def _sign(self, divisor: SizeNode) -> int:
        """1 or -1, from here on in all calls; 0 for no divisor."""
        if not divisor.hint:
            return 0
        env, size = self.env, divisor.size
        if env.data.of(size) and env.data.is_asked:
            if env.known(size, ">=", 0):
                env.data.require(size, ">", 0)
            elif env.known(size, ">", 0) is None and env.known(size, "<", 0) is None:
                env.data.expects(BoolNode(env, size, ">", 0))  # Python takes what is not
        return 1 if env.holds(size, ">", 0) else -1

    def pow_by_natural(self, other: SizeNode) -> SizeNode:
        if self.is_constant() and self.hint > 1 and not self.hint & (self.hint - 1):
            return self.wrap_int(1).lshift(other.mul(self.wrap_int(self.hint.bit_length() - 1)))
        return self._made(product([self.size] * other.guarded()))

    def sym_max(self, other: SizeNode) -> SizeNode:
        known = self.env.known(self.size, ">=", other.size)
        if known is None and other.size == 1 and not self.env.data.is_asked:  # of strides
            self.env.data.filled(self.size)
            known = True if self.env.data.of(self.size) else None
        if known is None:
            return self._made(maximum(self.size, other.size))
        return self if known else other

    def sym_min(self, other: SizeNode) -> SizeNode:
        known = self.env.known(self.size, "<=", other.size)
        if known is None:
            return self._made(minimum(self.size, other.size))
        return self if known else other

    def abs(self) -> SizeNode:
        return self if self.env.holds(self.size, ">=", 0) else self.neg()

    def round(self, digits: int | None = None) -> SizeNode:
        return self

    pos = floor = ceil = trunc = sym_int = round

    def is_integer(self) -> BoolNode:
        return self.wrap_bool(True)

    def lshift(self, other: SizeNode) -> SizeNode:
        return self._made(self.size * self._power(other))

    def rshift(self, other: SizeNode) -> SizeNode:
        return self._made(floordiv(self.size, self._power(other)))

    def _power(self, exponent: SizeNode) -> Size:
        at = exponent.size
        if self.env.data.of(at) or not (
            self.env.holds(at, ">=", 0) and self.env.holds(at, "<=", 62)
        ):
            at = exponent.guarded()  # it may raise, or be more than a word holds
        return power_of_two(at)

    def bitwise_and(self, other: SizeNode) -> SizeNode:
        """The bits of runs of ones in a mask, each a remainder."""
        open_ones = (self.size, other.size)
        if not any(isinstance(x, int) or self.env.data.of(x) for x in open_ones):
            if all(self.env.holds(x, ">=", 0) for x in open_ones):
                return self._made(common_bits(*open_ones))
        of, mask = (other.size, self.size) if self.is_constant() else (self.size, other.guarded())
        assert isinstance(mask, int)
        ones, total = mask if mask >= 0 else ~mask, 0 * of
        while ones:
            low = (ones & -ones).bit_length() - 1
            length = (~(ones >> low) & (ones >> low) + 1).bit_length() - 1
            total = total + mod(floordiv(of, 1 << low), 1 << length) * (1 << low)
            ones &= ~((1 << length) - 1 << low)
        return self._made(total if mask >= 0 else of - total)

    def bitwise_or(self, other: SizeNode) -> SizeNode:
        return self._made(self.size + other.size - self.bitwise_and(other).size)

    def bitwise_xor(self, other: SizeNode) -> SizeNode:
        return self._made(self.size + other.size - 2 * self.bitwise_and(other).size)

    # ------------------------------------------------------------------ as floats

    def sym_float(self) -> FloatNode:
        return FloatNode(self.env, float, (self,), float(self.hint), (self.size, 1))

    def int_truediv(self, other: SizeNode) -> FloatNode:
        if self.env.data.of(other.size):
            self.env.data.require(other.size, "!=", 0)
        elif self.env.holds(other.size, "==", 0):
            raise ZeroDivisionError("division by zero")
        value, quotient = self.hint / other.hint, (self.size, other.size)
        return FloatNode(self.env, operator.truediv, (self, other), value, quotient)

    truediv = int_truediv

    def float_pow(self, other: Any) -> FloatNode:
        return self.sym_float().float_pow(other)

    def sym_sqrt(self) -> FloatNode:
        return self.sym_float().sym_sqrt()

    def compared(self, op: str, other: SizeNode) -> BoolNode:
        return BoolNode(self.env, self.size, op, other.size)

    def __str__(self) -> str:
        return str(self.env.simplified(self.size))
