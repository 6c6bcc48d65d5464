"""Gradients that eager gives as sparse tensors: those of embeddings with sparse=True.

In a joint graph such a gradient is a node that calls ATen's embedding_sparse_backward, with the
meta of a dense tensor of the same shape, or a sum with one. The backward gives what these calls
take, and they come after it (`SparseRows`): ATen's own, as how many rows a padding index leaves out
is known to the call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.tracer import Tracer
from fusee.autodiff.joint import Gradient, SparseRows

__all__ = ["leaves", "made_of", "parts", "sparse_embedding", "sparse_nodes", "why_not"]

aten = torch.ops.aten


class _SparseEmbedding(torch.autograd.Function):
    """Looks rows up; the gradient of the weight is a call that is not run in the graph."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, t: Tracer, indices: Tensor, *options: Any) -> Any:
        ctx.t, ctx.indices, ctx.options = t, indices, options
        ctx.like = weight
        return aten.embedding.default(weight, indices, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        t, weight = ctx.t, ctx.like
        count = weight.shape[0]
        if type(count) is not int or not weight.is_contiguous():
            raise t.b.unsupported("a sparse gradient of a weight without a fixed size")
        op = aten.embedding_sparse_backward.default
        nodes, metas = t.operands((grads[0], ctx.indices))
        value = t.value(weight)
        twin = t.b.twins.empty(weight.shape, weight.stride(), metas[0].dtype, value.store.device)
        node = t.b.emit(op, (*nodes, count, *ctx.options), {}, twin, value.store.device)
        t.adopt(twin, node, None, value.store.device)
        return twin, None, None, None, None


def sparse_embedding(t: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.embedding in a joint trace."""
    names = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(names, args)), **kwargs}
    weight, indices = given["weight"], given["indices"]
    if not (given.get("sparse") and torch.is_grad_enabled() and weight.requires_grad):
        return func(*args, **kwargs)
    options = given.get("padding_idx", -1), given.get("scale_grad_by_freq", False)
    return _SparseEmbedding.apply(weight, t, indices, *options)  # type: ignore[no-untyped-call]


def sparse_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values eager has as sparse tensors, and sums with them."""
    found = set(graph.find_nodes(op="call_function", target=_ROWS, sort=False))
    row = list(found)
    for node in row:
        new = [user for user in node.users if user.op != "output" and user not in found]
        found.update(new)
        row += new
    return found


def why_not(graph: fx.Graph) -> str | None:
    """Why the sparse gradients of a joint graph cannot be made after it, if they cannot."""
    for node in sparse_nodes(graph):
        if node.target is _ROWS:
            continue
        if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
            return f"{node.target} of a sparse gradient"
    return None


def parts(node: fx.Node, sparse: set[fx.Node], resolve: Callable[[fx.Node], Any]) -> list[fx.Node]:
    """What a gradient is the sum of: nodes that call embedding_sparse_backward, and dense ones."""
    if node not in sparse or node.target is _ROWS:
        return [node]
    operands = [resolve(x) for x in node.args if isinstance(x, fx.Node)]
    return [part for x in operands if x is not None for part in parts(x, sparse, resolve)]


def leaves(found: Iterable[fx.Node], sparse: set[fx.Node]) -> Iterator[fx.Node]:
    """What the backward must give for these parts."""
    for node in found:
        yield from node.all_input_nodes if node in sparse else (node,)


def made_of(found: Sequence[fx.Node], sparse: set[fx.Node], place: Mapping[Any, int]) -> Gradient:
    """How a gradient comes from the backward's results. `place`: the positions of `leaves`."""
    rows: list[int | SparseRows] = []
    for node in found:
        if node in sparse:
            gradient, indices, *options = node.args
            rows.append(SparseRows(place[gradient], place[indices], tuple(options)))
        else:
            rows.append(place[node])
    return rows[0] if len(rows) == 1 and isinstance(rows[0], int) else tuple(rows)


_ROWS = aten.embedding_sparse_backward.default
