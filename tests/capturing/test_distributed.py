"""DistributedDataParallel around what is compiled, and compiled itself: two processes, by gloo."""

from __future__ import annotations

import copy
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusee
from fusee.backends import report

ROOT = Path(__file__).parents[2]

# Each way trains on other data in each process; parameters must come out as in eager, in both.
STEPS = """
import functools, os, sys, torch, fusee, fusee.compiler
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, device = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"


def net(width=64):
    torch.manual_seed(0)
    layers = (nn.Linear(16, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width))
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Linear(width, 4)).to(device)


def parallel(module, **how):
    ids = None if device == "cpu" else [rank]
    return DDP(module, device_ids=ids, bucket_cap_mb=0.01, gradient_as_bucket_view=True, **how)


def batches(count=5):
    made = torch.Generator().manual_seed(rank)
    for rows in [8] * (count - 1) + [3]:  # the last one is shorter
        yield tuple(torch.randn(rows, n, generator=made).to(device) for n in (16, 4))


def around(m):
    return fusee.compile(parallel(m))


def within(m):
    return parallel(fusee.compile(m, options={"prices": False}))


def in_place(m):
    made = parallel(m)
    fusee.install()
    made.compile()
    fusee.uninstall()
    return made


def whole_step(m):
    return parallel(m)


def train(make, compiles=lambda step: step):
    m = net()
    call = make(m)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

    @compiles
    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(call(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [step(*batch) for batch in batches()]
    return [*losses, *(p.grad for p in m.parameters()), *(p.detach() for p in m.parameters())]


def unsynchronised(call):
    (x, y), *_ = batches()
    with call.no_sync():
        F.mse_loss(call(x), y).backward()
    return [p.grad.clone() for p in call.parameters()]


want = train(parallel)
for make in (around, within, in_place, whole_step):
    fusee.compiler.reset()
    got = train(make, fusee.compile if make is whole_step else lambda step: step)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert not any(x.eager for x in fusee.report()), fusee.report()
    torch.testing.assert_close(*(unsynchronised(f(net())) for f in (make, parallel)))

# What DistributedDataParallel does at the backward knows itself by a weak reference.
for name in ("static_graph", "find_unused_parameters"):
    make = functools.partial(parallel, **{name: True})
    got, want = train(lambda m: fusee.compile(make(m))), train(make)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

# Checkpoints have the names of what was compiled, at any depth.
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
plain = net()
for made in (fusee.compile(net()), nn.Sequential(*map(fusee.compile, net()))):
    want = {name: x + 1 for name, x in plain.state_dict().items()}
    assert [*get_model_state_dict(made)] == [*want]
    set_model_state_dict(made, want)
    torch.testing.assert_close(dict(made.state_dict()), want)

# The parts of a graph send their gradients one after the other.
made = within(net())
(x, y), *_ = batches()
made(x)
assert len(fusee.report(made.module)) == 2, fusee.report(made.module)
assert len(fusee.report(fusee.compile(net()))) == 0

# A collective ends the graph.
def mean(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1

mine = torch.full((4,), float(rank), device=device)
torch.testing.assert_close(fusee.compile(mean)(mine), torch.full((4,), 3.0, device=device))
dist.destroy_process_group()
print("agrees")
"""


def run(device: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": "2"}
    own = {**os.environ, **about, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", STEPS, device],
            env={**own, "RANK": f"{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    assert all(text.endswith("agrees\n") for text in said), "\n".join(said)


def test_steps_are_those_of_eager() -> None:
    assert torch.distributed.is_gloo_available()
    run("cpu")


def test_buckets_of_open_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_limits", lambda: itertools.repeat(40))
    cut, run = list[Any](), report.Bucketed.__call__

    def noted(self: report.Bucketed, *inputs: Any) -> Any:
        cut.append(self.parts)
        return run(self, *inputs)

    monkeypatch.setattr(report.Bucketed, "__call__", noted)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    twin = copy.deepcopy(module)

    def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = module(x).view(x.shape[0] * 2, -1) * x.shape[0]
        loss: torch.Tensor = module(y.reshape(x.shape)).sum()
        return loss

    compiled = fusee.compile(step, dynamic=True)
    for rows in (3, 5, 6):
        x = torch.randn(rows, 4)
        (wanted := step(module, x)).backward()
        (found := compiled(twin, x)).backward()
        torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(cut) == 3 and all(len(parts) > 1 for parts in cut)
