"""What this process took from the cache on disk or wrote there, as bytes for another machine.

    magic, checksum, length of the table, table (JSON: versions, [key, size] of each entry), entries

Entries are code, and are run: load only what you trust. A key says all that its entry depends on,
so that an entry for another processor or version is never used.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from typing import NamedTuple

import torch

from fusee.errors import CacheWarning, OptionError, warn
from fusee.runtime.cache import object_cache

__all__ = ["CacheInfo", "load", "save"]

_MAGIC = b"fusee-artifacts-1\n"
_DIGEST_BYTES = 16
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
    return _MAGIC + _digest(content) + content, _info(found)


def load(artifacts: bytes) -> tuple[CacheInfo | None, bytes | None]:
    """Put the entries where this process finds them, and the next ones; and TorchInductor's.

    None if other versions made them.

    raises   OptionError if it is not what `save` gave, or damaged
    """
    start = len(_MAGIC) + _DIGEST_BYTES
    content = artifacts[start:] if isinstance(artifacts, bytes) else b""
    if not content or artifacts[:start] != _MAGIC + _digest(content):
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
