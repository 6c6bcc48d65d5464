"""torch.vmap and torch.func: a function that is transformed is a graph of its own, in one node.

The function runs on the machine with stand-ins for what the transform gives it: one example in
place of a batch, a plain tensor in place of one that is differentiated. What that records is cut
out of the graph and becomes a module of its own, and the graph calls the transform of this module.
So functorch itself runs, whoever runs the graph: a backend that traces it sees what functorch makes
of the module's calls. It runs on the stand-ins too, for what the results look like, and whatever it
refuses ends the graph.

What a program may learn of a tensor within a transform is what a stand-in surely tells as well, its
shape and dtype for one, not its strides. Anything else ends the graph.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from fusee.capture.attributes import Capturing
from fusee.capture.builtins import BY_CODE, stands_for
from fusee.capture.dynamic import Number
from fusee.capture.effects import BODY, effects
from fusee.capture.frame import is_scalar
from fusee.capture.graph_break import GraphBreak
from fusee.capture.torch_api import (
    FakeTensor,
    State,
    batch_axes,
    graph_module,
    is_pytree_class,
    pytree,
    set_grad_enabled,
)
from fusee.source import Args, Kwargs

# Of torch.func, by the name of what they return: a closure over the function, `func`.
_TRANSFORMS: tuple[Any, ...] = (
    torch.vmap, torch.func.grad, torch.func.grad_and_value, torch.func.jacrev, torch.func.jacfwd,
)  # fmt: skip
_CLOSURES = ("wrapped", "wrapper", "wrapper_fn")

# What is the same for one example of a batch, or a tensor that is differentiated.
_SAME = {
    "shape", "size", "dtype", "device", "ndim", "dim", "ndimension", "numel", "nelement", "__len__",
    "is_floating_point", "is_complex", "element_size", "itemsize", "layout", "is_sparse", "is_cuda",
    "is_quantized", "is_nested", "is_mkldnn", "is_meta", "is_cpu",
}  # fmt: skip


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
    outside: list[torch.Tensor]
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
        if isinstance(x, FakeTensor) and (axes is None or axis is not None):
            shown[k] = _example(m, x, axis)
            picked.append(k)
    before = _effects(m)
    args, kwargs = pytree.tree_unflatten(shown, spec)
    recorder = m.world.recorder
    with recorder.apart(*(shown[k] for k in picked)) as inner:
        try:
            with _Within(name):
                result = m.deep(m.call(func, *args, **kwargs))
        except Exception as error:  # noqa: BLE001  # whatever the program raises
            raise GraphBreak(f"the function under {name} raises {error!r}") from None
        if _effects(m) != before:
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


def _example(m: Capturing, x: torch.Tensor, axis: int | None) -> torch.Tensor:
    """A stand-in for `x`, or for one of a batch along `axis`, in the same memory."""
    with torch._C.DisableTorchFunction(), m.world.mode:
        if axis is None:
            return x.detach()
        if not x.shape[axis]:
            return x.new_empty([n for k, n in enumerate(x.shape) if k != axis])
        return x.select(axis, 0).detach()


def _effects(m: Capturing) -> Any:
    return m.world.changes()[1:], len(m.regions), State.now()


def _apart(x: Any) -> tuple[list[torch.Tensor], list[Any], Any]:
    """The tensors of a pytree; its other leaves, each in a tuple, None for a tensor; its spec."""
    leaves, spec = pytree.tree_flatten(x)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves], spec


def _together(tensors: Iterable[torch.Tensor], leaves: Sequence[Any], spec: Any) -> Any:
    found = iter(tensors)
    return pytree.tree_unflatten([next(found) if x is None else x[0] for x in leaves], spec)


# ------------------------------------------------------------------------------ the call


def _call(
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
        results = m.world.recorder.call_whole(call, *tensors, *body.outside)
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
    elif is_pytree_class(type(x)):
        raise GraphBreak(f"{name} of a {type(x).__qualname__}, which torch alone looks into")
    elif type(x) is Number:
        x.need()


@contextlib.contextmanager
def _with_grad(is_on: bool) -> Iterator[None]:
    """As torch.func has it for the function that it differentiates."""
    before = torch.is_grad_enabled()
    set_grad_enabled(is_on or before)
    try:
        yield
    finally:
        set_grad_enabled(before)


def _closure_of(transform: Any) -> Any:
    """What stands in for the functions that `transform` returns."""
    name = transform.__name__

    def stand(function: types.FunctionType, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
        m.world.know_cells(function)
        names = function.__code__.co_freevars
        cells = dict(zip(names, function.__closure__ or ()))
        values = {key: m.world.cell(cell, key) for key, cell in cells.items()}
        func = values.pop("func")
        values = {key: _arguments(m, name, x) for key, x in values.items()}
        args, kwargs = _arguments(m, name, (args, kwargs))
        axes = None
        if transform is torch.vmap:
            if values["chunk_size"] is not None:
                raise GraphBreak("vmap in chunks calls its function several times")
            try:
                axes = batch_axes(values["in_dims"], args, func)
            except Exception as error:  # noqa: BLE001  # what torch says of wrong arguments
                raise GraphBreak(f"vmap raises {error!r}") from None
        with _with_grad(name in ("grad", "grad_and_value", "jacrev")):
            body = run_body(m, name, func, args, kwargs, axes)

        def transformed(inner: Any, args: Args, kwargs: Kwargs) -> Any:
            closure = tuple(types.CellType({"func": inner, **values}[key]) for key in names)
            made = types.FunctionType(
                function.__code__, function.__globals__, name, function.__defaults__, closure
            )
            return made(*args, **kwargs)

        return _call(m, name, body, transformed, args, kwargs)

    return stand


for _transform in _TRANSFORMS:
    for _code in _transform.__code__.co_consts:
        if isinstance(_code, types.CodeType) and _code.co_name in _CLOSURES:
            assert "func" in _code.co_freevars
            BY_CODE[id(_code)] = _closure_of(_transform)


@stands_for(torch.func.jvp)
def _jvp(m: Capturing, /, func: Any, primals: Any, tangents: Any, **kwargs: Any) -> Any:
    primals, tangents, kwargs = _arguments(m, "jvp", (primals, tangents, kwargs))
    if not isinstance(primals, tuple):
        raise GraphBreak("jvp is called in an unusual way")
    body = run_body(m, "jvp", func, primals, {}, None)

    def both(inner: Any, primals: Any, tangents: Any, kwargs: Kwargs) -> Any:
        return torch.func.jvp(inner, primals, tangents, **kwargs)

    return _call(m, "jvp", body, both, primals, tangents, kwargs)


@stands_for(torch.func.vjp)
def _vjp(m: Capturing, func: Any, /, *primals: Any, **kwargs: Any) -> Any:
    """What the function gives, and another function: the graph runs the first again for that."""
    primals = _arguments(m, "vjp", primals)
    with _with_grad(True):
        body = run_body(m, "vjp", func, primals, {}, None)
    if any(effects(n) & {"writes", "draws"} for n in body.calls):
        raise GraphBreak("the function under vjp has effects, and would have them twice")

    def forward(inner: Any, primals: Args) -> Any:
        first, _, *aux = torch.func.vjp(inner, *primals, **kwargs)
        return first, *aux

    first, *aux = _call(m, "vjp", body, forward, primals)
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

    return _call(m, "pull_back", body, backward, primals, _arguments(m, "vjp", cotangents))
