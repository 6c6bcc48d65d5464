"""Training steps: `python -m bench.training` measures models x columns; JSON, table and plot.

A step is zero_grad, forward, loss and backward; the model is compiled, the loss is eager's. Three
measurements, each in new processes:

    cold     seconds of the first step with empty caches, and how far its gradients are from eager's
    memory   peak bytes of the tensors alive in a later step, parameters and inputs apart
    steady   median time of a step, columns taking turns in one process
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bench.child import measure, measure_all
from bench.columns import compile_column, missing
from bench.measure import take_turns
from bench.results_file import Results, Row
from bench.training_report import write
from tests.models import zoo

HERE = Path(__file__).parent
MODULE = "bench.training"
COLUMNS = ("eager", "inductor", "fusee", "compile")
MODELS = (
    "resnet18", "mobilenet_v3_small", "densenet121", "convnext_atto", "vit_b_16", "bert", "gpt2",
    "llama", "t5",
)  # fmt: skip
SEED = 7


class Step:
    """A training step of a model of the zoo without its optimizer."""

    def __init__(self, model: str, size: zoo.Size, column: str) -> None:
        self.module, self.args, self.kwargs = zoo.load(model, size)
        self.module.train()
        self.run = compile_column(column, self.module)

    def __call__(self) -> Tensor:
        self.module.zero_grad(set_to_none=True)
        loss = loss_of(self.run(*self.args, **self.kwargs))
        loss.backward()
        return loss.detach()


def loss_of(out: Any) -> Tensor:
    """Cross entropy of logits against fixed classes, mean square of anything else."""
    first = next(x for x in pytree.tree_leaves(out) if isinstance(x, Tensor))
    if first.dim() == 4 or first.shape[-1] not in (2, 100, 1000):
        return first.square().mean()
    rows = first.flatten(0, -2)
    classes = torch.arange(rows.shape[0], device=rows.device) % rows.shape[1]
    return F.cross_entropy(rows, classes)


def gradients(module: nn.Module) -> Tensor:
    """All gradients in one vector; zeros where a parameter has none."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return torch.cat([x.flatten() for x in found])


def cold(model: str, column: str, size: zoo.Size) -> Row:
    """Seconds of the first step; relative distances of its loss and gradients from eager's."""
    eager = Step(model, size, "eager")
    torch.manual_seed(SEED)
    want = eager(), gradients(eager.module)
    load = os.getloadavg()[0]
    print("compiling", flush=True)
    start = time.perf_counter()
    step = Step(model, size, column)
    begin = time.perf_counter()
    torch.manual_seed(SEED)
    loss = step()
    end = time.perf_counter()
    print("compiled", flush=True)
    return {
        "first_step_s": end - begin,
        "build_s": begin - start,
        "load": load,
        "loss_off": ((loss - want[0]).abs() / want[0].abs()).item(),
        "gradients_off": ((gradients(step.module) - want[1]).norm() / want[1].norm()).item(),
    }


def memory(model: str, column: str, size: zoo.Size) -> Row:
    """Peak bytes of tensors alive in the third step, parameters and inputs apart."""
    return {"step_bytes": peak_alive([Step(model, size, column)] * 3)}


def peak_alive(calls: Sequence[Callable[[], Any]]) -> int:
    """Peak bytes alive in the last of some calls, of all tensors that they made."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        for call in calls[:-1]:
            call()
        with torch.profiler.record_function("last call"):
            calls[-1]()
    events = profile.profiler.kineto_results.events()
    begin = next(e.start_ns() for e in events if e.name() == "last call")
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = peak = 0
    for at, count in changes:
        alive += count
        if at >= begin:
            peak = max(peak, alive)
    return peak


def steady(model: str, columns: Sequence[str], size: zoo.Size, seconds: float) -> Row:
    """Per column: median and quartiles of a step in milliseconds."""
    steps: dict[str, Callable[[], Any]] = {c: Step(model, size, c) for c in columns}
    for step in steps.values():
        step()
    return take_turns(steps, seconds)


# ------------------------------------------------------------------------------ all of them


def _measured(kind: str, model: str, columns: str, given: argparse.Namespace, caches: Path) -> Row:
    """One measurement; the caches are empty at a column's first, which is the cold one."""
    size = "test" if given.quick else "bench"
    arguments = ["measure", kind, model, columns, "--size", size, "--seconds", str(given.seconds)]
    # TorchInductor's columns take longest to compile, so steady state finds them in their cache
    return measure(arguments, caches / ("inductor" if kind == "steady" else columns), module=MODULE)


def _run(given: argparse.Namespace) -> None:
    columns = [c for c in given.columns.split(",") if missing(c) is None]
    results = Results(given.results)
    jobs = []
    for model in given.models.split(","):
        for kind in ("cold", "memory"):
            jobs += [(kind, model, column) for column in columns]
        jobs.append(("steady", model, ",".join(columns)))
    if not given.again:
        jobs = [j for j in jobs if not all(results.has(j[1], j[0], c) for c in j[2].split(","))]
    with tempfile.TemporaryDirectory(prefix="fusee-bench-") as caches:

        def measured(kind: str, model: str, column: str) -> Row:
            return _measured(kind, model, column, given, Path(caches) / model)

        measure_all(jobs, results, measured, "steady")
    write(results.data, given.results)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.training", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("measure", help="one measurement in this process, as JSON")
    one.add_argument("kind", choices=("cold", "memory", "steady"))
    one.add_argument("model")
    one.add_argument("columns")
    one.add_argument("--size", choices=("test", "bench"), default="bench")
    one.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--results", type=Path, default=HERE / "results" / "training.json")
    parser.add_argument("--seconds", type=float, default=4.0, help="per column, steady state")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    given = parser.parse_args()
    if given.command is None:
        _run(given)
        return
    columns = given.columns.split(",")
    if given.kind == "steady":
        found = steady(given.model, columns, given.size, given.seconds)
    else:
        found = {"cold": cold, "memory": memory}[given.kind](given.model, columns[0], given.size)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
