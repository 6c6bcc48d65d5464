"""What became of a program: its graphs, where they end and why, what is checked, time per stage.

print(explain(step)(x))
Path("step.html").write_text(explain(step)(x).html())
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from fusee import torch_functions as _torch_functions  # noqa: F401  # its stand-ins
from fusee.backends import registry
from fusee.backends.guarded import guarded
from fusee.capture.breaks import GraphBreak
from fusee.capture.bytecode import first_line, program
from fusee.capture.dispatch import CompiledFunction, Entry
from fusee.capture.policy import POLICY
from fusee.capture.targets import is_suspending, target_of
from fusee.capture.torch_api import OpOverload
from fusee.debug.page import page
from fusee.errors import source_line

__all__ = ["Break", "Explanation", "Graph", "Piece", "explain"]

# Generated names of objects that a piece holds.
_HELD = re.compile(r"\b_k\d+\b")

# Where modules keep what one writes as `self.layer`.
_TABLES = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")


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

    @classmethod
    def of(cls, entry: Entry) -> Piece:
        captured = entry.captured
        place = captured.place
        names = sorted(set(_HELD.findall(captured.source)), key=lambda name: int(name[2:]))
        stop = captured.stop
        return cls(
            function=place.function.__qualname__,
            begins=source_line(_begin(place.function, place.at)),
            graph=None if captured.graph is None else Graph.of(captured.graph),
            guards=tuple(_TABLES.sub(r".\1", str(fact)) for fact in captured.facts.rows),
            source=captured.source.strip(),
            held={name: _shown(captured.names[name]) for name in names if name in captured.names},
            stop=None if stop is None else Break.of(stop),
            eager=captured.eager,
            times=dict(entry.times),
        )


def _begin(function: types.FunctionType, at: int) -> str:
    if at < 0:
        return first_line(function)
    line = program(function.__code__).instructions[at].line
    return f"{function.__code__.co_filename}:{line} in {function.__name__}"


def _shown(value: Any) -> str:
    text = repr(value).splitlines()
    return text[0][:100] if text else ""


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
        return "\n".join(_lines(self))

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
    times = ", ".join(f"{stage} {ms:.2f}" for stage, ms in piece.times.items())
    found.append(("ms", times))
    return [(piece.function, ""), *found]


def _lines(explanation: Explanation) -> Iterator[str]:
    yield explanation.summary
    for number, piece in enumerate(explanation.pieces, 1):
        (function, _), *sections = _sections(piece)
        yield f"\n{number}. {function}"
        for title, text in sections:
            if "\n" in text:
                yield f"   {title}"
                yield from (f"      {line}" for line in text.splitlines())
            else:
                yield f"   {title:<18} {text}"


def explain(
    fn: Callable[..., Any], *, backend: registry.BackendLike | None = None
) -> Callable[..., Explanation]:
    """A function that calls `fn`, compiled anew, and says what was compiled.

    fn        a function, bound method, module or other callable, compiled already or not
    backend   as compile() takes it
    """
    function, before = target_of(fn)
    chosen = registry.default_backend() if backend is None else backend
    compile_graph = guarded(
        registry.lookup(chosen), registry.name_of(chosen), lambda text, where: None, fall_back=False
    )

    def call(*args: Any, **kwargs: Any) -> Explanation:
        if is_suspending(function):
            why = "asynchronous functions and generators run as they are"
            begins = source_line(first_line(function))
            piece = Piece(function.__qualname__, begins, None, (), "", {}, None, why, {})
            return Explanation((piece,), fn(*args, **kwargs))
        compiled = CompiledFunction(function, compile_graph, POLICY)
        result = compiled(*before, *args, **kwargs)
        entries = sorted(_entries(compiled), key=lambda entry: entry.number)
        return Explanation(tuple(map(Piece.of, entries)), result)

    return call


def _entries(compiled: CompiledFunction) -> Iterator[Entry]:
    yield from compiled.entries
    for callee in compiled.callees:
        yield from _entries(callee)
