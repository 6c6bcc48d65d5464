"""A fixed sample of the sweep over gradients: what training is made of, and some of the rest."""

from __future__ import annotations

import warnings
import zlib

import pytest

from fusee.backends import lookup

with warnings.catch_warnings():
    # torch's test modules import deprecated corners of torch and numpy.
    warnings.simplefilter("ignore")
    from tests.opinfo.gradients import run_gradients, wanted_gradients

TRAINING = (
    "addmm bmm cat gather index_put index_select masked_fill matmul mean nn.functional.avg_pool2d"
    " nn.functional.batch_norm nn.functional.conv2d nn.functional.cross_entropy"
    " nn.functional.dropout nn.functional.embedding nn.functional.gelu nn.functional.glu"
    " nn.functional.group_norm nn.functional.layer_norm nn.functional.linear"
    " nn.functional.max_pool2d nn.functional.mse_loss nn.functional.nll_loss nn.functional.silu"
    " nn.functional.scaled_dot_product_attention scatter_add softmax where"
).split()
CHECKED = (
    "addmm cumsum index_select linalg.vector_norm logsumexp nn.functional.avg_pool2d"
    " nn.functional.batch_norm nn.functional.gelu nn.functional.layer_norm softmax tanh"
).split()
# One in so many of the other ops, chosen by name.
SHARE = 24


def sample() -> list[str]:
    names = [name for name, dtype in wanted_gradients([], ["float32"])]
    others = [name for name in names if zlib.crc32(name.encode()) % SHARE == 0]
    return list(dict.fromkeys([name for name in TRAINING if name in names] + others))


@pytest.mark.filterwarnings("ignore")  # eager itself warns in many samples
@pytest.mark.parametrize("name", sample())
def test_gradients(name: str) -> None:
    outcome = run_gradients(name, "float32", lookup("fusee"), "other")
    assert not outcome.failures, "\n".join(outcome.failures)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHECKED)
def test_differences(name: str) -> None:
    outcome = run_gradients(name, "float64", lookup("fusee"), "first", check=True)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.passed == 1


def test_a_wrong_gradient_is_found() -> None:
    """The sweep's own test: a backend whose backward is off by a factor fails."""

    def wrong(gm, inputs):  # type: ignore[no-untyped-def]
        def call(*given):  # type: ignore[no-untyped-def]
            twice = [x * 2 - x.detach() if x.is_floating_point() else x for x in given]
            return gm(*twice)

        return call

    assert run_gradients("sin", "float32", wrong, "first").failures
    assert run_gradients("sin", "float64", wrong, "first", check=True).failures
