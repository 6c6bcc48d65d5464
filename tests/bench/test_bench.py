"""The benchmark's bookkeeping: what is still to do, what the figures mean, what is marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.columns import TITLES
from bench.measure import take_turns
from bench.results_file import Results
from bench.run import jobs

COLD = {"first_call_s": 4.0, "backend_s": 2.0, "eager_bytes": 100, "peak_bytes": 300, "load": 1.0}


def made(tmp_path: Path) -> Results:
    results = Results(tmp_path / "results.json")
    rows: dict[str, dict[str, Any]] = {
        "inductor": {**COLD, "first_call_s": 40.0, "backend_s": 32.0, "peak_bytes": 900},
        "fusee": {**COLD, "agrees": "yes"},
    }
    for column, row in rows.items():
        results.put("bert", "cold", column, row)
    for column, median in (("eager", 10.0), ("inductor", 8.0), ("fusee", 5.0)):
        row = {"median_ms": median, "eager_ms": 10.0, "load": 1.0}
        results.put("bert", "steady", column, row)
    return results


def test_figures(tmp_path: Path) -> None:
    found = dict(report.summary(made(tmp_path).data))
    assert found["first call, backend's part: TorchInductor / Fusee"] == pytest.approx(16)
    assert found["first call, whole: TorchInductor / Fusee"] == pytest.approx(10)
    assert found["steady state: TorchInductor / Fusee"] == pytest.approx(1.6)
    assert found["steady state, worst model: eager / Fusee"] == pytest.approx(2)
    assert found["steady state: TorchInductor with freezing / Fusee"] is None
    memory = found["peak memory while compiling, over eager: TorchInductor / Fusee"]
    assert memory == pytest.approx(4)


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    results = Results(made(tmp_path).path)  # read back
    todo = jobs(["bert"], ["inductor", "fusee", "freezing"], ["cold"], results)
    assert [job.columns for job in todo] == [("freezing",)]
    results.put("bert", "cold", "fusee", {"error": "it failed"})
    assert ("fusee",) in [job.columns for job in jobs(["bert"], ["fusee"], ["cold"], results)]
    assert len(jobs(["bert"], ["inductor"], ["cold"], None)) == 1
    assert len(jobs(["bert"], ["inductor"], ["cold"], results, busy=0.5)) == 1


def test_steady_state_measures_eager_beside_the_column(tmp_path: Path) -> None:
    todo = jobs(["bert"], ["fusee"], ["steady"], None)
    assert todo[0].columns == ("eager", "fusee")


def test_busy_machine_and_wrong_results_are_marked(tmp_path: Path) -> None:
    results = made(tmp_path)
    assert "Not to be quoted" not in report.as_markdown(results.data)
    results.put("bert", "cold", "fusee", {**COLD, "load": 9.0, "agrees": "output 0: too far"})
    text = report.as_markdown(results.data)
    assert "**Not to be quoted**: 1 of 5" in text
    assert f"bert, {TITLES['fusee']}: output 0: too far" in text


def test_tables_go_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n" + "\nold\n".join(report.MARKS) + "\nb\n")
    for _ in range(2):
        report.update_page(report.as_markdown(made(tmp_path).data), page)
    text = page.read_text()
    assert text.startswith("a\n") and text.endswith("\nb\n")
    assert text.count("| bert |") == 3 and "old" not in text


def test_columns_take_turns() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    found = take_turns(calls, seconds=0.01)
    assert set(found) == {"a", "b"} and found["a"]["turns"] == found["b"]["turns"] >= 5
