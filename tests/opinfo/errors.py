"""Torch's op database where it is empty or wrong: inputs that eager must refuse, and few elements.

Each op runs through fusee.compile on its error inputs, and on its first samples cut down: to no
element along the first or the last axis, and to one element. Eager decides: the same exception,
also where nobody uses the result, or the same result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import fusee
from fusee.errors import FuseeError, FuseeWarning
from tests.check import copy_tree
from tests.compare import Mismatch, assert_same
from tests.opinfo.exclusions import excluded
from tests.opinfo.sweep import OPS, SEED, Outcome, Skip, excluded_input

__all__ = ["ERROR_DTYPES", "KNOWN", "UNSTEADY", "run_errors", "wanted_errors"]

ERROR_DTYPES = {"float32": torch.float32, "int64": torch.int64}
# How many samples of an op are cut down.
SAMPLES = 2

Cut = Callable[[Tensor], Tensor]
CUTS: dict[str, Cut] = {
    "nothing along the first axis": lambda x: x.narrow(0, 0, 0),
    "nothing along the last axis": lambda x: x.narrow(-1, 0, 0),
    "one element": lambda x: x[(slice(0, 1),) * x.dim()],
}

# Ops whose outcome says nothing, and why.
UNSTEADY: dict[str, str] = {
    "resize_": "what it grows by is uninitialised memory",
    "resize_as_": "what it grows by is uninitialised memory",
}
# What differs, and why it stays.
KNOWN: dict[str, str] = {
    "aminmax": "FakeTensors take results of another dtype for `out`, which is no part of the graph",
    "nn.functional.pixel_unshuffle": (
        "ATen gives an empty tensor back as it is; its own shape function, stock torch.compile and"
        " we rearrange it"
    ),
}


def run_errors(name: str, dtype: str, backend: str = "fusee", which: str = "all") -> Outcome:
    """Error inputs of one op, and its cut samples; with `which` other than "all" fewer of them."""
    op = OPS[name]
    outcome = Outcome(name, dtype)
    for number, (kind, sample) in enumerate(_samples(op, ERROR_DTYPES[dtype], which)):
        outcome.count(lambda: _run(op.op, sample, backend), number, sample, f"{kind}: ")  # noqa: B023  called at once
    return outcome


def wanted_errors(names: list[str], dtypes: list[str]) -> list[tuple[str, str]]:
    """(op, dtype) pairs that are to be run."""
    return [
        (name, dtype)
        for name, op in OPS.items()
        for dtype in ERROR_DTYPES
        if (not names or name in names or op.name in names)
        and dtype in dtypes
        and ERROR_DTYPES[dtype] in op.supported_dtypes("cpu")
        and excluded(name, dtype) is None
        and name not in UNSTEADY
    ]


def _samples(op: OpInfo, dtype: torch.dtype, which: str) -> Iterator[tuple[str, SampleInput]]:
    torch.manual_seed(0)
    if op.error_inputs_func is not None and dtype is torch.float32:
        for number, error in enumerate(op.error_inputs("cpu")):
            if which == "all" or number < 2:
                yield "must raise", error.sample_input
    found = op.sample_inputs("cpu", dtype, requires_grad=False)
    for _, sample in zip(range(SAMPLES if which == "all" else 1), found):
        for kind, cut in CUTS.items():
            yield kind, _cut(sample, cut)


def _cut(sample: SampleInput, cut: Cut) -> SampleInput:
    def leaf(x: Any) -> Any:
        whole = isinstance(x, Tensor) and x.dim() and x.layout is torch.strided
        return cut(x).clone() if whole else x

    given = (sample.input, sample.args, sample.kwargs)
    x, args, kwargs = pytree.tree_map(leaf, given)
    return SampleInput(x, args=args, kwargs=kwargs)


def _run(function: Callable[..., Any], sample: SampleInput, backend: str) -> str | None:
    """What the outcome was; raises Mismatch where eager's is another."""
    call = (sample.input, *sample.args), sample.kwargs
    if excluded_input(call):
        raise Skip

    def program(args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def forgetful(args: Any, kwargs: Any) -> None:
        function(*args, **kwargs)

    want = _outcome(program, call)
    if isinstance(want, Exception):
        _assert_same_error(_outcome(fusee.compile(forgetful, backend=backend), call), want)
    compiled = fusee.compile(program, backend=backend)
    for _ in range(2):
        got = _outcome(compiled, call)
        if isinstance(want, Exception) or isinstance(got, Exception):
            _assert_same_error(got, want)
            continue
        assert_same(got, want, lambda: _outcome(program, pytree.tree_map(_widened, call)))
    return type(want).__name__ if isinstance(want, Exception) else None


def _assert_same_error(got: Any, want: Any) -> None:
    if type(got) is not type(want) or isinstance(got, FuseeError):
        raise Mismatch(f"got {_shown(got)}, eager gives {_shown(want)}")


def _shown(x: Any) -> str:
    first = (str(x).splitlines() or [""])[0]
    return f"{type(x).__name__}: {first[:90]}" if isinstance(x, Exception) else "a result"


def _outcome(program: Callable[..., Any], call: Any) -> Any:
    given = copy_tree(call)
    torch.manual_seed(SEED)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        warnings.simplefilter("ignore", FuseeWarning)
        try:
            return program(*given), given
        except Exception as error:  # noqa: BLE001  which one is what is asked
            return error


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
