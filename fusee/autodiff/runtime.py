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
from fusee.autodiff.joint import Gradient, Joint, Split
from fusee.autodiff.torch_api import clear_saved, has_saved_tensor_hooks, has_storage
from fusee.errors import DoubleBackwardError, InputError

__all__ = ["Consuming", "differentiable"]

# Inputs, one per InputSpec, to results.
Call = Callable[..., Sequence[Any]]

# The same, from a list that it empties: what is in it lives no longer than it is needed.
Consuming = Callable[[list[Any]], Sequence[Any]]


def differentiable(
    joint: Joint, split: Split, forward: Call, backward: Callable[[Split], Consuming]
) -> Callable[..., Sequence[Any]]:
    """A function of the forward's inputs; its results are those of the joint graph's forward.

    forward   runs split.forward on its inputs
    backward  gives what runs the backward of `split`, or of one without some of the tangents
    raises    (in backward) DoubleBackwardError if a gradient is differentiated again; InputError
              if a hook on saved tensors gave back another kind of tensor, or vmap runs the backward
    """
    differentiated = set(joint.tangents)
    constant = [k for k in range(joint.forward_results) if k not in differentiated]
    saved, count = split.saved, joint.forward_results
    specs = split.backward.inputs
    numbers = _numbers(joint)
    chosen = functools.cache(functools.partial(_Variant, joint, split))

    class CompiledGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
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
            if not all(g is None or has_storage(g) for g in grads):
                raise _batched()
            variant = chosen(tuple(g is None for g in grads))
            kept = variant.saved(ctx)
            if ctx.has_hooks:
                kept = [_as_saved(x, spec) for x, spec in zip(kept, specs)]
            kept += variant.rest(grads, ctx.numbers)
            del grads
            run = backward(variant.split)
            with torch.no_grad(), below_autograd(), without_autocast():
                found = run(kept)
            if torch.is_grad_enabled():
                found = _once(torch.ones((), requires_grad=True), *found)
            return tuple(_gradient(of, found) for of in variant.split.gradients)

    apply: Callable[..., Sequence[Any]] = CompiledGraph.apply
    if not joint.aten.no_autocast:
        return apply

    def without_casts(*inputs: Any) -> Any:
        with without_autocast():
            return apply(*inputs)

    return without_casts


def _numbers(joint: Joint) -> Callable[[Sequence[Any]], list[int]]:
    """A function of the forward's inputs: the value of each symbol."""
    sources = list(joint.aten.symbols.values())

    def numbers(inputs: Sequence[Any]) -> list[int]:
        return [
            inputs[s.index] if s.axis is None else inputs[s.index].size(s.axis) for s in sources
        ]

    return numbers


def _batched() -> InputError:
    return InputError(
        "gradients of a compiled graph are asked for in batches (is_grads_batched, or jacobian and"
        " hessian with vectorize=True)",
        did="stopped this backward",
        remedy="ask for them one by one, or call the module itself, not what was compiled of it",
    )


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

    def saved(self, ctx: Any) -> list[Any]:
        """What was saved, which this backward frees: but not yet for parts that it leaves out."""
        if ctx.done and ctx.done.isdisjoint(self._present):
            if any(ctx.later[k][0]._version != ctx.later[k][1] for k in self._read):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an"
                    " inplace operation"
                )
            kept = [x for x, _ in ctx.later]
        else:
            kept = list(ctx.saved_tensors)
            clear_saved(ctx)
        ctx.done |= self._present
        ctx.later = ()
        if ctx.done < self._parts:  # detached: a result would hold what made it, for ever
            ctx.later = [(x.detach(), x._version) for x in kept]
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


class _Once(torch.autograd.Function):
    """Gradients as they are; to differentiate them is an error, not a wrong result."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *gradients: Any) -> Any:
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise DoubleBackwardError(
            "a gradient of a compiled graph is differentiated: double backward is not compiled",
            did="stopped this backward; parameters keep the gradients they have",
            remedy="call the module itself, not what was compiled of it, where create_graph=True",
        )


_once: Callable[..., Sequence[Any]] = _Once.apply
