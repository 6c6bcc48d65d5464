"""`python -m tests.backends.pt2e`: a model that torchao quantises, in OpenVINO and in our compiler.

A process of its own, since transformers would import torchao wherever it can. Prints JSON:
    errors      how far each backend is from the quantised model in eager, of the largest result
    primitives  what OpenVINO executes
    unclaimed   what it does not
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, fx, nn

from fusee.backends import lookup


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        found: Tensor = self.last(x.mean((2, 3)))
        return found


def quantised(module: nn.Module, x: Tensor) -> nn.Module:
    """As torchao's guide for X86InductorQuantizer does it."""
    steps: Any = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86: Any = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = steps.prepare_pt2e(torch.export.export(module, (x,)).module(), quantizer)
    for _ in range(4):
        prepared(torch.randn_like(x))
    found: nn.Module = steps.convert_pt2e(prepared, fold_quantize=False)
    return found


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    module = quantised(Small().eval(), x)
    result: dict[str, Any] = {"errors": {}}
    for backend in ("openvino", "fusee"):
        reports = []

        def watched(gm: fx.GraphModule, inputs: Any, name: str = backend) -> Any:
            call = lookup(name)(gm, inputs)
            reports.append(call.report())  # noqa: B023  # called before the next turn
            return call

        torch._dynamo.reset()
        want = module(x)
        error = (torch.compile(module, backend=watched)(x) - want).abs().max() / want.abs().max()
        result["errors"][backend] = error.item()
        if backend == "openvino":
            (row,) = [row for report in reports for row in report.regions]
            assert row.primitives is not None and row.failed is None
            result["primitives"] = row.primitives()
            result["unclaimed"] = [one.op for report in reports for one in report.unclaimed]
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    with torch.no_grad():
        main()
