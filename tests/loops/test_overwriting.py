"""Kernels that change the caller's tensors while they read them: each element sees its own time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusee.backends.native import compile_native

Program = Callable[[Tensor, Tensor, Tensor], Any]


def moments(p: Tensor, m: Tensor, g: Tensor) -> Any:
    m.mul_(0.9).add_(g, alpha=0.1)
    p.sub_(m / (m.abs().sqrt() + 1))


def old_and_new(p: Tensor, m: Tensor, g: Tensor) -> Any:
    before = p + g
    p.mul_(2)
    after = p + before
    m.copy_(p)
    return before, after


def swapped(p: Tensor, m: Tensor, g: Tensor) -> Any:
    kept = p.clone()
    p.copy_(m)
    m.copy_(kept)
    return p + m * g


def chained(p: Tensor, m: Tensor, g: Tensor) -> Any:
    p.add_(g)
    m.add_(p)
    g.add_(m)
    p.mul_(g)


def moved(p: Tensor, m: Tensor, g: Tensor) -> Any:
    m.add_(g)
    p.add_(m.flip(0))
    g.copy_(p.t().contiguous().view(p.shape))


def summed(p: Tensor, m: Tensor, g: Tensor) -> Any:
    total = (p * g).mean()
    p.sub_(g)
    m.add_(p.sum(1, keepdim=True)).mul_(total)
    return (p - m).mean(), total


def masked(p: Tensor, m: Tensor, g: Tensor) -> Any:
    p.add_(g)
    m.narrow(0, 1, 2).copy_(p.narrow(0, 2, 2) * 2)
    return torch.nn.functional.pad(p, (1, 1)), torch.where(g > 0, p, m)


def normalised(p: Tensor, m: Tensor, g: Tensor) -> Any:
    p.add_(g)
    rows = torch.softmax(p, 1)
    m.lerp_(rows, 0.3)
    p.copy_(rows * m)


PROGRAMS = [moments, old_and_new, swapped, chained, moved, summed, masked, normalised]


@pytest.mark.parametrize("shape", [(6, 7), (300, 300), (5, 1)])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("threads", [1, 2])
def test_programs(program: Program, shape: tuple[int, int], threads: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape) for _ in range(3)]
    ours, theirs = [[x.clone() for x in given] for _ in range(2)]
    graph = torch.fx.symbolic_trace(program)
    compiled = compile_native(graph, ours, {"threads": threads})
    assert compiled.report().eager is None
    for _ in range(2):
        results, wanted = compiled(*ours), program(*theirs)
        torch.testing.assert_close(results, wanted)
        torch.testing.assert_close(ours, theirs)


def test_an_update_of_several_tensors_is_one_kernel() -> None:
    given = [torch.randn(64, 65) for _ in range(3)]
    compiled = compile_native(torch.fx.symbolic_trace(moments), given, {})
    assert len(compiled.report().kernels) == 1
