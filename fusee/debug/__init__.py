"""What became of a program: its graphs, where they end and why, what is checked, time per stage.

print(explain(step)(x))
Path("step.html").write_text(explain(step)(x).html())

A program as one graph to keep: `export.py`.
"""

from __future__ import annotations

import functools
import html
import runpy
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, TextIO

from torch import fx

from fusee import torch_functions as _torch_functions  # noqa: F401  # its stand-ins
from fusee.backends import registry
from fusee.backends.report import GuardedBackend
from fusee.capture.bytecode import first_line, program
from fusee.capture.captured import Entry
from fusee.capture.dynamic import TABLES, Varying
from fusee.capture.entries import CompiledFunction, listeners
from fusee.capture.graph_break import GraphBreak
from fusee.capture.policy import POLICY, is_suspending, target_of
from fusee.capture.torch_api import OpOverload
from fusee.errors import source_line, telling

# ---------------------------------------------------------------------------- page
# A report as one HTML page: no script, no font, no file besides it.

_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
  pre { font: 13px/1.45 ui-monospace, monospace; overflow-x: auto; padding: .6rem .8rem;
        margin: .3rem 0; border: 1px solid #8886; border-radius: .4rem; }
  summary { cursor: pointer; } .title { color: #888; }
  .stop pre { border-color: #c60; }
</style>
<h1>$title</h1>
<p>$summary</p>
$pieces
</html>
""")  # noqa: E501  # CSS

Section = tuple[str, str]


def page(title: str, summary: str, pieces: Sequence[Sequence[Section]]) -> str:
    """The page. Of each piece the first section's title is its heading."""
    shown = []
    for number, ((heading, _), *sections) in enumerate(pieces, 1):
        shown.append(f"<h2>{number}. {html.escape(heading)}</h2>")
        for name, text in sections:
            kind, body = "stop" if name == "ends before" else "part", html.escape(text)
            name = html.escape(name)
            if "\n" not in text:
                shown.append(f'<div class="{kind}"><span class="title">{name}</span> {body}</div>')
                continue
            # more than a line is in a box, which is open unless it is long
            is_open = " open" if text.count("\n") < 25 else ""
            shown.append(
                f'<details class="{kind}"{is_open}><summary class="title">{name}</summary>'
                f"<pre>{body}</pre></details>"
            )
    return _PAGE.substitute(
        title=html.escape(title), summary=html.escape(summary), pieces="\n".join(shown)
    )


# ---------------------------------------------------------------------------- explain


@dataclass(frozen=True)
class Graph:
    """One graph that the backend was given. `ops` counts its calls by name."""

    module: fx.GraphModule
    code: str
    ops: Mapping[str, int]

    @classmethod
    def of(cls, module: fx.GraphModule) -> Graph:
        calls = [n for n in module.graph.nodes if n.op.startswith("call_")]
        ops = Counter(_name(n.target) for n in calls)
        return cls(module, module.code.strip(), dict(ops.most_common()))

    @property
    def op_count(self) -> int:
        """How many calls the graph makes."""
        return sum(self.ops.values())


def _name(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return str(target)
    module = (getattr(target, "__module__", None) or "torch").lstrip("_")
    return f"{module}.{getattr(target, '__name__', target)}"


@dataclass(frozen=True)
class Break:
    """Where a graph ends before the function does. `text` is the user's line."""

    file: str
    line: int
    function: str
    text: str
    reason: str
    remedy: str

    @classmethod
    def of(cls, found: GraphBreak) -> Break:
        where, _, text = source_line(found.where).partition(":   ")
        place, _, function = where.rpartition(" in ")
        file, _, line = place.rpartition(":")
        number = int(line) if line.isdecimal() else 0
        remedy = found.remedy or "move it before or after the compiled function"
        return cls(file, number, function, text, found.reason, remedy)

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line} in {self.function}:   {self.text}\n"
            f"  why    {self.reason}\n  try    {self.remedy}"
        )


@dataclass(frozen=True)
class Piece:
    """What is run as one: a graph and the Python around it.

    begins   the user's line
    guards   what must be so for a call to use this piece, in words
    source   the Python that gives the graph its inputs, makes results and replays effects
    held     what the names `_k0`, `_k1`, ... in it stand for
    stop     why it ends before the function returns
    eager    why Python runs it instead; "" if it doesn't
    times    milliseconds of each stage
    symbols  sizes that vary, with their ranges; relations between them, and which line asked
    served   how many calls it has run, as the one element of a list that grows
    """

    function: str
    begins: str
    graph: Graph | None
    guards: tuple[str, ...]
    source: str
    held: Mapping[str, str]
    stop: Break | None
    eager: str
    times: Mapping[str, float]
    symbols: tuple[str, ...] = ()
    served: list[int] = field(default_factory=lambda: [0])

    @property
    def calls(self) -> int:
        """How many calls it has run."""
        return self.served[0]

    @classmethod
    def of(cls, entry: Entry, served: list[int]) -> Piece:
        captured = entry.captured
        place = captured.place
        held = {name: x for name, x in captured.names.items() if name.startswith("_k")}
        stop, code = captured.stop, place.function.__code__
        begins = first_line(place.function)
        if place.at >= 0:
            line = program(code).instructions[place.at].line
            begins = f"{code.co_filename}:{line} in {place.function.__name__}"
        return cls(
            function=place.function.__qualname__,
            begins=source_line(begins),
            graph=None if captured.graph is None else Graph.of(captured.graph),
            guards=tuple(TABLES.sub(r".\1", str(fact)) for fact in captured.facts.rows),
            source=captured.source.strip(),
            held={name: repr(x).partition("\n")[0][:100] for name, x in held.items()},
            stop=None if stop is None else Break.of(stop),
            eager=captured.eager,
            times=dict(entry.times),
            symbols=tuple(captured.symbols.told()) if captured.symbols else (),
            served=served,
        )


@dataclass(frozen=True)
class Explanation:
    """All pieces, in the order in which they were compiled, and what the call returned."""

    pieces: tuple[Piece, ...]
    result: Any

    @property
    def graphs(self) -> list[Graph]:
        return [piece.graph for piece in self.pieces if piece.graph is not None]

    @property
    def breaks(self) -> list[Break]:
        return [piece.stop for piece in self.pieces if piece.stop is not None]

    @property
    def guards(self) -> list[str]:
        return [guard for piece in self.pieces for guard in piece.guards]

    @property
    def graph_count(self) -> int:
        return len(self.graphs)

    @property
    def graph_break_count(self) -> int:
        return len(self.breaks)

    @property
    def op_count(self) -> int:
        return sum(graph.op_count for graph in self.graphs)

    @property
    def times(self) -> dict[str, float]:
        """Milliseconds of each stage, over all pieces."""
        total: Counter[str] = Counter()
        for piece in self.pieces:
            total.update(piece.times)
        return dict(total)

    @property
    def summary(self) -> str:
        stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in self.times.items())
        return (
            f"{_many(self.graph_count, 'graph')} with {_many(self.op_count, 'op')}, "
            f"{_many(self.graph_break_count, 'break')}, {_many(len(self.guards), 'guard')}; "
            f"ms: {stages}"
        )

    def __str__(self) -> str:
        rows = [self.summary]
        for number, piece in enumerate(self.pieces, 1):
            (function, _), *sections = _sections(piece)
            rows.append(f"\n{number}. {function}")
            for title, text in sections:
                if "\n" in text:
                    rows += [f"   {title}", *(f"      {line}" for line in text.splitlines())]
                else:
                    rows.append(f"   {title:<18} {text}")
        return "\n".join(rows)

    def html(self, title: str = "fusee.explain") -> str:
        """One page that needs nothing else."""
        return page(title, self.summary, [_sections(piece) for piece in self.pieces])


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _sections(piece: Piece) -> list[tuple[str, str]]:
    """Titles and texts of a piece."""
    found = [("begins at", piece.begins)]
    if piece.eager:
        found.append(("runs eagerly", piece.eager))
    if piece.graph is not None:
        ops = ", ".join(f"{count}x {name}" for name, count in piece.graph.ops.items())
        found.append((f"graph: {_many(piece.graph.op_count, 'op')}", ops))
        found.append(("graph's code", piece.graph.code))
    if piece.source:
        held = [f"# {name}: {text}" for name, text in piece.held.items()]
        found.append(("Python around it", "\n".join([*held, piece.source])))
    if piece.stop is not None:
        found.append(("ends before", str(piece.stop)))
    if piece.guards:
        found.append((_many(len(piece.guards), "guard"), "\n".join(piece.guards)))
    if piece.symbols:
        found.append(("sizes that vary", "\n".join(piece.symbols)))
    times = ", ".join(f"{stage} {ms:.2f}" for stage, ms in piece.times.items())
    found += [("calls served", str(piece.calls)), ("ms", times)]
    return [(piece.function, ""), *found]


@telling
def explain(
    fn: Callable[..., Any], *, backend: registry.BackendLike | None = None
) -> Callable[..., Explanation]:
    """A function that calls `fn`, compiled anew, and says what was compiled by its calls so far.

    fn        a function, bound method, module or other callable, compiled already or not
    backend   as compile() takes it
    """
    function, before = target_of(fn)
    chosen = registry.default_backend() if backend is None else backend
    compile_graph = GuardedBackend(registry.for_capture(chosen), registry.backend_name(chosen))
    varying = functools.partial(Varying, **registry.sizes_of(chosen))
    compiled = CompiledFunction(function, compile_graph, POLICY, varying=varying)
    served: dict[int, list[int]] = {}  # by an entry's number

    def observe(entry: Entry) -> None:
        served[entry.number] = _counted(entry)

    def call(*args: Any, **kwargs: Any) -> Explanation:
        if is_suspending(function):
            why = "asynchronous functions and generators run as they are"
            begins = source_line(first_line(function))
            piece = Piece(function.__qualname__, begins, None, (), "", {}, None, why, {})
            return Explanation((piece,), fn(*args, **kwargs))
        listeners.append(observe)
        try:
            result = compiled(*before, *args, **kwargs)
        finally:
            listeners.remove(observe)
        entries = sorted(_entries(compiled), key=lambda entry: entry.number)
        return Explanation(tuple(Piece.of(one, served[one.number]) for one in entries), result)

    return call


def _counted(entry: Entry) -> list[int]:
    """Count the calls that an entry runs from now on."""
    served, run = [0], entry.run
    if run is None and entry.compiled is not None:  # by Python else, which nobody counts
        run = entry.captured.run(entry.compiled)

    def counting(*given: Any) -> Any:
        served[0] += 1
        assert run is not None
        return run(*given)

    entry.run = None if run is None else counting
    return served


def _entries(compiled: CompiledFunction) -> Iterator[Entry]:
    yield from compiled.entries
    for callee in compiled.callees:
        yield from _entries(callee)


# ---------------------------------------------------------------------------- script
# A script, run with all that it compiles observed: what `python -m fusee explain` does.
#
# Whatever a piece of a compiled function is, is noted when it is compiled: by the end of the script
# the function may be gone.


def run_script(script: Path, arguments: Sequence[str], page: Path, status: TextIO) -> int:
    """Run a script as Python would, and write the page on what it compiled.

    page      where to; it is written even if the script fails
    status    takes a progress line, if it is a terminal, and a summary
    returns   the script's exit status; 1 if the page cannot be written
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
    lines = [f"{script.name}: {found.summary}"]
    if not found.pieces:
        lines = [f"{script.name} compiled nothing: no call of a compiled function was seen"]
    lines += [f"break {k}: {stop}" for k, stop in enumerate(found.breaks, 1)]
    lines += [f"{p.function} runs eagerly: {p.eager}" for p in found.pieces if p.eager]
    if code != 0:
        lines.append(f"the script ended with status {code}: the page shows what came before")
    lines.append(f"page: {page}")
    try:
        page.write_text(found.html(f"fusee.explain: {script.name}"), encoding="utf-8")
    except OSError as error:
        lines[-1], code = f"there is no page: {page}: {error.strerror}", code or 1
    print("\n".join(lines), file=status)
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
        self.pieces.append(Piece.of(entry, _counted(entry)))
        if self.status is not None:
            seconds = time.monotonic() - self.begin
            breaks = sum(piece.stop is not None for piece in self.pieces)
            line = f"{self.name}: {len(self.pieces)} pieces, {breaks} breaks, {seconds:.1f} s"
            print(f"\r\x1b[K{line}", end="", file=self.status, flush=True)

    def end(self) -> None:
        if self.status is not None and self.pieces:
            print("\r\x1b[K", end="", file=self.status, flush=True)
