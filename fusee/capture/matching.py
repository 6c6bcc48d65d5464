"""Opcodes of the statement `match`.

source   https://docs.python.org/3.13/library/dis.html#opcode-MATCH_CLASS; CPython's
         Python/ceval.c, match_class and match_keys
"""

from __future__ import annotations

from typing import Any

from fusee.capture.bytecode import Instruction
from fusee.capture.frame import OPCODES, Frame, Opcode, op

_MATCHES_ITSELF = 1 << 22  # Py_TPFLAGS__MATCH_SELF
_NOTHING = object()


def _is_flagged(flag: int) -> Opcode:
    return lambda f, i: f.push(bool(type(f.stack[-1]).__flags__ & flag))


OPCODES["MATCH_SEQUENCE"] = _is_flagged(1 << 5)  # Py_TPFLAGS_SEQUENCE
OPCODES["MATCH_MAPPING"] = _is_flagged(1 << 6)  # Py_TPFLAGS_MAPPING


@op()
def MATCH_KEYS(f: Frame, i: Instruction) -> None:
    """The values of these keys, or None if one is not there."""
    subject, keys = f.stack[-2:]
    get = f.machine.attribute(subject, "get") if keys else None
    found: list[Any] = []
    for k, key in enumerate(keys):
        if key in keys[:k]:
            raise ValueError(f"mapping pattern checks duplicate key ({key!r})")
        found.append(f.machine.call(get, (key, _NOTHING), {}))
        if found[-1] is _NOTHING:
            f.push(None)
            return
    f.push(tuple(found))


@op()
def MATCH_CLASS(f: Frame, i: Instruction) -> None:
    """The attributes that a class pattern asks for, or None if it does not match."""
    subject, cls, names = f.take(3)
    if not isinstance(cls, type):
        raise TypeError("called match pattern must be a class")
    if not f.machine.call(isinstance, (subject, cls), {}):
        f.push(None)
        return
    found: list[Any] = []
    by_position = _by_position(f, cls, i.arg)
    if by_position is None:
        found.append(subject)
        by_position = ()
    seen: list[str] = []
    for name in (*by_position, *names):
        if not isinstance(name, str):
            kind = type(name).__name__
            raise TypeError(f"__match_args__ elements must be strings (got {kind})")
        if name in seen:
            raise TypeError(f"{cls.__name__}() got multiple sub-patterns for attribute {name!r}")
        seen.append(name)
        try:
            found.append(f.machine.attribute(subject, name))
        except AttributeError:
            f.push(None)
            return
    f.push(tuple(found))


def _by_position(f: Frame, cls: type, count: int) -> tuple[str, ...] | None:
    """The attributes that `count` patterns without a name are about; None for the object itself."""
    if not count:
        return ()
    is_itself = False
    try:
        names = f.machine.attribute(cls, "__match_args__")
    except AttributeError:
        names, is_itself = (), bool(cls.__flags__ & _MATCHES_ITSELF)
    if not isinstance(names, tuple):
        kind = type(names).__name__
        raise TypeError(f"{cls.__name__}.__match_args__ must be a tuple (got {kind})")
    allowed = 1 if is_itself else len(names)
    if allowed < count:
        plural = "" if allowed == 1 else "s"
        raise TypeError(
            f"{cls.__name__}() accepts {allowed} positional sub-pattern{plural} ({count} given)"
        )
    return None if is_itself else names[:count]
