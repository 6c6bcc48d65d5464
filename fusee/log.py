"""Artefacts by name: stages publish what they made, anyone listens.

    FUSEE_LOG=graph,loops   prints these artefacts on stderr
    FUSEE_DUMP=folder       writes every artefact to folder/000_name/00_graph.py, 01_aten.py, ...
    subscribe(listener, "fusion")

A text that costs time to make is published as a function, which runs only if somebody listens.
Without listeners `publish` is one look at an empty dict.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fusee.config import settings
from fusee.errors import SettingError, choices


class Artefact(NamedTuple):
    suffix: str
    help: str


ARTEFACTS = {
    "graph": Artefact("py", "the captured graph of torch calls, as Python"),
    "aten": Artefact("py", "the functional graph of ATen ops, as Python, with the user's lines"),
    "passes": Artefact("txt", "what each pass over the ATen graph changed"),
    "loops": Artefact("txt", "the loop nests after lowering"),
    "fusion": Artefact("txt", "the kernels after fusion, and each refusal with its reason"),
    "memory": Artefact("txt", "the arena: offsets, lifetimes, reuse"),
    "kernels": Artefact("txt", "kernels, externs and what was not lowered, with the reason"),
    "llvm": Artefact("ll", "LLVM IR before optimisation"),
    "asm": Artefact("s", "the machine code of the host"),
    "host": Artefact("py", "the host function"),
    "weights": Artefact("txt", "what is derived from parameters and when it is recomputed"),
    "cache": Artefact("txt", "hits, misses and evictions of the object code cache"),
    "guards": Artefact("txt", "facts that a compiled function relies on"),
    "recompiles": Artefact("txt", "each call that needs another version: which fact, then and now"),
    "dynamic": Artefact("txt", "sizes that become symbols, and what makes numbers of them"),
    "time": Artefact("txt", "time per stage"),
}


class Record(NamedTuple):
    """One published artefact. `graph` is the name of the compiled graph, "" outside of one."""

    artefact: str
    name: str
    graph: str
    text: str


Listener = Callable[[Record], None]


@dataclass(slots=True)
class _Graph:
    """The compiled graph that artefacts belong to; its folder is made by the first dump."""

    name: str
    folder: Path | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)


_listeners: dict[str, tuple[Listener, ...]] = {}
_outside = _Graph("")
_graph: contextvars.ContextVar[_Graph] = contextvars.ContextVar("graph")


def publish(artefact: str, name: str, text: str | Callable[[], str]) -> None:
    """Give `text` to whoever listens to `artefact`; `name` says which one of its kind it is.

    raises   KeyError if no artefact has that name, when somebody listens to anything
    """
    if not _listeners:
        return
    listeners = _listeners.get(artefact)
    if listeners:
        body = text if isinstance(text, str) else text()
        record = Record(artefact, name, _graph.get(_outside).name, body)
        for listener in listeners:
            listener(record)
    elif artefact not in ARTEFACTS:
        raise KeyError(artefact)


def wants(artefact: str) -> bool:
    """Whether anybody listens, for callers that must collect facts before they can publish."""
    return artefact in _listeners


@contextlib.contextmanager
def graph(name: str) -> Iterator[None]:
    """All that is published inside belongs to one compiled graph of that name."""
    token = _graph.set(_Graph(name))
    try:
        yield
    finally:
        _graph.reset(token)


def subscribe(listener: Listener, *artefacts: str) -> Callable[[], None]:
    """Call `listener` with each Record of these artefacts (none given: of all). Returns the undo.

    raises   SettingError for an unknown artefact, or what cannot be called
    """
    if not callable(listener):
        raise SettingError(
            f"a listener is a function of one Record, not {type(listener).__name__}",
            did="changed nothing",
            remedy='log.subscribe(print, "fusion")',
        )
    names = artefacts if artefacts and "all" not in artefacts else tuple(ARTEFACTS)
    for name in names:
        if name not in ARTEFACTS:
            raise SettingError(
                f"there is no artefact named {name!r} to log",
                did="changed nothing",
                remedy=choices(name, ("all", *ARTEFACTS), "known artefacts"),
            )
    for name in names:
        _listeners[name] = (*_listeners.get(name, ()), listener)

    def undo() -> None:
        for name in names:
            left = tuple(other for other in _listeners.get(name, ()) if other is not listener)
            if left:
                _listeners[name] = left
            else:
                _listeners.pop(name, None)

    return undo


def _print(record: Record) -> None:
    title = " ".join(part for part in (record.artefact, record.graph, record.name) if part)
    print(f"=== {title}\n{record.text.rstrip()}\n", file=sys.stderr)


def dump_to(root: Path) -> Listener:
    """A listener that writes what FUSEE_DUMP=root writes."""

    def dump(record: Record) -> None:
        current = _graph.get(_outside)
        stem = "_".join(_file_part(part) for part in (record.artefact, record.name) if part)
        suffix = ARTEFACTS[record.artefact].suffix
        try:
            if current.folder is None:
                root.mkdir(parents=True, exist_ok=True)
                number, end = len(list(root.iterdir())), _file_part(current.name or "process")
                while current.folder is None:  # processes that dump to one root get folders each
                    with contextlib.suppress(FileExistsError):
                        (folder := root / f"{number:03}_{end}").mkdir()
                        current.folder = folder
                    number += 1
            path = current.folder / f"{next(current.numbers):02}_{stem}.{suffix}"
            path.write_text(record.text.rstrip() + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingError(
                f"FUSEE_DUMP={root} cannot be written to: {error.strerror}",
                did=f"stopped at the artefact {record.artefact!r}",
                remedy="name a folder of yours that has room, or unset FUSEE_DUMP",
            ) from None

    return dump


def _file_part(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_")[:60]


_chosen = settings()
if _chosen.log:
    subscribe(_print, *_chosen.log)
if _chosen.dump is not None:
    subscribe(dump_to(_chosen.dump))
