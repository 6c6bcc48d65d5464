"""Random chains of operators, eager beside kernels. Thousands: `python -m tests.loops.chains`."""

from __future__ import annotations

import pytest

from tests.loops.chains import chain, difference


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_chains(gradients: bool, dynamic: bool | None) -> None:
    first = 1000 * gradients + 500 * bool(dynamic)
    for seed in range(first, first + 40):
        source, calls = chain(seed, bool(dynamic))
        found = difference(source, calls, gradients, dynamic=dynamic, options={"prices": False})
        assert found is None, f"seed {seed}: {found}\n{source}"
