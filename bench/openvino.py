"""`python -m bench.openvino`: our OpenVINO backend beside upstream's, model by model.

Ours goes through fusee.compile, upstream's through torch.compile. Per model, each figure from new
processes, after `import torch` and building the model:
    correct   runs at all, and is as near to eager as float32 allows
    first     from there to the end of the first call: imports, capture, conversion, compilation
    warm      ours with model caching: a first process, and a second one that finds what it left;
              medians of three such pairs
    steady    both take turns of ten calls in one process; the median of each
    own       upstream's alone in the precision that it takes unless told otherwise
    memory    resident after a call, over that of eager's process

Both get torch's number of threads, and are told to compute in float32, as ours does anyway.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bench.child import Failed, measure
from bench.results_file import machine
from tests.models import zoo

HERE = Path(__file__).parent
COLUMNS = ("upstream", "ours")
STEADY_S = 8
TIMES = 3
TURN = 10
# As near as two orders of adding float32 numbers may come, relative to the largest result.
TOLERANCE = 1e-3

Row = dict[str, Any]


# ------------------------------------------------------------------------------ one process


def run(kind: str, model: str, column: str, size: str, folder: str) -> Row:
    """What a child process measures."""
    warnings.simplefilter("ignore")
    module, args, kwargs = zoo.load(model, size)  # type: ignore[arg-type]
    with torch.no_grad():
        want = module(*args, **kwargs)
        if kind == "steady":
            return _steady(module, args, kwargs)
        if kind == "own":
            call = _upstream(module, {})
            error = error_of(call(*args, **kwargs), want)
            return {"own_ms": _medians({"own": call}, args, kwargs)["own_ms"], "error": error}
        start = time.perf_counter()
        call = module if column == "eager" else _compiled(module, column, folder)
        got = call(*args, **kwargs)
        first = time.perf_counter() - start
        call(*args, **kwargs)
    return {"first_s": first, "error": error_of(got, want), "resident_mb": _resident()}


def _compiled(module: Any, column: str, folder: str) -> Callable[..., Any]:
    if column == "upstream":
        return _upstream(module, {"INFERENCE_PRECISION_HINT": "f32"})
    caching = {"model_caching": True, "cache_dir": folder} if folder else {}
    fusee = importlib.import_module("fusee")  # as a part of the first call
    found: Callable[..., Any] = fusee.compile(module, backend="openvino", options=caching)
    return found


def _upstream(module: Any, config: dict[str, Any]) -> Callable[..., Any]:
    options: dict[str, Any] = {
        "config": {"INFERENCE_NUM_THREADS": torch.get_num_threads(), **config}
    }
    found: Callable[..., Any] = torch.compile(module, backend="openvino", options=options)
    return found


def _steady(module: Any, args: Any, kwargs: Any) -> Row:
    calls = {name: _compiled(module, name, "") for name in COLUMNS}
    for call in calls.values():
        call(*args, **kwargs)
    return _medians(calls, args, kwargs)


def _medians(calls: Mapping[str, Callable[..., Any]], args: Any, kwargs: Any) -> Row:
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + STEADY_S
    while time.perf_counter() < end:
        for name, call in calls.items():
            call(*args, **kwargs)  # threads of the one before may still be waiting for work
            for _ in range(TURN):
                start = time.perf_counter()
                call(*args, **kwargs)
                times[name].append(time.perf_counter() - start)
    return {f"{name}_ms": statistics.median(found) * 1e3 for name, found in times.items()} | {
        f"{name}_best_ms": min(found) * 1e3 for name, found in times.items()
    }


def error_of(got: Any, want: Any) -> float:
    """The greatest distance of two results, relative to the largest element."""
    pairs = zip(pytree.tree_leaves(_plain(got)), pytree.tree_leaves(_plain(want)), strict=True)
    return max(
        ((a.double() - b.double()).abs().max() / (b.double().abs().max() + 1e-30)).item()
        for a, b in pairs
        if isinstance(b, Tensor)
    )


def _plain(x: Any) -> Any:
    return x.to_tuple() if hasattr(x, "to_tuple") else x


def _resident() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (row for row in status.read_text().splitlines() if row.startswith("VmRSS"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ------------------------------------------------------------------------------ all of it


def compare(model: str, size: str) -> Row:
    """All figures of one model."""
    row: Row = {"load": os.getloadavg()[0]}
    for column in ("eager", *COLUMNS):
        row[column] = _child("first", model, column, size, "")
    caching = [_cold_and_warm(model, size) for _ in range(TIMES)]
    for name, rows in zip(("cold", "warm"), zip(*caching)):
        row[name] = sorted(rows, key=lambda one: one.get("first_s", math.inf))[TIMES // 2]
    if is_right(row["upstream"]) and is_right(row["ours"]):
        row["steady"] = _child("steady", model, "both", size, "")
        row["own"] = _child("own", model, "upstream", size, "")
    return row


def _cold_and_warm(model: str, size: str) -> tuple[Row, Row]:
    """A process that finds an empty folder, and one that finds what it left."""
    with tempfile.TemporaryDirectory() as folder:
        given = ("first", model, "ours", size, folder)
        return _child(*given, caches=folder), _child(*given, caches=folder)


def _child(*arguments: str, caches: str | None = None) -> Row:
    with tempfile.TemporaryDirectory() as fresh:
        try:
            found = measure(
                ["--child", *arguments], Path(caches or fresh), 240, module="bench.openvino"
            )
        except Failed as error:
            return {"failed": str(error)[:300]}
    return found


def is_right(row: Row) -> bool:
    return row.get("error", math.inf) <= TOLERANCE


def table(rows: dict[str, Row]) -> str:
    """Markdown: a row per model, and the geometric means."""
    lines = [
        "| model | upstream | ours | first call, s: upstream / ours | steady, ms: upstream / ours |"
        " upstream in its own precision | first call with caching, s: cold / warm |"
        " memory, MB: ours / eager |",
        "|---|---|---|---|---|---|---|---|",
    ]
    figures = ("first", "steady", "own", "caching", "memory")
    ratios: dict[str, list[float]] = {name: [] for name in figures}
    for model, row in rows.items():
        upstream, ours, eager, cold, warm = (
            row.get(name, {}) for name in ("upstream", "ours", "eager", "cold", "warm")
        )
        cells = [model, _state(upstream), _state(ours)]
        cells.append(_ratio(ratios["first"], upstream, ours, "first_s", is_right(upstream)))
        steady = row.get("steady", {})
        cells.append(_pair(ratios["steady"], steady.get("upstream_ms"), steady.get("ours_ms")))
        own = row.get("own", {})
        cells.append(f"{own['own_ms']:.2f}, {_state(own)}" if "own_ms" in own else "-")
        cells.append(_ratio(ratios["caching"], cold, warm, "first_s", True))
        cells.append(_ratio(ratios["memory"], ours, eager, "resident_mb", True))
        lines.append(f"| {' | '.join(cells)} |")
    means = [_mean(ratios[name]) for name in figures]
    right = [sum(is_right(row.get(name, {})) for row in rows.values()) for name in COLUMNS]
    lines.append(f"| geometric mean, {right[0]} and {right[1]} right | | | {' | '.join(means)} |")
    return "\n".join(lines) + "\n"


def _state(row: Row) -> str:
    """How far from eager; "-" for what was not measured."""
    return f"error {row['error']:.0e}" if "error" in row else "fails" if row else "-"


def _ratio(kept: list[float], a: Row, b: Row, key: str, counts: bool) -> str:
    return _pair(kept, a.get(key) if counts else None, b.get(key))


def _pair(kept: list[float], a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return f"- / {b:.2f}" if b is not None else "-"
    kept.append(a / b)
    return f"{a:.2f} / {b:.2f} = {a / b:.2f}"


def _mean(found: list[float]) -> str:
    return f"{statistics.geometric_mean(found):.2f}" if found else "-"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.openvino")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--models", default=",".join(zoo.names()))
    parser.add_argument("--size", default="bench", choices=("bench", "test"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "openvino.json")
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(run(*given.child)))
        return
    data: Row = json.loads(given.out.read_text()) if given.out.exists() else {"models": {}}
    data["machine"] = {**machine(), "size": given.size}
    for model in given.models.split(","):
        data["models"][model] = compare(model, given.size)
        given.out.write_text(json.dumps(data, indent=1) + "\n")
        given.out.with_suffix(".md").write_text(table(data["models"]))
        print(model, json.dumps(data["models"][model]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
