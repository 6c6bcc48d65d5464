"""Gradients of torch's op database through a backend: `scripts/opinfo --gradients`.

A sample passes if the results that require grad, and the gradients of its inputs for fixed random
tangents, are what eager's autograd gives (tests/compare.py). Samples that eager refuses, or whose
results do not require grad, do not count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from tests.capture import capture
from tests.check import copy_tree
from tests.compare import assert_same
from tests.opinfo.exclusions import excluded
from tests.opinfo.sweep import OPS, SEED, Backend, Outcome, Skip, excluded_input, samples, tensors

GRADIENT_DTYPES = {"float32": torch.float32, "float64": torch.float64, "complex64": torch.complex64}

Call = tuple[tuple[Any, ...], dict[str, Any]]


def gradient_dtypes_of(op: OpInfo, device: str = "cpu") -> list[str]:
    """The dtypes of the sweep in which the op has gradients on a device."""
    if not op.supports_autograd:
        return []
    known = op.supported_backward_dtypes(device)
    return [name for name, dtype in GRADIENT_DTYPES.items() if dtype in known]


def run_gradients(
    name: str,
    dtype: str,
    backend: Backend,
    which: Literal["all", "first", "other"] = "all",
    check: bool = False,
    device: str = "cpu",
) -> Outcome:
    """All samples of one op, or one of them; `check` adds torch's gradcheck of the first."""
    op = OPS[name]
    outcome = Outcome(name, dtype)
    for number, sample in _with_grad(op, GRADIENT_DTYPES[dtype], which, device):

        def run(sample: SampleInput = sample) -> str | None:
            reason = run_gradient_sample(op, sample, backend)
            if check and outcome.passed == 0:
                gradcheck(op, sample, backend)
            return reason

        outcome.count(run, number, sample)
    return outcome


def _with_grad(
    op: OpInfo, dtype: torch.dtype, which: str, device: str
) -> Iterator[tuple[int, SampleInput]]:
    found = samples(op, dtype, which, requires_grad=True, device=device)
    return found if which == "all" else iter(list(found))


def run_gradient_sample(op: OpInfo, sample: SampleInput, backend: Backend) -> str | None:
    """Why the backend left the graph to eager, or None if it compiled it.

    raises   Mismatch, Skip, or whatever the backend raises
    """
    call: Call = (sample.input, *sample.args), sample.kwargs
    if excluded_input(call):
        raise Skip

    def function(args: Any, kwargs: Any) -> Any:
        return sample.output_process_fn_grad(op.op(*args, **kwargs))

    want = _eager(function, call)
    exact: list[Any] = []

    def oracle() -> Any:
        if not exact:
            try:
                exact.append(_eager(function, pytree.tree_map(widen, call)))
            except Skip:
                exact.append(want)
        return exact[0]

    gm, rebuild = capture(function, copy_tree(call))
    compiled = backend(gm, tensors(copy_tree(call)))
    for _ in range(2):
        given = copy_tree(call)
        torch.manual_seed(SEED)
        got = gradients(functools.partial(_compiled, compiled, rebuild), given)
        assert_same(got, want, oracle)
    report = getattr(compiled, "report", None)
    reason: str | None = report().eager if report is not None else None
    return reason and reason.splitlines()[0]


def _compiled(compiled: Callable[..., Any], rebuild: Callable[[Any], Any], given: Any) -> Any:
    return rebuild(compiled(*tensors(given)))


def _eager(function: Callable[..., Any], call: Call) -> Any:
    given = copy_tree(call)
    torch.manual_seed(SEED)
    try:
        return gradients(lambda given: function(*given), given)
    except Skip:
        raise
    except Exception as error:  # eager may refuse a sample in any way
        raise Skip from error


def gradients(run: Callable[[Any], Any], given: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """The results that require grad, detached, and the gradient of each input that does."""
    results = [
        leaf
        for leaf in pytree.tree_leaves(run(given))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    inputs = [leaf for leaf in tensors(given) if leaf.requires_grad]
    if not results or not inputs:
        raise Skip
    random = torch.Generator().manual_seed(SEED)
    tangents = [_tangent(x, random) for x in results]
    torch.autograd.backward(results, tangents)
    return [x.detach() for x in results], [x.grad for x in inputs]


def _tangent(x: Tensor, random: torch.Generator) -> Tensor:
    """Equal numbers for any dtype, so that the oracle's are those of the others."""
    parts = torch.randn((*x.shape, 2), generator=random, dtype=torch.float32)
    dense = torch.view_as_complex(parts) if x.is_complex() else parts[..., 0]
    return dense.contiguous().to(x.device, x.dtype)


def gradcheck(op: OpInfo, sample: SampleInput, backend: Backend) -> None:
    """torch's comparison with differences, of the compiled function in float64."""
    call: Call = (sample.input, *sample.args), sample.kwargs
    leaves = tensors(copy_tree(call))
    chosen = [k for k, x in enumerate(leaves) if x.requires_grad]
    gm, rebuild = capture(lambda args, kwargs: op.op(*args, **kwargs), copy_tree(call))
    compiled = backend(gm, leaves)

    def run(*inputs: Tensor) -> Any:
        given: list[Any] = [x.detach().clone() for x in leaves]
        for k, x in zip(chosen, inputs, strict=True):
            given[k] = x
        torch.manual_seed(SEED)
        found = sample.output_process_fn_grad(rebuild(compiled(*given)))
        return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad]

    inputs = [leaves[k].detach().requires_grad_() for k in chosen]
    torch.autograd.gradcheck(run, inputs, fast_mode=True, nondet_tol=1e-12)


def widen(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().double().requires_grad_(x.requires_grad)
    if isinstance(x, Tensor) and x.is_complex():
        return x.detach().to(torch.complex128).requires_grad_(x.requires_grad)
    return x


def wanted_gradients(
    names: Sequence[str], dtypes: Sequence[str], device: str = "cpu"
) -> list[tuple[str, str]]:
    """(op, dtype) pairs that are to be run: differentiable and not excluded."""
    return [
        (name, dtype)
        for name, op in OPS.items()
        if not names or name in names or op.name in names
        for dtype in gradient_dtypes_of(op, device)
        if dtype in dtypes and excluded(name, dtype) is None
    ]
