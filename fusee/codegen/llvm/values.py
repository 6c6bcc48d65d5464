"""Values of the loop IR as instructions, each at the rank where it last changes."""

from __future__ import annotations

import torch

from fusee.codegen.llvm.access import load_scalar, load_vector
from fusee.codegen.llvm.context import Context
from fusee.codegen.llvm.index import (
    groups,
    scalar_size,
    scalar_sum,
    split_lanes,
    vector_sum,
)
from fusee.codegen.llvm.ops import Target, emit, emit_bitcast, emit_cast
from fusee.codegen.llvm.tile import load_square
from fusee.codegen.llvm.types import HELD, literal, mangled, number, vector
from fusee.loops.ir import Value


def emit_value(ctx: Context, value: Value) -> None:
    """Write the value's instructions unless its level has them already. Operands come first."""
    rank, varies = ctx.facts[id(value)]
    known = ctx.ranked[rank].known
    if id(value) in known:
        return
    if not varies:
        known[id(value)] = _scalar(ctx, value, rank)
    elif value.op == "load":
        load = load_vector if ctx.copy_axis is None else load_square
        known[id(value)] = load(ctx, value)
    elif value.op == "index":
        known[id(value)] = vector_sum(ctx, groups(ctx, value.attr), rank)
    else:
        known[id(value)] = _vectors(ctx, value, rank)


def _scalar(ctx: Context, value: Value, rank: int) -> str:
    if value.op == "const":
        return number(value.attr, value.dtype)
    if value.op == "acc":
        found = ctx.acc_names[value.attr]
        assert isinstance(found, str)
        return found
    if value.op == "load":
        return load_scalar(ctx, value)
    if value.op == "index":
        return scalar_size(ctx, value.attr)
    args = [ctx.scalar(arg) for arg in value.args]
    return _apply(ctx, ctx.target(rank, 1), value, args)


def _vectors(ctx: Context, value: Value, rank: int) -> list[str]:
    if value.op == "acc":
        found = ctx.acc_names[value.attr]
        assert isinstance(found, list)
        return found
    t = ctx.target(rank, ctx.lanes)
    if value.op in FLIPPED and value.args[0].dtype is torch.int64:
        test = _position_test(ctx, t, value)
        if test is not None:
            return test
    columns = [ctx.vectors(arg) for arg in value.args]
    return [_apply(ctx, t, value, list(args)) for args in zip(*columns, strict=True)]


# Comparisons, and what they are with the operands exchanged.
FLIPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
_FAR = 1 << 20  # further away than any lane


def _position_test(ctx: Context, t: Target, value: Value) -> list[str] | None:
    """`start + lane < bound` as a test of 32-bit lane numbers against `bound - start`; or None.

    Masks of padding are such tests, and vectors of 64-bit numbers are dear.
    """
    op, (position, bound) = value.op, value.args
    if ctx.facts[id(bound)][1]:
        op, position, bound = FLIPPED[op], bound, position
    if position.op != "index" or ctx.facts[id(bound)][1] or ctx.copy_axis is not None:
        return None
    varying, uniform = split_lanes(ctx, position.attr)
    if [mono for mono, _ in varying] != [(ctx.lane,)] or varying[0][1] != 1:
        return None
    start, limit = scalar_sum(ctx, [*varying, *uniform]), ctx.scalar(bound)
    level, scalar = t.level, Target(t.level, ctx.machine, 1)
    kind, numbers = vector("i32", ctx.lanes), ", ".join(f"i32 {k}" for k in range(ctx.lanes))
    op = {"eq": "eq", "ne": "ne"}.get(op, "s" + op)
    found = []
    for copy in range(ctx.copies):
        left = level.op(f"sub i64 {limit}, {start}")
        if copy:
            left = level.op(f"sub i64 {left}, {copy * ctx.lanes}")
        left = scalar.intrinsic("smin", "i64", left, str(_FAR))
        left = scalar.intrinsic("smax", "i64", left, str(-_FAR))
        left = ctx.splat(level.op(f"trunc i64 {left} to i32"), "i32", ctx.facts[id(value)][0])
        found.append(level.op(f"icmp {op} {kind} <{numbers}>, {left}"))
    return found


def _apply(ctx: Context, t: Target, value: Value, args: list[str]) -> str:
    if value.op == "where":
        return t.select(args[0], HELD[value.dtype], args[1], args[2])
    source = value.args[0].dtype
    if value.op == "cast":
        return emit_cast(t, source, value.dtype, args[0])
    if value.op == "bitcast":
        return emit_bitcast(t, source, value.dtype, args[0])
    if value.op == "check":
        return _check(ctx, t, value, args[0])
    return emit(t, value.op, source, args)


def _check(ctx: Context, t: Target, value: Value, x: str) -> str:
    """x in [0, size), wrapped into it if asked; outside, the status is set and 0 taken."""
    size, message, wraps = value.attr
    kind, op = t.kind(torch.int64), t.level.op
    bound = scalar_size(ctx, size) if not isinstance(size, int) else ctx.param("check", size)
    if t.lanes > 1:
        bound = ctx.splat(bound, "i64", 0)
    zero = literal(0, torch.int64, t.lanes)
    index = x
    if wraps:
        negative = op(f"icmp slt {kind} {x}, {zero}")
        index = t.select(negative, "i64", op(f"add {kind} {x}, {bound}"), x)
    outside = op(f"icmp uge {kind} {index}, {bound}")
    report, refused = outside, x
    if t.lanes > 1:
        mask = vector("i1", t.lanes)
        if ctx.mask is not None:
            report = op(f"and {mask} {outside}, {ctx.mask}")
        refused = t.select(report, "i64", x, zero)
        name = f"llvm.vector.reduce.umax.{mangled('i64', t.lanes)}"
        refused = t.level.call("i64", name, (kind, refused))
        name = f"llvm.vector.reduce.or.{mangled('i1', t.lanes)}"
        report = t.level.call("i1", name, (mask, report))
    status, spare = ctx.status(), ctx.spare()
    # the index before the code, which says that there is one
    place = op(f"select i1 {report}, ptr %found, ptr {spare}")
    t.level.do(f"store i64 {refused}, ptr {place}, align 8")
    place = op(f"select i1 {report}, ptr {status}, ptr {spare}")
    code = ctx.param("message", message + 1)  # no part of the text, which many calls share
    t.level.do(f"store i64 {code}, ptr {place}, align 8")
    return t.select(outside, "i64", zero, index)
