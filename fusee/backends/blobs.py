"""Compiled models on disk, for engines that can export theirs: one file for each key.

A file begins with a mark and a check of what follows, and is written in one step. What cannot be
read or written is told once for each folder, and nothing is lost but time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fusee.errors import CacheWarning, warn

__all__ = ["Blobs", "digest"]

# Mark, check, length, key: 64 bytes, so that what follows is as aligned as the memory it is read
# into.
_HEADER = struct.Struct("<12s I Q 40s")
_MARK = b"fusee blob 3"
_PIECE = 1 << 23
_DID = "compiled the model anew"
_told: set[tuple[str, str]] = set()


def digest(parts: Iterable[str | bytes | Tensor | None]) -> str:
    """A name for texts and tensors, contents and geometry included.

    Pieces are digested side by side; SHA-256, for which processors have instructions.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        found = b"".join(pool.map(lambda piece: hashlib.sha256(piece).digest(), _pieces(parts)))
    return hashlib.sha256(found).hexdigest()[:40]


def _pieces(parts: Iterable[str | bytes | Tensor | None]) -> Iterator[bytes | memoryview]:
    for part in parts:
        if not isinstance(part, Tensor):
            yield part if isinstance(part, bytes) else str(part).encode()
            continue
        x = part.detach()
        yield f"{x.dtype} {tuple(x.shape)} {tuple(x.stride())}".encode()
        if x.numel():
            content = x.contiguous().view(-1).view(torch.uint8).numpy().data
            yield from (content[k : k + _PIECE] for k in range(0, len(content), _PIECE))


class Blobs:
    """The blobs in one folder, which is made when the first is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def size(self, key: str) -> int:
        """Bytes of a blob's file, 0 if there is none."""
        try:
            return self._path(key).stat().st_size
        except OSError:
            return 0

    def read(self, key: str, tell: bool = True) -> Tensor | None:
        """The blob's bytes, or None if there is none that is whole."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER.size)
                blob = torch.empty(os.fstat(file.fileno()).st_size - len(header), dtype=torch.uint8)
                count = file.readinto(blob.numpy().data)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if tell:
                self._tell("cannot be read", f"{error.strerror} ({path})")
            return None
        if count == blob.numel() and header == _header(key, blob.numpy().data):
            return blob
        if tell:
            self.refuse(key, "it is truncated or not ours")
        return None

    def refuse(self, key: str, reason: str) -> None:
        """Say that a blob is of no use; it is written anew."""
        self._tell("has a compiled model that cannot be used", f"{reason} ({self._path(key)})")

    def skip(self, reason: str) -> None:
        """Say that nothing can be kept."""
        self._tell("is of no use", reason)

    def write(self, key: str, blob: bytes, did: str = _DID) -> None:
        """Keep a blob; a folder that cannot be written to is no error. did: what goes on then"""
        temporary: str | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file, temporary = tempfile.mkstemp(dir=self.folder, suffix=".part")
            with os.fdopen(file, "wb") as out:
                out.write(_header(key, blob))
                out.write(blob)
            os.replace(temporary, self._path(key))
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._tell("cannot be written to", error.strerror or str(error), did)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.blob"

    def _tell(self, what: str, reason: str, did: str = _DID) -> None:
        if (str(self.folder), what) in _told:
            return
        _told.add((str(self.folder), what))
        warn(
            CacheWarning,
            f"the model cache {self.folder} {what}: {reason}",
            did=did,
            remedy="cache_dir names another folder; model_caching=False does without one",
        )


def _header(key: str, blob: bytes | memoryview) -> bytes:
    return _HEADER.pack(_MARK, zlib.crc32(blob), len(blob), key.encode())
