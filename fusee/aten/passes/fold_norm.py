"""Batch norm in inference becomes part of the layer before it, or one factor and one addend.

    conv(x, w, b) -> batch_norm     =>  conv(x, w', b')         if nothing else sees the convolution
    linear(x, w, b) -> batch_norm   =>  linear(x, w', b')       for 2-d results
    batch_norm(x)                   =>  x * scale + shift       otherwise

w', b', scale and shift are derived from parameters, in float64. The last form is what eager itself
computes; only that eager derives scale and shift anew at each call.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from fusee.aten.derive import folded_bias, folded_weight, norm_scale, norm_shift
from fusee.aten.passes.edit import Editor, bound, only_user, val

__all__ = ["fold_norm"]

aten = torch.ops.aten

_FORMS: dict[Any, tuple[str, ...]] = {
    aten.batch_norm.default: (
        "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps",
    ),
    aten.native_batch_norm.default: (
        "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps",
    ),
    aten._native_batch_norm_legit_no_training.default: (
        "input", "weight", "bias", "running_mean", "running_var", "momentum", "eps",
    ),
}  # fmt: skip


class Norm(NamedTuple):
    """One batch norm with statistics that are static."""

    node: fx.Node
    result: fx.Node  # the normalised tensor: the node, or the item 0 of its tuple
    input: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    mean: fx.Node
    variance: fx.Node
    eps: float


def fold_norm(edit: Editor) -> None:
    """Run the pass."""
    for node in edit.calls(*_FORMS):
        norm = _match(edit, node)
        if norm is None:
            continue
        if not (_into_convolution(edit, norm) or _into_linear(edit, norm)):
            _as_affine(edit, norm)


def _match(edit: Editor, node: fx.Node) -> Norm | None:
    names = _FORMS[node.target]
    named = dict(zip(names, bound(node, names), strict=True))
    if named.get("training"):
        return None
    x, mean, variance = named["input"], named["running_mean"], named["running_var"]
    if mean is None or variance is None:
        return None
    weight, bias = named["weight"], named["bias"]
    if not all(map(edit.is_static, (weight, bias, mean, variance))):
        return None
    result = node
    if node.target is not aten.batch_norm.default:
        items = [user for user in node.users if user.users]
        if len(items) != 1 or items[0].target is not operator.getitem or items[0].args[1] != 0:
            return None
        result = items[0]
        edit.erase(*[user for user in node.users if user is not result])
    if not val(result).dtype.is_floating_point:
        return None
    return Norm(node, result, x, weight, bias, mean, variance, named["eps"])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What eager computes in before it rounds to `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _foldable(edit: Editor, norm: Norm, weight: object, bias: object) -> bool:
    layer = norm.input
    return (
        only_user(layer) is norm.node
        and val(layer).dtype is val(norm.result).dtype
        and weight is not None
        and edit.is_static(weight)
        and edit.is_static(bias)
    )


def _folded(
    edit: Editor, norm: Norm, weight: fx.Node, bias: fx.Node | None, transposed_groups: int
) -> tuple[fx.Node, fx.Node]:
    """New weight and bias nodes for the layer before `norm`, in the layer's dtype."""
    dtype = val(norm.input).dtype
    wide = _wide(dtype)
    with edit.before(norm.node):
        new_weight = edit.call(
            folded_weight, weight, norm.weight, norm.variance, norm.eps, transposed_groups, wide,
            like=norm.node, val=_typed(weight, wide),
        )  # fmt: skip
        new_bias = edit.call(
            folded_bias, bias, norm.weight, norm.bias, norm.mean, norm.variance, norm.eps, wide,
            like=norm.node, val=_typed(norm.mean, wide),
        )  # fmt: skip
        return edit.cast(new_weight, dtype, norm.node), edit.cast(new_bias, dtype, norm.node)


def _typed(node: fx.Node, dtype: torch.dtype) -> torch.Tensor:
    """The meta of `node` converted to `dtype`."""
    meta = val(node)
    return meta if meta.dtype is dtype else torch.empty_like(meta, dtype=dtype)


def _into_convolution(edit: Editor, norm: Norm) -> bool:
    conv = norm.input
    if conv.op != "call_function" or conv.target is not aten.convolution.default:
        return False
    x, weight, bias, *rest = conv.args
    if not _foldable(edit, norm, weight, bias):
        return False
    assert isinstance(weight, fx.Node)
    transposed, groups = rest[3], rest[5]
    new = _folded(edit, norm, weight, bias, groups if transposed else 0)  # type: ignore[arg-type]
    edit.notes.append(f"folded {norm.node} into {conv}")
    edit.become(norm.result, aten.convolution.default, x, *new, *rest)
    return True


def _into_linear(edit: Editor, norm: Norm) -> bool:
    linear = norm.input
    if linear.op != "call_function" or linear.target is not aten.linear.default:
        return False
    x, weight, bias = bound(linear, ("input", "weight", "bias"))
    # batch norm's channels are axis 1, a linear layer's the last
    if val(linear).dim() != 2 or not _foldable(edit, norm, weight, bias):
        return False
    new = _folded(edit, norm, weight, bias, 0)
    edit.notes.append(f"folded {norm.node} into {linear}")
    edit.become(norm.result, aten.linear.default, x, *new)
    return True


def _as_affine(edit: Editor, norm: Norm) -> None:
    out = val(norm.result)
    wide = _wide(out.dtype)
    trailing = val(norm.input).dim() - 2
    channels = _typed(norm.mean, wide).view(-1, *[1] * trailing)
    image = _typed(norm.result, wide)
    like = norm.node
    with edit.before(norm.node):
        scale = edit.call(
            norm_scale, norm.weight, norm.variance, norm.eps, wide, trailing,
            like=like, val=channels,
        )  # fmt: skip
        shift = edit.call(
            norm_shift, norm.weight, norm.bias, norm.mean, norm.variance, norm.eps, wide, trailing,
            like=like, val=channels,
        )  # fmt: skip
        x = edit.cast(norm.input, wide, like)
        scaled = edit.call(aten.mul.Tensor, x, scale, like=like, val=image)
        if out.dtype is not wide:
            shifted = edit.call(aten.add.Tensor, scaled, shift, like=like, val=image)
    edit.notes.append(f"{norm.node} became one factor and one addend")
    if out.dtype is wide:
        edit.become(norm.result, aten.add.Tensor, scaled, shift)
    else:
        edit.become(norm.result, aten._to_copy.default, shifted, dtype=out.dtype)
