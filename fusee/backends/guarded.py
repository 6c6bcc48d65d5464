"""A backend as capture calls it: what goes wrong in it becomes an error that one can act on."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from fusee.backends.report import CompiledGraph, first_line
from fusee.backends.same_graph import form
from fusee.backends.source import captured_source
from fusee.config import settings
from fusee.errors import BackendError, FuseeError, TraceError

__all__ = ["guarded", "save_graph"]

CompiledFn = Callable[..., Any]


def guarded(
    backend: CompiledFn, name: str, notice: Callable[[str, str], None], *, fall_back: bool
) -> CompiledFn:
    """`backend`, with its failures as BackendError, or as a notice and the graph run eagerly.

    A graph of our own compiler serves again where the same one is captured for another version.
    One that eager refuses to run is left to eager, which raises what the program expects: shape
    functions accept more than ATen does, of tensors without elements above all.

    fall_back   whether to run a graph eagerly that the backend cannot compile
    raises      BackendError; errors of ours as they are, since they say what is wrong
    """
    made: weakref.WeakValueDictionary[Hashable, CompiledGraph] = weakref.WeakValueDictionary()

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> CompiledFn:
        cause: Exception | None = None
        key = form(gm, example_inputs)
        known = None if key is None else made.get(key)
        if known is not None:
            return known
        if _has_nothing(gm) and is_refused(gm, example_inputs):
            return gm.forward
        try:
            compiled = backend(gm, list(example_inputs))
            if key is not None and isinstance(compiled, CompiledGraph):
                made[key] = compiled
            if callable(compiled):
                return compiled  # type: ignore[no-any-return]
            problem = f"returned {type(compiled).__name__}, which cannot be called"
        except FuseeError as error:
            if isinstance(error, TraceError) and is_refused(gm, example_inputs):
                return gm.forward
            if not fall_back:
                raise
            problem = error.what
        except Exception as error:  # noqa: BLE001  # a backend is anybody's code
            if is_refused(gm, example_inputs):
                return gm.forward
            problem, cause = f"raised {type(error).__name__}: {error}", error
        where = first_line(gm)
        if fall_back:
            notice(f"a graph runs eagerly: backend {name!r} {problem}", where or "")
            eager: CompiledFn = gm.forward
            return eager
        raise BackendError(
            f"backend {name!r} {problem}",
            where=where,
            did=f"saved the graph to {save_graph(gm)}",
            remedy='options={"fallback": "eager"} runs such graphs eagerly',
        ) from cause

    compile_graph.__name__ = name
    for way in ("begin", "resume"):
        if (function := getattr(backend, way, None)) is not None:
            vars(compile_graph)[way] = function
    return compile_graph


def _has_nothing(gm: fx.GraphModule) -> bool:
    """Whether a graph of torch's own functions alone meets a tensor without elements."""
    is_empty = False
    for node in gm.graph.nodes:
        module = getattr(node.target, "__module__", None) or "torch"
        if node.op == "call_function" and module.partition(".")[0] not in ("torch", "_operator"):
            return False
        value = node.meta.get("example_value")
        is_empty |= isinstance(value, torch.Tensor) and 0 in value.shape
    return is_empty


def is_refused(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether eager raises for a graph and inputs like these, of which it gets copies."""
    copies = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in inputs
    ]
    with torch.random.fork_rng(devices=[]):
        try:
            gm.forward(*copies)
        except Exception:  # noqa: BLE001  # whatever it is, the call will raise it
            return True
    return False


def save_graph(gm: fx.GraphModule) -> str:
    """Write a graph as Python that runs with torch alone. Returns the file's path."""
    folder = settings().dump
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    file, path = tempfile.mkstemp(prefix="fusee_graph_", suffix=".py", dir=folder)
    with os.fdopen(file, "w") as out:
        out.write(captured_source(gm))
    return path
