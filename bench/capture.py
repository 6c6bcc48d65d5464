"""Capture and guards: `python -m bench.capture` measures TorchDynamo and fusee.compile.

Both get the same backend, which does nothing, so that what remains of a call is theirs.

    cold     a new process: from the call of torch.compile or fusee.compile to the end of the first
             call, without the time inside the backend and inside the graph. That is imports,
             capture, the guards' construction and one check of them
    warm     the same in a process in which the same one has compiled a small module before, which
             takes imports and what is set up once out of it
    import   `import fusee` and the first use of fusee.compile, after `import torch`
    guards   a later call, the two taking turns in one process: checks, and the way to the graph

All is processor time of the process: both do their work in one thread, and what else runs on the
machine must not count. First calls are the median of several processes, later calls the fastest of
many turns.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import fx, nn

from bench.capture_report import write
from bench.child import ROOT, Failed, measure
from bench.measure import Call
from bench.results_file import Results, Row
from tests.models import zoo

COLUMNS = ("dynamo", "compile")
FIRST_CALLS = ("cold", "warm")
PROGRAMS = ("one_op", "resnet18", "densenet121", "bert_12_layers")

Program = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]


class Idle:
    """A backend that compiles nothing, and the processor time in it and in its graphs."""

    def __init__(self) -> None:
        self.inside_s = 0.0
        self.graphs = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            begin = time.process_time()
            result = gm(*args)  # both make the graph's code at its first call
            self.inside_s += time.process_time() - begin
            return result

        return run


def compiled(column: str, program: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """`program` as a column compiles it. What it imports, it imports here or when it is called."""
    if column == "dynamo":
        return torch.compile(program, backend=backend)
    made: Callable[..., Any] = importlib.import_module("fusee").compile(program, backend=backend)
    return made


def first_call(kind: str, model: str, column: str, size: zoo.Size) -> Row:
    """Processor and wall-clock seconds of capture and guards in this process."""
    torch.set_num_threads(1)  # those that wait for work take processor time
    module, args, kwargs = zoo.load(model, size)
    with torch.no_grad():
        module(*args, **kwargs)
        if kind == "warm":
            small = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
            compiled(column, small, Idle())(torch.ones(2, 4))
        backend, load = Idle(), os.getloadavg()[0]
        wall, begin = time.perf_counter(), time.process_time()
        compiled(column, module, backend)(*args, **kwargs)
        seconds = time.process_time() - begin - backend.inside_s
        wall = time.perf_counter() - wall
    return {"cpu_s": seconds, "wall_s": wall, "graphs": backend.graphs, "load": load}


def importing() -> Row:
    """Seconds until fusee.compile can be called."""
    load, wall, begin = os.getloadavg()[0], time.perf_counter(), time.process_time()
    assert importlib.import_module("fusee").compile
    cpu_s, wall_s = time.process_time() - begin, time.perf_counter() - wall
    return {"cpu_s": cpu_s, "wall_s": wall_s, "load": load}


def program_of(name: str) -> Program:
    """What the calls of a row of `guards` are calls of."""
    if name == "one_op":
        return (lambda x: x + 1), (torch.ones(4),), {}
    if name != "bert_12_layers":
        return zoo.load(name, "test")
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=12, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    return BertModel(config).eval(), (torch.ones(1, 8, dtype=torch.int64),), {}


def guards(name: str, seconds: float) -> dict[str, Row]:
    """Per column a call whose graph is a function that gives what it gave before."""
    torch.set_num_threads(1)

    def constant(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        result = gm(*inputs)
        return lambda *args: result

    program, args, kwargs = program_of(name)
    calls: dict[str, Call] = {}
    with torch.no_grad():
        for column in COLUMNS:
            made = compiled(column, program, constant)
            made(*args, **kwargs)
            calls[column] = lambda made=made: made(*args, **kwargs)  # type: ignore[misc]
        found = fastest(calls, seconds)
    count = len(list(program.parameters())) if isinstance(program, nn.Module) else 0
    return {
        column: {"fastest_ms": taken * 1e3, "parameters": count} for column, taken in found.items()
    }


def fastest(calls: dict[str, Call], seconds: float, repeats: int = 100) -> dict[str, float]:
    """Processor seconds of a call in its fastest turn, `seconds` for each in all."""
    found = dict.fromkeys(calls, math.inf)
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or math.inf in found.values():
        for name, call in calls.items():
            call()
            begin = time.process_time()
            for _ in range(repeats):
                call()
            found[name] = min(found[name], (time.process_time() - begin) / repeats)
    return found


def child(arguments: Sequence[str]) -> None:
    """One measurement in this process, as JSON."""
    kind, name, column, size = arguments
    if kind == "guards":
        print(json.dumps(guards(name, seconds=3.0)))
    elif kind == "import":
        print(json.dumps(importing()))
    else:
        print(json.dumps(first_call(kind, name, column, "test" if size == "test" else "bench")))


def run(arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fusee-bench-") as caches:
        return measure(arguments, Path(caches), module="bench.capture")


def first_calls(kind: str, model: str, size: str, repeats: int, results: Results) -> None:
    """The columns in turns; the row of each is that of its median."""
    columns = COLUMNS if kind in FIRST_CALLS else ("compile",)
    rows: dict[str, list[Row]] = {column: [] for column in columns}
    for _ in range(repeats):
        for column in columns:
            rows[column].append(run([kind, model, column, size]))
    for column, found in rows.items():
        middle = statistics.median_low(row["cpu_s"] for row in found)
        row = next(row for row in found if row["cpu_s"] == middle)
        results.put(model, kind, column, {**row, "all_cpu_s": [r["cpu_s"] for r in found]})


def later_calls(name: str, results: Results) -> None:
    load = os.getloadavg()[0]
    for column, row in run(["guards", name, ",".join(COLUMNS), "test"]).items():
        results.put(name, "guards", column, {**row, "load": load})


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.capture", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(zoo.MODELS), help="comma-separated")
    parser.add_argument("--kinds", default="import,cold,warm,guards", help="comma-separated")
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results/capture.json")
    parser.add_argument("--size", choices=("test", "bench"), default="bench")
    parser.add_argument("--repeats", type=int, default=3, help="processes per figure")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    given = parser.parse_args()
    # an installed package has its bytecode beside it, as torch has
    compileall.compile_dir(ROOT / "fusee", quiet=1)
    results, kinds, console = Results(given.results), given.kinds.split(","), Console()
    todo = [(kind, m) for m in given.models.split(",") for kind in FIRST_CALLS if kind in kinds]
    todo += [("guards", name) for name in PROGRAMS if "guards" in kinds]
    todo += [("import", "fusee")] if "import" in kinds else []
    if not given.again:
        todo = [
            (k, m)
            for k, m in todo
            if not all(results.has(m, k, c) for c in COLUMNS[k == "import" :])
        ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(todo))
        for kind, name in todo:
            progress.update(task, description=f"{name}: {kind}")
            try:
                if kind == "guards":
                    later_calls(name, results)
                else:
                    first_calls(kind, name, given.size, given.repeats, results)
            except Failed as error:
                console.print(f"{name}, {kind}: {error}", style="yellow", markup=False)
            progress.advance(task)
    write(results.data, given.results)
    console.print(given.results.with_suffix(".md").read_text(), markup=False, soft_wrap=True)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in (*FIRST_CALLS, "guards", "import"):
        child(sys.argv[1:])
    else:
        main()
