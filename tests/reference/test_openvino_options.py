"""Each option, variable and import of OpenVINO's pages on torch.compile, by each route.

source   https://docs.openvino.ai/torchcompile
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee.backends.report import Report
from tests.reference.routes import Route

pytest.importorskip("openvino")
aten = torch.ops.aten
_numbers = itertools.count()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(nn.functional.gelu(self.first(x)))
        return found


def called(route: Route, backend: str = "openvino", **options: Any) -> Report:
    """The report of a model that is compiled with these options, and called."""
    name, model, x = f"option {next(_numbers)}", Small().eval(), torch.randn(3, 8)
    fast = route.compile(model, backend=backend, options={"name": name, **options})
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    (report,) = fusee.report(name)
    return report


def test_the_example_of_the_page(route: Route, tmp_path: Path) -> None:
    folder = tmp_path / "model_cache"
    called(route, device="CPU", model_caching=True, cache_dir=str(folder))
    assert list(folder.glob("[0-9a-f]*.blob"))


def test_model_caching_is_off_unless_asked_for(
    route: Route, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    called(route, model_caching=False)
    assert not list(tmp_path.iterdir())
    called(route, model_caching=True)
    assert [one.name for one in tmp_path.iterdir()] == ["cache"]


def test_device(route: Route) -> None:
    assert called(route).regions[0].device == "CPU"
    assert called(route, device="AUTO").regions[0].device == "AUTO"


def test_config(route: Route) -> None:
    report = called(route, device="CPU", config={"PERFORMANCE_HINT": "LATENCY"})
    assert report.regions[0].failed is None


def test_config_with_a_folder_of_openvinos_own(route: Route, tmp_path: Path) -> None:
    called(route, config={"CACHE_DIR": str(tmp_path / "own")})
    assert list((tmp_path / "own").iterdir())


def test_disabled_ops(route: Route) -> None:
    report = called(route, disabled_ops=[aten.gelu.default])
    assert [row.op for row in report.unclaimed] == ["aten.gelu.default"]
    assert len(report.regions) == 2


def test_decompositions(route: Route) -> None:
    report = called(route, decompositions=[aten.gelu.default])
    names = {op.split(".")[1] for row in report.regions for op in row.ops}
    assert "erf" in names and "gelu" not in names


def test_aot_autograd_finetunes(route: Route) -> None:
    models = [Small() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    fast = route.compile(models[0], backend="openvino", options={"aot_autograd": True})
    for _ in range(3):
        x = torch.randn(3, 8)
        for call, optimizer in zip((fast, models[1]), optimizers):
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    for mine, eagers in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(mine, eagers, rtol=1e-3, atol=1e-5)


def test_other_sizes(route: Route) -> None:
    model = Small().eval()
    fast = route.compile(
        model, backend="openvino", dynamic=True, options={"aot_autograd": route.name != "fusee"}
    )
    with torch.no_grad():
        for count in (3, 5, 9):
            x = torch.randn(count, 8)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_variables(route: Route, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENVINO_TORCH_BACKEND_DEVICE", "AUTO")
    assert called(route).regions[0].device == "AUTO"
    monkeypatch.delenv("OPENVINO_TORCH_BACKEND_DEVICE")
    monkeypatch.setenv("OPENVINO_TORCH_MODEL_CACHING", "True")
    monkeypatch.setenv("OPENVINO_TORCH_CACHE_DIR", str(tmp_path / "blobs"))
    called(route)
    assert list((tmp_path / "blobs").glob("[0-9a-f]*.blob"))


def test_the_older_backend(route: Route) -> None:
    if route.name == "stock" and "fusee_openvino_ts" not in torch.compiler.list_backends():
        pytest.skip("fusee_openvino_ts is not registered with this installation")
    with pytest.warns(fusee.errors.FuseeWarning, match="goes through TorchScript"):
        report = called(route, backend="openvino_ts")
    (row,) = report.regions
    assert row.engine == "openvino_ts" and row.failed is None


_IMPORTING = """
import openvino.torch
from openvino.frontend.pytorch.torchdynamo import backend
import torch, fusee
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), torch.randn(3, 8)
with torch.no_grad():
    for k, route in enumerate(("fusee", "installed", "stock")):
        if route == "installed":
            fusee.install()
        compiled = fusee.compile if route == "fusee" else torch.compile
        name = "fusee_openvino" if route == "stock" else "openvino"
        fast = compiled(model, backend=name, options={"name": route})
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        fusee.uninstall()
        (report,) = fusee.report(route)
        print(route, [row.engine for row in report.regions])
"""


def test_imports_that_the_pages_ask_for_change_nothing() -> None:
    """They register upstream's backend; ours is found by name all the same."""
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", _IMPORTING],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n") == [
        "fusee ['openvino']", "installed ['openvino']", "stock ['openvino']", "",
    ]  # fmt: skip
