"""The benchmark of models on a GPU: what its table says. The measurements need one."""

from __future__ import annotations

from pathlib import Path

from bench import gpu
from bench.results_file import Results


def test_table(tmp_path: Path) -> None:
    results = Results(tmp_path / "gpu.json")
    results.data["machine"]["gpu"] = "a GPU"
    for column, seconds, ms in (
        ("eager", 0.2, 5.0),
        ("inductor", 9.0, 4.0),
        ("reduce-overhead", 8.0, 3.0),
        ("compile", 0.8, 2.0),
    ):
        results.put("bert", "first", column, {"first_s": seconds, "away": 0.001})
        results.put("bert", "turns", column, {"median_ms": ms})
    results.put("bert", "turns", "step", {"median_ms": 1.8})
    results.put("vit", "first", "compile", {"error": "no kernel"})
    results.put("mlp", "first", "compile", {"first_s": 0.5, "away": 0.2})
    found = gpu.as_markdown(results.data)
    assert "| bert | 0.20 | 9.00 | 8.00 | 0.80 | - | 0.9 | 10.00x |" in found
    assert "| bert | 5.000 | 4.000 | 3.000 | 2.000 | 1.800 | 2.3 | 1.67x |" in found
    assert "| mlp | - | - | - | 0.50 | - | 0.3 | - |" in found
    assert "a GPU, torch" in found and "than a hundredth: mlp" in found


def test_columns_are_what_the_table_has() -> None:
    assert list(gpu.TITLES) == list(gpu.COLUMNS)
    assert {kind for _, kind, _, _ in gpu._TABLES} == set(gpu.KINDS)
