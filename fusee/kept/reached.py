"""What torch's own functions call: programs replace these, too, and no fact says so.

A graph names torch's functions, and that each is the one it was is made sure of. But those in
Python call others by name, which an earlier process may have had replaced, or a later one.
"""

from __future__ import annotations

import hashlib
import operator
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import fx

from fusee.capture.facts import ABSENT
from fusee.capture.world import is_scalar
from fusee.kept.naming import NotKept, is_torchs, known_by, taken_now

__all__ = ["reached", "replaced"]

_THEIRS = {"torch", "fusee", "numpy", "typing_extensions", "sympy", *sys.stdlib_module_names}
# What runs only for classes with functions of their own is not looked into, nor Python's library.
_CLOSED = {"torch.overrides", "torch._jit_internal", "torch.jit._script"}

Row = tuple[str, str, str]


def reached(module: fx.GraphModule) -> list[Row]:
    """Module, name and mark of all that a graph's functions call, but for C's own calls.

    raises   NotKept if something of it is not torch's
    """
    found: dict[tuple[str, str], str] = {}
    waiting: list[Any] = []
    for node in module.graph.nodes:
        if is_torchs(node.target):
            waiting.append(node.target)
        for name in _methods(node.op, node.target):
            waiting += _found(found, "torch", f"Tensor.{name}")
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if type(function) is not types.FunctionType or id(function) in seen:
            continue
        seen.add(id(function))
        home = str(function.__globals__.get("__name__"))
        if home.partition(".")[0] not in _THEIRS:
            raise NotKept(f"torch's functions call {home}.{function.__qualname__}")
        waiting += [cell.cell_contents for cell in function.__closure__ or () if _is_bound(cell)]
        if home not in _CLOSED and home.partition(".")[0] not in sys.stdlib_module_names:
            for place in _called(function, home):
                waiting += _found(found, *place)
    return [(*place, mark) for place, mark in found.items()]


def replaced(rows: Iterable[Row]) -> str | None:
    """The first of `reached` that is another now; what is not loaded yet is as it was."""
    for module, name, mark in rows:
        if module in sys.modules and _mark(taken_now(module, name)) != mark:
            return f"{module}.{name}"
    return None


def _methods(op: str, target: Any) -> list[str]:
    """The methods of tensors that a node calls."""
    name = getattr(target, "__name__", "")
    if op == "call_function" and vars(operator).get(name) is target:
        return [f"__{kind}{name.strip('_')}__" for kind in ("", "r", "i")]
    return [target] if op == "call_method" else []


def _found(found: dict[tuple[str, str], str], module: str, name: str) -> Iterator[Any]:
    x = taken_now(module, name)
    if x is not ABSENT and not is_scalar(x) and not isinstance(x, types.ModuleType):
        found[module, name] = _mark(x)
        yield x


def _called(function: types.FunctionType, home: str) -> Iterator[tuple[str, str]]:
    """Where a function may look for what it calls: each of its names in all that it can mean."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    held = map(function.__globals__.get, names)
    owners: list[types.ModuleType] = [x for x in held if _is_open(x)]
    for name in names:
        yield home, name
        if hasattr(torch.Tensor, name):
            yield "torch", f"Tensor.{name}"
    for owner in owners:
        for name in names:
            if name in vars(owner) or (owner is torch._VF and hasattr(owner, name)):
                yield owner.__name__, name
                if _is_open(x := getattr(owner, name)) and x not in owners:
                    owners.append(x)


def _is_open(x: Any) -> TypeGuard[types.ModuleType]:
    """Whether names are looked for in a module: those of operators appear when they are used."""
    is_module = isinstance(x, types.ModuleType) and sys.modules.get(x.__name__) is x
    return is_module and (type(x) is types.ModuleType or x is torch._VF)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _codes(x)


def _is_bound(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _mark(x: Any) -> str:
    if type(x) is types.FunctionType:  # others give functions attributes
        known: Any = x.__module__, x.__qualname__, known_by(x.__code__)
    else:
        try:
            known = known_by(x)
        except NotKept:
            known = type(x).__qualname__
    return hashlib.sha1(repr(known).encode()).hexdigest()[:16]
