"""A backend for tests of what goes into graphs, and how often one is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

__all__ = ["Counting"]


class Counting:
    """Runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward

    @property
    def targets(self) -> list[list[Any]]:
        """What the nodes of each graph call."""
        return [
            [n.target for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
            for gm in self.graphs
        ]
