"""The main job: densenet121 and a BERT under eager, TorchInductor, and Fusee by both its doors.

Each first call is a new process with empty caches; the steady state takes turns in one process.
Results are checked against eager. Then densenet121 is trained, eager and compiled steps in turns.
Writes out/demo.png.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from bench import report
from bench.child import Failed, measure
from bench.columns import TITLES, missing
from bench.results_file import machine

COLUMNS = ("eager", "inductor", "fusee", "compile")
PLOT = Path("out") / "demo.png"
# Of a quiet machine with two cores; nearly all of it is TorchInductor's.
MINUTES_PER_MODEL = 1.5

Row = dict[str, Any]


class Progress:
    """What is being done: a live table in a terminal, a line for each step elsewhere."""

    def __init__(self, console: Console, models: list[str], data: Row) -> None:
        self.console, self.models, self.data = console, models, data
        self.started = time.monotonic()
        self.live: Live | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table on the screen within; print it once at the end where there is none."""
        if self.console.is_terminal:
            with Live(self._table("starting"), console=self.console) as self.live:
                yield
                self.live.update(self._table(""))
            self.live = None
        else:
            yield
            self.console.print(self._table(""))

    def step(self, doing: str) -> None:
        """Say what begins now."""
        if self.live is not None:
            self.live.update(self._table(doing))
        else:
            self.console.print(f"[{time.monotonic() - self.started:4.0f} s] {doing}", markup=False)

    def _table(self, doing: str) -> Group:
        table = Table(title="first call with empty caches, steady state, agreement with eager")
        table.add_column("model")
        table.add_column("how")
        for heading in ("first call", "of it backend", "steady state", "agrees with eager"):
            table.add_column(heading, justify="right")
        for model in self.models:
            rows = self.data["models"].get(model, {})
            for column in COLUMNS:
                cold, steady = (rows.get(kind, {}).get(column, {}) for kind in ("cold", "steady"))
                table.add_row(
                    model if column == COLUMNS[0] else "",
                    TITLES[column],
                    cold.get("error") or _number(cold.get("first_call_s"), "s"),
                    "" if column == "eager" else _number(cold.get("backend_s"), "s"),
                    _number(steady.get("median_ms"), "ms"),
                    "" if column == "eager" else cold.get("agrees", ""),
                )
            table.add_section()
        return Group(table, Spinner("dots", text=doing) if doing else "")


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.2f} {unit}"


def run(models: list[str], size: str, progress: Progress) -> None:
    """Measure all rows into `progress.data`, telling of each as it begins."""
    usable = [column for column in COLUMNS if missing(column) is None]
    for model in models:
        rows: Row = progress.data["models"].setdefault(model, {"cold": {}, "steady": {}})
        for column in COLUMNS:
            progress.step(f"{model}: first call, {TITLES[column]}")
            reason = missing(column)
            arguments = ["cold", model, column, "--size", size]
            rows["cold"][column] = {"error": reason} if reason else _measure(arguments)
        progress.step(f"{model}: steady state, all in turns")
        found = _measure(["steady", model, ",".join(usable), "--size", size, "--seconds", "3"])
        if "error" in found:
            progress.console.print(f"{model}: {found['error']}", style="yellow", markup=False)
        else:
            eager_ms = found["eager"]["median_ms"]
            rows["steady"] = {c: {**row, "eager_ms": eager_ms} for c, row in found.items()}


def run_training(size: str, progress: Progress) -> bool:
    """Train densenet121 eagerly and under fusee.compile; whether the losses agree."""
    progress.step("densenet121: training steps, eager and fusee.compile in turns")
    row = _measure(["--size", size], module="bench.demo_training")
    console = progress.console
    if "error" in row:
        console.print(f"densenet121, training: {row['error']}", style="yellow", markup=False)
        return False
    speed = row["eager_s"] / row["later_s"]
    console.print(
        f"densenet121, training step with Adam: first {row['first_s']:.1f} s, second"
        f" {row['second_s']:.1f} s, then {speed:.2f}x as fast as eager; losses"
        f" {'agree' if row['agrees'] else 'differ'}: {row['losses'][1][-1]:.4f} at the end,"
        f" eager {row['losses'][0][-1]:.4f}"
    )
    return bool(row["agrees"])


def _measure(arguments: list[str], module: str = "bench.measure") -> Row:
    with tempfile.TemporaryDirectory(prefix="fusee-demo-") as caches:
        try:
            return measure(arguments, Path(caches), module=module)
        except Failed as error:
            return {"error": str(error)}


def conclude(data: Row) -> list[str]:
    """One sentence per model on what the figures of fusee.compile say."""
    lines = []
    for model, rows in data["models"].items():
        parts = []
        waits = [report.cold(rows, column, "first_call_s") for column in ("inductor", "compile")]
        if (times := report.ratio(*waits)) is not None:
            parts.append(f"first call {times:.1f}x shorter than TorchInductor's")
        for column in ("eager", "inductor"):
            speed = report.ratio(report.steady(rows, "compile"), report.steady(rows, column))
            if speed is not None:
                parts.append(f"then {speed:.2f}x as fast as {TITLES[column]}")
        lines.append(f"{model}: " + (", ".join(parts) or "no figures"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="densenet121,bert")
    parser.add_argument("--size", choices=("test", "bench"), default="bench")
    given = parser.parse_args()
    models = given.models.split(",")
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(
        f"Compiles {' and '.join(models)} in {len(COLUMNS)} ways: first calls with empty caches,"
        f" then the steady state; then trains densenet121.\nTakes about"
        f" {MINUTES_PER_MODEL * len(models) + 1:.0f} minutes on two quiet cores, nearly all of them"
        " TorchInductor's.",
        markup=False,
        highlight=False,
    )
    data: Row = {"machine": machine(), "overhead": {}, "models": {}}
    progress = Progress(console, models, data)
    with progress.shown():
        run(models, given.size, progress)
    trained = run_training(given.size, progress)
    for line in conclude(data):
        console.print(line)
    PLOT.parent.mkdir(exist_ok=True)
    report.plot(data, PLOT)
    console.print(f"plot: {PLOT}")
    ours = [rows["cold"]["compile"] for rows in data["models"].values()]
    return int(any(row.get("agrees") != "yes" for row in ours) or not trained)


if __name__ == "__main__":
    raise SystemExit(main())
