"""The callable of a compiled graph: the host function, bound to what it runs with.

It gives the host function its inputs and kept tensors (derived weights, constants).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.graph import AtenGraph
from fusee.aten.passes import Derived
from fusee.aten.passes.parts import parts
from fusee.backends.finish import Finish, finishing
from fusee.codegen.host import HostCode
from fusee.loops.ir import Buffer, LoopGraph, Message
from fusee.runtime import weights
from fusee.runtime.jit import Function
from fusee.runtime.program import Frame, Program, runner


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

    raises (when called)   as eager does for an index outside of its dimension, a divisor of zero
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
    exec(compile(host.source, "<fusee host>", "exec"), names)
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


def _failing(messages: Sequence[Message]) -> Callable[[int, Frame], None]:
    def fail(status: int, frame: Frame) -> None:
        kind, text = messages[status - 1]
        raise kind(text.format(frame.value))

    return fail
