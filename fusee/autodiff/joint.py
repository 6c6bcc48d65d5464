"""Forward and backward of a captured graph as one functional graph, and the two it is cut into.

    trace_joint      fx graph of torch calls  -> Joint                     trace.py
    partition        Joint                    -> Split                     partition.py
    differentiate    fx graph of torch calls  -> Split: both of these      partition.py
    differentiable   Split, compiled          -> one autograd.Function     autograd_function.py

node.meta of a joint graph holds what that of an AtenGraph does, and
    backward    True: recorded while eager's backward formulas ran. Such a node may still depend on
                values of the forward alone, a view for instance that the backward takes again.
    function    a number: recorded in the backward of this call of a torch.autograd.Function
    recompute   a number: in this region of torch.utils.checkpoint, which the user wants recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from fusee.aten.graph import AtenGraph
from fusee.aten.tracer import Tracer

# ---------------------------------------------------------------------------- joint


@dataclass(eq=False)
class Joint:
    """Forward and backward as traced.

    aten             inputs: the forward's (the caller's, then attributes), then one per tangent;
                     results: the forward's, as aten.outputs and aten.mutations name them, then the
                     gradients. aten.mutations are only those that autograd knows nothing of: batch
                     statistics, what is written under no_grad. Their inputs hold other values when
                     the backward runs, so these must not be saved as they came in.
    forward_results  how many of aten.results belong to the forward
    tangents         the forward results that take a tangent, in the order of the tangent inputs
    gradients        per forward input: position of its gradient among aten.results, or None
    rebinds          (input, result): a write that autograd knows of. Under autograd the input takes
                     the result's values, after the call
    detached         per output: whether it is a view in memory alone, not for autograd
    unreached        inputs that something computed under autograd, and that no gradient comes to
    parts            per tangent, a number: the same where eager's backward through one frees
                     something that the backward through the other needs
    """

    aten: AtenGraph
    forward_results: int
    tangents: tuple[int, ...]
    gradients: tuple[int | None, ...]
    rebinds: tuple[tuple[int, int], ...]
    detached: tuple[bool, ...]
    parts: tuple[int, ...] = ()
    unreached: tuple[int, ...] = ()

    @property
    def written(self) -> set[int]:
        """The inputs that the forward writes to, whether autograd knows of it or not."""
        return {m.index for m in self.aten.mutations} | {index for index, _ in self.rebinds}

    @property
    def forward_inputs(self) -> int:
        """How many of aten.inputs are the forward's; the others are tangents."""
        return len(self.aten.inputs) - len(self.tangents)

    def backward_nodes(self) -> set[fx.Node]:
        """The nodes that depend on a tangent: they cannot run in the forward."""
        found = set(self.aten.placeholders[self.forward_inputs :])
        for node in self.aten.graph.nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found


class Saved(NamedTuple):
    """What is kept for the backward: an input of the forward as it is, or one of its results."""

    kind: Literal["input", "result"]
    position: int


class SparseRows(NamedTuple):
    """A sparse tensor: ATen's embedding_sparse_backward of two results of the backward."""

    rows: int
    indices: int
    options: tuple[Any, ...]


# How the gradient of an input comes from the backward's results: it is one, or the sum of several
# parts, some of them sparse. None: there is no gradient.
Gradient = int | tuple[int | SparseRows, ...] | None


@dataclass(eq=False)
class Split:
    """A captured graph with its gradients, as two graphs to be compiled.

    joint     what they were cut from: it says what the caller gets of the forward's results
    forward   gives a tuple: the joint graph's forward results, then what only the backward reads.
              What requires grad is an input like any other: nothing may be derived from it ahead
    backward  inputs: `saved`, new objects at each call, then the integers `sizes`, then one per
              tangent; results: gradients, each once
    saved     where the first inputs of the backward come from
    sizes     symbols of the forward that the backward reads
    gradients per forward input: what of the backward's results its gradient is
    absent    tangents that the backward does not take, as nothing of the loss came through them
    without   the same split for another `absent`; None: the backward takes zeros instead
    """

    joint: Joint
    forward: AtenGraph
    backward: AtenGraph
    saved: tuple[Saved, ...]
    sizes: tuple[str, ...]
    gradients: tuple[Gradient, ...]
    absent: frozenset[int] = frozenset()
    without: Callable[[frozenset[int]], Split] | None = None

    @functools.cached_property
    def shown(self) -> list[tuple[int, int]]:
        """(saved value, result) where one is the other, which the program may write to."""
        count, rows = self.joint.forward_results, enumerate(self.saved)
        return [(k, at) for k, (kind, at) in rows if kind == "result" and at < count]


# ---------------------------------------------------------------------------- sparse
# Gradients that eager gives as sparse tensors: those of embeddings with sparse=True.
#
# In a joint graph such a gradient is a node that calls ATen's embedding_sparse_backward, with the
# meta of a dense tensor of the same shape, or a sum with one. The backward gives what these calls
# take, and they come after it (`SparseRows`): ATen's own, as how many rows a padding index leaves
# out is known to the call alone.

aten = torch.ops.aten

SPARSE = aten.embedding_sparse_backward.default


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
        nodes, metas = t.operands((grads[0], ctx.indices))
        value = t.value(weight)
        twin = t.b.twins.empty(weight.shape, weight.stride(), metas[0].dtype, value.store.device)
        node = t.b.emit(SPARSE, (*nodes, count, *ctx.options), {}, twin, value.store.device)
        t.adopt(twin, node, None, value.store.device)
        return twin, None, None, None, None


def sparse_embedding(
    t: Tracer,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """torch.embedding in a joint trace."""
    options = padding_idx, scale_grad_by_freq
    if not (sparse and torch.is_grad_enabled() and weight.requires_grad):
        return torch.embedding(weight, indices, *options, sparse)
    return _SparseEmbedding.apply(weight, t, indices, *options)  # type: ignore[no-untyped-call]


def sparse_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values eager has as sparse tensors, and sums with them."""
    found = set(graph.find_nodes(op="call_function", target=SPARSE, sort=False))
    row = list(found)
    for node in row:
        new = [user for user in node.users if user.op != "output" and user not in found]
        found.update(new)
        row += new
    return found


def why_not(graph: fx.Graph) -> str | None:
    """Why the sparse gradients of a joint graph cannot be made after it, if they cannot."""
    for node in sparse_nodes(graph):
        if node.target is SPARSE:
            continue
        if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
            return f"{node.target} of a sparse gradient"
    return None
