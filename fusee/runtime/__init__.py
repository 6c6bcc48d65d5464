"""All that compiled code needs when it runs; here, the process around it.

That is what to do once a module is imported, and when garbage is collected.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]

_waiting: dict[str, list[Action]] = {}
_lock = threading.RLock()


def when_imported(name: str, action: Action) -> None:
    """Call `action` with a module: now if it is imported, else when it is, before others see it."""
    with _lock:
        if name not in sys.modules:
            _waiting.setdefault(name, []).append(action)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
            return
    action(importlib.import_module(name))  # which waits for another thread that is at it


def cancel(name: str, action: Action) -> None:
    """Do nothing with the module after all, if it has not been imported."""
    with _lock:
        if action in (listed := _waiting.get(name, [])):
            listed.remove(action)
        if not listed:
            _waiting.pop(name, None)


class _Finder(MetaPathFinder):
    """Finds what the others find, for the modules that are waited for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads a module as its own loader does, which it then has again; and acts."""

    def __init__(self, own: Loader) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        with _lock:
            actions = _waiting.pop(module.__name__, [])
        for action in actions:
            action(module)


_finder = _Finder()


# ---------------------------------------------------------------------------- collector
# Python's cyclic garbage collector, kept from running while something is compiled.


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No cyclic collection meanwhile, nor at once after it for what was made: one pass over a
    program's objects takes as long as a step."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            due = 10 * gc.get_threshold()[0]  # fewer are looked at in a millisecond
            if 0 < due < gc.get_count()[0] and gc.get_freeze_count() < due:
                # all that there is becomes old, without being looked at; what a program has frozen
                # would be thawed (Python 3.12 begins with some 400 that are)
                gc.freeze()
                gc.unfreeze()
            gc.enable()
