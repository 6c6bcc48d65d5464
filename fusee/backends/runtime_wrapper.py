"""From what a graph's function computes to what the traced program returned.

Mutations are counted, views and aliases are taken again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from fusee import log
from fusee.aten.externs import is_view
from fusee.aten.graph import (
    AtenGraph,
    Constant,
    Fresh,
    InputItself,
    InputSpec,
    OutputItself,
    OutputSpec,
    Sym,
    ViewOfInput,
    ViewOfOutput,
    retyped,
)
from fusee.autodiff.autograd_function import Again, Consuming, differentiable
from fusee.autodiff.joint import Joint, Split
from fusee.backends.report import Report
from fusee.errors import FuseeWarning, warn

# ---------------------------------------------------------------------------- finish


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


# ---------------------------------------------------------------------------- training
# A graph that is differentiated: traced jointly with its backward, cut in two, compiled as two.
#
# What compiles the two halves is the caller's: our pipeline (native.py), eager kernels
# (aot_autograd.py), or functions of a user's own (aot_autograd.py).

# Runs one of the two graphs: its inputs, one per InputSpec, to its results.
Half = Callable[..., Sequence[Any]]


def is_differentiated(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether grad mode is on, and anything that goes in requires grad."""
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    given = (*tensors, *gm.parameters(), *gm.buffers())
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def flat_forward(joint: Joint, split: Split | None) -> AtenGraph:
    """The forward, to be compiled: it returns its results, saved values too, in a tuple.

    What requires grad is an input like any other: nothing may be derived from it ahead.

    split   None for a graph without tangents
    """
    graph = joint.aten if split is None else split.forward
    gradients = joint.gradients
    to_size = graph.to_size
    outputs = []
    for position, node in enumerate(graph.results):
        val = node.meta["val"]
        size, stride = tuple(map(to_size, val.shape)), tuple(map(to_size, val.stride()))
        outputs.append(Fresh(position, size, stride))
    inputs = [
        dataclasses.replace(
            spec,
            is_static=spec.is_static and gradient is None and spec.attribute is None,
            attribute=None,
        )
        for spec, gradient in zip(graph.inputs, gradients, strict=True)
    ]
    return dataclasses.replace(
        graph, outputs=tuple(outputs), structure=tuple, inputs=tuple(inputs), _module=None
    )


def flat_backward(split: Split) -> AtenGraph:
    """The backward, to be compiled. What was saved comes as a new object at each call."""
    inputs = tuple(dataclasses.replace(spec, is_static=False) for spec in split.backward.inputs)
    return dataclasses.replace(split.backward, inputs=inputs, _module=None)


def bind_training(
    gm: fx.GraphModule,
    joint: Joint,
    split: Split | None,
    forward: Half,
    backward: Callable[[Split], Consuming] | None,
    tell: Callable[[str], None],
) -> Callable[..., Any]:
    """The callable that takes the graph's inputs, and whose results know their backward.

    forward   runs flat_forward(joint, split)
    backward  gives what runs flat_backward of a split, when that is needed; None without tangents
    tell      is told what of the graph runs eagerly
    """
    run: Half = torch.no_grad()(forward)  # calls with out= refuse what requires grad
    if split is not None and backward is not None:
        again = Again(gm, joint, split.saved, tell)
        run = differentiable(joint, split, forward, backward, again)
    finish = finishing(joint.aten, joint)
    if any(spec.attribute is not None for spec in joint.aten.inputs):
        inner = run
        attributes = joint.aten.attributes

        def with_attributes(*inputs: Any) -> Any:
            everything = (*inputs, *attributes(gm))
            results = inner(*everything)
            return results if finish is None else finish(everything, results)

        return with_attributes
    if finish is None:
        return run
    return lambda *inputs: finish(inputs, run(*inputs))


def _publish(note: str) -> None:
    log.publish("kernels", "", note)


def train(
    gm: fx.GraphModule,
    joint: Joint,
    partition: Callable[[Joint], Split],
    compile_forward: Callable[[AtenGraph], Half],
    compile_backward: Callable[[AtenGraph], Callable[..., Sequence[Any]]],
    *,
    consumes: bool = False,
    tell: Callable[[str], None] = _publish,
) -> Callable[..., Any]:
    """`bind_training` of a joint graph whose halves are compiled by these functions.

    Of several results a loss seldom uses all, and those that it doesn't use cost nothing when the
    backward is compiled without them. That is known at the first backward; with one result, now.

    consumes   what compile_backward returns takes a list instead of arguments, and empties it
    """
    if not joint.tangents:
        return bind_training(
            gm, joint, None, compile_forward(flat_forward(joint, None)), None, tell
        )
    split = partition(joint)
    forward = compile_forward(flat_forward(joint, split))

    @functools.cache
    def backward(of: Split) -> Consuming:
        run = compile_backward(flat_backward(of))
        return run if consumes else lambda inputs: run(*inputs)

    if len(joint.tangents) == 1:
        backward(split)
    return bind_training(gm, joint, split, forward, backward, tell)


def describe(split: Split) -> str:
    """What is saved for the backward and what is computed once more, in a line."""
    to_size = split.backward.to_size
    kept = [
        spec
        for spec, saved in zip(split.backward.inputs, split.saved)
        if saved.kind == "result" and spec.dtype is not None
    ]
    total: Any = 0
    for spec in kept:
        count = to_size(1)
        for n in spec.size:
            count = count * n
        assert spec.dtype is not None
        total = total + count * spec.dtype.itemsize
    again = [
        str(node.target)
        for node in split.backward.graph.nodes
        if node.op == "call_function" and not node.meta.get("backward") and not is_view(node.target)
    ]
    recomputed = f"{len(again)} operators are computed again" if again else "none computed again"
    size = f"{total:,}" if isinstance(total, int) else str(total)
    return f"{len(kept)} values of {size} bytes are saved for the backward; {recomputed}"


# ---------------------------------------------------------------------------- apart
# Calls in which inputs lie as no graph takes them to: they run the captured graph itself.
#
# A graph is compiled as if its inputs lay apart: what it writes to one it does not see in another.
# So each call of a graph that writes to inputs looks where they lie; a call in which they overlap
# runs the captured graph itself, operator by operator, as eager does. So does one in which an input
# lies inside a larger storage, if the graph counts offsets from its beginning.

Call = Callable[..., Any]


def apart(
    gm: fx.GraphModule,
    call: Call,
    inputs: Sequence[InputSpec],
    written: Collection[int],
    report: Report,
) -> Call:
    """`call` where inputs lie apart, `gm` where one of those that are written to does not.

    written  the inputs that `call` writes to
    """
    count = len(gm.graph.find_nodes(op="placeholder"))  # the module's own tensors follow
    places = [s.index for s in inputs[:count] if s.dtype is not None]
    if len(places) < 2 or not written:
        return call
    sizes = [extent(inputs[k].size, inputs[k].stride) for k in places]
    is_known = all(type(size) is int for size in sizes)
    changes = [k in written for k in places]
    latest: Any = None  # where all lay in the last call in which they lay apart
    is_told = False

    def checked(*given: Any) -> Any:
        nonlocal latest, is_told
        at = [given[k].data_ptr() for k in places]
        where = at if is_known else [(given[k].data_ptr(), *_geometry(given[k])) for k in places]
        if where != latest:
            tensors = [given[k] for k in places]
            found = _overlapping(tensors, at, changes)
            if found is not None:
                if not is_told:
                    is_told = True
                    _tell(report, *(inputs[places[k]].name for k in found))
                return gm.forward(*given)
            latest = where
        return call(*given)

    return checked


def from_start(gm: fx.GraphModule, call: Call, aten: AtenGraph, report: Report) -> Call:
    """`call` where inputs begin their memory, as offsets in its graph take them to; `gm` else."""
    asked = [aten.inputs[k] for k in sorted(aten.from_start)]
    if not asked:
        return call
    count = len(gm.graph.find_nodes(op="placeholder"))
    is_told = False

    def inside(given: Sequence[Any]) -> str | None:
        for spec in asked:
            if spec.index >= count and spec.attribute is None:
                return spec.name  # a tangent: where it lies shows only in the backward
            own = (spec.attribute or "").split(".")
            x: Any = given[spec.index] if spec.index < count else reduce(getattr, own, gm)
            if x.storage_offset():
                return spec.name
        return None

    def checked(*given: Any) -> Any:
        nonlocal is_told
        name = inside(given)
        if name is None:
            return call(*given)
        if not is_told:
            is_told = True
            what = f"as_strided of {name}, which starts inside a larger storage"
            report.notes.append(f"calls run eagerly: {what}")
            _warn(report, what, "give as_strided a copy, or index instead")
        return gm.forward(*given)

    return checked


def extent(size: Sequence[Any], stride: Sequence[Any]) -> Any:
    """Elements from the first to past the last."""
    if any(type(n) is int and n == 0 for n in size):
        return 0
    total: Any = 1
    for n, step in zip(size, stride, strict=True):
        total = total + (n - 1) * step
    return total


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride()


def _overlapping(
    tensors: Iterable[Tensor], at: Sequence[int], changes: Sequence[bool]
) -> tuple[int, int] | None:
    """The positions of one that is written to and of one that it overlaps, if there are any."""
    ends = [start + extent(x.shape, x.stride()) * x.element_size() for start, x in zip(at, tensors)]
    reaches: dict[bool, int] = {}  # of all so far, and of those written to: which ends last
    for k in sorted(range(len(at)), key=at.__getitem__):
        if ends[k] == at[k]:
            continue
        before = reaches.get(changes[k])
        for kind in (True,) if not changes[k] else (True, False):
            other = reaches.get(kind)
            if other is not None and at[k] < ends[other]:
                return (k, other) if changes[k] else (other, k)
        if before is None or ends[k] > ends[before]:
            reaches[changes[k]] = k
    return None


def _tell(report: Report, written: str, other: str) -> None:
    what = f"the inputs {written} and {other} share memory, and {written} is written to"
    report.notes.append(f"calls run eagerly in which {what}")
    _warn(report, what, f"pass {other}.clone(), if it needs not see what is written")


def _warn(report: Report, what: str, remedy: str) -> None:
    warn(
        FuseeWarning,
        f"a call of {report.name} runs eagerly: {what}",
        where=report.where,
        did="the captured graph ran operator by operator, as every such call will",
        remedy=remedy,
    )
