"""The whole zoo: `scripts/zoo [--family F] [--only a,b] [--stages ...] [--jobs N] [--again]`.

Each model runs in a process of its own, with a time limit and a memory limit, so that a crash costs
one model. What is known of it is appended to out/zoo/TORCH.BACKEND.jsonl stage by stage; a second
run does only what is missing. Without scripts/setup: `PYTHONPATH=. python -m tests.zoo.main ...`,
where torch is installed, and whatever of transformers, timm, torchvision and diffusers is to run.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import torch

from tests.zoo.judge import STAGES, judge
from tests.zoo.table import markdown, reasons

ROOT = Path(__file__).parent.parent.parent
FAMILIES = {
    "transformers": "tests.zoo.transformers_models",
    "timm": "tests.zoo.timm_models",
    "torchvision": "tests.zoo.torchvision_models",
    "diffusers": "tests.zoo.diffusers_models",
}

Row = dict[str, Any]
Key = tuple[str, str]


def available(wanted: list[str]) -> list[str]:
    """Families whose package is installed; says which are not."""
    found = []
    for family in wanted or list(FAMILIES):
        if importlib.util.find_spec(family) is None:
            print(f"{family} is not installed: its models are left out", file=sys.stderr)
        else:
            found.append(family)
    return found


def load(path: Path) -> dict[Key, Row]:
    """The latest part of each model and stage, in one row a model."""
    rows: dict[Key, Row] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            part = json.loads(line)
            row = rows.setdefault((part["family"], part["model"]), {})
            if part["stage"] == "built" and "error" in part["found"]:
                row.clear()
            row[part["stage"]] = part["found"]
    return rows


# ---------------------------------------------------------------------------- one model


def child(
    sender: Connection, family: str, name: str, stages: tuple[str, ...], given: argparse.Namespace
) -> None:
    """Sends (stage, part of the row) as they become known."""
    if given.device == "cpu":  # CUDA reserves more addresses than there is memory
        memory = given.memory << 30
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    build = importlib.import_module(FAMILIES[family]).build
    stage = "built"
    try:
        for stage, found in judge(
            functools.partial(build, name), stages, not given.quick, given.backend, given.device
        ):
            sender.send((stage, found))
            following = [*stages, ""]
            stage = following[following.index(stage) + 1] if stage in stages else stages[0]
    except Exception as error:  # noqa: BLE001  any refusal is the row
        text = f"{type(error).__name__}: {error}"
        sender.send((stage, {"right": False, "error": text[:20000]}))
    sender.close()


def run_model(
    key: Key,
    stages: tuple[str, ...],
    given: argparse.Namespace,
    keep: Callable[[Key, str, Row], None],
) -> None:
    """Run one model in a process; `keep` takes each part of its row."""
    # A fork server has asked for the GPUs, and none of its children may use them then.
    kinds: dict[str, ForkServerContext | SpawnContext] = {
        "cpu": multiprocessing.get_context("forkserver"),
        "cuda": multiprocessing.get_context("spawn"),
    }
    context = kinds[given.device]
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender, *key, stages, given), daemon=True)
    process.start()
    sender.close()
    left = ["built", *stages]
    text = "the process ended"
    while left:
        if not receiver.poll(given.timeout):
            text = f"not done within {given.timeout} s"
            process.kill()
            break
        try:
            stage, found = receiver.recv()
        except EOFError:
            break
        keep(key, stage, found)
        if "error" in found and stage == "built":
            left = []
        elif stage in left:
            left.remove(stage)
    process.join(10)
    if left:
        code = process.exitcode
        process.kill()
        keep(key, left[0], {"right": False, "error": f"{text} (code {code})"})


def run_all(todo: list[tuple[Key, tuple[str, ...]]], given: argparse.Namespace, path: Path) -> None:
    lock = threading.Lock()
    waiting = list(reversed(todo))
    begin = time.perf_counter()

    def keep(key: Key, stage: str, found: Row) -> None:
        part = {"family": key[0], "model": key[1], "stage": stage, "found": found}
        with lock, path.open("a") as out:
            out.write(json.dumps(part) + "\n")

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                key, stages = waiting.pop()
                number = len(todo) - len(waiting)
            run_model(key, stages, given, keep)
            seconds = time.perf_counter() - begin
            print(f"{seconds:6.0f} s  {number:4} of {len(todo)}  {' '.join(key)}", flush=True)

    threads = [threading.Thread(target=work) for _ in range(given.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---------------------------------------------------------------------------- all


def main() -> int:
    parser = argparse.ArgumentParser(prog="zoo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", default="", help="comma-separated; all unless given")
    parser.add_argument("--only", default="", help="models, comma-separated; all unless given")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--again", action="store_true", help="run what has an outcome, too")
    parser.add_argument("--failed", action="store_true", help="run once more what is not right")
    parser.add_argument("--broken", action="store_true", help="run once more what has breaks")
    parser.add_argument("--part", default="1/1", help="e.g. 2/4: the second quarter alone")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a stage")
    parser.add_argument("--memory", type=int, default=24, help="GiB for a model's process")
    parser.add_argument("--quick", action="store_true", help="one start where numbers differ")
    parser.add_argument("--backend", default="fusee", help="eager: what capture alone does")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: models and inputs on a GPU"
    )
    parser.add_argument("--list", action="store_true", help="names alone")
    parser.add_argument("--write", type=Path, help="a file for the table, in Markdown")
    parser.add_argument("--reasons", type=Path, help="a file for the reasons, most frequent first")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.set_forkserver_preload(["tests.zoo.preload"])
    version = torch.__version__.partition("+")[0]
    kind = given.backend if given.device == "cpu" else f"{given.backend}.{given.device}"
    path = ROOT / "out" / "zoo" / f"{version}.{kind}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    only = [name for name in given.only.split(",") if name]
    keys = [
        (family, name)
        for family in available([x for x in given.family.split(",") if x])
        for name in importlib.import_module(FAMILIES[family]).names()
        if not only or name in only
    ]
    part, _, parts = given.part.partition("/")
    keys = keys[int(part) - 1 :: int(parts)]
    if given.list:
        print("\n".join(" ".join(key) for key in keys))
        return 0
    todo = to_do(keys, load(path), given)
    if todo:
        run_all(todo, given, path)
    rows = {key: row for key, row in load(path).items() if key in set(keys)}
    if given.write is not None:
        given.write.write_text(markdown(rows, given.backend))
    if given.reasons is not None:
        given.reasons.write_text(reasons(rows))
    return 0


def to_do(
    keys: list[Key], known: dict[Key, Row], given: argparse.Namespace
) -> list[tuple[Key, tuple[str, ...]]]:
    """Models and their stages that are to run."""
    wanted = given.stages.split(",")
    found = []
    for key in keys:
        row = known.get(key, {})
        stages = tuple(s for s in wanted if s not in row or is_again(row[s], given))
        is_unbuilt = "error" in row.get("built", {})
        if stages and (not is_unbuilt or given.again or given.failed):
            found.append((key, stages))
    return found


def is_again(found: Row, given: argparse.Namespace) -> bool:
    is_broken = bool(found.get("breaks") or found.get("eager"))
    return given.again or (given.failed and not found["right"]) or (given.broken and is_broken)


if __name__ == "__main__":
    sys.exit(main())
