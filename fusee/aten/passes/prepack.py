"""Linear layers and convolutions become the fastest call this processor has for them.

    linear(x, w, b)   =>  view(addmm(b, view(x), t(w)))                 float32, float64
                      =>  mkldnn._linear_pointwise(x, packed(w), b)     bfloat16, float16 if native
    convolution(...)  =>  mkldnn._convolution_pointwise(..., packed(w)) images
                      =>  view(addmm(b, view(x), t(squeeze(w))))        images of one pixel

addmm and mm write straight into the arena and cost 2 us a call; the packed operators allocate their
result and cost 25 us (linear) or 50 us (convolution). A packed float32 linear is up to twice as
fast for 2 to 64 rows, but two to four times as far from float64 as eager: not used. The rules
follow the measurements in docs/decisions.md, section Externs.
"""

from __future__ import annotations

import torch
from torch import fx

from fusee.aten.onednn import Packed, is_native, packed
from fusee.aten.passes.edit import Editor, bound, on_cpu, val

__all__ = ["prepack"]

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def prepack(edit: Editor) -> None:
    """Run the pass."""
    ops = packed()
    done = {"packed linear": 0, "matrix product": 0, "packed convolution": 0}
    for node in edit.calls(aten.linear.default):
        kind = _linear(edit, ops, node)
        if kind:
            done[kind] += 1
    for node in edit.calls(aten.addmm.default, aten.mm.default):
        if ops is not None and _product(edit, ops, node):
            done["packed linear"] += 1
    for node in edit.calls(aten.convolution.default):
        kind = _convolution(edit, ops, node)
        if kind:
            done[kind] += 1
    edit.notes += [f"{count} layers as {kind}" for kind, count in done.items() if count]


# ------------------------------------------------------------------------------ linear


def packs_linear(dtype: torch.dtype) -> bool:
    """Whether linear layers of `dtype` take packed weights."""
    # with instructions for these types ATen calls oneDNN too, which then packs at each call
    return dtype in (torch.bfloat16, torch.float16) and is_native(dtype)


def _packed_linear(
    edit: Editor, ops: Packed, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None
) -> None:
    """Replace `node` by the packed operator; `weight` is (out, in)."""
    with edit.before(node):
        opaque = edit.call(ops.reorder_linear, weight, None, like=node, val=val(weight))
    opaque.meta["packed"] = True
    edit.become(node, ops.linear, x, opaque, bias, "none", [], "")


def _linear(edit: Editor, ops: Packed | None, node: fx.Node) -> str:
    x, weight, bias = bound(node, ("input", "weight", "bias"))
    rank = val(x).dim()
    plain = val(weight).dim() == 2 and (bias is None or val(bias).dim() == 1)
    if not plain or rank < 2 or not on_cpu(node) or val(node).dtype not in _FLOATS:
        return ""
    is_static = edit.is_static(weight) and edit.is_static(bias)
    if ops is not None and is_static and packs_linear(val(node).dtype):
        _packed_linear(edit, ops, node, x, weight, bias)
        return "packed linear"
    with edit.before(node):
        factor = edit.call(aten.t.default, weight, like=node)
        rows = _rows(edit, x, node)
    _become_product(edit, node, rows, factor, bias)
    return "matrix product"


def _rows(edit: Editor, x: fx.Node, node: fx.Node) -> fx.Node:
    """`x` as a matrix of its last axis."""
    size = val(x).shape
    if len(size) == 2:
        return x
    if not val(x).is_contiguous():
        x = edit.call(aten.clone.default, x, like=node, memory_format=torch.contiguous_format)
    rows = size[0]
    for n in size[1:-1]:
        rows = rows * n
    return edit.call(aten.view.default, x, [rows, size[-1]], like=node)


def _become_product(
    edit: Editor, node: fx.Node, x: fx.Node, factor: fx.Node, bias: fx.Node | None
) -> None:
    """Make `node` the matrix product x @ factor + bias, in the shape it has."""
    op = aten.mm.default if bias is None else aten.addmm.default
    args = (x, factor) if bias is None else (bias, x, factor)
    out = val(node)
    if out.dim() == 2:
        edit.become(node, op, *args)
        return
    size = (val(x).shape[0], val(factor).shape[1])
    with edit.before(node):
        made = edit.call(op, *args, like=node, val=out.new_empty(size))
    edit.become(node, aten.view.default, made, list(out.shape))


def _product(edit: Editor, ops: Packed, node: fx.Node) -> bool:
    """mm and addmm with a static second factor, as a linear layer with the transposed weight."""
    if node.target is aten.mm.default:
        (x, factor), bias = node.args, None
    else:
        bias, x, factor = node.args
        if node.kwargs or not edit.is_static(bias) or val(bias).dim() != 1:  # type: ignore[arg-type]
            return False
        if val(bias).shape[0] != val(node).shape[1]:  # type: ignore[arg-type]
            return False
    assert isinstance(x, fx.Node) and isinstance(factor, fx.Node)
    if edit.is_static(x) or not edit.is_static(factor) or not on_cpu(node):
        return False
    if not packs_linear(val(node).dtype):
        return False
    with edit.before(node):
        weight = edit.call(aten.t.default, factor, like=node)
        weight = edit.call(
            aten.clone.default, weight, like=node, memory_format=torch.contiguous_format
        )
    _packed_linear(edit, ops, node, x, weight, bias)  # type: ignore[arg-type]
    return True


# ------------------------------------------------------------------------------ convolution


def _convolution(edit: Editor, ops: Packed | None, node: fx.Node) -> str:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    out = val(node)
    is_static = edit.is_static(weight) and edit.is_static(bias)
    if out.dim() != 4 or transposed or not is_static or not on_cpu(node):
        return ""
    if _is_one_pixel(edit, node):
        _as_product(edit, node, x, weight, bias)  # type: ignore[arg-type]
        return "matrix product"
    supported = out.dtype is torch.float32 or (
        out.dtype in (torch.bfloat16, torch.float16) and is_native(out.dtype)
    )
    if ops is None or not supported or 0 in edit.hints(x) or 0 in edit.hints(node):
        return ""
    with edit.before(node):
        opaque = _packed_kernel(edit, ops, node)
    edit.become(node, ops.conv, x, opaque, bias, padding, stride, dilation, groups, "none", [], "")
    return "packed convolution"


def _packed_kernel(edit: Editor, ops: Packed, node: fx.Node) -> fx.Node:
    """The weight in the order that oneDNN wants for this image size.

    An order for another size makes oneDNN reorder at each call by its slowest code (25 to 130 ms
    were measured); a plain channels-last weight costs a tenth of that. Batch sizes do not matter.
    """
    x, weight, _, stride, padding, dilation, _, _, groups = node.args
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    size = val(x).shape
    if any(isinstance(n, torch.SymInt) for n in size[2:]):
        made = edit.call(aten.clone.default, weight, like=node, memory_format=torch.channels_last)
        made.meta["free"] = True
        return made
    made = edit.call(
        ops.reorder_conv, weight, padding, stride, dilation, groups, edit.hints(x),
        like=node, val=val(weight),
    )  # fmt: skip
    made.meta["packed"] = True
    return made


def _is_one_pixel(edit: Editor, node: fx.Node) -> bool:
    """A 1x1 kernel on 1x1 images, as squeeze-and-excitation has."""
    x, weight, _, _, padding, _, _, _, groups = node.args
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    pixels = (*val(x).shape[2:], *val(weight).shape[2:])
    if any(isinstance(n, torch.SymInt) for n in pixels):
        return False
    assert isinstance(padding, (tuple, list))
    return (*pixels, groups, *padding) == (1, 1, 1, 1, 1, 0, 0)


def _as_product(
    edit: Editor, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None
) -> None:
    with edit.before(node):
        flat = edit.call(aten.squeeze.dims, x, [2, 3], like=node)
        factor = edit.call(aten.squeeze.dims, weight, [2, 3], like=node)
        factor = edit.call(aten.t.default, factor, like=node)
    node.meta.pop("layout", None)
    _become_product(edit, node, flat, factor, bias)
