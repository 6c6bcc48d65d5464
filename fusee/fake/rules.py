"""Sizes, strides and dtypes of operators' results, as the CPU's kernels give them; and a GPU's.

Said once, for capture and for tracing, with known sizes and with open ones: sizes are ints or
SymInts, of which a rule asks what torch would ask. A rule returns None, or raises Unsure, where
torch is to say what comes out: its own meta kernels, which take milliseconds where they are in
Python, and tens of them for SymInts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusee.fake.layouts import (
    Sizes,
    Spec,
    Unsure,
    broadcast,
    combined,
    equal,
    has_zero,
    in_format,
    indexed,
    is_contiguous,
    is_empty,
    is_row_major,
    known,
    let_be_equal,
    like,
    rows,
    same_ints,
    strides,
    suggested_layout,
)
from fusee.fake.torch_python import kernel, mode_of, on_ones
from fusee.loops.operators import ROWS, is_pointwise, opmath
from fusee.source import HALVES, Args, Kwargs, OpRules, overloads

aten = torch.ops.aten

Op = Any  # an OpOverload


# A Spec, a tuple of them with None where there is no result, or tensors that torch has made.
Found = Any
Rule = Callable[..., Found]

RULES: OpRules[Rule] = OpRules()


def results(op: Op, args: Args, kwargs: Kwargs) -> Found:
    """What an operator gives for these tensors and literals; None: it is torch's to say.

    raises   RuntimeError where the operator would
    """
    rule = RULES.get(op)
    try:
        found = None if rule is None else rule(*args, **kwargs)
        if found is not None or not goes_by_elements(op):
            return found
        operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        operands = operands[::-1] if op in _TURNED else operands
        # what a kernel may refuse of an argument, or give its result's dtype by
        numbers = _others(op)
        sorts = (
            (x.dtype, x.dim())
            if isinstance(x, Tensor)
            else (type(x), None if k in numbers or isinstance(x, _ANY) else x)
            for k, x in enumerate((*args, *kwargs.values()))
        )
        key = op, len(args), *kwargs, torch.get_default_dtype(), *sorts
        if (dtype := _DTYPES.get(key)) is None:
            dtype = _DTYPES[key] = on_ones(op, args, kwargs).dtype
        if op in _IN_ROWS:
            return rows(broadcast(*(x.shape for x in operands)), dtype)
        alone = all(isinstance(args[k], Tensor) for k in numbers if k < len(args))
        return combined(operands, dtype, alone=alone)
    except Unsure:
        return None


def in_python(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Run an operator, by torch's shape function if it has one in Python."""
    with mode_of(args):
        return (kernel(op) or op)(*args, **kwargs)


def in_layout_of(x: Tensor) -> Spec:
    return in_format(x.shape, x.dtype, suggested_layout(x))


# ---------------------------------------------------------------------------- pointwise


@functools.cache
def _others(op: Op) -> tuple[int, ...]:
    """Places of the arguments that TensorIterator takes for tensors where they are numbers."""
    return tuple(k for k, a in enumerate(op._schema.arguments) if a.name in ("self", "other"))


_DTYPES: dict[Any, torch.dtype] = {}  # by operator and sorts of operands
_ANY = (float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


@functools.cache
def goes_by_elements(op: Op) -> bool:
    """Whether an operator gives one new tensor, element by element of its operands."""
    returns = op._schema.returns
    is_one = (
        (op.namespace == "aten" or any(op in row.overloads for row in ROWS))
        and len(returns) == 1
        and str(returns[0].type) == "Tensor"
        and not returns[0].alias_info
    )
    others = any("[]" in str(a.type) or a.name == "memory_format" for a in op._schema.arguments)
    others = others or op in _APART or torch.Tag.nondeterministic_seeded in op.tags
    return is_one and not others and is_pointwise(op)


# However their operand lies.
_IN_ROWS = overloads("pow.Scalar mvlgamma masked_fill.Scalar masked_fill.Tensor")
_TURNED = overloads("rsub.Tensor leaky_relu_backward threshold_backward")  # the second comes first
_APART = overloads("_prelu_kernel log_sigmoid_backward")  # laid out by one of them


@RULES.rule("cat")
def _cat(tensors: Sequence[Tensor], axis: int = 0) -> Found:
    parts = [x for x in tensors if not same_ints(x.shape, (0,))] or tensors  # as torch does
    first, rank = parts[0], parts[0].dim()
    is_even = all(x.dim() == rank for x in parts) and all(x.dtype == first.dtype for x in tensors)
    if not is_even or axis not in range(-rank, rank):
        return None
    axis %= rank
    size: list[Any] = list(first.shape)
    for x in parts[1:]:
        others = [*size[:axis], *size[axis + 1 :]]
        if not equal([*x.shape[:axis], *x.shape[axis + 1 :]], others):
            return None
    size[axis] = sum(x.shape[axis] for x in parts)
    layouts = {suggested_layout(x) for x in tensors}
    layout = layouts.pop() if len(layouts) == 1 else torch.contiguous_format
    return in_format(size, first.dtype, layout)


@RULES.rule("stack")
def _stack(tensors: Sequence[Tensor], axis: int = 0) -> Found:
    first = tensors[0] if tensors else None
    if first is None or axis not in range(-first.dim() - 1, first.dim() + 1):
        return None
    for x in tensors:
        if x.dim() == first.dim():
            let_be_equal(x.shape, first.shape)
        if x.dtype != first.dtype or not equal(x.shape, first.shape) or not is_contiguous(x):
            return None
    size = list(first.shape)
    size.insert(axis % (first.dim() + 1), len(tensors))
    return rows(size, first.dtype)


# ---------------------------------------------------------------------------- reductions


def reduced(x: Tensor, axes: Sequence[int] | int | None, keep: bool) -> list[Any]:
    """The size. raises Unsure if an axis is not one of `x`, which is torch's to say"""
    rank = x.dim()
    given = (axes,) if isinstance(axes, int) else axes or range(rank)
    gone = {axis % rank for axis in given if -rank <= axis < rank}
    if len(gone) != len(given):
        raise Unsure
    return [1 if i in gone else n for i, n in enumerate(x.shape) if keep or i not in gone]


def _along(x: Tensor, axis: int) -> Sizes:
    """The size of `x`. raises IndexError if it has no such axis, as torch's own may not"""
    rank = max(x.dim(), 1)
    if not -rank <= axis < rank:
        raise IndexError(f"axis {axis} of a tensor of {rank}")
    return x.shape


@RULES.rule("sum sum.dim_IntList", is_mean=False)
@RULES.rule("mean mean.dim", is_mean=True)
def _sum_like(
    x: Tensor, axes: Any = None, keep: bool = False, *, dtype: Any = None, is_mean: bool
) -> Found:
    summed = dtype or x.dtype
    is_inexact = summed.is_floating_point or summed.is_complex
    if is_mean and not is_inexact:
        return None
    return rows(reduced(x, axes, keep), summed if is_inexact or dtype else torch.int64)


@RULES.rule("amax amin")
@RULES.rule("argmax argmin", gives=torch.int64)
def _extreme(x: Tensor, axes: Any = None, keep: bool = False, *, gives: Any = None) -> Found:
    return None if is_empty(x) else rows(reduced(x, axes, keep), gives or x.dtype)


@RULES.rule("cumsum")
def _cumsum(x: Tensor, axis: int, *, dtype: torch.dtype | None = None) -> Found:
    is_inexact = x.is_floating_point() or x.is_complex()
    return rows(_along(x, axis), dtype or (x.dtype if is_inexact else torch.int64))


def pooled(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil: bool,
    axes: int = 2,
) -> list[Any]:
    """The size. raises Unsure for what torch has something to say about

    source   aten/src/ATen/native/Pool.h, pooling_output_shape
    """
    if x.dim() - axes not in (1, 2) or is_empty(x):
        raise Unsure
    size = list(x.shape[:-axes])
    for i, n in enumerate(x.shape[-axes:]):
        k, p, d, step = (row[i % len(row)] for row in (kernel, padding, dilation, stride or kernel))
        if step <= 0 or d <= 0 or p < 0 or 2 * p > (k - 1) * d + 1:
            raise Unsure
        reach = n + 2 * p - d * (k - 1) - 1
        count = (reach + (step - 1 if ceil else 0)) // step + 1
        if ceil:  # the last window begins inside
            inside = (n + p + step - 1) // step
            count = torch.sym_min(count, inside)  # type: ignore[no-untyped-call]
        if count < 1:
            raise Unsure
        size.append(count)
    return size


@RULES.rule("max_pool2d_with_indices")
@RULES.rule("max_pool3d_with_indices", axes=3)
def _max_pool2d(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil: bool = False,
    axes: int = 2,
) -> Found:
    size, layout = pooled(x, kernel, stride, padding, dilation, ceil, axes), suggested_layout(x)
    return in_format(size, x.dtype, layout), in_format(size, torch.int64, layout)


RULES.rule("max_pool2d")(lambda x, *rest: None if known(x.shape) else _max_pool2d(x, *rest)[0])


@RULES.rule("avg_pool2d")
def _avg_pool2d(
    x: Tensor, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), ceil: bool = False, *_: Any
) -> Found:
    return in_format(pooled(x, kernel, stride, padding, (1,), ceil), x.dtype, suggested_layout(x))


@RULES.rule("_adaptive_avg_pool2d")
def _adaptive_avg_pool2d(x: Tensor, size: Sizes) -> Found:
    if x.dim() not in (3, 4) or len(size) != 2 or is_empty(x):
        return None
    return in_format((*x.shape[:-2], *size), x.dtype, suggested_layout(x))


RULES.rule("max_unpool2d")(
    lambda x, index, size: in_format((*x.shape[:-2], *size), x.dtype, suggested_layout(x))
)


# ---------------------------------------------------------------------------- copies


@RULES.rule("clone")
def _clone(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Found:
    if memory_format in (None, torch.preserve_format):
        return like(x)
    return in_format(x.shape, x.dtype, memory_format)


@RULES.rule("_to_copy")
def _to_copy(x: Any, **kwargs: Any) -> Found:
    if not isinstance(x, Tensor):  # a number that functorch has made a tensor of
        x = torch.scalar_tensor(x, device="meta")
    device = kwargs.pop("device", None)
    if device not in (None, x.device) or not {*kwargs} <= {"dtype", "non_blocking"}:
        return None
    return like(x, kwargs.get("dtype") or x.dtype)


@RULES.rule("empty_like zeros_like ones_like full_like", is_like=True)
@RULES.rule("new_empty new_zeros new_ones new_full", is_like=False)
def _of_one(x: Tensor, *args: Any, is_like: bool, **kwargs: Any) -> Found:
    is_usual = {*kwargs} <= {"dtype", "device", "pin_memory"}
    if kwargs.get("device") not in (None, x.device) or not is_usual:
        return None
    dtype = kwargs.get("dtype") or x.dtype
    return like(x, dtype) if is_like else rows(args[0], dtype)


RULES.rule("native_dropout")(
    lambda x, p, train: (like(x), like(x, torch.bool)) if x.is_floating_point() else None
)
RULES.rule(
    "fake_quantize_per_tensor_affine_cachemask"
    " _fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
)(lambda x, *given: (like(x), like(x, torch.bool)))
RULES.rule("index_fill.int_Scalar index_fill.int_Tensor")(
    lambda x, d, i, v: None if i.dim() > 1 or d >= x.dim() or getattr(v, "ndim", 0) else like(x)
)
RULES.rule("masked_scatter")(
    lambda x, mask, source: (
        rows(broadcast(x.shape, mask.shape), x.dtype)
        if (mask.dtype, source.dtype) == (torch.bool, x.dtype)
        else None
    )
)
RULES.rule("nonzero_static")(lambda x, *, size, fill_value=-1: rows((size, x.dim()), torch.int64))


@RULES.rule("roll")
def _roll(x: Tensor, shifts: Sizes, dims: Sequence[int] = ()) -> Found:
    layout = suggested_layout(x)
    if is_row_major(x) and not known(x.shape):
        axes = len(reduced(x, dims, True)) and len(shifts) - len(dims)
        return rows(x.shape, x.dtype) if axes == 0 or (len(shifts) == 1 and not dims) else None
    # a cat of two parts for each axis: an empty part suggests rows
    if layout == torch.contiguous_format or not dims:
        return None
    is_whole = any(s % x.shape[d] == 0 for s, d in zip(shifts, dims))
    return None if is_whole else in_format(x.shape, x.dtype, layout)


@RULES.rule("constant_pad_nd")
def _constant_pad(x: Tensor, padding: Sizes, value: Any = 0) -> Found:
    size = list(x.shape)
    if len(padding) % 2 or len(padding) > 2 * x.dim() or not is_row_major(x) or known(size):
        return None
    for k in range(len(padding) // 2):
        size[-1 - k] = size[-1 - k] + padding[2 * k] + padding[2 * k + 1]
    are_more = all(type(p) is int and p >= 0 for p in padding)
    return rows(size, x.dtype) if are_more or all(n >= 0 for n in size) else None


@RULES.rule_of_each("reflection_pad2d reflection_pad3d replication_pad2d replication_pad3d")
def _padded(op: Op, x: Tensor, padding: Sizes) -> Found:
    """Of a kernel that fills the memory format which its operand suggests."""
    layout = suggested_layout(x)
    is_plain = layout == torch.contiguous_format
    return None if is_plain else in_format(in_python(op, x, padding).shape, x.dtype, layout)


@RULES.rule("_linalg_svd")
def _svd(x: Tensor, full: bool = False, vectors: bool = True, **kwargs: Any) -> Found:
    u, s, v = in_python(aten._linalg_svd.default, x, full, vectors, **kwargs)
    return u, s, columns(v) if vectors else v


@RULES.rule("linalg_eig")
def _eig(x: Tensor) -> Found:
    values, vectors = in_python(aten.linalg_eig.default, x)
    return values, columns(vectors)


def columns(x: Tensor) -> Spec:
    """Column-major, as LAPACK writes."""
    *outer, row, column = range(x.dim())
    return Spec(x.shape, strides(x.shape, (*outer, column, row)), x.dtype)


# ---------------------------------------------------------------------------- normalisation


RULES.rule("_softmax _log_softmax _safe_softmax")(lambda x, d, *_: rows(_along(x, d), x.dtype))


@RULES.rule("native_layer_norm")
def _layer_norm(x: Tensor, shape: Sizes, weight: Any, bias: Any, eps: float) -> Found:
    outer = x.dim() - len(shape)
    sizes = [p.shape for p in (weight, bias) if p is not None]
    if not shape or not all(equal(size, shape) for size in (x.shape[outer:], *sizes)):
        raise RuntimeError(f"layer_norm over {list(shape)} of a tensor of size {list(x.shape)}")
    statistics = rows([*x.shape[:outer], *[1] * len(shape)], _statistics_dtype(x, weight, bias))
    return rows(x.shape, x.dtype), statistics, statistics


@RULES.rule("native_group_norm")
def _group_norm(
    x: Tensor, weight: Any, bias: Any, n: Any, channels: Any, pixels: Any, groups: int, eps: float
) -> Found:
    sizes = [p.shape for p in (weight, bias) if p is not None]
    fits = all(equal(size, (channels,)) for size in sizes) and channels % groups == 0
    if not fits or not equal((math.prod(x.shape),), (n * channels * pixels,)):
        raise RuntimeError(f"group_norm of {channels} channels in {groups} groups, weights {sizes}")
    statistics = rows((n, groups), _statistics_dtype(x, weight, bias))
    return in_layout_of(x), statistics, statistics


def _statistics_dtype(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """float32 if the parameters are wider than x, as in mixed precision."""
    is_mixed = any(p is not None and p.dtype != x.dtype for p in parameters)
    return torch.float32 if is_mixed else x.dtype


@RULES.rule("native_batch_norm _native_batch_norm_legit")
def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> tuple[Spec, ...]:
    channels = (x.shape[1],) if training else (0,)
    statistics = rows(channels, _statistics_dtype(x, weight, bias, mean, var))
    # images of one pixel each are rows
    # source   aten/src/ATen/native/Normalization.cpp, suggest_memory_format_contig
    made = rows(x.shape, x.dtype) if is_contiguous(x) else in_layout_of(x)
    return made, statistics, statistics


RULES.rule("_native_batch_norm_legit_functional")(
    lambda x, w, b, *rest: (*_batch_norm(x, w, b, *rest), *(like(s) for s in rest[:2]))
)
RULES.rule("_native_batch_norm_legit_no_training")(lambda x, *r: _batch_norm(x, *r[:4], False))
RULES.rule("_native_batch_norm_legit.no_stats")(
    lambda x, weight, bias, *_: _batch_norm(x, weight, bias, None, None, True)
)


# ---------------------------------------------------------------------------- contractions


@RULES.rule("linear")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Found:
    if x.dim() == 0 or not equal(x.shape[-1:], weight.shape[-1:]) or x.dtype != weight.dtype:
        raise RuntimeError(
            f"linear: {list(x.shape)} {x.dtype} does not fit {list(weight.shape)} {weight.dtype}"
        )
    return rows((*x.shape[:-1], *weight.shape[:-1]), x.dtype)


@RULES.rule("mm addmm", rank=2)
@RULES.rule("bmm baddbmm", rank=3)
def _product(*args: Any, rank: int, **_: Any) -> Found:
    """Of matrix products, with a summand or without."""
    *summand, a, b = args
    if a.dtype is torch.bool or any(x.dtype != a.dtype for x in args):
        raise RuntimeError(f"a product of {[x.dtype for x in args]}")
    if not a.dim() == b.dim() == rank:
        return None
    shared = (*a.shape[:-2], a.shape[-1])
    let_be_equal(shared, b.shape[:-1])
    if not equal(shared, b.shape[:-1]):
        return None
    size = (*a.shape[:-1], b.shape[-1])
    for c in summand:
        if c.dim() > rank or not equal(broadcast(c.shape, size), size):
            return None
    return rows(size, a.dtype)


@RULES.rule("convolution")
def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    extra: Sizes,
    groups: int,
) -> Found:
    channels = [weight.shape[0], weight.shape[1] * groups]
    expected, made = channels if transposed else channels[::-1]
    fits = x.dim() == weight.dim() and x.dtype == weight.dtype
    given = *stride, *dilation, *weight.shape[2:], *(p + 1 for p in padding)
    fits = fits and all(type(n) is not int or n > 0 for n in given)
    if not fits or not equal(x.shape[1:2], [expected]):
        raise RuntimeError(
            f"convolution: {list(x.shape)} {x.dtype} does not fit {list(weight.shape)}"
            f" {weight.dtype} in {groups} groups"
        )
    size: list[Any] = [x.shape[0], 0 if equal([expected], [0]) else made]
    for i, (n, k) in enumerate(zip(x.shape[2:], weight.shape[2:])):
        step, pad, spread, more = (row[i % len(row)] for row in (stride, padding, dilation, extra))
        reach = spread * (k - 1)
        if transposed:
            size.append((n - 1) * step - 2 * pad + reach + more + 1)
        else:
            size.append((n + 2 * pad - reach - 1) // step + 1)
    if any(n < (0 if transposed else 1) for n in size[2:]):
        raise RuntimeError(f"convolution: the result would have the size {size}")
    return convolution_spec(size, x, weight, groups)


def convolution_spec(size: Sizes, x: Tensor, weight: Tensor, groups: int) -> Spec:
    """Of a result of a convolution, or a gradient: they lie alike.

    source   aten/src/ATen/native/Convolution.cpp, determine_backend_memory_format, use_mkldnn
    """
    if x.dim() == 3:  # of images with one row: at::_convolution makes x contiguous
        with mode_of((weight,)):
            layout = suggested_layout(weight.unsqueeze(2))
        image = in_format((*size[:2], 1, size[2]), x.dtype, layout)
        return Spec(size, [*image.stride[:2], image.stride[3]], x.dtype)
    layout = suggested_layout(x)
    layout = suggested_layout(weight) if layout is torch.contiguous_format else layout
    if layout is torch.channels_last_3d and x.dtype not in HALVES:
        is_onednns = x.dtype is torch.float32 and (
            groups > 1
            or min(weight.shape[-2:]) > 3
            or bool(x.shape[0] > 1)
            or bool(math.prod(x.shape[:4]) > 20480)
        )
        layout = layout if is_onednns else torch.contiguous_format
    return in_format(size, x.dtype, layout)


@RULES.rule("scaled_dot_product_attention")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Found:
    if dropout <= 0 and q.dim() == k.dim() == v.dim() == 4:
        # the CPU runs its flash kernel, whose result is laid out as the query is
        # source   aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, use_flash_attention_cpp
        (first, heads, _, width), *others = (x.shape for x in (q, k, v))
        operands = [q, k, v] if mask is None else [q, k, v, mask]
        if (
            not is_empty(q, k, v)
            and all(equal((n[0], n[3]), (first, width)) for n in others)
            and (enable_gqa or all(equal(n[1:2], (heads,)) for n in others))
            and all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in operands)
        ):
            return like(q)
    batch = q.shape[:-2] if enable_gqa else broadcast(q.shape[:-2], k.shape[:-2])
    return rows((*batch, q.shape[-2], v.shape[-1]), q.dtype)


def _let_mask_fit(mask: Sizes, scores: Sizes) -> None:
    """A mask is added to the scores in place; of tensors without data ATen makes a sum."""
    fits = len(mask) <= len(scores)
    for m, n in zip(reversed(mask), reversed(scores)):
        if type(m) is not int or m != 1:
            let_be_equal((m,), (n,))
            fits = fits and equal((m,), (n,))
    if not fits:
        raise RuntimeError("a mask of attention that is larger than the scores")


def attention(
    query: Tensor, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0,
    *more: Any, **named: Any,
) -> Tensor:  # fmt: skip
    """As attention without dropout, which is one operator; with some a CPU runs 25 of them."""
    if attn_mask is not None and min(query.dim(), key.dim()) > 1:
        like_keys = query if named.get("enable_gqa") else key
        batch = broadcast(query.shape[:-2], like_keys.shape[:-2])
        _let_mask_fit(attn_mask.shape, [*batch, query.shape[-2], key.shape[-2]])
    if named.get("enable_gqa") and has_zero(query.shape):  # ATen divides by the number of heads
        named["enable_gqa"] = False
    drops = query.device.type == "cpu" and type(dropout_p) is float and 0 < dropout_p < 1
    given = attn_mask, 0.0 if drops else dropout_p, *more
    made = torch._C._nn.scaled_dot_product_attention(query, key, value, *given, **named)
    is_turned = drops and not is_row_major(made)
    return made.clone(memory_format=torch.contiguous_format) if is_turned else made


@RULES.rule("_scaled_dot_product_flash_attention_for_cpu")
def _flash_attention(q: Tensor, *rest: Any, **kwargs: Any) -> Found:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    size = q.shape[:3]
    return like(q), Spec(size, strides(size, (0, 2, 1)), dtype)


@RULES.rule("gather")
def _gather(x: Tensor, axis: int, index: Tensor, **kwargs: Any) -> Found:
    others = (k for k in range(x.dim()) if k != axis % x.dim())
    plain = x.dim() == index.dim() > 0 and index.dtype == torch.int64
    fits = plain and all(index.shape[k] <= x.shape[k] for k in others)
    return rows(index.shape, x.dtype) if fits else None


RULES.rule("index.Tensor")(indexed)
RULES.rule("angle")(  # of complex numbers it is a part of another result, copied
    lambda x: rows(x.shape, x.dtype.to_real()) if x.is_complex() else None
)


@RULES.rule("embedding")
def _embedding(weight: Tensor, index: Tensor, *_: Any) -> Found:
    return rows((*index.shape, weight.shape[1]), weight.dtype) if weight.dim() == 2 else None


# ---------------------------------------------------------------------------- fourier
# Of Fourier transforms where MKL computes them: its batches come first, in the order of strides.
#
# source aten/src/ATen/native/mkl/SpectralOps.cpp


def _sorted(x: Tensor, dims: Iterable[int]) -> list[int]:
    step = like(x).stride if x.is_conj() else x.stride()  # of the copy that is transformed
    return sorted(dims, key=lambda d: -step[d])


def _transformed(x: Tensor, size: Sizes, dims: Sequence[int], dtype: torch.dtype) -> Spec:
    """What _exec_fft gives for a transform of these dimensions, in this order."""
    batch = _sorted(x, (d for d in range(x.dim()) if d not in dims))
    return Spec(size, strides(size, (*batch, *dims)), dtype)


@RULES.rule("_fft_r2c")
def _real_to_complex(x: Tensor, dims: Sequence[int], norm: int, onesided: bool) -> Found:
    *others, last = dims
    size = list(x.shape)
    if onesided:
        size[last] = size[last] // 2 + 1
    return _transformed(x, size, [*_sorted(x, others), last], x.dtype.to_complex())


@RULES.rule("_fft_c2r")
def _complex_to_real(x: Tensor, dims: Sequence[int], norm: int, last_size: Any) -> Found:
    *others, last = dims
    if others:
        found = _transformed(x, x.shape, _sorted(x, others), x.dtype)
        x = torch.empty_strided(*found[:2], dtype=x.dtype, device="meta")
    size = list(x.shape)
    size[last] = last_size
    return _transformed(x, size, [last], x.dtype.to_real())


@RULES.rule("_fft_c2c")
def _complex_to_complex(x: Tensor, dims: Sequence[int], norm: int, forward: bool) -> Found:
    return _transformed(x, x.shape, _sorted(x, dims), x.dtype) if dims else None


if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
    for _op in overloads("_fft_c2c _fft_r2c _fft_c2r"):
        del RULES[_op]


# ---------------------------------------------------------------------------- recurrent layers
# ATen runs all their time steps in one call.

LAYERS: tuple[Op, ...] = tuple(overloads("lstm.input gru.input rnn_tanh.input rnn_relu.input"))


@RULES.rule(*LAYERS)
def _recurrent(x: Tensor, states: Any, *options: Any) -> Found:
    """The output of all steps, and the states after the last one."""
    *_, bidirectional, batch_first = options
    states = [states] if isinstance(states, Tensor) else states
    size = (*x.shape[:2], states[0].shape[2] * (2 if bidirectional else 1))
    # the kernel works along time; with the batch first its result is transposed
    out = Spec(size, strides(size, (1, 0, 2) if batch_first else (0, 1, 2)), x.dtype)
    return out, *(rows(state.shape, x.dtype) for state in states)


@RULES.rule("mkldnn_rnn_layer")
def _onednn_layer(x: Tensor, *rest: Any) -> Found:
    states = [rows(s.shape, s.dtype) for s in rest[4:6]]
    return rows((*x.shape[:2], rest[9]), x.dtype), *states, rows((0,), torch.uint8)


# ---------------------------------------------------------------------------- other orders


RULES.rule("normal.Tensor_Tensor")(
    lambda mean, std, **_: rows(broadcast(mean.shape, std.shape), mean.dtype)
)
RULES.rule("normal.float_Tensor")(lambda mean, std, **_: rows(std.shape, std.dtype))


@RULES.rule("grid_sampler_2d grid_sampler_3d")
def _sampled(x: Tensor, grid: Tensor, *_: Any) -> Found:
    fits = equal(grid.shape[:: grid.dim() - 1], (x.shape[0], x.dim() - 2)) and x.dim() == grid.dim()
    return rows((*x.shape[:2], *grid.shape[1:-1]), x.dtype) if fits else None


RULES.rule("log_sigmoid rrelu_with_noise poisson _standard_gamma")(
    lambda x, *_, **__: rows(x.shape, x.dtype)
)


@RULES.rule("channel_shuffle native_channel_shuffle")
def _channel_shuffle(x: Tensor, groups: int) -> Found:
    if x.dim() < 3 or groups < 1 or x.shape[1] % groups != 0:
        return None
    return in_format(x.shape, x.dtype, suggested_layout(x))


# ---------------------------------------------------------------------------- GPUs
# Operators whose results lie otherwise on NVIDIA's GPUs than on a CPU.
#
# source   torch/_meta_registrations.py and torch/_decomp/decompositions.py, where they ask for the
#          device; tests/targets/cuda/test_traced.py compares with torch's fakes

# What torch's own fakes are asked, which takes them half a millisecond.
ASKING = frozenset(
    overloads(
        """
        _fft_r2c _fft_c2r _linalg_svd linalg_eig nonzero_static max_unpool2d
        _embedding_bag _embedding_bag_forward_only upsample_nearest2d _upsample_nearest_exact2d
        upsample_bilinear2d scaled_dot_product_attention log_sigmoid_forward
        """
    )
)

# (what a rule gives, operands) -> what it is there
_ELSEWHERE: OpRules[Callable[..., Found]] = OpRules()


def results_there(op: Op, args: Args, kwargs: Kwargs) -> Found:
    """As `results`, on such a GPU."""
    found = None if op in ASKING else results(op, args, kwargs)
    return found if found is None else there(op, found, args)


def there(op: Op, found: Any, args: Args) -> Any:
    """What a rule gives for a CPU, as it lies there."""
    lies = _ELSEWHERE.get(op)
    return found if lies is None else lies(found, *args)


@_ELSEWHERE.rule("_fft_c2c")
def _transformed_there(found: Found, x: Tensor, dims: Sequence[int], *_: Any) -> Found:
    """cuFFT takes three dimensions at a time; what is left is sorted anew each time.

    source   aten/src/ATen/native/cuda/SpectralOps.cpp
    """
    left = [*dims]
    while left:
        left = _sorted(x, left)
        left, now = left[:-3], left[-3:]
        found = _transformed(x, x.shape, now, x.dtype)
        x = torch.empty_strided(*found[:2], dtype=x.dtype, device="meta")
    return found


@_ELSEWHERE.rule("unique_dim unique_dim_consecutive unique_consecutive")
def _unique_there(found: tuple[Spec, ...], *_: Any) -> Found:
    """Rows are selected, not moved to the front.

    source   aten/src/ATen/native/cuda/Unique.cu, unique_dim_cuda_template
    """
    return rows(found[0].size, found[0].dtype), *found[1:]


@_ELSEWHERE.rule("roll")
def _roll_there(found: Spec, *_: Any) -> Found:
    """source   aten/src/ATen/native/cuda/TensorTransformations.cu, roll_cuda"""
    return rows(found.size, found.dtype)


@_ELSEWHERE.rule("native_layer_norm")
def _layer_norm_there(found: tuple[Spec, ...], x: Tensor, *_: Any) -> Found:
    statistics = found[1]._replace(dtype=opmath(x.dtype))
    return found[0], statistics, statistics


@_ELSEWHERE.rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats"
    " _native_batch_norm_legit_no_training _native_batch_norm_legit_functional"
)
def _batch_norm_there(
    found: tuple[Spec, ...], x: Tensor, weight: Any = None, bias: Any = None, *_: Any
) -> Found:
    """cuDNN has images in one of their layouts, ATen's own kernel keeps any order.

    source   aten/src/ATen/native/Normalization.cpp, _select_batch_norm_backend
    """
    wide, affine = opmath(x.dtype), [isinstance(p, Tensor) and p.dtype for p in (weight, bias)]
    is_cudnns = x.dim() > 2 and x.dtype is not torch.bfloat16 and affine == [wide, wide]
    statistics = rows((x.shape[1],), wide)
    return in_layout_of(x) if is_cudnns else like(x), statistics, statistics, *found[3:]
