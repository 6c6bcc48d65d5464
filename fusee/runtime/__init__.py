"""All that compiled code needs when it runs; here, the process around it.

That is what to do once a module is imported, and what Python does not do meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, Generic, TypeVar

Action = Callable[[ModuleType], None]
T = TypeVar("T")

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
        found = (x.find_spec(name, path, target) for x in sys.meta_path if x is not self)
        spec = next((x for x in found if x is not None), None)
        if spec is not None and spec.loader is not None:
            with contextlib.suppress(AttributeError, TypeError):  # one of a program that was frozen
                spec.loader.exec_module = functools.partial(self.run, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def run(self, own: Action, module: ModuleType) -> None:
        own(module)
        with _lock:
            actions = _waiting.pop(module.__name__, [])
        for action in actions:
            action(module)


_finder = _Finder()


def in_child(renew: Callable[[], None]) -> Callable[[], None]:
    """Run a function in each forked child, where no other thread of its parent is. A decorator."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    return renew


# ---------------------------------------------------------------------------- meanwhile
# While something is compiled: no cyclic garbage collection, other settings of Python's, no signals.


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


class Setting(Generic[T]):
    """A number of the process that is another one while anybody has entered, `users` of them, and
    then the program's `own` again, unless that has set it meanwhile."""

    def __init__(self, get: Callable[[], T], put: Callable[[T], object], change: Callable[[T], T]):
        self.get, self.put, self.change = get, put, change
        self.own, self.users = get(), 0
        self.renew()
        in_child(self.renew)

    def renew(self) -> None:
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            if not self.users:
                self.own = self.get()
                self.put(self.change(self.own))
            self.users += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.users -= 1
            if not self.users and self.get() == self.change(self.own):
                self.put(self.own)

    @property
    def now(self) -> T:
        """What the program has set."""
        return self.own if self.users else self.get()


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Handlers of signals run at the end: what one raises within torch's dispatch to Python ends
    the process, and capture takes it for the program's. A signal that comes again does not wait."""
    own, came = dict[int, Any](), dict[int, FrameType | None]()

    def note(number: int, frame: FrameType | None) -> None:
        if number in came:
            own[number](number, frame)
        came[number] = frame

    try:
        with contextlib.suppress(ValueError):  # only the main thread has them
            for number in range(1, signal.NSIG):
                if callable(signal.getsignal(number)):
                    own[number] = signal.signal(number, note)
        yield
    finally:
        with contextlib.ExitStack() as ends:  # from last to first, whatever one raises
            ends.callback(lambda: [ends.callback(own[k], k, frame) for k, frame in came.items()])
            for number, handler in own.items():
                ends.callback(signal.signal, number, handler)
