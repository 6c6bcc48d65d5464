"""Layers of torch.nn whose Python decides by device, or hands itself to torch's modes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusee
from fusee.errors import FuseeWarning
from tests.autodiff.steps import same

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    "decoder layer": lambda: OfOneInput(nn.TransformerDecoderLayer(8, 2, 16, 0.0)),
    "attention": lambda: OfOneInput(nn.MultiheadAttention(8, 2, batch_first=True), 3),
    "lstm": lambda: nn.LSTM(8, 4, batch_first=True),
    "gru": lambda: nn.GRU(8, 4, 2, bidirectional=True),
    "group norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.GroupNorm(1, 2), nn.Mish()),
    "bilinear": lambda: OfOneInput(nn.Bilinear(8, 8, 3)),
    "circular": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.CircularPad2d((1, 8, 3, 0)), nn.CircularPad2d((-1, 2, 0, 1))
    ),
    "prelu, fold": lambda: nn.Sequential(nn.PReLU(), nn.Unflatten(2, (2, 4)), nn.Flatten(1)),
}


class OfOneInput(nn.Module):
    """Gives a layer its input several times."""

    def __init__(self, layer: nn.Module, times: int = 2) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(*[x] * self.times)
        return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", LAYERS)
def test_layer_trains(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(3, 6, 8)
    outcomes = []
    for run in (layer, fusee.compile(layer)):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error", FuseeWarning)
            out = run(given)
        first = out[0] if isinstance(out, tuple) else out
        (first * torch.linspace(-1, 1, first.numel()).view_as(first)).sum().backward()
        outcomes.append([first, given.grad, *(p.grad for p in layer.parameters())])
    for k, (theirs, ours) in enumerate(zip(*outcomes, strict=True)):
        same(f"{name}, item {k}", ours, theirs)


@pytest.mark.parametrize("size", [(2, 8, 6, 6), (2, 8, 3, 4, 4)])
def test_group_norm_keeps_channels_last_and_what_is_random_after_it(size: tuple[int, ...]) -> None:
    layout = torch.channels_last if len(size) == 4 else torch.channels_last_3d
    x = torch.randn(size).to(memory_format=layout)

    def f(x: Tensor) -> Tensor:
        return F.dropout(F.group_norm(x * 2, 2, torch.ones(8), eps=1e-3))

    results = []
    for call in (f, fusee.compile(f)):
        torch.manual_seed(0)
        results.append(call(x.requires_grad_()))
    torch.testing.assert_close(*results)
    assert results[0].stride() == results[1].stride() == x.stride()
