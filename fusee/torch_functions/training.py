"""Backward passes, hooks and optimizers within a compiled function.

A pass that begins and ends in a graph is one call of it, `leaf_gradients`: it begins at a tensor
that the graph computes and ends at leaves from outside. What it gives is written to their grads,
and what follows, an optimizer's step, is a part of the same graph. Any other pass is autograd's
own and runs between two graphs, which take and give gradients as a whole. Where the program wants
the gradient of what its own graph computes, that is cut there (effects.py).

Of torch.optim, `step` and the update formulas are captured like any Python. These are not:

_init_group     finds gradients and state. It runs for real: state that is missing is made at this
                very step anyway. What it found are facts, and inputs of the graph. At the first
                step of parameters on a GPU the option `capturable` is set, as TorchDynamo does:
                steps are counted there, and no number has to come from the CPU
_get_value      `step.item()`, which becomes a float of the graph
the list form   is taken where torch would go through the parameters one by one: the same formulas,
                on whole lists
fused forms     torch's kernels compute what the list form says
schedulers      run between two graphs

Tested with torch 2.13.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import adadelta, adagrad, adam, adamax, lr_scheduler, nadam, radam, rmsprop, sgd
from torch.optim import optimizer as base
from torch.utils import _foreach_utils

from fusee.capture import containers
from fusee.capture.attributes import Capturing
from fusee.capture.builtins import BY_CODE, SPECIAL, stands_for, stands_for_each
from fusee.capture.effects import BODY, HOOKS, effects
from fusee.capture.frame import ABSENT
from fusee.capture.graph_break import Breaking, GraphBreak, Lost, is_held, is_watched
from fusee.capture.guards import EqualsMatch, Keys
from fusee.capture.mirrors import Mirror, read_grad, write_grad
from fusee.capture.policy import enabled, inlined
from fusee.capture.sources import given_by, is_trusted
from fusee.capture.torch_api import (
    FakeTensor,
    as_autograd_keeps,
    has_saved_tensor_hooks,
    history,
    leaf_gradients,
    no_torch_function,
    pytree,
    run_for_real,
    saves,
)
from fusee.torch_functions.higher_order import run_body

# ---------------------------------------------------------------------------- passes


def _register(function: Any, name: str, first: str, seed: str) -> None:
    signature = inspect.signature(function)

    @stands_for(function)
    def run(m: Capturing, /, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        inputs: Any = given.pop("inputs", None)
        listed = pytree.tree_leaves([*inputs] if isinstance(inputs, _VIEWS) else inputs)
        if any(type(x) is FakeTensor and id(x) not in m.world.inputs for x in listed):
            m.world.varies.asks_gradients = True
            raise GraphBreak(f"{name} asks for the gradient of what its own graph computes")
        losses, seeds = (pytree.tree_leaves(given.pop(key, None)) for key in (first, seed))
        # neither `inputs`, nor a graph that stays
        is_whole = inputs is None and not any(given.values())
        is_usual = first != "outputs" and len(losses) == 1 and is_whole
        tangent = seeds[0] if seeds else None
        leaves = _leaves(m, losses[0], tangent) if is_usual else None
        if leaves is None:
            raise GraphBreak(f"{name} runs autograd, between two graphs", "")
        recorder, before = m.recorder, [read_grad(m, leaf) for leaf in leaves]
        with no_torch_function(), recorder.mode, torch.no_grad():
            found = [as_autograd_keeps(leaf) for leaf in leaves]
        recorder.write(leaf_gradients, "", (losses[0], tangent, *leaves), {}, found)
        ambient = torch.is_grad_enabled()
        m.call(torch._C._set_grad_enabled, False)
        for leaf, old, new in zip(leaves, before, found):
            if old is None:
                write_grad(m, leaf, new)
            else:
                m.call(Tensor.add_, old, new)
        m.call(torch._C._set_grad_enabled, ambient)


_VIEWS: tuple[Any, ...] = type({}.keys()), type({}.values())
# a view may have no gradient of its own, but require one since its base does
_HOOKS = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks", "_base")
_NONE = None, None, None


def _leaves(m: Capturing, loss: Any, tangent: Any) -> list[Tensor] | None:
    """The leaves at which a pass ends; None if it is autograd's own."""
    world, recorder = m.world, m.recorder
    if type(loss) is not FakeTensor or id(loss) in world.inputs or not loss.requires_grad:
        return None
    if m.modes or world.seen or has_saved_tensor_hooks() or is_watched():
        return None
    if world.passed is None or not (recorder.is_main and world.varies.with_backward):
        return None
    nodes = [*history(loss)]
    with no_torch_function():
        if tangent is None:
            is_odd = loss.is_complex() or loss.numel() != 1
        else:
            is_odd = type(tangent) is not FakeTensor or tangent.shape != loss.shape
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
    if not leaves or not all(id(x) in world.inputs for x in leaves):
        return None
    with no_torch_function():
        for real, origin in (world.inputs[id(x)] for x in leaves):
            # nothing but the pass itself, and what is guarded, may decide on its grad
            if not real.is_leaf or real.layout is not torch.strided or _HOOKS(real) != _NONE:
                return None
            grad = real.grad
            is_odd = grad is not None and (grad.layout is not torch.strided or grad.requires_grad)
            if is_odd or is_held(real):
                return None
            world.gives(origin, _HOOKS, "hooks and base of ", _NONE)
    world.fact(EqualsMatch, given_by(is_watched, "torch.autograd"), False)
    world.passed += using or [loss]
    order = {key: k for k, key in enumerate(world.inputs)}  # the same for later versions
    return sorted(leaves, key=lambda x: order[id(x)])


_register(Tensor.backward, "backward()", "self", "gradient")
_register(torch.autograd.backward, "backward()", "tensors", "grad_tensors")
_register(torch.autograd.grad, "torch.autograd.grad", "outputs", "grad_outputs")

# ---------------------------------------------------------------------------- hooks


@stands_for(Tensor.register_hook)
def _register_hook(m: Capturing, x: Any, hook: Any, /) -> None:
    """A hook that only computes is a part of the graph: autograd runs it as it does in eager."""
    recorder, name, f = m.recorder, "register_hook", m.frames[-1]
    is_own = type(x) is FakeTensor and id(x) not in m.world.inputs and not m.world.seen
    if not (is_own and recorder.is_main and x.requires_grad and id(x) not in recorder.leaves):
        raise GraphBreak("register_hook() of a tensor from outside, or that requires no grad")
    is_kept = f.program.instructions[f.at + 1].name != "POP_TOP"
    if is_kept or not _is_settled(m, hook):
        raise _unfit(m, x, "that may be removed, or do otherwise in the backward pass")
    body = run_body(m, name, hook, (x,), {}, None)
    with no_torch_function():
        found = [node.meta["example_value"] for node in body.results]
        is_like = all(y.shape == x.shape and y.dtype == x.dtype for y in found)
    if len(body.leaves) != 1 or not is_like or any(map(effects, body.calls)):
        raise _unfit(m, x, "that does more than compute a gradient")

    def register(x: Tensor, *outside: Tensor) -> None:
        function = body.function(outside)
        if x.requires_grad:
            x.register_hook(lambda gradient: function(gradient))  # type: ignore[no-untyped-call]

    register.__name__ = register.__qualname__ = name
    setattr(register, BODY, body.calls)
    setattr(register, HOOKS, {"hooks"})
    recorder.write(register, "", (x, *body.outside), {}, None)


def _unfit(m: Capturing, x: Tensor, why: str) -> GraphBreak | Lost:
    """What ends the graph before a hook that Python registers, if need be at its beginning."""
    return m.recorder.ending("register_hook", x, f"a hook of a tensor {why}")


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


_CLASSES: tuple[Any, ...] = (
    adadelta.Adadelta, adagrad.Adagrad, adam.Adam, adamax.Adamax, nadam.NAdam, radam.RAdam,
    rmsprop.RMSprop, sgd.SGD,
)  # fmt: skip


# ------------------------------------------------------------------------------ step, zero_grad


@inlined
def _without_grad(step: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch wraps around `step`, without its calls for TorchDynamo."""
    before = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(self.defaults["differentiable"])
        return step(self, *args, **kwargs)
    finally:
        torch.set_grad_enabled(before)


_USE_GRAD: Any = base._use_grad_for_differentiable(print)


@BY_CODE.rule(id(_USE_GRAD.__code__))
def _step(function: types.FunctionType, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    (cell,) = function.__closure__ or ()
    inner = m.world.hold(cell.cell_contents, function.__qualname__)
    return m.call(m.world.hold(_without_grad, "step"), inner, *args, **kwargs)


_ZERO_GRAD: Any = torch.optim.Optimizer.zero_grad
_OF_MODULES: Any = torch.nn.Module.zero_grad
_BODIES: dict[Any, Any] = {
    _ZERO_GRAD: _ZERO_GRAD.__wrapped__,
    _OF_MODULES: types.FunctionType(
        _OF_MODULES.__code__, _OF_MODULES.__globals__, "zero_grad", _OF_MODULES.__defaults__
    ),
}


@stands_for_each(*_BODIES)
def _zero_grad(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> None:
    """Gradients that a program lets go of are gone before its graph runs, as in eager.

    If the graph fails, Python runs the program from its beginning, and finds them gone. Where it
    would fail before this, they stay: a pass in the graph has two sets in memory, of small ones.
    """
    world = m.world
    may_fail = any("raises" in effects(node) for node in world.recorder.graph.nodes)
    is_first = not (may_fail or world.has_read("grad"))
    m.call(world.hold(_BODIES[function], "zero_grad"), *args, **kwargs)
    lets_go = (*args[1:], *kwargs.values()) != (False,)
    if is_first:
        slots = world.slots.items()
        world.released += [at for at, x in slots if at[1] == "grad" and x[2] is None]
    elif may_fail and lets_go and not world.passed:
        gone = [x for at, (x, _, grad) in world.slots.items() if at[1] == "grad" and grad is None]
        if sum(x.numel() * x.element_size() for x in gone) > _SMALL:
            world.passed = None


_SMALL = 1 << 26  # bytes of gradients, which cost less than another piece


# captured, each rate would be a fact, and every step a version
_SCHEDULERS = [x for x in vars(lr_scheduler).values() if isinstance(x, type) and "step" in vars(x)]
_IN_PYTHON = "a scheduler computes learning rates in Python, between two graphs"
SPECIAL.update((vars(kind)["step"], Breaking(_IN_PYTHON)) for kind in _SCHEDULERS)


# ------------------------------------------------------------------------------ state


@stands_for_each(*(enabled(kind._init_group) for kind in _CLASSES))
def _init_group(function: Any, m: Capturing, optimizer: Any, group: Any, *lists: Any) -> Any:
    if m.modes:
        raise GraphBreak("a function mode hears what an optimizer makes at its first step")
    state = m.world.mirror(m.attribute(optimizer, "state"))
    params = m.items(m.subscript(group, "params"))
    settings = m.world.mirror(group)
    mirrors = [state, *(x for at in map(id, state.obj.values()) if (x := m.world.mirrors.get(at)))]
    own = settings.obj
    was = own if settings.before is None else settings.before
    now = {**was, **settings.writes} if settings.copy is None else settings.copy
    written = {key for key in {**was, **now} if now.get(key, ABSENT) is not was.get(key, ABSENT)}
    # of a learning rate that is a number torch's function reads nothing
    is_paced = written <= {"lr"} and not isinstance(now.get("lr"), Tensor)
    if any(x.is_changed() for x in mirrors) or not is_paced:
        raise GraphBreak("an optimizer steps after its state was replaced")
    if dict.get(own, "capturable") is False and all(
        param.device.type in _GPUS and param not in state.obj for param in own["params"]
    ):
        own["capturable"] = True
    for key in dict.keys(group):
        m.subscript(group, key)
    real: list[list[Any]] = [[] for _ in lists]
    reals = [m.world.inputs[id(fake)][0] for fake in params]
    m.world.varies.begun += [(state.obj, x) for x in reals if x not in state.obj]
    with _graded(m, params) as made:
        result = run_for_real(function, optimizer, group, *real)
    known = made | _known(m, state, params)
    for found, given in zip(real, lists, strict=True):
        if any(isinstance(x, Tensor) and id(x) not in known for x in found):
            raise GraphBreak("an optimizer has tensors in its state that are not by parameter")
        given.extend(known.get(id(x), x) for x in found)
    return result


_GPUS = {"cuda"}


@contextlib.contextmanager
def _graded(m: Capturing, params: list[Any]) -> Iterator[dict[int, Any]]:
    """Inside, parameters have grads where the program has written some. These, by id of what is
    there in their place: it says what they are like, and takes no memory."""
    world, found, before = m.world, dict[int, Any](), []
    with torch.no_grad(), no_torch_function():
        try:
            for fake in params:
                grad: Any = world.slots.get((id(fake), "grad"), (ABSENT,))[-1]
                param, _ = world.inputs[id(fake)]
                if grad is ABSENT:
                    continue
                before.append((param, param.grad))
                if grad is None or id(grad) in world.inputs:
                    param.grad = grad if grad is None else world.inputs[id(grad)][0]
                else:
                    like = torch.empty((), dtype=grad.dtype, device=param.device)
                    param.grad = made = like.expand(param.shape)
                    found[id(made)] = grad
            yield found
        finally:
            for param, grad in before:
                param.grad = grad


def _known(m: Capturing, state: Mirror, params: list[Any]) -> dict[int, Any]:
    """Guards what there is for parameters now. What stands for each real tensor of it, by id."""
    world, found = m.world, dict[int, Any]()
    for fake in params:
        param, _ = world.inputs[id(fake)]
        grad = read_grad(m, fake)
        found[id(param)] = fake
        if grad is None:
            continue
        if id(grad) in world.inputs:
            found[id(world.inputs[id(grad)][0])] = grad
        of_param = dict.get(state.obj, param)
        if of_param is None:
            continue
        mirror = world.mirror(containers.item(m, state.obj, fake))
        world.fact(Keys, mirror.origin, tuple(of_param))
        for key, value in of_param.items():
            loaded = world.get(mirror, key)
            if isinstance(value, Tensor):
                found[id(value)] = loaded
    return found


# ------------------------------------------------------------------------------ formulas


@stands_for(base._get_value)
def _get_value(m: Capturing, x: Any) -> Any:
    if type(x) is not FakeTensor:
        return x
    if x.is_complex() or not x.is_floating_point():
        raise GraphBreak("a count of steps that is no float")
    return m.recorder.item(x)


SPECIAL[base._stack_if_compiling] = lambda m, x: x


@stands_for(base._default_to_fused_or_foreach)
def _default_form(
    m: Capturing, params: Any, differentiable: bool, use_fused: bool = False
) -> tuple[bool, bool]:
    # the list form of Nesterov's momentum writes to the gradients
    return False, not (differentiable or m.frames[-1].locals.get("nesterov") is True)


@stands_for(_foreach_utils._group_tensors_by_device_and_dtype)
def _grouped(m: Capturing, tensorlistlist: Any, with_indices: bool = False) -> Any:
    if m.modes:
        raise GraphBreak("a function mode hears what parts a list of tensors by their classes")
    lists, groups = tensorlistlist, dict[Any, Any]()
    for k, first in enumerate(lists[0]):
        key = (first.device, first.dtype)
        columns, indices = groups.setdefault(key, ([[] for _ in lists], []))
        indices.append(k)
        for column, one in zip(columns, lists, strict=True):
            if one:
                column.append(one[k])
    return groups


_FUSED = {
    enabled(getattr(module, f"_fused_{name}")): (module, name)
    for name, module in (("adam", adam), ("adagrad", adagrad), ("sgd", sgd))
}


@stands_for_each(*_FUSED)
def _in_lists(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """The list form, for the arguments of torch's fused one."""
    if any(kwargs.get(key) is not None for key in ("grad_scale", "found_inf")):
        raise GraphBreak("an optimizer with a gradient scaler inside of its kernel")
    module, name = _FUSED[function]
    form = "single" if kwargs.get("nesterov") else "multi"
    made = getattr(module, f"_{form}_tensor_{name}")
    return m.call(m.world.hold(made, made.__name__), *args, **kwargs)
