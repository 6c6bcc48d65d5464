"""Adapter to TorchDynamo's private API. Tested with torch 2.13; names exist in 2.11 to 2.15.

    torch._dynamo.backends.registry.lookup_backend   name -> function
    torch._TorchCompileInductorWrapper               TorchInductor with options, which it validates
    torch._dynamo.config.suppress_errors             whether what a backend refuses runs eagerly
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fusee.config import CaptureOptions, Options, knobs
from fusee.errors import (
    BackendError,
    ConstantSizeError,
    FuseeError,
    FuseeWarning,
    GraphBreakError,
    OptionError,
    RecompileError,
    nearest,
    warn,
)
from fusee.runtime import when_imported


def _skip_ours(trace_rules: Any) -> None:
    """Let no frame of ours be traced, nor of code that we generate; entrances are inlined."""
    trace_rules.SKIP_DIRS.append("<fusee ")
    trace_rules.add("fusee")


def _derive(error: type[FuseeError], name: str, module: Any) -> None:
    """Let who catches torch's error of that name catch ours as well."""
    error.__bases__ = (FuseeError, getattr(module, name))


when_imported("torch._dynamo.trace_rules", _skip_ours)
for _error, _module, _name in (
    (GraphBreakError, "torch._dynamo.exc", "Unsupported"),
    (RecompileError, "torch._dynamo.exc", "RecompileError"),
    (BackendError, "torch._dynamo.exc", "BackendCompilerFailed"),
    (ConstantSizeError, "torch.fx.experimental.symbolic_shapes", "ConstraintViolationError"),
):
    when_imported(_module, partial(_derive, _error, _name))


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
        known = inductor_names()
        wrong = next((name for name in options if name.replace("-", "_") not in known), None)
        close = nearest(wrong, known) if wrong is not None else None
        raise OptionError(
            str(error).partition(", known options")[0],
            remedy=repr(close) if close else "torch._inductor.list_options() lists them",
        ) from error
    return bound


def suppresses_errors() -> bool:
    """Whether torch._dynamo.config says to run eagerly what a backend cannot compile."""
    return bool(getattr(sys.modules.get("torch._dynamo.config"), "suppress_errors", False))


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


# ---------------------------------------------------------------------------- foreign
# Backends of other packages that take whole graphs: they are given the graph as it was captured.
#
# Their packages register with TorchDynamo when they are imported, under the names used here.


def compile_registered(
    package: str,
    name: str,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, object],
) -> Callable[..., Any]:
    """What another package's backend makes of the graph; it knows its options.

    raises   BackendError
    """
    importlib.import_module(package)
    found = lookup_backend(name)
    if found is None:
        raise BackendError(
            f"{package} was imported and registered no backend named {name!r}",
            did="stopped before compiling",
            remedy=f"a version of {package} that does",
        )
    more = {"options": dict(options)} if options else {}
    compiled: Callable[..., Any] = found(gm, list(example_inputs), **more)
    return compiled


# ---------------------------------------------------------------------------- inductor options
# Options of TorchInductor's, given where our compiler compiles: what they are here.

_OWN = {row.name for table in (CaptureOptions, Options) for row in knobs(table)}

# What has a counterpart, and which.
_HERE = {
    "compile_threads": "nothing compiles in other processes",
    "coordinate_descent_tuning": "nothing is tuned",
    "cpp.simdlen": 'options={"vector_bits": ...}',
    "cpp.threads": 'options={"threads": ...}',
    "debug": "FUSEE_DUMP=folder",
    "emulate_precision_casts": "always so",
    "fallback_random": "always so: random numbers are eager's",
    "force_disable_caches": 'options={"cache": False}',
    "freezing": 'options={"derive_weights": True}, the default',
    "fx_graph_cache": 'options={"cache": True}, the default',
    "max_autotune": "nothing is tuned",
    "max_autotune_gemm": "matrix products are ATen's",
    "max_autotune_pointwise": "nothing is tuned",
    "trace.enabled": "FUSEE_DUMP=folder",
    "triton.cudagraphs": 'backend="cudagraphs"',
}
_said: set[str] = set()


def without(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without TorchInductor's, of which the user is told once. Others stay."""
    plain = {name: name.replace("-", "_") for name in options if name not in _OWN}
    known = set(_HERE)
    if not known.issuperset(plain.values()):
        known.update(inductor_names())  # which takes a second to import
    theirs = [name for name in plain if plain[name] in known]
    if new := [plain[name] for name in theirs if plain[name] not in _said]:
        _said.update(new)
        listed = "; ".join(f"{name} (here: {_HERE.get(name, 'without effect')})" for name in new)
        warn(
            FuseeWarning,
            f"options of TorchInductor: {listed}",
            did="went on without them",
            remedy='docs/options.md has ours; backend="inductor" takes TorchInductor\'s',
        )
    return {name: value for name, value in options.items() if name not in theirs}
