"""The examples of PyTorch's "Introduction to torch.compile".

source   https://docs.pytorch.org/tutorials/intermediate/torch_compile_tutorial.html
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, fx

from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy
from tests.capturing.same import Traced, same
from tests.models import zoo


def foo(x: Tensor, y: Tensor) -> Tensor:
    a = torch.sin(x)
    b = torch.cos(y)
    return a + b


class MyModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.relu(self.lin(x))


def f1(x: Tensor, y: Tensor) -> Tensor:
    if x.sum() < 0:
        return -y
    return y


def f2(x: Tensor, y: int) -> Tensor:
    return x + y


def f3(x: Any) -> Tensor:
    x = x * 2
    x = numpy.fft.fft(x.numpy()).real
    x = torch.from_numpy(x)
    x = x * 2
    return x


def bar(a: Tensor, b: Tensor) -> Tensor:
    x = a / (torch.abs(a) + 1)
    if b.sum() < 0:
        b = b * -1
    return x * b


def targets(graph: fx.GraphModule) -> list[Any]:
    """What a graph calls, in order."""
    return [node.target for node in graph.graph.nodes if node.op.startswith("call")]


def test_foo() -> None:
    traced = same(foo, torch.randn(10, 10), torch.randn(10, 10))
    assert [targets(g) for g in traced.graphs] == [[torch.sin, torch.cos, operator.add]]


def test_module() -> None:
    module = MyModule()

    def call(x: Tensor) -> Any:
        return module(x)

    traced = same(call, torch.randn(10, 100))
    assert [targets(g)[-1] for g in traced.graphs] == [torch.nn.functional.relu]


def test_branch_on_a_value() -> None:
    traced = Traced(f1)
    x, y = torch.ones(5, 5), torch.randn(5, 5)
    for sign in (1, -1, 1, -1):
        assert torch.equal(traced(sign * x, y), f1(sign * x, y))
    assert traced(x, y) is y
    assert traced.entries == 3


def test_number_as_argument() -> None:
    traced = same(f2, torch.randn(5, 5), 3)
    assert len(traced.graphs) == 1


def test_function_that_is_not_torchs() -> None:
    traced = same(f3, torch.randn(5, 5), breaks=True)
    # what scipy gets and gives are tensors of the graphs too
    assert [operator.mul in targets(g) for g in traced.graphs] == [True, True]


def test_backend_that_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def custom_backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        print("custom backend called with FX graph:")
        print(gm.graph)
        return gm.forward

    compiled = CompiledFunction(foo, custom_backend, Policy())  # type: ignore[arg-type]
    compiled(torch.randn(3), torch.randn(3))
    said = capsys.readouterr().out
    assert said.count("custom backend called") == 1
    assert "torch.sin" in said or "sin" in said


def test_bar_in_three_graphs() -> None:
    traced = Traced(bar)
    a, b = torch.randn(10), torch.ones(10)
    for sign in (1, -1, 1, -1):
        assert torch.equal(traced(a, sign * b), bar(a, sign * b))
    first, *rest = map(targets, traced.graphs)
    # the sum and its comparison are torch calls, and so part of the first graph
    assert first == [torch.abs, operator.add, operator.truediv, "sum", operator.lt]
    assert rest == [[operator.mul], [operator.mul, operator.mul]]
    (stop,) = traced.stops
    assert "value of a tensor" in stop
    assert "in bar" in stop


def test_densenet_in_one_graph() -> None:
    module, args, _ = zoo.load("densenet121", "test")

    def call(x: Tensor) -> Any:
        return module(x)

    traced = Traced(call)
    with torch.no_grad():
        assert torch.equal(traced(*args), module(*args))
    assert len(traced.graphs) == 1 and not traced.stops


def test_a_densenet_trained_by_one_compiled_function() -> None:
    """The form of the text, with two blocks in place of densenet121's four."""
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    module = models.DenseNet(8, (2, 2), 8, num_classes=10)
    modules = [module.train(), copy.deepcopy(module)]
    optimizers = [torch.optim.Adam(one.parameters()) for one in modules]
    data = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))

    def train(mod: Any, opt: Any, data: Any) -> Any:
        opt.zero_grad(True)
        pred = mod(data[0])
        loss = torch.nn.CrossEntropyLoss()(pred, data[1])
        loss.backward()
        opt.step()
        return loss

    traced = Traced(train)
    for k in range(3):
        ours, theirs = (
            traced(modules[0], optimizers[0], data),
            train(modules[1], optimizers[1], data),
        )
        torch.testing.assert_close(ours, theirs)
        # the first call meets no gradients; forward, and the update of all parameters
        assert len(traced.graphs) == (2, 3, 3)[k]
    assert all("backward() runs autograd" in stop for stop in traced.stops)
    for mine, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-3)
