"""Compiled models read from disk before they are asked for, while Python traces a graph.

A file of keys says what a program that started alike used last time, in that order. They are read
one after another in one of the threads that compile.

- A model is found by its key alone, which holds the graph and its weights: a wrong guess costs
  time and is never used.
- What fails here is not told and leaves nothing: whoever asks for that key reads it again, and
  meets the same.
- Wrong guesses keep no memory: a key that was not expected drops what is left, and so does a
  minute. No more than a quarter of the free memory is filled.
- A fork waits for the model being read, and its child expects none; the end of a program waits
  for it, too, and no more are begun.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from fusee.backends.blobs import Blobs
from fusee.runtime import workers

__all__ = ["Ahead", "find"]

# Seconds that a model waits for being asked for.
_PATIENCE = 60
# How many programs one folder remembers: arguments that are never twice the same must not fill it.
_PROGRAMS = 100

_all: dict[str, Ahead] = {}
_finding = threading.Lock()
# Models of a forked child's parent, never freed: OpenVINO would wait for threads that are gone.
_inherited: list[dict[str, Future[Any]]] = []


class Ahead:
    """The compiled models of one folder, device and configuration. For use by several threads."""

    def __init__(self, blobs: Blobs, index: str, load: Callable[[Tensor], Any]) -> None:
        """index   key of the list of keys; load   a compiled model of a blob"""
        self.blobs, self.index, self.load = blobs, index, load
        self.lock = threading.Lock()
        self.used: list[str] = []
        text = blobs.read(index, tell=False)
        self.expected = [] if text is None else _keys(text)
        self.waiting = _that_fit(blobs, self.expected)
        self.begun: dict[str, Future[Any]] = {}
        if self.waiting:
            self._begin()
            timer = threading.Timer(_PATIENCE, self.drop)
            timer.daemon = True
            timer.start()

    def get(self, key: str) -> Any:
        """The model of a key, read now unless it was before; None if there is none.

        raises   what `load` does
        """
        found = self._take(key)
        if found is None:
            blob = self.blobs.read(key)
            found = None if blob is None else self.load(blob)
        return found

    def note(self, key: str) -> None:
        """Remember that this program used a key, which is on disk."""
        with self.lock:
            if key not in self.used:
                self.used.append(key)
            if key not in self.expected:
                self._remember()

    def finish(self) -> None:
        """Forget keys that the program used another time only."""
        with self.lock:
            if self.used and not set(self.expected) <= set(self.used):
                self._remember()

    def drop(self) -> None:
        """Begin nothing more, and keep nothing that was not asked for."""
        with self.lock:
            self.waiting.clear()
            self.begun.clear()

    def _take(self, key: str) -> Any:
        if key not in self.expected:
            self.drop()
        with self.lock:
            if key in self.waiting:
                self.waiting.remove(key)
            future = self.begun.pop(key, None)
        if future is None:
            return None
        if future.cancel():  # it waited for a thread: reading it here is faster
            self._begin()
            return None
        return None if future.exception() is not None else future.result()

    def _begin(self) -> None:
        with self.lock:
            if self.waiting:
                key = self.waiting.pop(0)
                self.begun[key] = workers.submit(self._read, key)

    def _read(self, key: str) -> Any:
        try:
            blob = self.blobs.read(key, tell=False)
            return None if blob is None else self.load(blob)
        finally:
            self._begin()  # refused when the program ends: then nobody asks

    def _remember(self) -> None:
        self.expected = list(self.used)
        self.blobs.write(
            self.index,
            "\n".join(self.used).encode(),
            did="went on; the next start will not read models ahead",
        )
        with contextlib.suppress(OSError):  # what cannot be cleared away stays
            files = sorted(self.blobs.folder.glob("index-*"), key=lambda path: path.stat().st_mtime)
            for path in files[:-_PROGRAMS]:
                path.unlink()


def find(
    folder: Path, device: str, config: Mapping[str, object], load: Callable[[Tensor], Any]
) -> Ahead:
    """The models of a folder for this program; the first time their reading begins."""
    alike = repr((sys.argv, device, sorted((name, str(config[name])) for name in config)))
    index = f"index-{hashlib.sha256(alike.encode()).hexdigest()[:34]}"
    name = f"{folder} {index}"
    with _finding:
        if name not in _all:
            _all[name] = Ahead(Blobs(folder), index, load)
        return _all[name]


def _keys(text: Tensor) -> list[str]:
    found = re.findall(r"^[0-9a-f]{40}$", text.numpy().tobytes().decode("ascii", "replace"), re.M)
    return list(dict.fromkeys(found))


def _that_fit(blobs: Blobs, keys: list[str]) -> list[str]:
    """The first keys whose models fit: each takes its blob's memory, and packs it in as much."""
    left = _available_bytes() // 4
    found = []
    for key in keys:
        left -= 2 * blobs.size(key)
        if left < 0:
            break
        found.append(key)
    return found


def _available_bytes() -> int:
    """Free memory and what the page cache would give back; 0 where this is not known."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.M)
    return int(found[1]) * 1024 if found else 0


def _finish() -> None:
    for models in list(_all.values()):
        models.finish()


def _in_child() -> None:
    global _finding
    _finding = threading.Lock()
    for models in _all.values():
        models.lock = threading.Lock()
        _inherited.append(models.begun)
        models.waiting, models.begun = [], {}
    _all.clear()  # what a child uses says little of the next start


atexit.register(_finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
