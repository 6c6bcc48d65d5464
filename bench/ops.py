"""Small programs beside eager: `python -m bench.ops` measures the cases of bench/ops_cases.py.

Eager and compiled calls take turns in one process, in blocks of a millisecond or so; a case's
figure is the median over neighbouring blocks of eager's time by the compiled one. A case below
0.97 is measured twice more when all others are done, and the median of the three counts: what a
busy machine does to one of them does not repeat. A row per case is written at once, so that a run
that is stopped goes on where it was. Families run in new processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fusee
from bench.columns import missing
from bench.ops_cases import Case, cases
from bench.ops_report import SLOWER, ratio_of, write
from bench.results_file import Results, Row

HERE = Path(__file__).parent
BLOCK_S = 0.001
COLUMNS = ("compile", "inductor")
# Loose: what is wrong is wrong by much, and results are held to eager's by tests.
TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.01}

Call = Callable[[], Any]


def call_of(case: Case, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Call:
    """The case's function on its inputs, with the gradients of all of them where it trains."""
    if case.mode == "run":
        return lambda: function(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    results = [y for y in pytree.tree_leaves(function(*inputs)) if y.requires_grad]
    tangents = [torch.randn_like(y) for y in results]

    def step() -> Any:
        found = pytree.tree_leaves(function(*inputs))
        sums = [y for y in found if y.requires_grad]
        return [y.detach() for y in found], torch.autograd.grad(
            sums, wanted, tangents, allow_unused=True
        )

    return step


def measured(case: Case, columns: Sequence[str], seconds: float) -> Row:
    """Per column: eager's time by its own, and both in microseconds; whether results agree."""
    functions = {"eager": case.function()}
    calls: dict[str, Call] = {}
    agrees: dict[str, str] = {}
    with torch.set_grad_enabled(case.mode == "train"):
        calls["eager"] = call_of(case, functions["eager"], case.tensors())
        want = _result(calls["eager"])
        for column in columns:
            compile_ = fusee.compile if column == "compile" else torch.compile
            function = compile_(case.function())
            calls[column] = call_of(case, function, case.tensors())
            agrees[column] = _difference(_result(calls[column]), want)
        _result(calls["eager"])
        ratios = turns(calls, seconds)
    return {c: {**row, "agrees": agrees[c]} for c, row in ratios.items()}


def _result(call: Call) -> list[Any]:
    torch.manual_seed(1)
    return [x.clone() if isinstance(x, Tensor) else x for x in pytree.tree_leaves(call())]


def _difference(got: list[Any], want: list[Any]) -> str:
    """ "yes", or the first line of how they differ."""
    for one, other in zip(got, want, strict=True):
        try:
            kind = other.dtype if isinstance(other, Tensor) else None
            room = TOLERANCES.get(kind, 1e-3) if kind else 1e-3
            torch.testing.assert_close(one, other, rtol=room, atol=room, equal_nan=True)
        except AssertionError as error:
            return " ".join(str(error).split())[:150]
    return "yes"


def turns(calls: dict[str, Call], seconds: float) -> dict[str, Row]:
    """Blocks of each in turn, at least seven; each column's ratio is taken within a round.

    One thread's time is the processor's, which leaves out what others had of it meanwhile.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    blocks = {}
    for name, call in calls.items():
        call()
        start = clock()
        call()
        blocks[name] = max(1, min(500, int(BLOCK_S / max(clock() - start, 1e-6))))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    is_on = gc.isenabled()
    gc.disable()
    end = clock() + seconds * len(calls)
    try:
        while clock() < end or len(taken["eager"]) < 7:
            for name in names:
                call, count = calls[name], blocks[name]
                start = clock()
                for _ in range(count):
                    call()
                taken[name].append((clock() - start) / count)
            names.reverse()
    finally:
        if is_on:
            gc.enable()
    eager = taken.pop("eager")
    return {
        name: {
            "ratio": statistics.median(e / t for e, t in zip(eager, own, strict=True)),
            "us": statistics.median(own) * 1e6,
            "eager_us": statistics.median(eager) * 1e6,
        }
        for name, own in taken.items()
    }


# ------------------------------------------------------------------------------ all of them


def chosen(text: str, every: int) -> list[Case]:
    """Cases whose family a part of `text` is, or whose name has one in it; one of `every`."""
    words = [word for word in text.split(";") if word]
    found = {
        case.name: case
        for case in cases()
        if not words or any(word == case.family or word in case.name for word in words)
        if not zlib.crc32(case.name.encode()) % every  # by chance, but the same ones each time
    }
    return list(found.values())


def in_child(names: Sequence[str], given: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """The rows that a new process measures, as they come."""
    todo = list(names)
    while todo:
        with tempfile.TemporaryDirectory(prefix="fusee-bench-") as caches:
            environment = {
                **os.environ,
                "FUSEE_CACHE_DIR": caches,
                "TORCHINDUCTOR_CACHE_DIR": caches,
                "OMP_NUM_THREADS": str(given.threads),
            }
            arguments = ["measure", given.columns, str(given.threads), str(given.seconds)]
            child = subprocess.Popen(
                [sys.executable, "-m", "bench.ops", *arguments],
                cwd=HERE.parent, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            assert child.stdin and child.stdout
            child.stdin.write("\n".join(todo))
            child.stdin.close()
            for line in child.stdout:
                name, row = json.loads(line)
                todo.remove(name)
                yield name, row
            child.wait()
        if todo:  # it ended in the middle of the first of what is left
            ended = todo.pop(0)
            row = {"error": f"the process ended with code {child.returncode}"}
            yield ended, dict.fromkeys(given.columns.split(","), row)


def measure_here(columns: Sequence[str], threads: int, seconds: float) -> None:
    """The cases named on stdin, a line of JSON each."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    by_name = {case.name: case for case in cases()}
    for name in sys.stdin.read().splitlines():
        try:
            found = measured(by_name[name], columns, seconds)
        except Exception as error:  # noqa: BLE001  a case that fails is a row, too
            text = f"{type(error).__name__}: {error}"[:200]
            found = {column: {"error": text} for column in columns}
        print(json.dumps([name, found]), flush=True)
        gc.collect()


def run(given: argparse.Namespace) -> None:
    columns = given.columns.split(",")
    given.columns = ",".join(c for c in columns if missing(c) is None)
    columns = given.columns.split(",")
    results = Results(given.results)
    kind = f"{given.threads} threads"
    todo = chosen(given.only, given.every)
    if not given.again:
        todo = [c for c in todo if not all(results.has(c.name, kind, one) for one in columns)]
    families: dict[str, list[str]] = {}
    for case in todo:
        families.setdefault(case.family, []).append(case.name)

    def put(name: str, row: Row, *, first: bool) -> None:
        for column, one in row.items():
            before = results.data["models"].get(name, {}).get(kind, {}).get(column, {})
            kept = [] if first else before.get("ratios", [])
            if "ratio" in one:
                one["ratios"] = [*kept, one.pop("ratio")]
            elif kept:
                continue
            results.put(name, kind, column, {"load": os.getloadavg()[0], **one})

    done = 0
    for family, names in families.items():
        for name, row in in_child(names, given):
            put(name, row, first=True)
            done += 1
            print(f"{done}/{len(todo)} {family}: {name} {_shown(row)}", flush=True)
    for _ in range(2):
        slow = [
            case.name for case in todo
            if any(ratio_of(row) < SLOWER[0] for row in results.data["models"]
                   .get(case.name, {}).get(kind, {}).values() if "ratios" in row)
        ]  # fmt: skip
        for name, row in in_child(slow, given):
            put(name, row, first=False)
            print(f"again: {name} {_shown(row)}", flush=True)
    write(results.data, given.results, given.page)


def _shown(row: Row) -> str:
    return ", ".join(
        f"{c} {one['error']}"
        if "error" in one
        else f"{c} {one.get('ratio', one['ratios'][-1]):.2f}"
        for c, one in row.items()
    )


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        columns, threads, seconds = sys.argv[2:]
        measure_here(columns.split(","), int(threads), float(seconds))
        return
    parser = argparse.ArgumentParser(prog="bench.ops", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--columns", default="compile", help="compile,inductor")
    parser.add_argument("--seconds", type=float, default=0.02, help="per case and column")
    parser.add_argument("--only", default="", help="parts of names or families, apart by ;")
    parser.add_argument("--every", type=int, default=1, help="only one of n cases")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "ops.json")
    parser.add_argument("--page", type=Path, help="write the tables into this page, too")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
