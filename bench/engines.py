"""`python -m bench.engines [--backend onnxrt]`: an engine on every model of the zoo, beside eager.

Per model, in a process of its own:
    claimed   how many of the graph's calls the engine has, and of how many
    error     distance from eager, relative to the largest result
    first     the first call, capture included
    steady    eager and the engine take turns; the median of each

Ends with status 1 if a model is not as near to eager as float32 allows, or a region failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import fusee
from bench.child import Failed, measure
from bench.openvino import TOLERANCE, error_of
from bench.results_file import machine
from tests.models import zoo

HERE = Path(__file__).parent

Row = dict[str, Any]


def run(model: str, backend: str, size: str, seconds: float) -> Row:
    """What a child process measures."""
    warnings.simplefilter("ignore")
    module, args, kwargs = zoo.load(model, size)  # type: ignore[arg-type]
    with torch.no_grad():
        want = module(*args, **kwargs)
        start = time.perf_counter()
        fast = fusee.compile(module, backend=backend)
        got = fast(*args, **kwargs)
        first = time.perf_counter() - start
        times: dict[str, list[float]] = {"eager": [], "ours": []}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times["ours"]) < 3:
            for name, call in (("eager", module), ("ours", fast)):
                start = time.perf_counter()
                call(*args, **kwargs)
                times[name].append(time.perf_counter() - start)
    rows = [row for report in fusee.report() for row in report.regions]
    claimed = sum(sum(row.ops.values()) for row in rows if row.failed is None)
    left = sum(len(report.unclaimed) for report in fusee.report())
    failed = [row for row in rows if row.failed is not None]
    found: Row = {
        "claimed": claimed,
        "calls": claimed + left + sum(sum(row.ops.values()) for row in failed),
        "failed": [row.failed for row in failed],
        "error": error_of(got, want),
        "first_s": first,
    }
    return found | {f"{name}_ms": statistics.median(x) * 1e3 for name, x in times.items()}


def is_right(row: Row) -> bool:
    return "error" in row and row["error"] <= TOLERANCE and not row["failed"]


def table(rows: dict[str, Row]) -> str:
    """Markdown: a row per model, and the geometric mean of what eager takes over ours."""
    lines = [
        "| model | claimed | error | first call, s | steady, ms: eager / engine |",
        "|---|---|---|---|---|",
    ]
    ratios = []
    for model, row in rows.items():
        if "error" not in row:
            lines.append(f"| {model} | fails | {row['failed']} | | |")
            continue
        ratios.append(row["eager_ms"] / row["ours_ms"])
        lines.append(
            f"| {model} | {row['claimed']} of {row['calls']} | {row['error']:.0e} |"
            f" {row['first_s']:.2f} |"
            f" {row['eager_ms']:.2f} / {row['ours_ms']:.2f} = {ratios[-1]:.2f} |"
        )
    mean = f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-"
    right = sum(map(is_right, rows.values()))
    return "\n".join([*lines, f"| geometric mean, {right} right | | | | {mean} |"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.engines")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="onnxrt")
    parser.add_argument("--models", default=",".join(zoo.names()))
    parser.add_argument("--size", default="bench", choices=("bench", "test"))
    parser.add_argument("--seconds", default="5", help="that eager and the engine take turns for")
    parser.add_argument("--out", type=Path, help="a JSON file; bench/results/BACKEND.json")
    given = parser.parse_args()
    if given.child is not None:
        model, backend, size, seconds = given.child
        print(json.dumps(run(model, backend, size, float(seconds))))
        return 0
    out = given.out or HERE / "results" / f"{given.backend}.json"
    data: Row = json.loads(out.read_text()) if out.exists() else {"models": {}}
    data["machine"] = {**machine(), "size": given.size}
    for model in given.models.split(","):
        load = os.getloadavg()[0]
        arguments = ["--child", model, given.backend, given.size, given.seconds]
        with tempfile.TemporaryDirectory() as caches:
            try:
                row = measure(arguments, Path(caches), 900, module="bench.engines")
            except Failed as error:
                row = {"failed": [str(error)[:300]]}
        data["models"][model] = {**row, "load": load}
        out.write_text(json.dumps(data, indent=1) + "\n")
        out.with_suffix(".md").write_text(table(data["models"]))
        print(model, json.dumps(row), file=sys.stderr, flush=True)
    return int(not all(map(is_right, data["models"].values())))


if __name__ == "__main__":
    sys.exit(main())
