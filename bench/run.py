"""`python -m bench.run`: measures models x columns and writes results, a table and a plot.

Each cold measurement is a new process with empty caches; then the same once more with the caches
it left (warm). Steady state: the columns take turns in one process. What the results file holds is
not measured again, so that a run can be stopped and resumed, and TorchInductor's columns reused:

    python -m bench.run --columns eager,fusee --baseline bench/results/baseline.json --again
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report
from bench.child import Failed, measure
from bench.columns import COLUMNS, TITLES, missing
from bench.results_file import Results
from tests.models import zoo

HERE = Path(__file__).parent
QUICK = ("resnet18", "bert", "convnext_atto")


class Job(NamedTuple):
    kind: str  # cold, steady, overhead
    model: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        who = (
            TITLES.get(self.columns[0], self.columns[0]) if self.kind == "cold" else "steady state"
        )
        return f"{self.model}: {who}"


def jobs(
    models: Sequence[str],
    columns: Sequence[str],
    kinds: Sequence[str],
    done: Results | None,
    busy: float | None = None,
) -> list[Job]:
    """What is still to be measured, models one after the other."""

    def has(model: str, kind: str, column: str) -> bool:
        return done is not None and done.has(model, kind, column, busy)

    found = []
    for model in models:
        if "cold" in kinds:
            todo = [c for c in columns if not has(model, "cold", c)]
            found += [Job("cold", model, (column,)) for column in todo]
        if "steady" in kinds and not all(has(model, "steady", c) for c in columns):
            found.append(Job("steady", model, tuple(dict.fromkeys(("eager", *columns)))))
    if "steady" in kinds:
        found.append(Job("overhead", "ten_kernels", tuple(dict.fromkeys(("eager", *columns)))))
    return found


def run_job(job: Job, results: Results, extra: list[str]) -> str:
    """Measure and store. Returns what to tell: "" or the reason why there is no figure."""
    arguments = [job.kind, job.model, ",".join(job.columns), *extra]
    with tempfile.TemporaryDirectory(prefix="fusee-bench-") as caches:
        if job.kind == "cold":
            return _cold(job, results, arguments, Path(caches))
        usable = [column for column in job.columns if missing(column) is None]
        arguments[2] = ",".join(usable)
        load = os.getloadavg()[0]
        try:
            found = measure(arguments, Path(caches))
        except Failed as error:
            return str(error)
    for column, row in found.items():
        row["eager_ms"] = found["eager"]["median_ms"]
        row["load"] = load
        if job.kind == "overhead":
            results.data["overhead"][column] = row
            results.save()
        else:
            results.put(job.model, "steady", column, row)
    return ""


def _cold(job: Job, results: Results, arguments: list[str], caches: Path) -> str:
    column = job.columns[0]
    reason = missing(column)
    if reason is not None:
        results.put(job.model, "cold", column, {"error": reason})
        return reason
    for kind in ("cold", "warm") if column != "eager" else ("cold",):
        try:
            results.put(job.model, kind, column, measure(arguments, caches))
        except Failed as error:
            results.put(job.model, kind, column, {"error": str(error)})
            return str(error)
    return ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.run", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="comma-separated; all models unless given")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="comma-separated")
    parser.add_argument("--kinds", default="cold,steady", help="cold, steady or both")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "results.json")
    parser.add_argument(
        "--baseline", type=Path, help="take columns that are not measured from here"
    )
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument(
        "--quick", action="store_true", help="three models, small sizes, one second"
    )
    parser.add_argument("--busy", type=float, help="measure again what began at a load above this")
    parser.add_argument("--seconds", type=float, default=4.0, help="per column, steady state")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    given = parser.parse_args(arguments)
    if given.quick and given.results == parser.get_default("results"):
        given.results = Path("out") / "quick.json"
    return given


def main() -> None:
    given = parse()
    models = given.models.split(",") if given.models else list(QUICK if given.quick else zoo.MODELS)
    unknown = [name for name in models if name not in zoo.MODELS]
    if unknown:
        raise SystemExit(f"no such model: {', '.join(unknown)}; known: {', '.join(zoo.MODELS)}")
    results = Results(given.results, given.baseline)
    done = None if given.again else results
    todo = jobs(models, given.columns.split(","), given.kinds.split(","), done, given.busy)
    extra = (
        ["--size", "test", "--seconds", "1"] if given.quick else ["--seconds", str(given.seconds)]
    )
    extra += ["--threads", str(given.threads)]
    console = Console()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("", total=len(todo))
        for job in todo:
            progress.update(task, description=str(job))
            trouble = run_job(job, results, extra)
            if trouble:
                console.print(f"{job}: {trouble}", style="yellow", markup=False)
            progress.advance(task)
    report.write(results.data, given.results)
    console.print(report.as_markdown(results.data), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
