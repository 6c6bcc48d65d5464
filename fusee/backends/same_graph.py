"""Graphs that were captured twice: one compiled graph serves both.

A version of a function may differ from another in what it checks and not in what it computes: at a
second training step gradients exist, the forward is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.torch_api import is_state
from fusee.runtime import collector

__all__ = ["form", "situation"]

_LEAVES = (
    int, bool, str, bytes, complex, type(None), type(Ellipsis), torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip


class _Unknown(Exception):
    """Something whose equality says too little."""


@collector.paused()
def form(gm: fx.GraphModule, examples: Sequence[Any]) -> Hashable | None:
    """What a compiled graph depends on; None if that cannot be told. Equal forms: one graph.

    That is each call with its arguments, the inputs' metadata and which of them share memory, the
    very parameters, since what is derived from them is kept, and the modes of torch that are on.
    """
    if any(True for _ in (*gm.parameters(), *gm.buffers())):
        return None
    places: dict[fx.Node, int] = {}
    rows: list[Hashable] = []
    try:
        for node in gm.graph.nodes:
            target = None if node.op == "placeholder" else node.target
            if node.op in ("get_attr", "call_module"):
                return None
            args = _argument((node.args, node.kwargs), places)
            rows.append((node.op, target, args))
            places[node] = len(places)
        buffers = [n.meta.get("is_buffer", False) for n in gm.graph.find_nodes(op="placeholder")]
        kept = tuple(
            id(x) if isinstance(x, Tensor) and (is_buffer or is_state(x)) else None
            for x, is_buffer in zip(examples, buffers, strict=True)
        )
        found = tuple(rows), situation(examples), kept
        hash(found)
    except (_Unknown, TypeError):  # TypeError: a target that cannot be hashed
        return None
    return found


def _argument(x: Any, places: dict[fx.Node, int]) -> Hashable:
    if isinstance(x, fx.Node):
        return fx.Node, places[x]
    if isinstance(x, (tuple, list)):
        return type(x), tuple(_argument(item, places) for item in x)
    if isinstance(x, dict):
        return dict, tuple((key, _argument(item, places)) for key, item in x.items())
    if isinstance(x, slice):
        return slice, _argument((x.start, x.stop, x.step), places)
    if type(x) is float:
        return float, x.hex()  # which tells -0.0 from 0.0, and finds NaN again
    if type(x) in _LEAVES:
        return type(x), x
    raise _Unknown


def situation(examples: Sequence[Any]) -> Hashable:
    """What a graph is compiled for besides what it is: its inputs' metadata, and torch's modes.

    Equal in two processes where it is the same.
    """
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    rows: list[Hashable] = []
    for k, x in enumerate(examples):
        if not isinstance(x, Tensor):
            rows.append((type(x), x))
            continue
        storage = x.untyped_storage().data_ptr() if x.numel() else -k - 1
        about = (type(x), x.dtype, x.device, x.layout, tuple(x.shape), x.stride())
        grad = (x.storage_offset(), x.requires_grad, x.is_leaf, x.is_inference(), is_state(x))
        same = objects.setdefault(id(x), k), storages.setdefault(storage, k)
        rows.append((*about, *grad, *same))
    return tuple(rows), _modes()


def _modes() -> Hashable:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *autocast, *grad, torch.get_default_dtype()
