"""Whole models through stock torch.compile, in evaluation mode, against eager.

With open sizes a sample of them runs here; `pytest tests/models --all-sizes` runs all of them.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.check import check
from tests.models import zoo

# transformers and timm warn about their own optional packages; Dynamo about what it traces.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", zoo.names())
def test_model_agrees_with_eager(name: str) -> None:
    module, args, kwargs = zoo.load(name, "test")
    check(module, *args, kwargs=kwargs, graphs=1)


# TorchDynamo alone takes up to a minute for one of the others.
SAMPLE = ("resnet18", "mobilenet_v3_small", "mixer_s32", "bert", "llama", "t5")


# TorchDynamo alone takes 150 s for swin_t with symbolic sizes: see the test after this one.
@pytest.mark.parametrize("name", [name for name in zoo.names() if name != "swin_t"])
def test_model_with_dynamic_sizes(name: str, request: pytest.FixtureRequest) -> None:
    if name not in SAMPLE and not request.config.getoption("--all-sizes"):
        pytest.skip("a sample: --all-sizes runs this one, too")
    module, args, kwargs = zoo.load(name, "test")
    inputs = (*args, *kwargs.values())
    rows = _Rows(module, len(args), list(kwargs))
    # one row would be compiled for alone; as many rows as tokens, only for as many
    first, *others = (_larger(inputs, n) for n in (5, 3, 4))
    with torch.no_grad():
        check(rows, *first, dynamic=True, graphs=1, again=others)


def test_windows_with_dynamic_sizes(request: pytest.FixtureRequest) -> None:
    """One stage of a swin transformer: shifted windows, padded to whole ones, attention in each."""
    if not request.config.getoption("--all-sizes"):
        pytest.skip("TorchDynamo takes 40 s: --all-sizes runs it")
    swin = importlib.import_module("torchvision.models.swin_transformer").SwinTransformer
    torch.manual_seed(0)
    module = swin([4, 4], 32, [2], [2], [7, 7], num_classes=10).eval()
    images = [torch.randn(n, 3, 64, 64) for n in (2, 3)]
    with torch.no_grad():
        check(module, images[0], dynamic=True, graphs=1, again=[(images[1],)])


class _Rows(torch.nn.Module):
    """The model as a function of its tensors, so that `again` can give it other ones."""

    def __init__(self, module: torch.nn.Module, positional: int, names: list[str]) -> None:
        super().__init__()
        self.module = module
        self.positional = positional
        self.names = names

    def forward(self, *given: Any) -> Any:
        named = dict(zip(self.names, given[self.positional :], strict=True))
        return self.module(*given[: self.positional], **named)


def _larger(inputs: tuple[Any, ...], times: int) -> tuple[Any, ...]:
    """The same inputs with `times` as many rows."""
    return tuple(x.repeat(times, *[1] * (x.dim() - 1)) if x.dim() else x for x in inputs)
