"""Splits an AtenGraph between an engine (OpenVINO, ONNX Runtime, ...) and our own compiler.

    claims    engine.claim says for each call: yes, or why not
    levels    what can run together, claimed or not, one level after the other
    worth     regions that cost more to enter than they save go back to the rest, and say so
    parts     each level as an AtenGraph of its own: fusee.aten.rewriter

`split` only decides; `split_run.py` compiles the parts and calls them one after another.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fusee.aten import AtenGraph, arguments, is_pure, is_view
from fusee.aten.rewriter import Editor, val
from fusee.aten.torch_api import OpOverload
from fusee.autodiff.min_cut import Costs
from fusee.backends.registry import EngineOptions
from fusee.backends.report import UnclaimedRow
from fusee.errors import BackendError, user_line
from fusee.fake.layouts import is_written
from fusee.runtime import in_child
from fusee.runtime.change_detection import Derivation, DerivedSet, Snapshot, why_not_derivable
from fusee.source import OpRules, overloads, tensors_in
from fusee.sym import Expr, Size, hint, known_ge, maximum, minimum
from fusee.sym.ranges import COMPARISONS

# ---------------------------------------------------------------------------- worth
# Whether an engine should have a region that it could have.
#
# Engines write down what a permutation or a strided slice gives, one element after another; our
# compiler reads through them, and mostly pays nothing. An element so copied takes OpenVINO about as
# long as a hundred operations of a matrix product. A region that copies for longer than it
# multiplies is therefore ours: the scan of a state space model has 15 operations per element that
# is copied, vision models with windows have 600, language models over 1,000.

aten = torch.ops.aten


_HEAVY = frozenset(
    overloads("addmm baddbmm bmm convolution linear mm scaled_dot_product_attention")
)
_COPIES = (aten.clone.default, aten.copy.default)
# Operations of products in the time that one element takes to be put elsewhere.
_FLOPS_OF_COPY = 100
# Elements that are copied in a millisecond, about: less is not worth leaving the engine for.
_FEW = 1 << 20


def why_not_worth(nodes: Sequence[fx.Node], costs: Costs, least: int, device: str) -> str | None:
    """Why these calls, one region, are better not an engine's; None if they are good for it.

    least    calls that compute, unless one of them is heavy
    device   the engine's: copies are weighed on the "CPU", which our compiler has as well
    """
    calls = [n for n in nodes if not is_view(n.target) and n.target not in _COPIES]
    if len(calls) < least and not any(node.target in _HEAVY for node in calls):
        return f"{len(nodes)} calls are too few"
    copied = 0  # elements that are put elsewhere one by one
    for node in nodes if device == "CPU" else ():
        val: Any = node.meta.get("val")
        is_moved = node.target is aten.slice.Tensor and len(node.args) > 4 and node.args[4] != 1
        if node.target is aten.permute.default:
            order: Any = node.args[1]
            moved = [axis for axis, n in zip(order, val.shape, strict=True) if not is_written(n, 1)]
            is_moved = moved != sorted(moved)
        copied += costs.count(val) if is_moved else 0
    if copied > _FEW and sum(map(costs.flops, nodes)) < _FLOPS_OF_COPY * copied:
        return (
            f"putting {copied / 1e6:.1f} million elements elsewhere takes longer than its products"
        )
    return None


# ---------------------------------------------------------------------------- regions


T = TypeVar("T")

# In a node's meta: the call that it runs together with, as what makes a weight for it.
HEAD = "head"

RegionCall = Callable[[tuple[Any, ...]], Sequence[Tensor]]
_NO_OPTIONS = EngineOptions()


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a graph, for an engine to compile.

    graph     functional, without mutations; its outputs are its results. All tensors in it are
              row-major: a part's other layouts are permuted before and after it, without copies.
              Only inputs with `is_static`, parameters and buffers, come as they are
    examples  per input of `graph` the tensor of the first call, or None for what is computed
    """

    name: str
    graph: AtenGraph
    examples: tuple[Any, ...]

    def calls(self) -> list[fx.Node]:
        """The calls to operators, in order."""
        found = self.graph.graph.nodes
        return [n for n in found if n.op == "call_function" and n.target is not operator.getitem]

    def conditions(self) -> list[str]:
        """What must hold of open sizes, in Python: no tensor is empty, what claims rely on.

        An engine declines calls where it does not.
        """
        to_size = self.graph.to_size
        nodes = (*self.graph.placeholders, *self.calls())
        vals = pytree.tree_leaves([node.meta["val"] for node in nodes])
        sizes = [to_size(n) for x in vals if isinstance(x, Tensor) for n in x.shape]
        found = [f"{size} >= 1" for size in sizes if isinstance(size, Expr)]
        for node in nodes:
            for a, op, b in node.meta.get("relies", ()):
                above = to_size(a) - to_size(b) if op == ">=" else to_size(b) - to_size(a)
                if not known_ge(above, 0):
                    found.append(f"{above} >= 0")
        return [*dict.fromkeys(found)]

    def open_inputs(self) -> tuple[str, ...]:
        """The inputs with open sizes, as `x[s0, 8]`."""
        found = []
        for spec in self.graph.inputs:
            if isinstance(spec.symbol, Expr):
                found.append(str(spec.symbol))
            elif any(isinstance(n, Expr) for n in spec.size):
                found.append(f"{spec.name}[{', '.join(map(str, spec.size))}]")
        return tuple(found)

    def fixed(self) -> tuple[int, ...]:
        """Positions of the inputs that its engine may hold as constants."""
        found = lasting(self.graph, self.examples)
        return tuple(k for k, node in enumerate(self.graph.placeholders) if node in found)

    def values(self, inputs: Mapping[int, Tensor]) -> dict[fx.Node, Tensor]:
        """What is known before a call: constants, and these inputs, by position."""
        graph = self.graph
        found = {graph.placeholders[k]: x for k, x in inputs.items()}
        constants = (node for node in graph.graph.nodes if node.op == "get_attr")
        return found | {node: graph.constants[str(node.target)] for node in constants}


def lasting(graph: AtenGraph, examples: Sequence[Any]) -> dict[fx.Node, Tensor]:
    """Inputs that engines may hold as constants: parameters and buffers whose changes show.

    Not those that the graph writes to: a region's call gets what they hold by then.

    examples   per input of `graph` the tensor of the first call, or None for what is computed
    """
    given = zip(graph.placeholders, graph.inputs, examples, strict=True)
    written = {mutation.index for mutation in graph.mutations}
    return {
        node: x
        for node, spec, x in given
        if spec.is_static and spec.index not in written
        if isinstance(x, Tensor) and why_not_derivable(x) is None
    }


class CompiledRegion(NamedTuple):
    """What an engine made of a region.

    call        takes the region's inputs, one per InputSpec, and returns its results; from several
                threads too
    spec        what another process makes its call of, with `Resuming`; None: it cannot
    primitives  what the engine executes and how often, if it can say
    """

    call: RegionCall
    spec: Any = None
    primitives: Callable[[], dict[str, int]] | None = None


class Engine:
    """What runs regions: one per compiled function, made with that function's options.

    name         of the backend, for reports: "openvino"
    device       where regions run, for reports: "CPU"
    device_type  of the tensors that it takes
    runs_aten    whether its kernels are ATen's
    options      a Table of its own rows
    """

    name: str
    device = "CPU"
    device_type = "cpu"
    runs_aten = False
    options: EngineOptions

    def __init__(self, options: Any = _NO_OPTIONS) -> None:
        self.options = options

    def keeps(self, op: OpOverload) -> bool:
        """Whether tracing leaves this operator whole, since the engine has it as it is."""
        raise NotImplementedError

    def claim(self, node: fx.Node) -> str | None:
        """None if the engine can run this call exactly as eager does, else the reason why not."""
        raise NotImplementedError

    def compile(self, region: Region) -> CompiledRegion:
        """The region, ready to be called.

        Results are fresh row-major tensors. Static inputs may be kept in whatever form, if calls
        notice that they changed (fusee.runtime.change_detection).

        raises   anything: the region is then compiled by us, with one warning
        """
        raise NotImplementedError

    def decompositions(self) -> Mapping[OpOverload, Callable[..., Any]]:
        """How operators that it does not keep are taken apart, where that is not as for us."""
        return {}

    def prepare(self, graph: AtenGraph, examples: Sequence[Any]) -> None:
        """Change a traced graph, given what its inputs are, before it is split."""

    @property
    def trains(self) -> bool:
        """Whether it has the forward of graphs that need gradients; else these are ours whole."""
        return False

    def kept_for(self) -> Sequence[str]:
        """What a later process must have in common to be given the parts; none: it is not."""
        return ()


@dataclass(frozen=True, eq=False)
class Levels:
    """The levels, in the order in which they run.

    levels    (True: the engine's; nodes in program order)
    unclaimed  one row per call that is not the engine's
    """

    levels: tuple[tuple[bool, tuple[fx.Node, ...]], ...]
    unclaimed: tuple[UnclaimedRow, ...]

    @property
    def rest(self) -> list[fx.Node]:
        """What is not the engine's."""
        return [n for is_claimed, nodes in self.levels if not is_claimed for n in nodes]

    @property
    def claimed(self) -> int:
        """How many calls the engine has."""
        return sum(len(_calls(nodes)) for is_claimed, nodes in self.levels if is_claimed)


def split(aten: AtenGraph, engine: Engine, least: int = 4, is_whole: bool = True) -> Levels:
    """Decide which calls go to the engine.

    least     a region with fewer calls that compute, and none that is heavy, goes back to the rest;
              if it is the whole graph, one is enough
    is_whole  False: it is a stage of one
    """
    reasons: dict[fx.Node, str] = {}
    for node in aten.graph.nodes:
        node.meta.pop("relies", None)
    for node in aten.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        reason = _never(node, engine) or engine.claim(node)
        if reason is not None:
            reasons[node] = reason
    for node in aten.graph.nodes:
        if node.meta.get(HEAD) in reasons:
            reasons[node] = "it makes a weight for a product that is not claimed"
    whole = aten.graph
    of_sizes: set[fx.Node] = set()
    for node in whole.nodes:
        if node.op == "call_function" and of_sizes.issuperset(node.all_input_nodes):
            of_sizes.add(node)
    for node in reversed(whole.nodes):
        if node in of_sizes and node.users and all(user in reasons for user in node.users):
            reasons.setdefault(node, "it is made of sizes alone, for what is not claimed")
    costs = Costs(aten)
    while True:
        levels = min(
            (_levels_from(aten.graph, reasons, first) for first in (True, False)),
            key=lambda levels: (sum(claimed for claimed, _ in levels), len(levels)),
        )
        enough = 1 if is_whole and len(levels) == 1 else least
        regions = [_calls(nodes) for claimed, nodes in levels if claimed]
        found = [(calls, why_not_worth(calls, costs, enough, engine.device)) for calls in regions]
        if all(why is None for _, why in found):
            break
        for calls, why in found:
            if why is not None:
                text = f"not worth entering {engine.name}: {why}"
                reasons.update(dict.fromkeys(calls, text))
    rows = [
        UnclaimedRow(op_text(n), why, user_line(n.meta.get("stack_trace")))
        for n, why in reasons.items()
    ]
    return Levels(tuple(levels), tuple(rows))


def show_hidden_rows(edit: Editor, engine: Engine) -> None:
    """Attention to nothing is 0 for ATen, and for engines NaN or a mean: a mask says where."""
    found: dict[fx.Node, fx.Node] = {}
    for node in edit.calls(aten.scaled_dot_product_attention.default):
        mask = arguments(node)["attn_mask"]
        if mask is None or (_never(node, engine) or engine.claim(node)) is not None:
            continue
        if mask not in found:
            with edit.before(node):
                is_bool = val(mask).dtype is torch.bool
                seen = mask if is_bool else edit.call(aten.ne.Scalar, mask, -math.inf)
                seen = edit.call(aten.any.dim, seen, -1, True)
                found[mask] = edit.call(aten.logical_not.default, seen)
        with edit.graph.inserting_after(node):
            shown = edit.call(aten.masked_fill.Scalar, node, found[mask], 0.0, like=node)
        node.replace_all_uses_with(shown, partial(operator.is_not, shown))


def op_text(node: fx.Node) -> str:
    """How reports call a node's operator: "aten.add.Tensor"."""
    return str(node.target)


def by_operator(*rows: tuple[T, str]) -> dict[OpOverload, T]:
    """A table of operators from rows of what is said of them, and their names."""
    return {op: said for said, names in rows for op in overloads(names)}


def relies(node: fx.Node, a: Any, op: str, b: Any) -> bool:
    """Whether `a >= b`, or `a <= b`; of open sizes, in this call. Each call of its region asks."""
    now = [x.node.hint if isinstance(x, torch.SymInt) else hint(x) for x in (a, b)]
    holds = COMPARISONS[op](*now)
    if holds and not type(a) is type(b) is int:
        node.meta["relies"] = [*node.meta.get("relies", ()), (a, op, b)]
    return holds


def indexed(node: fx.Node) -> list[tuple[fx.Node, bool, Any]]:
    """The index tensors of a call: (index, whether it may count from the end, size of the axis)."""
    args: Any = node.args
    if node.target is aten.embedding.default:
        return [(args[1], False, val(args[0]).shape[0])]
    if node.target in (aten.index_select.default, aten.gather.default):
        source = val(args[0])
        return [(args[2], False, source.shape[args[1]])] if source.dim() else []
    if node.target is aten.index.Tensor:
        sizes = val(args[0]).shape
        rows = enumerate(args[1])
        return [(x, True, sizes[k]) for k, x in rows if isinstance(x, fx.Node)]
    return []


def _never(node: fx.Node, engine: Engine) -> str | None:
    """What an engine is not asked for."""
    if not isinstance(node.target, OpOverload):
        return "it is no ATen operator"
    if node.target in engine.options.disabled_ops:
        return "the option disabled_ops names it"
    if not node.users:
        return "nothing needs its result: it is there because it may raise"
    if not is_pure(node):
        return "it draws from torch's random numbers, or has an effect"
    for other in (node, *node.all_input_nodes):
        device = torch.device(other.meta.get("device") or "cpu")
        if device.type != engine.device_type:
            return f"{other} is on {device}"
        if any(x.is_neg() or x.is_conj() for x in tensors_in(other.meta["val"])):
            return "its tensors are negated or conjugated when they are read"
    return None


def _levels_from(
    graph: fx.Graph, reasons: Mapping[fx.Node, str], first: bool
) -> list[tuple[bool, tuple[fx.Node, ...]]]:
    """first   whether level 0, and with it every second one, is the engine's"""
    level: dict[fx.Node, int] = {}
    members: dict[int, list[fx.Node]] = {}
    waiting: dict[fx.Node, list[fx.Node]] = {}
    effects = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if HEAD in node.meta:
            waiting.setdefault(node.meta[HEAD], []).append(node)
            continue
        odd = (node not in reasons) is not first
        if node.target is operator.getitem:
            odd = level[node.all_input_nodes[0]] % 2 == 1
        at = int(odd)
        for source in node.all_input_nodes:
            below = level.get(source, 0)
            at = max(at, below if (below % 2 == 1) is odd else below + 1)
        if node in reasons and not is_pure(node):
            at = effects = max(at, effects)
        for one in (*waiting.pop(node, ()), node):
            level[one] = at
            members.setdefault(at, []).append(one)
    return [((at % 2 == 0) is first, tuple(members[at])) for at in sorted(members)]


def _calls(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.target is not operator.getitem]


# ---------------------------------------------------------------------------- followed
# What an engine makes of a region with parameters as constants, made anew when they change.
#
# Constants are packed and folded by engines, so they are faster than inputs: by a third to a half.
# Parameters that keep changing, as in training, become inputs, and nothing is made anew after that.

# Row-major parameters by their position among the region's inputs.
Weights = Mapping[int, Tensor]


class Declined(Exception):
    """A region's call cannot serve these inputs; our compiler runs the region, for this call."""


class Bound(NamedTuple):
    """Between which integers a buffer lies: the region was made for these.

    position   among the region's inputs
    """

    position: int
    name: str
    low: int
    high: int

    def holds(self, x: Tensor) -> bool:
        """Whether this buffer lies there."""
        if not x.numel():
            return True
        low, high = torch.aminmax(x.detach())
        return bool(self.low <= low and high <= self.high)


class Pool(Generic[T]):
    """Things of which each serves one call at a time: as many as calls that run at once.

    make   makes one more
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.make, self.free = make, list[T]()
        self.give = self.free.append

    def take(self) -> T:
        """One that no other call has until it is given back."""
        try:
            return self.free.pop()
        except IndexError:  # to ask first whether there is one would let another thread take it
            return self.make()


class Made(NamedTuple, Generic[T]):
    """What was made, and of which weights: keep both while it runs, they may share memory."""

    snapshot: Snapshot | None
    executable: T
    weights: Weights


class Followed(Generic[T]):
    """Serves calls from any thread.

    fixed     positions of the inputs that are constants
    bounds    what else must hold of them
    examples  inputs of the first call
    make      from the region's constant weights to what runs it
    times     how often it is made before parameters become inputs; None: they never do
    """

    def __init__(
        self,
        fixed: Sequence[int],
        bounds: Sequence[Bound],
        examples: tuple[Any, ...],
        make: Callable[[Weights], T],
        times: int | None,
    ) -> None:
        self._make, self._times = make, times
        self._fixed, self._bounds = tuple(fixed), bounds
        self._known = DerivedSet([Derivation(self._fixed, lambda tensors: ())])
        self._begin()
        self.latest: Made[T]
        _all.add(self)
        self._refresh(examples)

    def _begin(self) -> None:
        self._lock, self._count, self._is_orphan = threading.Lock(), 0, True

    def current(self, inputs: tuple[Any, ...]) -> Made[T]:
        """What serves a call with these inputs.

        raises   BackendError if integers are not those that the region was claimed for; whatever
                 `make` raises
        """
        made = self.latest
        if self._is_orphan:
            made = self._refresh(inputs)
        elif made.snapshot is None:
            self._check(inputs)
        elif self._known.current(inputs) is not made.snapshot:
            made = self._refresh(inputs)
        return made

    def _refresh(self, inputs: tuple[Any, ...]) -> Made[T]:
        with self._lock:
            is_constant = self._times is None or self._count < self._times
            fixed = self._fixed if is_constant else ()
            snapshot = self._known.current(inputs) if fixed else None
            if self._count and snapshot is self.latest.snapshot:
                return self.latest  # another thread was here
            self._check(inputs)
            weights = {k: inputs[k].detach().contiguous() for k in fixed}
            self.latest = Made(snapshot, self._make(weights), weights)
            self._count += 1
            self._is_orphan = False
            return self.latest

    def _check(self, inputs: tuple[Any, ...]) -> None:
        for bound in self._bounds:
            if not bound.holds(inputs[bound.position]):
                raise BackendError(f"{bound.name} holds greater integers than it did")


# A forked child makes all of it anew: the engine's threads are not in it. What its parent made is
# never freed there, since engines would wait for them.
_all: weakref.WeakSet[Followed[Any]] = weakref.WeakSet()
_inherited: list[Any] = []


@in_child
def _begin_anew() -> None:
    for followed in _all:
        _inherited.append(vars(followed).get("latest"))
        followed._begin()


# ---------------------------------------------------------------------------- intervals
# Between which bounds the integers of a graph lie, as far as the graph itself says.
#
# For engines that compute integers in fewer bits than torch: they may have those that fit.

Interval = tuple[Size, Size]

# Open sizes are no greater: engines check it at each call.
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
    low, high = _range(val(node).dtype) or _INT32
    is_above = relies(node, found[0], ">=", max(low, _INT32[0]))
    return is_above and relies(node, found[1], "<=", min(high, _INT32[1]))


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
    if not isinstance(x, fx.Node):
        return _number(x)
    if "interval" in x.meta:
        return x.meta["interval"]  # type: ignore[no-any-return]
    found: Interval | None = None
    value = x.meta.get("val")
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        if value.dtype == torch.bool:
            found = 0, 1
        elif x.op != "call_function":
            found = _read_anew(x)
        elif (at := QUANTIZING.get(str(x.target))) is not None:
            found = _hull([interval(n) for n in x.args[at : at + 2]])
        elif (rule := _RULES.get(x.target)) is not None:
            found = rule(x)
    x.meta["interval"] = found
    return found


def _read_anew(node: fx.Node) -> Interval | None:
    """What a call may find in an integer input."""
    dtype = val(node).dtype
    return _range(dtype) if dtype.itemsize <= 4 else None


def _range(dtype: torch.dtype) -> tuple[int, int] | None:
    if dtype.is_floating_point or dtype.is_complex:
        return None
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def _number(x: Any) -> Interval | None:
    """A number among arguments, which may be a symbolic size."""
    if isinstance(x, int):
        return int(x), int(x)
    return (x, x) if isinstance(x, Expr) else None


def _hull(found: Sequence[Interval | None]) -> Interval | None:
    known = [one for one in found if one is not None]
    if len(known) != len(found) or not known:
        return None
    return reduce(minimum, (low for low, _ in known)), reduce(maximum, (high for _, high in known))


_RULES: OpRules[Callable[[fx.Node], Interval | None]] = OpRules()


def _either(*positions: int) -> Callable[[fx.Node], Interval | None]:
    return lambda node: _hull([interval(node.args[k]) for k in positions])


@_RULES.rule("arange.start_step")
def _arange(node: fx.Node) -> Interval | None:
    start, end = map(_number, node.args[:2])
    if start is None or end is None:
        return None
    step = arguments(node)["step"]
    if not isinstance(step, int) or step < 1:
        return _hull([start, end])
    return start[0], maximum(start[1], end[1] - 1)


def _at_ends(function: Callable[..., Size]) -> Callable[[fx.Node], Interval | None]:
    """Of operands and `alpha`: least and greatest where each operand is either."""

    def rule(node: fx.Node) -> Interval | None:
        ends = [x for x in map(interval, node.args[:2]) if x is not None]
        alpha = arguments(node).get("alpha", 1)
        if len(ends) < len(node.args[:2]) or not isinstance(alpha, int):
            return None
        found = [function(*given, alpha) for given in itertools.product(*ends)]
        return reduce(minimum, found), reduce(maximum, found)

    return rule


@_RULES.rule("cumsum")
def _cumulative(node: fx.Node) -> Interval | None:
    found, val = interval(node.args[0]), node.args[0].meta["val"]  # type: ignore[union-attr]
    if found is None or not val.dim():
        return found
    count = val.shape[node.args[1]]
    n = count if isinstance(count, int) else LARGEST_SIZE
    return minimum(found[0], found[0] * n), maximum(found[1], found[1] * n)


@_RULES.rule("bitwise_and.Scalar bitwise_and.Tensor")
def _masked(node: fx.Node) -> Interval | None:
    found = [b for b in map(interval, node.args) if b is not None and known_ge(b[0], 0)]
    return (0, reduce(minimum, (high for _, high in found))) if found else None


@_RULES.rule("abs")
def _magnitude(node: fx.Node) -> Interval | None:
    found = interval(node.args[0])
    if found is None:
        return None
    low, high = found
    return maximum(0, maximum(low, -high)), maximum(-low, high)


_RULES.update(
    by_operator(
        (
            _either(0),
            "view permute squeeze.dims unsqueeze expand repeat slice.Tensor select.int clone flip"
            " roll index.Tensor index_select gather embedding _to_copy",
        ),
        (lambda node: _hull([*map(interval, arguments(node)["tensors"])]), "cat stack"),
        (
            lambda node: _hull([interval(node.args[0]), interval(arguments(node)["value"])]),
            "constant_pad_nd",
        ),
        (_either(1), "copy"),
        (_either(1, 2), "where.self"),
        (_either(0, 2), "masked_fill.Scalar"),
        (_either(0, 1), "slice_scatter select_scatter maximum minimum"),
        (lambda node: interval(node.args[1]), "full full_like"),
        (_at_ends(lambda x, y, by: x + by * y), "add.Tensor add.Scalar"),
        (_at_ends(lambda x, y, by: x - by * y), "sub.Tensor"),
        (_at_ends(lambda x, y, by: y - by * x), "rsub.Scalar"),
        (_at_ends(lambda x, y, by: x * y), "mul.Tensor mul.Scalar"),
        (_at_ends(lambda x, by: -x), "neg"),
        (lambda node: _hull([(0, 0), interval(node.args[0])]), "tril triu"),
    )
)
