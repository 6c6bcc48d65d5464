"""Two reductions in one pass, the second of which needs the first's result: see loops/online.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusee.codegen.llvm.body import Carried, across, carried
from fusee.codegen.llvm.ops import Context, compare, emit
from fusee.loops.ir import Acc, Accumulate, Phase, identity
from fusee.loops.online import Online
from fusee.runtime.llvm_text import HELD, InsertPoint, literal


def accumulators(phase: Phase, along: bool) -> dict[Acc, Carried]:
    """How each accumulator of a phase is kept. `along`: lanes run along the reduced axis."""
    found: dict[Acc, Carried] = {}
    for s in phase.body:
        if isinstance(s, Online):
            how = Squares if s.acc.op == "sum" else Powers
            found[s.acc] = how(s.acc, s.value.dtype, False, s.raw, along)
        elif isinstance(s, Accumulate):
            found[s.acc] = carried(s, two_level=False)
    return found


@dataclass(frozen=True)
class OnlineCarried(Carried):
    """Parts: of the first accumulator, of the second one without its base, and what else it takes.

    Where lanes run along the reduced axis, they become one at each step.
    """

    raw: Acc
    along: bool

    def round(self, lanes: int) -> tuple[list[str], list[str]]:
        """Types and first values of what goes round a loop."""
        lanes = 1 if self.along else lanes
        return self.kinds(lanes), self.start(lanes)

    def step(self, ctx: Context, t: InsertPoint, old: list[str], given: list[str]) -> list[str]:
        """One more element per lane: the value, and the factor if there is one."""
        raise NotImplementedError

    def finished(self, t: InsertPoint, parts: list[str]) -> list[str]:
        """What went round a loop as parts."""
        return parts

    def _apply(self, t: InsertPoint) -> Callable[..., str]:
        return lambda op, *args: emit(t, op, self.dtype, [*args])

    def _one(self, ctx: Context, t: InsertPoint, x: str, op: str = "sum") -> str:
        """All lanes as one."""
        return across(ctx, t, Carried(Acc("", op, self.dtype), self.dtype, False), [x])[0]


class Powers(OnlineCarried):
    """A maximum m, and the sum of exp(v - m)."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtype, self.dtype

    def start(self, lanes: int) -> list[str]:
        return [literal(n, self.dtype, lanes) for n in (identity("max", self.dtype), 0)]

    def _base(self, t: InsertPoint, m: str) -> str:
        """The maximum, 0 if it is infinite: exp(x - base) is what a sum of infinities would be."""
        kind, size = HELD[self.dtype], self._apply(t)("abs", m)
        endless = compare(t, "eq", self.dtype, size, literal(float("inf"), self.dtype, t.lanes))
        return t.select(endless, kind, literal(0, self.dtype, t.lanes), m)

    def _power(self, t: InsertPoint, x: str, base: str) -> str:
        apply = self._apply(t)
        return apply("exp", apply("sub", x, base))

    def step(self, ctx: Context, t: InsertPoint, old: list[str], given: list[str]) -> list[str]:
        own = InsertPoint(t.level, t.machine, 1 if self.along else t.lanes)
        apply, (x, *factor) = self._apply(own), given
        m = apply("maximum", self._one(ctx, t, x, "max") if self.along else x, old[0])
        base = self._base(own, m)
        wide = base if own.lanes == t.lanes else t.level.splat(HELD[self.dtype], base, t.lanes)
        power = self._power(t, x, wide)
        if factor:
            power = self._apply(t)("mul", power, factor[0])
        if self.along:
            power = self._one(ctx, t, power)
        return [m, apply("fma", old[1], self._power(own, old[0], base), power)]

    def merge(self, t: InsertPoint, a: list[str], b: list[str]) -> list[str]:
        apply = self._apply(t)
        m = apply("maximum", a[0], b[0])
        base = self._base(t, m)
        left, right = (self._power(t, x, base) for x, _ in (a, b))
        return [m, apply("fma", b[1], right, apply("mul", a[1], left))]


class Squares(OnlineCarried):
    """A sum, the sum of squares of what elements are away from their mean, and their number.

    The number is the same for all lanes, and in a loop its inverse goes round with it.
    """

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtype, self.dtype, self.dtype

    def widths(self, lanes: int) -> list[int]:
        return [lanes, lanes, 1]

    def start(self, lanes: int) -> list[str]:
        return [literal(0, self.dtype, width) for width in self.widths(lanes)]

    def round(self, lanes: int) -> tuple[list[str], list[str]]:
        kinds, first = super().round(lanes)
        return [*kinds, kinds[2]], [*first, first[2]]

    def step(self, ctx: Context, t: InsertPoint, old: list[str], given: list[str]) -> list[str]:
        (x,), dtype, kind, count = given, self.dtype, HELD[self.dtype], 1
        one = InsertPoint(t.level, t.machine, 1)
        apply, alone = self._apply(t), self._apply(one)
        total = mean = x
        squares = old[1]
        if self.along and t.lanes > 1:
            count, total = t.lanes, self._one(ctx, t, x)
            mean = alone("mul", total, literal(1 / count, dtype, 1))
            away = apply("sub", x, t.level.splat(kind, mean, count))
            squares = alone("add", squares, self._one(ctx, t, apply("mul", away, away)))
            apply, t = alone, one
        n = alone("add", old[2], literal(count, dtype, 1))
        inverse = alone("div", literal(1, dtype, 1), n)
        share = alone("mul", old[2], alone("mul", inverse, literal(count, dtype, 1)))
        share, before = (self._wide(t, y) for y in (share, old[3]))
        away = apply("sub", mean, apply("mul", old[0], before))
        squares = apply("fma", apply("mul", away, share), away, squares)
        return [apply("add", old[0], total), squares, n, inverse]

    def _wide(self, t: InsertPoint, x: str) -> str:
        return x if t.lanes == 1 else t.level.splat(HELD[self.dtype], x, t.lanes)

    def finished(self, t: InsertPoint, parts: list[str]) -> list[str]:
        return parts[:3]

    def merge(self, t: InsertPoint, a: list[str], b: list[str]) -> list[str]:
        one = InsertPoint(t.level, t.machine, 1)
        apply, alone, unit = self._apply(t), self._apply(one), literal(1, self.dtype, 1)
        n = alone("add", a[2], b[2])
        inverses = [alone("div", unit, alone("maximum", x, unit)) for x in (a[2], b[2], n)]
        share = alone("mul", a[2], alone("mul", b[2], inverses[2]))
        left, right, share = (self._wide(t, x) for x in (*inverses[:2], share))
        away = apply("sub", apply("mul", b[0], right), apply("mul", a[0], left))
        squares = apply("add", a[1], b[1])
        squares = apply("fma", apply("mul", away, share), away, squares)
        return [apply("add", a[0], b[0]), squares, n]
