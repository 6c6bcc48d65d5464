"""How compile time grows with a program: `python -m bench.growth` prints the time of each stage.

Programs of n operations, each twice as large as the one before it: every stage should take about
twice as long each time. `exponent` is the slope between the first and the last size on logarithmic
axes: 1 is linear, 2 quadratic.

    chain        element-wise operations, one after the other, each with a number of its own
    recurrence   an element-wise recurrence that reads its state twice, as Euler's method does
    layers       linear and gelu in turn, each with the same weight
    wide         multiples of one input, added up two by two
    derived      what comes of a weight alone, step by step, with a reader at each step

Each runs for inference and for training (forward and backward). Times are of one first call in a
process that has compiled a small program before; no object code is taken from disk.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fusee
from fusee.backends.report import Report

MODES = ("inference", "training")
SIZES = (1250, 2500, 5000, 10_000, 20_000)

Program = Callable[[Tensor, Tensor], Tensor]


def chain(n: int) -> Program:
    def run(x: Tensor, w: Tensor) -> Tensor:
        for k in range(n // 4):
            x = (torch.sin(x) if k % 2 else torch.tanh(x)) + w[0] * (k + 0.5)
        return x

    return run


def recurrence(n: int) -> Program:
    def run(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(n // 4):
            x = x + 0.01 * torch.sin(x * w[0])
        return x

    return run


def layers(n: int) -> Program:
    def run(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(n // 2):
            x = F.gelu(F.linear(x, w))
        return x

    return run


def wide(n: int) -> Program:
    def run(x: Tensor, w: Tensor) -> Tensor:
        parts = [x * (k + 0.5) for k in range(n // 2)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts = [a + b for a, b in pairs] + parts[len(parts) & ~1 :]
        return parts[0] * w[0]

    return run


def derived(n: int) -> Program:
    weight = nn.Parameter(torch.randn(16, 16) / 4, requires_grad=False)

    def run(x: Tensor, w: Tensor) -> Tensor:
        made: Tensor = weight
        for k in range(n // 4):
            made = torch.tanh(made) * (k % 3 + 0.5)
            x = x + made[k % 16]
        return x * w[0]

    return run


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "chain": chain,
    "recurrence": recurrence,
    "layers": layers,
    "wide": wide,
    "derived": derived,
}


def stages(program: str, mode: str, n: int) -> dict[str, float]:
    """Seconds of each stage of a first call, and of all of it."""
    torch.manual_seed(0)
    x, w = torch.randn(4, 16), torch.randn(16, 16) / 4
    w.requires_grad_(mode == "training")
    compiled = fusee.compile(PROGRAMS[program](n), options={"cache": False})
    begin = time.perf_counter()
    result = compiled(x, w)
    if mode == "training":
        result.sum().backward()
    found = {"all": time.perf_counter() - begin}
    for report in fusee.report(compiled):
        _add(found, report)
    found["capture and run"] = 2 * found["all"] - sum(found.values())
    return found


def _add(found: dict[str, float], report: Report) -> None:
    for stage, ms in report.stages_ms.items():
        found[stage] = found.get(stage, 0.0) + ms / 1e3
    if report.backward is not None:
        _add(found, report.backward)


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope between the first and the last size on logarithmic axes."""
    return math.log(seconds[-1] / seconds[0]) / math.log(sizes[-1] / sizes[0])


def table(program: str, mode: str, rows: dict[int, dict[str, float]]) -> Table:
    """A row per stage, a column per size."""
    sizes = list(rows)
    shown = Table("stage, s", *(f"{n:,}" for n in sizes), "exponent", title=f"{program}, {mode}")
    for stage in sorted(rows[sizes[-1]], key=lambda name: rows[sizes[-1]][name]):
        seconds = [max(row.get(stage, 0.0), 1e-4) for row in rows.values()]
        slope = f"{exponent(sizes, seconds):.2f}" if len(sizes) > 1 else ""
        shown.add_row(stage, *(f"{s:.3f}" for s in seconds), slope)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="comma-separated")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="comma-separated")
    given = parser.parse_args()
    sizes = [int(n) for n in given.sizes.split(",")]
    torch.set_num_threads(1)
    console = Console()
    for mode in given.modes.split(","):
        for program in given.programs.split(","):
            stages(program, mode, 50)  # what is set up once is no part of any size's time
            console.print(table(program, mode, {n: stages(program, mode, n) for n in sizes}))


if __name__ == "__main__":
    main()
