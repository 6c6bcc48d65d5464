"""What is kept on disk, by content: object code and captures, and compiled models of engines; and
what the processes of a job have seen vary.

Whatever is wrong with a folder costs one warning and the cache, never the call. A folder of object
code that other users may write to is refused, since its files are run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import stat
import struct
import sys
import tempfile
import threading
import time
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fusee.config import settings
from fusee.errors import CacheWarning, OptionError, warn
from fusee.log import publish

# Mark, check, length, key: 64 bytes, so that what follows is as aligned as the memory it is read
# into.
_HEADER = struct.Struct("<12s I Q 40s")
_MARK = b"fusee blob 3"
_PIECE = 1 << 23
_TEMPORARY = ".new-"
# An entry counts as used again only after this long, so that hits rarely write.
_TOUCH_SECONDS = 600.0
# A temporary file this old was left by a process that died.
_STALE_SECONDS = 3600.0
# Eviction leaves this share of the limit, so that it does not run at each write.
_KEEP = 0.8
_SCAN_EVERY = 64


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, while that lives. Needs no NumPy."""
    return memoryview((ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr()))


def content_key(*parts: str | bytes | Tensor | None) -> str:
    """A name for all that decides what an entry holds: texts, and tensors with their geometry.

    Tensors are digested in pieces side by side; SHA-256, for which processors have instructions.
    """
    pieces: list[bytes | memoryview] = []
    kept: list[Tensor] = []  # for as long as their bytes are read
    for part in parts:
        if not isinstance(part, Tensor):
            pieces.append(part if isinstance(part, bytes) else str(part).encode())
            continue
        x = part.detach()
        pieces.append(f"{x.dtype} {tuple(x.shape)} {tuple(x.stride())}".encode())
        if x.numel():
            kept.append(x := x.contiguous())
            content = bytes_of(x)
            pieces += (content[k : k + _PIECE] for k in range(0, len(content), _PIECE))
    digests = None
    if any(isinstance(part, Tensor) for part in parts):
        # the program may end, and begin no threads
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(torch.get_num_threads()) as pool:
            digests = list(pool.map(_digest, pieces))
    return _digest(b"".join(digests or map(_digest, pieces))).hex()[:40]


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()


@functools.lru_cache(maxsize=4096)
def code_key(code: types.CodeType, placed: bool = True) -> str:
    """A name for what a function does; `placed`: and for the lines at which it does it."""
    consts = [
        code_key(x, placed)
        if isinstance(x, types.CodeType)
        else repr(sorted(map(repr, x)) if isinstance(x, frozenset) else x)
        for x in code.co_consts
    ]
    place = (code.co_filename, code.co_firstlineno, code.co_linetable) if placed else ()
    parts = (
        code.co_code, consts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
        code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount,
        code.co_exceptiontable, *place,
    )  # fmt: skip
    return hashlib.sha1(repr(parts).encode()).hexdigest()


@functools.cache
def code_salt() -> str:
    """What entries depend on that Python code of ours decides: all of that, and versions."""
    files = Path(__file__).parent.parent.rglob("*.py")
    code = content_key(*[x.read_bytes() for x in sorted(files)])
    return repr((sys.version, torch.__version__, code))


def object_cache() -> ObjectCache:
    """The one that the settings name."""
    return _opened(settings().cache_dir, settings().cache_size)


def write_whole(path: Path, *pieces: bytes) -> None:
    """Write a file under a temporary name and rename it: nobody sees a part. raises OSError"""
    handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class FileStore:
    """Entries in one folder, a file for each key: a header with a checksum, then the content."""

    suffix: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """An entry's file."""
        return self.folder / (key + self.suffix)

    def load(self, key: str) -> Tensor | None:
        """An entry's bytes, read once; None if they are damaged. raises OSError"""
        with self.path(key).open("rb") as file:
            header = file.read(_HEADER.size)
            size = os.fstat(file.fileno()).st_size - len(header)
            content = torch.empty(size, dtype=torch.uint8)
            count = file.readinto(bytes_of(content))
        is_whole = count == size and header == _header(key, bytes_of(content))
        return content if is_whole else None

    def save(self, key: str, content: bytes) -> None:
        """Write an entry. raises OSError"""
        write_whole(self.path(key), _header(key, content), content)

    def entries(self, prefix: str = "") -> list[tuple[float, int, Path]]:
        """Time, size and path of the entries whose keys begin so, the oldest first.

        Temporary files that were left are deleted. raises OSError
        """
        found: list[tuple[float, int, Path]] = []
        now = time.time()
        with os.scandir(self.folder) as files:
            for file in files:
                # another process may delete it at the same time
                with contextlib.suppress(FileNotFoundError):
                    facts = file.stat()
                    if file.name.endswith(self.suffix) and file.name.startswith(prefix):
                        found.append((facts.st_mtime, facts.st_size, Path(file.path)))
                    elif file.name.startswith(_TEMPORARY) and now - facts.st_mtime > _STALE_SECONDS:
                        os.unlink(file.path)
        return sorted(found)


def _header(key: str, content: bytes | memoryview) -> bytes:
    return _HEADER.pack(_MARK, zlib.crc32(content), len(content), key.encode())


class ObjectCache(FileStore):
    """A folder of object code with a limit in bytes; the entries used longest ago go first.

    used   keys of entries that this process has read or written

    `get` and `put` may be called from any thread. They remember what went wrong instead of warning:
    `report` warns, in the thread of the user's call.
    """

    suffix = ".o"

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        super().__init__(folder)
        self.limit_bytes = limit_bytes
        self.used: dict[str, None] = {}
        self.readable = self.writable = limit_bytes > 0
        self._problem: str | None = None
        self._puts = 0
        self._lock = threading.Lock()
        if self.readable:
            self._prepare()

    def get(self, key: str) -> bytes | None:
        """The entry, or None if it is not there or damaged."""
        if not self.readable:
            return None
        path = self.path(key)
        try:
            content = self.load(key)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._stop(f"cannot read {path}: {error.strerror or error}", reading=True)
            return None
        if content is None:
            publish("cache", key, "damaged entry, built again")
            return None
        # in a folder that we may only read, entries keep their age
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _TOUCH_SECONDS:
                os.utime(path)
        self.used[key] = None
        return bytes_of(content).tobytes()

    def put(self, key: str, code: bytes) -> None:
        """Keep an entry."""
        if not self.writable:
            return
        try:
            self.save(key, code)
        except OSError as error:
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
        try:
            entries = self.entries()
            total = sum(size for _, size, _ in entries)
            if total <= self.limit_bytes:
                return
            for _, size, path in entries:
                if total <= self.limit_bytes * _KEEP:
                    break
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                total -= size
                publish("cache", path.stem, f"evicted, {size} bytes")
        except OSError as error:
            self._stop(f"cannot make room in {self.folder}: {error.strerror or error}")

    def report(self) -> None:
        """Warn about what went wrong, once."""
        with self._lock:
            problem, self._problem = self._problem, None
        if problem is not None:
            did = f"went on without {'' if self.readable else 'reading or '}writing it"
            remedy = "FUSEE_CACHE_DIR=<a folder of yours>, or FUSEE_CACHE_SIZE=0 for none"
            warn(CacheWarning, f"the object code cache {problem}", did=did, remedy=remedy)

    def _prepare(self) -> None:
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


class Sidecar:
    """Entries that belong to another one: what others make of it.

    key      of the other entry, by what it holds
    is_open  whether that is a graph with open sizes, of which this process may have others
    """

    def __init__(self, cache: ObjectCache, key: str, is_open: bool = False) -> None:
        self.cache, self.key, self.is_open = cache, key, is_open

    def get(self, name: str) -> bytes | None:
        """What was kept under a name: a text of any length that says all it depends on."""
        return self.cache.get(content_key(self.key, name))

    def put(self, name: str, data: bytes) -> None:
        self.cache.put(content_key(self.key, name), data)


# In the meta of a graph that runs in parts: how many calls stand before each but the first. None:
# it runs as it was captured.
CUTS = "fusee_cuts"
# In the meta of a graph: what tells how it can run in parts one of which is a call of it, and how
# often it, and parts of it, may still be parted.
APART, MOST_CUTS = "fusee_apart", 8
# In the meta of a graph's output: which of its results become gradients of leaves, in place of
# what the leaves have by then.
GRADIENTS = "fusee_gradients"
# Says in the meta of a graph that another process will ask for what is made of it; and whether it
# has open sizes, as Sidecar.
KEPT = "fusee_kept"


@dataclass(frozen=True)
class Unread:
    """A captured graph that another process wrote down, and that is read when it is needed.

    count      how many inputs it has
    forward    runs it, operator by operator
    recompile  compiles it for such inputs
    """

    count: int
    forward: Callable[..., Any]
    recompile: Callable[[Sequence[Any]], Callable[..., Any]]


@runtime_checkable
class GraphCompiler(Protocol):
    """What compiles captured graphs, and can use what an earlier process made of them.

    Capture takes any `(gm, example_inputs) -> callable` for that; this one it tells more.

    serves_copies   what it gives may be called with other parameters, those of a copied module
    """

    serves_copies: bool

    def __call__(self, gm: Any, example_inputs: Sequence[Any], /) -> Callable[..., Any]: ...

    def begin(self) -> None:
        """A capture begins: files may be read meanwhile."""

    def resume(
        self, sidecar: Sidecar, examples: Sequence[Any], graph: Unread
    ) -> Callable[..., Any] | None:
        """What an earlier process kept beside a capture; None if it is of no use."""


@runtime_checkable
class KeptGraph(Protocol):
    """What a GraphCompiler gives.

    kept   writes down what another process may make of it, now and as more comes; None: nothing
    """

    kept: Callable[[Sidecar], object] | None


_told: set[tuple[str, str]] = set()


class Blobs(FileStore):
    """Compiled models of an engine in one folder, which is made when the first is written.

    What cannot be read or written is told once for each folder, and nothing is lost but time.
    """

    suffix = ".blob"

    def read(self, key: str, tell: bool = True) -> Tensor | None:
        """The blob's bytes, or None if there is none that is whole."""
        path = self.path(key)
        try:
            blob = self.load(key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if tell:
                self.tell("cannot be read", f"{error.strerror} ({path})")
            return None
        if blob is None and tell:
            self.refuse(key, "it is truncated or not ours")
        return blob

    def refuse(self, key: str, reason: str) -> None:
        """Say that a blob is of no use; it is written anew."""
        self.tell("has a compiled model that cannot be used", f"{reason} ({self.path(key)})")

    def write(self, key: str, blob: bytes, did: str = "compiled the model anew") -> None:
        """Keep a blob; a folder that cannot be written to is no error. did: what goes on then"""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.save(key, blob)
        except OSError as error:
            self.tell("cannot be written to", error.strerror or str(error), did)

    def tell(self, what: str, reason: str, did: str = "compiled the model anew") -> None:
        """Warn, once for each folder."""
        if (str(self.folder), what) not in _told:
            _told.add((str(self.folder), what))
            warn(
                CacheWarning,
                f"the model cache {self.folder} {what}: {reason}",
                did=did,
                remedy="cache_dir names another folder; model_caching=False does without one",
            )


_opened = functools.cache(ObjectCache)


# ---------------------------------------------------------------------------- artifacts
# What this process took from the cache on disk or wrote there, as bytes for another machine.
#
#   magic, checksum, length of the table, table (JSON: versions, [key, size] of each entry), entries
#
# Entries are code, and are run: load only what you trust. A key says all that its entry depends on,
# so that an entry for another processor or version is never used.

_BUNDLE_MAGIC = b"fusee-artifacts-2\n"
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
    start = len(_BUNDLE_MAGIC) + hashlib.sha256().digest_size
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
    where = f"{sys.platform} {platform.machine()}"
    return [f"torch {torch.__version__}", f"Python {python}", where]


# ---------------------------------------------------------------------------- jobs
# What the processes of a job have seen vary, kept beside the cache under the job's name, as text.
#
#     jobs/NAME/1f0c2a9d8e7b6a54.json
#
# Ranks and restarts of a job share it. Whoever has something new writes all that is known as
# another file, named after its content, and then deletes the files that it has read, which say
# less. So processes need no lock: in any order, the union of what is there says all.
#
# source   torch/_dynamo/pgo.py, which keeps a file for each rank

_JOB_FORMAT = "fusee job 1"
_MOST_VALUES = 8  # values that are listed of each; two show that it varies

# By function: where it begins, and by the words of an argument's size the values that it had.
_Rows = dict[str, tuple[str, dict[str, list[Any]]]]


def job_named(torchs: str) -> Job | None:
    """The job that FUSEE_JOB_ID names, or torch's own setting; None if no one does."""
    chosen = settings()
    name = chosen.job_id or torchs
    return _jobs(chosen.cache_dir / "jobs", name) if name and chosen.cache_size else None


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
                    "format": _JOB_FORMAT,
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
                known[words] = sorted({*known.get(words, ()), *seen})[:_MOST_VALUES]
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
                said = json.loads(text)
                if said["format"] != _JOB_FORMAT:
                    raise ValueError(f"its format is {said['format']!r}, not {_JOB_FORMAT!r}")
                given = said["functions"].items()
                rows = {name: (row["at"], dict(row["varies"])) for name, row in given}
                for at, varies in rows.values():
                    values = [x for seen in varies.values() for x in seen]
                    if type(at) is not str or any(type(x) not in (int, float) for x in values):
                        raise ValueError("a value is no number")
                self._add(rows)
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


_jobs = functools.cache(Job)
