"""Calls that write to tensors in a way that no graph has: the graph ends before them.

They give a tensor another shape, other strides or more memory, or elements share memory.

Compiled code writes to a tensor of the caller's as that was when the graph began. What eager
resizes (`out=` of another size, `resize_`, `set_`) or turns (`t_`, `unsqueeze_`) runs in Python,
with eager's warnings, unless the tensor is the graph's own and nothing can share its memory.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusee.capture.graph_break import GraphBreak
from fusee.capture.torch_api import OpOverload, OpOverloadPacket
from fusee.fake.layouts import is_dense
from fusee.source import Args, Kwargs


def is_in_place(name: str) -> bool:
    """Whether an operator with this name writes to its first operand."""
    return name.endswith("_") and not name.endswith("__") and name not in _KEYWORDS


# Functions of the module `operator` that would otherwise be words of Python.
_KEYWORDS = ("and_", "or_", "not_")

# These change the shape or the strides of a tensor, and not its memory.
TURN = {
    "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_",
}  # fmt: skip
# These change its memory, too.
_RESIZE = {"resize_", "resize_as_", "set_"}


def refuse_new_geometry(
    func: Any,
    args: Args,
    kwargs: Kwargs,
    is_input: Callable[[Tensor], bool],
    run: Callable[..., Any],
) -> None:
    """End the graph before a call on FakeTensors that changes more than the values of one.

    is_input  whether a tensor is there before the graph
    run       calls `func` on fakes, and writes nothing down
    raises    GraphBreak; what eager raises for these arguments
    """
    name = getattr(func, "__name__", "").partition(".")[0]
    is_operator = isinstance(func, (OpOverload, OpOverloadPacket))
    if is_operator and name in _RESIZE:
        raise GraphBreak(f"{name}() changes a tensor in a way no graph can express")
    if name in TURN and args and isinstance(args[0], Tensor) and is_input(args[0]):
        raise GraphBreak(
            f"{name}() changes the shape or strides of a tensor from outside the graph"
        )
    names = set(_results(func)) if is_operator else {"out"}
    given = {key: x for key, x in kwargs.items() if key in names and x is not None}
    outs = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    with torch._C.DisableTorchFunction():
        kept = [x for x in outs if is_input(x) or x.untyped_storage().nbytes()]
        if not kept:
            return
        # meta kernels resize: so they get others to try
        likes = pytree.tree_map_only(
            Tensor, lambda x: x.new_empty_strided(x.shape, x.stride()), given
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(func, args, {**kwargs, **likes})
        for x, like in zip(outs, pytree.tree_leaves(likes), strict=True):
            if like.shape != x.shape and any(x is one for one in kept):
                raise GraphBreak(
                    f"out= is resized from {list(x.shape)} to {list(like.shape)}",
                    "give it a tensor of the result's shape",
                )


def _results(op: Any) -> Iterator[str]:
    """The arguments by name that an operator writes to."""
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, o) for o in op.overloads()]
    for overload in overloads:
        for given in overload._schema.arguments:
            if given.kwarg_only and given.alias_info is not None:
                yield given.name


def refuse_overlaps(name: str, args: Any, kwargs: Any) -> None:
    """End the graph at a write that ATen may refuse, since elements share memory.

    FakeTensors do not look. source   aten/src/ATen/MemoryOverlap.cpp
    """
    written = kwargs.get("out")
    may_be_operand = written is None or _is_pointwise(name)
    if written is None and is_in_place(name) and args:
        written = args[0]
    for x in written if isinstance(written, (tuple, list)) else (written,):
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            continue
        steps = [(n, step) for n, step in zip(x.shape, x.stride()) if n > 1]
        reach = 1 + sum((n - 1) * step for n, step in steps)
        shares = x.numel() > reach or any(step == 0 for _, step in steps)
        if shares or any(_overlap(x, y, may_be_operand) for y in args):
            raise GraphBreak(
                f"{name} writes to memory that several elements or operands share", "clone() first"
            )


def _overlap(x: torch.Tensor, y: Any, may_be_same: bool) -> bool:
    """Whether two dense tensors have a part of their memory in common, or all of it."""
    if y is x or not isinstance(y, torch.Tensor) or y.layout is not torch.strided:
        return y is x and not may_be_same
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    if not (is_dense(x) and is_dense(y)):
        return False
    first, second = ((t.storage_offset(), t.storage_offset() + t.numel()) for t in (x, y))
    if first == second and x.stride() == y.stride():
        return not may_be_same
    return first[0] < second[1] and second[0] < first[1]


@functools.lru_cache(maxsize=1024)
def _is_pointwise(name: str) -> bool:
    """Whether each element depends on those at its place alone: `out` may be an operand."""
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def is_scale(tensors: Any, other: Any) -> bool:
    """Whether a tensor stands for a number that leaves tensors their dtypes."""
    if not isinstance(other, torch.Tensor) or not isinstance(tensors, (list, tuple)):
        return False
    with torch._C.DisableTorchFunction():
        return not other.dim() and all(
            x.is_floating_point() and torch.result_type(x, other) is x.dtype for x in tensors
        )
