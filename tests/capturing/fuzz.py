"""`scripts/fuzz [COUNT] [--first SEED] [--show]`: random programs, eager beside compiled.

Each program that differs is shrunk and printed with its seed. The last lines say how many programs
ran whole, in pieces and eagerly. Exit status 1 if any differed.

`scripts/fuzz --jobs 16 --seconds 450 --failures FILE` runs many processes, each with seeds of its
own, until the time or COUNT is over. A program that kills its process, or hangs, counts as one that
differs, and a new process goes on behind it. Programs that differ are appended to FILE as they are;
`scripts/fuzz 1 --first SEED` shrinks one.

With `--device cuda` all tensors that programs make are made there. With `--edits` each program is
edited between processes that share captures (edits.py).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import queue
import re
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from typing import Any, TextIO

import torch

from tests.capturing.differences import Outcome, difference, shrunk
from tests.capturing.edits import difference_after_edits
from tests.capturing.programs import program
from tests.capturing.vocabulary import PREAMBLE

PER_PROCESS = 2000  # programs, then a new process: what they leave behind does not add up
HANGS_S = 200
MEMORY = 8 << 30
FACTORIES = {"tensor", "ones", "zeros", "full", "arange", "eye", "rand", "randn", "empty"}


def main() -> int:
    args = arguments()
    if args.worker:
        work(args)
        return 0
    started = time.monotonic()
    total = Total(open(args.failures, "a") if args.failures else None)  # noqa: SIM115
    if args.jobs:
        spread(args, total)
    else:
        alone(args, total)
    seconds = time.monotonic() - started
    for reason, count in total.reasons.most_common(40 if args.show or args.whole else 12):
        print(f"  {count:5d}  {reason}")
    for what, seeds in sorted(total.classes.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds)} differ: {seeds[:8]}\n    {what[:300]}")
    programs = sum(total.kinds.values())
    print(
        f"{programs} programs in {seconds:.0f} s ({programs / seconds:.1f} a second):"
        f" {dict(total.kinds)}; {total.failed or 'none'} differ{'' if total.failed else 's'}"
    )
    return bool(total.failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=None, help="programs to run")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--show", action="store_true", help="print each program before it runs")
    parser.add_argument("--whole", action="store_true", help="print failures as they are")
    parser.add_argument("--most", type=int, default=20, help="stop after so many failures")
    parser.add_argument("--jobs", type=int, default=0, help="processes")
    parser.add_argument("--seconds", type=float, default=None, help="stop when they are over")
    parser.add_argument("--failures", help="the file that programs that differ are appended to")
    parser.add_argument(
        "--native", type=int, default=20, help="one program in so many runs as machine code"
    )
    parser.add_argument("--device", default="cpu", help="where tensors are made")
    parser.add_argument("--edits", action="store_true", help="edit programs between processes")
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count is None:
        args.count = 3000 if args.seconds is None else 10**9
    return args


class Total:
    """What all programs gave."""

    def __init__(self, failures: TextIO | None) -> None:
        self.failures = failures
        self.failed = 0
        self.kinds: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.classes: dict[str, list[int]] = {}
        self.lock = threading.Lock()

    def add(self, found: dict[str, Any]) -> None:
        """Count one program's result."""
        with self.lock:
            self.kinds[found["kind"]] += 1
            self.reasons.update(found["reasons"])
            what = found["what"]
            if what is None:
                return
            self.failed += 1
            self.classes.setdefault(told(what), []).append(found["seed"])
            if self.failures is not None:
                text = f"---- seed {found['seed']}\n{what}\n{body(program(found['seed']))}\n"
                self.failures.write(text)
                self.failures.flush()


def run(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one program, and say how it went."""
    found, source = Outcome(), on_device(program(seed), args.device)
    if args.edits:
        what = difference_after_edits(source, seed)
    else:
        what = difference(source, found, is_native(seed, args.native))
    return {
        "seed": seed,
        "what": what,
        "kind": "eager" if found.eager else "in pieces" if found.breaks else "whole",
        "reasons": list({re.sub(r"'.*'|\d+", "_", r)[:70] for r in found.eager + found.breaks}),
    }


def on_device(source: str, device: str) -> str:
    """A program whose tensors are made on a device."""
    if device == "cpu":
        return source
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).removeprefix("torch.") in FACTORIES
        ):
            if all(keyword.arg != "device" for keyword in node.keywords):
                node.keywords.append(ast.keyword("device", ast.Constant(device)))
    return ast.unparse(tree)


def is_native(seed: int, native: int) -> bool:
    return native > 0 and seed % native == native - 1


def alone(args: argparse.Namespace, total: Total) -> None:
    """Run all programs in this process."""
    warnings.filterwarnings("ignore")
    last = started = time.monotonic()
    for seed in range(args.first, args.first + args.count):
        if args.show:
            print(body(program(seed)), flush=True)
        found = run(seed, args)
        total.add(found)
        if found["what"] is not None:
            report(seed, found["what"], args)
            if total.failed >= args.most:
                break
        if time.monotonic() - last > 30:
            last = time.monotonic()
            done = seed - args.first + 1
            print(f"{done} programs, {total.failed} differ", file=sys.stderr, flush=True)
        if args.seconds is not None and time.monotonic() - started > args.seconds:
            break


def report(seed: int, what: str, args: argparse.Namespace) -> None:
    """Print a failure and the smallest program that still fails."""
    print(f"---- seed {seed}\n{what}", flush=True)
    text = body(program(seed))
    if not (args.whole or args.edits):
        kind, native = told(what), is_native(seed, args.native)

        def now(text: str) -> str:
            return difference(on_device(PREAMBLE + text, args.device), compiled=native) or ""

        text = shrunk(text, lambda text: told(now(text)) == kind)
        what = now(text) or what
    print(f"{text}\n{what}\n", flush=True)


# ------------------------------------------------------------------------------ many processes


def spread(args: argparse.Namespace, total: Total) -> None:
    """Run all programs in `args.jobs` processes."""
    ends = time.monotonic() + (args.seconds or 10**9)
    jobs = [
        threading.Thread(target=_job, args=(args, args.first + k, ends, total))
        for k in range(args.jobs)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()


def _job(args: argparse.Namespace, seed: int, ends: float, total: Total) -> None:
    """Run each `args.jobs`-th program from `seed` on, in one process after the other."""
    while seed < args.first + args.count and time.monotonic() < ends:
        command = [sys.executable, "-m", "tests.capturing.fuzz", "--worker", f"--first={seed}"]
        command += [f"--stride={args.jobs}", f"--native={args.native}", f"--device={args.device}"]
        command += ["--edits"] * args.edits
        command += [str(min(PER_PROCESS, (args.first + args.count - seed - 1) // args.jobs + 1))]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        seed = _follow(process, lines, seed, args.jobs, ends, total)
        process.kill()
        process.wait()


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def _follow(
    process: subprocess.Popen[str],
    lines: queue.SimpleQueue[str],
    seed: int,
    stride: int,
    ends: float,
    total: Total,
) -> int:
    """Count what a process tells, until it ends or hangs. Returns the seed to go on with."""
    while True:
        rest = ends - time.monotonic()
        try:
            line = lines.get(timeout=max(0.0, min(HANGS_S, rest)))
        except queue.Empty:
            if rest > HANGS_S:
                total.add(_lost(seed, f"it hangs for {HANGS_S} s"))
            return seed + stride
        if not line:
            if process.wait() != 0:
                total.add(_lost(seed, f"the process died: {process.returncode}"))
                return seed + stride
            return seed
        total.add(json.loads(line))
        seed += stride


def _lost(seed: int, what: str | None) -> dict[str, Any]:
    return {"seed": seed, "what": what, "kind": "lost", "reasons": []}


def work(args: argparse.Namespace) -> None:
    """Run programs and tell of each as one line of JSON on the standard output."""
    warnings.filterwarnings("ignore")
    if args.device == "cpu":  # a GPU's driver reserves addresses for all memory there is
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.ones(4, device=args.device).sin().sum().item()
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for k in range(args.count):
            seed = args.first + k * args.stride
            try:
                found = run(seed, args)
            except RuntimeError:
                if not is_lost(args.device):
                    raise
                found = _lost(seed, None)
            print(json.dumps(found), file=out, flush=True)
            if is_lost(args.device):
                break


def is_lost(device: str) -> bool:
    """Whether a bad index has ended all work on the device, as in eager."""
    try:
        torch.ones(1, device=device).item()
    except RuntimeError:
        return True
    return False


def told(what: str) -> str:
    """A difference without its numbers and places: what stays as a program shrinks."""
    return re.sub(r"(call|at the end)[^:]*:[^:]*:|[-.\d]+", "", what)


def body(source: str) -> str:
    """A program without what all have."""
    return source.removeprefix(PREAMBLE)


if __name__ == "__main__":
    raise SystemExit(main())
