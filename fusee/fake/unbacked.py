"""Operators of whose results only the data knows the size, and what those look like.

Each such size is a new unbacked symbol. Whoever runs the operator reads it off the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from fusee.fake.layouts import Spec, broadcast, rows, strides
from fusee.fake.rules import Found, Op, overload, overloads
from fusee.sym.expr import Size
from fusee.sym.shape_env import ShapeEnv, SizeNode, size_of, wrapped

# A rule that is given the ShapeEnv for its new symbols first.
UNBACKED: dict[Op, Callable[..., Found]] = {}


def _rule(*ops: Op) -> Callable[[Callable[..., Found]], Callable[..., Found]]:
    def register(function: Callable[..., Found]) -> Callable[..., Found]:
        UNBACKED.update(dict.fromkeys(ops, function))
        return function

    return register


def _new(env: ShapeEnv, lo: int = 0) -> Any:
    return wrapped(env, env.data.new(lo))


@_rule(overload("nonzero"))
def _nonzero(env: ShapeEnv, x: Tensor) -> Spec:
    count = wrapped(env, env.data.count(x))
    return Spec((count, x.dim()), (1, count), torch.int64)


@_rule(overload("masked_select"))
def _masked_select(env: ShapeEnv, x: Tensor, mask: Tensor) -> Spec:
    broadcast(x.shape, mask.shape)
    return rows((_new(env),), x.dtype)


@_rule(overload("repeat_interleave.Tensor"))
def _repeat_interleave(env: ShapeEnv, repeats: Tensor, output_size: Any = None) -> Spec:
    return rows((_new(env) if output_size is None else output_size,), torch.int64)


@_rule(overload("bincount"))
def _bincount(env: ShapeEnv, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Spec:
    dtype = torch.int64
    if weights is not None:
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return rows((_new(env, minlength if type(minlength) is int else 0),), dtype)


@_rule(overload("_unique2"))
def _unique(
    env: ShapeEnv, x: Tensor, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Spec, ...]:
    count = _new(env)
    places = rows(x.shape if inverse else (0,), torch.int64)
    return rows((count,), x.dtype), places, rows((count if counts else 0,), torch.int64)


@_rule(overload("unique_consecutive"))
def _unique_consecutive(
    env: ShapeEnv, x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[Spec, ...]:
    if dim is not None:
        return _of_rows(env, x, dim)
    count = _new(env)
    places = rows(x.shape if inverse else (0,), torch.int64)
    return rows((count,), x.dtype), places, rows((count if counts else 0,), torch.int64)


@_rule(*overloads("unique_dim unique_dim_consecutive"))
def _unique_dim(env: ShapeEnv, x: Tensor, dim: int, *_: Any, **__: Any) -> tuple[Spec, ...]:
    return _of_rows(env, x, dim)


def _of_rows(env: ShapeEnv, x: Tensor, dim: int) -> tuple[Spec, ...]:
    count, size, dim = _new(env), list(x.shape), dim % x.dim()
    length, size[dim] = size[dim], count
    order = (dim, *(k for k in range(x.dim()) if k != dim))  # it is moved to the front, and back
    made = Spec(size, strides(size, order), x.dtype)
    return made, rows((length,), torch.int64), rows((count,), torch.int64)


# ---------------------------------------------------------------------------- slices


def narrowed(
    x: Tensor, axis: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> tuple[Any, Any] | None:
    """Start and end of a slice with bounds that only data knows, inside the axis; None: others."""
    given = [at for at in (start, end) if type(at) is torch.SymInt]
    env = next((at.node.env for at in given if type(at.node) is SizeNode), None)
    if env is None or step != 1 or not env.data.of(*(at.node.size for at in given)):
        return None
    stop = sys.maxsize if end is None else end
    n, *bounds = map(_known, (x.shape[axis], 0 if start is None else start, stop))
    first, last = (env.data.inside(at, n) for at in bounds)
    return wrapped(env, first), wrapped(env, first + env.data.least_0(last - first))


def selected(x: Tensor, axis: int, index: Any) -> Any:
    """The index of a selection from the start on, if only data knows it; None: another."""
    if type(index) is not torch.SymInt or not isinstance(index.node, SizeNode):
        return None
    env, n = index.node.env, x.shape[axis]
    if not env.data.of(index.node.size):
        return None
    return wrapped(env, env.data.place(_known(index), _known(n)))


def _known(n: Any) -> Size:
    size = n if type(n) is int else size_of(n)
    assert size is not None
    return size


def select_geometry(x: Tensor, axis: int, index: Any) -> tuple[Any, Any, Any] | None:
    """Size, strides and offset of such a selection."""
    place = selected(x, axis, index)
    if place is None:
        return None
    size, stride = list(x.shape), list(x.stride())
    size.pop(axis)
    return size, stride, x.storage_offset() + place * stride.pop(axis)


def slice_geometry(
    x: Tensor, axis: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> tuple[Any, Any, Any] | None:
    """Size, strides and offset of such a slice."""
    ends = narrowed(x, axis, start, end, step)
    if ends is None:
        return None
    size, stride = list(x.shape), x.stride()
    size[axis] = ends[1] - ends[0]
    return size, stride, x.storage_offset() + ends[0] * stride[axis]


# By operator: how its result lies, if only data knows where it begins or ends.
GEOMETRIES: dict[Op, Callable[..., tuple[Any, Any, Any] | None]] = {
    overload("slice.Tensor"): slice_geometry,
    overload("select.int"): select_geometry,
}


def unbacked_env(graph: fx.Graph) -> ShapeEnv | None:
    """That of a captured graph with sizes that only data knows; None if it has none."""
    env, is_needed = ShapeEnv(), False
    env.is_over = True
    for node in graph.nodes:
        value = node.meta.get("example_value")
        for x in value if isinstance(value, (tuple, list)) else (value,):
            numbers: Iterable[Any] = x.shape if isinstance(x, Tensor) else (x,)
            for n in numbers:
                if type(n) is torch.SymInt and isinstance(n.node, SizeNode):
                    env = n.node.env
                    is_needed = is_needed or bool(env.data.of(n.node.size))
        is_needed = is_needed or _takes_at_a_mask(node)
    return env if is_needed else None


def _takes_at_a_mask(node: fx.Node) -> bool:
    """Whether the gradient of a call is what is found where a mask is true."""
    name = str(getattr(node.target, "__name__", node.target))
    if name.partition(".")[0].strip("_") not in ("setitem", "index_put"):
        return False
    vals = [x.meta.get("example_value") for x in node.all_input_nodes]
    masks = any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in vals[1:])
    return masks and isinstance(vals[-1], Tensor) and vals[-1].requires_grad
