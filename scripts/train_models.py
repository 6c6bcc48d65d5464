"""Training steps of the models of tests/models/zoo.py, compiled and eager; float64 arbitrates.

    PYTHONPATH=. python scripts/train_models.py [name ...] [--steps 3] [--optimizer adamw]

For each model: losses, gradients, parameters and buffers after the steps are compared; a row says
how far both are from float64, and how long the first compiled step took.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.autodiff.steps import check_training
from tests.models import zoo

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


def loss_of(out: Any) -> Tensor:
    """A number that depends on every floating result."""
    if isinstance(out, Tensor):
        return out.square().mean() if out.is_floating_point() else torch.zeros(())
    values = out.values() if isinstance(out, dict) else out
    if hasattr(out, "to_tuple"):
        values = out.to_tuple()
    parts = [loss_of(x) for x in values if isinstance(x, (Tensor, tuple, list, dict))]
    return torch.stack([p for p in parts if p.requires_grad]).sum()


def batches(args: tuple[Any, ...], steps: int) -> list[list[Any]]:
    found = []
    for k in range(steps):
        found.append(
            [x + 0.01 * k if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        )
    return found


def check(name: str, steps: int, optimizer: str) -> None:
    module, args, kwargs = zoo.load(name, "test")
    module.train()

    def step(model: nn.Module, *given: Any) -> Tensor:
        wide = next(model.parameters()).dtype is torch.float64
        extra = {
            key: x.double() if wide and isinstance(x, Tensor) and x.is_floating_point() else x
            for key, x in kwargs.items()
        }
        return loss_of(model(*given, **extra))

    check_training(module, step, batches(args, steps), optimizer=OPTIMIZERS[optimizer])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sgd")
    given = parser.parse_args()
    failed = []
    for name in given.names or zoo.names():
        begin = time.perf_counter()
        try:
            check(name, given.steps, given.optimizer)
            print(f"{name:24} ok      {time.perf_counter() - begin:6.1f} s", flush=True)
        except Exception as error:  # noqa: BLE001  # every model gets its row
            failed.append(name)
            text = next((line for line in str(error).splitlines() if line.strip()), "")
            print(f"{name:24} FAILED  {type(error).__name__}: {text[:160]}", flush=True)
            if given.names:
                traceback.print_exc()
    return len(failed)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    sys.exit(main())
