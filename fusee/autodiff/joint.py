"""Forward and backward of a captured graph as one functional graph, and the two it is cut into.

    trace_joint   fx graph of torch calls      -> Joint          fusee/autodiff/trace.py
    partition     Joint                        -> Split          fusee/autodiff/partition.py
    differentiable  Split, compiled            -> one autograd.Function   fusee/autodiff/runtime.py

node.meta of a joint graph holds what that of an AtenGraph does, and
    backward    True: recorded while eager's backward formulas ran. Such a node may still depend on
                values of the forward alone, a view for instance that the backward takes again.
    function    a number: recorded in the backward of this call of a torch.autograd.Function
    recompute   a number: in this region of torch.utils.checkpoint, which the user wants recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import fx

from fusee.aten.graph import AtenGraph

__all__ = ["Gradient", "Joint", "Saved", "SparseRows", "Split"]


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
    """A joint graph in two.

    forward   the joint graph's forward; results: its own, then those that only the backward reads
    backward  inputs: `saved`, then the integers `sizes`, then one per tangent; results: gradients,
              each once
    saved     where the first inputs of the backward come from
    sizes     symbols of the forward that the backward reads
    gradients per forward input: what of the backward's results its gradient is
    absent    tangents that the backward does not take, as nothing of the loss came through them
    without   the same split for another `absent`; None: the backward takes zeros instead
    """

    forward: AtenGraph
    backward: AtenGraph
    saved: tuple[Saved, ...]
    sizes: tuple[str, ...]
    gradients: tuple[Gradient, ...]
    absent: frozenset[int] = frozenset()
    without: Callable[[frozenset[int]], Split] | None = None
