"""Compiled models on disk, for engines that can export theirs: one file for each key.

A file begins with a mark and the digest of what follows, and is written in one step. What cannot
be read or written is told once for each folder, and nothing is lost but time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from fusee.errors import CacheWarning, layout

__all__ = ["Blobs", "digest"]

_MARK = b"fusee blob 1\n"
_told: set[tuple[str, str]] = set()


def digest(parts: Iterable[str | bytes | Tensor | None]) -> str:
    """A name for texts and tensors, contents and geometry included."""
    found = hashlib.blake2b(digest_size=20)
    for part in parts:
        if isinstance(part, Tensor):
            x = part.detach()
            found.update(f"{x.dtype} {tuple(x.shape)} {tuple(x.stride())}".encode())
            if x.numel():
                found.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            found.update(part if isinstance(part, bytes) else str(part).encode())
        found.update(b"\0")
    return found.hexdigest()


class Blobs:
    """The blobs in one folder, which is made when the first is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> bytes | None:
        """The blob, or None if there is none that is whole."""
        path = self._path(key)
        try:
            found = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._tell("cannot be read", f"{error.strerror} ({path})")
            return None
        start = len(_MARK) + 20
        blob = found[start:]
        if found[: len(_MARK)] == _MARK and found[len(_MARK) : start] == _sum(blob):
            return blob
        self.refuse(key, "it is truncated or not ours")
        return None

    def refuse(self, key: str, reason: str) -> None:
        """Say that a blob is of no use; it is written anew."""
        self._tell("has a compiled model that cannot be used", f"{reason} ({self._path(key)})")

    def skip(self, reason: str) -> None:
        """Say that nothing can be kept."""
        self._tell("is of no use", reason)

    def write(self, key: str, blob: bytes) -> None:
        """Keep a blob; a folder that cannot be written to is no error."""
        temporary: str | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file, temporary = tempfile.mkstemp(dir=self.folder, suffix=".part")
            with os.fdopen(file, "wb") as out:
                out.write(_MARK + _sum(blob))
                out.write(blob)
            os.replace(temporary, self._path(key))
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._tell("cannot be written to", error.strerror or str(error))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.blob"

    def _tell(self, what: str, reason: str) -> None:
        if (str(self.folder), what) in _told:
            return
        _told.add((str(self.folder), what))
        warnings.warn(
            layout(
                CacheWarning,
                f"the model cache {self.folder} {what}: {reason}",
                did="compiled the model anew",
                remedy="cache_dir names another folder; model_caching=False does without one",
            ),
            CacheWarning,
            stacklevel=3,
        )


def _sum(blob: bytes) -> bytes:
    return hashlib.blake2b(blob, digest_size=20).digest()
