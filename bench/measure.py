"""One measurement in this process: `python -m bench.measure KIND MODEL COLUMNS ...` prints JSON.

    cold      first call with whatever the cache folders hold, memory, agreement with eager
    steady    median time of a call, columns taking turns in one process
    overhead  time of a call whose kernels do next to nothing

The line "compiling" on stdout tells the watching parent that eager's part is over.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bench.columns import Timed, compile_column, settings_of
from tests.compare import Mismatch, assert_same
from tests.models import zoo

Call = Callable[[], Any]


def cold(model: str, column: str, size: zoo.Size) -> dict[str, Any]:
    """Seconds of the first call (whole, backend's part), peak memory in bytes.

    `load` is the machine's load average when compilation began: near 0 on a quiet machine.
    """
    module, args, kwargs = zoo.load(model, size)
    with torch.no_grad():
        want = module(*args, **kwargs)
        module(*args, **kwargs)
        eager_bytes, cpu_s, load = peak_bytes(), cpu_seconds(), os.getloadavg()[0]
        print("compiling", flush=True)
        start = time.perf_counter()
        with settings_of(column):
            timed = Timed(column)
            fn = compile_column(column, module, timed)
            got = fn(*args, **kwargs)
        first_call_s = time.perf_counter() - start
        found: dict[str, Any] = {
            "first_call_s": first_call_s,
            "backend_s": timed.compile_s + timed.first_run_s,
            "compile_s": timed.compile_s,
            "cpu_s": cpu_seconds() - cpu_s,
            "load": load,
            "graphs": len(timed.graphs),
            "eager_bytes": eager_bytes,
            "peak_bytes": peak_bytes(),
        }
        print("compiled", flush=True)
        second = fn(*args, **kwargs)
    found["agrees"] = _agreement((got, second), (want, want), module, args, kwargs)
    return found


def peak_bytes() -> int:
    """The most memory this process has had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cpu_seconds() -> float:
    """Processor time of this process and the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _agreement(got: Any, want: Any, module: nn.Module, args: Any, kwargs: Any) -> str:
    """ "yes", or what differs from eager by the rules of tests/compare.py."""

    def oracle() -> Any:
        wide_args, wide_kwargs = pytree.tree_map(_widen, (args, kwargs))
        with torch.no_grad():
            exact = module.double()(*wide_args, **wide_kwargs)
        return (exact, exact)

    try:
        assert_same(got, want, oracle)
    except Mismatch as error:
        return str(error)
    return "yes"


def _widen(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def steady(model: str, columns: list[str], size: zoo.Size, seconds: float) -> dict[str, Any]:
    """Per column: median and quartiles of a call in milliseconds, `seconds` for each column."""
    module, args, kwargs = zoo.load(model, size)
    calls: dict[str, Call] = {}
    with torch.no_grad():
        for column in columns:
            with settings_of(column):
                fn = compile_column(column, module)
                fn(*args, **kwargs)
            calls[column] = lambda fn=fn: fn(*args, **kwargs)  # type: ignore[misc]
        return take_turns(calls, seconds)


def overhead(columns: list[str], seconds: float) -> dict[str, Any]:
    """Per column: a call of ten dependent kernels on 8 x 8, through torch.compile, in ms."""
    x = torch.randn(8, 8)
    calls: dict[str, Call] = {}
    with torch.no_grad():
        for column in columns:
            with settings_of(column):
                fn = compile_column(column, TenKernels())
                fn(x)
            calls[column] = lambda fn=fn: fn(x)  # type: ignore[misc]
        return take_turns(calls, seconds)


class TenKernels(nn.Module):
    """Sums along rows and columns in turn: each needs all of the one before."""

    def forward(self, x: Tensor) -> Tensor:
        for step in range(10):
            x = torch.softmax(x, step % 2)
        return x


def take_turns(calls: Mapping[str, Call], seconds: float) -> dict[str, Any]:
    """Time the calls in rounds, each round starting with another column."""
    once = {name: _seconds(call, 3) for name, call in calls.items()}
    # A turn is long enough for the clock and short enough that all columns see the same machine.
    repeats = {name: max(1, min(1000, int(0.02 / taken))) for name, taken in once.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    end = time.perf_counter() + seconds * len(names)
    while time.perf_counter() < end or len(taken[names[0]]) < 5:
        for name in names:
            _seconds(calls[name], 1)  # the caches are another column's
            taken[name].append(_seconds(calls[name], repeats[name]))
        names.append(names.pop(0))
    return {name: _summary(values) for name, values in taken.items()}


def _seconds(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _summary(seconds: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {
        "median_ms": middle * 1e3,
        "quartiles_ms": [low * 1e3, high * 1e3],
        "fastest_ms": min(seconds) * 1e3,
        "turns": len(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("cold", "steady", "overhead"))
    parser.add_argument("model")
    parser.add_argument("columns")
    parser.add_argument("--size", choices=("test", "bench"), default="bench")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    columns = given.columns.split(",")
    if given.kind == "cold":
        found = cold(given.model, columns[0], given.size)
    elif given.kind == "steady":
        found = steady(given.model, columns, given.size, given.seconds)
    else:
        found = overhead(columns, given.seconds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
