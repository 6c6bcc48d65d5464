"""From what a graph's function computes to what the traced program returned.

Mutations are counted, views and aliases are taken again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusee.aten.graph import (
    AtenGraph,
    Constant,
    Fresh,
    InputItself,
    OutputItself,
    OutputSpec,
    Sym,
    ViewOfInput,
    ViewOfOutput,
)
from fusee.aten.interpret import retyped
from fusee.autodiff.joint import Joint

__all__ = ["Finish", "finishing"]

Finish = Callable[[Sequence[Any], Sequence[Tensor]], Any]


def finishing(graph: AtenGraph, joint: Joint | None = None) -> Finish | None:
    """A function (inputs, results) -> what the caller gets; None if that is tuple(results).

    joint    the call is differentiated: results come from an autograd.Function, and what the joint
             graph's forward has noted is done here, under autograd
    source   generated once, so that a call pays for what its outputs need and no more
    """
    if joint is not None:
        graph = dataclasses.replace(graph, mutations=(), _module=None)
    outputs = graph.outputs
    rebinds = () if joint is None else joint.rebinds
    count = len(graph.results) if joint is None else joint.forward_results
    plain = all(isinstance(o, Fresh) and o.position == k for k, o in enumerate(outputs))
    marks = [object() for _ in outputs]
    flat = graph.structure(list(marks))
    is_flat = isinstance(flat, (tuple, list)) and list(flat) == marks
    if plain and is_flat and not graph.mutations and not rebinds and len(outputs) == count:
        return None
    names: dict[str, Any] = {
        "structure": type(flat) if is_flat else graph.structure,
        "increment_version": torch.autograd.graph.increment_version,
        "retyped": retyped,
    }
    lines = ["def finish(inputs, results):"]
    for name, source in graph.symbols.items():
        size = "" if source.axis is None else f".size({source.axis})"
        lines.append(f"    {name} = inputs[{source.index}]{size}")
    for mutation in graph.mutations:
        lines.append(f"    increment_version(inputs[{mutation.index}])")
    for index, position in rebinds:
        lines.append(f"    inputs[{index}].copy_(results[{position}])")
    for k, spec in enumerate(outputs):
        detach = joint is not None and joint.detached[k]
        lines.append(f"    o{k} = {_output(spec, k, names)}{'.detach()' if detach else ''}")
    listed = ", ".join(f"o{k}" for k in range(len(outputs)))
    lines.append(f"    return structure([{listed}])")
    exec(compile("\n".join(lines), "<fusee results>", "exec"), names)
    finish: Finish = names["finish"]
    return finish


def _output(spec: OutputSpec, number: int, names: dict[str, Any]) -> str:
    if isinstance(spec, Fresh):
        return f"results[{spec.position}]"
    if isinstance(spec, InputItself):
        return f"inputs[{spec.index}]"
    if isinstance(spec, OutputItself):
        return f"o{spec.index}"
    if isinstance(spec, ViewOfInput):
        return _view(f"inputs[{spec.index}]", spec, names)
    if isinstance(spec, ViewOfOutput):
        return _view(f"results[{spec.position}]", spec, names)
    if isinstance(spec, Sym):
        return str(spec.expr)
    assert isinstance(spec, Constant)
    names[f"constant{number}"] = spec.value
    return f"constant{number}"


def _view(base: str, spec: ViewOfInput | ViewOfOutput, names: dict[str, Any]) -> str:
    dtype = str(spec.dtype).removeprefix("torch.")
    names[dtype] = spec.dtype
    names |= {name: getattr(torch, name) for name in spec.bits}
    text = f"retyped({base}, {_sizes(spec.size)}, {_sizes(spec.stride)}, {spec.offset}, {dtype})"
    for name in spec.bits:
        text = f"{name}({text})"
    return text


def _sizes(sizes: Sequence[object]) -> str:
    return "(" + "".join(f"{size}, " for size in sizes) + ")"
