"""Behind torch's names: `install()` puts our functions there, `uninstall()` takes them away.

torch.compile and nn.Module.compile are ours then. What else is replaced acts on both, so that a
program which knows only torch's names rules both. No module of torch's is imported for that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import EnumMeta
from typing import Any

import torch
from torch import nn

from fusee import compiler
from fusee.api import compile, compile_in_place
from fusee.backends import dynamo
from fusee.backends.registry import list_backends
from fusee.debug import torch_logs
from fusee.debug.explain import explain
from fusee.runtime.process import cancel, when_imported

# ---------------------------------------------------------------------------- libraries
# Libraries that keep closed lists of backends.
#
# Each is adapted when it is imported, by whoever imports it; what is done can be undone.
#
#   accelerate          DynamoBackend, an enum: TorchDynamoPlugin, transformers' TrainingArguments
#   TorchServe          PT2Backend, an enum: `pt2: {compile: {backend: fusee}}` of its model-config

Undo = Callable[[], None]


def adapt() -> Undo:
    """Adapt them all, now or when they are imported. Returns the undo."""
    done: list[Undo] = []
    for name, adapter in _LIBRARIES.items():
        action = functools.partial(lambda adapter, module: done.append(adapter(module)), adapter)
        when_imported(name, action)
        done.append(functools.partial(cancel, name, action))

    def undo() -> None:
        while done:
            done.pop()()

    return undo


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


_undo: list[Callable[[], None]] = []


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
    _undo.append(torch_logs.follow(_replace))
    _undo.append(adapt())


def uninstall() -> None:
    """Undo install(). What was compiled meanwhile stays as it is."""
    while _undo:
        _undo.pop()()


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
_OURS = (
    "cudagraph_mark_step_begin", "get_default_backend", "list_backends", "load_cache_artifacts",
    "save_cache_artifacts", "set_default_backend",
)  # fmt: skip


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

    _replace(module, "reset", reset_both)
    _replace(module, "explain", _explain)
    _replace(module, "error_on_graph_break", compiler.error_on_graph_break)


def _explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch._dynamo.explain of what torch.compile is now: its own class, with our findings."""

    def explained(*given: Any, **named: Any) -> Any:
        found = explain(f)(*given, **named)
        return dynamo.explanation(
            [graph.module for graph in found.graphs],
            [(b.reason, b.file, b.line, b.function, b.text) for b in found.breaks],
            found.guards,
            found.times,
        )

    return explained(*args, **kwargs) if args or kwargs else explained
