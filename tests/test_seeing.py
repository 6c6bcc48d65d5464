"""FUSEE_LOG and FUSEE_DUMP: every stage, readable, with the user's lines; graphs run as Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fusee import log
from fusee.backends.native import compile_native


class Net(nn.Module):
    """Something of everything: a fold, a call to ATen, reductions, loops that cannot be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3)
        self.norm = nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.norm(self.conv(x)))
        z = torch.softmax(y.mean((2, 3)), -1)
        z = z.masked_fill(z < 0.01, float("-inf"))
        return z * 2 + 1, torch.cumsum(z, 0)


def line_of(text: str) -> str:
    """`test_seeing.py:31` for the line of this file that contains `text`."""
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1):
        if text in line:
            return f"{Path(__file__).name}:{number}"
    raise AssertionError(text)


@pytest.fixture(scope="module")
def seen() -> tuple[Net, Tensor, list[Tensor], list[log.Record]]:
    """A net, its input, the inputs of its graph, and all that compiling it published."""
    records: list[log.Record] = []
    given: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        given.extend(inputs)
        return compile_native(gm, inputs, {"name": "net", "cache": False})

    torch._dynamo.reset()
    net, x = Net().eval(), torch.randn(2, 3, 8, 8)
    undo = log.subscribe(records.append)
    try:
        with torch.no_grad():
            torch.compile(net, backend=backend)(x)
    finally:
        undo()
    return net, x, given, records


Seen = tuple[Net, Tensor, list[Tensor], list[log.Record]]


def text_of(seen: Seen, artefact: str) -> str:
    return "\n".join(record.text for record in seen[3] if record.artefact == artefact)


@pytest.mark.parametrize("artefact", ["graph", "aten"])
def test_graphs_run_as_python(seen: Seen, artefact: str) -> None:
    net, x, given, _ = seen
    names: dict[str, Any] = {}
    exec(text_of(seen, artefact), names)
    with torch.no_grad():
        for got, want in zip(names["graph"](*given), net(x), strict=True):
            torch.testing.assert_close(got, want)


def test_the_captured_graph_keeps_its_attributes() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.weight = nn.Parameter(torch.tensor([1.5, float("inf")]))
            self.register_buffer("shift", torch.arange(2))

        def forward(self, x: Any) -> Any:
            return x * self.inner.weight + self.shift

    records: list[log.Record] = []
    undo = log.subscribe(records.append, "graph")
    x = torch.randn(3, 2)
    with torch.no_grad():
        compile_native(fx.symbolic_trace(Holder()), [x], {})
        undo()
        names: dict[str, Any] = {}
        exec(records[0].text, names)
        assert torch.equal(names["graph"](x), Holder()(x))


@pytest.mark.parametrize("artefact", ["graph", "aten", "loops", "fusion", "kernels"])
def test_stages_name_the_users_lines(seen: Seen, artefact: str) -> None:
    text = text_of(seen, artefact)
    place = line_of("z = torch.softmax(")
    if artefact == "graph":
        place = f"{place.replace(':', chr(34) + ', line ')}" if '", line' in text else place
    assert place in text


def test_loops_are_loop_nests(seen: Seen) -> None:
    text = text_of(seen, "loops")
    assert f"# mean.dim {line_of('y.mean(')}" in text
    assert "for i0 in range(2):" in text and "sum=" in text
    assert "mkldnn._convolution_pointwise.default(" in text


def test_fusion_shows_kernels_and_each_refusal_with_its_reason(seen: Seen) -> None:
    text = text_of(seen, "fusion")
    kernels, _, refusals = text.partition("# stayed apart")
    softmax, last = line_of("z = torch.softmax("), line_of("return z * 2")
    assert any(softmax in row and last in row for row in kernels.splitlines())
    rows = [row for row in refusals.splitlines() if row]
    assert rows and all(" with " in row and ": " in row for row in rows)
    assert any(line_of("return z * 2") in row for row in rows)


def test_every_stage_is_shown(seen: Seen) -> None:
    expected = {
        "graph": "class Graph(nn.Module)",
        "aten": "torch.ops.aten._softmax",
        "passes": "folded _native_batch_norm_legit_no_training into convolution",
        "weights": "folded_weight(",
        "memory": "bytes",
        "kernels": "kernels from",
        "llvm": "define void @",
        "asm": "ret",
        "host": "def call(",
        "time": "emit",
    }
    for artefact, part in expected.items():
        assert part in text_of(seen, artefact), artefact
    compiling = [record for record in seen[3] if not record.name.startswith("version")]
    assert {record.graph for record in compiling} <= {"net", ""}


PROGRAM = """
import torch

def program(x):
    return torch.softmax(x * 2 + 1, -1).sum(0) * 3

with torch.no_grad():
    torch.compile(program, backend="fusee")(torch.randn(3, 4))
"""


def test_environment_variables_choose_what_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "launch.py"
    script.write_text(PROGRAM)
    environment = {
        "PATH": "",
        "HOME": str(tmp_path),
        "FUSEE_LOG": "aten,fusion,time",
        "FUSEE_DUMP": str(tmp_path / "dump"),
        "FUSEE_CACHE_DIR": str(tmp_path / "cache"),
    }
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    for title in ("=== aten graph_0", "=== fusion graph_0", "=== time graph_0"):
        assert title in ended.stderr
    assert "=== loops" not in ended.stderr
    assert "launch.py:5 in program" in ended.stderr
    (folder,) = (tmp_path / "dump").glob("*_graph_0")
    stems = [path.name.partition("_")[2] for path in sorted(folder.iterdir())]
    assert stems[:5] == ["graph.py", "aten.py", "passes.txt", "weights.txt", "loops.txt"]
    assert {"fusion.txt", "memory.txt", "host.py", "kernels.txt", "time.txt"} < set(stems)


def test_a_misspelt_artefact_names_the_nearest(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import fusee"],
        env={"PATH": "", "HOME": str(tmp_path), "FUSEE_LOG": "fuson"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode != 0 and "'fusion'; known artefacts: all, graph" in ended.stderr
