"""Compiled forward and backward as one torch.autograd.Function, made per compiled graph.

All that is differentiated goes through the Function: inputs in, results out, what the backward
needs through save_for_backward. So hooks on saved tensors, version checks, retain_graph,
accumulation and gradients of some inputs are torch's own. Views, and writes to inputs that
autograd must know of, happen after it, on its results: see `Joint`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.graph import InputSpec
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
from fusee.autodiff.again import Again
from fusee.autodiff.joint import Gradient, Joint, Split
from fusee.errors import InputError
from fusee.source import HostFunction, HostSource, listed, picker

# The inputs of a graph, one per InputSpec, to its results. A backward may empty the list that it is
# given: what is in it then lives no longer than it is needed.
Run = Callable[[Sequence[Any]], Sequence[Any]]


_NONE: frozenset[int] = frozenset()


def differentiable(
    gm: fx.GraphModule,
    split: Split,
    forward: Run,
    backward: Callable[[Split], Run],
    tell: Callable[[str], None],
) -> Callable[..., Sequence[Any]]:
    """A function of the forward's inputs; its results are those of the joint graph's forward.

    gm        the captured graph: eager differentiates it for gradients of gradients, and in batches
    forward   runs split.forward
    backward  gives what runs the backward of `split`, or of one without some of the tangents
    tell      is told what of the graph runs eagerly
    raises    (in backward) InputError if a hook on saved tensors gave back another kind of tensor
    """
    joint, again = split.joint, Again(gm, split, tell)
    count = joint.forward_results
    constant = sorted(set(range(count)).difference(joint.tangents))
    chosen = functools.cache(functools.partial(_Variant, split))
    pick = picker(joint.tangents)
    present = (False,) * len(joint.tangents)
    keep, is_alone = _keeper(split, again.count), _is_alone(forward)

    class CompiledGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.held = again.hold(inputs) if again.holds else again.nothing
            results = forward(inputs) if is_alone else _below(forward, inputs)
            keep(ctx, (*inputs, *results), results)
            if constant:
                ctx.mark_non_differentiable(*[results[k] for k in constant])
            return tuple(results[:count])

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            grads = [*pick(given)]
            del given
            missing, are_real = present, True
            for g in grads:
                if g is None:
                    missing = tuple([g is None for g in grads])
                elif not has_storage(g):
                    are_real = False
            if missing is not present and False not in missing:  # eager's loss would not lead here
                return (None,) * len(ctx.needs_input_grad)
            variant = chosen(missing)
            held, kept = ctx.held, variant.saved(ctx, again)
            is_twice = torch.is_grad_enabled()
            if not are_real:  # vmap runs this backward
                return tuple(again.gradients(held, again.inputs(held, kept), grads, is_twice))
            operands = (again.inputs(held, kept), list(grads)) if is_twice else None
            kept += variant.rest(grads, ctx.numbers)
            del grads
            found = _run_backward(backward(variant.split), kept, is_twice)
            gradients = variant.gradients(found)
            if operands is None:
                return tuple(gradients)
            return tuple(again.differentiable(held, *operands, gradients))

    return _applied(CompiledGraph.apply, joint)


def _is_alone(run: Run | HostFunction) -> bool:
    """As HostFunction has it; of what is around one nobody knows."""
    return getattr(run, "is_alone", False)


def _below(forward: Run, inputs: Sequence[Any]) -> Sequence[Any]:
    with below_autograd():  # what it returns is a view of nothing
        return forward(inputs)


def _run_backward(run: Run, kept: list[Any], is_twice: bool) -> Sequence[Any]:
    if not is_twice:  # gradients are off
        if _is_alone(run):
            return run(kept)
        with below_autograd(), without_autocast():
            return run(kept)
    with torch.no_grad(), below_autograd(), without_autocast():
        return run(kept)


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
        ctx.numbers = [_number(values[k], axis) for k, axis in symbols] if symbols else ()
        ctx.done, ctx.later = _NONE, ()
        ctx.has_hooks = has_saved_tensor_hooks()
        ctx.set_materialize_grads(False)

    return keep


def _number(x: Any, axis: int | None) -> Any:
    """A symbol's value, of an input or result that shows it."""
    x = x if axis is None else x.size(axis)
    return x.item() if isinstance(x, Tensor) else x


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
        with without_autocast() if no_autocast else contextlib.nullcontext():
            return apply(*given)

    return run


def _gradient(of: Gradient, found: Sequence[Any]) -> Any:
    if not isinstance(of, tuple):
        return None if of is None else found[of]
    total: Tensor | None = None
    for part in of:
        if isinstance(part, int):
            x = found[part]
        else:
            rows, indices = found[part.rows], found[part.indices]
            x = torch.ops.aten.embedding_sparse_backward.default(rows, indices, *part.options)
        if total is not None:
            x = x + total if total.is_sparse and not x.is_sparse else total + x
        total = x
    return total


class _Variant:
    """How the backward is called when the loss has come through some results alone.

    missing  per tangent: whether it is None
    """

    def __init__(self, split: Split, missing: tuple[bool, ...]) -> None:
        joint, count = split.joint, len(split.saved)
        absent = frozenset(k for k, is_missing in enumerate(missing) if is_missing)
        self.split = split if split.without is None or not absent else split.without(absent)
        self._sizes = [list(joint.aten.symbols).index(name) for name in self.split.sizes]
        self._tangents = _tangents(joint, self.split.absent)
        self._parts = frozenset(joint.parts)
        self._present = frozenset(p for p, none in zip(joint.parts, missing) if not none)
        rows = self.split.gradients
        places = [-1 if x is None else x for x in rows if not isinstance(x, tuple)]
        self._place = picker(places) if len(places) == len(rows) else None
        self._read = [k for k, x in enumerate(self.split.backward.placeholders[:count]) if x.users]

    def saved(self, ctx: Any, again: Again) -> list[Any]:
        """What was saved, which this backward frees: but not yet for parts that it leaves out."""
        if ctx.done and ctx.done.isdisjoint(self._present):
            if any(ctx.later[k][0]._version != ctx.later[k][1] for k in self._read):
                raise modified()
            kept = [x for x, _ in ctx.later]
        else:
            shown = ctx.shown
            unread = [(x, n) for k, x, n in shown if k not in self._read] if shown else shown
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
        return [_gradient(of, found) for of in self.split.gradients]

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
