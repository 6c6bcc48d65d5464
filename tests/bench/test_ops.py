"""The benchmark of small programs: its cases, its figures, a sample that is not below eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import ops, ops_report
from bench.ops_cases import Case, cases, made
from bench.results_file import Results

CASES = {case.name: case for case in cases()}

# Programs that are faster than eager by so much that a busy machine does not hide it.
SAMPLE = (
    "F.silu(x) [1000x1000] f32 run",
    "x * x.sigmoid() + x [1000x1000] bf16 train",
    "torch.where(x > y, x, y * 2) [1000x1000, 1000x1000] f32 run",
    "x.logsumexp(1) [1000x1000] f32 run",
    "rms_norm(x, y) [8x128x768, 768, 768] f32 run",
    "euler(x, 30) [64x64] f32 run",
    "patchify(x, 4) [8x3x224x224] f32 run",
    "unpatchify(x, 4, x.shape[-1] // 16) [8x196x768] bf16 run",
    "x + y [300000x3, 3] f32 run",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_is_not_slower_than_eager(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found: list[float] = []
        while sum(ratio >= 0.9 for ratio in found) < 2:  # of three runs
            assert len(found) < 3, found
            row = ops.measured(CASES[name], ["compile"], 0.02)["compile"]
            assert row["agrees"] == "yes"
            found.append(row["ratio"])
    finally:
        torch.set_num_threads(threads)


def test_cases_run_and_lie_as_said() -> None:
    assert len(CASES) > 1000
    assert made("4x6:t", torch.float32).stride() == (1, 4)
    assert made("2x3x4x5:nhwc", torch.float32).stride() == (60, 1, 15, 3)
    assert made("4x6:part", torch.float32).stride() == (11, 1)
    assert made("4x6:step", torch.float32).stride() == (12, 2)
    numbers = made("100:i64<3", torch.float32)
    assert numbers.dtype is torch.int64 and set(numbers.tolist()) == {0, 1, 2}
    case = Case("", "x @ y + z", "4x4, 4x4:fixed, 4", "f32", "train")
    assert [x.requires_grad for x in case.tensors()] == [True, False, True]
    values, grads = ops.call_of(case, case.function(), case.tensors())()
    assert values[0].shape == (4, 4) and len(grads) == 2


def test_what_differs_is_said() -> None:
    case = Case("", "x + 1", "8", "f32", "run")
    row = ops.measured(case, ["compile"], 0.001)["compile"]
    assert row["agrees"] == "yes" and row["ratio"] > 0 and row["us"] > 0
    assert "Mismatched" in ops._difference([torch.ones(2)], [torch.zeros(2)])


def test_tables(tmp_path: Path) -> None:
    results = Results(tmp_path / "ops.json")
    names = list(CASES)[:4]
    for name, ratios in zip(names, ([2.0], [0.6, 0.5, 1.0], [0.95, 1.2, 0.96], [1.0]), strict=True):
        row = {"ratios": ratios, "us": 2.0, "eager_us": 4.0, "load": 0.1, "agrees": "yes"}
        results.put(name, "1 threads", "compile", row)
    text = ops_report.as_markdown(results.data)
    assert "| fusee.compile, 1 threads | 4 | 50.0 % (2) | 25.0 % (1) | 25.0 % (1) |" in text
    assert f"| `{names[1]}` | 4 | 2 | 0.60 |" in text and "Failed" not in text
    ops_report.write(results.data, results.path)
    assert results.path.with_suffix(".png").exists()


def test_what_is_there_is_not_measured_again() -> None:
    found = ops.chosen("small calls;F.silu", 1)
    assert {case.family for case in found} >= {"small calls", "elementwise"}
    assert len(ops.chosen("", 4)) < len(ops.chosen("", 1)) / 3
