"""Models read ahead: right and wrong guesses, damaged blobs, threads, forks, a program's end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusee.backends import lookup, resume
from fusee.backends.resume import Ahead
from fusee.errors import CacheWarning
from fusee.runtime import cache
from fusee.runtime.cache import Blobs

ROOT = Path(__file__).parent.parent.parent
INDEX = "index-" + "7" * 34
KEYS = [str(k) * 40 for k in range(8)]


class Model:
    """What the tests' blobs become."""

    def __init__(self, blob: Tensor) -> None:
        self.text = blob.numpy().tobytes().decode()


@pytest.fixture(autouse=True)
def _as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache, "_told", set())
    monkeypatch.setattr(resume, "_all", {})
    yield
    for models in resume._all.values():
        models.drop()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that were read by those who asked for them, not ahead."""
    found: list[str] = []
    read = Blobs.read

    def noting(self: Blobs, key: str, tell: bool = True) -> Tensor | None:
        if tell:
            found.append(key)
        return read(self, key, tell)

    monkeypatch.setattr(Blobs, "read", noting)
    return found


def start(folder: Path, load: Any = Model) -> Ahead:
    return Ahead(Blobs(folder), INDEX, load)


def a_run(folder: Path, keys: list[str]) -> Ahead:
    """What a program that uses these keys leaves in the folder."""
    models = start(folder)
    for key in keys:
        models.blobs.write(key, f"model {key[0]}".encode())
        models.note(key)
    models.finish()
    return models


def settle(models: Ahead) -> None:
    """Until all is read."""
    while models.waiting:
        wait(list(models.begun.values()))
    wait(list(models.begun.values()))


# ------------------------------------------------------------------------------ guesses


def test_what_was_used_is_read_ahead(tmp_path: Path, reads: list[str]) -> None:
    a_run(tmp_path, KEYS[:3])
    models = start(tmp_path)
    settle(models)
    assert [models.get(key).text for key in KEYS[:3]] == ["model 0", "model 1", "model 2"]
    assert reads == [] and models.begun == {}
    assert models.get(KEYS[0]).text == "model 0"  # a second time
    assert reads == KEYS[:1]


def test_the_index_is_written_only_if_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path, KEYS[:3])
    with monkeypatch.context() as patch:
        patch.setattr(Blobs, "write", None)
        models = start(tmp_path)
        for key in [KEYS[1], KEYS[0], KEYS[1], KEYS[2]]:
            models.note(key)
        models.finish()
        start(tmp_path).finish()  # ended before it used any
    models = start(tmp_path)
    models.note(KEYS[0])
    models.finish()
    assert start(tmp_path).expected == KEYS[:1]  # the others no more


def test_a_wrong_guess_drops_the_rest(tmp_path: Path) -> None:
    a_run(tmp_path, KEYS[:4])
    models = start(tmp_path)
    settle(models)
    left = [weakref.ref(models.begun[key].result()) for key in KEYS[1:4]]
    kept = models.get(KEYS[0])
    assert models.get(KEYS[5]) is None
    assert models.begun == {} and kept.text == "model 0"
    assert [ref() for ref in left] == [None] * 3
    assert models.get(KEYS[1]).text == "model 1"
    models.blobs.write(KEYS[5], b"model 5")
    models.note(KEYS[0])
    models.note(KEYS[5])
    assert start(tmp_path).expected == [KEYS[0], KEYS[5]]


def test_a_wrong_guess_ends_the_reading(tmp_path: Path) -> None:
    a_run(tmp_path, KEYS[:4])
    go, loaded = threading.Event(), []

    def load(blob: Tensor) -> Model:
        go.wait(10)
        loaded.append(1)
        return Model(blob)

    models = start(tmp_path, load)
    (present,) = models.begun.values()
    assert models.get(KEYS[5]) is None
    go.set()
    present.result()
    assert len(loaded) == 1 and models.begun == {} and models.waiting == []


def test_one_that_is_being_read_is_waited_for(tmp_path: Path, reads: list[str]) -> None:
    a_run(tmp_path, KEYS[:3])
    go, begun, by = threading.Event(), threading.Event(), []

    def load(blob: Tensor) -> Model:
        by.append(threading.current_thread())
        begun.set()
        if by[-1] is not threading.main_thread():
            go.wait(10)
        return Model(blob)

    models = start(tmp_path, load)
    assert begun.wait(10)
    assert models.get(KEYS[1]).text == "model 1"  # not begun: read here
    assert reads == KEYS[1:2]
    threading.Timer(0.1, go.set).start()
    assert models.get(KEYS[0]).text == "model 0"
    settle(models)
    assert models.get(KEYS[2]).text == "model 2"
    assert reads == KEYS[1:2] and by.count(threading.main_thread()) == 1 and len(by) == 3


def test_what_nobody_asks_for_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path, KEYS[:2])
    monkeypatch.setattr(resume, "_PATIENCE", 0.3)
    models = start(tmp_path)
    settle(models)
    assert models.begun
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.function == models.drop:
            thread.join(10)
    assert models.begun == {}
    assert models.get(KEYS[1]).text == "model 1"


def test_a_quarter_of_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resume._available_bytes() > 0 or sys.platform != "linux"
    size = a_run(tmp_path, KEYS[:4]).blobs.path(KEYS[0]).stat().st_size
    monkeypatch.setattr(resume, "_available_bytes", lambda: 2 * size * 4 * 2)
    models = start(tmp_path)
    settle(models)
    assert sorted(models.begun) == KEYS[:2]
    monkeypatch.setattr(resume, "_available_bytes", lambda: 0)
    models = start(tmp_path)
    assert models.begun == {} and models.get(KEYS[3]).text == "model 3"


def test_a_folder_remembers_a_hundred_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_PROGRAMS", 3)
    for k in range(6):
        monkeypatch.setattr(sys, "argv", ["program", str(k)])
        models = resume.find(tmp_path, "CPU", {}, Model)
        models.blobs.write(KEYS[0], b"model")
        models.note(KEYS[0])
    assert len(list(tmp_path.glob("index-*"))) == 3
    assert len(list(tmp_path.iterdir())) == 4


# ------------------------------------------------------------------------------ failures


def test_an_index_that_is_garbage_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / f"{INDEX}.blob"
    a_run(tmp_path, KEYS[:2])
    whole = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for damaged in (b"", b"\xff" * 99, whole[:-3], whole[:-1] + b"5"):
            path.write_bytes(damaged)
            assert start(tmp_path).expected == []
        Blobs(tmp_path).write(INDEX, b"../../x\n\0\xff\n" + KEYS[1].encode())
        assert start(tmp_path).expected == KEYS[1:2]
        path.unlink()
        path.mkdir()
        assert start(tmp_path).expected == []
    with pytest.warns(CacheWarning, match="cannot be written to.*\n.*will not read models ahead"):
        start(tmp_path).note(KEYS[0])


def test_a_failure_is_met_again_by_who_asks(tmp_path: Path) -> None:
    a_run(tmp_path, KEYS[:2])

    def load(blob: Tensor) -> Model:
        raise OverflowError("refused")

    models = start(tmp_path, load)
    settle(models)
    for _ in range(2):
        with pytest.raises(OverflowError):
            models.get(KEYS[0])


def test_a_blob_that_is_gone_or_damaged(tmp_path: Path) -> None:
    a_run(tmp_path, KEYS[:3])
    (tmp_path / f"{KEYS[0]}.blob").unlink()
    (tmp_path / f"{KEYS[1]}.blob").write_bytes(b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models = start(tmp_path)
        settle(models)
        assert models.get(KEYS[0]) is None
    with pytest.warns(CacheWarning, match="cannot be used") as told:
        assert models.get(KEYS[1]) is None
    assert len(told) == 1 and models.get(KEYS[2]).text == "model 2"


def test_threads_take_each_model_once(tmp_path: Path) -> None:
    a_run(tmp_path, KEYS)
    models = start(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(models.get, KEYS * 4))
    assert [model.text[-1] for model in found] == [key[0] for key in KEYS * 4]
    assert len({id(model) for model in found}) == len(found)
    assert models.begun == {} and models.waiting == []


# ------------------------------------------------------------------------------ processes


def run(program: str, *args: object) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


_SLOW = """
import os, signal, sys, threading, time
from pathlib import Path
from fusee.backends import resume as ahead
from fusee.runtime.cache import Blobs
lock, begun = threading.Lock(), threading.Event()
def load(blob):
    begun.set()
    with lock:
        print("begin", flush=True)
        time.sleep(0.5)
        print("end", flush=True)
    return 1
ahead._all["program"] = models = ahead.Ahead(Blobs(Path(sys.argv[1])), sys.argv[2], load)
begun.wait()
"""

_FORKS = """
if os.fork():
    os.wait()
    assert models.get("1" * 40) == 1
else:
    signal.alarm(20)
    assert models.begun == {} and models.waiting == []
    begun.clear()
    assert models.get("0" * 40) == 1 and models.get("1" * 40) == 1
    print("child", flush=True)
    os._exit(0)
"""


def test_a_program_may_end_at_once(tmp_path: Path) -> None:
    a_run(tmp_path, KEYS)
    assert run(_SLOW, tmp_path, INDEX) == ["begin", "end"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_fork_waits_and_its_child_expects_nothing(tmp_path: Path) -> None:
    a_run(tmp_path, KEYS[:2])
    said = run(_SLOW + _FORKS, tmp_path, INDEX)
    assert said.count("child") == 1 and said[:2] == ["begin", "end"]


# ------------------------------------------------------------------------------ OpenVINO


def two_layers(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(x @ w) + 1, -1) @ w


def compiled(folder: Path, value: float = 1.0, backend: str = "openvino") -> None:
    """As a process of its own would."""
    resume._all.clear()
    w, x = torch.nn.Parameter(torch.full((4, 4), value)), torch.randn(3, 4)
    with torch.no_grad():
        chosen = lookup(backend, {"model_caching": True, "cache_dir": folder})
        with pytest.MonkeyPatch.context() as busy:
            # what waits for a thread would be read where it is asked for
            busy.setattr(Future, "cancel", lambda future: False)
            call = chosen(fx.symbolic_trace(two_layers), [x, w])
        torch.testing.assert_close(call(x, w), two_layers(x, w))


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.filterwarnings("ignore:.*TorchScript")
def test_openvino_takes_what_was_read(tmp_path: Path, backend: str, reads: list[str]) -> None:
    pytest.importorskip("openvino")
    compiled(tmp_path, backend=backend)
    assert len(reads) == 1  # there was none
    compiled(tmp_path, backend=backend)
    assert len(reads) == 1
    compiled(tmp_path, 0.5, backend)
    (models,) = resume._all.values()
    assert len(reads) == 2 and models.begun == {}
    compiled(tmp_path, 0.5, backend)
    assert len(reads) == 2


def test_openvino_reads_nothing_before_the_first_graph(tmp_path: Path) -> None:
    """A forked child could use no OpenVINO after a model that its parent loaded was freed."""
    pytest.importorskip("openvino")
    compiled(tmp_path)
    resume._all.clear()
    lookup("openvino", {"model_caching": True, "cache_dir": tmp_path})
    assert resume._all == {}


def test_openvino_says_once_that_a_blob_is_damaged(tmp_path: Path, reads: list[str]) -> None:
    pytest.importorskip("openvino")
    compiled(tmp_path)
    Blobs(tmp_path).write(reads[0], b"not a model of this OpenVINO")
    with pytest.warns(CacheWarning, match="cannot be used") as told:
        compiled(tmp_path)
    assert len([w for w in told if w.category is CacheWarning]) == 1
    compiled(tmp_path)
    assert len(reads) == 2  # written anew, and read ahead


_PROGRAM = """
import json, sys, torch
from pathlib import Path
from torch import nn
import fusee
from fusee.runtime.cache import Blobs
asked, read = [], Blobs.read
Blobs.read = lambda self, key, tell=True: tell and asked.append(key) or read(self, key, tell)
torch.manual_seed(0)
m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
x = torch.randn(1, 3, 12, 12)
options = {"model_caching": True, "cache_dir": sys.argv[1]}
call = fusee.compile(m, backend="openvino", options=options)
if (Path(sys.argv[1]) / "end").exists():
    sys.exit()
with torch.no_grad():
    print(json.dumps([call(x).sum().item(), len(asked)]))
"""


def test_another_process_reads_ahead(tmp_path: Path, cache_dir: Path) -> None:
    pytest.importorskip("openvino")  # in a cache of its own: other tests keep this capture, too
    first, second = [json.loads(run(_PROGRAM, tmp_path)[-1]) for _ in range(2)]
    assert (first[1], second[1]) == (1, 0) and first[0] == second[0]
    (tmp_path / "end").touch()
    assert run(_PROGRAM, tmp_path) == []


def test_what_is_not_strided_has_no_name() -> None:
    dense = torch.eye(3)
    assert resume.name_on_disk(["engine"], [dense]) is not None
    assert resume.name_on_disk(["engine"], [dense, dense.to_sparse()]) is None
