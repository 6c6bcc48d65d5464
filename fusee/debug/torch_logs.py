"""TORCH_LOGS, for what we compile: the artefacts that have a counterpart, to torch's own handlers.

Adapter to torch._logging. Tested with torch 2.13; all names exist in 2.11 to 2.15.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import _logging

from fusee import log
from fusee.capture.entries import listeners
from fusee.capture.versions import Entry
from fusee.errors import source_line

_torchs: Any = _logging
# Below it, torch's handlers are found.
_HOME = "torch._dynamo.fusee"
_DYNAMIC = "torch.fx.experimental.symbolic_shapes"  # what TORCH_LOGS=dynamic switches on
# torch's names, and our artefacts.
_SAME = {
    "aot_graphs": ("aten",),
    "fusion": ("fusion",),
    "graph_code": ("graph",),
    "output_code": ("host", "llvm"),
}


def follow(replace: Callable[[Any, str, Any], None]) -> Callable[[], None]:
    """Send what is made to torch's logs, as TORCH_LOGS and torch._logging.set_logs say.

    replace   puts a function in another one's place
    returns   what ends it
    """
    ends = _subscribed()
    set_logs = _torchs.set_logs

    def set_both(**settings: Any) -> None:
        nonlocal ends
        set_logs(**settings)
        _all(ends)
        ends = _subscribed()

    replace(_torchs, "set_logs", set_both)
    return lambda: _all(ends)


def _all(ends: list[Callable[[], None]]) -> None:
    while ends:
        ends.pop()()


def _subscribed() -> list[Callable[[], None]]:
    """Listeners for what is switched on now; each as what ends it."""
    ends = []
    for name, artefacts in _SAME.items():
        if (logger := _wanted(name)) is not None:
            ends.append(log.subscribe(_to(logger), *artefacts))
    for name in ("guards", "recompiles"):
        if (logger := _wanted(name)) is not None:
            ends.append(log.subscribe(_told(logger), name))
    dynamic = logging.getLogger(_DYNAMIC)
    if dynamic.isEnabledFor(logging.INFO):
        ends.append(log.subscribe(_to(dynamic), "dynamic"))
    if (breaks := _wanted("graph_breaks")) is not None:

        def tell_of_breaks(entry: Entry) -> None:
            found = entry.captured
            for stop in found.breaks if found.stop is None else [found.stop, *found.breaks]:
                breaks.debug("Graph break: %s\n  %s", stop.reason, source_line(stop.where))

        listeners.append(tell_of_breaks)
        ends.append(lambda: listeners.remove(tell_of_breaks))
    return ends


def _wanted(name: str) -> logging.Logger | None:
    """torch's log of an artefact, if it is switched on."""
    logger: logging.Logger = _torchs.getArtifactLogger(_HOME, name)
    return logger if logger.isEnabledFor(logging.DEBUG) else None


def _told(logger: logging.Logger) -> log.Listener:
    return lambda record: logger.debug("%s: %s", record.name, record.text)


def _to(logger: logging.Logger) -> log.Listener:
    return lambda record: logger.info("%s %s\n%s", record.graph, record.name, record.text)
