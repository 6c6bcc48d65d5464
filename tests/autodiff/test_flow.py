"""The minimum cut against networkx, and how long one takes."""

from __future__ import annotations

import random
import time

import networkx
from hypothesis import given
from hypothesis import strategies as st

from fusee.autodiff.min_cut import Network

Arcs = list[tuple[int, int, int]]


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, Arcs]:
    count = draw(st.integers(2, 12))
    vertex = st.integers(0, count - 1)
    arc = st.tuples(vertex, vertex, st.integers(0, 9))
    return count, draw(st.lists(arc, max_size=40))


def cut(count: int, arcs: Arcs) -> tuple[int, bytearray]:
    network = Network(count)
    for arc in arcs:
        network.add(*arc)
    return network.minimum_cut(0, 1)


@given(networks())
def test_like_networkx(case: tuple[int, Arcs]) -> None:
    count, arcs = case
    value, is_sink_side = cut(count, arcs)
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(count))
    for tail, head, capacity in arcs:
        if graph.has_edge(tail, head):
            capacity += graph[tail][head]["capacity"]
        graph.add_edge(tail, head, capacity=capacity)
    expected, _ = networkx.minimum_cut(graph, 0, 1)
    assert value == expected
    assert is_sink_side[1] and not is_sink_side[0]
    through = sum(c for tail, head, c in arcs if is_sink_side[head] and not is_sink_side[tail])
    assert through == value, "the sides don't belong to a minimum cut"


def test_the_cut_is_the_one_nearest_to_the_sink() -> None:
    _, is_sink_side = cut(4, [(0, 2, 5), (2, 3, 5), (3, 1, 5)])
    assert list(is_sink_side) == [0, 1, 0, 0]


def test_long_chains_do_not_recurse() -> None:
    count = 20_000
    arcs = [(k, k + 1, 2) for k in range(2, count - 1)] + [(0, 2, 3), (count - 1, 1, 3)]
    assert cut(count, arcs)[0] == 2


def test_five_thousand_nodes_take_a_moment() -> None:
    """Layers of a transformer's shape: chains with skips, each node split in two."""
    rng = random.Random(0)
    nodes = 5_000
    network = Network(2 * nodes + 2)
    source, sink = 2 * nodes, 2 * nodes + 1
    for k in range(nodes):
        network.add(2 * k, 2 * k + 1, rng.choice([4, 16, 64]) * 1000)
        network.add(source, 2 * k, 10**15 if k % 12 == 0 else rng.randrange(1, 20) * 1000)
        for back in (1, rng.randrange(2, 12)):
            if k >= back:
                network.add(2 * (k - back) + 1, 2 * k, 10**15)
        if rng.random() < 0.3:
            network.add(2 * k + 1, sink, 10**15)
    begin = time.process_time()
    value, _ = network.minimum_cut(source, sink)
    took = time.process_time() - begin
    assert value > 0
    assert took < 1.0, f"{took:.2f} s"  # some 0.1 s; machines that test are slow at times
