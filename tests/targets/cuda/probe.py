"""Times of kernels on a GPU beside eager's and torch.compile's, in alternating runs.

python -m tests.targets.cuda.probe [part of a name]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fusee

Program = tuple[Callable[..., Any], tuple[int, ...], torch.dtype]
HALF, FULL = torch.bfloat16, torch.float32
ROUNDS, CALLS = 7, 20

PROGRAMS: dict[str, Program] = {
    "softmax, long rows": (lambda x: torch.softmax(x, -1), (2048, 50_304), HALF),
    "log_softmax, long rows": (lambda x: F.log_softmax(x.float(), -1), (2048, 50_304), HALF),
    "layer norm, long rows": (lambda x: F.layer_norm(x, x.shape[-1:]), (1024, 65_536), HALF),
    "layer norm, 1024": (lambda x: F.layer_norm(x, x.shape[-1:]), (16_384, 1024), HALF),
    "sum of all": (lambda x: (x * x).sum(), (1 << 26,), FULL),
    "few rows": (lambda x: (x.sum(-1), x.amax(-1)), (8, 1 << 22), FULL),
    "columns": (lambda x: x.sum(0), (32_768, 768), HALF),
    "columns of gradients": (lambda x: ((x * 2).sum(0), (x * x).sum(0)), (16_384, 4096), HALF),
    "variance of all": (lambda x: torch.var_mean(x), (1 << 26,), FULL),
    "batch norm": (
        lambda x: F.batch_norm(x, None, None, training=True), (64, 64, 112, 112), FULL),
    "transpose": (lambda x: x.t().contiguous(), (4096, 4096), FULL),
    "transpose and sum": (lambda x: (x + x.t()).relu(), (4096, 4096), FULL),
    "transpose, odd": (lambda x: x.t().contiguous(), (4095, 4097), FULL),
    "transpose, 16 bits": (lambda x: x.t().contiguous(), (4096, 4096), HALF),
    "transpose, 8 bits": (lambda x: x.t().contiguous(), (4096, 4096), torch.int8),
    "channels last": (
        lambda x: x.contiguous(memory_format=torch.channels_last), (64, 128, 80, 80), FULL),
    "channels first": (lambda x: x.permute(0, 3, 1, 2).contiguous(), (64, 80, 80, 128), FULL),
    "pixels last": (
        lambda x: x.contiguous(memory_format=torch.channels_last), (64, 3, 512, 512), FULL),
    "interleaved": (lambda x: torch.stack([x[0], x[1]], -1), (2, 1 << 23), FULL),
    "argmax": (lambda x: x.argmax(-1), (4, 1 << 22), FULL),
}  # fmt: skip


def time_of(call: Callable[..., Any], x: torch.Tensor) -> float:
    """Microseconds of one call among many."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    for _ in range(CALLS):
        call(x)
    end.record()
    end.synchronize()
    return 1000 * float(start.elapsed_time(end)) / CALLS


def main(part: str = "") -> None:
    print(f"{'us a call':26}{'eager':>10}{'stock':>10}{'ours':>10}{'stock/ours':>12}{'error':>10}")
    for name, (fn, shape, dtype) in PROGRAMS.items():
        if part not in name:
            continue
        x = torch.randn(shape, device="cuda").to(dtype)
        torch._dynamo.reset()
        calls = [fn, torch.compile(fn), fusee.compile(fn, options={"prices": False})]
        found = [call(x) for call in calls for _ in range(3)][2::3]
        theirs, ours = (y[0] if isinstance(y, tuple) else y for y in found[::2])
        error = (theirs.float() - ours.float()).abs().max().item()
        rows = [[time_of(call, x) for call in calls] for _ in range(ROUNDS)]
        eager, stock, own = (statistics.median(column) for column in zip(*rows, strict=True))
        times = f"{eager:10.1f}{stock:10.1f}{own:10.1f}"
        print(f"{name:26}{times}{stock / own:12.2f}{error:10.1e}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
