"""`scripts/bench engines [--backend onnxrt]`: an engine on every model of the zoo, beside eager.

Per model, in a process of its own:
    claimed   how many of the graph's calls the engine has, in how many regions; what it leaves, why
    error     distance from float64, relative to the largest result: eager's and the engine's
    first     the first call, capture included
    steady    eager and the engine take turns; the median of each. `--seconds 0` leaves it out

Ends with status 1 if a model is not as near to float64 as float32 allows, or a region failed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import fusee
from bench.child import Failed, measure
from bench.openvino import error_of
from bench.results_file import machine
from tests.check import in_float64
from tests.compare import Mismatch, assert_same
from tests.models import zoo

HERE = Path(__file__).parent
# Results that are not as near to float64 as eager's are right up to here: engines add in an order
# of their own, and densenet121 has 120 layers of sums.
NEAR = 1e-5

Row = dict[str, Any]


def run(model: str, backend: str, size: str, seconds: float) -> Row:
    """What a child process measures."""
    warnings.simplefilter("ignore")
    module, args, kwargs = zoo.load(model, size)  # type: ignore[arg-type]
    with torch.no_grad():
        want = module(*args, **kwargs)
        wide_args, wide_kwargs = in_float64((args, kwargs))
        exact = in_float64(copy.deepcopy(module))(*wide_args, **wide_kwargs)
        start = time.perf_counter()
        fast = fusee.compile(module, backend=backend)
        got = fast(*args, **kwargs)
        first = time.perf_counter() - start
        found: Row = {"first_s": first, "error": error_of(got, exact), "differs": None}
        found["eager_error"] = error_of(want, exact)
        try:
            assert_same(got, want, lambda: exact)
        except Mismatch as error:
            found["differs"] = str(error)
        if seconds:
            found.update(_steady(module, fast, args, kwargs, seconds))
    return found | _partition()


def _steady(module: Any, fast: Any, args: Any, kwargs: Any, seconds: float) -> Row:
    times: dict[str, list[float]] = {"eager": [], "ours": []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["ours"]) < 3:
        for name, call in (("eager", module), ("ours", fast)):
            start = time.perf_counter()
            call(*args, **kwargs)
            times[name].append(time.perf_counter() - start)
    return {f"{name}_ms": statistics.median(x) * 1e3 for name, x in times.items()}


def _partition() -> Row:
    """What the reports of all compiled graphs say of regions, and of what is in none."""
    rows = [row for report in fusee.report() for row in report.regions]
    good = [row for row in rows if row.failed is None]
    left = Counter(f"{u.op}: {u.reason}" for report in fusee.report() for u in report.unclaimed)
    claimed = sum(sum(row.ops.values()) for row in good)
    failed = sum(sum(row.ops.values()) for row in rows) - claimed
    return {
        "regions": len(good),
        "claimed": claimed,
        "calls": claimed + failed + left.total(),
        "unclaimed": dict(left),
        "failed": [row.failed for row in rows if row.failed is not None],
    }


def is_right(row: Row) -> bool:
    if "error" not in row or row["failed"]:
        return False
    return row["differs"] is None or row["error"] <= NEAR


def _says(row: Row) -> str:
    if not is_right(row):
        return f"no: {row['differs'] or row['failed'][0]}"
    times = row["error"] / max(row["eager_error"], 1e-30)
    return "yes" if row["differs"] is None else f"yes, {times:.0f} times eager's error"


def table(rows: dict[str, Row]) -> str:
    """Markdown: a row per model, and the geometric mean of what eager takes over ours."""
    lines = [
        "| model | right | claimed | regions | error: eager / engine | first call, s |"
        " steady, ms: eager / engine | left out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ratios = []
    for model, row in rows.items():
        if "error" not in row:
            lines.append(f"| {model} | no: {row['failed'][0]} | | | | | | |")
            continue
        steady = ""
        if "ours_ms" in row:
            ratios.append(row["eager_ms"] / row["ours_ms"])
            steady = f"{row['eager_ms']:.2f} / {row['ours_ms']:.2f} = {ratios[-1]:.2f}"
        cells = [
            model,
            _says(row),
            f"{row['claimed']} of {row['calls']}, {row['claimed'] / max(1, row['calls']):.1%}",
            str(row["regions"]),
            f"{row['eager_error']:.0e} / {row['error']:.0e}",
            f"{row['first_s']:.2f}",
            steady,
            "; ".join(f"{count} {text}" for text, count in row["unclaimed"].items()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    mean = f"{statistics.geometric_mean(ratios):.2f}" if ratios else ""
    right = sum(map(is_right, rows.values()))
    return "\n".join([*lines, f"| geometric mean | {right} | | | | | {mean} | |"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.engines")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="onnxrt")
    parser.add_argument("--models", default=",".join(zoo.names()))
    parser.add_argument("--size", default="bench", choices=("bench", "test"))
    parser.add_argument(
        "--seconds", default="5", help="that eager and the engine take turns for; 0: not at all"
    )
    parser.add_argument("--out", type=Path, help="a JSON file; bench/results/engines_BACKEND.json")
    given = parser.parse_args()
    if given.child is not None:
        model, backend, size, seconds = given.child
        print(json.dumps(run(model, backend, size, float(seconds))))
        return 0
    out = given.out or HERE / "results" / f"engines_{given.backend}.json"
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
