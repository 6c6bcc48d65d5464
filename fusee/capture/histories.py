"""Results of a graph whose gradients are asked for one by one.

A compiled graph is one node of autograd: no way leads from one of its results to another. Where a
function may ask for gradients of what a graph gave (`torch.autograd.grad(loss, features)`,
`features.retain_grad()`, hooks of tensors), its graphs are cut behind such results, so that what
comes after one has it in its history, as in eager mode. One that cannot be cut runs as captured.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from fusee.capture.bytecode import codes
from fusee.capture.effects import written_by
from fusee.capture.graph_break import storages
from fusee.capture.sources import is_trusted
from fusee.capture.torch_api import leaf_gradients
from fusee.runtime.cache import CUTS

_ASKING = frozenset("retain_grad register_hook register_multi_grad_hook get_gradient_edge".split())
_MOST = 400  # functions, then it is taken to ask


def asks_for_gradients(functions: Iterable[Any], values: Iterable[Any]) -> bool:
    """Whether functions, or what they call by name, may ask for gradients of what is no leaf.

    functions  or their code
    values     objects that the functions have in their variables
    """
    left, seen, held = [*functions], dict[int, Any](), [*values]
    first = len(left)
    while left:
        function = left.pop()
        is_code = isinstance(function, types.CodeType)
        code = function if is_code else function.__code__
        if id(code) in seen:
            continue
        seen[id(code)] = code
        names = {name for one in codes(code) for name in one.co_names}
        space: dict[str, Any] = {} if is_code else function.__globals__
        known = [space[name] for name in names if name in space]
        if len(seen) > _MOST or _asks(code, names, known):
            return True
        if not is_code:
            known += _cells(function)
        if len(seen) <= first:
            known += held
        left += (found for x in known for found in _called(x, names))
    return False


def is_asked(callers: Iterable[tuple[types.FunctionType, Any]]) -> bool:
    """Whether any of these may ask for gradients of what a function gives them."""
    for function, varies in callers:
        if varies.asks_gradients is None:
            varies.asks_gradients = asks_for_gradients((function,), ())
    return any(varies.asks_gradients for _, varies in callers)


def _asks(code: types.CodeType, names: set[str], known: list[Any]) -> bool:
    is_near = any("autograd" in name for name in names) or any(x is torch.autograd for x in known)
    keywords = {x for one in codes(code) for c in one.co_consts if type(c) is tuple for x in c}
    return (
        not _ASKING.isdisjoint(names)
        or (is_near and "grad" in names)
        or any(x is torch.autograd.grad for x in known)
        or ("backward" in names and "inputs" in keywords)
    )


def _cells(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is empty yet
            continue
    return found


def _function(x: Any) -> Any:
    """What Python runs of the program's where this is called; None if that is not plain to see."""
    kind = type(x)
    if kind in (types.MethodType, classmethod, staticmethod):
        x = x.__func__
    elif kind is property:
        x = x.fget
    elif kind is functools.partial:
        x = x.func
    return x if type(x) is types.FunctionType and _is_programs(x.__module__) else None


def _is_programs(module: Any) -> bool:
    return type(module) is str and not is_trusted(module)


def _called(x: Any, names: Iterable[str]) -> Iterator[types.FunctionType]:
    """The program's functions that an object is, or has under these names. It hears nothing."""
    if (found := _function(x)) is not None:
        yield found
        return
    if isinstance(x, types.ModuleType):
        spaces = [object.__getattribute__(x, "__dict__")]
        spaces = [space for space in spaces if _is_programs(space.get("__name__"))]
    else:
        bases = type.__getattribute__(x if isinstance(x, type) else type(x), "__mro__")
        spaces = [type.__getattribute__(base, "__dict__") for base in bases]
        spaces = [space for space in spaces if _is_programs(space.get("__module__"))]
    for space in spaces:
        for name in (*names, "__init__", "forward", "__call__"):
            if (found := _function(space.get(name))) is not None:
                yield found


def cuts(graph: fx.Graph) -> dict[str, Any]:
    """What is noted at a graph: how many calls stand before each cut between results, if there are
    any; None if it cannot be cut there."""
    with torch._C.DisableTorchFunction():
        return _cuts(graph)


def _cuts(graph: fx.Graph) -> dict[str, Any]:
    *nodes, output = graph.nodes
    calls = [node for node in nodes if node.op.startswith("call_")]
    results = {x for x in output.all_input_nodes if x in {*calls} and _has_history(x)}
    leads, memory = set(results), storages(results)  # to one of these, also by a write
    for node in reversed(calls):
        if not leads.isdisjoint(node.users) or memory & storages(written_by(node)):
            leads.add(node)
            memory |= storages([node])
    found, given = list[int](), set[int]()  # where the elements of results since the last cut lie
    for k, node in enumerate(calls):
        if node in leads and given and not given.isdisjoint(storages(node.all_input_nodes)):
            found.append(k)
            given.clear()
        if node in results:
            given |= storages([node])
    is_free = all(_is_free(nodes, calls, k) for k in found)
    return {CUTS: found if is_free else None} if found else {}


def _has_history(node: fx.Node) -> bool:
    x = node.meta.get("example_value")
    return isinstance(x, torch.Tensor) and x.requires_grad


def _is_free(nodes: list[fx.Node], calls: list[fx.Node], k: int) -> bool:
    """Whether two graphs may stand in place of one: they pass whole tensors of known sizes, which
    share no memory and are not written to, and torch's state is the same in both."""
    inputs = [node for node in nodes if node.op == "placeholder"]
    for node in inputs:
        x = node.meta.get("example_value")
        if not isinstance(x, torch.Tensor) or any(type(n) is not int for n in x.shape):
            return False
    if any("example_value" not in n.meta or n.target is leaf_gradients for n in calls):
        return False
    crossing = [node for node in calls[:k] if not {*calls[:k]}.issuperset(node.users)]
    if not all(isinstance(node.meta["example_value"], torch.Tensor) for node in crossing):
        return False
    memory = storages(crossing)
    written = storages(x for node in calls for x in written_by(node))
    return len(memory) == len(crossing) and memory.isdisjoint(written | storages(inputs))
