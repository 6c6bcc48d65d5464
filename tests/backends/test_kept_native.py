"""What our compiler made in one process runs in the next without the graph: where nothing differs.

A "process" here has new functions, classes and objects; the last test starts real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusee
from fusee import log
from fusee.backends import kept, native
from fusee.backends.report import Report, live_reports
from fusee.config import settings
from fusee.errors import FuseeWarning
from fusee.runtime.cache import _opened
from tests.backends.engine_calls import HEAD, IDS, LAYERS, PROGRAM, Programs

MODEL = LAYERS + "f = model\n"
X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Processes(Programs):
    def run(self, source: str, *args: Any, **options: Any) -> tuple[Any, Report]:
        """A program whose `f` was compiled and gave what eager does, and the report of its graph.

        Each call gets copies of the arguments, which are compared, too.
        """
        program, before = self.start(source), live_reports()
        program.call = fusee.compile(program.f, options={"prices": False, **options})
        with torch.no_grad():
            for _ in range(2):
                agree(program, *args)
        (report,) = (report for report in live_reports() if report not in before)
        return program, report


def agree(program: Any, *args: Any) -> None:
    """The program's compiled function and its own do the same with copies of the arguments."""
    found = []
    for call in (program.call, program.f):
        given = [x.clone() if isinstance(x, Tensor) else x for x in args]
        torch.manual_seed(1)
        results = call(*given)
        places = [x.untyped_storage().data_ptr() for x in given if isinstance(x, Tensor)]
        flat = results if isinstance(results, (tuple, list)) else [results]
        shared = [(x.untyped_storage().data_ptr() in places, x.stride()) for x in flat]
        found.append((results, given, torch.rand(1), shared))
    torch.testing.assert_close(*found)


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    traces: list[str] = []

    def count(name: str) -> None:
        whole: Any = getattr(native, name)  # it is another module's

        def counted(*args: Any, **keywords: Any) -> Any:
            traces.append("traced")
            return whole(*args, **keywords)

        monkeypatch.setattr(native, name, counted)

    count("trace")
    count("differentiate")
    monkeypatch.setenv("FUSEE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSEE_KEEP_CAPTURES", "1")
    settings.cache_clear()
    yield Processes(traces)
    sys.modules.pop(PROGRAM, None)
    settings.cache_clear()
    _opened.cache_clear()


def test_the_second_process_does_not_trace(processes: Processes) -> None:
    _, first = processes.run(MODEL, IDS)
    assert processes.traces == ["traced"] and "trace" in first.stages_ms
    _, second = processes.run(MODEL, IDS)
    assert not processes.traces and list(second.stages_ms) == ["resume"]
    assert "another process compiled it" in str(second)
    assert [row.function for row in first.kernels] == [row.function for row in second.kernels]
    assert "FUSEE_KEEP_CAPTURES=0" in second.kernels[0].body
    for name in ("where", "externs", "passes", "arena_bytes", "eager"):
        assert getattr(first, name) == getattr(second, name)


# A function f of X, or of IDS where it has a table.
KEPT = {
    "kernels": "def f(x): return (x * 2).sin(), x.sum(0)",
    "one result": "def f(x): return x.exp() + 1",
    "a list": "def f(x): return [x + 1, x.t() * 2]",
    "views": "def f(x): return x.t(), (x + 1)[1:], x.exp().view(-1)",
    "an input itself": "def f(x): return x, x + 1",
    "an output twice": "def f(x):\n  y = x.sin()\n  return y, y, y[0]",
    "a write": "def f(x): return x.mul_(2).sin()",
    "a write to a view": "def f(x):\n  x[1].add_(1)\n  x.t_()\n  return x * 2",
    "random numbers": "def f(x): return F.dropout(x, 0.5) + torch.rand(6)",
    "a constant": "def f(x): return x + torch.tensor([1., 2, 3, 4, 5, 6])",
    "a table of its own": "def f(x): return x + torch.arange(6.).cos()",
    "products": "w = torch.ones(6, 6)\ndef f(x): return (x @ w).relu() @ x.t()",
    "names of torch": "def f(x): return x.half().clone(memory_format=torch.preserve_format)",
    "a convolution": (
        "torch.manual_seed(0)\nm = nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU())"
        ".eval()\ndef f(x): return m(x[None])"
    ),
    "a recurrent layer": (
        "torch.manual_seed(0)\nm = nn.LSTM(6, 5).eval()\ndef f(x): return m(x[:, None])[0] * 2"
    ),
    "attention": (
        "torch.manual_seed(0)\nm = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval()\n"
        "def f(x): return m(x[None]) * 2"
    ),
    "bfloat16": (
        "torch.manual_seed(0)\nm = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))"
        ".bfloat16()\ndef f(x): return m(x.bfloat16()).float() * 2"
    ),
    "an operator of ATen's": "def f(x): return torch.linalg.svdvals(x) * 2 + x.sort(0)[0].sum()",
    "gradients that nobody asks for": "w = nn.Parameter(torch.ones(6))\ndef f(x): return x * w + 1",
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str, processes: Processes) -> None:
    processes.run(KEPT[name], X)
    assert processes.traces == ["traced"]
    program, _ = processes.run(KEPT[name], X)
    assert not processes.traces
    for _ in range(2):
        with torch.no_grad():
            agree(program, X * 3)
    assert not processes.traces


def test_why_something_is_not_kept(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST_BYTES", 23)
    said: list[str] = []
    stop = log.subscribe(lambda record: said.append(record.text), "cache")
    processes.run(KEPT["a constant"], X)
    stop()
    assert "what was compiled is not kept: its constants take more than 23 bytes" in said
    processes.run(KEPT["a constant"], X)
    assert processes.traces == ["traced"]


def test_other_weights_are_taken(processes: Processes) -> None:
    processes.run(MODEL, IDS)
    processes.run(MODEL + "for p in model.parameters(): p.data.mul_(2)\n", IDS)
    assert not processes.traces


@pytest.mark.parametrize("change", ["in place", "by data", "another tensor"])
def test_weights_that_change_later_are_seen(change: str, processes: Processes) -> None:
    processes.run(MODEL, IDS)
    program, _ = processes.run(MODEL, IDS)
    weight = program.f.first.weight
    with torch.no_grad():
        if change == "in place":
            weight.mul_(2)
        elif change == "by data":
            weight.data.mul_(2)
        else:
            weight.data = weight.data * 2
        agree(program, IDS)
    assert not processes.traces


def test_an_index_out_of_range_raises_what_eager_does(processes: Processes) -> None:
    processes.run(MODEL, IDS)
    program, _ = processes.run(MODEL, IDS)
    with torch.no_grad():
        with pytest.raises(IndexError, match="index out of range"):
            program.call(IDS + 1)
        agree(program, IDS)
    assert not processes.traces


def test_inputs_that_overlap_run_the_captured_graph(processes: Processes) -> None:
    source = "def f(x, y):\n  x.add_(1)\n  return x * y"
    processes.run(source, X.flatten()[:12], X.flatten()[12:])
    program, _ = processes.run(source, X.flatten()[:12], X.flatten()[12:])
    assert not processes.traces
    one, other = X.flatten().clone(), X.flatten().clone()
    with torch.no_grad():
        want = program.f(one[:12], one[6:18])
        with pytest.warns(FuseeWarning, match="share memory"):
            got = program.call(other[:12], other[6:18])
    torch.testing.assert_close((got, other), (want, one))
    assert not processes.traces


def test_several_threads_share_it(processes: Processes) -> None:
    processes.run(MODEL, IDS)
    program, _ = processes.run(MODEL, IDS)
    with torch.no_grad():
        want, wrong = program.f(IDS), []

    def call() -> None:
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose(program.call(IDS), want, atol=1e-6):
                    wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not processes.traces


@pytest.mark.parametrize("other", ["options", "no oneDNN", "a processor"])
def test_what_differs_is_compiled_for(
    other: str, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.run(MODEL, IDS)
    if other == "options":
        processes.run(MODEL, IDS, fuse=False)
    elif other == "a processor":
        monkeypatch.setenv("FUSEE_CPU", "sse")
        settings.cache_clear()
        processes.run(MODEL, IDS)
    else:
        torch._C._set_mkldnn_enabled(False)
        try:
            processes.run(MODEL, IDS)
        finally:
            torch._C._set_mkldnn_enabled(True)
    assert processes.traces == ["traced"]


def test_without_the_cache_nothing_is_kept(processes: Processes) -> None:
    for _ in range(2):
        processes.run(MODEL, IDS, cache=False)
        assert processes.traces == ["traced"]


def test_who_asks_for_the_graph_has_it_compiled(processes: Processes) -> None:
    processes.run(MODEL, IDS)
    stop = log.subscribe(lambda record: None, "aten")
    processes.run(MODEL, IDS)
    stop()
    assert processes.traces == ["traced"]


@pytest.mark.parametrize(
    ("said", "length", "is_kept"),
    [("auto", 60, True), ("auto", 5, False), ("1", 5, True), ("0", 60, False)],
)
def test_large_graphs_are_kept_unless_told(
    processes: Processes, environment: pytest.MonkeyPatch, said: str, length: int, is_kept: bool
) -> None:
    environment.setenv("FUSEE_KEEP_CAPTURES", said)
    settings.cache_clear()
    source = "def f(x):\n" + "  x = x.sin() + x\n" * (length // 2) + "  return x"
    for _ in range(2):
        processes.run(source, X)
    assert processes.traces == ([] if is_kept else ["traced"])


WHOLE = f"""
{HEAD}
import fusee
from fusee.backends.report import live_reports
{MODEL}
ids = torch.tensor({IDS.tolist()})
with torch.no_grad():
    call = fusee.compile(f, options={{"prices": False}})
    for _ in range(2):
        torch.testing.assert_close(call(ids), f(ids))
print(*live_reports()[-1].stages_ms)
"""


def told(tmp_path: Path, text: str) -> str:
    """What a program prints in a process that keeps its captures."""
    path = tmp_path / "program.py"
    path.write_text(text)
    variables = {"FUSEE_CACHE_DIR": str(tmp_path / "cache"), "FUSEE_KEEP_CAPTURES": "1"}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=True,
        env={**os.environ, **variables},
    )  # fmt: skip
    return done.stdout.strip()


def test_real_processes(tmp_path: Path) -> None:
    assert "trace" in told(tmp_path, WHOLE)
    assert told(tmp_path, WHOLE) == "resume"
