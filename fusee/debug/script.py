"""A script, run with all that it compiles observed: what `python -m fusee explain` does.

Whatever a piece of a compiled function is, is noted when it is compiled: by the end of the script
the function may be gone.
"""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from fusee.capture.dispatch import Entry, listeners
from fusee.debug.explain import Explanation, Piece

__all__ = ["run_script"]


def run_script(script: Path, arguments: Sequence[str], page: Path, status: TextIO) -> int:
    """Run a script as Python would, and write the page on what it compiled.

    page      where to; it is written even if the script fails
    status    takes a progress line, if it is a terminal, and a summary
    returns   the script's exit status
    raises    OSError if the page cannot be written
    """
    observer = _Observer(script.name, status)
    listeners.append(observer)
    argv, path = sys.argv[:], sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.parent.resolve())
    try:
        code = _run(script)
    finally:
        sys.argv, sys.path[:] = argv, path
        listeners.remove(observer)
    observer.end()
    found = Explanation(tuple(observer.pieces), None)
    page.write_text(found.html(f"fusee.explain: {script.name}"), encoding="utf-8")
    print(_text(found, script, page, code), file=status)
    return code


def _run(script: Path) -> int:
    """The exit status. Tracebacks begin in the script, as Python's do."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  # whatever the script raises, Ctrl-C included
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename != str(script):
            tb = tb.tb_next
        # without a frame of the script it is its text that is wrong
        traceback.print_exception(type(error), error, tb)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


class _Observer:
    """Notes what is compiled, and says how far it is."""

    def __init__(self, name: str, status: TextIO) -> None:
        self.pieces: list[Piece] = []
        self.name = name
        self.status = status if status.isatty() else None
        self.begin = time.monotonic()

    def __call__(self, entry: Entry) -> None:
        self.pieces.append(Piece.of(entry))
        if self.status is not None:
            seconds = time.monotonic() - self.begin
            breaks = sum(piece.stop is not None for piece in self.pieces)
            line = f"{self.name}: {len(self.pieces)} pieces, {breaks} breaks, {seconds:.1f} s"
            print(f"\r\x1b[K{line}", end="", file=self.status, flush=True)

    def end(self) -> None:
        if self.status is not None and self.pieces:
            print("\r\x1b[K", end="", file=self.status, flush=True)


def _text(found: Explanation, script: Path, page: Path, code: int) -> str:
    """What is shown in the end: counts, breaks, where the page is."""
    lines = [f"{script.name}: {found.summary}"]
    if not found.pieces:
        lines = [f"{script.name} compiled nothing: no call of a compiled function was seen"]
    lines += [f"break {k}: {stop}" for k, stop in enumerate(found.breaks, 1)]
    lines += [f"{p.function} runs eagerly: {p.eager}" for p in found.pieces if p.eager]
    if code != 0:
        lines.append(f"the script ended with status {code}: the page shows what came before")
    return "\n".join([*lines, f"page: {page}"])
