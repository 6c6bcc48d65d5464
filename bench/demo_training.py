"""The training example of torch.compile's introduction: densenet121, Adam, cross entropy.

`python -m bench.demo_training` takes the same steps eagerly and compiled and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusee
from tests.models import zoo

STEPS = 6
# Losses of float32 training drift apart from step to step, however near each step is.
DRIFT = 0.02

Step = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


def train(size: zoo.Size, wrap: Callable[[Step], Step]) -> tuple[list[float], list[float]]:
    """Seconds and loss of each step, from the same start at each call."""
    model, (images,), _ = zoo.load("densenet121", size)
    model.train()
    labels = torch.arange(len(images)) % 100
    optimizer = torch.optim.Adam(model.parameters())

    def step(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[0]), data[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    run, seconds, losses = wrap(step), [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append(run(model, (images, labels)).item())
        seconds.append(time.perf_counter() - start)
    return seconds, losses


def measured(size: zoo.Size) -> dict[str, Any]:
    """Seconds of the first step, and of the last ones; whether the losses are eager's."""
    eager_s, eager = train(size, lambda step: step)
    ours_s, ours = train(size, fusee.compile)
    return {
        "eager_s": statistics.median(eager_s[2:]),
        "first_s": ours_s[0],
        "second_s": ours_s[1],
        "later_s": statistics.median(ours_s[2:]),
        "losses": [eager, ours],
        "agrees": all(abs(a - b) <= DRIFT * abs(a) for a, b in zip(eager, ours, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.demo_training", description=__doc__)
    parser.add_argument("--size", choices=("test", "bench"), default="bench")
    print(json.dumps(measured(parser.parse_args().size)))


if __name__ == "__main__":
    main()
