"""What the processes of a job have seen vary, kept beside the cache under the job's name, as text.

    jobs/NAME/1f0c2a9d8e7b6a54.json

Ranks and restarts of a job share it. Whoever has something new writes all that is known as another
file, named after its content, and then deletes the files that it has read, which say less. So
processes need no lock: in any order, the union of what is there says all.

source   torch/_dynamo/pgo.py, which keeps a file for each rank
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusee.config import settings
from fusee.errors import CacheWarning, warn
from fusee.runtime.cache import content_key, write_whole

_FORMAT = "fusee job 1"
_MOST = 8  # values that are listed of each; two show that it varies

# By function: where it begins, and by the words of an argument's size the values that it had.
_Rows = dict[str, tuple[str, dict[str, list[Any]]]]


def job_named(torchs: str) -> Job | None:
    """The job that FUSEE_JOB_ID names, or torch's own setting; None if no one does."""
    chosen = settings()
    name = chosen.job_id or torchs
    return _opened(chosen.cache_dir, name) if name and chosen.cache_size else None


@functools.cache
def _opened(folder: Path, name: str) -> Job:
    return Job(folder / "jobs", name)


class Job:
    """What is known of one job."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        plain = re.sub(r"[^\w.-]", "_", name).lstrip(".")[:80]
        self.folder = folder / (plain if plain == name else f"{plain}-{content_key(name)[:8]}")
        self._rows: _Rows = {}
        self._told: set[Path] = set()
        self._lock = threading.Lock()
        self._read()

    def seen(self, function: str) -> Mapping[str, list[Any]]:
        """What varies of a function, by words, with values that it had."""
        return self._rows.get(function, ("", {}))[1]

    def learn(self, function: str, at: str, seen: Mapping[str, list[Any]]) -> None:
        """Keep that something varies. A folder that cannot be written to costs one warning."""
        with self._lock:
            if not self._add({function: (at, dict(seen))}):
                return
            read = self._read()
            text = json.dumps(
                {
                    "format": _FORMAT,
                    "functions": {
                        name: {"at": at, "varies": rows} for name, (at, rows) in self._rows.items()
                    },
                },
                indent=1,
                sort_keys=True,
            )
            path = self.folder / f"{content_key(text)[:16]}.json"
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(path, text.encode())
                for old in read:
                    if old != path:
                        old.unlink(missing_ok=True)
            except OSError as error:
                self._tell(self.folder, f"cannot be written to: {error.strerror}")

    def _add(self, rows: _Rows) -> bool:
        """Unite; whether anything is new."""
        before = json.dumps(self._rows, sort_keys=True)
        for function, (at, more) in rows.items():
            _, known = self._rows.setdefault(function, (at, {}))
            for words, seen in more.items():
                known[words] = sorted({*known.get(words, ()), *seen})[:_MOST]
        return before != json.dumps(self._rows, sort_keys=True)

    def _read(self) -> list[Path]:
        """Add all that is there; the files that it was in."""
        while True:
            paths, found = sorted(self.folder.glob("*.json")), []
            try:
                for path in paths:
                    found.append((path, path.read_text()))
            except FileNotFoundError:  # another process has written one that says more
                continue
            except (OSError, UnicodeDecodeError) as error:
                self._tell(path, f"cannot be read: {error}")
            break
        good = []
        for path, text in found:
            try:
                self._add(_parsed(text))
                good.append(path)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self._tell(path, f"is damaged or of another version: {error}")
        return good

    def _tell(self, path: Path, what: str) -> None:
        if path not in self._told:
            self._told.add(path)
            warn(
                CacheWarning,
                f"what the job {self.name!r} has learned {what} ({path})",
                did="went on without it",
                remedy="delete it, or let FUSEE_CACHE_DIR name another folder",
            )


def _parsed(text: str) -> _Rows:
    """The rows of a file. raises ValueError, TypeError, KeyError or AttributeError"""
    found = json.loads(text)
    if found["format"] != _FORMAT:
        raise ValueError(f"its format is {found['format']!r}, not {_FORMAT!r}")
    rows = {name: (row["at"], dict(row["varies"])) for name, row in found["functions"].items()}
    for at, varies in rows.values():
        values = [x for seen in varies.values() for x in seen]
        if type(at) is not str or any(type(x) not in (int, float) for x in values):
            raise ValueError("a value is no number")
    return rows
