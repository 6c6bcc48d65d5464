"""Iterators of C from outside: what they still have to give, and how they are moved on.

A program that goes through one is given a stand-in over the elements that are left. Afterwards the
real one is advanced by as many. Only what is copied without being moved is read like this.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

__all__ = ["ITERATORS", "advance", "consumed", "gone_through", "is_finite_iterator", "remaining"]

_EMPTY: tuple[Any, ...] = ([], (), range(0), {}, {}.items(), {}.values(), set(), "")
_PLAIN = (*(type(iter(x)) for x in _EMPTY), type(reversed([])))

ITERATORS: tuple[Any, ...] = (*_PLAIN, enumerate, zip)


def is_finite_iterator(x: Any) -> bool:
    """Whether `x` is an iterator of C that can be copied and that ends."""
    if type(x) in (enumerate, zip):
        return all(map(is_finite_iterator, _parts_of(x)))
    return type(x) in _PLAIN


def _parts_of(x: Any) -> tuple[Any, ...]:
    made = x.__reduce__()
    return (made[1][0],) if type(x) is enumerate else made[1]


def remaining(iterator: Any) -> list[Any]:
    """The elements that an iterator still has; it stays where it is."""
    return list(_copied(iterator))


def _copied(x: Any) -> Any:
    if type(x) in _PLAIN:
        return copy.copy(x)
    made, args, *_ = x.__reduce__()
    return made(*(_copied(part) if is_finite_iterator(part) else part for part in args))


def gone_through(iterator: Any) -> list[tuple[Any, Any]]:
    """The containers that an iterator, or one of its parts, reads from, each with its reader."""
    found: list[tuple[Any, Any]] = []
    for part in gc.get_referents(iterator):
        found += gone_through(part) if isinstance(part, ITERATORS) else [(iterator, part)]
    return found


def consumed(stand_in: Any, count: int) -> int:
    """How often a list's iterator that had `count` elements was asked; one more if it ended."""
    _, _, *state = stand_in.__reduce__()
    return state[0] if state else count + 1


def advance(iterator: Any, count: int) -> None:
    """Ask an iterator `count` times."""
    for _ in range(count):
        next(iterator, None)
