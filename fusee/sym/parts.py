"""Size expressions taken apart and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from fusee.sym.expr import Atom, Call, Size, Symbol, floordiv, linear_in, maximum, minimum, mod


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
    known: dict[Atom, Size] = {}
    left = _own_atoms(a)
    while left:  # what a call is made of comes before it
        atom = left[-1]
        inner = _own_atoms(atom.a) + _own_atoms(atom.b) if isinstance(atom, Call) else []
        missing = [x for x in inner if x not in known]
        if missing and atom not in known:
            left += missing
            continue
        left.pop()
        if isinstance(atom, Symbol):
            known[atom] = values.get(atom, atom.expr)
        elif isinstance(atom, Call) and atom not in known:
            known[atom] = CALLS[atom.op](_with_atoms(atom.a, known), _with_atoms(atom.b, known))
    return _with_atoms(a, known)


def _with_atoms(a: Size, known: Mapping[Atom, Size]) -> Size:
    if isinstance(a, int):
        return a
    total: Size = 0
    for mono, coef in a.terms.items():
        term: Size = coef
        for atom in mono:
            term = term * known[atom]
        total = total + term
    return total


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
