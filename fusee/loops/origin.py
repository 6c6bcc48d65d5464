"""Where loops come from: ATen ops and the user's lines, for people."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Protocol

from torch import fx

from fusee.errors import user_frame

__all__ = ["behind", "joined", "origin"]


class Lazy(Protocol):
    """A tensor that may not exist in memory: what this module knows of it."""

    origin: str
    operands: tuple[Any, ...]
    base: Any

    @property
    def storage(self) -> object | None: ...


def origin(node: fx.Node) -> str:
    """`softmax model.py:12`, or the op alone where the line is not known."""
    name = str(node.target).removeprefix("aten.").removesuffix(".default")
    place = _place(node.meta.get("stack_trace"))
    return f"{name} {place}" if place else name


@lru_cache(maxsize=1024)
def _place(stack_trace: Any) -> str:
    frame = user_frame(stack_trace)
    return "" if frame is None else f"{PurePath(frame['file']).name}:{frame['line']}"


def joined(origins: Iterable[str]) -> str:
    """Several origins as one text: `mul, add model.py:12 + relu model.py:13`."""
    places: dict[str, list[str]] = {}
    for one in origins:
        names, _, place = one.rpartition(" ")
        if not names:
            names, place = place, ""
        places.setdefault(place, []).append(names)
    rows = (f"{', '.join(dict.fromkeys(n))} {place}".strip() for place, n in places.items())
    return " + ".join(rows)


def behind(tensor: Lazy) -> str:
    """Where what is computed with `tensor` comes from: it and the lazy tensors that it reads."""
    found: list[str] = []
    seen: set[Lazy] = set()
    pending = [tensor]
    while pending:
        part = pending.pop()
        if part in seen or (part.storage is not None and part is not tensor):
            continue
        seen.add(part)
        if part.origin:
            found.append(part.origin)
        pending += part.operands
        if part.base is not None:
            pending.append(part.base)
    return joined(found[::-1])
