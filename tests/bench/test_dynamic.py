"""The benchmark of sizes that vary: what its programs count, and what its table says."""

from __future__ import annotations

from pathlib import Path

from bench import dynamic, dynamic_report
from bench.results_file import Results


def made(tmp_path: Path) -> Results:
    results = Results(tmp_path / "dynamic.json")
    for column, captures, seconds in (("inductor", 3, 60.0), ("compile", 2, 2.0)):
        results.put("bert", "all", column, {"captures": captures, "all_s": seconds, "load": 0.1})
    for column, ms in (("eager", 3.0), ("compile", 2.0), ("static", 1.6)):
        row = {"median_ms": {"96": ms, "128": 2 * ms}, "load": 0.2}
        results.put("densenet121", "turns", column, row)
    for column, seen in (("inductor", 40.0), ("compile", 5.5)):
        row = {"static_us": 5.0, "seen_us": seen, "new_us": 25.0, "load": 0.3}
        results.put("ten kernels", "calls", column, row)
    return results


def test_table(tmp_path: Path) -> None:
    found = dynamic_report.as_markdown(made(tmp_path).data)
    assert "| BERT, 20 lengths | captures (TorchInductor's) | 2 | 2 / 3 |" in found
    assert "| 60.0 / 2.0: 30.00x |" in found
    assert "mean, worst | 1.05x (1.02x) | 1.25x, 1.25x |" in found
    assert "| 1.50x / - |" in found
    assert (
        "seen before, us over the static call (TorchInductor's) | 1 (0.3) | 0.5 / 35.0 |" in found
    )
    assert "load average 0.1 to 0.3" in found


def test_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n" + "\nold\n".join(dynamic_report.MARKS) + "\nb\n")
    results = made(tmp_path)
    for _ in range(2):
        dynamic_report.write(results.data, results.path, page)
    text = page.read_text()
    assert text.startswith("a\n") and text.endswith("\nb\n")
    assert text.count("| BERT, 20 lengths |") == 1 and "old" not in text


def test_a_program_is_compiled_for_one_size_and_for_all() -> None:
    program = dynamic.PROGRAMS["gpt training"]._replace(
        sizes=(6, 9, 12), settings={"layers": 1, "hidden": 64, "batch": 2}
    )
    assert dynamic.all_sizes(program, "compile")["captures"] == 2
    assert dynamic.all_sizes(program, "static")["captures"] == 3
