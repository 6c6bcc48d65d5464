"""Operators that are another spelling of one that we want to see whole.

    layer_norm -> native_layer_norm        conv2d -> convolution        softmax.int -> _softmax
Each rule does what torch's composite kernel does on the CPU, in fewer steps.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusee.aten import bound, draws
from fusee.aten.torch_api import (
    OpOverload,
    active,
    bits_of,
    decomposition_tables,
    further_decompositions,
    is_composite,
    storage_id,
)
from fusee.aten.tracer import Rule, Tracer
from fusee.fake import on_metas
from fusee.fake.layouts import (
    extent,
    has_zero,
    is_dense,
    is_row_major,
    is_written,
    let_be_filled,
    may_repeat,
    same_ints,
    suggested_layout,
)
from fusee.fake.open_composites import IN_OTHERS
from fusee.fake.open_sizes import narrowed, selected
from fusee.fake.rules import LAYERS
from fusee.fake.torch_python import moved
from fusee.source import Args, Kwargs, OpRules, overloads
from fusee.sym.shape_env import is_unbacked

# ---------------------------------------------------------------------------- always
# Operators that give a view or not, depending on what they get: decided while tracing.
#
# Views are recorded in few forms, with arguments made absolute: view and expand with their whole
# shape, slice with bounds inside the axis, permute for every transpose. Operators that split a
# tensor become slices. What gives all of its operand back leaves no node.

aten = torch.ops.aten

# Also of operators on lists, below, and of those that write (mutation.py).
ALWAYS: OpRules[Rule] = OpRules()


def in_torchs_words(function: Callable[..., Any]) -> Rule:
    """A rule from a function of a tracer and the arguments, whose calls of torch are traced."""

    def rule(t: Tracer, op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        with active(t):
            return function(t, *args, **kwargs)

    return rule


# ------------------------------------------------------------------------------ aliases


@ALWAYS.rule("detach alias lift _lazy_clone")
def _same(t: Tracer, op: OpOverload, x: Tensor) -> Any:
    made = t.same(x)
    t.value(made).apart = "detach" if op is aten.detach.default else ""
    return made


ALWAYS.rule("lift_fresh")(lambda t, op, x: t.literal(x))
ALWAYS.rule("detach_ requires_grad_")(lambda t, op, x, *_: x)
ALWAYS.rule("_efficientzerotensor")(  # it has no memory that a kernel could read
    lambda t, op, size, **kwargs: t.call(aten.zeros.default, size, **kwargs)
)


@ALWAYS.rule("scalar_tensor")
def _scalar_tensor(t: Tracer, op: OpOverload, number: Any, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()  # whatever the number is
    return t.call(aten.full.default, [], number, **{**kwargs, "dtype": dtype})


@ALWAYS.rule("zeros ones zeros_like ones_like full_like new_zeros new_ones new_full")
def _filled(t: Tracer, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """`full`, which reads no tensor: what is made of it alone is computed once; or `full_like`, of
    another order of axes."""
    given = bound(op, args, kwargs)
    if given["pin_memory"] or given["layout"] not in (None, torch.strided):
        return t.record(op, *args, **kwargs)
    value = given.get("fill_value", int("ones" in op.__name__))
    dtype, device = given["dtype"] or torch.get_default_dtype(), given["device"]
    if "self" in given:
        source = t.value(given["self"])
        dtype, device = given["dtype"] or source.tensor.dtype, device or source.store.device
        if "size" not in given:
            given["size"] = source.tensor.shape
            if not (given["memory_format"] is None and is_row_major(source.tensor)):
                return t.record(aten.full_like.default, args[0], value, **kwargs)
    return t.call(aten.full.default, list(given["size"]), value, dtype=dtype, device=device)


# What asks a tensor with symbolic sizes for its geometry.
_QUERIES = (
    "size.default sym_size.default sym_size.int stride.default sym_stride.default sym_stride.int"
    " storage_offset.default sym_storage_offset.default numel.default sym_numel.default"
    " dim.default is_contiguous.default is_contiguous.memory_format is_strides_like_format.default"
    " sym_is_contiguous.default is_non_overlapping_and_dense.default"
)


@ALWAYS.rule("prim::device prim::layout", *overloads(_QUERIES))
def _query(t: Tracer, op: OpOverload, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return on_metas(op, t.value(x).tensor, *args, **kwargs)


# ------------------------------------------------------------------------------ shapes


@ALWAYS.rule("view _unsafe_view")
def _view(t: Tracer, op: OpOverload, x: Tensor, size: Sequence[Any]) -> Any:
    x = t.value(x).tensor
    shape = _whole(x, size)
    return t.same(x) if same_ints(shape, x.shape) else t.view(aten.view.default, x, shape)


@ALWAYS.rule("reshape _reshape_copy")
def _reshape(t: Tracer, op: OpOverload, x: Tensor, size: Sequence[Any]) -> Any:
    x = t.value(x).tensor
    shape = _whole(x, size)
    if op is aten.reshape.default and same_ints(shape, x.shape):
        return t.same(x)
    is_copied = op is not aten.reshape.default or not (
        is_row_major(x) or storage_id(on_metas(aten.reshape.default, x, shape)) == storage_id(x)
    )
    if is_copied:
        x = t.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    return t.view(aten.view.default, x, shape)


def _whole(x: Tensor, shape: Sequence[Any]) -> list[Any]:
    """`shape` for the elements of `x`, with the size that -1 stands for.

    Sizes on both sides cancel before anything is divided: symbolic products stay small.
    """
    numbers = [n for n in shape if type(n) is int]
    if -1 not in numbers:
        return list(shape)
    if 0 in numbers:
        return list(x.new_empty(x.shape).view(shape).shape)
    left = list(x.shape)
    rest: list[Any] = []
    let_be_filled(shape)
    for n in shape:
        twin = next((k for k, size in enumerate(left) if is_written(size, n)), None)
        if twin is not None:
            del left[twin]
        elif not _is_open(n):
            rest.append(n)
    size = math.prod(left) // math.prod(rest) if rest else math.prod(left)
    return [size if _is_open(n) else n for n in shape]


def _is_open(n: Any) -> bool:
    return type(n) is int and n == -1


@ALWAYS.rule("expand")
def _expand(t: Tracer, op: OpOverload, x: Tensor, size: Sequence[Any], **_: Any) -> Any:
    x = t.value(x).tensor
    shape = list(t.b.twins.view(op, x, size).shape)
    return t.same(x) if same_ints(shape, x.shape) else t.view(op, x, shape)


@ALWAYS.rule("unsqueeze")
def _unsqueeze(t: Tracer, op: OpOverload, x: Tensor, axis: int) -> Any:
    return t.view(op, x, axis % (x.dim() + 1))


@ALWAYS.rule("squeeze squeeze.dim squeeze.dims")
def _squeeze(t: Tracer, op: OpOverload, x: Tensor, asked: Any = None) -> Any:
    x = t.value(x).tensor
    asked = range(x.dim()) if asked is None else [asked] if isinstance(asked, int) else asked
    axes = sorted(axis % x.dim() for axis in asked) if x.dim() else []
    axes = [axis for axis in axes if x.shape[axis] == 1]
    return t.view(aten.squeeze.dims, x, axes) if axes else t.same(x)


@ALWAYS.rule("permute")
def _permute(t: Tracer, op: OpOverload, x: Tensor, order: Sequence[int]) -> Any:
    axes = [axis % x.dim() for axis in order]
    return t.same(x) if axes == list(range(x.dim())) else t.view(op, x, axes)


@ALWAYS.rule("transpose.int t")
def _transpose(t: Tracer, op: OpOverload, x: Tensor, i: int = 0, j: int = -1) -> Any:
    axes = list(range(x.dim()))
    if axes:
        axes[i], axes[j] = axes[j], axes[i]
    return t.call(aten.permute.default, x, axes)


# ------------------------------------------------------------------------------ parts


@ALWAYS.rule("slice.Tensor")
def _slice(
    t: Tracer, op: OpOverload, x: Tensor, axis: int = 0, start: Any = None, end: Any = None,
    step: Any = 1,
) -> Any:  # fmt: skip
    x = t.value(x).tensor
    axis %= x.dim()
    start, end = narrowed(x, axis, start, end, step)
    if step == 1 and same_ints((start, end), (0, x.shape[axis])):
        return t.same(x)
    if type(start) is int and type(end) is int:
        end = max(start, end)
    return t.view(op, x, axis, start, end, step)


@ALWAYS.rule("slice_scatter select_scatter diagonal_scatter")
def _part_scatter(t: Tracer, op: OpOverload, *args: Any) -> Any:
    """An open place, which gradients have as the program gave it, counts from the start."""
    given, x = [*bound(op, args, {}).values()], t.value(args[0]).tensor
    if 0 not in x.stride() and may_repeat(x):
        raise t.b.unsupported("a part of a copy whose elements share memory")
    if type(given[3]) is not torch.SymInt:
        return t.record(op, *args)
    axis = given[2] % x.dim()
    if op is aten.select_scatter.default:
        given[3] = selected(x, axis, given[3])
    else:
        given[3:5] = narrowed(x, axis, *given[3:])
    return t.record(op, *given)


@ALWAYS.rule("select.int")
def _select(t: Tracer, op: OpOverload, x: Tensor, axis: int, index: Any) -> Any:
    x = t.value(x).tensor
    axis %= x.dim()
    return t.view(op, x, axis, selected(x, axis, index))


@ALWAYS.rule("unbind.int")
def _unbind(t: Tracer, op: OpOverload, x: Tensor, axis: int = 0) -> list[Tensor]:
    x = t.value(x).tensor
    axis %= x.dim()
    count = operator.index(x.shape[axis])
    return [t.view(aten.select.int, x, axis, i) for i in range(count)]


@ALWAYS.rule("split.Tensor unsafe_split.Tensor split_with_sizes unsafe_split_with_sizes")
def _split(t: Tracer, op: OpOverload, x: Tensor, sizes: Any, axis: int = 0) -> list[Tensor]:
    x = t.value(x).tensor
    axis %= x.dim()
    parts = []
    start: Any = 0
    for part in t.b.twins.view(op, x, sizes, axis):
        end = start + part.shape[axis]
        parts.append(t.view(aten.slice.Tensor, x, axis, start, end, 1))
        start = end
    return parts


@ALWAYS.rule("diagonal unfold view.dtype view_as_real view_as_complex _conj _neg_view")
def _plain_view(t: Tracer, op: OpOverload, x: Any, *args: Any) -> Any:
    if isinstance(x, complex):  # a factor that autograd takes for a tensor
        x = t.literal(torch.tensor(x, dtype=torch.complex128))
    if op is aten.view.dtype and x.dtype == args[0]:
        return t.same(x)
    return t.view(op, x, *args)


@ALWAYS.rule("as_strided")
def _as_strided(
    t: Tracer, op: OpOverload, part: Tensor, size: Any, stride: Any, offset: Any = None
) -> Any:
    # The offset counts from the start of the storage, so only the base gives the right elements.
    x = t.value(part)
    base = x.store.base
    if offset is None:
        offset = x.tensor.storage_offset()
    elif x.store.origin is not None:
        t.b.from_start.add(x.store.origin)
    _within(t, base.tensor, x.tensor.dtype, size, stride, offset)
    if not is_dense(base.tensor):
        x.store.frozen = "a write beside as_strided between the elements of a tensor"
        if x.store.version:
            raise t.b.unsupported(x.store.frozen)
    found = t.view(op, base.tensor, list(size), list(stride), offset)
    for bit in (aten._conj.default, aten._neg_view.default):
        if (bit in bits_of(base.tensor)) != (bit in bits_of(x.tensor)):
            found = t.call(bit, found)
    return found


@ALWAYS.rule("as_strided_scatter")
def _as_strided_scatter(t: Tracer, op: OpOverload, *args: Any) -> Any:
    x = t.value(args[0])
    _, _, size, stride, offset = bound(op, args, {}).values()
    if offset is not None and x.store.origin is not None:
        t.b.from_start.add(x.store.origin)
    _within(t, x.tensor, x.tensor.dtype, size, stride, 0 if offset is None else offset)
    t.b.from_its_start(t.b.node(x), x)
    return t.record(op, *args)


def _within(
    t: Tracer, base: Tensor, dtype: torch.dtype, size: Any, stride: Any, offset: Any
) -> None:
    """raises  TraceError unless these elements are among those of `base`, a whole storage"""
    if base.dtype != dtype or base.storage_offset() != 0:
        raise t.b.unsupported("as_strided of a tensor that starts inside a larger storage")
    is_told = not any(map(is_unbacked, (*size, *stride, offset, *base.shape, *base.stride())))
    if is_told and 0 not in size:
        if offset + extent(size, stride) > extent(base.shape, base.stride()):
            raise t.b.unsupported("as_strided reaches beyond the elements of its tensor")


# ------------------------------------------------------------------------------ copies


@ALWAYS.rule("to.dtype to.dtype_layout to.device to.other type_as")
def _to(t: Tracer, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    given = bound(op, args, kwargs)
    if "other" in given:
        other = t.value(given["other"])
        given["dtype"], given["device"] = other.tensor.dtype, other.store.device
    return convert(t, args[0], *map(given.get, ("dtype", "device", "memory_format", "copy")))


@ALWAYS.rule("_to_copy")
def _to_copy(
    t: Tracer, op: OpOverload, x: Any, *, dtype: Any = None, device: Any = None,
    memory_format: Any = None, **_: Any,
) -> Any:  # fmt: skip
    return convert(t, x, dtype, device, memory_format, True)


def convert(
    t: Tracer,
    tensor: Any,
    dtype: torch.dtype | None,
    device: torch.device | None,
    layout: torch.memory_format | None = None,
    always: bool | None = False,
) -> Any:
    """`tensor` in that dtype, on that device; itself if it is so already, unless `always`."""
    if not isinstance(tensor, Tensor):  # a number that functorch has made a tensor of
        dtype = dtype or torch.get_default_dtype()
        return t.call(aten.full.default, [], tensor, dtype=dtype, device=t.here)
    value = t.value(tensor)
    x = value.tensor
    kwargs: dict[str, Any] = {}
    if dtype is not None and dtype != x.dtype:
        kwargs["dtype"] = dtype
    asked, here = torch.device(device or "meta"), value.store.device
    # "meta": nothing is asked, or code that asked a meta twin for its device
    if asked.type != "meta" and (asked.type != here.type or asked.index not in (None, here.index)):
        kwargs["device"] = asked
    if layout is not None and layout is not torch.preserve_format:
        if always or suggested_layout(x) != layout:
            kwargs["memory_format"] = layout
    if not kwargs and not always:
        return tensor
    if "dtype" not in kwargs and "device" not in kwargs:
        return t.call(aten.clone.default, x, **kwargs)
    return t.record(aten._to_copy.default, x, **kwargs)


@ALWAYS.rule("dropout dropout_ feature_dropout alpha_dropout")
def _dropout(t: Tracer, op: OpOverload, x: Tensor, probability: float, is_training: bool) -> Any:
    if not is_training or probability == 0 or has_zero(x.shape):
        return x
    if op not in (aten.dropout.default, aten.dropout_.default):
        return t.composite(op, x, probability, is_training)
    scaled = aten.mul.Tensor if op is aten.dropout.default else aten.mul_.Tensor
    if probability == 1:  # NaN stays, and nothing is drawn
        return t.call(scaled, x, 0)
    # in place a GPU draws as a CPU does
    if op is aten.dropout.default and t.value(x).store.device.type != "cpu":
        return t.call(aten.native_dropout.default, x, probability, True)[0]
    # torch's own has another form where sizes are open, that no kernel of ours draws
    noise = t.call(aten.empty_like.default, x)
    t.call(aten.bernoulli_.float, noise, 1 - probability)
    t.call(aten.div_.Scalar, noise, 1 - probability)
    return t.call(scaled, x, noise)


@ALWAYS.rule("max_pool1d")
def _max_pool1d(t: Tracer, op: OpOverload, x: Tensor, *args: Any) -> Any:
    """A CPU's kernel, which has no gradients, gives rows."""
    found = t.composite(op, x, *args)
    is_there = t.value(x).store.device.type == "cpu"
    return t.call(aten.contiguous.default, found) if is_there else found


@ALWAYS.rule("convolution")
def _convolution(t: Tracer, op: OpOverload, x: Tensor, *args: Any) -> Any:
    rows = (list, tuple)
    whole = (list(y) * (x.dim() - 2) if isinstance(y, rows) and len(y) == 1 else y for y in args)
    return t.record(op, x, *whole)


# ------------------------------------------------------------------------------ indexing


@ALWAYS.rule("channel_shuffle native_channel_shuffle")
@in_torchs_words
def _channel_shuffle(t: Tracer, x: Tensor, groups: int) -> Any:
    count, channels, *rest = x.shape
    parts = x.reshape(count, groups, channels // groups, *rest).transpose(1, 2).reshape(x.shape)
    copied = parts.clone if t.value(x).store.device.type == "cpu" else parts.contiguous
    return copied(memory_format=_layout_of_shuffled(t, x))


def _layout_of_shuffled(t: Tracer, x: Tensor) -> torch.memory_format:
    """Kernels for CPUs keep the layout; elsewhere these are views and copies that are contiguous.

    source   aten/src/ATen/native/PixelShuffle.cpp, ChanelShuffle.cpp
    """
    is_kept = t.value(x).store.device.type == "cpu"
    return suggested_layout(x) if is_kept else torch.contiguous_format


@ALWAYS.rule("one_hot")
@in_torchs_words
def _one_hot(t: Tracer, x: Tensor, classes: Any = -1) -> Any:
    if type(classes) is int and classes < 1:
        raise t.b.unsupported("how many classes one_hot() sees only the values tell")
    return IN_OTHERS[torch.nn.functional.one_hot](x, classes)


@ALWAYS.rule("index.Tensor _unsafe_index.Tensor")
def _index(t: Tracer, op: OpOverload, x: Tensor, indices: Sequence[Any]) -> Any:
    if _has_mask(indices) and t.b.twins.env is not None:
        found = t.record(aten.index.Tensor, x, _without_masks(t, indices))
        mask, *more = indices
        if not more and same_ints(mask.shape, x.shape[: mask.dim()]):
            made = t.node(found)
            made.meta["never_raises"] = True
            t.b.taken[made] = t.node(mask), t.node(x)
        return found
    if _has_mask(indices):
        raise t.b.unsupported(
            "indexing with a mask gives as many elements as the mask has ones",
            remedy="torch.where, or masked_fill, keeps the shape",
        )
    part = _part(t, x, indices)
    if part is not None:
        like = t.run_meta(aten.index.Tensor, *_metas(t, x, indices))
        if is_row_major(like):
            found = t.call(aten.slice.Tensor, x, *part)
            return t.call(aten.clone.default, found, memory_format=torch.contiguous_format)
    return t.record(aten.index.Tensor, x, indices)


@ALWAYS.rule("index_put _unsafe_index_put")
def _index_put(
    t: Tracer, op: OpOverload, x: Any, indices: Sequence[Any], values: Any, *more: bool
) -> Any:
    env, to_size, accumulate = t.b.twins.env, t.b.to_size, any(more)
    part = _part(t, x, indices)
    if part is not None and t.value(x).store.device == t.value(values).store.device:
        x = x if is_dense(x) else t.call(aten.clone.default, x)
        whole = t.call(aten.slice.Tensor, x, *part)
        if accumulate:
            values = t.call(aten.add.Tensor, whole, values)
        values = t.call(aten.expand.default, values, whole.shape)
        return t.call(aten.slice_scatter.default, x, values, *part)
    is_fill = len(indices) == 1 and not accumulate and all(n == 1 for n in values.shape)
    if env is None or to_size is None or is_fill or not _has_mask(indices):
        return t.record(op, x, indices, values, *more)
    if len(indices) == 1 and not accumulate:
        mask, (by, other) = indices[0], t.b.taken.get(t.node(values), (None, None))
        twin = t.value(x).tensor
        if other is not None and by is t.node(mask) and mask.dtype is torch.bool:
            given = other.meta["val"]
            is_alike = given.dtype is twin.dtype and same_ints(given.shape, twin.shape)
            if is_alike and is_row_major(twin) and is_row_major(given):
                # `x[mask] = other[mask]`, without a size that only the data knows
                size = [*mask.shape, *[1] * (x.dim() - mask.dim())]
                whole, device = t.call(aten.reshape.default, mask, size), t.device_of((x,))
                out = t.run_meta(aten.where.self, (t.value(whole).tensor, twin, twin), {}, device)
                operands = t.node(whole), other, t.node(x)
                t.adopt(out, t.b.emit(aten.where.self, operands, {}, out, device), None, device)
                return out
    found = _without_masks(t, indices)
    made = t.run_meta(aten.index.Tensor, *_metas(t, x, found))
    for n, m in zip(reversed(values.shape), reversed(made.shape)):
        if type(n) is not int or n != 1:
            env.data.require(to_size(n), "==", to_size(m))
    return t.record(op, x, found, values, accumulate)


def _metas(t: Tracer, x: Any, indices: Sequence[Any]) -> tuple[Args, Kwargs]:
    twins = [None if index is None else t.value(index).tensor for index in indices]
    return (t.value(x).tensor, twins), {}


# Of places that a program writes down.
_MOST_PLACES = 64


def _part(t: Tracer, x: Any, indices: Sequence[Any]) -> tuple[int, int, int, int] | None:
    """What `slice` takes for `x[:, [1, 3]]`: axis, start, end, step. None for other indices."""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return None
    ((axis, index),) = given
    node, n = t.node(index), t.value(x).tensor.shape[axis]
    if node.op != "get_attr" or index.dtype is not torch.int64 or index.dim() != 1:
        return None
    if type(n) is not int or not 0 < index.shape[0] <= _MOST_PLACES:
        return None
    places = [place + n * (place < 0) for place in t.b.constants[str(node.target)].tolist()]
    first, last = places[0], places[-1]
    step = places[1] - first if len(places) > 1 else 1
    if step <= 0 or not 0 <= first <= last < n or places != [*range(first, last + 1, step)]:
        return None
    return axis, first, last + 1, step


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _without_masks(t: Tracer, indices: Sequence[Any]) -> list[Any]:
    """Indices with those where a mask is true in place of the mask."""
    return [
        index
        for x in indices
        for index in (t.places(x) if x is not None and _has_mask((x,)) else (x,))
    ]


# ---------------------------------------------------------------------------- canonical
# Operators that ATen's kernels in C++ compose otherwise for the device of a twin than for a CPU, or
# not at all. All other composite ones are taken apart by these kernels.


CANONICAL: OpRules[Rule] = OpRules()


def group_norm(
    t: Tracer, input: Any, num_groups: int, weight: Any = None, bias: Any = None,
    eps: float = 1e-5, *_: Any, **__: Any,
) -> Any:  # fmt: skip
    """In the layout that it is given on a CPU, where torch makes rows of twins as on a GPU."""
    n, channels, *pixels = input.shape
    on_cpu = t.device_of((input,)).type == "cpu"
    layout = suggested_layout(input) if on_cpu else torch.contiguous_format
    x = input.contiguous(memory_format=layout)
    size = n, channels, math.prod(pixels), num_groups
    return torch.native_group_norm(x, weight, bias, *size, eps)[0]


CANONICAL.rule("group_norm")(in_torchs_words(group_norm))


@CANONICAL.rule("batch_norm")
def _batch_norm(t: Tracer, op: OpOverload, x: Tensor, *given: Any) -> Any:
    if not has_zero(x.shape):
        return t.call(aten.native_batch_norm.default, x, *given[:-1])[0]
    out = t.call(aten.clone.default, x)  # nothing to count: the statistics stay
    for apply, factor in zip((aten.mul.Tensor, aten.add.Tensor), given):
        if factor is not None:
            out = t.call(apply, out, t.call(aten.select.int, factor, 0, 0))
    return out


@CANONICAL.rule("softmax.int log_softmax.int")
def _softmax(t: Tracer, op: OpOverload, x: Tensor, axis: int, dtype: Any = None) -> Any:
    kernel = aten._softmax.default if op is aten.softmax.int else aten._log_softmax.default
    return t.call(kernel, convert(t, x, dtype, None), axis, False)


@CANONICAL.rule("baddbmm")
def _baddbmm(t: Tracer, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Rows, however the summand lies."""
    with active(t):
        return moved(torch_table()[op])(*args, **kwargs).contiguous()


@CANONICAL.rule("gru_cell")
def _gru_cell(t: Tracer, op: OpOverload, x: Tensor, state: Tensor, *weights: Any) -> Any:
    """One kernel of a GPU, which gives rows."""
    on_cpu = t.device_of((x,)).type == "cpu"
    state = state if on_cpu else t.call(aten.contiguous.default, state)
    return t.composite(op, x, state, *weights)


@CANONICAL.rule("linalg_cross")
def _cross(t: Tracer, op: OpOverload, x: Tensor, y: Tensor, *, dim: int = -1) -> Any:
    if x.dtype.is_complex:
        return t.record(op, x, y, dim=dim)
    with active(t):
        a, b = x.unbind(dim), y.unbind(dim)
        pairs = (1, 2), (2, 0), (0, 1)
        return torch.stack([a[k] * b[n] - a[n] * b[k] for k, n in pairs], dim)


@CANONICAL.rule(*LAYERS)
def _recurrent(t: Tracer, op: OpOverload, *args: Any) -> Any:
    # whole, as ATen runs them; but autocast casts what they are made of
    return (t.composite if t.autocast else t.record)(op, *args)


@CANONICAL.rule("pixel_shuffle pixel_unshuffle")
def _pixel_shuffle(t: Tracer, op: OpOverload, x: Tensor, factor: int) -> Any:
    with active(t):
        found = moved(decomposition(op))(x, factor)
        return found.contiguous(memory_format=_layout_of_shuffled(t, x))


# torch's own composition of these asks for vectors too while a dispatch mode is on, by another
# algorithm
CANONICAL.rule("linalg_svdvals")(
    lambda t, op, x, **kwargs: t.call(aten._linalg_svd.default, x, False, False, **kwargs)[1]
)
CANONICAL.rule("linalg_eigvalsh")(
    lambda t, op, x, half="L": t.call(aten._linalg_eigh.default, x, half, False)[0]
)


# ---------------------------------------------------------------------------- foreach
# Operators on lists whose second operand is a tensor: one operator for each tensor of the list.
#
# torch's own device-independent kernels of all others call these. Of these they read the operand's
# value first, which a graph cannot.

_BINARY = {
    aten._foreach_add.Tensor: aten.add.Tensor,
    aten._foreach_mul.Tensor: aten.mul.Tensor,
    aten._foreach_div.Tensor: aten.div.Tensor,
}
_SCALED: dict[Any, Callable[..., Tensor]] = {
    aten._foreach_addcmul.Tensor: torch.mul,
    aten._foreach_addcdiv.Tensor: torch.div,
}


ALWAYS.rule(*_BINARY)(
    lambda t, op, xs, y, **kwargs: [t.call(_BINARY[op], x, y, **kwargs) for x in xs]
)


@ALWAYS.rule(*_SCALED)
def _scaled(t: Tracer, op: OpOverload, xs: Any, left: Any, right: Any, factors: Tensor) -> Any:
    """x + factor * a * b, or x + factor * a / b, with a factor for each tensor."""
    if any(x.dtype not in (torch.float32, torch.float64) for x in xs):
        raise t.b.unsupported(f"{op} of {xs[0].dtype}, whose steps ATen does not round")
    with active(t):
        rows = zip(xs, left, right, factors.unbind(), strict=True)
        return [x + _SCALED[op](a * factor, b) for x, a, b, factor in rows]


# torch's own kernel calls `_foreach_zero_`, which asks for this
ALWAYS.rule("_foreach_zero")(in_torchs_words(lambda t, xs: [torch.zeros_like(x) for x in xs]))


@ALWAYS.rule("_amp_foreach_non_finite_check_and_unscale")
@in_torchs_words
def _unscaled(t: Tracer, gradients: Any, found: Tensor, inverse: Tensor) -> Any:
    """Gradients without the scale of their loss, and 1 if one of them is not finite."""
    for x in gradients:
        found = found.masked_fill(~x.isfinite().all(), 1)
    return [x * inverse.view([]) for x in gradients], found


@ALWAYS.rule("_amp_update_scale")
@in_torchs_words
def _updated_scale(
    t: Tracer, scale: Any, steps: Any, found: Any, growth: float, backoff: float, interval: int
) -> Any:
    """The scale of a loss, and for how many steps all gradients have been finite."""
    wide = scale.double()  # a factor is a double
    grown, less = ((wide * by).to(scale.dtype) for by in (growth, backoff))
    grown = torch.where(grown.isfinite(), grown, scale)
    steps = steps + 1
    is_over, is_found = steps == interval, found != 0
    scale = torch.where(is_found, less, torch.where(is_over, grown, scale))
    return scale, steps.masked_fill(is_found | is_over, 0)


# ---------------------------------------------------------------------------- decompose
# Decompositions: what an operator that nobody keeps is made of.
#
# Tables are dicts from operator to a function in simpler operators. torch's own are the last
# resort: written for generality, they take a millisecond a call.

Table = Mapping[OpOverload, Callable[..., Any]]

# Not in core ATen, but lowered or called whole.
_KEPT = frozenset(
    overloads(
        "linear scaled_dot_product_attention _native_batch_norm_legit_functional"
        " _native_batch_norm_legit_no_training _native_batch_norm_legit.no_stats silu mish softplus"
        " hardswish hardsigmoid baddbmm stack upsample_nearest2d.vec upsample_bilinear2d.vec"
        " upsample_bicubic2d.vec grid_sampler_2d roll"
    )
)


@functools.cache
def keep_core(op: OpOverload) -> bool:
    """The default policy: core ATen and a few whole operators are kept, random ones always."""
    if op in _KEPT or torch.Tag.core in op.tags:
        return True
    return draws(op) and not is_composite(op)


def decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """The function that `op` is decomposed by unless the caller has one, or None."""
    return torch_table().get(op)


def taken_apart(op: OpOverload) -> Callable[..., Any] | None:
    """The function that `op` is decomposed by if someone asks for it, or None."""
    if op is aten._native_batch_norm_legit_no_training.default:
        # torch's goes by way of an operator that tracing takes for this one
        whole = further_decompositions()[aten._native_batch_norm_legit.default]
        return lambda x, w, b, mean, var, momentum, eps: whole(
            x, w, b, mean, var, False, momentum, eps
        )
    return decomposition(op) or further_decompositions().get(op)


# Kernels of these round once in half precision, torch's decompositions after every step. Gradients
# of pads torch takes apart into additions at places that are data.
_ONLY_WHOLE = frozenset(
    overloads(
        "addr logit upsample_linear1d upsample_linear1d.vec upsample_trilinear3d"
        " upsample_trilinear3d.vec reflection_pad1d_backward reflection_pad2d_backward"
        " reflection_pad3d_backward"
    )
)


@functools.cache
def torch_table() -> Table:
    """torch's decompositions down to core ATen, less the inexact and those that draw randomly."""
    return {
        op: function
        for op, function in decomposition_tables().items()
        if op not in _ONLY_WHOLE and not draws(op)
    }
