"""Compiles a split graph, and calls its parts one after another.

A region that its engine cannot compile, or that fails when it runs, is compiled by us: with one
warning, for that region alone. Regions have no effects, so one that failed can simply run again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fusee import log
from fusee.aten import AtenGraph, PartSource, is_pure, is_view, part_source, returning
from fusee.aten.attention import known_masks
from fusee.aten.rewriter import Editor, body_lines, cut, edited
from fusee.aten.trace import trace
from fusee.aten.weights import fold, restride
from fusee.backends.aot_autograd import bind, is_differentiated, staged
from fusee.backends.regions import (
    Declined,
    Engine,
    Region,
    RegionCall,
    forget_read,
    note_values,
    op_text,
    show_hidden_rows,
    split,
)
from fusee.backends.registry import later
from fusee.backends.report import (
    CompiledGraph,
    ExternRow,
    RegionRow,
    Report,
    captured_source,
    first_line,
    remember,
)
from fusee.backends.resume import ClaimedPart, KeptSplit, body_of
from fusee.config import Options
from fusee.errors import FuseeError, FuseeWarning, MissingFake, TraceError, user_line, warn
from fusee.source import HostSource

# Loops and LLVM, which graphs that are an engine's as a whole don't wait for.
_NATIVE = "fusee.backends.native"
compile_native: Callable[..., CompiledGraph] = later(_NATIVE, "compile_native")
compile_aten = later(_NATIVE, "compile_aten")
split_native = later(_NATIVE, "split_native")
bind_native = later(_NATIVE, "bind_native")

_numbers = itertools.count()


def compile_with(
    engine: Engine, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> CompiledGraph:
    """Compile a captured graph: the engine's regions, and ours between them.

    Graphs without a functional ATen form are our compiler's whole.
    """
    options = Options(name=engine.options.name)
    report = Report(options.name or f"{engine.name}_{next(_numbers)}", first_line(gm))
    if (trains := is_differentiated(gm, example_inputs)) and not engine.trains:
        reason = "it needs gradients, which are our own compiler's"
        return _whole(gm, example_inputs, engine, options, reason)
    decompositions = engine.decompositions()
    with log.graph(report.name):
        log.publish("graph", "", lambda: captured_source(gm))
        try:
            if trains:
                both = split_native(
                    gm,
                    example_inputs,
                    options,
                    report,
                    keeps=engine.keeps,
                    decompositions=decompositions,
                    more=(_save_compared,),
                )
                unseen = len(both.forward.inputs) - len(example_inputs)
                given = [*example_inputs, *[None] * unseen]
                forward = compile_split(both.forward, given, engine, options, report).call
                remember(report)
                run = bind_native(gm, both, lambda inputs: forward(*inputs), options, report)
                return CompiledGraph(run, report)
            with report.timed("trace"):
                aten = trace(gm, example_inputs, keep=engine.keeps, decompositions=decompositions)
        except MissingFake:
            raise
        except TraceError as error:
            return _whole(gm, example_inputs, engine, options, error.what)
        log.publish("aten", "", lambda: str(aten))
        attributes = aten.attributes(gm)
        given = [*example_inputs, *attributes]
        made = compile_split(aten, given, engine, options, report)
        remember(report)
    compiled = CompiledGraph(bind(gm, aten, made.call, report), report)
    if made.kept is not None and not attributes and not aten.from_start:
        entry = made.kept.entry(engine.kept_for(), example_inputs)
        compiled.kept = None if entry is None else lambda sidecar: sidecar.put(*entry)
    return compiled


def _whole(
    gm: fx.GraphModule, example_inputs: Sequence[Any], engine: Engine, options: Options, reason: str
) -> CompiledGraph:
    """The graph through our compiler, whose report says why it is not the engine's."""
    found = compile_native(gm, example_inputs, options)
    found.report().notes.append(f"nothing of it runs in {engine.name}: {reason}")
    return found


def _save_compared(edit: Editor) -> None:
    """Save what is asked to be equal, as the gradient of `amax` asks of a maximum: the backward is
    ours, and what it computes again is rounded otherwise than the engine does."""
    for compared in edit.calls(torch.ops.aten.eq.Tensor):
        row = [*compared.all_input_nodes]
        for node in row:
            if node.op != "call_function":
                continue
            if is_view(node.target) or node.meta.get("backward"):
                row += [x for x in node.all_input_nodes if x not in row]
            else:
                node.meta["recompute"] = "save"


def compile_split(
    aten: AtenGraph,
    example_inputs: Sequence[Any],
    engine: Engine,
    options: Options,
    report: Report,
    is_whole: bool = True,
) -> SplitCall:
    """A traced graph as what runs it: the engine's regions, and ours between them.

    Where sizes show that only the data knows, each stage is split by itself.

    example_inputs   one per InputSpec
    options          for what our compiler gets
    is_whole         False: it is a stage of a graph
    """
    if aten.is_staged:
        if aten.required:  # which checks by example know nothing of
            options = dataclasses.replace(options, check=False)

        def compile_part(graph: AtenGraph, examples: list[Any]) -> RegionCall:
            call = compile_split(graph, examples, engine, options, report, is_whole=False).call
            return lambda inputs: call(*inputs)

        return SplitCall(staged(aten, compile_part, example_inputs), None)
    with report.timed("split"):
        fold(aten, options)
        restride(aten)
        note_values(aten, example_inputs)
        engine.prepare(aten, example_inputs)
        if not engine.runs_aten:
            show = functools.partial(show_hidden_rows, engine=engine)
            edited(aten, options, (known_masks, show), report.notes)
        decided = split(aten, engine, is_whole=is_whole)
        while forget_read(aten, decided.rest, example_inputs):
            decided = split(aten, engine, is_whole=is_whole)
        parts = cut(aten, decided.levels)
    report.unclaimed += decided.unclaimed
    place = {node: k for k, node in enumerate(aten.placeholders)}
    made: list[tuple[RegionCall, ClaimedPart | PartSource | None]] = []
    for part in parts:
        places = tuple(place.get(x) if isinstance(x, fx.Node) else None for x in part.inputs)
        examples = tuple(None if k is None else example_inputs[k] for k in places)
        region = Region(f"region_{len(report.regions)}", part.graph, examples)
        if part.is_claimed:
            call = _EngineCall(region, engine, options, report)
            claimed = ClaimedPart(call.row.name, call.row.ops, call.spec, places)
            made.append((call, None if call.spec is None else claimed))
        else:
            made.append(_rest(region, options, report))
    name = {node: f"x{k}" for node, k in place.items()}
    write = HostSource("body", ", ".join(name.values()), "x{}".format)
    write.read_symbols(aten.symbols)
    write.add(*body_lines(aten, parts, name))
    text = str(write)
    log.publish("host", "split", text)
    body = body_of(text, [call for call, _ in made])
    is_whole = returning(aten, body) is body  # what it gives is what the program returned
    kept = KeptSplit.of(text, [one for _, one in made], report) if is_whole else None
    return SplitCall(body, kept)


def _rest(region: Region, options: Options, report: Report) -> tuple[RegionCall, PartSource | None]:
    """What no engine has: our compiler on the CPU, ATen itself for a single call and elsewhere.

    With it the source of what ATen runs, if that is all there is to it, and has no effects.
    """
    graph, calls = region.graph, region.calls()
    devices = {torch.device(n.meta["device"]).type for n in graph.graph.nodes if "device" in n.meta}
    if devices <= {"cpu"} and len(calls) > 1:
        return compile_aten(graph, region.examples, options, report), None
    if devices <= {"cpu"}:
        for x in calls:
            line = user_line(x.meta.get("stack_trace")) or ""
            report.externs.append(ExternRow(op_text(x), "there is nothing to fuse it with", line))
    source = part_source(graph)
    call = source.bind(graph.constants)
    is_whole = not graph.constants and all(map(is_pure, calls))
    return lambda inputs: call(*inputs), source if is_whole else None


class SplitCall(NamedTuple):
    """What runs a split graph, writes included, and what another process can make it of."""

    call: Callable[..., Any]
    kept: KeptSplit | None


class _EngineCall:
    """One region as it is called: through the engine, or through our compiler once that failed."""

    def __init__(self, region: Region, engine: Engine, options: Options, report: Report) -> None:
        self.region, self.options, self.report = region, options, report
        self.lock = threading.Lock()
        self.ours: RegionCall | None = None
        self.row = RegionRow(
            region.name,
            engine.name,
            engine.device,
            dict(Counter(map(op_text, region.calls()))),
            region.open_inputs(),
        )
        report.regions.append(self.row)
        self.spec: Any = None
        with report.timed(engine.name):
            try:
                self.call, self.spec, self.row.primitives = engine.compile(region)
            except Exception as error:  # noqa: BLE001  # the engine is another project's code
                self.call = self._fall_back(error, "was not compiled")

    def __call__(self, inputs: tuple[Any, ...]) -> Sequence[Tensor]:
        call = self.call
        try:
            results: Sequence[Tensor] = self.row.timed(call, inputs)
        except Declined:
            return self._compile_ours()(inputs)
        except Exception as error:
            if call is self.ours:
                raise
            self.call = self._fall_back(error, "failed")
            results = self.row.timed(self.call, inputs)
        return results

    def _compile_ours(self) -> RegionCall:
        with self.lock:
            if self.ours is None:
                self.ours, _ = _rest(self.region, self.options, self.report)
            return self.ours

    def _fall_back(self, error: Exception, what: str) -> RegionCall:
        if self.row.failed is not None:
            return self._compile_ours()
        reason = error.what if isinstance(error, FuseeError) else str(error)
        self.row.failed = (reason.strip().splitlines() or [type(error).__name__])[0]
        node = culprit(self.region, reason)
        op = op_text(node) if node is not None else f"one of {', '.join(self.row.ops)}"
        lines = [line.strip() for line in reason.splitlines() if line.strip()]
        warn(
            FuseeWarning,
            f"{self.row.name} of {self.report.name} {what} in {self.row.engine}, at {op}: "
            f"{lines[0] if lines else 'no reason was given'}",
            where=user_line(node.meta.get("stack_trace")) if node is not None else None,
            did="this region runs through our own compiler from now on",
            remedy="disabled_ops leaves an operator to PyTorch, and the rest to the engine",
        )
        return self._compile_ours()


def culprit(region: Region, text: str) -> fx.Node | None:
    """The call that an engine's error text speaks of, if it says."""
    calls = region.calls()
    if len(calls) == 1:
        return calls[0]
    for line in text.splitlines():
        words = set(re.split(r"[\s'\"/,:;()]+", line))
        for node in calls:
            if node.name in words or op_text(node) in words:
                return node
    return None
