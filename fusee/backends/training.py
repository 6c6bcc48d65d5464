"""A graph that is differentiated: traced jointly with its backward, cut in two, compiled as two.

What compiles the two halves is the caller's: our pipeline (native.py), eager kernels (eager.py), or
functions of a user's own (two_graphs.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee import log
from fusee.aten.graph import AtenGraph, Fresh
from fusee.aten.operators import is_view
from fusee.autodiff.again import Again
from fusee.autodiff.joint import Joint, Split
from fusee.autodiff.runtime import Consuming, differentiable
from fusee.backends.finish import finishing

__all__ = [
    "Half",
    "bind_training",
    "describe",
    "flat_backward",
    "flat_forward",
    "is_differentiated",
]

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
