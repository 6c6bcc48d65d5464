"""Process replay: what the compiler made of each case, as hashes; a move leaves all of them equal.

    scripts/replay                     compares all cases with HASHES.txt; status 1 if any differs
    scripts/replay zoo/bert op/softmax these alone; a name may be a pattern: 'train/*'
    scripts/replay --write             writes HASHES.txt anew, or the named cases in it
    scripts/replay --show zoo/bert     saves the texts, and shows how those of HEAD differ from them
    scripts/replay --show zoo/bert --revision main

A line of HASHES.txt is a case, and one hash for each stage: ATen graph, loops, LLVM IR, host
function. Hashes are of one set of versions, which stands above them; on others nothing is compared.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.replay.texts import STAGES, Texts, cases, texts, versions

ROOT = Path(__file__).parent.parent.parent
HASHES = Path(__file__).parent / "HASHES.txt"
OUT = ROOT / "out" / "replay"

HEAD = "# Written by `scripts/replay --write`; tests/replay/main.py says what is hashed.\n"
COLUMNS = "# case | " + " ".join(STAGES) + "\n"
VALID = "# valid on "

Hashes = tuple[str, ...]  # one per stage


def hashes(found: Texts) -> Hashes:
    return tuple(hashlib.sha256(found[stage].encode()).hexdigest()[:12] for stage in STAGES)


def read(text: str) -> tuple[str, dict[str, Hashes]]:
    """The versions on which the hashes are valid, and those of each case."""
    valid, rows = "", {}
    for line in text.splitlines():
        if line.startswith(VALID):
            valid = line.removeprefix(VALID)
        elif line and not line.startswith("#"):
            name, *row = line.split()
            rows[name] = tuple(row)
    return valid, rows


def write(valid: str, rows: Mapping[str, Hashes]) -> str:
    lines = [f"{name} {' '.join(row)}\n" for name, row in rows.items()]
    return "".join([HEAD, f"{VALID}{valid}\n", COLUMNS, *lines])


def differing(known: Hashes | None, now: Hashes) -> list[str]:
    """The stages whose texts are others than they were; all of them for a new case."""
    if known is None:
        return ["new"]
    return [stage for stage, a, b in zip(STAGES, known, now, strict=True) if a != b]


def selected(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that a pattern is or matches; all if there is none.

    raises   SystemExit for a pattern that matches nothing
    """
    names = list(names)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            close = difflib.get_close_matches(pattern, names, 3, 0.5)
            raise SystemExit(f"replay: no case is named {pattern}; near it: {', '.join(close)}")
    return [n for n in names if not patterns or any(fnmatch.fnmatch(n, p) for p in patterns)]


def compare(names: Sequence[str], known: Mapping[str, Hashes]) -> tuple[dict[str, Hashes], int]:
    """Today's hashes, and how many cases differ from the known ones; tells each as it is found."""
    now, differ = {}, 0
    begin = time.perf_counter()
    for name in names:
        now[name] = hashes(texts(name))
        stages = differing(known.get(name), now[name])
        if stages:
            differ += 1
            print(f"{name}: {', '.join(stages)}", flush=True)
    seconds = time.perf_counter() - begin
    print(f"replay: {differ} of {len(names)} cases differ, {seconds:.0f} s")
    return now, differ


def save(name: str, folder: Path) -> list[Path]:
    """The texts of a case as files, one per stage."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stage, text in texts(name).items():
        paths.append(folder / f"{stage}.txt")
        paths[-1].write_text(text)
    return paths


def save_of_revision(name: str, revision: str, folder: Path) -> None:
    """The same of another revision: its package, with the tests that are here."""
    with tempfile.TemporaryDirectory() as tree:
        packed = subprocess.run(
            ["git", "archive", revision, "fusee", "tests"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
            tar.extractall(tree, filter="data")
        shutil.copytree(Path(__file__).parent, Path(tree, "tests", "replay"), dirs_exist_ok=True)
        command = [sys.executable, "-m", "tests.replay.main", "--save", str(folder), name]
        subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": tree}, check=True)


def show(name: str, revision: str) -> str:
    """How the texts of the working tree differ from those of a revision. Both stay in OUT."""
    folder = OUT / name.replace("/", "_")
    save(name, folder / "now")
    save_of_revision(name, revision, folder / "before")
    rows: list[str] = []
    for stage in STAGES:
        before, now = (
            (folder / side / f"{stage}.txt").read_text().splitlines() for side in ("before", "now")
        )
        rows += difflib.unified_diff(
            before, now, f"{revision}/{stage}", f"now/{stage}", lineterm=""
        )
    return "\n".join([*rows, f"replay: texts are in {folder.relative_to(ROOT)}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/replay", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("cases", nargs="*", help="names or patterns; by default all")
    parser.add_argument("--write", action="store_true", help="set hashes to today's")
    parser.add_argument("--show", action="store_true", help="save texts, show what differs")
    parser.add_argument("--revision", default="HEAD", help="what --show compares with")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="only save texts there")
    chosen = parser.parse_args(arguments)
    names = selected(chosen.cases, cases())
    if chosen.save:
        for name in names:
            save(name, chosen.save)
        return 0
    if chosen.show:
        for name in names:
            print(show(name, chosen.revision))
        return 0
    valid, known = read(HASHES.read_text()) if HASHES.exists() else ("", {})
    if valid != versions() and not chosen.write:
        print(f"replay: skipped; hashes are of {valid}, here are {versions()}")
        return 0
    now, differ = compare(names, known)
    if chosen.write:
        kept = known if chosen.cases and valid == versions() else {}
        HASHES.write_text(write(versions(), {**kept, **now}))
        return 0
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
