"""A fixed sample of the sweep over what eager refuses, and over empty and single elements."""

from __future__ import annotations

import warnings
import zlib

import pytest
import torch

import fusee

with warnings.catch_warnings():
    # torch's test modules import deprecated corners of torch and numpy.
    warnings.simplefilter("ignore")
    from tests.opinfo import errors

# Ops whose errors are about values or about having none; and one in so many of the others, by name.
ALWAYS = (
    "gather scatter index_select index_add index_copy index_fill index_put take put"
    " nn.functional.one_hot nn.functional.embedding nn.functional.cross_entropy"
    " nn.functional.binary_cross_entropy linalg.inv linalg.cholesky max amax argmin mode"
    " nn.functional.pad.replicate_negative floor_divide remainder pow bernoulli"
).split()
SHARE = 16


def sample() -> list[tuple[str, str]]:
    pairs = errors.wanted_errors([], list(errors.ERROR_DTYPES))
    named = set(ALWAYS)
    return [
        (name, dtype)
        for name, dtype in pairs
        if name not in errors.KNOWN
        if dtype == "float32" or name.startswith("nn.functional.one_hot")
        if name in named or zlib.crc32(name.encode()) % SHARE == 0
    ]


@pytest.mark.filterwarnings("ignore")  # eager itself warns in many samples
@pytest.mark.parametrize("name, dtype", sample())
def test_the_same_outcome(name: str, dtype: str) -> None:
    outcome = errors.run_errors(name, dtype, which="some")
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.passed


@pytest.mark.filterwarnings("ignore")
def test_a_missing_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep's own test: a compiler that does not refuse anything fails."""

    def lenient(program, backend):  # type: ignore[no-untyped-def]
        return lambda *given: torch.zeros(1)

    monkeypatch.setattr(fusee, "compile", lenient)
    assert errors.run_errors("gather", "float32").failures
