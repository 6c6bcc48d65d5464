"""A graph of torch calls from one run on real tensors: what Dynamo hands over, without Dynamo.

Quick enough for thousands of samples. Control flow is whatever the run did; sizes are constants.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


def capture(
    fn: Callable[..., Any], inputs: Sequence[Any]
) -> tuple[fx.GraphModule, Callable[[Sequence[Any]], Any]]:
    """The graph of `fn(*inputs)`, and what turns its flat outputs into fn's result.

    Placeholders are the tensors among the leaves of `inputs`, in order. Inputs that fn changes are
    changed: give it copies.
    """
    recorder = _Recorder()
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            recorder.place(leaf)
    with recorder:
        result = fn(*inputs)
    leaves, spec = pytree.tree_flatten(result)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    recorder.graph.output(tuple(recorder.node_of(leaves[i]) for i in positions))

    def rebuild(outputs: Sequence[Any]) -> Any:
        filled = list(leaves)
        for i, value in zip(positions, outputs, strict=True):
            filled[i] = value
        return pytree.tree_unflatten(filled, spec)

    return fx.GraphModule(recorder.root, recorder.graph), rebuild


class _Recorder(TorchFunctionMode):
    """Records each outermost torch call that takes or returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Tensor] = []  # or an id would be used again

    def place(self, tensor: Tensor) -> None:
        """A placeholder for a tensor that comes from outside."""
        node = self.graph.placeholder(f"arg{len(self.alive)}")
        self.nodes.setdefault(id(tensor), node)
        self.alive.append(tensor)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that made a tensor; a tensor from nowhere is a constant of the graph."""
        if id(tensor) not in self.nodes:
            name = f"constant{len(self.alive)}"
            self.root.register_buffer(name, tensor)
            self._made(tensor, self.graph.get_attr(name))
        return self.nodes[id(tensor)]

    def _made(self, value: Any, node: fx.Node) -> None:
        if isinstance(value, Tensor):
            if id(value) not in self.nodes:
                self.nodes[id(value)] = node
                self.alive.append(value)
        elif isinstance(value, tuple | list):
            for i, part in enumerate(value):
                if isinstance(part, Tensor | tuple | list):
                    self._made(part, self.graph.call_function(operator.getitem, (node, i)))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        place = len(self.graph.nodes)
        inputs = self._arguments((args, kwargs))
        result = func(*args, **kwargs)
        changes = func is Tensor.__setitem__
        if changes or any(isinstance(x, Tensor) for x in pytree.tree_leaves(result)):
            self._made(result, self._call(func, args, *inputs))
        elif given and len(self.graph.nodes) > place:
            self.graph.eliminate_dead_code(lambda node: node.op != "get_attr")
        return result

    def _arguments(self, tree: Any) -> Any:
        def leaf(x: Any) -> Any:
            return self.node_of(x) if isinstance(x, Tensor) else x

        return pytree.tree_map(leaf, _without_slices(tree, self.node_of))

    def _call(self, func: Any, real: tuple[Any, ...], args: Any, kwargs: Any) -> fx.Node:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], _attribute(func, real[0])))
        if name == "__set__":
            raise NotImplementedError("assignment to an attribute of a tensor")
        owner = getattr(func, "__objclass__", None)
        is_method = owner is not None or getattr(Tensor, name, None) is func
        if is_method and hasattr(operator, name):
            return self.graph.call_function(getattr(operator, name), tuple(args), kwargs)
        if is_method:
            return self.graph.call_method(name, tuple(args), kwargs)
        return self.graph.call_function(func, tuple(args), kwargs)


def _attribute(getter: Any, tensor: Tensor) -> str:
    """The name of the property whose `__get__` a function is."""
    return str(getter.__self__.__name__)


def _without_slices(tree: Any, node_of: Callable[[Tensor], fx.Node]) -> Any:
    """Slices hold tensors where pytree does not look."""
    if isinstance(tree, slice):
        parts = (tree.start, tree.stop, tree.step)
        return slice(*(node_of(x) if isinstance(x, Tensor) else x for x in parts))
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(_without_slices(x, node_of) for x in tree)
    if type(tree) is list:
        return [_without_slices(x, node_of) for x in tree]
    return tree
