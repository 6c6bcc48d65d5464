"""Whole models become one graph each, and give what eager gives, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.capturing.same import Traced, shape_of
from tests.models import zoo

# Mamba's scan is torch's associative_scan, which compiles its own argument and is called between
# graphs: each of the functions around it, in both layers, is one graph before and one after.
GRAPHS = {"mamba": 15}


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
    assert len(traced.graphs) == GRAPHS.get(name, 1), traced.stops
    for result in (got, again):
        assert shape_of(result) == shape_of(want)
