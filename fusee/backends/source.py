"""The captured graph as Python that runs: for people, and to take a graph away from its program."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from torch import Tensor, fx, nn

from fusee.aten.source import constant_source

__all__ = ["captured_source"]


def captured_source(gm: fx.GraphModule) -> str:
    """A module that runs with torch alone: `graph(*inputs)` returns what the graph does.

    Modules that the graph calls, which only graphs made by hand do, are to be put in by name.
    """
    code = gm.graph.python_code("self", verbose=True)
    words = set(re.findall(r"\w+", code.src))
    globals_ = {name: value for name, value in code.globals.items() if name in words - {"torch"}}
    rows = ["import torch", "from torch import nn"]
    rows += [_import(name, value) for name, value in globals_.items()]
    body = [f"    {line}" if line.strip() else "" for line in code.src.strip("\n").splitlines()]
    rows += ["", "", "class Graph(nn.Module):", *body, "", "", "graph = Graph()"]
    names = {str(node.target) for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    for name in sorted(names):
        parent = "graph"
        for part in name.split(".")[:-1]:
            row = f'{parent}.{part} = getattr({parent}, "{part}", None) or nn.Module()'
            rows += [row] if row not in rows else []
            parent = f"{parent}.{part}"
        rows.append(f"graph.{name} = {_attribute(gm, name)}")
    return "\n".join(rows) + "\n"


def _import(name: str, value: Any) -> str:
    """How to have a global of the graph's code again."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, float):  # inf and nan
        return f'{name} = float("{value}")'
    if value is type(None):
        return f"{name} = type(None)"
    home = getattr(value, "__module__", None)
    where = getattr(value, "__qualname__", getattr(value, "__name__", name))
    if home is None or "<" in where:
        return f"{name} = ...  # {value!r}: put it in"
    return f"from {home} import {where} as {name}"


def _attribute(gm: fx.GraphModule, name: str) -> str:
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, nn.Parameter):
        return f"nn.Parameter({constant_source(value.detach())}, {value.requires_grad})"
    if isinstance(value, Tensor):
        return constant_source(value)
    return f"...  # {type(value).__name__}: put it in"
