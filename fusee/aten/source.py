"""A functional graph as Python source: for people under the user's lines, and to be run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import fx

from fusee.errors import user_line

__all__ = ["constant_source", "function_source", "python_source"]

_SHOWN_ELEMENTS = 64  # of a constant; longer ones are left out of the text


class Source(Protocol):
    """What source is written from: the part of AtenGraph that this module knows."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]

    @property
    def symbols(self) -> Mapping[str, Any]: ...


def python_source(graph: Source) -> str:
    """The graph as a module that runs with torch alone: `graph(*inputs)` returns the results."""
    rows = ["import torch", ""]
    rows += [f"{name} = {constant_source(x)}" for name, x in graph.constants.items()]
    return "\n".join([*rows, "", function_source(graph, for_people=True)])


def function_source(graph: Source, for_people: bool = False) -> str:
    """The function `graph` alone; constants are globals. It drops tensors after their last use."""
    write = _Writer()
    nodes = list(graph.graph.nodes)
    names = [node.name for node in nodes if node.op == "placeholder"]
    rows = [f"def graph({', '.join(names)}):"]
    for name, source in graph.symbols.items():
        suffix = "" if source.axis is None else f".size({source.axis})"
        rows.append(f"    {name} = {names[source.index]}{suffix}")
    last = {} if for_people else _last_uses(nodes)
    line = None
    for node in nodes:
        if for_people and node.op == "call_function":
            now = user_line(node.meta.get("stack_trace"))
            if now is not None and now != line:
                rows.append(f"    # {now}")
            line = now
        text = write.node(node)
        if text is not None:
            note = f"  # {_note(node.meta.get('val'))}" if for_people else ""
            rows.append(f"    {text}{note if node.op == 'call_function' else ''}")
        if node in last:
            rows.append(f"    del {', '.join(last[node])}")
    return "\n".join(rows) + "\n"


class _Writer:
    """Nodes and arguments as Python expressions."""

    def node(self, node: fx.Node) -> str | None:
        if node.op == "call_function":
            target: Any = node.target
            args = [self.value(x) for x in node.args]
            if getattr(target, "__name__", "") == "getitem":
                return f"{node.name} = {args[0]}[{args[1]}]"
            args += [f"{name}={self.value(x)}" for name, x in node.kwargs.items()]
            return f"{node.name} = torch.ops.{target}({', '.join(args)})"
        if node.op == "get_attr":
            return f"{node.name} = {node.target}" if node.name != node.target else None
        if node.op == "output":
            return f"return {self.value(node.args[0])}"
        return None

    def value(self, x: Any) -> str:
        if isinstance(x, fx.Node):
            return x.name
        if isinstance(x, tuple):
            return f"({', '.join(map(self.value, x))}{',' if len(x) == 1 else ''})"
        if isinstance(x, list):
            return f"[{', '.join(map(self.value, x))}]"
        if isinstance(x, torch.device):
            return f"torch.device({str(x)!r})"
        if isinstance(x, float) and not math.isfinite(x):
            return f'float("{x}")'
        return repr(x)


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[str]]:
    """For each node, the names that nobody needs after it."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[str]] = {}
    for node in reversed(nodes):
        ends = [x for x in node.all_input_nodes if x not in seen and x.op == "call_function"]
        seen.update(ends)
        if ends and node.op != "output":
            found[node] = [x.name for x in ends]
    return found


def _note(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        sizes = ", ".join(map(str, val.shape))
        return f"{str(val.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(val, (tuple, list)):
        return ", ".join(map(_note, val))
    return str(val)


def constant_source(x: torch.Tensor) -> str:
    """An expression for a small tensor; a large one becomes zeros, with a comment that says so."""
    if x.numel() <= _SHOWN_ELEMENTS:
        return f"torch.tensor({_numbers(x.tolist())}, dtype={x.dtype}, device={str(x.device)!r})"
    shape = list(x.shape)
    return f"torch.zeros({shape}, dtype={x.dtype}, device={str(x.device)!r})  # elements left out"


def _numbers(x: Any) -> str:
    if isinstance(x, list):
        return f"[{', '.join(map(_numbers, x))}]"
    if isinstance(x, float) and not math.isfinite(x):
        return f'float("{x}")'
    return repr(x)
