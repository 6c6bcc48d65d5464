"""The three routes by which a program of the documents reaches us; every snippet takes each.

fusee      fusee.compile(...)
installed  torch.compile(...) after fusee.install()
stock      torch.compile(..., backend="fusee") or "fusee_openvino": TorchDynamo captures
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import fusee
from fusee.backends.report import Report, live_reports

ROUTES = ("fusee", "installed", "stock")

# What the documents call a backend is, for stock torch.compile, another's.
_STOCK = {"openvino": "fusee_openvino", "openvino_ts": "fusee_openvino_ts"}


class Route:
    """One route. `graphs` are those that our compilers made since the test began."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._before = self._known()  # held, so that no later one has the id of one of these
        self._kept: list[Any] = []

    def _known(self) -> list[Report]:
        return list(live_reports())

    def compile(self, fn: Any = None, **arguments: Any) -> Any:
        """torch.compile as the documents write it."""
        compiled: Callable[..., Any] = fusee.compile if self.name == "fusee" else torch.compile
        if self.name == "stock":
            backend = arguments.get("backend", "fusee")
            if isinstance(backend, str):
                arguments["backend"] = _STOCK.get(backend, backend)
        made = compiled(fn, **arguments)
        self._kept.append(made)
        return made

    @property
    def graphs(self) -> list[Report]:
        before = {id(one) for one in self._before}
        return [one for one in self._known() if id(one) not in before]


def routes(name: str) -> Iterator[Route]:
    """A route, taken back afterwards."""
    torch._dynamo.reset()
    if name == "installed":
        fusee.install()
    try:
        yield Route(name)
    finally:
        fusee.uninstall()
        torch._dynamo.reset()
        fusee.compiler.reset()
