"""Compile a small convolutional network, compare it with eager, and time both.

python examples/compile_a_model.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fusee


def network() -> nn.Module:
    """Three blocks of convolution, batch norm and relu, and a classifier."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()


def milliseconds(module: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The fastest of twenty calls."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        module(x)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    torch.manual_seed(0)
    eager, x = network(), torch.randn(4, 3, 64, 64)
    fast = fusee.compile(eager)
    with torch.no_grad():
        start = time.perf_counter()
        got = fast(x)
        print(f"first call      {time.perf_counter() - start:.2f} s")
        print(f"largest error   {(got - eager(x)).abs().max().item():.1e}")
        print(f"eager           {milliseconds(eager, x):.2f} ms")
        print(f"fusee           {milliseconds(fast, x):.2f} ms")


if __name__ == "__main__":
    main()
