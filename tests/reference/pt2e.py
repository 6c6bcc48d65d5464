"""`python -m tests.reference.pt2e`: what torchao quantises, in OpenVINO and in our compiler.

A process of its own, since transformers would import torchao wherever it can. Prints JSON, by route
and backend:
    error       how far it is from the quantised model in eager, of the largest result
    graphs      how many were compiled
    primitives  what OpenVINO executes
    unclaimed   what it does not
and for weights that torchao has folded (`fold_quantize=True`, its default)
    said        warnings of ours
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import fusee
from fusee.errors import FuseeWarning
from tests.reference.routes import ROUTES, routes


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


def quantised(module: nn.Module, x: Tensor, fold: bool = False) -> nn.Module:
    """As torchao's guide for X86InductorQuantizer does it."""
    steps: Any = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86: Any = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = steps.prepare_pt2e(torch.export.export(module, (x,)).module(), quantizer)
    for _ in range(4):
        prepared(torch.randn_like(x))
    found: nn.Module = steps.convert_pt2e(prepared, fold_quantize=fold)
    return found


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    module = quantised(Small().eval(), x)
    want = module(x)
    found: dict[str, Any] = {}
    for name in ROUTES:
        for backend in ("fusee", "openvino"):
            for route in routes(name):
                got = route.compile(module, backend=backend)(x)
                row = found[f"{name} {backend}"] = {
                    "error": ((got - want).abs().max() / want.abs().max()).item(),
                    "graphs": len(route.graphs),
                }
                (report,) = route.graphs
                if backend == "openvino":
                    (region,) = report.regions
                    assert region.primitives is not None and region.failed is None
                    row["primitives"] = region.primitives()
                    row["unclaimed"] = [one.op for one in report.unclaimed]
    folded = quantised(Small().eval(), x, fold=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FuseeWarning)
        got = fusee.compile(folded, backend="openvino")(x)
    found["folded"] = {
        "error": (got - folded(x)).abs().max().item(),
        "said": [str(one.message) for one in said if one.category is FuseeWarning],
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    with torch.no_grad():
        main()
