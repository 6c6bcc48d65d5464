"""What belongs to tensors: gradients, data, and attributes that programs put on them.

The `grad` of one is a part of it like an attribute: None or a tensor, by a fact. What is written
to it is replayed after the graph. Between two such reads only a backward pass could change it,
and that is never inside of a graph.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from fusee.capture.graph_break import GraphBreak
from fusee.capture.mirrors import Mirror
from fusee.capture.sources import Dict, Held
from fusee.capture.torch_api import FakeTensor, asks


def read(m: Any, fake: torch.Tensor) -> Any:
    """`tensor.grad`."""
    world = m.world
    if m.modes or (id(fake) in world.seen and asks(m.kind_of(fake))):
        raise GraphBreak("the grad of a tensor whose class, or a mode, is asked about it")
    written = world.slots.get((id(fake), "grad"))
    if written is not None:
        return written[2]
    real, origin = world.inputs.get(id(fake), (None, None))
    if real is None or origin is None:
        if id(fake) in world.put_grads:
            return world.put_grads[id(fake)]
        if fake.requires_grad:
            raise GraphBreak("the grad of a tensor of the graph is the result of a backward pass")
        return None
    with torch._C.DisableTorchFunction(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that most such tensors have none
        grad = real.grad
    return world.load(grad, world.place(fake, "grad"))


def write(m: Any, fake: torch.Tensor, value: Any) -> None:
    """`tensor.grad = value`."""
    if m.modes:
        raise GraphBreak("setting the grad of a tensor where a mode is asked about it")
    is_input = id(fake) in m.world.inputs
    if id(fake) in m.world.seen or not (is_input or (_is_plain(fake) and m.world.recorder.is_main)):
        raise GraphBreak("setting the grad of a tensor that the graph computes")
    if isinstance(value, FakeTensor):
        same = [(x.shape, x.dtype, x.device) for x in (fake, value)]
        if same[0] != same[1] or value.requires_grad or value is fake:
            raise GraphBreak("a grad unlike its tensor", "give it the tensor's size and dtype")
    elif value is not None:
        raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(value)}")
    if is_input:
        m.world.set_slot(fake, "grad", value)
    else:
        m.world.put_grads[id(fake)] = value


def _is_plain(fake: torch.Tensor) -> bool:
    """Whether autograd knows nothing of a tensor."""
    with torch._C.DisableTorchFunction():
        return not (fake.requires_grad or fake.is_inference())


def put_on(m: Any, fake: torch.Tensor) -> Mirror:
    """The Mirror of what programs put on a tensor, from outside or computed by the graph."""
    real, origin = m.world.inputs.get(id(fake), (None, None))
    if origin is not None:
        known: Mirror | None = m.world.mirrors.get(id(real.__dict__))
        return known or m.world.mirror(real.__dict__, Dict(origin))
    if id(fake) not in m.world.put_on:
        m.world.put_on[id(fake)] = made = Mirror({}, Held(fake, "attributes"))
        made.copy = {}
    found: Mirror = m.world.put_on[id(fake)]
    return found


def store_grad(m: Any, fake: torch.Tensor, name: str, value: Any) -> bool:
    """`tensor.requires_grad = value`, or `tensor.data = value` of what is its data; else False."""
    if id(fake) in m.world.seen or m.modes:
        return False
    with torch._C.DisableTorchFunction():
        is_leaf = fake.is_leaf
    if name == "requires_grad" and isinstance(value, bool) and is_leaf:
        m.world.recorder.call(torch.Tensor.requires_grad_, fake, value)
        return True
    if name != "data" or not isinstance(value, FakeTensor) or id(value) in m.world.seen:
        return False
    if _is_data(fake, value):
        return True
    # to the program it is the same tensor, with the other one's memory
    recorder, is_input = m.world.recorder, id(fake) in m.world.inputs
    with torch._C.DisableTorchFunction():
        is_like = (fake.dtype, fake.device) == (value.dtype, value.device)
        if not is_like or not recorder.is_main or (fake.requires_grad and not is_input):
            raise GraphBreak("a tensor gets data unlike its own, or loses track of gradients")
        before = fake.detach().requires_grad_(fake.requires_grad)
    data = recorder.call(torch.Tensor.detach, value)
    if any(x is fake for x, *_ in recorder.turned):
        raise GraphBreak("a tensor that was turned in place gets the data of another")
    recorder.rebind(fake, before, data)
    if fake.requires_grad:  # and the graph would not give it any gradient
        recorder.leaves[id(fake)] = recorder.leaves[id(data)] = True
    if is_input:
        m.world.set_slot(fake, "data", data)
    with torch._C.DisableTorchFunction():
        fake.data = data
    return True


def _is_data(fake: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor is the memory of another one, seen as it is."""

    def seen(x: torch.Tensor) -> tuple[Any, ...]:
        memory = x.untyped_storage()._cdata
        return memory, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()

    with torch._C.DisableTorchFunction():
        return value is fake or seen(value) == seen(fake)


def spent(x: torch.Tensor) -> torch.Tensor:
    """What a graph gives in the place of a tensor whose history a backward pass has used up."""
    with torch.inference_mode(False):  # gradients are on, whatever is on where the piece began
        begin = torch.empty(0, requires_grad=True)
        return _Spent.apply(begin, [x])  # type: ignore[no-untyped-call, no-any-return]


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors"
            " after they have already been freed). Saved intermediate values of the graph are freed"
            " when you call .backward() or autograd.grad(). Specify retain_graph=True if you need"
            " to backward through the graph a second time or if you need to access saved tensors"
            " after calling backward."
        )


def is_held(leaf: torch.Tensor) -> bool:
    """Whether somebody has the node of autograd at which the gradients of a leaf end: it may have
    hooks, which nothing tells of."""
    with torch.enable_grad():
        ((node, _),) = leaf.view_as(leaf).grad_fn.next_functions  # type: ignore[union-attr]
    return sys.getrefcount(node) > 2


def is_watched() -> bool:
    """Whether backward passes look for NaN, or may meet hooks of torch.distributed."""
    if torch.is_anomaly_enabled():
        return True
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is not None and bool(module.is_initialized())
