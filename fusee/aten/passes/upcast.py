"""Matrix products of bfloat16 and float16 in float32, on processors that have no better.

    mm(x, w)   =>  to(mm(to(x, float32), to(w, float32)), x.dtype)

Both accumulate in float32 and round once; only the speed differs. Casts of large weights run at
each call, fused by the code generator, so that memory does not triple; those of convolutions are
small beside their images, and are kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fusee.aten.onednn import is_native
from fusee.aten.passes.edit import Editor, on_cpu, val

__all__ = ["upcast"]

aten = torch.ops.aten

# From here on float32 wins although it casts the weight at each call: see docs/decisions.md.
LEAST_ROWS = 6

# operator -> which axes of its result are rows that share the second factor
_PRODUCTS: dict[Any, slice] = {
    aten.linear.default: slice(0, -1),
    aten.mm.default: slice(0, 1),
    aten.addmm.default: slice(0, 1),
    aten.bmm.default: slice(1, 2),
    aten.baddbmm.default: slice(1, 2),
}


def upcast(edit: Editor) -> None:
    """Run the pass."""
    if is_native(torch.bfloat16) and is_native(torch.float16):
        return
    known: dict[fx.Node, fx.Node] = {}
    for node in list(edit.graph.nodes):
        if node.op == "call_function" and _wins(edit, node):
            _rewrite(edit, node, known)


def _wins(edit: Editor, node: fx.Node) -> bool:
    target = node.target
    is_conv = target is aten.convolution.default
    is_attention = target is aten.scaled_dot_product_attention.default
    if not (is_conv or is_attention or target in _PRODUCTS):
        return False
    dtype = val(node).dtype
    if is_native(dtype) or not on_cpu(node):
        return False
    if is_conv:
        return True
    if is_attention:
        return dtype is torch.float16  # the bfloat16 kernel of ATen is vectorised, this one is not
    return math.prod(edit.hints(node)[_PRODUCTS[target]]) >= LEAST_ROWS


def _rewrite(edit: Editor, node: fx.Node, known: dict[fx.Node, fx.Node]) -> None:
    dtype = val(node).dtype
    derive = node.target is aten.convolution.default

    def wide(arg: fx.Node) -> fx.Node:
        if val(arg).dtype is not dtype:
            return arg
        found = known.get(arg)
        if found is None:
            large = val(arg).dim() > 1 and not derive
            found = known[arg] = _before_rounding(edit, arg) or edit.cast(
                arg, torch.float32, node, derive=not large
            )
        return found

    with edit.before(node):
        args, kwargs = fx.map_arg(node.args, wide), fx.map_arg(node.kwargs, wide)
        meta = val(node).to(torch.float32)
        product = edit.call(node.target, *args, like=node, val=meta, **kwargs)  # type: ignore[arg-type]
    edit.become(node, aten._to_copy.default, product, dtype=dtype)
    edit.notes.append(f"{node} multiplies in float32: {product}")


def _before_rounding(edit: Editor, node: fx.Node) -> fx.Node | None:
    """A folded weight in the precision it was computed in."""
    if node.target is not aten._to_copy.default or not edit.is_static(node):
        return None
    (source,) = node.all_input_nodes
    is_fold = source.op == "call_function" and val(source).dtype is torch.float32
    return source if is_fold and not isinstance(source.target, torch._ops.OpOverload) else None
