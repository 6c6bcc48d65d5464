"""Backends: what turns a captured graph into something callable.

The contract is torch.compile's own: `backend(gm, example_inputs) -> callable(*inputs) -> outputs`.
"""

from fusee.backends import ours as ours
from fusee.backends.registry import Backend, list_backends, lookup, register

__all__ = ["Backend", "list_backends", "lookup", "register"]
