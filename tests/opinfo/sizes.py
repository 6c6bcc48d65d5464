"""Torch's op database with sizes that vary: one version for each group of samples.

Samples of an op that have all in common but the lengths of their axes are a group, together with
copies of theirs whose axes are twice as long. One function is compiled for a group with
dynamic=True and called with each of them; eager says what comes out, or what is raised. An axis of
no element, or of one, is no length: broadcasting tells it apart, so that results with such an axis
may have a version of their own.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

import fusee
from fusee.capture.captured import Entry
from fusee.capture.entries import listeners
from fusee.errors import FuseeError, FuseeWarning
from fusee.log import subscribe
from tests.check import copy_tree, sharing
from tests.compare import Mismatch, assert_same, is_within, may_be_chance, neighbour
from tests.opinfo.gradients import gradients, widen
from tests.opinfo.sweep import DTYPES, OPS, SEED, Outcome, Skip, excluded_input, samples

__all__ = ["run_sizes"]

CALLS = 6  # of a group
LARGEST = 2**16  # elements of a tensor that is made twice as long
NEIGHBOURS = 16  # of a call, where it must be known how far rounding may lead

Call = tuple[Any, Any]
# Of a sample's results that gradients are of: a phase that nothing fixes is taken out, say.
Process = Callable[[Any], Any]


def run_sizes(
    name: str,
    dtype: str,
    backend: str = "fusee",
    which: str = "all",
    learns: bool = False,
    device: str = "cpu",
) -> Outcome:
    """All groups of one op, or with `which` other than "all" the first one of each function.

    learns   with gradients, of inputs that have any
    """
    op = OPS[name]
    outcome = Outcome(name, dtype)
    # _outcome sets it, before the graph begins
    invocations.wrapper_set_seed = _without_seed  # type: ignore[attr-defined]
    functions = [op.op]
    if not learns and op.inplace_variant is not None and op.inplace_variant is not op.op:
        functions.append(op.inplace_variant)
    for function in functions:
        kind = "in place, " if function is not op.op else ""
        drawn = [s for _, s in samples(op, DTYPES[dtype], "all", learns, device)]
        found = groups(drawn, bool(kind))
        for number, calls in enumerate(found if which == "all" else itertools.islice(found, 1)):
            (first, *rest), kwargs = calls[0][0]
            shown = SampleInput(first, args=tuple(rest), kwargs=kwargs)
            outcome.count(lambda: _run(function, calls, backend), number, shown, kind)  # noqa: B023  called at once
    return outcome


def _without_seed(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def groups(found: list[SampleInput], in_place: bool) -> Iterator[list[tuple[Call, Process]]]:
    """Arguments that differ in the lengths of axes alone."""
    by_form: dict[Any, list[tuple[Call, Process]]] = {}
    for sample in found:
        call = (sample.input, *sample.args), sample.kwargs
        if (in_place and sample.broadcasts_input) or excluded_input(call):
            continue
        longer = pytree.tree_map(_longer, call)
        if isinstance(offsets := sample.kwargs.get("offsets"), Tensor):  # in order, up to an end
            longer[1]["offsets"] = offsets.repeat_interleave(2) * 2
        for given in (call, longer):
            leaves, spec = pytree.tree_flatten(given)
            calls = by_form.setdefault((str(spec), *map(_form, leaves)), [])
            if len(calls) < CALLS:
                calls.append((given, sample.output_process_fn_grad))
    yield from (calls for calls in by_form.values() if len(calls) > 1)


def _lengths(x: Any) -> Any:
    """Which axes have none, or one."""
    return tuple(min(n, 2) for n in x.shape) if isinstance(x, Tensor) else None


def _form(x: Any) -> Any:
    """What two leaves of a group have in common."""
    if not isinstance(x, Tensor):
        return type(x), repr(x)
    order, step, steps = _outer_first(x), 1, []
    for axis in reversed(order):
        steps.append("dense" if x.stride(axis) == step else x.stride(axis))
        step *= x.shape[axis]
    return (
        x.dtype,
        _lengths(x),
        tuple(order),
        tuple(steps),
        x.is_conj(),
        x.is_neg(),
        x.requires_grad,
    )


def _outer_first(x: Tensor) -> list[int]:
    return sorted(range(x.dim()), key=lambda k: (-x.stride()[k], -x.shape[k], k))


def _longer(x: Any) -> Any:
    """A tensor that is twice as long along each axis that has a length, laid out as `x`."""
    if not isinstance(x, Tensor) or not x.dim() or x.numel() > LARGEST >> x.dim():
        return x
    times = [2 if n > 1 else 1 for n in x.shape]
    if x.dim() > 1 and x.shape[-1] == x.shape[-2] > 1 and x.dtype.is_floating_point:
        longer = torch.kron(
            torch.eye(2, dtype=x.dtype, device=x.device), x.contiguous()
        )  # has an inverse if the matrix has one
        longer = longer.repeat([*times[:-2], 1, 1])
    else:
        longer = x.repeat(times)
    order = _outer_first(x)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return longer.permute(order).contiguous().permute(back).requires_grad_(x.requires_grad)


def _run(
    function: Callable[..., Any], calls: list[tuple[Call, Process]], backend: str
) -> str | None:
    """Why a group has more versions than one, or None. raises Mismatch, Skip"""

    def program(args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    compiled = fusee.compile(program, backend=backend, dynamic=True)
    learns = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(calls))
    versions: list[Entry] = []
    reasons: list[str] = []
    forms = set()  # of results
    with _seen() as (made, why, asked):
        for call, process in calls:
            eagers: list[str] = []
            with _imports(eagers):
                want = _outcome(program, call, process)
            first = len(asked)
            with _imports(asked):
                got = _outcome(compiled, call, process)
            asked[first:] = [x for x in asked[first:] if x not in eagers]
            if isinstance(want, Exception) or isinstance(got, Exception):
                if type(got) is not type(want) or isinstance(got, FuseeError):
                    raise Mismatch(f"{_sizes(call)}: got {_shown(got)}, eager gives {_shown(want)}")
            else:
                try:
                    _compare(got, want, lambda call: _outcome(program, call, process), call)  # noqa: B023  called at once
                except Mismatch as error:
                    raise Mismatch(f"{_sizes(call)}: {error}") from error
                if not learns and (ours := sharing(*got)) != (theirs := sharing(*want)):
                    raise Mismatch(f"{_sizes(call)}: shared memory {ours}, eager's {theirs}")
                forms.add(tuple(map(_lengths, pytree.tree_leaves(want))))
                if versions and made:
                    reasons += why
                versions += made
            made.clear()
            why.clear()
    if not versions:
        raise Skip
    begun = [entry for entry in versions if entry.captured.place.at < 0]
    is_more = len(begun) > len(forms)
    found = [f"another version: {x}" for x in dict.fromkeys(reasons)] if is_more else []
    stops = [e.captured.stop.reason for e in versions if e.captured.stop is not None]
    found += [f"the graph ends: {x}" for x in dict.fromkeys(stops)]
    found += [f"sympy: {x}" for x in dict.fromkeys(asked)]
    return " / ".join(found) or None


def _compare(got: Any, want: Any, run: Callable[[Call], Any], call: Call) -> None:
    """raises   Mismatch, unless eager is as far off on neighbouring inputs"""
    exact = functools.cache(lambda: run(pytree.tree_map(widen, call)))
    try:
        assert_same(got, want, exact)
        return
    except Mismatch as error:
        if not may_be_chance(error):
            raise
        failed = error
    generator = torch.Generator().manual_seed(SEED)

    def moved(x: Any) -> Any:
        is_moved = isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64)
        return neighbour(x.detach(), generator).requires_grad_(x.requires_grad) if is_moved else x

    others = [pytree.tree_leaves(run(pytree.tree_map(moved, call))) for _ in range(NEIGHBOURS)]
    trees = (pytree.tree_leaves(tree) for tree in (got, want, exact()))
    for ours, eagers, right, *near in zip(*trees, *others):
        try:
            assert_same(ours, eagers, lambda: right)  # noqa: B023  called at once
        except Mismatch:
            if not is_within(ours, eagers, right, near):
                raise failed from None


@contextlib.contextmanager
def _seen() -> Iterator[tuple[list[Entry], list[str], list[str]]]:
    """Versions as they are made, why they are, and what asked for sympy."""
    made: list[Entry] = []
    why: list[str] = []
    listeners.append(made.append)
    undo = subscribe(lambda record: why.append(record.text.splitlines()[0]), "recompiles")
    try:
        yield made, why, []
    finally:
        undo()
        listeners.remove(made.append)


_SYMPY = ("sympy", "torch.utils._sympy", "torch.fx.experimental.symbolic_shapes")


@contextlib.contextmanager
def _imports(asked: list[str]) -> Iterator[None]:
    """Notes who imports sympy: it is in the process already, so that nothing else tells."""
    by_python = builtins.__import__

    def noting(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(_SYMPY):
            asked.append(_asker(sys._getframe(1)))
        return by_python(name, *args, **kwargs)

    builtins.__import__ = noting
    try:
        yield
    finally:
        builtins.__import__ = by_python


def _asker(frame: Any) -> str:
    """The operator that runs, or the function that asks."""
    name = frame.f_code.co_name
    while frame is not None:
        for key in ("func", "op"):
            if isinstance(found := frame.f_locals.get(key), torch._ops.OpOverload):
                name = str(found)
        frame = frame.f_back
    return str(name)


def _sizes(call: Call) -> str:
    return str([tuple(x.shape) for x in pytree.tree_leaves(call) if isinstance(x, Tensor)])


def _shown(x: Any) -> str:
    first = (str(x).splitlines() or [""])[0]
    return f"{type(x).__name__}: {first[:120]}" if isinstance(x, Exception) else "a result"


def _outcome(program: Callable[..., Any], call: Call, process: Process) -> Any:
    """The arguments afterwards and the result, or results and gradients; or what is raised."""
    given = copy_tree(call)
    learns = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(given))
    torch.manual_seed(SEED)
    with warnings.catch_warnings(), torch.set_grad_enabled(learns):
        warnings.simplefilter("ignore")
        warnings.simplefilter("ignore", FuseeWarning)
        try:
            return (
                gradients(lambda given: process(program(*given)), given)
                if learns
                else (given, program(*given))
            )
        except Exception as error:  # noqa: BLE001  which one is what is asked
            return error
