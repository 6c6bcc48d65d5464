"""Loop nests: lanes, tails, strides, reductions, scans, masks, scatters, against torch."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from fusee.codegen.llvm import _Emitter, emit_kernel
from fusee.codegen.llvm.lanes import Stage, choose_stages, choose_vectors
from fusee.loops import (
    REDUCTIONS,
    Acc,
    Accumulate,
    Buffer,
    Kernel,
    Phase,
    Statement,
    Store,
    Value,
    Values,
    cast,
    check,
    op,
    walk,
    where,
)
from fusee.runtime import jit
from fusee.runtime.llvm_text import Machine
from fusee.sym import Size, Symbol
from tests.codegen.kernel_run import axes, buffer, layouts, machine, number, run

F32 = torch.float32
MACHINES = pytest.mark.parametrize("on", layouts(), ids=lambda m: str(m.bits))
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 100, 1023, 1025, 3000]


def same(got: torch.Tensor, want: torch.Tensor, rtol: float = 0, atol: float = 0) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, equal_nan=True, rtol=rtol, atol=atol)


def at(buffer: Buffer, *where: Symbol | Size) -> Size:
    return buffer.index([w.expr if isinstance(w, Symbol) else w for w in where])


# ------------------------------------------------------------------------------ plain loops


@MACHINES
@pytest.mark.parametrize(
    "dtype", [F32, torch.float64, torch.bfloat16, torch.int8, torch.bool], ids=str
)
def test_one_axis(dtype: torch.dtype, on: Machine) -> None:
    for n in SIZES:
        x = torch.randn(n).mul(10).to(dtype)
        out = torch.zeros(n + 5, dtype=dtype)
        values, bx, bo = Values(), buffer("x", x), buffer("o", out, "result")
        (i,) = axes("i", [n])
        store = Store(bo, i.expr, values.load(bx, i.expr))
        run(Kernel((i,), [Phase((), [store])], lanes=i), {bx: x, bo: out}, on=on, parts=3)
        same(out, torch.cat([x, torch.zeros(5, dtype=dtype)]))


@MACHINES
@pytest.mark.parametrize("lanes", [True, False])
def test_axes_strides_and_broadcast(lanes: bool, on: Machine) -> None:
    for a, b, c in [(2, 3, 5), (1, 4, 33), (3, 1, 8), (5, 7, 100), (0, 3, 4), (2, 0, 3)]:
        x = torch.randn(c, a, b).permute(1, 2, 0)  # strided along the lanes
        y = torch.randn(b, 1).expand(b, c)
        z = torch.randn(c)
        w = torch.randn(a, 1, 1).expand(a, b, c)
        out = torch.empty(a, b, c)
        values = Values()
        i, j, k = axes("i j k", [a, b, c])
        buffers = [buffer(name, t) for name, t in zip("xyzwo", (x, y, z, w, out), strict=True)]
        bx, by, bz, bw, bo = buffers
        total = op("add", values.load(bx, at(bx, i, j, k)), values.load(by, at(by, j, k)))
        total = op("add", total, values.load(bz, at(bz, k)))
        total = op("mul", total, values.load(bw, at(bw, i, j, k)))
        store = Store(bo, at(bo, i, j, k), total)
        if lanes:
            kernel = Kernel((i, j, k), [Phase((), [store])], lanes=k)
        else:
            kernel = Kernel((i,), [Phase((j, k), [store])])
        tensors = dict(zip(buffers, (x, y, z, w, out), strict=True))
        run(kernel, tensors, on=on, parts=4)
        same(out, (x + y + z) * w)


@MACHINES
@pytest.mark.parametrize("dtype", [F32, torch.int16, torch.int64], ids=str)
def test_reversed_and_strided(dtype: torch.dtype, on: Machine) -> None:
    for n in SIZES:
        x = torch.arange(2 * n + 1).to(dtype)
        back, spread = torch.zeros(n, dtype=dtype), torch.zeros(3 * n + 1, dtype=dtype)
        values = Values()
        bx, bb, bs = buffer("x", x), buffer("b", back), buffer("s", spread)
        (i,) = axes("i", [n])
        body: list[Statement] = [
            Store(bb, n - 1 - i.expr, values.load(bx, 2 * i.expr + 1)),
            Store(bs, 3 * i.expr, values.load(bx, n - 1 - i.expr)),
        ]
        kernel = Kernel((i,), [Phase((), body)], lanes=i)
        run(kernel, {bx: x, bb: back, bs: spread}, on=on, parts=2)
        same(back, x[1 : 2 * n : 2].flip(0))
        want = torch.zeros_like(spread)
        want[: 3 * n : 3] = x[:n].flip(0)
        same(spread, want)


@MACHINES
def test_index_as_number_and_division(on: Machine) -> None:
    for n in (1, 8, 45, 130):
        x = torch.randn(200)
        out, places = torch.empty(n), torch.empty(n, dtype=torch.int64)
        values, bx, bo, bp = Values(), buffer("x", x), buffer("o", out), buffer("p", places)
        (i,) = axes("i", [n])
        odd = i.expr // 3 * 5 + (i.expr + 1) % 7
        below = (i.expr - 5) // 4 + 3 + (i.expr - 9) % 5
        body: list[Statement] = [
            Store(bo, i.expr, values.load(bx, odd % 200)),
            Store(bp, i.expr, values.index(2 * i.expr + 3 + below)),
        ]
        kernel = Kernel((i,), [Phase((), body)], lanes=i)
        text = run(kernel, {bx: x, bo: out, bp: places}, on=on).code.text
        assert not re.search(r"u(div|rem) <\d+ x i64>", text), "halves do, and multiply as vectors"
        t = torch.arange(n)
        same(out, x[(t // 3 * 5 + (t + 1) % 7) % 200])
        same(places, 2 * t + 3 + (t - 5) // 4 + 3 + (t - 9) % 5)


@MACHINES
def test_comparisons_of_positions(on: Machine) -> None:
    n, rows = 70, 3
    i, j = axes("i j", [rows, n])
    for name, shift in itertools.product(("lt", "le", "gt", "ge", "eq", "ne"), (-(10**12), 0, 35)):
        out = torch.empty(rows, n, dtype=torch.bool)
        values, bo = Values(), buffer("o", out)
        here = values.index(j.expr + 20 * i.expr + shift)
        there = values.index(40 * i.expr + 17)
        test = op(name, here, there)
        if shift:
            test = op("and", test, op(name, there, here))
        kernel = Kernel((i, j), [Phase((), [Store(bo, at(bo, i, j), test)])], lanes=j)
        run(kernel, {bo: out}, on=on)
        row, column = torch.arange(rows)[:, None], torch.arange(n)
        compare = getattr(torch, name)
        a, b = column + 20 * row + shift, (40 * row + 17).expand(rows, n)
        same(out, compare(a, b) & compare(b, a) if shift else compare(a, b))


@MACHINES
@pytest.mark.parametrize("dtype", [F32, torch.uint8, torch.float64], ids=str)
def test_masked_loads_pad(dtype: torch.dtype, on: Machine) -> None:
    for rows, n, left, right in [(3, 5, 2, 1), (2, 40, 3, 9), (1, 1, 10, 10), (2, 0, 4, 3)]:
        x = torch.randn(rows, n).mul(20).abs().to(dtype)
        wide = left + n + right
        out = torch.empty(rows + 2, wide, dtype=dtype)
        values, bx, bo = Values(), buffer("x", x), buffer("o", out)
        i, j = axes("i j", [rows + 2, wide])
        row, column = values.index(i.expr - 1), values.index(j.expr - left)
        inside = values.const(True, torch.bool)
        for value, size in ((row, rows), (column, n)):
            for compare, bound in (("ge", 0), ("lt", size)):
                test = op(compare, value, values.const(bound, torch.int64))
                inside = op("and", inside, test)
        fill = values.const(7, dtype)
        both = values.load(bx, at(bx, i.expr - 1, j.expr - left), inside, fill)
        first, last = (values.const(bound, torch.int64) for bound in (0, rows))
        by_row = op("and", op("ge", row, first), op("lt", row, last))
        want = torch.full((rows + 2, wide), 7, dtype=dtype)
        want[1:-1, left : left + n] = x
        store = Store(bo, at(bo, i, j), both)
        run(Kernel((i, j), [Phase((), [store])], lanes=j), {bx: x, bo: out}, on=on, parts=2)
        same(out, want)
        run(Kernel((i,), [Phase((j,), [store])]), {bx: x, bo: out.zero_()}, on=on)
        same(out, want)
        if n:
            (k,) = axes("k", [n])
            backward = values.load(bx, at(bx, i.expr - 1, n - 1 - k.expr), by_row, fill)
            mirrored = torch.empty(rows + 2, n, dtype=dtype)
            bm = buffer("m", mirrored)
            store = Store(bm, at(bm, i, k), backward)
            run(Kernel((i, k), [Phase((), [store])], lanes=k), {bx: x, bm: mirrored}, on=on)
            want = torch.full_like(mirrored, 7)
            want[1:-1] = x.flip(1)
            same(mirrored, want)


@pytest.mark.parametrize("far", [0, 1 << 19, 1 << 20, 1 << 33])
def test_only_places_that_are_far_away_are_limited(far: int) -> None:
    """Before they are told apart in 32 bits."""
    n, values = 50, Values()
    for bound in (20, far + 20):
        out = torch.empty(n, dtype=torch.bool)
        (i,), bo = axes("i", [n]), buffer("o", out)
        test = op("lt", values.index(i.expr + far), values.const(bound, torch.int64))
        kernel = Kernel((i,), [Phase((), [Store(bo, i.expr, test)])], lanes=i)
        code = run(kernel, {bo: out}).code
        same(out, torch.arange(n) + far < bound)
        assert (str(1 << 20) in code.text) == (far >= 1 << 20)


def test_loads_are_whole_where_nothing_is_fetched_ahead_of_masked_ones() -> None:
    """Beyond rows, beyond columns, of what a condition picks, at the end of short rows; each at the
    ends of memory, too."""
    rows, n, pad = 5, 50, 3
    x, y = torch.randn(rows, n), torch.randn(rows, n)
    values, bx, by = Values(), buffer("x", x), buffer("y", y)
    i, j, k, m = axes("i j k m", [rows + 2 * pad, n + 2 * pad, n, rows])
    zero, seven = values.const(0, torch.int64), values.const(7, F32)

    def inside(axis: Symbol, size: int) -> Value:
        place = values.index(axis.expr - pad)
        return op("and", op("ge", place, zero), op("lt", place, values.const(size, torch.int64)))

    down = values.load(bx, at(bx, i.expr - pad, k), inside(i, rows), seven)
    along = values.load(bx, at(bx, m, j.expr - pad), inside(j, n), seven)
    condition = op("gt", values.load(bx, at(bx, m, k)), values.const(0, F32))
    chosen = where(condition, values.load(by, at(by, m, k)), seven)
    wide = torch.full((rows + 2 * pad, n + 2 * pad), 7.0)
    wide[pad:-pad, pad:-pad] = x
    features = jit.host_target().features | {"avx512f", "avx512bw"}
    amd, intel = Machine(features | {"sse4a"}, 512), Machine(features - {"sse4a"}, 512)
    for value, outer, lane, want, line, is_amds in (
        (down, i, k, wide[:, pad:-pad], "select <16 x i1>", False),
        (along, m, j, wide[pad:-pad], "phi <16 x float>", True),
        (chosen, m, k, torch.where(x > 0, y, torch.tensor(7.0)), "llvm.arithmetic.fence", True),
        (values.load(bx, at(bx, m, k)), m, k, x, "phi <16 x float>", True),
    ):
        out = torch.empty(want.shape)
        bo = buffer("o", out)
        store = Store(bo, at(bo, outer, lane), value)
        kernel = Kernel((outer, lane), [Phase((), [store])], lanes=lane)
        for on in (amd, intel):
            assert (line in emit_kernel(kernel, on).module) == (is_amds and on is amd)
            if on.is_x86:
                run(kernel, {bx: x, by: y, bo: out.zero_()}, on=on, parts=2)
                same(out, want)


@pytest.mark.parametrize(("kind", "length", "lines"), [("long", 100, 7), ("int", 1000, 8)])
def test_rows_that_are_picked_are_fetched_ahead(kind: str, length: int, lines: int) -> None:
    """Where the row lies that is picked eight rounds later, however few rounds are left."""
    table = torch.randn(11, length)
    for rows, columns in ((1, 3), (3, 7), (5, 40)):
        chosen = torch.randint(0, 11, (columns, rows), dtype=getattr(torch, kind))
        out = torch.zeros(rows, columns, length)
        values, bt, bc, bo = Values(), buffer("t", table), buffer("c", chosen), buffer("o", out)
        i, j, k = axes("i j k", [rows, columns, length])
        row = values.indirect(check(cast(values.load(bc, at(bc, j, i)), torch.int64), 11, 0), 11)
        store = Store(bo, at(bo, i, j, k), values.load(bt, at(bt, row, k)))
        kernel = Kernel((i, j, k), [Phase((), [store])], lanes=k)
        code = run(kernel, {bt: table, bc: chosen, bo: out}, parts=2).code
        same(out, table[chosen.t().long()])
        first, *more = re.findall(r"llvm.prefetch.p0\(ptr (%v\d+)", code.text)
        assert len(more) == lines - 1
        (start,) = re.findall(rf"{first} = getelementptr i8, ptr (%v\d+), i64 0", code.text)
        # from where the table begins, not from the row that is picked now
        assert re.search(rf"{start} = getelementptr float, ptr %b\d+, i64", code.text)


@MACHINES
@pytest.mark.parametrize("dtype", [F32, torch.int8, torch.float64], ids=str)
def test_gather_and_check(dtype: torch.dtype, on: Machine) -> None:
    table = torch.randn(11, 37).mul(30).to(dtype)
    for n, m in [(4, 37), (9, 5), (1, 1), (30, 20)]:
        rows = torch.randint(-11, 11, (n,))
        columns = torch.randint(0, 37, (m,))
        out = torch.empty(n, m, dtype=dtype)
        values = Values()
        every = zip("trco", (table, rows, columns, out), strict=True)
        bt, br, bc, bo = (buffer(s, t) for s, t in every)
        i, j = axes("i j", [n, m])
        row = values.indirect(check(values.load(br, i.expr), 11, 4), 11)
        column = values.indirect(check(values.load(bc, j.expr), 37, 5), 37)
        whole = Store(bo, at(bo, i, j), values.load(bt, at(bt, row, column)))
        tensors = {bt: table, br: rows, bc: columns, bo: out}
        kernel = Kernel((i, j), [Phase((), [whole])], lanes=j)
        done = run(kernel, tensors, on=on, parts=2)
        assert done.status == (0, 0)
        same(out, table[rows][:, columns])
        columns[m // 2] = 37
        assert run(kernel, tensors, on=on).status == (6, 37)
        columns[m // 2] = 0
        rows[0] = -12
        assert run(kernel, tensors, on=on).status == (5, -12)


@MACHINES
@pytest.mark.parametrize(
    "dtype", [F32, torch.float64, torch.bfloat16, torch.int8, torch.bool], ids=str
)
def test_transposes_by_tiles(dtype: torch.dtype, on: Machine) -> None:
    sizes = [(1, 16, 8), (2, 33, 40), (1, 15, 300), (3, 64, 7), (1, 40, 3), (2, 2, 33)]
    for a, b, c in [*sizes, (1, 100, 257), (1, 0, 4), (2, 24, 21), (1, 47, 65)]:
        x = torch.randn(a, c, b).mul(9).to(dtype)  # contiguous along j
        y = torch.randn(a, b, c).mul(9).to(dtype)
        row, column = torch.randn(b).to(dtype), torch.randn(c).to(dtype)
        out, other = torch.empty(a, b, c, dtype=dtype), torch.empty(a, c, b, dtype=dtype)
        i, j, k = axes("i j k", [a, b, c])
        values = Values()
        tensors = dict(zip("xyrcop", (x, y, row, column, out, other), strict=True))
        buffers = {name: buffer(name, t) for name, t in tensors.items()}
        places = {"x": (i, k, j), "y": (i, j, k), "r": (j,), "c": (k,)}
        loads = [values.load(buffers[name], at(buffers[name], *w)) for name, w in places.items()]
        total = loads[0]
        for load in loads[1:]:
            if dtype is torch.int8:
                total = op("add", total, load)
            elif dtype is torch.bool:
                total = op("xor", total, load)
            else:
                wide = [cast(v, F32) if dtype is torch.bfloat16 else v for v in (total, load)]
                total = cast(op("add", *wide), dtype)
        body: list[Statement] = [
            Store(buffers["o"], at(buffers["o"], i, j, k), total),
            Store(buffers["p"], at(buffers["p"], i, k, j), total),
        ]
        kernel = Kernel((i, j, k), [Phase((), body)], lanes=k)
        run(kernel, {buffers[name]: t for name, t in tensors.items()}, on=on, parts=3)
        want = x.transpose(1, 2)
        for t in (y, row[:, None], column):
            want = want ^ t if dtype is torch.bool else want + t
        same(out, want)
        same(other, want.transpose(1, 2).contiguous())


def test_tiles_are_for_accesses_that_disagree() -> None:
    """Rows of 45 bytes, read and stored along themselves, are one masked vector each."""
    for n, is_tiled in ((45, False), (4, True)):
        x, out = torch.zeros(3, 40, 64, dtype=torch.uint8), torch.zeros(3, 40, n, dtype=torch.uint8)
        i, j, k = axes("i j k", [3, 40, n])
        bx, bo = buffer("x", x), buffer("o", out, "result")
        value = Values().load(bx, at(bx, i, j, k))
        kernel = Kernel((i, j, k), [Phase((), [Store(bo, at(bo, i, j, k), value)])], lanes=k)
        tile = choose_vectors(kernel, [walk([value])], k, machine())[2]
        assert (tile is not None and tile.turns) == is_tiled


@pytest.mark.parametrize(("n", "is_row"), [(64, True), (128, True), (129, False)])
def test_rows_of_a_few_vectors_are_a_loop_of_their_own(n: int, is_row: bool) -> None:
    """Counting three coordinates on took longer than rows of 64 channels."""
    x, y, out = torch.randn(4, 30, n), torch.randn(n), torch.zeros(4, 30, n + 1)
    i, j, k = axes("i j k", [4, 30, n])
    values, (bx, by, bo) = Values(), (buffer(s, t) for s, t in zip("xyo", (x, y, out), strict=True))
    value = op("mul", values.load(bx, at(bx, i, j, k)), values.load(by, at(by, k)))
    kernel = Kernel((i, j, k), [Phase((), [Store(bo, at(bo, i, j, k), value)])], lanes=k)
    wide = Machine(machine().features | {"avx512f", "avx512bw"}, 512)
    tile = choose_vectors(kernel, [walk([value])], k, wide)[2]
    assert (tile is not None and not tile.turns and tile.axis is j) == is_row
    run(kernel, {bx: x, by: y, bo: out}, parts=3)
    same(out[..., :n], x * y)


@pytest.mark.parametrize(("apart", "rows"), [(4, 3), (1, 13)])
def test_code_of_tiles_is_short(apart: int, rows: int) -> None:
    lengths = []
    for n in (300, 1444):
        x, out = torch.randn(2, rows, n), torch.zeros(2, n, rows * apart)
        i, j, k = axes("i j k", [2, n, rows])
        values, bx, bo = Values(), buffer("x", x), buffer("o", out, "result")
        store = Store(bo, at(bo, i, j, k), values.load(bx, at(bx, i, k, j)))
        kernel = Kernel((i, j, k), [Phase((), [store])], lanes=k)
        run(kernel, {bx: x, bo: out}, parts=3)
        same(out[..., :rows], x.transpose(1, 2))
        lengths.append(emit_kernel(kernel, machine()).module.count("\n"))
    assert lengths[0] == lengths[1] < 300


@MACHINES
@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("turns", [False, True])
def test_short_rows(turns: bool, dtype: torch.dtype, on: Machine) -> None:
    """Rows of 2 to 9, copied as rows, or from columns: to places of their own, in either layout."""
    for n, rows in itertools.product((2, 3, 4, 8, 9), (3, 16, 70)):
        x = torch.randn(3, n, rows) if turns else torch.randn(3, rows, n)
        x = x.mul(9).to(dtype)
        around = torch.full((3, rows, n + 5), 7).to(dtype)
        out, back = around[..., 2 : n + 2], torch.empty(3, n, rows).to(dtype)
        i, j, k = axes("i j k", [3, rows, n])
        bx, bo, bb = (buffer(s, t) for s, t in zip("xob", (x, out, back), strict=True))
        value = Values().load(bx, at(bx, i, k, j) if turns else at(bx, i, j, k))
        kernel = Kernel((i, j, k), [Phase((), [Store(bo, at(bo, i, j, k), value)])], lanes=k)
        run(kernel, {bx: x, bo: out}, on=on, parts=3)
        want = x.transpose(1, 2) if turns else x
        same(out, want)
        assert bool((around[..., :2] == 7).all()) and bool((around[..., n + 2 :] == 7).all())
        # the other way round: pieces of rows are loaded
        of = Values().load(bo, at(bo, i, j, k))
        other = Kernel((i, k, j), [Phase((), [Store(bb, at(bb, i, k, j), of)])], lanes=j)
        run(other, {bo: out, bb: back}, on=on, parts=3)
        same(back, want.transpose(1, 2))


# ------------------------------------------------------------------------------ reductions


@pytest.mark.parametrize(
    ("size", "first"),
    [(7, Stage(1, 8)), (8, Stage(1, 8)), (17, Stage(1, 16)), (40, Stage(2, 16)), (56, Stage(1, 16)),
     (64, Stage(4, 16)), (1000, Stage(4, 16))],
)  # fmt: skip
def test_vectors_at_once_are_no_more_than_short_rows_have(size: int, first: Stage) -> None:
    i, j = axes("i j", [30, size])
    values, b = Values(), Buffer("x", F32, (30, size), (size, 1), "input")
    value = values.load(b, at(b, i, j))
    phase = Phase((j,), [Accumulate(Acc("s", "sum", F32), value)])
    on = Machine(frozenset({"avx512f", "avx512bw"}), 512)
    assert choose_stages([phase], [walk([value])], j, 16, on)[0] == first


def reduction(name: str, dtype: torch.dtype, values: Values, x: Value, where: Size) -> Accumulate:
    arg = name in ("argmax", "argmin")
    acc = Acc("a", name, torch.int64 if arg else dtype)
    return Accumulate(acc, x, values.index(where) if arg else None)


def expected(name: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    if x.shape[dim] == 0:
        shape = x.sum(dim).shape
        info = torch.finfo if x.dtype.is_floating_point else torch.iinfo
        lowest = {"max": True, "min": False}
        if name in lowest:
            if x.dtype is torch.bool:
                return torch.full(shape, not lowest[name])
            edge = info(x.dtype).min if lowest[name] else info(x.dtype).max
            if x.dtype.is_floating_point:
                edge = float("-inf") if lowest[name] else float("inf")
            return torch.full(shape, edge, dtype=x.dtype)
        if name in ("argmax", "argmin", "xor"):
            return torch.zeros(shape, dtype=torch.int64 if name != "xor" else x.dtype)
    if name == "xor":
        total = torch.zeros(x.sum(dim).shape, dtype=x.dtype)
        for k in range(x.shape[dim]):
            total = total ^ x.select(dim, k)
        return total
    functions = {
        "sum": lambda: x.sum(dim, dtype=x.dtype),
        "prod": lambda: x.prod(dim, dtype=x.dtype),
        "max": lambda: x.amax(dim),
        "min": lambda: x.amin(dim),
        "any": lambda: x.any(dim),
        "all": lambda: x.all(dim),
        "argmax": lambda: x.argmax(dim),
        "argmin": lambda: x.argmin(dim),
    }
    return functions[name]()


def fitting(name: str) -> list[torch.dtype]:
    if name in ("any", "all"):
        return [torch.bool]
    if name == "xor":
        return [torch.int32, torch.int64, torch.bool]
    return [F32, torch.float64, torch.int64, torch.int32, torch.uint8]


@MACHINES
@pytest.mark.parametrize("name", list(REDUCTIONS))
@pytest.mark.parametrize("inner", [True, False], ids=["along", "across"])
def test_reductions(name: str, inner: bool, on: Machine) -> None:
    for dtype, (rows, n) in itertools.product(
        fitting(name), [(3, 0), (1, 1), (40, 3), (3, 40), (5, 9), (37, 17), (2, 301)]
    ):
        x = (torch.randn(rows, n) * 3).to(dtype)
        if dtype is torch.bool:
            x = torch.randint(0, 20, (rows, n)) == 0
            x = ~x if name == "all" else x
        x = x if inner else x.t().contiguous().t()
        values, bx = Values(), buffer("x", x)
        i, j = axes("i j", [rows, n])
        statement = reduction(name, dtype, values, values.load(bx, at(bx, i, j)), j.expr)
        out = torch.empty(rows, dtype=statement.acc.dtype)
        bo = buffer("o", out)
        store = Store(bo, i.expr, values.acc(statement.acc))
        kernel = Kernel(
            (i,), [Phase((j,), [statement]), Phase((), [store])], lanes=None if inner else i
        )
        run(kernel, {bx: x, bo: out}, on=on, parts=2)
        floating = dtype.is_floating_point and name in ("sum", "prod")
        same(out, expected(name, x, 1), **({"rtol": 1e-5, "atol": 1e-5} if floating else {}))


@MACHINES
@pytest.mark.parametrize("inner", [True, False], ids=["along", "across"])
def test_nan_and_ties_in_reductions(inner: bool, on: Machine) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.randint(-3, 3, (40, 75)).float()
    for row in range(30):
        x[row, row * 2] = nan
        x[row, 74 - row] = nan
    x[31] = -inf
    x[32] = inf
    x[33, :10], x[33, 5] = inf, -inf
    x = x if inner else x.t().contiguous().t()
    for name in ("max", "min", "argmax", "argmin", "sum"):
        values, bx = Values(), buffer("x", x)
        i, j = axes("i j", list(x.shape))
        statement = reduction(name, F32, values, values.load(bx, at(bx, i, j)), j.expr)
        out = torch.empty(40, dtype=statement.acc.dtype)
        bo = buffer("o", out)
        store = Store(bo, i.expr, values.acc(statement.acc))
        kernel = Kernel(
            (i,), [Phase((j,), [statement]), Phase((), [store])], lanes=None if inner else i
        )
        run(kernel, {bx: x, bo: out}, on=on)
        same(out, expected(name, x, 1))


@MACHINES
@pytest.mark.parametrize("inner", [True, False], ids=["along", "across"])
def test_reduce_over_several_axes_and_everything(inner: bool, on: Machine) -> None:
    for a, b, c in [(3, 4, 5), (2, 33, 17), (40, 7, 9), (1, 2, 300), (20, 0, 3)]:
        x = torch.randn(b, a, c)
        values, bx = Values(), buffer("x", x)
        i, j, k = axes("i j k", [a, b, c])
        load = values.load(bx, at(bx, j, i, k))
        total, most = Acc("t", "sum", F32), Acc("m", "max", F32)
        out, top = torch.empty(a), torch.empty(a)
        bo, bt = buffer("o", out), buffer("t", top)
        phases = [
            Phase((j, k), [Accumulate(total, load), Accumulate(most, load)]),
            Phase((), [Store(bo, i.expr, values.acc(total)), Store(bt, i.expr, values.acc(most))]),
        ]
        run(Kernel((i,), phases, lanes=None if inner else i), {bx: x, bo: out, bt: top}, on=on)
        same(out, x.sum((0, 2)), rtol=1e-5, atol=1e-5)
        same(top, x.amax((0, 2)) if b else torch.full((a,), float("-inf")))
        whole = torch.empty(())
        bw = buffer("w", whole)
        store = Store(bw, 0, values.acc(total))
        kernel = Kernel((), [Phase((j, i, k), [Accumulate(total, load)]), Phase((), [store])])
        run(kernel, {bx: x, bw: whole}, on=on)
        same(whole, x.sum(), rtol=1e-4, atol=1e-4)


@MACHINES
def test_row_kernel_stores_and_reads_back(on: Machine) -> None:
    """Softmax whose exponentials are stored by one phase and loaded by the next."""
    for rows, n in [(1, 1), (5, 7), (3, 8), (4, 33), (2, 1000), (3, 0)]:
        x, out = torch.randn(rows, n), torch.empty(rows, n)
        values, bx, bo = Values(), buffer("x", x), buffer("o", out)
        i, j = axes("i j", [rows, n])
        most, total = Acc("m", "max", F32), Acc("s", "sum", F32)
        load = values.load(bx, at(bx, i, j))
        power = op("exp", op("sub", load, values.acc(most)))
        again = op("div", values.load(bo, at(bo, i, j)), values.acc(total))
        for lanes in (None, i):
            phases = [
                Phase((j,), [Accumulate(most, load)]),
                Phase((j,), [Store(bo, at(bo, i, j), power), Accumulate(total, power)]),
                Phase((j,), [Store(bo, at(bo, i, j), again)]),
            ]
            out.zero_()
            run(Kernel((i,), phases, lanes=lanes), {bx: x, bo: out}, on=on, parts=2)
            same(out, torch.softmax(x, -1), rtol=1e-6, atol=1e-7)


@MACHINES
@pytest.mark.parametrize("lanes", [True, False])
def test_scans(lanes: bool, on: Machine) -> None:
    for rows, n in [(1, 1), (3, 20), (40, 5), (17, 33), (2, 0)]:
        x, out, best = torch.randn(rows, n), torch.empty(rows, n), torch.empty(rows, n)
        places = torch.empty(rows, n, dtype=torch.int64)
        values = Values()
        bx, bo, bb, bp = (buffer(s, t) for s, t in zip("xobp", (x, out, best, places), strict=True))
        i, j = axes("i j", [rows, n])
        load = values.load(bx, at(bx, i, j))
        total, most = Acc("t", "sum", torch.float64), Acc("m", "max", F32)
        where = Acc("w", "argmax", torch.int64)
        body: list[Statement] = [
            Accumulate(total, cast(load, torch.float64)),
            Accumulate(most, load),
            Accumulate(where, load, values.index(j.expr)),
            Store(bo, at(bo, i, j), cast(values.acc(total), F32)),
            Store(bb, at(bb, i, j), values.acc(most)),
            Store(bp, at(bp, i, j), values.acc(where)),
        ]
        kernel = Kernel((i,), [Phase((j,), body)], lanes=i if lanes else None)
        run(kernel, {bx: x, bo: out, bb: best, bp: places}, on=on)
        same(out, x.double().cumsum(1).float())
        if n:
            same(best, x.cummax(1).values)
            same(places, x.cummax(1).indices)


@MACHINES
@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_scans_of_many_rows_go_through_squares(dtype: torch.dtype, on: Machine) -> None:
    """Rows of a vector or less took a scatter for each column, and 17 columns a vector for one."""
    wide = torch.float64 if dtype is F32 else F32 if dtype is torch.bfloat16 else dtype
    for n, are_open in itertools.product((1, 5, 8, 17, 40), (False, True)):
        x, around = torch.randn(150, n).mul(9).to(dtype), torch.full((2, 150, n + 3), 7).to(dtype)
        out, twice = around[..., 1 : n + 1]
        values, total = Values(), Acc("t", "sum", wide)
        bx, bo, bt = (buffer(s, t) for s, t in zip("xot", (x, out, twice), strict=True))
        sizes = {Symbol("s0", 0, hint=150): 150, Symbol("s1", 0, hint=n): n}
        i, j = axes("i j", [s.expr for s in sizes] if are_open else [150, n])
        running = cast(values.acc(total), dtype)
        first: list[Statement] = [
            Accumulate(total, cast(values.load(bx, at(bx, i, j)), wide)),
            Store(bo, at(bo, i, j), running),
        ]
        again = values.load(bo, at(bo, i, j))
        double = cast(op("add", cast(again, wide), cast(again, wide)), dtype)
        phases = [Phase((j,), first), Phase((j,), [Store(bt, at(bt, i, j), double)])]
        text = run(Kernel((i,), phases), {bx: x, bo: out, bt: twice}, sizes, on, 3).code.text
        same(out, x.to(wide).cumsum(1).to(dtype), rtol=1e-6)
        same(twice, out + out)
        assert bool((around[..., 0] == 7).all()) and bool((around[..., n + 1 :] == 7).all())
        if "avx512bw" in on.features and on.bits == 512:
            assert "scatter" not in text and "shufflevector" in text


@pytest.mark.parametrize(
    ("dtype", "n", "squares"),
    [(torch.int64, 100, False), (torch.int64, 7, True), (torch.float64, 100, True)],
)
def test_long_sums_of_whole_numbers_go_along_rows(
    dtype: torch.dtype, n: int, squares: bool
) -> None:
    """Eight rows at a time are eight streams, and an addition of integers takes a cycle."""
    x, out = torch.randn(300, n).mul(9).to(dtype), torch.zeros(300, n, dtype=dtype)
    i, j = axes("i j", [300, n])
    values, total = Values(), Acc("t", "sum", dtype)
    bx, bo = buffer("x", x), buffer("o", out)
    load = values.load(bx, at(bx, i, j))
    store = Store(bo, at(bo, i, j), values.acc(total))
    kernel = Kernel((i,), [Phase((j,), [Accumulate(total, load), store])])
    wide = Machine(machine().features | {"avx512f", "avx512bw"}, 512)
    assert bool(_Emitter(kernel, wide).rows) == squares
    run(kernel, {bx: x, bo: out}, parts=3)
    same(out, x.cumsum(1), rtol=1e-12)


@pytest.mark.parametrize("inner", [True, False], ids=["along", "across"])
@pytest.mark.parametrize("n", [100, 3000, 100_000, 3_000_000])
def test_sums_are_as_accurate_as_eager(n: int, inner: bool) -> None:
    rows = max(1, min(64, 3_000_000 // n))
    for shift in (0.0, 0.5, 100.0):
        torch.manual_seed(n)
        x = torch.rand(rows, n) - 0.5 + shift
        x = x if inner else x.t().contiguous().t()
        out = torch.empty(rows)
        values, bx, bo = Values(), buffer("x", x), buffer("o", out)
        i, j = axes("i j", [rows, n])
        acc = Acc("s", "sum", F32)
        phases = [
            Phase((j,), [Accumulate(acc, values.load(bx, at(bx, i, j)))]),
            Phase((), [Store(bo, i.expr, values.acc(acc))]),
        ]
        run(Kernel((i,), phases, lanes=None if inner else i), {bx: x, bo: out})
        exact = x.double().sum(1)
        ours, eager = ((t.double() - exact).abs().pow(2).mean().sqrt() for t in (out, x.sum(1)))
        half_ulp = exact.abs().mean() * 2**-24
        assert ours <= 2 * eager + half_ulp


# ------------------------------------------------------------------------------ scatters


@MACHINES
@pytest.mark.parametrize("mode", ["add", "mul", "min", "max"])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_ordered_scatter(mode: str, dtype: torch.dtype, on: Machine) -> None:
    n, m = 50, 21
    x = torch.randn(n, m).mul(3).abs().to(dtype)
    where = torch.randint(0, 7, (n,))
    out = torch.ones(7, m, dtype=dtype)
    combines: dict[str, Any] = {
        "add": torch.add,
        "mul": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
    }
    combine = combines[mode]
    want = out.clone()
    for k in range(n):  # rounds at every step, as index_put_ does
        want[where[k]] = combine(want[where[k]], x[k])
    values = Values()
    bx, bw, bo = (buffer(s, t) for s, t in zip("xwo", (x, where, out), strict=True))
    i, j = axes("i j", [n, m])
    row = values.indirect(values.load(bw, i.expr), 7)
    store = Store(bo, at(bo, row, j), values.load(bx, at(bx, i, j)), mode)  # type: ignore[arg-type]
    start = out.clone()
    for kernel in (
        Kernel((i, j), [Phase((), [store])], ordered=(i,)),
        Kernel((i, j), [Phase((), [store])], ordered=(i, j)),
        Kernel((i,), [Phase((j,), [store])], ordered=(i,)),
    ):
        out.copy_(start)
        code = run(kernel, {bx: x, bw: where, bo: out}, on=on).code
        assert number(code.total, {}) == 1
        same(out, want)


@MACHINES
def test_last_write_wins_in_order(on: Machine) -> None:
    n = 100
    x, where, out = torch.arange(n).float(), torch.randint(0, 10, (n,)), torch.zeros(10)
    values = Values()
    bx, bw, bo = (buffer(s, t) for s, t in zip("xwo", (x, where, out), strict=True))
    (i,) = axes("i", [n])
    store = Store(bo, values.indirect(values.load(bw, i.expr), 10), values.load(bx, i.expr))
    run(Kernel((i,), [Phase((), [store])], ordered=(i,)), {bx: x, bw: where, bo: out}, on=on)
    want = torch.zeros(10)
    for k in range(n):
        want[where[k]] = x[k]
    same(out, want)


# ------------------------------------------------------------------------------ text


def softmax_kernel(rows: Size, n: Size) -> Kernel:
    values = Values()
    x = Buffer("x", F32, (rows, n), (n, 1), "input")
    out = Buffer("out", F32, (rows, n), (n, 1), "result")
    i, j = axes("i j", [rows, n])
    most, total = Acc("m", "max", F32), Acc("s", "sum", F32)
    load = values.load(x, at(x, i, j))
    power = op("exp", op("sub", load, values.acc(most)))
    return Kernel(
        (i,),
        [
            Phase((j,), [Accumulate(most, load)]),
            Phase((j,), [Accumulate(total, power)]),
            Phase((j,), [Store(out, at(out, i, j), op("div", power, values.acc(total)))]),
        ],
    )


def test_text_does_not_depend_on_sizes_but_of_short_rows() -> None:
    s = Symbol("s0", 2, hint=5).expr
    shapes: list[tuple[Size, Size]] = [(2048, 512), (512, 512), (3, 1000), (s, 177), (s, s + 1)]
    codes = [emit_kernel(softmax_kernel(*shape), machine()) for shape in shapes]
    assert len({code.text for code in codes}) == 1
    assert codes[0].name.startswith("k_") and codes[0].name in codes[0].text


def test_text_does_not_grow_with_an_axis_beside_lanes_that_fill_no_vector() -> None:
    def text(n: int) -> str:
        x, out, turned = torch.empty(n, 16), torch.empty(n, 8), torch.empty(8, n)
        bx, bo, bt = (buffer(name, t) for name, t in zip("xot", (x, out, turned), strict=True))
        i, j = axes("i j", [n, 8])
        total = op("exp", Values().load(bx, at(bx, i, j)))
        body: list[Statement] = [Store(bo, at(bo, i, j), total), Store(bt, at(bt, j, i), total)]
        return emit_kernel(Kernel((i, j), [Phase((), body)], lanes=j), machine(512)).text

    assert len(text(4096)) < 2 * len(text(64))


def test_sizes_known_only_at_the_call() -> None:
    s0, s1 = Symbol("s0", 0), Symbol("s1", 0)
    a, b = s0.expr, s1.expr
    for rows, n in [(3, 5), (7, 130), (0, 4)]:
        x, out = torch.randn(rows, n), torch.empty(n, rows)
        bx = Buffer("x", F32, (a, b), (b, 1), "input")
        bo = Buffer("o", F32, (b, a), (a, 1), "result")
        i, j = axes("i j", [a, b])
        values = Values()
        store = Store(bo, at(bo, j, i), values.load(bx, at(bx, i, j)))
        sizes = {s0: rows, s1: n}
        run(Kernel((i, j), [Phase((), [store])], lanes=j), {bx: x, bo: out}, sizes, parts=3)
        same(out, x.t().contiguous())


@pytest.mark.parametrize("name", ["sse", "avx2", "avx512", "neon"])
def test_other_processors_compile(name: str) -> None:
    jit.binding().initialize_all_targets()
    jit.binding().initialize_all_asmprinters()
    target = jit.named(name)
    emitter = jit.Emitter(target)
    on = Machine(target.features)
    for kernel in [softmax_kernel(20, 30), *everything()]:
        assert emitter.emit(emit_kernel(kernel, on).module)


def everything() -> list[Kernel]:
    """Kernels that touch all forms of access in all dtypes."""
    kernels = []
    for dtype in (F32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool):
        values = Values()
        x = Buffer("x", dtype, (64, 64), (64, 1), "input")
        places = Buffer("p", torch.int64, (64,), (1,), "input")
        out = Buffer("o", dtype, (64, 64), (64, 1), "result")
        i, j = axes("i j", [64, 64])
        there = values.indirect(check(values.load(places, j.expr), 64, 0), 64)
        inside = op("lt", values.index(j.expr), values.const(60, torch.int64))
        fill = values.const(1, dtype)
        for load in (
            values.load(x, at(x, i, j), inside, fill),
            values.load(x, at(x, i, 63 - j.expr)),
            values.load(x, at(x, j, i)),
            values.load(x, at(x, i, there), inside, fill),
        ):
            for index in (at(out, i, j), at(out, j, i), at(out, i, 63 - j.expr), at(out, i, there)):
                store = Store(out, index, load)
                kernels.append(Kernel((i, j), [Phase((), [store])], lanes=j))
    return kernels
