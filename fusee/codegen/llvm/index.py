"""Index expressions as i64 arithmetic, in parts: each part where it last changes."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fusee.codegen.llvm.ops import Context, Group
from fusee.loops import Buffer, Value
from fusee.runtime.llvm_text import numbered, splat, vector
from fusee.sym import Atom, Call, Expr, Size, Symbol, known_ge, known_lt

# ---------------------------------------------------------------------------- taking apart


def changes(ctx: Context, atom: Atom) -> bool:
    """False for sizes, which a call of the kernel does not change."""
    if isinstance(atom, Symbol):
        return atom in ctx.axis_number or atom.payload is not None
    return any(
        changes(ctx, inner)
        for side in (atom.a, atom.b)
        if not isinstance(side, int)
        for mono in side.terms
        for inner in mono
    )


def groups(ctx: Context, size: Size) -> list[Group]:
    """The expression as a sum of coefficient times atoms, in an order free of names."""
    if isinstance(size, int):
        return [((), size)] if size else []
    known = ctx.groups.get(size)
    if known is not None:
        return known
    found: dict[tuple[Atom, ...], Size] = {}
    for mono, coef in size.terms.items():
        moving = tuple(atom for atom in mono if changes(ctx, atom))
        fixed = tuple(atom for atom in mono if not changes(ctx, atom))
        part: Size = Expr({fixed: coef}) if fixed else coef
        found[moving] = found.get(moving, 0) + part
    result = [(mono, coef) for mono, coef in found.items() if coef != 0]
    if len(result) > 1:
        result.sort(key=lambda group: mono_key(ctx, group[0]))
    ctx.groups[size] = result
    return result


def mono_key(ctx: Context, mono: tuple[Atom, ...]) -> tuple[Any, ...]:
    """Equal for products that differ in names alone, so that texts do not depend on these."""
    keys: list[tuple[Any, ...]] = []
    for atom in mono:
        if not isinstance(atom, Symbol):
            sides = (groups(ctx, side) for side in (atom.a, atom.b))
            keys.append((2, atom.op, *(tuple(mono_key(ctx, x) for x, _ in s) for s in sides)))
        elif atom in ctx.axis_number:
            keys.append((0, ctx.axis_number[atom]))
        else:
            keys.append((1, ctx.payloads.setdefault(atom.payload, len(ctx.payloads))))
    return tuple(sorted(keys))


def mono_rank(ctx: Context, mono: Iterable[Atom]) -> int:
    return max((ctx.atom_fact(atom)[0] for atom in mono), default=0)


def mono_varies(ctx: Context, mono: Iterable[Atom]) -> bool:
    return any(ctx.atom_fact(atom)[1] for atom in mono)


# ---------------------------------------------------------------------------- scalars


def scalar_size(ctx: Context, size: Size) -> str:
    """An expression that is the same in all lanes, as an i64."""
    return scalar_sum(ctx, groups(ctx, size))


def scalar_sum(ctx: Context, terms: Sequence[Group]) -> str:
    """The sum of terms, each added at the rank where it changes."""
    return _by_rank(ctx, ("sum",), terms, "", functools.partial(_sum, ctx)) or "0"


def pointer(ctx: Context, buffer: Buffer, kind: str, terms: Sequence[Group]) -> str:
    """The address of element sum(terms) of a buffer of `kind`."""

    def further(rank: int, place: str, own: Sequence[Group]) -> str:
        return ctx.ranked[rank].at(place, _sum(ctx, rank, "", own), kind)

    start = ctx.buffer(buffer)
    return _by_rank(ctx, ("pointer", ctx.buffers[buffer], kind), terms, start, further)


def _by_rank(
    ctx: Context,
    key: tuple[object, ...],
    terms: Sequence[Group],
    total: str,
    join: Callable[[int, str, Sequence[Group]], str],
) -> str:
    """`join(rank, total so far, the rank's terms)` for each rank that terms have, in its level."""
    ranks = [mono_rank(ctx, mono) for mono, _ in terms]
    ordered = [group for _, group in sorted(zip(ranks, terms), key=operator.itemgetter(0))]
    done = 0
    for rank, count in sorted(Counter(ranks).items()):
        made = functools.partial(join, rank, total, ordered[done : done + count])
        done += count
        total = ctx.ranked[rank].once((*key, tuple(ordered[:done])), made)
    return total


def _sum(ctx: Context, rank: int, total: str, terms: Sequence[Group]) -> str:
    """total + terms; "" is no total yet."""
    level = ctx.ranked[rank]
    for mono, coef in terms:
        if coef == -1 and mono:
            total = level.op(f"sub i64 {total or '0'}, {_product(ctx, rank, mono, 1)}")
        else:
            term = _product(ctx, rank, mono, coef)
            total = level.op(f"add i64 {total}, {term}") if total else term
    return total


def _product(ctx: Context, rank: int, mono: tuple[Atom, ...], coef: Size) -> str:
    level = ctx.ranked[rank]

    def make() -> str:
        found = coefficient_name(ctx, mono, coef) if coef != 1 or not mono else ""
        if found and len(mono) == 1 and mono[0] in ctx.loop_axes:
            return level.times(found)
        for atom in mono:
            name = _scalar_atom(ctx, atom)
            found = level.op(f"mul nsw i64 {name}, {found}") if found else name
        return found

    return level.once(("product", mono, coef), make)


def coefficient_name(ctx: Context, mono: tuple[Atom, ...], coef: Size) -> str:
    """A coefficient: 0, 1 and -1 stay in the text, others are the host's to give."""
    return str(coef) if coef in (0, 1, -1) else ctx.param(("of", mono_key(ctx, mono)), coef)


def _scalar_atom(ctx: Context, atom: Atom) -> str:
    if isinstance(atom, Symbol):
        if atom in ctx.axis_name:
            return ctx.axis_name[atom]
        assert isinstance(atom.payload, Value)
        return ctx.scalar(atom.payload)
    rank, _ = ctx.atom_fact(atom)

    def make() -> str:
        a = scalar_size(ctx, atom.a)
        b = str(atom.b) if _has_number(atom) else scalar_size(ctx, atom.b)
        return _call(ctx, rank, atom, a, b, 1)

    return ctx.ranked[rank].once(("call", atom), make)


def _has_number(atom: Call) -> bool:
    """Whether a divisor is a number, which stays in the text."""
    return isinstance(atom.b, int) and atom.op in ("//", "%")


def _call(ctx: Context, rank: int, atom: Call, a: str, b: str, lanes: int) -> str:
    t = ctx.target(rank, lanes)
    kind = vector("i64", lanes)
    if atom.op in ("min", "max"):
        return t.intrinsic(f"s{atom.op}", "i64", a, b)
    if atom.op in ("&", "<<"):
        return t.op(f"{'and' if atom.op == '&' else 'shl'} {kind} {a}, {b}")
    if known_ge(atom.a, 0):
        name = "udiv" if atom.op == "//" else "urem"
        if lanes > 1 and _has_number(atom) and known_lt(atom.a, 1 << 32):
            # no machine multiplies vectors of 64 bits and keeps the upper half, as a division does
            half = vector("i32", lanes)
            a = t.op(f"trunc {kind} {a} to {half}")
            a = t.op(f"{name} {half} {a}, {splat('i32', atom.b, lanes)}")
            return t.op(f"zext {half} {a} to {kind}")
        return t.op(f"{name} {kind} {a}, {b}")
    # divisors are positive: only a negative remainder has to be moved
    rest = t.op(f"srem {kind} {a}, {b}")
    negative = t.op(f"ashr {kind} {rest}, {splat('i64', 63, lanes)}")
    if atom.op == "//":
        quotient = t.op(f"sdiv {kind} {a}, {b}")
        return t.op(f"add {kind} {quotient}, {negative}")
    moved = t.op(f"and {kind} {negative}, {b}")
    return t.op(f"add {kind} {rest}, {moved}")


# ---------------------------------------------------------------------------- vectors


def split_lanes(ctx: Context, terms: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """(terms that differ between lanes, terms that do not)."""
    pairs = [(group, mono_varies(ctx, group[0])) for group in terms]
    return [group for group, varies in pairs if varies], [x for x, varies in pairs if not varies]


def lane_stride(ctx: Context, varying: Sequence[Group]) -> list[Group] | None:
    """The sum by which `varying` grows from lane to lane, or None if it is not constant."""
    stride: list[Group] = []
    for mono, coef in varying:
        rest = tuple(atom for atom in mono if atom != ctx.lane)
        if len(rest) != len(mono) - 1 or mono_varies(ctx, rest):
            return None
        stride.append((rest, coef))
    return stride


def vector_sum(ctx: Context, terms: Sequence[Group], rank: int) -> list[str]:
    """The sum as vectors of i64, for every copy, emitted at `rank`."""
    varying, uniform = split_lanes(ctx, terms)
    stride = lane_stride(ctx, varying)
    if stride is not None:
        return _ramp(ctx, [*varying, *uniform], stride, rank)
    level, kind = ctx.ranked[rank], vector("i64", ctx.lanes)
    start = [ctx.splat(scalar_sum(ctx, uniform), "i64", rank)] if uniform else []
    products = []
    for mono, coef in varying:
        factors = [_vector_atom(ctx, atom, rank) for atom in mono]
        totals = []
        for of_copy in zip(*factors, strict=True):
            total = functools.reduce(lambda x, y: level.op(f"mul {kind} {x}, {y}"), of_copy)
            if coef != 1:
                by = ctx.splat(coefficient_name(ctx, mono, coef), "i64", 0)
                total = level.op(f"mul {kind} {total}, {by}")
            totals.append(total)
        products.append(totals)
    return [
        functools.reduce(lambda x, y: level.op(f"add {kind} {x}, {y}"), (*start, *terms))
        for terms in zip(*products, strict=True)
    ]


def _ramp(ctx: Context, terms: Sequence[Group], stride: Sequence[Group], rank: int) -> list[str]:
    """Start + lane * stride."""
    level, kind = ctx.ranked[rank], vector("i64", ctx.lanes)
    start, step = scalar_sum(ctx, terms), scalar_sum(ctx, stride)
    steps = numbered("i64", range(ctx.lanes))
    if step != "1":
        steps = level.op(f"mul {kind} {steps}, {ctx.splat(step, 'i64', rank)}")
    totals = []
    for copy in range(ctx.copies):
        first = start
        if copy:
            ahead = level.op(f"mul i64 {step}, {copy * ctx.lanes}")
            first = level.op(f"add i64 {start}, {ahead}")
        totals.append(level.op(f"add {kind} {ctx.splat(first, 'i64', rank)}, {steps}"))
    return totals


def _vector_atom(ctx: Context, atom: Atom, rank: int) -> list[str]:
    if not ctx.atom_fact(atom)[1]:
        name = _scalar_atom(ctx, atom)
        return [ctx.splat(name, "i64", rank)] * ctx.copies
    if isinstance(atom, Symbol):
        if atom == ctx.lane:
            return _ramp(ctx, [((atom,), 1)], [((), 1)], rank)
        assert isinstance(atom.payload, Value)
        return ctx.vectors(atom.payload)
    a = vector_sum(ctx, groups(ctx, atom.a), rank)
    if _has_number(atom):
        b = [splat("i64", atom.b, ctx.lanes)] * ctx.copies
    else:
        b = vector_sum(ctx, groups(ctx, atom.b), rank)
    return [_call(ctx, rank, atom, x, y, ctx.lanes) for x, y in zip(a, b, strict=True)]
