"""Size expressions taken apart and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from fusee.sym.expr import Atom, Call, Size, Symbol, floordiv, linear_in, maximum, minimum, mod


def atoms(a: Size) -> Iterator[Atom]:
    """Every atom of `a`, those inside divisions too."""
    if isinstance(a, int):
        return
    for mono in a.terms:
        for atom in mono:
            yield atom
            if isinstance(atom, Call):
                yield from atoms(atom.a)
                yield from atoms(atom.b)


def symbols(a: Size) -> dict[Symbol, None]:
    """The symbols that `a` mentions, in order of appearance. Not to be changed."""
    if isinstance(a, int):
        return {}
    if a._symbols is None:
        a._symbols = {atom: None for atom in atoms(a) if isinstance(atom, Symbol)}
    return a._symbols


def coefficient(a: Size, symbol: Symbol) -> tuple[Size, Size] | None:
    """(c, rest) with a == c*symbol + rest and neither mentioning it; None if not linear in it."""
    if isinstance(a, int) or symbol not in symbols(a):
        return 0, a
    coef, rest = linear_in(a, symbol)
    if coef is None or symbol in symbols(coef) or symbol in symbols(rest):
        return None
    return coef, rest


def substitute(a: Size, values: Mapping[Symbol, Size]) -> Size:
    """`a` with symbols replaced, simplified anew."""
    if isinstance(a, int):
        return a
    total: Size = 0
    for mono, coef in a.terms.items():
        term: Size = coef
        for atom in mono:
            term = term * _substitute_atom(atom, values)
        total = total + term
    return total


def _substitute_atom(atom: Atom, values: Mapping[Symbol, Size]) -> Size:
    if isinstance(atom, Symbol):
        found = values.get(atom)
        return atom.expr if found is None else found
    assert isinstance(atom, Call)
    return CALLS[atom.op](substitute(atom.a, values), substitute(atom.b, values))


CALLS: dict[str, Callable[[Size, Size], Size]] = {
    "//": floordiv,
    "%": mod,
    "min": minimum,
    "max": maximum,
}


def hint(a: Size, default: int = 64) -> int:
    """The value of `a` with each symbol at its hint; for decisions of speed only."""
    if isinstance(a, int):
        return a
    known: dict[Symbol, Size] = {s: default if s.hint is None else s.hint for s in symbols(a)}
    value = substitute(a, known)
    assert isinstance(value, int)
    return value


def product(sizes: Iterable[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total
