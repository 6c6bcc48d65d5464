"""Lower a function's ATen graph, interpret the loops, and compare with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fusee.aten import must_run
from fusee.aten.torch_api import TorchSymbols
from fusee.loops import Buffer, Extern, LoopGraph
from fusee.loops.lower import GraphLowering
from fusee.sym import Symbol
from fusee.targets.cpu import CPU
from tests.compare import assert_as_near, measured
from tests.loops.interpret import interpret


def layouts(args: Sequence[Tensor]) -> list[Buffer]:
    return [
        Buffer(f"x{k}", t.dtype, tuple(t.shape), tuple(t.stride()), "input")
        for k, t in enumerate(args)
    ]


aten = torch.ops.aten


def _turned(x: Tensor, a: int = 0, b: int = -1) -> Tensor:
    axes = [*range(x.dim())]
    if axes:
        axes[a], axes[b] = axes[b], axes[a]
    return x.permute(axes)


def _squeezed(x: Tensor, axis: int | None = None) -> Tensor:
    axes = range(x.dim()) if axis is None else [axis % x.dim()] * bool(x.dim())
    return x.squeeze(tuple(k for k in axes if x.shape[k] == 1))


# Operators of eager's, by the one spelling that tracing records (fusee/aten/canonicalize.py).
_CANONICAL: dict[Any, Callable[..., Tensor]] = {
    aten.t.default: _turned,
    aten.transpose.int: _turned,
    aten.squeeze.default: _squeezed,
    aten.squeeze.dim: _squeezed,
    aten._unsafe_view.default: Tensor.view,
    **dict.fromkeys((aten.alias.default, aten.detach.default), lambda x: x.view(x.shape)),
    aten.scalar_tensor.default: lambda value, **options: torch.full((), value, **options),
}


def aten_graph(
    fn: Callable[..., Any],
    args: Sequence[Tensor],
    tracing_mode: Literal["fake", "symbolic"] = "fake",
) -> fx.GraphModule:
    """The functional ATen ops that eager runs, with what they return."""
    functional = torch.func.functionalize(lambda *a: tuple(tree_leaves(fn(*a))))
    module = make_fx(functional, _CANONICAL, tracing_mode=tracing_mode)(*args)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = getattr(module, str(node.target))
    return module


def lower_module(
    module: fx.GraphModule, args: Sequence[Tensor], writes: dict[int, int] | None = None
) -> LoopGraph:
    return GraphLowering(
        module.graph,
        layouts(args),
        profile=CPU.profile,
        constants=constants_of(module),
        size_of=int,
        extern_of=lambda op: None,
        must_run=must_run,
        writes=writes or {},
    ).run()


def lowered(
    fn: Callable[..., Any], *args: Tensor, writes: dict[int, int] | None = None
) -> LoopGraph:
    return lower_module(aten_graph(fn, args), args, writes)


def externs(graph: LoopGraph) -> list[str]:
    names = [step.name for step in graph.steps if isinstance(step, Extern)]
    return [name.removeprefix("aten.").removesuffix(".default") for name in names]


def constants_of(module: fx.GraphModule) -> dict[str, Tensor]:
    found = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return found | dict(module.named_buffers())


def copied(x: Tensor) -> Tensor:
    """A copy with equal strides and offset, overlaps included."""
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())


def compare(
    got: Sequence[Any], wanted: Sequence[Tensor | None], exact: Callable[[], list[Tensor]]
) -> None:
    """Equal dtype, shape and strides; values close, or as near to float64's result as eager's."""
    for position, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        if theirs is None:  # a gradient that nobody wants
            assert mine is None
            continue
        assert mine.dtype is theirs.dtype
        assert mine.shape == theirs.shape
        assert theirs.numel() == 0 or mine.stride() == theirs.stride()
        ours, eagers = mine.double(), theirs.double()
        near = torch.isclose(ours, eagers, 1e-5, 1e-6, equal_nan=True)
        if near.all():
            continue
        assert theirs.is_floating_point(), (mine, theirs)
        found = measured(exact)
        truth = found.tree[position].double()
        ours = torch.where(near, eagers, ours)
        where, info = f"result {position}", torch.finfo(theirs.dtype)
        # where eager itself is not near any number of its dtype, another formula may be
        finite = (eagers - truth).isfinite() & (truth.abs() <= info.max)
        assert_as_near(ours[finite], eagers[finite], truth[finite], info, where, found.longest)


def check(fn: Callable[..., Any], *args: Tensor, allow: Sequence[str] = ()) -> LoopGraph:
    """Assert that the loops compute what eager does, with Externs only from `allow`."""
    module = aten_graph(fn, args)
    constants = constants_of(module)
    graph = GraphLowering(
        module.graph,
        layouts(args),
        profile=CPU.profile,
        constants=constants,
        size_of=int,
        extern_of=lambda op: None,
        must_run=must_run,
    ).run()
    assert set(externs(graph)) <= set(allow), graph.notes
    got = interpret(graph, [copied(x) for x in args], constants_of(module))
    wanted = tree_leaves(fn(*map(copied, args)))

    def exact() -> list[Tensor]:
        return tree_leaves(fn(*(x.double() if x.is_floating_point() else x for x in args)))

    compare(got, wanted, exact)
    return graph


def op_graph(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.GraphModule:
    """A graph of one call, undecomposed. Its tensors are inputs in order of appearance."""
    graph = fx.Graph()
    flat, spec = tree_flatten((list(args), kwargs))
    nodes = []
    for k, x in enumerate(flat):
        if isinstance(x, Tensor):
            nodes.append(graph.placeholder(f"x{k}"))
            nodes[-1].meta["val"] = x
        else:
            nodes.append(x)
    given, named = tree_unflatten(nodes, spec)
    call = graph.call_function(op, tuple(given), named)
    call.meta["val"] = op(*args, **kwargs)
    if isinstance(call.meta["val"], Tensor):
        results = [call]
    else:
        results = [graph.call_function(getitem, (call, k)) for k in range(len(call.meta["val"]))]
        for node, val in zip(results, call.meta["val"], strict=True):
            node.meta["val"] = val
    graph.output(tuple(results))
    return fx.GraphModule({}, graph)


def check_op(op: OpOverload, *args: Any, allow: Sequence[str] = (), **kwargs: Any) -> LoopGraph:
    """Assert that the lowering of this very op computes what eager does."""
    module = op_graph(op, args, kwargs)
    tensors = [x for x in tree_leaves((list(args), kwargs)) if isinstance(x, Tensor)]
    graph = lower_module(module, tensors)
    assert set(externs(graph)) <= set(allow), graph.notes

    def exact() -> list[Tensor]:
        def wide(x: Any) -> Any:
            return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

        wide_args, wide_kwargs = tree_map(wide, (list(args), kwargs))
        return tree_leaves(op(*wide_args, **wide_kwargs))

    compare(interpret(graph, [copied(x) for x in tensors]), tree_leaves(op(*args, **kwargs)), exact)
    return graph


def check_symbolic(
    fn: Callable[..., Any], args: Sequence[Tensor], *others: Sequence[Tensor]
) -> LoopGraph:
    """Lower once with unknown sizes; compare with eager at the sizes of `args` and `others`."""
    module = aten_graph(fn, args, "symbolic")
    sizes = TorchSymbols()
    inputs: list[Buffer] = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, Tensor):
            shape, strides = tuple(map(sizes, value.shape)), tuple(map(sizes, value.stride()))
            inputs.append(Buffer(node.name, value.dtype, shape, strides, "input"))
    graph = GraphLowering(
        module.graph,
        inputs,
        profile=CPU.profile,
        constants=constants_of(module),
        size_of=sizes,
        extern_of=lambda op: None,
        must_run=must_run,
    ).run()
    assert not externs(graph), graph.notes
    for each in (args, *others):
        values: dict[Symbol, int] = {}
        for layout, tensor in zip(inputs, each, strict=True):
            for size, n in zip(layout.shape, tensor.shape, strict=True):
                if not isinstance(size, int):
                    ((mono, _),) = size.terms.items()
                    assert isinstance(mono[0], Symbol)
                    values[mono[0]] = n
        got = interpret(graph, each, {}, values)
        compare(got, tree_leaves(fn(*each)), lambda each=each: tree_leaves(fn(*each)))  # type: ignore[misc]
    return graph
