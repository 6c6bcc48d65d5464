"""Values that repeat within a vector, as a number per group of channels does beside channels.

A loop over i that reads x[i // 8] has lanes of eight elements at most. Where it reads that again at
each point of other axes, x[i // 8] is stored before, once for each i, by a loop of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fusee.loops.ir import Buffer, Extern, Loop, Value, rewrite, rewrite_index, walk
from fusee.loops.schedule import cuts
from fusee.sym.expr import Size, Symbol, coefficient, hint, known_lt, product, symbols

# How often a value is read again, at least.
AGAIN = 16


def unrepeated(steps: Iterable[Loop | Extern], wide: int) -> Iterator[Loop | Extern]:
    """The steps of a graph, with loops before those that would have few lanes.

    wide   elements of a vector
    """
    count = 0
    for step in steps:
        if isinstance(step, Loop) and not step.scan:
            stored: dict[int, Value] = {}
            for value, axes in _repeated(step, wide):
                loop = _stored(value, axes, f"each{count}", step.origin)
                stored[id(value)] = value.table.load(loop.buffer, loop.index)
                count += 1
                yield loop
            step = _reading(step, stored) if stored else step
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
        often = hint(_points(every)) >= AGAIN * hint(_points(axes))
        if often and any(_step(other, axis) == 1 for other in indices for axis in cut):
            yield value, axes


def _points(axes: Iterable[Symbol]) -> Size:
    return product(axis.hi for axis in axes if axis.hi is not None)


def _step(index: Size, axis: Symbol) -> Size | None:
    parts = coefficient(index, axis)
    return None if parts is None else parts[0]


def _stored(value: Value, axes: list[Symbol], name: str, origin: str) -> Loop:
    shape = [axis.hi for axis in axes if axis.hi is not None]
    strides: list[Size] = []
    size: Size = 1
    for n in reversed(shape):
        strides.insert(0, size)
        size = size * n
    buffer = Buffer(name, value.dtype, tuple(shape), tuple(strides), "scratch")
    index = buffer.index([axis.expr for axis in axes])
    return Loop(buffer, tuple(axes), index, value, origin=origin)


def _reading(loop: Loop, stored: dict[int, Value]) -> Loop:
    """The loop, with some loads replaced."""
    twins = dict(_pairs(loop, stored))
    new = rewrite(loop.operands, None, twins.get)

    def of(value: Value | None) -> Value | None:
        return None if value is None else new[id(value)]

    return replace(
        loop,
        index=rewrite_index(loop.index, None, new),
        value=new[id(loop.value)],
        result=of(loop.result),
        which=of(loop.which),
        reads_memo=None,
    )


def _pairs(loop: Loop, stored: dict[int, Value]) -> Iterator[tuple[Value, Value]]:
    for value in walk(loop.operands):
        if id(value) in stored:
            yield value, stored[id(value)]
