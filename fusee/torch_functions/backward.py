"""Backward passes and hooks within a compiled function.

A pass that begins and ends in a graph is one call of it, `leaf_gradients`: it begins at a tensor
that the graph computes and ends at leaves from outside. What it gives is written to their grads,
and what follows, an optimizer's step, is a part of the same graph. Any other pass is autograd's
own and runs between two graphs, which take and give gradients as a whole. Where the program wants
the gradient of what its own graph computes, the function is eager's from the start.
"""

from __future__ import annotations

import dis
import inspect
import operator
import types
from typing import Any

import torch

from fusee.capture import attributes
from fusee.capture.attributes import Capturing
from fusee.capture.builtins import stands_for
from fusee.capture.graph_break import GraphBreak, Lost
from fusee.capture.guards import EqualsMatch
from fusee.capture.recorder import BODY, HOOKS, effects
from fusee.capture.sources import ResultOf, given_by, is_trusted
from fusee.capture.torch_api import (
    FakeTensor,
    as_autograd_keeps,
    has_saved_tensor_hooks,
    history,
    is_held,
    is_watched,
    leaf_gradients,
    pytree,
    saves,
)
from fusee.torch_functions.transforms import run_body

# ---------------------------------------------------------------------------- passes


def _register(function: Any, name: str, first: str, seed: str) -> None:
    signature = inspect.signature(function)

    @stands_for(function)
    def run(m: Capturing, /, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        inputs = pytree.tree_leaves(given.get("inputs"))
        if any(isinstance(x, FakeTensor) and id(x) not in m.world.inputs for x in inputs):
            raise Lost(f"{name} asks for the gradient of a tensor that its own graph computes")
        losses, seeds = (pytree.tree_leaves(given.pop(key, None)) for key in (first, seed))
        # neither `inputs`, nor a graph that stays
        is_usual = len(losses) == 1 and not any(given.values()) and first != "outputs"
        tangent = seeds[0] if seeds else None
        leaves = _leaves(m, losses[0], tangent) if is_usual else None
        if leaves is None:
            raise GraphBreak(f"{name} runs autograd, between two graphs", "")
        _accumulate(m, losses[0], tangent, leaves)


# a view may have no gradient of its own, but require one since its base does
_HOOKS = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks", "_base")
_NONE = None, None, None


def _leaves(m: Capturing, loss: Any, tangent: Any) -> list[torch.Tensor] | None:
    """The leaves at which a pass ends; None if it is autograd's own."""
    world, recorder = m.world, m.world.recorder
    if not isinstance(loss, FakeTensor) or id(loss) in world.inputs or not loss.requires_grad:
        return None
    if m.modes or world.seen or has_saved_tensor_hooks() or is_watched():
        return None
    if world.passed is None or not (recorder.is_main and world.varies.with_backward):
        return None
    nodes = [*history(loss)]
    with torch._C.DisableTorchFunction():
        if tangent is None:
            is_odd = loss.is_complex() or loss.numel() != 1
        else:
            is_odd = not isinstance(tangent, FakeTensor) or tangent.shape != loss.shape
        try:
            using = [node for node in nodes if saves(node)]
        except RuntimeError:  # eager raises on its way
            return None
    # what a class of the user's gives shows when it runs; gradients in rows have no strides
    is_odd |= any(
        isinstance(node, torch.autograd.function.BackwardCFunction)
        or getattr(node, "_saved_sparse", False)
        for node in nodes
    )
    is_odd |= any("recompute" in node.meta for node in recorder.graph.nodes)
    if is_odd or not {*map(id, world.passed)}.isdisjoint(map(id, nodes)):
        return None
    leaves = [x for node in nodes if (x := getattr(node, "variable", None)) is not None]
    if not all(id(x) in world.inputs and _is_plain(m, x) for x in leaves) or not leaves:
        return None
    world.fact(EqualsMatch, given_by(is_watched, "torch.autograd"), False)
    world.passed += using or [loss]
    order = {key: k for k, key in enumerate(world.inputs)}  # the same for later versions
    return sorted(leaves, key=lambda x: order[id(x)])


def _is_plain(m: Capturing, leaf: torch.Tensor) -> bool:
    """Whether nothing but the pass itself, and what is guarded, decides on the grad of a leaf."""
    real, origin = m.world.inputs[id(leaf)]
    with torch._C.DisableTorchFunction():
        if not real.is_leaf or real.layout is not torch.strided or _HOOKS(real) != _NONE:
            return False
        if is_held(real):
            return False
        grad = real.grad
        if grad is not None and (grad.layout is not torch.strided or grad.requires_grad):
            return False
    m.world.fact(EqualsMatch, ResultOf(origin, _HOOKS, "hooks and base of "), _NONE)
    return True


def _accumulate(m: Capturing, loss: torch.Tensor, tangent: Any, leaves: list[torch.Tensor]) -> None:
    """The pass, as a call of the graph, and what it does to grads."""
    recorder, before = m.world.recorder, [attributes.read(m, leaf) for leaf in leaves]
    with torch._C.DisableTorchFunction(), recorder.mode, torch.no_grad():
        found = [as_autograd_keeps(leaf) for leaf in leaves]
    recorder.write(leaf_gradients, "", (loss, tangent, *leaves), {}, found)
    ambient = torch.is_grad_enabled()
    m.call(torch._C._set_grad_enabled, False)
    for leaf, old, new in zip(leaves, before, found):
        if old is None:
            attributes.write(m, leaf, new)
        else:
            m.call(torch.Tensor.add_, old, new)
    m.call(torch._C._set_grad_enabled, ambient)


_register(torch.Tensor.backward, "backward()", "self", "gradient")
_register(torch.autograd.backward, "backward()", "tensors", "grad_tensors")
_register(torch.autograd.grad, "torch.autograd.grad", "outputs", "grad_outputs")

# ---------------------------------------------------------------------------- hooks


@stands_for(torch.Tensor.register_hook)
def _register_hook(m: Capturing, x: Any, hook: Any, /) -> None:
    """A hook that only computes is a part of the graph: autograd runs it as it does in eager."""
    recorder, name, f = m.world.recorder, "register_hook", m.frames[-1]
    is_own = isinstance(x, FakeTensor) and id(x) not in m.world.inputs and not m.world.seen
    if not (is_own and recorder.is_main and x.requires_grad and id(x) not in recorder.leaves):
        raise GraphBreak("register_hook() of a tensor from outside, or that requires no grad")
    is_kept = f.program.instructions[f.at + 1].name != "POP_TOP"
    if is_kept or not _is_settled(m, hook):
        raise _unfit(m, x, "that may be removed, or do otherwise in the backward pass")
    body = run_body(m, name, hook, (x,), {}, None)
    with torch._C.DisableTorchFunction():
        found = [node.meta["example_value"] for node in body.results]
        is_like = all(y.shape == x.shape and y.dtype == x.dtype for y in found)
    if len(body.leaves) != 1 or not is_like or any(map(effects, body.calls)):
        raise _unfit(m, x, "that does more than compute a gradient")

    def register(x: torch.Tensor, *outside: torch.Tensor) -> None:
        function = body.function(outside)
        if x.requires_grad:
            x.register_hook(lambda gradient: function(gradient))  # type: ignore[no-untyped-call]

    register.__name__ = register.__qualname__ = name
    setattr(register, BODY, body.calls)
    setattr(register, HOOKS, {"hooks"})
    recorder.write(register, "", (x, *body.outside), {}, None)


def _unfit(m: Capturing, x: torch.Tensor, why: str) -> GraphBreak | Lost:
    """What ends the graph before a hook that Python registers, if need be at its beginning."""
    return m.world.recorder.ending("register_hook", x)(f"a hook of a tensor {why}")


def _is_settled(m: Capturing, hook: Any) -> bool:
    """Whether a function reads nothing but its argument, torch, and parameters that do not change:
    it runs later than its body is captured."""
    if type(hook) is not types.FunctionType or hook.__defaults__ or hook.__kwdefaults__:
        return False
    code, owner = hook.__code__, m.frames[-1].code
    stored = {x.argval for x in dis.get_instructions(owner) if x.opname == "STORE_DEREF"}
    for other in owner.co_consts:
        if isinstance(other, types.CodeType) and other is not code:
            stored.update(other.co_freevars)
    count = owner.co_argcount + owner.co_kwonlyargcount
    parameters = {*owner.co_varnames[:count]} & {*owner.co_cellvars} - stored
    names = (x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL")
    found = (hook.__globals__.get(name, torch) for name in names)  # else it is one of Python's
    is_known = all(isinstance(x, types.ModuleType) and is_trusted(x.__name__) for x in found)
    return is_known and {*code.co_freevars} <= parameters
