"""When two kernels are one kernel on other buffers: the repeated layers of a network.

`form(kernel)` is all of a kernel but which buffers it works on. Kernels of equal form are emitted
once. The code generator shares more, kernels of other sizes too, but only by their finished text.
"""

from __future__ import annotations

from collections.abc import Hashable

from fusee.loops.ir import Accumulate, Buffer, Kernel, Store, payloads, walk
from fusee.loops.order import roots
from fusee.sym.expr import Size


def form(kernel: Kernel) -> tuple[Hashable, list[Buffer]]:
    """(form, the buffers in order of appearance). Unequal forms may still be equal kernels."""
    return _Form().of(kernel)


class _Form:
    def __init__(self) -> None:
        self.buffers: dict[Buffer, int] = {}
        self.accs: dict[object, int] = {}
        self.values: dict[int, int] = {}

    def of(self, kernel: Kernel) -> tuple[Hashable, list[Buffer]]:
        phases = []
        for phase in kernel.phases:
            needed = [root for s in phase.body for root in roots(s)]
            needed += [v for s in phase.body if isinstance(s, Store) for v in payloads(s.index)]
            rows: list[Hashable] = []
            for value in walk(needed):
                if id(value) in self.values:
                    continue
                args = tuple([self.values[id(arg)] for arg in value.args])
                rows.append((value.op, value.dtype, args, self._attr(value.op, value.attr)))
                self.values[id(value)] = len(self.values)
            phases.append((phase.inner, tuple(rows), tuple(map(self._statement, phase.body))))
        key = (kernel.outer, kernel.lanes, kernel.ordered, tuple(phases))
        return key, list(self.buffers)

    def _statement(self, statement: Store | Accumulate) -> Hashable:
        value = self.values[id(statement.value)]
        if isinstance(statement, Store):
            place = self._buffer(statement.buffer), self._index(statement.index)
            return (*place, value, statement.mode)
        which = None if statement.which is None else self.values[id(statement.which)]
        return self._acc(statement.acc), statement.acc.op, statement.acc.dtype, value, which

    def _attr(self, op: str, attr: object) -> Hashable:
        if op == "load":
            assert isinstance(attr, tuple)
            return self._buffer(attr[0]), self._index(attr[1])
        if op == "index":
            return self._index(attr)  # type: ignore[arg-type]
        if op == "acc":
            return self._acc(attr)
        # repr tells 0.0 from -0.0 and makes NaN equal to itself
        return repr(attr)

    def _index(self, index: Size) -> Hashable:
        # data-dependent parts are named by the value they load, which differs between twins
        return index, tuple([self.values[id(value)] for value in payloads(index)])

    def _buffer(self, buffer: Buffer) -> Hashable:
        number = self.buffers.setdefault(buffer, len(self.buffers))
        return number, buffer.dtype, buffer.role == "input"

    def _acc(self, acc: object) -> Hashable:
        return self.accs.setdefault(acc, len(self.accs))
