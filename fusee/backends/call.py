"""The callable of a compiled graph: the host function, bound to what it runs with.

It gives the host function its inputs, kept tensors (derived weights, constants), and turns its flat
results into what the traced program returned: mutations are counted, views and aliases replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

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
from fusee.aten.passes import Derived
from fusee.aten.passes.parts import parts
from fusee.autodiff.joint import Joint
from fusee.codegen.host import HostCode
from fusee.loops.ir import Buffer, LoopGraph
from fusee.runtime import weights
from fusee.runtime.jit import Function
from fusee.runtime.program import Frame, Program, runner

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
        "retyped": _retyped,
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
    exec("\n".join(lines), names)
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
    return f"retyped({base}, {_sizes(spec.size)}, {_sizes(spec.stride)}, {spec.offset}, {dtype})"


def _sizes(sizes: Sequence[object]) -> str:
    return "(" + "".join(f"{size}, " for size in sizes) + ")"


def _retyped(
    base: Tensor, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
) -> Tensor:
    """A view of `base`, `offset` elements of `dtype` after its first one."""
    if dtype == base.dtype:
        return base.as_strided(size, stride, base.storage_offset() + offset)
    start = base.storage_offset() * base.dtype.itemsize // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=base.device)
    return view.set_(base.untyped_storage(), start + offset, size, stride)


def bind_call(
    gm: fx.GraphModule,
    aten: AtenGraph,
    derived: Derived | None,
    loops: LoopGraph,
    host: HostCode,
    functions: Sequence[Function],
    threads: int,
    *,
    consumes: bool = False,
) -> Callable[..., Any]:
    """The callable that takes the graph's inputs; in a list, which it empties, if it `consumes`.

    raises (when called)   IndexError as eager does for an index outside of its dimension
    """
    program = Program(functions, host.layout)
    names: dict[str, Any] = {
        **host.names,
        "checkout": program.checkout,
        "checkin": program.checkin,
        "run": runner(),
        "threads": (lambda: threads) if threads else torch.get_num_threads,
        "kept": _kept(aten, derived, loops),
        "fail": _failing(loops.messages),
    }
    exec(host.source, names)
    call: Callable[[Sequence[Any]], tuple[Any, ...]] = names["call"]
    finish = finishing(aten)
    if consumes:
        return call if finish is None else lambda inputs: finish((*inputs,), call(inputs))
    if any(spec.attribute is not None for spec in aten.inputs):
        return _with_attributes(gm, aten, call, finish)
    if finish is None:
        return lambda *inputs: call(inputs)
    return lambda *inputs: finish(inputs, call(inputs))


def _with_attributes(
    gm: fx.GraphModule, aten: AtenGraph, call: Callable[..., Any], finish: Finish | None
) -> Callable[..., Any]:
    """Tensors that the captured module holds itself follow the caller's."""

    def with_attributes(*inputs: Any) -> Any:
        everything = (*inputs, *aten.attributes(gm))
        results = call(everything)
        return results if finish is None else finish(everything, results)

    return with_attributes


Kept = tuple[int, tuple[Tensor, ...]]


def _kept(
    aten: AtenGraph, derived: Derived | None, loops: LoopGraph
) -> Callable[[tuple[Any, ...]], Kept]:
    """A function of the inputs: a version, and the tensors that are kept between calls."""
    constants = tuple(
        aten.constants[b.name]
        for b in loops.inputs
        if isinstance(b, Buffer) and b.role == "constant"
    )
    if derived is None or not derived.sources:
        fixed = () if derived is None else derived.compute(())
        always: Kept = (1, fixed + constants)
        return lambda inputs: always
    split = parts(derived)
    known = weights.DerivedSet([weights.Derived(one.sources, one.compute) for _, one in split])
    places = [place for positions, _ in split for place in positions]
    order = sorted(range(len(places)), key=places.__getitem__)
    latest: tuple[weights.Snapshot | None, Kept] = (None, (0, ()))

    def kept(inputs: tuple[Any, ...]) -> Kept:
        nonlocal latest
        snapshot = known.current(inputs)
        of, found = latest  # one object, so that another thread's is whole
        if of is not snapshot:
            found = snapshot.version, tuple(snapshot.tensors[k] for k in order) + constants
            latest = snapshot, found
        return found

    return kept


def _failing(messages: Sequence[str]) -> Callable[[int, Frame], None]:
    def fail(status: int, frame: Frame) -> None:
        raise IndexError(messages[status - 1].format(frame.value))

    return fail
