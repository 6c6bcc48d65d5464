"""Random programs on sizes beside eager, over random sequences of sizes: values, and versions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.capturing.same import Traced

# Expressions of sizes as trees: a variable, a constant, or an operator and its operands.
OPERATORS: dict[str, tuple[int, Callable[..., Any]]] = {
    "+": (2, operator.add), "-": (2, operator.sub), "*": (2, operator.mul),
    "//": (2, lambda a, b: a // (abs(b) + 1)), "%": (2, lambda a, b: a % (abs(b) + 1)),
    "// -3": (1, lambda a: a // -3), "% -3": (1, lambda a: a % -3),
    "divmod": (1, lambda a: divmod(a, 4)[0]), "** 2": (1, lambda a: a**2),
    "max": (2, max), "min": (2, min), "neg": (1, operator.neg), "abs": (1, abs),
    "<< 1": (1, lambda a: a << 1), ">> 1": (1, lambda a: a >> 1), "~": (1, operator.invert),
    "& 6": (1, lambda a: a & 6), "| 5": (1, lambda a: a | 5), "^ 3": (1, lambda a: a ^ 3),
    "int /2": (1, lambda a: int(a / 2)), "round /4": (1, lambda a: round(a / 4)),
    "ceil *1.5": (1, lambda a: math.ceil(a * 1.5)), "prod": (2, lambda a, b: math.prod((a, b))),
    "sum": (2, lambda a, b: sum([a, b, 1])), "sorted": (2, lambda a, b: sorted([a, b])[0]),
    "if": (2, lambda a, b: a if a > b else b - 1), "chain": (1, lambda a: 1 if 2 < a <= 9 else a),
    "even": (1, lambda a: a // 2 if a % 2 == 0 else a + 1),
    "isqrt": (1, lambda a: math.isqrt(abs(a))), "root": (1, lambda a: math.floor(abs(a) ** 0.5)),
    "log": (1, lambda a: round(math.log2(abs(a) + 1) * 3)), "bits": (1, lambda a: a.bit_length()),
    "gcd": (1, lambda a: math.gcd(a, 12)), "lcm": (1, lambda a: math.lcm(8, abs(a))),
    "below": (1, lambda a: int(3 - math.sqrt(abs(a)) < 0.5)),
    "in": (1, lambda a: a if a in range(3, 50, 2) else 0), "float": (1, lambda a: int(a / 3 > 2.5)),
}  # fmt: skip
EXPRESSIONS = st.recursive(
    st.sampled_from(["n", "m", "numel", "k"]) | st.integers(-3, 9),
    lambda inner: st.sampled_from([*OPERATORS]).flatmap(
        lambda name: st.tuples(st.just(name), *[inner] * OPERATORS[name][0])
    ),
    max_leaves=6,
)
# What branches: each may part the sizes in two.
BRANCHES = {
    *"isqrt root log lcm below".split(),
    "if",
    "chain",
    "even",
    "in",
    "float",
    "abs",
    "sorted",
    "max",
    "min",
    "//",
    "%",
    "round /4",
    "int /2",
}


def evaluated(tree: Any, names: dict[str, Any]) -> Any:
    if isinstance(tree, str):
        return names[tree]
    if isinstance(tree, int):
        return tree
    name, *operands = tree
    return OPERATORS[name][1](*(evaluated(x, names) for x in operands))


def branches(tree: Any) -> int:
    if not isinstance(tree, tuple):
        return 0
    return (tree[0] in BRANCHES) + sum(map(branches, tree[1:]))


def test_what_a_function_makes_of_sizes_is_computed_before_the_graph() -> None:
    def program(x: torch.Tensor) -> Any:
        n = x.shape[0]
        whole = math.isqrt(n), n.bit_length(), math.ceil(math.log2(n)), int(n**0.5)
        x = x + sum(k for k in range(0, n, 10)) + sum([k + 1 for k in range(-1, -n, -10)])
        return x * n, whole, math.gcd(n, 4), math.sqrt(n) > 9.5

    traced = Traced(program)
    for n in (82, 86, 94, 98, 93, 85, 97, 89):  # below and above 90
        x = torch.ones(n)
        want, got = program(x), traced(x)
        assert got[1:] == want[1:]
        torch.testing.assert_close(got[0], want[0])
    assert len(traced.graphs) == 1 + 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(EXPRESSIONS, min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(2, 20), st.integers(2, 12), st.integers(-2, 9)),
        min_size=3,
        max_size=7,
    ),
    st.booleans(),
)
def test_programs_on_sizes_are_as_in_eager(
    trees: list[Any], calls: list[tuple[int, int, int]], makes_sizes: bool
) -> None:
    def program(x: torch.Tensor, k: int) -> Any:
        n, m = x.shape
        names = {"n": n, "m": m, "numel": x.numel(), "k": k}
        found = [evaluated(tree, names) for tree in trees]
        made: Any = x
        if makes_sizes:
            made = x.new_ones(found[0] % 7 + 1, n).sum(), x[: found[0] % (n + 1)]
        return found, f"{found[-1]}|{x.shape}", x * found[-1], made

    traced = Traced(program)
    for n, m, k in calls:
        x = torch.ones(n, m)
        want, got = program(x, k), traced(x, k)
        assert got[:2] == want[:2] and [*map(type, got[0])] == [*map(type, want[0])]
        torch.testing.assert_close(got[2:], want[2:])
    assert not traced.stops, traced.stops
    if not (makes_sizes or any(map(branches, trees))):  # a static version, and as each one varies
        assert len(traced.graphs) <= 4
