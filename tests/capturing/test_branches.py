"""Branches on a tensor's value of which one side raises: errors as in eager, and one graph."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

import fusee
from tests.capturing import branching
from tests.capturing.branching import with_message
from tests.capturing.same import Traced, same

POSITIVE, NEGATIVE = torch.tensor([3.0, 4.0, 5.0]), torch.tensor([-3.0, 4.0, 5.0])
ZERO = torch.zeros(3)


KEPT = """
    without_message with_message a_number_as_truth of_two of_one_of_two negated in_a_callee
    effects_before within_finally in_torchs_own of_numbers of_a_double
""".split()


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("x", [POSITIVE, NEGATIVE, ZERO], ids=["positive", "negative", "zero"])
def test_errors_are_those_of_eager(name: str, x: torch.Tensor) -> None:
    same(getattr(branching, name), x)


def test_a_failed_check_is_no_other_version() -> None:
    traced = Traced(with_message)
    traced(POSITIVE)
    with pytest.raises(AssertionError, match="first is three"):
        traced(NEGATIVE)
    assert torch.equal(traced(POSITIVE), with_message(POSITIVE))
    assert traced.entries == 1


def test_a_step_that_stops_at_a_bad_loss_is_one_graph() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), list[float]()

        def step(x: torch.Tensor) -> float:
            loss = model(x).square().mean()
            value = loss.item()
            if not math.isfinite(value):
                seen.append(value)
                sys.exit(1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return value

        return step, model, seen

    (step, model, seen), (other, expected, told) = make(), make()
    fast = fusee.compile(step, fullgraph=True)
    for x in (POSITIVE, NEGATIVE, POSITIVE / 0, ZERO):
        if torch.isfinite(x).all():
            assert fast(x) == pytest.approx(other(x))
        else:
            for call in (fast, other):
                with pytest.raises(SystemExit):
                    call(x)
        assert str(seen) == str(told)
        torch.testing.assert_close([*model.parameters()], [*expected.parameters()])


@pytest.mark.parametrize("name", ["caught", "after_a_write", "asked_for_more"])
@pytest.mark.parametrize("x", [POSITIVE, NEGATIVE], ids=["positive", "negative"])
def test_where_the_graph_ends_nevertheless(name: str, x: torch.Tensor) -> None:
    """An error that is caught may be usual, and what was written to can't be run again."""
    same(getattr(branching, name), x.clone(), breaks=True)


@pytest.mark.parametrize("backend", ["aot_eager", "fusee"])
def test_training(backend: str) -> None:
    model = branching.Checking()
    fast = fusee.compile(model, backend=backend, fullgraph=True)
    model(POSITIVE).sum().backward()
    expected, model.linear.weight.grad = model.linear.weight.grad, None
    fast(POSITIVE).sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, expected)
    with pytest.raises(AssertionError, match="not finite"):
        fast(POSITIVE / 0)
