"""Compiled forward and backward as one torch.autograd.Function, made per compiled graph.

All that is differentiated goes through the Function: inputs in, results out, what the backward
needs through save_for_backward. So hooks on saved tensors, version checks, retain_graph,
accumulation and gradients of some inputs are torch's own. Views, and writes to inputs that
autograd must know of, happen after it, on its results: see `Joint`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fusee.aten import Fresh, InputSpec, ViewOfOutput
from fusee.aten.boundary import flatten
from fusee.aten.torch_api import (
    as_if_not_written,
    below_autograd,
    clear_saved,
    has_saved_tensor_hooks,
    has_storage,
    keeps_graph,
    laid_out,
    modified,
    without_autocast,
)
from fusee.autodiff import Joint, Split
from fusee.errors import DoubleBackwardError, InputError
from fusee.fake import without_dynamo
from fusee.source import HostFunction, HostSource, listed, picker

# The inputs of a graph, one per InputSpec, to its results. A backward may empty the list that it is
# given: what is in it then lives no longer than it is needed.
Run = Callable[[Sequence[Any]], Sequence[Any]]


_NONE: frozenset[int] = frozenset()


def differentiable(
    gm: Any,
    split: Split,
    forward: Run,
    backward: Callable[[Split], Run | None],
    tell: Callable[[str], None],
) -> Callable[..., Sequence[Any]]:
    """A function of the forward's inputs; its results are those of the joint graph's forward.

    gm        the captured graph, or what runs it: eager differentiates it for gradients of
              gradients, and in batches
    forward   runs split.forward
    backward  gives what runs the backward of `split`, or of one without some of the tangents; None:
              eager differentiates the graph
    tell      is told what of the graph runs eagerly
    raises    (in backward) InputError if a hook on saved tensors gave back another kind of tensor
    """
    joint, again = split.joint, Again(gm, split, tell)
    count = joint.forward_results
    constant = sorted(set(range(count)).difference(joint.tangents))
    gradients, pick = _gradients(split, again, backward), picker(joint.tangents)
    keep = _keeper(split, again.count)

    def below(inputs: Sequence[Any]) -> Sequence[Any]:
        with below_autograd():  # what it returns is a view of nothing
            return forward(inputs)

    compute = forward if _is_alone(forward) else below

    class CompiledGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.held = again.hold(inputs) if again.holds else again.nothing
            results = compute(inputs)
            keep(ctx, (*inputs, *results), results)
            if constant:
                ctx.mark_non_differentiable(*[results[k] for k in constant])
            return tuple(results[:count])

        @staticmethod
        @without_dynamo
        def backward(ctx: Any, *given: Any) -> Any:
            grads = [*pick(given)]
            del given
            return gradients(ctx, grads)

    run = _applied(CompiledGraph.apply, joint)
    if joint.written or len(set(joint.parts)) < 2:
        return run

    def once(inputs: Sequence[Any]) -> list[Any]:
        with torch.no_grad(), without_autocast(joint.aten.no_autocast):
            return [*compute(inputs)]

    return _in_parts(joint, run, once, again.hold, keep, gradients)


def _gradients(
    split: Split, again: Again, backward: Callable[[Split], Run | None]
) -> Callable[[Any, list[Any]], tuple[Any, ...]]:
    """A function of a node's context and the gradients of its results: those of its inputs.

    It empties the list: what is in it lives no longer than it is needed.
    """
    chosen = functools.cache(functools.partial(_Variant, split))
    present = (False,) * len(split.joint.tangents)

    def gradients(ctx: Any, grads: list[Any]) -> tuple[Any, ...]:
        missing, are_real = present, True
        for k, g in enumerate(grads):
            if g is None:
                missing = tuple([g is None for g in grads])
            elif not has_storage(g):
                are_real &= g.is_sparse
                grads[k] = g.to_dense() if g.is_sparse else g
        if missing is not present and False not in missing:  # eager's loss would not lead here
            return (None,) * again.count
        variant = chosen(missing)
        held, kept = ctx.held, variant.saved(ctx, again)
        is_twice = torch.is_grad_enabled()
        run = backward(variant.split) if are_real else None
        if run is None:  # vmap runs this backward, or another process has compiled none
            return tuple(again.gradients(held, again.inputs(held, kept), grads, is_twice))
        operands = (again.inputs(held, kept), list(grads)) if is_twice else None
        if is_twice or ctx.has_hooks or keeps_graph():
            kept = [x.detach() for x in kept]  # who has them besides can be counted
        kept += variant.rest(grads, ctx.numbers)
        grads.clear()
        if _is_alone(run) and not is_twice:  # gradients are off
            results = run(kept)
        else:
            with torch.no_grad(), below_autograd(), without_autocast():
                results = run(kept)
        found = variant.gradients(results)
        if operands is None:
            return tuple(found)
        return tuple(again.differentiable(held, *operands, found))

    return gradients


def _in_parts(
    joint: Joint,
    whole: Callable[..., Sequence[Any]],
    forward: Callable[[Sequence[Any]], list[Any]],
    hold: Callable[[Sequence[Any]], HeldValues],
    keep: Callable[[Any, Sequence[Any], Sequence[Any]], None],
    gradients: Callable[[Any, list[Any]], Sequence[Any]],
) -> Callable[..., Sequence[Any]]:
    """`whole`, with a node of autograd for each part where inputs have histories.

    The engine goes on to all that a node leads to, and what another part has used up raises there.
    """
    reached = joint.tangents_of[0]
    leading: dict[int, frozenset[int]] = {}  # inputs; none if gradients are zero whatever comes in
    places: dict[int, list[int]] = {}
    for part in dict.fromkeys(joint.parts):
        bits = sum(1 << k for k, one in enumerate(joint.parts) if one == part)
        leading[part] = frozenset(k for k, x in enumerate(reached) if x & bits)
        places[part] = [k for k, one in zip(joint.tangents, joint.parts) if one == part]

    class CompiledPart(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, part: int, held: HeldValues, results: Sequence[Any], *inputs: Any
        ) -> Any:
            ctx.own, ctx.held = places[part], held
            seen = [x.detach() if isinstance(x, Tensor) else x for x in results]
            for k in ctx.own:
                seen[k] = results[k]
            keep(ctx, (*inputs, *seen), seen)
            return tuple(results[k] for k in ctx.own)

        @staticmethod
        @without_dynamo
        def backward(ctx: Any, *given: Any) -> Any:
            found = dict(zip(ctx.own, given))
            return None, None, None, *gradients(ctx, [found.get(k) for k in joint.tangents])

    apply: Callable[..., Sequence[Any]] = CompiledPart.apply

    def run(*inputs: Any) -> Sequence[Any]:
        histories = (inputs[k].grad_fn for own in leading.values() for k in own)
        if not torch.is_grad_enabled() or all(x is None for x in histories):
            return whole(*inputs)
        given = {
            part: [
                x if not own or k in own or not isinstance(x, Tensor) else x.detach()
                for k, x in enumerate(inputs)
            ]
            for part, own in leading.items()
        }
        held = {part: hold(mine) for part, mine in given.items()}  # before the forward draws
        results = forward(inputs)
        for part, mine in given.items():
            for k, x in zip(places[part], apply(part, held[part], results, *mine)):
                results[k] = x
        return tuple(results[: joint.forward_results])

    return run


def _is_alone(run: Run | HostFunction) -> bool:
    """As HostFunction has it; of what is around one nobody knows."""
    return getattr(run, "is_alone", False)


def _keeper(split: Split, count: int) -> Callable[[Any, Sequence[Any], Sequence[Any]], None]:
    """A function that notes in a forward's context what its backward needs.

    It takes the context, the `count` inputs and after them the results, and the results.
    """
    places, shown = split.joint.aten.symbols.values(), split.shown
    pick = picker([at + count * (kind == "result") for kind, at in split.saved])
    # of what is no number an axis
    symbols = [(at.index + count * (at.unbacked is not None), at.axis) for at in places]

    def keep(ctx: Any, values: Sequence[Any], results: Sequence[Any]) -> None:
        ctx.save_for_backward(*pick(values))
        ctx.shown = ()
        if shown:
            ctx.shown = [(k, results[at].detach(), results[at]._version) for k, at in shown]
        ctx.numbers = ()
        if symbols:
            told = (values[k] if axis is None else values[k].size(axis) for k, axis in symbols)
            ctx.numbers = [x.item() if isinstance(x, Tensor) else x for x in told]
        ctx.done, ctx.later = _NONE, ()
        ctx.has_hooks = has_saved_tensor_hooks()
        ctx.set_materialize_grads(False)

    return keep


def _applied(apply: Callable[..., Sequence[Any]], joint: Joint) -> Callable[..., Sequence[Any]]:
    """`apply` where backward passes go on to inputs no more than in eager: what made them stays."""
    is_reached = any(gradient is not None for gradient in joint.gradients)
    ends, no_autocast = joint.unreached if is_reached else (), joint.aten.no_autocast
    if not ends and not no_autocast:
        return apply

    def run(*inputs: Any) -> Any:
        given = list(inputs)
        for index in ends:
            given[index] = given[index].detach()
        with without_autocast(no_autocast):
            return apply(*given)

    return run


class _Variant:
    """How the backward is called when the loss has come through some results alone.

    missing  per tangent: whether it is None
    """

    def __init__(self, split: Split, missing: tuple[bool, ...]) -> None:
        joint = split.joint
        absent = frozenset(k for k, is_missing in enumerate(missing) if is_missing)
        self.split = split if split.without is None or not absent else split.without(absent)
        self._sizes = [list(joint.aten.symbols).index(name) for name in self.split.sizes]
        self._tangents = _tangents(joint, self.split.absent)
        self._parts = frozenset(joint.parts)
        self._present = frozenset(p for p, none in zip(joint.parts, missing) if not none)
        rows = self.split.gradients
        places = [-1 if x is None else x for x in rows if not isinstance(x, tuple)]
        self._place = picker(places) if len(places) == len(rows) else None

    def saved(self, ctx: Any, again: Again) -> list[Any]:
        """What was saved, which this backward frees: but not yet for parts that it leaves out."""
        if ctx.done and ctx.done.isdisjoint(self._present):
            if any(ctx.later[k][0]._version != ctx.later[k][1] for k in self.split.read):
                raise modified()
            kept = [x for x, _ in ctx.later]
        else:
            shown = ctx.shown
            unread = [(x, n) for k, x, n in shown if k not in self.split.read] if shown else shown
            if unread:
                with as_if_not_written(unread):
                    kept = list(ctx.saved_tensors)
            else:
                kept = list(ctx.saved_tensors)
            clear_saved(ctx)
        if not keeps_graph():
            ctx.done |= self._present
            if ctx.done < self._parts:  # detached: a result would hold what made it, for ever
                if not ctx.later:
                    ctx.held = again.hold_saved(ctx.held, kept)
                versions = {k: version for k, _, version in ctx.shown}
                ctx.later = [(x.detach(), versions.get(k, x._version)) for k, x in enumerate(kept)]
            else:
                ctx.held, ctx.shown, ctx.later = None, (), ()
        if ctx.has_hooks:
            kept = [_as_saved(x, spec) for x, spec in zip(kept, self.split.backward.inputs)]
        return kept

    def gradients(self, found: Sequence[Any]) -> Sequence[Any]:
        """What the backward's results say of each input of the forward."""
        if self._place is not None:
            return self._place((*found, None))
        results: list[Any] = []
        for of in self.split.gradients:
            total: Tensor | None = None
            for part in of if isinstance(of, tuple) else () if of is None else (of,):
                if isinstance(part, int):
                    x = found[part]
                else:
                    rows, indices = found[part.rows], found[part.indices]
                    scatter = torch.ops.aten.embedding_sparse_backward.default
                    x = scatter(rows, indices, *part.options)
                if total is not None:
                    x = x + total if total.is_sparse and not x.is_sparse else total + x
                total = x
            results.append(total)
        return results

    def rest(self, grads: list[Tensor | None], numbers: Sequence[int]) -> list[Any]:
        """What the backward takes after the saved values."""
        tangents = self._tangents(grads, numbers)
        return [*(numbers[k] for k in self._sizes), *tangents] if self._sizes else tangents


def _tangents(
    joint: Joint, absent: frozenset[int]
) -> Callable[[list[Tensor | None], Sequence[int]], list[Tensor]]:
    """A function (gradients of results, values of symbols) -> tangents as they are compiled for.

    source   generated once, as sizes and strides may be expressions
    """

    def zeros(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype).zero_()

    write = HostSource("tangents", "grads, numbers", zeros=zeros, laid_out=laid_out)
    if joint.aten.symbols:
        write.add(f"{', '.join(joint.aten.symbols)}, = numbers")
    for k, spec in enumerate(joint.aten.inputs[joint.forward_inputs :]):
        if k in absent:
            continue
        size, stride = listed(spec.size), listed(spec.stride)
        dtype = write.hold(f"dtype{k}", spec.dtype)
        lazy = "is_conj" if spec.dtype is not None and spec.dtype.is_complex else "is_neg"
        write.add(
            f"g = grads[{k}]",
            f"if g is not None and g.{lazy}(): g = grads[{k}] = g.clone()",
            f"if g is None: grads[{k}] = zeros({size}, {stride}, {dtype})",
            f"elif g.stride() != {stride}: grads[{k}] = laid_out(g, {stride})",
        )
    kept = [f"grads[{k}]" for k in range(len(joint.tangents)) if k not in absent]
    write.add(f"return [{', '.join(kept)}]")
    return write.function("tangents")


def _as_saved(x: Tensor, spec: InputSpec) -> Tensor:
    """What a hook gave back, as the backward takes it.

    raises   InputError for another dtype or number of dimensions, or other sizes
    """
    known = all(not isinstance(n, int) or n == m for n, m in zip(spec.size, x.shape))
    if x.dtype != spec.dtype or x.dim() != len(spec.size) or not known:
        raise InputError(
            f"a hook on saved tensors gave back {x.dtype}{list(x.shape)} for {spec.name}, which was"
            f" {spec.dtype}{list(spec.size)}",
            remedy="unpack must give back what pack was given",
        )
    stride = tuple(spec.stride)
    if all(isinstance(n, int) for n in stride) and x.stride() != stride:
        return laid_out(x, stride)  # type: ignore[arg-type]  # ints, by the line above
    return x


# ---------------------------------------------------------------------------- twice
# Gradients of gradients: eager's autograd goes once more through the captured graph.
#
# The compiled backward knows the values of gradients, not where they come from. Whoever asks for
# them with create_graph=True gets these values, in a Function whose own backward runs the captured
# graph eagerly, from what the compiled call was given, and differentiates that as often as is asked
# for. Until then a call pays for keeping inputs that its backward does not need:
#
#     saved by the Function     as they come back from there
#     leaves, constants         themselves; no tensor that autograd could lead back to the Function
#     computed by others        their memory and their place in autograd, not the tensor
#     written to by the graph   a copy, if a result or gradient depends on what was there before
#     random numbers            the generator's state, 5 KB, so that the same are drawn again

# Why a graph is differentiated by eager, for reports.
_REASON = "double backward or gradients in batches: the graph is differentiated by eager's autograd"

_FUNCTION = "autograd_function_apply"


class HeldValues(NamedTuple):
    """What one call keeps.

    values    of the inputs at `positions`
    watched   tensors that share with them the counters of writes, which were at `versions`
    others    by position: what no write from outside can change
    states    of the generators
    """

    positions: list[int]
    values: Sequence[Tensor]
    watched: Sequence[Tensor]
    versions: list[int]
    others: dict[int, Any]
    states: list[Tensor]


_NO_OTHERS: dict[int, Any] = {}
_NO_STATES: list[Tensor] = []


class Again:
    """How a captured graph is differentiated by eager.

    gm      takes the forward's inputs, those apart that it has as attributes
    tell    is told, once, that it was needed
    """

    def __init__(self, gm: Any, split: Split, tell: Callable[[str], None]) -> None:
        joint = split.joint
        specs = joint.aten.inputs[: joint.forward_inputs]
        self.gm, self.tell = gm, tell
        self.tangents, self.outputs = joint.tangents, joint.aten.outputs
        self.attributes = [spec.attribute for spec in specs if spec.attribute is not None]
        self.saved = {s.position: k for k, s in enumerate(split.saved) if s.kind == "input"}
        self.rebinds = {position: index for index, position in joint.rebinds}
        self.written = joint.written
        self.joint, self.count = joint, len(specs)
        self.copied = self.behind(frozenset(range(len(self.tangents)))) & self.written
        cpu, gpus = torch.default_generator, torch.cuda.default_generators
        drawn = [
            x if isinstance(x, torch.Generator) else gpus[x.index or 0] if x.type == "cuda" else cpu
            for x in joint.generators
        ]
        self.generators = [*dict.fromkeys(drawn)]
        kinds = {spec.device.type for spec in specs if spec.device is not None}
        kind = next((x for x in kinds if x != "cpu"), "cpu")
        self.autocast = kind, joint.aten.no_autocast, torch.get_autocast_dtype(kind)
        unsaved = [k for k in range(self.count) if k not in self.saved]
        self.others = [k for k in unsaved if k in self.written or specs[k].dtype is None]
        self.plain = [k for k in unsaved if k not in self.others]
        self.nothing = HeldValues([], (), (), [], _NO_OTHERS, _NO_STATES)
        self.holds = bool(unsaved or self.generators)
        self.is_plain = not self.others and not self.generators
        self.pick, self.pick_others = picker(self.plain), picker(self.others)
        with_gradient = {k for k, gradient in enumerate(joint.gradients) if gradient is not None}
        self.changing = [k for k in self.others if k in self.copied | with_gradient]
        self.told = False

    # -------------------------------------------------------------------------- the forward

    def hold(self, inputs: Sequence[Any]) -> HeldValues:
        """Called before the forward runs, unless there is `nothing`."""
        found = _watch(self.pick(inputs))
        if self.is_plain:
            return HeldValues(self.plain, *found, _NO_OTHERS, _NO_STATES)
        others = dict(zip(self.others, self.pick_others(inputs)))
        for k in self.changing:
            with torch.enable_grad():
                others[k] = inputs[k].clone() if k in self.copied else inputs[k].detach()
        return HeldValues(self.plain, *found, others, [g.get_state() for g in self.generators])

    def hold_saved(self, held: HeldValues, saved: Sequence[Any]) -> HeldValues:
        """`held` for a later backward, to which what was saved comes without autograd."""
        values, watched, versions = _watch([saved[k] for k in self.saved.values()])
        return held._replace(
            positions=[*held.positions, *self.saved],
            values=[*held.values, *values],
            watched=[*held.watched, *watched],
            versions=[*held.versions, *versions],
        )

    def inputs(self, held: HeldValues, saved: Sequence[Any]) -> list[Any]:
        """The forward's inputs, with their places in autograd.

        saved    what came back of the values that the Function saved
        """
        found = {index: saved[k] for index, k in self.saved.items()}
        found.update(held.others)
        found.update(zip(held.positions, held.values, strict=True))
        return [found[k] for k in range(self.count)]

    # -------------------------------------------------------------------------- the backward

    def behind(self, present: frozenset[int]) -> frozenset[int]:
        """The inputs that the gradients which come from these tangents depend on."""
        bits = sum(1 << k for k in present)
        return frozenset(k for k, x in enumerate(self.joint.tangents_of[1]) if x & bits)

    def differentiable(
        self,
        held: HeldValues,
        inputs: list[Any],
        tangents: list[Tensor | None],
        found: Sequence[Any],
    ) -> Sequence[Any]:
        """`found`, the gradients per input, as values that can be differentiated.

        raises   DoubleBackwardError for a graph that does not say how
        """
        if isinstance(self.gm, fx.GraphModule) and any(map(_hides_grad, self.gm.modules())):
            raise DoubleBackwardError(
                "a torch.autograd.Function in a graph of torch.compile has a backward without"
                " gradients of its own",
                remedy="fusee.compile, or call the module itself where create_graph=True",
            )
        behind = self.behind(frozenset(k for k, t in enumerate(tangents) if t is not None))
        operands = [
            x.detach() if isinstance(x, Tensor) and k not in behind else x
            for k, x in enumerate(inputs)
        ]
        operands += tangents
        differentiable: Callable[..., Sequence[Any]] = _Twice.apply
        return differentiable(self, held, found, *operands)

    def gradients(
        self,
        held: HeldValues,
        inputs: Sequence[Any],
        tangents: Sequence[Tensor | None],
        create_graph: bool,
    ) -> list[Tensor | None]:
        """The gradient of each input by eager's autograd, through a new run of the graph.

        raises   RuntimeError, as autograd does, if an input has been written to since
        """
        if _versions(held.watched) != held.versions:
            raise modified()
        if not self.told:
            self.told = True
            self.tell(_REASON)
        with torch.enable_grad():
            twins = list(inputs)  # tensors that the graph may write to, and that are no leaves
            for k, x in enumerate(inputs):
                if isinstance(x, Tensor) and (k in self.written or x.requires_grad):
                    twins[k] = x.clone() if k in self.written else x.view_as(x)
            wanted = {
                k: torch.autograd.graph.get_gradient_edge(x)
                for k, x in enumerate(twins)
                if isinstance(x, Tensor) and x.requires_grad
            }
            with self._as_it_was(held.states):
                ends = self._results(twins)
            pairs = [(x, t) for x, t in zip(ends, tangents, strict=True) if t is not None]
        return _differentiated(pairs, wanted, self.count, create_graph)

    @contextlib.contextmanager
    def _as_it_was(self, states: Sequence[Tensor]) -> Iterator[None]:
        kind, enabled, dtype = self.autocast
        present = [generator.get_state() for generator in self.generators]
        try:
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)
            with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
                yield
        finally:
            for generator, state in zip(self.generators, present, strict=True):
                generator.set_state(state)

    def _results(self, twins: list[Any]) -> list[Tensor]:
        """Run the graph: the results that tangents belong to."""
        split = len(twins) - len(self.attributes)
        if self.attributes:
            own = dict(zip(self.attributes, twins[split:], strict=True))
            returned = torch.func.functional_call(self.gm, own, tuple(twins[:split]))
        else:
            returned = self.gm.forward(*twins)
        leaves: list[Any] = []
        flatten(returned, leaves)
        by_position: dict[int, Tensor | None] = {}
        for spec, leaf in zip(self.outputs, leaves, strict=True):
            if isinstance(spec, Fresh):
                by_position[spec.position] = leaf
            elif isinstance(spec, ViewOfOutput) and leaf.requires_grad:
                by_position.setdefault(spec.index, leaf._base)
        for position, index in self.rebinds.items():
            by_position[position] = twins[index]
        found = []
        for position in self.tangents:
            result = by_position.get(position)
            if result is None:
                raise DoubleBackwardError(
                    f"result {position} of a graph cannot be found in a second run of it",
                    remedy="call the module itself where create_graph=True",
                )
            found.append(result)
        return found


def _watch(given: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], list[int]]:
    """Values, watched and versions of HeldValues for these inputs."""
    versions = _versions(given)
    if all(map(_is_leaf, given)):
        return given, given, versions
    with torch.enable_grad():
        values = [x if x.is_leaf else _Place.apply(x) for x in given]  # type: ignore[no-untyped-call]
    return values, [x if x.is_leaf else x.detach() for x in given], versions


def _versions(given: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(_version, given))
    except RuntimeError:  # tensors of inference mode count no writes
        return [0 if x.is_inference() else x._version for x in given]


_is_leaf, _version = operator.attrgetter("is_leaf"), operator.attrgetter("_version")


class _Place(torch.autograd.Function):
    """The memory of a tensor and its place in autograd, without the tensor.

    A later write to that tensor may lead autograd from it to whoever holds it: never freed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # no gradient is none, not zeros
        with below_autograd():
            return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class _Twice(torch.autograd.Function):
    """Gradients as compiled; their own gradients are eager's."""

    @staticmethod
    def forward(
        ctx: Any, again: Again, held: HeldValues, found: Sequence[Any], *operands: Any
    ) -> Any:
        ctx.again, ctx.held = again, held
        ctx.are_tensors = [isinstance(x, Tensor) for x in operands]
        ctx.others = [None if isinstance(x, Tensor) else x for x in operands]
        ctx.save_for_backward(*(x for x in operands if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *seconds: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        again: Again = ctx.again
        with torch.enable_grad():
            operands = [
                (lambda x: x.view_as(x) if x.requires_grad else x)(next(tensors)) if there else x
                for there, x in zip(ctx.are_tensors, ctx.others, strict=True)
            ]
            wanted = {
                k: x for k, x in enumerate(operands) if isinstance(x, Tensor) and x.requires_grad
            }
            # no gradient depends on the others, but what is differentiated are gradients of some
            for k, second in enumerate(seconds):
                if second is not None and k not in wanted:
                    operands[k] = operands[k].detach().requires_grad_()
            inputs, tangents = operands[: again.count], operands[again.count :]
            firsts = again.gradients(ctx.held, inputs, tangents, create_graph=True)
        pairs = [
            (first, second)
            for first, second in zip(firsts, seconds, strict=True)
            if first is not None and second is not None and first.requires_grad
        ]
        is_again = torch.is_grad_enabled()
        return (None, None, None, *_differentiated(pairs, wanted, len(operands), is_again))


def _differentiated(
    pairs: Sequence[tuple[Tensor, Tensor]], wanted: dict[int, Any], count: int, create_graph: bool
) -> list[Tensor | None]:
    """The gradients of `count` inputs, of which those in `wanted` may have one, from pairs of an
    output and its gradient."""
    found: Sequence[Tensor | None] = ()
    if pairs:
        outputs, given = zip(*pairs)
        found = torch.autograd.grad(
            outputs, [*wanted.values()], given, create_graph=create_graph, allow_unused=True
        )
    by_place = dict(zip(wanted, found))
    return [by_place.get(k) for k in range(count)]


def _hides_grad(module: torch.nn.Module) -> bool:
    """Whether it calls a backward that TorchDynamo has captured, with gradients off inside."""
    if not isinstance(module, fx.GraphModule):
        return False
    calls = (n for n in module.graph.nodes if getattr(n.target, "__name__", "") == _FUNCTION)
    backwards = [module.get_submodule(str(node.args[1].target)) for node in calls]
    return any(
        inner.target is torch._C._set_grad_enabled
        for backward in backwards
        if isinstance(backward, fx.GraphModule)
        for inner in backward.graph.nodes
    )
