"""What one process split, the next one calls without the graph: only where nothing differs."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fusee
from fusee import log
from fusee.aten import trace
from fusee.backends import openvino as api
from fusee.backends import resume, split_run
from fusee.backends.report import Report, live_reports
from fusee.config import settings
from fusee.errors import FuseeWarning
from fusee.runtime.cache import _opened
from tests.backends.engine_calls import IDS, LAYERS, PROGRAM, Programs, printed

pytest.importorskip("openvino")


class Processes(Programs):
    def __init__(self, folder: Path, traces: list[str]) -> None:
        super().__init__(traces)
        self.folder = folder

    def start(self, source: str = LAYERS) -> Any:
        resume._all.clear()
        return super().start(source)

    def compiled(self, model: Any, backend: str = "openvino", **options: Any) -> Callable[..., Any]:
        given = {"model_caching": True, "cache_dir": self.folder / "models", **options}
        made: Callable[..., Any] = fusee.compile(model, backend=backend, options=given)
        return made

    def run(self, source: str = LAYERS, *args: Any, **options: Any) -> tuple[Any, Report]:
        """A new process' result, which is eager's, and the report of its graph."""
        program = self.start(source)
        before = live_reports()
        with torch.no_grad():
            call = self.compiled(program.model, **options)
            got, want = call(*(args or (IDS,))), program.model(*(args or (IDS,)))
        torch.testing.assert_close(got, want)
        program.call = call
        (report,) = (report for report in live_reports() if report not in before)
        return program, report


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    traces: list[str] = []

    def counted(*args: Any, **keywords: Any) -> Any:
        traces.append("traced")
        return trace.trace(*args, **keywords)

    monkeypatch.setattr(split_run, "trace", counted)
    monkeypatch.setenv("FUSEE_CACHE_DIR", str(tmp_path / "objects"))
    settings.cache_clear()
    yield Processes(tmp_path, traces)
    sys.modules.pop(PROGRAM, None)
    settings.cache_clear()
    _opened.cache_clear()


def test_the_second_process_neither_traces_nor_splits(processes: Processes) -> None:
    _, first = processes.run()
    assert processes.traces == ["traced"] and "trace" in first.stages_ms
    program, second = processes.run()
    assert not processes.traces and "resume" in second.stages_ms
    assert [(row.name, row.ops, row.engine) for row in second.regions] == [
        (row.name, row.ops, row.engine) for row in first.regions
    ]
    assert second.where == first.where and "another process split it" in str(second)
    assert second.regions[0].calls == 1 and second.regions[0].primitives is not None
    assert second.regions[0].primitives() == first.regions[0].primitives()  # type: ignore[misc]
    with torch.no_grad():
        torch.testing.assert_close(program.call(IDS), program.model(IDS))


def test_a_part_that_no_engine_has_is_kept_with_the_others(processes: Processes) -> None:
    source = LAYERS.replace("x = self.table(ids)", "x = self.table(ids.to(torch.int16).long() % 9)")
    _, first = processes.run(source)
    assert first.unclaimed
    _, second = processes.run(source)
    assert second.unclaimed == first.unclaimed and second.externs == first.externs
    assert bool(processes.traces) is bool(first.kernels)  # what we compiled is not kept


def test_other_weights_are_compiled_for(processes: Processes) -> None:
    processes.run()
    other = LAYERS.replace("manual_seed(0)", "manual_seed(1)")
    assert processes.run(other)[0] and processes.traces == ["traced"]
    assert processes.run(other)[0] and not processes.traces


@pytest.mark.parametrize("change", ["in place", "by data", "another tensor"])
def test_weights_that_change_later_are_seen(change: str, processes: Processes) -> None:
    processes.run()
    program, _ = processes.run()
    weight = program.model.first.weight
    with torch.no_grad():
        if change == "in place":
            weight.mul_(2)
        elif change == "by data":
            weight.data.mul_(2)
        else:
            weight.data = weight.data * 2
        for _ in range(2):
            torch.testing.assert_close(program.call(IDS), program.model(IDS))
    assert processes.traces == ["traced"]
    report = live_reports()[-1]
    assert "trace" in report.stages_ms and report.regions[0].failed is None
    assert report.regions[0].calls == 2


def test_calls_at_once_while_weights_change(processes: Processes) -> None:
    processes.run()
    program, _ = processes.run()
    with torch.no_grad():
        program.model.first.weight.mul_(2)
        want, wrong = program.model(IDS), []

        def call() -> None:
            with torch.no_grad():
                for _ in range(5):
                    if not torch.allclose(program.call(IDS), want, atol=1e-5):
                        wrong.append(1)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and processes.traces == ["traced"]


def test_an_index_out_of_range_raises_what_eager_does(processes: Processes) -> None:
    processes.run()
    program, _ = processes.run()
    with torch.no_grad():
        with pytest.raises(IndexError, match="index out of range"):
            program.call(IDS + 1)
        torch.testing.assert_close(program.call(IDS), program.model(IDS))


def test_a_buffer_beyond_what_it_was_taken_for(processes: Processes) -> None:
    source = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.tensor([1, 2, 3]))
        self.w = nn.Parameter(torch.ones(3))
    def forward(self, x):
        return x * (self.n * 2) * self.w
model = Model()
"""
    x = torch.linspace(1, 2, 3)
    processes.run(source, x)
    processes.run(source, x)
    assert not processes.traces
    processes.run(source.replace("[1, 2, 3]", "[1, 2, 2 ** 40]"), x)
    assert processes.traces


def test_a_region_that_fails_is_compiled_by_us(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.run()
    program, _ = processes.run()

    def broken(self: Any, inputs: Any, outputs: Any) -> None:
        raise RuntimeError("aten.gelu.default went wrong")

    monkeypatch.setattr(api.Executable, "__call__", broken)
    with torch.no_grad(), pytest.warns(FuseeWarning, match=r"aten\.gelu\.default went wrong"):
        torch.testing.assert_close(program.call(IDS), program.model(IDS))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(program.call(IDS), program.model(IDS))


OTHERS: dict[str, dict[str, Any]] = {
    "a disabled operator": {"disabled_ops": [torch.ops.aten.gelu.default]},
    "a decomposition": {"decompositions": [torch.ops.aten.gelu.default]},
    "configuration": {"config": {"PERFORMANCE_HINT": "THROUGHPUT"}},
    "training": {"aot_autograd": True},
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_options_are_another_split(what: str, processes: Processes) -> None:
    processes.run()
    _, first = processes.run(**OTHERS[what])
    assert processes.traces == ["traced"]
    _, second = processes.run(**OTHERS[what])
    assert [row.ops for row in first.regions] == [row.ops for row in second.regions]


@pytest.mark.filterwarnings("ignore:the backend 'openvino_ts'")
def test_the_older_path_has_its_own(processes: Processes) -> None:
    processes.run()
    processes.run(backend="openvino_ts")
    assert processes.traces == ["traced"]
    _, report = processes.run(backend="openvino_ts")
    assert not processes.traces and report.regions[0].engine == "openvino_ts"


SITUATIONS: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("what", SITUATIONS)
def test_other_modes_are_another_split(what: str, processes: Processes) -> None:
    processes.run()
    program = processes.start()
    call = processes.compiled(program.model)
    with torch.no_grad(), SITUATIONS[what]():
        torch.testing.assert_close(call(IDS), program.model(IDS), rtol=1e-2, atol=1e-2)
    assert processes.traces == ["traced"]


def test_gradients_are_asked_for_in_the_second_process(processes: Processes) -> None:
    processes.run()
    program = processes.start()
    call = processes.compiled(program.model)
    call(IDS).square().sum().backward()
    got = program.model.first.weight.grad.clone()
    program.model.zero_grad()
    program.model(IDS).square().sum().backward()
    torch.testing.assert_close(got, program.model.first.weight.grad)


WITHOUT: dict[str, str] = {
    "draws": LAYERS.replace("x = self.table(ids)", "x = self.table(ids) + torch.rand(8) * 0"),
    "what it holds changes": LAYERS.replace(
        "x = self.table(ids)", "self.n = getattr(self, 'n', 0) + 1; x = self.table(ids) * self.n"
    ),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_programs_with_effects_are_right_in_both(what: str, processes: Processes) -> None:
    for _ in range(2):
        program = processes.start(WITHOUT[what])
        other = processes.start(WITHOUT[what])
        with torch.no_grad():
            call = processes.compiled(program.model)
            for _ in range(3):
                torch.testing.assert_close(call(IDS), other.model(IDS))


def test_functions_of_the_users_are_traced_in_each_process(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs behind a name in the graph is known by its own code alone, not by what it calls."""
    source = """
def inner(x):
    return x * 2
def outer(x):
    return inner(x) + 1
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 8))
    def forward(self, x):
        return (outer(x) @ self.w).softmax(-1)
model = Model()
"""
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    for code in (source, source, source.replace("x * 2", "x * x")):
        program = processes.start(code)
        fusee.compiler.allow_in_graph(program.outer)
        with torch.no_grad():
            call = processes.compiled(program.model)
            torch.testing.assert_close(call(x), program.model(x))
        assert processes.traces == ["traced"]


def test_whoever_looks_at_artefacts_sees_them(processes: Processes) -> None:
    processes.run()
    seen: list[str] = []
    undo = log.subscribe(lambda record: seen.append(record.artefact), "aten")
    try:
        processes.run()
    finally:
        undo()
    assert seen == ["aten"]


def test_our_own_code_is_a_part_of_the_name(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.run()
    monkeypatch.setattr(resume, "code_salt", lambda: "the next release")
    processes.run()
    assert processes.traces == ["traced"]


def test_without_the_models_it_is_compiled_again(processes: Processes) -> None:
    processes.run()
    for path in (processes.folder / "models").iterdir():
        path.unlink()
    processes.run()
    assert processes.traces == ["traced"]
    processes.run()
    assert not processes.traces


def test_entries_that_are_damaged_are_made_again(processes: Processes) -> None:
    processes.run()
    for path in (processes.folder / "objects").iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    processes.run()
    assert processes.traces == ["traced"]


_PROGRAM = """
import json, sys, torch
import torch.nn.functional as F
from torch import nn
import fusee
from fusee.backends.report import live_reports
torch.manual_seed(0)
m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)).eval()
x = torch.linspace(-1, 1, 432).reshape(1, 3, 12, 12)
options = {"model_caching": True, "cache_dir": sys.argv[1]}
call = fusee.compile(m, backend="openvino", options=options)
with torch.no_grad():
    far = (call(x) - m(x)).abs().max().item()
    (report,) = live_reports()
    whole = "openvino" in sys.modules
    import openvino
    model = openvino.Core().read_model  # as for programs of their own
    extension = openvino._pyopenvino.get_version() == openvino.__version__
    m[0].weight.mul_(2)
    later = (call(x) - m(x)).abs().max().item()
print(json.dumps([sorted(report.stages_ms), whole, extension, far < 1e-5, later < 1e-5]))
"""


def test_another_process_imports_no_more_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEE_CACHE_DIR", str(tmp_path / "objects"))
    found = [printed(_PROGRAM, str(tmp_path / "models")) for _ in range(2)]
    assert found[0] == [["openvino", "split", "trace"], True, True, True, True]
    assert found[1] == [["resume"], False, True, True, True]


WRITING = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
    def forward(self, x, y):
        x.add_(1)
        return F.relu(self.first(y)) + x
model = Model().eval()
"""


@pytest.mark.filterwarnings("ignore:.*share memory:UserWarning")
def test_inputs_that_are_written_to_may_overlap_in_every_process(processes: Processes) -> None:
    for _ in range(2):
        program = processes.start(WRITING)
        call = processes.compiled(program.model)
        for begin in (4, 0, 1):  # apart, one tensor, and rows in common
            ours, theirs = torch.ones(8, 8), torch.ones(8, 8)
            with torch.no_grad():
                got = call(ours[:4], ours[begin : begin + 4])
                want = program.model(theirs[:4], theirs[begin : begin + 4])
            torch.testing.assert_close((got, ours), (want, theirs))
