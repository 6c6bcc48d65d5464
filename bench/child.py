"""Runs bench.measure in a new process with its own cache folders and watches its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.results_file import Results

ROOT = Path(__file__).parent.parent
WATCH_S = 0.1


class Failed(Exception):
    """The measurement ended without a result; the text is the last line it wrote to stderr."""


def measure(
    arguments: list[str], caches: Path, timeout_s: float = 1200, *, module: str = "bench.measure"
) -> dict[str, Any]:
    """The JSON that `python -m MODULE ARGUMENTS` prints.

    `peak_bytes` becomes the larger of what the process says and what was seen of it and its
    children together while it compiled (proportional set size where the system has it).
    raises   Failed
    """
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "FUSEE_CACHE_DIR": str(caches / "fusee"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    # Packages are installed with bytecode, and whoever has none of Fusee writes it at the first
    # import: without this a first call would be a measure of Python's compiler.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    watch = _Watch(process)
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    killer = threading.Timer(timeout_s, process.kill)
    for thread in (watch, reader, killer):
        thread.daemon = True
        thread.start()
    lines: list[str] = []
    for line in process.stdout or ():
        lines.append(line)
        watch.follow(line.strip())
    code = process.wait()
    killer.cancel()
    watch.stop()
    reader.join()
    if code != 0:
        last = next((line.strip() for line in reversed(errors) if line.strip()), "")
        raise Failed(last or f"the process ended with code {code}")
    found: dict[str, Any] = json.loads(lines[-1])
    if "peak_bytes" in found:
        found["peak_bytes"] = max(found["peak_bytes"], watch.peak_bytes)
    return found


def measure_all(
    jobs: Sequence[tuple[str, str, str]],
    results: Results,
    measured: Callable[[str, str, str], Any],
    together: str,
) -> None:
    """Measure each job, with progress; results are kept.

    jobs      kind, program, columns: comma-separated, where one process measures several
    measured  a job's row, or a row for each column. raises Failed
    together  the kind of which one process measures all columns
    """
    console = Console()
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console) as progress:
        task = progress.add_task("", total=len(jobs))
        for kind, name, column in jobs:
            progress.update(task, description=f"{name}: {kind} {column}")
            load = os.getloadavg()[0]
            try:
                found = measured(kind, name, column)
            except Failed as error:
                console.print(f"{name}: {kind} {column}: {error}", style="yellow", markup=False)
                found = {"error": str(error)}
            rows = found if kind == together and "error" not in found else {column: found}
            for one, row in rows.items():
                results.put(name, kind, one, {"load": load, **row})
            progress.advance(task)


def with_empty_caches(
    more: Sequence[str], timeout_s: float, *, module: str, twice: str = ""
) -> Callable[[str, str, str], Any]:
    """Measures a job in a new process, whose caches are empty; `more` follows its arguments.

    twice   the kind of job that runs in two processes, of which the second finds the caches of
            the first, and is measured
    """

    def measured(*job: str) -> Any:
        with tempfile.TemporaryDirectory(prefix="fusee-bench-") as caches:
            arguments = ["measure", *job, *more]
            if job[0] == twice:
                measure(arguments, Path(caches), timeout_s, module=module)
            return measure(arguments, Path(caches), timeout_s, module=module)

    return measured


class _Watch(threading.Thread):
    """Samples the memory of a process and its descendants between "compiling" and "compiled"."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__()
        self.process = psutil.Process(process.pid)
        self.peak_bytes = 0
        self.active = False
        self.ended = threading.Event()

    def follow(self, line: str) -> None:
        if line in ("compiling", "compiled"):
            self.active = line == "compiling"

    def stop(self) -> None:
        self.ended.set()
        self.join()

    def run(self) -> None:
        while not self.ended.wait(WATCH_S):
            if self.active:
                start = time.perf_counter()
                self.peak_bytes = max(self.peak_bytes, self._sample())
                # Looking must not cost the watched process its cores.
                self.ended.wait(4 * (time.perf_counter() - start))

    def _sample(self) -> int:
        total = 0
        try:
            family = [self.process, *self.process.children(recursive=True)]
        except psutil.Error:
            return 0
        for member in family:
            try:
                total += _bytes_of(member)
            except psutil.Error:
                continue  # it ended while we looked
        return total


def _bytes_of(process: psutil.Process) -> int:
    info = process.memory_full_info() if hasattr(psutil, "LINUX") else process.memory_info()
    return int(getattr(info, "pss", info.rss))
