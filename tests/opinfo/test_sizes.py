"""A fixed sample of the sweep over groups of samples whose sizes vary: one group of each op."""

from __future__ import annotations

import warnings

import pytest
import torch

with warnings.catch_warnings():
    # torch's test modules import deprecated corners of torch and numpy.
    warnings.simplefilter("ignore")
    from tests.opinfo import sizes, sweep
    from tests.opinfo.reasons import reason


@pytest.mark.filterwarnings("ignore")  # eager itself warns in many samples
@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in sweep.wanted([], ["float32"])))
def test_one_version(name: str) -> None:
    outcome = sizes.run_sizes(name, "float32", which="other")
    assert not outcome.failures, "\n".join(outcome.failures)
    asked = [reason for reason in outcome.eager if "sympy: " in reason]
    assert not asked, "\n".join(asked)
    if "quantile" in name and torch.__version__ < "2.12":
        return  # it compares values there
    for told in outcome.eager:
        assert all(reason(name, part) for part in told.split(" / "))
