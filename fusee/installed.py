"""Behind torch's names: `install()` puts our functions there, `uninstall()` takes them away.

torch.compile and nn.Module.compile are ours then. What else is replaced acts on both, so that a
program which knows only torch's names rules both. No module of torch's is imported for that.

Adapter to torch._logging. Tested with torch 2.13; all names exist in 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import EnumMeta
from typing import Any

import torch
from torch import _logging, nn

from fusee import compiler, log
from fusee.api import compile, compile_in_place, compiles
from fusee.backends import dynamo
from fusee.backends.registry import list_backends
from fusee.capture.captured import Entry
from fusee.capture.entries import listeners
from fusee.capture.graph_break import GraphBreak
from fusee.debug import explain
from fusee.errors import source_line
from fusee.runtime import cancel, when_imported

# ---------------------------------------------------------------------------- libraries
# Libraries that keep closed lists of backends.
#
# Each is adapted when it is imported, by whoever imports it; what is done can be undone.
#
#   accelerate          DynamoBackend, an enum: TorchDynamoPlugin, transformers' TrainingArguments
#   TorchServe          PT2Backend, an enum: `pt2: {compile: {backend: fusee}}` of its model-config

Undo = Callable[[], None]


def _extend(enum: EnumMeta, values: Sequence[str]) -> Undo:
    """Give an enum of texts more members, named as they are in capitals."""
    members: Any = enum
    before = [set(members._value2member_map_), set(members._member_map_)]
    new = [v for v in map(str, values) if v not in before[0] and v.upper() not in before[1]]
    for value in new:
        member = str.__new__(members, value)
        member._name_, member._value_ = value.upper(), value
        type.__setattr__(enum, value.upper(), member)
        members._value2member_map_[value] = members._member_map_[value.upper()] = member
        members._member_names_.append(value.upper())

    def undo() -> None:
        for value in new:
            del members._value2member_map_[value], members._member_map_[value.upper()]
            members._member_names_.remove(value.upper())
            type.__delattr__(enum, value.upper())

    return undo


_LIBRARIES: dict[str, Callable[[Any], Undo]] = {
    "accelerate.utils.dataclasses": lambda module: _extend(
        module.DynamoBackend, [name.upper() for name in list_backends()]
    ),
    "ts.utils.util": lambda module: _extend(module.PT2Backend, list_backends()),
}


# ---------------------------------------------------------------------------- installed


_undo: list[Undo] = []


def install() -> None:
    """Put `compile` behind torch.compile and nn.Module.compile, until uninstall().

    Functions of torch.compiler, torch._dynamo.reset and torch._dynamo.explain then act on what we
    compile too, TORCH_LOGS shows it, options of TorchInductor are taken with one notice, and
    libraries that keep lists of backends know ours.
    """
    if _undo:
        return
    _replace(torch, "compile", _compile)
    _replace(nn.Module, "compile", _compile_module)
    _replace(torch.compiler, "reset", _reset)
    _replace(torch.compiler, "substitute_in_graph", _substitute_in_graph)
    for name in _OURS:
        if hasattr(torch.compiler, name):
            _replace(torch.compiler, name, getattr(compiler, name))
    when_imported("torch._dynamo", _behind_dynamo)
    _undo.append(lambda: cancel("torch._dynamo", _behind_dynamo))
    set_logs, ends = _torchs.set_logs, _subscribed()

    def set_both(**settings: Any) -> None:
        set_logs(**settings)
        _all(ends)
        ends.extend(_subscribed())

    _replace(_torchs, "set_logs", set_both)
    _undo.append(lambda: _all(ends))
    for name, adapter in _LIBRARIES.items():
        action = functools.partial(lambda adapter, module: _undo.append(adapter(module)), adapter)
        when_imported(name, action)
        _undo.append(functools.partial(cancel, name, action))


def uninstall() -> None:
    """Undo install(). What was compiled meanwhile stays as it is."""
    _all(_undo)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Put a function where another was; uninstall() puts that back, unless a third one came."""
    before = getattr(owner, name)

    def back() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, before)

    setattr(owner, name, value)
    _undo.append(back)


# ------------------------------------------------------------------------------ compile


# Others may have put functions of theirs around ours, which then outlive uninstall(): Lightning.
_stock_compile, _stock_in_place = torch.compile, nn.Module.compile


@compiles
@functools.wraps(compile)
def _compile(model: Any = None, **arguments: Any) -> Any:
    if not _undo:
        return _stock_compile(model, **arguments)
    return compile(model, **_understood(arguments))


def _compile_module(self: nn.Module, *args: Any, **arguments: Any) -> None:
    """Compile what calling this module does. Takes compile()'s arguments."""
    if not _undo:
        return _stock_in_place(self, *args, **arguments)
    return compile_in_place(self, **_understood(arguments))


def _understood(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without options of TorchInductor's, if our compiler gets them."""
    options, backend = arguments.get("options"), arguments.get("backend")
    backend = compiler.get_default_backend() if backend is None else backend
    if backend != "fusee" or not isinstance(options, Mapping):
        return arguments
    return {**arguments, "options": dynamo.without(options)}


# ------------------------------------------------------------------------------ the others

# What torch.compiler has and ours does for both.
_OURS = tuple(
    "cudagraph_mark_step_begin get_default_backend list_backends load_cache_artifacts"
    " save_cache_artifacts set_default_backend".split()
)


def _reset() -> None:
    """torch.compiler.reset, for both; what was never imported has nothing to reset."""
    compiler.reset()
    if (loaded := sys.modules.get("torch._dynamo")) is not None:
        loaded.reset()


_torchs_substitute = torch.compiler.substitute_in_graph


@functools.wraps(_torchs_substitute)
def _substitute_in_graph(original_fn: Any, **options: Any) -> Callable[[Any], Any]:
    torchs = _torchs_substitute(original_fn, **options)
    ours = compiler.substitute_in_graph(original_fn, **options)
    return lambda traceable: (ours(traceable), torchs(traceable))[1]


def _behind_dynamo(module: Any) -> None:
    reset = module.reset

    @functools.wraps(reset)
    def reset_both() -> None:
        compiler.reset()
        reset()

    def explain_ours(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Of what torch.compile is now: torch's own class, with our findings."""

        def explained(*given: Any, **named: Any) -> Any:
            found = explain(f)(*given, **named)
            return dynamo.explanation(
                [graph.module for graph in found.graphs],
                [(b.reason, b.file, b.line, b.function, b.text) for b in found.breaks],
                found.guards,
                found.times,
            )

        return explained(*args, **kwargs) if args or kwargs else explained

    _replace(module, "reset", reset_both)
    _replace(module, "explain", explain_ours)
    counters = module.utils.counters

    def count(entry: Entry) -> None:
        found = entry.captured
        counters["frames"]["total"] += 1
        counters["frames"]["ok"] += not found.eager
        if found.graph is not None:
            nodes = (n for n in found.graph.graph.nodes if n.op not in ("placeholder", "output"))
            counters["stats"]["unique_graphs"] += 1
            counters["stats"]["calls_captured"] += sum(1 for _ in nodes)
        for stop in _stops(entry):
            counters["graph_break"][stop.reason] += 1

    listeners.append(count)
    _undo.append(lambda: listeners.remove(count))
    _replace(module, "error_on_graph_break", compiler.error_on_graph_break)


# ---------------------------------------------------------------------------- torch's logs
# TORCH_LOGS, for what we compile: the artefacts that have a counterpart, to torch's own handlers.

_torchs: Any = _logging
# Below it, torch's handlers are found.
_HOME = "torch._dynamo.fusee"
_DYNAMIC = "torch.fx.experimental.symbolic_shapes"  # what TORCH_LOGS=dynamic switches on
# torch's names, and our artefacts.
_SAME = {
    "aot_graphs": ("aten",),
    "fusion": ("fusion",),
    "graph_code": ("graph",),
    "output_code": ("host", "llvm"),
}


def _stops(entry: Entry) -> list[GraphBreak]:
    found = entry.captured
    return found.breaks if found.stop is None else [found.stop, *found.breaks]


def _all(ends: list[Undo]) -> None:
    while ends:
        ends.pop()()


def _subscribed() -> list[Undo]:
    """Listeners for what is switched on now; each as what ends it."""
    ends = []
    for name, artefacts in _SAME.items():
        if (logger := _wanted(name)) is not None:
            ends.append(log.subscribe(_to(logger), *artefacts))
    for name in ("guards", "recompiles"):
        if (logger := _wanted(name)) is not None:
            ends.append(log.subscribe(_to(logger, logging.DEBUG, "{0.name}: {0.text}"), name))
    dynamic = logging.getLogger(_DYNAMIC)
    if dynamic.isEnabledFor(logging.INFO):
        ends.append(log.subscribe(_to(dynamic), "dynamic"))
    if (breaks := _wanted("graph_breaks")) is not None:

        def tell_of_breaks(entry: Entry) -> None:
            for stop in _stops(entry):
                breaks.debug("Graph break: %s\n  %s", stop.reason, source_line(stop.where))

        listeners.append(tell_of_breaks)
        ends.append(lambda: listeners.remove(tell_of_breaks))
    return ends


def _wanted(name: str) -> logging.Logger | None:
    """torch's log of an artefact, if it is switched on."""
    logger: logging.Logger = _torchs.getArtifactLogger(_HOME, name)
    return logger if logger.isEnabledFor(logging.DEBUG) else None


def _to(
    logger: logging.Logger,
    level: int = logging.INFO,
    form: str = "{0.graph} {0.name}\n{0.text}",
) -> log.Listener:
    return lambda record: logger.log(level, "%s", form.format(record))
