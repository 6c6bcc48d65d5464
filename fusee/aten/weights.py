"""What depends on parameters alone is computed once and kept: the derived weights.

The static part of the graph that the rest reads becomes a program of its own, `Derived`; its
results are new inputs of the graph. Left where they are
    views of parameters, and fills      cost nothing at each call
    what a pass marked derive=False     costs less time than memory
    what would grow memory              see Budget
Then its own operands are looked at, so that no more than necessary runs at each call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from fusee.aten import AtenGraph, arguments, closure, is_creation, is_view, last_reads, tensor_input
from fusee.aten.attention import known_masks, with_every_head
from fusee.aten.rewriter import DERIVATIONS, Editor, Pass, edited, only_user, val
from fusee.aten.torch_api import laid_out
from fusee.config import Options
from fusee.fake.layouts import known
from fusee.fake.torch_python import opmath
from fusee.source import Args, Kwargs, overloads

# ---------------------------------------------------------------------------- constants


class Slot(int):
    """An argument of a step: the value with this number."""

    def __repr__(self) -> str:
        return f"v{int(self)}"


class DeriveStep(NamedTuple):
    """One call. Its result gets the next number, after the sources' and the constants'.

    stride   how the result lies for its readers, whatever the call gives; None: as it comes
    """

    name: str
    target: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    done: tuple[int, ...]  # values that no later step reads
    stride: tuple[int, ...] | None = None


@dataclass(eq=False)
class Derived:
    """How to compute some derived inputs of a graph from its static inputs.

    sources    indices of inputs: when one of these tensors changes, compute() must run again
    constants  tensors of the graph
    steps      values are numbered: sources, then constants, then the steps' results
    results    the numbers of the values to keep
    targets    indices of the derived inputs, one per result
    """

    sources: tuple[int, ...]
    constants: tuple[Tensor, ...]
    steps: tuple[DeriveStep, ...]
    results: tuple[int, ...]
    targets: tuple[int, ...]

    def compute(self, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The derived inputs for these values of `sources`."""
        values: list[Any] = [*sources, *self.constants]

        def load(arg: Any) -> Any:
            return values[arg] if type(arg) is Slot else arg

        with torch.no_grad():
            for step in self.steps:
                args, kwargs = fx.node.map_aggregate((step.args, step.kwargs), load)
                made = step.target(*args, **kwargs)
                if step.stride is not None and made.stride() != step.stride:
                    made = laid_out(made, step.stride)
                values.append(made)
                for number in step.done:
                    values[number] = None
        return tuple(values[number] for number in self.results)

    def __str__(self) -> str:
        rows = [f"v{k} = input {index}" for k, index in enumerate(self.sources)]
        rows += [f"v{len(rows) + k} = constant {k}" for k in range(len(self.constants))]
        for k, step in enumerate(self.steps, len(rows)):
            args = [*map(repr, step.args), *(f"{key}={arg!r}" for key, arg in step.kwargs.items())]
            name = getattr(step.target, "__name__", str(step.target))
            rows.append(f"v{k} = {name}({', '.join(args)})  # {step.name}")
        rows += [f"input {k} = v{number}" for k, number in zip(self.targets, self.results)]
        return "\n".join(rows)


# Tables such as attention masks come from no parameter; up to here they are worth keeping.
FREE = 2**20


@dataclass
class Budget:
    """Memory that derived weights may take: as much as the parameters again, packed ones aside.

    free   bytes that one tensor may take however little it comes from
    """

    edit: Editor
    left: int
    spent: int = 0
    refused: list[str] = field(default_factory=list)
    free: int = FREE

    def allows(self, node: fx.Node) -> bool:
        """Whether to keep the result of `node`; if so its bytes are spent."""
        if node.meta.get("packed") or node.meta.get("free"):
            return True
        size = self.edit.bytes(node)
        below = closure([node]) if size > self.free else ()
        given = sum(self.edit.bytes(x) for x in below if x.op in ("placeholder", "get_attr"))
        if size > self.left or (size > self.free and size > 2 * given):
            self.refused.append(f"{node} is computed at each call: it takes {size} bytes to keep")
            return False
        self.left -= size
        self.spent += size
        return True


def constants(edit: Editor) -> tuple[Derived, ...]:
    """Split the static part off, in parts that share no parameter: one that changes recomputes its
    part alone. Derived inputs are appended to the graph's inputs.
    """
    total = sum(
        edit.bytes(node)
        for node in edit.graph.nodes
        if node.op in ("placeholder", "get_attr") and edit.is_static(node) and _is_tensor(node)
    )
    budget = Budget(edit, max(total, FREE))
    kept = frontier(edit, budget)
    needed = closure(kept)
    position = {node: k for k, node in enumerate(edit.graph.nodes)}
    part: dict[fx.Node, list[fx.Node]] = {}  # of each node; constants are in none
    for node in filter(needed.__contains__, position):
        given = {id(part[x]): part[x] for x in node.all_input_nodes if x in part}
        if given or node.op == "placeholder":
            whole, *others = sorted(given.values(), key=len, reverse=True) or [[]]
            part.update(dict.fromkeys([node, *itertools.chain(*others)], whole))
            whole += [node, *itertools.chain(*others)]
    members: dict[int, dict[fx.Node, int]] = {}
    for k, node in enumerate(kept, len(edit.aten.inputs)):
        members.setdefault(id(part.get(node)), {})[node] = k
    derived = tuple(_derived(edit.aten, position, targets) for targets in members.values())
    aten, specs = edit.aten, list(edit.aten.inputs)
    with edit.before(next(node for node in aten.graph.nodes if node.op != "placeholder")):
        inputs = [aten.graph.placeholder(f"derived_{node.name}") for node in kept]
    for node, made in zip(kept, inputs, strict=True):
        made.meta = {key: value for key, value in node.meta.items() if key != "stack_trace"}
        edit.adopt(made)
        about = val(node), node.meta.get("device"), aten.to_size
        spec = tensor_input(len(specs), made.name, *about, is_static=True)
        specs.append(dataclasses.replace(spec, stride=()) if node.meta.get("packed") else spec)
        edit.replace(node, made)
    aten.inputs = tuple(specs)
    edit.notes += budget.refused
    if kept:
        edit.notes.append(
            f"{len(kept)} tensors derived from {sum(len(one.sources) for one in derived)}"
            f" parameters, {sum(node.meta.get('packed', False) for node in kept)} packed,"
            f" {budget.spent} bytes beside those"
        )
    return derived


def frontier(edit: Editor, budget: Budget) -> list[fx.Node]:
    """The static nodes to keep, in graph order."""
    chosen: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    for reader in edit.graph.nodes:
        if edit.is_static(reader):
            continue
        pending = list(reader.all_input_nodes)
        while pending:
            node = pending.pop()
            if not edit.is_static(node) or node.op != "call_function" or node in seen:
                continue
            seen.add(node)
            is_cheap = is_view(node.target) or is_creation(node.target) or not _is_tensor(node)
            if is_cheap or node.meta.get("derive") is False or not budget.allows(node):
                pending += node.all_input_nodes
            else:
                chosen.add(node)
    return [node for node in edit.graph.nodes if node in chosen]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _derived(aten: AtenGraph, position: dict[fx.Node, int], targets: dict[fx.Node, int]) -> Derived:
    """What computes these nodes, each the derived input of an index.

    position   of the graph's nodes: that of an input is its index
    """
    own = sorted(closure(targets), key=position.__getitem__)
    given, constants, calls = (
        [n for n in own if n.op == op] for op in ("placeholder", "get_attr", "call_function")
    )
    there = [aten.inputs[position[node]].device for node in given]
    there += [aten.constants[str(node.target)].device for node in constants]
    # numbers of the CPU that a pass has told to be where their readers are
    begun = [*given, *constants]
    homes = [node.meta.get("device") or at for node, at in zip(begun, there)]
    moved = [k for k, (home, at) in enumerate(zip(homes, there)) if home != at]
    slots = {n: Slot(k) for k, n in enumerate([*begun, *(begun[k] for k in moved), *calls])}
    done = last_reads(targets, [((node,), node.all_input_nodes) for node in calls])
    copy = torch.ops.aten._to_copy.default
    steps = [DeriveStep(begun[k].name, copy, (Slot(k),), {"device": homes[k]}, ()) for k in moved]
    for k, node in enumerate(calls):
        args, kwargs = fx.map_arg((node.args, node.kwargs), slots.__getitem__)
        numbers = tuple(int(slots[x]) for x in done.get(k, ()))
        target: Any = node.target
        # Eager's strides. A packed convolution gives its result channels-last, whatever eager does
        stride = val(node).stride() if _is_tensor(node) and not node.meta.get("packed") else None
        if stride is not None and not known(stride):
            stride = None
        steps.append(DeriveStep(node.name, target, args, kwargs, numbers, stride))
    return Derived(
        sources=tuple(position[node] for node in given),
        constants=tuple(aten.constants[str(node.target)] for node in constants),
        steps=tuple(steps),
        results=tuple(int(slots[node]) for node in targets),
        targets=tuple(targets.values()),
    )


# ---------------------------------------------------------------------------- fold
# What a graph computes from no input is computed ahead, and becomes a constant.
#
# For graphs that are split: T5's position buckets, int64 from aranges alone, were no engine's, and
# parted what is. Our own compiler keeps such values with the weights (`constants`).

# Constants may take this part of the parameters' memory.
_SHARE = 16


def fold(aten: AtenGraph, options: Options) -> None:
    """Change `aten` in place. Its results, and views and fills, stay as they are."""
    edit = Editor(aten, options, parameters=False)
    inputs = zip(aten.placeholders, aten.inputs, strict=True)
    most = max(FREE, sum(edit.bytes(node) for node, spec in inputs if spec.is_static) // _SHARE)
    results = set(aten.results)
    kept = [n for n in frontier(edit, Budget(edit, most, free=most)) if n not in results]
    position = {node: k for k, node in enumerate(aten.graph.nodes)}
    values: dict[fx.Node, Tensor] = {}
    for node in kept:
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            (values[node],) = _derived(aten, position, {node: 0}).compute(())
    for node, value in values.items():
        of = val(node)
        if (value.dtype, value.shape, value.stride()) == (of.dtype, of.shape, of.stride()):
            name = f"_folded{len(aten.constants)}"
            aten.constants[name] = value
            with edit.before(node):
                made = aten.graph.create_node("get_attr", name)
            made.meta = dict(node.meta)
            edit.replace(node, made)


# ---------------------------------------------------------------------------- fold norm
# Batch norm in inference becomes part of the layer before it, or one factor and one addend.
#
#   conv(x, w, b) -> batch_norm     =>  conv(x, w', b')         if nothing else sees the convolution
#   linear(x, w, b) -> batch_norm   =>  linear(x, w', b')       for 2-d results
#   batch_norm(x)                   =>  x * scale + shift       otherwise
#
# w', b', scale and shift are derived from parameters, in float64. The last form is what eager
# itself computes; only that eager derives scale and shift anew at each call.

aten = torch.ops.aten

_NORMS = tuple(overloads("batch_norm native_batch_norm _native_batch_norm_legit_no_training"))


class Norm(NamedTuple):
    """One batch norm with statistics that are static."""

    node: fx.Node
    result: fx.Node  # the normalised tensor: the node, or the item 0 of its tuple
    input: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    mean: fx.Node
    variance: fx.Node
    eps: float


def fold_norm(edit: Editor) -> None:
    """Run the pass."""
    for node in edit.calls(*_NORMS):
        named = arguments(node)
        if named.get("training"):
            continue
        x, mean, variance = named["input"], named["running_mean"], named["running_var"]
        if mean is None or variance is None:
            continue
        weight, bias = named["weight"], named["bias"]
        if not all(map(edit.is_static, (weight, bias, mean, variance))):
            continue
        result = node
        if node.target is not aten.batch_norm.default:
            items = [user for user in node.users if user.users]
            if len(items) != 1 or items[0].target is not operator.getitem or items[0].args[1] != 0:
                continue
            result = items[0]
            edit.erase(*[user for user in node.users if user is not result])
        if not val(result).dtype.is_floating_point:
            continue
        norm = Norm(node, result, x, weight, bias, mean, variance, named["eps"])
        if not _into_layer(edit, norm):
            _as_affine(edit, norm)


def _typed(node: fx.Node, dtype: torch.dtype) -> Tensor:
    """The meta of `node` converted to `dtype`."""
    meta = val(node)
    return meta if meta.dtype is dtype else torch.empty_like(meta, dtype=dtype)


def _into_layer(edit: Editor, norm: Norm) -> bool:
    """Fold a norm into the layer before it, if that is a convolution or a linear one."""
    layer, rest, groups = norm.input, list[Any](), 0
    target, given = cast(Any, (layer.target, layer.args))
    if target is aten.convolution.default:
        x, weight, bias, *rest = given
        groups = rest[5] if rest[3] else 0  # of a transposed one
    # batch norm's channels are axis 1, a linear layer's the last
    elif target is aten.linear.default and val(layer).dim() == 2:
        x, weight, bias = cast(Any, arguments(layer)).values()
    else:
        return False
    if only_user(layer) is not norm.node or val(layer).dtype is not val(norm.result).dtype:
        return False
    if weight is None or not (edit.is_static(weight) and edit.is_static(bias)):
        return False
    dtype = val(layer).dtype
    wide = opmath(dtype)
    with edit.before(norm.node):
        new_weight = edit.call(
            folded_weight, weight, norm.weight, norm.variance, norm.eps, groups, wide,
            val=_typed(weight, wide),
        )  # fmt: skip
        new_bias = edit.call(
            folded_bias, bias, norm.weight, norm.bias, norm.mean, norm.variance, norm.eps, wide,
            val=_typed(norm.mean, wide),
        )  # fmt: skip
        new = [edit.cast(made, dtype) for made in (new_weight, new_bias)]
    edit.notes.append(f"folded {norm.node} into {layer}")
    edit.become(norm.result, target, x, *new, *rest)
    return True


def _as_affine(edit: Editor, norm: Norm) -> None:
    out = val(norm.result)
    wide = opmath(out.dtype)
    trailing = val(norm.input).dim() - 2
    channels = _typed(norm.mean, wide).view(-1, *[1] * trailing)
    image = _typed(norm.result, wide)
    with edit.before(norm.node):
        scale = edit.call(
            norm_scale, norm.weight, norm.variance, norm.eps, wide, trailing,
            val=channels,
        )  # fmt: skip
        shift = edit.call(
            folded_bias, None, norm.weight, norm.bias, norm.mean, norm.variance, norm.eps, wide,
            trailing, val=channels,
        )  # fmt: skip
        x = edit.cast(norm.input, wide)
        scaled = edit.call(aten.mul.Tensor, x, scale, val=image)
        if out.dtype is not wide:
            shifted = edit.call(aten.add.Tensor, scaled, shift, val=image)
    edit.notes.append(f"{norm.node} became one factor and one addend")
    if out.dtype is wide:
        edit.become(norm.result, aten.add.Tensor, scaled, shift)
    else:
        edit.become(norm.result, aten._to_copy.default, shifted, dtype=out.dtype)


# ---------------------------------------------------------------------------- restride
# An as_strided that moves no element becomes a copy, for graphs that are split.
#
# Pools of channels-last images end in one, for the strides of axes of size one. No engine knows
# strides, so it parted what is an engine's.


def restride(graph: AtenGraph) -> None:
    """Change `graph` in place. Metas stay as they are, strides included."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        source: Any = node.args[0]
        val, made = source.meta["val"], node.meta["val"]
        before, after = (
            [(graph.to_size(n), graph.to_size(step)) for n, step in zip(x.shape, x.stride())]
            for x in (val, made)
        )
        same = len(before) == len(after) and all(
            n == m and (n == 1 or step == other)
            for (n, step), (m, other) in zip(before, after, strict=True)
        )
        if same and val.storage_offset() == made.storage_offset() == 0 and val.dtype == made.dtype:
            node.target = aten.clone.default
            node.args, node.kwargs = (source,), {"memory_format": torch.preserve_format}


def run_passes(
    aten: AtenGraph, options: Options, passes: Sequence[Pass]
) -> tuple[tuple[Derived, ...], list[str]]:
    """Change `aten` in place: how to compute its derived inputs, and what each pass did.

    Derived inputs are appended to `aten.inputs`, if options.derive_weights is on.
    """
    notes = list[str]()
    edit = edited(aten, options, (known_masks, with_every_head, *passes), notes)
    derived = constants(edit) if options.derive_weights else ()
    return derived, notes


# ---------------------------------------------------------------------------- derive
# What passes compute from parameters that is no single ATen operator.
#
# These functions appear as static nodes of the graph until `constants` moves them out. What they
# compute per channel they compute in float64: folding must not cost accuracy that eager has.


def norm_scale(
    weight: Tensor | None, variance: Tensor, eps: float, dtype: torch.dtype, trailing: int = 0
) -> Tensor:
    """The factor that batch norm multiplies each channel by: (channels, 1, .. trailing times)."""
    scale = (variance.double() + eps).rsqrt_()
    if weight is not None:
        scale *= weight
    return scale.to(dtype).view(-1, *[1] * trailing)


def folded_weight(
    layer_weight: Tensor,
    weight: Tensor | None,
    variance: Tensor,
    eps: float,
    transposed_groups: int,
    dtype: torch.dtype,
) -> Tensor:
    """A layer's weight with the following batch norm's factor in it.

    shapes   (out, ...), or with transposed_groups = g > 0 a transposed convolution's
             (in, out / g, ...), whose g groups of inputs make consecutive groups of outputs
    """
    scale = norm_scale(weight, variance, eps, dtype)
    wide = layer_weight.to(dtype)
    if not transposed_groups:
        return wide * scale.view(-1, *[1] * (wide.dim() - 1))
    rest = wide.shape[1:]
    grouped = wide.reshape(transposed_groups, -1, *rest)
    scale = scale.view(transposed_groups, 1, rest[0], *[1] * (len(rest) - 1))
    return (grouped * scale).reshape(wide.shape)


def folded_bias(
    layer_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    dtype: torch.dtype,
    trailing: int = 0,
) -> Tensor:
    """A layer's bias with the following batch norm in it, or what that adds to each channel after
    its factor, if there is no layer: (channels, 1, .. trailing times)."""
    centre = mean.double().neg() if layer_bias is None else layer_bias.double() - mean
    shift = centre * norm_scale(weight, variance, eps, torch.float64)
    if bias is not None:
        shift += bias
    return shift.to(dtype).view(-1, *[1] * trailing)


DERIVATIONS.update((norm_scale, folded_weight, folded_bias))
