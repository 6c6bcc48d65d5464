"""Compares trace + interpret with eager: all that a caller can see of a call.

same(fn, x, y)      fn is one node of the traced graph: no capture, so samples cost milliseconds
captured(fn, x)     the graphs and example inputs that stock torch.compile hands to a backend
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fusee.aten import AtenGraph, executable
from fusee.aten.canonicalize import keep_core
from fusee.aten.trace import trace

Fn = Callable[..., Any]


def one_node(fn: Fn, inputs: list[Any]) -> fx.GraphModule:
    """A graph that calls `fn` on all its inputs."""
    graph = fx.Graph()
    graph.output(
        graph.call_function(fn, tuple(graph.placeholder(f"x{i}") for i in range(len(inputs))))
    )
    return fx.GraphModule({}, graph)


def traced(fn: Fn, *inputs: Any, keep: Any = keep_core) -> AtenGraph:
    return trace(one_node(fn, list(inputs)), inputs, keep=keep)


def run(graph: AtenGraph, inputs: Sequence[Any]) -> Any:
    """What the traced program returns for these inputs, which it may write to."""
    return executable(graph)(*inputs)


def same(fn: Fn, *inputs: Any) -> AtenGraph:
    """Trace `fn`, run the graph twice with fresh copies of the inputs, compare with eager."""
    graph = traced(fn, *inputs)
    assert_functional(graph)
    assert_vals(graph, inputs)
    for seed in (0, 1):
        assert_same_call(lambda *args: run(graph, args), fn, inputs, seed)
    return graph


def assert_vals(graph: AtenGraph, inputs: Any) -> None:
    """Run with eager ATen, every node gives what its val says: shape, strides, dtype, device."""
    env: dict[fx.Node, Any] = {}
    given = iter(copies(inputs))
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            env[node] = graph.constants[node.target]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
        if node.op == "output" or not isinstance(env[node], torch.Tensor):
            continue
        got, val = env[node], node.meta["val"]
        assert (got.shape, got.dtype) == (val.shape, val.dtype), (node.format_node(), got.shape)
        assert _strides(got) == _strides(val), (node.format_node(), got.stride(), val.stride())
        assert got.device == node.meta["device"]


def assert_same_call(got: Fn, want: Fn, inputs: Any, seed: int = 0) -> None:
    """Both calls, on copies of the inputs: results, memory shared, inputs, random stream after."""
    ours, theirs = copies(inputs), copies(inputs)
    with torch.no_grad():
        torch.manual_seed(seed)
        expected = want(*theirs)
        after = torch.rand(3)
        torch.manual_seed(seed)
        found = got(*ours)
        assert torch.equal(torch.rand(3), after), "the random stream differs"
    assert_same_tensors([found, ours], [expected, theirs])


def assert_same_tensors(found: Any, expected: Any) -> None:
    left, right = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(left) == len(right)
    for a, b in zip(left, right):
        assert type(a) is type(b), (a, b)
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, a.shape, b.dtype, b.shape)
        assert _strides(a) == _strides(b), (tuple(a.shape), a.stride(), b.stride())
        torch.testing.assert_close(a, b, equal_nan=True)
    assert _sharing(left) == _sharing(right)


def _strides(x: torch.Tensor) -> list[int]:
    return [s for s, n in zip(x.stride(), x.shape) if n > 1] if x.numel() else []


def _sharing(leaves: list[Any]) -> list[Any]:
    """For each pair of tensors: identical, in one storage and how far apart, or apart."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    found: list[Any] = []
    for i, a in enumerate(tensors):
        for b in tensors[:i]:
            if a is b:
                found.append("same")
            elif a.numel() and a.untyped_storage()._cdata == b.untyped_storage()._cdata:
                found.append(a.data_ptr() - b.data_ptr())
            else:
                found.append(None)
    return found


def copies(inputs: Any) -> list[Any]:
    """Copies with the same strides and offsets; inputs that share memory still do."""
    storages: dict[int, torch.Tensor] = {}
    found = []
    for x in inputs:
        if not isinstance(x, torch.Tensor):
            found.append(x)
            continue
        key = x.untyped_storage()._cdata
        if key not in storages:
            whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
            storages[key] = whole.clone()
        base = storages[key].view(-1)
        found.append(base.as_strided(x.shape, x.stride(), x.storage_offset()))
    return found


def assert_functional(graph: AtenGraph) -> None:
    """No operator of the graph writes; every tensor's val and device are there."""
    for node in graph.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta and "device" in node.meta, node.format_node()
            if isinstance(node.target, torch._ops.OpOverload):
                assert not node.target._schema.is_mutable, node.format_node()
    graph.graph.lint()


def operators(graph: AtenGraph) -> list[str]:
    """Names of the operators called, in order: aten.add.Tensor, ..."""
    return [str(n.target) for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def captured(
    fn: Fn, *args: Any, dynamic: bool | None = None
) -> list[tuple[fx.GraphModule, list[Any]]]:
    """What stock torch.compile gives a backend for this call."""
    graphs = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Fn:
        graphs.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    return graphs


def compiled(fn: Fn, dynamic: bool | None = None, graphs: list[AtenGraph] | None = None) -> Fn:
    """`fn` under stock torch.compile with trace + interpret as the backend."""

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Fn:
        graph = trace(gm, inputs)
        assert_functional(graph)
        if graphs is not None:
            graphs.append(graph)
        call = executable(graph)
        return lambda *args: call(*args, *graph.attributes(gm))

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, dynamic=dynamic)
