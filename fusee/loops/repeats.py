"""Values that repeat within a vector, as a number per group of channels does beside channels.

A loop over i that reads x[i // 8] has lanes of eight elements at most. Where it reads that again at
each point of other axes, x[i // 8] is stored before, once for each i, by a loop of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fusee.loops.ir import Buffer, Extern, Loop, Value, contiguous, walk
from fusee.loops.schedule import cuts, points_of, rewritten
from fusee.sym.expr import Size, Symbol, coefficient, known_lt, symbols

# How often a value is read again, at least.
AGAIN = 16


def unrepeated(steps: Iterable[Loop | Extern], wide: int) -> Iterator[Loop | Extern]:
    """The steps of a graph, with loops before those that would have few lanes.

    wide   elements of a vector
    """
    count = 0
    for step in steps:
        if isinstance(step, Loop) and not step.scan:
            stored: dict[Value, Value] = {}
            for value, axes in _repeated(step, wide):
                loop = _stored(value, axes, f"each{count}", step.origin)
                stored[value] = value.table.load(loop.buffer, loop.index)
                count += 1
                yield loop
            step = rewritten(step, {}, stored.get) if stored else step
        yield step


def _repeated(loop: Loop, wide: int) -> Iterator[tuple[Value, list[Symbol]]]:
    """Loads that cut an axis, with the axes that they go along."""
    every = (*loop.axes, *loop.reduce_axes)
    loads = [v for v in walk(loop.operands) if v.op == "load"]
    indices = [loop.index, *(v.attr[1] for v in loads)]
    for value in loads:
        index = value.attr[1]
        own = symbols(index)
        cut = {axis for axis, size in cuts(index, {*every}) if known_lt(size, wide)}
        if not cut or value.args or any(symbol not in every for symbol in own):
            continue
        axes = [axis for axis in every if axis in own]
        often = points_of(every) >= AGAIN * points_of(axes)
        if often and any(_step(other, axis) == 1 for other in indices for axis in cut):
            yield value, axes


def _step(index: Size, axis: Symbol) -> Size | None:
    parts = coefficient(index, axis)
    return None if parts is None else parts[0]


def _stored(value: Value, axes: list[Symbol], name: str, origin: str) -> Loop:
    shape = tuple([axis.hi for axis in axes if axis.hi is not None])
    buffer = Buffer(name, value.dtype, shape, contiguous(shape), "scratch")
    index = buffer.index([axis.expr for axis in axes])
    return Loop(buffer, tuple(axes), index, value, origin=origin)
