"""Size expressions against Python's own integers."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusee.sym import (
    Size,
    Steps,
    Symbol,
    coefficient,
    divides,
    floordiv,
    hint,
    known_ge,
    known_lt,
    lower_bound,
    maximum,
    minimum,
    mod,
    product,
    substitute,
    symbols,
    upper_bound,
)
from fusee.sym.ranges import COMPARISONS

ROW = Symbol("i", 0, 12)
J = Symbol("j", 0, 8)
S = Symbol("s", 2, None, hint=17)
K = Symbol("k", 0, S.expr)
SYMBOLS = (ROW, J, S, K)


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[Size, str]:
    """An expression built by our operators and the same as Python source."""
    if depth == 0 or draw(st.booleans()):
        if draw(st.booleans()):
            n = draw(st.integers(-40, 40))
            return n, f"({n})"
        symbol = draw(st.sampled_from(SYMBOLS))
        return symbol.expr, symbol.name
    left, left_text = draw(expressions(depth - 1))
    op = draw(st.sampled_from(["+", "-", "*", "//", "%", "min", "max"]))
    if op in ("//", "%"):
        n = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]))
        divide = floordiv if op == "//" else mod
        return divide(left, n), f"(({left_text}) {op} {n})"
    right, right_text = draw(expressions(depth - 1))
    if op in ("min", "max"):
        pick = minimum if op == "min" else maximum
        return pick(left, right), f"{op}({left_text}, {right_text})"
    made = {"+": left + right, "-": left - right, "*": left * right}[op]
    return made, f"(({left_text}) {op} ({right_text}))"


@st.composite
def points(draw: st.DrawFn) -> dict[Symbol, Size]:
    s = draw(st.integers(2, 40))
    k = draw(st.integers(0, s - 1))
    return {ROW: draw(st.integers(0, 11)), J: draw(st.integers(0, 7)), S: s, K: k}


@given(expressions(), points())
def test_operators_and_printing_agree_with_python(
    made: tuple[Size, str], at: dict[Symbol, Size]
) -> None:
    expression, text = made
    names = {symbol.name: value for symbol, value in at.items()}
    expected = eval(text, {}, names)
    assert substitute(expression, at) == expected
    assert eval(str(expression), {}, names) == expected


@given(expressions(), expressions(), points())
def test_steps_compute_it(
    made: tuple[Size, str], other: tuple[Size, str], at: dict[Symbol, Size]
) -> None:
    steps = Steps([symbol.name for symbol in at])
    a, b = made[0], other[0]
    wanted = [steps.number(a), steps.number(b), *(steps.compared(a, op, b) for op in COMPARISONS)]
    assert steps.number(a) == wanted[0]
    found = [value for value in at.values() if isinstance(value, int)]
    for op, *operands, c in steps.rows:
        x, y = (found[k] for k in operands)
        found.append(c if op == "number" else x + c * y if op == "+" else int(PYTHON[op](x, y)))
    p, q = (substitute(size, at) for size in (a, b))
    assert [found[k] for k in wanted] == [p, q, *(op(p, q) for op in COMPARISONS.values())]


PYTHON = {**COMPARISONS, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}
PYTHON |= {"min": min, "max": max}


def test_what_a_size_lacks_of_a_multiple() -> None:
    n = Symbol("n", 1).expr
    padded = n + mod(-n, 7)
    assert padded == n + mod(7 - mod(n, 7), 7) == 7 * floordiv(n + 6, 7)
    assert mod(padded, 7) == 0 and floordiv(padded, 7) == floordiv(n + 6, 7)
    assert lower_bound(mod(-n, 7)) == 0 and upper_bound(mod(-n, 7)) == 6
    assert known_ge(padded, n) and known_ge(n + 6, padded)
    assert floordiv(-n, 7) == -floordiv(n + 6, 7)
    assert floordiv(n + mod(n, 2), 2) == floordiv(n + 1, 2) == floordiv(n + mod(n, 2) + 1, 2)
    assert mod(n + mod(n, 2), 2) == 0 and floordiv(n + mod(n, 2) + 13, 14) == floordiv(n + 13, 14)


@given(expressions(), points())
def test_bounds_hold(made: tuple[Size, str], at: dict[Symbol, Size]) -> None:
    expression, _ = made
    value = substitute(expression, at)
    assert isinstance(value, int)
    low, high = lower_bound(expression), upper_bound(expression)
    assert low is None or low <= value
    assert high is None or value <= high


@given(expressions(2), points(), st.integers(1, 30))
def test_facts_are_never_wrong(made: tuple[Size, str], at: dict[Symbol, Size], n: int) -> None:
    expression, _ = made
    value = substitute(expression, at)
    assert isinstance(value, int)
    assert not known_lt(expression, n) or value < n
    assert not known_ge(expression, n) or value >= n
    assert not divides(n, expression) or value % n == 0


@given(expressions(2), points())
def test_division_by_a_size(made: tuple[Size, str], at: dict[Symbol, Size]) -> None:
    expression, _ = made
    value, s = substitute(expression, at), at[S]
    assert isinstance(value, int) and isinstance(s, int)
    assert substitute(floordiv(expression, S.expr), at) == value // s
    assert substitute(mod(expression, S.expr), at) == value % s


@given(expressions(2), points(), st.integers(1, 30))
def test_division_by_a_sum(made: tuple[Size, str], at: dict[Symbol, Size], n: int) -> None:
    (expression, _), by = made, S.expr + n
    product = expression * by
    assert floordiv(product, by) == expression and mod(product, by) == 0
    for a in (expression, product + 1):
        value, s = substitute(a, at), substitute(by, at)
        assert isinstance(value, int) and isinstance(s, int)
        assert substitute(floordiv(a, by), at) == value // s
        assert substitute(mod(a, by), at) == value % s


i, j, s, k = ROW.expr, J.expr, S.expr, K.expr


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ((8 * i + j) // 8, i),
        ((8 * i + j) % 8, j),
        ((8 * i + j) // 96, 0),
        ((8 * i + j) % 96, 8 * i + j),
        ((k + s * i) // s, i),
        ((k + s * i) % s, k),
        ((s * 64) // 64, s),
        ((s * 128) // s, 128),
        ((i // 2) // 3, i // 6),
        ((2 * i + 96 * s) // 8, 12 * s + i // 4),
        (minimum(k, s), k),
        (i - i, 0),
        (product([s, 0, 3]), 0),
    ],
)
def test_simplifies(made: Size, expected: Size) -> None:
    assert made == expected


def test_coefficient_takes_linear_parts_apart() -> None:
    assert coefficient(3 * i + s * i + j, ROW) == (s + 3, j)
    assert coefficient(i * i, ROW) is None
    assert coefficient(i // 5 + i, ROW) is None
    assert coefficient(7, ROW) == (0, 7)


def test_truth_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown at compile time"):
        bool(s)


def test_hint_is_the_first_calls_value() -> None:
    assert hint(s * 2 + 1) == 35
    assert hint(5) == 5


@pytest.mark.parametrize(
    "step",
    [
        lambda k, i: floordiv(k + i, 2) + 1,
        lambda k, i: floordiv(k + i, 3) + mod(k, 7),  # in it twice: as text, 2 ** 5000 letters
        lambda k, i: minimum(k, floordiv(k * 3 + 1, 2)) + i,
    ],
)
def test_divisions_within_divisions(step: Callable[[Size, int], Size]) -> None:
    """Sizes nested deeper than Python's calls are simplified, bounded and computed."""
    symbol, number = Symbol("s", 2), 10
    nested: Size = symbol.expr
    for i in range(5000):
        nested, now = step(nested, i), step(number, i)
        assert isinstance(now, int)
        number = now
    assert substitute(nested, {symbol: 10}) == number
    assert list(symbols(nested)) == [symbol]
    least = lower_bound(nested)
    assert least is not None and 0 <= least <= number


@pytest.mark.parametrize("least", [2, -2])
def test_products_of_many_sizes(least: int) -> None:
    """Their bounds are asked for a number of times that does not double with each size."""
    product: Size = 1
    for i in range(60):
        product = product * Symbol(f"s{i}", least).expr
    assert lower_bound(product - 5) in (None, 2**60 - 5)
    assert lower_bound(mod(product, 100)) == 0
