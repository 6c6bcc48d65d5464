"""Random programs of views, writes and computations do what eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aten.harness import same

Fn = Callable[..., Any]


def x35() -> torch.Tensor:
    return torch.arange(15.0).reshape(3, 5) - 7


VIEWS: list[Fn] = [
    lambda x: x.t() if x.dim() == 2 else x,
    lambda x: x[1:] if x.dim() and x.shape[0] > 1 else x,
    lambda x: x[..., ::2] if x.dim() else x,
    lambda x: x.reshape(-1),
    lambda x: x.unsqueeze(0) if x.dim() < 4 else x,
    lambda x: x.squeeze(),
    lambda x: x[0] if x.dim() and x.shape[0] else x,
    lambda x: x.flatten(),
    lambda x: x.detach(),
    lambda x: x.diagonal() if x.dim() == 2 else x,
    lambda x: x.movedim(0, -1) if x.dim() > 1 else x,
]
WRITERS: list[Fn] = [
    lambda x: x.add_(1),
    lambda x: x.mul_(2),
    lambda x: x.copy_(torch.full((), 3.0)),
    lambda x: x.zero_(),
    lambda x: x.exp_().clamp_(max=50),
    lambda x: x.fill_(2),
]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("view"), st.integers(0, 9), st.integers(0, len(VIEWS) - 1)),
        st.tuples(st.just("write"), st.integers(0, 9), st.integers(0, len(WRITERS) - 1)),
        st.tuples(st.just("compute"), st.integers(0, 9), st.just(0)),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 4))
def test_any_mix_of_views_and_writes(program: list[tuple[str, int, int]], kept: int) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        pool = [x, y, y + 1]
        for kind, at, which in program:
            value = pool[at % len(pool)]
            if kind == "view":
                pool.append(VIEWS[which](value))
            elif kind == "write":
                WRITERS[which](value)
            else:
                pool.append(value * 2 + 1)
        return pool[len(pool) - 1 - kept % len(pool) :]

    same(fn, x35(), x35().t().contiguous())
