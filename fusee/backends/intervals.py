"""Between which bounds the integers of a graph lie, as far as the graph itself says.

For engines that compute integers in fewer bits than torch: they may have those that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.graph import AtenGraph
from fusee.backends.followed import Bound
from fusee.backends.regions import Region, lasting

__all__ = ["LARGEST_SIZE", "QUANTIZING", "bounds", "fits", "forget_read", "interval", "note_values"]

aten = torch.ops.aten

Interval = tuple[int, int]

# What a symbolic size is taken to be at most; engines check it at each call.
LARGEST_SIZE = 2**30

# Operators of exported quantized models, by name: they exist once a library of quantization is
# imported. For those that quantize: where the least of the numbers is among the arguments.
QUANTIZING: dict[str, int | None] = {
    "quantized_decomposed.quantize_per_tensor.default": 3,
    "quantized_decomposed.quantize_per_channel.default": 4,
    "quantized_decomposed.dequantize_per_tensor.default": None,
    "quantized_decomposed.dequantize_per_channel.default": None,
}

_INT32 = (-(2**31), 2**31 - 1)


def fits(node: fx.Node) -> bool:
    """Whether an integer tensor holds nothing that its dtype, or 32 bits, could not."""
    found = interval(node)
    if found is None:
        return False
    low, high = _range(node.meta["val"].dtype) or _INT32
    return max(low, _INT32[0]) <= found[0] and found[1] <= min(high, _INT32[1])


def note_values(graph: AtenGraph, examples: Sequence[Any]) -> None:
    """Take constants and integer buffers for what they hold now.

    Engines look at buffers again when these change.
    """
    known = lasting(graph, examples)
    for node in graph.graph.find_nodes(op="get_attr"):
        known[node] = graph.constants[str(node.target)]
    for node, x in known.items():
        if _range(x.dtype) and x.numel():
            low, high = torch.aminmax(x.detach())
            node.meta["interval"] = int(low), int(high)


def forget_read(graph: AtenGraph, calls: Sequence[fx.Node], examples: Sequence[Any]) -> bool:
    """Take nothing for what these calls read in a buffer: only regions look at theirs again.

    Whether anything was taken for that.
    """
    known = {node for node in lasting(graph, examples) if node.meta.get("interval") is not None}
    read = {x for node in calls for x in node.all_input_nodes if x in known}
    found = {x for x in read if interval(x) != _read_anew(x)}
    for node in graph.graph.nodes if found else ():
        if node in found:
            node.meta["interval"] = _read_anew(node)
        elif node.op == "call_function":
            node.meta.pop("interval", None)
    return bool(found)


def bounds(region: Region) -> list[Bound]:
    """What the integer buffers of a region were taken for, which calls look at again."""
    fixed = set(region.fixed())
    found = [(k, x, x.meta.get("interval")) for k, x in enumerate(region.graph.placeholders)]
    return [
        Bound(k, node.name, *between)
        for k, node, between in found
        if k in fixed and between is not None and _range(region.examples[k].dtype)
    ]


def interval(x: Any) -> Interval | None:
    """The least and the greatest value of an integer or bool tensor; None: not known."""
    if isinstance(x, int):
        return int(x), int(x)
    if not isinstance(x, fx.Node):
        return None
    if "interval" not in x.meta:
        x.meta["interval"] = _find(x)
    found: Interval | None = x.meta["interval"]
    return found


def _find(node: fx.Node) -> Interval | None:
    val = node.meta.get("val")
    if not isinstance(val, Tensor) or val.is_floating_point() or val.is_complex():
        return None
    if val.dtype == torch.bool:
        return 0, 1
    if node.op != "call_function":
        return _read_anew(node)
    at = QUANTIZING.get(str(node.target))
    if at is not None:
        return _hull([_size(n) for n in node.args[at : at + 2]])
    rule = _RULES.get(node.target)
    return rule(node) if rule is not None else None


def _read_anew(node: fx.Node) -> Interval | None:
    """What a call may find in an integer input."""
    dtype = node.meta["val"].dtype
    return _range(dtype) if dtype.itemsize <= 4 else None


def _range(dtype: torch.dtype) -> Interval | None:
    if dtype.is_floating_point or dtype.is_complex:
        return None
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def _size(x: Any) -> Interval | None:
    """A number among arguments, which may be a symbolic size."""
    if isinstance(x, int):
        return int(x), int(x)
    if isinstance(x, (float, fx.Node)) or x is None:
        return None
    return -LARGEST_SIZE, LARGEST_SIZE


def _hull(found: Sequence[Interval | None]) -> Interval | None:
    known = [one for one in found if one is not None]
    if len(known) != len(found) or not known:
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _passed(node: fx.Node) -> Interval | None:
    return interval(node.args[0])


def _joined(node: fx.Node) -> Interval | None:
    return _hull([interval(x) for x in node.args[0]])  # type: ignore[union-attr]


def _either(*positions: int) -> Callable[[fx.Node], Interval | None]:
    return lambda node: _hull([interval(node.args[k]) for k in positions])


def _padded(node: fx.Node) -> Interval | None:
    value = node.args[2] if len(node.args) > 2 else 0
    return _hull([interval(node.args[0]), interval(value)])


def _arange(node: fx.Node) -> Interval | None:
    start, end = map(_size, node.args[:2])
    if start is None or end is None:
        return None
    step = node.args[2] if len(node.args) > 2 else 1
    if not isinstance(step, int) or step < 1:
        return _hull([start, end])
    return start[0], max(start[1], end[1] - 1)


def _full(node: fx.Node) -> Interval | None:
    return _size(node.args[1])


def _sums(sign: int) -> Callable[[fx.Node], Interval | None]:
    def rule(node: fx.Node) -> Interval | None:
        a, b = (interval(x) or _symbolic(x) for x in node.args[:2])
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        if a is None or b is None or not isinstance(alpha, int):
            return None
        ends = [x + sign * alpha * y for x in a for y in b]
        return min(ends), max(ends)

    return rule


def _symbolic(x: Any) -> Interval | None:
    return None if isinstance(x, fx.Node) else _size(x)


def _product(node: fx.Node) -> Interval | None:
    a, b = (interval(x) or _symbolic(x) for x in node.args[:2])
    if a is None or b is None:
        return None
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _reversed(node: fx.Node) -> Interval | None:
    a, b = (interval(x) or _symbolic(x) for x in node.args[:2])
    if a is None or b is None or len(node.args) > 2 or node.kwargs:
        return None
    return b[0] - a[1], b[1] - a[0]


def _cumulative(node: fx.Node) -> Interval | None:
    found, val = interval(node.args[0]), node.args[0].meta["val"]  # type: ignore[union-attr]
    if found is None or not val.dim():
        return found
    count = val.shape[node.args[1]]
    n = count if isinstance(count, int) else LARGEST_SIZE
    return min(found[0], found[0] * n), max(found[1], found[1] * n)


def _masked(node: fx.Node) -> Interval | None:
    found = [b for b in map(interval, node.args) if b is not None and b[0] >= 0]
    return (0, min(high for _, high in found)) if found else None


def _magnitude(node: fx.Node) -> Interval | None:
    found = interval(node.args[0])
    return None if found is None else (max(0, found[0], -found[1]), max(-found[0], found[1]))


def _negated(node: fx.Node) -> Interval | None:
    found = interval(node.args[0])
    return None if found is None else (-found[1], -found[0])


_RULES: dict[Any, Callable[[fx.Node], Interval | None]] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten.permute.default,
            aten.squeeze.dims,
            aten.unsqueeze.default,
            aten.expand.default,
            aten.repeat.default,
            aten.slice.Tensor,
            aten.select.int,
            aten.clone.default,
            aten.flip.default,
            aten.roll.default,
            aten.index.Tensor,
            aten.index_select.default,
            aten.gather.default,
            aten.embedding.default,
        ),
        _passed,
    ),
    aten.cat.default: _joined,
    aten.stack.default: _joined,
    aten.copy.default: _either(1),
    aten.where.self: _either(1, 2),
    aten.masked_fill.Scalar: _either(0, 2),
    aten.slice_scatter.default: _either(0, 1),
    aten.select_scatter.default: _either(0, 1),
    aten.maximum.default: _either(0, 1),
    aten.minimum.default: _either(0, 1),
    aten.constant_pad_nd.default: _padded,
    aten.arange.start_step: _arange,
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.new_full.default: lambda node: _size(node.args[2]),
    aten.zeros_like.default: lambda node: (0, 0),
    aten.ones_like.default: lambda node: (1, 1),
    aten._to_copy.default: _passed,
    aten.add.Tensor: _sums(1),
    aten.add.Scalar: _sums(1),
    aten.sub.Tensor: _sums(-1),
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _product,
    aten.rsub.Scalar: _reversed,
    aten.cumsum.default: _cumulative,
    aten.abs.default: _magnitude,
    aten.neg.default: _negated,
    aten.bitwise_and.Scalar: _masked,
    aten.bitwise_and.Tensor: _masked,
    aten.tril.default: lambda node: _hull([(0, 0), interval(node.args[0])]),
    aten.triu.default: lambda node: _hull([(0, 0), interval(node.args[0])]),
}
