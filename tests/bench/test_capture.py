"""The benchmark of capture: what is told apart, and what its tables say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from bench import capture, capture_report
from bench.results_file import Results


def made(tmp_path: Path) -> Results:
    results = Results(tmp_path / "capture.json")
    for model, dynamo, ours in (("bert", 1.0, 0.1), ("resnet18", 1.6, 0.4)):
        for kind in ("cold", "warm"):
            for column, seconds in (("dynamo", dynamo), ("compile", ours)):
                row = {"cpu_s": seconds, "wall_s": 2 * seconds, "graphs": 1, "load": 0.5}
                results.put(model, kind, column, row)
    for column, ms in (("dynamo", 0.2), ("compile", 0.05)):
        row = {"fastest_ms": ms, "parameters": 62, "load": 0.5}
        results.put("resnet18", "guards", column, row)
    results.put("fusee", "import", "compile", {"cpu_s": 0.04, "load": 0.5})
    return results


def test_tables(tmp_path: Path) -> None:
    text = capture_report.as_markdown(made(tmp_path).data)
    assert "| capture and guards, new process, imports included (2 models) | 6.3x |" in text
    assert "| bert | 1.00 | 0.10 | 1.00 | 0.10 | 1/1 |" in text
    assert "| resnet18 | 62 | 200.0 | 50.0 | 4.0x |" in text
    assert "`import torch`: 0.040 s" in text and "| fusee |" not in text
    assert "load average while measuring 0.5 to 0.5" in text


def test_what_is_measured_and_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def measure(arguments: list[str]) -> dict[str, Any]:
        asked.append(arguments)
        return {"cpu_s": float(len(asked)), "graphs": 1, "load": 0.0}

    monkeypatch.setattr(capture, "run", measure)
    results = Results(tmp_path / "capture.json")
    capture.first_calls("cold", "bert", "test", 3, results)
    assert [arguments[2] for arguments in asked] == ["dynamo", "compile"] * 3
    row = results.data["models"]["bert"]["cold"]["dynamo"]
    assert row["cpu_s"] == 3 and row["all_cpu_s"] == [1, 3, 5]


def test_the_graphs_time_is_not_captures() -> None:
    x = torch.ones(2)
    backend = capture.Idle()
    gm = fx.symbolic_trace(lambda x: x + 1)
    monkey = gm.forward

    def slow(*args: Any) -> Any:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        return monkey(*args)

    gm.forward = slow
    run = backend(gm, [x])
    assert run(x).tolist() == [2, 2] and backend.graphs == 1
    assert backend.inside_s >= 0.02


def test_a_later_call_is_measured() -> None:
    found = capture.guards("one_op", seconds=0.02)
    assert set(found) == {"dynamo", "compile"}
    assert all(0 < row["fastest_ms"] < 100 for row in found.values())
