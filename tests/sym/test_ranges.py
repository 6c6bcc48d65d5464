"""What follows from relations of sizes: never more than holds for every value."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusee.fake.layouts import same_ints
from fusee.sym import Size, Symbol, floordiv, maximum, minimum, mod, substitute, symbols
from fusee.sym.ranges import COMPARISONS, OPPOSITE
from fusee.sym.shape_env import ShapeEnv

VALUES = range(2, 12)
OPS = [*COMPARISONS]


def env(**hints: int) -> tuple[ShapeEnv, dict[str, Size]]:
    made = ShapeEnv()
    return made, {name: made.symbol(name, hint).node.size for name, hint in hints.items()}


def value(a: Size, sizes: dict[Symbol, Size]) -> int:
    found = substitute(a, sizes)
    assert isinstance(found, int)
    return found


FORMS = st.recursive(
    st.one_of(st.sampled_from(["a", "b"]), st.integers(-9, 9)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*"]), inner, inner),
        st.tuples(st.sampled_from(["//", "%"]), inner, st.integers(1, 9)),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner),
        st.tuples(st.sampled_from(["//", "%"]), inner, st.sampled_from(["a", "b"])),
    ),
    max_leaves=6,
)


def built(form: Any, sizes: dict[str, Size]) -> Size:
    if isinstance(form, int):
        return form
    if isinstance(form, str):
        return sizes[form]
    op, *parts = form
    x, y = (built(part, sizes) for part in parts)
    if op in ("+", "-", "*"):
        return {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y}[op]()
    return {"//": floordiv, "%": mod, "min": minimum, "max": maximum}[op](x, y)


def plain(form: Any, numbers: dict[str, int]) -> int:
    """The same by Python."""
    if isinstance(form, int):
        return form
    if isinstance(form, str):
        return numbers[form]
    op, *parts = form
    x, y = (plain(part, numbers) for part in parts)
    return {
        "+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "//": lambda: x // y,
        "%": lambda: x % y, "min": lambda: min(x, y), "max": lambda: max(x, y),
    }[op]()  # fmt: skip


QUESTIONS = st.lists(st.tuples(FORMS, st.sampled_from(OPS), FORMS), min_size=1, max_size=6)


@given(QUESTIONS, st.sampled_from(VALUES), st.sampled_from(VALUES))
def test_answers_hold_wherever_the_relations_do(questions: Any, a: int, b: int) -> None:
    made, sizes = env(a=a, b=b)
    answers = []
    for left, op, right in questions:
        found = made.holds(built(left, sizes), op, built(right, sizes))
        assert found == COMPARISONS[op](
            plain(left, {"a": a, "b": b}), plain(right, {"a": a, "b": b})
        )
        answers.append(found)
    variables = [*symbols(sizes["a"]), *symbols(sizes["b"])]
    for x, y in itertools.product(VALUES, VALUES):
        now: dict[Symbol, Size] = dict(zip(variables, (x, y)))
        if not all(COMPARISONS[r.op](value(r.a, now), value(r.b, now)) for r in made.relations):
            continue
        for (left, op, right), answer in zip(questions, answers):
            numbers = {"a": x, "b": y}
            assert COMPARISONS[op](plain(left, numbers), plain(right, numbers)) == answer


@pytest.mark.parametrize(
    ("left", "op", "right", "shown"),
    [
        (("*", 8, ("//", "a", 2)), "!=", 8, "a >= 4"),
        (("//", "a", 4), ">", 1, "a >= 8"),
        (("*", "a", "b"), ">", ("*", 3, "b"), "a >= 4"),
        (("-", "a", "b"), "<", 0, "a < b"),
        (("+", ("*", 6, "a"), -12), "==", ("*", 6, ("-", "b", 2)), "a == b"),
        ("a", "!=", 2, "a >= 3"),
        ("a", "!=", 5, "a != 5"),
        (("%", "a", 8), "==", 0, "((a)%(8)) == 0"),
    ],
)
def test_relations_are_told_in_few_words(left: Any, op: str, right: Any, shown: str) -> None:
    hints = {"a < b": (8, 9), "a == b": (9, 9)}.get(shown, (8, 3))
    made, sizes = env(a=hints[0], b=hints[1])
    assert made.holds(built(left, sizes), op, built(right, sizes))
    assert [str(x) for x in made.relations] == [shown]
    assert made.known(built(left, sizes), op, built(right, sizes))
    assert made.known(built(left, sizes), OPPOSITE[op], built(right, sizes)) is False


def test_a_closer_bound_takes_the_place_of_a_wider_one() -> None:
    made, sizes = env(a=64)
    for k in (2, 4, 8, 16):
        assert made.holds(floordiv(sizes["a"], k), ">", 1)
    assert [str(x) for x in made.relations] == ["a >= 32"]


def test_what_is_known_one_way_round_is_known_the_other() -> None:
    made, sizes = env(a=5, b=3)
    a, b = sizes.values()
    assert made.holds(a, ">=", b)
    assert made.known(b, "<=", a) and made.known(b, ">", a) is False
    assert made.holds(a, "!=", b) and made.known(b, "!=", a)


@pytest.mark.parametrize(
    "number", [1.7, 0.3, 0.7, 2.3, 4.35, 1 / 3, 16000 / 44100, 0.49999, math.pi]
)
@pytest.mark.parametrize("function", [math.floor, math.ceil, math.trunc])
@pytest.mark.parametrize("run", [operator.mul, operator.truediv])
def test_a_size_times_a_number_is_rounded_as_floats_are(
    run: Any, function: Any, number: float
) -> None:
    for now in (7, 20, 71, 93, 1000):
        made = ShapeEnv()
        size = made.symbol("s0", now)
        found = getattr(run(size, number).node, function.__name__)().size
        for n in range(2, 3000):
            values: dict[Symbol, Size] = dict.fromkeys(symbols(size.node.size), n)
            asked = [(value(x.a, values), x.op, value(x.b, values)) for x in made.relations]
            if all(COMPARISONS[op](a, b) for a, op, b in asked):
                assert value(found, values) == function(run(n, number))
        is_open = bool(symbols(found))
        assert is_open or number in (0.49999, math.pi) or now == 1000


def test_a_symbol_that_turned_out_to_be_a_number_is_that_number() -> None:
    made = ShapeEnv()
    rows, columns = made.symbol("s0", 3), made.symbol("s1", 5)
    assert not same_ints((rows, columns), (3, columns))
    assert rows == 3  # from here on
    assert same_ints((rows, columns), (3, columns))
    assert not same_ints((rows, columns), (columns, columns))
