"""Reductions that need another's result, in one pass with it: softmax's sum, the variance.

What an element contributes is moved from the base so far to a later one:

    sum(exp(v - g) * u), g made of max(v)    raw = sum(exp(v - m) * u), then raw * exp(m - g)
    sum((v - g)^2),      g made of sum(v)    raw = sum((v - mean)^2), then raw + n * (mean - g)^2

source   Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Chan, Golub and
         LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979
"""

from __future__ import annotations

from collections.abc import Sequence

from fusee.loops.ir import (
    Acc,
    Accumulate,
    Phase,
    Statement,
    Store,
    Value,
    index_of,
    op,
    rewrite,
    rewrite_index,
    walk,
)
from fusee.loops.schedule import reads_own_acc
from fusee.sym.expr import product, symbols


class Online(Accumulate):
    """Accumulates `value` into `acc` as it would be alone, and beside it into `raw`.

    which   u of exp(v - g) * u, if there is one
    """

    def __init__(self, acc: Acc, value: Value, raw: Acc, factor: Value | None = None) -> None:
        super().__init__(acc, value, factor)
        self.raw = raw


def in_one_pass(phases: Sequence[Phase]) -> list[Phase]:
    """The phases with later ones merged into the first whose points they share, where they can.

    What happens at outer points alone comes after them.
    """
    found: list[Phase] = []
    waiting: list[Phase] = []
    rest = list(phases)
    while rest:
        phase = rest.pop(0)
        if not phase.inner:
            waiting.append(phase)
            continue
        last = found[-1] if found and found[-1].inner else None
        merged = None if last is None else _merged(last, phase, waiting)
        if merged is None:
            found += [*waiting, phase]
            waiting = []
            continue
        found[-1], changes = merged
        waiting, rest = ([_changed(p, changes) for p in some] for some in (waiting, rest))
    return found + waiting


def _accs(phase: Phase) -> set[object]:
    own: set[object] = set()
    for s in phase.body:
        if isinstance(s, Accumulate):
            own |= {s.acc, s.raw} if isinstance(s, Online) else {s.acc}
    return own


def _merged(
    first: Phase, second: Phase, between: Sequence[Phase]
) -> tuple[Phase, dict[Acc, Value]] | None:
    """Both as one, and what is to be read in the place of an accumulator; None: they can't be."""
    if first.inner != second.inner or reads_own_acc(first) or reads_own_acc(second):
        return None
    stored = {s.buffer for p in (first, *between) for s in p.body if isinstance(s, Store)}
    if any(v.op == "load" and v.attr[0] in stored for v in walk(second.operands)):
        return None
    own, body, changes = _accs(first), list(first.body), dict[Acc, Value]()
    for statement in second.body:
        if not any(v.op == "acc" and v.attr in own for v in walk(statement.operands)):
            body.append(statement)
            continue
        if not isinstance(statement, Accumulate) or statement.acc.op != "sum":
            return None
        for k, base in enumerate(body):
            if type(base) is Accumulate and base.which is None:
                both = _online(base, statement, first)
                if both is not None:
                    body[k], changes[statement.acc] = both
                    break
        else:
            return None
    return Phase(first.inner, body), changes


def _online(base: Accumulate, statement: Accumulate, phase: Phase) -> tuple[Online, Value] | None:
    """What accumulates both, and what the second accumulator is then."""
    v, value, table = base.value, statement.value, statement.value.table
    if v.dtype is not value.dtype or not v.dtype.is_floating_point:
        return None
    raw = Acc(f"{statement.acc.name}_raw", "sum", statement.acc.dtype)
    own, found = table.acc(base.acc), table.acc(raw)
    if base.acc.op == "sum" and value.op == "mul" and value.args[0] is value.args[1]:
        g = _subtracted(value.args[0], base, phase)
        if g is None:
            return None
        count = table.index(product(a.hi for a in phase.inner if a.hi is not None), v.dtype)
        away = own / count - g
        return Online(base.acc, v, raw), found + count * (away * away)
    sides = (value, None), *((value.args, value.args[::-1]) if value.op == "mul" else ())
    for power, factor in sides:
        if base.acc.op == "max" and power.op == "exp":
            g = _subtracted(power.args[0], base, phase)
            if g is not None and (factor is None or _is_free(factor, base.acc)):
                return Online(base.acc, v, raw, factor), found * op("exp", own - g)
    return None


def _is_free(value: Value, acc: Acc) -> bool:
    return not any(v.op == "acc" and v.attr is acc for v in walk([value]))


def _subtracted(value: Value, base: Accumulate, phase: Phase) -> Value | None:
    """g of v - g: the same at all points of the phase, made of no accumulator but the base's."""
    if value.op != "sub" or value.args[0] is not base.value:
        return None
    g = value.args[1]
    for part in walk([g]):
        if {*phase.inner} & {*symbols(index_of(part))}:
            return None
        if part.op == "acc" and part.attr is not base.acc:
            return None
    return g


def _changed(phase: Phase, changes: dict[Acc, Value]) -> Phase:
    new = rewrite(phase.operands, None, lambda v: changes.get(v.attr) if v.op == "acc" else None)
    body: list[Statement] = []
    for s in phase.body:
        if isinstance(s, Store):
            body.append(
                Store(s.buffer, rewrite_index(s.index, None, new), new[id(s.value)], s.mode)
            )
        else:
            which = None if s.which is None else new[id(s.which)]
            body.append(Accumulate(s.acc, new[id(s.value)], which))
    return Phase(phase.inner, body)
