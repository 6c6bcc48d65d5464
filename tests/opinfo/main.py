"""The full sweep: `scripts/opinfo [--gradients | --errors | --sizes] [--ops a,b] ...`.

Ops run in child processes of some tens, so that a crash costs one op. Outcomes are appended to
out/opinfo/BACKEND.jsonl (others: BACKEND.gradients.jsonl) as they come; a second run does only
what is missing (`--again NAMES` repeats some, `--failed` those that failed). The summary lists what
failed, by op.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tests.opinfo.errors import wanted_errors
from tests.opinfo.exclusions import EXCLUDED
from tests.opinfo.gradients import GRADIENT_DTYPES, wanted_gradients
from tests.opinfo.results import errors_markdown, gradients_markdown, markdown, sizes_markdown
from tests.opinfo.sweep import DTYPES, wanted

ROOT = Path(__file__).parent.parent.parent
SILENCE_S = 600

Row = dict[str, Any]
Pair = tuple[str, str]


def load(path: Path) -> dict[Pair, Row]:
    """The latest outcome of each (op, dtype)."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["op"], row["dtype"]): row for row in rows}


def run_chunk(pairs: list[Pair], backend: str, path: Path, kind: Sequence[str] = ()) -> int:
    """Run pairs in one child and append their outcomes. Returns how many have one now."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.opinfo.chunk", backend, *kind],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(pairs))
    process.stdin.close()
    done = 0
    started: Pair = pairs[0]
    with path.open("a") as out:
        killer = threading.Timer(SILENCE_S, process.kill)
        killer.start()
        for line in process.stdout:
            killer.cancel()
            killer = threading.Timer(SILENCE_S, process.kill)
            killer.start()
            row = json.loads(line)
            if "start" in row:
                started = (row["start"][0], row["start"][1])
            else:
                out.write(line)
                out.flush()
                done += 1
        killer.cancel()
        code = process.wait()
        if code != 0 and done < len(pairs):
            text = f"the process ended with code {code}"
            row = {"op": started[0], "dtype": started[1], "passed": 0, "skipped": 0}
            out.write(json.dumps({**row, "failures": [text]}) + "\n")
            done += 1
    return done


def summary(rows: list[Row]) -> str:
    """Totals, then each op that failed with its first failure."""
    total: Counter[str] = Counter()
    lines = []
    for row in rows:
        total["samples passed"] += row["passed"]
        total["samples failed"] += len(row["failures"])
        total["samples that eager refuses"] += row["skipped"]
        total["samples left to eager, with a reason"] += sum(row.get("eager", {}).values())
        total["ops with dtype failed" if row["failures"] else "ops with dtype passed"] += 1
        if row["failures"]:
            count = len(row["failures"])
            lines.append(f"{row['op']} {row['dtype']}: {count} failed; {row['failures'][0]}")
    head = [f"{name}: {count}" for name, count in total.items()]
    return "\n".join([*sorted(lines), "", *head, f"patterns excluded: {len(EXCLUDED)}"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="opinfo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="fusee", help="a name, or module:function")
    parser.add_argument("--gradients", action="store_true", help="of ops that have any")
    parser.add_argument("--errors", action="store_true", help="inputs that eager refuses, and few")
    parser.add_argument("--sizes", action="store_true", help="samples as groups whose sizes vary")
    parser.add_argument("--one", action="store_true", help="one sample of each op, not all")
    parser.add_argument("--cuda", action="store_true", help="on a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--ops", default="", help="comma-separated; all unless given")
    parser.add_argument("--dtypes", default=",".join(dict.fromkeys([*DTYPES, *GRADIENT_DTYPES])))
    parser.add_argument("--again", action="store_true", help="run what has an outcome, too")
    parser.add_argument("--failed", action="store_true", help="run what failed once more")
    parser.add_argument("--write", type=Path, help="a file for the summary, in Markdown")
    parser.add_argument("--chunk", type=int, default=100, help="ops per process")
    given = parser.parse_args()
    if given.cuda and given.errors:
        parser.error("--cuda runs samples, gradients and sizes, no errors")
    kind = ["sizes"] * given.sizes + ["gradients"] * given.gradients
    kind += ["errors"] * given.errors + ["one"] * given.one + ["cuda"] * given.cuda
    name = ".".join([given.backend.replace(":", "."), *kind, "jsonl"])
    path = ROOT / "out" / "opinfo" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    choose: Any = wanted_gradients if given.gradients else wanted
    choose = wanted_errors if given.errors else choose
    names, dtypes = given.ops.split(",") if given.ops else [], given.dtypes.split(",")
    pairs = choose(names, dtypes, "cuda") if given.cuda else choose(names, dtypes)
    before = load(path)

    def is_done(pair: Pair) -> bool:
        row = before.get(pair)
        return not given.again and row is not None and not (given.failed and row["failures"])

    todo = [pair for pair in pairs if not is_done(pair)]
    console = Console()
    with Progress(console=console) as progress:
        task = progress.add_task("op database", total=len(pairs), completed=len(pairs) - len(todo))

        def work(part: list[Pair]) -> None:
            while part:
                done = run_chunk(part, given.backend, path, kind)
                progress.advance(task, done)
                if done == 0:
                    raise SystemExit(
                        "the child process gives no outcome; run tests.opinfo.chunk by hand"
                    )
                part = part[done:]

        parts = [todo[k : k + given.chunk] for k in range(0, len(todo), given.chunk)]
        with ThreadPoolExecutor(given.jobs) as pool:
            for _ in pool.map(work, parts):
                pass
    rows = [row for pair, row in load(path).items() if pair in set(pairs)]
    if given.write is not None:
        write = gradients_markdown if given.gradients else markdown
        write = errors_markdown if given.errors else write
        if given.sizes:
            write = functools.partial(sizes_markdown, learns=given.gradients)
        given.write.write_text(write(rows, given.backend))
    console.print(summary(rows), markup=False, highlight=False, soft_wrap=True)
    return int(any(row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
