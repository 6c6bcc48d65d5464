"""How tests of engines compile, and two programs that they share."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fusee
from fusee.backends import lookup
from fusee.backends.report import Report

PROGRAM = "program_of_another_process"
HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
"""
LAYERS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, ids):
        x = self.table(ids)
        return self.second(F.gelu(self.first(x))).softmax(-1)
model = Model().eval()
"""
IDS = torch.tensor([[1, 2, 9], [0, 4, 5]])


class Programs:
    """Starts programs as new processes would; `traces` grows with each graph that is traced."""

    def __init__(self, traces: list[str]) -> None:
        self.traces = traces

    def start(self, source: str = LAYERS) -> Any:
        program = types.ModuleType(PROGRAM)
        sys.modules[PROGRAM] = program
        exec(compile(HEAD + source, f"<{PROGRAM}>", "exec"), program.__dict__)
        self.traces.clear()
        return program


def compiled(backend: str, fn: Callable[..., Any], *args: Any, **options: object) -> Any:
    """A function as the backend alone compiles it."""
    return lookup(backend, options)(fx.symbolic_trace(fn), list(args))


def through(backend: str, seen: list[Report], **options: object) -> Callable[..., Any]:
    """The backend for stock torch.compile, which notes the reports."""
    found = lookup(backend, options)

    def noting(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        call = found(gm, inputs)
        seen.append(call.report())
        return call

    return noting


ways = pytest.mark.parametrize("way", ["fusee.compile", "torch.compile"])


def by(way: str, backend: str, fn: Callable[..., Any], **options: object) -> Any:
    """A function as its user compiles it, by one of `ways`."""
    if way == "fusee.compile":
        return fusee.compile(fn, backend=backend, options=options)
    return torch.compile(fn, backend=lookup(backend, options))


def two_layers(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(x @ w) + 1, -1) @ w


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.avg_pool2d(F.gelu(F.conv2d(x, w, padding=1)), 2).flatten(1)


def printed(program: str, *args: str) -> Any:
    """The last line that a program prints in a process of its own, which is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    return json.loads(done.stdout.splitlines()[-1])
