"""AdamW over 200 parameters: `python -m bench.optimizer` measures eager's forms and fusee.compile.

    bert    the parameters of transformer layers, 768 wide: 16 of each 26 are vectors
    small   200 parameters of 32 to 16,384 elements: what a call costs besides memory

The columns update equal parameters, one column after another, since all of them at once would take
8 GB. With one thread, the default, a figure is processor time, so that what else runs on the
machine counts as little as possible; with more it is time passed. A figure is the fastest of many
steps; `first` is the first call of fusee.compile, compilation included, with an empty cache.
`--device cuda` has the parameters on a GPU; a figure is the time until the GPU has done the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fusee

RESULTS = Path(__file__).parent / "results"
COUNT = 200
LAYER = [(768, 768), (768,)] * 4 + [(768,)] * 2 + [(3072, 768), (3072,), (768, 3072), (768,)]
MIXES: dict[str, list[tuple[int, ...]]] = {
    "bert": [*LAYER, (768,), (768,)],
    "small": [(64, 64), (64,), (128, 128), (128,), (32, 128), (32,)],
}
FORMS: dict[str, dict[str, Any]] = {
    "eager loop": {"foreach": False},
    "eager foreach": {"foreach": True},
    "eager fused": {"fused": True},
    "fusee": {"foreach": True},
}
# How far sums of parameters may differ, elsewhere by no more than of equal numbers: on a GPU forms
# round in another order (8e-7 of a sum, at the first run).
SAME: dict[str, tuple[float | None, float | None]] = {"cuda": (1e-5, 1e-3)}


def optimizer(
    shapes: list[tuple[int, ...]], form: dict[str, Any], device: str
) -> torch.optim.AdamW:
    torch.manual_seed(0)
    values = [torch.randn(shapes[k % len(shapes)]).to(device) for k in range(COUNT)]
    params = [torch.nn.Parameter(x) for x in values]
    for p in params:
        p.grad = torch.randn_like(p)
    return torch.optim.AdamW(params, lr=1e-3, **form)


def seconds(call: Callable[[], object], device: str) -> float:
    is_gpu = device != "cpu"
    wait: Callable[[], object] = torch.cuda.synchronize if is_gpu else lambda: None
    clock = time.perf_counter if is_gpu or torch.get_num_threads() > 1 else time.thread_time
    wait()
    begin = clock()
    call()
    wait()
    return clock() - begin


def measure(mix: str, turns: int, device: str) -> dict[str, Any]:
    """Milliseconds of each column; all must have made the same parameters."""
    row: dict[str, Any] = {"fastest_ms": {}, "median_ms": {}}
    sums: dict[str, list[float]] = {}
    for name, form in FORMS.items():
        made = optimizer(MIXES[mix], form, device)
        step = fusee.compile(made.step) if name == "fusee" else made.step
        row["first_s"] = seconds(step, device)
        taken = [seconds(step, device) for _ in track(range(turns), description=f"{mix}, {name}")]
        row["fastest_ms"][name] = min(taken) * 1e3
        row["median_ms"][name] = statistics.median(taken) * 1e3
        params = made.param_groups[0]["params"]
        sums[name] = [p.double().sum().item() for p in params]
        row["elements"] = sum(p.numel() for p in params)
    for found in sums.values():
        rtol, atol = SAME.get(device, (None, None))
        torch.testing.assert_close(found, sums["eager loop"], rtol=rtol, atol=atol)
    return row


def table(found: dict[str, Any]) -> str:
    """The rows as Markdown."""
    head = ["mix", "elements", "first call, s", *(f"{name}, ms" for name in FORMS)]
    lines = [head, ["---"] * len(head)]
    for mix, row in found["mixes"].items():
        times = row["fastest_ms"]
        cells = [f"{times[n]:.2f} ({times[n] / times['fusee']:.1f}x)" for n in FORMS]
        lines.append([mix, f"{row['elements']:,}", f"{row['first_s']:.1f}", *cells])
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"# AdamW over {COUNT} parameters\n\n{found['machine']}\n\n{text}\n"


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="optimizer")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FUSEE_CACHE_DIR"] = cache
        mixes = {mix: measure(mix, arguments.turns, arguments.device) for mix in MIXES}
    of_cpu = arguments.threads == 1 and arguments.device == "cpu"
    machine = f"{arguments.device}, torch {torch.__version__}, {arguments.threads} thread(s), "
    machine += f"fastest step, {'processor time' if of_cpu else 'time passed'}"
    found = {"machine": machine, "mixes": mixes}
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    text = table(found)
    (RESULTS / f"{arguments.name}.md").write_text(text)
    shown = Table(*["mix", *FORMS])
    for mix, row in mixes.items():
        shown.add_row(mix, *(f"{row['fastest_ms'][name]:.2f} ms" for name in FORMS))
    Console().print(shown)


if __name__ == "__main__":
    main()
