"""Losses, and gradients: how those of operators lie, and a backward pass within a graph.

Gradients lie as what they are gradients of, or row by row. Those of factorisations are triangular
solves. A pass is one call, which gives what comes to the grads of leaves, as eager does; whoever
traces the graph has a form of its own for it (autodiff/trace.py).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fusee.fake.layouts import (
    Sizes,
    Spec,
    broadcast,
    equal,
    is_dense,
    let_be_equal,
    like,
    rows,
    strides,
)
from fusee.fake.rules import RULES, Found, convolution_spec, in_layout_of

# ---------------------------------------------------------------------------- losses


@RULES.rule("nll_loss_forward", rank=2)
@RULES.rule("nll_loss2d_forward", rank=4)
def _nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, *, rank: int
) -> Found:
    size = (x.shape[0], *x.shape[2:])
    if x.dim() != rank or not equal(target.shape, size):
        return None
    if weight is not None and not equal(weight.shape, x.shape[1:2]):
        return None
    return rows(() if reduction else size, x.dtype), rows((), x.dtype)


@RULES.rule("binary_cross_entropy")
def _binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Any = None, reduction: int = 1
) -> Found:
    return rows((), x.dtype) if reduction else like(x)


@RULES.rule("multi_margin_loss")
def _multi_margin(
    x: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> Found:
    """Of one sample a number, which torch's formula gives an axis."""
    return None if reduction or target.shape else rows((), x.dtype)


@RULES.rule("multilabel_margin_loss_forward")
def _multilabel_margin(x: Tensor, target: Tensor, reduction: int) -> Found:
    is_one = not reduction and target.dim() < 2
    return (rows((), x.dtype), rows(target.shape, x.dtype)) if is_one else None


# ---------------------------------------------------------------------------- gradients


def _asked(specs: Iterable[Spec | None], mask: Sequence[bool]) -> tuple[Spec | None, ...]:
    return tuple(spec if asked else None for spec, asked in zip(specs, mask))


@RULES.rule("native_layer_norm_backward")
def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sizes, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
) -> Found:
    parts = (x, weight, bias)
    return _asked((None if p is None else rows(p.shape, p.dtype) for p in parts), mask)


@RULES.rule("native_batch_norm_backward")
def _batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> Found:
    channels = rows((x.shape[1],), x.dtype if weight is None else weight.dtype)
    return _asked((in_layout_of(x), channels, channels), rest[-1])


@RULES.rule("native_group_norm_backward")
def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Any, rstd: Any, weight: Any, n: Any, channels: Any, *rest: Any
) -> Found:
    row = rows((channels,), x.dtype if weight is None else weight.dtype)
    return _asked((in_layout_of(x), row, row), rest[-1])


@RULES.rule("_softmax_backward_data _log_softmax_backward_data")
def _softmax_backward(grad: Tensor, out: Tensor, axis: int, dtype: torch.dtype) -> Found:
    let_be_equal(grad.shape, out.shape)
    if not equal(grad.shape, out.shape):
        raise RuntimeError("Expected tensor for argument #1 'grad' to have the size of 'output'")
    return rows(grad.shape, dtype)


RULES.rule(
    "mse_loss_backward huber_loss_backward smooth_l1_loss_backward glu_backward"
    " nll_loss_backward nll_loss2d_backward multi_margin_loss_backward"
    " multilabel_margin_loss_backward fractional_max_pool2d_backward"
    " fractional_max_pool3d_backward adaptive_max_pool3d_backward"
)(lambda grad, x, *_: rows(x.shape, x.dtype))


@RULES.rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def _flash_attention_backward(grad: Tensor, *operands: Any, **_: Any) -> Found:
    return tuple(Spec(x.shape, strides(x.shape, (0, 2, 1, 3)), x.dtype) for x in operands[:3])


RULES.rule("embedding_dense_backward")(
    lambda grad, index, count, *_: rows((count, grad.shape[-1]), grad.dtype)
)
RULES.rule(
    "max_pool2d_with_indices_backward reflection_pad2d_backward reflection_pad3d_backward"
    " replication_pad2d_backward replication_pad3d_backward"
)(lambda grad, x, *_: in_layout_of(x))
RULES.rule("_upsample_bicubic2d_aa_backward")(lambda grad, out, size, *_: rows(size, grad.dtype))
RULES.rule("binary_cross_entropy_backward")(lambda grad, x, *_: like(x))
RULES.rule("log_sigmoid_forward")(lambda x: (rows(x.shape, x.dtype),) * 2)


@RULES.rule("convolution_backward")
def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Found:
    image, kernel = (convolution_spec(y.shape, x, weight, rest[-2]) for y in (x, weight))
    return _asked((image, kernel, rows((grad.shape[1],), weight.dtype)), rest[-1])


@RULES.rule("linalg_solve_triangular")
def _solved(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, **_: Any) -> Found:
    """Columns come one after the other. Errors, and what is lazily conjugated, are torch's."""
    n = b.shape[-2 if left else -1]
    if min(a.dim(), b.dim()) < 2 or a.dtype is not b.dtype or not equal(a.shape[-2:], (n, n)):
        return None
    size = [*broadcast(a.shape[:-2], b.shape[:-2]), *b.shape[-2:]]
    order = [*range(len(size) - 2), len(size) - 1, len(size) - 2]
    return Spec(size, strides(size, order), b.dtype)


def leaf_gradients(loss: Tensor, gradient: Tensor | None, *leaves: Tensor) -> Sequence[Tensor]:
    """What `loss.backward(gradient)` adds to the grad of each leaf: tensors that nobody else has.

    raises   as autograd does; RuntimeError if it gives a leaf nothing
    source   torch/csrc/autograd/functions/accumulate_grad.h
    """
    if has_torch_function((loss,)):
        found: Sequence[Tensor] = handle_torch_function(
            leaf_gradients, (loss,), loss, gradient, *leaves
        )
        return found
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        # not `inputs=leaves`: what autocast keeps of a leaf may end at an older node of it
        torch.autograd.backward((loss,), (gradient,))
        return checked([leaf.grad for leaf in leaves])
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def checked(found: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients, none of which may be missing: the rest of the graph was captured with all."""
    if any(x is None for x in found):
        raise RuntimeError("a backward pass within a graph gives a leaf no gradient")
    return [x for x in found if x is not None]


# what recorders take for calls that only compute
leaf_gradients.__dict__["_fusee_body"] = ()


def as_autograd_keeps(leaf: Tensor) -> Tensor:
    """A tensor laid out as autograd keeps the gradient of a leaf."""
    strides = leaf.stride() if is_dense(leaf) else rows(leaf.shape, leaf.dtype).stride
    return torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device)


def history(loss: Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph below a tensor."""
    row, known = [loss.grad_fn], set()
    while row:
        node: Any = row.pop()
        if node is not None and node not in known:
            known.add(node)
            yield node
            row += [below for below, _ in node.next_functions]


def saves(node: Any) -> bool:
    """Whether a node of autograd holds tensors, which a backward pass lets go of.

    raises   RuntimeError, as such a pass does, if one of them was written to
    """
    kind = node.__class__
    found = [getattr(node, name) for name in _saved(kind)]
    return kind.__name__ in _SECRET or any(isinstance(x, Tensor) or x for x in found)


def goes_beside(x: Tensor, used_up: Collection[Any]) -> bool:
    """Whether a pass from `x` gets past what saves something to a leaf, and meets nothing of
    `used_up` on its way."""
    row, known = [(x.grad_fn, False)], set()
    while row:
        at = node, has_saved = row.pop()
        if node is None or node in used_up or at in known:
            continue
        known.add(at)
        if has_saved and hasattr(node, "variable"):
            return True
        row += [(below, has_saved or saves(node)) for below, _ in node.next_functions]
    return False


# Nodes that let go of what they hold and do not show it: of writes to a part, of lists of tensors.
_SECRET = ("CopySlices", "CppFunction")


@functools.cache
def _saved(kind: type) -> list[str]:
    raw = [name for name in dir(kind) if name.startswith("_raw_saved")]
    by_user = issubclass(kind, torch.autograd.function.BackwardCFunction)
    return [name.replace("_raw_" if by_user else "_raw", "") for name in raw]
