"""Adapter to TorchDynamo's private API. Tested with torch 2.13; names exist in 2.11 to 2.15.

    torch._dynamo.backends.registry.lookup_backend   name -> function
    torch._TorchCompileInductorWrapper               TorchInductor with options, which it validates
    torch._dynamo.trace_rules                        folders and files of which no frame is traced
    torch._dynamo.exc.Unsupported                    what fullgraph=True raises

torch._dynamo takes a second to import and is imported here only when a stock backend is asked for.
Whoever else imports it finds it knowing of us.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusee.errors import FuseeError, GraphBreakError, OptionError, nearest
from fusee.runtime.imports import when_imported


def _skip_ours(trace_rules: Any) -> None:
    """Let no frame of ours be traced, nor of code that we generate; entrances are inlined."""
    trace_rules.SKIP_DIRS.append("<fusee ")
    trace_rules.add("fusee")


def _derive_error(exc: Any) -> None:
    """Let `except Unsupported` catch a GraphBreakError as well."""
    GraphBreakError.__bases__ = (FuseeError, exc.Unsupported)


when_imported("torch._dynamo.trace_rules", _skip_ours)
when_imported("torch._dynamo.exc", _derive_error)


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
