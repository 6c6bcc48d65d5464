"""Concatenations are written piece by piece, and pointwise ops reach into the pieces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fusee
from fusee.loops import Loop
from fusee.loops.checker import show_step
from tests.loops.lower.against_eager import check


def test_cat_and_stack() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    check(
        lambda x, y: (torch.cat([x, y, x], 1), torch.stack([x, x * 2], 1), torch.cat([x, x])), x, y
    )
    check(lambda x, y: torch.cat([x, y.double()], -1), x, y)
    check(lambda x, y: torch.cat([torch.empty(0), x]), x, y)
    check(lambda x: torch.cat([x, x.flip(0)]).sum(0), x)


def test_pointwise_goes_into_the_pieces() -> None:
    def fn(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        return torch.relu(torch.cat([x, y], 1) * b[:, None] + 1)

    graph = check(fn, torch.randn(2, 3, 5), torch.randn(2, 4, 5), torch.randn(7))
    assert len(graph.steps) == 2
    assert len({step.buffer for step in graph.steps if isinstance(step, Loop)}) == 1


def test_rotary_embedding_has_unit_stride_loads() -> None:
    def fn(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = q.shape[-1] // 2
        return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin

    q = torch.randn(2, 5, 3, 8).transpose(1, 2)
    graph = check(fn, q, torch.randn(5, 8), torch.randn(5, 8))
    assert len(graph.steps) == 2
    texts = [show_step(s) for s in graph.steps if isinstance(s, Loop)]
    assert all("//" not in text and "%" not in text for text in texts)


def test_views_of_pieces() -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        c = torch.cat([x, y], 1)
        return [
            c.transpose(0, 1) * 2, c.unsqueeze(0) + 1, c[:, 1:3] + 1, c[:, 4:] + 1, c[:, 2:5] + 1,
            c[1] + 1, c.reshape(2, 2, 9) + 1, c.sum(1), c.exp().softmax(-1), c.expand(3, 4, 9) + 1,
            c.half().float() + 1, c + c, c * torch.cat([y, x], 1), c.view(4, 3, 3) + 1,
            c[:, ::2] * 2,
        ]  # fmt: skip

    check(fn, torch.randn(4, 3), torch.randn(4, 6))


def test_growing_concatenations() -> None:
    def fn(x: Tensor) -> Tensor:
        parts = [x]
        for k in range(4):
            parts.append(F.relu(torch.cat(parts, 1) * (k + 1)).sum(1, keepdim=True))
        return torch.cat(parts, 1)

    check(fn, torch.randn(2, 3, 4))


def test_cat_into_channels_last_keeps_the_layout() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(lambda x: torch.cat([x, x * 2], 1), x)
    check(lambda x: torch.cat([x.relu(), x * 2], 1).exp().mean((2, 3)), x)


def test_pooled_images_of_one_pixel_lie_as_in_eager() -> None:
    """Batch norm makes rows of what may lie either way; what is resized and joined follows it."""

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        normed = F.batch_norm(F.conv2d(x.mean((2, 3), True), weight), None, None, training=True)
        return torch.cat([x, F.interpolate(normed.relu_(), size=(4, 4), mode="bilinear")], 1)

    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    weight = torch.randn(8, 8, 1, 1).to(memory_format=torch.channels_last)
    want, got = fn(x, weight), fusee.compile(fn)(x, weight)
    assert got.stride() == want.stride()
