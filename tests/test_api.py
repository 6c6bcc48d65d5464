"""What users import: fusee.report(), and how little `import fusee` costs."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch import Tensor, fx

import fusee
from fusee.backends.native import compile_native
from fusee.backends.report import CompiledGraph


def program(x: Tensor, w: Tensor) -> Tensor:
    y = torch.softmax(x @ w, -1)
    return torch.sort(y)[0] + 1


def compiled(name: str) -> CompiledGraph:
    with torch.no_grad():
        example = [torch.randn(4, 6), torch.randn(6, 3)]
        return compile_native(fx.symbolic_trace(program), example, {"name": name})


def test_a_report_tells_what_was_compiled() -> None:
    graph = compiled("softmax of a product")
    (report,) = fusee.report(graph)
    assert report is graph.report()
    assert [row.op for row in report.externs] == ["aten.mm.default", "aten.sort.default"]
    assert all(row.reason for row in report.externs)
    assert len(report.kernels) == 2 and all("for" in row.body for row in report.kernels)
    assert set(report.stages_ms) >= {"trace", "lower", "emit"}
    text = str(report)
    for part in (
        "graph softmax of a product: 2 kernels",
        "matrix products are ATen's",
        "stages, ms",
    ):
        assert part in text


def test_reports_are_found_by_name_while_their_graphs_live() -> None:
    graph = compiled("the one")
    assert fusee.report("the one") == fusee.report(graph)
    assert graph.report() in fusee.report()
    del graph
    gc.collect()
    assert fusee.report("the one") == []


def test_reports_of_stock_torch_compile_are_found_by_name() -> None:
    torch._dynamo.reset()
    fast = torch.compile(program, backend="fusee", options={"name": "stock"})
    with torch.no_grad():
        fast(torch.randn(4, 6), torch.randn(6, 3))
    (report,) = fusee.report("stock")
    assert report.where is not None
    assert "test_api.py" in report.where and "x @ w" in report.where
    assert f"begins at    {report.where}" in str(report)


def test_report_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match='option "name"'):
        fusee.report(program)


IMPORTS = """
import sys
import fusee
heavy = ("torch", "llvmlite", "numpy", "fusee.backends")
assert not [name for name in heavy if name in sys.modules]
assert "report" in dir(fusee)
fusee.report, fusee.backends
heavy = ("torch._dynamo", "torch._inductor", "llvmlite")
print([name for name in heavy if name in sys.modules])
"""


def test_importing_is_light() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "[]\n", ended.stderr


def test_reports_of_what_compile_gave() -> None:
    module = torch.nn.Linear(4, 4)
    fast, x = fusee.compile(module, options={"prices": False}), torch.randn(3, 4)

    @fusee.compile
    def split(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y + 1 if y.sum() > 100 else y.cos()

    assert fusee.report(fast) == []
    with torch.no_grad():
        fast(x)
        split(x)
        method = fusee.compile(module.forward)
        method(x)
    (report,) = fusee.report(fast)
    assert report.externs
    assert len(fusee.report(split)) == 2 and len(fusee.report(method)) == 1
    assert report not in fusee.report(split)
