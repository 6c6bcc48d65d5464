"""Accumulators: what is carried round the loops of a reduction.

A floating-point sum is kept in two levels, so that its error does not grow with its length: the
inner loop sums blocks from zero, and finished blocks are added with the rounding error of each
addition kept beside them (Knuth's two-sum). Other reductions are carried as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusee.codegen.llvm.context import Context
from fusee.codegen.llvm.math import HAS_FUSED
from fusee.codegen.llvm.ops import Target, compare, emit
from fusee.codegen.llvm.types import HELD, Machine, is_float, literal, number, vector
from fusee.loops.ir import Acc, Accumulate, Value
from fusee.loops.scalar import REDUCTIONS, identity


@dataclass(frozen=True)
class Carried:
    """How one accumulator is kept. Its parts: a value, and for arg-reductions an index."""

    acc: Acc
    dtype: torch.dtype  # of the values accumulated
    two_level: bool

    @property
    def is_arg(self) -> bool:
        return self.acc.op in ("argmax", "argmin")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype, torch.int64) if self.is_arg else (self.dtype,)

    def kinds(self, lanes: int) -> list[str]:
        return [vector(HELD[dtype], lanes) for dtype in self.dtypes]

    def start(self, lanes: int) -> list[str]:
        first = literal(identity(self.acc.op, self.dtype), self.dtype, lanes)
        return [first, literal(0, torch.int64, lanes)] if self.is_arg else [first]

    def outer_kinds(self, lanes: int) -> list[str]:
        """Of what is carried outside the innermost loop: sum and error, or the parts."""
        return self.kinds(lanes) * 2 if self.two_level else self.kinds(lanes)

    def outer_start(self, lanes: int) -> list[str]:
        return self.start(lanes) * 2 if self.two_level else self.start(lanes)


def carried(statement: Accumulate, two_level: bool) -> Carried:
    acc = statement.acc
    sums = two_level and acc.op == "sum" and is_float(statement.value.dtype)
    return Carried(acc, statement.value.dtype, sums)


def accumulate(
    ctx: Context, t: Target, how: Carried, old: list[str], new: list[str], mask: str | None
) -> list[str]:
    """One more element per lane; masked lanes take the identity."""
    if mask is not None:
        value = t.select(mask, HELD[how.dtype], new[0], how.start(t.lanes)[0])
        new = [value, *new[1:]]
    if not how.is_arg:
        return [combine(t, how, old[0], new[0])]
    better = _better(t, how, old[0], new[0])
    return [
        t.select(better, HELD[dtype], x, y)
        for dtype, x, y in zip(how.dtypes, new, old, strict=True)
    ]


def fuses(how: Carried, value: Value, machine: Machine) -> bool:
    """True for a sum of products: multiplied and added with one rounding, as ATen's compiler does.

    It halves the error of a scalar product, and takes one instruction.
    """
    is_sum = how.acc.op == "sum" and is_float(how.dtype) and value.op == "mul"
    return is_sum and not HAS_FUSED.isdisjoint(machine.features)


def combine(t: Target, how: Carried, old: str, new: str) -> str:
    op = REDUCTIONS[how.acc.op]
    if how.dtype is torch.bool:
        # numbers 0 and 1: a sum or maximum of them is an or
        op = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}.get(op, op)
    return emit(t, op, how.dtype, [new, old])


def _better(t: Target, how: Carried, old: str, new: str) -> str:
    """True where new goes before old: strictly better, or the first NaN."""
    op = "gt" if how.acc.op == "argmax" else "lt"
    if not is_float(how.dtype):
        return compare(t, op, how.dtype, new, old)
    kind, mask = t.kind(how.dtype), vector("i1", t.lanes)
    wins = t.level.op(f"fcmp u{op} {kind} {new}, {old}")
    number_before = t.level.op(f"fcmp ord {kind} {old}, {old}")
    return t.level.op(f"and {mask} {wins}, {number_before}")


def merge(t: Target, how: Carried, a: list[str], b: list[str]) -> list[str]:
    """Two accumulators of disjoint elements as one; among equals the lower index."""
    if not how.is_arg:
        return [combine(t, how, a[0], b[0])]
    mask = vector("i1", t.lanes)
    better = _better(t, how, a[0], b[0])
    worse = _better(t, how, b[0], a[0])
    equal = t.level.op(f"xor {mask} {t.level.op(f'or {mask} {better}, {worse}')}, {_true(t)}")
    lower = compare(t, "lt", torch.int64, b[1], a[1])
    tie = t.level.op(f"and {mask} {equal}, {lower}")
    takes_b = t.level.op(f"or {mask} {better}, {tie}")
    return [
        t.select(takes_b, HELD[dtype], y, x) for dtype, x, y in zip(how.dtypes, a, b, strict=True)
    ]


def _true(t: Target) -> str:
    return literal(True, torch.bool, t.lanes)


def merge_all(t: Target, how: Carried, parts: list[list[str]]) -> list[str]:
    """Pairwise, so that the chain is short."""
    while len(parts) > 1:
        rest = parts[len(parts) & ~1 :]
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [merge(t, how, a, b) for a, b in pairs] + rest
    return parts[0]


def two_sum(t: Target, how: Carried, outer: list[str], block: str) -> list[str]:
    """(sum, error) with a block's sum added; exact but for the rounding of the error."""
    kind, op = t.kind(how.dtype), t.level.op
    total, error = outer
    new = op(f"fadd {kind} {total}, {block}")
    virtual = op(f"fsub {kind} {new}, {total}")
    left = op(f"fsub {kind} {total}, {op(f'fsub {kind} {new}, {virtual}')}")
    right = op(f"fsub {kind} {block}, {virtual}")
    lost = op(f"fadd {kind} {left}, {right}")
    return [new, op(f"fadd {kind} {error}, {lost}")]


def settle(t: Target, how: Carried, outer: list[str]) -> list[str]:
    """The result of what was carried outside: a sum with its error, NaN beside infinities."""
    if not how.two_level:
        return outer
    kind = t.kind(how.dtype)
    total, error = outer
    finite = t.level.op(f"fcmp ord {kind} {error}, {error}")
    error = t.select(finite, HELD[how.dtype], error, literal(0, how.dtype, t.lanes))
    return [t.level.op(f"fadd {kind} {total}, {error}")]


def across(ctx: Context, t: Target, how: Carried, parts: list[str]) -> list[str]:
    """All lanes as one: halves are merged until one element is left."""
    lanes, level = t.lanes, t.level
    while lanes > 1:
        half = lanes // 2
        low = ", ".join(f"i32 {i}" for i in range(half))
        high = ", ".join(f"i32 {i}" for i in range(half, lanes))
        halves: list[list[str]] = [[], []]
        for kind, part in zip(how.kinds(lanes), parts, strict=True):
            for side, picks in zip(halves, (low, high), strict=True):
                if half == 1:
                    side.append(level.op(f"extractelement {kind} {part}, {picks}"))
                else:
                    side.append(
                        level.op(
                            f"shufflevector {kind} {part}, {kind} poison, <{half} x i32> <{picks}>"
                        )
                    )
        parts = merge(Target(level, ctx.machine, half), how, *halves)
        lanes = half
    return parts


def into_first_lane(t: Target, how: Carried, parts: list[str]) -> list[str]:
    """Scalars as a vector whose other lanes change nothing."""
    found = []
    scalar_start = Carried(how.acc, how.dtype, False).start(t.lanes)
    for dtype, base, part in zip(how.dtypes, scalar_start, parts, strict=True):
        kind = vector(HELD[dtype], t.lanes)
        found.append(t.level.op(f"insertelement {kind} {base}, {HELD[dtype]} {part}, i64 0"))
    return found


def result(how: Carried, parts: list[str]) -> str:
    """The part that reading the accumulator yields."""
    return parts[-1]


def zero(how: Carried) -> str:
    return number(0, how.dtype)
