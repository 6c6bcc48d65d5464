"""Integers known or unknown at compile time: exact expressions over named symbols.

    Size    ::= int | Expr
    Expr    ::= sum of int * Monomial           never a constant: those are plain ints
    Monomial::= product of Atom
    Atom    ::= Symbol | FloorDiv(Size, Size) | Mod(Size, Size) | Min(Size, Size) | Max(Size, Size)
              | And(Size, Size) | Shift(1, Size)

A Symbol is an axis variable (0 <= i < size), a size that only the call knows (lo <= s), or an
index that is itself data. Results are canonical where the rules below reach, so that equality of
expressions is structural equality. Divisors are positive and division floors, as in Python.

Nothing here is interned: an expression lives as long as the graph that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import gcd
from typing import Any, ClassVar, Union

Size = Union[int, "Expr"]
Atom = Union["Symbol", "Call"]


class _Atom:
    """What a monomial is a product of. Ordered by `key`, which also prints it as Python."""

    __slots__ = ("_hash", "range")
    _hash: int
    range: tuple[int | None, int | None]  # least and greatest value

    @property
    def key(self) -> str:
        raise NotImplementedError

    @property
    def expr(self) -> Expr:
        return Expr({(self,): 1})  # type: ignore[dict-item]

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self.key


class Symbol(_Atom):
    """A named integer with `lo <= value`, and `value < hi` if `hi` is given.

    `hint` is a value it may have (the first call's), for decisions of speed only. `payload` is
    the owner's: loops keep there the value that a data-dependent index is loaded from.
    """

    __slots__ = ("name", "lo", "hi", "hint", "payload")

    def __init__(
        self,
        name: str,
        lo: int = 0,
        hi: Size | None = None,
        hint: int | None = None,
        payload: object = None,
    ) -> None:
        self.name = name
        self.lo, self.hi, self.hint, self.payload = lo, hi, hint, payload
        self.range = lo, hi - 1 if isinstance(hi, int) else None
        self._hash = hash((name, lo, hi))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Symbol)
            and self.name == other.name
            and self.lo == other.lo
            and self.hi == other.hi
            and self.payload is other.payload
        )

    __hash__ = _Atom.__hash__

    def __reduce__(self) -> Any:
        return Symbol, (self.name, self.lo, self.hi, self.hint, self.payload)

    @property
    def key(self) -> str:
        return self.name

    @property
    def size(self) -> Size:
        """How many values an axis goes through, from 0 on."""
        assert self.hi is not None
        return self.hi


class Call(_Atom):
    """FloorDiv, Mod, Min, Max, And or Shift of two sizes that no rule could resolve."""

    __slots__ = ("op", "a", "b", "_key")
    FORMS: ClassVar[dict[str, str]] = {
        "//": "({a})//({b})",
        "%": "({a})%({b})",
        "min": "min({a}, {b})",
        "max": "max({a}, {b})",
        "&": "({a})&({b})",
        "<<": "({a})<<({b})",
    }

    def __init__(self, op: str, a: Size, b: Size) -> None:
        self.op, self.a, self.b = op, a, b
        self._key = ""
        self._hash = hash((op, a, b))
        # now, so that no question about the size it is part of goes deeper than one division
        self.range = _call_range(self)

    def __reduce__(self) -> Any:
        return Call, (self.op, self.a, self.b)

    @property
    def key(self) -> str:
        if not self._key:  # only when asked for: what is divided twice is in it twice
            self._key = "(" + self.FORMS[self.op].format(a=self.a, b=self.b) + ")"
        return self._key

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Call)
            and self._hash == other._hash
            and self.op == other.op
            and self.a == other.a
            and self.b == other.b
        )

    __hash__ = _Atom.__hash__


Monomial = tuple[Atom, ...]


class Expr:
    """A polynomial with integer coefficients; `terms` maps each monomial to a nonzero int."""

    __slots__ = ("_calls", "_hash", "_linear", "_symbols", "terms")

    def __init__(self, terms: dict[Monomial, int]) -> None:
        self.terms = terms
        self._hash = hash(frozenset(terms.items()))
        self._calls: list[Call] | None = None
        self._symbols: dict[Symbol, None] | None = None
        self._linear: dict[Symbol, tuple[Size, Size] | None] | None = None

    def __reduce__(self) -> Any:  # hashes of texts differ between processes
        return Expr, (self.terms,)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Expr) and self._hash == other._hash and self.terms == other.terms
        )

    def __add__(self, other: Size) -> Size:
        terms = dict(self.terms)
        for mono, coef in _terms(other):
            terms[mono] = terms.get(mono, 0) + coef
        return collect(terms)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr({mono: -coef for mono, coef in self.terms.items()})

    def __sub__(self, other: Size) -> Size:
        return self + (-other)

    def __rsub__(self, other: Size) -> Size:
        return -self + other

    def __mul__(self, other: Size) -> Size:
        if isinstance(other, int):
            if other == 0:
                return 0
            return Expr({mono: coef * other for mono, coef in self.terms.items()})
        terms: dict[Monomial, int] = {}
        for left, x in self.terms.items():
            for right, y in other.terms.items():
                mono = left or right
                if left and right:
                    mono = tuple(sorted(left + right, key=lambda atom: atom.key))
                terms[mono] = terms.get(mono, 0) + x * y
        return collect(terms)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Size) -> Size:
        return floordiv(other, self)

    def __mod__(self, other: Size) -> Size:
        return mod(self, other)

    def __rmod__(self, other: Size) -> Size:
        return mod(other, self)

    def __repr__(self) -> str:
        parts = []
        keys = [([atom.key for atom in mono], coef) for mono, coef in self.terms.items()]
        for factors, coef in sorted(keys, key=lambda term: (-len(term[0]), term[0])):
            if coef != 1 or not factors:
                factors.insert(0, str(coef))
            parts.append("*".join(factors))
        return " + ".join(parts).replace("+ -", "- ")

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of {self} is unknown at compile time; ask known_eq or known_lt")


def _terms(x: Size) -> Iterable[tuple[Monomial, int]]:
    return x.terms.items() if isinstance(x, Expr) else (((), x),)


def collect(terms: dict[Monomial, int]) -> Size:
    terms = {mono: coef for mono, coef in terms.items() if coef}
    if not terms:
        return 0
    if len(terms) == 1 and () in terms:
        return terms[()]
    return Expr(terms)


# ------------------------------------------------------------------------------ division


def _divide_term(mono: Monomial, coef: int, divisor: Size) -> tuple[Monomial, int] | None:
    """The exact quotient of one term, or None. Divisors of several terms divide nothing here."""
    if isinstance(divisor, int):
        return None if coef % divisor else (mono, coef // divisor)
    if len(divisor.terms) != 1:
        return None
    ((factors, scale),) = divisor.terms.items()
    rest = list(mono)
    for factor in factors:
        if factor not in rest:
            return None
        rest.remove(factor)
    return None if coef % scale else (tuple(rest), coef // scale)


def _split(a: Size, b: Size) -> tuple[Size, Size]:
    """(q, r) with a == q*b + r, where q takes every term that b divides exactly."""
    if isinstance(b, Expr) and len(b.terms) > 1:
        exact_one: Size = 0
        left, lead = a, _lead(b)
        for _ in range(_MOST_TERMS):  # long division
            if isinstance(left, int):
                return (exact_one, 0) if left == 0 else (0, a)
            mono = _lead(left)
            found = _divide_term(mono, left.terms[mono], Expr({lead: b.terms[lead]}))
            if found is None:
                break
            part = collect(dict([found]))
            exact_one, left = exact_one + part, left - part * b
        return 0, a
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for mono, coef in _terms(a):
        exact = _divide_term(mono, coef, b)
        if exact is None:
            rest[mono] = coef
        else:
            quotient[exact[0]] = quotient.get(exact[0], 0) + exact[1]
    if isinstance(b, int) and () in rest:
        whole, rest[()] = divmod(rest[()], b)
        quotient[()] = quotient.get((), 0) + whole
    return collect(quotient), collect(rest)


def _lead(a: Expr) -> Monomial:
    """The first of the terms in an order that products keep."""
    return min(a.terms, key=lambda mono: (-len(mono), [atom.key for atom in mono]))


_MOST_TERMS = 64  # of a quotient


def _split_low(a: Size, b: int) -> tuple[int, Size, Size] | None:
    """(g, high, low) with a == g*high + low, 0 <= low < g and g dividing b: low can't carry."""
    steps = {gcd(coef, b) for mono, coef in _terms(a) if mono}
    for g in sorted(steps, reverse=True):
        if g <= 1:
            continue
        high, low = _split(a, g)
        if high != 0 and known_ge(low, 0) and known_lt(low, g):
            return g, high, low
    return None


def floordiv(a: Size, b: Size) -> Size:
    """a // b for b > 0."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 1:
        return a
    quotient, rest = _split(a, b)
    if rest == 0 or (known_ge(rest, 0) and known_lt(rest, b)):
        return quotient
    if isinstance(b, Expr) and (scale := gcd(*b.terms.values(), *(n for _, n in _terms(rest)))) > 1:
        return quotient + floordiv(_split(rest, scale)[0], _split(b, scale)[0])
    if isinstance(b, int):
        if (even := _made_even(rest)) is not rest:
            return quotient + floordiv(even, b)
        if _is_falling(rest):
            return quotient - floordiv(b - 1 - rest, b)
        low = _split_low(rest, b)
        if low is not None:
            return quotient + floordiv(low[1], b // low[0])
        more = 0 if isinstance(rest, int) else rest.terms.get((), 0)
        inner = only_atom(rest - more)
        if isinstance(inner, Call) and inner.op == "//" and isinstance(inner.b, int):
            return quotient + floordiv(inner.a + more * inner.b, inner.b * b)
    return quotient + Call("//", rest, b).expr


def mod(a: Size, b: Size) -> Size:
    """a % b for b > 0; the result is in [0, b)."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if b == 1:
        return 0
    _, rest = _split(a, b)
    if rest == 0 or (known_ge(rest, 0) and known_lt(rest, b)):
        return rest
    if isinstance(b, int):
        for mono, coef in _terms(rest):
            atom = mono[0] if len(mono) == 1 else None
            if coef < 0 and isinstance(atom, Call) and atom.op == "%" and divides(b, atom.b):
                return mod(rest + coef * (atom.a - atom.expr), b)
        if (even := _made_even(rest)) is not rest:
            return mod(even, b)
        if _is_falling(rest):  # what a size lacks of a multiple: with the size it is one
            return rest - b * floordiv(rest, b)
        low = _split_low(rest, b)
        if low is not None:
            g, high, tail = low
            return g * mod(high, b // g) + tail
    return Call("%", rest, b).expr


def _made_even(a: Size) -> Size:
    """`a` with n + n % 2 in it as 2 * ((n + 1) // 2)."""
    for mono, coef in _terms(a):
        atom = mono[0] if len(mono) == 1 else None
        if isinstance(atom, Call) and atom.op == "%" and atom.b == 2:
            more = 2 * floordiv(atom.a + 1, 2) - atom.a - atom.expr
            changed = a + coef * more
            if len([*_terms(changed)]) < len([*_terms(a)]):
                return changed
    return a


def _is_falling(a: Size) -> bool:
    """Whether sizes are only taken away in it."""
    terms = [(mono, coef) for mono, coef in _terms(a) if mono]
    return all(coef < 0 for _, coef in terms) and all(s.hi is None for s in symbols(a))


def only_atom(a: Size | None) -> Atom | None:
    if isinstance(a, Expr) and len(a.terms) == 1:
        ((mono, coef),) = a.terms.items()
        if coef == 1 and len(mono) == 1:
            return mono[0]
    return None


def minimum(a: Size, b: Size) -> Size:
    if known_ge(b, a):
        return a
    if known_ge(a, b):
        return b
    return Call("min", a, b).expr


def maximum(a: Size, b: Size) -> Size:
    if known_ge(b, a):
        return b
    if known_ge(a, b):
        return a
    return Call("max", a, b).expr


def common_bits(a: Size, b: Size) -> Size:
    """a & b of what is not negative."""
    return a & b if isinstance(a, int) and isinstance(b, int) else Call("&", a, b).expr


def power_of_two(exponent: Size) -> Size:
    """1 << exponent, for exponents from 0 to 62."""
    return 1 << exponent if isinstance(exponent, int) else Call("<<", 1, exponent).expr


# ------------------------------------------------------------------------------ facts


def lower_bound(a: Size) -> int | None:
    """An integer that `a` is never below, or None if this can't tell."""
    if isinstance(a, int):
        return a
    found = _lower(a, iter(range(_MOST_STEPS)))
    if found is not None:
        return found
    # by what quotients are at least: n // 7 >= (n - 6) / 7
    total: Size = a
    scale = 1
    for mono, coef in a.terms.items():
        atom = mono[0] if len(mono) == 1 else None
        if isinstance(atom, Call) and atom.op == "//" and isinstance(b := atom.b, int):
            least = atom.a - (b - 1) if coef > 0 else atom.a
            total = b * (total - scale * coef * atom.expr) + scale * coef * least
            scale *= b
    low = _lower(total, iter(range(_MOST_STEPS))) if 1 < scale < _MOST_SCALE else None
    return None if low is None else -(-low // scale)


def _lower(a: Size, steps: Iterator[int]) -> int | None:
    if isinstance(a, int):
        return a
    if next(steps, None) is None:  # each factor of a product asks twice for the rest of it
        return None
    found = {atom: None for mono in a.terms for atom in mono if isinstance(atom, Symbol)}
    # those with a symbolic range first: their ends mention the others
    for symbol in sorted(found, key=lambda s: (not isinstance(s.hi, Expr), s.hi is None)):
        coef, rest = linear_in(a, symbol)
        if coef is None:
            continue
        least, most = _lower(coef, steps), _lower(-coef, steps)
        if least is not None and least >= 0:  # it rises
            return _lower(coef * symbol.lo + rest, steps)
        if most is not None and most >= 0:
            end = symbol.hi
            return None if end is None else _lower(coef * (end - 1) + rest, steps)
    total = 0
    for mono, coef in a.terms.items():
        lo, hi = 1, 1 if not mono else None
        for position, atom in enumerate(mono):
            low, high = atom.range
            if low is None or low < 0:
                return None
            lo *= low
            first = position == 0
            hi = high if first else (None if hi is None or high is None else hi * high)
        end = lo if coef > 0 else hi
        if end is None:
            return None
        total += coef * end
    return total


_MOST_SCALE = 1 << 20
_MOST_STEPS = 200


def linear_in(a: Expr, symbol: Atom) -> tuple[Size | None, Size]:
    coef: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for mono, c in a.terms.items():
        count = mono.count(symbol)
        if count > 1:
            return None, 0
        if count:
            at = mono.index(symbol)
            coef[mono[:at] + mono[at + 1 :]] = c
        else:
            rest[mono] = c
    return collect(coef), collect(rest)


def _call_range(atom: Call) -> tuple[int | None, int | None]:
    a, b = atom.a, atom.b
    if atom.op == "%":
        return 0, (b - 1 if isinstance(b, int) else None)
    lo_a, hi_a = lower_bound(a), upper_bound(a)
    if atom.op == "//":
        if not isinstance(b, int):
            return (0, hi_a) if lo_a is not None and lo_a >= 0 else (None, None)
        return (None if lo_a is None else lo_a // b), (None if hi_a is None else hi_a // b)
    lo_b, hi_b = lower_bound(b), upper_bound(b)
    if atom.op == "<<":
        return 1 << max(lo_b or 0, 0), 1 << (62 if hi_b is None else min(hi_b, 62))
    if atom.op == "&":
        return 0, min((x for x in (hi_a, hi_b) if x is not None), default=None)
    lows = [x for x in (lo_a, lo_b) if x is not None]
    highs = [x for x in (hi_a, hi_b) if x is not None]
    if atom.op == "min":
        return (min(lows) if len(lows) == 2 else None), (min(highs) if highs else None)
    return (max(lows) if lows else None), (max(highs) if len(highs) == 2 else None)


def upper_bound(a: Size) -> int | None:
    """An integer that `a` is never above (inclusive), or None if this can't tell."""
    if isinstance(a, int):
        return a
    negated = lower_bound(-a)
    return None if negated is None else -negated


def known_eq(a: Size, b: Size) -> bool:
    """True only if a == b for all values of the symbols."""
    return a == b


def known_ge(a: Size, b: Size) -> bool:
    """True only if a >= b for all values of the symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a >= b
    least = lower_bound(a - b)
    return least is not None and least >= 0


def known_lt(a: Size, b: Size) -> bool:
    """True only if a < b for all values of the symbols."""
    return known_ge(b, a + 1)


def divides(k: Size, a: Size) -> bool:
    """True only if k divides a for all values of the symbols."""
    return _split(a, k)[1] == 0


# ---------------------------------------------------------------------------- parts
# Size expressions taken apart and put together again.


def atoms(a: Size) -> Iterator[Atom]:
    """Every atom of `a` once, those inside divisions too, however deep they are."""
    left, seen = _own_atoms(a), set[Atom]()
    while left:
        atom = left.pop()
        if atom not in seen:
            seen.add(atom)
            yield atom
            if isinstance(atom, Call):
                left += _own_atoms(atom.b) + _own_atoms(atom.a)


def inner_first(a: Size) -> Iterator[Atom]:
    """Every atom of `a` once, what a division is made of before it."""
    left, seen = _own_atoms(a), set[Atom]()
    while left:
        atom = left[-1]
        inner = _own_atoms(atom.a) + _own_atoms(atom.b) if isinstance(atom, Call) else []
        missing = [x for x in inner if x not in seen]
        if missing and atom not in seen:
            left += missing
            continue
        left.pop()
        if atom not in seen:
            seen.add(atom)
            yield atom


def _own_atoms(a: Size) -> list[Atom]:
    """The last one first."""
    return [] if isinstance(a, int) else [atom for mono in a.terms for atom in mono][::-1]


def symbols(a: Size) -> dict[Symbol, None]:
    """The symbols that `a` mentions, in order of appearance. Not to be changed."""
    if isinstance(a, int):
        return {}
    if a._symbols is None:
        own = dict.fromkeys(atom for mono in a.terms for atom in mono)
        found = own if all(type(atom) is Symbol for atom in own) else atoms(a)
        a._symbols = {atom: None for atom in found if isinstance(atom, Symbol)}
    return a._symbols


def calls_in(a: Size) -> list[Call]:
    """The atoms of `a` that are no symbols, in the order of `atoms`. Not to be changed."""
    if isinstance(a, int):
        return []
    if a._calls is None:
        a._calls = [atom for atom in atoms(a) if isinstance(atom, Call)]
    return a._calls


def only_symbol(a: Size | None) -> Symbol | None:
    """The symbol that a size is, if it is nothing else."""
    found = only_atom(a)
    return found if isinstance(found, Symbol) else None


def coefficient(a: Size, symbol: Symbol) -> tuple[Size, Size] | None:
    """(c, rest) with a == c*symbol + rest and neither mentioning it; None if not linear in it."""
    if isinstance(a, int) or symbol not in symbols(a):
        return 0, a
    if a._linear is None:
        a._linear = {}
    if symbol not in a._linear:
        coef, rest = linear_in(a, symbol)
        is_hidden = coef is None or symbol in symbols(coef) or symbol in symbols(rest)
        a._linear[symbol] = None if coef is None or is_hidden else (coef, rest)
    return a._linear[symbol]


def substitute(a: Size, values: Mapping[Any, Size]) -> Size:
    """`a` with symbols, or other atoms, replaced, simplified anew."""
    if isinstance(a, int) or values.keys().isdisjoint((*symbols(a), *calls_in(a))):
        return a
    known: dict[Atom, Size] = dict(values.items())
    divides_none = all(type(atom) is Symbol for mono in a.terms for atom in mono)
    for atom in () if divides_none else inner_first(a):
        if isinstance(atom, Call) and atom not in known:
            known[atom] = CALLS[atom.op](_with_atoms(atom.a, known), _with_atoms(atom.b, known))
    return _with_atoms(a, known)


def _with_atoms(a: Size, known: Mapping[Atom, Size]) -> Size:
    if isinstance(a, int):
        return a
    terms: dict[Monomial, int] = {}
    for mono, coef in a.terms.items():
        if known.keys().isdisjoint(mono):
            terms[mono] = terms.get(mono, 0) + coef
            continue
        term: Size = coef
        for atom in mono:
            found = known.get(atom)
            term = term * (atom.expr if found is None else found)
        for factors, count in _terms(term):
            terms[factors] = terms.get(factors, 0) + count
    return collect(terms)


class Steps:
    """How machine code computes sizes: `rows` as fusee/runtime/jit.py has them, each once."""

    def __init__(self, inputs: Iterable[str]) -> None:
        self._inputs = {name: k for k, name in enumerate(inputs)}
        self._known: dict[Atom, int] = {}
        self.rows: dict[tuple[str, int, int, int], int] = {}

    def _step(self, op: str, a: int = 0, b: int = 0, c: int = 0) -> int:
        return self.rows.setdefault((op, a, b, c), len(self._inputs) + len(self.rows))

    def number(self, a: Size) -> int:
        """Which number a size is, among the inputs and what the rows give."""
        for atom in inner_first(a):
            if atom in self._known:
                continue
            if isinstance(atom, Symbol):
                self._known[atom] = self._inputs[atom.name]
            elif isinstance(atom, Call):
                self._known[atom] = self._step(atom.op, self._sum(atom.a), self._sum(atom.b))
        return self._sum(a)

    def greatest(self, symbol: Symbol, sizes: Iterable[Size]) -> None:
        """From here on a symbol is the greatest of these."""
        first, *others = map(self.number, sizes)
        for other in others:
            first = self._step("max", first, other)
        self._known[symbol] = first

    def compared(self, a: Size, op: str, b: Size) -> int:
        """Which number is 1 where `a op b` holds, and else 0."""
        if op in (">", ">="):
            a, op, b = b, "<" + op[1:], a
        if op == "<":
            a, op = a + 1, "<="
        return self._step(op, self.number(a), self.number(b))

    def _sum(self, a: Size) -> int:
        if isinstance(a, int):
            return self._step("number", c=a)
        total = None
        for mono, scale in sorted(a.terms.items(), key=lambda term: term[1] != 1 and term[0] != ()):
            if not mono:
                part, scale = self._step("number", c=scale), 1
            else:
                part = self._known[mono[0]]
            for atom in mono[1:]:
                part = self._step("*", part, self._known[atom])
            if total is None and scale == 1:
                total = part
            else:
                before = self._step("number") if total is None else total
                total = self._step("+", before, part, scale)
        assert total is not None
        return total


CALLS: dict[str, Callable[[Size, Size], Size]] = {
    "//": floordiv,
    "%": mod,
    "min": minimum,
    "max": maximum,
    "&": common_bits,
    "<<": lambda _, exponent: power_of_two(exponent),
}


def hint(a: Size, default: int = 64, times: float = 1) -> int:
    """The value of `a` with each symbol at so many times its hint; for decisions of speed only."""
    if isinstance(a, int):
        return a
    known: dict[Symbol, Size] = {}
    for symbol in symbols(a):
        n = default if symbol.hint is None else symbol.hint
        known[symbol] = n if times == 1 else max(1, int(n * times))  # numbers may be negative
    try:
        value = substitute(a, known)
    except ZeroDivisionError:  # a divisor (n // 2) that is 0 for a fraction of its hint
        if times == 1:
            raise
        return hint(a, default)
    assert isinstance(value, int)
    return value


def count_points(axes: Iterable[Symbol]) -> Size:
    """How many points these axes have together."""
    return product(axis.hi for axis in axes if axis.hi is not None)


def product(sizes: Iterable[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total
