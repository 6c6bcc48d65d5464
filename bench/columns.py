"""What is compared: each column runs a module its own way.

A column compiles through stock torch.compile, or through fusee.compile, with a backend wrapped in
`Timed`, which tells apart what the backend costs from what capture costs.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

INDUCTOR = ("inductor", "freezing")
COLUMNS = ("eager", *INDUCTOR, "fusee", "compile")
TITLES = {
    "eager": "eager",
    "inductor": "TorchInductor",
    "freezing": "TorchInductor, freezing",
    "fusee": "Fusee in torch.compile",
    "compile": "fusee.compile",
}


@dataclass
class Timed:
    """A backend by column name that adds up its own time: importing, compiling, each first run."""

    column: str
    compile_s: float = 0.0
    first_run_s: float = 0.0
    graphs: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        start = time.perf_counter()
        compiled = _backend(self.column)(gm, inputs)
        self.compile_s += time.perf_counter() - start
        self.graphs.append(gm)
        runs = 0

        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs > 1:
                return compiled(*args)
            start = time.perf_counter()
            result = compiled(*args)
            self.first_run_s += time.perf_counter() - start
            return result

        return run


def _backend(column: str) -> Callable[..., Any]:
    # Imports belong to the first call: a user waits for them, too.
    if column in INDUCTOR:
        found: Callable[..., Any] = importlib.import_module("torch._inductor.compile_fx").compile_fx
        return found
    found = importlib.import_module("fusee.backends").lookup("fusee")
    return found


def compile_column(
    column: str, module: nn.Module, timed: Timed | None = None
) -> Callable[..., Any]:
    """A function that runs `module` the column's way, its backend on the clock `timed` if given."""
    if column == "eager":
        return module
    if column == "compile":
        made: Callable[..., Any] = importlib.import_module("fusee").compile(
            module, backend=timed or "fusee"
        )
        return made
    return torch.compile(module, backend=timed or _backend(column))


@contextlib.contextmanager
def settings_of(column: str) -> Iterator[None]:
    """Global settings that must hold while a column compiles."""
    if column != "freezing":
        yield
        return
    config = importlib.import_module("torch._inductor.config")
    with config.patch(freezing=True):
        yield


def missing(column: str) -> str | None:
    """Why a column cannot run on this machine, or None."""
    if column in INDUCTOR and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return "no C++ compiler"
    return None
