"""Operators of open sizes: views, new tensors, pools, and results of unknown size.

torch's kernels in C++ take known sizes alone, and those in Python ask about each size. Where a rule
returns None, or raises Unsure, torch is to say what comes out, or what is wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusee.fake.layouts import (
    Sizes,
    Spec,
    Unsure,
    broadcast,
    equal,
    has_zero,
    indexed,
    is_empty,
    is_row_major,
    is_transforming,
    is_written,
    known,
    let_be_as_many,
    let_be_equal,
    let_be_sizes,
    like,
    rows,
    same_ints,
    strides,
    view_strides,
)
from fusee.fake.rules import RULES, Found, Op, columns, pooled, reduced, there
from fusee.fake.torch_python import with_open_ints
from fusee.source import Args, Kwargs, OpRules, Rules, leaves, overload, overloads
from fusee.sym.shape_env import ShapeEnv, SizeNode, known_size, wrapped

aten = torch.ops.aten

Run = Callable[..., Any]

# By operator, of meta tensors; makers give a meta tensor, too.
OPEN_VIEWS: OpRules[Run] = OpRules()
OPEN_MAKERS: OpRules[Run] = OpRules()


def _strided(x: Tensor, size: Sizes, stride: Sizes, more: Any = 0) -> Tensor:
    return x.as_strided(size, stride, x.storage_offset() + more)


def _axis(axis: int, rank: int) -> int:
    if axis not in range(-rank, rank):
        raise Unsure  # torch has the error
    return axis % rank


# ---------------------------------------------------------------------------- axes


@OPEN_VIEWS.rule("permute")
def _permuted(x: Tensor, axes: Sequence[int]) -> Tensor | None:
    order = [_axis(k, x.dim()) for k in axes]
    if sorted(order) != [*range(x.dim())]:
        return None
    size, stride = x.shape, x.stride()
    return _strided(x, [size[k] for k in order], [stride[k] for k in order])


def _is_negative(sizes: Sizes) -> bool:
    """Whether an open size is, which eager refuses, or takes for another one."""
    return any(isinstance(n, torch.SymInt) and n < 0 for n in sizes)


@OPEN_VIEWS.rule("expand")
def _expanded(x: Tensor, size: Sizes, implicit: bool = False) -> Tensor | None:
    lead = len(size) - x.dim()
    if lead < 0 or _is_negative(size):
        return None
    sizes, strides = [*size], list[Any]()
    for k, (n, step) in enumerate(zip(x.shape, x.stride()), lead):
        if (type(size[k]) is int and size[k] == -1) or is_written(n, size[k]):
            sizes[k] = n
        elif type(n) is int and n == 1:
            step = 0
        elif not equal((n,), (size[k],)):
            return None
        strides.append(step)
    for k in reversed(range(lead)):  # an axis of one element lies as if there were more of them
        is_one = type(size[k]) is int and size[k] == 1 and x.dim()
        strides.insert(0, sizes[k + 1] * strides[0] if is_one else 0)
    return _strided(x, sizes, strides)


# ---------------------------------------------------------------------------- parts


@OPEN_VIEWS.rule("select.int")
def _selected(x: Tensor, axis: int, index: Any) -> Tensor:
    axis = _axis(axis, x.dim())
    n, at = x.shape[axis], selected(x, axis, index)
    if not 0 <= at < n:  # torch's fake kernel takes any place
        raise IndexError(f"index {index} is out of range for a size of {n}")
    size, stride = [*x.shape], [*x.stride()]
    del size[axis]
    return _strided(x, size, stride[:axis] + stride[axis + 1 :], at * stride[axis])


@OPEN_VIEWS.rule("slice.Tensor")
def _sliced(x: Tensor, axis: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    axis = _axis(axis, x.dim())
    if step < 1:
        return None
    first, last = narrowed(x, axis, start, end, step)
    count = (last - first + (step - 1)) // step if last >= first else 0
    size, stride = [*x.shape], [*x.stride()]
    more = first * stride[axis]
    size[axis], stride[axis] = count, stride[axis] * step
    return _strided(x, size, stride, more)


def _within(at: Any, n: Any, default: Any) -> Any:
    """A bound of a slice, counted from the start of an axis of n and inside it."""
    if at is None or (type(at) is int and at == sys.maxsize):
        return default
    if is_written(at, n):
        return n
    if at < 0:
        at = at + n
        return at if at >= 0 else 0
    return at if at <= n else n


@OPEN_VIEWS.rule("split_with_sizes")
def _split(x: Tensor, sizes: Sizes, axis: int = 0) -> Any:
    axis = _axis(axis, x.dim())
    let_be_equal((sum(sizes),), (x.shape[axis],))
    let_be_sizes(sizes)
    if any(type(n) is int and n < 0 for n in sizes) or sum(sizes) != x.shape[axis]:
        return None
    parts = []
    for k, n in enumerate(sizes):
        size = [*x.shape]
        size[axis] = n
        parts.append(_strided(x, size, x.stride(), sum(sizes[:k]) * x.stride(axis)))
    return parts


@OPEN_VIEWS.rule("split.Tensor unsafe_split.Tensor")
def _split_evenly(x: Tensor, size: Any, axis: int = 0) -> Any:
    axis = _axis(axis, x.dim())
    count = x.shape[axis] // size if size > 0 else size
    if is_written(x.shape[axis], 0):
        return _split(x, [0], axis)
    if type(count) is not int or not is_written(count * size, x.shape[axis]):
        return None
    return _split(x, [size] * count, axis)


@OPEN_VIEWS.rule("unbind.int")
def _unbound(x: Tensor, axis: int = 0) -> Any:
    count = x.shape[_axis(axis, x.dim())]
    return [_selected(x, axis, k) for k in range(count)] if type(count) is int else None


@OPEN_VIEWS.rule("diagonal")
def _diagonal(x: Tensor, offset: int = 0, first: int = 0, second: int = 1) -> Tensor | None:
    a, b = _axis(first, x.dim()), _axis(second, x.dim())
    high, wide = x.shape[a] + min(offset, 0), x.shape[b] - max(offset, 0)
    if a == b:
        return None
    has_any = high > 0 and wide > 0
    kept = [k for k in range(x.dim()) if k not in (a, b)]
    size, stride = [x.shape[k] for k in kept], [x.stride(k) for k in kept]
    more = 0 if not has_any else offset * x.stride(b) if offset > 0 else -offset * x.stride(a)
    size.append(torch.sym_min(high, wide) if has_any else 0)  # type: ignore[no-untyped-call]
    return _strided(x, size, [*stride, x.stride(a) + x.stride(b)], more)


@RULES.rule("diagonal_scatter", view="diagonal")
@RULES.rule("slice_scatter", view="slice.Tensor")
@RULES.rule("select_scatter", view="select.int")
def _scattered(x: Tensor, src: Tensor, *place: Any, view: str, **named: Any) -> Found:
    """What torch's own shape functions put in any place, and ATen refuses."""
    op, part = overload(view), None
    whole = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    with contextlib.suppress(Unsure):
        part = OPEN_VIEWS[op](whole, *place, **named)
    part = op(whole, *place, **named) if part is None else part
    if not same_ints(src.shape, part.shape):
        let_be_equal(src.shape, part.shape)
        if not equal(src.shape, part.shape):
            raise RuntimeError(
                "expected src to have a size equal to the slice of self."
                f" src size = {[*src.shape]}, slice size = {[*part.shape]}"
            )
    # torch 2.11's own let elements of the copy share memory, too
    is_spread = any(type(step) is int and step == 0 for step in x.stride())
    return like(x) if is_spread else Spec(x.shape, x.stride(), x.dtype)


# ---------------------------------------------------------------------------- shapes


@OPEN_VIEWS.rule("view _unsafe_view")
def _viewed(x: Tensor, size: Any, is_asked: bool = True) -> Tensor | None:
    if not isinstance(size, (list, tuple)):
        return None
    sizes = [*size]
    rest = [k for k, n in enumerate(sizes) if type(n) is int and n == -1]
    if len(rest) > 1 or has_zero((*sizes, *x.shape)):
        return None
    if _is_negative(sizes):
        return None
    whole = math.prod(x.shape)
    if rest:
        kept = [n for n in sizes if not (type(n) is int and n == -1)]
        old: Sizes = x.shape
        for n in kept:  # a quotient of products would say less than equal sizes do
            if isinstance(n, torch.SymInt) and not any(is_written(n, m) for m in old):
                open_ones = (m for m in old if isinstance(m, torch.SymInt))
                like = (m for m in open_ones if _now(m) == _now(n) is not None)
                if (found := next(like, None)) is not None:
                    bool(n == found)
        sizes[rest[0]] = whole // math.prod(kept)
    let_be_as_many(x.shape, sizes)
    if math.prod(sizes) != whole:
        return None
    if (steps := view_strides(x.shape, x.stride(), sizes)) is not None:
        return _strided(x, sizes, steps)
    if x.is_contiguous():
        return _strided(x, *rows(sizes, x.dtype)[:2])
    if is_asked and any(type(n) is int and n == 1 for n in x.shape):  # torch's own overlooks these
        if (steps := view_strides(x.shape, x.stride(), sizes, _is_equal)) is not None:
            return _strided(x, sizes, steps)
        raise RuntimeError(
            "view size is not compatible with input tensor's size and stride (at least one"
            " dimension spans across two contiguous subspaces). Use .reshape(...) instead."
        )
    return None


def _is_equal(a: Any, b: Any) -> bool:
    return equal((a,), (b,))


@OPEN_VIEWS.rule("reshape")
def _reshaped(x: Tensor, size: Any) -> Tensor | None:
    found: Tensor | None = _viewed(x, size, is_asked=False)
    if found is not None or not isinstance(size, (list, tuple)):
        return found
    count = math.prod(n for n in size if type(n) is not int or n != -1)
    sizes = [math.prod(x.shape) // count if type(n) is int and n == -1 else n for n in size]
    if has_zero((*sizes, *x.shape)) or math.prod(sizes) != x.numel():
        return None
    steps = view_strides(x.shape, x.stride(), sizes, _is_equal)
    if steps is not None:
        return _strided(x, sizes, steps)
    return torch.empty_strided(*rows(sizes, x.dtype)[:2], dtype=x.dtype, device="meta")


def _now(n: Any) -> int | None:
    """The value of a size in this call; None if only data knows it."""
    is_ours = isinstance(n.node, SizeNode)
    found: int | None = None if is_ours and n.node.env.data.of(n.node.size) else n.node.hint
    return found


# Their kernels take open sizes.
_VIEWS = (
    "alias detach as_strided as_strided_ transpose.int t unsqueeze squeeze squeeze.dim squeeze.dims"
)
OPEN_VIEWS.update({op: op for op in overloads(_VIEWS)})


# ---------------------------------------------------------------------------- makers


@OPEN_MAKERS.rule("arange arange.start arange.start_step")
def _counted(*ends: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor | None:
    start, end, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    if any(type(x) not in (int, torch.SymInt) for x in (start, end, step)):
        return None
    if type(step) is not int or step < 1 or not end >= start:
        return None
    size = ((end - start + (step - 1)) // step,)
    return torch.empty_strided(size, (1,), dtype=dtype or torch.int64, device="meta")


@OPEN_MAKERS.rule_of_each("zeros ones full")
def _dense(op: Op, *given: Any, layout: Any = None, pin_memory: Any = None, **named: Any) -> Any:
    """Without what makes another kind of tensor: no twin is of that kind."""
    if type(given[-1]) is complex and torch.get_default_dtype().itemsize == 2:
        named["dtype"] = named.get("dtype") or torch.complex64  # meta kernels have complex32
    return op(*given, **named)


OPEN_MAKERS.update({op: op for op in overloads("empty.memory_format empty_strided")})


# ---------------------------------------------------------------------------- by C++ alone
# Operators whose meta kernels take known sizes alone, or that have none.


RULES.rule("hash_tensor")(
    lambda x, axes=(), *, keepdim=False, mode=0: rows(reduced(x, axes, keepdim), torch.uint64)
)


@RULES.rule("_sample_dirichlet _dirichlet_grad binomial")
def _drawn(x: Tensor, *more: Tensor | None, generator: Any = None) -> Found:
    given = [x, *(y for y in more if y is not None)]
    is_known = all(y.dtype is x.dtype and equal(y.shape, x.shape) for y in given)
    return rows(x.shape, x.dtype) if is_known and x.dtype in _DRAWN else None


_DRAWN = (torch.float32, torch.float64)


@RULES.rule("geqrf")
def _reflectors(x: Tensor) -> Found:
    if x.dim() < 2:
        return None
    least: Any = torch.sym_min
    return columns(x), rows([*x.shape[:-2], least(*x.shape[-2:])], x.dtype)


@RULES.rule("histogram.bins_tensor")
def _counted_between(x: Tensor, bins: Tensor, **_: Any) -> Found:
    if bins.dim() != 1 or is_empty(bins) or bins.dtype is not x.dtype:
        return None
    return rows([bins.shape[0] - 1], x.dtype), rows(bins.shape, x.dtype)


@RULES.rule("histogram.bin_ct")
def _counted_evenly(x: Tensor, bins: int = 100, **_: Any) -> Found:
    return (rows([bins], x.dtype), rows([bins + 1], x.dtype)) if bins > 0 else None


@RULES.rule("_histogramdd_bin_edges")
def _edges(x: Tensor, bins: Sequence[int], **_: Any) -> Found:
    return tuple([rows([n + 1], x.dtype) for n in bins]) if _has_columns(x, bins) else None


RULES.rule("_histogramdd_from_bin_cts")(
    lambda x, bins, **_: rows(bins, x.dtype) if _has_columns(x, bins) else None
)


@RULES.rule("_histogramdd_from_bin_tensors")
def _counted_in_given_boxes(x: Tensor, bins: Sequence[Tensor], **_: Any) -> Found:
    if not _has_columns(x, bins) or any(b.dim() != 1 or b.dtype is not x.dtype for b in bins):
        return None
    return rows([b.shape[0] - 1 for b in bins], x.dtype)


def _has_columns(x: Tensor, bins: Sequence[Any]) -> bool:
    """Whether there is a row of bins for each coordinate."""
    return x.dim() > 1 and equal(x.shape[-1:], [len(bins)])


@RULES.rule("_trilinear")
def _trilinear(a: Tensor, b: Tensor, c: Tensor, *axes: Sequence[int], unroll_dim: int = 1) -> Spec:
    *added, gone = axes[:4]
    shapes = []
    for x, places in zip((a, b, c), added):
        size = [*x.shape]
        for k in sorted(places):
            size.insert(k, 1)
        shapes.append(size)
    return rows([n for k, n in enumerate(broadcast(*shapes)) if k not in gone], a.dtype)


# ---------------------------------------------------------------------------- pools
# Their rules, and functions of torch of which ATen takes windows and results' sizes as ints.


@RULES.rule("fractional_max_pool2d", axes=2)
@RULES.rule("fractional_max_pool3d", axes=3)
def _fractional_max_pool(
    x: Tensor, kernel: Sizes, size: Sizes, samples: Tensor, *, axes: int
) -> Found:
    fits = x.dim() - axes in (1, 2) and len(kernel) == len(size) == axes
    inner = zip(x.shape[-axes:], kernel, size)
    if not fits or is_empty(x) or not all(n >= k + m - 1 for n, k, m in inner):
        return None
    lead = x.shape[:1] if x.dim() == axes + 2 else (1,)
    if not equal(samples.shape, [*lead, x.shape[-axes - 1], axes]):
        return None
    made = [*x.shape[:-axes], *size]
    return rows(made, x.dtype), rows(made, torch.int64)


@RULES.rule("adaptive_max_pool2d", axes=2)
@RULES.rule("adaptive_max_pool3d", axes=3)
def _adaptive_max_pool(x: Tensor, size: Sizes, *, axes: int) -> Found:
    if x.dim() - axes not in (1, 2) or len(size) != axes or is_empty(x):
        return None
    if not is_row_major(x) or known((*x.shape, *size)):
        return None
    made = [*x.shape[:-axes], *size]
    return rows(made, x.dtype), rows(made, torch.int64)


@RULES.rule("avg_pool3d")
def _avg_pool3d(
    x: Tensor, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), ceil: bool = False, *_: Any
) -> Found:
    size = pooled(x, kernel, stride, padding, (1,), ceil, 3)
    return rows(size, x.dtype) if is_row_major(x) and not known(size) else None


@RULES.rule(
    "avg_pool2d_backward avg_pool3d_backward max_pool3d_with_indices_backward"
    " adaptive_max_pool2d_backward"
)
def _unpooled_rows(grad: Tensor, x: Tensor, *_: Any) -> Found:
    return rows(x.shape, x.dtype) if is_row_major(x) and not known(x.shape) else None


class _Pool(torch.autograd.Function):
    """A pool of ATen's, below autograd. Its gradient's arguments are named as its own."""

    @staticmethod
    def forward(ctx: Any, op: Any, x: Tensor, given: dict[str, Any]) -> Any:
        found = with_open_ints(op, x, *given.values())
        places = found[1:] if isinstance(found, tuple) else ()
        ctx.name, ctx.given = op._schema.name.partition("::")[2], given
        ctx.save_for_backward(x, *places)
        ctx.mark_non_differentiable(*places)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op = getattr(aten, f"{ctx.name}_backward").default
        known = {**ctx.given, "grad_output": grads[0]}
        known.update(zip(("self", "indices"), ctx.saved_tensors))
        return None, with_open_ints(op, *(known[a.name] for a in op._schema.arguments)), None


def _pool(of_known: Callable[..., Any], op: Any, which: Any = slice(None)) -> Callable[..., Any]:
    """The form of a function that calls a pool of ATen's; `which`: of its results."""
    _, *arguments = op._schema.arguments

    def filled(a: Any, value: Any) -> Any:
        if value is None:
            value = a.default_value if a.has_default_value() else []
        is_one = str(a.type) == "List[int]" and not isinstance(value, (list, tuple))
        return [value] * a.N if is_one else value

    def pool(input: Tensor, *args: Any, **named: Any) -> Any:
        given = {**dict(zip((a.name for a in arguments), args)), **named}
        if is_transforming() or not any(isinstance(y, torch.SymInt) for y in leaves(given)):
            return of_known(input, *args, **named)
        rows = {a.name: filled(a, given.get(a.name)) for a in arguments}
        found = _Pool.apply(op, input, rows)  # type: ignore[no-untyped-call]
        return found[which] if isinstance(found, tuple) else found

    return pool


_nn = torch._C._nn
# By function of torch; what gives None lets the function run itself.
POOLS: Rules[Any, Run] = Rules(
    {
        getattr(_nn, name): _pool(getattr(_nn, name), getattr(aten, name).default)
        for name in (
            "max_pool3d_with_indices avg_pool3d adaptive_max_pool3d fractional_max_pool2d"
            " fractional_max_pool3d"
        ).split()
    }
)


@POOLS.rule(F.fractional_max_pool2d, axes=2)
@POOLS.rule(F.fractional_max_pool3d, axes=3)
@POOLS.rule(F.fractional_max_pool2d_with_indices, axes=2, places=True)
@POOLS.rule(F.fractional_max_pool3d_with_indices, axes=3, places=True)
def _fractional(
    input: Tensor,
    kernel_size: Any,
    output_size: Any = None,
    output_ratio: Any = None,
    return_indices: bool = False,
    _random_samples: Tensor | None = None,
    *,
    axes: int,
    places: bool = False,
) -> Any:
    """The size of the result is a part of the operand's."""
    ratios = output_ratio if isinstance(output_ratio, (tuple, list)) else ()
    is_known = output_size is None and len(ratios) != axes
    if is_known or input.dim() - axes not in (1, 2):
        return None
    whole: Any = torch.sym_int
    size = output_size
    if size is None:
        size = [whole(n * part) for n, part in zip(input.shape[-axes:], ratios)]
    if (samples := _random_samples) is None:
        lead = 1 if input.dim() == axes + 1 else input.shape[0]
        shape = lead, input.shape[-axes - 1], axes
        samples = torch.rand(shape, dtype=input.dtype, device=input.device)
    pool = POOLS[getattr(_nn, f"fractional_max_pool{axes}d")]
    found = pool(input, kernel_size, size, samples)
    return found if places or return_indices else found[0]


_max_pool2d = _pool(torch.max_pool2d, aten.max_pool2d_with_indices.default, 0)
_max_and_places = _pool(_nn.max_pool2d_with_indices, aten.max_pool2d_with_indices.default)
_avg_pool2d = _pool(_nn.avg_pool2d, aten.avg_pool2d.default)
_adaptive_max_pool2d = _pool(_nn.adaptive_max_pool2d, aten.adaptive_max_pool2d.default)


def _row(n: Any, first: int = 1) -> tuple[Any, ...]:
    return (first, *(n if isinstance(n, (tuple, list)) else (n,)))


@POOLS.rule(torch.max_pool1d, F.max_pool1d)
@POOLS.rule(torch.max_pool1d_with_indices, return_indices=True)
def _max_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """F.max_pool1d, of images of one row."""
    windows = _row(kernel_size), _row(stride or kernel_size), _row(padding, 0), _row(dilation)
    images = _max_and_places if return_indices else _max_pool2d
    found = images(input.unsqueeze(-2), *windows, ceil_mode)
    if return_indices:
        return tuple(x.squeeze(-2) for x in found)
    has_places = (input.requires_grad and torch.is_grad_enabled()) or input.device.type != "cpu"
    return found.squeeze(-2) if has_places else found.squeeze(-2).contiguous()  # as ATen does


@POOLS.rule(torch.avg_pool1d)
def _avg_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    *options: Any,
    **named: Any,
) -> Any:
    windows = _row(kernel_size), _row(stride or kernel_size), _row(padding, 0)
    return _avg_pool2d(input.unsqueeze(-2), *windows, *options, **named).squeeze(-2)


POOLS |= {
    torch.adaptive_max_pool1d: lambda input, output_size: tuple(
        x.squeeze(-2) for x in _adaptive_max_pool2d(input.unsqueeze(-2), _row(output_size))
    ),
    torch.adaptive_avg_pool1d: lambda input, output_size: _nn.adaptive_avg_pool2d(
        input.unsqueeze(-2), _row(output_size)
    ).squeeze(-2),
    torch.max_pool2d: _max_pool2d,
    torch.max_pool3d: _pool(torch.max_pool3d, aten.max_pool3d_with_indices.default, 0),
    _nn.max_pool2d_with_indices: _max_and_places,
    _nn.avg_pool2d: _avg_pool2d,
    _nn.adaptive_max_pool2d: _adaptive_max_pool2d,
}


# ---------------------------------------------------------------------------- unbacked
# Operators of whose results only the data knows the size, and what those look like.
#
# Each such size is a new unbacked symbol. Whoever runs the operator reads it off the result.

# A rule that is given the ShapeEnv for its new symbols first.
UNBACKED: OpRules[Callable[..., Found]] = OpRules()


def unbacked(env: ShapeEnv, op: Op, args: Args, kwargs: Kwargs, device: torch.device) -> Found:
    """What a rule of these gives on a device."""
    found = UNBACKED[op](env, *args, **kwargs)
    return there(op, found, args) if device.type == "cuda" else found


def _unbacked_size(env: ShapeEnv, lo: int = 0) -> Any:
    return wrapped(env, env.data.new(lo))


@UNBACKED.rule("nonzero")
def _nonzero(env: ShapeEnv, x: Tensor) -> Spec:
    count = wrapped(env, env.data.count(x))
    return Spec((count, x.dim()), (1, count), torch.int64)


@UNBACKED.rule("masked_select")
def _masked_select(env: ShapeEnv, x: Tensor, mask: Tensor) -> Spec:
    broadcast(x.shape, mask.shape)
    return rows((_unbacked_size(env),), x.dtype)


@UNBACKED.rule("repeat_interleave.Tensor")
def _repeat_interleave(env: ShapeEnv, repeats: Tensor, output_size: Any = None) -> Spec:
    return rows((_unbacked_size(env) if output_size is None else output_size,), repeats.dtype)


@UNBACKED.rule("bincount")
def _bincount(env: ShapeEnv, x: Tensor, weights: Tensor | None = None, minlength: Any = 0) -> Spec:
    dtype = torch.int64
    if weights is not None:
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    count = _unbacked_size(env, minlength if type(minlength) is int else 0)
    if type(minlength) is torch.SymInt:
        env.note(known_size(count), ">=", known_size(minlength))
    return rows((count,), dtype)


@UNBACKED.rule("_unique2")
def _unique(
    env: ShapeEnv, x: Tensor, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Spec, ...]:
    count = _unbacked_size(env)
    places = rows(x.shape if inverse else (0,), torch.int64)
    return rows((count,), x.dtype), places, rows((count if counts else 0,), torch.int64)


@UNBACKED.rule("unique_consecutive")
def _unique_consecutive(
    env: ShapeEnv, x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> Found:
    return _unique(env, x, True, inverse, counts) if dim is None else _of_rows(env, x, dim)


@UNBACKED.rule("unique_dim unique_dim_consecutive")
def _of_rows(env: ShapeEnv, x: Tensor, dim: int, *_: Any, **__: Any) -> tuple[Spec, ...]:
    count, size, dim = _unbacked_size(env), list(x.shape), dim % x.dim()
    length, size[dim] = size[dim], count
    order = (dim, *(k for k in range(x.dim()) if k != dim))  # it is moved to the front, and back
    made = Spec(size, strides(size, order), x.dtype)
    return made, rows((length,), torch.int64), rows((count,), torch.int64)


@RULES.rule("index_add index_copy")
def _rows_put(x: Tensor, axis: int, index: Tensor, source: Tensor, **_: Any) -> None:
    """As many rows as places, of the size of the others, or eager raises. The rest is torch's."""
    if x.dim() and source.dim() and index.dim():
        at = _axis(axis, source.dim())
        let_be_equal((source.shape[at],), index.shape)
        if x.dim() == source.dim():  # torch's own metas let one row's elements stand for several
            other, row = ([*y.shape[:at], *y.shape[at + 1 :]] for y in (source, x))
            let_be_equal(other, row)
            if not equal(other, row):
                raise RuntimeError(
                    "source tensor shape must match self tensor shape, excluding dim"
                )


@RULES.rule("linalg_vector_norm")
def _of_known_order(x: Tensor, order: Any = 2, *_: Any, **__: Any) -> None:
    """Each has a formula of its own. The rest is torch's to say."""
    float(order)


@RULES.rule("scatter.src scatter.reduce scatter_add scatter_reduce.two")
def _elements_placed(x: Tensor, axis: int, index: Tensor, source: Any, *_: Any, **__: Any) -> None:
    """As many places as elements where these have gradients, or eager's backward raises."""
    if isinstance(source, Tensor) and source.requires_grad:
        let_be_equal(index.shape, source.shape)


@RULES.rule("index_select")
def _number_selected(x: Tensor, axis: int, index: Tensor) -> None:
    """Of a number one place, or eager raises. torch's own meta does not look."""
    if not x.dim() and index.dim():
        let_be_equal(index.shape, (1,))
        if not equal(index.shape, (1,)):
            raise RuntimeError("index_select() of a number takes one index")


@RULES.rule("im2col")
def _blocks(x: Tensor, kernel: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes) -> None:
    """torch's own meta looks at all but the padding."""
    if any(n < 0 for n in padding):
        raise RuntimeError("padding should be non-negative")


@RULES.rule("put")
def elements_put(x: Tensor, index: Tensor, source: Tensor, *_: Any, **__: Any) -> None:
    """As many elements as places, or eager raises. torch's own metas do not look."""
    let_be_as_many(index.shape, source.shape)
    if not equal((index.numel(),), (source.numel(),)):
        raise IndexError("put_() needs one element for each place")


@RULES.rule("index_put index_put_ _index_put_impl_ _unsafe_index_put")
def _values_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *_: Any, **__: Any
) -> None:
    """The same of values that are spread over the places; where masks choose, it is seen later."""
    given, at = [index for index in indices if index is not None], 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            size = x.shape[at : at + index.dim()]
            let_be_equal(size, index.shape)
            if not equal(size, index.shape):  # torch's own metas do not look
                what = "The shape of the mask does not match the shape of the indexed tensor"
                raise IndexError(what)
            at += index.dim() - 1
        at += 1
    for index, other in itertools.combinations(given, 2):
        _let_spread(index.shape, other.shape)
    if (found := indexed(x, indices, torch.int32)) is not None:
        _let_spread(values.shape, found.size)
        if not equal(broadcast(values.shape, found.size), found.size):
            raise RuntimeError("index_put_() of values that do not fit the places")


def _let_spread(a: Sizes, b: Sizes) -> None:
    """Let sizes broadcast that only data knows, as ones that are equal."""
    for n, m in zip(reversed(a), reversed(b)):
        if not any(type(size) is int and size == 1 for size in (n, m)):
            let_be_equal((n,), (m,))


# ---------------------------------------------------------------------------- slices


def narrowed(
    x: Tensor, axis: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> tuple[Any, Any]:
    """Start and end of a slice, from the start of an axis on and inside it.

    If only data knows one of these, no place is asked for but one that an axis of two has: an axis
    too short runs eagerly.
    """
    n = x.shape[axis]
    ends = [at for at in (start, end) if at is not None and type(at) is not torch.SymInt]
    is_far = any(abs(at) > 2 and at != sys.maxsize for at in ends)
    given = [at for at in (start, end, n if is_far else 0) if type(at) is torch.SymInt]
    env = next((at.node.env for at in given if type(at.node) is SizeNode), None)
    if env is None or step != 1 or not env.data.of(*(at.node.size for at in given), known_size(n)):
        return _within(start, n, 0), _within(end, n, n)
    bounds = 0 if start is None else start, sys.maxsize if end is None else end
    first, last = (env.data.inside(known_size(at), known_size(n)) for at in bounds)
    return wrapped(env, first), wrapped(env, first + env.data.least_0(last - first))


def selected(x: Tensor, axis: int, index: Any) -> Any:
    """The index of a selection from the start on; whether there is one is asked if only data
    knows it."""
    n = x.shape[axis]
    if type(index) is torch.SymInt and isinstance(index.node, SizeNode):
        env, at = index.node.env, index.node.size
        if env.data.of(at):
            return wrapped(env, env.data.place(at, known_size(n)))
    return index + n if index < 0 else index
