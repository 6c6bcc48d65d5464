"""Which buffers a step or kernel reads and writes."""

from __future__ import annotations

from collections.abc import Iterable

from fusee.loops.ir import Buffer, Extern, Kernel, Loop, Store, View, payloads, walk
from fusee.loops.order import roots


def writes(step: Loop | Extern | Kernel) -> list[Buffer]:
    """The buffers that a step or kernel stores to."""
    if isinstance(step, Loop):
        return [step.buffer]
    if isinstance(step, Kernel):
        return list(dict.fromkeys(s.buffer for s in step.statements() if isinstance(s, Store)))
    return [b for b in step.results if b is not None] + list(step.mutates)


def reads(step: Loop | Extern | Kernel) -> list[Buffer]:
    """The buffers that a step or kernel loads from."""
    if isinstance(step, Extern):
        return list(dict.fromkeys(v.buffer for v in views((step.args, step.kwargs))))
    if step.reads_memo is None:
        if isinstance(step, Loop):
            values = [v for v in (step.value, step.result, step.which) if v is not None]
            values += payloads(step.index)
        else:
            values = [root for s in step.statements() for root in roots(s)]
            values += [
                v for s in step.statements() if isinstance(s, Store) for v in payloads(s.index)
            ]
        order = walk(values)
        step.reads_memo = list(dict.fromkeys(v.attr[0] for v in order if v.op == "load"))
        if isinstance(step, Loop):
            step.size_memo = len(order)
    return step.reads_memo


def size(loop: Loop) -> int:
    """How many values the loop computes at one point."""
    reads(loop)
    return loop.size_memo


def views(tree: object) -> Iterable[View]:
    if isinstance(tree, View):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from views(item)
    elif isinstance(tree, dict):
        yield from views(list(tree.values()))
