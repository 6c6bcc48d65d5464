"""Calls that give a tensor another shape, other strides or more memory: the graph ends before them.

Compiled code writes to a tensor of the caller's as that was when the graph began. What eager
resizes (`out=` of another size, `resize_`, `set_`) or turns (`t_`, `unsqueeze_`) runs in Python,
with eager's warnings, unless the tensor is the graph's own and nothing can share its memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusee.capture.breaks import GraphBreak
from fusee.capture.torch_api import OpOverload, OpOverloadPacket

__all__ = ["refuse_new_geometry"]

# These change the shape or the strides of a tensor, and not its memory.
_TURN = {
    "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_",
}  # fmt: skip
# These change its memory, too.
_RESIZE = {"resize_", "resize_as_", "set_"}


def refuse_new_geometry(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
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
    if name in _TURN and args and isinstance(args[0], Tensor) and is_input(args[0]):
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
        likes = pytree.tree_map_only(Tensor, _like, given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(func, args, {**kwargs, **likes})
        for x, like in zip(outs, pytree.tree_leaves(likes), strict=True):
            if like.shape != x.shape and any(x is one for one in kept):
                raise GraphBreak(
                    f"out= is resized from {list(x.shape)} to {list(like.shape)}",
                    "give it a tensor of the result's shape",
                )


def _like(x: Tensor) -> Tensor:
    return x.new_empty_strided(x.shape, x.stride())


def _results(op: Any) -> Iterator[str]:
    """The arguments by name that an operator writes to."""
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, o) for o in op.overloads()]
    for overload in overloads:
        for argument in overload._schema.arguments:
            if argument.kwarg_only and argument.alias_info is not None:
                yield argument.name
