"""Sizes against their ceilings: a folder that is over one of them fails.

    scripts/size           prints the table; status 1 if anything is over its ceiling
    scripts/size --write   writes ceilings.toml anew: today's sizes, rounded up

A ceiling is raised by hand or by --write in the commit that needs it, which says why; so growth is
seen where it is decided. Who makes a folder smaller runs --write, and it stays so.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.size.measure import ALL, NAMES, Figures, folders

ROOT = Path(__file__).parent.parent.parent
CEILINGS = Path(__file__).parent / "ceilings.toml"
# Ceilings lie one part in SLACK above, at multiples of STEPS: a mend needs no new ones.
SLACK = 100
STEPS = Figures(files=1, lines=50, tokens=500, functions=10, once=5)

HEAD = """\
# The most that each folder may hold; measured by tests/size/measure.py, which says what is counted.
# Written by `scripts/size --write`; raised only by a commit that says why.
"""


def measured() -> dict[str, Figures]:
    """Today's sizes. Of tests only what is Python: their tables are written by programs."""
    return {**folders(ROOT / "fusee"), **folders(ROOT / "tests", ".py")}


def read(text: str) -> dict[str, Figures]:
    """Ceilings as they are written in the table."""
    return {name: Figures(**row) for name, row in tomllib.loads(text).items()}


def write(found: Mapping[str, Figures]) -> str:
    """The table with ceilings just above what was found."""
    steps = asdict(STEPS)
    rows = []
    for name in sorted(found):
        sizes = {key: value + value // SLACK for key, value in asdict(found[name]).items()}
        cells = [f"{key} = {-(-size // steps[key]) * steps[key]}" for key, size in sizes.items()]
        rows.append(f'"{name}" = {{ {", ".join(cells)} }}\n')
    return HEAD + "".join(rows)


def problems(found: Mapping[str, Figures], ceilings: Mapping[str, Figures]) -> list[str]:
    """What is over its ceiling, and folders and rows that have no counterpart."""
    told = []
    for name in sorted({*found, *ceilings}):
        if name not in ceilings:
            told.append(f"{name} has no ceiling")
        elif name not in found:
            told.append(f"{name} has a ceiling and is not there")
        else:
            limits = asdict(ceilings[name])
            for key, value in asdict(found[name]).items():
                if value > limits[key]:
                    told.append(f"{name}: {value:,} {key}, at most {limits[key]:,}")
    return told


def table(found: Mapping[str, Figures], ceilings: Mapping[str, Figures]) -> Table:
    """Sizes and ceilings, one row a folder; what is over is red."""
    shown = Table("folder", box=None, header_style="bold")
    for name in NAMES:
        shown.add_column(name, justify="right")
        shown.add_column("<=", justify="right", style="dim")
    for name in sorted(found):
        cells = []
        limits = asdict(ceilings.get(name, Figures()))
        for key, value in asdict(found[name]).items():
            mark = "red" if value > limits[key] else "none"
            cells += [f"[{mark}]{value:,}[/]", f"{limits[key]:,}"]
        shown.add_row(name, *cells, style="bold" if name.endswith(ALL) else "")
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/size", description="sizes against ceilings")
    parser.add_argument("--write", action="store_true", help="set ceilings to today's sizes")
    chosen = parser.parse_args(arguments)
    found = measured()
    if chosen.write:
        CEILINGS.write_text(write(found))
    ceilings = read(CEILINGS.read_text())
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table(found, ceilings))
    told = problems(found, ceilings)
    for line in told:
        console.print(f"size: {line}", style="red")
    if told:
        where = CEILINGS.relative_to(ROOT)
        console.print(f"size: shrink what grew, or raise its ceiling in {where} and say why")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
