"""Passes over a graph for a GPU: the forms in which ATen's kernels are fastest there."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.graph import arguments
from fusee.aten.rewriter import Editor, val

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
# Of a matrix that is faster by ours for up to four rows.
_ROWS_BYTES = 13 << 20
# Of ATen's attention without a mask.
_MOST_HEAD = 256


def patches_as_products(edit: Editor) -> None:
    """A convolution of patches that do not overlap is one matrix product (0.3 to 0.03 ms for ViT).

    In 16 bits alone: of wider numbers torch allows TF32 in convolutions, not in products.
    """
    for node in list(edit.calls(aten.convolution.default)):
        named = arguments(node)
        x, weight = named["input"], named["weight"]
        kernel, sizes = list(val(weight).shape[2:]), list(val(x).shape)
        fits = (
            val(x).dtype in _HALVES
            and len(sizes) == 2 + len(kernel)
            and all(type(n) is int for n in sizes[1:])
            and kernel == list(named["stride"])
            and math.prod(kernel) > 1
            and not (any(named["padding"]) or named["transposed"])
            and all(n == 1 for n in (named["groups"], *named["dilation"]))
            and all(n % k == 0 for n, k in zip(sizes[2:], kernel, strict=True))
        )
        if fits:
            _as_product(edit, node, x, weight, named["bias"], sizes, kernel)


def _as_product(
    edit: Editor,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: Any,
    sizes: list[Any],
    kernel: list[int],
) -> None:
    n, channels, *pixels = sizes
    grid = [size // k for size, k in zip(pixels, kernel, strict=True)]
    dims = len(kernel)
    blocks = [size for pair in zip(grid, kernel, strict=True) for size in pair]
    order = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    count = channels * math.prod(kernel)
    with edit.before(node):

        def view(of: fx.Node, shape: list[Any]) -> fx.Node:
            return edit.call(aten.view.default, of, shape, like=node, val=val(of).reshape(shape))

        parts = edit.call(aten.permute.default, view(x, [n, channels, *blocks]), order, like=node)
        flat = view(weight, [val(weight).shape[0], count])
        memory_format = torch.contiguous_format
        parts = edit.call(aten.clone.default, parts, like=node, memory_format=memory_format)
        rows = view(parts, [n * math.prod(grid), count])
        product = edit.call(aten.linear.default, rows, flat, bias, like=node)
        found = view(product, [n, *grid, val(weight).shape[0]])
    edit.become(node, aten.permute.default, found, [0, 1 + dims, *range(1, 1 + dims)])
    edit.notes.append(f"{node} is a product of patches")


def channels_last(edit: Editor) -> None:
    """Convolutions that cuDNN runs on tensor cores take and give their images in that layout.

    cuDNN converts them else, there and back, at each one (a fifth of densenet121's time).
    """
    if not edit.options.channels_last:
        return
    dtypes = (*_HALVES, *([torch.float32] if torch.backends.cudnn.allow_tf32 else []))
    images = [node for node in edit.calls(aten.convolution.default) if val(node).dim() == 4]
    if any(_is_grouped(node) for node in images):
        return  # of which cuDNN has slow ones in that layout
    marked = [node for node in images if not node.args[6] and val(node).dtype in dtypes]
    for node in marked:
        node.meta["layout"] = "channels_last"
    if marked:
        edit.notes.append(f"{len(marked)} convolutions in channels-last layout")


def _is_grouped(node: fx.Node) -> bool:
    """Whether it has groups of several channels."""
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    return bool(node.args[8] != 1 and val(weight).shape[1] != 1)


def heads_of_groups(edit: Editor) -> None:
    """Keys and values that are copied for each head of a group: attention reads them as they were.

    Where torch can take the kernels that know groups: flash attention and cuDNN's.
    """
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return
    for node in list(edit.calls(aten.scaled_dot_product_attention.default)):
        named = arguments(node)
        q, k, v = (named[name] for name in ("query", "key", "value"))
        head = val(q).shape[-1]
        if named["attn_mask"] is not None or named["dropout_p"] or val(q).dtype not in _HALVES:
            continue
        if type(head) is not int or head > _MOST_HEAD or head % 8:
            continue
        sources = [_repeated(edit, x) for x in (k, v)]
        if None in sources or _heads(sources[0]) != _heads(sources[1]):
            continue
        named.update(key=sources[0], value=sources[1], enable_gqa=True)
        kwargs = {name: named.pop(name) for name in ("scale", "enable_gqa")}
        edit.become(node, aten.scaled_dot_product_attention.default, *named.values(), **kwargs)
        edit.notes.append(f"{node} reads keys and values of groups of heads")


def _heads(node: fx.Node | None) -> Any:
    return None if node is None else val(node).shape[1]


def _repeated(edit: Editor, node: fx.Node) -> fx.Node | None:
    """What each head of a group is a copy of: x[:, :, None].expand(..).reshape(..)."""
    shape = edit.sizes(node)
    if node.target not in (aten.view.default, aten._unsafe_view.default) or len(shape) != 4:
        return None
    source: Any = node.args[0]
    while source.target is aten.clone.default:
        source = source.args[0]
    if source.target is not aten.expand.default:
        return None
    inner = source.args[0]
    if inner.target is not aten.unsqueeze.default or inner.args[1] not in (2, -3):
        return None
    found: fx.Node = inner.args[0]
    own = edit.sizes(found)
    if len(own) != 4 or type(own[1]) is not int or type(shape[1]) is not int:
        return None
    fits = edit.sizes(source)[:3] == [*own[:2], shape[1] // own[1]]
    return found if fits and own[2:] == shape[2:] else None


def rows_as_sums(edit: Editor) -> None:
    """A matrix times few rows is a sum of products of ours for each: they read the matrix once, in
    one kernel, and what comes before and after one row joins it (docs/benchmarks.md, GPUs).

    cuBLAS takes such rows for a tile.
    """
    for node in list(edit.calls(aten.linear.default)):
        named = arguments(node)
        x, weight, bias = named["input"], named["weight"], named["bias"]
        *rows, count = val(x).shape
        dtype, matrix = val(x).dtype, val(weight)
        known = all(type(n) is int for n in (*rows, *matrix.shape))
        if not known or matrix.dim() != 2 or count == 0:
            continue
        if dtype not in (*_HALVES, torch.float32) or not 0 < math.prod(rows) <= _most_rows(matrix):
            continue
        with edit.before(node):
            found = _rows_times(edit, node, x, weight, bias)
        edit.become(node, aten.view.default, found, list(val(node).shape))
        edit.notes.append(f"{node} is a sum of products")


def _most_rows(matrix: Tensor) -> int:
    """How many rows are faster than cuBLAS's: on an H200 four up to 13 MB."""
    return 4 if matrix.nbytes <= _ROWS_BYTES else 2


def _rows_times(edit: Editor, node: fx.Node, x: fx.Node, weight: fx.Node, bias: Any) -> fx.Node:
    dtype, *_, count = val(x).dtype, *val(x).shape
    number = val(x).numel() // count
    given = edit.call(aten.view.default, x, [number, count], like=node)
    given.meta["stored"] = True  # each element of the result reads all of it
    matrix, products = edit.cast(weight, torch.float32, node), []
    for k in range(number):
        row = given
        if number > 1:
            row = edit.call(aten.slice.Tensor, given, 0, k, k + 1, like=node)
        row = edit.cast(row, torch.float32, node)
        product = edit.call(aten.mul.Tensor, row, matrix, like=node)
        found = edit.call(aten.sum.dim_IntList, product, [1], like=node)
        if bias is not None:
            wide = edit.cast(bias, torch.float32, node)
            found = edit.call(aten.add.Tensor, found, wide, like=node)
        products.append(edit.cast(found, dtype, node))
    return products[0] if number == 1 else edit.call(aten.cat.default, products, like=node)
