"""The training example of torch.compile's introduction: densenet121, Adam, cross entropy.

`python -m bench.demo_training` takes the same steps eagerly and compiled, in turns; prints JSON.
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

STEPS = 8
# Losses of float32 training drift apart from step to step, however near each step is.
DRIFT = 0.02

Step = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


class Training:
    """densenet121 and its optimizer, from the same start whenever it is made."""

    def __init__(self, size: zoo.Size, wrap: Callable[[Step], Step]) -> None:
        self.model, (self.images,), _ = zoo.load("densenet121", size)
        self.model.train()
        self.labels = torch.arange(len(self.images)) % 100
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.run = wrap(self._step)

    def _step(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(model(data[0]), data[1])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self) -> None:
        """Take a step, and note its time and loss."""
        start = time.perf_counter()
        self.losses.append(self.run(self.model, (self.images, self.labels)).item())
        self.seconds.append(time.perf_counter() - start)


def measured(size: zoo.Size) -> dict[str, Any]:
    """Seconds of the first step, and of the last ones; whether the losses are eager's.

    The two take turns: what else the machine does slows both alike.
    """
    eager, ours = Training(size, lambda step: step), Training(size, fusee.compile)
    for _ in range(STEPS):
        eager.step()
        ours.step()
    pairs = zip(eager.losses, ours.losses, strict=True)
    return {
        "eager_s": statistics.median(eager.seconds[2:]),
        "first_s": ours.seconds[0],
        "second_s": ours.seconds[1],
        "later_s": statistics.median(ours.seconds[2:]),
        "losses": [eager.losses, ours.losses],
        "agrees": all(abs(a - b) <= DRIFT * abs(a) for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.demo_training", description=__doc__)
    parser.add_argument("--size", choices=("test", "bench"), default="bench")
    print(json.dumps(measured(parser.parse_args().size)))


if __name__ == "__main__":
    main()
