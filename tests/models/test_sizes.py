"""All models over sizes that vary: one version for the first call and one for all others.

A sample of the models runs here; `pytest tests/models --all-sizes` runs all of them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import fusee
from bench.training import gradients, loss_of
from fusee.capture.captured import Entry
from tests.compare import assert_same
from tests.models import zoo

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CALLS = 12
SAMPLE = ("resnet18", "bert", "t5", "unet2d_condition")
# Their modules are made for one image size, or one length: mamba's loops over it are unrolled.
FIXED = {"vit": "pixels", "vit_b_16": "pixels", "mixer_s32": "pixels", "mamba": "tokens"}
# What image sizes are multiples of, and the smallest of these; batch norm needs several elements.
STEPS = {"unet2d_condition": (4, 2), "autoencoder_kl": (8, 2), "swin_t": (16, 4)}


def sizes(name: str) -> Iterator[dict[str, Any]]:
    """Settings of a model's row with random sizes; the second call differs from the first in all.

    Otherwise a size that happened to stay is found to vary later, by a third version.
    """
    chosen = random.Random(name)
    row = zoo.MODELS[name]
    varied = [key for key in ("batch", "tokens", "pixels") if key in row.test]
    varied = [key for key in varied if FIXED.get(name) != key]
    step, least = STEPS.get(name, (32, 2))
    ways: dict[str, Callable[[], int]] = {
        "batch": lambda: chosen.randint(2, 20),
        "tokens": lambda: 2 * chosen.randint(2, 12),
        "pixels": lambda: step * chosen.randint(least, least + 3),
    }
    first: dict[str, Any] = {}
    for _ in range(CALLS):
        found: dict[str, Any] = {key: ways[key]() for key in varied}
        while first and all(first.values()) and any(first[key] == found[key] for key in varied):
            found = {key: ways[key]() for key in varied}
        first = dict.fromkeys(varied) if first else found
        yield {**row.test, **found}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", zoo.names())
def test_two_versions_serve_all_sizes(
    name: str, training: bool, entries: list[Entry], request: pytest.FixtureRequest
) -> None:
    if name not in SAMPLE and not request.config.getoption("--all-sizes"):
        pytest.skip("a sample: --all-sizes runs this one, too")
    module, _, _ = zoo.load(name, "test")
    module.train(training)
    state = {key: x.clone() for key, x in module.state_dict().items()}
    compiled = fusee.compile(module)

    def run(function: Any, settings: dict[str, Any]) -> Any:
        torch.manual_seed(2)
        args, kwargs = zoo.MODELS[name].inputs(**settings)
        torch.manual_seed(3)  # dropout's
        if not training:
            with torch.no_grad():
                return function(*args, **kwargs)
        module.load_state_dict(state)
        module.zero_grad(set_to_none=True)
        loss = loss_of(function(*args, **kwargs))
        loss.backward()
        return loss.detach(), gradients(module)

    for k, settings in enumerate(sizes(name)):
        got = run(compiled, settings)
        if k in (1, 2, CALLS - 1):  # a new version, and one that others made
            want = run(module, settings)
            if training:
                torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-4)
                off = (got[1] - want[1]).norm() / want[1].norm()
                assert off < 2e-2, off
            else:
                assert_same(got, want, partial(exact, run, module, settings))
    assert len(entries) <= 2
    assert all(entry.captured.stop is None for entry in entries)


def exact(run: Any, module: torch.nn.Module, settings: Any) -> Any:
    """The same in float64."""
    wide = copy.deepcopy(module).double()

    def widened(*args: Any, **kwargs: Any) -> Any:
        return wide(*map(widen, args), **{name: widen(x) for name, x in kwargs.items()})

    return run(widened, settings)


def widen(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
