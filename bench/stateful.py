"""Models that keep state, and steps of training: `python -m bench.stateful` prints a table.

Each program writes to something that outlives its call: a number, a tensor that is replaced or
written to, a container, a global. Guards must hold in spite of that, at no more than a few
microseconds. Eager and compiled calls take turns in one process, on one thread; a figure is the
median of blocks. `first` is the first call, compilation included.
"""

from __future__ import annotations

import argparse
import collections
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import fusee

HELD: dict[str, Tensor] = {}


class Stateful(nn.Module):
    """Twelve layers of 16 numbers, and one way to keep something of each call."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
        self.count, self.rate = 0, 0.5
        self.mean, self.last = torch.zeros(16), torch.zeros(8, 16)
        self.states = [torch.zeros(8, 16) for _ in range(4)]
        self.kept: dict[str, Any] = {"last": self.last, "count": 0}
        self.recent: collections.deque[Tensor] = collections.deque(maxlen=5)
        self.history: list[Tensor] = []
        self.register_buffer("seen", torch.zeros(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.way(self, x)


def counter(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return x * m.count


def every_tenth(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return x + 1 if m.count % 10 == 0 else x


def decaying_number(m: Any, x: Tensor) -> Tensor:
    m.rate *= 0.999
    return x * m.rate


def running_mean(m: Any, x: Tensor) -> Tensor:
    m.mean = m.mean * 0.9 + x.mean(0) * 0.1
    return x + m.mean


def last_result(m: Any, x: Tensor) -> Tensor:
    y = x + m.last
    m.last = x
    return y


def list_of_states(m: Any, x: Tensor) -> Tensor:
    m.states = [state * 0.5 + x for state in m.states]
    return x + m.states[0]


def items_of_a_list(m: Any, x: Tensor) -> Tensor:
    for k, state in enumerate(m.states):
        m.states[k] = state * 0.5 + x
    return x + m.states[0]


def dictionary(m: Any, x: Tensor) -> Tensor:
    m.kept["last"], m.kept["count"] = m.kept["last"] * 0.5 + x, m.kept["count"] + 1
    return x + m.kept["last"]


def deque(m: Any, x: Tensor) -> Tensor:
    m.recent.append(x)
    return torch.stack([*m.recent]).sum(0)


def growing_list(m: Any, x: Tensor) -> Tensor:
    m.history.append(x.mean())
    return x


def replaced_buffer(m: Any, x: Tensor) -> Tensor:
    m.seen = m.seen * 0.9 + x
    return x + m.seen


def written_buffer(m: Any, x: Tensor) -> Tensor:
    m.seen.mul_(0.9).add_(x)
    return x + m.seen


def global_dictionary(m: Any, x: Tensor) -> Tensor:
    HELD["last"] = HELD.get("last", m.last) * 0.5 + x
    return x + HELD["last"]


WAYS = [
    counter, every_tenth, decaying_number, running_mean, last_result, list_of_states,
    items_of_a_list, dictionary, deque, growing_list, replaced_buffer, written_buffer,
    global_dictionary,
]  # fmt: skip


def training(kind: str) -> Callable[[], Any]:
    """A step of Adam on six layers, and what is done beside it."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    optimizer, mean, count = torch.optim.Adam(net.parameters(), lr=1e-3), copy.deepcopy(net), [0]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def step() -> Tensor:
        count[0] += 1
        if kind == "rate set in the step":
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * 0.99 ** count[0]
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        if kind == "clipped gradients":
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if kind == "scheduler":
            schedule.step()
        if kind == "averaged weights":
            with torch.no_grad():
                for p, q in zip(mean.parameters(), net.parameters(), strict=True):
                    p.lerp_(q, 0.01)
        return loss.detach()

    return step


STEPS = ["step", "clipped gradients", "rate set in the step", "scheduler", "averaged weights"]


def classifier(kind: str) -> Callable[[], Any]:
    """A step of SGD as training scripts have it: the loss first, then the gradients let go of."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(16, 32), torch.randint(0, 10, (16,))
    optimizer, mean = torch.optim.SGD(net.parameters(), lr=0.01), copy.deepcopy(net)
    total, count = [0.0], [0]

    def step() -> Any:
        loss = F.cross_entropy(net(x), y)
        if kind == "loss that is checked" and not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        count[0] += 1
        if kind == "mean kept in numbers":
            total[0] += loss.item() * x.shape[0]
        if kind != "gradients of four steps" or count[0] % 4 == 1:
            optimizer.zero_grad()
        loss.backward()
        if kind != "gradients of four steps" or count[0] % 4 == 0:
            optimizer.step()
        if kind == "averages that warm up":
            decay = min(0.999, (1 + count[0]) / (10 + count[0]))
            with torch.no_grad():
                for p, q in zip(mean.parameters(), net.parameters(), strict=True):
                    p.mul_(decay).add_(q, alpha=1 - decay)
        return total[0] / count[0] if kind == "mean kept in numbers" else loss.detach()

    return step


RECIPES = [
    "loss before zero_grad", "loss that is checked", "mean kept in numbers",
    "gradients of four steps", "averages that warm up",
]  # fmt: skip


def measured(programs: tuple[Callable[..., Any], Callable[..., Any]], *args: Any) -> list[float]:
    """Seconds of the first call, microseconds of eager's and of ours."""
    start = time.perf_counter()
    programs[1](*args)
    first = time.perf_counter() - start
    times: tuple[list[float], list[float]] = ([], [])
    for block in range(12):
        for program, found in zip(programs, times, strict=True):
            start = time.perf_counter()
            for _ in range(30):
                program(*args)
            if block > 1:  # the first ones compile, too
                found.append((time.perf_counter() - start) / 30 * 1e6)
    return [first, *map(statistics.median, times)]


def main() -> None:
    """Measure all, and print the table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    torch.set_num_threads(1)
    console = Console()
    table = Table("program", "first call, s", "eager, us", "compiled, us", "times as fast")
    x = torch.randn(8, 16)
    for name in track([*(way.__name__ for way in WAYS), *STEPS, *RECIPES], console=console):
        if name in (*STEPS, *RECIPES):
            make = training if name in STEPS else classifier
            found = measured((make(name), fusee.compile(make(name))))
        else:
            way = next(way for way in WAYS if way.__name__ == name)
            with torch.no_grad():
                found = measured((Stateful(way), fusee.compile(Stateful(way))), x)
        first, eager, ours = found
        table.add_row(
            name.replace("_", " "), f"{first:.2f}", f"{eager:.0f}", f"{ours:.0f}",
            f"{eager / ours:.2f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
