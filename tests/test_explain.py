"""explain: graphs, breaks, guards and time in words. export: one graph, or why there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusee import api, compiler
from fusee.debug import Explanation, explain, export
from fusee.errors import GraphBreakError

x = torch.linspace(-1, 1, 4)
HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def bar(a: Tensor, b: Tensor) -> Tensor:
    y = a / (torch.abs(a) + 1)
    if b.sum() < 0:
        b = b * -1
    return y * b


def explained(fn: Any, *args: Any) -> Explanation:
    return explain(fn, backend="eager")(*args)


# ------------------------------------------------------------------------------ explain


def test_bar() -> None:
    found = explained(bar, x, -torch.ones(4))
    torch.testing.assert_close(found.result, bar(x, -torch.ones(4)))
    assert (found.graph_count, found.graph_break_count) == (2, 1)
    assert [graph.op_count for graph in found.graphs] == [5, 2]
    assert found.op_count == 7
    assert found.graphs[0].ops["torch.abs"] == 1 and "torch.abs(a)" in found.graphs[0].code
    (stop,) = found.breaks
    assert Path(stop.file).name == HERE and stop.function == "bar"
    assert stop.text == "if b.sum() < 0:" and "value of a tensor" in stop.reason and stop.remedy
    assert Path(__file__).read_text().splitlines()[stop.line - 1].strip() == stop.text
    assert set(found.times) == {"capture", "guards", "backend"}
    assert any(re.fullmatch(r"a is float32\[4\] of strides \[1\] on cpu", g) for g in found.guards)
    first, second = found.pieces
    assert "_graph(a, b" in first.source and first.function == "bar"
    assert "b = b * -1" in second.begins


def test_as_text() -> None:
    text = str(explained(bar, x, torch.ones(4)))
    assert text.startswith("2 graphs with 6 ops, 1 break,")
    for part in (
        "1. bar",
        "2. bar",
        "torch.abs(a)",
        "if b.sum() < 0:",
        "why    bool() needs the value",
        "try    ",
        "_out = _graph(a, b",
        "a is float32[4]",
        "capture",
    ):
        assert part in text, part
    assert not [line for line in text.splitlines() if line != line.rstrip()]


class _Reader(HTMLParser):
    """Checks that tags match, and collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_as_a_page() -> None:
    page = explained(bar, x, torch.ones(4)).html()
    reader = _Reader()
    reader.feed(page)
    assert reader.open == [] and reader.loads == [] and "<script" not in page
    for part in ("if b.sum() < 0:", "torch.abs(a)", "2 graphs with 6 ops"):
        assert part in reader.text


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, t: Tensor) -> Tensor:
        return self.layer(t).relu()


def test_modules_methods_and_what_is_compiled_already() -> None:
    net = Net()
    for fn in (net, net.forward, api.compile(net), api.compile(net.forward), lambda t: net(t)):
        found = explained(fn, x)
        torch.testing.assert_close(found.result, net(x))
        assert (found.graph_count, found.graph_break_count) == (1, 0)
    assert any("self.layer.weight is" in guard for guard in explained(net, x).guards)
    default = explain(net)(x)
    assert default.graph_count == 1 and default.times["backend"] > 0


def test_callees_after_a_break_are_told_too() -> None:
    def callee(t: Tensor) -> Tensor:
        t = t + 1
        print(end="")
        return t * 2

    found = explained(lambda t: callee(t - 1) + 3, x)
    assert [piece.function.split(".")[-1] for piece in found.pieces] == [
        "<lambda>", "callee", "callee", "<lambda>",
    ]  # fmt: skip
    assert {stop.text for stop in found.breaks} == {'print(end="")'}
    assert "print() shows" in str(found)


def test_what_runs_eagerly_is_told() -> None:
    def numbers(t: Tensor) -> Iterator[Tensor]:
        yield t

    found = explained(numbers, x)
    assert found.graph_count == 0 and "run as they are" in found.pieces[0].eager
    assert "runs eagerly" in str(found)

    @compiler.disable(reason="it is slow to capture")
    def slow(t: Tensor) -> Tensor:
        return t

    (stop,) = explained(lambda t: slow(t) + 1, x).breaks
    assert "slow is disabled: it is slow to capture" in stop.reason


# ------------------------------------------------------------------------------ export


def test_export_takes_the_tensors_and_holds_the_rest() -> None:
    net = Net()
    graph = export(net, (x,))
    torch.testing.assert_close(graph(x), net(x))
    torch.testing.assert_close(graph(torch.ones(4)), net(torch.ones(4)))
    assert {id(p) for p in graph.parameters()} == {id(p) for p in net.parameters()}

    scale = torch.tensor(3.0)

    def step(a: Tensor, more: list[Tensor], *, k: int = 2) -> dict[str, Any]:
        return {"sum": a + more[0] * scale, "same": a, "others": (more[1], k), "held": scale}

    y, z = torch.ones(4), torch.zeros(2)
    graph = export(step, (x, [y, z]), {"k": 5})
    got, want = graph(x, y, z), step(x, [y, z], k=5)
    torch.testing.assert_close(got["sum"], want["sum"])
    assert got["same"] is x and got["others"][0] is z and got["others"][1] == 5
    assert [node.name for node in graph.graph.nodes if node.op == "placeholder"] == [
        "input_0", "input_1", "input_2",
    ]  # fmt: skip


def test_export_runs_nothing_and_says_that_it_exports() -> None:
    log: list[int] = []

    def step(t: Tensor) -> Tensor:
        return t + 1 if compiler.is_exporting() else t - 1

    torch.testing.assert_close(export(step, (x,))(x), x + 1)
    torch.testing.assert_close(api.compile(step, backend="eager")(x), x - 1)

    def changes(t: Tensor) -> Tensor:
        log.append(1)
        return t + 1

    with pytest.raises(GraphBreakError, match="changes objects besides tensors"):
        export(changes, (x,))
    assert log == []


def test_export_of_what_draws_and_of_modes() -> None:
    def drops(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, True) + torch.rand_like(x)

    def inferring(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return x + 1

    x = torch.randn(3, 4)
    torch.manual_seed(0)
    wanted = drops(x)
    graph = export(drops, (x,))
    torch.manual_seed(0)
    assert torch.equal(graph(x), wanted)
    with pytest.raises(GraphBreakError, match="inference_mode"):
        export(inferring, (x,))


def test_export_says_where_it_breaks() -> None:
    with pytest.raises(GraphBreakError, match="not one graph") as error:
        export(bar, (x, x))
    assert HERE in str(error.value) and "if b.sum() < 0:" in str(error.value)

    def wrong(t: Tensor) -> Tensor:
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        export(wrong, (x,))
    with pytest.raises(TypeError):
        export(bar, (x,))


def test_symbols_are_shown_with_ranges_relations_lines_and_calls() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        x = x * 2 if x.shape[0] % 8 == 0 else x + 1
        for _ in range(y.shape[0]):
            x = x + 1
        return x

    explained = explain(program)
    explained(torch.ones(6), torch.ones(3))
    explained(torch.ones(7), torch.ones(4))
    found = explained(torch.ones(9), torch.ones(4))
    first, second = found.pieces
    assert (first.calls, second.calls) == (1, 2) and not first.symbols
    shown = "\n".join(second.symbols)
    assert "s0 = x.size(0): 7 in this call, 1 <= s0" in shown
    assert "x.size(0) % 8 != 0   (" in shown and "if x.shape[0] % 8 == 0" in shown
    assert "s1 is made a constant: y.size(0) == 4   (" in shown and "in range(y.shape[0])" in shown
    assert "calls served" in found.html() and "sizes that vary" in found.html()
