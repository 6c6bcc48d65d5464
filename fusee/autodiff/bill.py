"""What a graph costs as it was captured, and what kernels for it cost.

Matrix products and other calls of ATen cost the same in both, and are left out. Loops read and
write once what eager's operators pass on through memory, one after the other.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten import AtenGraph, is_view, key_of, memory_root
from fusee.autodiff.min_cut import REDUCTIONS, Costs, Kind, Prices, kind, kind_of, name_of, op_of
from fusee.fake.layouts import is_written, same_ints
from fusee.source import overloads, tensors_in

# Operators that read the elements of their first operand that others say, or write there.
_PICKING = frozenset("_unsafe_index embedding gather index index_select take".split())
_PUTTING = frozenset(
    "_unsafe_index_put index_add index_copy index_put put scatter scatter_add"
    " scatter_reduce".split()
)
_FILLS = overloads("full full_like")
_COPIES = frozenset(("clone", "_to_copy"))  # by whatever name the program calls them
_PAGE = 4096  # bytes
_EMPTY = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())


class Charge(NamedTuple):
    """A call of eager's: its kinds as `Prices.own` has them, what it passes, both prices, and what
    of the first is the host's."""

    kind: str
    once: str
    passed: float
    own: float
    loop: float
    host: float


class Bill(NamedTuple):
    """In the unit of Prices.

    calls     the operators that eager calls, and the views that it takes besides results
    captured  of all of them
    kernels   of all loops, with what a compiled call costs by itself
    singles   what stays a call among them, see `_cheaper_calls`
    unit      Prices'
    """

    calls: list[Charge]
    captured: float
    kernels: float
    singles: dict[fx.Node, tuple[float, float]]
    unit: float

    @property
    def is_captured(self) -> bool:
        """Whether it runs as captured, which it does within what prices are uncertain by."""
        return self.captured <= 1.1 * self.kernels

    def __str__(self) -> str:
        listed = ", ".join(f"{call.kind} {call.own / self.unit:.1f}" for call in self.calls)
        calls = f"{self.captured / self.unit:.1f} us ({listed or 'products'})"
        return f"its calls cost {calls}, kernels {self.kernels / self.unit:.1f}"


def bill(
    aten: AtenGraph,
    halves: Sequence[AtenGraph],
    loops: Container[Any],
    prices: Prices,
    times: float = 1,
) -> Bill:
    """
    halves   what `aten` is compiled as
    loops    the operators that become loops
    times    as Costs has it
    """
    costs = Costs(aten, prices, times)
    parts = [costs if half is aten else Costs(half, prices, times) for half in halves]
    looped = _loops(aten, loops)
    results, calls = {*aten.results}, _calls(aten, looped)
    host, kernels = float(prices.train if len(halves) > 1 else prices.run), 0.0
    others = (x for x in aten.graph.nodes if x.op == "call_function" and x.target not in loops)
    if len(halves) > 1 and any(kind_of(x.target) is Kind.HEAVY for x in others):
        host += prices.guard
    charges = list[Charge]()
    # a pass within the graph is the engine's, and autograd notes each call that is ahead of it
    if ahead := sum(bool(nodes[0].meta.get("ahead")) for nodes in calls.values()):
        price = prices.train + 2 * prices.call * ahead
        charges.append(Charge("a pass of autograd", "", 0, price, 0, price))
    priced, layouts = dict[str, tuple[float, float]](), dict[Any, str]()
    is_listed = len(prices.own) > 1  # else no price is of a layout
    for (_, full_name), nodes in calls.items():
        said = name = full_name.partition("::")[2]
        if not name or (len(nodes) == 1 and name_of(op_of(nodes[0])) in _COPIES):
            name = name_of(op_of(nodes[0]))
        kind = f"{name}{_known_layout(costs, nodes, layouts) if is_listed else ''}"
        if kind not in priced:
            priced[kind] = price_of(prices.own, kind)
        own, loop = priced[kind]
        passed = 0 if name in _EMPTY else _passed(costs, nodes)
        alike = prices.own.get(f"{name} once", (prices.call, prices.run))
        name = said if said == "copy_" else name  # into memory that is there
        once = f"{name}{' number' * any(map(_has_number, nodes))} once"
        usual = prices.own.get(f"{name} once", alike)
        call, alone = prices.own.get(once, usual)
        charges.append(Charge(kind, once, passed, call + own * passed, loop * passed, call))
        # fusion saves none of it
        kernels += max(0, alone - prices.run) + max(0, loop - prices.near) * passed
    views = [x for x in aten.graph.nodes if is_view(x.target) and x not in results]
    price = prices.view * len(views)
    charges += [Charge(f"{len(views)} views", "", 0, price, 0, price)] if views else []
    singles: dict[fx.Node, tuple[float, float]] = {}
    for half, part in zip(halves, parts, strict=True):
        inner = looped if half is aten else _loops(half, loops)
        passed = _passed(part, inner, True)
        kernels += prices.near * passed
        if len(halves) > 1:
            share = passed / (prices.move * prices.cache)
            kernels += prices.cold * min(1 / len(halves), share)
        singles |= {} if half.symbols else _cheaper_calls(part, inner, layouts)
    kernels -= sum(as_loop - as_call for as_call, as_loop in singles.values())
    kernels = prices.both(host, kernels)
    captured = prices.both(sum(c.host for c in charges), sum(c.own - c.host for c in charges))
    return Bill(charges, captured, kernels, singles, prices.unit)


def _calls(aten: AtenGraph, loops: Sequence[fx.Node]) -> dict[tuple[int, str], list[fx.Node]]:
    """The nodes of each call of eager's, by its number and name."""
    results, written = {*aten.results}, {aten.results[x.position] for x in aten.mutations}
    calls: dict[tuple[int, str], list[fx.Node]] = {}
    for node in loops:
        is_clone = node.target is torch.ops.aten.clone.default and node in results
        if is_clone and node.meta.get("backward"):
            continue  # of a gradient that is a view: eager gives the view
        unnamed = (-len(calls), "aten::copy_") if is_clone and node in written else (0, "")
        calls.setdefault(node.meta.get("call", unnamed), []).append(node)
    return calls


def _cheaper_calls(
    costs: Costs, loops: Sequence[fx.Node], layouts: dict[Any, str]
) -> dict[fx.Node, tuple[float, float]]:
    """What ATen's kernel computes for much less than a loop, with both prices.

    A loop saves what it has in common with others: a value in memory is written and read.
    """
    prices, inner, found = costs.prices, {*loops}, {}
    calls = Counter(node.meta.get("call") for node in inner)
    names = {kind.partition(" ")[0] for kind in prices.own}
    for node in inner:
        name = name_of(op_of(node))
        if calls[node.meta.get("call")] > 1 or name not in names:
            continue
        kind = f"{name}{_known_layout(costs, [node], layouts)}"
        if kind not in prices.own:
            continue
        passed, (own, loop) = _passed(costs, [node]), prices.own[kind]
        shared = {root for x in node.all_input_nodes if (root := _memory(x)) in inner}
        if any(user in inner for user in node.users):
            shared.add(node)
        saved = 2 * prices.near * prices.move * sum(map(costs.bytes, shared))
        as_call, as_loop = 4 * prices.call + own * passed, loop * passed - saved
        if 1.2 * as_call < as_loop:
            found[node] = as_call, as_loop
    return found


@functools.cache
def _parameters(op: OpOverload) -> dict[str, tuple[int, str, Any]]:
    """Place, type and default of each, by name."""
    rows = enumerate(op._schema.arguments)
    return {x.name: (place, str(x.type), x.default_value) for place, x in rows}


def _has_number(node: fx.Node) -> bool:
    given = zip(node.args, _parameters(op_of(node)).values())
    return any(type(x) in (int, float) and y in ("Tensor", "number") for x, (_, y, _) in given)


def _loops(aten: AtenGraph, loops: Container[Any]) -> list[fx.Node]:
    nodes = aten.graph.nodes
    # whatever its operator, what has complex operands or results is ATen's call
    odd = {x for x in nodes if any(t.is_complex() for t in tensors_in(x.meta.get("val")))}
    called = (x for x in nodes if x.target in loops and not is_view(x.target))
    return [x for x in called if odd.isdisjoint((x, *x.all_input_nodes))]


def price_of(own: Mapping[str, tuple[float, float]], kind: str) -> tuple[float, float]:
    """What is known of a kind; of what is not listed, of the one that differs by fewest words."""
    if kind not in own:
        # in training `log_softmax` is `_log_softmax`, `layer_norm` is `native_layer_norm`
        kind = kind.lstrip("_").removeprefix("native_")
    if kind in own:
        return own[kind]
    name, *layout = kind.split(" ")
    _, usual = own[""]  # of an operator that nobody measured loops are taken to be better
    words = {*layout}
    listed = [x for x in own if x.partition(" ")[0] == name and not x.endswith("once")]
    nearest = min(
        listed, key=lambda x: len(words.symmetric_difference(x.split(" ")[1:])), default=""
    )
    found, has = own[nearest] if nearest else (1.5 * usual, usual), {*nearest.split(" ")[1:]}
    for word in words ^ has:
        factors, power = own.get(f" {word}", (1, 1)), 1 if word in words else -1
        found = found[0] * factors[0] ** power, found[1] * factors[1] ** power
    return found


def _known_layout(costs: Costs, nodes: Sequence[fx.Node], layouts: dict[Any, str]) -> str:
    """`_layout`, once for all calls of a form; `layouts` has those so far, and of which nodes."""
    if (known := layouts.get(of := tuple(nodes))) is not None:
        return known
    _, full_name = nodes[0].meta.get("call", (0, "")) if len(nodes) > 1 else (0, "")
    # equal for calls of known sizes that differ in what lies in memory alone
    parts: list[Any] = [full_name]
    for node in nodes:
        tensors = [t for x in (node, *node.all_input_nodes) for t in tensors_in(x.meta["val"])]
        if any(t._has_symbolic_sizes_strides for t in tensors):
            parts.append(node)
            continue
        literals = fx.node.map_arg((node.args, node.kwargs), lambda x: None)
        places = [(x.dtype, x.shape, x.stride()) for x in tensors]
        parts.append((node.target, key_of(literals), *places))
    form = tuple(parts)
    if form not in layouts:
        layouts[form] = _layout(costs, nodes)
    layouts[of] = layouts[form]
    return layouts[form]


# ---------------------------------------------------------------------------- layout
# What decides on lanes, as words:
#
# narrow     of less than 4 bytes
# integer    no floating point
# number     nor operands of that, and one is a number: what divides by it multiplies
# across     a result's lanes lie elsewhere in an operand; far: each on a page of its own, there
#            and back
# permuted   a result's lanes are not its last axis
# tiny       there are two or three of them; short, scant, brief: some more
# down       other axes are reduced, or gone along, than the one that an operand's lanes are on
# few        a result is of few elements then
# spread     an operand is broadcast
# repeated   elements of an operand lie in one place
# order      of a norm, another one than 2, for which ATen has a kernel of its own
#
# What a call says in text is a word, too: one way of several to compute it.


def _layout(costs: Costs, nodes: Sequence[fx.Node]) -> str:
    """The words of a call of eager's, each after a space."""
    own = [x for x in nodes if x.meta.get("call", (0, ""))[1].endswith(f"::{name_of(op_of(x))}")]
    (result, *_) = tensors_in((own or nodes)[-1].meta["val"])
    given = [t for node in nodes for x in node.all_input_nodes for t in tensors_in(x.meta["val"])]
    lanes, is_moved = _lanes(result), kind_of(nodes[0].target) is Kind.MOVING
    sums = [x for x in given if x.dim() and name_of(op_of(nodes[0])) in REDUCTIONS]
    sums = [x for x in sums if not same_ints(x.shape, result.shape)]
    picks = name_of(op_of(nodes[0])) in _PICKING | _PUTTING
    dim = _given(nodes[0], "dim") if picks or not is_moved else ()
    axes = [k for k in (dim if isinstance(dim, (tuple, list)) else (dim,)) if type(k) is int]
    # lanes of an operand run along none of these axes; if there are none, by its shape
    is_down = any(
        not any({k, k - x.dim()} & {*axes} for k in _lanes(x))
        if axes
        else same_ints(x.shape[-1:], result.shape[-1:])
        for x in ((given[:1] if picks else given) if axes else sums)
        if x.dim()
    )
    least = max(1, costs.count(result))
    rows = [_reduced(costs, x, axes, least == 1) for x in sums if not is_down]
    length = max(rows or [costs.size(result.shape[k]) for k in lanes], default=1)
    apart = [_apart(costs, x, result, lanes, is_moved) for x in given]
    is_integer = not any(x.dtype.is_floating_point or x.is_complex() for x in given)
    places = (pair for x in given if costs.count(x) >= least for pair in zip(x.shape, x.stride()))
    smaller = (x for x in given if costs.count(x) < costs.count(result) and not is_moved)
    # from the last axis on: each is the result's, or has one element
    spread = (
        zip(x.shape[::-1], result.shape[::-1]) for x in smaller if 0 < x.dim() <= result.dim()
    )
    texts = {
        text: True
        for node in nodes
        for name, (_, _, usual) in _parameters(op_of(node)).items()
        if isinstance(text := node.kwargs.get(name, _given(node, name)), str) and text != usual
    }
    words = {
        "narrow": any(x.itemsize < 4 for x in (result, *given)),
        "integer": not (result.dtype.is_floating_point or result.is_complex()),
        "number": is_integer and any(map(_has_number, nodes)),
        "across": any(here for here, _ in apart),
        "far": any(min(pair) >= _PAGE for pair in apart),
        "permuted": bool(lanes) and lanes[-1] < result.dim() - 1,
        "tiny": 1 < length < 4,
        "short": 4 <= length < 16,
        "scant": 16 <= length < 32,
        "brief": 32 <= length <= 128,
        "down": is_down,
        "few": is_down and any(least < costs.count(x) < 16 * least for x in sums),
        "spread": any(all(is_written(n, 1) or is_written(n, m) for n, m in x) for x in spread),
        "repeated": any(is_written(step, 0) and not is_written(n, 1) for n, step in places),
        "order": any(_given(x, "ord") not in (None, 2) for x in nodes),
        **texts,
    }
    return "".join(f" {word}" for word, holds in words.items() if holds)


def _lanes(x: Tensor) -> list[int]:
    return [k for k, step in enumerate(x.stride()) if is_written(step, 1)]


def _reduced(costs: Costs, x: Tensor, axes: Sequence[int], is_all: bool) -> int:
    """How many elements beside one another are reduced; by the last axis if nobody says which."""
    own = {k % x.dim() for k in axes} or {*range(x.dim())} if axes or is_all else {x.dim() - 1}
    length = 1
    for k in sorted(own, key=lambda k: costs.size(x.stride(k))):
        if costs.size(x.stride(k)) <= length or length == 1:
            length *= costs.size(x.shape[k])
    return length


def _given(node: fx.Node, name: str) -> Any:
    """What a call was given for a parameter, by its place; None of none."""
    place = _parameters(op_of(node)).get(name, (len(node.args),))[0]
    return node.args[place] if place < len(node.args) else None


def _apart(
    costs: Costs, x: Tensor, result: Tensor, lanes: Sequence[int], is_moved: bool
) -> tuple[int, int]:
    """How many bytes apart a result's lanes lie in an operand, and the operand's in the result.

    0: beside one another, or at one place.

    is_moved: it lies in a result of another shape as it is, as what is padded or joined does.
    """
    lead = result.dim() - x.dim()
    if not same_ints(x.shape, result.shape) and not (is_moved and x.dim()):
        return 0, 0

    def widest(t: Tensor, axes: Iterable[int]) -> int:
        inside = [k for k in axes if 0 <= k < t.dim() and not is_written(t.shape[k], 1)]
        found = [n for n in map(t.stride, inside) if not any(is_written(n, m) for m in (0, 1))]
        return max((costs.size(n) * t.itemsize for n in found), default=0)

    return widest(x, (k - lead for k in lanes)), widest(result, (k + lead for k in _lanes(x)))


def _passed(costs: Costs, nodes: Collection[fx.Node], whole: bool = False) -> int:
    """What it costs to bring the operands of all these nodes from memory, and their results there.

    whole   a tensor that a part is written into is written anew; else it costs the part alone, as
            do sums into zeros that were made for them
    """
    inner, read, total = set(nodes), dict[fx.Node, int](), 0
    for node in nodes:
        given, name = node.all_input_nodes, name_of(op_of(node))
        into_new = name in _PUTTING and not whole and len(given) > 1
        # made of one number, for one user
        into_new = into_new and len(given[0].users) == 1 and given[0].target in _FILLS
        if into_new or (name.endswith("_scatter") and kind(node) is Kind.MOVING):
            given = given[1:]
            total += costs.bytes(node if whole else given[-1]) if given else 0
        else:
            row = list(node.users)
            for user in row:  # in memory for a user of it, or of its views
                if user.target is operator.getitem or is_view(user.target):
                    row += user.users
                elif user not in inner:
                    total += costs.bytes(node)
                    break
        for x in given:
            root = _memory(x)
            if root not in inner:
                size = min(costs.bytes(x), costs.bytes(root))
                if name in _PICKING and x is given[0]:
                    size = min(size, costs.bytes(node))
                read[root] = max(read.get(root, 0), size)
    return (total + sum(read.values())) * costs.prices.move


def _memory(node: fx.Node) -> fx.Node:
    node = memory_root(node)
    return node if node.target is not operator.getitem else memory_root(node.all_input_nodes[0])
