"""A program as one graph, or the error that says where it cannot be one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fusee import torch_functions as _torch_functions  # noqa: F401  # its stand-ins
from fusee.aten.subgraph import Copier
from fusee.capture.bytecode import first_line
from fusee.capture.captured import Captured, Place
from fusee.capture.policy import POLICY, is_suspending, target_of
from fusee.capture.trace import capture
from fusee.errors import GraphBreakError, source_line


class _Output:
    """Stands for an output of the graph."""

    def __init__(self, number: int) -> None:
        self.number = number


def export(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> fx.GraphModule:
    """All of `fn(*args, **kwargs)` as one graph of torch calls. Nothing is run.

    The module takes the tensors among the arguments, in the order in which pytree lists them, and
    holds all other tensors as parameters and buffers. It returns what `fn` does if that is made of
    tuples, lists and dicts, else the leaves as a tuple.

    raises   GraphBreakError where the graph would end; whatever `fn` raises
    source   torch.export.export, torch._dynamo.export
    """
    function, before = target_of(fn)
    if is_suspending(function):
        raise _refused("it is asynchronous or a generator", first_line(function))
    named = dict(kwargs or {})
    bound = inspect.signature(function).bind(*before, *args, **named)
    bound.apply_defaults()
    captured = capture(Place(function), bound.arguments, POLICY.for_export())
    if captured.raises:
        fn(*args, **named)
    if captured.eager:
        raise _refused(captured.eager, first_line(function))
    if captured.stop is not None:
        raise _refused(captured.stop.reason, captured.stop.where, captured.stop.remedy)
    mode = [] if captured.inference is None else [f"inference_mode({captured.inference})"]
    for effect in (*captured.effects, *mode):
        raise _refused(
            f"it changes objects besides tensors, which no graph does: {effect}",
            first_line(function),
            "return what changes instead",
        )
    return _module(captured, bound.arguments, [*args, *named.values()])


def _refused(reason: str, where: str, remedy: str = "") -> GraphBreakError:
    return GraphBreakError(
        f"the program is not one graph: {reason}",
        where=source_line(where),
        did="exported nothing",
        remedy=remedy or "move it out of the exported function",
    )


def _module(captured: Captured, values: Mapping[str, Any], arguments: list[Any]) -> fx.GraphModule:
    """The captured graph with the caller's tensors as its inputs and all others as attributes."""
    old = captured.graph.graph if captured.graph is not None else fx.Graph()
    root, copier = nn.Module(), Copier()
    graph, copied = copier.graph, copier.made
    nodes: dict[int, fx.Node] = {}  # by id of the real tensor
    for k, x in enumerate(pytree.tree_leaves(arguments)):
        if isinstance(x, Tensor) and id(x) not in nodes:
            nodes[id(x)] = graph.placeholder(f"input_{k}")
    outputs: tuple[Any, ...] = ()
    examples = iter(captured.examples)
    for node in old.nodes:
        if node.op == "placeholder":
            copied[node] = _node_of(next(examples), node.name, nodes, root, graph)
        elif node.op == "output":
            outputs = node.args[0]
        else:
            copier.copy(node)
    result = captured.run(lambda *inputs: [_Output(k) for k in range(len(outputs))])(
        *(values[name] for name in captured.place.parameters)
    )
    leaves, spec = pytree.tree_flatten(result)

    def shown(leaf: Any) -> Any:
        if isinstance(leaf, _Output):
            return copied[outputs[leaf.number]]
        return _node_of(leaf, "kept", nodes, root, graph) if isinstance(leaf, Tensor) else leaf

    made = [shown(leaf) for leaf in leaves]
    graph.output(pytree.tree_unflatten(made, spec) if _is_plain(result) else tuple(made))
    return fx.GraphModule(root, graph, "Exported")


def _node_of(
    x: Tensor, name: str, nodes: dict[int, fx.Node], root: nn.Module, graph: fx.Graph
) -> fx.Node:
    """The node of a real tensor; one that no argument holds becomes an attribute."""
    if id(x) not in nodes:
        while hasattr(root, name):
            name += "_"
        if isinstance(x, nn.Parameter):
            root.register_parameter(name, x)
        else:
            root.register_buffer(name, x)
        nodes[id(x)] = graph.get_attr(name)
    return nodes[id(x)]


def _is_plain(x: Any) -> bool:
    """Whether fx can write down a container."""
    if type(x) in (tuple, list):
        return all(map(_is_plain, x))
    if type(x) is dict:
        return all(map(_is_plain, x.values()))
    return isinstance(x, (Tensor, _Output, int, float, bool, str, type(None)))
