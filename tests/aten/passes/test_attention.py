"""Hand-written attention over many keys becomes one operator; nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fusee.aten import rewriter
from tests.aten.passes.graphs import Build, through_passes

aten = torch.ops.aten
SDPA = "aten.scaled_dot_product_attention.default"


def attend(
    build: Build, queries: int, keys: int, scale: float | None, mask: torch.Tensor | None
) -> tuple[fx.Node, fx.Node]:
    """The attention and its weights, as matmul of 4-d tensors is traced."""
    b, h, d = 2, 3, 8
    q = build.call(aten.view.default, build.input(torch.randn(b, h, queries, d)), [b * h, -1, d])
    k = build.input(torch.randn(b, h, keys, d))
    k = build.call(aten.transpose.int, build.call(aten.view.default, k, [b * h, -1, d]), 1, 2)
    v = build.call(aten.view.default, build.input(torch.randn(b, h, keys, d)), [b * h, -1, d])
    scores = build.call(
        aten.view.default, build.call(aten.bmm.default, q, k), [b, h, queries, keys]
    )
    if scale is not None:
        scores = build.call(aten.div.Tensor, scores, scale)
    if mask is not None:
        scores = build.call(aten.add.Tensor, scores, build.input(mask))
    weights = build.call(aten._softmax.default, scores, -1, False)
    flat = build.call(aten.view.default, weights, [b * h, queries, keys])
    return build.call(aten.bmm.default, flat, v), weights


@pytest.mark.parametrize("scale", [None, 2.0])
def test_attention_is_recognised(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriter, "LEAST_SCORES", 0)
    build = Build()
    passed = through_passes(build, attend(build, 30, 40, scale, None)[0])
    passed.check()
    assert SDPA in passed.targets and "aten.bmm.default" not in passed.targets


def test_few_keys_stay_as_they_are() -> None:
    build = Build()
    passed = through_passes(build, attend(build, 30, 40, 2.0, None)[0])
    assert SDPA not in passed.targets


def test_masked_rows_stay_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriter, "LEAST_SCORES", 0)
    build = Build()
    mask = torch.full((30, 40), -torch.inf)
    passed = through_passes(build, attend(build, 30, 40, 2.0, mask)[0])
    assert SDPA not in passed.targets and passed.after[0].isnan().all()


def test_weights_that_are_read_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriter, "LEAST_SCORES", 0)
    build = Build()
    passed = through_passes(build, *attend(build, 30, 40, 2.0, None))
    passed.check()
    assert SDPA not in passed.targets
