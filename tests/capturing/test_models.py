"""Whole models become one graph each, and give what eager gives, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.capturing.same import Traced, shape_of
from tests.models import zoo

# Asked whether it is being compiled, mamba takes torch's associative_scan in place of its loop, and
# without gradients eager has a fast path for attention that backends do not know. Both round
# otherwise.
ROUNDS_OTHERWISE = {"mamba", "vit_b_16"}


@pytest.mark.parametrize("name", zoo.names())
def test_model(name: str) -> None:
    module, args, kwargs = zoo.load(name, "test")

    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    traced = Traced(call)
    with torch.no_grad():
        want = module(*args, **kwargs)
        got = traced(*args, **kwargs)
        entries = traced.entries
        again = traced(*args, **kwargs)
    assert traced.entries == entries, "the second call was captured again"
    assert len(traced.graphs) == 1, traced.stops
    for result in (got, again):
        if name in ROUNDS_OTHERWISE:
            tensors = [x if isinstance(x, torch.Tensor) else dict(x) for x in (result, want)]
            torch.testing.assert_close(*tensors)
        else:
            assert shape_of(result) == shape_of(want)


def test_models_after_torch_compile() -> None:
    """TorchDynamo patches nn.Module when it first runs; llama makes a ModuleList in its forward."""
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    module, args, kwargs = zoo.load("llama", "test")
    traced = Traced(lambda *args, **kwargs: module(*args, **kwargs))
    with torch.no_grad():
        traced(*args, **kwargs)
    assert not traced.stops
