"""Backends: what turns a captured graph into something callable.

The contract is torch.compile's own: `backend(gm, example_inputs) -> callable(*inputs) -> outputs`.
"""

import importlib
from collections.abc import Callable
from typing import Any

from fusee.backends.registry import Backend, list_backends, lookup, register

__all__ = ["Backend", "aot", "list_backends", "lookup", "register"]


def aot(
    *, fw_compiler: Callable[..., Any], bw_compiler: Callable[..., Any] | None = None, **more: Any
) -> Callable[..., Any]:
    """A backend from functions that compile forward and backward graphs of ATen operators.

    more   partition: from a joint graph to the two
    source fusee/backends/aot_autograd.py, which says all; it is loaded with autodiff at the first
    use
    """
    made: Callable[..., Any] = importlib.import_module("fusee.backends.aot_autograd").aot(
        fw_compiler=fw_compiler, bw_compiler=bw_compiler, **more
    )
    return made
