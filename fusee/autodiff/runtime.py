"""Compiled forward and backward as one torch.autograd.Function, made per compiled graph.

All that is differentiated goes through the Function: inputs in, results out, what the backward
needs through save_for_backward. So hooks on saved tensors, version checks, retain_graph,
accumulation and gradients of some inputs are torch's own. Views, and writes to inputs that
autograd must know of, happen after it, on its results: see `Joint`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusee.aten.graph import InputSpec
from fusee.aten.torch_api import below_autograd, without_autocast
from fusee.autodiff.again import Again
from fusee.autodiff.joint import Gradient, Joint, Split
from fusee.autodiff.torch_api import (
    clear_saved,
    has_saved_tensor_hooks,
    has_storage,
    keeps_graph,
    modified,
)
from fusee.errors import InputError

__all__ = ["Consuming", "differentiable"]

# Inputs, one per InputSpec, to results.
Call = Callable[..., Sequence[Any]]

# The same, from a list that it empties: what is in it lives no longer than it is needed.
Consuming = Callable[[list[Any]], Sequence[Any]]


def differentiable(
    joint: Joint, split: Split, forward: Call, backward: Callable[[Split], Consuming], again: Again
) -> Callable[..., Sequence[Any]]:
    """A function of the forward's inputs; its results are those of the joint graph's forward.

    forward   runs split.forward on its inputs
    backward  gives what runs the backward of `split`, or of one without some of the tangents
    again     differentiates the graph where the compiled backward cannot: gradients that are
              themselves differentiated, and those in batches
    raises    (in backward) InputError if a hook on saved tensors gave back another kind of tensor
    """
    differentiated = set(joint.tangents)
    constant = [k for k in range(joint.forward_results) if k not in differentiated]
    saved, count = split.saved, joint.forward_results
    numbers = _numbers(joint)
    chosen = functools.cache(functools.partial(_Variant, joint, split))

    class CompiledGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.held = again.hold(inputs)
            with below_autograd():  # what it returns is a view of nothing
                results = forward(*inputs)
            ctx.save_for_backward(
                *(inputs[s.position] if s.kind == "input" else results[s.position] for s in saved)
            )
            ctx.numbers = numbers(inputs)
            ctx.done, ctx.later = frozenset(), ()
            ctx.has_hooks = has_saved_tensor_hooks()
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*(results[k] for k in constant))
            return tuple(results[:count])

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            grads = [given[k] for k in joint.tangents]
            del given
            if all(g is None for g in grads):  # eager's loss would not lead here
                return (None,) * len(ctx.needs_input_grad)
            variant = chosen(tuple(g is None for g in grads))
            held = ctx.held
            kept = variant.saved(ctx, again)
            is_twice = torch.is_grad_enabled()
            if not all(g is None or has_storage(g) for g in grads):  # vmap runs this backward
                return tuple(again.gradients(held, again.inputs(held, kept), grads, is_twice))
            operands = (again.inputs(held, kept), list(grads)) if is_twice else None
            kept += variant.rest(grads, ctx.numbers)
            del grads
            run = backward(variant.split)
            with torch.no_grad(), below_autograd(), without_autocast():
                found = run(kept)
            gradients = [_gradient(of, found) for of in variant.split.gradients]
            if operands is None:
                return tuple(gradients)
            return tuple(again.differentiable(held, *operands, gradients))

    apply: Callable[..., Sequence[Any]] = CompiledGraph.apply
    if joint.unreached and any(gradient is not None for gradient in joint.gradients):
        apply = _detaching(apply, joint.unreached)
    return _without_casts(apply) if joint.aten.no_autocast else apply


def _detaching(apply: Callable[..., Sequence[Any]], indices: Sequence[int]) -> Call:
    """Backward passes go on to these inputs no more than in eager: what made them stays free."""

    def run(*inputs: Any) -> Any:
        given = list(inputs)
        for index in indices:
            given[index] = given[index].detach()
        return apply(*given)

    return run


def _without_casts(apply: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    def run(*inputs: Any) -> Any:
        with without_autocast():
            return apply(*inputs)

    return run


def _numbers(joint: Joint) -> Callable[[Sequence[Any]], list[int]]:
    """A function of the forward's inputs: the value of each symbol."""
    sources = list(joint.aten.symbols.values())

    def numbers(inputs: Sequence[Any]) -> list[int]:
        return [
            inputs[s.index] if s.axis is None else inputs[s.index].size(s.axis) for s in sources
        ]

    return numbers


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

    def __init__(self, joint: Joint, split: Split, missing: tuple[bool, ...]) -> None:
        count = len(split.saved)
        absent = frozenset(k for k, is_missing in enumerate(missing) if is_missing)
        self.split = split if split.without is None or not absent else split.without(absent)
        self._sizes = [list(joint.aten.symbols).index(name) for name in self.split.sizes]
        self._tangents = _tangents(joint, self.split.absent)
        self._parts = frozenset(joint.parts)
        self._present = frozenset(p for p, none in zip(joint.parts, missing) if not none)
        self._read = [k for k, x in enumerate(self.split.backward.placeholders[:count]) if x.users]

    def saved(self, ctx: Any, again: Again) -> list[Any]:
        """What was saved, which this backward frees: but not yet for parts that it leaves out."""
        if ctx.done and ctx.done.isdisjoint(self._present):
            if any(ctx.later[k][0]._version != ctx.later[k][1] for k in self._read):
                raise modified()
            kept = [x for x, _ in ctx.later]
        else:
            kept = list(ctx.saved_tensors)
            clear_saved(ctx)
        ctx.done |= self._present
        if ctx.done < self._parts:  # detached: a result would hold what made it, for ever
            if not ctx.later:
                ctx.held = again.hold_saved(ctx.held, kept)
            ctx.later = [(x.detach(), x._version) for x in kept]
        else:
            ctx.later = ()
            if not keeps_graph():
                ctx.held = None
        if ctx.has_hooks:
            kept = [_as_saved(x, spec) for x, spec in zip(kept, self.split.backward.inputs)]
        return kept

    def rest(self, grads: list[Tensor | None], numbers: Sequence[int]) -> list[Any]:
        """What the backward takes after the saved values."""
        return [*(numbers[k] for k in self._sizes), *self._tangents(grads, numbers)]


def _tangents(
    joint: Joint, absent: frozenset[int]
) -> Callable[[list[Tensor | None], Sequence[int]], list[Tensor]]:
    """A function (gradients of results, values of symbols) -> tangents as they are compiled for.

    source   generated once, as sizes and strides may be expressions
    """
    names: dict[str, Any] = {"zeros": _zeros, "laid_out": _laid_out}
    lines = ["def tangents(grads, numbers):"]
    if joint.aten.symbols:
        lines.append(f"    {', '.join(joint.aten.symbols)}, = numbers")
    for k, spec in enumerate(joint.aten.inputs[joint.forward_inputs :]):
        if k in absent:
            continue
        size, stride = _tuple(spec.size), _tuple(spec.stride)
        names[f"dtype{k}"] = spec.dtype
        lines.append(f"    g = grads[{k}]")
        lazy = "is_conj" if spec.dtype is not None and spec.dtype.is_complex else "is_neg"
        lines.append(f"    if g is not None and g.{lazy}(): g = grads[{k}] = g.clone()")
        lines.append(f"    if g is None: grads[{k}] = zeros({size}, {stride}, dtype{k})")
        lines.append(f"    elif g.stride() != {stride}: grads[{k}] = laid_out(g, {stride})")
    listed = [f"grads[{k}]" for k in range(len(joint.tangents)) if k not in absent]
    lines.append(f"    return [{', '.join(listed)}]")
    exec(compile("\n".join(lines), "<fusee tangents>", "exec"), names)
    found: Callable[[list[Tensor | None], Sequence[int]], list[Tensor]] = names["tangents"]
    return found


def _tuple(sizes: Sequence[object]) -> str:
    return "(" + "".join(f"{size}, " for size in sizes) + ")"


def _zeros(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype).zero_()


def _laid_out(x: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


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
        return _laid_out(x, stride)  # type: ignore[arg-type]  # ints, by the line above
    return x
