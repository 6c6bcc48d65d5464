"""The host function: what a call costs, and what it leaves behind when it fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusee import log
from fusee.backends.native import compile_native
from fusee.backends.report import CompiledGraph
from fusee.runtime import launch
from fusee.runtime.launch import LaunchFrame


def compiled(fn: Callable[..., Any], *args: Any, **options: object) -> CompiledGraph:
    with torch.no_grad():
        return compile_native(fx.symbolic_trace(fn), list(args), options)


def host_of(fn: Callable[..., Any], *args: Any) -> tuple[CompiledGraph, str]:
    records: list[log.Record] = []
    undo = log.subscribe(records.append, "host")
    graph = compiled(fn, *args)
    undo()
    return graph, records[0].text


def fastest_us(call: Callable[[], object]) -> float:
    """Microseconds of a call when nothing disturbs it."""
    best = float("inf")
    for _ in range(100):
        begin = time.perf_counter()
        for _ in range(100):
            call()
        best = min(best, time.perf_counter() - begin)
    return best / 100 * 1e6


def ten_in_a_row(x: Tensor) -> Tensor:
    for step in range(10):
        x = torch.softmax(x, step % 2)
    return x


def ten_apart(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.softmax(x, -1) for x in xs)


def test_ten_kernels_in_a_row_cost_little() -> None:
    x = torch.randn(4, 4)
    graph = compiled(ten_in_a_row, x)
    assert len(graph.report().kernels) == 10
    assert fastest_us(lambda: graph(x)) < 20


def test_ten_kernels_with_inputs_and_outputs_of_their_own() -> None:
    xs = [torch.randn(4, 5 + k) for k in range(10)]
    traced = fx.Graph()
    nodes = [traced.placeholder(f"x{k}") for k in range(10)]
    traced.output(tuple(traced.call_function(torch.softmax, (x, -1)) for x in nodes))
    with torch.no_grad():
        graph = compile_native(fx.GraphModule({}, traced), xs, {})
    torch.testing.assert_close(tuple(graph(*xs)), ten_apart(*xs))
    assert len(graph.report().kernels) == 10
    assert fastest_us(lambda: graph(*xs)) < 60  # 17 us on a quiet machine


def test_a_call_that_fails_gives_its_frame_back(monkeypatch: pytest.MonkeyPatch) -> None:
    table, index = torch.randn(10, 64), torch.tensor([1, 2])
    made: list[LaunchFrame] = []

    def counting(*given: Any) -> LaunchFrame:
        made.append(LaunchFrame(*given))
        return made[-1]

    monkeypatch.setattr(launch, "LaunchFrame", counting)
    graph = compiled(lambda i, t: torch.softmax(t[i] @ t.t(), -1), index, table)
    good = graph(index, table)
    for _ in range(3):
        with pytest.raises(IndexError):
            graph(torch.tensor([1, 10]), table)
    assert torch.equal(graph(index, table), good)
    assert len(made) == 1


def test_results_are_made_in_the_form_that_is_returned() -> None:
    """Kernels keep reduced axes; no view is taken to be rid of them."""
    x = torch.randn(4, 6, 5)

    def reduced(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(1), x.amax(), (x.mean((0, 2)) * 2)

    graph, source = host_of(reduced, x)
    assert "as_strided" not in source
    for got, want in zip(graph(x), reduced(x), strict=True):
        assert got._base is None and got.stride() == want.stride()
        torch.testing.assert_close(got, want)
    graph, source = host_of(lambda x: (x.sum(1), x.sum(1, keepdim=True)), x)
    plain, kept = graph(x)
    assert plain.shape == (4, 5) and kept.shape == (4, 1, 5)


def test_transposed_inputs_of_calls_are_cheap_views() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5)
    graph, source = host_of(lambda x, w: torch.mm(x, w.t()) * 2, x, w)
    torch.testing.assert_close(graph(x, w), x @ w.t() * 2)
    assert ".t()" in source and "as_strided" not in source


PARTS: tuple[Callable[..., Any], ...] = (
    lambda z, x: torch.bmm(z[:, 1:].real, x),
    lambda z, x: z[1].imag[1:].t() @ x[0, :3],
    lambda z, x: z[1:].imag[:, 1:, 1:].transpose(1, 2) @ x[:1, 1:],
    lambda z, x: torch.view_as_real(z[1])[1, 1:].mm(x[1, :2]),
    lambda z, x: x.diagonal(1, 1, 2)[1:] @ x[0, 1:],
)


@pytest.mark.parametrize("fn", PARTS)
def test_parts_of_views_that_calls_give_begin_where_these_do(fn: Callable[..., Any]) -> None:
    z, x = torch.randn(2, 4, 4, dtype=torch.cfloat), torch.randn(2, 4, 4)
    torch.testing.assert_close(compiled(fn, z, x)(z, x), fn(z, x))
