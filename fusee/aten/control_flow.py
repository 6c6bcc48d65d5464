"""cond, while_loop, map and scan: how often their functions run is known only when the graph runs.

Such a call is one operator of its own in the functional graph, `fusee::cond_3` say: it takes the
call's tensors and runs the functions' graphs, compiled when they first run. Its derivative is
another one, which runs them again under autograd.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fusee.aten.rewriter import copied
from fusee.aten.torch_api import below_autograd, laid_out, library, storage_id, with_autograd
from fusee.aten.tracer import Tracer
from fusee.errors import TraceError
from fusee.fake import Twins, fake_mode, is_symbolic
from fusee.fake.layouts import is_row_major
from fusee.source import Rules

# What compiles the graph of a function, `(graph, example inputs) -> callable`: the backend's, which
# lies above; graphs run by torch where there is none.
COMPILERS: list[Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]] = []

_numbers = itertools.count()


class _Function:
    """The graph of a function, compiled once for each kind of operands."""

    def __init__(self, graph: fx.GraphModule) -> None:
        (output,) = graph.graph.find_nodes(op="output")
        if isinstance(output.args[0], fx.Node):  # of a loop's test, which is in no tuple
            made = fx.Graph()
            made.output((made.graph_copy(graph.graph, {}),))
            graph = fx.GraphModule(graph, made)
        self.graph = graph
        self.compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *given: Any) -> Any:
        if not COMPILERS:
            return self.graph.forward(*given)
        kinds = [
            (x.dtype, x.shape, x.stride(), x.requires_grad) if isinstance(x, Tensor) else x
            for x in given
        ]
        key = *kinds, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if key not in self.compiled:
            is_full = len(self.compiled) == _KINDS  # sizes that vary have one for each
            compiler: Any = COMPILERS[-1]
            self.compiled[key] = (
                self.graph.forward if is_full else compiler(_fixed(self.graph), [*given])
            )
        return self.compiled[key](*given)


def _fixed(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph for operands of known sizes, whatever was open when it was captured."""
    made = copied(gm, _fixed)
    for node in made.graph.nodes:
        node.meta.pop("example_value", None)
    return made


_KINDS = 64
_ROWS = torch.contiguous_format


def as_tensor(x: Any) -> Tensor:
    """An integer as an operator takes it that takes tensors."""
    if isinstance(x, Tensor):
        return x
    if not isinstance(x, (int, torch.SymInt)):
        raise TraceError(f"a higher-order operator is given a {type(x).__name__}")
    return torch.scalar_tensor(x, dtype=torch.int64)  # type: ignore[arg-type]


RUNS: Rules[str, Callable[..., Any]] = Rules()


@RUNS.rule("cond")
def _cond(functions: Sequence[_Function], pred: Any, operands: Any) -> Any:
    return functions[0 if pred else 1](*operands)


@RUNS.rule("while_loop")
def _while_loop(functions: Sequence[_Function], carried: Any, more: Any) -> Any:
    test, body = functions
    while test(*carried, *more)[0]:
        carried = body(*carried, *more)
    return carried


@RUNS.rule("map_impl")
def _map(functions: Sequence[_Function], xs: Any, more: Any) -> Any:
    (body,) = functions
    rows = [body(*row, *more) for row in zip(*(x.unbind() for x in xs))]
    return [torch.stack(column) for column in zip(*rows)]


@RUNS.rule("scan")
def _scan(functions: Sequence[_Function], carried: Any, xs: Any, more: Any) -> Any:
    (body,), rows, count = functions, [], len(carried)
    for row in zip(*(x.unbind() for x in xs)):
        found = body(*carried, *row, *more)
        carried = found[:count]
        rows.append(found[count:])
    return [*carried, *(torch.stack(column) for column in zip(*rows))]


def _shaped(name: str, shapes: Callable[..., list[Tensor]], *operands: Any) -> list[Tensor]:
    """What a call gives for fakes, as tensors without data."""
    if name == "cond":
        return shapes(*operands[1])
    if name == "while_loop":
        return shapes(*operands[0], *operands[1])
    carried, xs, more = operands if name == "scan" else ((), *operands)
    with xs[0].fake_mode:
        rows = [x[0] for x in xs]
    found, count = shapes(*carried, *rows, *more), len(carried)
    return [*found[:count], *(x.new_empty((xs[0].shape[0], *x.shape)) for x in found[count:])]


def operator(t: Tracer, op: Any, args: Any, shapes: Callable[..., list[Tensor]]) -> Any:
    """The operator that a call of a higher-order operator is, and what it takes.

    shapes   from a graph and its operands, which are fakes: what it gives, as tensors without data
    """
    name = op.name()
    functions = [_Function(x) for x in args if isinstance(x, fx.GraphModule)]
    operands, spec = pytree.tree_flatten([x for x in args if not isinstance(x, fx.GraphModule)])
    own = f"{name}_{next(_numbers)}"
    reverse = f"{own}_backward"
    library.define(f"{own}(Tensor[] given) -> Tensor[]")
    library.define(f"{reverse}(Tensor[] given, Tensor[] grads) -> Tensor[]")
    forward: Any = getattr(torch.ops.fusee, own).default
    backward: Any = getattr(torch.ops.fusee, reverse).default

    is_open = is_symbolic(operands)
    twins = t.b.twins if is_open else Twins(fake_mode())
    fakes = [
        twins.empty(x.shape, x.stride(), x.dtype, t.device) if isinstance(x, Tensor) else x
        for x in operands
    ]
    of_last = functools.partial(shapes, functions[-1].graph)
    # sizes are those of the graph, always
    told = _shaped(name, of_last, *pytree.tree_unflatten(fakes, spec))
    if is_open and not all(map(is_row_major, told)):
        raise t.b.unsupported(f"{name} with sizes that are not known, and results in another order")
    numbers = [not isinstance(x, Tensor) for x in operands]
    orders = [None if is_open else x.stride() for x in told]

    def shaped(given: list[Tensor]) -> list[Tensor]:
        return [Twins().empty(x.shape, x.stride(), x.dtype, t.device) for x in told]

    def computed(given: list[Tensor]) -> list[Tensor]:
        values = [int(x) if is_number else x for x, is_number in zip(given, numbers)]
        return list(RUNS[name](functions, *pytree.tree_unflatten(values, spec)))

    def run(given: list[Tensor]) -> list[Tensor]:
        taken, found = {*map(storage_id, given)}, list[Tensor]()
        for x, order in zip(computed(given), orders, strict=True):
            if storage_id(x) in taken or not (
                x.is_contiguous() if order is None else x.stride() == order
            ):  # in memory of its own, with the strides that were told of it, or those of rows
                x = x.clone(memory_format=_ROWS) if order is None else laid_out(x, order)
            found.append(x)
        return found

    def differentiated(given: list[Tensor]) -> Any:
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            return list(_Differentiated.apply(forward, backward, *given))  # type: ignore[no-untyped-call]
        with below_autograd():
            return forward(given)

    library.impl(own, run, "CompositeExplicitAutograd")
    library.impl(own, shaped, "Meta")
    library.impl(own, differentiated, "Autograd")
    library.impl(reverse, functools.partial(_gradients, computed), "CompositeExplicitAutograd")
    library.impl(reverse, lambda x, _: [*map(torch.empty_like, filter(is_inexact, x))], "Meta")
    return forward, operands


def _gradients(
    computed: Callable[[list[Tensor]], list[Tensor]], given: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    """Those of operands that are floats: the call is run again."""
    leaves = [x.detach().requires_grad_(is_inexact(x)) for x in given]
    with with_autograd():
        found = [x for x in computed(leaves) if is_inexact(x)]
    pairs = [(x, grad) for x, grad in zip(found, grads, strict=True) if x.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    sources, outer = [x for x, _ in pairs], [grad for _, grad in pairs]
    with with_autograd():
        results = torch.autograd.grad(sources, wanted, outer, materialize_grads=True)
    return [torch.empty_like(x).copy_(g) for x, g in zip(wanted, results)]


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *given: Tensor) -> Any:
        ctx.backward, ctx.takes = backward, [is_inexact(x) for x in given]
        ctx.save_for_backward(*given)
        with below_autograd():
            found = tuple(forward(list(given)))
        ctx.mark_non_differentiable(*(x for x in found if not is_inexact(x)))
        ctx.gives = [is_inexact(x) for x in found]
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kept = [grad for grad, is_inexact in zip(grads, ctx.gives) if is_inexact]
        with below_autograd():
            found = iter(ctx.backward(list(ctx.saved_tensors), kept))
        return None, None, *(next(found) if is_inexact else None for is_inexact in ctx.takes)


def is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
