"""On a GPU: the zoo's models, against float64; calls that repeat are replayed at new addresses.

python -m pytest tests/targets/cuda/test_zoo.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusee
from bench.training import gradients, loss_of
from tests.check import copy_tree
from tests.compare import assert_same
from tests.models import zoo
from tests.models.test_sizes import FIXED, exact
from tests.targets.cuda.test_device import moved

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _whole_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in TF32 are too far from float64 for it to arbitrate."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def inputs(name: str, seed: int, **larger: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    args, kwargs = zoo.MODELS[name].inputs(**{**zoo.MODELS[name].test, **larger})
    return moved(args), dict(zip(kwargs, moved(kwargs.values())))


@pytest.mark.parametrize("name", zoo.names())
def test_inference(name: str) -> None:
    module = zoo.load(name, "test")[0].cuda()
    compiled = fusee.compile(module)

    def run(function: Any, seed: int) -> Any:
        args, kwargs = inputs(name, seed)
        with torch.no_grad():
            return function(*args, **kwargs)

    results = []
    for seed in range(5):
        got = run(compiled, seed)
        assert_same(got, run(module, seed), partial(exact, run, module, seed))
        results.append((got, copy_tree(got)))
    for got, kept in results:  # later calls leave the results of earlier ones
        for x, y in zip(pytree.tree_leaves(got), pytree.tree_leaves(kept), strict=True):
            assert not isinstance(x, Tensor) or torch.equal(x, y)
    assert not any(report.eager for report in fusee.report(compiled))


@pytest.mark.parametrize("name", zoo.names())
def test_training(name: str) -> None:
    if name == "mamba" and torch.__version__ < "2.12":
        pytest.skip("its associative_scan has no gradients in eager mode")
    module = zoo.load(name, "test")[0].cuda().train()
    state = {key: x.clone() for key, x in module.state_dict().items()}
    compiled = fusee.compile(module)
    larger = {"batch": 8}  # of two pixels batch norm makes two signs: any rounding may turn them
    has_batch_norm = any(isinstance(x, nn.modules.batchnorm._BatchNorm) for x in module.modules())
    if "pixels" in zoo.MODELS[name].test and name not in FIXED and has_batch_norm:
        larger["pixels"] = 96

    def run(function: Any, seed: int) -> Any:
        args, kwargs = inputs(name, seed, **larger)
        torch.manual_seed(3)  # dropout's
        module.load_state_dict(state)
        module.zero_grad(set_to_none=True)
        loss = loss_of(function(*args, **kwargs))
        loss.backward()
        return loss.detach(), gradients(module)

    for seed in range(4):
        got, want = map(partial(run, seed=seed), (compiled, module))
        torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-4)
        off = (got[1] - want[1]).norm() / want[1].norm()
        assert off < 2e-2, off
    assert not any(report.eager for report in fusee.report(compiled))
