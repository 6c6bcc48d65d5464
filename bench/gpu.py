"""Models on one NVIDIA GPU: `python -m bench.gpu` measures models x columns; JSON and a table.

    first    the first call with empty caches, in a new process: seconds, agreement with eager
    again    the same with what such a process has left: code, and captures (FUSEE_KEEP_CAPTURES)
    turns    milliseconds of a call, columns taking turns in one process
    memory   peak bytes that torch reserves over ten calls, and over the last five, in a new process

Columns: eager, TorchInductor, the same in mode reduce-overhead, fusee.compile, and in training
fusee.compile of all that a step does: gradients and the optimizer, too. Random weights. Rows named
"zoo ..." are the models of tests/models/zoo.py, eight times the batch of CPUs, in bfloat16.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusee
from bench.child import measure_all, with_empty_caches
from bench.report import geomean, update_page
from bench.results_file import Results, Row
from tests.models import zoo

HERE = Path(__file__).parent
MODULE = "bench.gpu"
COLUMNS = ("eager", "inductor", "reduce-overhead", "compile", "step")
TITLES = {
    "eager": "eager",
    "inductor": "TorchInductor",
    "reduce-overhead": "reduce-overhead",
    "compile": "fusee.compile",
    "step": "of the whole step",
}
KINDS = ("first", "again", "turns", "memory")
MARKS = ("<!-- gpu:begin -->", "<!-- gpu:end -->")

Step = Callable[[Callable[..., Any]], Any]


class Program(NamedTuple):
    """A module and what one call of it, or of what was compiled of it, does.

    asked   by kind, what the project set out for: milliseconds of a call, seconds of a first one
    """

    make: Callable[[], tuple[nn.Module, Step]]
    asked: Mapping[str, float] = MappingProxyType({})


def _asked(turns: float, first: float) -> Mapping[str, float]:
    return {"turns": turns, "first": first, "again": 0.4}


def _models() -> Any:
    return importlib.import_module("transformers")


def _forward(module: nn.Module, *inputs: Tensor, **named: Tensor) -> tuple[nn.Module, Step]:
    def step(call: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return _first(call(*inputs, **named))

    return module.eval(), step


def _train(
    module: nn.Module, loss: Callable[[Any], Tensor], *inputs: Tensor
) -> tuple[nn.Module, Step]:
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)

    def step(call: Callable[..., Any]) -> Any:
        optimizer.zero_grad(set_to_none=True)
        found = loss(_first(call(*inputs)))
        found.backward()
        optimizer.step()
        return found.detach()

    return module.train(), step


def _first(found: Any) -> Tensor:
    """Logits, or hidden states."""
    return found if isinstance(found, Tensor) else found[0]


def _mean(x: Tensor) -> Tensor:
    return x.float().square().mean()


def _ids(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(0, vocabulary, shape, device="cuda")


def _on_the_gpu(make: Callable[[], nn.Module]) -> nn.Module:
    """In bfloat16. Weights are drawn there: a CPU takes a minute for 1.2 billion."""
    with torch.device("cuda"):
        return make().to(torch.bfloat16)


def _bert() -> nn.Module:
    found = _models()
    return _on_the_gpu(lambda: found.BertModel(found.BertConfig()))


def _gpt2() -> nn.Module:
    found = _models()
    config = found.GPT2Config(use_cache=False)
    return _on_the_gpu(lambda: found.GPT2LMHeadModel(config))


def _llama() -> nn.Module:
    found = _models()
    config = found.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, use_cache=False,
    )  # fmt: skip
    return _on_the_gpu(lambda: found.LlamaForCausalLM(config))


def _vision(name: str, dtype: torch.dtype) -> nn.Module:
    if name.startswith("vit"):
        made = importlib.import_module("timm").create_model(name)
    else:
        made = getattr(importlib.import_module("torchvision.models"), name)()
    return made.to("cuda", dtype)


def _images(count: int, side: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 3, side, side, device="cuda", dtype=dtype)


def _mlp() -> tuple[nn.Module, Step]:
    layers = [(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(12)]
    module = nn.Sequential(*(layer for three in layers for layer in three)).cuda()
    return _forward(module, torch.randn(64, 256, device="cuda"))


def _densenet_step() -> tuple[nn.Module, Step]:
    target = torch.randint(0, 1000, (16,), device="cuda")
    module = _vision("densenet121", torch.float32)
    return _train(module, lambda y: nn.functional.cross_entropy(y, target), _images(16, 128))


def _of_the_zoo(name: str) -> tuple[nn.Module, Step]:
    settings = zoo.MODELS[name].bench
    module = zoo.load(name, "bench")[0].to("cuda", HALF)
    args, kwargs = zoo.MODELS[name].inputs(**{**settings, "batch": 8 * settings["batch"]})
    args, kwargs = pytree.tree_map_only(Tensor, _on_gpu, (args, kwargs))
    return _forward(module, *args, **kwargs)


def _on_gpu(x: Tensor) -> Tensor:
    return x.to("cuda", HALF if x.is_floating_point() else x.dtype)


HALF = torch.bfloat16
PROGRAMS = {
    "bert": Program(lambda: _forward(_bert(), _ids(30_000, 16, 256)), _asked(2.3, 0.9)),
    "vit": Program(
        lambda: _forward(_vision("vit_base_patch16_224", HALF), _images(32, 224, HALF)),
        _asked(2.75, 0.8),
    ),
    "llama, one token": Program(lambda: _forward(_llama(), _ids(100_000, 1, 1)), _asked(0.95, 0.9)),
    "llama, 1,024 tokens": Program(lambda: _forward(_llama(), _ids(100_000, 1, 1024))),
    "densenet121": Program(
        lambda: _forward(_vision("densenet121", torch.float32), _images(16, 128)),
        _asked(1.8, 1.5),
    ),
    "resnet50": Program(lambda: _forward(_vision("resnet50", HALF), _images(64, 224, HALF))),
    "mlp": Program(_mlp, _asked(0.13, 0.3)),
    "densenet121, training": Program(_densenet_step, _asked(8.5, 5.0)),
    "gpt2, training": Program(
        lambda: _train(_gpt2(), _mean, _ids(50_000, 8, 512)), _asked(13.8, 2.5)
    ),
    "bert, training": Program(lambda: _train(_bert(), _mean, _ids(30_000, 16, 256))),
    "resnet50, training": Program(
        lambda: _train(_vision("resnet50", HALF), _mean, _images(64, 224, HALF))
    ),
    "vit, training": Program(
        lambda: _train(_vision("vit_base_patch16_224", HALF), _mean, _images(32, 224, HALF))
    ),
    "llama, training": Program(lambda: _train(_llama(), _mean, _ids(100_000, 1, 1024))),
    **{f"zoo {name}": Program(partial(_of_the_zoo, name)) for name in zoo.MODELS},
}


def compiled(column: str, module: nn.Module, step: Step) -> Callable[[], Any]:
    """What does one call."""
    if column == "step":
        whole: Callable[[], Any] = fusee.compile(lambda: step(module))
        return whole
    call: Callable[..., Any] = module
    if column == "compile":
        call = fusee.compile(module)
    elif column != "eager":
        call = torch.compile(module, mode=None if column == "inductor" else column)
    return lambda: step(call)


def first(program: Program, column: str) -> Row:
    """Seconds of the first call, and how far its result is from eager's, of the largest there."""
    torch.manual_seed(0)
    module, step = program.make()
    state = torch.cuda.get_rng_state()
    want = step(module)
    torch.manual_seed(0)
    module, step = program.make()
    torch.cuda.set_rng_state(state)
    call = compiled(column, module, step)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    got = call()
    torch.cuda.synchronize()
    taken = time.perf_counter() - begin
    away = (got.double() - want.double()).abs().max() / want.double().abs().max()
    return {"first_s": taken, "away": away.item()}


def memory(program: Program, column: str) -> Row:
    module, step = program.make()
    call = compiled(column, module, step)
    for _ in range(5):
        call()
    found = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    later = torch.cuda.max_memory_reserved()
    return {"reserved_bytes": max(found, later), "later_bytes": later}


def turns(program: Program, columns: Sequence[str], seconds: float) -> Row:
    """Per column: the median of what calls take, a few at a time between two events."""
    module, step = program.make()
    calls = {column: compiled(column, module, step) for column in columns if column != "step"}
    if "step" in columns:  # an optimizer that is compiled counts its steps on the GPU
        calls["step"] = compiled("step", *program.make())
    for call in calls.values():
        for _ in range(4):  # recordings are made
            call()
    taken: dict[str, list[float]] = {column: [] for column in columns}
    end = time.perf_counter() + seconds * len(columns)
    while time.perf_counter() < end or len(taken[columns[0]]) < 5:
        for column, call in calls.items():
            call()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            for _ in range(5):
                call()
            marks[1].record()
            torch.cuda.synchronize()
            taken[column].append(marks[0].elapsed_time(marks[1]) / 5)
    return {column: {"median_ms": statistics.median(x)} for column, x in taken.items()}


# ------------------------------------------------------------------------------ the table


def as_markdown(data: Row) -> str:
    """First calls, times of a call, memory, and where it was measured."""
    parts = []
    for title, kind, name, show in _TABLES:
        parts += [title, "", f"| model | {' | '.join(TITLES.values())} | asked | stock / ours |"]
        parts.append("|---" * (len(COLUMNS) + 3) + "|")
        gained = []
        for model, rows in data["models"].items():
            found = [rows.get(kind, {}).get(column, {}).get(name) for column in COLUMNS]
            if all(x is None for x in found):
                continue
            stock = [x for x in found[1:3] if x is not None]
            if stock and kind not in ("first", "again") and found[0] is not None:
                stock.append(found[0])
            own = min((x for x in found[3:] if x is not None), default=None)
            gain = min(stock) / own if stock and own else None
            gained += [gain] if gain else []
            asked = PROGRAMS[model].asked.get(kind, "") if model in PROGRAMS else ""
            cells = [*map(show, found), f"{asked}"]
            parts.append(f"| {model} | {' | '.join(cells)} | {f'{gain:.2f}x' if gain else '-'} |")
        mean = geomean(gained)
        parts += ["", f"Geometric mean of the last column: {mean:.2f}x." if mean else "", ""]
    about = data["machine"]
    parts.append(f"{about.get('gpu', '')}, torch {about['torch']}, Python {about['python']}")
    parts[-1] += f", {about['date']}. Further from eager than a hundredth: " + (
        ", ".join(_far(data)) or "none"
    )
    return "\n".join(parts) + "\n"


def _far(data: Row) -> list[str]:
    away = {m: rows.get("first", {}).get("compile", {}) for m, rows in data["models"].items()}
    return [model for model, row in away.items() if not row.get("away", 0.0) <= 0.01]


def _shown(form: str, scale: float = 1.0) -> Callable[[float | None], str]:
    return lambda x: "-" if x is None else form.format(x / scale)


_TABLES: tuple[tuple[str, str, str, Callable[[float | None], str]], ...] = (
    ("First call with empty caches, in seconds", "first", "first_s", _shown("{:.2f}")),
    ("First call of a second process, in seconds", "again", "first_s", _shown("{:.2f}")),
    ("A call, in milliseconds", "turns", "median_ms", _shown("{:.3f}")),
    ("Memory that torch reserves, in MiB", "memory", "reserved_bytes", _shown("{:.0f}", 2**20)),
    ("The same from the sixth call on", "memory", "later_bytes", _shown("{:.0f}", 2**20)),
)


# ------------------------------------------------------------------------------ all of them


def _run(given: argparse.Namespace) -> None:
    os.environ["FUSEE_KEEP_CAPTURES"] = "1"
    results, columns = Results(given.results), given.columns.split(",")
    results.data["machine"]["gpu"] = torch.cuda.get_device_name()
    jobs = []
    for name in given.programs.split(";"):
        for kind in given.kinds.split(","):
            jobs += [(kind, name, c) for c in (columns if kind != "turns" else [",".join(columns)])]
    seconds = ["--seconds", str(given.seconds)]
    measured = with_empty_caches(seconds, 300, module=MODULE, twice="again")
    measure_all(jobs, results, measured, "turns")
    text = as_markdown(results.data)
    given.results.with_suffix(".md").write_text(text)
    if given.page is not None:
        update_page(text, given.page, MARKS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("measure", help="one measurement in this process, as JSON")
    one.add_argument("kind", choices=KINDS)
    one.add_argument("program")
    one.add_argument("columns")
    one.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--programs", default=";".join(PROGRAMS), help="names, parted by ;")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--results", type=Path, default=HERE / "results" / "gpu.json")
    parser.add_argument("--page", type=Path, help="write the table into this page, too")
    parser.add_argument("--seconds", type=float, default=2.0, help="of turns, per column")
    given = parser.parse_args()
    if given.command is None:
        _run(given)
        return
    program, columns = PROGRAMS[given.program], given.columns.split(",")
    if given.kind == "turns":
        print(json.dumps(turns(program, columns, given.seconds)))
    else:
        measured = memory if given.kind == "memory" else first
        print(json.dumps(measured(program, columns[0])))


if __name__ == "__main__":
    main()
