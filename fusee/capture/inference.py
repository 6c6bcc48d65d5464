"""torch.inference_mode within a program that is captured.

Tensors that are made in the mode are of another kind, so a graph runs in it wholly or not at all:
its piece enters the mode around the graph. While the program is captured the mode is really on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.stand_ins import Args, Kwargs, stands_for
from fusee.capture.torch_api import enter_inference_mode

__all__ = ["left"]

_mode: Any = torch.inference_mode


@stands_for(_mode.__enter__)
def _enter(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    (manager,) = args
    m.inference.append((manager, enter_inference_mode(m.attribute(manager, "mode"))))


@stands_for(_mode.__exit__)
def _exit(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    if not m.inference or m.inference[-1][0] is not args[0]:
        raise GraphBreak("inference mode, which began before this graph, ends here")
    _, context = m.inference.pop()
    context.__exit__(None, None, None)


@contextmanager
def left(m: Capturing) -> Iterator[None]:
    """Leaves, at the end, what the program entered."""
    try:
        yield
    finally:
        while m.inference:
            m.inference.pop()[1].__exit__(None, None, None)
