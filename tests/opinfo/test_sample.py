"""A fixed sample of the sweep over torch's op database: some samples of each op, in two dtypes."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import pytest
import torch

from fusee.backends import lookup

with warnings.catch_warnings():
    # torch's test modules import deprecated corners of torch and numpy.
    warnings.simplefilter("ignore")
    from tests.opinfo import sweep
    from tests.opinfo.exclusions import EXCLUDED, excluded

PAIRS = sweep.wanted([], list(sweep.DTYPES))


@pytest.mark.filterwarnings("ignore")  # eager itself warns in many samples
@pytest.mark.parametrize("name", list(dict.fromkeys(name for name, _ in PAIRS)))
def test_op(name: str) -> None:
    failures = []
    first, *others = [dtype for op, dtype in PAIRS if op == name]
    # One of the other dtypes, chosen by name so that it is the same each time.
    chosen = [others[zlib.crc32(name.encode()) % len(others)]] if others else []
    for dtype in (first, *chosen):
        which: Any = "first" if dtype == first else "other"
        outcome = sweep.run_op(name, dtype, lookup("fusee"), which, variants=dtype == first)
        failures += [f"{dtype}: {text}" for text in outcome.failures]
    assert not failures, "\n".join(failures)


def test_exclusions_name_real_ops() -> None:
    for pattern, reason in EXCLUDED.items():
        assert reason
        name, _, only = pattern.partition(":")
        assert only in ("", *sweep.DTYPES)
        dtype = only or "float32"
        if "linear_cross_entropy" in name and not hasattr(
            torch.nn.functional, "linear_cross_entropy"
        ):
            continue  # of a later torch than this
        assert any(excluded(op, dtype) for op in sweep.OPS if op.startswith(name.split("*")[0]))
