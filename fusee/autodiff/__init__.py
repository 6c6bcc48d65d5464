"""Forward and backward of a captured graph as one functional graph, and the two it is cut into.

    trace_joint      fx graph of torch calls  -> Joint                     trace.py
    chunk_losses     Joint                    -> Joint, with a budget       chunks.py
    partition        Joint                    -> Split                     partition.py
    differentiate    fx graph of torch calls  -> Split: both of these      partition.py
    differentiable   Split, compiled          -> one autograd.Function     autograd_function.py

node.meta of a joint graph holds what that of an AtenGraph does, and
    backward    True: recorded while eager's backward formulas ran. Such a node may still depend on
                values of the forward alone, a view for instance that the backward takes again.
    function    a number: recorded in the backward of this call of a torch.autograd.Function
    recompute   a number: in this region of torch.utils.checkpoint, which the user wants recomputed.
    ahead       True: a backward pass within the graph begins at what is computed of this
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from fusee.aten import AtenGraph, dependents, draws
from fusee.aten.rewriter import new_call
from fusee.aten.torch_api import library
from fusee.aten.tracer import Tracer
from fusee.fake import on_metas
from fusee.fake.layouts import is_row_major, known, like, same_ints
from fusee.fake.torch_python import opmath

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
    notes            what passes did to the graph, for the report
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
    notes: list[str] = field(default_factory=list)

    @property
    def written(self) -> set[int]:
        """The inputs that the forward writes to, whether autograd knows of it or not."""
        return {m.index for m in self.aten.mutations} | {index for index, _ in self.rebinds}

    @property
    def forward_inputs(self) -> int:
        """How many of aten.inputs are the forward's; the others are tangents."""
        return len(self.aten.inputs) - len(self.tangents)

    @functools.cached_property
    def tangents_of(self) -> tuple[list[int], list[int]]:
        """Per input of the forward two sets of tangents, as bits: those that its gradient depends
        on; and those of which any gradient does that depends on the input, too."""
        given, nodes = self.aten.placeholders, self.aten.graph.nodes
        above = {x: 1 << k for k, x in enumerate(given[self.forward_inputs :])}
        for node in nodes:
            for x in node.all_input_nodes:
                above[node] = above.get(node, 0) | above.get(x, 0)
        results = self.aten.results
        ends = [None if k is None else results[k] for k in self.gradients]
        below = {node: above.get(node, 0) for node in ends if node is not None}
        for node in reversed(nodes):
            for x in sources(node) if node in below else ():
                below[x] = below.get(x, 0) | below[node]
        reached = [0 if node is None else above.get(node, 0) for node in ends]
        return reached, [below.get(x, 0) for x in given[: self.forward_inputs]]

    @functools.cached_property
    def generators(self) -> list[torch.Generator | torch.device]:
        """What the graph draws from: generators, or those of devices."""
        found = list[torch.Generator | torch.device]()
        for node in self.aten.graph.nodes:
            if draws(node.target):
                own: Any = node.kwargs.get("generator")
                found.append(torch.device(node.meta["device"] or "cpu") if own is None else own)
        return list({str(x) if isinstance(x, torch.device) else id(x): x for x in found}.values())

    def backward_nodes(self) -> set[fx.Node]:
        """The nodes that depend on a tangent, and cannot run in the forward; or that come with and
        after a backward pass within the graph."""
        given = self.aten.placeholders[self.forward_inputs :]
        if not given:
            given = [node for node in self.aten.graph.nodes if node.meta.get("backward")]
        return dependents(self.aten.graph, given)


_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
# Of its arguments: running mean and variance, and whether it trains; of its results: the later two.
_STATISTICS, _TRAINS = (3, 4), 5


def sources(node: fx.Node) -> list[fx.Node]:
    """What a value is computed of. While it trains, a batch norm makes of its running statistics
    nothing but later ones; its gradients have none (`prepare`)."""
    args: Any = node.args
    if node.target is not operator.getitem or args[0].target is not _NORM:
        return node.all_input_nodes
    given, number = args[0].args, args[1]
    if not given[_TRAINS] or number in _STATISTICS:
        return node.all_input_nodes
    return [x for k, x in enumerate(given) if isinstance(x, fx.Node) and k not in _STATISTICS]


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
    def read(self) -> list[int]:
        """The saved values that the backward reads."""
        given = self.backward.placeholders[: len(self.saved)]
        return [k for k, x in enumerate(given) if x.users]

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
    """torch.embedding in a joint trace; None: it may run as it is."""
    if not (sparse and torch.is_grad_enabled() and weight.requires_grad):
        return None
    options = padding_idx, scale_grad_by_freq
    return _SparseEmbedding.apply(weight, t, indices, *options)  # type: ignore[no-untyped-call]


def sparse_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values eager has as sparse tensors, and sums with them."""
    found = graph.find_nodes(op="call_function", target=SPARSE, sort=False)
    return dependents(graph, found) - {graph.output_node()} if found else set()


def why_not(graph: fx.Graph) -> str | None:
    """Why the sparse gradients of a joint graph cannot be made after it, if they cannot."""
    for node in sparse_nodes(graph):
        if node.target is not SPARSE and not is_sum(node):
            return f"{node.target} of a sparse gradient"
    return None


def is_sum(node: fx.Node) -> bool:
    """Whether a node is the sum of two others."""
    factor: Any = node.kwargs.get("alpha", 1)
    return node.target is aten.add.Tensor and bool(factor == 1)


# ---------------------------------------------------------------------------- norms
# Batch and group norm as their statistics and a formula, so that results need not be saved.
#
#     native_group_norm(x, weight, bias, ...) -> (x - mean) * rstd * weight + bias
# The operator stays for its statistics, which are small. The formula is the one that its lowering
# computes the result by, in the same order of operations.


_BATCH_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)


_BATCH_NORMS_BACKWARD = (aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)


class _After:
    """Writes calls one after the other behind a node, described by `meta`."""

    def __init__(
        self, graph: fx.Graph, node: fx.Node, meta: dict[str, Any], name: str | None = None
    ) -> None:
        self.graph, self.last, self.meta, self.name = graph, node, meta, name

    def __call__(self, op: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        """The call. Its value is `val`, or else what `op` gives for those of its arguments."""
        with self.graph.inserting_after(self.last):
            self.last = new_call(self.graph, op, args, kwargs, self.meta, val, self.name)
        return self.last

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype is dtype else self(aten._to_copy.default, x, dtype=dtype)


def open_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the result of `node`, if it is a norm and its statistics are not rounded."""
    is_group = node.target is aten.native_group_norm.default
    if not (is_group or node.target in _BATCH_NORMS):
        return
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    given: Any = (*node.args, None, None)
    x, weight, bias = given[:3]
    val, statistics = x.meta["val"], node.meta["val"][1:3]
    exact = opmath(val.dtype)
    if 0 not in parts or any(s.dtype is not exact for s in statistics):
        return
    if any(type(n) is not int for s in statistics for n in s.shape) or val.dim() < 2:
        return
    out = parts[0]
    if not same_ints(out.meta["val"].stride(), val.stride()):
        return
    write = _After(graph, node, node.meta, "norm")
    like = out.meta["val"] if val.dtype is exact else out.meta["val"].to(exact)
    ones, channels = [1] * (val.dim() - 2), [val.shape[1]]
    is_known = is_row_major(val) and all(type(n) is int for n in val.shape)
    if is_group and is_known and torch.device(node.meta["device"] or "cpu").type == "cpu":
        # in groups, so that what stores a group may follow its statistics while it is near; what
        # threads share, fusion cuts in groups anyway
        groups = statistics[0].shape[1]
        channels = [groups, val.shape[1] // groups]
        x = write(aten.view.default, x, [val.shape[0], *channels, *val.shape[2:]])
        like = like.view(x.meta["val"].shape)
    rows = []
    for k in (1, 2):
        row = write(operator.getitem, node, k, val=node.meta["val"][k])
        if k in parts:  # which may come too late
            parts[k].replace_all_uses_with(row)
            graph.erase_node(parts[k])
        if len(channels) == 2:
            rows.append(write(aten.view.default, row, [*row.meta["val"].shape, 1, *ones]))
        elif is_group:
            # Statistics of groups, (batch, groups), for each channel of the groups
            batch, groups = row.meta["val"].shape
            row = write(aten.unsqueeze.default, row, 2)
            row = write(aten.expand.default, row, [batch, groups, val.shape[1] // groups])
            row = write(aten.clone.default, row, memory_format=torch.contiguous_format)
            rows.append(write(aten.view.default, row, [batch, val.shape[1], *ones]))
        else:
            rows.append(write(aten.view.default, row, [1, statistics[0].shape[-1], *ones]))
    y = write(aten.sub.Tensor, write.cast(x, exact), rows[0], val=like)
    y = write(aten.mul.Tensor, y, rows[1], val=like)
    for operand, op in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
        if operand is not None:
            operand = write.cast(operand, exact)
            y = write(op, y, write(aten.view.default, operand, [1, *channels, *ones]), val=like)
    y = write.cast(y, val.dtype)
    y = y if len(channels) == 1 else write(aten.view.default, y, [*val.shape])
    out.replace_all_uses_with(y)
    graph.erase_node(out)


# ---------------------------------------------------------------------------- replay
# Random numbers in regions of torch.utils.checkpoint: drawn again in the backward, not saved.
#
#     mask = bernoulli(x, p)   =>   state = generator_state(x); drawn = bernoulli(x, p)
#                                   mask = redrawn_bernoulli(state, sizes, p), as the dtype of drawn
#
# The forward takes `drawn` for `mask` (node.meta["drawn"]), the backward draws once more from the
# state, which is 5 KB, and leaves the stream alone. Eager does so from the state of a region's
# begin.

library.define("generator_state(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
library.define("redrawn_bernoulli(Tensor state, SymInt[] size, float p) -> Tensor")


@torch.library.impl(library, "generator_state", "CompositeExplicitAutograd")
def _state(x: Tensor) -> Tensor:
    return torch.default_generator.get_state()


@torch.library.impl(library, "redrawn_bernoulli", "CompositeExplicitAutograd")
def _redrawn(state: Tensor, size: Sequence[int], p: float) -> Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    return torch.empty(size, dtype=torch.bool).bernoulli_(p, generator=generator)


REDRAWN = torch.ops.fusee.redrawn_bernoulli.default
_STATE = torch.ops.fusee.generator_state.default


def replay(joint: Joint, node: fx.Node) -> bool:
    """Whether `node` is one for this, and is now drawn again. It changes the graph."""
    if node.target is not aten.bernoulli.p or type(node.meta.get("recompute")) is not int:
        return False
    if torch.device(node.meta["device"] or "cpu").type != "cpu":  # no recording asks for a state
        return False
    x, p = node.args[0], node.args[1] if len(node.args) > 1 else 0.5
    val, like = node.meta["val"], _state(torch.empty(0))
    sizes: list[Any] = [joint.aten.to_size(n) for n in val.shape]
    known = all(type(n) is int for n in sizes)
    if not (is_row_major(val) and isinstance(p, float)) or node.kwargs.get("generator") is not None:
        return False
    if node.meta.get("backward") or (known and math.prod(sizes) <= like.numel()):
        return False
    graph = joint.aten.graph
    state = _After(graph, node.prev, node.meta)(_STATE, x, val=like.to("meta"))
    write = _After(graph, node, node.meta)
    mask = write(REDRAWN, state, sizes, p, val=_like(val, torch.bool))
    wide = write(aten._to_copy.default, mask, dtype=val.dtype, val=_like(val, val.dtype))
    wide.meta["drawn"] = node
    node.replace_all_uses_with(wide)
    return True


# ---------------------------------------------------------------------------- prepare
# Rewrites of a joint graph that leave less to save.
#
# narrow   a value that the backward may read again goes through the smallest dtype that holds it
# parts    zeros with a part put in + zeros with another part put in -> zeros with both put in


def prepare(joint: Joint) -> None:
    """Rewrite the graph in place. Its results stay what they are, bit by bit."""
    graph = joint.aten.graph
    for node in list(graph.nodes):
        open_norm(graph, node)
        if node.target in _BATCH_NORMS_BACKWARD and node.args[7]:
            # in training the running statistics are not read: whoever saved them would find them
            # written to by a second forward
            node.args = (*node.args[:3], None, None, *node.args[5:])
    for node in list(graph.nodes):
        if replay(joint, node):
            continue
        val: Any = node.meta.get("val")
        dtype: torch.dtype | None = None  # a smaller one that holds each value that it can have
        source: Any = node.args[0] if node.target is operator.getitem else None
        if node.target in (aten.bernoulli.p, aten.bernoulli.default):
            dtype = torch.bool if val.dtype is not torch.bool else None  # zeros and ones
        elif source is not None and node.args[1] == 1 and source.target in _WINDOWS:
            plane = source.args[0].meta["val"].shape[-_WINDOWS[source.target] :]
            if known(plane) and math.prod(plane) < 2**31:
                dtype = torch.int32  # positions in a plane
        users = [user for user in node.users if user.op != "output"]
        if dtype is None or node.meta.get("backward") or not users:
            continue
        write = _After(graph, node, {k: x for k, x in node.meta.items() if k != "recompute"})
        small = write(aten._to_copy.default, node, dtype=dtype, val=_like(val, dtype))
        wide = write(aten._to_copy.default, small, dtype=val.dtype, val=_like(val, val.dtype))
        for user in users:
            user.replace_input_with(node, wide)


_WINDOWS = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """torch.empty_like, which imports sympy at its first call."""
    if x.device.type != "meta":
        same: Tensor = on_metas(torch.empty_like, x, dtype=dtype)
        return same
    found = like(x, dtype)
    return torch.empty_strided(found.size, found.stride, dtype=dtype, device="meta")
