"""Adapter to TorchDynamo's private API. Tested with torch 2.13; names exist in 2.11 to 2.15.

    torch._dynamo.backends.registry.lookup_backend   name -> function
    torch._TorchCompileInductorWrapper               TorchInductor with options, which it validates
    torch._dynamo.trace_rules                        folders and files of which no frame is traced
    torch._dynamo.exc                                what fullgraph=True, a backend that fails and
                                                     error_on_recompile raise
    ExplainOutput, GraphCompileReason                what torch._dynamo.explain gives

torch._dynamo takes a second to import and is imported here only when a stock backend is asked for.
Whoever else imports it finds it knowing of us.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from fusee.errors import (
    BackendError,
    FuseeError,
    GraphBreakError,
    OptionError,
    RecompileError,
    nearest,
)
from fusee.runtime.imports import when_imported


def _skip_ours(trace_rules: Any) -> None:
    """Let no frame of ours be traced, nor of code that we generate; entrances are inlined."""
    trace_rules.SKIP_DIRS.append("<fusee ")
    trace_rules.add("fusee")


def _derive_errors(exc: Any) -> None:
    """Let `except Unsupported` catch a GraphBreakError as well, and so on."""
    GraphBreakError.__bases__ = (FuseeError, exc.Unsupported)
    RecompileError.__bases__ = (FuseeError, exc.RecompileError)
    BackendError.__bases__ = (FuseeError, exc.BackendCompilerFailed)


when_imported("torch._dynamo.trace_rules", _skip_ours)
when_imported("torch._dynamo.exc", _derive_errors)


def registered(excluded: Iterable[str]) -> list[str]:
    """Names registered with TorchDynamo, without those of these tags; none if it isn't imported."""
    registry = sys.modules.get("torch._dynamo.backends.registry")
    return [] if registry is None else registry.list_backends(tuple(excluded))


def list_backends() -> list[str]:
    """All names that stock torch knows."""
    registry = importlib.import_module("torch._dynamo.backends.registry")
    names: list[str] = registry.list_backends(exclude_tags=None)
    return names


def lookup_backend(name: str) -> Callable[..., Any] | None:
    """Stock torch's backend of that name, or None if it has none."""
    if name not in list_backends():
        return None
    registry = importlib.import_module("torch._dynamo.backends.registry")
    found: Callable[..., Any] = registry.lookup_backend(name)
    return found


def inductor(options: Mapping[str, object], mode: str | None = None) -> Callable[..., Any]:
    """TorchInductor with these options or this mode, without compiling anything.

    raises   OptionError
    """
    make: Callable[..., Any] = torch._TorchCompileInductorWrapper
    try:
        bound: Callable[..., Any] = make(mode, dict(options) or None, None)
    except RuntimeError as error:
        known = importlib.import_module("torch._inductor.config").get_config_copy()
        wrong = next((name for name in options if name.replace("-", "_") not in known), None)
        close = nearest(wrong, known) if wrong is not None else None
        raise OptionError(
            str(error).partition(", known options")[0],
            did="stopped before compiling",
            remedy=repr(close) if close else "torch._inductor.list_options() lists them",
        ) from error
    return bound


def inductor_names() -> Collection[str]:
    """The options that TorchInductor knows."""
    names: dict[str, Any] = importlib.import_module("torch._inductor.config").get_config_copy()
    return names.keys()


def explanation(
    graphs: list[Any],
    breaks: list[tuple[str, str, int, str, str]],
    guards: list[str],
    times: Mapping[str, float],
) -> Any:
    """What torch._dynamo.explain gives, of our findings: a reason and the user's line a break."""
    found = importlib.import_module("torch._dynamo.backends.debugging").ExplainOutput
    reason = importlib.import_module("torch._dynamo.output_graph").GraphCompileReason
    calls = [[n for n in gm.graph.nodes if n.op.startswith("call_")] for gm in graphs]
    return found(
        graphs=graphs,
        graph_count=len(graphs),
        graph_break_count=len(breaks),
        break_reasons=[
            reason(why, [traceback.FrameSummary(file, line, function, line=text)], False)
            for why, file, line, function, text in breaks
        ],
        op_count=sum(map(len, calls)),
        ops_per_graph=[[node.target for node in some] for some in calls],
        out_guards=guards,
        compile_times="\n".join(f"{stage}: {ms:.1f} ms" for stage, ms in times.items()),
    )
