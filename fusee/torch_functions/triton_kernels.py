"""Kernels that users write in Triton, launched with a grid: one call in the graph.

A launch becomes an operator of torch.library, made once for a kernel, the kinds of its arguments
and its constants. Its schema says which tensors the kernel writes to; all else follows as for any
operator of the user's. Triton is not imported: a program that launches its kernels has done so.

Tested with Triton 3.6; used are JITFunction's `fn`, `signature`, `params` and `kernel[grid](..)`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

from fusee.capture import symbols
from fusee.capture.attributes import Capturing
from fusee.capture.builtins import BY_NAME
from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import IdMatch
from fusee.capture.torch_api import FakeTensor


def written(kernel: Any) -> frozenset[str]:
    """Parameters that lead to what a kernel stores: by its source, all names that flow into one.

    What a function gets that is not Triton's own counts as stored, and so do all parameters of a
    kernel without a source.
    """
    parameters = frozenset(kernel.signature.parameters)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    except (OSError, SyntaxError):
        return parameters
    if any(isinstance(x, ast.Attribute) and x.attr == "pointer_type" for x in ast.walk(tree)):
        return parameters  # of an address in memory nobody knows whose it is
    nodes = list(ast.walk(tree))
    flows = {name: {name} for name in parameters}

    def leads(*parts: ast.AST | None) -> set[str]:
        names = {x for part in parts if part is not None for x in _names(part)}
        return {p for name in names for p in flows.get(name, ())}

    grown = True
    while grown:
        before = sum(map(len, flows.values()))
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                source = leads(node.value)
            elif isinstance(node, (ast.For, ast.comprehension)):
                targets, source = [node.target], leads(node.iter)
            else:
                continue
            for target in targets:
                for name in _names(target):
                    flows.setdefault(name, set()).update(source)
        grown = sum(map(len, flows.values())) > before
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return frozenset().union(*[leads(*_stored(call, kernel.fn.__globals__)) for call in calls])


def _names(tree: ast.AST) -> Iterator[str]:
    """Names in an expression, without those that are only loaded from."""
    if isinstance(tree, ast.Name):
        yield tree.id
    elif not (isinstance(tree, ast.Call) and _called(tree).endswith("load")):
        for part in ast.iter_child_nodes(tree):
            yield from _names(part)


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


_BUILTIN = frozenset("range min max len abs float int bool print isinstance".split())


def _stored(call: ast.Call, outside: dict[str, Any]) -> list[ast.AST]:
    """What a call may store to."""
    name = _called(call)
    given: list[ast.AST] = [*call.args, *(x.value for x in call.keywords)]
    root: ast.AST = call.func
    while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
        root = root.func if isinstance(root, ast.Call) else root.value
    base = outside.get(root.id) if isinstance(root, ast.Name) else None
    module = base.__name__ if inspect.ismodule(base) else getattr(base, "__module__", "") or ""
    is_tritons = module == "triton" or module.startswith("triton.language")
    if isinstance(call.func, ast.Name):
        name = getattr(base, "__name__", name)
    if any(word in name for word in ("store", "atomic", "asm", "extern")):
        return [call.func, *given]
    is_method = isinstance(call.func, ast.Attribute) and base is None
    is_known = is_tritons or is_method or (name in _BUILTIN and base is None)
    return [] if is_known else given


# ------------------------------------------------------------------------------ operators

_library: Any = torch.library.Library("fusee_triton", "FRAGMENT")  # type: ignore[no-untyped-call]
_numbers = itertools.count()
_KINDS = {bool: "bool", int: "SymInt", torch.SymInt: "SymInt", float: "float"}


@functools.cache
def _operator(kernel: Any, kinds: tuple[tuple[str, str], ...], fixed: frozenset[Any]) -> Any:
    """An operator that launches a kernel.

    kinds   name and type of each argument that differs from call to call
    fixed   (name, type, value) of the others, and of options
    """
    stores = written(kernel)
    takes = [
        f"Tensor(a{k}!) x{k}" if kind == "Tensor" and name in stores else f"{kind} x{k}"
        for k, (name, kind) in enumerate(kinds)
    ]
    constants = {name: value for name, _, value in fixed}

    def launch(*given: Any) -> None:
        *values, grid = given
        named = zip((name for name, _ in kinds), values, strict=True)
        kernel[tuple(grid)](**constants, **dict(named))

    name = f"{kernel.fn.__name__}_{next(_numbers)}"
    _library.define(f"{name}({', '.join([*takes, 'SymInt[] grid'])}) -> ()")
    _library.impl(name, launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusee_triton::{name}", lambda *given: None, lib=_library)
    return getattr(torch.ops.fusee_triton, name).default


@BY_NAME.rule(("triton.runtime.jit", "JITFunction.run"))
def _launch(
    function: Any, m: Capturing, kernel: Any, /, *args: Any, grid: Any, warmup: Any, **how: Any
) -> None:
    origin = m.world.origin(kernel)
    if warmup is not False or origin is None:
        raise GraphBreak("a Triton kernel is made on the way, or only compiled")
    m.world.fact(IdMatch, origin, kernel)
    names = kernel.signature.parameters
    given = kernel.signature.bind(*args, **{k: x for k, x in how.items() if k in names})
    given.apply_defaults()
    if callable(grid):
        grid = m.call(grid, dict(given.arguments))
    fixed = {name: symbols.value(x) for name, x in how.items() if name not in names}
    varying, constexprs = {}, {x.name for x in kernel.params if x.is_constexpr}
    for name, x in given.arguments.items():
        if isinstance(x, FakeTensor):
            if x.requires_grad and torch.is_grad_enabled():
                raise GraphBreak("a Triton kernel reads a tensor that requires grad")
            varying[name] = x, "Tensor"
        elif type(x) in _KINDS and name not in constexprs:
            varying[name] = x, _KINDS[type(x)]
        else:
            fixed[name] = symbols.value(x)
    try:
        kinds = tuple((name, kind) for name, (_, kind) in varying.items())
        op = _operator(kernel, kinds, frozenset((k, type(x), x) for k, x in fixed.items()))
    except TypeError:  # not hashable
        raise GraphBreak("a Triton kernel takes what is no tensor, number or constant") from None
    sizes = list(grid) if isinstance(grid, (tuple, list)) else [grid]
    m.world.recorder.call(op, *(x for x, _ in varying.values()), sizes)
