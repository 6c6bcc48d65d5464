"""What a compiled function does when the function, or the model that it is of, becomes another."""

# mypy: ignore-errors

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fusee import api
from tests.capturing.same import Traced
from tests.counting import Counting

T = Any
X = torch.arange(3.0)


def test_defaults_and_code_that_are_assigned() -> None:
    def step(x: T, scale: T = 2.0, *, shift: T = 1) -> T:
        return x * scale + shift

    def other(x: T, *rest: T, sign: T = -1) -> T:
        return x * sign * len(rest)

    traced = Traced(step)
    torch.testing.assert_close(traced(X), X * 2 + 1)
    step.__defaults__, step.__kwdefaults__ = (3.0,), {"shift": X}
    torch.testing.assert_close(traced(X), X * 3 + X)
    torch.testing.assert_close(traced(X, 2.0, shift=1), X * 2 + 1)
    step.__defaults__ = None
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'scale'"):
        traced(X)
    step.__code__, step.__kwdefaults__ = other.__code__, {"sign": -1}
    torch.testing.assert_close(traced(X, 1), X * -1)  # a call that the old code takes too
    torch.testing.assert_close(traced(X, 1, 2), X * -2)
    torch.testing.assert_close(traced(X, 1, sign=4), X * 4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift'"):
        traced(X, shift=1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: T) -> T:
        return self.layer(x)


def test_copies_of_a_model_have_versions_of_their_own() -> None:
    backend = Counting()
    net = Net()
    net.forward = api.compile(net.forward, backend=backend, fullgraph=True)
    net(X)
    copies = [copy.deepcopy(net) for _ in range(10)]
    for one in copies:
        with torch.no_grad():
            one.layer.bias += 1
        torch.testing.assert_close(one(X), Net.forward(one, X))
        one(X)
    assert len(backend.graphs) == 11
    net(X)
    assert len(backend.graphs) == 11  # not pushed out by its copies
    refs = [weakref.ref(one) for one in copies]
    del copies, one
    gc.collect()
    assert not [ref for ref in refs if ref() is not None]
