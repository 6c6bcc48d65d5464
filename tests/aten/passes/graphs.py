"""ATen graphs built by hand, run before and after passes on real tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten import AtenGraph, Fresh, InputSpec, Mutation
from fusee.aten.weights import Derived, run_passes
from fusee.config import Options
from fusee.targets import cpu
from tests.compare import assert_as_near, measured

CPU = torch.device("cpu")


class Build:
    """An AtenGraph in the making. `values` are the real tensors of its placeholders."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.specs: list[InputSpec] = []
        self.values: list[Tensor] = []
        self.constants: dict[str, Tensor] = {}

    def input(self, value: Tensor, is_static: bool = False) -> fx.Node:
        index = len(self.specs)
        name = f"{'w' if is_static else 'x'}{index}"
        calls = [node for node in self.graph.nodes if node.op != "placeholder"]
        # placeholders come first in a graph, whenever they are made
        place = self.graph.inserting_before(calls[0]) if calls else contextlib.nullcontext()
        with place:
            node = self.graph.placeholder(name)
        node.meta = {"val": value.to("meta"), "device": CPU}
        size, stride = tuple(value.shape), value.stride()
        self.specs.append(
            InputSpec(index, node.name, value.dtype, size, stride, 0, CPU, is_static=is_static)
        )
        self.values.append(value)
        return node

    def weight(
        self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
    ) -> fx.Node:
        return self.input((torch.randn(*shape) * scale).to(dtype), is_static=True)

    def constant(self, value: Tensor) -> fx.Node:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        node = self.graph.create_node("get_attr", name)
        node.meta = {"val": value.to("meta"), "device": CPU}
        return node

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        metas = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        found = op(*metas[0], **metas[1])
        # fills are made on the real device
        node.meta = {"val": found.to("meta") if isinstance(found, Tensor) else found, "device": CPU}
        return node

    def done(self, *results: fx.Node, mutations: Sequence[Mutation] = ()) -> AtenGraph:
        self.graph.output(tuple(results))
        outputs = tuple(
            Fresh(i, tuple(n.meta["val"].shape), n.meta["val"].stride())
            for i, n in enumerate(results)
        )
        return AtenGraph(
            self.graph, self.constants, tuple(self.specs), outputs, tuple(mutations), list
        )


def run(aten: AtenGraph, values: Sequence[Tensor]) -> list[Tensor]:
    """The results of the graph for these placeholders."""
    aten.graph.lint()
    module = fx.GraphModule(dict(aten.constants), aten.graph)
    with torch.no_grad():
        return list(module(*values))


def in_layout(aten: AtenGraph) -> AtenGraph:
    """A copy that does as lowering does: nodes with a layout work in it, others see eager's."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(aten.graph, {}))
    contiguous = torch.ops.aten.contiguous.default
    for node in list(graph.nodes):
        if node.meta.get("layout") == "channels_last":
            with graph.inserting_before(node):
                args = [_image(graph, arg) if k < 2 else arg for k, arg in enumerate(node.args)]
            node.args = tuple(args)
            with graph.inserting_after(node):
                plain = graph.call_function(contiguous, (node,))
            plain.meta = {"val": node.meta["val"]}
            node.replace_all_uses_with(plain, lambda user, plain=plain: user is not plain)
    return AtenGraph(graph, aten.constants, aten.inputs, aten.outputs, aten.mutations, list)


def _image(graph: fx.Graph, arg: Any) -> Any:
    if not isinstance(arg, fx.Node) or arg.meta.get("packed") or arg.meta["val"].dim() != 4:
        return arg
    kwargs: dict[str, Any] = {"memory_format": torch.channels_last}
    return graph.call_function(torch.ops.aten.contiguous.default, (arg,), kwargs)


def kept(derived: Sequence[Derived], values: Sequence[Any]) -> list[Tensor]:
    """The derived inputs of a graph, in their order."""
    found: dict[int, Tensor] = {}
    for one in derived:
        found.update(zip(one.targets, one.compute([values[k] for k in one.sources]), strict=True))
    return [found[k] for k in sorted(found)]


class Passed:
    """A graph after the passes, with its results and those it had before."""

    def __init__(self, build: Build, aten: AtenGraph, **options: Any) -> None:
        self.build, self.aten = build, aten
        self.before = run(aten, build.values)
        exact = [v.double() if v.is_floating_point() else v for v in build.values]
        self.exact, self.longest = measured(lambda: run(_as_double(aten), exact))
        chosen = Options(**options)
        self.derived, self.notes = run_passes(aten, chosen, cpu.CPU().passes(chosen))
        self.after = self.run(build.values)

    def run(self, values: Sequence[Tensor]) -> list[Tensor]:
        return run(in_layout(self.aten), [*values, *kept(self.derived, values)])

    @property
    def targets(self) -> list[str]:
        """The operators of the main graph, in order."""
        return [str(n.target) for n in self.aten.graph.nodes if n.op == "call_function"]

    def check(self) -> None:
        """The results are as near to float64 as eager's: tests/compare.py."""
        for before, after, exact in zip(self.before, self.after, self.exact, strict=True):
            assert after.dtype == before.dtype and after.shape == before.shape
            info, widest = torch.finfo(before.dtype), (after.double(), before.double())
            assert_as_near(*widest, exact.double(), info, "result", self.longest)


def _as_double(aten: AtenGraph) -> AtenGraph:
    """The same graph without roundings to smaller types."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(aten.graph, {}))
    for node in graph.nodes:
        if node.kwargs.get("dtype") in (torch.float32, torch.bfloat16, torch.float16):
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
    constants = {
        name: value.double() if value.is_floating_point() else value
        for name, value in aten.constants.items()
    }
    return AtenGraph(graph, constants, aten.inputs, aten.outputs, aten.mutations, list)


def through_passes(build: Build, *results: fx.Node, **options: Any) -> Passed:
    return Passed(build, build.done(*results), **options)
