"""Weights that a program unpacks from a few bits on each call, as GPTQ and AWQ do.

    q = bitwise_and(bitwise_right_shift(qweight.expand(...), shifts), 15)
    y = x @ ((q - zeros) * scales).view(inputs, outputs)

A matrix product is taken together with all that makes its weight out of parameters, its origin. An
engine that has compressed weights is given q, zeros and scales, as `Packed`, and never sees how
they were unpacked: that is computed once, by torch. How it is spelt does not matter, as long as an
integer of at most eight bits is shifted and scaled last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.graph import AtenGraph
from fusee.aten.tidy import is_pure
from fusee.aten.torch_api import OpOverload
from fusee.backends.intervals import fits, interval
from fusee.backends.regions import HEAD, lasting

__all__ = ["Origin", "Packed", "find_origins", "gather"]

aten = torch.ops.aten

# More calls than any spelling needs.
_MOST = 64

# Which argument of a product is its weight, and along which axis of it sums run.
_WEIGHTS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (1, 0),
    aten.addmm.default: (2, 0),
    aten.linear.default: (1, 1),
}
_SHIFTS = (
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
)
_SAME_VALUES = (
    aten.view.default,
    aten.permute.default,
    aten.clone.default,
    aten._to_copy.default,
)


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight (q - zero) * scale, in groups along the axis that a product sums over.

    q      uint8, (outputs, groups, size of a group)
    zero   uint8 or as `scale`, (outputs, groups, 1); None: nothing is subtracted
    scale  of the weight's dtype, (outputs, groups, 1)
    axis   of the weight, that the product sums over
    """

    q: Tensor
    zero: Tensor | None
    scale: Tensor
    axis: int


@dataclass(frozen=True, eq=False)
class Origin:
    """The calls that make one product's weight, in order; the last one gives it."""

    head: fx.Node
    calls: tuple[fx.Node, ...]

    @property
    def weight(self) -> fx.Node:
        return self.calls[-1]

    def packed(self, values: Mapping[fx.Node, Tensor]) -> Packed | Tensor:
        """The weight from the values of placeholders and constants.

        A Tensor, the weight itself, if neighbours along the axis share no scale.
        """
        found = dict(values)
        with torch.no_grad():
            for node in self.calls:
                target: Any = node.target
                found[node] = target(*fx.map_arg(node.args, found.__getitem__), **node.kwargs)
            tail = _tail(self.weight)
            assert tail is not None
            return _grouped(tail, found, _WEIGHTS[self.head.target][1]) or found[self.weight]


def gather(aten_graph: AtenGraph, examples: Sequence[Any], refuses: Callable[[Any], bool]) -> None:
    """Mark what makes weights of products, so that it runs with them; each gets calls of its own.

    examples   per input, as for `note_values`
    refuses    operators that must not be among these calls
    """
    good = lasting(aten_graph, examples)
    for origin in list(_origins(aten_graph.graph, set(good))):
        if any(refuses(node.target) for node in (*origin.calls, origin.head)):
            continue
        _set_apart(aten_graph.graph, origin)


def _set_apart(graph: fx.Graph, origin: Origin) -> None:
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(origin.head):
        for node in origin.calls:
            copies[node] = graph.node_copy(node, lambda x: copies.get(x, x))
            copies[node].meta[HEAD] = origin.head
    origin.head.replace_input_with(origin.weight, copies[origin.weight])
    for node in reversed(origin.calls):
        if not node.users:
            graph.erase_node(node)


def find_origins(graph: AtenGraph) -> list[Origin]:
    """The origins that `gather` marked, in a part of its graph."""
    marked = {node for node in graph.graph.nodes if HEAD in node.meta}
    if not marked:
        return []
    return list(_origins(graph.graph, set(graph.placeholders), marked))


def _origins(
    graph: fx.Graph, inputs: set[fx.Node], among: set[fx.Node] | None = None
) -> Iterator[Origin]:
    """Products whose weight is unpacked from `inputs` and constants alone."""
    for head in graph.nodes:
        if head.op != "call_function" or head.target not in _WEIGHTS:
            continue
        weight = head.args[_WEIGHTS[head.target][0]]
        if head.args.count(weight) != 1 or weight.op != "call_function":
            continue
        calls = _above(weight, inputs)
        if calls is None or (among is not None and not among.issuperset(calls)):
            continue
        if _is_unpacked(weight) and _tail(weight) is not None:
            yield Origin(head, tuple(calls))


def _above(weight: fx.Node, inputs: set[fx.Node]) -> list[fx.Node] | None:
    """All calls that a value depends on, in order; None if they need more than `inputs`."""
    found: set[fx.Node] = set()
    waiting = [weight]
    while waiting:
        node = waiting.pop()
        if node in found or node in inputs or node.op == "get_attr":
            continue
        val = node.meta.get("val")
        if not isinstance(node.target, OpOverload) or not isinstance(val, Tensor):
            return None
        is_open = any(not isinstance(n, int) for n in val.shape)
        if is_open or not is_pure(node) or len(found) == _MOST:
            return None
        found.add(node)
        waiting += node.all_input_nodes
    return [node for node in weight.graph.nodes if node in found]


# ------------------------------------------------------------------------------ values


@dataclass(frozen=True, eq=False)
class _Tail:
    """The last calls of an origin: from q, the nodes through which it becomes the weight."""

    q: fx.Node
    steps: tuple[fx.Node, ...]


def _tail(weight: fx.Node) -> _Tail | None:
    steps: list[fx.Node] = []
    node: Any = weight
    wanted = [aten.sub.Tensor, aten.mul.Tensor]
    while isinstance(node, fx.Node) and node.op == "call_function":
        bounds = None if node.meta["val"].is_floating_point() else interval(node)
        is_scaled = aten.mul.Tensor not in wanted
        is_small = bounds is not None and bounds[0] >= 0 and bounds[1] <= 255 and fits(node)
        if is_scaled and is_small:
            return _Tail(node, tuple(reversed(steps)))
        if node.target in wanted and (is_scaled or node.target is aten.mul.Tensor):
            del wanted[wanted.index(node.target) :]
        elif node.target not in _SAME_VALUES:
            return None
        steps.append(node)
        node = _source(node)
    return None


def _source(step: fx.Node) -> Any:
    """The operand by which q comes in: of two factors, the one that is unpacked."""
    first = step.args[0]
    if step.target is aten.mul.Tensor and not _is_unpacked(first):
        return step.args[1]
    return first


def _is_unpacked(x: Any) -> bool:
    return isinstance(x, fx.Node) and (x.target in _SHIFTS or any(map(_is_unpacked, x.args)))


def _grouped(tail: _Tail, values: Mapping[fx.Node, Tensor], axis: int) -> Packed | None:
    """The weight in the largest groups that share a scale; None if there are none."""
    tables: list[Tensor] = [values[tail.q]]  # q, scale, zero
    for step in tail.steps:
        if step.target in (aten.mul.Tensor, aten.sub.Tensor):
            (other,) = (x for x in step.args[:2] if x is not _source(step))
            table = values[other] if isinstance(other, fx.Node) else torch.tensor(other)
            at = len(tables) if step.target is aten.sub.Tensor else 1
            tables.insert(at, table)
            shape: Any = step.meta["val"].shape
            tables = [x.expand(shape) for x in tables]
        elif step.target is aten.view.default:
            shape = step.args[1]
            tables = [x.reshape(shape) for x in tables]
        elif step.target is aten.permute.default:
            order: Any = step.args[1]
            tables = [x.permute(order) for x in tables]
    size = _group_size([x.movedim(axis, 1) for x in tables[1:]])
    weight = values[tail.steps[-1]]
    *groups, wanted = (
        x.movedim(axis, 1).reshape(weight.shape[1 - axis], -1, size) for x in (*tables, weight)
    )
    q, scale, *zeros = groups
    zero = zeros[0][..., :1] if zeros else torch.zeros(1, dtype=torch.uint8)
    if zero.is_floating_point() or int(zero.min()) < 0 or int(zero.max()) > 255:
        zero = zero.to(weight.dtype)
    else:
        zero = zero.to(torch.uint8)
    q, scale = q.to(torch.uint8), scale[..., :1].to(weight.dtype)
    again = (q.to(weight.dtype) - zero.to(weight.dtype)) * scale
    if size == 1 or not torch.allclose(again, wanted, rtol=1e-3, atol=0):
        return None
    return Packed(q, zero if zeros else None, scale, axis)


def _group_size(tables: Sequence[Tensor]) -> int:
    """How many neighbours along axis 1 have the same row in all tables."""
    n = tables[0].shape[1]
    size = n
    for table in tables:
        changes = (table[:, 1:] != table[:, :-1]).any(0).nonzero().flatten() + 1
        for at in changes.tolist():
            size = math.gcd(size, at)
    return size
