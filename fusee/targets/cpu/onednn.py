"""Linear layers and convolutions become the fastest call this processor has for them.

    linear(x, w, b)   =>  view(addmm(b, view(x), t(w)))                 float32, float64
                      =>  view(sum(w * view(x), 1) + b)                 of one row
                      =>  mkldnn._linear_pointwise(x, packed(w), b)     bfloat16, float16 if native
    convolution(...)  =>  mkldnn._convolution_pointwise(..., packed(w)) images
                      =>  view(addmm(b, view(x), t(squeeze(w))))        images of one pixel

addmm and mm write straight into the arena and cost 2 us a call; the packed operators allocate their
result and cost 25 us (linear) or 50 us (convolution). A packed float32 linear is up to twice as
fast for 2 to 64 rows, but two to four times as far from float64 as eager: not used. The rules
follow the measurements in docs/benchmarks.md, section Externs.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten import arguments, is_view, memory_root
from fusee.aten.rewriter import Editor, only_user, same_shape, val
from fusee.fake import on_metas
from fusee.fake.layouts import known
from fusee.source import HALVES, OpRules

# ---------------------------------------------------------------------------- onednn
# What oneDNN can do in this build of torch and on this processor. Adapter of torch.ops.mkldnn.
#
# Tested with torch 2.13. torch.ops.mkldnn exists in builds with oneDNN for x86 and ARM; the packed
# operators and their arguments are equal from 2.11 to 2.15.
#
# A packed weight is an opaque tensor: it has the size of the weight it was made from, and no
# strides.


class Packed:
    """The packed operators. Linear takes inputs of any rank, convolution images."""

    def __init__(self) -> None:
        ops = torch.ops.mkldnn
        self.linear: OpOverload = ops._linear_pointwise.default
        self.linear_binary: OpOverload = ops._linear_pointwise.binary
        self.conv: OpOverload = ops._convolution_pointwise.default
        self.conv_binary: OpOverload = ops._convolution_pointwise.binary
        self.conv_binary_inplace: OpOverload = ops._convolution_pointwise_.binary
        self.reorder_linear: OpOverload = ops._reorder_linear_weight.default
        self.reorder_conv: OpOverload = ops._reorder_convolution_weight.default


def packed() -> Packed | None:
    """The packed operators, or None where this build has no oneDNN or it is switched off."""
    return _built_in() if torch.backends.mkldnn.enabled else None


@functools.cache
def _built_in() -> Packed | None:
    if not _available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    return Packed()


def _available() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@functools.cache
def is_native(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies matrices of `dtype` at least as fast as float32.

    Where it does not, ATen multiplies bfloat16 and float16 with scalar code, 8 to 25 times slower
    than float32 (benchmarks.md, Externs).
    """
    if dtype not in HALVES:
        return True
    if not _available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


# ---------------------------------------------------------------------------- prepack


aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float64, *HALVES)


# By operator, what makes of a call one of these, and says which; or leaves it, and says nothing.
_LAYERS: OpRules[Callable[[Editor, Packed | None, fx.Node], str]] = OpRules()
_KINDS = "packed linear", "matrix product", "dot products", "packed convolution"


def prepack(edit: Editor) -> None:
    """Run the pass."""
    ops, done = packed(), Counter[str]()
    for node in edit.calls(*_LAYERS):
        done[_LAYERS[node.target](edit, ops, node)] += 1
    edit.notes += [f"{done[kind]} layers as {kind}" for kind in _KINDS if done[kind]]


# ------------------------------------------------------------------------------ linear


def packs_linear(dtype: torch.dtype) -> bool:
    """Whether linear layers of `dtype` take packed weights."""
    # with instructions for these types ATen calls oneDNN too, which then packs at each call
    return dtype in HALVES and is_native(dtype)


def _packed_linear(
    edit: Editor, ops: Packed, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None
) -> None:
    """Replace `node` by the packed operator; `weight` is (out, in)."""
    with edit.before(node):
        opaque = edit.call(ops.reorder_linear, weight, None, val=val(weight))
    opaque.meta["packed"] = True
    edit.become(node, ops.linear, x, opaque, bias, "none", [], "")


@_LAYERS.rule("linear")
def _linear(edit: Editor, ops: Packed | None, node: fx.Node) -> str:
    x, weight, bias = arguments(node).values()
    rank = val(x).dim()
    plain = val(weight).dim() == 2 and (bias is None or val(bias).dim() == 1)
    if not plain or rank < 2 or val(node).dtype not in _FLOATS:
        return ""
    is_static = edit.is_static(weight) and edit.is_static(bias)
    if ops is not None and is_static and packs_linear(val(node).dtype):
        _packed_linear(edit, ops, node, x, weight, bias)
        return "packed linear"
    # dot products along rows are faster than ATen, which has one call for each
    is_dense = val(weight).is_contiguous() and val(node).dtype in (torch.float32, torch.float64)
    if is_dense and all(n == 1 for n in val(x).shape[:-1]):
        out, (count, length) = val(node), val(weight).shape
        with edit.before(node):
            row = edit.call(aten.view.default, x, [1, length])
            terms = on_metas(Tensor.new_empty, out, (count, length))
            sums = on_metas(Tensor.new_empty, out, (count,))
            made = edit.call(aten.mul.Tensor, weight, row, val=terms)
            made = edit.call(aten.sum.dim_IntList, made, [1], val=sums)
            if bias is not None:
                made = edit.call(aten.add.Tensor, made, bias)
        edit.become(node, aten.view.default, made, list(out.shape))
        return "dot products"
    with edit.before(node):
        factor = edit.call(aten.permute.default, weight, [1, 0])
        if rank > 2:  # a matrix of its last axis
            if not val(x).is_contiguous():
                x = edit.contiguous(x)
            *lead, length = val(x).shape
            x = edit.call(aten.view.default, x, [math.prod(lead), length])
    _become_product(edit, node, x, factor, bias)
    return "matrix product"


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
        made = edit.call(op, *args, val=on_metas(Tensor.new_empty, out, size))
    edit.become(node, aten.view.default, made, list(out.shape))


@_LAYERS.rule("addmm mm")
def _product(edit: Editor, ops: Packed | None, node: fx.Node) -> str:
    """One with a static second factor, as a linear layer with the transposed weight."""
    if node.target is aten.mm.default:
        (x, factor), bias = node.args, None
    else:
        bias, x, factor = node.args
        if node.kwargs or not edit.is_static(bias) or val(bias).dim() != 1:  # type: ignore[arg-type]
            return ""
        if val(bias).shape[0] != val(node).shape[1]:  # type: ignore[arg-type]
            return ""
    assert isinstance(x, fx.Node) and isinstance(factor, fx.Node)
    is_packed = edit.is_static(factor) and packs_linear(val(node).dtype)
    if ops is None or edit.is_static(x) or not is_packed:
        return ""
    with edit.before(node):
        weight = edit.contiguous(edit.call(aten.permute.default, factor, [1, 0]))
    _packed_linear(edit, ops, node, x, weight, bias)  # type: ignore[arg-type]
    return "packed linear"


# ------------------------------------------------------------------------------ convolution


@_LAYERS.rule("convolution")
def _convolution(edit: Editor, ops: Packed | None, node: fx.Node) -> str:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    out = val(node)
    is_static = edit.is_static(weight) and edit.is_static(bias)
    is_known = known((*stride, *padding, *dilation, groups))  # type: ignore[misc]
    if out.dim() != 4 or transposed or not (is_static and is_known):
        return ""
    # a 1x1 kernel on 1x1 images, as squeeze-and-excitation has
    pixels = *val(x).shape[2:], *val(weight).shape[2:], groups, *padding  # type: ignore[misc]
    if known(pixels) and pixels == (1, 1, 1, 1, 1, 0, 0):
        with edit.before(node):
            flat = edit.call(aten.squeeze.dims, x, [2, 3])
            factor = edit.call(aten.squeeze.dims, weight, [2, 3])
            factor = edit.call(aten.permute.default, factor, [1, 0])
        node.meta.pop("layout", None)
        _become_product(edit, node, flat, factor, bias)  # type: ignore[arg-type]
        return "matrix product"
    supported = out.dtype is torch.float32 or (out.dtype in HALVES and is_native(out.dtype))
    if ops is None or not supported or 0 in edit.hints(x) or 0 in edit.hints(node):
        return ""
    with edit.before(node):
        # the weight in the order that oneDNN wants for this image size; see `for_any_size`
        given = weight, padding, stride, dilation, groups, edit.hints(x)
        opaque = edit.call(ops.reorder_conv, *given, val=val(weight))
    opaque.meta["packed"] = True
    edit.become(node, ops.conv, x, opaque, bias, padding, stride, dilation, groups, "none", [], "")
    return "packed convolution"


# Whether oneDNN adds to images of one pixel: torch 2.11's cannot.
_ADDS_TO_ONE = torch.__version__ >= "2.13"
# How many sets of sizes a weight remembers its order for.
_MOST_SIZES = 64

# Of dnnl_memory_desc: int ndims, int64 dims[12], the int data type; int64s follow at 112.
_GAP = slice(108, 112)


def for_any_size(op: OpOverload) -> Callable[..., Tensor]:
    """`op`, a packed convolution, for images of open sizes.

    An order for another image size makes oneDNN reorder the weight at each call, by its slowest
    code (25 to 130 ms were measured). So each size finds the order that it wants, on the weight,
    which has it made where it meets the size first. Batch sizes do not matter.
    """
    names = [argument.name for argument in op._schema.arguments]
    image, place, rest = names.index("X"), names.index("W"), names.index("padding")

    def call(*args: Any) -> Tensor:
        weight, shape = args[place], args[image].shape
        key = shape[2:], *args[rest : rest + 4]
        try:
            fitting = weight.by_size[key]
        except (AttributeError, KeyError):
            by_size = weight.__dict__.setdefault("by_size", {})
            plain = weight.to_dense().view(weight.shape)
            made = torch.ops.mkldnn._reorder_convolution_weight(plain, *key[1:], shape)
            wanted = order(made)
            alike = (old for old in (weight, *by_size.values()) if order(old) == wanted)
            fitting = next(alike, made)  # equal orders share memory
            if len(by_size) == _MOST_SIZES:
                by_size.clear()
            by_size[key] = fitting
        return op(*args[:place], fitting, *args[place + 1 :])  # type: ignore[no-any-return]

    return call


def order(weight: Tensor) -> list[int]:
    """oneDNN's description of a packed weight, without its one gap, whose bytes say nothing."""
    words: list[int] = torch.ops.mkldnn._get_mkldnn_serialized_md(weight).tolist()
    return words[: _GAP.start] + words[_GAP.stop :]


# ---------------------------------------------------------------------------- postops
# What follows a packed operator and costs nothing inside it.
#
#     relu(conv(x))              =>  conv(x, "relu")
#     add(conv(x), y)            =>  conv.binary(x, y, "add")
#     relu(add(conv(x), y))      =>  conv.binary(x, y, "add", "relu")
#
# Only what oneDNN does in a few instructions: for gelu, silu, tanh and sigmoid its code is two to
# four times slower than a separate pass over the result by our own (benchmarks.md, Externs), so
# those stay, and are fused with what follows them. bfloat16 and float16 keep their rounding between
# operators: their sums are not fused.

PostOp = tuple[str, list[float], str]


def postops(edit: Editor) -> None:
    """Run the pass."""
    ops = packed()
    if ops is None:
        return
    done: dict[str, int] = {}
    for node in edit.calls(ops.conv, ops.linear):
        while (step := _take_user(edit, ops, node)) is not None:
            node, name = step
            done[name] = done.get(name, 0) + 1
    edit.notes += [f"{count} {name} inside packed operators" for name, count in done.items()]


def _take_user(edit: Editor, ops: Packed, node: fx.Node) -> tuple[fx.Node, str] | None:
    """Take the only user of `node` into it: the new node, and the name of what it took in."""
    user = only_user(node)
    if user is None or user.op != "call_function" or not isinstance(user.meta["val"], Tensor):
        return None
    if val(user).dtype is not val(node).dtype or not same_shape(user, node):
        return None
    unary = _unary(user)
    if unary is not None:
        # after a sum only relu: the operator takes no other there
        is_sum, present = node.target is ops.conv_binary, node.args[-3]
        takes = is_sum and present is None and unary[0] == "relu"
        if not takes and not (node.target in (ops.conv, ops.linear) and present == "none"):
            return None
        return _replace(edit, node.target, [*node.args[:-3], *unary], node, user), unary[0]
    if user.target is not aten.add.Tensor:
        return None
    left, right = user.args[:2]
    other = right if left is node else left
    if user.kwargs or not isinstance(other, fx.Node) or other is node:
        return None
    are_wide = val(node).dtype is val(other).dtype is torch.float32
    if not (are_wide and same_shape(other, node) and node.args[-3] == "none"):
        return None
    pixels = val(node).shape[2:]
    if node.target is ops.conv and not (_ADDS_TO_ONE or (known(pixels) and math.prod(pixels) > 1)):
        return None
    # what only this sum uses would have to be stored for it: a pass more, not less
    if other.target not in (ops.conv, ops.conv_binary, ops.linear, ops.linear_binary):
        if other.op != "call_function" or len(other.users) < 2 or is_view(other.target):
            return None
    x, weight, bias = node.args[:3]
    if node.target is ops.linear:
        args = [x, other, weight, bias, "add"]
        return _replace(edit, ops.linear_binary, args, node, user), "add"
    if node.target is ops.conv and "layout" in node.meta:
        args = [x, other, weight, bias, *node.args[3:7], "add", None, None, [], None]
        return _replace(edit, ops.conv_binary, args, node, user), "add"
    return None


def _unary(user: fx.Node) -> PostOp | None:
    """The post-op that `user` is, in oneDNN's names."""
    target = user.target
    if target is aten.relu.default:
        return "relu", [], ""
    if target is aten.hardswish.default:
        return "hardswish", [], ""
    if target is aten.leaky_relu.default:
        return "leaky_relu", [arguments(user)["negative_slope"]], ""
    if target in (aten.hardtanh.default, aten.clamp.default):
        _, low, high = arguments(user).values()
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high:
            return "hardtanh", [low, high], ""
    return None


def _replace(edit: Editor, target: Any, args: list[Any], node: fx.Node, user: fx.Node) -> fx.Node:
    if "layout" in node.meta:
        user.meta["layout"] = node.meta["layout"]
    return edit.become(user, target, *args)


# ---------------------------------------------------------------------------- upcast
# Matrix products of bfloat16 and float16 in float32, on processors that have no better.
#
#     mm(x, w)   =>  to(mm(to(x, float32), to(w, float32)), x.dtype)
#
# Both accumulate in float32 and round once; only the speed differs. Casts of large weights run at
# each call, fused by the code generator, so that memory does not triple; those of convolutions are
# small beside their images, and are kept.

# From here on float32 wins although it casts the weight at each call: see docs/benchmarks.md.
LEAST_ROWS = 6

# operator -> which axes of its result are rows that share the second factor
_PRODUCTS: dict[Any, slice] = {
    aten.linear.default: slice(0, -1),
    aten.mm.default: slice(0, 1),
    aten.addmm.default: slice(0, 1),
    aten.bmm.default: slice(1, 2),
    aten.baddbmm.default: slice(1, 2),
}


def improves(node: fx.Node, static: Collection[fx.Node]) -> bool:
    """As fusee.targets.Target: by a packed weight, or by float32 where there is no better."""
    is_conv = node.target is aten.convolution.default
    if not is_conv and node.target not in _PRODUCTS:
        return False
    dtype = val(node).dtype
    if not is_native(dtype):
        return True
    packs = packed() is not None and (is_conv or packs_linear(dtype))
    return packs and any(memory_root(x) in static for x in node.all_input_nodes)


def upcast(edit: Editor) -> None:
    """Run the pass."""
    if is_native(torch.bfloat16) and is_native(torch.float16):
        return
    known: dict[fx.Node, fx.Node] = {}
    attention = aten.scaled_dot_product_attention.default
    targets = {*_PRODUCTS, aten.convolution.default, attention}
    for node in list(edit.graph.nodes):
        if node.target not in targets or is_native(dtype := val(node).dtype):
            continue
        # the bfloat16 kernel of attention in ATen is vectorised, that of float16 is not
        if node.target is attention and dtype is not torch.float16:
            continue
        rows = _PRODUCTS.get(node.target)
        if rows is None or math.prod(edit.hints(node)[rows]) >= LEAST_ROWS:
            _rewrite(edit, node, known)


def _rewrite(edit: Editor, node: fx.Node, known: dict[fx.Node, fx.Node]) -> None:
    dtype = val(node).dtype
    derive = node.target is aten.convolution.default

    def wide(arg: fx.Node) -> fx.Node:
        if val(arg).dtype is not dtype:
            return arg
        found = known.get(arg)
        if found is None and arg.target is aten._to_copy.default and edit.is_static(arg):
            # a folded weight in the precision that it was computed in
            (source,) = arg.all_input_nodes
            is_fold = source.op == "call_function" and val(source).dtype is torch.float32
            if is_fold and not isinstance(source.target, OpOverload):
                found = source
        if found is None:
            large = val(arg).dim() > 1 and not derive
            found = edit.cast(arg, torch.float32, derive=not large)
        known[arg] = found
        return found

    with edit.before(node):
        args, kwargs = fx.map_arg(node.args, wide), fx.map_arg(node.kwargs, wide)
        meta = val(node).to(torch.float32)
        product = edit.call(node.target, *args, val=meta, **kwargs)  # type: ignore[arg-type]
    edit.become(node, aten._to_copy.default, product, dtype=dtype)
    edit.notes.append(f"{node} multiplies in float32: {product}")


# ---------------------------------------------------------------------------- channels last
# Convolutional networks run in channels-last layout.
#
# Marks convolutions of images with meta["layout"] = "channels_last": lowering gives them their
# input in that layout and takes their result in it; `val` keeps eager's strides, which the outputs
# of the graph still have. Measured faster for every shape but a first convolution of three
# channels, and there by less than the change of layout after it would cost (docs/benchmarks.md,
# Externs).

_DTYPES = (torch.float32, *HALVES)  # oneDNN's; others keep ATen's layout


def channels_last(edit: Editor) -> None:
    """Run the pass."""
    marked = edit.images(_DTYPES) if packed() is not None else []
    if len(marked) == 1 and not edit.is_static(marked[0].args[1]):
        return  # nothing is packed, and an image would be converted there and back
    edit.mark_channels_last(marked)
