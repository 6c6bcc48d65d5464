"""Sizes that vary: `python -m bench.dynamic` measures programs x columns; JSON and a table.

A program is called with one size after another, as it comes: the first call is static for all
columns, and sizes that change become open (dynamic=None). Measurements, in new processes:

    all      one call at each size, with empty caches: graphs compiled, seconds of all calls
    turns    median time of a call at each size, columns taking turns in one process
    memory   peak bytes of the tensors alive in a training step at the largest size
    calls    ten tiny kernels: a call at a size seen before, and at a new one
    same     a function whose sizes never change: its first call, and a later one

The column `static` compiles each size by itself: what open sizes cost shows beside it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fusee
from bench.child import measure_all, with_empty_caches
from bench.columns import compile_column, missing
from bench.dynamic_report import write
from bench.measure import TenKernels, cpu_seconds, take_turns
from bench.results_file import Results, Row
from bench.training import loss_of, peak_alive
from fusee.backends.report import Report
from tests.models import zoo

HERE = Path(__file__).parent
MODULE = "bench.dynamic"
COLUMNS = ("eager", "inductor", "compile", "static")
NEW_TOKENS = 64

Call = Callable[[int], Any]


class Program(NamedTuple):
    """What is called with sizes.

    make      a call by size, for a column
    model     a row of the zoo; `settings` replace its own
    varied    the setting that varies
    kinds     what is measured, see above
    more      keywords for generate()
    """

    make: Callable[[Program, str], Call]
    model: str
    varied: str
    sizes: tuple[int, ...]
    settings: dict[str, Any]
    columns: tuple[str, ...] = COLUMNS
    kinds: tuple[str, ...] = ("all", "turns")
    more: dict[str, Any] = {}  # noqa: RUF012

    def load(self) -> tuple[Any, Callable[[int], zoo.Inputs]]:
        """The model in evaluation mode, and its inputs by size."""
        row = zoo.MODELS[self.model]
        settings = {**row.bench, **self.settings}
        torch.manual_seed(0)
        module = row.build(**settings).eval()

        def inputs(size: int) -> zoo.Inputs:
            torch.manual_seed(size)
            return row.inputs(**{**settings, self.varied: size})

        return module, inputs


def compiled(column: str, target: Any) -> Callable[..., Any]:
    """As compile_column, which knows nothing of `static`."""
    if column == "static":
        return fusee.compile(target, dynamic=False)
    return compile_column(column, target)


def by_size(column: str, target: Any) -> Callable[[int], Callable[..., Any]]:
    """What a column calls at a size: one function for all, or one for each."""
    if column != "static":
        one = compiled(column, target)
        return lambda size: one
    made: dict[int, Callable[..., Any]] = {}
    return lambda size: made.setdefault(size, compiled(column, target))


def inference(program: Program, column: str) -> Call:
    module, inputs = program.load()
    function = by_size(column, module)
    given = {size: inputs(size) for size in program.sizes}

    @torch.no_grad()
    def call(size: int) -> Any:
        args, kwargs = given[size]
        return function(size)(*args, **kwargs)

    return call


def training(program: Program, column: str) -> Call:
    module, inputs = program.load()
    module.train()
    function = by_size(column, module)
    given = {size: inputs(size) for size in program.sizes}

    def call(size: int) -> Any:
        module.zero_grad(set_to_none=True)
        args, kwargs = given[size]
        loss = loss_of(function(size)(*args, **kwargs))
        loss.backward()
        return loss.detach()

    return call


def generation(program: Program, column: str) -> Call:
    """transformers' generate() with its default cache, which grows at each token."""
    module, inputs = program.load()
    module.config.use_cache = module.generation_config.use_cache = True
    module.generation_config.eos_token_id = None  # random weights would end some early
    module.generation_config.pad_token_id = module.generation_config.decoder_start_token_id = 0
    if column != "eager":
        module.forward = compiled(column, module.forward)
    given = {size: inputs(size)[1]["input_ids"] for size in program.sizes}

    @torch.no_grad()
    def call(size: int) -> Any:
        ids = given[size]
        return module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False,
            min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, **program.more,
        )  # fmt: skip

    return call


_TEXT = {"batch": 1, "layers": 4, "hidden": 256}
_THREE = ("eager", "inductor", "compile")
_LENGTHS = tuple(range(32, 232, 10))

PROGRAMS = {
    "bert": Program(inference, "bert", "tokens", _LENGTHS, {"batch": 1}, _THREE, ("all",)),
    "bert in batches": Program(inference, "bert", "tokens", _LENGTHS, {}, _THREE, ("all",)),
    "llama generate": Program(generation, "llama", "tokens", (24,), _TEXT, _THREE),
    "t5 generate": Program(generation, "t5", "tokens", (24,), _TEXT, _THREE),
    "llama beams": Program(
        generation, "llama", "tokens", (24,), _TEXT, _THREE, more={"num_beams": 4}
    ),
    "densenet121": Program(
        inference, "densenet121", "pixels", (96, 128, 160, 192, 224, 112), {"batch": 4}
    ),
    "unet": Program(inference, "unet2d_condition", "pixels", (24, 32, 40, 48, 16, 36), {}),
    "gpt training": Program(
        training, "gpt2", "tokens", tuple(range(40, 140, 10)), {}, COLUMNS,
        ("all", "turns", "memory"),
    ),
}  # fmt: skip


def captures(column: str, before: list[Report]) -> int | None:
    """Graphs that were compiled and are not among `before`, whose graphs may be gone by now."""
    if column in ("compile", "static"):
        return len({id(one) for one in fusee.report()} - {id(one) for one in before})
    if column == "inductor":
        counters = importlib.import_module("torch._dynamo.utils").counters
        return int(counters["stats"]["unique_graphs"])
    return None


def all_sizes(program: Program, column: str) -> Row:
    """Seconds of one call at each size, nothing compiled before."""
    call = program.make(program, column)
    load, before = os.getloadavg()[0], fusee.report()
    begin, cpu_s = time.perf_counter(), cpu_seconds()
    each = []
    for size in program.sizes:
        start = time.perf_counter()
        call(size)
        each.append(time.perf_counter() - start)
    return {
        "all_s": time.perf_counter() - begin,
        "cpu_s": cpu_seconds() - cpu_s,
        "each_s": each,
        "captures": captures(column, before),
        "load": load,
    }


def turns(program: Program, columns: Sequence[str], seconds: float) -> Row:
    """Per column: the median time of a call in milliseconds, by size."""
    calls = {column: program.make(program, column) for column in columns}
    for size in program.sizes:
        for call in calls.values():
            call(size)
    found: dict[str, Row] = {column: {"median_ms": {}} for column in columns}
    for size in program.sizes:
        taking = {column: partial(call, size) for column, call in calls.items()}
        for column, row in take_turns(taking, seconds / len(program.sizes)).items():
            found[column]["median_ms"][str(size)] = row["median_ms"]
    return found


def memory(program: Program, column: str) -> Row:
    """Peak bytes of tensors alive in a step at the largest size, after others."""
    call = program.make(program, column)
    sizes = [*program.sizes, max(program.sizes)]
    return {"step_bytes": peak_alive([partial(call, size) for size in sizes])}


# ------------------------------------------------------------------------------ tiny calls


def calls(column: str, seconds: float) -> Row:
    """Microseconds of a call of ten kernels, by columns.

    At a size that a version with open sizes serves; at new ones by what the first call at a size
    takes more than the second, the median of a hundred.
    """
    with torch.no_grad():
        functions = {name: compiled(name, TenKernels()) for name in ("static", column)}
        for x in [torch.randn(n, 8) for n in (8, 12, 9)]:
            functions[column](x)
        functions["static"](x)
        timed = {name: partial(f, x) for name, f in functions.items()}
        found = take_turns(timed, seconds)
        more = []
        for n in range(16, 116):
            y = torch.randn(n, 8)
            functions[column](x)
            start = time.perf_counter()
            functions[column](y)
            again = time.perf_counter()
            functions[column](y)
            more.append(2 * again - start - time.perf_counter())
    seen_us = found[column]["median_ms"] * 1e3
    return {
        "static_us": found["static"]["median_ms"] * 1e3,
        "seen_us": seen_us,
        "new_us": seen_us + statistics.median(more) * 1e6,
    }


def same(column: str, seconds: float) -> Row:
    """A function of one size with and without open sizes: microseconds of a call."""
    with torch.no_grad():
        functions = {name: compiled(name, TenKernels()) for name in ("static", column)}
        x = torch.randn(8, 8)
        timed = {name: partial(f, x) for name, f in functions.items()}
        found = take_turns(timed, seconds)
    return {
        "static_us": found["static"]["median_ms"] * 1e3,
        "seen_us": found[column]["median_ms"] * 1e3,
    }


# ------------------------------------------------------------------------------ all of them


def _jobs(names: Sequence[str], columns: Sequence[str]) -> list[tuple[str, str, str]]:
    """Kind, program, columns (comma-separated) of each child process."""
    found = []
    for name in names:
        if name == "ten kernels":
            found += [(kind, name, c) for kind in ("calls", "same") for c in columns
                      if c in ("inductor", "compile")]  # fmt: skip
            continue
        program = PROGRAMS[name]
        wanted = [c for c in columns if c in program.columns]
        for kind in program.kinds:
            if kind == "turns":
                found.append((kind, name, ",".join(wanted)))
            else:
                found += [(kind, name, c) for c in wanted if (kind, c) != ("memory", "static")]
    return found


def _run(given: argparse.Namespace) -> None:
    columns = [c for c in given.columns.split(",") if missing(c) is None]
    results = Results(given.results)
    jobs = _jobs(given.programs.split(","), columns)
    if not given.again:
        jobs = [j for j in jobs if not all(results.has(j[1], j[0], c) for c in j[2].split(","))]
    more = ["--seconds", str(given.seconds), *(["--quick"] if given.quick else [])]
    measure_all(jobs, results, with_empty_caches(more, 3600, module=MODULE), "turns")
    write(results.data, given.results, given.page)


def _quick(program: Program) -> Program:
    """A smaller one of the same kind."""
    row = zoo.MODELS[program.model].test
    settings: dict[str, Any] = {
        k: row[k] for k in ("layers", "hidden", "channels", "context") if k in row
    }
    sizes = tuple(n // 2 // 4 * 4 for n in program.sizes) if len(program.sizes) > 1 else (8,)
    return program._replace(settings=settings, sizes=tuple(dict.fromkeys(sizes)))


def _measured(given: argparse.Namespace) -> Row:
    columns = given.columns.split(",")
    if given.kind in ("calls", "same"):
        return {"calls": calls, "same": same}[given.kind](columns[0], given.seconds)
    program = PROGRAMS[given.program]
    program = _quick(program) if given.quick else program
    if given.kind == "turns":
        return turns(program, columns, given.seconds)
    return {"all": all_sizes, "memory": memory}[given.kind](program, columns[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.dynamic", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("measure", help="one measurement in this process, as JSON")
    one.add_argument("kind", choices=("all", "turns", "memory", "calls", "same"))
    one.add_argument("program")
    one.add_argument("columns")
    one.add_argument("--seconds", type=float, default=6.0)
    one.add_argument("--quick", action="store_true")
    parser.add_argument("--programs", default=",".join((*PROGRAMS, "ten kernels")))
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--results", type=Path, default=HERE / "results" / "dynamic.json")
    parser.add_argument("--page", type=Path, help="write the table into this page, too")
    parser.add_argument("--seconds", type=float, default=6.0, help="per column, over all sizes")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--quick", action="store_true", help="small models")
    given = parser.parse_args()
    if given.command is None:
        _run(given)
    else:
        print(json.dumps(_measured(given)))


if __name__ == "__main__":
    main()
