"""A sample of the zoo: that models are built and judged, and that a wrong result is seen."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.compare import Mismatch, is_cancelled
from tests.zoo import diffusers_models, timm_models, torchvision_models, transformers_models
from tests.zoo.judge import _Call, _Eager, judge
from tests.zoo.table import markdown, reasons

pytestmark = [pytest.mark.filterwarnings("ignore")]

SAMPLE = {"qwen2": transformers_models, "AutoencoderTiny": diffusers_models}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_is_right(name: str) -> None:
    stages = ("inference", "training")
    build = functools.partial(SAMPLE[name].build, name)
    found = dict(judge(build, stages, again=False))
    assert [found[stage]["right"] for stage in stages] == [True, True], found


def test_families_have_their_models() -> None:
    assert len(transformers_models.names()) > 300
    assert {"llama", "bert", "whisper", "clip"} <= {*transformers_models.names()}
    assert len(timm_models.names()) > 60
    assert {"resnet18", "raft_small"} <= {*torchvision_models.names()}
    assert len(diffusers_models.names()) > 20


class _Asking(nn.Module):
    """Does something else where it is compiled, as libraries do that ask."""

    def forward(self, x: Any) -> Any:
        y = torch.sin(x)
        y = y * 2 if y.sum() > 0 else y
        return y + 1 if torch.compiler.is_compiling() else y.cos()


def test_a_wrong_result_and_a_break_are_seen() -> None:
    def build(seed: int) -> Any:
        return _Asking(), (torch.ones(3),), {}, "asks"

    rows = {("none", "asking"): dict(judge(build, ("inference", "stock inference")))}
    row = rows["none", "asking"]
    assert row["inference"]["asks"]
    assert row["inference"]["right"] is False and row["stock inference"]["right"] is False
    assert row["inference"]["graphs"] == row["stock inference"]["graphs"] == 2
    assert "asking" in markdown(rows, "fusee") and "value" in reasons(rows)


class _Deciding(nn.Module):
    """Puts numbers on the sides of a step that rounding decides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 256))

    def forward(self, x: Any) -> Any:
        sums = (x * self.weight).sum(1) + 1 - (self.weight * x).flip(1).sum(1) - 1
        return torch.where(sums > 0, 1.0, 0.0) + self.weight.sum() * 0 + x[:, 0]


def test_what_rounding_decides_in_eager_too_is_no_mistake() -> None:
    torch.manual_seed(0)
    eager = _Eager(_Call(_Deciding(), (torch.randn(64, 256),), {}, False))
    other = eager.call.moved(99).run()
    assert not torch.equal(other["out"], eager.want["out"])
    eager.compare(other)
    assert eager.near == 1
    with pytest.raises(Mismatch):
        eager.compare({**other, "out": 3 - other["out"]})


def test_a_sum_that_cancels_is_held_against_what_is_summed() -> None:
    exact = torch.tensor([1e-9, -1e-9, 0.0]).double()
    assert is_cancelled(exact.float() + 3e-8, exact, 1.0)  # rounding, of numbers about 1
    assert not is_cancelled(exact.float() + 3e-8, exact, 1e-3)
    exact = torch.tensor([2e-6, 1e-6]).double()
    assert is_cancelled(exact.float() * 1.0005, exact, 1.0)
    assert not is_cancelled(exact.float() * 1.01, exact, 1.0)  # small, but not noise
