"""`scripts/fuzz [COUNT] [--first SEED] [--show]`: random programs, eager beside compiled.

Each program that differs is shrunk and printed with its seed. The last lines say how many programs
ran whole, in pieces and eagerly. Exit status 1 if any differed.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections import Counter

from tests.capturing.differences import Outcome, difference, shrunk
from tests.capturing.programs import program
from tests.capturing.vocabulary import PREAMBLE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=3000, help="programs to run")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--show", action="store_true", help="print each program before it runs")
    parser.add_argument("--whole", action="store_true", help="print failures as they are")
    parser.add_argument("--most", type=int, default=20, help="stop after so many failures")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    started = last = time.monotonic()
    failed: list[int] = []
    reasons: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.count):
        source = program(seed)
        if args.show:
            print(body(source), flush=True)
        found = Outcome()
        what = difference(source, found)
        kinds["eager" if found.eager else "in pieces" if found.breaks else "whole"] += 1
        reasons.update({re.sub(r"'.*'|\d+", "_", r)[:70] for r in {*found.eager, *found.breaks}})
        if what is not None:
            failed.append(seed)
            report(seed, source, what, args.whole)
            if len(failed) >= args.most:
                break
        if time.monotonic() - last > 30:
            last = time.monotonic()
            print(f"{seed - args.first + 1} programs, {len(failed)} differ", flush=True)
    print(f"{sum(kinds.values())} programs in {time.monotonic() - started:.0f} s: {dict(kinds)}")
    for reason, count in reasons.most_common(40 if args.show or args.whole else 12):
        print(f"  {count:5d}  {reason}")
    print(f"{len(failed)} differ: {failed}" if failed else "none differs")
    return bool(failed)


def report(seed: int, source: str, what: str, whole: bool) -> None:
    """Print a failure and the smallest program that still fails."""
    print(f"---- seed {seed}\n{what}", flush=True)
    text = body(source)
    if not whole:
        kind = told(what)
        text = shrunk(text, lambda text: told(difference(PREAMBLE + text) or "") == kind)
        what = difference(PREAMBLE + text) or what
    print(f"{text}\n{what}\n", flush=True)


def told(what: str) -> str:
    """A difference without its numbers and places: what stays as a program shrinks."""
    return re.sub(r"(call|at the end)[^:]*:[^:]*:|[-.\d]+", "", what)


def body(source: str) -> str:
    """A program without what all have."""
    return source.removeprefix(PREAMBLE)


if __name__ == "__main__":
    raise SystemExit(main())
