"""Backends: what turns a captured graph into something callable.

The contract is torch.compile's own: `backend(gm, example_inputs) -> callable(*inputs) -> outputs`.
`aot` makes one of functions that compile forward and backward graphs.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fusee.backends import ours as ours
from fusee.backends.registry import Backend, list_backends, lookup, register

if TYPE_CHECKING:
    from fusee.backends.two_graphs import aot

__all__ = ["Backend", "aot", "list_backends", "lookup", "register"]


def __getattr__(name: str) -> Any:
    if name != "aot":
        raise AttributeError(f"module 'fusee.backends' has no attribute {name!r}")
    found = importlib.import_module("fusee.backends.two_graphs").aot  # with all of autodiff
    globals()[name] = found
    return found
