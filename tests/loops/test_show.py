"""The loop IR as text grows with its values, not with the ways through them."""

from __future__ import annotations

import torch

from fusee.loops import Buffer, Kernel, Phase, Store, Values, op
from fusee.loops.checker import show_kernel
from fusee.sym import Symbol


def _kernel(steps: int) -> Kernel:
    """y = y + sin(y), again and again, and only the last one is stored."""
    values, axis = Values(), Symbol("i0", 0, 64)
    x, out = (Buffer(name, torch.float32, (64,), (1,), "input") for name in "xy")
    y = values.load(x, axis.expr)
    for _ in range(steps):
        y = op("add", y, op("sin", y))
    return Kernel((axis,), [Phase((), [Store(out, axis.expr, y)])])


def test_shared_values_have_names() -> None:
    assert show_kernel(_kernel(3)).splitlines() == [
        "for i0 in range(64):",
        "  t0 = add(x[i0], sin(x[i0]))",
        "  t1 = add(t0, sin(t0))",
        "  y[i0] = add(t1, sin(t1))",
    ]


def test_text_of_a_recurrence_is_linear() -> None:
    small, large = (len(show_kernel(_kernel(n))) for n in (1000, 4000))
    assert large < 4.5 * small


def test_long_expressions_are_cut() -> None:
    values, axis = Values(), Symbol("i0", 0, 64)
    x = Buffer("x", torch.float32, (64,), (1,), "input")
    y = values.load(x, axis.expr)
    for _ in range(2000):
        y = op("sin", y)
    lines = show_kernel(Kernel((axis,), [Phase((), [Store(x, axis.expr, y)])])).splitlines()
    assert max(map(len, lines)) < 120 and sum(line.count("sin") for line in lines) == 2000


def test_values_inside_indices_have_names() -> None:
    values, axis = Values(), Symbol("i0", 0, 64)
    at, x = (Buffer(name, torch.int64, (64,), (1,), "input") for name in ("at", "x"))
    where = values.load(at, axis.expr)
    value = values.load(x, values.indirect(where, 64))
    text = show_kernel(Kernel((axis,), [Phase((), [Store(x, axis.expr, value)])]))
    assert text.splitlines()[1:] == ["  t0 = at[i0]", "  x[i0] = x[t0]"]
