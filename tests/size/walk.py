"""The walk of one graph: through which files it goes, from `compile_native` on.

    python -m tests.size.walk     prints the files with the functions that are given it, and Steps

A small network is compiled with every call of ours watched. Files in a row that are given the
graph, in whichever form it is then, are its walk. Methods of the graph itself are no place that it
goes to.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

import fusee
from fusee.aten import AtenGraph
from fusee.backends import native
from fusee.loops import LoopGraph, Schedule
from fusee.loops.memory import Plan

FORMS = (fx.GraphModule, fx.Graph, AtenGraph, LoopGraph, Schedule, Plan)
PACKAGE = Path(fusee.__file__).parent
# From the top down.
FOLDERS = "backends autodiff aten fake targets codegen loops runtime sym".split()


class Stay(NamedTuple):
    """A file, and those of its functions that are given the graph before another file is.

    names   the form, and what the function calls it
    """

    file: str
    functions: dict[str, None]
    names: set[tuple[str, str, str]]


class Steps(NamedTuple):
    """How often it goes to a folder further up, and to a file that it has left; names it bears."""

    climbs: int
    returns: int
    names: int


def walk(*, training: bool) -> list[Stay]:
    """What compiling a small network gives the graph to, in order."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Softmax(-1))
    x, stays = torch.randn(4, 8), list[Stay]()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        path, code = Path(frame.f_code.co_filename), frame.f_code
        if event != "call" or PACKAGE not in path.parents or code.co_name.startswith("<"):
            return
        named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = {name: frame.f_locals.get(name) for name in named if name != "self"}
        graphs = {name: x for name, x in given.items() if isinstance(x, FORMS)}
        if graphs:
            file = path.relative_to(PACKAGE).as_posix()
            if not stays or stays[-1].file != file:
                stays.append(Stay(file, {}, set()))
            stays[-1].functions[code.co_qualname] = None
            stays[-1].names.update((file, type(x).__name__, name) for name, x in graphs.items())

    with torch.set_grad_enabled(training):
        for watched in (False, True):  # what is imported and compiled once is no step
            gm = fx.symbolic_trace(model)
            sys.setprofile(watch if watched else None)
            try:
                native.compile_native(gm, [x], {"cache": False, "check": False, "prices": False})
            finally:
                sys.setprofile(None)
    return stays


def steps(stays: list[Stay]) -> Steps:
    floors = [FOLDERS.index(stay.file.partition("/")[0]) for stay in stays]
    names = set().union(*(stay.names for stay in stays))
    returns = len(stays) - len({stay.file for stay in stays})
    return Steps(sum(b < a for a, b in itertools.pairwise(floors)), returns, len(names))


if __name__ == "__main__":
    for training in (False, True):
        stays = walk(training=training)
        print("training" if training else "inference", steps(stays))
        for stay in stays:
            print(f"    {stay.file}: {', '.join(stay.functions)}")
