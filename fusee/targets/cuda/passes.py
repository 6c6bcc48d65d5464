"""Passes over a graph for a GPU: forms in which ATen's kernels are fastest, numbers of the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten import arguments, is_deterministic
from fusee.aten.attention import FLOATS
from fusee.aten.rewriter import Editor, val
from fusee.fake import on_metas
from fusee.fake.layouts import is_written, known, same_ints, view_strides
from fusee.loops.lower import is_home
from fusee.loops.lower.tensor import HANDLERS
from fusee.source import HALVES, overloads

aten = torch.ops.aten

# Of a matrix that is faster by ours for up to four rows.
_ROWS_BYTES = 13 << 20
# Elements of 16 bits in an access of 16 bytes. What products do in a second on an H200 if rows of
# an operand or of the result are no multiples of it, and if they are; bytes that are copied.
_EVEN, _SLOW, _FAST, _COPIED = 8, 150e12, 600e12, 3e12
# Seconds that a kernel more costs.
_LAUNCHED = 5e-6
# Time in channels-last over the time in rows, of convolutions in groups of several channels and of
# others.
_GROUPED, _PLAIN = 1.36, 0.82
# Elements of a column that a thread scans, and columns that are enough for a thread each.
_PIECE, _MANY_COLUMNS = 64, 1 << 16
_LONG_ROW = 1 << 16  # that one block scans
_SCANS = tuple(overloads("cumsum cumprod cummax cummin"))
# What adds by atomics, in whatever order threads come.
_ATOMIC = tuple(
    overloads(
        "index_put _unsafe_index_put index_add index_reduce scatter_add scatter_reduce.two"
        " scatter.src scatter.reduce embedding_dense_backward put"
    )
)
# What takes indices of the CPU.
_INDEXING = tuple(overloads("index.Tensor _unsafe_index.Tensor index_put _unsafe_index_put"))
# Of ATen's attention without a mask.
_MOST_HEAD = 256


def patches_as_products(edit: Editor) -> None:
    """A convolution of patches that do not overlap is one matrix product (0.3 to 0.03 ms for ViT).

    In 16 bits alone: of wider numbers torch allows TF32 in convolutions, not in products.
    """

    def view(of: fx.Node, shape: list[Any]) -> fx.Node:
        return edit.call(aten.view.default, of, shape, val=val(of).reshape(shape))

    for node in edit.calls(aten.convolution.default):
        named = arguments(node)
        x, weight = named["input"], named["weight"]
        kernel, sizes = list(val(weight).shape[2:]), list(val(x).shape)
        fits = (
            val(x).dtype in HALVES
            and len(sizes) == 2 + len(kernel)
            and known(sizes[1:])
            and kernel == list(named["stride"])
            and math.prod(kernel) > 1
            and not (any(named["padding"]) or named["transposed"])
            and all(n == 1 for n in (named["groups"], *named["dilation"]))
            and all(n % k == 0 for n, k in zip(sizes[2:], kernel, strict=True))
        )
        if not fits:
            continue
        n, channels, *pixels = sizes
        grid = [size // k for size, k in zip(pixels, kernel, strict=True)]
        dims = len(kernel)
        blocks = [size for pair in zip(grid, kernel, strict=True) for size in pair]
        patch = [1, *range(3, 3 + 2 * dims, 2)]
        if val(x).stride(1) == 1 and not val(x).is_contiguous():  # pieces in one are copied
            patch.append(patch.pop(0))
        order = [0, *range(2, 2 + 2 * dims, 2), *patch]
        count = channels * math.prod(kernel)
        with edit.before(node):
            if patch[0] != 1:
                last = edit.call(aten.permute.default, weight, [0, *range(2, 2 + dims), 1])
                weight = edit.contiguous(last)
            parts = edit.call(aten.permute.default, view(x, [n, channels, *blocks]), order)
            flat = view(weight, [val(weight).shape[0], count])
            rows = view(edit.contiguous(parts), [n * math.prod(grid), count])
            product = edit.call(aten.linear.default, rows, flat, named["bias"])
            found = view(product, [n, *grid, val(weight).shape[0]])
        edit.become(node, aten.permute.default, found, [0, 1 + dims, *range(1, 1 + dims)])
        edit.notes.append(f"{node} is a product of patches")


def biases_apart(edit: Editor) -> None:
    """A convolution's bias is added by the kernel that reads the result: ATen adds it to cuDNN's in
    a kernel of its own, but for one value a channel in float32, where it has a kernel for all.

    source: aten/src/ATen/native/Convolution.cpp, _convolution
    """
    for node in edit.calls(aten.convolution.default):
        named = arguments(node)
        weight, bias = named["weight"], named["bias"]
        is_single = named["groups"] != 1 and val(weight).shape[1] == 1
        if bias is None or (is_single and val(node).dtype not in HALVES):
            continue
        named["bias"] = None
        with edit.before(node):
            op, of = aten.convolution.default, val(node)
            plain = edit.call(op, *named.values(), val=of)
            shape = [-1, *[1] * (val(weight).dim() - 2)]
            added = edit.call(aten.reshape.default, bias, shape)
        if "layout" in node.meta:  # of a joint graph
            plain.meta["layout"] = node.meta.pop("layout")
        edit.become(node, aten.add.Tensor, plain, added)


def channels_last(edit: Editor) -> None:
    """Convolutions that cuDNN runs on tensor cores take and give their images in that layout.

    cuDNN converts them else, there and back, at each one (a fifth of densenet121's time). Those in
    groups of several channels are slower so: if all together gain, by torch's own measurements.

    source: torch/_inductor/graph.py, decide_layout_opt
    """
    marked = edit.images((*HALVES, *[torch.float32] * torch.backends.cudnn.allow_tf32))
    shapes = {node: val(x).shape for node in marked if isinstance(x := node.args[1], fx.Node)}
    work = {node: math.prod(edit.hints(node)) * math.prod(x[1:]) for node, x in shapes.items()}
    slower = sum(n for node, n in work.items() if _has_groups(node))
    if slower * (_GROUPED - _PLAIN) <= sum(work.values()) * (1 - _PLAIN):
        edit.mark_channels_last(marked)


def _has_groups(node: fx.Node) -> bool:
    """Of several channels each."""
    weight: Any = node.args[1]
    return 1 not in (node.args[8], val(weight).shape[1])


def joint_channels_last(edit: Editor) -> None:
    """The same in a joint graph: all that is computed of such images lies so, and what is saved.
    If none has groups: their gradients take up to 31 times as long in that layout.

    Results lie as in eager mode. So do gradients of weights. In 16 bits alone: densenet121's step
    in float32 took a tenth longer.
    """
    marked = edit.images(HALVES)
    if not marked or edit.aten.symbols or any(map(_has_groups, marked)):
        return
    weights = {node.args[1] for node in marked}
    gradients = edit.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    marked += [node for node in gradients if node.args[2] in weights]
    layouts = dict.fromkeys(marked, "channels_last")
    found: dict[fx.Node, Any] = {}

    def now(node: fx.Node) -> Any:
        return found.get(node, val(node))

    for node in edit.graph.nodes:
        if node in layouts:
            of = val(node)
            found[node] = _as_images(of) if isinstance(of, Tensor) else (_as_images(of[0]), *of[1:])
        elif node.op == "call_function" and any(x in found for x in node.all_input_nodes):
            args, kwargs = fx.map_arg(node.args, now), fx.map_arg(node.kwargs, now)
            if node.target is aten.view.default:  # a loop reads it, whatever its operand's strides
                found[node] = args[0].reshape(args[1])
            else:
                found[node] = on_metas(node.target, *args, **kwargs)
    moved = [x for x in edit.aten.results if val(x).stride() != now(x).stride()]
    if not all(val(x).is_contiguous() for x in moved):
        return
    as_eager: dict[fx.Node, fx.Node] = {}
    for node in moved:
        with edit.graph.inserting_after(node):
            given = {"val": val(node), "memory_format": torch.contiguous_format}
            as_eager[node] = edit.call(aten.clone.default, node, like=node, **given)
    (output,) = edit.graph.find_nodes(op="output")
    output.args = (tuple(as_eager.get(x, x) for x in edit.aten.results),)
    for node, of in found.items():
        node.meta["val"] = of
    edit.mark_channels_last(layouts, "convolutions and gradients")


def _as_images(x: Any) -> Any:
    if x is None or x.dim() != 4:
        return x
    return torch.empty_like(x, memory_format=torch.channels_last)


def heads_of_groups(edit: Editor) -> None:
    """Keys and values that are copied for each head of a group: attention reads them as they were.

    Where torch can take the kernels that know groups: flash attention and cuDNN's.
    """
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return
    for node in edit.calls(aten.scaled_dot_product_attention.default):
        named = arguments(node)
        q, k, v = (named[name] for name in ("query", "key", "value"))
        head = val(q).shape[-1]
        if named["attn_mask"] is not None or named["dropout_p"] or val(q).dtype not in HALVES:
            continue
        if type(head) is not int or head > _MOST_HEAD or head % 8:
            continue
        sources: Any = [_repeated(edit, x) for x in (k, v)]
        if None in sources or len({val(x).shape[1] for x in sources}) > 1:
            continue
        edit.change(node, key=sources[0], value=sources[1], enable_gqa=True)
        edit.notes.append(f"{node} reads keys and values of groups of heads")


def _repeated(edit: Editor, node: fx.Node) -> fx.Node | None:
    """What each head of a group is a copy of: x[:, :, None].expand(..).reshape(..), or one head
    that was expanded."""
    shape = edit.sizes(node)
    if len(shape) != 4 or type(shape[1]) is not int:
        return None
    source: Any = node
    if node.target is aten.view.default:
        source = node.args[0]
        while source.target is aten.clone.default:
            source = source.args[0]
    if source.target is not aten.expand.default:
        return None
    found: Any = source.args[0]
    if source is not node:
        if found.target is not aten.unsqueeze.default or found.args[1] != 2:
            return None
        found = found.args[0]
    own = edit.sizes(found)
    if len(own) != 4 or type(own[1]) is not int or (source is node and own[1] != 1):
        return None
    as_found = [*own[:2], shape[1] // own[1]] if source is not node else [own[0], shape[1]]
    fits = edit.sizes(source)[: len(as_found)] == as_found
    return found if fits and own[2:] == shape[2:] else None


# Elements that ATen's fused attention wants rows of a mask to be multiples of. One that is not, or
# whose rows are scattered, it copies at each call, or multiplies, masks and normalises whole
# matrices of scores. Keys up to which the kernel that suits short rows is the faster one: 49 keys
# take 37 us there, 69 in cuDNN's, and 97 by products; 128 keys 15 and 12.
ROW, _FEW_KEYS = 16, 64


EFFICIENT: Any = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD: Any = aten._scaled_dot_product_efficient_attention_backward.default


def aligned(x: Any) -> Any:
    """As ATen's memory-efficient kernels read heads and masks: rows of multiples of 16 bytes.
    There may be no mask.

    source: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h,
    check_supported
    """
    if x is None:
        return None
    step, count = 16 // x.itemsize, x.shape[-1]
    if x.stride(-1) == 1 and not any(n % step for n in x.stride()[:-1]):
        return x
    rows = x.new_empty((*x.shape[:-1], -(-count // step) * step))
    return rows[..., :count].copy_(x)


def few_keys(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *rest: Any, **named: Any
) -> Tensor:
    """scaled_dot_product_attention, by the kernel for few keys where they have a mask."""
    dropout, is_causal = (*rest, 0.0, False)[:2]
    three = [query, key, value]
    is_whole = not any(x.shape[-1] * x.itemsize % 16 for x in three)  # else no kernel takes them
    three = [*map(aligned, three)] if is_whole else three
    is_short = (
        mask is not None
        and query.dim() == 4
        and query.dtype == mask.dtype
        and query.dtype in HALVES
        and not (dropout or named.get("enable_gqa"))
        and 1 < key.shape[-2] <= _FEW_KEYS
        and key.shape[:2] == value.shape[:2] == query.shape[:2]
        and key.shape[-2] == mask.shape[-1]
        and all(n % ROW == 0 for n in mask.stride()[:-1])
        and mask.stride(-1) == 1
        and is_whole
        and torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
    )
    if mask is None or not is_short:
        op: Any = aten.scaled_dot_product_attention.default
        return op(*three, mask, *rest, **named)  # type: ignore[no-any-return]
    mask = mask.expand(*query.shape[:-1], key.shape[-2])
    found: Tensor = EFFICIENT(*three, mask, False, 0.0, is_causal, scale=named.get("scale"))[0]
    return found


def efficient_attention(*operands: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Its seed and offset are on the GPU always: a kernel leaves them there if it is recorded,
    and else on the CPU. source: aten/src/ATen/native/transformers/cuda/attention.cu"""
    result, logsumexp, *drawn = EFFICIENT(*map(aligned, operands[:4]), *operands[4:], **kwargs)
    seed, offset = (x.to(result.device) for x in drawn)
    return result, logsumexp, seed, offset


def efficient_attention_backward(*operands: Any, **kwargs: Any) -> Any:
    """Reads the seed and the offset where a kernel does: on the CPU, unless it is recorded."""
    logsumexp, seed, offset, dropout = operands[6:10]
    if dropout and not torch.cuda.is_current_stream_capturing():
        seed, offset = seed.cpu(), offset.cpu()
    drawn = logsumexp, seed, offset, dropout
    return EFFICIENT_BACKWARD(*map(aligned, operands[:6]), *drawn, *operands[10:], **kwargs)


def masks_as_read(edit: Editor) -> None:
    """Masks as ATen's fused kernels read them: numbers that are added, in rows of 16, once for all
    layers that have the same.

    source: aten/src/ATen/native/transformers/attention.cpp, convert_boolean_attn_mask and pad_bias;
    cuda/sdp_utils.cpp
    """
    found: dict[fx.Node, fx.Node] = {}
    for node in sorted(edit.calls(aten.scaled_dot_product_attention.default)):
        named = arguments(node)
        mask, q = named["attn_mask"], named["query"]
        if not isinstance(mask, fx.Node) or val(q).dtype not in FLOATS or val(q).dim() != 4:
            continue
        dtype, is_bool = val(q).dtype, val(mask).dtype is torch.bool
        *_, keys = val(mask).shape or (None,)
        if type(keys) is not int or keys == 0 or not (is_bool or val(mask).dtype is dtype):
            continue
        *steps, step = val(mask).stride()
        if not is_bool and all(n % ROW == 0 for n in steps) and step == 1:
            continue
        if mask not in found:
            with edit.before(node):
                x = mask
                if is_bool:
                    shown, hidden = (edit.number(n, x, dtype) for n in (0.0, -math.inf))
                    x = edit.call(aten.where.self, x, shown, hidden)
                x = edit.contiguous(x)
                if keys > 1 and keys % ROW:
                    longer = edit.call(aten.constant_pad_nd.default, x, [0, -keys % ROW])
                    longer.meta["stored"] = True
                    x = edit.call(aten.slice.Tensor, longer, val(x).dim() - 1, 0, keys)
                found[mask] = x
        if found[mask] is not mask:
            node.replace_input_with(mask, found[mask])
            edit.erase(mask)


def one_key(edit: Editor) -> None:
    """Attention to one key alone is its value, in the kernels around it (6.7 to 2.2 us)."""
    for node in edit.calls(aten.scaled_dot_product_attention.default):
        named = arguments(node)
        q, k, v = (named[name] for name in ("query", "key", "value"))
        if named["attn_mask"] is not None or named["dropout_p"] or val(q).dtype not in FLOATS:
            continue
        sizes = [*val(q).shape, *val(k).shape]
        if len(sizes) != 8 or not all(type(n) is int and n > 0 for n in sizes):
            continue
        batch, heads, _, _, same, groups, keys, _ = sizes
        if keys != 1 or same != batch or heads % groups:
            continue
        with edit.before(node):
            q, k, v = (edit.cast(x, torch.float32) for x in (q, k, v))
            lead = [batch, groups, heads // groups, -1]
            q = edit.call(aten.reshape.default, q, [*lead, val(q).shape[-1]])
            k, v = (edit.call(aten.unsqueeze.default, x, 2) for x in (k, v))
            score = edit.call(aten.sum.dim_IntList, edit.call(aten.mul.Tensor, q, k), [-1], True)
            zero = edit.call(aten.sub.Tensor, score, score)
            share = edit.call(aten.exp.default, zero)  # its softmax: 1, or not a number
            found = edit.call(aten.mul.Tensor, share, v)
            found = edit.call(aten.reshape.default, found, list(val(node).shape))
        edit.become(node, aten._to_copy.default, found, dtype=val(node).dtype)
        edit.notes.append(f"{node} is its only value")


def in_one_order(edit: Editor) -> None:
    """Where only deterministic algorithms may run, ATen adds what ours would by atomics: it sorts,
    or refuses."""
    if torch.are_deterministic_algorithms_enabled():
        for node in edit.calls(*_ATOMIC):
            node.meta["called"] = "deterministic algorithms are asked for"


def long_scans(edit: Editor) -> None:
    """Products along long rows are ATen's, since ours take a thread for each row, and so are scans
    of one row that a block would be long at. Sums and products along long columns, of which there
    are few, begin at each piece of them."""
    for node in list(edit.calls(*_SCANS)):
        named = arguments(node)
        shape, dtype = list(val(named["self"]).shape), val(named["self"]).dtype
        known = shape and all(type(n) is int and n > 0 for n in shape)
        if not known or dtype.is_complex:
            continue
        dim = named["dim"] % len(shape)
        if shape[dim] < 4 * _PIECE:
            continue
        adds = node.target in (aten.cumsum.default, aten.cumprod.default)
        if math.prod(shape[dim + 1 :]) == 1:
            is_alone = math.prod(shape) == shape[dim] > _LONG_ROW
            if node.target is aten.cumprod.default or is_alone:
                node.meta["called"] = "a scan along long rows"
        elif adds and math.prod(shape) // shape[dim] < _MANY_COLUMNS:
            with edit.before(node):
                x = edit.cast(named["self"], val(node).dtype)
                found = _in_pieces(edit, node, x, dim)
                found = edit.call(aten.slice.Tensor, found, dim, 0, shape[dim])
            edit.become(node, aten.clone.default, found, memory_format=torch.contiguous_format)
            edit.notes.append(f"{node} goes along pieces of its columns at once")


def _in_pieces(edit: Editor, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    """A scan of each piece, joined with what came before it; a row ends with its last piece."""
    call = edit.call

    def padded(x: fx.Node, front: int, back: int) -> fx.Node:
        pads = [0, 0] * (val(x).dim() - 1 - dim) + [front, back]
        return call(aten.constant_pad_nd.default, x, pads, start) if front or back else x

    adds = node.target is aten.cumsum.default
    start, scan = (0, aten.cumsum.default) if adds else (1, aten.cumprod.default)
    x = padded(x, 0, -val(x).shape[dim] % _PIECE)
    size = list(val(x).shape)
    count = size[dim] // _PIECE
    parts = call(aten.view.default, x, [*size[:dim], count, _PIECE, *size[dim + 1 :]])
    if adds:
        totals = call(aten.sum.dim_IntList, parts, [dim + 1])
    else:
        totals = call(aten.prod.dim_int, parts, dim + 1)
    before = padded(call(scan, call(aten.slice.Tensor, totals, dim, 0, count - 1), dim), 1, 0)
    join = aten.add.Tensor if adds else aten.mul.Tensor
    found = call(join, call(scan, parts, dim + 1), call(aten.unsqueeze.default, before, dim + 1))
    return call(aten.view.default, found, size)


def rows_as_sums(edit: Editor) -> None:
    """A matrix times few rows is a sum of products of ours for each: they read the matrix once, in
    one kernel, and what comes before and after one row joins it (docs/benchmarks.md, GPUs).

    cuBLAS takes such rows for a tile.
    """
    for node in edit.calls(aten.linear.default):
        named = arguments(node)
        x, weight, bias = named["input"], named["weight"], named["bias"]
        *rows, count = val(x).shape
        dtype, matrix = val(x).dtype, val(weight)
        if not known((*rows, *matrix.shape)) or matrix.dim() != 2 or count == 0:
            continue
        # so many rows are faster than cuBLAS's: on an H200 four up to 13 MB
        bytes_read = math.prod(matrix.shape) * matrix.itemsize
        most = 4 if bytes_read <= _ROWS_BYTES else 2
        if dtype not in FLOATS or not 0 < math.prod(rows) <= most:
            continue
        with edit.before(node):
            number = math.prod(rows)
            if not val(x).is_contiguous():  # a view may not have all rows one after another
                x = edit.call(aten.clone.default, x, memory_format=torch.contiguous_format)
            given = edit.call(aten.view.default, x, [number, count])
            given.meta["stored"] = True  # each element of the result reads all of it
            wide, products = edit.cast(weight, torch.float32), []
            for k in range(number):
                row = given if number == 1 else edit.call(aten.slice.Tensor, given, 0, k, k + 1)
                row = edit.cast(row, torch.float32)
                product = edit.call(aten.mul.Tensor, row, wide)
                found = edit.call(aten.sum.dim_IntList, product, [1])
                if bias is not None:
                    found = edit.call(aten.add.Tensor, found, edit.cast(bias, torch.float32))
                products.append(edit.cast(found, dtype))
            found = products[0] if number == 1 else edit.call(aten.cat.default, products)
        edit.become(node, aten.view.default, found, list(val(node).shape))
        edit.notes.append(f"{node} is a sum of products")


def even_rows(edit: Editor) -> None:
    """Large products in 16 bits whose rows are no multiples of 16 bytes get longer ones, of zeros.

    cuBLAS has slow kernels alone for them: a layer of 50,257 words takes 3.3 ms there, and with
    50,264 0.45 beside the copies (docs/benchmarks.md, GPUs).
    """
    padded: _Longer = {}
    for node in list(edit.graph.nodes):
        if node.target in _PRODUCTS and val(node).dtype in HALVES and val(node).dim():
            product = _Padded(edit, node, padded)
            if product.pays():
                product.run()


def layers_of_rows(edit: Editor) -> None:
    """What a linear layer takes lies row by row, one copy for all that take it: else ATen copies it
    for each, and adds the bias in a kernel of its own (13 to 4 us for 16,384 rows of 64).

    Attention over pixels takes them so. A matrix may lie by columns: cuBLAS reads it.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in edit.calls(aten.linear.default):
        x: Any = node.args[0]
        *lead, length = val(x).shape
        # whether all axes but the last may be one, and rows are in one piece
        found = view_strides(val(x).shape, val(x).stride(), [math.prod(lead), length])
        in_rows = found is not None and (is_written(length, 1) or same_ints(found[-1:], (1,)))
        if val(x).dim() < 3 or in_rows:
            continue
        if x not in copies:
            with edit.before(node):
                copies[x] = edit.contiguous(x)
        node.args = (copies[x], *node.args[1:])
    if copies:
        edit.notes.append(f"{len(copies)} operands of layers lie row by row")


# Names of a bias and of the two operands among the arguments.
_PRODUCTS: dict[Any, tuple[str, str, str]] = {
    aten.mm.default: ("", "self", "mat2"),
    aten.addmm.default: ("self", "mat1", "mat2"),
    aten.linear.default: ("bias", "input", "weight"),
}


# By what they are made of, and the zeros at the ends of its axes.
_Longer = dict[tuple[fx.Node, tuple[int, ...]], fx.Node]


class _Padded:
    """A product of (m, k) with (k, n), or (n, k) of a layer, and longer axes for it."""

    def __init__(self, edit: Editor, node: fx.Node, padded: _Longer) -> None:
        self.edit, self.node, self.padded = edit, node, padded
        named = arguments(node)
        given: list[Any] = [named.get(name) for name in _PRODUCTS[node.target]]
        self.bias, self.a, self.b = given
        self.names = ("n", "k") if node.target is aten.linear.default else ("k", "n")
        *rows, k = val(self.a).shape
        self.sizes = {"m": math.prod(rows), "k": k, "n": val(node).shape[-1]}
        self.more: dict[str, int] = {}  # by axis
        self.is_plain = named.get("alpha", 1) == named.get("beta", 1) == 1

    def pays(self) -> bool:
        """Whether rows are odd, and the product is large beside what is copied to mend that."""
        sizes = self.sizes
        if not self.is_plain or not all(type(n) is int and n > 0 for n in sizes.values()):
            return False
        if min(val(self.a).dim(), val(self.b).dim()) < 2:
            return False
        if self.bias is not None and val(self.bias).dim() != 1:
            return False
        rows = "n", _along(self.a, ("m", "k")), _along(self.b, self.names)
        self.more = {x: -sizes[x] % _EVEN for x in rows if x and sizes[x] % _EVEN}
        matrices = (("mk", "mk"), ("kn", "kn"), ("mn", "n"))
        copied = [
            math.prod(sizes[x] for x in of) for of, axes in matrices if {*axes} & {*self.more}
        ]
        gained = 2 * math.prod(sizes.values()) * (1 / _SLOW - 1 / _FAST)
        return bool(self.more) and gained > 4 * sum(copied) / _COPIED + _LAUNCHED * len(copied)

    def run(self) -> None:
        edit, node, sizes = self.edit, self.node, self.sizes
        with edit.before(node):
            a, b, bias = self.a, self.longer(self.b, self.names), self.bias
            if val(a).dim() > 2:
                a = edit.call(aten.reshape.default, a, [sizes["m"], sizes["k"]])
            a = self.longer(a, ("m", "k"))
            if self.names == ("n", "k"):
                b = edit.call(aten.permute.default, b, [1, 0])
            if bias is None:
                found = edit.call(aten.mm.default, a, b)
            else:
                found = edit.call(aten.addmm.default, self.longer(bias, "n"), a, b)
            for dim, name in enumerate("mn"):
                if name in self.more:
                    found = edit.call(aten.slice.Tensor, found, dim, 0, sizes[name])
            if "n" in self.more:
                found = edit.contiguous(found)
        edit.become(node, aten.view.default, found, list(val(node).shape))
        edit.notes.append(f"{node} has rows of a multiple of 16 bytes")

    def longer(self, x: fx.Node, names: Sequence[str]) -> fx.Node:
        """An operand with zeros at the end of its axes; what it is a transpose of is what grows."""
        order: Any = x.args[1] if x.target is aten.permute.default else ()
        if list(order) == [1, 0]:
            source = self.longer(x.all_input_nodes[0], names[::-1])
            return self.edit.call(aten.permute.default, source, [1, 0])
        pads = [n for name in reversed(names) for n in (0, self.more.get(name, 0))]
        if not any(pads):
            return x
        key, call = (x, tuple(pads)), self.edit.call
        if key not in self.padded and any(pads[2:]):
            self.padded[key] = call(aten.constant_pad_nd.default, x, pads)
        elif key not in self.padded:
            # rows alone: a copy that asks of no element whether it is there takes half of the time
            tail = (*val(x).shape[:-1], pads[1])
            zeros = call(aten.full.default, tail, 0, val=val(x).new_zeros(tail))
            self.padded[key] = call(aten.cat.default, [x, zeros], -1)
            self.padded[key].meta["stored"] = True  # else it would be, as it is and turned
        return self.padded[key]


def _along(x: fx.Node, names: tuple[str, str]) -> str | None:
    """The axis along which a matrix lies row by row."""
    (*_, outer, inner) = val(x).stride()
    return names[1] if inner == 1 else names[0] if outer == 1 else None


# ---------------------------------------------------------------------------- numbers of the CPU
# A graph whose tensors are on a GPU and on the CPU: what of the CPU's becomes the GPU's.
#
# ATen takes a number of the CPU beside tensors of a GPU: `x * torch.tensor(2.0)`, a float that
# varies, a learning rate. Numbers that only the GPU uses are computed there, and come there if they
# are inputs (`brought` in their node's meta). What is left on the CPU stays ATen's.


def numbers_home(edit: Editor, home: torch.device) -> None:
    """Pass over a graph for the GPU `home`."""
    moved, inputs = 0, edit.aten.placeholders
    written = {inputs[mutation.index] for mutation in edit.aten.mutations}
    first = next(node for node in edit.graph.nodes if node.op not in ("placeholder", "get_attr"))

    def bring(node: fx.Node, users: Sequence[fx.Node]) -> None:
        """Have these read a copy on the GPU."""
        if users:
            with edit.before(node.next if node.op == "call_function" else first):
                twin = edit.call(aten._to_copy.default, node, like=users[0], device=home)
            for user in users:
                user.replace_input_with(node, twin)

    for node in reversed(list(edit.graph.nodes)):
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or _is_at(node, home):
            continue
        there = [user for user in node.users if "device" in user.meta and _is_at(user, home)]
        if val.dim():
            # places that a program writes down, `x[:, [2, 0]]`, or makes of nothing else,
            # `x[torch.arange(3)]`, come when the graph is compiled; ATen would wait at each call
            if node.op != "placeholder" and edit.is_static(node):
                bring(node, [user for user in there if user.target in _INDEXING])
            continue
        # what reads more than numbers there stays with them: an element, a sum
        elsewhere = (x.meta.get("val") for x in node.all_input_nodes if not _is_at(x, home))
        may_move = node.op in ("placeholder", "get_attr") or (
            node.target in HANDLERS
            and is_deterministic(node.target)
            and not any(isinstance(x, Tensor) and x.dim() for x in elsewhere)
        )
        if len(there) == len(node.users) and node not in written and may_move:
            moved += bool(there)
            node.meta["device"] = home
            if node.op == "placeholder":
                node.meta["brought"] = True
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": home}
            continue
        kept = [u for u in there if u.target is aten._to_copy.default and "device" in u.kwargs]
        bring(node, [user for user in there if user not in kept])
    if moved:
        edit.notes.append(f"{moved} numbers of the CPU are computed on {home}")


def _is_at(node: fx.Node, home: torch.device) -> bool:
    device = node.meta.get("device")
    return device is None or is_home(torch.device(device), home)
