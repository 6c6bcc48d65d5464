"""How tests of engines compile, and two programs that they share."""

from __future__ import annotations

import json
import subprocess
import sys
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
