"""The examples in torch's own docstrings: programs that nobody here has written.

A docstring's examples are one function, whose variables and results are compared with eager's. One
in sixteen runs by default; `ALL_DOCSTRINGS=1 python -m pytest tests/capturing/test_docstrings.py`
runs them all (2 minutes). `SKIPPED` says what is left out, and why.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import linecache
import os
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.capturing.same import Traced

MODULES = """
    torch torch.Tensor torch.nn torch.nn.functional torch.nn.init torch.nn.parameter torch.nn.utils
    torch.nn.utils.parametrize torch.nn.utils.parametrizations torch.nn.utils.prune
    torch.nn.utils.rnn torch.nn.utils.stateless torch.nn.attention torch.linalg torch.fft
    torch.special torch.signal.windows torch.sparse torch.masked torch.func torch.distributions
    torch.distributions.transforms torch.autograd torch.autograd.forward_ad torch.autograd.graph
    torch.autograd.functional torch.autograd.function torch.optim torch.optim.lr_scheduler
    torch.optim.swa_utils torch.utils.checkpoint torch.utils.data torch.overrides torch.random
    torch.amp torch.fx torch.jit torch.compiler
""".split()
# Lines with these are left out.
SKIPPED = {
    "need a GPU, files, other processes or the network": """
        cuda xpu open( download load( save( multiprocess DataLoader distributed fork hub. inductor
    """,
    "hold what nobody wrote there": """
        torch.empty( empty_like new_empty empty_permuted empty_strided resize_ skip_init
    """,
    "switch on what stays on": """
        set_default_d set_default_t set_num set_deterministic use_deterministic set_detect set_flush
        set_printoptions set_warn register_module_ Library( library. seed() initial_seed get_rng
    """,
    "are compilers, profilers and protocols of torch's own": """
        compile( export( profiler __torch_function__ wait(
    """,
    "draw": "plt.",
}
_SKIPPED = " ".join(SKIPPED.values()).split()
# super(C).__init__() of an unbound super (docs/open.md); symbols of jagged sizes are numbered;
# eager itself cannot show or compare these.
KNOWN = ("IterableDataset", "nested", "is_masked_tensor", "quantized")


def documented() -> dict[str, str]:
    """Docstrings with examples, each once, by the name of what has them."""
    found: dict[str, str] = {}

    def add(name: str, x: Any) -> None:
        text = inspect.getdoc(x) or ""
        if ">>>" in text and text not in found.values():
            found[name] = text

    for path in MODULES:
        module = torch.Tensor if path == "torch.Tensor" else importlib.import_module(path)
        for name in sorted(vars(module)):
            x = inspect.getattr_static(module, name)
            if not name.startswith("_"):
                add(f"{path}.{name}", x)
            for more in sorted(vars(x)) if inspect.isclass(x) else ():
                add(f"{path}.{name}.{more}", inspect.getattr_static(x, more))
    return {name: text for name, text in found.items() if not any(k in name for k in KNOWN)}


def program(name: str, text: str) -> tuple[str, dict[str, Any]] | None:
    """A function of the examples that run in eager mode, and its globals; None: there are none."""
    given: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional, "np": numpy}
    scope, lines = dict(given), list[str]()
    try:
        examples = doctest.DocTestParser().get_examples(text)
    except ValueError:  # its indentation is not doctest's
        return None
    for example in examples:
        with contextlib.suppress(Exception):  # what is only sketched
            tree = ast.parse(example.source)
            if any(part in example.source for part in _SKIPPED):
                continue
            known = set(scope)
            exec(compile(tree, name, "exec"), scope)
            if any(isinstance(line, (ast.Import, ast.ImportFrom)) for line in tree.body):
                given.update({key: scope[key] for key in set(scope) - known})
                continue
            for line in tree.body:
                is_shown = isinstance(line, ast.Expr)
                lines.append(f"shown{len(lines)} = " * is_shown + ast.unparse(line))
    body = textwrap.indent("\n".join(lines), "    ")
    source = f"def example():\n{body}\n    return dict(locals())\n"
    linecache.cache[f"<{name}>"] = len(source), None, source.splitlines(True), f"<{name}>"
    return (source, given) if lines else None


def told(x: Any) -> Any:
    """What of a variable can be compared."""
    if isinstance(x, torch.Tensor):
        traits = x.dtype, x.shape, x.layout, x.requires_grad, x.is_leaf
        return *traits, None if x.is_meta else str(x.detach()), told(x.grad if x.is_leaf else None)
    if isinstance(x, nn.Module):
        return type(x).__name__, told(x.state_dict())
    if isinstance(x, dict):
        return [(str(key), told(item)) for key, item in x.items()]
    if isinstance(x, (list, tuple)):
        return type(x).__name__, [told(item) for item in x]
    is_plain = isinstance(x, (int, str, float, bool, torch.dtype, torch.device, type(None)))
    return x if is_plain and x == x else type(x).__name__  # NaN


def outcome(run: Any) -> Any:
    torch.manual_seed(0)
    numpy.random.seed(0)
    try:
        return told(run())
    except Exception as error:  # noqa: BLE001  # the exception is what is compared
        return type(error).__name__, str(error)


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # some write files
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")
        yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)


TEXTS = documented()
CHOSEN = sorted(TEXTS)[:: 1 if os.environ.get("ALL_DOCSTRINGS") else 16]


def test_there_are_many() -> None:
    assert len(TEXTS) > 600


@pytest.mark.parametrize("name", CHOSEN)
def test_an_example_gives_what_eager_gives(name: str) -> None:
    torch.manual_seed(0)
    made = program(name, TEXTS[name])
    if made is None:
        pytest.skip("no example of it runs by itself")
    (source, given), found = made, []
    for compiler in (lambda fn: fn, Traced):
        scope = dict(given)
        exec(compile(source, f"<{name}>", "exec"), scope)
        run = compiler(scope["example"])
        found += [outcome(run), outcome(run)]
    assert found[2:] == found[:2], source
