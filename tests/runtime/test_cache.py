"""The object cache on disk, and each way in which a disk can fail."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusee.config import settings
from fusee.errors import CacheWarning
from fusee.runtime import jit
from fusee.runtime.cache import ObjectCache, content_key
from tests.runtime.kernels import DO_NOTHING, numbered

KEY = content_key("a", "b")


@pytest.fixture
def disk(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path / "cache", 10_000)


def test_keys_tell_parts_apart() -> None:
    assert content_key("ab", "c") != content_key("a", "bc")
    assert content_key("ab") == content_key("ab")


def test_what_was_put_is_got(disk: ObjectCache) -> None:
    assert disk.get(KEY) is None
    disk.put(KEY, b"code")
    assert disk.get(KEY) == b"code"
    assert ObjectCache(disk.folder, 10_000).get(KEY) == b"code"
    assert disk.folder.stat().st_mode & 0o777 == 0o700
    disk.report()


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "header"])
def test_damaged_entries_are_built_again(disk: ObjectCache, damage: str) -> None:
    disk.put(KEY, b"some object code")
    path = next(disk.folder.glob("*.o"))
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        del data[-3:]
    elif damage == "flip":
        data[-1] ^= 1
    elif damage == "header":
        data[0] ^= 1
    else:
        data.clear()
    path.write_bytes(data)
    assert disk.get(KEY) is None
    disk.put(KEY, b"some object code")
    assert disk.get(KEY) == b"some object code"
    disk.report()


def test_oldest_go_first(disk: ObjectCache) -> None:
    disk.put("first", b"")
    for k in range(20):
        disk.put(f"key{k:02}", bytes(1000))
        os.utime(disk.folder / f"key{k:02}.o", (k + 1, k + 1))
    stale = disk.folder / ".new-dead"
    stale.write_bytes(b"left by a process that died")
    os.utime(stale, (1, 1))
    disk.evict()
    left = sorted(path.name for path in disk.folder.iterdir())
    assert "first.o" in left
    assert "key00.o" not in left
    assert "key19.o" in left
    assert ".new-dead" not in left
    assert sum(path.stat().st_size for path in disk.folder.iterdir()) <= 8000


def test_a_used_entry_stays(disk: ObjectCache) -> None:
    for k in range(9):
        disk.put(f"key{k}", bytes(1000))
        os.utime(disk.folder / f"key{k}.o", (1000 + k, 1000 + k))
    assert disk.get("key0") is not None
    disk.limit_bytes = 5000
    disk.evict()
    assert disk.get("key0") is not None
    assert disk.get("key1") is None


def test_size_zero_turns_it_off(tmp_path: Path) -> None:
    disk = ObjectCache(tmp_path / "cache", 0)
    disk.put(KEY, b"code")
    assert disk.get(KEY) is None
    assert not disk.folder.exists()
    disk.report()


def one_warning(disk: ObjectCache, words: str) -> None:
    with pytest.warns(CacheWarning, match=words) as caught:
        disk.report()
    assert len(caught) == 1
    disk.put("another", b"code")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disk.report()


def test_disk_full(disk: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.put("before", b"code")

    class Full:
        def __init__(self, handle: int, mode: str) -> None:
            os.close(handle)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *exc: object) -> None:
            return None

        def writelines(self, data: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", Full)
    disk.put(KEY, b"code")
    assert not list(disk.folder.glob(".new-*"))
    assert disk.get("before") == b"code"
    one_warning(disk, "No space left")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip("may not mount here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    disk = ObjectCache(tiny_disk, 1_000_000)
    for k in range(10):
        disk.put(f"key{k}", os.urandom(4000))
    one_warning(disk, "No space left")
    assert disk.get("key0") is not None


def refuse(*args: object, **kwargs: object) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_read_only_folder(disk: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.put(KEY, b"code")
    os.utime(disk.folder / f"{KEY}.o", (1, 1))
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    assert disk.get(KEY) == b"code"
    disk.put("other", b"code")
    one_warning(disk, "Permission denied")
    assert disk.get(KEY) == b"code"


def test_unreadable_entry(disk: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.put(KEY, b"code")
    monkeypatch.setattr(Path, "open", refuse)
    assert disk.get(KEY) is None
    one_warning(disk, "Permission denied")


def test_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    disk = ObjectCache(tmp_path / "file" / "cache", 10_000)
    assert disk.get(KEY) is None
    disk.put(KEY, b"code")
    one_warning(disk, "FUSEE_CACHE_DIR")


def test_folder_that_others_may_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    disk = ObjectCache(folder, 10_000)
    disk.put(KEY, b"code")
    assert not list(folder.iterdir())
    one_warning(disk, "other users may write to it")


def test_compiling_goes_on_without_a_cache(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    environment.setenv("FUSEE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    settings.cache_clear()
    with pytest.warns(CacheWarning) as caught:
        assert jit.compile_one(numbered(DO_NOTHING, 200)).address
        assert jit.compile_one(numbered(DO_NOTHING, 201)).address
    assert len(caught) == 1


def test_threads_read_write_and_evict(disk: ObjectCache) -> None:
    failures: list[BaseException] = []
    stop = time.monotonic() + 0.5

    def work(number: int) -> None:
        try:
            k = 0
            while time.monotonic() < stop:
                k += 1
                key = f"key{k % 7}"
                disk.put(key, key.encode() * 500)
                found = disk.get(key)
                assert found is None or found == key.encode() * 500
                if k % 10 == number:
                    disk.evict()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    disk.report()
