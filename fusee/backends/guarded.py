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
from fusee.errors import BackendError, FuseeError

__all__ = ["guarded", "save_graph"]

CompiledFn = Callable[..., Any]


def guarded(
    backend: CompiledFn, name: str, notice: Callable[[str, str], None], *, fall_back: bool
) -> CompiledFn:
    """`backend`, with its failures as BackendError, or as a notice and the graph run eagerly.

    A graph of our own compiler serves again where the same one is captured for another version.

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
        try:
            compiled = backend(gm, list(example_inputs))
            if key is not None and isinstance(compiled, CompiledGraph):
                made[key] = compiled
            if callable(compiled):
                return compiled  # type: ignore[no-any-return]
            problem = f"returned {type(compiled).__name__}, which cannot be called"
        except FuseeError as error:
            if not fall_back:
                raise
            problem = error.what
        except Exception as error:  # noqa: BLE001  # a backend is anybody's code
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


def save_graph(gm: fx.GraphModule) -> str:
    """Write a graph as Python that runs with torch alone. Returns the file's path."""
    folder = settings().dump
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    file, path = tempfile.mkstemp(prefix="fusee_graph_", suffix=".py", dir=folder)
    with os.fdopen(file, "w") as out:
        out.write(captured_source(gm))
    return path
