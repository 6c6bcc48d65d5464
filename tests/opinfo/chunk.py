"""Runs a list of (op, dtype) in this process and prints one JSON line before and after each.

    python -m tests.opinfo.chunk fusee [errors | sizes | gradients] [one] [cuda] < pairs.json

Whoever started it sees, if it dies, at which op.
"""

from __future__ import annotations

import functools
import importlib
import json
import signal
import sys
import warnings
from dataclasses import asdict
from typing import Any, Literal

import torch

from fusee.backends import lookup
from tests.opinfo.errors import run_errors
from tests.opinfo.gradients import run_gradients
from tests.opinfo.sizes import run_sizes
from tests.opinfo.sweep import Backend, Outcome, run_op

SECONDS_PER_OP = 300


def backend_named(name: str) -> Backend:
    """A backend by name, or `module:function`."""
    if ":" in name:
        module, function = name.split(":")
        found: Backend = getattr(importlib.import_module(module), function)
        return found
    return lookup(name)


def as_is(gm: Any, inputs: Any) -> Any:
    """The trivial backend: the captured graph, as it is."""
    return gm.forward


def _timeout(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS_PER_OP} s")


def main() -> None:
    kinds = {"sizes": run_sizes, "gradients": run_gradients, "errors": run_errors}
    run: Any = next((kinds[kind] for kind in kinds if kind in sys.argv[2:]), run_op)
    backend: Any = sys.argv[1] if run in (run_sizes, run_errors) else backend_named(sys.argv[1])
    if run is run_sizes:
        run = functools.partial(run_sizes, learns="gradients" in sys.argv[2:])
    if "cuda" in sys.argv[2:]:
        run = functools.partial(run, device="cuda")
    which: Literal["all", "other"] = "other" if "one" in sys.argv[2:] else "all"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _timeout)
    for name, dtype in json.load(sys.stdin):
        print(json.dumps({"start": [name, dtype]}), flush=True)
        signal.alarm(SECONDS_PER_OP)
        try:
            outcome = run(name, dtype, backend, which)
        except TimeoutError as error:
            outcome = Outcome(name, dtype, failures=[str(error)])
        signal.alarm(0)
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
