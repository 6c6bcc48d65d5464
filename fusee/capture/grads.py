"""What belongs to tensors: gradients, entries of dicts by tensor, attributes that are written.

The `grad` of one is a part of it like an attribute: None or a tensor, by a fact. What is written
to it is replayed after the graph. Between two such reads only a backward pass could change it, and
that is never inside of a graph.
"""

from __future__ import annotations

from typing import Any

import torch

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.mirror import Mirror
from fusee.capture.torch_api import FakeTensor, asks

__all__ = ["item_by_tensor", "read", "store", "write"]


def read(m: Capturing, fake: torch.Tensor) -> Any:
    """`tensor.grad`."""
    world = m.world
    if m.modes or (id(fake) in world.seen and asks(m.kind_of(fake))):
        raise GraphBreak("the grad of a tensor whose class, or a mode, is asked about it")
    written = world.slots.get((id(fake), "grad"))
    if written is not None:
        return written[2]
    real, origin = world.inputs.get(id(fake), (None, None))
    if real is None or origin is None:
        if fake.requires_grad:
            raise GraphBreak("the grad of a tensor of the graph is the result of a backward pass")
        return None
    with torch._C.DisableTorchFunction():
        grad = real.grad if real.is_leaf else None
    return world.load(grad, world.place(fake, "grad"))


def item_by_tensor(m: Capturing, mirror: Mirror, key: torch.Tensor) -> Any:
    """`state[parameter]` of a dict from outside."""
    real, origin = m.world.inputs.get(id(key), (None, None))
    if real is None or origin is None or real not in mirror.obj or mirror.is_changed():
        raise GraphBreak("a dict from outside is asked for a tensor that it does not have")
    place = m.world.entry(mirror, real, str(origin))
    return m.world.load(dict.__getitem__(mirror.obj, real), place)


def write(m: Capturing, fake: torch.Tensor, value: Any) -> None:
    """`tensor.grad = value`."""
    if m.modes:
        raise GraphBreak("setting the grad of a tensor where a mode is asked about it")
    if id(fake) not in m.world.inputs or not fake.is_leaf or id(fake) in m.world.seen:
        raise GraphBreak("setting the grad of a tensor that the graph computes")
    if isinstance(value, FakeTensor):
        same = [(x.shape, x.dtype, x.device) for x in (fake, value)]
        if same[0] != same[1] or value.requires_grad or value is fake:
            raise GraphBreak("a grad unlike its tensor", "give it the tensor's size and dtype")
    elif value is not None:
        raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(value)}")
    m.world.set_slot(fake, "grad", value)


def store(m: Capturing, fake: torch.Tensor, name: str, value: Any) -> bool:
    """`tensor.requires_grad = value`, or `tensor.data = value` of what is its data; else False."""
    if id(fake) in m.world.seen or m.modes:
        return False
    if name == "requires_grad" and isinstance(value, bool):
        m.world.recorder.call(torch.Tensor.requires_grad_, (fake, value), {})
        return True
    return name == "data" and isinstance(value, FakeTensor) and _is_data(fake, value)


def _is_data(fake: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor is the memory of another one, seen as it is."""

    def seen(x: torch.Tensor) -> tuple[Any, ...]:
        memory = x.untyped_storage()._cdata
        return memory, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()

    with torch._C.DisableTorchFunction():
        return value is fake or seen(value) == seen(fake)
