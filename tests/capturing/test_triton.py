"""Kernels that users write in Triton: they are launched on real tensors, between graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusee

launched: list[type] = []


class JITFunction:
    """Stands for Triton's, whose launcher is Python: it reads addresses, and compiles."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, x: Tensor, out: Tensor, *, grid: Any, warmup: bool, scale: int) -> None:
        assert x.data_ptr() and not warmup and grid == (4,)
        launched.append(type(x))
        out.copy_(x * scale)


@pytest.fixture(autouse=True)
def _as_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JITFunction.run, "__module__", "triton.runtime.jit")
    launched.clear()


def test_a_kernel_is_launched_between_graphs() -> None:
    kernel = JITFunction()

    def fn(x: Tensor) -> Tensor:
        x = x.sin() + 1
        out = torch.empty_like(x)
        kernel[(4,)](x, out, scale=3)
        return out.relu() * x

    compiled = fusee.compile(fn)
    for _ in range(3):
        x = torch.randn(8)
        want = (x.sin() + 1) * 3
        torch.testing.assert_close(compiled(x), want.relu() * (x.sin() + 1))
    assert launched == [Tensor] * 3
    found = fusee.explain(fn)(torch.randn(8))
    assert "JITFunction.run launches a Triton kernel" in str(found)
