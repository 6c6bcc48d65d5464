"""A backward pass within a graph: one call, which gives what comes to the grads of leaves.

Whoever traces the graph has a form of its own for this call (autodiff/trace.py): what it gives here
is what eager gives.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fusee.fake.layouts import is_dense, rows


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
    found = [getattr(node, name) for name in _saved(node.__class__)]
    return any(isinstance(x, (Tensor, tuple)) for x in found)


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


@functools.cache
def _saved(kind: type) -> list[str]:
    return [name.replace("_raw", "") for name in dir(kind) if name.startswith("_raw_saved")]
