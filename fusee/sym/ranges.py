"""What is known about open sizes: ranges of sums of them, numbers that they are not, and which of
them only the data knows. And between which numbers floats lie that the data knows.

Some functions of a size give the same number for many: a root, a logarithm, rounded or compared.
What one gives is a number, and the version holds for all sizes that give it: `math.isqrt(n)` that
is 5 says `25 <= n <= 35`. So it is with every function that only grows, or only falls; where it
changes is found by asking it.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from fusee.errors import TraceError
from fusee.sym import (
    Atom,
    Call,
    Expr,
    Monomial,
    Size,
    Symbol,
    calls_in,
    collect,
    hint,
    inner_first,
    lower_bound,
    maximum,
    minimum,
    only_atom,
    product,
    substitute,
    symbols,
    upper_bound,
)

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_TURNED = {"==": "==", "!=": "!=", "<": ">", ">": "<", "<=": ">=", ">=": "<="}

# Functions of math whose results stay open, and the numbers that they take.
FUNCTIONS: dict[Callable[[float], float], tuple[str, float]] = {
    math.sqrt: (">=", 0.0),
    **dict.fromkeys((math.log, math.log2, math.log10), (">", 0.0)),
    math.log1p: (">", -1.0),
    **dict.fromkeys((math.exp, math.expm1, math.sinh, math.cosh), ("<=", 700.0)),
    **dict.fromkeys((math.sin, math.cos, math.tan, math.atan, math.tanh, math.erf), ("", 0.0)),
}
Range = tuple[int | None, int | None]  # least and greatest, as far as they are known
# A sum without a constant whose terms have no factor in common; "==", "!=", ">=" or "<="; a number
Form = tuple[Expr, str, int]


class Comparison(NamedTuple):
    """`a op b`, which the graph relies on; `where` is the user's line that asked."""

    a: Size
    op: str
    b: Size
    where: str

    def __str__(self) -> str:
        return f"{self.a} {self.op} {self.b}"

    @property
    def asked(self) -> str:
        """What a question is about that has no answer; without `op`, a number."""
        return f"whether {self}" if self.op else f"the value of {self.a}"


class Predicate(NamedTuple):
    """A condition that no Comparison says: `holds`, given the values of `symbols`, is `answer`.

    text   shows it, by the symbols' names
    """

    holds: Callable[[Any], Any]
    text: str
    symbols: tuple[Symbol, ...]
    answer: bool
    where: str


@functools.cache
def as_ratio(
    run: Any, numbers: tuple[float | None, ...], function: Callable[[float], int]
) -> tuple[int, int, int] | None:
    """p, q and a bound: `function(run(n, number))` rounds n * p / q, for n from 0 to the bound.

    Beyond it that holds to q * STEPS where q does not divide n: the quotient lies 1 / q from the
    next integer, which is more than rounding loses. For multiples of q floats are asked.
    """
    (number,) = (x for x in numbers if x is not None)
    is_product = run is operator.mul
    if not (is_product or numbers[0] is None) or not 0 < number < math.inf:
        return None
    exact = Fraction(number) if is_product else 1 / Fraction(number)
    p, q = exact.limit_denominator(1000).as_integer_ratio()
    if abs(exact * q - p) * 2**51 > p or p * q * STEPS > 2**50:
        return None
    for k in range(STEPS + 1):
        if function(run(*(k * q if x is None else x for x in numbers))) != k * p:
            return p, q, k * q - 1
    return p, q, q * STEPS


STEPS = 2**14  # 3 ms


class Ranges:
    """Conditions that hold, and what follows from them."""

    def __init__(self) -> None:
        self._noted: dict[Size, Range] = {}
        self._unequal: set[tuple[Size, int]] = set()
        self._found: dict[Size, Range] = {}

    def state(self) -> tuple[Any, Any]:
        return self._noted, self._unequal

    def be(self, noted: dict[Size, Range], unequal: set[tuple[Size, int]]) -> None:
        self._noted, self._unequal = noted, unequal

    def symbol(self, symbol: Symbol, hi: int | None) -> None:
        """Note the ends (inclusive) of a new symbol."""
        self._noted[symbol.expr] = symbol.lo, hi

    def answer(self, form: Form | bool) -> bool | None:
        """Whether a condition holds; None if that is open."""
        if isinstance(form, bool):
            return form
        core, op, k = form
        low, high = self.range(core)
        is_above, is_below = low is not None and low > k, high is not None and high < k
        if op == ">=":
            return True if is_above or low == k else (False if is_below else None)
        if op == "<=":
            return True if is_below or high == k else (False if is_above else None)
        if is_above or is_below or {(core, k), (-core, -k)} & self._unequal:
            return op == "!="
        return (op == "==") if low == high == k else None

    def note(self, form: Form) -> Form:
        """From here on a condition holds, of which that was open; in other words if those say more.

        At the end of a range a size that is not that end is past it.
        """
        core, op, k = form
        low, high = self.range(core)
        if op == "!=" and k in (low, high):
            stronger = self.form(core - k, ">" if k == low else "<")
            assert not isinstance(stronger, bool)
            return self.note(stronger)
        if op == "!=":
            self._unequal.add((core, k))
            return form
        self._noted[core] = (low if op == "<=" else k), (high if op == ">=" else k)
        self._found.clear()
        return form

    # ---------------------------------------------------------------------- forms

    def form(self, difference: Size, op: str) -> Form | bool:
        """`difference op 0` as what all that say the same have in common, or its truth."""
        if not isinstance(difference, int):
            difference = self._without_factors(difference)
        if isinstance(difference, int):
            return COMPARISONS[op](difference, 0)
        terms = {mono: count for mono, count in difference.terms.items() if mono}
        constant, scale = difference.terms.get((), 0), gcd(*terms.values())
        if next(iter(terms.values())) < 0:
            constant, scale, op = -constant, -scale, _TURNED[op]
        core = Expr({mono: count // scale for mono, count in terms.items()})
        scale = abs(scale)
        if op in ("==", "!=") and constant % scale:
            return op == "!="
        k = -constant // scale if op in ("==", "!=", "<=", ">") else -(constant // scale)
        if op in ("<", ">"):
            k, op = (k + 1, ">=") if op == ">" else (k - 1, "<=")
        atom = only_atom(core)
        if isinstance(atom, Call) and atom.op == "//" and isinstance(atom.b, int):
            if op == ">=":
                return self.form(atom.a - k * atom.b, ">=")
            if op == "<=":
                return self.form(atom.a - (k + 1) * atom.b, "<")
        if isinstance(atom, Call) and atom.op == "%":
            is_less = self.answer(self.form(atom.a - atom.b, "<"))
            if is_less and self.answer(self.form(atom.a, ">=")):
                return self.form(atom.a - k, op)
        return core, op, k

    def _without_factors(self, a: Expr) -> Size:
        """Without what all terms are multiplied by, where that is above 0."""
        for atom in next(iter(a.terms)):
            low, _ = self._atom(atom)
            if low is not None and low > 0 and all(atom in mono for mono in a.terms):
                rest = a // atom.expr
                return rest if isinstance(rest, int) else self._without_factors(rest)
        return a

    # ---------------------------------------------------------------------- ranges

    def range(self, a: Size) -> Range:
        """The least and the greatest value of `a`."""
        if isinstance(a, int):
            return a, a
        if (found := self._found.get(a)) is None:
            low, high = self._noted.get(-a, (None, None))  # what was asked the other way round
            turned = None if high is None else -high, None if low is None else -low
            sides = _both(self._noted.get(a, (None, None)), turned), self._sum(a)
            low, high = _both(_both(*sides), (lower_bound(a), upper_bound(a)))
            found = self._found[a] = low, high
        return found

    def _sum(self, a: Expr) -> Range:
        low: int | None = 0
        high: int | None = 0
        for mono, count in a.terms.items():
            ends = self._product(mono)
            least, most = ends if count > 0 else ends[::-1]
            low = None if low is None or least is None else low + count * least
            high = None if high is None or most is None else high + count * most
        return low, high

    def _product(self, mono: Monomial) -> Range:
        if len(mono) == 1:
            return self._atom(mono[0])
        ranges = [self._atom(atom) for atom in mono]
        lows, highs = [low for low, _ in ranges], [high for _, high in ranges]
        if any(low is None or low < 0 for low in lows):
            return None, None
        most = None if None in highs else product(high for high in highs if high is not None)
        least = product(low for low in lows if low is not None)
        assert isinstance(least, int) and not isinstance(most, Expr)
        return least, most

    def _atom(self, atom: Atom) -> Range:
        noted = self._noted.get(Expr({(atom,): 1}), (None, None))
        if isinstance(atom, Symbol):
            return _both(noted, (atom.lo, None))
        (low, high), b = self.range(atom.a), atom.b
        if atom.op == "//" and isinstance(b, int):
            found = None if low is None else low // b, None if high is None else high // b
            return _both(noted, found)
        return _both(noted, atom.range)


def _both(x: Range, y: Range) -> Range:
    """What is known if two ranges are."""
    lows = [low for low, _ in (x, y) if low is not None]
    highs = [high for _, high in (x, y) if high is not None]
    return max(lows, default=None), min(highs, default=None)


def sides(core: Expr, op: str, k: int) -> tuple[Size, str, Size]:
    """`core op k` without minus signs."""
    less = collect({mono: -count for mono, count in core.terms.items() if count < 0})
    if less != 0 and (op, k) in (("<=", -1), (">=", 1)):
        op, k = op[0], 0
    if (op, k) == (">=", 1) and less == 0 and lower_bound(core) == 0:
        op, k = "!=", 0
    left, right = core + less, less + k
    return (left - k, op, less) if k < 0 else (left, op, right)


# ---------------------------------------------------------------------------- unbacked
# Sizes, and integers, that only data knows: what they are shows when the graph has run so far.
#
# Of such a symbol nothing is answered but what holds for all its values. torch's own code asks for
# each size whether it is 0 or 1, and hears that it is neither, as it says of unbacked symbols.

_GUESS = 4099  # what such a size may be, for decisions of speed


class Unbacked:
    """The unbacked symbols of a ShapeEnv.

    made      the symbols in order, and the lines that made them
    marked    sizes from outside that the program has said to be such: mark_unbacked
    required  what must hold of them in each call: else eager raises, or lays a result out otherwise
    as_sizes  relations that torch's own code has guessed since a call was last written down and
              that the graph is to check: -1 does not meet them, which in a shape is no error, or
              sizes of results hang on them
    is_asked  whether the program asks now; False: torch does
    refuse    raises for a question that has no answer
    expects   lets the graph check a comparison, and Python run where it does not hold
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.made: dict[Symbol, str] = {}
        self.marked: set[Symbol] = set()
        self.required: list[Any] = []
        self.as_sizes: list[tuple[Size, str, Size]] = []
        self.is_asked = False
        self.refuse: Callable[[Any], NoReturn] = refuse
        self.expects: Callable[[Any], Any] = lambda comparison: None
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

    def count(self, mask: torch.Tensor) -> Size:
        """How many elements of a mask are true: the same for all who ask before it changes."""
        if any(type(n) is int and n == 0 for n in mask.shape):
            return 0
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
        likely = 0
        if guessed is None and self.refuse is refuse:
            # once there is a graph, it had better run eagerly for few sizes than always: those of
            # which a division leaves a rest
            rest = a - b
            many = math.prod({hint(call.b) for call in calls_in(rest)}) * _GUESS
            likely = hint(substitute(rest, dict.fromkeys(self.of(rest), many)))
        if is_chosen := likely != 0:
            guessed = COMPARISONS[op](likely, 0)
        elif guessed is None:
            self.refuse(self.env.relation(a, op, b))
        # it may be a check of bounds
        if is_chosen or op not in ("==", "!=") or self._may_be_negative(a, b):
            holds = op if guessed else opposite
            self.required.append(self.env.relation(a, holds, b))
            numbers = [s for s in self.of(a, b) if not self.env.known(s.expr, ">=", 0)]
            # it does not hold where a number is -1
            is_told = not numbers or any(
                self.env.known(substitute(a, {s: -1}), holds, substitute(b, {s: -1})) is False
                for s in numbers
            )
            if is_told and (a, holds, b) not in self.as_sizes:
                self.as_sizes.append((a, holds, b))
        return guessed

    def guessed(self, a: Size, op: str, b: Size) -> bool | None:
        """Whether `a op b` of sizes that are neither 0 nor 1; None if that does not tell."""
        likely: dict[Symbol, Size] = {}
        for s in self.of(a, b):
            low, _ = self.env.limits(s.expr)
            likely[s] = Symbol(s.name, max(low or 0, 2), hint=s.hint).expr
        found: bool | None = self.env.known(substitute(a, likely), op, substitute(b, likely))
        # a quotient of sizes is one, and so is what one size has more than another
        for x, by, y in ((a, op, b), (b, _TURNED[op], a), (a - b, op, 0), (b - a, _TURNED[op], 0)):
            if found is None and isinstance(y, int) and 0 <= y <= 2 and self.env.known(x, ">=", 0):
                found = self.env.known(Symbol("size", 2).expr, by, y)
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
    raise TraceError(f"{asked.asked} only the values of tensors tell")


@dataclass(frozen=True)
class Written:
    """What torch has a sympy expression for: it asks which symbols depend on data."""

    size: Size
    free_symbols: ClassVar[frozenset[Any]] = frozenset()


_FAR = 2**40  # more than sizes are

# With numbers for all operands but one.
_GROW = {
    float, math.sqrt, math.log, math.log2, math.log10, math.log1p, math.exp, math.expm1,
    operator.add, operator.sub, operator.mul, operator.neg,
}  # fmt: skip


def steady(env: Any, a: Size, function: Callable[[int], Any]) -> Any:
    """What a function gives for a size; from here on that is so in all calls."""
    at, ends = hint(a), env.limits(a)
    value = function(at)
    for op, step, end in ((">=", -1, ends[0]), ("<=", 1, ends[1])):
        last = _last(function, value, at, step, end)
        if last is not None and last != end:
            env.holds(a, op, last)
    return value


def _last(function: Any, value: Any, at: int, step: int, end: int | None) -> int | None:
    """The last integer, from one on, for which a function gives the same; None: there is none."""

    def is_same(count: int) -> bool:
        n = at + step * count
        try:
            return (end is None or (end - n) * step >= 0) and bool(function(n) == value)
        except (ValueError, OverflowError, ZeroDivisionError):
            return False

    near, far = 0, 1
    while is_same(far):
        near, far = far, 2 * far
        if far > _FAR:
            return None
    while far - near > 1:
        middle = (near + far) // 2
        near, far = (middle, far) if is_same(middle) else (near, middle)
    return at + step * near


_WORD = 2**62  # a machine's integers hold this, and one more
_SIZES = 2**16  # what sizes of tensors count for: their product is no more than memory has


def fits(env: Any, a: Size) -> bool:
    """Whether 64 bits hold a number that the program computed, in all calls from here on.

    Integers of the program's that it is made of are bounded for that. What only the data knows, the
    graph computes as torch does.
    """
    if isinstance(a, int):
        return abs(a) <= _WORD
    if env.data.of(a):
        return True
    for end in (2**31, 2**15, 2**5):
        if _magnitude(env, a) <= _WORD:
            return True
        for integer in (s.expr for s in symbols(a) if env.limits(s.expr)[1] is not None):
            if abs(hint(integer)) < end:
                env.holds(integer, "<", end)
                env.holds(integer, ">", -end)
    return _magnitude(env, a) <= _WORD


def _magnitude(env: Any, a: Expr) -> int:
    """What `a` is at most, either side of 0."""
    most: dict[Atom, int] = {}

    def total(x: Size) -> int:
        if isinstance(x, int):
            return abs(x)
        return sum(
            abs(scale)
            * math.prod(most[atom] for atom in factors if atom in most)
            * (_SIZES if any(atom not in most for atom in factors) else 1)
            for factors, scale in x.terms.items()
        )

    for atom in inner_first(a):
        if isinstance(atom, Symbol):
            low, high = env.limits(atom.expr)
            if low is not None and high is not None:
                most[atom] = max(abs(low), abs(high))
        else:
            left, right = total(atom.a), total(atom.b)
            most[atom] = {"<<": 1 << min(right, 63), "%": right}.get(atom.op, max(left, right))
    return total(a)


def rounded(x: Any, function: Callable[[float], int]) -> int:
    """What rounds a float that is computed from sizes, from here on the same in all calls."""
    if (found := _curve(x)) is None:
        return function(x.guarded())
    size, below = found
    return int(steady(x.env, size, lambda n: function(below(n))))


def compared(x: Any, op: str, other: Any) -> bool:
    """`x op other` of such floats, from here on the same in all calls."""
    found, known = _curve(x), other.maybe_as_float()
    compare = COMPARISONS[op]
    if found is None or known is None or op in ("==", "!="):
        answer = x.env.computed(compare, (x, other))
        return compare(x.guarded(), other.guarded()) if answer is None else bool(answer)
    size, below = found
    return bool(steady(x.env, size, lambda n: compare(below(n), known)))


_LARGEST = 2**20  # denominators, such as that of 2.5, with which products stay exact
_Quotient = tuple[Size, Size]


def as_quotient(x: Any, is_exact: bool = True) -> _Quotient | None:
    """A float as the quotient that it is; `is_exact`: without having been rounded."""
    if x.kind is not float:
        return None
    found = x.quotient
    if found is None and not hasattr(x.operands[0], "kind") and math.isfinite(x.value):
        found = x.value.as_integer_ratio()
    if found is None or abs(hint(found[0])) > _LARGEST**2:
        return None
    under = found[1]
    is_binary = isinstance(under, int) and 0 < under <= _LARGEST and not under & (under - 1)
    is_constant = x.quotient is None
    return found if is_binary or not (is_exact or is_constant) else None


EXACT: dict[Any, Callable[..., _Quotient]] = {
    operator.add: lambda a, b: (a[0] * b[1] + b[0] * a[1], a[1] * b[1]),
    operator.sub: lambda a, b: (a[0] * b[1] - b[0] * a[1], a[1] * b[1]),
    operator.mul: lambda a, b: (a[0] * b[0], a[1] * b[1]),
    operator.truediv: lambda a, b: (a[0] * b[1], a[1] * b[0]),
    operator.neg: lambda a: (-a[0], a[1]),
}


def _curve(x: Any) -> tuple[Size, Callable[[int], float]] | None:
    """A float as a function of one size that only grows or only falls; None: another one."""
    if x.kind is int:
        low, _ = x.env.limits(x.size)
        return None if low is None or low < 0 or x.is_constant() else (x.size, lambda n: n)
    known = [y.maybe_as_int() if y.kind is int else y.maybe_as_float() for y in x.operands]
    if known.count(None) != 1:
        return None
    k = known.index(None)
    of = x.operands[k]
    is_of_size = of.kind is int or of.function is float  # which is not negative
    if x.function is operator.truediv:
        grows = k == 0 or is_of_size
    else:
        grows = x.function in _GROW or (x.function is operator.pow and k == 0 and is_of_size)
    inner = _curve(of) if grows else None
    if inner is None:
        return None
    size, below = inner
    return size, lambda n: x.function(*(below(n) if y is None else y for y in known))


# ---------------------------------------------------------------------------- floats
# What floats that only data knows can be: whether Python may compute with them after the graph.
#
# Only what cannot raise is put off: later it would come too late. A float of at most 32 bits
# bounds what is made of it: neither does its square overflow nor has a sum of squares no root.

_MOST = sys.float_info.max
# Between which numbers a float lies that is neither NaN nor infinite. An infinite one has a sign
# that numbers between them have; for neither does anything raise that does not for these.
Floats = tuple[float, float]


def result_range(function: Any, operands: tuple[Any, ...]) -> Floats | None:
    """Between which numbers a function's float lies; None: it may raise, or be no float."""
    if function in (torch.Tensor.item, operator.getitem):
        x = operands[0]  # what holds it, or what `tolist()` gives of that
        dtype = (x if isinstance(x, torch.Tensor) else x.made[1]).dtype
        limit = torch.finfo(dtype).max if dtype.is_floating_point else _MOST
        return -limit, limit
    given: list[Floats] = []
    for x in operands:
        if type(x) in (int, float) and abs(x) <= _MOST:
            given.append((float(x), float(x)))
        else:
            given.append(getattr(x, "range", None) or (-_MOST, _MOST))
    (low, high), *more = given
    by: Any = operands[1] if more else None
    least, most = more[0] if more else (0.0, 0.0)
    if function in (min, max):
        kinds = {getattr(x, "kind", type(x)) for x in operands}  # of integers it might be one
        lows, highs = zip((low, high), *more)
        return (min(lows), max(highs)) if more and kinds == {float} else None
    if function in (abs, math.fabs):
        return 0.0, max(-low, high)
    if function is math.sqrt:
        return (0.0, math.sqrt(high)) if low >= 0 else None
    if function is operator.neg:
        return -high, -low
    if function is round:  # to integers, without `by`; the largest floats are rounded to none
        is_sure = type(by) is int and by >= 0 and max(-low, high) < _MOST / 2
        return (low - 1, high + 1) if is_sure else None
    if function is operator.pow:
        if type(by) not in (int, float) or not 0 <= by <= 64 or (low < 0 and by % 1):
            return None
        try:
            return (low**by if by % 2 else 0.0), max(-low, high) ** by
        except OverflowError:
            return None
    if function is operator.truediv:
        if least <= 0 <= most:
            return None
        return (0.0, _MOST) if low >= 0 and least > 0 else (-_MOST, _MOST)
    if function is operator.mul:
        ends = [a * b for a in (low, high) for b in (least, most)]
        return max(min(ends), -_MOST), min(max(ends), _MOST)
    if function is operator.sub:
        least, most = -most, -least
    # what may be infinite takes the whole sum with it
    least = low + least if low >= 0 and least >= 0 else min(low + least, -1.0)
    most = high + most if high <= 0 and most <= 0 else max(high + most, 1.0)
    return max(least, -_MOST), min(most, _MOST)
