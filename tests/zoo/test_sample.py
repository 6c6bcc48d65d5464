"""A sample of the zoo: that models are built and judged, and that a wrong result is seen."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.zoo import diffusers_models, timm_models, torchvision_models, transformers_models
from tests.zoo.judge import judge
from tests.zoo.table import markdown, reasons

pytestmark = [pytest.mark.filterwarnings("ignore")]

SAMPLE = {
    "qwen2": transformers_models,
    "AutoencoderTiny": diffusers_models,
}


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
    assert row["inference"]["right"] is False and row["stock inference"]["right"] is False
    assert row["inference"]["graphs"] == row["stock inference"]["graphs"] == 2
    assert "asking" in markdown(rows, "fusee") and "value" in reasons(rows)
