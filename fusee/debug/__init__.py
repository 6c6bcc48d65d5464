"""What became of a program: its graphs, where they end and why, what is checked, time per stage;
and a program as one graph to keep.

print(explain(step)(x))
Path("step.html").write_text(explain(step)(x).html())
export(step, (x,))
"""

from __future__ import annotations

import functools
import html
import inspect
import operator
import runpy
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any, TextIO

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fusee import torch_functions as _torch_functions  # noqa: F401  # its stand-ins
from fusee.aten.rewriter import Copier
from fusee.backends import registry
from fusee.backends.report import GuardedBackend
from fusee.capture.bytecode import first_line, program
from fusee.capture.captured import Captured, Entry, Place
from fusee.capture.dynamic import TABLES, Varying
from fusee.capture.entries import CompiledFunction, listeners
from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import TensorFact, Values
from fusee.capture.policy import POLICY, is_suspending, target_of
from fusee.capture.sources import Computation, ComputedAt, Local, Origin, SizeOf, looking
from fusee.capture.symbols import joined_text, list_text
from fusee.capture.torch_api import Mark, OpOverload
from fusee.capture.trace import capture
from fusee.errors import GraphBreakError, OptionError, SizeError, source_line, telling
from fusee.source import Args
from fusee.sym import Symbol
from fusee.sym.ranges import COMPARISONS
from fusee.sym.shape_env import wrapped

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
        ops = Counter[str]()
        for target in (n.target for n in calls):
            name = str(target)
            if not isinstance(target, (str, OpOverload)):
                module_name = (getattr(target, "__module__", None) or "torch").lstrip("_")
                name = f"{module_name}.{getattr(target, '__name__', target)}"
            ops[name] += 1
        return cls(module, module.code.strip(), dict(ops.most_common()))

    @property
    def op_count(self) -> int:
        """How many calls the graph makes."""
        return sum(self.ops.values())


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
            rows.append(f"\n{number}. {piece.function}")
            for title, text in _sections(piece):
                if "\n" in text:
                    rows += [f"   {title}", *(f"      {line}" for line in text.splitlines())]
                else:
                    rows.append(f"   {title:<18} {text}")
        return "\n".join(rows)

    def html(self, title: str = "fusee.explain") -> str:
        """One page that needs nothing else."""
        shown = []
        for number, piece in enumerate(self.pieces, 1):
            shown.append(f"<h2>{number}. {html.escape(piece.function)}</h2>")
            for name, text in _sections(piece):
                kind, body = "stop" if name == "ends before" else "part", html.escape(text)
                head = f'class="title">{html.escape(name)}</'
                if "\n" not in text:
                    shown.append(f'<div class="{kind}"><span {head}span> {body}</div>')
                    continue
                # more than a line is in a box, which is open unless it is long
                is_open = " open" if text.count("\n") < 25 else ""
                shown.append(
                    f'<details class="{kind}"{is_open}><summary {head}summary>'
                    f"<pre>{body}</pre></details>"
                )
        return _PAGE.substitute(
            title=html.escape(title), summary=html.escape(self.summary), pieces="\n".join(shown)
        )


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
    return [*found, ("calls served", str(piece.calls)), ("ms", times)]


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
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
            code = 1
    except BaseException as error:  # noqa: BLE001  # whatever the script raises, Ctrl-C included
        tb = error.__traceback__  # which begins in the script, as Python's does
        while tb is not None and tb.tb_frame.f_code.co_filename != str(script):
            tb = tb.tb_next
        # without a frame of the script it is its text that is wrong
        traceback.print_exception(type(error), error, tb)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
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


# ---------------------------------------------------------------------------- export
# A program as one graph of given or open sizes, or the error that says where it cannot be one.


class _Given:
    """Stands for a tensor that a node gives, in the source around the graph."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def size(self, axis: int) -> fx.Proxy:
        graph = self.node.graph
        return fx.Proxy(graph.call_function(torch.ops.aten.sym_size.int, (self.node, axis)))

    def tolist(self) -> fx.Proxy:
        return fx.Proxy(self.node.graph.call_method("tolist", (self.node,)))


def _recording(function: Any) -> Any:
    """What that source calls: a node of the graph, where what a node gives is given to it."""
    if isinstance(function, Computation):
        return Computation(tuple((_recording(step), given) for step, given in function.steps))
    is_ours = any(function is x for x in (str, float, int, torch.Size, list_text, joined_text))
    is_method = isinstance(function, types.MethodDescriptorType)
    if not (is_ours or is_method or isinstance(function, types.BuiltinFunctionType)):
        return function

    def called(*args: Any) -> Any:
        nodes = [x.node for x in pytree.tree_leaves(args) if isinstance(x, (fx.Proxy, _Given))]
        if not nodes:
            return function(*args)
        given = fx.node.map_aggregate(args, lambda x: getattr(x, "node", x))
        make: Any = nodes[0].graph.call_method if is_method else nodes[0].graph.call_function
        return fx.Proxy(make(function.__name__ if is_method else function, given))

    return called


@telling
def export(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> fx.GraphModule:
    """All of `fn(*args, **kwargs)` as one graph of torch calls. Nothing is run.

    The module takes the tensors among the arguments, in the order in which pytree lists them, and
    holds all other tensors as parameters and buffers. It returns what `fn` does if that is made of
    tuples, lists and dicts, else the leaves as a tuple.

    dynamic_shapes   which sizes vary, with torch.export.Dim, as torch.export.export has it; the
                     module then checks sizes, and `meta["relations"]` lists what must hold
    raises   GraphBreakError where the graph would end; ConstantSizeError where the program needs
             the number of a Dim; whatever `fn` raises
    source   torch.export.export, torch._dynamo.export
    """
    taken = (args, (tuple, list), "a tuple"), (kwargs, (Mapping, type(None)), "a dict")
    for given, kind, what in taken:
        if not isinstance(given, kind):
            raise OptionError(
                f"export() takes arguments as {what}, not {type(given).__name__}",
                did="exported nothing",
                remedy='fusee.export(fn, (x,), {"scale": 2.0})',
            )
    function, before = target_of(fn)
    if is_suspending(function):
        raise _refused("it is asynchronous or a generator", first_line(function))
    named = dict(kwargs or {})
    bound = inspect.signature(function).bind(*before, *args, **named)
    bound.apply_defaults()
    varies = None
    if dynamic_shapes is not None:
        own = dict([*bound.arguments.items()][len(before) :])
        varies = declared(fn, tuple(args), named, own, dynamic_shapes)
    captured = capture(Place(function), bound.arguments, POLICY.for_export(), varies)
    if captured.raises:
        fn(*args, **named)
    if captured.eager:
        raise _refused(captured.eager, first_line(function))
    if captured.stop is not None:
        raise _refused(captured.stop.reason, captured.stop.where, captured.stop.remedy)
    mode = [] if captured.inference is None else [f"inference_mode({captured.inference})"]
    for effect in (*captured.effects, *mode):
        raise _refused(
            f"it changes objects besides tensors, which no graph does: {effect}",
            first_line(function),
            "return what changes instead",
        )
    return _Module(captured, bound.arguments, [*args, *named.values()]).made()


def _refused(reason: str, where: str, remedy: str = "") -> GraphBreakError:
    return GraphBreakError(
        f"the program is not one graph: {reason}",
        where=source_line(where),
        did="exported nothing",
        remedy=remedy or "move it out of the exported function",
    )


class _Module:
    """The captured graph with the caller's tensors as its inputs and all others as attributes."""

    def __init__(self, captured: Captured, values: Values, arguments: list[Any]) -> None:
        self.captured, self.values, self.look = captured, values, looking(values)
        self.root, self.copier = nn.Module(), Copier()
        self.graph = self.copier.graph
        self.nodes: dict[int, fx.Node] = {}  # by id of the real tensor
        self.numbers: dict[str, fx.Node] = {}  # by the words of an integer that varies
        self.sizes: dict[Symbol, fx.Node] = {}
        self.relations: list[str] = []
        origins = captured.symbols.origins if captured.symbols is not None else {}
        open_numbers = {str(x): self.look(x) for x in origins.values() if isinstance(x, Local)}
        for k, x in enumerate(pytree.tree_leaves(arguments)):
            if isinstance(x, Tensor) and id(x) not in self.nodes:
                self.nodes[id(x)] = self.graph.placeholder(f"input_{k}")
            elif name := next((n for n, value in open_numbers.items() if value is x), None):
                del open_numbers[name]
                self.numbers[name] = self.graph.placeholder(f"input_{k}")

    def made(self) -> fx.GraphModule:
        captured, copied = self.captured, self.copier.made
        whole = captured.graph or fx.GraphModule(nn.Module(), fx.Graph())
        self.root._modules.update(whole._modules)  # functions of torch.cond, and of others like it
        if captured.symbols is not None:
            self._check()
        outputs: tuple[Any, ...] = ()
        inputs = iter(zip(captured.examples, captured.inputs))
        for node in whole.graph.nodes:
            if node.op == "placeholder":
                x, at = next(inputs)
                copied[node] = self._of(x, node.name) if isinstance(x, Tensor) else self._number(at)
            elif node.op == "output":
                outputs = node.args[0]
            else:
                self.copier.copy(node)
        recording = {name: _recording(x) for name, x in captured.names.items()}
        run = replace(captured, names=recording).run(
            lambda *inputs: [_Given(copied[x]) for x in outputs]
        )
        given = [self._given(self.values[name]) for name in captured.place.parameters]
        try:
            result = run(*given)
        except (TypeError, AttributeError) as error:  # of a node, or of what stands for a tensor
            if captured.symbols is None:
                raise
            reason = f"it returns what no graph computes of sizes that vary: {error}"
            raise _refused(reason, first_line(captured.place.function)) from None
        leaves, spec = pytree.tree_flatten(result, lambda x: type(x) is torch.Size)

        def shown(leaf: Any) -> Any:
            if isinstance(leaf, (_Given, fx.Proxy)):
                return leaf.node
            if type(leaf) is torch.Size:  # to fx it is a tuple
                return self.graph.call_function(torch.Size, (tuple(leaf),))
            return self._of(leaf, "kept") if isinstance(leaf, Tensor) else leaf

        made = [shown(leaf) for leaf in leaves]
        self.graph.output(pytree.tree_unflatten(made, spec) if _is_plain(result) else tuple(made))
        found = fx.GraphModule(self.root, self.graph, "Exported")
        found.meta["relations"] = tuple(self.relations)
        return found

    def _given(self, x: Any) -> Any:
        """An argument for the source around the graph: its sizes that vary are nodes."""
        if not self.sizes or isinstance(x, nn.Module):
            return x
        opened = {str(self.captured.symbols.origins[s]): n for s, n in self.sizes.items()}

        def sized(leaf: Any) -> Any:
            return _Given(self.nodes[id(leaf)]) if id(leaf) in self.nodes else leaf

        if type(x) is int:
            name = next((n for n, value in self.values.items() if value is x), "")
            return fx.Proxy(opened[name]) if name in opened else x
        return pytree.tree_map(sized, x)

    def _of(self, x: Tensor, name: str) -> fx.Node:
        """The node of a real tensor; one that no argument holds becomes an attribute."""
        if id(x) not in self.nodes:
            while hasattr(self.root, name):
                name += "_"
            if isinstance(x, nn.Parameter):
                self.root.register_parameter(name, x)
            else:
                self.root.register_buffer(name, x)
            self.nodes[id(x)] = self.graph.get_attr(name)
        return self.nodes[id(x)]

    def _number(self, origin: Origin) -> fx.Node:
        """The node of a size, or an integer, that varies."""
        if isinstance(origin, ComputedAt):
            numbers = [fx.Proxy(self._number(x)) for x in origin.of.parts]
            return _recording(origin.function)(numbers).node  # type: ignore[no-any-return]
        if not isinstance(origin, SizeOf):
            return self.numbers[str(origin)]
        tensor = self._of(self.look(origin.of), "kept")
        return self.graph.call_function(torch.ops.aten.sym_size.int, (tensor, origin.axis))

    def symbol_node(self, symbol: Symbol, example: Any) -> Any:
        """As Recorder has it."""
        if symbol not in self.sizes:
            self.sizes[symbol] = made = self._number(self.captured.symbols.origins[symbol])
            made.meta["example_value"] = example
        return self.sizes[symbol]

    def _check(self) -> None:
        """Have the program check its sizes first."""
        symbols, rows = self.captured.symbols, []
        for symbol, origin in symbols.origins.items():
            size = self.symbol_node(symbol, wrapped(symbols.env, symbol.expr))
            if symbol.lo >= 2 and isinstance(origin, SizeOf):
                rows.append((f"{origin} >= {symbol.lo}", operator.ge, size, symbol.lo))
        for fact in self.captured.facts.rows:
            known = fact.value
            if isinstance(known, TensorFact) and id(self.look(fact.origin)) in self.nodes:
                sizes = {SizeOf(fact.origin, k): n for k, n in enumerate(known.size)}
                fixed = [(at, n) for at, n in sizes.items() if n is not None]
                rows += [(f"{at} == {n}", operator.eq, self._number(at), n) for at, n in fixed]
        for _, relation, _ in symbols.facts():
            both = (symbols.size_node(x, self) for x in (relation.a, relation.b))
            rows.append((str(relation), COMPARISONS[relation.op], *both))
        rows = [*{row[0]: row for row in rows}.values()]
        texts = self.relations = [row[0] for row in rows]
        held = [self.graph.call_function(row[1], row[2:]) for row in rows]
        named = {str(symbols.origins[s]): x for s, x in self.sizes.items()}
        self.graph.call_function(check_sizes, (texts, held, named))


@fx.has_side_effect
def check_sizes(relations: Sequence[str], hold: Sequence[bool], sizes: Mapping[str, int]) -> None:
    """What an exported program calls first. raises SizeError"""
    if not all(hold):
        failed = " and ".join(text for text, holds in zip(relations, hold) if not holds)
        there = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        raise SizeError(
            f"the exported program needs {failed}; there are {there}",
            remedy="export it again with other Dims, or examples",
        )


def _is_plain(x: Any) -> bool:
    """Whether fx can write down a container."""
    if type(x) in (tuple, list):
        return all(map(_is_plain, x))
    if type(x) is dict:
        return all(map(_is_plain, x.values()))
    kinds = (Tensor, _Given, fx.Proxy, torch.Size, int, float, bool, str, type(None))
    return isinstance(x, kinds)


# ---------------------------------------------------------------------------- dynamic_shapes
# What `dynamic_shapes` says, in the forms of torch.export: which sizes of which arguments vary.
#
#     {"x": {0: Dim("batch", max=64)}, "y": (Dim.AUTO, None)}     by parameter
#     ({0: batch}, [{1: 2 * batch}])     by place; containers have the form of the argument
#
# source   torch.export.dynamic_shapes, whose objects are known here by their attributes


class Declared(Varying):
    """Sizes vary where `dynamic_shapes` says so, and nowhere else."""

    def __init__(self, sizes: dict[int, dict[int, Mark]], numbers: set[str]) -> None:
        super().__init__()
        self.sizes, self.numbers = sizes, numbers

    def marks(self, x: Tensor) -> Mapping[int, Mark]:
        return {**super().marks(x), **self.sizes.get(id(x), {})}

    def __call__(self, origin: Any, value: Any) -> bool:
        return str(origin) in self.numbers or super().__call__(origin, value)


def declared(
    fn: Callable[..., Any],
    args: Args,
    kwargs: Mapping[str, Any],
    named: Mapping[str, Any],
    shapes: Any,
) -> Declared:
    """What varies.

    named    the arguments by their parameters, but for what a method is bound to
    raises   OptionError for a form that does not fit them
    """
    if hasattr(shapes, "dynamic_shapes"):  # a ShapesCollection, AdditionalInputs
        shapes = shapes.dynamic_shapes(fn, args, kwargs)
    found = Declared({}, set())
    if isinstance(shapes, Mapping):
        more = next(
            (x for x in named.values() if isinstance(x, dict) and not {*shapes} <= {*named}), {}
        )
        _walk("", {**named, **more}, shapes, found)
        return found
    given, names = (*args, *kwargs.values()), (*[*named][: len(args)], *kwargs)
    by_name = all(named.get(n) is x for n, x in zip(names, given))
    if by_name and isinstance(shapes, (tuple, list)) and len(shapes) == len(given) == len(names):
        _walk("", named, dict(zip(names, shapes)), found)  # numbers are known by name
    else:
        _walk("", given, shapes, found)
    return found


def _walk(name: str, x: Any, shapes: Any, found: Declared) -> None:
    if shapes is None:
        return
    if isinstance(x, Tensor):
        given = dict(shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes))
        if any(type(k) is not int or not 0 <= k < x.dim() for k in given) or (
            not isinstance(shapes, Mapping) and len(given) != x.dim()
        ):
            raise _wrong(f"{name} has axes 0 to {x.dim() - 1}, not those of {shapes!r}")
        marked = {k: _mark(f"{name}.size({k})", x.shape[k], dim) for k, dim in given.items()}
        found.sizes.setdefault(id(x), {}).update(marked)
    elif isinstance(x, Mapping) and isinstance(shapes, Mapping):
        if unknown := [key for key in shapes if key not in x]:
            raise _wrong(f"there is no {name or 'argument'} {unknown[0]!r}")
        for key, of in shapes.items():
            _walk(f"{name}[{key!r}]" if name else str(key), x[key], of, found)
    elif isinstance(x, (tuple, list)) and isinstance(shapes, (tuple, list)):
        if len(x) != len(shapes):
            raise _wrong(f"{name or 'the call'} has {len(x)} elements, not {len(shapes)}")
        for k, (item, of) in enumerate(zip(x, shapes)):
            _walk(f"{name}[{k}]" if name else f"argument {k}", item, of, found)
    elif type(x) is int and _kind(shapes) is not None:
        if _kind(shapes) != "STATIC":
            found.numbers.add(name)
    else:
        whom = f"{name}, a {type(x).__name__}" if name else "the arguments"
        raise _wrong(f"{shapes!r} says nothing of {whom}")


def _kind(dim: Any) -> str | None:
    """AUTO, DYNAMIC or STATIC; None of what is no such hint."""
    return getattr(getattr(dim, "type", None), "name", None)


def _mark(name: str, size: int, dim: Any) -> Mark:
    """What is said of one size."""
    kind = _kind(dim)
    fixed = dim if type(dim) is int else getattr(dim, "value", None)
    if dim is None or kind == "STATIC" or fixed is not None:
        if fixed not in (None, size):
            raise _wrong(f"{name} is {size}, not {fixed}")
        return Mark(False)
    if kind is None and not hasattr(dim, "min"):
        raise _wrong(f"{dim!r} says nothing of {name}: give a Dim, Dim.AUTO, a number or None")
    of = dim if kind else getattr(dim, "root", dim)
    low, high = (end if type(end) is int else None for end in (of.min, of.max))
    value = size if of is dim else None
    if value is not None and (value < (low or 0) or (high is not None and value > high)):
        raise _wrong(f"{name} is {value}, which {dim!r} leaves out")
    return Mark(True, kind != "AUTO", low, high, None if kind else dim)


def _wrong(what: str) -> OptionError:
    return OptionError(
        f"dynamic_shapes: {what}",
        did="exported nothing",
        remedy='for each argument what varies, as {"x": {0: Dim("batch")}, "n": None}',
    )
