"""Functions of torch that take functions: torch.vmap and torch.func, autograd.Function.apply,
checkpoint, control flow, flex_attention.

A function that is transformed is a graph of its own, in one node. It runs on the machine with
stand-ins for what the transform gives it: one example in place of a batch, a plain tensor in place
of one that is differentiated. What that records is cut out of the graph and becomes a module of its
own, and the graph calls the transform of this module. So functorch itself runs, whoever runs the
graph: a backend that traces it sees what functorch makes of the module's calls. It runs on the
stand-ins too, for what the results look like, and whatever it refuses ends the graph.

What a program may learn of a tensor within a transform is what a stand-in surely tells as well, its
shape and dtype for one, not its strides. Anything else ends the graph.

A class of autograd functions is one node, which calls `apply`: whoever traces the graph sees what
eager's autograd makes of it. What its methods read must be known, so the machine runs them as well.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from fusee.capture.attributes import Capturing
from fusee.capture.builtins import BY_CODE, SPECIAL, stands_for, stands_for_each
from fusee.capture.dynamic import Computed, Number
from fusee.capture.effects import BODY, effects, written_by
from fusee.capture.frame import EXACT, having, is_scalar
from fusee.capture.graph_break import GraphBreak, storages
from fusee.capture.policy import inlined
from fusee.capture.torch_api import (
    FakeTensor,
    SelectiveMode,
    State,
    apply_function,
    batch_axes,
    graph_module,
    higher_order,
    no_torch_function,
    pytree,
    set_grad_enabled,
)
from fusee.source import Args, Kwargs, tensors_in

# ---------------------------------------------------------------------------- transforms

# The names of transforms, by id of the code of what they return: a closure over `func`.
_TRANSFORMS: dict[int, str] = {
    id(code): name
    for name in "vmap grad grad_and_value jacrev jacfwd".split()
    for code in vars(torch.func)[name].__code__.co_consts
    if isinstance(code, types.CodeType) and code.co_name in ("wrapped", "wrapper", "wrapper_fn")
}

# What is the same for one example of a batch, or a tensor that is differentiated.
_SAME = frozenset(
    "shape size dtype device ndim dim ndimension numel nelement __len__ is_floating_point"
    " is_complex element_size itemsize layout is_sparse is_cuda is_quantized is_nested"
    " is_mkldnn is_meta is_cpu".split()
)


class _Within(TorchFunctionMode):
    """Sees what the program asks of tensors within a transform."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if found is None or name in _SAME or _apart(found)[0]:
            return found
        raise GraphBreak(f"{name} of a tensor may differ within {self.name}")


class FunctionBody(NamedTuple):
    """A function as a graph.

    module      takes the tensors that the transform changes, then those from outside of the body
    picked      the places of the first ones among the leaves of all arguments
    outside     the second ones
    leaves      what the function returns, None for each tensor, to be put together by `spec`
    calls       its nodes
    """

    name: str
    module: fx.GraphModule
    picked: list[int]
    outside: list[Tensor]
    leaves: Sequence[Any]
    spec: Any
    calls: list[fx.Node]

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that the graph gives."""
        (output,) = self.module.graph.find_nodes(op="output")
        return list(output.args[0])

    def function(self, outside: Args) -> Callable[..., Any]:
        """The function, for a transform."""

        def body(*args: Any, **kwargs: Any) -> Any:
            given = pytree.tree_leaves((args, kwargs))
            found = self.module.forward(*(given[k] for k in self.picked), *outside)
            return _together(found, self.leaves, self.spec)

        body.__name__ = body.__qualname__ = self.name
        return body


# ------------------------------------------------------------------------------ the body


# Transforms that differentiate, whatever requires gradients outside of them.
_DIFFERENTIATE = frozenset(("grad", "grad_and_value", "jacrev", "jacfwd", "jvp", "vjp"))


def run_body(
    m: Capturing, name: str, func: Any, args: Args, kwargs: Kwargs, axes: list[int | None] | None
) -> FunctionBody:
    """Run a function on stand-ins and take what it records out of the graph.

    axes   of each leaf of `args`, the axis that it is mapped over; None if there is no mapping
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    count = len(pytree.tree_leaves(args))
    picked, shown = list[int](), list(leaves)
    for k, x in enumerate(leaves):
        axis = None if axes is None or k >= count else axes[k]
        if type(x) is not FakeTensor or (axes is not None and axis is None):
            continue
        picked.append(k)
        with no_torch_function(), m.world.mode:  # a stand-in in the same memory
            if axis is not None and not x.shape[axis]:
                shown[k] = x.new_empty([n for j, n in enumerate(x.shape) if j != axis])
            else:
                shown[k] = (x if axis is None else x.select(axis, 0)).detach()
    with no_torch_function():
        needs = any(type(x) is FakeTensor and x.requires_grad for x in leaves)
    outer = m.within
    m.within = (*outer, name, *(["grad"] if needs and torch.is_grad_enabled() else []))
    before = effects_of(m)
    args, kwargs = pytree.tree_unflatten(shown, spec)
    recorder = m.recorder
    with recorder.apart(*(shown[k] for k in picked)) as inner:
        try:
            with _Within(name):
                result = m.deep(m.call(func, *args, **kwargs))
        except Exception as error:  # noqa: BLE001  # whatever the program raises
            raise GraphBreak(f"the function under {name} raises {error!r}") from None
        finally:
            m.within = outer
        if effects_of(m) != before:
            raise GraphBreak(f"the function under {name} does more than compute tensors")
        tensors, found, out_spec = _apart(result)
        if not all(x is None or is_scalar(x[0]) for x in found):
            raise GraphBreak("the function under a transform returns more than tensors")
        inner.output(tuple(map(recorder.node, tensors)))
    nodes = inner.find_nodes(op="placeholder")[len(picked) :]
    outside = [node.meta["example_value"] for node in nodes]
    calls = [n for n in inner.nodes if n.op not in ("placeholder", "output")]
    short = getattr(func, "__name__", type(func).__name__)
    return FunctionBody(
        short, graph_module(inner, recorder.bodies), picked, outside, found, out_spec, calls
    )


def effects_of(m: Capturing) -> Any:
    """What a function has changed so far, besides tensors."""
    return m.world.changes()[1:], len(m.regions), State.now()


def _apart(x: Any) -> tuple[list[Tensor], list[Any], Any]:
    """The tensors of a pytree; its other leaves, each in a tuple, None for a tensor; its spec."""
    leaves, spec = pytree.tree_flatten(x)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], spec


def _together(tensors: Iterable[Tensor], leaves: Sequence[Any], spec: Any) -> Any:
    found = iter(tensors)
    return pytree.tree_unflatten([next(found) if x is None else x[0] for x in leaves], spec)


# ------------------------------------------------------------------------------ the call


def _transformed(
    m: Capturing, name: str, body: FunctionBody, transform: Callable[..., Any], *given: Any
) -> Any:
    """`transform(function, *given)` as one node. It takes and returns pytrees, and so does this."""
    tensors, constants, spec = _apart(given)
    constants = [x if x is None or is_scalar(x[0]) else (None,) for x in constants]
    count, shape = len(tensors), list[Any]()

    def call(*tensors: Any) -> tuple[Any, ...]:
        given = _together(tensors, constants, spec)
        results, *shape[:] = _apart(transform(body.function(tensors[count:]), *given))
        return tuple(results)

    call.__name__ = call.__qualname__ = f"{name}_{body.name}".replace("<lambda>", "function")
    setattr(call, BODY, body.calls)
    try:
        results = m.recorder.call_whole(call, *tensors, *body.outside)
    except Exception as error:  # noqa: BLE001  # whatever functorch refuses
        raise GraphBreak(f"{name} raises {error!r}") from None
    if not all(x is None or is_scalar(x[0]) for x in shape[0]):
        raise GraphBreak(f"{name} gives more than tensors")
    return _together(results, *shape)


def _arguments(m: Capturing, name: str, given: Any) -> Any:
    """Arguments of a transform, without what lies outside."""
    given = m.deep(given)
    _look_into(name, given)
    if any(on for _, on, _ in State.now().autocast):
        raise GraphBreak(f"{name} while autocast is on")
    return given


def _look_into(name: str, x: Any) -> None:
    """Floats that the graph computes become constants; what capture cannot see ends the graph."""
    if type(x) in (tuple, list, dict, collections.OrderedDict) or hasattr(x, "_fields"):
        for item in x.values() if isinstance(x, dict) else x:
            _look_into(name, item)
    elif type(x) in pytree.SUPPORTED_NODES:
        raise GraphBreak(f"{name} of a {type(x).__qualname__}, which torch alone looks into")
    elif type(x) is Number:
        x.need()


@BY_CODE.rule(*_TRANSFORMS)
def _of_closure(function: types.FunctionType, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """A call of the function that a transform has returned."""
    m.world.know_cells(function)
    name, names = _TRANSFORMS[id(function.__code__)], function.__code__.co_freevars
    cells = dict(zip(names, function.__closure__ or ()))
    values = {key: m.world.cell(cell, key) for key, cell in cells.items()}
    func = values.pop("func")
    values = {key: _arguments(m, name, x) for key, x in values.items()}
    args, kwargs = _arguments(m, name, (args, kwargs))
    axes = None
    if name == "vmap":
        if values["chunk_size"] is not None and values["randomness"] == "same":
            raise GraphBreak("vmap puts the generator back before each chunk")
        try:
            axes = batch_axes(values["in_dims"], args, func)
        except Exception as error:  # noqa: BLE001  # what torch says of wrong arguments
            raise GraphBreak(f"vmap raises {error!r}") from None
    # as torch.func has it for the function that it differentiates
    is_on = torch.is_grad_enabled() or name in ("grad", "grad_and_value", "jacrev")
    with torch.set_grad_enabled(is_on):
        body = run_body(m, name, func, args, kwargs, axes)

    def transformed(inner: Any, args: Args, kwargs: Kwargs) -> Any:
        closure = tuple(types.CellType({"func": inner, **values}[key]) for key in names)
        made = types.FunctionType(
            function.__code__, function.__globals__, name, function.__defaults__, closure
        )
        return made(*args, **kwargs)

    return _transformed(m, name, body, transformed, args, kwargs)


@stands_for(torch.func.jvp)
def _jvp(m: Capturing, /, func: Any, primals: Any, tangents: Any, **kwargs: Any) -> Any:
    primals, tangents, kwargs = _arguments(m, "jvp", (primals, tangents, kwargs))
    if not isinstance(primals, tuple):
        raise GraphBreak("jvp is called in an unusual way")
    body = run_body(m, "jvp", func, primals, {}, None)

    def both(inner: Any, primals: Any, tangents: Any, kwargs: Kwargs) -> Any:
        return torch.func.jvp(inner, primals, tangents, **kwargs)

    return _transformed(m, "jvp", body, both, primals, tangents, kwargs)


@stands_for(torch.func.vjp)
def _vjp(m: Capturing, func: Any, /, *primals: Any, **kwargs: Any) -> Any:
    """What the function gives, and another function: the graph runs the first again for that."""
    primals = _arguments(m, "vjp", primals)
    with torch.enable_grad():
        body = run_body(m, "vjp", func, primals, {}, None)
    if any(effects(n) & {"writes", "draws"} for n in body.calls):
        raise GraphBreak("the function under vjp has effects, and would have them twice")

    def forward(inner: Any, primals: Args) -> Any:
        first, _, *aux = torch.func.vjp(inner, *primals, **kwargs)
        return first, *aux

    first, *aux = _transformed(m, "vjp", body, forward, primals)
    has_aux = kwargs.get("has_aux", False)
    return first, functools.partial(_pull_back, body, primals, has_aux), *aux


def _pull_back(body: FunctionBody, primals: Args, has_aux: bool, cotangents: Any) -> Any:
    """What the function that vjp returns is called for."""


@stands_for(_pull_back)
def _pulled_back(
    m: Capturing, body: FunctionBody, primals: Args, has_aux: bool, cotangents: Any, /
) -> Any:
    def backward(inner: Any, primals: Args, cotangents: Any) -> Any:
        return torch.func.vjp(inner, *primals, has_aux=has_aux)[1](cotangents)

    return _transformed(m, "pull_back", body, backward, primals, _arguments(m, "vjp", cotangents))


# ---------------------------------------------------------------------------- higher order


_Function: Any = torch.autograd.Function


class _Context:
    """What `ctx` is to an autograd function that the machine runs."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Any, ...] = ()
        self.dirty: tuple[Any, ...] = ()

    @inlined
    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    @inlined
    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    @inlined
    def note(self, *_: Any) -> None:
        """What torch is told of results; it shows in them once `apply` is called."""

    save_for_forward = mark_non_differentiable = set_materialize_grads = note


@stands_for(apply_function)
def _apply(m: Capturing, cls: Any, /, *given: Any, **kwargs: Any) -> Any:
    if cls is checkpoint.CheckpointFunction and not kwargs:
        return _checkpoint_reentrant(m, *given)
    if cls in m.made_classes or kwargs:
        raise GraphBreak(f"{cls.__qualname__}.apply is made, or called, in a way that differs")
    # stand-ins do not show it, and its backward is its own
    if _DIFFERENTIATE.intersection(m.within):
        raise GraphBreak(f"{cls.__qualname__} has a backward pass of its own under a transform")
    has_context = cls.setup_context is not _Function.setup_context
    if "vmap" in m.within and not (cls.generate_vmap_rule and has_context):
        raise GraphBreak(f"vmap asks {cls.__qualname__} for a `vmap` of its own")
    if m.policy.is_in_graph(cls):
        return _apply_whole(m, cls, given)
    with no_torch_function():
        needs = tuple(type(x) is FakeTensor and x.requires_grad for x in given)
    is_grad, calls, before = torch.is_grad_enabled(), m.recorder.calls, m.world.changes()[1:]
    has_asked, m.asks_compiling, sizes = m.asks_compiling, False, m.recorder.symbols.env.data.made
    known = len(sizes)
    if not (is_grad and any(needs)):  # nothing goes backward: it is what its lines do
        _switch_grad(m, False)
        try:
            return _without_backward(m, cls, given, has_context)
        finally:
            _switch_grad(m, is_grad)
    if m.modes:
        raise GraphBreak(f"a function mode hears what {cls.__qualname__} computes")
    with m.recorder.apart() as trial:
        set_grad_enabled(False)
        try:
            context = _Context(needs)
            out = _run_forward(m, cls, given, context)
            results = out if isinstance(out, tuple) else (out,)
            grads = [m.call(torch.ones_like, x) for x in results if type(x) is FakeTensor]
            if len(grads) != sum(type(x) not in EXACT for x in results):
                raise GraphBreak(f"{cls.__qualname__} gives more than tensors")
            grads = [None if type(x) in EXACT else grads.pop(0) for x in results]
            begun = len(trial.nodes)
            try:
                m.call(m.attribute(cls, "backward"), context, *grads)
            except Exception as error:  # noqa: BLE001  # whatever it raises in the backward pass
                raise GraphBreak(f"{cls.__qualname__}.backward raises {error!r}") from None
            if m.recorder.writers([*trial.nodes][begun:], known=True):  # none sees it later
                raise GraphBreak(f"{cls.__qualname__}.backward writes to a tensor from outside")
        finally:
            set_grad_enabled(is_grad)
            asks, m.asks_compiling = m.asks_compiling, m.asks_compiling or has_asked
    m.recorder.calls = calls
    if m.world.changes()[1:] != before:
        raise GraphBreak(f"{cls.__qualname__} does more than compute tensors")
    if len(sizes) > known:
        raise GraphBreak(f"{cls.__qualname__} has sizes that only the data knows")
    if asks:  # it would run otherwise on stand-ins, and keep them
        raise GraphBreak(f"{cls.__qualname__} asks whether it is compiled, where nobody tells it")
    return _apply_whole(m, cls, given)


def _apply_whole(m: Capturing, cls: Any, given: Args) -> Any:
    def apply(*args: Any) -> Any:
        return cls.apply(*args)

    apply.__name__ = apply.__qualname__ = cls.__name__
    apply.__module__ = cls.__module__
    return m.recorder.call_whole(apply, *map(m.deep, given))


def _switch_grad(m: Capturing, is_on: bool) -> None:
    """Switch gradients, of which no function mode hears."""
    before = State.now()
    with no_torch_function():
        set_grad_enabled(is_on)
    m.recorder.switch(before, State.now())


def _run_forward(m: Capturing, cls: Any, given: Args, context: _Context) -> Any:
    if cls.setup_context is _Function.setup_context:
        return m.call(m.attribute(cls, "forward"), context, *given)
    out = m.call(m.attribute(cls, "forward"), *given)
    m.call(m.attribute(cls, "setup_context"), context, given, out)
    return out


def _without_backward(m: Capturing, cls: Any, given: Args, has_context: bool) -> Any:
    """Its forward; an input that it gives back is another tensor."""
    context = _Context((False,) * len(given))
    out = _run_forward(m, cls, given, context)
    results = list(out) if type(out) is tuple else [out]
    for k, x in enumerate(results):
        is_given = type(x) is FakeTensor and any(x is one for one in given)
        if is_given and (x.requires_grad or all(x is not one for one in context.dirty)):
            if has_context and any(x is one for one in context.saved_tensors):
                raise GraphBreak(f"{cls.__qualname__} saves an input that it gives back")
            way = (Tensor.detach, x) if x.requires_grad else (Tensor.view_as, x, x)
            results[k] = m.call(*way)
    return tuple(results) if type(out) is tuple else results[0]


_CHECKPOINT: Any = checkpoint.checkpoint


@stands_for(_CHECKPOINT)
def _checkpoint(m: Capturing, /, function: Any, *args: Any, **kwargs: Any) -> Any:
    """The function, inlined: its nodes are marked, for a backend to compute them again."""
    settings = _CHECKPOINT.__wrapped__.__kwdefaults__
    chosen = {**settings, **{key: kwargs[key] for key in settings if key in kwargs}}
    if chosen["use_reentrant"] is not False:  # torch's own code comes to `_checkpoint_reentrant`
        inner = m.world.hold(_CHECKPOINT.__wrapped__, "checkpoint")
        return m.call(inner, function, *args, **kwargs)
    if chosen["debug"] is not settings["debug"]:
        raise GraphBreak(
            "checkpoint(..., debug=True) records the backward pass as it runs",
            "checkpoint(...) without debug",
        )
    policy = None
    if chosen["context_fn"] is not settings["context_fn"]:
        mode, _ = m.items(m.call(chosen["context_fn"]))
        if type(mode) is not SelectiveMode:
            raise GraphBreak("checkpoint() runs its function within contexts of the program's")
        wanted = m.attribute(mode, "policy_fn")

        def policy(out: Any, op: Any, args: Any, kwargs: Any) -> bool:
            """Whether the program wants an operator's result saved."""
            context = checkpoint.SelectiveCheckpointContext(is_recompute=False)
            context.op_output = out
            found = wanted(context, op, *args, **kwargs)
            saving = checkpoint.CheckpointPolicy
            return found is True or found in (saving.MUST_SAVE, saving.PREFER_SAVE)

    given = {key: x for key, x in kwargs.items() if key not in (*settings, "preserve_rng_state")}
    return _recomputed(m, policy, function, *args, **given)


def _recomputed(m: Capturing, policy: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    before = m.world.changes()[1:]
    with m.recorder.recomputed(policy) as made:
        result = m.call(function, *args, **kwargs)
    has_effects = m.world.changes()[1:] != before or m.recorder.writers(made)
    if torch.is_grad_enabled() and has_effects:
        raise GraphBreak("what runs under checkpoint() has effects, and has them twice in eager")
    return result


def _checkpoint_reentrant(m: Capturing, function: Any, _: Any, *given: Any) -> Any:
    """The same, where it is sure that the outputs are differentiated as eager's are."""
    learns = any(type(x) is FakeTensor and x.requires_grad for x in given)
    if not learns:
        m.call(warnings.warn, "None of the inputs have requires_grad=True. Gradients will be None")
    learns = learns and torch.is_grad_enabled()
    alone = torch.no_grad()(getattr(function, "_call_impl", function))  # else attributes are copied
    result = _recomputed(m, None, function, *given) if learns else m.call(alone, *given)
    results = result if isinstance(result, tuple) else [result]
    for x in (y for y in results if type(y) is FakeTensor):
        is_float = x.is_floating_point() or x.is_complex()
        if any(x is y for y in given) or (learns and is_float and not x.requires_grad):
            raise GraphBreak("a reentrant checkpoint() makes all that it gives require grad")
    return result


def _known(names: Iterable[str]) -> list[Any]:
    """The higher-order operators of these names that this torch has."""
    return [getattr(higher_order, name) for name in names if hasattr(higher_order, name)]


@stands_for(*_known(["out_dtype"]))
def _out_dtype(m: Capturing, op: Any, dtype: Any, /, *operands: Any) -> Any:
    """The operator on tensors that are converted first, as in eager."""
    tensors = [x for x in operands if type(x) is FakeTensor]
    if any(x.requires_grad for x in tensors):
        raise GraphBreak("out_dtype of tensors that require grad, for which it has no gradient")
    wide = functools.reduce(torch.promote_types, (x.dtype for x in tensors), dtype)
    given = (m.call(Tensor.to, x, wide) if type(x) is FakeTensor else x for x in operands)
    return m.call(Tensor.to, m.call(op, *given), dtype)


stands_for(*_known(["wrap"]))(  # it is the call, for tracers that want it as one node
    lambda m, function, /, *args, **kwargs: m.call(function, *args, **kwargs)
)


# ---------------------------------------------------------------------------- control flow
# torch.cond, while_loop, map and scan: their functions are graphs, and the call is one node.
# As in TorchDynamo's graphs, a function takes the call's operands and then the tensors that it uses
# from outside, which the call gets as operands too. How often a function runs is known only when
# the graph runs, so it must do nothing but compute tensors, new ones: anything else ends the graph.


class _Convention(NamedTuple):
    """How a higher-order operator calls its functions.

    functions  their places among its arguments, and the names that TorchDynamo gives their graphs
    lifted     the place of the operands to which tensors from outside are added
    given      from the arguments: what the functions get
    bare       of which functions the only result is in no tuple
    stacked    from the arguments: how many of the last function's results are not stacked, and how
               many rows the others have
    """

    functions: dict[int, str]
    lifted: int
    given: Callable[[Any], tuple[Any, ...]]
    stacked: Callable[[Any], tuple[int | None, int]] = lambda args: (None, 0)
    bare: tuple[int, ...] = ()


def _rows(xs: Any) -> tuple[Any, ...]:
    return tuple(x.select(0, 0) for x in xs)


_FORMS = {
    "cond": _Convention({1: "cond_true", 2: "cond_false"}, 3, lambda args: tuple(args[3])),
    "while_loop": _Convention(
        {0: "cond_fn", 1: "body_fn"}, 3, lambda args: (*args[2], *args[3]), bare=(0,)
    ),
    "map_impl": _Convention(
        {0: "map_body"}, 2, lambda args: (*_rows(args[1]), *args[2]),
        lambda args: (0, args[1][0].shape[0]),
    ),
    "scan": _Convention(
        {0: "scan_combine_fn"}, 3, lambda args: (*args[1], *_rows(args[2]), *args[3]),
        lambda args: (len(args[1]), args[2][0].shape[0] if args[2] else 0),
    ),
}  # fmt: skip


@stands_for_each(*_known(_FORMS))
def _call(operator: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    name, given = operator.__name__, list(m.deep((*args, *kwargs.values())))
    form = _FORMS[name]
    if name == "cond" and not isinstance(given[0], (FakeTensor, Computed)):
        return m.call(given[1 if m.truth(given[0]) else 2], *given[3])
    operands = [x for k, x in enumerate(given) if k not in form.functions]
    constants = [x for x in pytree.tree_leaves(given[form.lifted]) if is_scalar(x)]
    leaves = pytree.tree_leaves(operands)
    if sum(type(x) is FakeTensor for x in leaves) + len(constants) < len(leaves):
        raise GraphBreak(f"{name} of operands that are no tensors")
    with no_torch_function(), m.world.mode:
        inner = form.given(given)
    bodies = {k: run_body(m, name, given[k], inner, {}, None) for k in form.functions}
    outside = {id(x): x for body in bodies.values() for x in body.outside}
    # as cond, too, has its operands in a graph; numbers are in those of the functions
    inner = tuple(x for x in pytree.tree_leaves(inner) if type(x) is FakeTensor)
    lifted = pytree.tree_leaves(given[form.lifted])
    given[form.lifted] = tuple(x for x in lifted if type(x) is FakeTensor)
    for body in bodies.values():
        _check(name, body, (*inner, *outside.values()))
    first, last = bodies[min(bodies)], bodies[max(bodies)]
    if name == "cond" and (first.spec, _laid_out(first)) != (last.spec, _laid_out(last)):
        raise GraphBreak(
            f"the functions of cond give {_laid_out(first)} and {_laid_out(last)}",
            "both must give results of the same structure, sizes, strides and dtypes",
        )
    if name == "while_loop":
        _check_turns(name, given[2], (), last)
        with no_torch_function():
            if first.results[0].meta["example_value"].dtype is not torch.bool:
                raise GraphBreak("what decides on another turn of while_loop is no bool")
    elif name in ("scan", "map_impl"):
        carried, rows = (given[1], given[2]) if name == "scan" else ((), given[1])
        _check_turns(name, carried, rows, last)
    for k, body in bodies.items():
        given[k] = _aligned(body, len(inner), list(outside.values()), is_bare=k in form.bare)
        given[k].meta[BODY] = body.calls
        given[k].meta["name"] = form.functions[k]
    given[form.lifted] = (*given[form.lifted], *outside.values())
    operands = tensors_in([x for k, x in enumerate(given) if k not in form.functions])
    results = _results(m, last, operands, *form.stacked(given))
    m.recorder.write(operator, "", tuple(given), {}, results)
    return pytree.tree_unflatten(results, last.spec)


def _check(name: str, body: FunctionBody, operands: Args) -> None:
    """raises GraphBreak for a function that does more than compute new tensors."""
    with no_torch_function():
        shared = {x.untyped_storage()._cdata for x in tensors_in(operands)}
        shared |= storages(n for n in body.module.graph.nodes if n.op == "placeholder")
        results = storages(body.results)
        if any(shared & storages(written_by(n)) for n in body.calls):
            raise GraphBreak(
                f"the function {body.name} under {name} writes to a tensor it is given"
            )
        if shared & results or len(results) < len(body.results):
            raise GraphBreak(
                f"the function {body.name} under {name} gives a tensor that it gets, or one twice",
                "return x.clone()",
            )
    if any("draws" in effects(n) for n in body.calls):
        raise GraphBreak(f"the function {body.name} under {name} draws random numbers")
    if not all(leaf is None for leaf in body.leaves):
        raise GraphBreak(f"the function {body.name} under {name} gives more than tensors")


def _check_turns(name: str, carried: Args, rows: Args, body: FunctionBody) -> None:
    """raises GraphBreak where a turn gives the next other tensors than it got, or has no row."""
    found = [node.meta["example_value"] for node in body.results]
    with no_torch_function():
        before, after = ([(x.dtype, x.shape, x.device) for x in some] for some in (carried, found))
        if before != after[: len(before)] or (not rows and len(after) > len(before)):
            raise GraphBreak(
                f"the function {body.name} under {name} gives other tensors than it is given",
                "give the next turn the same sizes and dtypes",
            )
        if any(x.shape[0] != rows[0].shape[0] for x in rows[1:]):
            raise GraphBreak(f"{name} of different numbers of rows")


def _laid_out(body: FunctionBody) -> list[tuple[Any, ...]]:
    """The dtypes, sizes and strides of results."""
    found = [n.meta["example_value"] for n in body.results]
    with no_torch_function():
        return [(x.dtype, tuple(x.shape), x.stride()) for x in found]


def _aligned(
    body: FunctionBody, count: int, outside: list[Tensor], *, is_bare: bool
) -> fx.GraphModule:
    """The graph of a function that takes all tensors from outside, in one order for all."""
    old, made, env = body.module.graph, fx.Graph(), dict[fx.Node, fx.Node]()
    places = old.find_nodes(op="placeholder")
    own = {id(x): node for x, node in zip(body.outside, places[count:], strict=True)}
    for k, x in enumerate([*places[:count], *outside]):
        node = x if isinstance(x, fx.Node) else own.get(id(x))
        placeholder = made.placeholder(f"arg{k}")
        placeholder.meta["example_value"] = x if node is None else node.meta["example_value"]
        if node is not None:
            env[node] = placeholder
    results: Any = made.graph_copy(old, env)
    made.output(results[0] if is_bare else results)
    return graph_module(made, body.module)


def _results(
    m: Capturing, body: FunctionBody, operands: list[Tensor], plain: int | None, rows: int
) -> tuple[Tensor, ...]:
    """Stand-ins of what the call gives."""
    found = []
    with no_torch_function(), m.world.mode:
        wants = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
        for k, node in enumerate(body.results):
            x = node.meta["example_value"].detach()
            if plain is not None and k >= plain:
                x = x.new_empty((rows, *x.shape))
            else:
                x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            is_float = x.is_floating_point() or x.is_complex()
            found.append(x.requires_grad_().clone() if wants and is_float else x)
    return tuple(found)


# ---------------------------------------------------------------------------- flex attention
# flex_attention: the functions that change scores and mask them are graphs, in one node.
# The node calls what eager runs: all scores at once, the functions mapped over batch, head, query
# and key by vmap, softmax, and the sum of values. A backend that traces it sees these calls, and
# autograd differentiates them; where blocks are masked as a whole, they are computed and masked.

T = Tensor


@stands_for(*_known(["flex_attention"]))
def _flex_attention(m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    query, key, value, score_mod, block_mask, scale, *_ = (*args, *kwargs.values())
    if type(scale) is Number:
        scale.need()
    working = torch.float64 if query.dtype == torch.float64 else torch.float32
    with no_torch_function(), m.world.mode:
        score = torch.empty((), dtype=working, device=query.device)
        places = tuple(torch.empty((), dtype=torch.int64, device=query.device) for _ in range(4))
    scoring = _body(m, score_mod, (score, *places))
    masking = _body(m, block_mask[-1], places)
    count = len(scoring.outside)

    def flex_attention(query: T, key: T, value: T, *outside: T) -> tuple[T, T, T]:
        """What eager gives: the result; log2 of the sums of exponentials; the largest scores,
        likewise.

        source   torch/_higher_order_ops/flex_attention.py, math_attention, whose formula it is
        """
        groups = query.size(1) // key.size(1)
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        key, value = (x.expand(query.size(0), *x.shape[1:]) for x in (key, value))
        scores = query.to(working) @ key.to(working).transpose(-2, -1)
        places = [torch.arange(n, device=scores.device) for n in scores.shape]
        scores = (scores * scale).to(working)
        hidden = _mapped(masking, (), outside[count:])(*places).logical_not()
        scored = _mapped(scoring, (0,), outside[:count])(scores, *places)
        scores = scored.to(working).masked_fill(hidden, -math.inf)
        empty = (scores == -math.inf).all(-1)
        sums = scores.logsumexp(-1).masked_fill(empty, -math.inf)
        weights = scores.softmax(-1).masked_fill(empty.unsqueeze(-1), 0.0)
        out = weights.to(query.dtype) @ value.to(query.dtype)
        order = sorted(range(4), key=query.stride().__getitem__, reverse=True)
        out = out.permute(order).contiguous().permute([order.index(k) for k in range(4)])
        return out, sums / math.log(2), scores.amax(-1) / math.log(2)

    setattr(flex_attention, BODY, [*scoring.calls, *masking.calls])
    given = (query, key, value, *scoring.outside, *masking.outside)
    return m.recorder.call_whole(flex_attention, *given)


def _body(m: Capturing, function: Any, given: Args) -> FunctionBody:
    with having(m.recorder, by_index=True):
        body = run_body(m, "flex_attention", function, given, {}, None)
    if len(body.results) != 1 or any(effects(n) & {"writes", "draws"} for n in body.calls):
        raise GraphBreak(
            f"the function {body.name} under flex_attention does more than compute a number"
        )
    return body


def _mapped(
    body: FunctionBody, before: tuple[int, ...], outside: tuple[T, ...]
) -> Callable[..., T]:
    """The function for all scores at once."""

    def function(*given: T) -> T:
        found: T = body.module.forward(*given, *outside)[0]
        return found

    for k in reversed(range(4)):
        axes = tuple(0 if j == k else None for j in range(4))
        function = torch.vmap(function, in_dims=(*before, *axes))
    return function


# it names nodes for tracers of torch's
SPECIAL[traceback.annotate] = lambda m, annotation_dict: contextlib.nullcontext()
