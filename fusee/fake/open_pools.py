"""Pools whose windows, or results, have open sizes where ATen takes ints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusee.fake.torch_python import with_open_ints

aten = torch.ops.aten


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
        flat = [y for x in given.values() for y in (x if isinstance(x, (list, tuple)) else (x,))]
        if not any(isinstance(y, torch.SymInt) for y in flat):
            return of_known(input, *args, **named)
        rows = {a.name: filled(a, given.get(a.name)) for a in arguments}
        found = _Pool.apply(op, input, rows)  # type: ignore[no-untyped-call]
        return found[which] if isinstance(found, tuple) else found

    return pool


def _fractional(of_known: Callable[..., Any], axes: int, places: bool) -> Callable[..., Any]:
    """The form of a function of torch whose result's size is a part of its operand's."""
    name = f"fractional_max_pool{axes}d"
    row = _pool(getattr(torch._C._nn, name), getattr(aten, name).default)

    def pool(
        input: Tensor,
        kernel_size: Any,
        output_size: Any = None,
        output_ratio: Any = None,
        return_indices: bool = False,
        _random_samples: Tensor | None = None,
    ) -> Any:
        ratios = output_ratio if isinstance(output_ratio, (tuple, list)) else ()
        is_known = output_size is None and len(ratios) != axes
        if is_known or input.dim() - axes not in (1, 2):
            given = output_size, output_ratio, return_indices, _random_samples
            return of_known(input, kernel_size, *given)
        whole: Any = torch.sym_int
        size = output_size
        if size is None:
            size = [whole(n * part) for n, part in zip(input.shape[-axes:], ratios)]
        if (samples := _random_samples) is None:
            lead = 1 if input.dim() == axes + 1 else input.shape[0]
            shape = lead, input.shape[-axes - 1], axes
            samples = torch.rand(shape, dtype=input.dtype, device=input.device)
        found = row(input, kernel_size, size, samples)
        return found if places or return_indices else found[0]

    return pool


_nn = torch._C._nn
_max_pool2d = _pool(torch.max_pool2d, aten.max_pool2d_with_indices.default, 0)
_max_and_places = _pool(_nn.max_pool2d_with_indices, aten.max_pool2d_with_indices.default)
_avg_pool2d = _pool(_nn.avg_pool2d, aten.avg_pool2d.default)
_adaptive_max_pool2d = _pool(_nn.adaptive_max_pool2d, aten.adaptive_max_pool2d.default)


def _row(n: Any, first: int = 1) -> tuple[Any, ...]:
    return (first, *(n if isinstance(n, (tuple, list)) else (n,)))


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
    return tuple(x.squeeze(-2) for x in found) if return_indices else found.squeeze(-2)


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


# By function of torch.
POOLS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.max_pool1d, F.max_pool1d), _max_pool1d),
    torch.max_pool1d_with_indices: functools.partial(_max_pool1d, return_indices=True),
    torch.avg_pool1d: _avg_pool1d,
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
    **{
        getattr(_nn, name): _pool(getattr(_nn, name), getattr(aten, name).default)
        for name in (
            "max_pool3d_with_indices avg_pool3d adaptive_max_pool3d fractional_max_pool2d"
            " fractional_max_pool3d"
        ).split()
    },
    F.fractional_max_pool2d: _fractional(F.fractional_max_pool2d, 2, False),
    F.fractional_max_pool3d: _fractional(F.fractional_max_pool3d, 3, False),
    F.fractional_max_pool2d_with_indices: _fractional(
        F.fractional_max_pool2d_with_indices, 2, True
    ),
    F.fractional_max_pool3d_with_indices: _fractional(
        F.fractional_max_pool3d_with_indices, 3, True
    ),
}
