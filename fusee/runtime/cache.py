"""Object code on disk, by content.

One file per entry, named after the key: a header with a checksum, then the object code. A file is
written under a temporary name and renamed, so that concurrent processes see whole entries or none.
Whatever is wrong with the folder costs one warning and the cache, never the call. A folder that
other users may write to is refused, since its files are run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

from fusee.config import settings
from fusee.errors import CacheWarning, OptionError, warn
from fusee.log import publish

# ---------------------------------------------------------------------------- cache


_MAGIC = b"fusee-object-1\n\0"
_DIGEST_BYTES = 16
_HEADER_BYTES = len(_MAGIC) + _DIGEST_BYTES
_SUFFIX = ".o"
# An entry counts as used again only after this long, so that hits rarely write.
_TOUCH_SECONDS = 600.0
# A temporary file this old was left by a process that died.
_STALE_SECONDS = 3600.0
# Eviction leaves this share of the limit, so that it does not run at each write.
_KEEP = 0.8
_SCAN_EVERY = 64


def content_key(*parts: str | bytes) -> str:
    """A name for all that decides what an entry holds."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


@functools.cache
def code_salt(*folders: str) -> str:
    """What entries depend on that code in these folders of ours makes: that code, and versions."""
    root = Path(__file__).parent.parent
    files = [x for name in folders for x in (root / name).rglob("*.py")]
    code = content_key(*[x.read_bytes() for x in sorted(files)])
    return repr((sys.version, torch.__version__, code))


def object_cache() -> ObjectCache:
    """The one that the settings name."""
    return _opened(settings().cache_dir, settings().cache_size)


class ObjectCache:
    """A folder of object code with a limit in bytes; the entries used longest ago go first.

    used   keys of entries that this process has read or written

    `get` and `put` may be called from any thread. They remember what went wrong instead of warning:
    `report` warns, in the thread of the user's call.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.used: dict[str, None] = {}
        self.readable = self.writable = limit_bytes > 0
        self._problem: str | None = None
        self._puts = 0
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._opened = False

    def get(self, key: str) -> bytes | None:
        """The entry, or None if it is not there or damaged."""
        if not self._open():
            return None
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._stop(f"cannot read {path}: {error.strerror or error}", reading=True)
            return None
        code = data[_HEADER_BYTES:]
        if data[:_HEADER_BYTES] != _MAGIC + _checksum(code):
            publish("cache", key, "damaged entry, built again")
            return None
        self._touch(path)
        self.used[key] = None
        return code

    def put(self, key: str, code: bytes) -> None:
        """Keep an entry."""
        if not self._open() or not self.writable:
            return
        temporary = ""
        try:
            handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self.folder)
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + _checksum(code) + code)
            os.replace(temporary, self._path(key))
        except OSError as error:
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._stop(f"cannot write to {self.folder}: {error.strerror or error}")
            return
        with self._lock:
            self.used[key] = None
            due = self._puts % _SCAN_EVERY == 0
            self._puts += 1
        if due:
            self.evict()

    def evict(self) -> None:
        """Delete the entries used longest ago until the folder fits its limit."""
        entries: list[tuple[float, int, str]] = []
        now = time.time()
        try:
            with os.scandir(self.folder) as found:
                for entry in found:
                    # another process may delete it at the same time
                    with contextlib.suppress(FileNotFoundError):
                        facts = entry.stat()
                        if entry.name.endswith(_SUFFIX):
                            entries.append((facts.st_mtime, facts.st_size, entry.path))
                        elif now - facts.st_mtime > _STALE_SECONDS:
                            os.unlink(entry.path)
            total = sum(size for _, size, _ in entries)
            if total <= self.limit_bytes:
                return
            for _, size, path in sorted(entries):
                if total <= self.limit_bytes * _KEEP:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size
                publish("cache", Path(path).stem, f"evicted, {size} bytes")
        except OSError as error:
            self._stop(f"cannot make room in {self.folder}: {error.strerror or error}")

    def report(self) -> None:
        """Warn about what went wrong, once."""
        with self._lock:
            problem, self._problem = self._problem, None
        if problem is not None:
            without = "" if self.readable else "reading or "
            warn(
                CacheWarning,
                f"the object code cache {problem}",
                did=f"went on without {without}writing it",
                remedy="FUSEE_CACHE_DIR=<a folder of yours>, or FUSEE_CACHE_SIZE=0 for none",
            )

    def _path(self, key: str) -> Path:
        return self.folder / (key + _SUFFIX)

    def _open(self) -> bool:
        """Make the folder at the first use. Whether the cache can be read."""
        if not self._opened:
            with self._opening:
                if not self._opened:
                    self._prepare()
                self._opened = True
        return self.readable

    def _prepare(self) -> None:
        if not self.readable:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.folder.stat()
        except OSError as error:
            self._stop(f"cannot use {self.folder}: {error.strerror or error}", reading=True)
            return
        ours = not hasattr(os, "getuid") or facts.st_uid in (os.getuid(), 0)
        if not ours or (os.name == "posix" and facts.st_mode & stat.S_IWOTH):
            self._stop(f"cannot trust {self.folder}: other users may write to it", reading=True)

    def _stop(self, problem: str, reading: bool = False) -> None:
        with self._lock:
            if self.writable or (reading and self.readable):
                self._problem = problem
            self.writable = False
            self.readable = self.readable and not reading

    def _touch(self, path: Path) -> None:
        # in a folder that we may only read, entries keep their age
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _TOUCH_SECONDS:
                os.utime(path)


class Sidecar:
    """Entries that belong to another one: what others make of it."""

    def __init__(self, cache: ObjectCache, key: str) -> None:
        """key   of the other entry, by what it holds"""
        self.cache, self.key = cache, key

    def get(self, name: str) -> bytes | None:
        """What was kept under a name: a text of any length that says all it depends on."""
        return self.cache.get(content_key(self.key, name))

    def put(self, name: str, data: bytes) -> None:
        self.cache.put(content_key(self.key, name), data)


def _checksum(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_DIGEST_BYTES).digest()


@functools.cache
def _opened(folder: Path, limit_bytes: int) -> ObjectCache:
    return ObjectCache(folder, limit_bytes)


# ---------------------------------------------------------------------------- artifacts
# What this process took from the cache on disk or wrote there, as bytes for another machine.
#
#   magic, checksum, length of the table, table (JSON: versions, [key, size] of each entry), entries
#
# Entries are code, and are run: load only what you trust. A key says all that its entry depends on,
# so that an entry for another processor or version is never used.

_BUNDLE_MAGIC = b"fusee-artifacts-1\n"
_LENGTH_BYTES = 8
# Not of our cache: what torch.compiler.save_cache_artifacts gave.
_TORCHS = "torch"


class CacheInfo(NamedTuple):
    """keys of the entries, and how many bytes they take."""

    keys: tuple[str, ...]
    size: int


def save(torchs: bytes | None = None) -> tuple[bytes, CacheInfo] | None:
    """All entries that this process used; None if there are none.

    torchs   the same for TorchInductor
    """
    cache = object_cache()
    found = {key: data for key in cache.used if (data := cache.get(key)) is not None}
    entries = found if torchs is None else {**found, _TORCHS: torchs}
    if not entries:
        return None
    table = json.dumps([_versions(), [[key, len(data)] for key, data in entries.items()]]).encode()
    content = b"".join([len(table).to_bytes(_LENGTH_BYTES), table, *entries.values()])
    return _BUNDLE_MAGIC + _digest(content) + content, _info(found)


def load(artifacts: bytes) -> tuple[CacheInfo | None, bytes | None]:
    """Put the entries where this process finds them, and the next ones; and TorchInductor's.

    None if other versions made them.

    raises   OptionError if it is not what `save` gave, or damaged
    """
    start = len(_BUNDLE_MAGIC) + _DIGEST_BYTES
    content = artifacts[start:] if isinstance(artifacts, bytes) else b""
    if not content or artifacts[:start] != _BUNDLE_MAGIC + _digest(content):
        raise OptionError(
            "these are no artifacts that save_cache_artifacts() gave, or they are damaged",
            did="loaded nothing",
            remedy="the first of the two things that it returns, bytes, as it is",
        )
    at = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES])
    versions, rows = json.loads(content[_LENGTH_BYTES:at])
    entries: dict[str, bytes] = {}
    for key, size in rows:
        entries[key], at = content[at : at + size], at + size
    torchs = entries.pop(_TORCHS, None)
    others = [f"{k}, here {now}" for k, now in zip(versions, _versions()) if k != now]
    if others:
        text = f"the cache artifacts are of no use here: made by {'; '.join(others)}"
        warn(CacheWarning, text, did="loaded nothing", remedy="save them anew")
        return None, torchs
    cache = object_cache()
    for key, data in entries.items():
        cache.put(key, data)
    cache.report()
    return _info(entries), torchs


def _info(entries: dict[str, bytes]) -> CacheInfo:
    return CacheInfo(tuple(entries), sum(map(len, entries.values())))


def _versions() -> list[str]:
    python = ".".join(map(str, sys.version_info[:2]))
    return [
        f"torch {torch.__version__}",
        f"Python {python}",
        f"{sys.platform} {platform.machine()}",
    ]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
