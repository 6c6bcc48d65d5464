"""Objects that are nested deeper than Python's calls go in and out of compiled functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import fusee
from tests.capturing.same import Traced

DEPTH = 5000


class Node:
    """One of a chain, linked both ways."""

    def __init__(self, value: Any, after: Any) -> None:
        self.value, self.after, self.before = value, after, None
        if after is not None:
            after.before = self


def chain(values: Any) -> Any:
    node = None
    for value in values:
        node = Node(value, node)
    return node


def nest(kind: Callable[[Any], Any], x: Any) -> Any:
    for _ in range(DEPTH):
        x = kind(x)
    return x


def caused(x: Any) -> Any:
    error = ValueError(x)
    error.__cause__ = x if isinstance(x, ValueError) else None
    return error


KINDS: dict[str, Callable[[Any], Any]] = {
    "list": lambda x: [x],
    "tuple": lambda x: (x,),
    "dict": lambda x: {"inside": x},
    "set_beside": lambda x: [x, {1, 2}],
    "closure": lambda x: lambda: x,
    "exception": caused,
}


def inside(x: Any) -> tuple[int, Any]:
    """How deep `x` is nested, and what is innermost."""
    depth = 0
    while not isinstance(x, Tensor):
        if isinstance(x, (list, tuple)):
            x = x[0]
        elif isinstance(x, dict):
            x = x["inside"]
        elif isinstance(x, ValueError):
            x = x.__cause__ or x.args[0]
        else:
            x = x()
        depth += 1
    return depth, x


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_nested(kind: str) -> None:
    assert sys.getrecursionlimit() < DEPTH
    fast, x = Traced(lambda x: nest(KINDS[kind], x * 2)), torch.ones(2)
    for _ in range(2):
        depth, found = inside(fast(x))
        assert depth == DEPTH and torch.equal(found, x * 2)
    assert not fast.stops


@pytest.mark.parametrize("kind", ["list", "tuple"])
def test_what_is_nested_is_alive_where_a_graph_ends(kind: str) -> None:
    def run(x: Tensor) -> Any:
        made = nest(KINDS[kind], x * 2)
        return made, x.sum().item()

    (made, total), x = Traced(run)(torch.ones(2)), torch.ones(2)
    assert total == 2 and inside(made)[0] == DEPTH and torch.equal(inside(made)[1], x * 2)


@pytest.mark.parametrize("kind", ["list", "tuple"])
def test_arguments_are_nested(kind: str) -> None:
    def run(nested: Any, x: Tensor) -> Tensor:
        while not isinstance(nested, Tensor):
            nested = nested[0]
        return nested * x

    fast, x = Traced(run), torch.ones(2)
    for value in (3.0, 4.0):
        assert torch.equal(fast(nest(KINDS[kind], x * value), x), x * value)
    assert fast.entries == 1 and not fast.stops


def test_the_innermost_list_is_written_to() -> None:
    def run(nested: Any, x: Tensor) -> None:
        while isinstance(nested[0], list):
            nested = nested[0]
        nested[0] = x * 2

    given, x = nest(KINDS["list"], torch.ones(2)), torch.ones(2)
    Traced(run)(given, x)
    assert torch.equal(inside(given)[1], x * 2)


def test_a_chain_of_objects_goes_in() -> None:
    def run(node: Any, x: Tensor) -> Tensor:
        while node is not None:
            x = x + node.value if isinstance(node.value, Tensor) else x * node.value
            node = node.after
        return x

    fast, x = Traced(run), torch.ones(2)
    for value in (1.0, 2.0):
        values = [x * value if k % 10 == 0 else 1 for k in range(DEPTH)]
        assert torch.equal(fast(chain(values), x), x + value * (DEPTH // 10))
    assert fast.entries == 1 and not fast.stops


def test_a_chain_of_objects_that_is_linked_both_ways_comes_out() -> None:
    node = Traced(lambda x: chain([x + 1, *range(DEPTH)]))(torch.ones(2))
    count = 0
    while node.after is not None:
        assert node.after.before is node
        node, count = node.after, count + 1
    assert count == DEPTH and torch.equal(node.value, torch.full((2,), 2.0))


# ------------------------------------------------------------------------------ calls


def again(x: Tensor, count: int) -> Tensor:
    return x.cos() if count == 0 else again(x + 1, count - 1)


def endless(x: Tensor) -> Tensor:
    return endless(x + 1)


def caught(x: Tensor) -> Tensor:
    try:
        return endless(x)
    except RecursionError:
        return x * sys.getrecursionlimit()


def deeper(count: int, function: Callable[[], Any]) -> Any:
    return function() if count == 0 else deeper(count - 1, function)


def test_calls_are_nested_as_deep_as_python_has_them() -> None:
    fast, x = Traced(again), torch.ones(2)
    assert torch.equal(fast(x, 400), again(x, 400))
    assert fast.entries == 1 and not fast.stops
    with pytest.raises(RecursionError):
        fusee.compile(endless)(x)
    assert torch.equal(fusee.compile(caught)(x), caught(x))


@pytest.mark.parametrize("left", [100, 300])
def test_a_function_is_captured_far_down(left: int) -> None:
    """Where eager has the frames it needs, though capture and the compiler have not."""
    limit, depth = sys.getrecursionlimit(), len(inspect.stack(0))
    found = deeper(limit - depth - left, lambda: fusee.compile(again)(torch.ones(2), 40))
    assert torch.equal(found, again(torch.ones(2), 40)) and sys.getrecursionlimit() == limit


def test_threads_capture_deep_calls_side_by_side() -> None:
    x, limit = torch.ones(2), sys.getrecursionlimit()
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(fusee.compile(again), x, count) for count in range(200, 400, 20)]
        for count, one in zip(range(200, 400, 20), found, strict=True):
            assert torch.equal(one.result(), again(x, count))
    assert sys.getrecursionlimit() == limit
