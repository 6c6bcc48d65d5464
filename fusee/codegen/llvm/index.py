"""Index expressions as i64 arithmetic, in parts: each part where it last changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fusee.codegen.llvm.context import Context, Group
from fusee.codegen.llvm.types import vector
from fusee.loops.ir import Buffer, Value
from fusee.sym.expr import Atom, Call, Expr, Size, Symbol, known_ge

# ------------------------------------------------------------------------------ taking apart


def changes(ctx: Context, atom: Atom) -> bool:
    """False for sizes, which a call of the kernel does not change."""
    if isinstance(atom, Symbol):
        return atom in ctx.axis_number or atom.payload is not None
    assert isinstance(atom, Call)
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
    return tuple(sorted(_atom_key(ctx, atom) for atom in mono))


def _atom_key(ctx: Context, atom: Atom) -> tuple[Any, ...]:
    if isinstance(atom, Symbol):
        if atom in ctx.axis_number:
            return (0, ctx.axis_number[atom])
        return (1, ctx.payloads.setdefault(id(atom.payload), len(ctx.payloads)))
    assert isinstance(atom, Call)
    sides = (
        tuple(mono_key(ctx, mono) for mono, _ in groups(ctx, side)) for side in (atom.a, atom.b)
    )
    return (2, atom.op, *sides)


def mono_rank(ctx: Context, mono: Iterable[Atom]) -> int:
    return max((ctx.atom_fact(atom)[0] for atom in mono), default=0)


def mono_varies(ctx: Context, mono: Iterable[Atom]) -> bool:
    return any(ctx.atom_fact(atom)[1] for atom in mono)


# ------------------------------------------------------------------------------ scalars


def scalar_size(ctx: Context, size: Size) -> str:
    """An expression that is the same in all lanes, as an i64."""
    return scalar_sum(ctx, groups(ctx, size))


def scalar_sum(ctx: Context, terms: Sequence[Group]) -> str:
    """The sum of terms, each added at the rank where it changes."""
    total, done = "", 0
    ordered = _by_rank(ctx, terms)
    while done < len(ordered):
        rank, end = _same_rank(ordered, done)
        level = ctx.ranked[rank]
        key = ("sum", tuple(group for _, group in ordered[:end]))
        found = level.known.get(key)
        if found is None:
            found = total
            for _, group in ordered[done:end]:
                found = _add(ctx, rank, found, group)
            level.known[key] = found
        assert isinstance(found, str)
        total, done = found, end
    return total or "0"


def pointer(ctx: Context, buffer: Buffer, kind: str, terms: Sequence[Group]) -> str:
    """The address of element sum(terms) of a buffer of `kind`."""
    address, done = ctx.buffer(buffer), 0
    ordered = _by_rank(ctx, terms)
    while done < len(ordered):
        rank, end = _same_rank(ordered, done)
        level = ctx.ranked[rank]
        key = ("pointer", ctx.buffers[buffer], kind, tuple(group for _, group in ordered[:end]))
        found = level.known.get(key)
        if found is None:
            offset = ""
            for _, group in ordered[done:end]:
                offset = _add(ctx, rank, offset, group)
            found = level.op(f"getelementptr {kind}, ptr {address}, i64 {offset}")
            level.known[key] = found
        assert isinstance(found, str)
        address, done = found, end
    return address


def _by_rank(ctx: Context, terms: Sequence[Group]) -> list[tuple[int, Group]]:
    return sorted(((mono_rank(ctx, group[0]), group) for group in terms), key=lambda item: item[0])


def _same_rank(ordered: list[tuple[int, Group]], start: int) -> tuple[int, int]:
    rank, end = ordered[start][0], start
    while end < len(ordered) and ordered[end][0] == rank:
        end += 1
    return rank, end


def _add(ctx: Context, rank: int, total: str, group: Group) -> str:
    """total + group; "" is no total yet."""
    mono, coef = group
    level = ctx.ranked[rank]
    if coef == -1 and mono:
        return level.op(f"sub i64 {total or '0'}, {_product(ctx, rank, mono, 1)}")
    term = _product(ctx, rank, mono, coef)
    return level.op(f"add i64 {total}, {term}") if total else term


def _product(ctx: Context, rank: int, mono: tuple[Atom, ...], coef: Size) -> str:
    level = ctx.ranked[rank]
    key = ("product", mono, coef)
    found = level.known.get(key)
    if found is None:
        found = coefficient_name(ctx, mono, coef) if coef != 1 or not mono else ""
        if found and len(mono) == 1 and mono[0] in ctx.loop_axes:
            found = level.known[key] = level.times(found)
            return found
        for atom in mono:
            name = _scalar_atom(ctx, atom)
            found = level.op(f"mul nsw i64 {name}, {found}") if found else name
        level.known[key] = found
    assert isinstance(found, str)
    return found


def coefficient_name(ctx: Context, mono: tuple[Atom, ...], coef: Size) -> str:
    """A coefficient: 0, 1 and -1 stay in the text, others are the host's to give."""
    if coef in (0, 1, -1):
        return str(coef)
    return ctx.param(("of", mono_key(ctx, mono)), coef)


def _scalar_atom(ctx: Context, atom: Atom) -> str:
    if isinstance(atom, Symbol):
        if atom in ctx.axis_name:
            return ctx.axis_name[atom]
        assert isinstance(atom.payload, Value)
        return ctx.scalar(atom.payload)
    assert isinstance(atom, Call)
    rank, _ = ctx.atom_fact(atom)
    level = ctx.ranked[rank]
    key = ("call", atom)
    found = level.known.get(key)
    if found is None:
        a, b = scalar_size(ctx, atom.a), _second(ctx, atom)
        found = _call(ctx, rank, atom, a, b, 1)
        level.known[key] = found
    assert isinstance(found, str)
    return found


def _second(ctx: Context, atom: Call) -> str:
    """The second operand of a call; divisors that are numbers stay in the text."""
    if isinstance(atom.b, int) and atom.op in ("//", "%"):
        return str(atom.b)
    return scalar_size(ctx, atom.b)


def _call(ctx: Context, rank: int, atom: Call, a: str, b: str, lanes: int) -> str:
    t = ctx.target(rank, lanes)
    kind = vector("i64", lanes)
    if atom.op in ("min", "max"):
        return t.intrinsic(f"s{atom.op}", "i64", a, b)
    if known_ge(atom.a, 0):
        return t.level.op(f"{'udiv' if atom.op == '//' else 'urem'} {kind} {a}, {b}")
    # divisors are positive: only a negative remainder has to be moved
    rest = t.level.op(f"srem {kind} {a}, {b}")
    negative = t.level.op(f"ashr {kind} {rest}, {_word(63, lanes)}")
    if atom.op == "//":
        quotient = t.level.op(f"sdiv {kind} {a}, {b}")
        return t.level.op(f"add {kind} {quotient}, {negative}")
    moved = t.level.op(f"and {kind} {negative}, {b}")
    return t.level.op(f"add {kind} {rest}, {moved}")


def _word(value: int, lanes: int) -> str:
    return str(value) if lanes == 1 else f"splat (i64 {value})"


# ------------------------------------------------------------------------------ vectors


def split_lanes(ctx: Context, size: Size) -> tuple[list[Group], list[Group]]:
    """(terms that differ between lanes, terms that do not)."""
    varying: list[Group] = []
    uniform: list[Group] = []
    for group in groups(ctx, size):
        (varying if mono_varies(ctx, group[0]) else uniform).append(group)
    return varying, uniform


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
    uniform = [group for group in terms if not mono_varies(ctx, group[0])]
    varying = [group for group in terms if mono_varies(ctx, group[0])]
    stride = lane_stride(ctx, varying)
    if stride is not None:
        return _ramp(ctx, [*varying, *uniform], stride, rank)
    level, kind = ctx.ranked[rank], vector("i64", ctx.lanes)
    totals: list[str] = []
    for copy in range(ctx.copies):
        total = ""
        if uniform:
            total = ctx.splat(scalar_sum(ctx, uniform), "i64", rank)
        for group in varying:
            term = _vector_product(ctx, group, rank)[copy]
            total = level.op(f"add {kind} {total}, {term}") if total else term
        totals.append(total)
    return totals


def _ramp(ctx: Context, terms: Sequence[Group], stride: Sequence[Group], rank: int) -> list[str]:
    """Start + lane * stride."""
    level, kind = ctx.ranked[rank], vector("i64", ctx.lanes)
    start, step = scalar_sum(ctx, terms), scalar_sum(ctx, stride)
    numbers = ", ".join(f"i64 {lane}" for lane in range(ctx.lanes))
    steps = f"<{numbers}>"
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


def _vector_product(ctx: Context, group: Group, rank: int) -> list[str]:
    mono, coef = group
    level, kind = ctx.ranked[rank], vector("i64", ctx.lanes)
    factors = [_vector_atom(ctx, atom, rank) for atom in mono]
    totals = []
    for copy in range(ctx.copies):
        total = factors[0][copy]
        for factor in factors[1:]:
            total = level.op(f"mul {kind} {total}, {factor[copy]}")
        if coef != 1:
            by = ctx.splat(coefficient_name(ctx, mono, coef), "i64", 0)
            total = level.op(f"mul {kind} {total}, {by}")
        totals.append(total)
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
    assert isinstance(atom, Call)
    a = vector_sum(ctx, groups(ctx, atom.a), rank)
    if isinstance(atom.b, int) and atom.op in ("//", "%"):
        b = [_word(atom.b, ctx.lanes)] * ctx.copies
    else:
        b = vector_sum(ctx, groups(ctx, atom.b), rank)
    return [_call(ctx, rank, atom, x, y, ctx.lanes) for x, y in zip(a, b, strict=True)]
