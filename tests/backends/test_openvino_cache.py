"""Model caching of the backend openvino: a second process, damaged blobs, folders of no use."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusee.backends import lookup
from fusee.backends import openvino as api
from fusee.backends.openvino import graph
from fusee.errors import CacheWarning
from fusee.runtime import cache
from fusee.runtime.cache import Blobs, content_key
from tests.backends.engine_calls import printed

pytest.importorskip("openvino")


def two_layers(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(x @ w) + 1, -1) @ w


def compiled(
    folder: Path,
    w: Tensor | None = None,
    rows: int = 3,
    backend: str = "openvino",
    **options: object,
) -> Any:
    gm = fx.symbolic_trace(two_layers)
    given = {"model_caching": True, "cache_dir": folder, **options}
    w = torch.nn.Parameter(torch.ones(4, 4)) if w is None else w
    x = torch.randn(rows, 4)
    with torch.no_grad():
        call = lookup(backend, given)(gm, [x, w])
        torch.testing.assert_close(call(x, w), two_layers(x, w))
    return call


def models(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith("index-")]


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each model that was not found on disk."""
    found: list[str] = []
    convert = graph.convert_fx

    def counting(*args: Any) -> Any:
        found.append("converted")
        return convert(*args)

    monkeypatch.setattr(graph, "convert_fx", counting)
    return found


@pytest.fixture(autouse=True)
def _told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_told", set())


def test_the_second_time_nothing_is_converted(tmp_path: Path, conversions: list[str]) -> None:
    compiled(tmp_path)
    compiled(tmp_path)
    assert len(conversions) == 1


def test_what_the_key_depends_on(
    tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tmp_path)
    compiled(tmp_path, torch.nn.Parameter(torch.full((4, 4), 2.0)))
    compiled(tmp_path, config={"NUM_STREAMS": 2})
    assert len(conversions) == len(models(tmp_path)) == 3
    with pytest.warns(CacheWarning, match="AUTO: compiled models cannot be kept"):
        compiled(tmp_path, device="AUTO")
    assert len(conversions) == 4 and len(models(tmp_path)) == 3
    compiled(tmp_path, rows=5)
    monkeypatch.setattr(api, "identity", lambda device: "OpenVINO 2027, another processor")
    compiled(tmp_path)
    assert len(conversions) == 6 and len(models(tmp_path)) == 5


def test_the_default_folder(
    tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    w, x = torch.ones(4, 4), torch.randn(3, 4)
    for _ in range(2):
        lookup("openvino", {"model_caching": True})(fx.symbolic_trace(two_layers), [x, w])
    assert len(models(tmp_path / "cache")) == len(conversions) == 1


@pytest.mark.filterwarnings("ignore:the backend 'openvino_ts'")
def test_the_older_path_keeps_models_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tmp_path)
    compiled(tmp_path, backend="openvino_ts")
    assert len(models(tmp_path)) == 2
    monkeypatch.delattr(graph, "convert_traced")
    compiled(tmp_path, backend="openvino_ts")


@pytest.mark.parametrize("damage", ["truncated", "foreign", "another_model", "another_version"])
def test_a_damaged_blob_is_rebuilt_and_said_once(
    damage: str, tmp_path: Path, conversions: list[str]
) -> None:
    compiled(tmp_path)
    (path,) = models(tmp_path)
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "foreign":
        path.write_bytes(b"<?xml something else")
    elif damage == "another_model":
        compiled(tmp_path / "other", torch.nn.Parameter(torch.full((4, 4), 2.0)))
        conversions.pop()
        (other,) = models(tmp_path / "other")
        path.write_bytes(other.read_bytes())
    else:
        Blobs(tmp_path).write(path.stem, b"not a model of this OpenVINO")
    with pytest.warns(CacheWarning, match="cannot be used"):
        compiled(tmp_path)
    assert len(conversions) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(tmp_path)
    assert len(conversions) == 2
    path.write_bytes(whole[:7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once said is enough
        compiled(tmp_path)


def test_a_digest_sees_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_PIECE", 64)
    x = torch.arange(100.0)
    found = {content_key("graph", x), content_key("graph", x.view(10, 10))}
    for k in (0, 50, 99):
        y = x.clone()
        y[k] = -1
        found |= {content_key("graph", y), content_key("graph", y.view(10, 10).t())}
    assert len(found) == 8
    assert content_key("graph", x) in found and content_key("grap", "h", x) not in found


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(CacheWarning, match="cannot be written to") as told:
        compiled(tmp_path / "file" / "cache")
        compiled(tmp_path / "file" / "cache")
    assert len(told) >= 1 and len(conversions) == 2

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.warns(CacheWarning, match="No space left"):
        compiled(tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []


def test_a_read_only_folder_is_read_from(
    tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tmp_path)
    before = set(tmp_path.iterdir())
    if os.geteuid() == 0:  # who may write anywhere

        def refused(*args: Any, **kwargs: Any) -> Any:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr("tempfile.mkstemp", refused)
    tmp_path.chmod(0o500)
    with pytest.warns(CacheWarning, match="cannot be written to: (Permission|Read-only)"):
        compiled(tmp_path, config={"NUM_STREAMS": 2})
    compiled(tmp_path)
    tmp_path.chmod(0o700)
    assert len(conversions) == 2 and set(tmp_path.iterdir()) == before


_PROGRAM = """
import json, sys, torch
from torch import nn
from fusee.backends.openvino import graph
import fusee
convert, converted = graph.convert_fx, []
graph.convert_fx = lambda *args: converted.append(1) or convert(*args)
torch.manual_seed(0)
m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
x = torch.randn(1, 3, 12, 12)
options = {"model_caching": True, "cache_dir": sys.argv[1]}
made = {"openvino": fusee.compile, "fusee_openvino": torch.compile}[sys.argv[2]]
call = made(m, backend=sys.argv[2], options=options)
with torch.no_grad():
    print(json.dumps([call(x).sum().item(), len(converted)]))
"""


@pytest.mark.parametrize("backend", ["openvino", "fusee_openvino"])
def test_another_process_finds_the_models(backend: str, tmp_path: Path) -> None:
    found = [printed(_PROGRAM, str(tmp_path / "cache"), backend) for _ in range(2)]
    assert [converted for _, converted in found] == [1, 0]
    assert found[0][0] == found[1][0]
