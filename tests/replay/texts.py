"""The texts of all stages of one case: the ATen graphs, the loops, the LLVM IR, the host functions.

    zoo/bert            a model of tests/models/zoo.py, inference
    train/bert          the same in training: forward and backward of its joint graph
    op/softmax          an operator of torch's database on its plainest float32 sample
    open/bert           a model with open sizes, captured by stock torch.compile; with batch norm in
                        training and gradients if its name ends in "+"

Nothing is turned into machine code and nothing compiled runs: graphs are captured by fusee.compile,
go down the pipeline, and run as they are. All that could differ between two machines is fixed:
instruction set, vector width, threads. What processors multiply natively only matters to bfloat16
and float16, which no case has.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils._pytree import tree_map

import fusee
from fusee import config, log, targets
from fusee.autodiff import Split
from fusee.backends import native
from fusee.targets import cpu
from tests.models import zoo

with warnings.catch_warnings():
    # torch's test modules import deprecated corners of torch and numpy
    warnings.simplefilter("ignore")
    from tests.opinfo import sweep

STAGES = ("aten", "loops", "llvm", "host")
# Which artefacts of the log are texts of which stage; LLVM's is taken from the compiler.
ARTEFACTS = {
    "aten": "aten",
    "passes": "aten",
    "loops": "loops",
    "fusion": "loops",
    "memory": "host",
    "host": "host",
}
OPTIONS = {"prices": False, "vector_bits": 256, "threads": 2, "cache": False, "check": True}
# One operator in so many, by its name.
EVERY = 4
# Models with open sizes: torch.compile takes seconds for each.
OPEN = ("bert", "llama", "resnet18", "convnext_atto", "t5", "bert+", "resnet18+")
# Packages whose minor version shows in graphs, beside Python's.
PACKAGES = ("torch", "torchvision", "timm", "transformers", "diffusers")

Texts = dict[str, str]


def versions() -> str:
    """On which versions hashes are valid: minor ones, as `python 3.11, torch 2.13, ...`."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in PACKAGES:
        try:
            found[name] = ".".join(metadata.version(name).split(".")[:2])
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return ", ".join(f"{name} {version}" for name, version in found.items())


def cases() -> list[str]:
    """The names of all cases."""
    ops = [name for name, dtype in sweep.wanted([], ["float32"])]
    chosen = [name for name in ops if zlib.crc32(name.encode()) % EVERY == 0]
    models = zoo.names()
    return (
        [f"{kind}/{name}" for kind in ("zoo", "train") for name in models]
        + [f"op/{name}" for name in chosen]
        + [f"open/{name}" for name in OPEN]
    )


def texts(case: str) -> Texts:
    """Stage -> all that a case made there, with a title over each text."""
    recorder = Recorder()
    with fixed(), recorder.listening(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, _, name = case.partition("/")
        _CASES[kind](name, recorder)
    return recorder.texts()


# ------------------------------------------------------------------------------ cases


def _infer(name: str, recorder: Recorder) -> None:
    module, args, kwargs = zoo.load(name, "test")
    with torch.no_grad():
        fusee.compile(module, backend=recorder)(*args, **kwargs)


def _train(name: str, recorder: Recorder) -> None:
    module, args, kwargs = zoo.load(name, "test")
    fusee.compile(module.train(), backend=recorder)(*args, **kwargs)


def _operator(name: str, recorder: Recorder) -> None:
    outcome = sweep.run_op(name, "float32", recorder, "first", variants=False)
    assert not outcome.failures, outcome.failures


def _open(name: str, recorder: Recorder) -> None:
    module, args, kwargs = zoo.load(name.removesuffix("+"), "test")
    if name.endswith("+"):
        module.train()
    rows, named = tree_map(_more_rows, (args, kwargs))
    torch._dynamo.reset()
    with torch.set_grad_enabled(name.endswith("+")):
        torch.compile(module, backend=recorder, dynamic=True)(*rows, **named)


def _more_rows(x: Any) -> Any:
    """Five times as many: torch.compile takes a size of 1 as fixed."""
    return x.repeat(5, *[1] * (x.dim() - 1)) if isinstance(x, torch.Tensor) and x.dim() else x


_CASES: dict[str, Callable[[str, Recorder], None]] = {
    "zoo": _infer,
    "train": _train,
    "op": _operator,
    "open": _open,
}


# ------------------------------------------------------------------------------ recording


class Recorder:
    """A backend that sends graphs down the pipeline, keeps the texts, and runs graphs eagerly."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {stage: [] for stage in STAGES}

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with (
            mock.patch.object(cpu, "Build", self._build),
            mock.patch.object(targets, "prepare", lambda: None),
            mock.patch.object(targets, "bind_host", lambda *args: None),
            mock.patch.object(native, "bind", lambda gm, *args: gm.forward),
            mock.patch.object(native, "bind_split", _with_backward),
        ):
            compiled = native.compile_native(gm, inputs, OPTIONS)
        if compiled.report().eager:
            self.found["aten"].append(f"# eager: {compiled.report().eager}\n")
        return gm.forward

    def texts(self) -> Texts:
        return {stage: _without_paths("\n".join(self.found[stage])) for stage in STAGES}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        undo = log.subscribe(self._listen, *ARTEFACTS)
        try:
            yield
        finally:
            undo()

    def _listen(self, record: log.Record) -> None:
        title = " ".join(part for part in (record.artefact, record.name) if part)
        self.found[ARTEFACTS[record.artefact]].append(f"# {title}\n{record.text.rstrip()}\n")

    def _build(self, **_: Any) -> _Build:
        return _Build(self.found["llvm"])


class _Build:
    """Takes the compiler's place (runtime.jit.Build): keeps what it is given."""

    def __init__(self, found: list[str]) -> None:
        self.found = found

    def add(self, text: str) -> None:
        self.found.append(text)

    def finish(self) -> None:
        """Nothing is compiled."""


def _with_backward(
    gm: fx.GraphModule, split: Split, forward: Any, compile_backward: Callable[..., Any], _: Any
) -> Callable[..., Any]:
    """Takes the place of bind_split: compiles the backward now, whatever needs gradients."""
    if split.joint.tangents:
        compile_backward(split)
    return gm.forward


@contextlib.contextmanager
def fixed() -> Iterator[None]:
    """The same machine everywhere: AVX2, two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with mock.patch.dict(os.environ, {"FUSEE_CPU": "avx2"}):
            config.settings.cache_clear()
            yield
    finally:
        config.settings.cache_clear()
        torch.set_num_threads(threads)


def _without_paths(text: str) -> str:
    for folder in sorted(filter(None, {*sys.path, os.getcwd()}), key=len, reverse=True):
        text = text.replace(f"{Path(folder)}{os.sep}", "")
    return re.sub(r"\b0x[0-9a-f]{9,}\b(?=>)", "0x", text)
