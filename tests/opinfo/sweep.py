"""Torch's op database through a backend, without Dynamo: one fx graph per sample.

A sample passes if the backend's function gives what eager gives (tests/compare.py), inputs that the
op changes included. Samples that eager refuses, or that return no tensor, do not count.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from tests.capture import capture
from tests.check import copy_tree, sharing
from tests.compare import Mismatch, assert_same
from tests.opinfo.exclusions import excluded

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
# Some of the database's functions set this seed themselves, which no graph records.
SEED = 42
Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass
class Outcome:
    """One op with one dtype: how many samples passed, and what the failed ones said.

    eager   why graphs were left to eager, and how many
    """

    op: str
    dtype: str
    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    eager: dict[str, int] = field(default_factory=dict)

    def count(
        self, run: Callable[[], str | None], number: int, sample: SampleInput, kind: str = ""
    ) -> None:
        """Run one sample, which gives why the graph was left to eager, or None; raises nothing."""
        try:
            reason = run()
            self.passed += 1
            if reason is not None:
                self.eager[reason] = self.eager.get(reason, 0) + 1
        except Skip:
            self.skipped += 1
        except Exception as error:  # noqa: BLE001  any failure is a row of the summary
            text = f"{type(error).__name__}: {error}".splitlines()
            self.failures.append(f"{kind}sample {number} {show(sample)}: {text[0][:300]}")


class Skip(Exception):
    """The sample does not count: eager refuses it, or it has nothing to compare."""


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS: dict[str, OpInfo] = {full_name(op): op for op in op_db}


def dtypes_of(op: OpInfo, device: str = "cpu") -> list[str]:
    """The dtypes of the sweep that the op supports on a device."""
    supported = op.supported_dtypes(device)
    return [name for name, dtype in DTYPES.items() if dtype in supported]


def run_op(
    name: str,
    dtype: str,
    backend: Backend,
    which: Literal["all", "first", "other"] = "all",
    variants: bool = True,
    device: str = "cpu",
) -> Outcome:
    """All samples of one op, or one of them; in-place variants too, where the op has one."""
    op = OPS[name]
    outcome = Outcome(name, dtype)
    functions = [op.op]
    if variants and op.inplace_variant is not None and op.inplace_variant is not op.op:
        functions.append(op.inplace_variant)
    for number, sample in samples(op, DTYPES[dtype], which, device=device):
        for function in functions:
            inplace = function is op.inplace_variant and function is not op.op
            if inplace and sample.broadcasts_input:
                continue
            kind = "in place, " if inplace else ""
            run = functools.partial(run_sample, function, sample, backend)
            outcome.count(run, number, sample, kind)
    return outcome


def samples(
    op: OpInfo, dtype: torch.dtype, which: str, requires_grad: bool = False, device: str = "cpu"
) -> Iterator[tuple[int, SampleInput]]:
    """The samples with their numbers: all, the plainest, or one chosen by the op's name."""
    torch.manual_seed(0)
    found = enumerate(op.sample_inputs(device, dtype, requires_grad=requires_grad))
    if which == "all":
        yield from found
    elif which == "first":
        yield from itertools.islice(found, 1)
    elif early := list(itertools.islice(found, 8)):
        # Chosen by name, so that it is the same each time.
        yield early[zlib.crc32(full_name(op).encode()) % len(early)]


def run_sample(function: Callable[..., Any], sample: SampleInput, backend: Backend) -> str | None:
    """Why the backend left the graph to eager, or None if it compiled it.

    raises   Mismatch, Skip, or whatever the backend raises
    """
    call = (sample.input, *sample.args), sample.kwargs
    if excluded_input(call):
        raise Skip
    want_args, want = _eager(function, call)
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(want)):
        raise Skip

    exact: list[Any] = []

    def oracle(position: int) -> Callable[[], Any]:
        def compute() -> Any:
            if not exact:
                try:
                    exact.append(_eager(function, pytree.tree_map(_widen, call)))
                except Skip:
                    exact.append((want_args, want))
            return exact[0][position]

        return compute

    with torch.no_grad():
        gm, rebuild = capture(lambda args, kwargs: function(*args, **kwargs), copy_tree(call))
        compiled = backend(gm, tensors(copy_tree(call)))
        for _ in range(2):
            given = copy_tree(call)
            torch.manual_seed(SEED)
            got = rebuild(compiled(*tensors(given)))
            assert_same(got, want, oracle(1))
            assert_same(given, want_args, oracle(0))
            if (ours := sharing(given, got)) != (eagers := sharing(want_args, want)):
                raise Mismatch(f"shared memory: got {ours}, eager gives {eagers}")
    report = getattr(compiled, "report", None)
    reason: str | None = report().eager if report is not None else None
    return reason and reason.splitlines()[0]


def _eager(function: Callable[..., Any], call: Any) -> tuple[Any, Any]:
    args, kwargs = copy_tree(call)
    torch.manual_seed(SEED)
    try:
        with torch.no_grad():
            result = function(*args, **kwargs)
    except Exception as error:  # eager may refuse a sample in any way
        raise Skip from error
    return (args, kwargs), result


def excluded_input(call: Any) -> bool:
    """Layouts that are no strided memory: a graph of them is refused ahead by every stage."""
    leaves = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    return any(leaf.layout != torch.strided or leaf.is_quantized for leaf in leaves)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _widen(x: Any) -> Any:
    if isinstance(x, torch.dtype):  # what results are to be
        return torch.float64 if x.is_floating_point else x
    if isinstance(x, Tensor) and x.is_complex():
        return x.to(torch.complex128)
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def show(sample: SampleInput) -> str:
    def leaf(x: Any) -> str:
        return (
            f"{x.dtype}{list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else repr(x)
        )

    parts = [leaf(x) for x in pytree.tree_leaves((sample.input, sample.args))]
    parts += [f"{name}={leaf(value)}" for name, value in sample.kwargs.items()]
    return "(" + ", ".join(parts)[:160] + ")"


def wanted(
    names: Sequence[str], dtypes: Sequence[str], device: str = "cpu"
) -> list[tuple[str, str]]:
    """(op, dtype) pairs that are to be run: supported and not excluded."""
    chosen = [name for name in OPS if not names or name in names or OPS[name].name in names]
    return [
        (name, dtype)
        for name in chosen
        for dtype in dtypes_of(OPS[name], device)
        if dtype in dtypes and excluded(name, dtype) is None
    ]


__all__ = ["DTYPES", "OPS", "Mismatch", "Outcome", "run_op", "run_sample", "wanted"]
