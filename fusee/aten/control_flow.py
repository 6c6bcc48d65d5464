"""cond, while_loop, map and scan: how often their functions run is known only when the graph runs.

Such a call is one operator of its own in the functional graph, `fusee::cond_3` say: it takes the
call's tensors and runs the functions' graphs, compiled when they first run. Its derivative is
another one, which runs them again under autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fusee.aten.torch_api import active, below_autograd, laid_out, library, with_autograd
from fusee.aten.tracer import Tracer
from fusee.source import Rules

NAMES = {"cond", "while_loop", "map_impl", "scan"}

# What compiles the graph of a function, `(graph, example inputs) -> callable`: the backend's, which
# lies above; graphs run by torch where there is none.
COMPILERS: list[Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]] = []

_numbers = itertools.count()


class _Function:
    """The graph of a function, compiled once for each kind of operands."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *given: Tensor) -> Any:
        if (given and given[0].is_meta) or not COMPILERS:
            return self.graph.forward(*given)
        kinds = [(x.dtype, x.shape, x.stride(), x.requires_grad) for x in given]
        key = *kinds, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if key not in self.compiled:
            self.compiled[key] = COMPILERS[-1](self.graph, list(given))
        return self.compiled[key](*given)


_RUNS: Rules[str, Callable[..., Any]] = Rules()


@_RUNS.rule("cond")
def _cond(functions: Sequence[_Function], pred: Any, operands: Any) -> Any:
    return functions[0 if pred else 1](*operands)


@_RUNS.rule("while_loop")
def _while_loop(functions: Sequence[_Function], carried: Any, more: Any) -> Any:
    test, body = functions
    while test(*carried, *more)[0]:
        carried = body(*carried, *more)
    return carried


@_RUNS.rule("map_impl")
def _map(functions: Sequence[_Function], xs: Any, more: Any) -> Any:
    (body,) = functions
    rows = [body(*row, *more) for row in zip(*(x.unbind() for x in xs))]
    return [torch.stack(column) for column in zip(*rows)]


@_RUNS.rule("scan")
def _scan(functions: Sequence[_Function], carried: Any, xs: Any, more: Any) -> Any:
    (body,), rows, count = functions, [], len(carried)
    for row in zip(*(x.unbind() for x in xs)):
        found = body(*carried, *row, *more)
        carried = found[:count]
        rows.append(found[count:])
    return [*carried, *(torch.stack(column) for column in zip(*rows))]


def _shaped(name: str, functions: Sequence[_Function], *operands: Any) -> list[Tensor]:
    """On tensors without data: what a call gives."""
    body = functions[-1]
    if name == "cond":
        return list(body(*operands[1]))
    if name == "while_loop":
        return list(body(*operands[0], *operands[1]))
    carried, xs, more = operands if name == "scan" else ((), *operands)
    found = body(*carried, *(x[0] for x in xs), *more)
    count = len(carried)
    return [*found[:count], *(x.new_empty((len(xs[0]), *x.shape)) for x in found[count:])]


def called(t: Tracer, op: Any, args: Any, kwargs: Any, attribute: Any) -> Any:
    """The rule of these operators: a call of one of our own."""
    if t.b.to_size is not None:
        raise t.b.unsupported(f"{op.name()} with sizes that are not known")
    functions = [_Function(x) for x in args if isinstance(x, fx.GraphModule)]
    tensors, spec = pytree.tree_flatten([x for x in args if not isinstance(x, fx.GraphModule)])
    made = _operator(op.name(), functions, spec)
    with active(t):
        return tuple(made(tensors))


def _operator(name: str, functions: list[_Function], spec: Any) -> Any:
    own = f"{name}_{next(_numbers)}"
    library.define(f"{own}(Tensor[] given) -> Tensor[]")
    library.define(f"{own}_backward(Tensor[] given, Tensor[] grads) -> Tensor[]")
    forward: Any = getattr(torch.ops.fusee, own).default
    backward: Any = getattr(torch.ops.fusee, f"{own}_backward").default

    told: list[Tensor] = []

    def shaped(given: list[Tensor]) -> list[Tensor]:
        found = _shaped(name, functions, *pytree.tree_unflatten(given, spec))
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in found
        ]

    def computed(given: list[Tensor]) -> list[Tensor]:
        return list(_RUNS[name](functions, *pytree.tree_unflatten(given, spec)))

    def run(given: list[Tensor]) -> list[Tensor]:
        if not told:  # sizes are those of the graph, always
            told.extend(shaped([x.to("meta") for x in given]))
        pairs = zip(computed(given), told, strict=True)
        taken = {x.untyped_storage()._cdata for x in given}
        return [_fresh(x, like, taken) for x, like in pairs]

    def gradients(given: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(_is_float(x)) for x in given]
        with with_autograd():
            found = [x for x in computed(leaves) if _is_float(x)]
        pairs = [(x, grad) for x, grad in zip(found, grads, strict=True) if x.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        sources, outer = [x for x, _ in pairs], [grad for _, grad in pairs]
        with with_autograd():
            results = torch.autograd.grad(sources, wanted, outer, materialize_grads=True)
        return [torch.empty_like(x).copy_(g) for x, g in zip(wanted, results)]

    def differentiated(given: list[Tensor]) -> Any:
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            return list(_Differentiated.apply(forward, backward, *given))  # type: ignore[no-untyped-call]
        with below_autograd():
            return forward(given)

    library.impl(own, run, "CompositeExplicitAutograd")
    library.impl(own, shaped, "Meta")
    library.impl(own, differentiated, "Autograd")
    library.impl(f"{own}_backward", gradients, "CompositeExplicitAutograd")
    library.impl(
        f"{own}_backward",
        lambda given, grads: [torch.empty_like(x) for x in given if _is_float(x)],
        "Meta",
    )
    return forward


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *given: Tensor) -> Any:
        ctx.backward, ctx.takes = backward, [_is_float(x) for x in given]
        ctx.save_for_backward(*given)
        with below_autograd():
            found = tuple(forward(list(given)))
        ctx.mark_non_differentiable(*(x for x in found if not _is_float(x)))
        ctx.gives = [_is_float(x) for x in found]
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kept = [grad for grad, is_float in zip(grads, ctx.gives) if is_float]
        with below_autograd():
            found = iter(ctx.backward(list(ctx.saved_tensors), kept))
        return None, None, *(next(found) if is_float else None for is_float in ctx.takes)


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _fresh(x: Tensor, like: Tensor, taken: set[int]) -> Tensor:
    """A result in memory of its own, with the strides that were told of it."""
    if x.stride() == like.stride() and x.untyped_storage()._cdata not in taken:
        return x
    return laid_out(x, like.stride())
