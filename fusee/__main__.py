"""`python -m fusee explain script.py`: a page on all that a script compiles."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fusee import __version__
from fusee.debug import run_script
from fusee.errors import nearest
from fusee.installed import install


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status. 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m fusee", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fusee {__version__}")
    command = parser.add_subparsers(metavar="command", required=True).add_parser(
        "explain",
        help="run a script and write a page on what it compiles",
        usage="python -m fusee explain [-o PAGE] script.py [arguments ...] [-o PAGE]",
        description="Runs a script with fusee.compile behind torch.compile, and writes one HTML"
        " page on all that it compiled: graphs, where they end and why, guards, the Python between"
        " graphs, times. The exit status is the script's.",
    )
    command.add_argument("-o", metavar="PAGE", type=Path, help="SCRIPT.explain.html unless given")
    command.add_argument("script", type=Path, nargs="?", help="what `python` would run")
    command.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="the script's; a last `-o PAGE` is ours, unless one came before the script",
    )
    given = parser.parse_args(arguments)
    if given.script is None:
        command.error("which script? python -m fusee explain script.py")
    rest: list[str] = given.arguments
    if given.o is None and len(rest) >= 2 and rest[-2] == "-o":
        given.o, rest = Path(rest[-1]), rest[:-2]
    page = given.o or Path(f"{given.script.stem}.explain.html")
    if not given.script.is_file():
        script: Path = given.script
        folder = script.parent if script.parent.is_dir() else Path()
        close = nearest(script.name, [found.name for found in folder.glob("*.py")])
        meant = f"; did you mean {folder / close}?" if close else ""
        command.error(f"there is no file {script}{meant}")
    if page.is_dir() or not page.absolute().parent.is_dir():
        command.error(f"the page cannot be written to {page}: no such folder, or it is one")
    install()
    return run_script(given.script, rest, page, sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
