"""Attention written as matmul, softmax, matmul becomes one operator that needs no score matrix.

    bmm(softmax(bmm(q, k^T) * scale), v)  =>  scaled_dot_product_attention(q, k, v, scale)

Only for many keys: below, two products with our softmax between them are as fast, because a block
of scores stays in the cache (benchmarks.md, Externs). Only where nothing else reads the scores,
and without a mask: of a row that is masked whole softmax makes NaN, the operator zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from fusee.aten.passes.rewriter import Editor, only_user, val

__all__ = ["fuse_attention"]

aten = torch.ops.aten

LEAST_SCORES = 512 * 512  # per head

_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.clone.default,
    aten.reshape.default,
)


class Scores(NamedTuple):
    """What softmax is taken of: product * scale, with product = bmm(q, k)."""

    product: fx.Node
    scale: float


def fuse_attention(edit: Editor) -> None:
    """Run the pass."""
    if edit.aten.symbols:
        return  # whether an expand only reshapes must be known
    for node in edit.calls(aten.bmm.default):
        weights, v = node.args
        assert isinstance(weights, fx.Node) and isinstance(v, fx.Node)
        softmax = _through(weights, aten._softmax.default)
        if softmax is None or val(node).dtype is not torch.float32:
            continue
        scores = _scores(softmax)
        if scores is not None and _is_long(edit, node, softmax, scores):
            edit.notes.append(f"{node} became attention")
            _rewrite(edit, node, softmax, scores, v)


def _through(node: fx.Node, target: Any) -> fx.Node | None:
    """The call of `target` that `node` is a reshape of, if no other node reads what is between."""
    while node.op == "call_function" and only_user(node) is not None:
        if node.target is target:
            return node
        source = node.all_input_nodes[0]
        if node.target not in _RESHAPES or val(node).numel() != val(source).numel():
            return None
        node = source
    return None


def _scores(softmax: fx.Node) -> Scores | None:
    """Read softmax's input backwards: an optional factor, a product."""
    node, axis = softmax.args[:2]
    assert isinstance(node, fx.Node)
    if val(softmax).dim() != 4 or axis not in (-1, 3):
        return None
    scale = 1.0
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        factor = node.args[1]
        if not isinstance(factor, (int, float)) or only_user(node) is None or factor == 0:
            return None
        is_product = node.target in (aten.mul.Tensor, aten.mul.Scalar)
        scale = float(factor) if is_product else 1.0 / factor
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    product = _through(node, aten.bmm.default)
    return None if product is None else Scores(product, scale)


def _is_long(edit: Editor, node: fx.Node, softmax: fx.Node, scores: Scores) -> bool:
    batch, heads, queries, keys = edit.hints(softmax)
    product, out = edit.hints(scores.product), edit.hints(node)
    return (
        queries * keys >= LEAST_SCORES
        and product == [batch * heads, queries, keys]
        and out[:2] == [batch * heads, queries]
    )


def _rewrite(edit: Editor, node: fx.Node, softmax: fx.Node, scores: Scores, v: fx.Node) -> None:
    q, k = scores.product.args
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node)
    batch, heads, queries, keys = val(softmax).shape

    def images(x: fx.Node, rows: Any) -> fx.Node:
        size = [batch, heads, rows, val(x).shape[-1]]
        if not val(x).is_contiguous():
            x = edit.call(aten.clone.default, x, like=node, memory_format=torch.contiguous_format)
        return edit.call(aten.view.default, x, size, like=node)

    with edit.before(node):
        keys_first = edit.call(aten.transpose.int, k, 1, 2, like=node)
        q, k, v = images(q, queries), images(keys_first, keys), images(v, keys)
        out = val(q).new_empty((batch, heads, queries, val(v).shape[-1]))
        made = edit.call(
            aten.scaled_dot_product_attention.default, q, k, v, None, 0.0, False,
            like=node, val=out, scale=scores.scale,
        )  # fmt: skip
    edit.become(node, aten.view.default, made, list(val(node).shape))
