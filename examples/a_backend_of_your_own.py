"""A backend is a function `(gm, example_inputs) -> callable`; this one counts what it is given.

python examples/a_backend_of_your_own.py
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fusee import backends


def counting(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
    """Print how often each operator is called, then leave the rest to Fusee's compiler."""
    calls = (node for node in gm.graph.nodes if node.op.startswith("call_"))
    counts = collections.Counter(str(getattr(n.target, "__name__", n.target)) for n in calls)
    for name, count in counts.most_common():
        print(f"{count:4} {name}")
    compiled: Callable[..., Any] = backends.lookup("fusee")(gm, example_inputs)
    return compiled


def main() -> None:
    fast = torch.compile(lambda x: torch.sin(x) + torch.cos(x) * torch.sin(2 * x), backend=counting)
    x = torch.randn(8)
    with torch.no_grad():
        print(fast(x).shape)


if __name__ == "__main__":
    main()
