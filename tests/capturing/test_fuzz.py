"""A hundred random programs, eager beside compiled. Thousands: `scripts/fuzz`."""

from __future__ import annotations

import pytest

from tests.capturing.differences import difference
from tests.capturing.edits import difference_after_edits
from tests.capturing.programs import program

PER_TEST = 25


@pytest.mark.parametrize("first", range(75, 200, PER_TEST))
@pytest.mark.filterwarnings("ignore")
def test_programs(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        found = difference(program(seed))
        assert found is None, f"scripts/fuzz 1 --first {seed}\n{found}"


@pytest.mark.filterwarnings("ignore")
def test_programs_that_are_edited_between_processes() -> None:
    for seed in range(50):
        found = difference_after_edits(program(seed), seed)
        assert found is None, f"scripts/fuzz 1 --edits --first {seed}\n{found}"
