"""The backend tvm. What needs Apache TVM (300 MB) runs where it is installed."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusee
from fusee.backends import lookup, tvm
from fusee.errors import MissingPackage, OptionError
from tests.check import check

HERE = importlib.util.find_spec("tvm") is not None
needs_tvm = pytest.mark.skipif(not HERE, reason="needs apache-tvm")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def compiled(fn: Callable[..., Any], *args: Any, **options: object) -> Any:
    return lookup("tvm", options)(fx.symbolic_trace(fn), list(args))


@pytest.mark.skipif(HERE, reason="apache-tvm is here")
def test_without_it_one_error_says_how_to_get_it() -> None:
    with pytest.raises(MissingPackage, match=r"needs tvm[\s\S]*pip install apache-tvm"):
        fusee.compile(torch.relu, backend="tvm")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": None}, "'scheduler'"),
        ({"scheduler": "auto_scheduler"}, "'meta_schedule'"),
        ({"scheduler": 3}, "one of None, 'default', 'meta_schedule', not 3"),
        ({"trials": 0}, "int >= 1"),
        ({"opt_level": "3"}, "from 0 to 4"),
        ({"disabled_ops": "relu"}, "a list of operators"),
    ],
)
def test_wrong_options(options: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        tvm.TvmOptions.parse(options)


def elementwise(x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    many = [F.relu(x), F.gelu(x), F.silu(x), F.hardswish(x), F.hardsigmoid(x), F.relu6(x)]
    many += [x.sigmoid(), x.tanh(), x.exp(), x.abs().sqrt(), (x.abs() + 1).rsqrt(), -x]
    many += [x.erf(), x.cos(), x.sin(), x + y, x + 1, x - y, x * y, x * 2, x / (y.abs() + 1)]
    many += [x / 3, x**2, x.softmax(-1), F.gelu(x, approximate="tanh"), n * 0.5 + x]
    many += [torch.where(x < y, x, y), torch.cat([x, y]), torch.stack([x, y], 1), n.float()]
    tests = [n == 2, x <= y, x < y, x < 0.5, x > 0.5, x >= 0.5, (x < y) & (n == 2)]
    tests += [torch.logical_and(x < y, n == 2), torch.logical_or(x < y, n == 2)]
    return *many, *tests


def shaped(x: Tensor, w: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    rows = [x.reshape(4, 6).t(), x[1:, ::2], x.unsqueeze(1).expand(3, 5, 8), x.flatten(), x[0]]
    rows += [x.mean(-1), x.sum((0, 1)), x @ w, torch.addmm(x[0], x, w), F.embedding(i, w)]
    rows += [torch.bmm(x[None], w[None]), F.linear(x, w, x[0]), F.layer_norm(x, (8,))]
    heads = x.reshape(1, 2, 3, 4)
    return *rows, F.scaled_dot_product_attention(heads, heads * 2, heads + 1)


def convolved(x: Tensor, w: Tensor, deep: Tensor) -> tuple[Tensor, ...]:
    y = F.conv2d(x, w, stride=2, padding=1)
    pooled = F.max_pool2d(y, 2), F.avg_pool2d(y, 2), F.adaptive_avg_pool2d(y, 1)
    return y, *pooled, F.conv2d(y, deep, groups=4), F.batch_norm(y, y[0, :, 0, 0], deep[:, 0, 0, 0])


@needs_tvm
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (elementwise, (torch.randn(3, 8), torch.randn(3, 8), torch.arange(24).view(3, 8))),
        (shaped, (torch.randn(3, 8), torch.randn(8, 8), torch.tensor([0, 7, 3]))),
        (convolved, (torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), torch.rand(4, 1, 2, 2))),
    ],
)
def test_operators(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    calls: list[Any] = []

    def noting(gm: fx.GraphModule, inputs: Any) -> Any:
        calls.append(lookup("tvm")(gm, inputs))
        return calls[-1]

    check(fn, *args, backend=noting, capture="fx")
    (report,) = [call.report() for call in calls]
    assert not report.unclaimed and [row.failed for row in report.regions] == [None], str(report)


@needs_tvm
def test_weights_threads_and_what_is_not_claimed() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    fast = fusee.compile(module, backend="tvm", options={"opt_level": 2})
    x = torch.randn(3, 8)
    for _ in range(2):
        torch.testing.assert_close(fast(x), module(x))
        module.get_parameter("0.weight").mul_(-2)
    wrong: list[float] = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(20):
                x = torch.randn(3, 8)
                wrong.append(float((fast(x) - module(x)).abs().max()))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 160 and max(wrong) < 1e-5
    call = compiled(
        lambda x: torch.tanh(torch.tan(x @ x)) @ x.double().float(),
        torch.rand(4, 4),
        disabled_ops=[torch.ops.aten.tanh],
    )
    reasons = {row.op: row.reason for row in call.report().unclaimed}
    assert "were not compared" in reasons["aten.tan.default"]
    assert "disabled_ops" in reasons["aten.tanh.default"]
